"""Queries that only the command line needs: one .sql file each, beside the module that uses it."""

from __future__ import annotations

from importlib import resources
from typing import Any

import headwater


def read_query(name: str) -> bytes:
    """Return the text of a query; `name` is its path in this package without .sql, such as `commands/doctor`."""
    return (resources.files(__package__) / f"{name}.sql").read_bytes()


def run_query(log: headwater.Headwater, name: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Run a query and return its rows."""
    with log.connection() as connection:
        return connection.execute(read_query(name), parameters or None).fetchall()
