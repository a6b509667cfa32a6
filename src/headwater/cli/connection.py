"""How a command finds its database: --dsn, then HEADWATER_DSN, then the embedded server that runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import psycopg
import typer

import headwater
from headwater import errors, settings
from headwater.cli.log_lines import LogLines
from headwater.embedded import Postgres
from headwater.errors import LogUnavailable
from headwater.settings import Settings

DATABASE = "headwater"
CONNECT_SECONDS = 10


class Session:
    """One run of the command line: its settings, read once, and the database they lead to."""

    def __init__(self, *, log_format: str | None = None) -> None:
        self._log_format = log_format

    @cached_property
    def settings(self) -> Settings:
        read = settings.load(os.environ)
        self._lines(read).write()
        return read

    @property
    def log_lines(self) -> LogLines:
        """What this run logs, for processes that it starts."""
        return self._lines(self.settings)

    def _lines(self, read: Settings) -> LogLines:
        return LogLines(read.log_level, self._log_format or read.log_format)

    def embedded(self, *, port: int | None = None) -> Postgres:
        """The embedded server of this user, whether it runs or not."""
        return Postgres(self.settings.home / "postgres", port=port)

    def dsn(self, given: str | None) -> str:
        """The database to use, or LogUnavailable with what to do."""
        found = given or self.settings.dsn
        if found is not None:
            return found
        server = self.embedded()
        if not server.running:
            raise LogUnavailable("no database: set HEADWATER_DSN or run `headwater up`")
        return server.dsn(DATABASE)

    @contextmanager
    def connection(self, given: str | None) -> Iterator[psycopg.Connection[Any]]:
        """A plain connection in autocommit, for what comes before there is a log."""
        with translated(), connect(self.dsn(given)) as connection:
            yield connection

    @contextmanager
    def log(self, given: str | None) -> Iterator[headwater.Headwater]:
        """The log in that database."""
        dsn = self.dsn(given)
        # A pool only says that it waited in vain; one plain connection says why, and at once.
        with translated():
            connect(dsn).close()
        with headwater.connect(
            dsn,
            pool_size=self.settings.pool_size,
            connect_timeout_seconds=CONNECT_SECONDS,
            application_name="headwater cli",
        ) as log:
            yield log


def session(context: typer.Context) -> Session:
    """The session that the root of the command line made."""
    found = context.find_root().obj
    assert isinstance(found, Session)
    return found


def connect(dsn: str) -> psycopg.Connection[Any]:
    return psycopg.connect(
        dsn, autocommit=True, connect_timeout=CONNECT_SECONDS, application_name="headwater cli", prepare_threshold=None
    )


@contextmanager
def translated() -> Iterator[None]:
    """Postgres' errors as ours, for what does not go through the library."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate is None:
            if isinstance(error, psycopg.OperationalError | psycopg.ProgrammingError):
                raise LogUnavailable(
                    f"no connection to Postgres: {error}".strip(), hint="Check --dsn or HEADWATER_DSN."
                ) from error
            raise
        ours = errors.from_sqlstate(
            error.sqlstate, error.diag.message_primary or str(error), hint=error.diag.message_hint
        )
        if ours is None:
            raise
        raise ours from error
