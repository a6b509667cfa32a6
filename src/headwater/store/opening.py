"""One address for event stores, wherever they live: a Postgres, or a directory."""

from __future__ import annotations

from pathlib import Path

from headwater.client import Headwater, connect
from headwater.errors import InvalidRequest
from headwater.store.sqlite import SqliteStores


def open(address: str) -> Headwater | SqliteStores:
    """The log at `postgresql://...`, or the event stores in the directory of `sqlite:///dir` (`sqlite:////var/dir`)."""
    scheme, separator, rest = address.partition("://")
    if separator and scheme in ("postgresql", "postgres"):
        return connect(address)
    if separator and scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        return SqliteStores(Path(rest[1:]))
    raise InvalidRequest(
        f'"{address}" is no address of event stores',
        hint="Write postgresql://user@host/database, sqlite:///directory or sqlite:////absolute/directory.",
    )
