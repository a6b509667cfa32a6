"""Which Postgres to connect to: a DSN in any of its forms, HEADWATER_DSN, or the server of `headwater up`."""

from __future__ import annotations

import os
import re

import psycopg
from psycopg.conninfo import conninfo_to_dict

from headwater import settings
from headwater.errors import InvalidRequest, LogUnavailable
from headwater.settings import Settings

# The log's database on the server of `headwater up`.
DATABASE = "headwater"
# As SQLAlchemy and Django projects write it: with the driver.
_DRIVER = re.compile(r"^(postgres(?:ql)?)\+\w+://")
_EXPECTED = "Expected a URL (postgresql://user@host/database) or a conninfo string (host=... dbname=...)."


def find_dsn(given: str | None = None, loaded: Settings | None = None) -> str:
    """The DSN to connect to, as a URL or conninfo string of libpq.

    Messages never contain a part of the DSN: it may be the password.
    """
    loaded = loaded or (settings.load(os.environ) if given is None else None)
    found = given or (loaded.dsn if loaded else None)
    if found is None and loaded is not None:
        # Imported when needed: most programs give a DSN.
        from headwater.embedded.postgres import Postgres

        server = Postgres(loaded.home / "postgres")
        if not server.running:
            raise LogUnavailable("no database: set HEADWATER_DSN or run `headwater up`")
        return server.dsn(DATABASE)
    dsn = _DRIVER.sub(r"\1://", found or "")
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        raise InvalidRequest("invalid DSN", hint=_EXPECTED) from None
    if "@" in str(parts.get("host", "")):
        raise InvalidRequest(
            "invalid DSN: its user or password contains the character @", hint="Write it as %40 in a URL."
        )
    return dsn
