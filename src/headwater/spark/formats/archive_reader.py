"""Reads events from an archive in log order, and file statistics for planning.

Files may overlap: a batch that spans midnight has two files, and compaction mixes old ones. `events_of` is a k-way
merge: it opens a file, and then each of its row groups, when it reaches the first position in it, and yields rows when
nothing unread can precede them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import count
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headwater.calls.archives import TopicCoverage
from headwater.calls.pipelines import Filters
from headwater.errors import InvalidRequest
from headwater.spark.arrow import BATCH_ROWS

Range = tuple[int, int]
"""Positions after the first number, up to the second."""

# The columns that selections use. Other columns are read only from row groups with selected events.
FILTER_COLUMNS = ("position", "topic", "type", "key", "published_at")
# Some writers truncate the time bounds in a table's log to milliseconds.
TIME_BOUND_PRECISION = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """A file of an archive, as described in the table's log."""

    path: str
    events: int
    size: int
    first: int
    last: int
    """The lowest and the highest position in it."""
    newest: datetime | None


@dataclass(frozen=True, slots=True)
class ArchiveSelection:
    """The events to read from an archive: a range of positions for each topic, and filters."""

    ranges: Mapping[str, Range]
    filters: Filters

    @property
    def hull(self) -> Range:
        return min(after for after, _ in self.ranges.values()), max(up_to for _, up_to in self.ranges.values())


def archived_ranges(kept: Iterable[TopicCoverage], *, after: int, up_to: int) -> dict[str, dict[str, Range]]:
    """The parts of a range that retention removed and archives have: ranges by location and topic."""
    found: dict[str, dict[str, Range]] = {}
    for topic in kept:
        start = max(after, topic.lost_to, topic.created_after)
        end = min(up_to, topic.expired_to)
        if topic.location is not None and start < end:
            found.setdefault(topic.location, {})[topic.topic] = (start, end)
    return found


def files_of(location: str, *, after: int, up_to: int) -> list[ArchiveFile]:
    """The files of an archive that may hold these positions."""
    _, files = _open(location, after=after, up_to=up_to)
    return files


def events_of(location: str, wanted: ArchiveSelection, schema: Any) -> Iterator[pa.RecordBatch]:
    """Yield the events of an archive in order, as batches of this Arrow schema.

    Holds a few batches in memory; a row group that is not in order, as after compaction, is held as a whole.
    """
    after, up_to = wanted.hull
    directory, files = _open(location, after=after, up_to=up_to)
    numbers = count()
    # A heap by first position: unopened files, unread row groups, and partly read row groups.
    ahead: list[tuple[int, int, ArchiveFile | Iterator[pa.Table]]] = []

    def put(first: int, item: ArchiveFile | Iterator[pa.Table]) -> None:
        heapq.heappush(ahead, (first, next(numbers), item))

    for file in files:
        put(file.first, file)
    waiting: list[pa.Table] = []
    while ahead:
        first, _, item = heapq.heappop(ahead)
        if isinstance(item, ArchiveFile):
            opened = pq.ParquetFile(directory.open_input_file(item.path))
            for group, lowest in _row_groups(opened, after=after, up_to=up_to):
                put(first if lowest is None else lowest, _wanted_rows(opened, group, wanted, schema))
        elif (rows := next(item, None)) is not None:
            waiting.append(rows)
            # The remaining rows of the group come after these.
            put(rows["position"][-1].as_py(), item)
        ready, waiting = _split_ready(waiting, before=ahead[0][0] if ahead else None)
        if ready is not None:
            yield from ready.to_batches(max_chunksize=BATCH_ROWS)


