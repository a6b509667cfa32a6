"""Publishing and following, compared with the same columns in a plain table on the same server."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

import psycopg

import headwater
from bench import _measure as measure
from bench._measure import Act, ClientProcesses, Figures, Samples, Server, Variant
from headwater.calls import encoding, publishing
from headwater.log.model import NewEvent, Topic

# What its page relies on: a number in the last line of every run, also with --quick.
PROMISED = ("single16_vs_bare", "batch1000_vs_bare", "copy_vs_bare", "follow_vs_select")

TOPIC = "bench"
FOLLOWED = "bench-follow"
IDLE = "bench-idle"
COPIED = 20_000
BATCH_SIZE = 1000

# The baseline has the columns and defaults of `headwater_internal.event` and nothing else: no partitions, checks,
# triggers or topic lookup. `bare` has a primary key, which reading in order requires; `keyless` has no index.
FLOOR = """
create schema floor;
create sequence floor.bare_position;
create table floor.bare (
    position     bigint      primary key default nextval('floor.bare_position'),
    topic_id     integer     not null,
    partition    integer     not null default 0,
    topic_offset bigint,
    key          bytea,
    type         text,
    routing_key  text,
    headers      jsonb,
    content_type text,
    payload      bytea,
    event_id     text,
    published_at timestamptz not null default clock_timestamp()
);
create sequence floor.keyless_position;
create table floor.keyless (like floor.bare including defaults);
alter table floor.keyless alter column position set default nextval('floor.keyless_position');
create table floor.followed (like floor.bare including defaults including indexes);
"""
COLUMNS = "topic_id, key, type, routing_key, headers, content_type, payload"


def events(count: int) -> list[NewEvent]:
    """Events of about 200 bytes. Bytes, so that neither side encodes JSON."""
    dice = random.Random(1)
    return [
        NewEvent(
            dice.randbytes(200),
            key=f"customer-{dice.randrange(10_000)}",
            type="order.placed",
            content_type="application/x-protobuf",
        )
        for _ in range(count)
    ]


# --- headwater -----------------------------------------------------------------------------------------------


def publish_one(dsn: str) -> Act:
    log = _log(dsn)
    one = events(1)[0]

    def act() -> int:
        log.publish(TOPIC, one.payload, key=one.key, type=one.type, content_type=one.content_type)
        return 1

    return _warm(act)


def publish_batch(dsn: str, size: int) -> Act:
    log = _log(dsn)
    batch = events(size)

    def act() -> int:
        return len(log.publish_batch(TOPIC, batch))

    return _warm(act)


def publish_many(dsn: str) -> Act:
    log = _log(dsn)
    many = events(COPIED)
    return lambda: log.publish_many(TOPIC, many)


def follow(dsn: str) -> Act:
    log = _log(dsn)

    def act() -> int:
        return sum(
            len(batch) for batch in log.follow_batches(FOLLOWED, batch_size=BATCH_SIZE, stop_when_caught_up=True)
        )

    return act


# --- baseline ------------------------------------------------------------------------------------------------


def insert_one(dsn: str, table: str) -> Act:
    cursor = _floor(dsn).cursor(binary=True)
    one = events(1)[0]
    statement = f"insert into floor.{table} ({COLUMNS}) values (%s, %b, %s, %s, %s, %s, %b)"

    def act() -> int:
        # Encoded each time, as an application with text must.
        key = one.key.encode() if isinstance(one.key, str) else one.key
        cursor.execute(statement, (1, key, one.type, None, None, one.content_type, one.payload), prepare=True)
        return 1

    return _warm(act)


def insert_batch(dsn: str, table: str, size: int, packed_ahead: bool = False) -> Act:
    """One statement with arrays, encoded as Headwater does."""
    cursor = _floor(dsn).cursor(binary=True)
    batch = events(size)
    # Separate unnest calls are faster than unnest(a, b, ...).
    statement = (
        f"insert into floor.{table} ({COLUMNS}) "
        "select 1, r.key, r.type, r.routing_key, r.headers::jsonb, r.content_type, r.payload from ("
        "select unnest(%b::bytea[]) as payload, unnest(%b::bytea[]) as key, unnest(%b::text[]) as type, "
        "unnest(%b::text[]) as routing_key, unnest(%b::text[]) as headers, unnest(%b::text[]) as content_type) as r"
    )
    ahead = publishing.publish_batch(TOPIC, batch).params[1:7]

    def act() -> int:
        params = ahead if packed_ahead else publishing.publish_batch(TOPIC, batch).params[1:7]
        cursor.execute(statement, params, prepare=True)
        return size

    return _warm(act)


def insert_lists(dsn: str, table: str, size: int) -> Act:
    """The same with Python lists, as in psycopg's manual."""
    cursor = _floor(dsn).cursor(binary=True)
    batch = events(size)
    statement = (
        f"insert into floor.{table} (topic_id, key, type, content_type, payload) "
        "select 1, unnest(%b::bytea[]), unnest(%b::text[]), unnest(%b::text[]), unnest(%b::bytea[])"
    )

    def act() -> int:
        keys = [str(event.key).encode() for event in batch]
        types = [event.type for event in batch]
        params = (keys, types, [event.content_type for event in batch], [event.payload for event in batch])
        cursor.execute(statement, params, prepare=True)
        return size

    return _warm(act)


