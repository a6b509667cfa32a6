"""Captured tables as they are now: each a Delta table that every batch of changes is merged into, once."""

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
from headwater.lake.columns import CapturedColumn, Row, columns_of, described, reader_of, schema_of, typed, widens
from headwater.lake.files import DataFile, filesystem
from headwater.lake.fold import Folded, Resolved, fold, resolve
from headwater.lake.table import WRITTEN, Location, add_actions, despite_others, noting, open_or_create, open_table

# A merge holds so many changes in memory; a larger transaction is merged in several steps, each noted.
CHANGES_PER_MERGE: Final = 200_000
BYTES_PER_MERGE: Final = 64 << 20
_DELETED: Final = "headwater_deleted"
_KEPT: Final = "headwater_kept_{}"

Place = tuple[int, int]
"""A change's place in its source: the LSN of its commit, and its number within the transaction."""


@dataclass(slots=True)
class _Waiting:
    """Changes of one table that have the same columns, and wait to be merged."""

    table: CurrentTable
    columns: tuple[CapturedColumn, ...]
    pieces: list[Any] = field(default_factory=list)
    last: Place = (0, 0)


class CurrentTables:
    """The captured tables below one place of the lake, as one pipeline keeps them."""

    def __init__(self, root: Location, *, app: str, as_text: Sequence[str] = ()) -> None:
        self._root = root
        self._app = app
        self._as_text = tuple(as_text)
        self._tables: dict[tuple[str, str], CurrentTable] = {}
        self._known: dict[str, tuple[CapturedColumn, ...]] = {}

    def table(self, schema: str, name: str) -> CurrentTable:
        """The lake's table of a captured one."""
        if (schema, name) not in self._tables:
            location = self._root.child(f"{schema}.{name}")
            self._tables[schema, name] = CurrentTable(location, f"{schema}.{name}", self._app)
        return self._tables[schema, name]

    def apply(self, batches: Iterable[Any]) -> dict[str, int]:
        """Merge changes, given in their order as RecordBatches of the capture's schema; how many were of each table.

        Those that a table has already are left out, so any part of the past can be repeated.
        """
        waiting: dict[tuple[str, str], _Waiting] = {}
        applied: dict[str, int] = {}
        held = bytes_held = 0
        for delta in self.touched():
            delta.update_incremental()
        for batch in batches:
            for (schema, name, columns_hash), rows in _runs(batch):
                table = self.table(schema, name)
                columns = self._columns(table, columns_hash, rows)
                rows = _after(rows, table.place())
                if not rows.num_rows:
                    continue
                queue = waiting.get((schema, name))
                if queue is not None and queue.columns != columns:
                    self._merge([waiting.pop((schema, name))], applied)
                    queue = None
                if queue is None:
                    queue = waiting[schema, name] = _Waiting(table, columns)
                queue.pieces.append(rows)
                held += rows.num_rows
                bytes_held += rows.nbytes
            if held >= CHANGES_PER_MERGE or bytes_held >= BYTES_PER_MERGE:
                self._merge(waiting.values(), applied)
                waiting.clear()
                held = bytes_held = 0
        self._merge(waiting.values(), applied)
        return applied

    def touched(self) -> list[DeltaTable]:
        """The tables that were opened here."""
        return [table.delta for table in self._tables.values() if table.delta is not None]

    def _columns(self, table: CurrentTable, columns_hash: str, rows: Any) -> tuple[CapturedColumn, ...]:
        """What the columns of these changes are: told with the first of them, or known from before."""
        told = rows.column("columns").drop_null()
        if len(told):
            self._known[columns_hash] = described(told[0].as_py(), as_text=self._as_text)
        columns = self._known.get(columns_hash)
        if columns is None:
            # The change that told it was filtered out on the way. What the lake's own table says will do: a column
            # that it does not have is found out when the values are looked at.
            columns = table.columns()
        return columns

    def _merge(self, queues: Iterable[_Waiting], applied: dict[str, int]) -> None:
        for queue in queues:
            changes = pa.Table.from_batches(queue.pieces)
            queue.table.merge(changes, queue.columns)
            applied[queue.table.name] = applied.get(queue.table.name, 0) + changes.num_rows


