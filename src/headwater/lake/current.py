"""Current state of captured tables: one Delta table each, into which every batch of changes is merged exactly once.

The lake sink calls `CurrentTables.apply` with each batch. Changes are grouped by table, folded into the last state of
each row (`fold.py`) and merged in one Delta commit. The commit also records the offset of the last merged change, so
a repeated batch is skipped. Invariant: the rows and the recorded offset of a table change in the same commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable, Schema, write_deltalake

from headwater.errors import CaptureRefused, InvalidRequest, LakeBusy
from headwater.lake.columns import (
    CapturedColumn,
    Row,
    columns_of,
    parse_columns,
    reader_of,
    schema_of,
    to_arrow,
    widens,
)
from headwater.lake.files import DataFile, filesystem
from headwater.lake.fold import FoldResult, ResolvedRow, fold, resolve
from headwater.lake.table import (
    WRITER_PROPERTIES,
    Location,
    add_actions,
    open_or_create,
    open_table,
    record_versions,
    retry_on_conflict,
)

# Changes that one merge holds in memory. A larger transaction is merged in several commits, each with its offset.
CHANGES_PER_MERGE: Final = 200_000
BYTES_PER_MERGE: Final = 64 << 20
_DELETED: Final = "headwater_deleted"
_KEPT: Final = "headwater_kept_{}"

ChangeOffset = tuple[int, int]
"""The offset of a change: the LSN of its commit, and its sequence within the transaction."""


@dataclass(slots=True)
class _PendingMerge:
    """Buffered changes of one table that have the same columns."""

    table: CurrentTable
    columns: tuple[CapturedColumn, ...]
    pieces: list[Any] = field(default_factory=list)
    last: ChangeOffset = (0, 0)


class CurrentTables:
    """The captured tables of one pipeline, below one location of the lake."""

    def __init__(self, root: Location, *, app: str, as_text: Sequence[str] = ()) -> None:
        self._root = root
        self._app = app
        self._as_text = tuple(as_text)
        self._tables: dict[tuple[str, str], CurrentTable] = {}
        self._known: dict[str, tuple[CapturedColumn, ...]] = {}

    def table(self, schema: str, name: str) -> CurrentTable:
        """The lake table of a captured table."""
        if (schema, name) not in self._tables:
            location = self._root.child(f"{schema}.{name}")
            self._tables[schema, name] = CurrentTable(location, f"{schema}.{name}", self._app)
        return self._tables[schema, name]

    def apply(self, batches: Iterable[Any]) -> dict[str, int]:
        """Merge changes, in order, given as RecordBatches of the capture's schema; return their number by table.

        Idempotent: changes that a table already has are skipped.
        """
        waiting: dict[tuple[str, str], _PendingMerge] = {}
        applied: dict[str, int] = {}
        held = bytes_held = 0
        for delta in self.opened():
            delta.update_incremental()
        for batch in batches:
            for (schema, name, columns_hash), rows in _runs(batch):
                table = self.table(schema, name)
                columns = self._columns(table, columns_hash, rows)
                rows = _after(rows, table.offset())
                if not rows.num_rows:
                    continue
                pending = waiting.get((schema, name))
                if pending is not None and pending.columns != columns:
                    self._merge([waiting.pop((schema, name))], applied)
                    pending = None
                if pending is None:
                    pending = waiting[schema, name] = _PendingMerge(table, columns)
                pending.pieces.append(rows)
                held += rows.num_rows
                bytes_held += rows.nbytes
            if held >= CHANGES_PER_MERGE or bytes_held >= BYTES_PER_MERGE:
                self._merge(waiting.values(), applied)
                waiting.clear()
                held = bytes_held = 0
        self._merge(waiting.values(), applied)
        return applied

    def opened(self) -> list[DeltaTable]:
        """The Delta tables opened so far."""
        return [table.delta for table in self._tables.values() if table.delta is not None]

    def _columns(self, table: CurrentTable, columns_hash: str, rows: Any) -> tuple[CapturedColumn, ...]:
        """The columns of these changes: described in the first of them, or cached by their hash."""
        descriptions = rows.column("columns").drop_null()
        if len(descriptions):
            self._known[columns_hash] = parse_columns(descriptions[0].as_py(), as_text=self._as_text)
        columns = self._known.get(columns_hash)
        if columns is None:
            # A transform filtered out the change with the description. Use the columns of the lake's table;
            # `_refuse_unknown` detects a column that it does not have.
            columns = table.columns()
        return columns

    def _merge(self, merges: Iterable[_PendingMerge], applied: dict[str, int]) -> None:
        for pending in merges:
            changes = pa.Table.from_batches(pending.pieces)
            pending.table.merge(changes, pending.columns)
            applied[pending.table.name] = applied.get(pending.table.name, 0) + changes.num_rows


class CurrentTable:
    """One captured table in the lake. Its Delta log records the offset of the last merged change."""

    def __init__(self, location: Location, name: str, app: str) -> None:
        self.name = name
        self.delta = open_table(location)
        self.location = location
        self._app = app

    def offset(self) -> ChangeOffset:
        """The offset of the last merged change, in the version of the table that this process has loaded."""
        if self.delta is None:
            return (-1, -1)
        lsn = self.delta.transaction_version(self._app)
        sequence = self.delta.transaction_version(f"{self._app}/sequence")
        return (-1, -1) if lsn is None or sequence is None else (lsn, sequence)

    def columns(self) -> tuple[CapturedColumn, ...]:
        """The columns of the lake's table."""
        if self.delta is None:
            raise InvalidRequest(
                f"the columns of {self.name} are unknown: no change described them",
                hint="A transform before keep: current must not filter out the rows that have `columns`.",
            )
        return columns_of(pa.schema(self.delta.schema().to_arrow()))

    def merge(self, changes: Any, columns: tuple[CapturedColumn, ...]) -> None:
        """Merge these changes, which are in order and after the recorded offset, in one commit."""
        self._refuse_keyless(columns)
        table = self.ensure_created(columns)
        columns = self._fit_columns(table, columns)
        selected = changes.select(["operation", "key", "before", "after", "unchanged"])
        folded = fold((row for batch in selected.to_batches() for row in batch.to_pylist()), columns)
        last = (changes.column("commit_lsn")[-1].as_py(), changes.column("sequence")[-1].as_py())
        found = self.offset()

        def commit() -> None:
            table.update_incremental()
            if self.offset() >= last:
                return
            self._refuse_other(found)
            properties = record_versions({self._app: last[0], f"{self._app}/sequence": last[1]})
            rows, kept = self._rows(folded, columns)
            if folded.truncated:
                write_deltalake(
                    table,
                    rows.filter(pc.invert(rows[_DELETED])).select([column.name for column in columns]),
                    mode="overwrite",
                    schema_mode="merge",
                    commit_properties=properties,
                    writer_properties=WRITER_PROPERTIES,
                )
            else:
                _merge(table, rows, columns, kept, properties)
            table.update_incremental()

        retry_on_conflict(commit)

    def load(self, files: Sequence[DataFile], columns: Sequence[CapturedColumn], *, found: int) -> None:
        """Replace the contents of the table by these files, written below it. `found` is the earlier result of `loads`.

        The recorded offset stays: merging later changes again that are already in the files is harmless.
        """
        table = self.ensure_created(columns)

        def commit() -> None:
            table.update_incremental()
            if self.loads() != found:
                raise LakeBusy(
                    f"another process has loaded {self.name} meanwhile",
                    hint="Stop one of the two processes, then retry.",
                )
            table.create_write_transaction(
                add_actions(files),
                "overwrite",
                Schema.from_arrow(schema_of(columns)),
                commit_properties=record_versions({f"{self._app}/loads": found + 1}),
            )
            table.update_incremental()

        retry_on_conflict(commit)

    def loads(self) -> int:
        """How often the table was loaded from a snapshot, in the version that this process has loaded."""
        return (self.delta.transaction_version(f"{self._app}/loads") or 0) if self.delta is not None else 0

    def ensure_created(self, columns: Sequence[CapturedColumn]) -> DeltaTable:
        """The Delta table, created if it is missing."""
        self._refuse_keyless(columns)
        if self.delta is None:
            self.delta = open_or_create(self.location, schema_of(columns))
        return self.delta

    # -- internals

    def _refuse_keyless(self, columns: Sequence[CapturedColumn]) -> None:
        if not any(column.in_key for column in columns):
            raise CaptureRefused(
                f"the table {self.name} has no key, so its changes cannot be matched to rows",
                hint="Give it a primary key, or a replica identity that uses a unique index; or use keep: history.",
            )

    def _refuse_other(self, found: ChangeOffset) -> None:
        if self.offset() != found:
            raise LakeBusy(
                f"another process is merging changes of {self.name} for the same pipeline",
                hint="Stop one of the two processes, then retry. Nothing was merged twice.",
            )

    def _fit_columns(self, table: DeltaTable, columns: Sequence[CapturedColumn]) -> tuple[CapturedColumn, ...]:
        """Add or widen the table's columns to fit these; return the columns with the table's resulting types."""
        have = {column.name: column for column in self.columns()}
        fitted: list[CapturedColumn] = []
        wider: dict[str, CapturedColumn] = {}
        for column in columns:
            old = have.get(column.name, column)
            if old.type == column.type:
                fitted.append(column)
            elif old.type == pa.string():
                fitted.append(replace(column, as_text=True))
            elif widens(column.type, old.type):
                # A change from before the table was loaded with its current columns.
                fitted.append(replace(old, in_key=column.in_key))
            elif widens(old.type, column.type):
                wider[column.name] = column
                fitted.append(column)
            else:
                raise InvalidRequest(
                    f"the type of column {column.name!r} of {self.name} changed from {old.type} to {column.type}, "
                    "which the lake's table cannot be converted to",
                    hint="Reload the table: stop the pipeline, run `headwater pipeline reset`, start it again.",
                )
        if wider:
            retry_on_conflict(lambda: self._rewrite(table, wider))
        missing = [column.field for column in columns if column.name not in have]
        if missing:
            retry_on_conflict(lambda: _add_columns(table, missing))
        for column in fitted:
            if column.name in have and column.name not in wider and have[column.name] != column:
                retry_on_conflict(partial(_describe, table, column))
        return tuple(fitted)

    def _rewrite(self, table: DeltaTable, wider: Mapping[str, CapturedColumn]) -> None:
        """Rewrite the whole table with wider types for some columns."""
        table.update_incremental()
        schema = pa.schema([
            wider[field.name].field if field.name in wider else field for field in pa.schema(table.schema().to_arrow())
        ])  # fmt: skip
        batches = (pa.RecordBatch.from_arrays(
            [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)], schema=schema
        ) for batch in _dataset(table).to_batches())  # fmt: skip
        write_deltalake(
            table,
            pa.RecordBatchReader.from_batches(schema, batches),
            mode="overwrite",
            schema_mode="overwrite",
            writer_properties=WRITER_PROPERTIES,
        )
        table.update_incremental()

    def _rows(self, folded: FoldResult, columns: Sequence[CapturedColumn]) -> tuple[Any, list[str]]:
        """The source rows of the merge, with a flag for deleted rows; and the columns that some rows keep."""
        resolved: list[ResolvedRow] = []
        gone: list[Row] = []
        names, read = frozenset(column.name for column in columns), reader_of(columns)
        for key, state in folded.states.items():
            if state is None:
                gone.append(read(key))
            else:
                resolved.append(resolve(key, state, names, read))
        self._refuse_unknown(resolved, columns)
        resolved = self._fetch_large_values(resolved, columns)
        kept = [column.name for column in columns if any(column.name in row.kept for row in resolved)]
        rows = to_arrow([row.values for row in resolved] + gone, columns)
        flags = pa.array([False] * len(resolved) + [True] * len(gone), pa.bool_())
        rows = rows.append_column(_DELETED, flags)
        for number, name in enumerate(kept):
            is_kept = [name in row.kept for row in resolved] + [False] * len(gone)
            rows = rows.append_column(_KEPT.format(number), pa.array(is_kept, pa.bool_()))
        return rows, kept

    def _refuse_unknown(self, resolved: Sequence[ResolvedRow], columns: Sequence[CapturedColumn]) -> None:
        names = {column.name for column in columns}
        unknown = {name for row in resolved for name in row.values.keys() - names}
        if unknown:
            raise InvalidRequest(
                f"{self.name} has columns without a description: {', '.join(sorted(unknown))}",
                hint="A transform before keep: current must not filter out the rows that have `columns`.",
            )

    def _fetch_large_values(self, resolved: list[ResolvedRow], columns: Sequence[CapturedColumn]) -> list[ResolvedRow]:
        """Fill in the unchanged large values of rows whose key changed, from the lake's row with the old key."""
        moved = [row for row in resolved if row.origin is not None and row.origin != row.key]
        if not moved:
            return resolved
        key, read = [column for column in columns if column.in_key], reader_of(columns)
        names = [column.name for column in key]
        origins = to_arrow([read(row.origin or "") for row in moved], key)
        wanted = sorted({name for row in moved for name in row.kept} - set(names))
        assert self.delta is not None
        first = ds.field(names[0]).isin(origins[names[0]].combine_chunks())
        found = _dataset(self.delta).to_table(columns=[*names, *wanted], filter=first).to_pylist()
        by_key = {tuple(row[name] for name in names): row for row in found}
        filled = {}
        for row, origin in zip(moved, origins.to_pylist(), strict=True):
            stored = by_key.get(tuple(origin[name] for name in names), {})
            filled[row.key] = {name: stored.get(name) for name in row.kept}
        plain = {column.name: column for column in columns}
        return [
            ResolvedRow(row.key, row.values | _as_captured(filled[row.key], plain), frozenset(), None)
            if row.key in filled
            else row
            for row in resolved
        ]


