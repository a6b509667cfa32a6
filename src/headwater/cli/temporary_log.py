"""A log to try things on: a given database, or an embedded server that is gone afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import headwater
from headwater.cli.connection import Session
from headwater.cli.up import prepare
from headwater.database import schema
from headwater.embedded import Postgres


@contextmanager
def scratch_log(run: Session, dsn: str | None) -> Iterator[headwater.Headwater]:
    """The log of a given database, where the schema is installed if it has none; else a new one."""
    given = dsn or run.settings.dsn
    if given is not None:
        _install_if_missing(run, given)
        with run.log(given) as log:
            yield log
        return
    with tempfile.TemporaryDirectory(prefix="headwater-", ignore_cleanup_errors=True) as directory:
        server = Postgres(Path(directory, "postgres"))
        try:
            server.start()
            with run.log(prepare(server)) as log:
                yield log
        finally:
            server.stop(mode="immediate")


def _install_if_missing(run: Session, dsn: str) -> None:
    """Install the schema in an empty database. One that is there is never upgraded on the side."""
    with run.connection(dsn) as connection:
        found = connection.execute("select to_regnamespace('headwater') is not null").fetchone()
        if found == (False,):
            schema.upgrade(connection)
