"""Which tables are captured: a publication, made when missing; what could not work is refused before it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from headwater.capture.queries import query
from headwater.errors import CaptureRefused


@dataclass(frozen=True, slots=True)
class _Server:
    wal_level: str
    server_version: int
    in_recovery: bool
    role_name: str
    may_replicate: bool


@dataclass(frozen=True, slots=True)
class _Table:
    given_name: str
    schema_name: str | None
    table_name: str | None
    is_table: bool
    is_permanent: bool
    has_identity: bool


@dataclass(frozen=True, slots=True)
class _Published:
    schema_name: str
    table_name: str
    has_identity: bool


def quoted(name: str) -> str:
    """A name as an SQL identifier."""
    return sql.Identifier(name).as_string(None)


def check_server(connection: psycopg.Connection[Any]) -> None:
    """Refuse a server or a role that cannot capture changes."""
    with connection.cursor(row_factory=class_row(_Server)) as cursor:
        server = cursor.execute(query("server")).fetchone()
    assert server is not None
    if server.wal_level != "logical":
        raise CaptureRefused(
            f"the server's wal_level is {server.wal_level!r}; change capture needs 'logical'",
            hint="Run: alter system set wal_level = logical; then restart Postgres.",
        )
    if server.in_recovery:
        raise CaptureRefused("this server is a standby", hint="Connect to the primary.")
    if not server.may_replicate:
        raise CaptureRefused(
            f"the role {server.role_name!r} may not replicate",
            hint=f"Run as an administrator: alter role {quoted(server.role_name)} replication;",
        )


def ensure(connection: psycopg.Connection[Any], name: str, tables: Sequence[str], *, create: bool = True) -> None:
    """Make sure that the publication is there and has these tables, or, without `create`, that it could be made."""
    wanted = _find_tables(connection, tables)
    found = connection.execute(query("publication"), {"publication": name}).fetchone()
    if found is None:
        _refuse_to_create(name, wanted)
        if create:
            _create(connection, name, wanted)
        return
    with connection.cursor(row_factory=class_row(_Published)) as cursor:
        published = cursor.execute(query("published_tables"), {"publication": name}).fetchall()
    there = {(table.schema_name, table.table_name) for table in published}
    missing = [_full_name(table) for table in wanted if (table.schema_name, table.table_name) not in there]
    if missing:
        listed = ", ".join(missing)
        raise CaptureRefused(
            f"the publication {name!r} does not have {listed}",
            hint=f"Run: alter publication {quoted(name)} add table {listed}; and take a snapshot of what was added.",
        )
    (needs_identity,) = found
    if needs_identity:
        _refuse_anonymous(table for table in published if not table.has_identity)


def _find_tables(connection: psycopg.Connection[Any], names: Sequence[str]) -> list[_Table]:
    with connection.cursor(row_factory=class_row(_Table)) as cursor:
        tables = cursor.execute(query("tables"), {"tables": list(names)}).fetchall()
    for table in tables:
        if table.table_name is None:
            raise CaptureRefused(f"there is no table {table.given_name!r}")
        if not table.is_table or not table.is_permanent:
            raise CaptureRefused(f"{table.given_name!r} is not a table whose changes are logged")
    return tables


def _refuse_to_create(name: str, tables: Sequence[_Table]) -> None:
    if not tables:
        raise CaptureRefused(
            f"there is no publication {name!r}, and no tables to make one of",
            hint="Name the tables, or create the publication yourself.",
        )
    # Before the publication is made: once it is there, updates of such a table fail for those who make them.
    _refuse_anonymous(table for table in tables if not table.has_identity)


def _create(connection: psycopg.Connection[Any], name: str, tables: Sequence[_Table]) -> None:
    listed = sql.SQL(", ").join([sql.SQL(_full_name(table)) for table in tables])
    statement = sql.SQL("create publication {} for table {} with (publish_via_partition_root = true)")
    try:
        connection.execute(statement.format(sql.Identifier(name), listed))
    except (psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation):
        return  # another process was quicker
    except psycopg.errors.InsufficientPrivilege as error:
        raise CaptureRefused(
            f"this role may not make a publication of these tables: {error.diag.message_primary}",
            hint="Make the publication as the tables' owner, who needs the right to create in the database.",
        ) from error


def _full_name(table: _Table | _Published) -> str:
    return sql.Identifier(table.schema_name or "", table.table_name or "").as_string(None)


def _refuse_anonymous(tables: Iterable[_Table | _Published]) -> None:
    for table in tables:
        full = _full_name(table)
        raise CaptureRefused(
            f"the table {full} has nothing that identifies its rows, so that updates and deletes of it would fail",
            hint=f"Give it a primary key, or run: alter table {full} replica identity full;",
        )
