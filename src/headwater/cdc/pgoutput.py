"""What pgoutput says, protocol 1: bytes to changes, a batch at a time. No I/O here.

A batch of messages is taken apart column by column with numpy; nothing here runs once per change.
The format: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from headwater.cdc.json_text import (
    TYPE_NAMES,
    Bytes,
    Cells,
    Flags,
    Form,
    Places,
    Rendered,
    form_of,
    objects,
    render,
)

SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),  # commit LSN and sequence, of fixed width: sorts as the changes do
        ("xid", pa.int64()),
        ("commit_lsn", pa.int64()),
        ("committed_at", pa.timestamp("us", "UTC")),
        ("sequence", pa.int64()),  # within the transaction, from 0; counts changes only
        ("schema", pa.string()),
        ("table", pa.string()),
        ("operation", pa.string()),  # insert, update, delete, truncate
        ("key", pa.string()),  # JSON; null for a table without a key
        ("before", pa.string()),  # JSON: the whole row or its key, as the replica identity allows; else null
        ("after", pa.string()),  # JSON, without the columns in `unchanged`; null for delete and truncate
        ("unchanged", pa.list_(pa.string())),  # large values that were not touched, and so not logged
        ("columns_hash", pa.string()),  # changes when the table's columns do
        ("columns", pa.string()),  # JSON: what the columns are; on the first change of each hash in a read
    ]
)

OPERATIONS: Final = ("insert", "update", "delete", "truncate")
_EPOCH_MICROSECONDS: Final = 946_684_800_000_000  # 2000-01-01, from 1970
_KEY_FLAG: Final = 1


class MalformedMessage(ValueError):
    """The bytes are not what pgoutput's protocol 1 says they are."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table, as its Relation message describes it."""

    name: str
    type_oid: int
    type_name: str
    type_modifier: int
    in_identity: bool

    @property
    def form(self) -> Form:
        return form_of(self.type_name)


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as it was when the changes that follow were made."""

    oid: int
    schema: str
    table: str
    identity: str  # d: default, n: nothing, f: full, i: index
    columns: tuple[Column, ...]
    key: tuple[int, ...]  # which columns tell a row from all others; empty if none do
    description: str = field(init=False)
    columns_hash: str = field(init=False)

    def __post_init__(self) -> None:
        described = [
            {"name": column.name, "type": column.type_name, "modifier": column.type_modifier, "key": number in self.key}
            for number, column in enumerate(self.columns)
        ]
        description = json.dumps(described, ensure_ascii=False, separators=(",", ":"))
        named = f"{self.schema}\0{self.table}\0{self.identity}\0{description}"
        object.__setattr__(self, "description", description)
        object.__setattr__(self, "columns_hash", hashlib.sha256(named.encode()).hexdigest()[:16])


@dataclass(frozen=True, slots=True)
class _Transaction:
    """The transaction that a batch ended in the middle of."""

    xid: int
    commit_lsn: int
    committed_at: int
    changes: int


_NO_TRANSACTION: Final = _Transaction(xid=0, commit_lsn=-1, committed_at=0, changes=0)


@dataclass(frozen=True, slots=True)
class _Tuples:
    """Rows of one relation: for each column what each row has there, and where."""

    kinds: list[Bytes]
    starts: list[Places]
    ends: list[Places]
    stops: Places


class Decoder:
    """Takes the messages of one read in batches of any size; gives the changes of transactions that committed at
    `start` or later and before `end`. Relations are learned from all of them.

    `primary_keys` names the key of tables with replica identity FULL, whose messages do not tell it.
    """

    def __init__(
        self, *, start: int = 0, end: int = 1 << 63, primary_keys: Mapping[tuple[str, str], Sequence[str]] | None = None
    ) -> None:
        self._start = start
        self._end = end
        self._primary_keys = primary_keys or {}
        self._relations: dict[int, Relation] = {}
        self._types: dict[int, str] = {}
        self._open: _Transaction | None = None
        self._described: set[str] = set()

    def decode(self, messages: Any) -> Any:
        """The changes in this batch of messages (an Arrow array of bytes), as a RecordBatch of SCHEMA."""
        count = len(messages)
        if not count:
            return _nothing()
        _, offset_buffer, data_buffer = messages.buffers()
        data: Bytes = np.frombuffer(data_buffer, np.uint8)
        bounds = np.frombuffer(offset_buffer, np.int32)[messages.offset : messages.offset + count + 1].astype(np.int64)
        at, stop = bounds[:-1], bounds[1:]
        if (stop <= at).any():
            raise MalformedMessage("an empty message")
        kinds = data[at]
        numbers = _Numbers(data)

        before = self._open or _NO_TRANSACTION
        begins = kinds == ord("B")
        begin_at = at[begins]
        lsns = np.concatenate([[before.commit_lsn], numbers.int64(begin_at + 1)])
        times = np.concatenate([[before.committed_at], numbers.int64(begin_at + 9) + _EPOCH_MICROSECONDS])
        xids = np.concatenate([[before.xid], numbers.oid(begin_at + 17)])
        transaction_of = np.cumsum(begins)
        kept = (lsns >= self._start) & (lsns < self._end) & (lsns >= 0)

        learned = self._learn(data, at, stop, kinds)
        is_row = (kinds == ord("I")) | (kinds == ord("U")) | (kinds == ord("D"))
        wanted = (is_row | (kinds == ord("T"))) & kept[transaction_of]
        rows = np.flatnonzero(wanted)
        relation_ids = numbers.oid(at[rows] + 1)
        if (kinds[rows] == ord("T")).any():
            rows, relation_ids = _spread_truncates(numbers, at, kinds, rows, relation_ids)

        transactions = transaction_of[rows]
        changes = np.bincount(transactions, minlength=len(lsns))
        first = np.cumsum(changes) - changes
        first[0] -= before.changes
        sequence = np.arange(len(rows)) - first[transactions]
        batch = self._assemble(
            _Slice(data, at, stop, kinds, numbers),
            rows,
            relation_ids,
            learned,
            transactions,
            sequence,
            lsns,
            times,
            xids,
        )
        self._remember(kinds, lsns, times, xids, changes, before)
        return batch

    def finish(self) -> None:
        """Check that the read ended between two transactions."""
        if self._open is not None:
            raise MalformedMessage("the messages ended in the middle of a transaction")

    def _remember(
        self, kinds: Bytes, lsns: Places, times: Places, xids: Places, changes: Places, before: _Transaction
    ) -> None:
        last_begin = int(np.flatnonzero(kinds == ord("B"))[-1]) if len(lsns) > 1 else -1
        commits = np.flatnonzero(kinds == ord("C"))
        if len(commits) and commits[-1] > last_begin:
            self._open = None
        elif len(lsns) > 1 or self._open is not None:
            done = int(changes[-1]) + (before.changes if len(lsns) == 1 else 0)
            self._open = _Transaction(int(xids[-1]), int(lsns[-1]), int(times[-1]), done)

    def _learn(self, data: Bytes, at: Places, stop: Places, kinds: Bytes) -> dict[int, list[tuple[int, Relation]]]:
        """The relations described in this batch: for each oid, from which message on which holds."""
        learned: dict[int, list[tuple[int, Relation]]] = {}
        for index in np.flatnonzero((kinds == ord("R")) | (kinds == ord("Y"))).tolist():
            message = data[at[index] : stop[index]].tobytes()
            if message[:1] == b"Y":
                (oid,) = struct.unpack_from(">I", message, 1)
                _, name, _ = message[5:].split(b"\0")
                # For a domain this is the name of the type below it.
                self._types[oid] = name.decode()
                continue
            relation = self._relation(message)
            known = self._relations.get(relation.oid)
            history = learned.setdefault(relation.oid, [(-1, known)] if known is not None else [])
            history.append((index, relation))
            self._relations[relation.oid] = relation
        return learned

    def _relation(self, message: bytes) -> Relation:
        (oid,) = struct.unpack_from(">I", message, 1)
        schema, table, rest = message[5:].split(b"\0", 2)
        identity = chr(rest[0])
        (count,) = struct.unpack_from(">h", rest, 1)
        columns, place = [], 3
        for _ in range(count):
            flags = rest[place]
            end = rest.index(b"\0", place + 1)
            type_oid, modifier = struct.unpack_from(">Ii", rest, end + 1)
            columns.append(
                Column(
                    rest[place + 1 : end].decode(),
                    type_oid,
                    self._types.get(type_oid) or TYPE_NAMES.get(type_oid) or f"oid {type_oid}",
                    modifier,
                    bool(flags & _KEY_FLAG),
                )
            )
            place = end + 9
        name = (schema.decode() or "pg_catalog", table.decode())
        if identity == "f":
            named = self._primary_keys.get(name, ())
            found = tuple(number for number, column in enumerate(columns) if column.name in named)
            key = found if len(found) == len(named) else ()
        else:
            key = tuple(number for number, column in enumerate(columns) if column.in_identity)
        return Relation(oid, *name, identity, tuple(columns), key)

    def _assemble(
        self,
        batch: _Slice,
        rows: Places,
        relation_ids: Places,
        learned: Mapping[int, list[tuple[int, Relation]]],
        transactions: Places,
        sequence: Places,
        lsns: Places,
        times: Places,
        xids: Places,
    ) -> Any:
        count = len(rows)
        if not count:
            return _nothing()
        relations: list[Relation] = []
        relation_of = np.empty(count, np.int64)
        keys, befores, afters = _Scattered(count), _Scattered(count), _Scattered(count)
        unchanged = _Lists(count)
        for relation, members in self._by_relation(rows, relation_ids, learned):
            relation_of[members] = len(relations)
            relations.append(relation)
            _write_images(relation, batch, rows[members], members, keys, befores, afters, unchanged)

        descriptions: list[str | None] = [None] * count
        for number, relation in enumerate(relations):
            if relation.columns_hash not in self._described:
                self._described.add(relation.columns_hash)
                descriptions[int(np.argmax(relation_of == number))] = relation.description
        operations = np.searchsorted(np.frombuffer(b"DITU", np.uint8), batch.kinds[rows])
        commit_lsns = lsns[transactions]

        def spread(texts: Sequence[str], which: Places) -> Any:
            return pa.array(texts, pa.string()).take(pa.array(which))

        return pa.RecordBatch.from_arrays(
            [
                change_ids(commit_lsns, sequence),
                pa.array(xids[transactions], pa.int64()),
                pa.array(commit_lsns, pa.int64()),
                pa.array(times[transactions], pa.int64()).view(pa.timestamp("us", "UTC")),
                pa.array(sequence, pa.int64()),
                spread([relation.schema for relation in relations], relation_of),
                spread([relation.table for relation in relations], relation_of),
                spread(["delete", "insert", "truncate", "update"], operations),
                keys.array(),
                befores.array(),
                afters.array(),
                unchanged.array(),
                spread([relation.columns_hash for relation in relations], relation_of),
                pa.array(descriptions, pa.string()),
            ],
            schema=SCHEMA,
        )

    def _by_relation(
        self, rows: Places, relation_ids: Places, learned: Mapping[int, list[tuple[int, Relation]]]
    ) -> Iterator[tuple[Relation, Places]]:
        """The changes of each relation as it was then: the relation and their numbers."""
        same = bool((relation_ids == relation_ids[0]).all())
        for oid in [int(relation_ids[0])] if same else np.unique(relation_ids).tolist():
            members = np.arange(len(rows)) if same else np.flatnonzero(relation_ids == oid)
            history = learned.get(oid)
            if history is None:
                if oid not in self._relations:
                    raise MalformedMessage(f"a change of table {oid}, which was never described")
                yield self._relations[oid], members
                continue
            version = np.searchsorted(np.array([index for index, _ in history]), rows[members]) - 1
            if (version < 0).any():
                raise MalformedMessage(f"a change of table {oid} before its description")
            for number in np.unique(version).tolist():
                yield history[number][1], members[version == number]


class _Numbers:
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
class _Slice:
    """A batch of messages."""

    data: Bytes
    at: Places
    stop: Places
    kinds: Bytes
    numbers: _Numbers


def _nothing() -> Any:
    return pa.RecordBatch.from_arrays([pa.array([], column.type) for column in SCHEMA], schema=SCHEMA)


def _spread_truncates(
    numbers: _Numbers, at: Places, kinds: Bytes, rows: Places, relation_ids: Places
) -> tuple[Places, Places]:
    """One TRUNCATE of several tables is one change of each."""
    truncates = kinds[rows] == ord("T")
    repeats = np.where(truncates, relation_ids, 1)  # where a row has its table, a truncate has how many
    spread = np.repeat(np.arange(len(rows)), repeats)
    nth = np.arange(len(spread)) - (np.cumsum(repeats) - repeats)[spread]
    oids = np.where(truncates[spread], numbers.oid(at[rows[spread]] + 6 + 4 * nth), relation_ids[spread])
    return rows[spread], oids


def _take_apart(batch: _Slice, places: Places, columns: int) -> _Tuples:
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


def _write_images(
    relation: Relation,
    batch: _Slice,
    messages: Places,
    members: Places,
    keys: _Scattered,
    befores: _Scattered,
    afters: _Scattered,
    unchanged: _Lists,
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


class _Scattered:
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


class _Lists:
    """A column of lists of names, most of them empty."""

    def __init__(self, count: int) -> None:
        self._which = np.zeros(count, np.int64)
        self._lists: list[list[str]] = [[]]

    def put(self, members: Places, names: list[str]) -> None:
        self._which[members] = len(self._lists)
        self._lists.append(names)

    def array(self) -> Any:
        return pa.array(self._lists, pa.list_(pa.string())).take(pa.array(self._which))


_HEX: Final[Bytes] = np.frombuffer(b"0123456789abcdef", np.uint8)
_ID_WIDTH: Final = 25


def change_ids(commit_lsns: Places, sequence: Places) -> Any:
    """The id of each change: its commit's LSN, a hyphen and its sequence, in hexadecimal of fixed width."""
    count = len(sequence)
    text = np.empty((count, _ID_WIDTH), np.uint8)
    for digits, column, numbers in ((16, 0, commit_lsns), (8, 17, sequence)):
        for digit in range(digits):
            text[:, column + digit] = _HEX[(numbers >> (4 * (digits - 1 - digit))) & 15]
    text[:, 16] = ord("-")
    offsets = np.arange(0, (count + 1) * _ID_WIDTH, _ID_WIDTH, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(text.reshape(-1)))
