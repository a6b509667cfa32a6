"""Replays past events from the log and archives to a topic, a queue or a table, each event exactly once.

A replay runs in parts. Each part is written in one transaction with its progress, or idempotently before it, so a
replay that was killed resumes under the same name. The plan (ranges and times) is fixed and stored when it starts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial, reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Final

from pyspark.errors import PySparkException
from pyspark.sql import functions as f
from pyspark.sql.streaming.datasource import ReadMaxRows

import headwater
from headwater import Headwater
from headwater.calls import archives as archive_calls
from headwater.calls import archives as archives_calls
from headwater.calls import log as log_calls
from headwater.calls import reading as reading_calls
from headwater.calls.archives import Replay, TopicCoverage
from headwater.client.database.connection import rows_of
from headwater.errors import InvalidRequest
from headwater.spark.arrow import EVENT
from headwater.spark.formats.archive_reader import archived_ranges
from headwater.spark.formats.log import LogSource, estimate_ranges, position_before, refuse_lost
from headwater.spark.formats.log_ranges import EstimatedRange, Range
from headwater.spark.replay.targets import PRIVATE_PREFIX, Part, Target, ToQueue, ToTable, ToTopic

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = [
    "FoundEvents",
    "Preview",
    "ReplayProgress",
    "ReplaySelection",
    "Target",
    "ToQueue",
    "ToTable",
    "ToTopic",
    "preview",
    "replay",
]

EVENTS_PER_PART: Final = 200_000


@dataclass(frozen=True, slots=True)
class ReplaySelection:
    """Which events to replay; None means no restriction. A time range includes its start, not its end."""

    topics: tuple[str, ...] | None = None
    after: int | None = None
    up_to: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    types: tuple[str, ...] | None = None
    keys: tuple[bytes, ...] | None = None

    def check(self) -> None:
        if self.after is not None and self.since is not None:
            raise InvalidRequest("give only one of after and since")
        if any(at is not None and at.tzinfo is None for at in (self.since, self.until)):
            raise InvalidRequest("since and until require a time zone")

    @property
    def is_open_ended(self) -> bool:
        return self == ReplaySelection(after=self.after, since=self.since)


@dataclass(frozen=True, slots=True)
class FoundEvents:
    """The events of a topic that a replay reads from the log or from the archive."""

    topic: str
    source: str
    """`log` or `archive`."""
    events: int
    first_position: int
    last_position: int
    first_published_at: datetime
    last_published_at: datetime


@dataclass(frozen=True, slots=True)
class Preview:
    """What a replay would do."""

    start_after: int
    up_to: int
    found: tuple[FoundEvents, ...]
    rewind_to: int | None
    """The position to which the queue would be rewound: events in the log are delivered again, not published."""
    also_reached: tuple[str, ...]
    """Other queues that would receive the published events, because they are bound to all topics."""

    @property
    def published(self) -> int:
        """How many events would be written."""
        return sum(one.events for one in self.found if self.rewind_to is None or one.source == "archive")


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    """The progress of a replay. `share` is an estimate."""

    name: str
    start_after: int
    done_to: int
    up_to: int
    events: int
    share: float
    finished: bool
    rewind_to: int | None = None


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan of a replay, fixed when it starts."""

    start_after: int
    up_to: int
    gone_to: int
    """The position up to which events may be missing."""
    ranges: Mapping[str, Range]
    """The range to read, by topic."""
    rewind_to: int | None = None
    since: datetime | None = None
    until: datetime | None = None

    def document(self) -> dict[str, Any]:
        return {
            "gone_to": self.gone_to,
            "ranges": {topic: list(positions) for topic, positions in self.ranges.items()},
            "rewind_to": self.rewind_to,
            "since": self.since and self.since.isoformat(),
            "until": self.until and self.until.isoformat(),
        }

    @classmethod
    def of(cls, stored: Replay) -> _Plan:
        since, until = (stored.plan[name] and datetime.fromisoformat(stored.plan[name]) for name in ("since", "until"))
        return cls(
            stored.start_after,
            stored.up_to,
            stored.plan["gone_to"],
            {topic: (low, high) for topic, (low, high) in stored.plan["ranges"].items()},
            stored.plan["rewind_to"],
            since,
            until,
        )