def insert_executemany(dsn: str, table: str, size: int) -> Act:
    """One statement per event, sent in one pipeline and transaction."""
    connection = _floor(dsn)
    cursor = connection.cursor(binary=True)
    batch = events(size)
    statement = f"insert into floor.{table} ({COLUMNS}) values (%s, %b, %s, %s, %s, %s, %b)"

    def act() -> int:
        rows = [(1, str(e.key).encode(), e.type, None, None, e.content_type, e.payload) for e in batch]
        with connection.transaction():
            cursor.executemany(statement, rows)
        return size

    return _warm(act)


def copy_many(dsn: str, table: str, packed_ahead: bool = False) -> Act:
    """COPY, encoded and sent in the same pieces as Headwater."""
    connection = _floor(dsn)
    many = events(COPIED)
    topic = _any_topic()
    pieces = [many[at : at + BATCH_SIZE] for at in range(0, len(many), BATCH_SIZE)]
    ahead = [encoding.copy_rows(topic, piece) for piece in pieces]

    def act() -> int:
        with connection.cursor() as cursor, cursor.copy(_copy_into(table, "(format binary)")) as copy:
            copy.write(encoding.COPY_START)
            for piece, packed in zip(pieces, ahead, strict=True):
                copy.write(packed if packed_ahead else encoding.copy_rows(topic, piece))
            copy.write(encoding.COPY_END)
        return len(many)

    return act


def copy_write_row(dsn: str, table: str) -> Act:
    """COPY as in psycopg's manual: one tuple at a time."""
    connection = _floor(dsn)
    many = events(COPIED)

    def act() -> int:
        with connection.cursor() as cursor, cursor.copy(_copy_into(table, "(format binary)")) as copy:
            copy.set_types(["int4", "bytea", "text", "text", "jsonb", "text", "bytea"])
            for e in many:
                copy.write_row((1, str(e.key).encode(), e.type, None, None, e.content_type, e.payload))
        return len(many)

    return act


def select(dsn: str) -> Act:
    """Read pages of the plain table in order, as tuples."""
    cursor = _floor(dsn).cursor(binary=True)
    statement = (
        "select position, topic_id, partition, topic_offset, key, type, routing_key, headers, content_type, payload, "
        "event_id, published_at from floor.followed where position > %s order by position limit %s"
    )

    def act() -> int:
        after = count = 0
        while rows := cursor.execute(statement, (after, BATCH_SIZE), prepare=True).fetchall():
            count += len(rows)
            after = rows[-1][0]
        return count

    return act


# One connection of each kind per process, for all variants.
@cache
def _log(dsn: str) -> headwater.Headwater:
    return headwater.connect(dsn, pool_size=1)


@cache
def _floor(dsn: str) -> psycopg.Connection:
    return psycopg.connect(dsn, autocommit=True)


def _copy_into(table: str, form: str) -> Any:
    return f"copy floor.{table} ({COLUMNS}) from stdin {form}"


def _any_topic() -> Topic:
    return Topic(id=1, name=TOPIC, created_at=datetime.now(UTC), expired_to=0)


def _warm(act: Act) -> Act:
    """Enough executions for psycopg to prepare the statement and for Postgres to choose a generic plan."""
    for _ in range(12):
        act()
    return act


