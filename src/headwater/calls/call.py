"""What a call to the log is: its SQL, its parameters, and what its rows mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, LiteralString, TypeVar

T = TypeVar("T")
Rows = list[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One round trip to the log: its SQL, its parameters, and what its rows mean."""

    sql: LiteralString
    params: tuple[Any, ...]
    decode: Callable[[Rows], T]


def nothing(rows: Rows) -> None:
    return None


def only_value(rows: Rows) -> Any:
    return rows[0][0]