def preview(spark: SparkSession, dsn: str, selection: ReplaySelection, target: Target) -> Preview:
    """Read all events of a replay without writing anything, and return what it would do."""
    with headwater.connect(dsn, pool_size=1) as log:
        plan = _plan(log, selection, target)
        reached = target.also_reached(log) if isinstance(target, ToQueue) else []
        kept = {topic.topic: topic for topic in log.run(archive_calls.kept_topics(None))}
        if isinstance(target, ToQueue) and plan.rewind_to is not None:
            # Include the events that the rewind delivers.
            plan = replace(plan, up_to=log.run(log_calls.log_state()).stable, ranges=_bound_ranges(log, target, plan))
    found: list[FoundEvents] = []
    rows = _rows(spark, dsn, selection, plan, after=plan.start_after, up_to=plan.up_to)
    if rows is not None:
        expired = f.create_map(*[f.lit(x) for name in plan.ranges for x in (name, kept[name].expired_to)])
        source = f.when(f.col("position") <= expired[f.col("topic")], "archive").otherwise("log")
        grouped = rows.groupBy("topic", source.alias("source")).agg(
            f.count("*"), f.min("position"), f.max("position"), f.min("published_at"), f.max("published_at")
        )
        with explain_errors():
            found = [FoundEvents(*row) for row in grouped.sort("topic", "source").collect()]
    return Preview(plan.start_after, plan.up_to, tuple(found), plan.rewind_to, tuple(reached))


def replay(
    spark: SparkSession,
    dsn: str,
    selection: ReplaySelection,
    target: Target,
    *,
    name: str,
    events_per_second: float | None = None,
    events_per_part: int = EVENTS_PER_PART,
    on_progress: Callable[[ReplayProgress], None] = lambda progress: None,
) -> ReplayProgress:
    """Replay events, each exactly once. Called again with the same name and request, it resumes."""
    with headwater.connect(dsn, pool_size=2) as log:
        state = _start_or_resume(log, name, selection, target)
        plan = _Plan.of(state)
        kept = [topic for topic in log.run(archives_calls.kept_topics(None)) if topic.topic in plan.ranges]
        ahead = estimate_ranges(log, kept, after=plan.start_after, up_to=plan.up_to)

        def progress(done_to: int, events: int) -> ReplayProgress:
            share = _share(ahead, done_to)
            finished = done_to >= plan.up_to
            return ReplayProgress(name, plan.start_after, done_to, plan.up_to, events, share, finished, plan.rewind_to)

        done_to, events, came = state.done_to, state.events, 0
        on_progress(progress(done_to, events))
        began = time.monotonic()
        part = events_per_part if events_per_second is None else max(1, min(events_per_part, int(events_per_second)))
        while done_to < plan.up_to:
            end = _part_end(dsn, plan, after=done_to, events=part)
            rows = _rows(spark, dsn, selection, plan, after=done_to, up_to=end)
            this = Part(dsn, name, done_to, end, partial(refuse_gone, log, plan, after=done_to))
            if rows is None:
                written = 0
                log.run(this.advance(0))
            else:
                with explain_errors():
                    written = target.write(rows, this)
            done_to, events, came = end, events + written, came + written
            on_progress(progress(done_to, events))
            if events_per_second is not None and done_to < plan.up_to:
                # A part has at most one second's worth of events, so this sleep is short.
                time.sleep(max(0.0, began + came / events_per_second - time.monotonic()))
        return progress(done_to, events)


@contextmanager
def explain_errors() -> Iterator[None]:
    """Convert Spark errors to Headwater's errors, without Spark's tracebacks."""
    try:
        yield
    except PySparkException as error:
        from headwater.spark.pipelines.batch_query import explain

        raise explain(str(error)) from error


