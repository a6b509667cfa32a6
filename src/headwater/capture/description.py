"""The current columns and keys of the tables in a publication."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import psycopg
from psycopg.rows import class_row

from headwater.capture.queries import query


@dataclass(frozen=True, slots=True)
class PublishedColumn:
    """A column of a published table."""

    schema_name: str
    table_name: str
    has_all_rows: bool
    is_published: bool
    column_name: str
    data_type: str
    is_nullable: bool
    column_default: str | None
    is_key: bool


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A published table. `is_whole` is false if the publication leaves out some of its columns or rows."""

    schema: str
    name: str
    columns: tuple[PublishedColumn, ...]
    is_whole: bool

    @property
    def has_key(self) -> bool:
        return any(column.is_key for column in self.columns)


def published_tables(connection: psycopg.Connection[Any], publication: str) -> list[PublishedTable]:
    """The tables of a publication, in the order of their names."""
    with connection.cursor(row_factory=class_row(PublishedColumn)) as cursor:
        found = cursor.execute(query("published_columns"), {"publication": publication}).fetchall()
    tables = []
    for (schema, name), members in groupby(found, lambda column: (column.schema_name, column.table_name)):
        columns = list(members)
        tables.append(
            PublishedTable(
                schema,
                name,
                tuple(column for column in columns if column.is_published),
                all(column.has_all_rows and column.is_published for column in columns),
            )
        )
    return tables
