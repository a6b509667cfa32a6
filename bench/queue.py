"""The cost of claiming and acknowledging in a queue, compared with queues that write a row per event."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

import psycopg

import headwater
from bench import _measure as measure
from bench._measure import Act, ClientProcesses, Options, Samples, Server, Variant
from headwater.calls import queues as queue_calls
from headwater.errors import LeaseLost
from headwater.queue.model import Lease

if TYPE_CHECKING:
    import procrastinate

# What its page relies on: a number in the last line of every run, also with --quick.
PROMISED = ("consume_b100_vs_pgmq", "wal_b100_vs_pgmq", "cpu_b100_vs_pgmq", "consume_b1_vs_pgmq")

TOPIC = "bench"
LATENCY_TOPIC = "bench-latency"
PAYLOAD_BYTES = 200
LEASE_SECONDS = 3600.0
REAP_SECONDS = 1.0
POLL_SECONDS = 0.002
START_SECONDS = 1.0
WARM_UPS = 12

logging.getLogger("procrastinate").setLevel(logging.ERROR)

# Both are PL/pgSQL functions with cached plans. Payloads are bytes everywhere, so that no side encodes JSON.
# `vt`: a visibility timeout; reading moves it forward, acknowledging deletes.
# `status`: a row goes from ready to processing to done, and stays.
OTHERS = """
create schema other;
create table other.vt (
    msg_id      bigint      generated always as identity primary key,
    read_ct     integer     not null default 0,
    enqueued_at timestamptz not null default now(),
    vt          timestamptz not null,
    message     bytea
);
create index vt_vt on other.vt (vt);

create function other.vt_send(body bytea) returns bigint language plpgsql as $$
declare
    sent bigint;
begin
    insert into other.vt (vt, message) values (clock_timestamp(), body) returning msg_id into sent;
    return sent;
end;
$$;

create function other.vt_read(seconds float8, quantity integer) returns setof other.vt language plpgsql as $$
begin
    return query
    with chosen as (
        select q.msg_id from other.vt q
        where q.vt <= clock_timestamp()
        order by q.msg_id
        limit quantity
        for update skip locked
    )
    update other.vt q
    set vt = clock_timestamp() + make_interval(secs => seconds), read_ct = q.read_ct + 1
    from chosen
    where q.msg_id = chosen.msg_id
    returning q.*;
end;
$$;

create function other.vt_delete(ids bigint[]) returns setof bigint language plpgsql as $$
begin
    return query delete from other.vt q where q.msg_id = any (ids) returning q.msg_id;
end;
$$;

create table other.status (
    id         bigint      generated always as identity primary key,
    status     text        not null default 'ready' check (status in ('ready', 'processing', 'done')),
    attempts   integer     not null default 0,
    created_at timestamptz not null default now(),
    started_at timestamptz,
    body       bytea
);
create index status_ready on other.status (id) where status = 'ready';

create function other.status_send(body bytea) returns bigint language plpgsql as $$
declare
    sent bigint;
begin
    insert into other.status (body) values (status_send.body) returning id into sent;
    return sent;
end;
$$;

create function other.status_read(quantity integer) returns setof other.status language plpgsql as $$
begin
    return query
    with chosen as (
        select q.id from other.status q
        where q.status = 'ready'
        order by q.id
        limit quantity
        for update skip locked
    )
    update other.status q
    set status = 'processing', started_at = clock_timestamp(), attempts = q.attempts + 1
    from chosen
    where q.id = chosen.id
    returning q.*;
end;
$$;

create function other.status_done(ids bigint[]) returns setof bigint language plpgsql as $$
begin
    return query update other.status q set status = 'done' where q.id = any (ids) returning q.id;
