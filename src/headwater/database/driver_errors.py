"""Errors of the database driver as errors of Headwater."""

from __future__ import annotations

import psycopg

from headwater.errors import InvalidEvent, LogUnavailable, from_sqlstate


def translate_error(error: psycopg.Error) -> BaseException:
    """The Headwater error for an error of Postgres; the error itself if it has no counterpart."""
    if error.sqlstate is None:
        if isinstance(error, psycopg.OperationalError):
            return LogUnavailable(f"lost the connection to Postgres: {error}".strip())
        if isinstance(error, psycopg.DataError):
            return InvalidEvent(str(error))
        return error
    diag = error.diag
    ours = from_sqlstate(
        error.sqlstate,
        diag.message_primary or str(error),
        hint=diag.message_hint,
        detail=diag.message_detail,
        constraint=diag.constraint_name if error.sqlstate == "23514" else None,
        table=diag.table_name or diag.datatype_name,
    )
    return error if ours is None else ours
