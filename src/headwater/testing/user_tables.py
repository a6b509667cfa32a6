"""The tables of an application: remembered at the beginning, compared and put back after each run of a simulation."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import sql


class UserTables:
    """All tables outside of Headwater's schemas, as they are when this is opened. Needs the rights of a superuser,
    since foreign keys and triggers are off while rows are put back."""

    def __init__(self, dsn: str) -> None:
        self._connection: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True)
        statement = resources.files(__package__).joinpath("user_tables.sql").read_bytes()
        rows = self._connection.execute(statement).fetchall()
        self._tables: dict[str, list[str]] = {table: compared for table, _, compared in rows}
        self._stored: dict[str, list[str]] = {table: stored for table, stored, _ in rows}

    def __enter__(self) -> Self:
        for number, table in enumerate(self._tables):
            self._connection.execute(
                sql.SQL("create temporary table {} as table {}").format(_copy(number), sql.SQL(table))
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def restore(self) -> None:
        """Put the rows back as they were."""
        if not self._tables:
            return
        with self._connection.transaction():
            self._connection.execute("set local session_replication_role = replica")
            tables = sql.SQL(", ").join(sql.SQL(table) for table in self._tables)
            self._connection.execute(sql.SQL("truncate {} cascade").format(tables))
            for number, table in enumerate(self._tables):
                columns = _listed(self._stored[table])
                self._connection.execute(
                    sql.SQL("insert into {} ({}) overriding system value select {} from {}").format(
                        sql.SQL(table),
                        columns,
                        columns,
                        _copy(number),
                    )
                )

    def contents(self) -> list[tuple[str, Counter[str]]]:
        """The rows of each table as text, in any order."""
        found = []
        for table, columns in self._tables.items():
            if columns:
                rows = self._connection.execute(
                    sql.SQL("select to_jsonb(t)::text from (select {} from {}) as t").format(
                        _listed(columns),
                        sql.SQL(table),
                    )
                ).fetchall()
                found.append((f"table {table}", Counter(row[0] for row in rows)))
            else:
                count = self._connection.execute(sql.SQL("select count(*) from {}").format(sql.SQL(table))).fetchone()
                found.append((f"table {table}", Counter({"row": count[0]} if count else {})))
        return found


def _listed(columns: list[str]) -> sql.Composable:
    """Columns that are quoted already."""
    return sql.SQL(", ").join(sql.SQL(column) for column in columns)


def _copy(number: int) -> sql.Composable:
    return sql.Identifier("pg_temp", f"headwater_copy_{number}")
