"""Open event stores by address: in Postgres, or in a directory of SQLite files."""

from __future__ import annotations

from pathlib import Path

from headwater import aio
from headwater.client import Headwater, connect
from headwater.client.eventstore.sqlite import SqliteStores
from headwater.errors import InvalidRequest
from headwater.eventstore.sqlite import AsyncSqliteStores


def open(address: str | None = None) -> Headwater | SqliteStores:
    """Open the log in a Postgres database (any DSN that `connect` takes), or the event stores in the directory of
    `sqlite:///dir` (`sqlite:////var/dir`)."""
    directory = _directory(address)
    return connect(address) if directory is None else SqliteStores(directory)


async def open_async(address: str | None = None) -> aio.AsyncHeadwater | AsyncSqliteStores:
    """Like `open`, for asyncio."""
    directory = _directory(address)
    return await aio.connect(address) if directory is None else AsyncSqliteStores(directory)


def _directory(address: str | None) -> Path | None:
    """The directory of a sqlite address; None for a Postgres address."""
    if address is None:
        return None
    scheme, separator, rest = address.partition("://")
    is_conninfo = not separator and "=" in address
    if is_conninfo or scheme.partition("+")[0] in ("postgresql", "postgres"):
        return None
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        return Path(rest[1:])
    # The address may contain a password.
    raise InvalidRequest(
        "invalid address of event stores",
        hint="Expected postgresql://user@host/database, host=... dbname=..., sqlite:///directory or "
        "sqlite:////absolute/directory.",
    )
