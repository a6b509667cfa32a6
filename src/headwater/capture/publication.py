"""The publication that lists the captured tables: created if missing, after checking that capture can work."""

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
class _ServerState:
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
class _PublicationTable:
    schema_name: str
    table_name: str
    has_identity: bool


def quoted(name: str) -> str:
    """Quote a name as an SQL identifier."""
    return sql.Identifier(name).as_string(None)


def check_server(connection: psycopg.Connection[Any]) -> None:
    """Raise CaptureRefused if this server or role cannot capture changes."""
    with connection.cursor(row_factory=class_row(_ServerState)) as cursor:
        server = cursor.execute(query("server")).fetchone()
    assert server is not None
    if server.wal_level != "logical":
        raise CaptureRefused(
            f"wal_level is {server.wal_level!r}; change capture requires 'logical'",
            hint="Run: alter system set wal_level = logical; then restart Postgres.",
        )
    if server.in_recovery:
        raise CaptureRefused(
            "the server is a standby; change capture requires the primary", hint="Connect to the primary."
        )
    if not server.may_replicate:
        raise CaptureRefused(
            f"the role {server.role_name!r} does not have the REPLICATION attribute",
            hint=f"Run as an administrator: alter role {quoted(server.role_name)} replication;",
        )


def ensure(connection: psycopg.Connection[Any], name: str, tables: Sequence[str], *, create: bool = True) -> None:
    """Create the publication if it is missing, and check that it has these tables; without `create`, only check."""
    wanted = _find_tables(connection, tables)
    found = connection.execute(query("publication"), {"publication": name}).fetchone()
    if found is None:
        _check_creatable(name, wanted)
        if create:
            _create(connection, name, wanted)
        return
    with connection.cursor(row_factory=class_row(_PublicationTable)) as cursor:
        published = cursor.execute(query("published_tables"), {"publication": name}).fetchall()
    present = {(table.schema_name, table.table_name) for table in published}
    missing = [_full_name(table) for table in wanted if (table.schema_name, table.table_name) not in present]
    if missing:
        listed = ", ".join(missing)
        raise CaptureRefused(
            f"the publication {name!r} does not contain {listed}",
            hint=f"Run: alter publication {quoted(name)} add table {listed}; then take a snapshot of the added tables.",
        )
    (needs_identity,) = found
    if needs_identity:
        _reject_without_identity(table for table in published if not table.has_identity)


def _find_tables(connection: psycopg.Connection[Any], names: Sequence[str]) -> list[_Table]:
    with connection.cursor(row_factory=class_row(_Table)) as cursor:
        tables = cursor.execute(query("tables"), {"tables": list(names)}).fetchall()
    for table in tables:
        if table.table_name is None:
            raise CaptureRefused(f"table {table.given_name!r} does not exist")
        if not table.is_table or not table.is_permanent:
            raise CaptureRefused(f"{table.given_name!r} is not a logged table; its changes cannot be captured")
    return tables


def _check_creatable(name: str, tables: Sequence[_Table]) -> None:
    if not tables:
        raise CaptureRefused(
            f"publication {name!r} does not exist, and no tables were given to create it",
            hint="Give the tables, or create the publication yourself.",
        )
    # Check first: once the publication exists, every update of a table without identity fails in its application.
    _reject_without_identity(table for table in tables if not table.has_identity)


def _create(connection: psycopg.Connection[Any], name: str, tables: Sequence[_Table]) -> None:
    listed = sql.SQL(", ").join([sql.SQL(_full_name(table)) for table in tables])
    statement = sql.SQL("create publication {} for table {} with (publish_via_partition_root = true)")
    try:
        connection.execute(statement.format(sql.Identifier(name), listed))
    except (psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation):
        return  # another process created it
    except psycopg.errors.InsufficientPrivilege as error:
        raise CaptureRefused(
            f"this role has no permission to create a publication of these tables: {error.diag.message_primary}",
            hint="Create the publication as the owner of the tables, who needs the CREATE privilege on the database.",
        ) from error


def _full_name(table: _Table | _PublicationTable) -> str:
    return sql.Identifier(table.schema_name or "", table.table_name or "").as_string(None)


def _reject_without_identity(tables: Iterable[_Table | _PublicationTable]) -> None:
    for table in tables:
        full = _full_name(table)
        raise CaptureRefused(
            f"the table {full} has no replica identity, so updates and deletes of it would fail",
            hint=f"Give it a primary key, or run: alter table {full} replica identity full;",
        )
