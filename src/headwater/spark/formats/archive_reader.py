"""Events read back from an archive, in the order of the log; and what its files say without being read.

Files may overlap: a batch that spans midnight has two, and compaction mixes old ones. A file, and then each of its row
groups, is opened when the reading has come to its first position; rows leave when nothing unread can come before them.
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

from headwater.calls import Conditions, KeptTopic
from headwater.errors import InvalidRequest
from headwater.spark.arrow import BATCH_ROWS

Range = tuple[int, int]
"""Positions after the first number, up to the second."""

# What decides whether an event is wanted. All but these are read only where some are.
DECIDING = ("position", "topic", "type", "key", "published_at")
# Bounds of times in a table's log are cut to milliseconds by some who write them.
CUT_TIME = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """A file of an archive, as the table's log describes it."""

    path: str
    events: int
    size: int
    first: int
    last: int
    """The lowest and the highest position in it."""
    newest: datetime | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events of an archive are asked for: of each topic those in a range, if they meet the conditions."""

    ranges: Mapping[str, Range]
    conditions: Conditions

    @property
    def hull(self) -> Range:
        return min(after for after, _ in self.ranges.values()), max(up_to for _, up_to in self.ranges.values())


def archived_ranges(kept: Iterable[KeptTopic], *, after: int, up_to: int) -> dict[str, dict[str, Range]]:
    """What of a range of positions is in archives: by location, of each topic the part that retention took."""
    found: dict[str, dict[str, Range]] = {}
    for topic in kept:
        start = max(after, topic.lost_to, topic.created_after)
        end = min(up_to, topic.expired_to)
        if topic.location is not None and start < end:
            found.setdefault(topic.location, {})[topic.topic] = (start, end)
    return found


def files_of(location: str, *, after: int, up_to: int) -> list[ArchiveFile]:
    """The files of an archive that may hold these positions."""
    _, files = _opened(location, after=after, up_to=up_to)
    return files


def events_of(location: str, wanted: Wanted, schema: Any) -> Iterator[pa.RecordBatch]:
    """Events of an archive in order, as batches of this Arrow schema.

    Holds some batches at a time; of row groups that are not in order inside, as compaction leaves them, all of each.
    """
    after, up_to = wanted.hull
    directory, files = _opened(location, after=after, up_to=up_to)
    numbers = count()
    # By first position: files that were not opened yet, row groups that were not read yet, and the rest of others.
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
            # What follows in it comes after these.
            put(rows["position"][-1].as_py(), item)
        ready, waiting = _ready(waiting, before=ahead[0][0] if ahead else None)
        if ready is not None:
            yield from ready.to_batches(max_chunksize=BATCH_ROWS)


def _opened(location: str, *, after: int, up_to: int) -> tuple[Any, list[ArchiveFile]]:
    """An archive's directory, and its files in a range."""
    # Here, since most tasks have no use for it.
    from headwater.lake.files import filesystem
    from headwater.lake.table import Location, open_table

    table = open_table(Location(location))
    if table is None:
        raise InvalidRequest(
            f"there is no archive at {location}, as seen from here",
            hint="Make it reachable on every machine that reads, or read with archive=false and skipExpired=true.",
        )
    return filesystem(table), _described(pa.table(table.get_add_actions(flatten=True)), after=after, up_to=up_to)


def _described(actions: pa.Table, *, after: int, up_to: int) -> list[ArchiveFile]:
    """The files in a range, by what a table's log says of them; one of which it says nothing is always among them."""

    def column(name: str) -> list[Any]:
        # A table of which nobody kept statistics has no columns for them.
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
    """The row groups of a file that may hold these positions, each with its first; None if it does not say."""
    footer = opened.metadata
    column = opened.schema_arrow.get_field_index("position")
    for group in range(footer.num_row_groups):
        found = footer.row_group(group).column(column).statistics
        if found is None or not found.has_min_max:
            yield group, None
        elif found.max > after and found.min <= up_to:
            yield group, found.min


def _wanted_rows(opened: Any, group: int, wanted: Wanted, schema: Any) -> Iterator[pa.Table]:
    """The wanted rows of a row group, in order, as this schema has them."""
    deciding = opened.read_row_group(group, columns=list(DECIDING))
    mask = _mask(deciding, wanted)
    positions = deciding["position"].filter(mask).to_numpy()
    if not len(positions):
        return
    in_order = bool((positions[1:] > positions[:-1]).all())
    if not in_order:
        rows = opened.read_row_group(group, columns=schema.names).filter(mask)
        yield _fitting(rows, schema).sort_by("position")
        return
    start = 0
    for batch in opened.iter_batches(batch_size=BATCH_ROWS, row_groups=[group], columns=schema.names):
        rows = pa.Table.from_batches([batch]).filter(mask.slice(start, batch.num_rows))
        start += batch.num_rows
        if rows.num_rows:
            yield _fitting(rows, schema)


def _fitting(rows: pa.Table, schema: Any) -> pa.Table:
    return pa.Table.from_arrays([rows[field.name].cast(field.type) for field in schema], schema=schema)


def _mask(rows: pa.Table, wanted: Wanted) -> Any:
    """Which rows are wanted."""
    asked = wanted.conditions
    of_topics: Any = pa.scalar(False)
    by_range: dict[Range, list[str]] = {}
    for topic, positions in wanted.ranges.items():
        by_range.setdefault(positions, []).append(topic)
    for (after, up_to), topics in by_range.items():
        inside = pc.and_(pc.greater(rows["position"], after), pc.less_equal(rows["position"], up_to))
        of_topics = pc.or_(of_topics, pc.and_(inside, pc.is_in(rows["topic"], pa.array(topics, rows["topic"].type))))
    mask = of_topics
    if asked.types is not None:
        mask = pc.and_(mask, pc.is_in(rows["type"], pa.array(asked.types, rows["type"].type)))
    if asked.keys is not None:
        mask = pc.and_(mask, pc.is_in(rows["key"], pa.array(asked.keys, rows["key"].type)))
    for at, holds in ((asked.published_from, pc.greater_equal), (asked.published_before, pc.less)):
        if at is not None:
            mask = pc.and_(mask, holds(rows["published_at"], pa.scalar(at, rows["published_at"].type)))
    return mask


def _ready(waiting: Sequence[pa.Table], *, before: int | None) -> tuple[pa.Table | None, list[pa.Table]]:
    """Of tables that are each in order: the rows below a position as one that is, and what has to wait."""
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
    """How many rows at the start, which are in order, are below a position."""
    return int(rows.column("position").to_numpy().searchsorted(before))


def merged(one: Iterator[pa.RecordBatch], other: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Two streams of events, each in order, as one that is. Holds a batch of each."""
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
    """Where a batch that starts with these ranges has as much of them as it may; None: all of it fits.

    Events are counted, by a look at their positions and topics alone. Their bytes are an estimate: each is taken to
    have its share of its file, which is compressed.
    """
    if max_events is None and max_bytes is None:
        return None
    wanted = Wanted(ranges, Conditions())
    after, up_to = wanted.hull
    directory, files = _opened(location, after=after, up_to=up_to)
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
            # One event comes whatever its size.
            most = min(most, max(1, int(sizes.cumsum().searchsorted(max_bytes, side="right"))))
        if most < len(positions) and (following is None or following.first > positions[most - 1]):
            return int(positions[most - 1])
    return None


def position_before(files: Iterable[ArchiveFile], at: datetime) -> int | None:
    """A position that no event of these files published at that time or later is at or below; None: there is none."""
    return min((file.first - 1 for file in files if file.newest is None or file.newest + CUT_TIME >= at), default=None)
