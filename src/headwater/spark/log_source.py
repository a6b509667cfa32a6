"""The format "headwater": the log as a table and a stream of Spark, to read and to write."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

import headwater
from headwater import calls
from headwater.calls import Conditions
from headwater.errors import InvalidRequest
from headwater.spark import arrow
from headwater.spark.log_sink import LogStreamWriter, LogWriter

if TYPE_CHECKING:
    from headwater import Headwater

Range = tuple[int, int]
"""Positions after the first number, up to the second."""

READ_OPTIONS = (
    "dsn",
    "topics",
    "after",
    "since",
    "fromEnd",
    "upTo",
    "until",
    "skipExpired",
    "partitions",
    "maxEventsPerTrigger",
    "waitSeconds",
)

# A task of fewer positions costs more to start than to run.
LEAST_PER_PARTITION = 50_000
# Events of several topics are sorted by Postgres: this many fit into its memory, or nearly.
WINDOW = 50_000
# An event gets its position and its time in one statement. Longer than this, no statement publishes.
LONGEST_STATEMENT = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What the options of a read say."""

    dsn: str
    topics: tuple[str, ...] | None
    after: int | None
    since: datetime | None
    from_end: bool
    up_to: int | None
    until: datetime | None
    skip_expired: bool
    partitions: int | None
    max_events: int
    wait_seconds: float

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        known = {name.lower() for name in READ_OPTIONS}
        # Spark adds a path where one was given to load(), and nothing else.
        unknown = sorted(name for name in options if name.lower() not in known)
        if unknown:
            raise InvalidRequest(
                f"unknown options for reading: {', '.join(unknown)}", hint=f"Known are {', '.join(READ_OPTIONS)}."
            )
        given = {name: options[name] for name in READ_OPTIONS if name in options}
        parsed = cls(
            dsn=required_dsn(options),
            topics=_names(given.get("topics")),
            after=_whole_number("after", given.get("after"), least=0),
            since=_time("since", given.get("since")),
            from_end=_truth("fromEnd", given.get("fromEnd")),
            up_to=_whole_number("upTo", given.get("upTo"), least=0),
            until=_time("until", given.get("until")),
            skip_expired=_truth("skipExpired", given.get("skipExpired")),
            partitions=_whole_number("partitions", given.get("partitions"), least=1),
            max_events=_whole_number("maxEventsPerTrigger", given.get("maxEventsPerTrigger"), least=1) or 1_000_000,
            wait_seconds=float(_whole_number("waitSeconds", given.get("waitSeconds"), least=0, default=5) or 0),
        )
        if (parsed.after is not None) + (parsed.since is not None) + parsed.from_end > 1:
            raise InvalidRequest("say where to start once: after, since or fromEnd")
        return parsed


def required_dsn(options: Mapping[str, str]) -> str:
    if "dsn" not in options:
        raise InvalidRequest(
            'the format "headwater" needs the option dsn', hint='Add .option("dsn", "postgresql://...").'
        )
    return options["dsn"]


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidRequest("the option topics names none", hint="Leave it out to read the whole log.")
    return names


def _whole_number(name: str, text: str | None, *, least: int, default: int | None = None) -> int | None:
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise InvalidRequest(f"the option {name} is {text!r}, not a whole number from {least}")
    return int(text)


def _truth(name: str, text: str | None) -> bool:
    if text is None or text.lower() in ("true", "false"):
        return (text or "").lower() == "true"
    raise InvalidRequest(f"the option {name} is {text!r}, neither true nor false")


def _time(name: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"the option {name} is {text!r}, not a time like 2026-01-31T12:00:00Z") from None
    if at.tzinfo is None:
        raise InvalidRequest(f"the option {name} needs a time zone: {text}Z, if it is UTC")
    return at


@dataclass(frozen=True, slots=True)
class Pushed:
    """The part of a query's conditions that Postgres can answer."""

    topics: frozenset[str] | None = None
    after: int = 0
    up_to: int | None = None
    conditions: Conditions = field(default_factory=Conditions)


def push(filters: Iterable[Filter]) -> tuple[Pushed, list[Filter]]:
    """What of these conditions, all of which must hold, Postgres takes over; and which Spark has to see to."""
    pushed = Pushed()
    left: list[Filter] = []
    for condition in filters:
        taken = _take(pushed, condition)
        if taken is None:
            left.append(condition)
        else:
            pushed = taken
    return pushed, left


def _take(pushed: Pushed, condition: Filter) -> Pushed | None:
    attribute: tuple[str, ...] = getattr(condition, "attribute", ())
    if len(attribute) != 1:
        return None
    column = attribute[0]
    if column == "position":
        return _take_position(pushed, condition)
    if column == "published_at":
        return _take_time(pushed, condition)
    values: Sequence[Any]
    if isinstance(condition, EqualTo):
        values = (condition.value,)
    elif isinstance(condition, In):
        values = tuple(condition.value)
    else:
        return None
    asked = pushed.conditions
    if column == "key" and all(isinstance(value, (bytes, bytearray)) for value in values):
        keys = {bytes(value) for value in values}
        keys = keys if asked.keys is None else keys & set(asked.keys)
        return replace(pushed, conditions=replace(asked, keys=tuple(sorted(keys))))
    if not all(isinstance(value, str) for value in values):
        return None
    if column == "topic":
        names = frozenset(values)
        return replace(pushed, topics=names if pushed.topics is None else pushed.topics & names)
    if column == "type":
        types = set(values) if asked.types is None else set(values) & set(asked.types)
        return replace(pushed, conditions=replace(asked, types=tuple(sorted(types))))
    return None


