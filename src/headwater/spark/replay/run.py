"""Replays: the past of the log, from wherever it is kept, to a topic, a group or a table, each event once.

A replay goes in parts. What arrived is noted together with how far that is, so one that was killed goes on by its name.
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
from headwater import Headwater, calls
from headwater.calls import KeptTopic, Replay
from headwater.client.database.connection import rows_of
from headwater.errors import InvalidRequest
from headwater.spark.arrow import EVENT
from headwater.spark.formats.archive_reader import archived_ranges
from headwater.spark.formats.log import LogSource, position_before, refuse_lost, stretches
from headwater.spark.formats.log_ranges import Range, Stretch
from headwater.spark.replay.targets import PRIVATE_PREFIX, Part, Target, ToGroup, ToTable, ToTopic

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = [
    "Found",
    "Preview",
    "Progress",
    "Selection",
    "Target",
    "ToGroup",
    "ToTable",
    "ToTopic",
    "preview",
    "replay",
]

EVENTS_PER_PART: Final = 200_000


@dataclass(frozen=True, slots=True)
class Selection:
    """Which events are to come again; None asks nothing. A time range includes its start, not its end."""

    topics: tuple[str, ...] | None = None
    after: int | None = None
    up_to: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    types: tuple[str, ...] | None = None
    keys: tuple[bytes, ...] | None = None

    def refuse_nonsense(self) -> None:
        if self.after is not None and self.since is not None:
            raise InvalidRequest("say where to start once: after or since")
        if any(at is not None and at.tzinfo is None for at in (self.since, self.until)):
            raise InvalidRequest("a time to replay from or to needs a time zone")

    @property
    def only_says_where_to_start(self) -> bool:
        return self == Selection(after=self.after, since=self.since)


@dataclass(frozen=True, slots=True)
class Found:
    """What a replay has, or would have, of a topic in one place."""

    topic: str
    place: str
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
    found: tuple[Found, ...]
    rewind_to: int | None
    """Where a group would begin anew: what the log has comes by that, and is not published."""
    also_reached: tuple[str, ...]
    """Other groups that would get what is published, since they are bound to every topic."""

    @property
    def published(self) -> int:
        """How many events would be written."""
        return sum(one.events for one in self.found if self.rewind_to is None or one.place == "archive")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replay is. The share is an estimate."""

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
    """What was found out when a replay began, and has to stay as it was."""

    start_after: int
    up_to: int
    gone_to: int
    """Up to here, it is no loss if events are gone."""
    ranges: Mapping[str, Range]
    """Of each topic what is read."""
    rewind_to: int | None = None
    since: datetime | None = None
    until: datetime | None = None

    def dumped(self) -> dict[str, Any]:
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


def preview(spark: SparkSession, dsn: str, selection: Selection, target: Target) -> Preview:
    """What a replay would do, found out by reading all of it and writing nothing."""
    with headwater.connect(dsn, pool_size=1) as log:
        plan = _planned(log, selection, target)
        reached = target.also_reached(log) if isinstance(target, ToGroup) else []
        kept = {topic.topic: topic for topic in log.run(calls.kept_topics(None))}
        if isinstance(target, ToGroup) and plan.rewind_to is not None:
            # What the rewind brings is told too.
            plan = replace(plan, up_to=log.run(calls.log_state()).settled, ranges=_bound_ranges(log, target, plan))
    found: list[Found] = []
    rows = _rows(spark, dsn, selection, plan, after=plan.start_after, up_to=plan.up_to)
    if rows is not None:
        expired = f.create_map(*[f.lit(x) for name in plan.ranges for x in (name, kept[name].expired_to)])
        place = f.when(f.col("position") <= expired[f.col("topic")], "archive").otherwise("log")
        grouped = rows.groupBy("topic", place.alias("place")).agg(
            f.count("*"), f.min("position"), f.max("position"), f.min("published_at"), f.max("published_at")
        )
        with explained_errors():
            found = [Found(*row) for row in grouped.sort("topic", "place").collect()]
    return Preview(plan.start_after, plan.up_to, tuple(found), plan.rewind_to, tuple(reached))