def _open(location: str, *, after: int, up_to: int) -> tuple[Any, list[ArchiveFile]]:
    """The directory of an archive, and its files in a range."""
    # Imported here because most tasks do not need it.
    from headwater.lake.files import filesystem
    from headwater.lake.table import Location, open_table

    table = open_table(Location(location))
    if table is None:
        raise InvalidRequest(
            f"no archive found at {location} from this machine",
            hint="Make it accessible on every machine that reads, or read with archive=false and skipExpired=true.",
        )
    return filesystem(table), _files_in_range(pa.table(table.get_add_actions(flatten=True)), after=after, up_to=up_to)


def _files_in_range(actions: pa.Table, *, after: int, up_to: int) -> list[ArchiveFile]:
    """The files in a range, by their statistics in the table's log; a file without statistics is always included."""

    def column(name: str) -> list[Any]:
        # A table without statistics lacks these columns.
        return actions[name].to_pylist() if name in actions.schema.names else [None] * actions.num_rows

    files = [
        ArchiveFile(
            unquote(path), events or 0, size, 1 if first is None else first, up_to if last is None else last, at
        )
        for path, events, size, first, last, at in zip(
            column("path"),
            column("num_records"),
            column("size_bytes"),
            column("min.position"),
            column("max.position"),
            column("max.published_at"),
            strict=True,
        )
    ]
    return [file for file in files if file.last > after and file.first <= up_to]


def _row_groups(opened: Any, *, after: int, up_to: int) -> Iterator[tuple[int, int | None]]:
    """The row groups of a file that may hold these positions, with their first position; None if unknown."""
    footer = opened.metadata
    column = opened.schema_arrow.get_field_index("position")
    for group in range(footer.num_row_groups):
        found = footer.row_group(group).column(column).statistics
        if found is None or not found.has_min_max:
            yield group, None
        elif found.max > after and found.min <= up_to:
            yield group, found.min


def _wanted_rows(opened: Any, group: int, wanted: ArchiveSelection, schema: Any) -> Iterator[pa.Table]:
    """Yield the selected rows of a row group, in order, with this schema."""
    deciding = opened.read_row_group(group, columns=list(FILTER_COLUMNS))
    mask = _mask(deciding, wanted)
    positions = deciding["position"].filter(mask).to_numpy()
    if not len(positions):
        return
    in_order = bool((positions[1:] > positions[:-1]).all())
    if not in_order:
        rows = opened.read_row_group(group, columns=schema.names).filter(mask)
        yield _convert(rows, schema).sort_by("position")
        return
    start = 0
    for batch in opened.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=schema.names):
        rows = pa.Table.from_batches([batch]).filter(mask.slice(start, batch.num_rows))
        start += batch.num_rows
        if rows.num_rows:
            yield _convert(rows, schema)


def _convert(rows: pa.Table, schema: Any) -> pa.Table:
    return pa.Table.from_arrays([rows[field.name].cast(field.type) for field in schema], schema=schema)


def _mask(rows: pa.Table, wanted: ArchiveSelection) -> Any:
    """A boolean mask of the selected rows."""
    filters = wanted.filters
    of_topics: Any = pa.scalar(False)
    by_range: dict[Range, list[str]] = {}
    for topic, positions in wanted.ranges.items():
        by_range.setdefault(positions, []).append(topic)
    for (after, up_to), topics in by_range.items():
        inside = pc.and_(pc.greater(rows["position"], after), pc.less_equal(rows["position"], up_to))
        of_topics = pc.or_(of_topics, pc.and_(inside, pc.is_in(rows["topic"], pa.array(topics, rows["topic"].type))))
    mask = of_topics
    if filters.types is not None:
        mask = pc.and_(mask, pc.is_in(rows["type"], pa.array(filters.types, rows["type"].type)))
    if filters.keys is not None:
        mask = pc.and_(mask, pc.is_in(rows["key"], pa.array(filters.keys, rows["key"].type)))
    for at, holds in ((filters.published_from, pc.greater_equal), (filters.published_before, pc.less)):
        if at is not None:
            mask = pc.and_(mask, holds(rows["published_at"], pa.scalar(at, rows["published_at"].type)))
    return mask