def _take_position(pushed: Pushed, condition: Filter) -> Pushed | None:
    value = getattr(condition, "value", None)
    if not isinstance(value, int):
        return None
    after, up_to = pushed.after, pushed.up_to

    def not_above(limit: int) -> int:
        return limit if up_to is None else min(up_to, limit)

    match condition:
        case EqualTo():
            return replace(pushed, after=max(after, value - 1), up_to=not_above(value))
        case GreaterThan():
            return replace(pushed, after=max(after, value))
        case GreaterThanOrEqual():
            return replace(pushed, after=max(after, value - 1))
        case LessThan():
            return replace(pushed, up_to=not_above(value - 1))
        case LessThanOrEqual():
            return replace(pushed, up_to=not_above(value))
    return None


def _take_time(pushed: Pushed, condition: Filter) -> Pushed | None:
    value = getattr(condition, "value", None)
    if not isinstance(value, datetime):
        return None
    # Spark's own times are UTC, whether they say so or not.
    at = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    asked = pushed.conditions
    tick = timedelta(microseconds=1)
    match condition:
        case GreaterThan():
            asked = replace(asked, published_from=_later(asked.published_from, at + tick))
        case GreaterThanOrEqual():
            asked = replace(asked, published_from=_later(asked.published_from, at))
        case LessThan():
            asked = replace(asked, published_before=_earlier(asked.published_before, at))
        case LessThanOrEqual():
            asked = replace(asked, published_before=_earlier(asked.published_before, at + tick))
        case _:
            return None
    return replace(pushed, conditions=asked)


def _later(one: datetime | None, other: datetime) -> datetime:
    return other if one is None else max(one, other)


def _earlier(one: datetime | None, other: datetime) -> datetime:
    return other if one is None else min(one, other)


