"""Decoder for pgoutput, protocol version 1: message bytes to changes, a batch at a time. No I/O.

`Slot.read` feeds it batches of messages. Each batch is decoded column by column with numpy: no Python code runs once
per change. State kept between batches: the open transaction, and the last Relation and Type message of each oid.
The format: https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from headwater.capture.json_text import TYPE_NAMES, Bytes, Integers
from headwater.capture.relation import Column, Relation
from headwater.capture.row_images import (
    IntegerReader,
    MalformedMessage,
    MessageBatch,
    NameListBuilder,
    TextColumnBuilder,
    write_images,
)

SCHEMA: Final = pa.schema(
    [
        ("id", pa.string()),  # commit LSN and sequence, of fixed width: sorts like the changes
        ("xid", pa.int64()),
        ("commit_lsn", pa.int64()),
        ("committed_at", pa.timestamp("us", "UTC")),
        ("sequence", pa.int64()),  # within the transaction, from 0; counts changes only
        ("schema", pa.string()),
        ("table", pa.string()),
        ("operation", pa.string()),  # insert, update, delete, truncate
        ("key", pa.string()),  # JSON; null for a table without a key
        ("before", pa.string()),  # JSON: the whole row or its key, depending on the replica identity; else null
        ("after", pa.string()),  # JSON, without the columns in `unchanged`; null for delete and truncate
        ("unchanged", pa.list_(pa.string())),  # TOASTed values that the update did not modify and so did not log
        ("columns_hash", pa.string()),  # changes when the table's columns do
        ("columns", pa.string()),  # JSON: description of the columns; on the first change of each hash in a read
    ]
)

OPERATIONS: Final = ("delete", "insert", "truncate", "update")  # in the order of their message letters
_EPOCH_MICROSECONDS: Final = 946_684_800_000_000  # 2000-01-01, from 1970
_KEY_FLAG: Final = 1

__all__ = ["OPERATIONS", "SCHEMA", "Decoder", "MalformedMessage", "change_ids"]


@dataclass(frozen=True, slots=True)
class _Transaction:
    """The transaction that is still open at the end of a batch."""

    xid: int
    commit_lsn: int
    committed_at: int
    changes: int


_NO_TRANSACTION: Final = _Transaction(xid=0, commit_lsn=-1, committed_at=0, changes=0)


class Decoder:
    """Decodes the messages of one read, in batches of any size.

    It returns the changes of transactions that committed at `start` or later and before `end`; Relation messages are
    processed in all transactions. `primary_keys` gives the key of tables with replica identity FULL, whose messages
    do not contain it.
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
        """Decode a batch of messages (an Arrow binary array) into a RecordBatch of SCHEMA."""
        count = len(messages)
        if not count:
            return _nothing()
        _, offset_buffer, data_buffer = messages.buffers()
        data: Bytes = np.frombuffer(data_buffer, np.uint8)
        bounds = np.frombuffer(offset_buffer, np.int32)[messages.offset : messages.offset + count + 1].astype(np.int64)
        at, stop = bounds[:-1], bounds[1:]
        if (stop <= at).any():
            raise MalformedMessage("empty message")
        kinds = data[at]
        numbers = IntegerReader(data)

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
            MessageBatch(data, at, stop, kinds, numbers),
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
        """Check that the read ended at a transaction boundary."""
        if self._open is not None:
            raise MalformedMessage("the messages ended in the middle of a transaction")

    def _remember(
        self, kinds: Bytes, lsns: Integers, times: Integers, xids: Integers, changes: Integers, before: _Transaction
    ) -> None:
        last_begin = int(np.flatnonzero(kinds == ord("B"))[-1]) if len(lsns) > 1 else -1
        commits = np.flatnonzero(kinds == ord("C"))
        if len(commits) and commits[-1] > last_begin:
            self._open = None
        elif len(lsns) > 1 or self._open is not None:
            done = int(changes[-1]) + (before.changes if len(lsns) == 1 else 0)
            self._open = _Transaction(int(xids[-1]), int(lsns[-1]), int(times[-1]), done)

    def _learn(self, data: Bytes, at: Integers, stop: Integers, kinds: Bytes) -> dict[int, list[tuple[int, Relation]]]:
        """The relations described in this batch: for each oid, the message index from which each version applies."""
        learned: dict[int, list[tuple[int, Relation]]] = {}
        for index in np.flatnonzero((kinds == ord("R")) | (kinds == ord("Y"))).tolist():
            message = data[at[index] : stop[index]].tobytes()
            if message[:1] == b"Y":
                (oid,) = struct.unpack_from(">I", message, 1)
                _, name, _ = message[5:].split(b"\0")
                # For a domain this is the name of its base type.
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
        columns, offset = [], 3
        for _ in range(count):
            flags = rest[offset]
            end = rest.index(b"\0", offset + 1)
            type_oid, modifier = struct.unpack_from(">Ii", rest, end + 1)
            columns.append(
                Column(
                    rest[offset + 1 : end].decode(),
                    type_oid,
                    self._types.get(type_oid) or TYPE_NAMES.get(type_oid) or f"oid {type_oid}",
                    modifier,
                    bool(flags & _KEY_FLAG),
                )
            )
            offset = end + 9
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
        batch: MessageBatch,
        rows: Integers,
        relation_ids: Integers,
        learned: Mapping[int, list[tuple[int, Relation]]],
        transactions: Integers,
        sequence: Integers,
        lsns: Integers,
        times: Integers,
        xids: Integers,
    ) -> Any:
        count = len(rows)
        if not count:
            return _nothing()
        relations: list[Relation] = []
        relation_of = np.empty(count, np.int64)
        keys, befores, afters = TextColumnBuilder(count), TextColumnBuilder(count), TextColumnBuilder(count)
        unchanged = NameListBuilder(count)
        for relation, members in self._by_relation(rows, relation_ids, learned):
            relation_of[members] = len(relations)
            relations.append(relation)
            write_images(relation, batch, rows[members], members, keys, befores, afters, unchanged)

        descriptions: list[str | None] = [None] * count
        for number, relation in enumerate(relations):
            if relation.columns_hash not in self._described:
                self._described.add(relation.columns_hash)
                descriptions[int(np.argmax(relation_of == number))] = relation.description
        operations = np.searchsorted(np.frombuffer(b"DITU", np.uint8), batch.kinds[rows])
        commit_lsns = lsns[transactions]

        def spread(texts: Sequence[str], which: Integers) -> Any:
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
                spread(OPERATIONS, operations),
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
        self, rows: Integers, relation_ids: Integers, learned: Mapping[int, list[tuple[int, Relation]]]
    ) -> Iterator[tuple[Relation, Integers]]:
        """Each version of each relation with the indexes of its changes."""
        same = bool((relation_ids == relation_ids[0]).all())
        for oid in [int(relation_ids[0])] if same else np.unique(relation_ids).tolist():
            members = np.arange(len(rows)) if same else np.flatnonzero(relation_ids == oid)
            history = learned.get(oid)
            if history is None:
                if oid not in self._relations:
                    raise MalformedMessage(f"change of table {oid} without a Relation message")
                yield self._relations[oid], members
                continue
            version = np.searchsorted(np.array([index for index, _ in history]), rows[members]) - 1
            if (version < 0).any():
                raise MalformedMessage(f"change of table {oid} before its Relation message")
            for number in np.unique(version).tolist():
                yield history[number][1], members[version == number]


