"""The format "headwater": the log as a table and a stream of Spark, to read and to write.

What retention took and an archive has is read from there. Where the one ends and the other begins is found out by each
task when it starts, and looked at again when it ends: who was overtaken by retention says so, and is run again.

Offsets of a stream are kept in Spark's checkpoint: each is the position of an event that was read, with its epoch. In
a later epoch, the batch between two offsets has the events between the last positions that both epochs share, which are
the same whenever it is repeated. If those are below the offsets, the log has lost events: see headwater.spark.epochs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from adbc_driver_manager import AdbcConnection
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

import headwater
from headwater import calls
from headwater.calls import Conditions, KeptTopic
from headwater.errors import EpochChanged, InvalidRequest, PositionExpired
from headwater.model import LogState
from headwater.spark import arrow
from headwater.spark.epochs import Offset, common_position, other_epoch
from headwater.spark.formats import archive_reader
from headwater.spark.formats.archive_reader import Wanted, archived_ranges, merged
from headwater.spark.formats.log_ranges import Range, Stretch, common, divide, united, windows
from headwater.spark.formats.log_writer import LogStreamWriter, LogWriter
from headwater.spark.formats.read_options import Pushed, ReadOptions, push, within

if TYPE_CHECKING:
    from headwater import Headwater

# A task of fewer positions costs more to start than to run.
LEAST_PER_PARTITION = 250_000
# Events of several topics are sorted by Postgres: this many fit into its memory, or nearly.
WINDOW = 50_000
# An event gets its position and its time in one statement. Longer than this, no statement publishes.
LONGEST_STATEMENT = timedelta(hours=1)
# Above every position: whatever is gone, it is no loss.
EVERYTHING = 2**62


@dataclass(frozen=True)
class PositionRanges(InputPartition):
    """What one task reads: whose events at which positions, and up to where it is no loss if some are gone."""

    topics: tuple[str, ...] | None
    ranges: tuple[Range, ...]
    """Where the log has had events."""
    gone_to: int
    conditions: Conditions = field(default_factory=Conditions)
    span: Range | None = None
    """All that is this task's to read, in the log or in an archive; None: no more than the ranges."""
    archive: bool = True
    epoch: int | None = None
    """The epoch in which this was planned: in another one it may stand for other events. None: whichever it is."""

    @property
    def whole(self) -> Range | None:
        if self.span is not None or not self.ranges:
            return self.span
        return self.ranges[0][0], self.ranges[-1][1]


def read_part(dsn: str, part: PositionRanges, schema: StructType) -> Iterator[pa.RecordBatch]:
    """The events of one task, settled and in order: from archives what retention took, from the log the rest."""
    if part.whole is None:
        return
    after, up_to = part.whole
    with arrow.connect(dsn) as connection:
        kept = _kept(connection, part)
        if part.topics is not None and len(part.topics) == 1:
            # One after the other, and retention may go on meanwhile.
            while archived := archived_ranges(kept, after=after, up_to=up_to):
                for location, ranges in archived.items():
                    yield from _archived(location, ranges, part.conditions, schema)
                after = min(up_to, max(topic.expired_to for topic in kept))
                kept = _kept(connection, part)
            scans = common(part.ranges, [(after, up_to)])
            yield from _scanned(connection, part, scans, schema)
        else:
            archived = archived_ranges(kept, after=after, up_to=up_to)
            streams = [_archived(location, ranges, part.conditions, schema) for location, ranges in archived.items()]
            yield from reduce(merged, [*streams, _scanned(connection, part, windows(part.ranges, WINDOW), schema)])
        refuse_overtaken(kept, _kept(connection, part), after=after, up_to=up_to)


def _kept(connection: AdbcConnection, part: PositionRanges) -> list[KeptTopic]:
    """What there is of the topics now, or PositionExpired if something that this task is to read is nowhere."""
    assert part.whole is not None
    present = arrow.answer(connection, calls.current_epoch())
    if part.epoch is not None and part.epoch != present:
        raise EpochChanged(
            f"the log is in epoch {present}, and this read was planned in epoch {part.epoch}",
            hint="Postgres crashed, failed over or was restored meanwhile. Read again.",
            detail={"epoch": present, "requested_epoch": part.epoch, "common_position": part.whole[0]},
        )
    kept = known_archives(arrow.answer(connection, calls.kept_topics(part.topics)), use=part.archive)
    refuse_lost(kept, after=max(part.whole[0], part.gone_to))
    return kept


