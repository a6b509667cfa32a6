"""A log for demos and measurements: in a given database, or on a temporary embedded server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import headwater
from headwater.cli.connection import Session, prepare_database
from headwater.database import schema
from headwater.embedded import Postgres
from headwater.embedded.temporary import temporary_directory


@contextmanager
def temporary_log(run: Session, dsn: str | None) -> Iterator[headwater.Headwater]:
    """Open the log of a given database, installing a missing schema; otherwise of a temporary embedded server."""
    given = dsn or run.settings.dsn
    if given is not None:
        _install_if_missing(run, given)
        with run.log(given) as log:
            yield log
        return
    with temporary_directory() as directory:
        server = Postgres(directory / "postgres")
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
