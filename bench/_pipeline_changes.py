"""Captured changes: through pipelines to NATS and Delta, to a null sink, with Debezium; and single changes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from deltalake import DeltaTable
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from bench import _debezium as debezium
from bench import _measure as measure
from bench._measure import Server
from bench._pipeline_setup import (
    CAPTURED,
    COPIED,
    RUN_SECONDS,
    SLOW,
    BenchSetup,
    Measurement,
    Measurements,
    Work,
    measure_variants,
    used,
)
from headwater.capture.slot import Slot
from headwater.nats import codec, streams, subjects
from headwater.nats.subjects import Table
from headwater.spark.pipelines.batch_query import offset_in
from headwater.spark.pipelines.file import PipelineSpec, parse
from headwater.spark.pipelines.runner import Report, Runner

PACKED, EACH, DELTA, CAPTURE, DEBEZIUM = ("packed", "each", "delta", "capture", "debezium")
"""The variants. Each reads the same changes from a replication slot with its name."""

SUBSCRIBE_SECONDS = 0.5
# The sizes of the transactions, repeated: half of the changes are in transactions of up to 1000.
TRANSACTIONS = (1, 10, 1, 100, 1, 1000, 1, 10, 100, 1, 10, 1, 2000, 1, 100, 1, 10, 1, 500, 1)


def make_changes(server: Server, count: int) -> int:
    """Make at least `count` changes, in transactions of all sizes; return their number."""
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes += TRANSACTIONS
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("set synchronous_commit = off")
        connection.execute("select setval('bench.next_id', nextval('bench.next_id'))")
        connection.execute("call bench.change_much(%s)", (sizes[:-1],))
        # A synchronous commit flushes all earlier ones: capture reads only flushed WAL.
        connection.execute("set synchronous_commit = on")
        connection.execute("call bench.change_much(%s)", (sizes[-1:],))
    return sum(sizes)


def pipeline(name: str, tables: Sequence[str], sink: Mapping[str, Any], **more: Any) -> PipelineSpec:
    """A pipeline as declared in a file."""
    body = {"from": {"changes": {"tables": list(tables), "slot": name, "publication": name}}, "to": sink, **more}
    (spec,) = parse(json.dumps({"pipelines": {name: body}}), {}).pipelines
    return spec


def through_pipeline(setup: BenchSetup, spec: PipelineSpec, counted: Callable[[], int]) -> Work:
    """Drain the slot as `headwater pipeline run --once` does: the time is the sum of its micro-batches.

    `counted` returns the number of changes that arrived since its last call.
    """

    def work(_: int) -> Measurement:
        counted()
        reports: list[Report] = []
        with used(setup) as cpu:
            Runner(setup.spark, [spec], setup.settings(once=True), report=reports.append).run()
        seconds = sum(report.details["seconds"] for report in reports if report.what == "batch")
        return Measurement(counted(), seconds, cpu)

    return work


def captured(setup: BenchSetup) -> Work:
    """Drain a slot into a null sink: the cost of capture alone."""
    slot = Slot(setup.server.dsn, CAPTURE, CAPTURE)

    def work(_: int) -> Measurement:
        with used(setup) as cpu:
            query = (
                setup.spark.readStream.format("headwater.changes")
                .options(dsn=slot.dsn, slot=slot.name, publication=slot.publication, tables=CAPTURED)
                .load()
                .writeStream.format("noop")
                .option("checkpointLocation", str(setup.directory / "checkpoints" / "capture"))
                .trigger(availableNow=True)
                .start()
            )
            if not query.awaitTermination(int(RUN_SECONDS)):
                raise TimeoutError(f"capture took more than {RUN_SECONDS:.0f} s")
        progress = query.recentProgress
        slot.advance(max(offset.position for one in progress if (offset := offset_in(one)) is not None))
        seconds = sum(one["durationMs"]["triggerExecution"] for one in progress) / 1000
        return Measurement(sum(one["numInputRows"] for one in progress), seconds, cpu)

    return work


def by_debezium(setup: BenchSetup) -> Work:
    """Capture the same changes with Debezium; the time is from its first batch to its last."""

    def work(count: int) -> Measurement:
        postgres = setup.server.cpu_seconds() or 0.0
        begun = setup.clients.begin(
            debezium.capture,
            slot=DEBEZIUM,
            publication=DEBEZIUM,
            directory=str(setup.directory),
            count=count,
            seconds=measure.ANSWER_SECONDS - 40,
        )
        done: debezium.Captured = begun()
        postgres = (setup.server.cpu_seconds() or 0.0) - postgres
        setup.server.execute("select pg_replication_slot_advance(%s, pg_current_wal_lsn())", (DEBEZIUM,))
        # Scale the measured part, which excludes the start, to all changes.
        seconds = done.seconds * done.changes / done.measured_changes
        return Measurement(done.changes, seconds, {"java": done.cpu_seconds, "postgres": postgres})

    return work


def stored(setup: BenchSetup, *, packed: bool) -> Callable[[], int]:
    """A counter of the changes that the stream received since the last call, one or many in each message."""
    last = 0

    async def look() -> int:
        nonlocal last
        async with streams.connect(setup.nats.url) as client:
            js = client.jetstream()
            first, last = last + 1, (await js.stream_info(subjects.CDC_STREAM)).state.last_seq
            if not packed or last < first:
                return last - first + 1
            config = ConsumerConfig(
                ack_policy=AckPolicy.NONE, deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=first
            )
            subscription = await js.pull_subscribe("", stream=subjects.CDC_STREAM, config=config)
            changes = messages = 0
            while messages < last - first + 1:
                some = await subscription.fetch(1000, timeout=20)
                messages += len(some)
                changes += sum(len(codec.decode(one.data)) for one in some if one.subject.endswith(".batch"))
            return changes

    return lambda: asyncio.run(look())


def measure_changes(setup: BenchSetup, *, count: int, rounds: int) -> Measurements:
    history = str(setup.directory / "lake")
    in_lake = 0

    def to_lake() -> int:
        nonlocal in_lake
        before = in_lake
        if DeltaTable.is_deltatable(history):
            in_lake = DeltaTable(history).to_pyarrow_dataset().count_rows()
        return in_lake - before

    works: dict[str, Work] = {
        PACKED: through_pipeline(
            setup, pipeline(PACKED, [CAPTURED], {"nats": {"shape": "packed"}}), stored(setup, packed=True)
        ),
        EACH: through_pipeline(
            setup, pipeline(EACH, [CAPTURED], {"nats": {"shape": "each"}}), stored(setup, packed=False)
        ),
        DELTA: through_pipeline(setup, pipeline(DELTA, [CAPTURED], {"lake": {"path": history}}), to_lake),
        CAPTURE: captured(setup),
    }
    if (reason := debezium.missing()) is None:
        works[DEBEZIUM] = by_debezium(setup)
    else:
        measure.say(f"without Debezium: {reason}")
    for name in works:
        Slot(setup.server.dsn, name, name).prepare((CAPTURED,))
    return measure_variants(setup, works, rounds=rounds, before=lambda: make_changes(setup.server, count))


# --- one change at a time ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Live:
    """Measurements of a continuous pipeline to NATS."""

    latencies_ms: list[float]
    snapshot_rows_per_s: float


def seen(dsn: str, url: str, subject: str, count: int, seconds: float) -> dict[int, int]:
    """The times at which rows arrived at a subscriber, by key; at most `count` rows and `seconds`."""
    times: dict[int, int] = {}

    async def listen() -> None:
        done = asyncio.Event()

        async def note(message: Msg) -> None:
            times[codec.decode(message.data)["data"]["id"]] = time.monotonic_ns()
            if len(times) >= count:
                done.set()

        async with streams.connect(url) as client:
            await client.subscribe(subject, cb=note)
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), seconds)

    asyncio.run(listen())
    return times


def latencies_ms(setup: BenchSetup, *, keys: range, per_second: float) -> list[float]:
    """Milliseconds from the commit of a row to its message, for single inserts."""
    answer = setup.clients.begin(
        seen,
        client=1,
        url=setup.nats.url,
        subject=subjects.changes_filter(Table(*SLOW.split("."))),
        count=len(keys),
        seconds=len(keys) / per_second + 30,
    )
    time.sleep(SUBSCRIBE_SECONDS)
    committed: dict[int, int] = {}
    began = time.monotonic()
    for number, key in enumerate(keys):
        # Spread the inserts, so that they are not in step with the micro-batches.
        time.sleep(max(0.0, began + (number + number * 0.618 % 1) / per_second - time.monotonic()))
        setup.server.execute("insert into bench.slow values (%s, md5(%s::text))", (key, key))
        committed[key] = time.monotonic_ns()
    times: dict[int, int] = answer()
    if lost := committed.keys() - times.keys():
        raise RuntimeError(f"{len(lost)} of {len(keys)} changes did not come in time")
    return [(times[key] - at) / 1e6 for key, at in committed.items()]


def measure_live(setup: BenchSetup, *, count: int, warm_up: int, per_second: float) -> Live:
    """A continuous pipeline that starts micro-batches as soon as possible; then a requested snapshot."""
    spec = pipeline("live", [SLOW, COPIED], {"nats": {"shape": "each"}}, every_seconds=0)
    started = threading.Event()
    failures: list[str] = []

    def note(report: Report) -> None:
        if report.what in ("failed", "ended"):
            failures.append(str(report.details.get("error")))
        if failures or report.what == "started":
            started.set()

    runner = Runner(setup.spark, [spec], setup.settings(once=False), report=note)
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    try:
        if not started.wait(60) or failures:
            raise RuntimeError(f"the pipeline did not start: {failures}")
        latencies_ms(setup, keys=range(warm_up), per_second=per_second)
        found = latencies_ms(setup, keys=range(warm_up, warm_up + count), per_second=per_second)
        live = Live(found, asyncio.run(requested_snapshot(setup)))
        if failures:
            raise RuntimeError(f"the pipeline failed meanwhile: {failures}")
        return live
    finally:
        runner.stop()
        thread.join(60)


async def requested_snapshot(setup: BenchSetup) -> float:
    """Rows per second of a table snapshot to NATS, requested as a client of the bridge does."""
    table = Table(*COPIED.split("."))
    async with streams.connect(setup.nats.url) as client:
        began = time.monotonic()
        answer = codec.decode((await client.request(subjects.request_subject(table), b"", timeout=10)).data)
        if not answer["accepted"]:
            raise RuntimeError(f"no snapshot: {answer}")
        while time.monotonic() < began + RUN_SECONDS:
            document = await streams.get_snapshot(client.jetstream(), table)
            if document is not None and document["state"] != "running":
                if document["state"] != "done":
                    raise RuntimeError(f"the snapshot failed: {document}")
                return int(document["rows"]) / (time.monotonic() - began)
            await asyncio.sleep(0.05)
    raise TimeoutError(f"the snapshot took more than {RUN_SECONDS:.0f} s")