def refuse_gone(log: Headwater, plan: _Plan, *, after: int) -> None:
    """Raise PositionExpired if events that existed when the replay started are neither in the log nor archived."""
    kept = [topic for topic in log.run(archives_calls.kept_topics(None)) if topic.topic in plan.ranges]
    refuse_lost(kept, after=max(after, plan.gone_to))


def _start_or_resume(log: Headwater, name: str, selection: ReplaySelection, target: Target) -> Replay:
    """The stored replay with this name, or a new one."""
    request = _request(selection, target)
    stored = log.run(archive_calls.find_replay(name))
    if stored is not None:
        # Raises if the stored request differs.
        return log.run(archives_calls.start_replay(name, request, start_after=0, up_to=0, plan={}))
    if not isinstance(target, ToQueue):
        target.prepare(log)
    elif not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
        raise InvalidRequest(
            f"invalid name {name!r} for a replay to a queue: it is also part of a topic name",
            hint="Use 1 to 100 characters of A-Z a-z 0-9 . _ -",
        )
    plan = _plan(log, selection, target)
    call = archives_calls.start_replay(
        name, request, start_after=plan.start_after, up_to=plan.up_to, plan=plan.document()
    )
    with log.transaction() as connection, connection.cursor(binary=True) as cursor:
        # Rewind the queue in the transaction that records the replay, so that it happens exactly once.
        if isinstance(target, ToQueue):
            target.begin(log, connection, name, rewind_to=plan.rewind_to)
        return call.decode(rows_of(cursor, call))


def _request(selection: ReplaySelection, target: Target) -> dict[str, Any]:
    """The request in a comparable form. Times are left out, because relative times differ in a repeated call."""
    return {
        "to": target.document(),
        "topics": None if selection.topics is None else sorted(selection.topics),
        "after": selection.after,
        "up_to": selection.up_to,
        "by_time": [selection.since is not None, selection.until is not None],
        "types": None if selection.types is None else sorted(selection.types),
        "keys": None if selection.keys is None else sorted(key.hex() for key in selection.keys),
    }


def _plan(log: Headwater, selection: ReplaySelection, target: Target) -> _Plan:
    """Plan the topics and ranges to read, from the current state of the log."""
    selection.check()
    bound = _topics(log, selection, target)
    # The plan is stored in the same database, so it stays valid in a later epoch.
    stable = log.run(log_calls.log_state(sorted(bound))).stable
    kept = log.run(archives_calls.kept_topics(sorted(bound)))
    start = selection.after or 0
    if selection.since is not None:
        start = position_before(log, sorted(bound), kept, selection.since)
    if selection.after is not None:
        refuse_lost(kept, after=selection.after)
    gone_to = 0 if selection.after is not None else max((topic.lost_to for topic in kept), default=0)
    up_to = stable if selection.up_to is None else min(stable, selection.up_to)
    if isinstance(target, ToQueue) and selection.is_open_ended:
        return _with_rewind(log, selection, kept, bound, start=start, gone_to=gone_to)
    ranges = {
        name: (max(start, low), min(up_to, high)) for name, (low, high) in bound.items() if max(start, low) < up_to
    }
    return _Plan(start, max(start, up_to), gone_to, ranges, None, selection.since, selection.until)


def _with_rewind(
    log: Headwater,
    selection: ReplaySelection,
    kept: list[TopicCoverage],
    bound: Mapping[str, Range],
    *,
    start: int,
    gone_to: int,
) -> _Plan:
    """Plan a rewind of the queue for events in the log; only archived events are published."""
    ranges = {
        topic: (max(low, bound[topic][0]), min(high, bound[topic][1]))
        for archived in archived_ranges(kept, after=start, up_to=2**62).values()
        for topic, (low, high) in archived.items()
        if max(low, bound[topic][0]) < min(high, bound[topic][1])
    }
    uncleared = log.run(archive_calls.uncleared_topics(sorted(ranges), after=start)) if ranges else []
    if uncleared:
        raise InvalidRequest(
            f"retention is still removing events of {', '.join(uncleared)}, which the rewind would deliver as well",
            hint="Run headwater maintain until it removes nothing, then retry.",
        )
    up_to = max((high for _, high in ranges.values()), default=start)
    # In the log, the position of a time is exact; in an archive, only the file is known.
    rewind_to = (
        start if selection.since is None else log.run(reading_calls.position_before(sorted(bound), selection.since))
    )
    return _Plan(start, max(start, up_to), gone_to, ranges, rewind_to, selection.since, None)