# --- an idle follower ----------------------------------------------------------------------------------------


def follow_idle(dsn: str) -> tuple[list[float], float]:
    """Follow the idle topic up to its empty event; returns latencies in ms, and CPU seconds between the two markers."""
    latencies: list[float] = []
    marks: list[float] = []
    log = _log(dsn)
    for event in log.follow(IDLE, after=0):
        if event.type == "start":
            log.publish(IDLE, None, type="ready")
        elif event.payload:
            latencies.append((time.monotonic_ns() - int.from_bytes(event.payload, "big")) / 1e6)
        elif event.type == "mark":
            marks.append(time.process_time())
        elif event.type == "end":
            break
    return latencies, marks[1] - marks[0]


@dataclass(frozen=True)
class Idle:
    """The latency and cost of an idle follower."""

    p50_ms: float
    p99_ms: float
    client_cpu_ms_per_second: float
    server_cpu_ms_per_second: float | None


def measure_idle(server: Server, clients: ClientProcesses, *, count: int, idle_seconds: float) -> Idle:
    """Latency from the call of publish, including the commit, to an idle follower in another process."""
    log = _log(server.dsn)
    answer = clients.begin(follow_idle)
    log.publish(IDLE, None, type="start")
    while not any(event.type == "ready" for event in log.read(IDLE)):
        time.sleep(0.05)
    for _ in range(count):
        time.sleep(random.uniform(0.02, 0.18))
        log.publish(IDLE, time.monotonic_ns().to_bytes(8, "big"))
    # Wait until the follower's polling interval is at its maximum; then measure the idle cost.
    time.sleep(0.5)
    log.publish(IDLE, None, type="mark")
    before, started = server.cpu_seconds(), time.monotonic()
    time.sleep(idle_seconds)
    after, seconds = server.cpu_seconds(), time.monotonic() - started
    log.publish(IDLE, None, type="mark")
    log.publish(IDLE, None, type="end")
    latencies, client_cpu = answer()
    assert len(latencies) == count
    return Idle(
        p50_ms=measure.percentile(latencies, 50),
        p99_ms=measure.percentile(latencies, 99),
        client_cpu_ms_per_second=client_cpu / seconds * 1000,
        server_cpu_ms_per_second=None if before is None or after is None else (after - before) / seconds * 1000,
    )


# --- the run -------------------------------------------------------------------------------------------------

OURS = "headwater"
Workload = tuple[str, str, list[Variant]]
"""A key of the JSON line, the label in the table, and the variants: Headwater first, then the baselines."""


def workloads() -> list[Workload]:
    found: list[Workload] = []
    for connections in (1, 4, 16):
        key, many = f"single{connections}", "connection" if connections == 1 else "connections"
        found.append(
            (
                key,
                f"one event per transaction, {connections} {many}",
                [
                    Variant(f"{key} {OURS}", publish_one, {}, connections),
                    Variant(f"{key} bare", insert_one, {"table": "bare"}, connections),
                    Variant(f"{key} keyless", insert_one, {"table": "keyless"}, connections),
                ],
            )
        )
    for size in (100, 1000):
        for connections in (1, 4):
            key, many = f"batch{size}", "connection" if connections == 1 else "connections"
            if connections > 1:
                key += f"x{connections}"
            variants = [
                Variant(f"{key} {OURS}", publish_batch, {"size": size}, connections),
                Variant(f"{key} bare", insert_batch, {"table": "bare", "size": size}, connections),
                Variant(f"{key} keyless", insert_batch, {"table": "keyless", "size": size}, connections),
            ]
            if key == "batch1000":
                more = {"table": "bare", "size": size}
                variants += [
                    Variant(f"{key} bare, packed ahead", insert_batch, {**more, "packed_ahead": True}),
                    Variant(f"{key} bare, Python lists", insert_lists, more),
                    Variant(f"{key} bare, executemany", insert_executemany, more),
                ]
            found.append((key, f"batches of {size}, {connections} {many}", variants))
    found.append(
        (
            "copy",
            f"a stream of {COPIED:,} by COPY, 1 connection",
            [
                Variant(f"copy {OURS}", publish_many),
                Variant("copy bare", copy_many, {"table": "bare"}),
                Variant("copy keyless", copy_many, {"table": "keyless"}),
                Variant("copy bare, packed ahead", copy_many, {"table": "bare", "packed_ahead": True}),
                Variant("copy bare, write_row", copy_write_row, {"table": "bare"}),
            ],
        )
    )
    found.append(
        (
            "follow",
            f"reading in pages of {BATCH_SIZE}, 1 connection",
            [Variant(f"follow {OURS}", follow), Variant("follow select", select)],
        )
    )
    return found


