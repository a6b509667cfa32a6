"""The caller's own connection: what may be passed as `connection=`, and the cursor that calls run on.

Accepted are psycopg connections, SQLAlchemy sessions and connections on psycopg, and Django's `connection` on psycopg.
`driver_connection` and `async_driver_connection` return the psycopg connection inside. They recognise the classes of
other packages by name, so nothing is imported. Everything else is refused with the SQL that works there.

Invariant: a call behaves the same on every connection. `CallCursor` therefore ignores the connection's row factory,
cursor class, loaders and dumpers; transactions, autocommit and prepared statements stay as the caller set them.
"""

from __future__ import annotations

import json
from typing import Any, Protocol, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.adapt import AdaptersMap
from psycopg.postgres import register_default_adapters, register_default_types
from psycopg.pq import Format
from psycopg.rows import tuple_row
from psycopg.types.array import register_all_arrays
from psycopg.types.json import set_json_dumps, set_json_loads

from headwater.calls.encoding import PACKED_DUMPERS
from headwater.calls.publishing import SQL_EXAMPLES
from headwater.errors import InvalidRequest, LogUnavailable


class SqlalchemyTransaction(Protocol):
    """A Session or Connection of SQLAlchemy, also of asyncio."""

    def in_transaction(self) -> bool: ...


class SqlalchemyScopedSession(Protocol):
    """A scoped_session of SQLAlchemy, also of asyncio."""

    def get_bind(self) -> Any: ...


class SqlalchemyRawConnection(Protocol):
    """What `Engine.raw_connection` returns."""

    @property
    def driver_connection(self) -> Any: ...


class DjangoConnection(Protocol):
    """Django's `connection`."""

    def ensure_connection(self) -> None: ...


WrappedConnection: TypeAlias = (
    SqlalchemyTransaction | SqlalchemyScopedSession | SqlalchemyRawConnection | DjangoConnection
)
"""A connection of another package, recognised by type checkers by one of its methods."""
CallerConnection: TypeAlias = Connection[Any] | WrappedConnection
"""What the blocking API accepts as `connection=`."""
AsyncCallerConnection: TypeAlias = AsyncConnection[Any] | WrappedConnection
"""What the asyncio API accepts as `connection=`."""

_Driver = TypeVar("_Driver", bound=Connection[Any] | AsyncConnection[Any])


def _default_adapters() -> AdaptersMap:
    """psycopg's adapters as they are without any change, global changes included, and those of calls."""
    adapters = AdaptersMap()
    register_default_types(adapters.types)
    register_default_adapters(adapters)
    register_all_arrays(adapters)
    set_json_loads(json.loads, adapters)
    set_json_dumps(json.dumps, adapters)
    for cls, dumper in PACKED_DUMPERS.items():
        adapters.register_dumper(cls, dumper)
    return adapters


_ADAPTERS = _default_adapters()


class CallCursor(psycopg.Cursor[tuple[Any, ...]]):
    """A cursor for calls: tuples in binary format, with psycopg's default adapters."""

    __slots__ = ()

    def __init__(self, connection: Connection[Any]) -> None:
        super().__init__(connection, row_factory=tuple_row)
        self.format = Format.BINARY

    @property
    def adapters(self) -> AdaptersMap:
        return _ADAPTERS


class AsyncCallCursor(psycopg.AsyncCursor[tuple[Any, ...]]):
    """The same on an asyncio connection."""

    __slots__ = ()

    def __init__(self, connection: AsyncConnection[Any]) -> None:
        super().__init__(connection, row_factory=tuple_row)
        self.format = Format.BINARY

    @property
    def adapters(self) -> AdaptersMap:
        return _ADAPTERS


def driver_connection(connection: CallerConnection) -> Connection[Any]:
    """The psycopg connection of the caller's connection."""
    if isinstance(connection, Connection):
        return _checked(connection)
    found: Any = connection
    kind = _kind(found)
    if kind in ("AsyncSession", "AsyncConnection", "async_scoped_session"):
        raise _wrong_api(found, "asyncio")
    if kind in ("Session", "scoped_session"):
        found = found.connection()
    if _kind(found) == "Connection":
        if not found.in_transaction():
            # As SQLAlchemy does before its own statements. Otherwise its commit() would not commit the event.
            found.begin()
        found = found.connection
    if kind == "Django":
        found.ensure_connection()
        found = found.connection
    found = getattr(found, "driver_connection", found)
    if isinstance(found, Connection):
        return _checked(found)
    raise _wrong_api(connection, "asyncio") if isinstance(found, AsyncConnection) else _unsupported(connection, found)


