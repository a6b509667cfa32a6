"""The format "headwater": the log as a Spark table and stream, for reads and writes.

Events removed by retention are read from archives. Each task determines the boundary between archive and log when it
starts, and checks it again when it ends: if retention overtook it, it raises PositionExpired, and Spark retries it.

The offsets of a stream are in Spark's checkpoint: each is the position of an event that was read, with its epoch. In a
later epoch, the batch between two offsets has the events between the last positions that both epochs share, which are
the same at each retry. If those are below the offsets, the log has lost events: see headwater.spark.epochs.
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
from headwater.calls import archives as archive_calls
from headwater.calls import archives as archives_calls
from headwater.calls import log as log_calls
from headwater.calls import pipelines
from headwater.calls import pipelines as pipelines_calls
from headwater.calls import reading as reading_calls
from headwater.calls.archives import TopicCoverage
from headwater.calls.pipelines import Filters
from headwater.errors import EpochChanged, InvalidRequest, PositionExpired
from headwater.log.model import LogState
from headwater.spark import arrow
from headwater.spark.epochs import Offset, common_position, epoch_changed_error
from headwater.spark.formats import archive_reader
from headwater.spark.formats.archive_reader import ArchiveSelection, archived_ranges, merge_sorted
from headwater.spark.formats.log_ranges import EstimatedRange, Range, divide, intersect, merge_ranges, split_ranges
from headwater.spark.formats.log_writer import LogStreamWriter, LogWriter
from headwater.spark.formats.read_options import PushedFilters, ReadOptions, add_time_range, push

if TYPE_CHECKING:
    from headwater import Headwater

# Starting a task for fewer positions costs more than running it.
MIN_POSITIONS_PER_TASK = 250_000
# Postgres sorts the events of several topics: about this many fit into its memory.
WINDOW = 50_000
# An event gets its position and its time in one statement. No publishing statement runs longer than this.
MAX_STATEMENT_DURATION = timedelta(hours=1)
# Above every position: missing events are not an error.
NO_LIMIT = 2**62


@dataclass(frozen=True)
class PositionRanges(InputPartition):
    """The input of one task: topics, ranges of positions, and the position up to which events may be missing."""

    topics: tuple[str, ...] | None
    ranges: tuple[Range, ...]
    """Ranges of the log that have or had events."""
    gone_to: int
    filters: Filters = field(default_factory=Filters)
    span: Range | None = None
    """Everything that this task has to read, in the log or in an archive; None: only the ranges."""
    archive: bool = True
    epoch: int | None = None
    """The epoch in which this was planned: in another epoch the positions may be other events. None: any epoch."""

    @property
    def whole(self) -> Range | None:
        if self.span is not None or not self.ranges:
            return self.span
        return self.ranges[0][0], self.ranges[-1][1]


def read_part(dsn: str, part: PositionRanges, schema: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the events of one task, stable and in order, from archives and the log."""
    if part.whole is None:
        return
    after, up_to = part.whole
    with arrow.connect(dsn) as connection:
        kept = _retention_state(connection, part)
        if part.topics is not None and len(part.topics) == 1:
            # First the archives, then the log. Retention may continue meanwhile.
            while archived := archived_ranges(kept, after=after, up_to=up_to):
                for location, ranges in archived.items():
                    yield from _read_archive(location, ranges, part.filters, schema)
                after = min(up_to, max(topic.expired_to for topic in kept))
                kept = _retention_state(connection, part)
            scans = intersect(part.ranges, [(after, up_to)])
            yield from _scan(connection, part, scans, schema)
        else:
            archived = archived_ranges(kept, after=after, up_to=up_to)
            streams = [_read_archive(location, ranges, part.filters, schema) for location, ranges in archived.items()]
            yield from reduce(
                merge_sorted, [*streams, _scan(connection, part, split_ranges(part.ranges, WINDOW), schema)]
            )
        refuse_overtaken(kept, _retention_state(connection, part), after=after, up_to=up_to)


def _retention_state(connection: AdbcConnection, part: PositionRanges) -> list[TopicCoverage]:
    """The retention state of the topics; PositionExpired if events of this task are neither in the log nor archived."""
    assert part.whole is not None
    present = arrow.fetch(connection, log_calls.current_epoch())
    if part.epoch is not None and part.epoch != present:
        raise EpochChanged(
            f"the log is in epoch {present}, but this read was planned in epoch {part.epoch}",
            hint="Postgres crashed, failed over or was restored meanwhile. Repeat the read.",
            detail={"epoch": present, "requested_epoch": part.epoch, "common_position": part.whole[0]},
        )
    kept = known_archives(arrow.fetch(connection, archives_calls.kept_topics(part.topics)), use=part.archive)
    refuse_lost(kept, after=max(part.whole[0], part.gone_to))
    return kept