def _topics(log: Headwater, selection: ReplaySelection, target: Target) -> dict[str, Range]:
    """The topics to read, with their ranges of positions."""
    existing = {topic.name for topic in log.run(log_calls.topics())}
    if isinstance(target, ToQueue):
        bound = target.bound(log)
        named = {}
        for name in existing:
            taken = [bound[binding] for binding in (name, None) if binding in bound]
            if taken and not name.startswith(PRIVATE_PREFIX):
                named[name] = (min(low for low, _ in taken), max(high for _, high in taken))
    else:
        # Without a selection, do not read the target topic itself.
        own = target.name if isinstance(target, ToTopic) and selection.topics is None else None
        named = {name: (0, 2**62) for name in existing if name != own}
    if selection.topics is None:
        return named
    for name in selection.topics:
        log.run(log_calls.find_topic(name))
    return {name: named[name] for name in selection.topics if name in named}


def _bound_ranges(log: Headwater, target: ToQueue, plan: _Plan) -> dict[str, Range]:
    """All ranges that a rewound queue receives again."""
    wanted = _topics(log, ReplaySelection(), target)
    return {name: (max(plan.start_after, low), high) for name, (low, high) in wanted.items()}


def _part_end(dsn: str, plan: _Plan, *, after: int, events: int) -> int:
    """The end of a part of at most `events` events."""
    if not plan.ranges:
        return plan.up_to
    options = {"dsn": dsn, "topics": ",".join(sorted(plan.ranges)), "waitSeconds": "0"}
    stream = LogSource(options).streamReader(EVENT)
    stream.target = plan.up_to
    try:
        start = {"position": after, "gone_to": plan.gone_to}
        end = stream.latestOffset(start, ReadMaxRows(events))["position"]
    finally:
        stream.stop()
    return plan.up_to if end == after else end


def _rows(
    spark: SparkSession, dsn: str, selection: ReplaySelection, plan: _Plan, *, after: int, up_to: int
) -> DataFrame | None:
    """The selected events of a part, in order within and across partitions; None if there cannot be any."""
    topics = [name for name, (low, high) in plan.ranges.items() if low < up_to and high > after]
    if not topics or after >= up_to:
        return None
    rows = (
        spark.read.format("headwater")
        .option("dsn", dsn)
        .option("topics", ",".join(sorted(topics)))
        .option("after", str(after))
        .option("upTo", str(up_to))
        # Events missing at the start are accepted; refuse_gone detects events that are removed later.
        .option("skipExpired", "true")
        .load()
    )
    if any(plan.ranges[name][0] > after or plan.ranges[name][1] < up_to for name in topics):
        rows = rows.filter(reduce(or_, [_inside(name, plan.ranges[name]) for name in topics]))
    if selection.types is not None:
        rows = rows.filter(f.col("type").isin(*selection.types))
    if selection.keys is not None:
        rows = rows.filter(f.col("key").isin(*[f.lit(bytearray(key)) for key in selection.keys]))
    if plan.since is not None:
        rows = rows.filter(f.col("published_at") >= f.lit(plan.since))
    if plan.until is not None:
        rows = rows.filter(f.col("published_at") < f.lit(plan.until))
    return rows


def _inside(topic: str, positions: Range) -> Column:
    low, high = positions
    return (f.col("topic") == topic) & (f.col("position") > low) & (f.col("position") <= high)


def _share(ahead: list[EstimatedRange], done_to: int) -> float:
    """The completed share of the estimated events."""
    total = sum(estimate.events for estimate in ahead)
    done = sum(
        estimate.events * min(1.0, max(0.0, (done_to - estimate.after) / (estimate.up_to - estimate.after)))
        for estimate in ahead
    )
    return 1.0 if total == 0 else done / total