def replay(
    spark: SparkSession,
    dsn: str,
    selection: Selection,
    target: Target,
    *,
    name: str,
    events_per_second: float | None = None,
    events_per_part: int = EVENTS_PER_PART,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Let events come again, each once. Repeated with the same name and request, it goes on where it was."""
    with headwater.connect(dsn, pool_size=2) as log:
        state = _begun(log, name, selection, target)
        plan = _Plan.of(state)
        kept = [topic for topic in log.run(calls.kept_topics(None)) if topic.topic in plan.ranges]
        ahead = stretches(log, kept, after=plan.start_after, up_to=plan.up_to)

        def progress(done_to: int, events: int) -> Progress:
            share = _share(ahead, plan.start_after, done_to)
            finished = done_to >= plan.up_to
            return Progress(name, plan.start_after, done_to, plan.up_to, events, share, finished, plan.rewind_to)

        done_to, events, came = state.done_to, state.events, 0
        on_progress(progress(done_to, events))
        began = time.monotonic()
        part = events_per_part if events_per_second is None else max(1, min(events_per_part, int(events_per_second)))
        while done_to < plan.up_to:
            end = _part_end(log, dsn, plan, after=done_to, events=part)
            rows = _rows(spark, dsn, selection, plan, after=done_to, up_to=end)
            this = Part(dsn, name, done_to, end, partial(refuse_gone, log, plan, after=done_to))
            if rows is None:
                written = 0
                log.run(this.advance(0))
            else:
                with explained_errors():
                    written = target.write(rows, this)
            done_to, events, came = end, events + written, came + written
            on_progress(progress(done_to, events))
            if events_per_second is not None and done_to < plan.up_to:
                # A part is a second's worth, so this is no long sleep.
                time.sleep(max(0.0, began + came / events_per_second - time.monotonic()))
        return progress(done_to, events)


@contextmanager
def explained_errors() -> Iterator[None]:
    """What went wrong in Spark, without its tracebacks: our own error, if that is at the bottom of it."""
    try:
        yield
    except PySparkException as error:
        from headwater.spark.pipelines.batch_query import explained

        raise explained(str(error)) from error


def refuse_gone(log: Headwater, plan: _Plan, *, after: int) -> None:
    """PositionExpired if events that were there when the replay began are nowhere any more."""
    kept = [topic for topic in log.run(calls.kept_topics(None)) if topic.topic in plan.ranges]
    refuse_lost(kept, after=max(after, plan.gone_to))


def _begun(log: Headwater, name: str, selection: Selection, target: Target) -> Replay:
    """The replay of that name; begun now if there is none."""
    request = _request(selection, target)
    stored = log.run(calls.find_replay(name))
    if stored is not None:
        # Says so if it is another request.
        return log.run(calls.start_replay(name, request, start_after=0, up_to=0, plan={}))
    if not isinstance(target, ToGroup):
        target.prepare(log)
    elif not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name):
        raise InvalidRequest(
            f"{name!r} names a topic too, if it is a replay to a group", hint="Use up to 100 of A-Z a-z 0-9 . _ -"
        )
    plan = _planned(log, selection, target)
    call = calls.start_replay(name, request, start_after=plan.start_after, up_to=plan.up_to, plan=plan.dumped())
    with log.transaction() as connection, connection.cursor(binary=True) as cursor:
        # A group is rewound with the note that it was, so that it happens once.
        if isinstance(target, ToGroup):
            target.begin(log, connection, name, rewind_to=plan.rewind_to)
        return call.decode(rows_of(cursor, call))


def _request(selection: Selection, target: Target) -> dict[str, Any]:
    """What was asked for, as it can be compared with a repetition, whose times may be told from a later now."""
    return {
        "to": target.described(),
        "topics": None if selection.topics is None else sorted(selection.topics),
        "after": selection.after,
        "up_to": selection.up_to,
        "by_time": [selection.since is not None, selection.until is not None],
        "types": None if selection.types is None else sorted(selection.types),
        "keys": None if selection.keys is None else sorted(key.hex() for key in selection.keys),
    }


def _planned(log: Headwater, selection: Selection, target: Target) -> _Plan:
    """What to read of which topics, as things are now."""
    selection.refuse_nonsense()
    bound = _topics(log, selection, target)
    # Kept in the database with the plan: in whichever epoch the replay goes on, all of it is in the log's history.
    settled = log.run(calls.log_state(sorted(bound))).settled
    kept = log.run(calls.kept_topics(sorted(bound)))
    start = selection.after or 0
    if selection.since is not None:
        start = position_before(log, sorted(bound), kept, selection.since)
    if selection.after is not None:
        refuse_lost(kept, after=selection.after)
    gone_to = 0 if selection.after is not None else max((topic.lost_to for topic in kept), default=0)
    up_to = settled if selection.up_to is None else min(settled, selection.up_to)
    if isinstance(target, ToGroup) and selection.only_says_where_to_start:
        return _with_rewind(log, selection, kept, bound, start=start, gone_to=gone_to)
    ranges = {
        name: (max(start, low), min(up_to, high)) for name, (low, high) in bound.items() if max(start, low) < up_to
    }
    return _Plan(start, max(start, up_to), gone_to, ranges, None, selection.since, selection.until)


def _with_rewind(
    log: Headwater,
    selection: Selection,
    kept: list[KeptTopic],
    bound: Mapping[str, Range],
    *,
    start: int,
    gone_to: int,
) -> _Plan:
    """A group is rewound for what the log has: to be published is only what it has not."""
    ranges = {
        topic: (max(low, bound[topic][0]), min(high, bound[topic][1]))
        for archived in archived_ranges(kept, after=start, up_to=2**62).values()
        for topic, (low, high) in archived.items()
        if max(low, bound[topic][0]) < min(high, bound[topic][1])
    }
    uncleared = log.run(calls.uncleared_topics(sorted(ranges), after=start)) if ranges else []
    if uncleared:
        raise InvalidRequest(
            f"retention is still clearing away events of {', '.join(uncleared)}, which the rewind would bring as well",
            hint="Run headwater maintain until it sweeps nothing, then try again.",
        )
    up_to = max((high for _, high in ranges.values()), default=start)
    # Of the log it is known to the event where a time begins; of an archive, to the file.
    rewind_to = start if selection.since is None else log.run(calls.position_before(sorted(bound), selection.since))
    return _Plan(start, max(start, up_to), gone_to, ranges, rewind_to, selection.since, None)


def _topics(log: Headwater, selection: Selection, target: Target) -> dict[str, Range]:
    """The topics to read, each with the positions that count."""
    there = {topic.name for topic in log.run(calls.topics())}
    if isinstance(target, ToGroup):
        bound = target.bound(log)
        named = {}
        for name in there:
            taken = [bound[binding] for binding in (name, None) if binding in bound]
            if taken and not name.startswith(PRIVATE_PREFIX):
                named[name] = (min(low for low, _ in taken), max(high for _, high in taken))
    else:
        # The copy is not copied.
        own = target.name if isinstance(target, ToTopic) and selection.topics is None else None
        named = {name: (0, 2**62) for name in there if name != own}
    if selection.topics is None:
        return named
    for name in selection.topics:
        log.run(calls.find_topic(name))
    return {name: named[name] for name in selection.topics if name in named}


def _bound_ranges(log: Headwater, target: ToGroup, plan: _Plan) -> dict[str, Range]:
    """All that a rewound group gets again, from wherever."""
    wanted = _topics(log, Selection(), target)
    return {name: (max(plan.start_after, low), high) for name, (low, high) in wanted.items()}


def _part_end(log: Headwater, dsn: str, plan: _Plan, *, after: int, events: int) -> int:
    """Where a part of at most so many events ends, as a stream would cut it."""
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
    spark: SparkSession, dsn: str, selection: Selection, plan: _Plan, *, after: int, up_to: int
) -> DataFrame | None:
    """The chosen events of a part, in order within each partition and from one to the next; None: there can be none."""
    topics = [name for name, (low, high) in plan.ranges.items() if low < up_to and high > after]
    if not topics or after >= up_to:
        return None
    rows = (
        spark.read.format("headwater")
        .option("dsn", dsn)
        .option("topics", ",".join(sorted(topics)))
        .option("after", str(after))
        .option("upTo", str(up_to))
        # What was gone at the start is no loss; what goes later, refuse_gone tells.
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


def _share(ahead: list[Stretch], start: int, done_to: int) -> float:
    """How much of what was ahead is done."""
    total = sum(stretch.events for stretch in ahead)
    done = sum(
        stretch.events * min(1.0, max(0.0, (done_to - stretch.after) / (stretch.up_to - stretch.after)))
        for stretch in ahead
    )
    return 1.0 if total == 0 else done / total