def _add_columns(table: DeltaTable, fields: Sequence[Any]) -> None:
    table.update_incremental()
    have = {field.name for field in table.schema().fields}
    missing = [field for field in Schema.from_arrow(pa.schema(fields)).fields if field.name not in have]
    if missing:
        table.alter.add_columns(missing)
        table.update_incremental()


def _describe(table: DeltaTable, column: CapturedColumn) -> None:
    """Update the Postgres type in the column's metadata."""
    table.update_incremental()
    about = {name.decode(): value.decode() for name, value in column.field.metadata.items()}
    table.alter.set_column_metadata(column.name, about)
    table.update_incremental()


def _as_captured(values: Mapping[str, Any], columns: Mapping[str, CapturedColumn]) -> Row:
    """Values of the lake in the form that changes have. Only types that Postgres can TOAST occur here."""
    return {
        name: "\\x" + value.hex() if isinstance(value, bytes) and columns[name].type == pa.binary() else _text(value)
        for name, value in values.items()
    }


def _text(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | str) else str(value)


def _runs(batch: Any) -> Iterable[tuple[tuple[str, str, str], Any]]:
    """The rows of each table with each set of columns, in the order of their first row."""
    names = ("schema", "table", "columns_hash")
    keys = list(zip(*(batch.column(name).to_pylist() for name in names), strict=True))
    if keys and keys.count(keys[0]) == len(keys):
        yield keys[0], batch
        return
    members: dict[tuple[str, str, str], list[int]] = {}
    for number, key in enumerate(keys):
        members.setdefault(key, []).append(number)
    for key, numbers in members.items():
        yield key, batch.take(pa.array(numbers))


