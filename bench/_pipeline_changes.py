"""Captured changes: through pipelines to NATS and Delta, to nothing, by Debezium; and one change at a time."""

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
from bench._pipeline_place import CAPTURED, COPIED, RUN_SECONDS, SLOW, Place, Turn, Turns, Work, taking_turns, used
from headwater.capture.slot import Slot
from headwater.nats import codec, streams, subjects
from headwater.nats.subjects import Table
from headwater.spark.pipelines.file import PipelineSpec, parse
from headwater.spark.pipelines.runner import Report, Runner, place_in

PACKED, EACH, DELTA, CAPTURE, DEBEZIUM = ("packed", "each", "delta", "capture", "debezium")
"""What is done with the same changes, each from a replication slot of its own, which has the same name."""

SUBSCRIBE_SECONDS = 0.5
# How many changes the transactions have, over and over: half of the changes are in ones of up to 1000.
TRANSACTIONS = (1, 10, 1, 100, 1, 1000, 1, 10, 100, 1, 10, 1, 2000, 1, 100, 1, 10, 1, 500, 1)


def make_changes(server: Server, count: int) -> int:
    """So many changes at least, in transactions of all sizes; says how many."""
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes += TRANSACTIONS
    with psycopg.connect(server.dsn, autocommit=True) as connection:
        connection.execute("set synchronous_commit = off")
        connection.execute("select setval('bench.next_id', nextval('bench.next_id'))")
        connection.execute("call bench.change_much(%s)", (sizes[:-1],))
        # Waits for the disk, and so for all before it: what is not there yet is not captured.
        connection.execute("set synchronous_commit = on")
        connection.execute("call bench.change_much(%s)", (sizes[-1:],))
    return sum(sizes)


def pipeline(name: str, tables: Sequence[str], sink: Mapping[str, Any], **more: Any) -> PipelineSpec:
    """A pipeline as a file would declare it."""
    body = {"from": {"changes": {"tables": list(tables), "slot": name, "publication": name}}, "to": sink, **more}
    (spec,) = parse(json.dumps({"pipelines": {name: body}}), {}).pipelines
    return spec


def through_pipeline(place: Place, spec: PipelineSpec, counted: Callable[[], int]) -> Work:
    """Work off the slot as `headwater pipeline run --once` does: the time is that of its micro-batches.

    `counted` says how many changes came to the end since it was last asked.
    """

    def work(_: int) -> Turn:
        counted()
        said: list[Report] = []
        with used(place) as cpu:
            Runner(place.spark, [spec], place.settings(once=True), report=said.append).run()
        seconds = sum(report.details["seconds"] for report in said if report.what == "batch")
        return Turn(counted(), seconds, cpu)

    return work


def captured(place: Place) -> Work:
    """Work off a slot into nothing: what capture costs without a sink."""
    slot = Slot(place.server.dsn, CAPTURE, CAPTURE)

    def work(_: int) -> Turn:
        with used(place) as cpu:
            query = (
                place.spark.readStream.format("headwater.changes")
                .options(dsn=slot.dsn, slot=slot.name, publication=slot.publication, tables=CAPTURED)
                .load()
                .writeStream.format("noop")
                .option("checkpointLocation", str(place.directory / "checkpoints" / "capture"))
                .trigger(availableNow=True)
                .start()
            )
            if not query.awaitTermination(int(RUN_SECONDS)):
                raise TimeoutError(f"capture took more than {RUN_SECONDS:.0f} s")
        progress = query.recentProgress
        slot.advance(max(place_in(one) or 0 for one in progress))
        seconds = sum(one["durationMs"]["triggerExecution"] for one in progress) / 1000
        return Turn(sum(one["numInputRows"] for one in progress), seconds, cpu)

    return work


def by_debezium(place: Place) -> Work:
    """The same into Debezium's handler; the time is from its first batch to its last."""

    def work(count: int) -> Turn:
        postgres = place.server.cpu_seconds() or 0.0
        begun = place.crew.begin(
            debezium.capture,
            slot=DEBEZIUM,
            publication=DEBEZIUM,
            directory=str(place.directory),
            count=count,
            seconds=measure.ANSWER_SECONDS - 40,
        )
        done: debezium.Captured = begun()
        postgres = (place.server.cpu_seconds() or 0.0) - postgres
        place.server.execute("select pg_replication_slot_advance(%s, pg_current_wal_lsn())", (DEBEZIUM,))
        # The part of the run without its start, in proportion.
        seconds = done.seconds * done.changes / done.measured_changes
        return Turn(done.changes, seconds, {"java": done.cpu_seconds, "postgres": postgres})

    return work


