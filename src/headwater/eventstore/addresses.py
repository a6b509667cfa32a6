"""Open event stores by address: in Postgres, or in a directory of SQLite files."""

from __future__ import annotations

from pathlib import Path

from headwater import aio
from headwater.client import Headwater, connect
from headwater.client.eventstore.sqlite import SqliteStores
from headwater.errors import InvalidRequest
from headwater.eventstore.sqlite import AsyncSqliteStores


def open(address: str) -> Headwater | SqliteStores:
    """Open the log at `postgresql://...`, or the event stores in the directory of `sqlite:///dir`
    (`sqlite:////var/dir`)."""
    directory = _directory(address)
    return connect(address) if directory is None else SqliteStores(directory)


async def open_async(address: str) -> aio.AsyncHeadwater | AsyncSqliteStores:
    """Like `open`, for asyncio."""
    directory = _directory(address)
    return await aio.connect(address) if directory is None else AsyncSqliteStores(directory)


def _directory(address: str) -> Path | None:
    """The directory of a sqlite address; None for a Postgres address."""
    scheme, separator, rest = address.partition("://")
    if separator and scheme in ("postgresql", "postgres"):
        return None
    if separator and scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        return Path(rest[1:])
    raise InvalidRequest(
        f'invalid address of event stores "{address}"',
        hint="Expected postgresql://user@host/database, sqlite:///directory or sqlite:////absolute/directory.",
    )
