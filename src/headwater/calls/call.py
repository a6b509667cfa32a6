"""A call to the log: its SQL, its parameters, and how its rows are decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, LiteralString, TypeVar

from headwater.setting_definitions import definitions

T = TypeVar("T")
Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One round trip to the database: SQL, parameters, and how the rows are decoded."""

    sql: LiteralString
    params: tuple[Any, ...]
    decode: Callable[[Rows], T]


@dataclass(frozen=True, slots=True)
class Selected(Generic[T]):
    """A value that a query selects: the SQL expression of each of its fields."""

    make: Callable[..., T]
    expressions: Mapping[str, LiteralString]

    @property
    def sql(self) -> LiteralString:
        return ", ".join(self.expressions.values())

    def value(self, row: tuple[Any, ...]) -> T:
        return self.make(**dict(zip(self.expressions, row, strict=True)))

    def first(self, rows: Rows) -> T:
        return self.value(rows[0])

    def all(self, rows: Rows) -> list[T]:
        return [self.value(row) for row in rows]


def setting_columns(noun: type, alias: LiteralString = "") -> dict[str, LiteralString]:
    """The columns of the settings of a noun."""
    return {one.name: alias + one.name for one in definitions(noun)}


def named_arguments(arguments: Mapping[str, Any]) -> tuple[LiteralString, tuple[Any, ...]]:
    """The arguments of a SQL function by name, and their parameters. Arguments that are None are left out.

    Names are those of settings (see `setting_definitions.checked`) or written in the code, and never come from a user.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    listed = ", ".join(f"{name} => %s{'::text[]' * isinstance(value, list)}" for name, value in given.items())
    return listed, tuple(given.values())


def nothing(rows: Rows) -> None:
    return None


def only_value(rows: Rows) -> Any:
    return rows[0][0]
