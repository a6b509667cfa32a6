"""Connections with pinned session settings, and query results streamed as Arrow record batches."""

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
with suppress(ImportError):  # optional: `stream` falls back to psycopg, which is slower
    import adbc_driver_manager
    import adbc_driver_postgresql  # type: ignore[no-redef]
    from adbc_driver_manager import AdbcConnection, AdbcStatement

    # The plain driver, because importing `dbapi` takes a second and its reader loses SQLSTATEs.
    from adbc_driver_manager._reader import AdbcRecordBatchReader

# The text of a value must not depend on role or database defaults, and application timeouts must not end a long read.
SESSION: Final = (
    "-c datestyle=ISO -c intervalstyle=iso_8601 -c timezone=UTC -c extra_float_digits=1 "
    "-c bytea_output=hex -c lc_monetary=C -c client_min_messages=warning "
    "-c statement_timeout=0 -c idle_in_transaction_session_timeout=0 "
    "-c default_transaction_isolation=read\\ committed"
)
BATCH_BYTES: Final = 4 << 20
BATCH_ROWS: Final = 20_000
_CONNECT_SECONDS: Final = 30
_ERRORS_BY_SQLSTATE: Final = {
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


def pin_settings(dsn: str) -> str:
    """Return the DSN with every setting pinned that affects the text form of values."""
    given = conninfo.conninfo_to_dict(dsn)
    return conninfo.make_conninfo(
        dsn,
        options=f"{given.get('options') or ''} {SESSION}".strip(),
        client_encoding="UTF8",
        connect_timeout=given.get("connect_timeout") or _CONNECT_SECONDS,
        application_name=given.get("application_name") or "headwater capture",
    )


def connect(dsn: str) -> psycopg.Connection[tuple[Any, ...]]:
    """Open a connection in autocommit mode."""
    return psycopg.connect(pin_settings(dsn), autocommit=True)


def stream(dsn: str, query: str, *, before: Sequence[str] = ()) -> Generator[Any]:
    """Yield the result as RecordBatches, in one transaction with the statements in `before`, which run first.

    Columns must be bytea or text. Errors are psycopg's, whichever driver is installed.
    """
    if adbc_driver_postgresql is None:
        return _stream_rows(dsn, query, before)
    return _stream_arrow(dsn, query, before)


@lru_cache(maxsize=8)
def arrow_database(conninfo: str, process: int) -> Any:
    """The ADBC driver for this address, cached per process: creating one looks up all types and takes 50 ms.

    It holds no connection, so it survives a server restart.
    """
    return adbc_driver_postgresql.connect(conninfo)


def _stream_arrow(dsn: str, query: str, before: Sequence[str]) -> Generator[Any]:
    try:
        with AdbcConnection(arrow_database(pin_settings(dsn), os.getpid())) as connection:
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
        kind = _ERRORS_BY_SQLSTATE.get(error.sqlstate or "", psycopg.OperationalError)
        raise kind(str(error)) from error


def _stream_rows(dsn: str, query: str, before: Sequence[str]) -> Generator[Any]:
    with psycopg.connect(pin_settings(dsn)) as connection:
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
