"""What only the command line asks of the database: one .sql file beside this one for each question."""

from __future__ import annotations

from importlib import resources
from typing import Any

import headwater


def query(name: str) -> bytes:
    """The text of a query, by the name of its file."""
    return (resources.files(__package__) / f"{name}.sql").read_bytes()


def ask(log: headwater.Headwater, name: str, *parameters: object) -> list[tuple[Any, ...]]:
    """The rows that a query answers with."""
    with log.connection() as connection:
        return connection.execute(query(name), parameters or None).fetchall()