def _nothing() -> Any:
    return pa.RecordBatch.from_arrays([pa.array([], column.type) for column in SCHEMA], schema=SCHEMA)


def _spread_truncates(
    numbers: IntegerReader, at: Integers, kinds: Bytes, rows: Integers, relation_ids: Integers
) -> tuple[Integers, Integers]:
    """Expand a TRUNCATE of several tables into one change per table."""
    truncates = kinds[rows] == ord("T")
    repeats = np.where(truncates, relation_ids, 1)  # a Truncate message has the number of tables in this field
    spread = np.repeat(np.arange(len(rows)), repeats)
    nth = np.arange(len(spread)) - (np.cumsum(repeats) - repeats)[spread]
    oids = np.where(truncates[spread], numbers.oid(at[rows[spread]] + 6 + 4 * nth), relation_ids[spread])
    return rows[spread], oids


_HEX: Final[Bytes] = np.frombuffer(b"0123456789abcdef", np.uint8)
_ID_WIDTH: Final = 25


def change_ids(commit_lsns: Integers, sequence: Integers) -> Any:
    """The id of each change: commit LSN, hyphen, sequence, in hexadecimal of fixed width."""
    count = len(sequence)
    text = np.empty((count, _ID_WIDTH), np.uint8)
    for digits, column, numbers in ((16, 0, commit_lsns), (8, 17, sequence)):
        for digit in range(digits):
            text[:, column + digit] = _HEX[(numbers >> (4 * (digits - 1 - digit))) & 15]
    text[:, 16] = ord("-")
    offsets = np.arange(0, (count + 1) * _ID_WIDTH, _ID_WIDTH, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(text.reshape(-1)))
