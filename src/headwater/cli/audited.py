"""What an administrator does by the command line: in one transaction with the event that tells of it."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg

import headwater
from headwater.calls import Call
from headwater.cli.queries import ask

T = TypeVar("T")


class _InOneTransaction(headwater.Headwater):
    """A log whose calls all go through one connection, in the transaction that is open there."""

    def __init__(self, log: headwater.Headwater, connection: psycopg.Connection[Any]) -> None:
        super().__init__(log._pool)
        self._one = connection

    def _run(self, call: Call[T], connection: psycopg.Connection[Any] | None = None, *, tries: int = 1) -> T:
        return super()._run(call, connection or self._one)

    def run(
        self,
        call: Call[T],
        *,
        patience_seconds: float | None = None,
        connection: psycopg.Connection[Any] | None = None,
    ) -> T:
        # What failed in a transaction is not tried again in it.
        return self._run(call, connection)

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        yield self._one

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Any]]:
        with self._one.transaction():
            yield self._one


@contextmanager
def acting(
    log: headwater.Headwater, action: str, subject: str, detail: dict[str, Any] | None = None
) -> Iterator[headwater.Headwater]:
    """The log to act on. What is done with it is one transaction with the event of `headwater.audit` that tells of it:
    by which role, which user of this machine, and what changed. The block may add to `detail`; nothing secret.

    A role that is no administrator may not write to that topic: what it does with what is its own is not told there.
    """
    ((role, administrator),) = ask(log, "who_acts")
    told = {} if detail is None else detail
    for name in [name for name, value in told.items() if value is None]:
        del told[name]
    if not administrator:
        with log.transaction() as connection:
            yield _InOneTransaction(log, connection)
        return
    told["door"], told["system_user"] = "cli", _system_user()
    with log.audited(role, action, subject, told) as connection:
        yield _InOneTransaction(log, connection)


def _system_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run as a number that has no name.
        return str(os.getuid())
