"""The rows in messages: taken apart column by column, and written as JSON. No I/O here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.capture.json_text import Bytes, Cells, Flags, Places, Rendered, objects, render
from headwater.capture.relation import Relation


class MalformedMessage(ValueError):
    """The bytes are not what pgoutput's protocol 1 says they are."""


class Numbers:
    """Numbers anywhere in a buffer, in network order."""

    def __init__(self, data: Bytes) -> None:
        self._data = data

    def _at(self, places: Places, kind: str, width: int) -> Places:
        if not len(places):
            return np.zeros(0, np.int64)
        if len(self._data) < width:
            raise MalformedMessage("a message that ends too early")
        # Each byte starts a number; what lies past the end is asked for only where nothing is used of it.
        view: Any = np.ndarray((len(self._data) - width + 1,), kind, self._data.data, strides=(1,))
        return np.asarray(view[np.minimum(places, len(view) - 1)], np.int64)

    def int16(self, places: Places) -> Places:
        return self._at(places, ">i2", 2)

    def int32(self, places: Places) -> Places:
        return self._at(places, ">i4", 4)

    def oid(self, places: Places) -> Places:
        return self._at(places, ">u4", 4)

    def int64(self, places: Places) -> Places:
        return self._at(places, ">i8", 8)


@dataclass(frozen=True, slots=True)
class Messages:
    """A batch of messages."""

    data: Bytes
    at: Places
    stop: Places
    kinds: Bytes
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class _Tuples:
    """Rows of one relation: for each column what each row has there, and where."""

    kinds: list[Bytes]
    starts: list[Places]
    ends: list[Places]
    stops: Places


def _take_apart(batch: Messages, places: Places, columns: int) -> _Tuples:
    """The tuples that start at these places."""
    if not (batch.numbers.int16(places) == columns).all():
        raise MalformedMessage("a row with another number of columns than its table")
    place = places + 2
    kinds, starts, ends = [], [], []
    last = len(batch.data) - 1
    for _ in range(columns):
        if (place > last).any():
            raise MalformedMessage("a row that ends too early")
        kind = batch.data[place]
        there = kind == ord("t")
        if there.all():
            start = place + 5
            end = start + batch.numbers.int32(place + 1)
        else:
            if not (there | (kind == ord("n")) | (kind == ord("u"))).all():
                raise MalformedMessage("a value that is neither text, null nor unchanged")
            start = place + np.where(there, 5, 1)
            end = start + np.where(there, batch.numbers.int32(place + 1), 0)
        kinds.append(kind)
        starts.append(start)
        ends.append(end)
        place = end
    return _Tuples(kinds, starts, ends, place)


def write_images(
    relation: Relation,
    batch: Messages,
    messages: Places,
    members: Places,
    keys: Scattered,
    befores: Scattered,
    afters: Scattered,
    unchanged: Lists,
) -> None:
    """The images of these changes of one relation, each written in its place."""
    rows = np.flatnonzero(batch.kinds[messages] != ord("T"))
    if not len(rows):
        return
    members, messages = members[rows], messages[rows]
    width = len(relation.columns)
    names = [column.name for column in relation.columns]
    place = batch.at[messages] + 5
    stop = batch.stop[messages]
    if (place >= stop).any():
        raise MalformedMessage("a change that ends too early")
    marker = batch.data[place]
    has_old = np.flatnonzero(marker != ord("N"))
    has_new = np.flatnonzero(batch.kinds[messages] != ord("D"))
    whole = marker[has_old] == ord("O")
    if not (whole | (marker[has_old] == ord("K"))).all():
        raise MalformedMessage("a change with neither an old nor a new row")

    old: _Tuples | None = None
    if len(has_old):
        old = _take_apart(batch, place[has_old] + 1, width)
        place[has_old] = old.stops
    new = _take_apart(batch, place[has_new] + 1, width) if len(has_new) else None
    if new is not None:
        place[has_new] = new.stops
    if (place != stop).any():
        raise MalformedMessage("a change that does not end where its message does")

    if old is not None:
        rendered = _Columns(relation, batch.data, old)
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
        rendered = _Columns(relation, batch.data, new)
        for pattern, chosen in _patterns(new):
            shown = [number for number in range(width) if number not in pattern]
            key = [number for number in relation.key if number not in pattern]
            afters.put(members[has_new[chosen]], rendered.objects(chosen, shown, names))
            if relation.key:
                keys.put(members[has_new[chosen]], rendered.objects(chosen, key, names))
            if pattern:
                unchanged.put(members[has_new[chosen]], [names[number] for number in pattern])


def _fill_unchanged(new: _Tuples, has_new: Places, old: _Tuples, has_old: Places) -> None:
    """A value that the new row leaves out as unchanged is taken from the old row, where that has it."""
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


def _patterns(tuples: _Tuples) -> Iterator[tuple[tuple[int, ...], Places]]:
    """Which columns are unchanged, and the rows where just these are."""
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


class _Columns:
    """The columns of some rows as JSON values, each made when it is first needed."""

    def __init__(self, relation: Relation, data: Bytes, tuples: _Tuples) -> None:
        self._relation = relation
        self._data = data
        self._tuples = tuples
        self._rendered: dict[int, Rendered] = {}

    def _column(self, number: int) -> Rendered:
        if number not in self._rendered:
            cells = Cells(
                self._data,
                self._tuples.starts[number],
                self._tuples.ends[number],
                self._tuples.kinds[number] == ord("t"),
            )
            self._rendered[number] = render(cells, self._relation.columns[number].form)
        return self._rendered[number]

    def objects(self, rows: Places, columns: Sequence[int], names: Sequence[str]) -> Any:
        if not len(rows):
            return pa.array([], pa.string())
        every = len(rows) == len(self._tuples.stops)
        picked = [self._column(number) if every else self._column(number).take(rows) for number in columns]
        return objects([names[number] for number in columns], picked, len(rows))


class Scattered:
    """A text column that is filled piece by piece."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pieces: list[tuple[Places, Any]] = []

    def put(self, members: Places, texts: Any) -> None:
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


class Lists:
    """A column of lists of names, most of them empty."""

    def __init__(self, count: int) -> None:
        self._which = np.zeros(count, np.int64)
        self._lists: list[list[str]] = [[]]

    def put(self, members: Places, names: list[str]) -> None:
        self._which[members] = len(self._lists)
        self._lists.append(names)

    def array(self) -> Any:
        return pa.array(self._lists, pa.list_(pa.string())).take(pa.array(self._which))
