"""Row images in pgoutput messages: split into columns and converted to JSON. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.capture.json_text import Bytes, Cells, Flags, Integers, JsonColumn, objects, render
from headwater.capture.relation import Relation


class MalformedMessage(ValueError):
    """The bytes do not follow pgoutput's protocol version 1."""


class IntegerReader:
    """Reads big-endian integers at any offsets of a buffer."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def _at(self, offsets: Integers, kind: str, width: int) -> Integers:
        if not len(offsets):
            return np.zeros(0, np.int64)
        if len(self._data) < width:
            raise MalformedMessage("truncated message")
        # A view in which a number starts at each byte. Offsets past the end are clamped; callers ignore those results.
        view: Any = np.ndarray((len(self._data) - width + 1,), kind, self._data.data, strides=(1,))
        return np.asarray(view[np.minimum(offsets, len(view) - 1)], np.int64)

    def int16(self, offsets: Integers) -> Integers:
        return self._at(offsets, ">i2", 2)

    def int32(self, offsets: Integers) -> Integers:
        return self._at(offsets, ">i4", 4)

    def oid(self, offsets: Integers) -> Integers:
        return self._at(offsets, ">u4", 4)

    def int64(self, offsets: Integers) -> Integers:
        return self._at(offsets, ">i8", 8)


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """A batch of messages: their bytes, offsets and message types."""

    data: Bytes
    at: Integers
    stop: Integers
    kinds: Bytes
    numbers: IntegerReader


@dataclass(frozen=True, slots=True)
class _Tuples:
    """Tuples of one relation: for each column, the kind of each value and its offsets in the data."""

    kinds: list[Bytes]
    starts: list[Integers]
    ends: list[Integers]
    stops: Integers


def _split_tuples(batch: MessageBatch, offsets: Integers, columns: int) -> _Tuples:
    """Split the tuples that start at these offsets into columns."""
    if not (batch.numbers.int16(offsets) == columns).all():
        raise MalformedMessage("the number of columns in a row differs from its Relation message")
    offset = offsets + 2
    kinds, starts, ends = [], [], []
    last = len(batch.data) - 1
    for _ in range(columns):
        if (offset > last).any():
            raise MalformedMessage("truncated row")
        kind = batch.data[offset]
        is_text = kind == ord("t")
        if is_text.all():
            start = offset + 5
            end = start + batch.numbers.int32(offset + 1)
        else:
            if not (is_text | (kind == ord("n")) | (kind == ord("u"))).all():
                raise MalformedMessage("invalid kind of value: expected text, null or unchanged")
            start = offset + np.where(is_text, 5, 1)
            end = start + np.where(is_text, batch.numbers.int32(offset + 1), 0)
        kinds.append(kind)
        starts.append(start)
        ends.append(end)
        offset = end
    return _Tuples(kinds, starts, ends, offset)


def write_images(
    relation: Relation,
    batch: MessageBatch,
    messages: Integers,
    members: Integers,
    keys: TextColumnBuilder,
    befores: TextColumnBuilder,
    afters: TextColumnBuilder,
    unchanged: NameListBuilder,
) -> None:
    """Convert the row images of these changes of one relation to JSON and add them to the column builders."""
    rows = np.flatnonzero(batch.kinds[messages] != ord("T"))
    if not len(rows):
        return
    members, messages = members[rows], messages[rows]
    width = len(relation.columns)
    names = [column.name for column in relation.columns]
    offset = batch.at[messages] + 5
    stop = batch.stop[messages]
    if (offset >= stop).any():
        raise MalformedMessage("truncated change")
    marker = batch.data[offset]
    has_old = np.flatnonzero(marker != ord("N"))
    has_new = np.flatnonzero(batch.kinds[messages] != ord("D"))
    whole = marker[has_old] == ord("O")
    if not (whole | (marker[has_old] == ord("K"))).all():
        raise MalformedMessage("change with neither an old nor a new row")

    old: _Tuples | None = None
    if len(has_old):
        old = _split_tuples(batch, offset[has_old] + 1, width)
        offset[has_old] = old.stops
    new = _split_tuples(batch, offset[has_new] + 1, width) if len(has_new) else None
    if new is not None:
        offset[has_new] = new.stops
    if (offset != stop).any():
        raise MalformedMessage("change that does not end at the end of its message")

    if old is not None:
        rendered = _TupleColumns(relation, batch.data, old)
        everything, key_only = np.flatnonzero(whole), np.flatnonzero(~whole)
        identity = [number for number, column in enumerate(relation.columns) if column.in_identity]
        befores.put(members[has_old[everything]], rendered.objects(everything, range(width), names))
        befores.put(members[has_old[key_only]], rendered.objects(key_only, identity, names))
        deleted = np.flatnonzero(batch.kinds[messages[has_old]] == ord("D"))
        if relation.key:
            keys.put(members[has_old[deleted]], rendered.objects(deleted, relation.key, names))
    if new is not None:
        if old is not None:
            _fill_unchanged(new, has_new, old, has_old)
        rendered = _TupleColumns(relation, batch.data, new)
        for pattern, chosen in _patterns(new):
            shown = [number for number in range(width) if number not in pattern]
            key = [number for number in relation.key if number not in pattern]
            afters.put(members[has_new[chosen]], rendered.objects(chosen, shown, names))
            if relation.key:
                keys.put(members[has_new[chosen]], rendered.objects(chosen, key, names))
            if pattern:
                unchanged.put(members[has_new[chosen]], [names[number] for number in pattern])


def _fill_unchanged(new: _Tuples, has_new: Integers, old: _Tuples, has_old: Integers) -> None:
    """Take values that the new row omits as unchanged from the old row, if it has them."""
    both, in_new, in_old = np.intersect1d(has_new, has_old, assume_unique=True, return_indices=True)
    if not len(both):
        return
    for number, kind in enumerate(new.kinds):
        fill = (kind[in_new] == ord("u")) & (old.kinds[number][in_old] == ord("t"))
        if fill.any():
            to, source = in_new[fill], in_old[fill]
            kind = new.kinds[number] = kind.copy()
            kind[to] = ord("t")
            new.starts[number][to] = old.starts[number][source]
            new.ends[number][to] = old.ends[number][source]


def _patterns(tuples: _Tuples) -> Iterator[tuple[tuple[int, ...], Integers]]:
    """Each set of unchanged columns, with the rows that have exactly this set."""
    count = len(tuples.stops)
    flags = {number: kind == ord("u") for number, kind in enumerate(tuples.kinds) if (kind == ord("u")).any()}
    if not flags:
        yield (), np.arange(count)
        return
    table: Flags = np.stack(list(flags.values()), axis=1)
    patterns, which = np.unique(table, axis=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        columns = tuple(column for column, flag in zip(flags, pattern, strict=True) if flag)
        yield columns, np.flatnonzero(which.reshape(-1) == number)


class _TupleColumns:
    """The columns of some rows as JSON values, each converted when it is first needed."""

    def __init__(self, relation: Relation, data: Bytes, tuples: _Tuples) -> None:
        self._relation = relation
        self._data = data
        self._tuples = tuples
        self._rendered: dict[int, JsonColumn] = {}

    def _column(self, number: int) -> JsonColumn:
        if number not in self._rendered:
            cells = Cells(
                self._data,
                self._tuples.starts[number],
                self._tuples.ends[number],
                self._tuples.kinds[number] == ord("t"),
            )
            self._rendered[number] = render(cells, self._relation.columns[number].form)
        return self._rendered[number]

    def objects(self, rows: Integers, columns: Sequence[int], names: Sequence[str]) -> Any:
        if not len(rows):
            return pa.array([], pa.string())
        every = len(rows) == len(self._tuples.stops)
        picked = [self._column(number) if every else self._column(number).take(rows) for number in columns]
        return objects([names[number] for number in columns], picked, len(rows))


class TextColumnBuilder:
    """Builds a text column from pieces in any order."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pieces: list[tuple[Integers, Any]] = []

    def put(self, members: Integers, texts: Any) -> None:
        if len(members):
            self._pieces.append((members, texts))

    def array(self) -> Any:
        if not self._pieces:
            return pa.nulls(self._count, pa.string())
        if len(self._pieces) == 1 and len(self._pieces[0][0]) == self._count:
            return self._pieces[0][1]
        source = np.full(self._count, -1, np.int64)
        done = 0
        for members, texts in self._pieces:
            source[members] = np.arange(done, done + len(texts))
            done += len(texts)
        together = pa.concat_arrays([texts for _, texts in self._pieces])
        return together.take(pa.array(source, mask=source < 0))


class NameListBuilder:
    """Builds a column of lists of names, most of them empty."""

    def __init__(self, count: int) -> None:
        self._which = np.zeros(count, np.int64)
        self._lists: list[list[str]] = [[]]

    def put(self, members: Integers, names: list[str]) -> None:
        self._which[members] = len(self._lists)
        self._lists.append(names)

    def array(self) -> Any:
        return pa.array(self._lists, pa.list_(pa.string())).take(pa.array(self._which))
