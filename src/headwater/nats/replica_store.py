"""A table's replica in SQLite: its rows and its replication state, always changed in one transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from headwater.nats.errors import InvalidMessage, ReplicaRefused
from headwater.nats.subjects import DEFAULT_SCHEMA, Table

_INTEGERS: Final = frozenset({"smallint", "integer", "bigint", "int2", "int4", "int8", "oid"})
_REALS: Final = frozenset({"real", "double precision", "float4", "float8"})
_BOOLEANS: Final = frozenset({"boolean", "bool"})
_DOCUMENTS: Final = frozenset({"json", "jsonb"})
_BUSY_SECONDS: Final = 30.0

_STATE: Final = """
create table if not exists _headwater_replica (
    name            text    not null primary key,
    snapshot_id     text    not null,
    visible         text    not null,
    after_lsn       integer not null,
    stream_created  text    not null,
    stream_sequence integer not null,
    last_lsn        integer not null,
    last_sequence   integer not null,
    columns         text    not null,
    consistent_lsn      integer not null default 0
) strict
"""


class Diverged(Exception):
    """A change does not fit the rows of the replica: the replica differs from its table."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The replication state.

    `stream_sequence` is the last sequence of the stream CDC that is applied to the rows; `last_lsn` and
    `last_sequence` belong to the last applied change. Below `consistent_lsn`, rows may be ahead of the changes.
    """

    snapshot_id: str
    visible: str
    after_lsn: int
    stream_created: str
    stream_sequence: int
    last_lsn: int
    last_sequence: int
    consistent_lsn: int = 0


class ReplicaStore:
    """One table's replica in an SQLite file."""

    def __init__(self, path: Path | str, table: Table) -> None:
        self.table: Final = table
        self.name: Final = table.name if table.schema == DEFAULT_SCHEMA else f"{table.schema}.{table.name}"
        try:
            # Autocommit: transactions begin and end where `transaction` says.
            self._connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
            self._connection.execute("pragma journal_mode = wal")
            self._connection.execute(_STATE)
            self._add_consistent_lsn()
        except sqlite3.Error as error:
            raise ReplicaRefused(f"cannot use {path}: {error}", hint="Choose an SQLite file, or a new file.") from error
        self._columns: dict[str, _Column] = {}
        self._key: tuple[str, ...] = ()
        self._load_columns()

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction around the block; rolled back if the block raises."""
        self._connection.execute("begin immediate")
        try:
            yield
        except BaseException:
            self._connection.execute("rollback")
            self._load_columns()
            raise
        self._connection.execute("commit")

    # -- state

    def state(self) -> ReplicaState | None:
        """The replication state; None before the first snapshot."""
        row = self._connection.execute(
            "select snapshot_id, visible, after_lsn, stream_created, stream_sequence, last_lsn, last_sequence, "
            "consistent_lsn from _headwater_replica where name = ?",
            (self.name,),
        ).fetchone()
        return None if row is None else ReplicaState(*row)

    def save(self, state: ReplicaState) -> None:
        """Store the replication state."""
        columns = json.dumps([(c.name, c.data_type, c.primary_key) for c in self._columns.values()])
        self._connection.execute(
            "insert or replace into _headwater_replica values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self.name,
                state.snapshot_id,
                state.visible,
                state.after_lsn,
                state.stream_created,
                state.stream_sequence,
                state.last_lsn,
                state.last_sequence,
                columns,
                state.consistent_lsn,
            ),
        )

    def forget(self) -> None:
        """Invalidate the stream sequence, so that the next run takes a snapshot. The rows stay until then."""
        state = self.state()
        if state is not None:
            with self.transaction():
                self._connection.execute(
                    "update _headwater_replica set stream_created = '' where name = ?", (self.name,)
                )

    # -- rows

    def rebuild(self, columns: Sequence[Mapping[str, Any]]) -> None:
        """Replace the replica's table by an empty one with these columns of a schema document."""
        described = {
            str(column["name"]): _Column(
                str(column["name"]), str(column["data_type"]).lower(), bool(column.get("primary_key"))
            )
            for column in columns
        }
        key = tuple(column.name for column in described.values() if column.primary_key)
        if not key:
            raise ReplicaRefused(
                f"{self.table.full_name} has no primary key, so its changes cannot be matched to rows",
                hint="Give the table a primary key.",
            )
        if self.state() is None and self._exists():
            raise ReplicaRefused(
                f"the file already has a table {self.name} that is not a replica",
                hint="Choose another file, or drop the table.",
            )
        self._columns, self._key = described, key
        self._connection.execute(f"drop table if exists {_quoted(self.name)}")
        lines = [f"{_quoted(column.name)} {column.affinity}" for column in described.values()]
        lines.append(f"primary key ({', '.join(map(_quoted, key))})")
        self._connection.execute(f"create table {_quoted(self.name)} ({', '.join(lines)})")

    def add_columns(self, columns: Sequence[Mapping[str, Any]]) -> None:
        """Add the columns of a newer schema document that the replica lacks."""
        for column in columns:
            name = str(column["name"])
            if name not in self._columns:
                added = _Column(name, str(column["data_type"]).lower(), primary_key=False)
                self._columns[name] = added
                self._connection.execute(
                    f"alter table {_quoted(self.name)} add column {_quoted(name)} {added.affinity}"
                )

    def unknown_columns(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has columns that the replica lacks."""
        return not row.keys() <= self._columns.keys()

    def load(self, rows: Iterable[Mapping[str, Any]], *, leniently: bool = False) -> int:
        """Insert the rows of a snapshot; return their number. `leniently`: existing rows are replaced."""
        names = list(self._columns)
        values = [[self._value(name, row.get(name)) for name in names] for row in rows]
        placeholders = ", ".join("?" * len(names))
        try:
            self._connection.executemany(
                f"insert {'or replace ' if leniently else ''}into {_quoted(self.name)} "
                f"({', '.join(map(_quoted, names))}) values ({placeholders})",
                values,
            )
        except sqlite3.IntegrityError as error:
            raise Diverged(f"the snapshot has a duplicate row: {error}") from error
        return len(values)

    def apply(self, event: Mapping[str, Any], *, leniently: bool = False) -> None:
        """Apply one change; Diverged if it does not fit the rows.

        `leniently`: rows may be ahead of the changes, or still missing. Diverged only if the change alone does not
        contain the whole row.
        """
        operation = event.get("operation")
        data = event.get("data")
        if not isinstance(data, Mapping):
            raise InvalidMessage(f"a change has no data: {str(event)[:200]}")
        if operation == "INSERT":
            self._insert(data, replace=leniently)
        elif operation == "UPDATE" and leniently:
            self._update_leniently(data, event.get("old"), partial=bool(event.get("unchanged")))
        elif operation == "UPDATE":
            self._update(data, event.get("old"))
        elif operation == "DELETE" and leniently:
            self._connection.execute(f"delete from {_quoted(self.name)} where {self._where()}", self._key_of(data))
        elif operation == "DELETE":
            self._execute_for_one_row(
                f"delete from {_quoted(self.name)} where {self._where()}", self._key_of(data), "delete"
            )
        elif operation == "TRUNCATE":
            self._connection.execute(f"delete from {_quoted(self.name)}")
        else:
            raise InvalidMessage(f"invalid operation {operation!r}: expected INSERT, UPDATE, DELETE or TRUNCATE")

    def rows(self) -> list[dict[str, Any]]:
        """All rows, in the order of their keys."""
        cursor = self._connection.execute(
            f"select * from {_quoted(self.name)} order by {', '.join(map(_quoted, self._key))}"
        )
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    # -- internals

    def _exists(self) -> bool:
        found = self._connection.execute(
            "select 1 from sqlite_master where type in ('table', 'view') and name = ?", (self.name,)
        )
        return found.fetchone() is not None

    def _load_columns(self) -> None:
        row = self._connection.execute("select columns from _headwater_replica where name = ?", (self.name,)).fetchone()
        self._columns = {} if row is None else {item[0]: _Column(*item) for item in json.loads(row[0])}
        self._key = tuple(column.name for column in self._columns.values() if column.primary_key)

    def _add_consistent_lsn(self) -> None:
        """Add the column to files of earlier versions."""
        names = [row[1] for row in self._connection.execute("pragma table_info(_headwater_replica)")]
        if "consistent_lsn" not in names:
            self._connection.execute(
                "alter table _headwater_replica add column consistent_lsn integer not null default 0"
            )

    def _insert(self, data: Mapping[str, Any], *, replace: bool = False) -> None:
        names = ", ".join(map(_quoted, data))
        placeholders = ", ".join("?" * len(data))
        try:
            self._connection.execute(
                f"insert {'or replace ' if replace else ''}into {_quoted(self.name)} ({names}) values ({placeholders})",
                self._values(data),
            )
        except sqlite3.IntegrityError as error:
            raise Diverged(f"insert of an existing row: {error}") from error

    def _update(self, data: Mapping[str, Any], old: Any) -> None:
        key = self._old_key(data, old)
        changes = ", ".join(f"{_quoted(name)} = ?" for name in data)
        try:
            self._execute_for_one_row(
                f"update {_quoted(self.name)} set {changes} where {self._where()}",
                [*self._values(data), *key],
                "update",
            )
        except sqlite3.IntegrityError as error:
            raise Diverged(f"update to the key of another row: {error}") from error

    def _update_leniently(self, data: Mapping[str, Any], old: Any, *, partial: bool) -> None:
        key, old_key = self._key_of(data), self._old_key(data, old)
        if not partial:
            if old_key != key:
                self._connection.execute(f"delete from {_quoted(self.name)} where {self._where()}", old_key)
            self._insert(data, replace=True)
        elif old_key == key and self._row_exists(key):
            self._update(data, None)
        else:
            # A row with the old key may be another row that got this key later.
            raise Diverged("update with only some values of a missing row")

    def _row_exists(self, key: Sequence[Any]) -> bool:
        found = self._connection.execute(f"select 1 from {_quoted(self.name)} where {self._where()}", key)
        return found.fetchone() is not None

    def _old_key(self, data: Mapping[str, Any], old: Any) -> list[Any]:
        return self._key_of(old if isinstance(old, Mapping) and old.keys() >= set(self._key) else data)

    def _execute_for_one_row(self, statement: str, values: Sequence[Any], what: str) -> None:
        if self._connection.execute(statement, values).rowcount != 1:
            raise Diverged(f"{what} of a missing row")

    def _where(self) -> str:
        return " and ".join(f"{_quoted(name)} = ?" for name in self._key)

    def _key_of(self, row: Mapping[str, Any]) -> list[Any]:
        missing = [name for name in self._key if row.get(name) is None]
        if missing:
            raise InvalidMessage(f"a change of {self.table.full_name} lacks its key {', '.join(missing)}")
        return [self._value(name, row[name]) for name in self._key]

    def _values(self, row: Mapping[str, Any]) -> list[Any]:
        return [self._value(name, value) for name, value in row.items()]

    def _value(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        column = self._columns[name]
        if column.data_type in _DOCUMENTS:
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, bool):
            return int(value) if column.affinity == "integer" else str(value).lower()
        if column.affinity == "text" and not isinstance(value, str):
            return json.dumps(value, ensure_ascii=False)
        return value


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the replica."""

    name: str
    data_type: str
    primary_key: bool

    @property
    def affinity(self) -> str:
        if self.data_type in _INTEGERS or self.data_type in _BOOLEANS:
            return "integer"
        return "real" if self.data_type in _REALS else "text"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