def stored(place: Place, *, packed: bool) -> Callable[[], int]:
    """Counts the changes that came into the stream since it was last asked: one in each message, or many."""
    last = 0

    async def look() -> int:
        nonlocal last
        async with streams.connected(place.nats.url) as client:
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


def measure_changes(place: Place, *, count: int, rounds: int) -> Turns:
    history = str(place.directory / "lake")
    in_lake = 0

    def to_lake() -> int:
        nonlocal in_lake
        before = in_lake
        if DeltaTable.is_deltatable(history):
            in_lake = DeltaTable(history).to_pyarrow_dataset().count_rows()
        return in_lake - before

    works: dict[str, Work] = {
        PACKED: through_pipeline(
            place, pipeline(PACKED, [CAPTURED], {"nats": {"shape": "packed"}}), stored(place, packed=True)
        ),
        EACH: through_pipeline(
            place, pipeline(EACH, [CAPTURED], {"nats": {"shape": "each"}}), stored(place, packed=False)
        ),
        DELTA: through_pipeline(place, pipeline(DELTA, [CAPTURED], {"lake": {"path": history}}), to_lake),
        CAPTURE: captured(place),
    }
    if (reason := debezium.missing()) is None:
        works[DEBEZIUM] = by_debezium(place)
    else:
        measure.say(f"without Debezium: {reason}")
    for name in works:
        Slot(place.server.dsn, name, name).prepare((CAPTURED,))
    return taking_turns(place, works, rounds=rounds, before=lambda: make_changes(place.server, count))


# --- one change at a time ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Live:
    """What a running pipeline to NATS does."""

    latencies_ms: list[float]
    snapshot_rows_per_s: float


def seen(dsn: str, url: str, subject: str, count: int, seconds: float) -> dict[int, int]:
    """When each row came to a subscriber, by its key; so many rows at most, for so long at most."""
    times: dict[int, int] = {}

    async def listen() -> None:
        done = asyncio.Event()

        async def note(message: Msg) -> None:
            times[codec.decode(message.data)["data"]["id"]] = time.monotonic_ns()
            if len(times) >= count:
                done.set()

        async with streams.connected(url) as client:
            await client.subscribe(subject, cb=note)
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), seconds)

    asyncio.run(listen())
    return times


def latencies_ms(place: Place, *, keys: range, per_second: float) -> list[float]:
    """Milliseconds from the commit of a row to its message, for rows that come one by one."""
    answer = place.crew.begin(
        seen,
        client=1,
        url=place.nats.url,
        subject=subjects.changes_filter(Table(*SLOW.split("."))),
        count=len(keys),
        seconds=len(keys) / per_second + 30,
    )
    time.sleep(SUBSCRIBE_SECONDS)
    committed: dict[int, int] = {}
    began = time.monotonic()
    for number, key in enumerate(keys):
        # Not in step with the micro-batches.
        time.sleep(max(0.0, began + (number + number * 0.618 % 1) / per_second - time.monotonic()))
        place.server.execute("insert into bench.slow values (%s, md5(%s::text))", (key, key))
        committed[key] = time.monotonic_ns()
    times: dict[int, int] = answer()
    if lost := committed.keys() - times.keys():
        raise RuntimeError(f"{len(lost)} of {len(keys)} changes did not come in time")
    return [(times[key] - at) / 1e6 for key, at in committed.items()]


def measure_live(place: Place, *, count: int, warm_up: int, per_second: float) -> Live:
    """A pipeline that stays up and starts micro-batches as soon as it can; then a snapshot on request."""
    spec = pipeline("live", [SLOW, COPIED], {"nats": {"shape": "each"}}, every_seconds=0)
    started = threading.Event()
    failures: list[str] = []

    def note(report: Report) -> None:
        if report.what in ("failed", "ended"):
            failures.append(str(report.details.get("error")))
        if failures or report.what == "started":
            started.set()

    runner = Runner(place.spark, [spec], place.settings(once=False), report=note)
    thread = threading.Thread(target=runner.run, daemon=True)
    thread.start()
    try:
        if not started.wait(60) or failures:
            raise RuntimeError(f"the pipeline did not start: {failures}")
        latencies_ms(place, keys=range(warm_up), per_second=per_second)
        found = latencies_ms(place, keys=range(warm_up, warm_up + count), per_second=per_second)
        live = Live(found, asyncio.run(requested_snapshot(place)))
        if failures:
            raise RuntimeError(f"the pipeline failed meanwhile: {failures}")
        return live
    finally:
        runner.stop()
        thread.join(60)


async def requested_snapshot(place: Place) -> float:
    """Rows a second of a snapshot of a table to NATS, asked for as a client of the bridge does."""
    table = Table(*COPIED.split("."))
    async with streams.connected(place.nats.url) as client:
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