def prepare(server: Server, followed: int) -> None:
    """Create topics and baseline tables, and fill both with the same events."""
    measure.say("filling topics and tables for reading")
    server.execute(FLOOR)
    log = _log(server.dsn)
    for topic in (TOPIC, FOLLOWED, IDLE):
        log.create_topic(topic)
    many = events(followed)
    log.publish_many(FOLLOWED, many)
    with _floor(server.dsn).cursor().copy(_copy_into("followed", "(format binary)")) as copy:
        copy.write(encoding.COPY_START)
        copy.write(encoding.copy_rows(_any_topic(), many))
        copy.write(encoding.COPY_END)
    server.execute("analyze")


def show(found: Sequence[Workload], samples: Samples) -> None:
    rows: list[Sequence[str] | None] = []
    for _, title, variants in found:
        rows.append(None)
        rows.append((f"[bold]{title}[/bold]", *[""] * 5))
        ours = variants[0].name
        for variant in variants:
            got: Figures = measure.figures(samples[variant.name])
            rows.append(
                (
                    "  " + variant.name.partition(" ")[2],
                    measure.number(got.rate),
                    "" if variant is variants[0] else measure.number(measure.ratio(samples, ours, variant.name), 2),
                    measure.number(got.server_cpu_us, 1),
                    measure.number(got.client_cpu_us, 1),
                    measure.number(got.wal_bytes),
                )
            )
    columns = ("", "events/s", "headwater is", "server CPU us", "client CPU us", "WAL bytes")
    measure.table("per event; bare: a table with a primary key on position, keyless: without", columns, rows)


def ratios(found: Sequence[Workload], samples: Samples) -> dict[str, float]:
    return {
        f"{key}_vs_{floor.name.partition(' ')[2].replace(', ', '_').replace(' ', '_').lower()}": round(
            measure.ratio(samples, variants[0].name, floor.name), 3
        )
        for key, _, variants in found
        for floor in variants[1:]
    }


def main() -> None:
    options = measure.arguments(__doc__ or "")
    rounds, seconds, followed = options.sized((15, 0.5, 100_000), (3, 0.12, 20_000), (1, 0.02, 1_000))
    count, idle_seconds = options.sized((300, 10.0), (30, 2.0), (3, 0.2))
    found = [workload for workload in workloads() if not options.only or workload[0] in options.only]
    with measure.measured_server(options.dsn) as server:
        prepare(server, followed)
        with measure.ClientProcesses(server.dsn, 16) as clients:
            # First, while the server is idle: later it still writes back dirty pages of the workloads.
            measure.say("an idle follower")
            idle = measure_idle(server, clients, count=count, idle_seconds=idle_seconds)
            samples: Samples = {}
            for _, title, variants in found:
                measure.say(title)
                samples |= measure.interleaved(server, clients, variants, rounds=rounds, seconds=seconds)
        show(found, samples)
        print(
            f"idle follower: publish to handler p50 {idle.p50_ms:.1f} ms, p99 {idle.p99_ms:.1f} ms; "
            f"idle, it takes {idle.client_cpu_ms_per_second:.1f} ms of CPU a second here, "
            f"{measure.number(idle.server_cpu_ms_per_second, 1)} ms in the server"
        )
        measure.finish(
            server,
            options,
            "publish",
            {
                **ratios(found, samples),
                **{f"{key}_per_second": round(measure.figures(samples[v[0].name]).rate) for key, _, v in found},
                "idle_latency_p50_ms": round(idle.p50_ms, 2),
                "idle_latency_p99_ms": round(idle.p99_ms, 2),
                "idle_client_cpu_ms_per_second": round(idle.client_cpu_ms_per_second, 2),
                "idle_server_cpu_ms_per_second": idle.server_cpu_ms_per_second
                and round(idle.server_cpu_ms_per_second, 2),
            },
        )


if __name__ == "__main__":
    main()
