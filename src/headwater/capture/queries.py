"""Loads the SQL queries of change capture, one .sql file each."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import LiteralString

from psycopg import sql


@cache
def query(name: str) -> LiteralString:
    """The text of a query, by the name of its file."""
    folder = resources.files(__package__) / "sql"
    return (folder / f"{name}.sql").read_text()


def fill_query(name: str, **parts: sql.Composable) -> str:
    """A query with its {parts} fill_query in, for statements that do not accept parameters."""
    return sql.SQL(query(name)).format(**parts).as_string(None)