def _read_archive(
    location: str, ranges: dict[str, Range], filters: Filters, schema: StructType
) -> Iterator[pa.RecordBatch]:
    # Imported here because it imports pandas, which planning does not need.
    from pyspark.sql.pandas.types import to_arrow_schema

    return archive_reader.events_of(
        location, ArchiveSelection(ranges, filters), to_arrow_schema(schema, timezone="UTC")
    )


def _scan(
    connection: AdbcConnection, part: PositionRanges, ranges: Iterable[Range], schema: StructType
) -> Iterator[pa.RecordBatch]:
    for after, up_to in ranges:
        if part.topics is not None and len(part.topics) == 1:
            (topic,) = part.topics
            columns = pipelines.scan_columns(topic, after=after, up_to=up_to, filters=part.filters)
            yield from arrow.batches(connection, columns, schema, constants={"topic": topic})
        else:
            call = pipelines.scan(part.topics, after=after, up_to=up_to, filters=part.filters)
            yield from arrow.batches(connection, call, schema)


def known_archives(kept: list[TopicCoverage], *, use: bool) -> list[TopicCoverage]:
    """The retention state; without `use`, as if there were no archives."""
    return kept if use else [replace(topic, location=None, lost_to=topic.expired_to) for topic in kept]


def refuse_lost(kept: Iterable[TopicCoverage], *, after: int) -> None:
    """Raise PositionExpired if events after this position are neither in the log nor archived."""
    lost = max((topic for topic in kept if topic.lost_to > after), key=lambda topic: topic.lost_to, default=None)
    if lost is not None:
        raise PositionExpired(
            f'retention removed events of topic "{lost.topic}" after position {after}, up to {lost.lost_to}',
            hint="Continue from the earliest position, or read with the option skipExpired.",
            detail={"earliest_position": lost.lost_to + 1, "topic": lost.topic},
        )


def refuse_overtaken(before: Iterable[TopicCoverage], now: Iterable[TopicCoverage], *, after: int, up_to: int) -> None:
    """Raise PositionExpired if retention meanwhile moved events from the log to an archive before they were read."""
    expired_before = {topic.topic: topic.expired_to for topic in before}
    for topic in now:
        passed = expired_before.get(topic.topic, 0)
        if topic.location is not None and topic.expired_to > max(passed, after) and passed < up_to:
            raise PositionExpired(
                f'retention removed events of topic "{topic.topic}" while they were read',
                hint="They are in the archive: repeat the read.",
                detail={"earliest_position": topic.lost_to + 1, "topic": topic.topic},
            )


def plan(
    log: Headwater, part: PositionRanges, kept: list[TopicCoverage], *, after: int, up_to: int, pieces: int, least: int
) -> list[PositionRanges]:
    """Divide a range among tasks that are otherwise like `part`. Spark requires at least one."""
    if after >= up_to:
        return [part]
    assigned = log.run(pipelines_calls.assigned_ranges(after=after, up_to=up_to))
    whole = merge_ranges([*_of_log(assigned), *_of_archives(kept, after=after, up_to=up_to)])
    return [
        replace(part, ranges=tuple(intersect(piece, assigned)), span=(piece[0][0], piece[-1][1]))
        for piece in divide(whole, pieces=pieces, least=least)
    ] or [part]


def estimate_ranges(log: Headwater, kept: Sequence[TopicCoverage], *, after: int, up_to: int) -> list[EstimatedRange]:
    """The parts of a range that may have events, with estimates of their number."""
    if after >= up_to:
        return []
    assigned = log.run(pipelines_calls.assigned_ranges(after=after, up_to=up_to))
    return merge_ranges([*_of_log(assigned), *_of_archives(kept, after=after, up_to=up_to)])


def _of_log(assigned: Iterable[Range]) -> Iterator[EstimatedRange]:
    return (EstimatedRange(start, end, end - start) for start, end in assigned)