async def async_driver_connection(connection: AsyncCallerConnection) -> AsyncConnection[Any]:
    """The asyncio psycopg connection of the caller's connection."""
    if isinstance(connection, AsyncConnection):
        return _checked(connection)
    found: Any = connection
    kind = _kind(found)
    if kind in ("Session", "scoped_session", "Connection", "Django"):
        raise _wrong_api(found, "blocking")
    if kind in ("AsyncSession", "async_scoped_session"):
        found = await found.connection()
    if _kind(found) == "AsyncConnection":
        if not found.in_transaction():
            await found.begin()
        found = await found.get_raw_connection()
    found = getattr(found, "driver_connection", found)
    if isinstance(found, AsyncConnection):
        return _checked(found)
    raise _wrong_api(connection, "blocking") if isinstance(found, Connection) else _unsupported(connection, found)


_SQLALCHEMY = ("Session", "scoped_session", "Connection", "AsyncSession", "async_scoped_session", "AsyncConnection")


def _kind(connection: Any) -> str | None:
    """The name of SQLAlchemy's class, "Django", or None. Subclasses count, for example the sessions of SQLModel."""
    for cls in type(connection).__mro__:
        package = cls.__module__.partition(".")[0]
        if package == "sqlalchemy" and cls.__name__ in _SQLALCHEMY:
            return cls.__name__
        if package == "django" and cls.__name__ in ("BaseDatabaseWrapper", "ConnectionProxy"):
            return "Django"
    return None


def _checked(connection: _Driver) -> _Driver:
    """Refuse a closed connection, and one whose client encoding would change the text of events."""
    if connection.closed:
        raise LogUnavailable("the connection is closed")
    encoding = connection.pgconn.parameter_status(b"client_encoding") or b""
    if encoding != b"UTF8":
        raise InvalidRequest(
            f"the connection has client_encoding {encoding.decode()}, expected UTF8",
            hint="Run `set client_encoding to 'UTF8'` on it, or connect with client_encoding=utf8.",
        )
    return connection


def _wrong_api(connection: Any, style: str) -> InvalidRequest:
    name = _full_name(connection)
    if style == "asyncio":
        return InvalidRequest(
            f"{name} is an asyncio connection, and this log has the blocking API",
            hint="Use `log = await headwater.aio.connect(...)` and `await` its methods.",
        )
    return InvalidRequest(
        f"{name} is a blocking connection, and this log has the asyncio API",
        hint="Use `log = headwater.connect(...)`, or pass an asyncio connection.",
    )


def _unsupported(connection: Any, driver: Any) -> InvalidRequest:
    """The error for a connection that is not on psycopg 3, with the SQL that publishes on it."""
    name = _full_name(connection)
    package = type(driver).__module__.partition(".")[0]
    outer = {"django": "django", "sqlalchemy": "sqlalchemy"}.get(_full_name(connection).partition(".")[0], package)
    if outer == "django" and connection.vendor != "postgresql":
        return InvalidRequest(
            f"{name} is not a connection to Postgres", hint="Pass `connections[...]` of the Postgres database."
        )
    on = "" if driver is connection else f" on {package}"
    if outer in SQL_EXAMPLES:
        sql = SQL_EXAMPLES[outer]
        if (_kind(connection) or "").lower().startswith("async"):
            sql = f"await {sql}"
        return InvalidRequest(
            f"{name}{on} is not supported as `connection`: only the driver psycopg 3 is",
            hint=f"Publish with SQL in the same transaction: {sql}",
        )
    return InvalidRequest(
        f"{name} is not supported as `connection`",
        hint="Expected a psycopg 3 connection, a SQLAlchemy Session or Connection on psycopg, or Django's connection. "
        "With another driver, use the SQL function headwater.publish in its transaction.",
    )


def _full_name(connection: Any) -> str:
    cls = type(connection)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
