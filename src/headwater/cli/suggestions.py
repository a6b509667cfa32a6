"""Suggestions: for the name of a topic, queue or webhook that does not exist, the existing names that are close."""

from __future__ import annotations

import difflib
from typing import Final

import psycopg

from headwater.cli.connection import Session, connect
from headwater.cli.queries import read_query
from headwater.errors import HeadwaterError

# What the detail of a not-found error names; each has a query of its names.
_KINDS: Final = ("topic", "queue", "webhook")


def with_suggestion(error: HeadwaterError, run: Session) -> HeadwaterError:
    """The same error; its hint names existing names that are close to the missing one, if there are any."""
    kind = next((kind for kind in _KINDS if isinstance(error.detail.get(kind), str)), None)
    if kind is None or run.last_dsn is None:
        return error
    try:
        with connect(run.last_dsn) as connection:
            names = [name for (name,) in connection.execute(read_query(f"{kind}_names")).fetchall()]
    except psycopg.Error:
        # The first error is the one to report, such as to a role that may not list names.
        return error
    close = difflib.get_close_matches(error.detail[kind], names, n=3)
    if not close:
        return error
    meant = f"Did you mean {' or '.join(close)}?"
    return type(error)(error.message, hint=f"{meant} {error.hint}" if error.hint else meant, detail=error.detail)