def _of_archives(kept: Iterable[TopicCoverage], *, after: int, up_to: int) -> Iterator[EstimatedRange]:
    for location, ranges in archived_ranges(kept, after=after, up_to=up_to).items():
        low, high = ArchiveSelection(ranges, Filters()).hull
        for file in archive_reader.files_of(location, after=low, up_to=high):
            start, end = max(file.first - 1, low), min(file.last, high)
            yield EstimatedRange(start, end, max(1, file.events * (end - start) // (file.last - file.first + 1)))


class LogReader(DataSourceReader):
    """A batch read of the events that are stable when it is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema
        self.pushed = PushedFilters()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self.pushed, left = push(filters)
        return left

    def partitions(self) -> Sequence[InputPartition]:
        # Pass all results in the partitions: tasks may have a copy of this object from before this call.
        options, pushed = self.options, self.pushed
        with headwater.connect(options.dsn, pool_size=1) as log:
            topics = chosen_topics(log, options.topics, pushed.topics)
            if topics == ():
                return [PositionRanges((), (), 0)]
            # Read before the retention state, which may change meanwhile: tasks check again.
            state = log.run(log_calls.log_state(topics))
            up_to = state.stable
            kept = known_archives(log.run(archive_calls.kept_topics(topics)), use=options.archive)
            after, gone_to = start_of(log, options, topics, kept, state)
            if options.after is not None and not options.skip_expired:
                refuse_lost(kept, after=after)
            filters = add_time_range(pushed.filters, options.since, options.until)
            if filters.published_from is not None:
                after = max(after, position_before(log, topics, kept, filters.published_from))
            if filters.published_before is not None:
                last = filters.published_before + MAX_STATEMENT_DURATION
                up_to = min(up_to, log.run(reading_calls.position_before(topics, last)))
            after = max(after, pushed.after)
            up_to = min(limit for limit in (up_to, options.up_to, pushed.up_to) if limit is not None)
            return plan(
                log,
                PositionRanges(topics, (), gone_to, filters, archive=options.archive, epoch=state.epoch),
                kept,
                after=after,
                up_to=up_to,
                pieces=options.partitions or 64,
                least=1 if options.partitions else MIN_POSITIONS_PER_TASK,
            )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, PositionRanges)
        return read_part(self.options.dsn, partition, self.schema)


def chosen_topics(
    log: Headwater, named: tuple[str, ...] | None, pushed: frozenset[str] | None
) -> tuple[str, ...] | None:
    """The topics to read: those of the option, without those that a filter excludes. None means the whole log."""
    if pushed is None:
        return named
    # A filter may name a topic that does not exist: it matches no events.
    existing = named if named is not None else [topic.name for topic in log.run(log_calls.topics())]
    return tuple(name for name in existing if name in pushed)


def start_of(
    log: Headwater, options: ReadOptions, topics: Sequence[str] | None, kept: Sequence[TopicCoverage], state: LogState
) -> tuple[int, int]:
    """The position after which a read starts, and the position up to which events may be missing."""
    if options.from_end:
        return state.stable, state.stable
    if options.after is not None:
        after = options.after
        if options.epoch is not None and options.epoch != state.epoch:
            # The position that a reader has chosen; it may have no event.
            after = log.run(log_calls.common_position(options.epoch, options.after))
            if after < options.after and options.on_epoch_change == "stop":
                raise epoch_changed_error(Offset(options.after, options.epoch), present=state.epoch, common=after)
        if after > state.head:
            raise EpochChanged(
                f"position {after} was never assigned in epoch {state.epoch}: the head of the log is {state.head}",
                hint="It belongs to another log, or to a lost history. Read from a position of this log.",
                detail={"epoch": state.epoch, "requested_epoch": options.epoch, "common_position": state.head},
            )
        return after, NO_LIMIT if options.skip_expired else 0
    gone_to = NO_LIMIT if options.skip_expired else max((topic.lost_to for topic in kept), default=0)
    after = 0 if options.since is None else position_before(log, topics, kept, options.since)
    return after, gone_to


def position_before(log: Headwater, topics: Sequence[str] | None, kept: Sequence[TopicCoverage], at: datetime) -> int:
    """A position after which all events published at that time or later are, in the log and in archives."""
    found = log.run(reading_calls.position_before(topics, at))
    for location, ranges in archived_ranges(kept, after=0, up_to=found).items():
        low, high = ArchiveSelection(ranges, Filters()).hull
        archived = archive_reader.position_before(archive_reader.files_of(location, after=low, up_to=high), at)
        found = found if archived is None else min(found, archived)
    return found


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream read. Offsets are stable positions, so no event can appear below one later."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        if options.up_to is not None or options.until is not None:
            raise InvalidRequest("upTo and until are not allowed for a stream: use them for batch reads")
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

    def _retention_state(self) -> list[TopicCoverage]:
        return known_archives(
            self._connected().run(archives_calls.kept_topics(self.options.topics)), use=self.options.archive
        )

    def _state(self) -> LogState:
        """The state of the log; EpochChanged if the option inEpoch names another epoch."""
        state = self._connected().run(log_calls.log_state(self.options.topics))
        if self.options.in_epoch is not None and state.epoch != self.options.in_epoch:
            raise EpochChanged(
                f"the log is in epoch {state.epoch}, but the query was started in epoch {self.options.in_epoch}",
                hint="Postgres crashed, failed over or was restored. Restart the query.",
                detail={"epoch": state.epoch, "requested_epoch": self.options.in_epoch, "common_position": 0},
            )
        return state

    def _resolve(self, offset: dict[str, int], state: LogState) -> int:
        """Convert an offset to a position of the current epoch; EpochChanged if its event is lost, unless `rewind`."""
        stored = Offset(offset["position"], offset.get("epoch"))
        if stored.epoch in (None, state.epoch):
            return stored.position
        common = common_position(self._connected(), stored, self.options.topics)
        if common < stored.position and self.options.on_epoch_change == "stop":
            raise epoch_changed_error(stored, present=state.epoch, common=common)
        return common

    def initialOffset(self) -> dict[str, int]:
        log, topics, state = self._connected(), self.options.topics, self._state()
        position, gone_to = start_of(log, self.options, topics, self._retention_state(), state)
        if position <= state.stable:
            # The equivalent position of an event, because offsets must be positions of events.
            position = log.run(pipelines_calls.last_event_position(topics, up_to=position))
        return {"position": position, "gone_to": gone_to, "epoch": state.epoch}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.max_events)

    def prepareForTriggerAvailableNow(self) -> None:
        _, self.target, self._target_epoch = self._state()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """The end of the next batch. Waits up to `wait_seconds` for events, because Spark would call again at once."""
        log = self._connected()
        max_events = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        deadline = time.monotonic() + (0 if self.target is not None else self.options.wait_seconds)
        pause = 0.01
        while True:
            state = self._state()
            after = self._resolve(start, state)
            stable = state.stable
            if self.target is not None and self._target_epoch in (None, state.epoch):
                stable = min(stable, self.target)
            if stable > after:
                end = self._batch_end(log, after=after, stable=stable, max_events=max_events)
                if end is not None:
                    return {**start, "position": end, "epoch": state.epoch}
            # While no transaction is open, poll only the head, which needs neither a snapshot nor locks.
            while (left := deadline - time.monotonic()) > 0:
                log.run_maintenance()
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, 0.1)
                # Not ">": a crash may reduce the head.
                if state.stable < state.head or log.run(log_calls.head()) != state.head:
                    break
            else:
                return start

    def _batch_end(self, log: Headwater, *, after: int, stable: int, max_events: int | None) -> int | None:
        """The end of a batch according to both limits; None if there are no events."""
        topics, max_bytes = self.options.topics, self.options.max_bytes
        most = max_events
        if max_bytes is not None:
            # The number of events that fit, by the average size of the next ones.
            average = log.run(archives_calls.average_bytes(topics, after=after, up_to=stable))
            fitting = max(1, max_bytes // max(1, average))
            most = fitting if max_events is None else min(max_events, fitting)
        end = log.run(pipelines.batch_end(topics, after=after, stable=stable, max_events=most))
        if not self.options.archive or after >= log.run(reading_calls.expired_to(topics)):
            return end
        for location, ranges in archived_ranges(self._retention_state(), after=after, up_to=stable).items():
            limited = archive_reader.batch_end(location, ranges, max_events=max_events, max_bytes=max_bytes)
            if limited is None and end is None:
                # The archived events fit, and the log has no more.
                limited = ArchiveSelection(ranges, Filters()).hull[1]
            end = min(bound for bound in (limited, end) if bound is not None)
        return end

    def reportLatestOffset(self) -> dict[str, int]:
        state = self._state()
        return {"position": state.stable, "epoch": state.epoch}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        state = self._state()
        after, up_to = self._resolve(start, state), self._resolve(end, state)
        gone_to = NO_LIMIT if self.options.skip_expired else start["gone_to"]
        kept = self._retention_state()
        refuse_lost(kept, after=max(after, gone_to))
        requested = self.options.partitions
        filters = add_time_range(Filters(), self.options.since, None)
        return plan(
            self._connected(),
            PositionRanges(self.options.topics, (), gone_to, filters, archive=self.options.archive, epoch=state.epoch),
            kept,
            after=after,
            up_to=up_to,
            pieces=requested or 8,
            least=1 if requested else MIN_POSITIONS_PER_TASK,
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, PositionRanges)
        return read_part(self.options.dsn, partition, self.schema)

    def stop(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


class LogSource(DataSource):
    """The log. Reads require the option `dsn`; writes require it too, and a topic."""

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
