"""Converts captured changes and snapshots to NATS messages in ZeBridge's formats. No I/O.

Input are batches of changes with the columns of `headwater.capture`; output are batches with `frames.SCHEMA`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.nats import codec, frames, subjects
from headwater.nats.codec import Encoding
from headwater.nats.errors import InvalidMessage
from headwater.nats.subjects import Table

CHANGE_COLUMNS: Final = (
    "id", "xid", "commit_lsn", "committed_at", "sequence", "schema", "table", "operation", "before", "after",
    "unchanged",
)  # fmt: skip
OPERATIONS: Final = ("insert", "update", "delete", "truncate")

PACKED_CHANGES: Final = 500
PACKED_BYTES: Final = 524_288
CHUNK_ROWS: Final = 10_000

_TIME: Final = "%Y-%m-%dT%H:%M:%SZ"  # Arrow's %S has the fraction of the column's unit
_TIME_BYTES: Final = len("2026-01-01T00:00:00.000000Z")
_ID_BYTES: Final = len("0000000000000000-00000000")
_NO_DATA: Final = {"msgpack": b"\x80", "json": b"{}"}


# --- changes -------------------------------------------------------------------------------------------------


def change_messages(
    changes: pa.RecordBatch, *, encoding: Encoding = "msgpack", timeline: int | None = None
) -> pa.RecordBatch:
    """One message for each change, in order. `timeline` is the WAL timeline of the changes."""
    if changes.num_rows == 0:
        return _batch([], [], [], [])
    kinds = _ChangeKinds(changes, timeline)
    return pa.RecordBatch.from_arrays(
        [
            kinds.texts(lambda kind: kind.subject),
            kinds.msg_ids(),
            pa.nulls(changes.num_rows, pa.binary()),
            _events(changes, kinds, encoding),
        ],
        schema=frames.SCHEMA,
    )


class Packer:
    """Packs the changes of one transaction to one table into messages of limited count and size.

    Message boundaries depend on the changes alone, not on the batches in which they arrive, so that a repeated read
    gives the same message ids. Therefore the last changes of a batch are held back until the next batch or `finish`.
    """

    def __init__(
        self,
        *,
        encoding: Encoding = "msgpack",
        packed_changes: int = PACKED_CHANGES,
        packed_bytes: int = PACKED_BYTES,
        timeline: int | None = None,
    ) -> None:
        self._timeline: Final = timeline
        self._encoding: Final[Encoding] = encoding
        self._packed_changes: Final = packed_changes
        self._packed_bytes: Final = packed_bytes
        self._held: pa.RecordBatch | None = None

    def add(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        """Return the messages that these changes complete."""
        changes = changes.select(CHANGE_COLUMNS)
        if self._held is not None and self._held.num_rows:
            changes = pa.concat_batches([self._held, changes])
        if changes.num_rows == 0:
            return _batch([], [], [], [])
        lsns, spans = self._spans(changes)
        last = np.flatnonzero((lsns != lsns[-1]) | (spans != spans[-1]))
        complete = int(last[-1]) + 1 if len(last) else 0
        self._held = changes.slice(complete)
        return self._pack(changes.slice(0, complete))

    def finish(self) -> pa.RecordBatch:
        """Return the messages that were held back."""
        held, self._held = self._held, None
        return _batch([], [], [], []) if held is None else self._pack(held)

    def _spans(self, changes: pa.RecordBatch) -> tuple[Any, Any]:
        return (
            changes.column("commit_lsn").to_numpy(zero_copy_only=False),
            changes.column("sequence").to_numpy(zero_copy_only=False) // self._packed_changes,
        )

    def _pack(self, changes: pa.RecordBatch) -> pa.RecordBatch:
        if changes.num_rows == 0:
            return _batch([], [], [], [])
        kinds = _ChangeKinds(changes, self._timeline)
        lsns, spans = self._spans(changes)
        tables = kinds.table_numbers()
        # Order the packs by their first change; within a pack the changes keep their order.
        _, first, pack = np.unique(np.stack([lsns, spans, tables]), axis=1, return_index=True, return_inverse=True)
        rank = first[pack.reshape(-1)]
        order = np.argsort(rank, kind="stable")
        sorted_rank = rank[order]
        ends = [*(np.flatnonzero(sorted_rank[1:] != sorted_rank[:-1]) + 1).tolist(), len(order)]

        events = _events(changes, kinds, self._encoding).take(pa.array(order))
        _, offset_buffer, data = events.buffers()
        offsets = np.frombuffer(offset_buffer, np.int32)[events.offset : events.offset + len(events) + 1]
        held = memoryview(data)
        ids = changes.column("id").take(pa.array(order)).to_pylist()
        codes = kinds.codes[order]
        out: tuple[list[str], list[str], list[Any], list[bytes]] = ([], [], [], [])
        start = 0
        for end in ends:
            while start < end:
                limit = offsets[start] + self._packed_bytes
                stop = min(end, max(start + 1, int(np.searchsorted(offsets, limit, side="right")) - 1))
                used = {kinds.kinds[code] for code in set(codes[start:stop].tolist())}
                table = next(iter(used)).table
                operation = next(iter(used)).operation if len(used) == 1 else "mixed"
                out[0].append(subjects.packed_subject(table, operation))
                out[1].append(
                    f"{ids[start]}-to-{ids[stop - 1][17:]}-{table.full_name}-batch{id_suffix(self._timeline)}"
                )
                out[2].append(None)
                out[3].append(self._array(held, offsets, start, stop))
                start = stop
        return _batch(*out)

    def _array(self, held: memoryview, offsets: Any, start: int, stop: int) -> bytes:
        body = bytes(held[offsets[start] : offsets[stop]])
        if self._encoding == "msgpack":
            return _array_head(stop - start) + body
        parts = [bytes(held[offsets[row] : offsets[row + 1]]) for row in range(start, stop)]
        return b"[" + b",".join(parts) + b"]"


@dataclass(frozen=True, slots=True)
class _ChangeKind:
    """One operation on one table: the fields that its changes share."""

    table: Table
    operation: str
    timeline: int | None

    @property
    def subject(self) -> str:
        return subjects.change_subject(self.table, self.operation)

    @property
    def id_suffix(self) -> str:
        return f"-{self.table.full_name}-{self.operation}{id_suffix(self.timeline)}"


def id_suffix(timeline: int | None) -> str:
    """The suffix of message ids for changes of a timeline.

    After a promotion, an LSN of the lost history may be reused by another change, and JetStream would drop its message
    as a duplicate. The first timeline has no suffix, so that most installations never see one.
    """
    return "" if timeline is None or timeline == 1 else f"@{timeline}"


class _ChangeKinds:
    """The kind of each change of a batch. A batch has few kinds, so shared fields are built once for each kind."""

    def __init__(self, changes: pa.RecordBatch, timeline: int | None) -> None:
        missing = [name for name in CHANGE_COLUMNS if name not in changes.schema.names]
        if missing:
            raise InvalidMessage(f"missing columns in a batch of changes: {', '.join(missing)}")
        self._changes = changes
        named = pc.binary_join_element_wise(
            changes.column("schema"), changes.column("table"), changes.column("operation"), "\0"
        )
        if named.null_count:
            raise InvalidMessage("a change has no schema, table or operation")
        encoded = named.dictionary_encode()
        self.codes: Any = encoded.indices.to_numpy(zero_copy_only=False)
        self.kinds: list[_ChangeKind] = []
        for text in encoded.dictionary.to_pylist():
            schema, table, operation = text.split("\0")
            if operation not in OPERATIONS:
                raise InvalidMessage(f"invalid operation {operation!r}: expected {', '.join(OPERATIONS)}")
            self.kinds.append(_ChangeKind(Table(schema, table), operation, timeline))

    def of_kind(self, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        """For each change, the value of its kind."""
        return pa.array(values, kind).take(pa.array(self.codes))

    def texts(self, text: Any) -> pa.Array:
        return self.of_kind([text(kind) for kind in self.kinds], pa.string())

    def msg_ids(self) -> pa.Array:
        return pc.binary_join_element_wise(self._changes.column("id"), self.texts(lambda kind: kind.id_suffix), "")

    def table_numbers(self) -> Any:
        tables = {table: number for number, table in enumerate({kind.table: None for kind in self.kinds})}
        return np.array([tables[kind.table] for kind in self.kinds], np.int64)[self.codes]


def _events(changes: pa.RecordBatch, kinds: _ChangeKinds, encoding: Encoding) -> pa.Array:
    """Encode each change as an event."""
    ids = changes.column("id")
    if ids.null_count or not pc.all(pc.equal(pc.binary_length(ids), _ID_BYTES), min_count=0).as_py():
        raise InvalidMessage(f"invalid id of a change: expected {_ID_BYTES} characters")
    operation = changes.column("operation")
    is_delete = pc.equal(operation, "delete")
    data = pc.if_else(is_delete, changes.column("before"), changes.column("after"))
    old = pc.if_else(pc.equal(operation, "update"), changes.column("before"), pa.scalar(None, pa.string()))
    unchanged = changes.column("unchanged")
    if encoding == "json":
        return _json_events(changes, kinds, data, old, unchanged)
    if encoding == "msgpack":
        return _msgpack_events(changes, kinds, data, old, unchanged)
    raise InvalidMessage(f"invalid encoding {encoding!r}: expected {', '.join(codec.ENCODINGS)}")


def _times(changes: pa.RecordBatch) -> pa.Array:
    # Format each distinct time once: a transaction has one.
    encoded = changes.column("committed_at").dictionary_encode()
    times = pc.strftime(pc.cast(encoded.dictionary, pa.timestamp("us", "UTC")), format=_TIME)
    return times.take(encoded.indices)


def _json_events(changes: pa.RecordBatch, kinds: _ChangeKinds, data: Any, old: Any, unchanged: Any) -> pa.Array:
    def head(kind: _ChangeKind) -> str:
        shared = {
            "table": kind.table.name,
            "schema": kind.table.schema,
            "operation": kind.operation.upper(),
            "subject": kind.subject,
        }
        return json.dumps(shared, ensure_ascii=False, separators=(",", ":"))[:-1] + ',"msg_id":"'

    parts: list[Any] = [
        kinds.texts(head),
        kinds.msg_ids(),
        '","lsn":',
        pc.cast(changes.column("commit_lsn"), pa.string()),
        ',"xid":',
        pc.cast(changes.column("xid"), pa.string()),
        ',"sequence":',
        pc.cast(changes.column("sequence"), pa.string()),
        ',"committed_at":"',
        _times(changes),
        '","data":',
        pc.fill_null(data, "{}"),
    ]
    if old.null_count < len(old):
        parts.append(pc.fill_null(pc.binary_join_element_wise(',"old":', old, ""), ""))
    if _any_listed(unchanged):
        lists = [
            ',"unchanged":' + json.dumps(names, ensure_ascii=False) if names else "" for names in unchanged.to_pylist()
        ]
        parts.append(pa.array(lists, pa.string()))
    return pc.cast(pc.binary_join_element_wise(*parts, "}", ""), pa.binary())


def _msgpack_events(changes: pa.RecordBatch, kinds: _ChangeKinds, data: Any, old: Any, unchanged: Any) -> pa.Array:
    rows = changes.num_rows

    def shared(kind: _ChangeKind) -> bytes:
        values = {
            "table": kind.table.name,
            "schema": kind.table.schema,
            "operation": kind.operation.upper(),
            "subject": kind.subject,
        }
        packed = b"".join(codec.encode(part, "msgpack") for pair in values.items() for part in pair)
        id_bytes = _ID_BYTES + len(kind.id_suffix)
        return packed + codec.encode("msg_id", "msgpack") + _text_head(id_bytes)

    fields = np.full(rows, 0x80 + 10, np.uint8)  # the header of a map with 10 pairs
    ends: list[Any] = []
    if old.null_count < len(old):
        fields += old.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)
        old_key = codec.encode("old", "msgpack")
        ends.append(pc.fill_null(pc.binary_join_element_wise(old_key, _to_msgpack(old), b""), b""))
    if _any_listed(unchanged):
        key = codec.encode("unchanged", "msgpack")
        lists = [key + codec.encode(names, "msgpack") if names else b"" for names in unchanged.to_pylist()]
        fields += np.array([bool(listed) for listed in lists]).astype(np.uint8)
        ends.append(pa.array(lists, pa.binary()))
    return pc.binary_join_element_wise(
        _raw(fields.reshape(-1, 1)),
        kinds.of_kind([shared(kind) for kind in kinds.kinds], pa.binary()),
        pc.cast(kinds.msg_ids(), pa.binary()),
        codec.encode("lsn", "msgpack"),
        _unsigned(changes.column("commit_lsn")),
        codec.encode("xid", "msgpack"),
        _unsigned(changes.column("xid")),
        codec.encode("sequence", "msgpack"),
        _unsigned(changes.column("sequence")),
        codec.encode("committed_at", "msgpack") + _text_head(_TIME_BYTES),
        pc.cast(_times(changes), pa.binary()),
        codec.encode("data", "msgpack"),
        pc.fill_null(_to_msgpack(data), _NO_DATA["msgpack"]),
        *ends,
        b"",
    )


def _any_listed(lists: Any) -> bool:
    return bool(pc.any(pc.greater(pc.list_value_length(lists), 0), min_count=0).as_py())


def _to_msgpack(texts: Any) -> pa.Array:
    """Convert JSON texts to MessagePack; null stays null."""
    present = texts.drop_null() if texts.null_count else texts
    # One call for all texts: the overhead of a call for each would exceed the parsing.
    values = json.loads("[" + ",".join(present.to_pylist()) + "]")
    packed = pa.array(codec.encode_all(values), pa.binary())
    if not texts.null_count:
        return packed
    valid = texts.is_valid().to_numpy(zero_copy_only=False)
    return packed.take(pa.array(np.cumsum(valid) - 1, mask=~valid))


def _unsigned(column: Any) -> pa.Array:
    """Encode numbers as MessagePack uint 64."""
    numbers = column.to_numpy(zero_copy_only=False).astype(">u8")
    block = np.empty((len(numbers), 9), np.uint8)
    block[:, 0] = 0xCF
    block[:, 1:] = numbers.view(np.uint8).reshape(-1, 8)
    return _raw(block)


def _raw(block: Any) -> pa.Array:
    """A 2-dimensional array of bytes as a binary array, one value per row."""
    rows, width = block.shape
    offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int32)
    return pa.BinaryArray.from_buffers(
        pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(block))]
    )


def _text_head(size: int) -> bytes:
    if size < 32:
        return bytes([0xA0 | size])
    return b"\xd9" + bytes([size]) if size < 256 else b"\xda" + size.to_bytes(2, "big")


def _array_head(size: int) -> bytes:
    if size < 16:
        return bytes([0x90 | size])
    return b"\xdc" + size.to_bytes(2, "big") if size < 65_536 else b"\xdd" + size.to_bytes(4, "big")


def _batch(subject: list[str], msg_id: list[str], headers: list[Any], payload: list[bytes]) -> pa.RecordBatch:
    columns = (subject, msg_id, headers, payload)
    arrays = [pa.array(values, field.type) for values, field in zip(columns, frames.SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=frames.SCHEMA)


# --- schemas and snapshots -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SchemaColumn:
    """A column as a schema document describes it."""

    name: str
    data_type: str
    is_nullable: bool = True
    column_default: str | None = None
    primary_key: bool = False


def schema_document(table: Table, columns: Sequence[SchemaColumn], *, timestamp: int) -> dict[str, Any]:
    """The document about a table in the bucket `schemas`."""
    return {
        "table": table.name,
        "schema": f"{table.schema}.{table.name}",
        "timestamp": timestamp,
        "columns": [
            {
                "name": column.name,
                "position": position,
                "data_type": column.data_type,
                "is_nullable": column.is_nullable,
                "column_default": column.column_default,
                "primary_key": column.primary_key,
            }
            for position, column in enumerate(columns, 1)
        ],
    }


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """The metadata of a snapshot, known before its first row is read.

    `visible` is the result of `pg_current_snapshot()`: xmin:xmax:xip. `lsn` is the approximate WAL position, for
    information only. `stream_sequence` is the last sequence of the stream CDC, read before the snapshot was taken.
    """

    table: Table
    snapshot_id: str
    lsn: str
    visible: str
    stream_sequence: int


def chunk_messages(
    snapshot: SnapshotInfo,
    rows: Sequence[Sequence[str]],
    *,
    first_chunk: int = 1,
    encoding: Encoding = "msgpack",
    compressed: bool = False,
    dictionary: bytes | None = None,
) -> pa.RecordBatch:
    """Encode chunks of a snapshot, each a list of rows as JSON objects, as messages."""
    headers: dict[str, str] = {}
    if compressed:
        headers[codec.CONTENT_ENCODING] = "zstd"
        if dictionary is not None:
            headers[codec.DICTIONARY] = subjects.dictionary_key(snapshot.table, codec.dictionary_id(dictionary))
    lines = frames.header_lines(headers) if headers else None
    out: tuple[list[str], list[str], list[Any], list[bytes]] = ([], [], [], [])
    for number, texts in enumerate(rows, first_chunk):
        document = {
            "table": snapshot.table.name,
            "schema": snapshot.table.schema,
            "operation": "snapshot",
            "snapshot_id": snapshot.snapshot_id,
            "chunk": number,
            "lsn": snapshot.lsn,
            "data": json.loads("[" + ",".join(texts) + "]"),
        }
        payload = codec.encode(document, encoding)
        out[0].append(subjects.chunk_subject(snapshot.table, snapshot.snapshot_id, number))
        out[1].append(f"snap-{snapshot.table.full_name}-{snapshot.snapshot_id}-{number}")
        out[2].append(lines)
        out[3].append(codec.compress(payload, dictionary) if compressed else payload)
    return _batch(*out)


def meta_message(
    snapshot: SnapshotInfo,
    *,
    after_lsn: str,
    batch_count: int,
    row_count: int,
    timestamp: int,
    chunk_runs: Sequence[Sequence[int]] | None = None,
    consistent_lsn: str | None = None,
    encoding: Encoding = "msgpack",
) -> pa.RecordBatch:
    """The message after the last chunk, which marks the snapshot as complete.

    `after_lsn` is the end of the WAL, read at any time after the snapshot was taken: later commits are not in the
    snapshot. `chunk_runs` are the numbers of its chunks, as [first, last] pairs. `consistent_lsn` is set if some chunks
    are from later snapshots than `snapshot`; it is an LSN after the last of them.
    """
    document: dict[str, Any] = {
        "snapshot_id": snapshot.snapshot_id,
        "lsn": snapshot.lsn,
        "timestamp": timestamp,
        "batch_count": batch_count,
        "row_count": row_count,
        "table": snapshot.table.name,
        "schema": snapshot.table.schema,
        "snapshot": snapshot.visible,
        "after_lsn": after_lsn,
        "stream_sequence": snapshot.stream_sequence,
    }
    if chunk_runs is not None:
        document["chunks"] = chunk_runs
    if consistent_lsn is not None:
        document |= {"resumed": True, "consistent_lsn": consistent_lsn}
    msg_id = f"snap-{snapshot.table.full_name}-{snapshot.snapshot_id}-meta"
    return _batch([subjects.meta_subject(snapshot.table)], [msg_id], [None], [codec.encode(document, encoding)])


def samples(rows: Sequence[str], encoding: Encoding = "msgpack") -> Iterator[bytes]:
    """Rows as samples for training a dictionary."""
    for row in rows:
        yield codec.encode(json.loads(row), encoding)
