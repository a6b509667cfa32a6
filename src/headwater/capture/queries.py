"""What capture asks of Postgres: one .sql file for each question."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import LiteralString

from psycopg import sql


@cache
def query(name: str) -> LiteralString:
    """The text of a query, by the name of its file. Such a text is part of the program."""
    folder = resources.files(__package__) / "sql"
    return (folder / f"{name}.sql").read_text()


def filled(name: str, **parts: sql.Composable) -> str:
    """A query with its {parts} put in, for what takes no parameters."""
    return sql.SQL(query(name)).format(**parts).as_string(None)