def _archived(
    location: str, ranges: dict[str, Range], conditions: Conditions, schema: StructType
) -> Iterator[pa.RecordBatch]:
    # Here, since it imports pandas, which planning has no use for.
    from pyspark.sql.pandas.types import to_arrow_schema

    return archive_reader.events_of(location, Wanted(ranges, conditions), to_arrow_schema(schema, timezone="UTC"))


def _scanned(
    connection: AdbcConnection, part: PositionRanges, ranges: Iterable[Range], schema: StructType
) -> Iterator[pa.RecordBatch]:
    for after, up_to in ranges:
        if part.topics is not None and len(part.topics) == 1:
            (topic,) = part.topics
            columns = calls.scan_columns(topic, after=after, up_to=up_to, conditions=part.conditions)
            yield from arrow.batches(connection, columns, schema, constants={"topic": topic})
        else:
            call = calls.scan(part.topics, after=after, up_to=up_to, conditions=part.conditions)
            yield from arrow.batches(connection, call, schema)


def known_archives(kept: list[KeptTopic], *, use: bool) -> list[KeptTopic]:
    """The same, as it is for somebody who does not look into archives unless `use`."""
    return kept if use else [replace(topic, location=None, lost_to=topic.expired_to) for topic in kept]


def refuse_lost(kept: Iterable[KeptTopic], *, after: int) -> None:
    """PositionExpired if events after this position are nowhere any more."""
    lost = max((topic for topic in kept if topic.lost_to > after), key=lambda topic: topic.lost_to, default=None)
    if lost is not None:
        raise PositionExpired(
            f'events of topic "{lost.topic}" after position {after} are gone, up to {lost.lost_to}',
            hint="Go on from the earliest position, or read with the option skipExpired.",
            detail={"earliest_position": lost.lost_to + 1, "topic": lost.topic},
        )


def refuse_overtaken(before: Iterable[KeptTopic], now: Iterable[KeptTopic], *, after: int, up_to: int) -> None:
    """PositionExpired if retention took, meanwhile, events that were to be read from the log and are in an archive."""
    expired_before = {topic.topic: topic.expired_to for topic in before}
    for topic in now:
        passed = expired_before.get(topic.topic, 0)
        if topic.location is not None and topic.expired_to > max(passed, after) and passed < up_to:
            raise PositionExpired(
                f'retention took events of topic "{topic.topic}" while they were read',
                hint="They are in the archive: read again.",
                detail={"earliest_position": topic.lost_to + 1, "topic": topic.topic},
            )


def plan(
    log: Headwater, part: PositionRanges, kept: list[KeptTopic], *, after: int, up_to: int, pieces: int, least: int
) -> list[PositionRanges]:
    """A range shared out among tasks that are otherwise like this one. Spark wants one at least."""
    if after >= up_to:
        return [part]
    drawn = log.run(calls.drawn_ranges(after=after, up_to=up_to))
    whole = united([*_of_log(drawn), *_of_archives(kept, after=after, up_to=up_to)])
    shared = divide(whole, pieces=pieces, least=least)
    return [
        replace(part, ranges=tuple(common(piece, drawn)), span=(piece[0][0], piece[-1][1])) for piece in shared
    ] or [part]


def stretches(log: Headwater, kept: Sequence[KeptTopic], *, after: int, up_to: int) -> list[Stretch]:
    """Where in a range there may be events, and how many."""
    if after >= up_to:
        return []
    drawn = log.run(calls.drawn_ranges(after=after, up_to=up_to))
    return united([*_of_log(drawn), *_of_archives(kept, after=after, up_to=up_to)])


def _of_log(drawn: Iterable[Range]) -> Iterator[Stretch]:
    return (Stretch(start, end, end - start) for start, end in drawn)


