"""Audited changes: a change made on the command line and its audit event are one transaction."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg

import headwater
from headwater.calls import Call
from headwater.cli.queries import run_query
from headwater.database.caller_connection import CallerConnection

T = TypeVar("T")


class _TransactionLog(headwater.Headwater):
    """A log that runs all of its calls on one connection, in the open transaction of that connection."""

    def __init__(self, log: headwater.Headwater, connection: psycopg.Connection[Any]) -> None:
        super().__init__(log._pool)
        self._one = connection

    def _run(self, call: Call[T], connection: CallerConnection | None = None, *, tries: int = 1) -> T:
        return super()._run(call, connection or self._one)

    def run(self, call: Call[T], *, connection: CallerConnection | None = None) -> T:
        # A failed call aborts the transaction, so it cannot be retried here.
        return self._run(call, connection)

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        yield self._one

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Any]]:
        with self._one.transaction():
            yield self._one


@contextmanager
def audit(
    log: headwater.Headwater, action: str, subject: str, detail: dict[str, Any] | None = None
) -> Iterator[headwater.Headwater]:
    """Yield a log for the change. The change is one transaction with an event in the topic `headwater.audit` that
    records the database role, the user of this machine, and `detail`. The block may add to `detail`; no secrets.

    A role that is not an administrator cannot write to that topic; its changes are not audited.
    """
    ((role, administrator),) = run_query(log, "current_role")
    recorded = {} if detail is None else detail
    for name in [name for name, value in recorded.items() if value is None]:
        del recorded[name]
    if not administrator:
        with log.transaction() as connection:
            yield _TransactionLog(log, connection)
        return
    recorded["server"], recorded["system_user"] = "cli", _system_user()
    with log.audited(role, action, subject, recorded) as connection:
        yield _TransactionLog(log, connection)


def _system_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # In a container, the user id may have no name.
        return str(os.getuid())