def divide(ranges: Iterable[Range], *, pieces: int, least: int) -> list[list[Range]]:
    """Ranges shared out in order among at most so many pieces, alike in size and none without need below `least`."""
    whole = list(ranges)
    total = sum(up_to - after for after, up_to in whole)
    if total == 0:
        return []
    size = max(least, -(-total // pieces))
    shared: list[list[Range]] = [[]]
    room = size
    for start, up_to in whole:
        after = start
        while after < up_to:
            if room == 0:
                shared.append([])
                room = size
            end = min(up_to, after + room)
            shared[-1].append((after, end))
            room -= end - after
            after = end
    return shared


def windows(ranges: Iterable[Range], size: int) -> Iterator[Range]:
    """The same positions in ranges of at most this size."""
    for start, up_to in ranges:
        for after in range(start, up_to, size):
            yield after, min(up_to, after + size)


@dataclass(frozen=True)
class PositionRanges(InputPartition):
    """What one task reads: whose events at which positions, and up to where it is no loss if some are gone."""

    topics: tuple[str, ...] | None
    ranges: tuple[Range, ...]
    gone_to: int
    conditions: Conditions = field(default_factory=Conditions)


def read_ranges(dsn: str, part: PositionRanges, schema: StructType) -> Iterator[pa.RecordBatch]:
    """The events of some ranges, all of them settled."""
    if not part.ranges:
        return
    topics = part.topics
    one_topic = topics is not None and len(topics) == 1
    with arrow.connect(dsn) as connection:
        for after, up_to in part.ranges if one_topic else windows(part.ranges, WINDOW):
            call = calls.scan(topics, after=after, up_to=up_to, conditions=part.conditions)
            yield from arrow.batches(connection, call, schema)
        # Afterwards, since retention may come between planning and reading.
        arrow.run(connection, calls.refuse_expired(topics, after=max(part.ranges[0][0], part.gone_to)))


class LogReader(DataSourceReader):
    """A batch read: what is settled when it is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema
        self.pushed = Pushed()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self.pushed, left = push(filters)
        return left

    def partitions(self) -> Sequence[InputPartition]:
        # What is found out here travels with the partitions: tasks may have this object as it was before.
        options, pushed = self.options, self.pushed
        with headwater.connect(options.dsn, pool_size=1) as log:
            topics = chosen_topics(log, options.topics, pushed.topics)
            if topics == ():
                return [PositionRanges((), (), 0)]
            after, gone_to = start_of(log, options, topics)
            if options.after is not None and not options.skip_expired:
                log.run(calls.refuse_expired(topics, after=after))
            conditions = within(pushed.conditions, options.since, options.until)
            up_to = log.run(calls.log_state()).settled
            if conditions.published_from is not None:
                after = max(after, log.run(calls.position_before(topics, conditions.published_from)))
            if conditions.published_before is not None:
                last = conditions.published_before + LONGEST_STATEMENT
                up_to = min(up_to, log.run(calls.position_before(topics, last)))
            after = max(after, pushed.after)
            up_to = min(limit for limit in (up_to, options.up_to, pushed.up_to) if limit is not None)
            ranges = log.run(calls.drawn_ranges(after=after, up_to=up_to)) if after < up_to else []
        shared = divide(ranges, pieces=options.partitions or 64, least=1 if options.partitions else LEAST_PER_PARTITION)
        # Spark wants one partition at least.
        return [PositionRanges(topics, tuple(piece), gone_to, conditions) for piece in shared or [[]]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, PositionRanges)
        return read_ranges(self.options.dsn, partition, self.schema)


def chosen_topics(
    log: Headwater, named: tuple[str, ...] | None, pushed: frozenset[str] | None
) -> tuple[str, ...] | None:
    """The topics to read: those of the option, less what a condition excludes. None stands for the whole log."""
    if pushed is None:
        return named
    # A condition may name a topic that is not there, which only means that nothing is found.
    there = named if named is not None else [topic.name for topic in log.run(calls.topics())]
    return tuple(name for name in there if name in pushed)


def start_of(log: Headwater, options: ReadOptions, topics: Sequence[str] | None) -> tuple[int, int]:
    """Where a read begins, and up to where it knows that events are gone."""
    if options.from_end:
        settled = log.run(calls.log_state()).settled
        return settled, settled
    if options.after is not None:
        return options.after, 2**62 if options.skip_expired else 0
    gone_to = 2**62 if options.skip_expired else log.run(calls.expired_to(topics))
    after = 0 if options.since is None else log.run(calls.position_before(topics, options.since))
    return after, gone_to


def within(conditions: Conditions, since: datetime | None, until: datetime | None) -> Conditions:
    """The conditions, and the times that the options name."""
    if since is not None:
        conditions = replace(conditions, published_from=_later(conditions.published_from, since))
    if until is not None:
        conditions = replace(conditions, published_before=_earlier(conditions.published_before, until))
    return conditions


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream read. Its offsets are settled positions, so nothing can appear below one later."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.up_to is not None or options.until is not None:
            raise InvalidRequest("a stream has no end: upTo and until are for batch reads")
        self.options = options
        self.schema = schema
        self.target: int | None = None
        self._log: Headwater | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_log": None}

    def _connected(self) -> Headwater:
        if self._log is None:
            self._log = headwater.connect(self.options.dsn, pool_size=1)
        return self._log

    def initialOffset(self) -> dict[str, int]:
        position, gone_to = start_of(self._connected(), self.options, self.options.topics)
        return {"position": position, "gone_to": gone_to}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.max_events)

    def prepareForTriggerAvailableNow(self) -> None:
        self.target = self._connected().run(calls.log_state()).settled

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """The end of the next batch; waits a while for one to begin, since Spark would ask again at once."""
        log = self._connected()
        max_events = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        deadline = time.monotonic() + (0 if self.target is not None else self.options.wait_seconds)
        pause = 0.01
        while True:
            state = log.run(calls.log_state())
            settled = state.settled if self.target is None else min(state.settled, self.target)
            if settled > start["position"]:
                end = log.run(
                    calls.batch_end(
                        self.options.topics, after=start["position"], settled=settled, max_events=max_events
                    )
                )
                if end is not None:
                    return {**start, "position": end}
            # Only the head is asked for while nothing is in flight: that takes no snapshot and looks at no lock.
            while (left := deadline - time.monotonic()) > 0:
                log.do_upkeep()
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, 0.1)
                if state.settled < state.drawn or log.run(calls.head()) > state.drawn:
                    break
            else:
                return start

    def reportLatestOffset(self) -> dict[str, int]:
        return {"position": self._connected().run(calls.log_state()).settled}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        log = self._connected()
        after, up_to = start["position"], end["position"]
        gone_to = 2**62 if self.options.skip_expired else start["gone_to"]
        log.run(calls.refuse_expired(self.options.topics, after=max(after, gone_to)))
        ranges = log.run(calls.drawn_ranges(after=after, up_to=up_to)) if after < up_to else []
        asked = self.options.partitions
        shared = divide(ranges, pieces=asked or 8, least=1 if asked else LEAST_PER_PARTITION)
        conditions = within(Conditions(), self.options.since, None)
        return [PositionRanges(self.options.topics, tuple(piece), gone_to, conditions) for piece in shared or [[]]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, PositionRanges)
        return read_ranges(self.options.dsn, partition, self.schema)

    def stop(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


class LogSource(DataSource):
    """The log. Reads need `dsn`; writes need it too, and a topic."""

    @classmethod
    def name(cls) -> str:
        return "headwater"

    def schema(self) -> StructType:
        return arrow.EVENT

    def reader(self, schema: StructType) -> LogReader:
        return LogReader(ReadOptions.parse(self.options), schema)

    def streamReader(self, schema: StructType) -> LogStreamReader:
        return LogStreamReader(ReadOptions.parse(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> LogWriter:
        return LogWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> LogStreamWriter:
        return LogStreamWriter(self.options, schema)
