"""One log read by many queues: the rows written grow with batches, not with events times queues."""

from __future__ import annotations

import time
from dataclasses import dataclass

import headwater
from bench import _measure as measure
from bench._measure import Server
from headwater.queue.model import Lease

# What its page relies on: a number in the last line of every run, also with --quick.
PROMISED = ("rows_per_batch_1_queues", "rows_per_batch_20_queues")

TOPIC = "bench"
BATCH_SIZE = 1000
REAP_EVERY_BATCHES = 200
QUEUES = (1, 5, 20)


@dataclass(frozen=True)
class Written:
    """The rows that a number of queues wrote to process the whole log, and the seconds that one process took."""

    queues: int
    events: int
    batches: int
    rows: int
    wal_bytes: int
    table_bytes: int
    seconds: float

    @property
    def wal_bytes_per_delivery(self) -> float:
        return self.wal_bytes / self.events / self.queues


def fill(server: Server, log: headwater.Headwater, count: int) -> None:
    measure.say(f"filling the log with {count:,} events")
    log.create_topic(TOPIC)
    for _ in range(10):
        server.execute(
            "insert into headwater_internal.event (topic_id, content_type, payload) "
            "select t.id, 'application/octet-stream', %s from headwater_internal.topic t, generate_series(1, %s) "
            "where t.name = %s",
            (bytes(200), count // 10, TOPIC),
        )
    server.execute("vacuum (analyze)")


def work_through(log: headwater.Headwater, queue: str) -> tuple[int, int]:
    """Process every event as a worker does, with maintenance; returns the numbers of events and batches."""
    events = batches = 0
    lease: Lease | None = log.claim(queue, worker="bench", batch_size=BATCH_SIZE)
    while lease is not None:
        events += len(lease.events)
        batches += 1
        if batches % REAP_EVERY_BATCHES == 0:
            log.reap(queue)
        lease = log.settle_and_claim(lease, worker="bench", batch_size=BATCH_SIZE)
    return events, batches


def rows_written(server: Server, log: headwater.Headwater) -> int:
    """Rows inserted, updated and deleted so far in all tables of the log."""
    with log.connection() as connection:
        connection.execute("select pg_stat_force_next_flush()")
    found = server.execute(
        "select sum(n_tup_ins + n_tup_upd + n_tup_del) from pg_stat_user_tables where schemaname = 'headwater_internal'"
    )
    return int(found[0][0])


def table_bytes(server: Server) -> int:
    """The size of all tables of the log with their indexes."""
    found = server.execute(
        "select sum(pg_total_relation_size(c.oid)) from pg_class c "
        "where c.relnamespace in ('headwater'::regnamespace, 'headwater_internal'::regnamespace) and c.relkind = 'r'"
    )
    return int(found[0][0])


def fan_out(server: Server, log: headwater.Headwater, queues: int) -> Written:
    names = [f"{queues}-{number}" for number in range(queues)]
    for name in names:
        log.create_queue(name, topics=TOPIC)
    wal, rows, size = server.wal_bytes(), rows_written(server, log), table_bytes(server)
    began = time.monotonic()
    counted = [work_through(log, name) for name in names]
    seconds = time.monotonic() - began
    return Written(
        queues=queues,
        events=counted[0][0],
        batches=sum(batches for _, batches in counted),
        rows=rows_written(server, log) - rows,
        wal_bytes=server.wal_bytes() - wal,
        table_bytes=table_bytes(server) - size,
        seconds=seconds,
    )


def main() -> None:
    options = measure.arguments(__doc__ or "")
    count = options.sized(1_000_000, 100_000, 5_000)
    with measure.measured_server(options.dsn) as server, headwater.connect(server.dsn, pool_size=1) as log:
        fill(server, log, count)
        found: list[Written] = []
        for queues in QUEUES:
            measure.say(f"{queues} queues")
            found.append(fan_out(server, log, queues))
            assert found[-1].events == count
        measure.table(
            f"processing the log in batches of {BATCH_SIZE}",
            (
                "events",
                "queues",
                "batches",
                "rows written",
                "rows/batch",
                "WAL bytes",
                "/event/queue",
                "table growth",
                "s",
            ),
            [
                (
                    measure.number(one.events),
                    measure.number(one.queues),
                    measure.number(one.batches),
                    measure.number(one.rows),
                    measure.number(one.rows / one.batches, 2),
                    measure.number(one.wal_bytes),
                    measure.number(one.wal_bytes_per_delivery, 3),
                    measure.number(one.table_bytes),
                    measure.number(one.seconds, 1),
                )
                for one in found
            ],
        )
        per_queue: dict[str, float] = {}
        for one in found:
            per_queue[f"rows_{one.queues}_queues"] = one.rows
            per_queue[f"rows_per_batch_{one.queues}_queues"] = round(one.rows / one.batches, 3)
            per_queue[f"wal_bytes_per_event_and_queue_{one.queues}_queues"] = round(one.wal_bytes_per_delivery, 3)
            per_queue[f"deliveries_per_second_{one.queues}_queues"] = round(one.events * one.queues / one.seconds)
        measure.finish(
            server,
            options,
            "fanout",
            {
                "events": count,
                **per_queue,
            },
        )


if __name__ == "__main__":
    main()
