"""Connections whose texts are always the same, and results that come as Arrow without being held in memory."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final

import psycopg
import pyarrow as pa
from psycopg import conninfo

adbc_driver_postgresql: Any = None
with suppress(ImportError):  # slower without
    import adbc_driver_manager
    import adbc_driver_postgresql  # type: ignore[no-redef]
    from adbc_driver_manager import AdbcConnection, AdbcStatement

    # Of the plain driver, not of its `dbapi`, whose import takes a second and whose reader loses SQLSTATEs.
    from adbc_driver_manager._reader import AdbcRecordBatchReader

# The text of a value must not depend on whose session reads it; and no limit meant for applications ends a long read.
SESSION: Final = (
    "-c datestyle=ISO -c intervalstyle=iso_8601 -c timezone=UTC -c extra_float_digits=1 "
    "-c bytea_output=hex -c lc_monetary=C -c client_min_messages=warning "
    "-c statement_timeout=0 -c idle_in_transaction_session_timeout=0 "
    "-c default_transaction_isolation=read\\ committed"
)
BATCH_BYTES: Final = 4 << 20
BATCH_ROWS: Final = 20_000
_CONNECT_SECONDS: Final = 30
_KINDS: Final = {
    kind.sqlstate: kind
    for kind in (
        psycopg.errors.ObjectInUse,
        psycopg.errors.ObjectNotInPrerequisiteState,
        psycopg.errors.UndefinedObject,
        psycopg.errors.UndefinedTable,
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.InvalidParameterValue,
    )
}


def fixed(dsn: str) -> str:
    """The same connection with every setting fixed that the text of a value depends on."""
    given = conninfo.conninfo_to_dict(dsn)
    return conninfo.make_conninfo(
        dsn,
        options=f"{given.get('options') or ''} {SESSION}".strip(),
        client_encoding="UTF8",
        connect_timeout=given.get("connect_timeout") or _CONNECT_SECONDS,
        application_name=given.get("application_name") or "headwater capture",
    )


def connect(dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
    """A connection in autocommit."""
    return psycopg.connect(fixed(dsn), autocommit=True)


def stream(dsn: str, query: str, *, before: Sequence[str] = ()) -> Generator[Any]:
    """The result as RecordBatches, one at a time, in one transaction with the statements `before` it.

    Values must be bytes or texts.
    Errors are psycopg's, whichever driver is there.
    """
    if adbc_driver_postgresql is None:
        return _stream_rows(dsn, query, before)
    return _stream_arrow(dsn, query, before)


@lru_cache(maxsize=8)
def arrow_database(conninfo: str, process: int) -> Any:
    """A driver for this address, for this process to keep: to make one costs the look-up of all types, 50 ms.

    It holds no connection, so a server that restarts is no matter to it.
    """
    return adbc_driver_postgresql.connect(conninfo)


def _stream_arrow(dsn: str, query: str, before: Sequence[str]) -> Generator[Any]:
    try:
        with AdbcConnection(arrow_database(fixed(dsn), os.getpid())) as connection:
            connection.set_autocommit(not before)
            for statement in before:
                with AdbcStatement(connection) as first:
                    first.set_sql_query(statement)
                    first.execute_update()
            with AdbcStatement(connection) as reading:
                reading.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(BATCH_BYTES)})
                reading.set_sql_query(query)
                handle, _ = reading.execute_query()
                yield from AdbcRecordBatchReader._import_from_c(handle.address)
    except adbc_driver_manager.Error as error:
        kind = _KINDS.get(error.sqlstate or "", psycopg.OperationalError)
        raise kind(str(error)) from error


def _stream_rows(dsn: str, query: str, before: Sequence[str]) -> Generator[Any]:
    with psycopg.connect(fixed(dsn)) as connection:
        for statement in before:
            connection.execute(statement.encode())
        with connection.cursor("headwater_capture", binary=True) as cursor:
            cursor.itersize = BATCH_ROWS
            cursor.execute(query.encode())
            names = [column.name for column in cursor.description or ()]
            kinds = [pa.binary() if column.type_code == 17 else pa.string() for column in cursor.description or ()]
            while rows := cursor.fetchmany(BATCH_ROWS):
                columns = [pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
                yield pa.RecordBatch.from_arrays(columns, names)