def _after(rows: Any, offset: ChangeOffset) -> Any:
    """The changes after an offset."""
    lsn, sequence = offset
    lsns, sequences = rows.column("commit_lsn"), rows.column("sequence")
    later = pc.or_(pc.greater(lsns, lsn), pc.and_(pc.equal(lsns, lsn), pc.greater(sequences, sequence)))
    return rows if pc.all(later).as_py() else rows.filter(later)


def _dataset(table: DeltaTable) -> Any:
    """The rows of a table without partitions, read from its files."""
    paths = pa.table(table.get_add_actions(flatten=True))["path"].to_pylist()
    schema = pa.schema(table.schema().to_arrow())
    return ds.dataset(paths, schema=schema, format="parquet", filesystem=filesystem(table))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _merge(table: DeltaTable, rows: Any, columns: Sequence[CapturedColumn], kept: list[str], properties: Any) -> None:
    names = [column.name for column in columns]
    new = {_quoted(name): f"s.{_quoted(name)}" for name in names}
    update = dict(new)
    for number, name in enumerate(kept):
        quoted = _quoted(name)
        update[quoted] = f"case when s.{_KEPT.format(number)} then t.{quoted} else s.{quoted} end"
    same = " and ".join(f"t.{_quoted(column.name)} = s.{_quoted(column.name)}" for column in columns if column.in_key)
    (
        # Without streaming, the key bounds of the source let the merge skip files of the table.
        table.merge(
            rows,
            same,
            source_alias="s",
            target_alias="t",
            streamed_exec=False,
            writer_properties=WRITER_PROPERTIES,
            commit_properties=properties,
        )
        .when_matched_delete(f"s.{_DELETED}")
        .when_matched_update(update, f"not s.{_DELETED}")
        .when_not_matched_insert(new, f"not s.{_DELETED}")
        .execute()
    )