def _of_archives(kept: Iterable[KeptTopic], *, after: int, up_to: int) -> Iterator[Stretch]:
    for location, ranges in archived_ranges(kept, after=after, up_to=up_to).items():
        low, high = Wanted(ranges, Conditions()).hull
        for file in archive_reader.files_of(location, after=low, up_to=high):
            start, end = max(file.first - 1, low), min(file.last, high)
            yield Stretch(start, end, max(1, file.events * (end - start) // (file.last - file.first + 1)))


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
            # Before what is kept, since retention may go on meanwhile: a task looks again.
            state = log.run(calls.log_state(topics))
            up_to = state.settled
            kept = known_archives(log.run(calls.kept_topics(topics)), use=options.archive)
            after, gone_to = start_of(log, options, topics, kept, state)
            if options.after is not None and not options.skip_expired:
                refuse_lost(kept, after=after)
            conditions = within(pushed.conditions, options.since, options.until)
            if conditions.published_from is not None:
                after = max(after, position_before(log, topics, kept, conditions.published_from))
            if conditions.published_before is not None:
                last = conditions.published_before + LONGEST_STATEMENT
                up_to = min(up_to, log.run(calls.position_before(topics, last)))
            after = max(after, pushed.after)
            up_to = min(limit for limit in (up_to, options.up_to, pushed.up_to) if limit is not None)
            return plan(
                log,
                PositionRanges(topics, (), gone_to, conditions, archive=options.archive, epoch=state.epoch),
                kept,
                after=after,
                up_to=up_to,
                pieces=options.partitions or 64,
                least=1 if options.partitions else LEAST_PER_PARTITION,
            )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, PositionRanges)
        return read_part(self.options.dsn, partition, self.schema)


def chosen_topics(
    log: Headwater, named: tuple[str, ...] | None, pushed: frozenset[str] | None
) -> tuple[str, ...] | None:
    """The topics to read: those of the option, less what a condition excludes. None stands for the whole log."""
    if pushed is None:
        return named
    # A condition may name a topic that is not there, which only means that nothing is found.
    there = named if named is not None else [topic.name for topic in log.run(calls.topics())]
    return tuple(name for name in there if name in pushed)


def start_of(
    log: Headwater, options: ReadOptions, topics: Sequence[str] | None, kept: Sequence[KeptTopic], state: LogState
) -> tuple[int, int]:
    """Where a read begins, and up to where it knows that events are gone."""
    if options.from_end:
        return state.settled, state.settled
    if options.after is not None:
        after = options.after
        if options.epoch is not None and options.epoch != state.epoch:
            # A reader's own position, which need not be that of an event.
            after = log.run(calls.common_position(options.epoch, options.after))
            if after < options.after and options.on_epoch_change == "stop":
                raise other_epoch(Offset(options.after, options.epoch), present=state.epoch, common=after)
        if after > state.drawn:
            raise EpochChanged(
                f"position {after} was never issued in epoch {state.epoch}: the head of the log is {state.drawn}",
                hint="It is of another log, or of a history that was lost. Read from a position of this log.",
                detail={"epoch": state.epoch, "requested_epoch": options.epoch, "common_position": state.drawn},
            )
        return after, EVERYTHING if options.skip_expired else 0
    gone_to = EVERYTHING if options.skip_expired else max((topic.lost_to for topic in kept), default=0)
    after = 0 if options.since is None else position_before(log, topics, kept, options.since)
    return after, gone_to


def position_before(log: Headwater, topics: Sequence[str] | None, kept: Sequence[KeptTopic], at: datetime) -> int:
    """A position to read after in order to get every event published at that time or later, from wherever it is."""
    found = log.run(calls.position_before(topics, at))
    for location, ranges in archived_ranges(kept, after=0, up_to=found).items():
        low, high = Wanted(ranges, Conditions()).hull
        archived = archive_reader.position_before(archive_reader.files_of(location, after=low, up_to=high), at)
        found = found if archived is None else min(found, archived)
    return found


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream read. Its offsets are positions of events that were stable, so nothing can appear below one later."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.up_to is not None or options.until is not None:
            raise InvalidRequest("a stream has no end: upTo and until are for batch reads")
        self.options = options
        self.schema = schema
        self.target: int | None = None
        self._target_epoch: int | None = None
        self._log: Headwater | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_log": None}

    def _connected(self) -> Headwater:
        if self._log is None:
            self._log = headwater.connect(self.options.dsn, pool_size=1)
        return self._log

    def _kept(self) -> list[KeptTopic]:
        return known_archives(self._connected().run(calls.kept_topics(self.options.topics)), use=self.options.archive)

    def _state(self) -> LogState:
        """How far this stream may read; EpochChanged if the query was to run in another epoch."""
        state = self._connected().run(calls.log_state(self.options.topics))
        if self.options.in_epoch is not None and state.epoch != self.options.in_epoch:
            raise EpochChanged(
                f"the log is in epoch {state.epoch}, and the query was started in epoch {self.options.in_epoch}",
                hint="Postgres crashed, failed over or was restored. Start the query again.",
                detail={"epoch": state.epoch, "requested_epoch": self.options.in_epoch, "common_position": 0},
            )
        return state

    def _resolved(self, offset: dict[str, int], state: LogState) -> int:
        """An offset as a position of the present epoch; EpochChanged if its event is lost, unless to be rewound."""
        kept = Offset(offset["position"], offset.get("epoch"))
        if kept.epoch in (None, state.epoch):
            return kept.position
        common = common_position(self._connected(), kept, self.options.topics)
        if common < kept.position and self.options.on_epoch_change == "stop":
            raise other_epoch(kept, present=state.epoch, common=common)
        return common

    def initialOffset(self) -> dict[str, int]:
        log, topics, state = self._connected(), self.options.topics, self._state()
        position, gone_to = start_of(log, self.options, topics, self._kept(), state)
        if position <= state.settled:
            # The same place, said by an event: see above.
            position = log.run(calls.last_event_position(topics, up_to=position))
        return {"position": position, "gone_to": gone_to, "epoch": state.epoch}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.max_events)

    def prepareForTriggerAvailableNow(self) -> None:
        _, self.target, self._target_epoch = self._state()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """The end of the next batch; waits a while for one to begin, since Spark would ask again at once."""
        log = self._connected()
        max_events = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        deadline = time.monotonic() + (0 if self.target is not None else self.options.wait_seconds)
        pause = 0.01
        while True:
            state = self._state()
            after = self._resolved(start, state)
            settled = state.settled
            if self.target is not None and self._target_epoch in (None, state.epoch):
                settled = min(settled, self.target)
            if settled > after:
                end = self._batch_end(log, after=after, settled=settled, max_events=max_events)
                if end is not None:
                    return {**start, "position": end, "epoch": state.epoch}
            # Only the head is asked for while nothing is in flight: that takes no snapshot and looks at no lock.
            while (left := deadline - time.monotonic()) > 0:
                log.do_upkeep()
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, 0.1)
                # Not "above": a crash may take the head back.
                if state.settled < state.drawn or log.run(calls.head()) != state.drawn:
                    break
            else:
                return start

    def _batch_end(self, log: Headwater, *, after: int, settled: int, max_events: int | None) -> int | None:
        """How far a batch reaches, by both limits; None: there is nothing for it."""
        topics, max_bytes = self.options.topics, self.options.max_bytes
        most = max_events
        if max_bytes is not None:
            # As many events as fit if they are as large as the next ones.
            average = log.run(calls.average_bytes(topics, after=after, up_to=settled))
            fitting = max(1, max_bytes // max(1, average))
            most = fitting if max_events is None else min(max_events, fitting)
        end = log.run(calls.batch_end(topics, after=after, settled=settled, max_events=most))
        if not self.options.archive or after >= log.run(calls.expired_to(topics)):
            return end
        for location, ranges in archived_ranges(self._kept(), after=after, up_to=settled).items():
            limited = archive_reader.batch_end(location, ranges, max_events=max_events, max_bytes=max_bytes)
            if limited is None and end is None:
                # All of it fits, and the log has nothing more.
                limited = Wanted(ranges, Conditions()).hull[1]
            end = min(bound for bound in (limited, end) if bound is not None)
        return end

    def reportLatestOffset(self) -> dict[str, int]:
        state = self._state()
        return {"position": state.settled, "epoch": state.epoch}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        state = self._state()
        after, up_to = self._resolved(start, state), self._resolved(end, state)
        gone_to = EVERYTHING if self.options.skip_expired else start["gone_to"]
        kept = self._kept()
        refuse_lost(kept, after=max(after, gone_to))
        asked = self.options.partitions
        conditions = within(Conditions(), self.options.since, None)
        return plan(
            self._connected(),
            PositionRanges(
                self.options.topics, (), gone_to, conditions, archive=self.options.archive, epoch=state.epoch
            ),
            kept,
            after=after,
            up_to=up_to,
            pieces=asked or 8,
            least=1 if asked else LEAST_PER_PARTITION,
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, PositionRanges)
        return read_part(self.options.dsn, partition, self.schema)

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
