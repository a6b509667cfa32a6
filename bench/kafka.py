"""The Kafka door, against the floor: COPY of the same rows into a bare table, and SELECT of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from confluent_kafka import Consumer, Producer, TopicPartition

import headwater
from bench import _measure as measure
from bench._measure import Server

FLOOR = """
create schema floor;
create table floor.record (
    position bigint generated always as identity primary key, key bytea, payload bytea, produced_ms bigint
);
"""
BATCH_SIZE = 1000


@contextmanager
def brokers(dsn: str, processes: int) -> Iterator[tuple[str, int]]:
    """Broker processes, as a user starts them: their addresses and the process above them."""
    program = "from headwater.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", "--kafka", "127.0.0.1:0", "--dsn", dsn, "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    process = subprocess.Popen(
        [*command, "--processes", str(processes)], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        yield ",".join(json.loads(process.stdout.readline())["kafka"]), process.pid
    finally:
        process.terminate()
        process.wait(30)


def produce(bootstrap: str, topic: str, count: int, value: bytes) -> float:
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
    started = time.monotonic()
    for number in range(count):
        while True:
            try:
                producer.produce(topic, value, key=b"%d" % (number % 1000))
                break
            except BufferError:
                producer.poll(0.01)
    left = producer.flush(300)
    assert left == 0, f"{left} records were not acknowledged"
    return time.monotonic() - started


def consume(bootstrap: str, topic: str, partitions: int, count: int) -> float:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench", "fetch.message.max.bytes": 1_000_000})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    started = time.monotonic()
    got = 0
    while got < count:
        messages = consumer.consume(min(count - got, 10_000), timeout=30)
        assert messages, f"only {got} of {count} records came"
        got += len(messages)
    spent = time.monotonic() - started
    consumer.close()
    return spent


def copy(server: Server, count: int, value: bytes) -> float:
    """The floor of producing: the same rows by COPY, as many to a transaction as a batch holds."""
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        started = time.monotonic()
        for first in range(0, count, BATCH_SIZE):
            with connection.cursor().copy(
                "copy floor.record (key, payload, produced_ms) from stdin (format binary)"
            ) as rows:
                rows.set_types(("bytea", "bytea", "int8"))
                for number in range(first, min(first + BATCH_SIZE, count)):
                    rows.write_row((b"%d" % (number % 1000), value, 1))
        return time.monotonic() - started


def select(server: Server, count: int) -> float:
    """The floor of fetching: the same rows, a page at a time."""
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        started = time.monotonic()
        cursor = connection.cursor(binary=True)
        after = got = 0
        while got < count:
            page = cursor.execute(
                "select position, key, payload, produced_ms from floor.record where position > %s order by position "
                "limit 5000",
                (after,),
            ).fetchall()
            got += len(page)
            after = page[-1][0]
        return time.monotonic() - started


def latency(bootstrap: str, topic: str, *, rate: int, seconds: float) -> list[float]:
    """Milliseconds from produce to the consumer's hand, at so many records a second."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench-latency", "fetch.wait.max.ms": 100})
    consumer.assign([TopicPartition(topic, 0, 0)])
    consumer.poll(1)
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0})
    spent: list[float] = []
    sent = 0
    started = time.monotonic()
    while time.monotonic() - started < seconds or len(spent) < sent:
        assert time.monotonic() - started < seconds + 30, "records did not come"
        while time.monotonic() - started < seconds and sent < (time.monotonic() - started) * rate:
            producer.produce(topic, b"%r" % time.monotonic(), partition=0)
            sent += 1
        producer.poll(0)
        came = consumer.consume(100, timeout=0.001)
        now = time.monotonic()
        spent += [(now - float(message.value())) * 1000 for message in came]
    consumer.close()
    return spent


def main() -> None:
    options = measure.arguments(__doc__ or "")
    started = time.monotonic()
    counts = {100: 20_000, 1000: 5_000} if options.quick else {100: 300_000, 1000: 100_000}
    result: dict[str, Any] = {"bench": "kafka"}
    rows = []
    with measure.measured_server(options.dsn) as server, brokers(server.dsn, 2) as (bootstrap, parent):
        for size, count in counts.items():
            value = os.urandom(size)
            server.execute("drop schema if exists floor cascade")
            server.execute(FLOOR)
            floor_in, floor_out = copy(server, count, value), select(server, count)
            rows.append((f"{size} B, COPY and SELECT", count, floor_in, floor_out, None, None))
            for partitions in (1, 6):
                topic = f"bench-{size}-{partitions}"
                with headwater.connect(server.dsn) as log:
                    log.create_topic(topic, kind="sequenced", partitions=partitions)
                cpu = server.cpu_seconds(), measure._family_cpu_seconds(parent)
                spent_in = produce(bootstrap, topic, count, value)
                spent_out = consume(bootstrap, topic, partitions, count)
                after = server.cpu_seconds(), measure._family_cpu_seconds(parent)
                postgres = None if cpu[0] is None or after[0] is None else (after[0] - cpu[0]) / count * 1e6
                rows.append(
                    (f"{size} B, {partitions} partitions", count, spent_in, spent_out, postgres,
                     (after[1] - cpu[1]) / count * 1e6)
                )  # fmt: skip
                result[f"produce_vs_copy_{size}_{partitions}"] = round(floor_in / spent_in, 3)
                result[f"fetch_vs_select_{size}_{partitions}"] = round(floor_out / spent_out, 3)
        with headwater.connect(server.dsn) as log:
            log.create_topic("bench-latency", kind="sequenced")
        spent = latency(bootstrap, "bench-latency", rate=1000, seconds=2.0 if options.quick else 20.0)
        measure.table(
            "records a second; CPU of Postgres and of the brokers, both ways together",
            ("", "in", "out", "Postgres us", "brokers us"),
            [
                (name, measure.number(count / i), measure.number(count / o), measure.number(p, 1), measure.number(b, 1))
                for name, count, i, o, p, b in rows
            ],
        )
        result |= {
            "produce_vs_copy": result["produce_vs_copy_100_6"],
            "fetch_vs_select": result["fetch_vs_select_100_6"],
            "p50_ms": round(measure.percentile(spent, 50), 2),
            "p99_ms": round(measure.percentile(spent, 99), 2),
            "quick": options.quick,
            "seconds": round(time.monotonic() - started, 1),
        }
        measure.finish(server, result)


if __name__ == "__main__":
    main()
