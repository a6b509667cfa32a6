"""The Kafka server, compared with COPY of the same rows into a plain table and SELECT from it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
from confluent_kafka import Consumer, Producer, TopicPartition

import headwater
from bench import _measure as measure
from bench._measure import Server
from bench._serving import serving

# What its page relies on: a number in the last line of every run, also with --quick.
PROMISED = ("produce_vs_copy", "fetch_vs_select")

FLOOR = """
create schema floor;
create table floor.record (
    position bigint generated always as identity primary key, key bytea, payload bytea, produced_ms bigint
);
"""
BATCH_SIZE = 1000
PROCESSES = 2
START_SECONDS = 30.0


class Brokers(NamedTuple):
    """Broker processes: their addresses and their parent process."""

    bootstrap: str
    parent: int


class Cost(NamedTuple):
    """The cost per record in microseconds: time, and CPU time of clients and servers."""

    elapsed: float
    postgres: float | None
    brokers: float
    client: float


@contextmanager
def brokers(dsn: str, processes: int) -> Iterator[Brokers]:
    with serving(dsn, "--kafka", "127.0.0.1:0", "--processes", str(processes)) as (ready, pid):
        started = Brokers(",".join(ready["kafka"]), pid)
        wait_until_ready(started, processes)
        yield started


def wait_until_ready(started: Brokers, processes: int) -> None:
    """Wait until all brokers know each other, share the partitions, and are warm."""
    deadline = time.monotonic() + START_SECONDS
    producer = Producer({"bootstrap.servers": started.bootstrap})
    while True:
        topics = producer.list_topics(WARM_UP, timeout=10).topics
        if len({one.leader for one in topics[WARM_UP].partitions.values()}) == processes:
            break
        assert time.monotonic() < deadline, "the brokers do not share the partitions"
        time.sleep(0.1)
    produce(producer, WARM_UP, WARM_UP_COUNT, b"x")
    consumer = consumer_of(started.bootstrap, WARM_UP)
    consume(consumer, WARM_UP, 6, WARM_UP_COUNT)
    consumer.close()


WARM_UP = "bench-warm-up"
WARM_UP_COUNT = 12_000


def prepare(server: Server) -> None:
    """Create topics for warm-up reads from new brokers, and the baseline table."""
    with headwater.connect(server.dsn) as log:
        log.create_topic(WARM_UP, kind="sequenced", partitions=6)
        for partition in range(6):
            events = [headwater.NewEvent(b"x" * 100, partition=partition)] * (WARM_UP_COUNT // 6)
            log.publish_batch(WARM_UP, events)
    server.execute(FLOOR)


def producer_of(bootstrap: str, topic: str) -> Producer:
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "acks": "all",
            "linger.ms": 5,
            "batch.num.messages": BATCH_SIZE,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    producer.list_topics(topic, timeout=10)
    return producer


def produce(producer: Producer, topic: str, count: int, value: bytes) -> None:
    for number in range(count):
        while True:
            try:
                producer.produce(topic, value, key=b"%d" % (number % 1000))
                break
            except BufferError:
                producer.poll(0.01)
    left = producer.flush(300)
    assert left == 0, f"{left} records were not acknowledged"


def consumer_of(bootstrap: str, topic: str) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "bench",
            "fetch.message.max.bytes": 1_000_000,
            # With 100,000 buffered records the client pauses, by default for a second: longer than reading them takes.
            "fetch.queue.backoff.ms": 5,
        }
    )
    consumer.list_topics(topic, timeout=10)
    return consumer


def consume(consumer: Consumer, topic: str, partitions: int, count: int) -> None:
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    got = 0
    while got < count:
        messages = consumer.consume(min(count - got, 10_000), timeout=30)
        assert messages, f"only {got} of {count} records came"
        got += len(messages)


def copy(connection: psycopg.Connection, count: int, value: bytes) -> None:
    """The baseline of producing: COPY of the same rows, one transaction per batch."""
    for first in range(0, count, BATCH_SIZE):
        with connection.cursor().copy(
            "copy floor.record (key, payload, produced_ms) from stdin (format binary)"
        ) as rows:
            rows.set_types(("bytea", "bytea", "int8"))
            for number in range(first, min(first + BATCH_SIZE, count)):
                rows.write_row((b"%d" % (number % 1000), value, 1))


def select(connection: psycopg.Connection, count: int) -> None:
    """The baseline of fetching: SELECT of the same columns in pages, prepared and in binary format."""
    cursor = connection.cursor(binary=True)
    after = got = 0
    while got < count:
        page = cursor.execute(
            "select position, key, payload, produced_ms from floor.record where position > %s order by position "
            "limit 5000",
            (after,),
            prepare=True,
        ).fetchall()
        got += len(page)
        after = page[-1][0]


@contextmanager
def measured(server: Server, parent: int | None, count: int, costs: list[Cost]) -> Iterator[None]:
    """Measure the cost of the block per record."""

    def used() -> tuple[float | None, float]:
        return server.cpu_seconds(), 0.0 if parent is None else measure._family_cpu_seconds(parent)

    before, client, started = used(), time.process_time(), time.monotonic()
    yield
    elapsed, client, after = time.monotonic() - started, time.process_time() - client, used()
    postgres = None if before[0] is None or after[0] is None else (after[0] - before[0]) * 1e6 / count
    costs.append(Cost(elapsed * 1e6 / count, postgres, (after[1] - before[1]) * 1e6 / count, client * 1e6 / count))


def latency(bootstrap: str, topic: str, partitions: int, *, rate: int, seconds: float) -> list[float]:
    """Milliseconds from produce to consume at a constant rate."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench-latency", "fetch.wait.max.ms": 100})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    consumer.poll(1)
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0})
    producer.list_topics(topic, timeout=10)
    spent: list[float] = []
    sent = 0
    started = time.monotonic()
    while time.monotonic() - started < seconds or len(spent) < sent:
        assert time.monotonic() - started < seconds + 30, "records did not arrive"
        while time.monotonic() - started < seconds and sent < (time.monotonic() - started) * rate:
            producer.produce(topic, b"%r" % time.monotonic(), partition=sent % partitions)
            sent += 1
        producer.poll(0)
        came = consumer.consume(100, timeout=0.001)
        now = time.monotonic()
        spent += [(now - float(message.value())) * 1000 for message in came]
    consumer.close()
    # Until all connections are established, records wait for them.
    return spent[rate // 2 :]


def rounds_of(server: Server, size: int, partitions: int, count: int, rounds: int) -> dict[str, list[Cost]]:
    """The cost of each method in each round. The baseline and the server alternate."""
    value = os.urandom(size)
    costs: dict[str, list[Cost]] = {"copy": [], "select": [], "produce": [], "cold": [], "warm": []}
    for number in range(rounds):
        measure.say(f"{size} B, {partitions} partitions, round {number + 1} of {rounds}")
        topic = f"bench-{size}-{partitions}-{number}"
        with headwater.connect(server.dsn) as log:
            log.create_topic(topic, kind="sequenced", partitions=partitions)
        server.execute("truncate floor.record restart identity")
        with psycopg.connect(server.dsn, autocommit=True) as connection:
            with measured(server, None, count, costs["copy"]):
                copy(connection, count, value)
            with brokers(server.dsn, PROCESSES) as up:
                producer = producer_of(up.bootstrap, topic)
                with measured(server, up.parent, count, costs["produce"]):
                    produce(producer, topic, count, value)
            with measured(server, None, count, costs["select"]):
                select(connection, count)
        # First new brokers with an empty cache, then the same brokers again.
        with brokers(server.dsn, PROCESSES) as up:
            for name in ("cold", "warm"):
                consumer = consumer_of(up.bootstrap, topic)
                with measured(server, up.parent, count, costs[name]):
                    consume(consumer, topic, partitions, count)
                consumer.close()
    return costs


def part_of(floor: list[Cost], ours: list[Cost]) -> float:
    return round(statistics.median(a.elapsed / b.elapsed for a, b in zip(floor, ours, strict=True)), 3)


def middle(costs: list[Cost]) -> Cost:
    return sorted(costs, key=lambda cost: cost.elapsed)[len(costs) // 2]


NAMES = {
    "copy": "COPY",
    "produce": "produce",
    "select": "SELECT",
    "cold": "fetch, nothing in memory",
    "warm": "fetch again",
}


def main() -> None:
    options = measure.arguments(__doc__ or "")
    small, large = options.sized((500_000, 50_000), (40_000, 8_000), (500, 100))
    counts = {100: small, 1000: large}
    rounds = options.sized(3, 1, 1)
    latency_seconds = options.sized(20.0, 3.0, 0.2)
    result: dict[str, Any] = {}
    rows: list[list[str] | None] = []
    with measure.measured_server(options.dsn) as server:
        prepare(server)
        for size, count in counts.items():
            for partitions in (1, 6):
                costs = rounds_of(server, size, partitions, count, rounds)
                rows += [None] if rows else []
                for name, shown in NAMES.items():
                    cost = middle(costs[name])
                    megabytes = size / cost.elapsed
                    rows.append(
                        [f"{size} B, {partitions} partitions: {shown}", measure.number(1e6 / cost.elapsed),
                         measure.number(megabytes, 1), measure.number(cost.postgres, 2),
                         measure.number(cost.brokers, 2), measure.number(cost.client, 2)]
                    )  # fmt: skip
                key = f"{size}_{partitions}"
                result[f"produce_vs_copy_{key}"] = part_of(costs["copy"], costs["produce"])
                result[f"fetch_vs_select_{key}"] = part_of(costs["select"], costs["cold"])
                result[f"fetch_again_vs_select_{key}"] = part_of(costs["select"], costs["warm"])
                for name in ("produce", "cold", "warm"):
                    cost = middle(costs[name])
                    result[f"cpu_us_{name}_{key}"] = {
                        who: None if spent is None else round(spent, 2)
                        for who, spent in zip(Cost._fields[1:], cost[1:], strict=True)
                    }
        latencies = []
        with brokers(server.dsn, PROCESSES) as up:
            for partitions in (1, 6):
                topic = f"bench-latency-{partitions}"
                with headwater.connect(server.dsn) as log:
                    log.create_topic(topic, kind="sequenced", partitions=partitions)
                measure.say(f"latency, {partitions} partitions")
                spent = latency(up.bootstrap, topic, partitions, rate=1000, seconds=latency_seconds)
                figures = [round(measure.percentile(spent, percent), 2) for percent in (50, 99)]
                latencies.append([f"{partitions} partitions", *(measure.number(figure, 2) for figure in figures)])
                result |= dict(zip((f"p50_ms_{partitions}", f"p99_ms_{partitions}"), figures, strict=True))
        measure.table(
            f"{PROCESSES} brokers; CPU for each record, in microseconds",
            ("", "records/s", "MB/s", "Postgres", "brokers", "client"),
            rows,
        )
        measure.table("1,000 records a second, from produce to consume, in ms", ("", "p50", "p99"), latencies)
        result |= {
            "produce_vs_copy": result["produce_vs_copy_100_6"],
            "fetch_vs_select": result["fetch_vs_select_100_6"],
            "fetch_again_vs_select": result["fetch_again_vs_select_100_6"],
            "p50_ms": result["p50_ms_1"],
            "p99_ms": result["p99_ms_1"],
        }
        measure.finish(server, options, "kafka", result)


if __name__ == "__main__":
    main()
