"""Connections of commands: to --dsn, otherwise HEADWATER_DSN, otherwise the running embedded server."""

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
from headwater.cli.log_lines import LogConfig
from headwater.database import schema
from headwater.embedded import Postgres
from headwater.embedded.address import DATABASE, find_dsn
from headwater.errors import LogUnavailable
from headwater.settings import Settings

CONNECT_SECONDS = 10


class Session:
    """One run of the command line: its settings, read once, and its database."""

    def __init__(self, *, log_format: str | None = None) -> None:
        self._log_format = log_format
        # The database that the command uses, once it has looked for it.
        self.last_dsn: str | None = None

    @cached_property
    def settings(self) -> Settings:
        loaded = settings.load(os.environ)
        self._log_config(loaded).apply()
        return loaded

    @property
    def log_config(self) -> LogConfig:
        """The logging configuration, for child processes."""
        return self._log_config(self.settings)

    def _log_config(self, loaded: Settings) -> LogConfig:
        return LogConfig(loaded.log_level, self._log_format or loaded.log_format)

    def embedded(self, *, port: int | None = None) -> Postgres:
        """The embedded server of this user, running or not."""
        return Postgres(self.settings.home / "postgres", port=port)

    def dsn(self, given: str | None) -> str:
        """Return the DSN of the database, or raise LogUnavailable."""
        self.last_dsn = find_dsn(given, self.settings)
        return self.last_dsn

    @contextmanager
    def connection(self, given: str | None) -> Iterator[psycopg.Connection[Any]]:
        """A plain autocommit connection, for databases that may have no schema yet."""
        with translate_errors(), connect(self.dsn(given)) as connection:
            yield connection

    @contextmanager
    def log(self, given: str | None) -> Iterator[headwater.Headwater]:
        """Connect to the log in that database."""
        dsn = self.dsn(given)
        # A pool only reports a timeout; a plain connection fails at once and with the reason.
        with translate_errors():
            connect(dsn).close()
        with headwater.connect(
            dsn,
            pool_size=self.settings.pool_size,
            connect_timeout_seconds=CONNECT_SECONDS,
            application_name="headwater cli",
        ) as log:
            yield log


def session(context: typer.Context) -> Session:
    """The session that the root command created."""
    found = context.find_root().obj
    assert isinstance(found, Session)
    return found


def connect(dsn: str) -> psycopg.Connection[Any]:
    return psycopg.connect(
        dsn, autocommit=True, connect_timeout=CONNECT_SECONDS, application_name="headwater cli", prepare_threshold=None
    )


def prepare_database(server: Postgres) -> str:
    """Create and upgrade the log's database on a running embedded server; returns its DSN."""
    server.ensure_database(DATABASE)
    dsn = server.dsn(DATABASE)
    with translate_errors(), connect(dsn) as connection:
        schema.upgrade(connection)
    return dsn


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate errors of psycopg to HeadwaterError, for connections that do not belong to the library."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate is None:
            if isinstance(error, psycopg.OperationalError | psycopg.ProgrammingError):
                raise LogUnavailable(
                    f"cannot connect to Postgres: {error}".strip(), hint="Check --dsn or HEADWATER_DSN."
                ) from error
            raise
        translated = errors.from_sqlstate(
            error.sqlstate, error.diag.message_primary or str(error), hint=error.diag.message_hint
        )
        if translated is None:
            raise
        raise translated from error
