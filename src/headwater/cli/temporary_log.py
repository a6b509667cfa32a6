"""A log for demos and measurements: in a given database, or on a temporary embedded server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import headwater
from headwater.cli.connection import Session, prepare_database
from headwater.database import schema
from headwater.embedded import Postgres


@contextmanager
def temporary_log(run: Session, dsn: str | None) -> Iterator[headwater.Headwater]:
    """Open the log of a given database, installing a missing schema; otherwise of a temporary embedded server."""
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
            with run.log(prepare_database(server)) as log:
                yield log
        finally:
            server.stop(mode="immediate")


def _install_if_missing(run: Session, dsn: str) -> None:
    """Install a missing schema. An existing schema is never upgraded here."""
    with run.connection(dsn) as connection:
        found = connection.execute("select to_regnamespace('headwater') is not null").fetchone()
        if found == (False,):
            schema.upgrade(connection)