class CurrentTable:
    """One captured table in the lake. It notes the place of the last change that is in it."""

    def __init__(self, location: Location, name: str, app: str) -> None:
        self.name = name
        self.delta = open_table(location)
        self.location = location
        self._app = app

    def place(self) -> Place:
        """The place of the last change that is in it, as this process knows."""
        if self.delta is None:
            return (-1, -1)
        lsn = self.delta.transaction_version(self._app)
        sequence = self.delta.transaction_version(f"{self._app}/sequence")
        return (-1, -1) if lsn is None or sequence is None else (lsn, sequence)

    def columns(self) -> tuple[CapturedColumn, ...]:
        """The columns as the lake's table has them."""
        if self.delta is None:
            raise InvalidRequest(
                f"nothing says what the columns of {self.name} are",
                hint="A transform before keep: current must let the rows through that carry `columns`.",
            )
        return columns_of(pa.schema(self.delta.schema().to_arrow()))

    def merge(self, changes: Any, columns: tuple[CapturedColumn, ...]) -> None:
        """Bring these changes, which come after what it has and are in order, into it in one commit."""
        self._refuse_keyless(columns)
        table = self.created(columns)
        columns = self._fitted(table, columns)
        told = changes.select(["operation", "key", "before", "after", "unchanged"])
        folded = fold((row for batch in told.to_batches() for row in batch.to_pylist()), columns)
        last = (changes.column("commit_lsn")[-1].as_py(), changes.column("sequence")[-1].as_py())
        found = self.place()

        def commit() -> None:
            table.update_incremental()
            if self.place() >= last:
                return
            self._refuse_other(found)
            properties = noting({self._app: last[0], f"{self._app}/sequence": last[1]})
            rows, kept = self._rows(folded, columns)
            if folded.truncated:
                write_deltalake(
                    table,
                    rows.filter(pc.invert(rows[_DELETED])).select([column.name for column in columns]),
                    mode="overwrite",
                    schema_mode="merge",
                    commit_properties=properties,
                    writer_properties=WRITTEN,
                )
            else:
                _merge(table, rows, columns, kept, properties)
            table.update_incremental()

        despite_others(commit)

    def load(self, files: Sequence[DataFile], columns: Sequence[CapturedColumn], *, found: int) -> None:
        """Let these files, written below it, be all that it has. `found` is what `loads` said before.

        What it notes of changes stays: those after it are not in the files, or do no harm.
        """
        table = self.created(columns)

        def commit() -> None:
            table.update_incremental()
            if self.loads() != found:
                raise LakeBusy(
                    f"another process has loaded {self.name} meanwhile", hint="Stop one of both, then run this again."
                )
            table.create_write_transaction(
                add_actions(files),
                "overwrite",
                Schema.from_arrow(schema_of(columns)),
                commit_properties=noting({f"{self._app}/loads": found + 1}),
            )
            table.update_incremental()

        despite_others(commit)

    def loads(self) -> int:
        """How often it was loaded from a snapshot, as this process knows."""
        return (self.delta.transaction_version(f"{self._app}/loads") or 0) if self.delta is not None else 0

    def created(self, columns: Sequence[CapturedColumn]) -> DeltaTable:
        """Its Delta table, made if it is missing."""
        self._refuse_keyless(columns)
        if self.delta is None:
            self.delta = open_or_create(self.location, schema_of(columns))
        return self.delta

    # -- how

    def _refuse_keyless(self, columns: Sequence[CapturedColumn]) -> None:
        if not any(column.in_key for column in columns):
            raise CaptureRefused(
                f"the table {self.name} has no key, so nobody can tell which of its rows changed",
                hint="Give it a primary key, or a replica identity that uses a unique index; or use keep: history.",
            )

    def _refuse_other(self, found: Place) -> None:
        if self.place() != found:
            raise LakeBusy(
                f"another process merges changes of {self.name} for the same pipeline",
                hint="Stop one of both, then run this again. Nothing was merged twice.",
            )

    def _fitted(self, table: DeltaTable, columns: Sequence[CapturedColumn]) -> tuple[CapturedColumn, ...]:
        """Let the table have what changes with these columns bring; the columns as the table then has them."""
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
                # A change from before the table was loaded with its columns of now.
                fitted.append(replace(old, in_key=column.in_key))
            elif widens(old.type, column.type):
                wider[column.name] = column
                fitted.append(column)
            else:
                raise InvalidRequest(
                    f"the column {column.name!r} of {self.name} was {old.type} in the lake and is {column.type} now",
                    hint="Load the table anew: stop the pipeline, run `headwater pipeline reset`, start it again.",
                )
        if wider:
            despite_others(lambda: self._rewrite(table, wider))
        missing = [column.field for column in columns if column.name not in have]
        if missing:
            despite_others(lambda: _add_columns(table, missing))
        for column in fitted:
            if column.name in have and column.name not in wider and have[column.name] != column:
                despite_others(partial(_describe, table, column))
        return tuple(fitted)

    def _rewrite(self, table: DeltaTable, wider: Mapping[str, CapturedColumn]) -> None:
        """Write the whole table anew, with some of its columns as wider types."""
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
            writer_properties=WRITTEN,
        )
        table.update_incremental()

    def _rows(self, folded: Folded, columns: Sequence[CapturedColumn]) -> tuple[Any, list[str]]:
        """The source of the merge: the last state of each row or that it is gone; and which columns some rows keep."""
        resolved: list[Resolved] = []
        gone: list[Row] = []
        names, read = frozenset(column.name for column in columns), reader_of(columns)
        for key, state in folded.states.items():
            if state is None:
                gone.append(read(key))
            else:
                resolved.append(resolve(key, state, names, read))
        self._refuse_unknown(resolved, columns)
        resolved = self._fetched(resolved, columns)
        kept = [column.name for column in columns if any(column.name in row.kept for row in resolved)]
        rows = typed([row.values for row in resolved] + gone, columns)
        flags = pa.array([False] * len(resolved) + [True] * len(gone), pa.bool_())
        rows = rows.append_column(_DELETED, flags)
        for number, name in enumerate(kept):
            marks = [name in row.kept for row in resolved] + [False] * len(gone)
            rows = rows.append_column(_KEPT.format(number), pa.array(marks, pa.bool_()))
        return rows, kept

    def _refuse_unknown(self, resolved: Sequence[Resolved], columns: Sequence[CapturedColumn]) -> None:
        names = {column.name for column in columns}
        unknown = {name for row in resolved for name in row.values.keys() - names}
        if unknown:
            raise InvalidRequest(
                f"{self.name} has columns that nothing describes: {', '.join(sorted(unknown))}",
                hint="A transform before keep: current must let the rows through that carry `columns`.",
            )

    def _fetched(self, resolved: list[Resolved], columns: Sequence[CapturedColumn]) -> list[Resolved]:
        """With the large values of rows whose key changed, from where the lake has them."""
        moved = [row for row in resolved if row.origin is not None and row.origin != row.key]
        if not moved:
            return resolved
        key, read = [column for column in columns if column.in_key], reader_of(columns)
        names = [column.name for column in key]
        origins = typed([read(row.origin or "") for row in moved], key)
        wanted = sorted({name for row in moved for name in row.kept} - set(names))
        assert self.delta is not None
        first = ds.field(names[0]).isin(origins[names[0]].combine_chunks())
        found = _dataset(self.delta).to_table(columns=[*names, *wanted], filter=first).to_pylist()
        by_key = {tuple(row[name] for name in names): row for row in found}
        filled = {}
        for row, origin in zip(moved, origins.to_pylist(), strict=True):
            there = by_key.get(tuple(origin[name] for name in names), {})
            filled[row.key] = {name: there.get(name) for name in row.kept}
        plain = {column.name: column for column in columns}
        return [
            Resolved(row.key, row.values | _as_told(filled[row.key], plain), frozenset(), None)
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
    """Note what a column is in Postgres by now."""
    table.update_incremental()
    about = {name.decode(): value.decode() for name, value in column.field.metadata.items()}
    table.alter.set_column_metadata(column.name, about)
    table.update_incremental()


def _as_told(values: Mapping[str, Any], columns: Mapping[str, CapturedColumn]) -> Row:
    """Values of the lake as changes tell them. Only those that Postgres stores apart can be missing from a change."""
    return {
        name: "\\x" + value.hex() if isinstance(value, bytes) and columns[name].type == pa.binary() else _text(value)
        for name, value in values.items()
    }


def _text(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | str) else str(value)


def _runs(batch: Any) -> Iterable[tuple[tuple[str, str, str], Any]]:
    """The rows of each table with each set of columns, in the order of their first."""
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


def _after(rows: Any, place: Place) -> Any:
    """The changes after a place."""
    lsn, sequence = place
    lsns, sequences = rows.column("commit_lsn"), rows.column("sequence")
    later = pc.or_(pc.greater(lsns, lsn), pc.and_(pc.equal(lsns, lsn), pc.greater(sequences, sequence)))
    return rows if pc.all(later).as_py() else rows.filter(later)


def _dataset(table: DeltaTable) -> Any:
    """The rows of a table that is not split, through its files."""
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
        # Not streamed: then the bounds of the keys in the source rule out files of the table.
        table.merge(
            rows,
            same,
            source_alias="s",
            target_alias="t",
            streamed_exec=False,
            writer_properties=WRITTEN,
            commit_properties=properties,
        )
        .when_matched_delete(f"s.{_DELETED}")
        .when_matched_update(update, f"not s.{_DELETED}")
        .when_not_matched_insert(new, f"not s.{_DELETED}")
        .execute()
    )