def _split_ready(waiting: Sequence[pa.Table], *, before: int | None) -> tuple[pa.Table | None, list[pa.Table]]:
    """Split sorted tables at a position: the rows below it as one sorted table, and the remaining rows."""
    if before is None:
        parts = [(rows, rows.num_rows) for rows in waiting]
    else:
        parts = [(rows, _below(rows, before)) for rows in waiting]
    ready = [rows.slice(0, number) for rows, number in parts if number]
    left = [rows.slice(number) for rows, number in parts if number < rows.num_rows]
    if not ready:
        return None, left
    if len(ready) == 1:
        return ready[0], left
    return pa.concat_tables(ready).sort_by("position"), left


def _below(rows: pa.Table | pa.RecordBatch, before: int) -> int:
    """The number of leading rows below a position; the rows are sorted."""
    return int(rows.column("position").to_numpy().searchsorted(before))


def merge_sorted(one: Iterator[pa.RecordBatch], other: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Merge two sorted streams of events. Holds one batch of each."""
    left, right = _next(one), _next(other)
    while left is not None and right is not None:
        end = 1 + min(left.column("position")[-1].as_py(), right.column("position")[-1].as_py())
        from_left, from_right = _below(left, end), _below(right, end)
        if from_left and from_right:
            both = pa.Table.from_batches([left.slice(0, from_left), right.slice(0, from_right)]).sort_by("position")
            yield from both.combine_chunks().to_batches()
        else:
            yield left.slice(0, from_left) if from_left else right.slice(0, from_right)
        left = left.slice(from_left) if from_left < left.num_rows else _next(one)
        right = right.slice(from_right) if from_right < right.num_rows else _next(other)
    if left is not None:
        yield left
    if right is not None:
        yield right
    yield from one
    yield from other


def _next(batches: Iterator[pa.RecordBatch]) -> pa.RecordBatch | None:
    return next((batch for batch in batches if batch.num_rows), None)


def batch_end(
    location: str, ranges: Mapping[str, Range], *, max_events: int | None, max_bytes: int | None
) -> int | None:
    """The position at which a batch of these ranges reaches its limits; None if everything fits.

    Events are counted by reading only positions and topics. Bytes are an estimate: the compressed size of a file
    divided by its number of events.
    """
    if max_events is None and max_bytes is None:
        return None
    wanted = ArchiveSelection(ranges, Filters())
    after, up_to = wanted.hull
    directory, files = _open(location, after=after, up_to=up_to)
    files.sort(key=lambda file: file.first)
    positions, sizes = np.empty(0, np.int64), np.empty(0, np.float64)
    for file, following in zip(files, [*files[1:], None], strict=True):
        with pq.ParquetFile(directory.open_input_file(file.path)) as opened:
            groups = [group for group, _ in _row_groups(opened, after=after, up_to=up_to)]
            rows = opened.read_row_groups(groups, columns=["position", "topic"])
        found = rows.filter(_mask(rows, wanted))["position"].to_numpy()
        positions = np.concatenate([positions, found])
        sizes = np.concatenate([sizes, np.full(len(found), file.size / max(file.events, 1))])
        order = positions.argsort()
        positions, sizes = positions[order], sizes[order]
        most = len(positions) + 1 if max_events is None else max_events
        if max_bytes is not None:
            # A batch has at least one event, whatever its size.
            most = min(most, max(1, int(sizes.cumsum().searchsorted(max_bytes, side="right"))))
        if most < len(positions) and (following is None or following.first > positions[most - 1]):
            return int(positions[most - 1])
    return None


def position_before(files: Iterable[ArchiveFile], at: datetime) -> int | None:
    """A position below all events of these files that were published at that time or later; None if there are none."""
    return min(
        (file.first - 1 for file in files if file.newest is None or file.newest + TIME_BOUND_PRECISION >= at),
        default=None,
    )
