"""A call to the log: its SQL, its parameters, and how its rows are decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, LiteralString, TypeVar

T = TypeVar("T")
Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One round trip to the database: SQL, parameters, and how the rows are decoded."""

    sql: LiteralString
    params: tuple[Any, ...]
    decode: Callable[[Rows], T]


def nothing(rows: Rows) -> None:
    return None


def only_value(rows: Rows) -> Any:
    return rows[0][0]