end;
$$;
"""


@dataclass(frozen=True)
class Other:
    """The SQL of another queue: send, read, acknowledge and fill."""

    send: str
    read: str
    end: str
    fill: str
    body: int
    """The index of the payload column in the result of a read; the first column is the id."""


VT = Other(
    send="select other.vt_send(%b)",
    read=f"select * from other.vt_read({LEASE_SECONDS}, %s)",
    end="select other.vt_delete(%s)",
    fill="insert into other.vt (vt, message) select clock_timestamp(), %s from generate_series(1, %s)",
    body=4,
)
STATUS = Other(
    send="select other.status_send(%b)",
    read="select * from other.status_read(%s)",
    end="select other.status_done(%s)",
    fill="insert into other.status (body) select %s from generate_series(1, %s)",
    body=5,
)
OTHER_QUEUES = {"vt": VT, "status": STATUS}


# --- the work ------------------------------------------------------------------------------------------------


def work_ours(dsn: str, queue: str, size: int, durable: bool = False) -> Act:
    """Settle the current batch and claim the next, as a worker with an empty handler does."""
    log = _log(dsn)
    worker = str(os.getpid())
    lease: Lease | None = None
    reap_at = last = 0.0

    def act() -> int:
        nonlocal lease, reap_at, last
        now = time.monotonic()
        if now - last > 0.1:
            # A turn starts. The time between turns is not counted.
            reap_at += now - last
        last = now
        if now > reap_at:
            log.reap(queue)
            reap_at = now + REAP_SECONDS
        try:
            if lease is None:
                first = queue_calls.claim(
                    queue, worker=worker, batch_size=size, lease_seconds=LEASE_SECONDS, relaxed=not durable
                )
                lease = log._run(first)
            else:
                more = queue_calls.settle_and_claim(
                    lease, {}, worker=worker, batch_size=size, lease_seconds=LEASE_SECONDS, relaxed=not durable
                )
                lease = log._run(more)
        except LeaseLost:
            # Rewound between two turns.
            lease = None
        return 0 if lease is None else len(lease.events)

    return _warm(act)


def work_other(dsn: str, queue: str, size: int, durable: bool = True) -> Act:
    """Acknowledge the current batch and read the next: two statements, each in its own transaction."""
    other = OTHER_QUEUES[queue]
    cursor = _plain(dsn, durable).cursor(binary=True)
    held: list[int] = []

    def act() -> int:
        nonlocal held
        if held:
            cursor.execute(other.end, (held,), prepare=True)
        held = [row[0] for row in cursor.execute(other.read, (size,), prepare=True).fetchall()]
        return len(held)

    return _warm(act)


def work_procrastinate(dsn: str, seconds: float) -> Act:
    """Run its worker for some seconds, one job at a time: it has no call to process one batch."""
    loop, app, handled = _opened_app(dsn)

    def act() -> int:
        before = len(handled)
        loop.run_until_complete(_run_worker(app, seconds))
        return len(handled) - before

    return act


async def _run_worker(app: procrastinate.App, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(app.run_worker_async(install_signal_handlers=False), seconds)


def _app(dsn: str) -> tuple[procrastinate.App, list[float]]:
    """An application with one task, and the latencies in ms that it records."""
    import procrastinate

    handled: list[float] = []
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=1, max_size=4))

    @app.task(name="handle")
    async def handle(sent: int, body: str) -> None:
        handled.append((time.monotonic_ns() - sent) / 1e6)

    return app, handled


# One connection of each kind per process, for all variants.
@cache
def _log(dsn: str) -> headwater.Headwater:
    return headwater.connect(dsn, pool_size=1)


@cache
def _opened_app(dsn: str) -> tuple[asyncio.AbstractEventLoop, procrastinate.App, list[float]]:
    loop = asyncio.new_event_loop()
    app, handled = _app(dsn)
    loop.run_until_complete(app.open_async())
    Finalize(None, lambda: loop.run_until_complete(app.close_async()), exitpriority=1)
    return loop, app, handled


@cache
def _plain(dsn: str, durable: bool) -> psycopg.Connection:
    connection = psycopg.connect(dsn, autocommit=True)
    if not durable:
        connection.execute("set synchronous_commit = off")
    return connection


def _warm(act: Act) -> Act:
    """Enough executions for psycopg to prepare the statement and for Postgres to choose a generic plan."""
    for _ in range(WARM_UPS):
        act()
    return act


# --- data ----------------------------------------------------------------------------------------------------


def payload() -> bytes:
    return bytes(range(PAYLOAD_BYTES))


def refill_other(server: Server, queue: str, count: int) -> Callable[[], None]:
    """Vacuum and analyze the table, which is the best case for this queue."""

    def refill() -> None:
        server.execute(f"truncate other.{queue}")
        server.execute(OTHER_QUEUES[queue].fill, (payload(), count))
        server.execute(f"vacuum (analyze) other.{queue}")

    return refill


def refill_ours(server: Server, queue: str, count: int) -> Callable[[], None]:
    """Rewind the queue if too few events are left; otherwise keep its state."""

    def refill() -> None:
        log = _log(server.dsn)
        left = server.execute(
            "select headwater.head() - headwater_internal.claimed_position(g) from headwater_internal.queue g where "
            "name = %s",
            (queue,),
        )
        if left[0][0] < count:
            log.rewind_queue(queue, position=0)

    return refill


def refill_procrastinate(server: Server, count: int) -> Callable[[], None]:
    def refill() -> None:
        server.execute("truncate procrastinate_jobs cascade")
        server.execute(
            "insert into procrastinate_jobs (queue_name, task_name, args) "
            "select 'default', 'handle', jsonb_build_object('sent', 0, 'body', repeat('x', %s)) "
            "from generate_series(1, %s)",
            (PAYLOAD_BYTES, count),
        )
        server.execute("vacuum (analyze) procrastinate_jobs")

    return refill


def prepare(server: Server, count: int, warm_up: int) -> None:
    """Fill the log, and the other queues with events for the warm-up."""
    measure.say("filling the log")
    server.execute(OTHERS)
    log = _log(server.dsn)
    log.create_topic(TOPIC)
    log.create_topic(LATENCY_TOPIC)
    server.execute(
        "insert into headwater_internal.event (topic_id, content_type, payload) "
        "select t.id, 'application/octet-stream', %s from headwater_internal.topic t, generate_series(1, %s) where "
        "t.name = %s",
        (payload(), count, TOPIC),
    )
    for queue in OTHER_QUEUES:
        refill_other(server, queue, warm_up)()
    app, _ = _app(server.dsn)

    async def install() -> None:
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    asyncio.run(install())
    server.execute("vacuum (analyze)")


# --- the run -------------------------------------------------------------------------------------------------

OURS, OURS_DURABLE, PGMQ, PGMQ_RELAXED, STATUSES, STATUSES_RELAXED, PROCRASTINATE = (
    "headwater",
    "headwater, durable",
    "pgmq-style",
    "pgmq-style, async commit",
    "status column",
    "status column, async commit",
    "procrastinate",
)
# More than any variant processes in a second on a few cores.
MOST_PER_SECOND = {1: 30_000, 10: 80_000, 100: 150_000, 1000: 150_000}


@dataclass(frozen=True)
class Cell:
    """A batch size, a number of workers, and the variants to compare."""

    size: int
    workers: int
    variants: tuple[Variant, ...]

    def name(self, which: str) -> str:
        return f"b{self.size} w{self.workers} {which}"

    def has(self, which: str) -> bool:
        return any(variant.name == self.name(which) for variant in self.variants)


def cell(server: Server, size: int, workers: int, *, seconds: float, options: Options) -> Cell:
    made = Cell(size, workers, ())
    fill = int(MOST_PER_SECOND[size] * seconds) + 2 * size * workers
    variants: list[Variant] = []
    for which, durable in ((OURS, False), (OURS_DURABLE, True)):
        queue = made.name(which)
        _log(server.dsn).create_queue(queue, topics=TOPIC)
        its_options: dict[str, Any] = {"queue": queue, "size": size, "durable": durable}
        enough = int(240_000 * seconds)
        variants.append(Variant(queue, work_ours, its_options, workers, refill_ours(server, queue, enough)))
    others = [(PGMQ, "vt", True), (PGMQ_RELAXED, "vt", False), (STATUSES, "status", True)]
    if options.size == "full":
        others.append((STATUSES_RELAXED, "status", False))
    for which, queue, durable in others:
        its_options = {"queue": queue, "size": size, "durable": durable}
        refill = refill_other(server, queue, fill)
        variants.append(Variant(made.name(which), work_other, its_options, workers, refill))
    if size == 1:
        procrastinate_seconds = options.sized(1.5, 0.4, 0.4)
        refill = refill_procrastinate(server, int(3000 * procrastinate_seconds))
        its_options = {"seconds": procrastinate_seconds}
        variants.append(Variant(made.name(PROCRASTINATE), work_procrastinate, its_options, workers, refill))
    return Cell(size, workers, tuple(variants))


def show(cells: Sequence[Cell], samples: Samples) -> None:
    rows: list[Sequence[str] | None] = []
    for one in cells:
        rows.append(None)
        many = "worker" if one.workers == 1 else "workers"
        rows.append((f"[bold]batch {one.size}, {one.workers} {many}[/bold]", *[""] * 5))
        for variant in one.variants:
            got = measure.figures(samples[variant.name])
            ours = variant.name == one.name(OURS)
            rows.append(
                (
                    "  " + variant.name.split(" ", 2)[2],
                    measure.number(got.rate),
                    "" if ours else measure.number(measure.ratio(samples, one.name(OURS), variant.name), 2),
                    measure.number(got.server_cpu_us, 1),
                    measure.number(got.client_cpu_us, 1),
                    measure.number(got.wal_bytes, 1),
                )
            )
    columns = ("", "events/s", "headwater is", "server CPU us", "client CPU us", "WAL bytes")
    measure.table(
        "claim and acknowledge, per event; headwater and async commit do not wait for the disk", columns, rows
    )


# --- latency -------------------------------------------------------------------------------------------------


def wait_ours(dsn: str, queue: str, until: float) -> list[float]:
    log = _log(dsn)
    worker = str(os.getpid())
    latencies: list[float] = []
    lease: Lease | None = None
    while time.monotonic() < until:
        if lease is None:
            lease = log.claim(queue, worker=worker, batch_size=10)
        else:
            lease = log.settle_and_claim(lease, worker=worker, batch_size=10)
        if lease is None:
            time.sleep(POLL_SECONDS)
        else:
            now = time.monotonic_ns()
            latencies += [(now - int.from_bytes(event.payload or b"", "big")) / 1e6 for event in lease.events]
    return latencies


def wait_other(dsn: str, queue: str, until: float) -> list[float]:
    other = OTHER_QUEUES[queue]
    cursor = _plain(dsn, True).cursor(binary=True)
    latencies: list[float] = []
    while time.monotonic() < until:
        rows = cursor.execute(other.read, (10,), prepare=True).fetchall()
        if not rows:
            time.sleep(POLL_SECONDS)
            continue
        now = time.monotonic_ns()
        latencies += [(now - int.from_bytes(row[other.body], "big")) / 1e6 for row in rows]
        cursor.execute(other.end, ([row[0] for row in rows],), prepare=True)
    return latencies


def wait_procrastinate(dsn: str, until: float) -> list[float]:
    loop, app, handled = _opened_app(dsn)
    handled.clear()
    loop.run_until_complete(_run_worker(app, until - time.monotonic()))
    return handled


def measure_latency(
    server: Server, clients: ClientProcesses, which: str, *, seconds: float, per_second: int
) -> list[float]:
    """Latency from the call of publish, including the commit, to the handler of one of four waiting workers."""
    import procrastinate

    log = _log(server.dsn)
    plain = _plain(server.dsn, True).cursor(binary=True)
    app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=server.dsn))
    until = time.monotonic() + seconds + START_SECONDS + 1.0

    def send_other(other: Other) -> Callable[[], Any]:
        return lambda: plain.execute(other.send, (time.monotonic_ns().to_bytes(8, "big"),), prepare=True)

    send: Callable[[], Any]
    options: dict[str, Any] = {"until": until}
    wait: Callable[..., list[float]] = wait_other
    match which:
        case "headwater":
            log.create_queue("latency", topics=LATENCY_TOPIC, from_end=True, if_missing=True)
            wait, options["queue"] = wait_ours, "latency"

            def send() -> Any:
                return log.publish(LATENCY_TOPIC, time.monotonic_ns().to_bytes(8, "big"))
        case "pgmq-style":
            options["queue"], send = "vt", send_other(VT)
        case "status column":
            options["queue"], send = "status", send_other(STATUS)
        case _:
            wait = wait_procrastinate
            app.open()
            task = app.configure_task("handle", allow_unknown=True)

            def send() -> Any:
                return task.defer(sent=time.monotonic_ns(), body="x" * 8)

    for table in ("other.vt", "other.status", "procrastinate_jobs cascade"):
        server.execute(f"truncate {table}")
    answers = [clients.begin(wait, client=client, **options) for client in range(4)]
    time.sleep(START_SECONDS)
    began = time.monotonic()
    for number in range(int(seconds * per_second)):
        time.sleep(max(0.0, began + number / per_second - time.monotonic()))
        send()
    latencies = [latency for answer in answers for latency in answer()]
    app.close()
    sent = int(seconds * per_second)
    if len(latencies) < sent:
        measure.say(f"{which}: {sent - len(latencies)} of {sent} did not arrive in time and are not counted")
    return latencies or [math.nan]


def main() -> None:
    options = measure.arguments(__doc__ or "")
    rounds, seconds, latency_seconds = options.sized((5, 0.5, 10.0), (3, 0.15, 0.5), (1, 0.02, 0.1))
    chosen = options.sized(
        [(size, workers) for size in (1, 10, 100, 1000) for workers in (1, 4, 8)],
        [(1, 4), (10, 4), (100, 4), (1000, 4)],
        [(1, 4), (100, 4)],
    )
    with measure.measured_server(options.dsn) as server:
        # Small enough for the shared buffers, like recently published events.
        prepare(server, int(400_000 * seconds), WARM_UPS * max(size * workers for size, workers in chosen))
        cells = [cell(server, size, workers, seconds=seconds, options=options) for size, workers in chosen]
        samples: Samples = {}
        with measure.ClientProcesses(server.dsn, max(workers for _, workers in chosen)) as clients:
            for one in cells:
                measure.say(f"batch {one.size}, {one.workers} workers")
                samples |= measure.interleaved(server, clients, one.variants, rounds=rounds, seconds=seconds)
            latencies: dict[str, list[float]] = {}
            for which in (OURS, PGMQ, STATUSES, PROCRASTINATE):
                measure.say(f"latency of {which}")
                latencies[which] = measure_latency(server, clients, which, seconds=latency_seconds, per_second=200)
        show(cells, samples)
        measure.table(
            "from publish to handler, 200 events/s, 4 workers, ms",
            ("", "p50", "p99"),
            [
                (which, *(measure.number(measure.percentile(found, percent), 2) for percent in (50, 99)))
                for which, found in latencies.items()
            ],
        )
        measure.finish(
            server,
            options,
            "queue",
            {
                **result(cells, samples),
                **_latency(latencies),
            },
        )


def result(cells: Sequence[Cell], samples: Samples) -> dict[str, Any]:
    """Ratios to each other queue with four workers, for batch sizes 100 and 1."""
    found: dict[str, Any] = {}
    for one in cells:
        if one.workers != 4 or one.size not in (1, 100):
            continue
        ours = measure.figures(samples[one.name(OURS)])
        key = f"b{one.size}"
        for which, name in (
            (PGMQ, "pgmq"),
            (PGMQ_RELAXED, "pgmq_async"),
            (STATUSES, "status"),
            (STATUSES_RELAXED, "status_async"),
            (PROCRASTINATE, "procrastinate"),
        ):
            if not one.has(which):
                continue
            theirs = measure.figures(samples[one.name(which)])
            found[f"consume_{key}_vs_{name}"] = round(measure.ratio(samples, one.name(OURS), one.name(which)), 2)
            found[f"wal_{key}_vs_{name}"] = round(ours.wal_bytes / theirs.wal_bytes, 4)
            if ours.server_cpu_us is not None and theirs.server_cpu_us is not None:
                found[f"cpu_{key}_vs_{name}"] = round(ours.server_cpu_us / theirs.server_cpu_us, 3)
        durable = measure.ratio(samples, one.name(OURS_DURABLE), one.name(PGMQ))
        found[f"consume_{key}_durable_vs_pgmq"] = round(durable, 2)
        found[f"consume_{key}_per_second"] = round(ours.rate)
    return {"workers": 4, **found}


def _latency(latencies: dict[str, list[float]]) -> dict[str, float]:
    return {
        f"latency_{which.split()[0].replace('-style', '')}_p{percent}_ms": round(measure.percentile(found, percent), 2)
        for which, found in latencies.items()
        for percent in (50, 99)
    }


if __name__ == "__main__":
    main()
