"""Admission of network connections: how many a process takes, and what silent ones may take of that.

A connection is *new* until its client has proven itself, by a valid request or by its password. New connections are the
cheap weapon: they cost an attacker nothing. So each address has a share of new ones, and where the share or the whole
is full, the oldest new one is closed in favour of the next: an honest client proves itself at once and stays.
Invariant: a connection that has proven itself is never closed for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Admission(Generic[T]):
    """The connections of one process. `close` closes one; `leave` must be called for every one that ended."""

    def __init__(self, max_connections: int, close: Callable[[T], None]) -> None:
        self.max_connections = max_connections
        self._close = close
        self._max_new = max(1, max_connections // 8)
        self._addresses: dict[T, str] = {}
        # Of each address, the oldest first.
        self._new: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._addresses))

    def __contains__(self, connection: T) -> bool:
        return connection in self._addresses

    def enter(self, connection: T, address: str) -> bool:
        """A connection comes; False: there are too many, and all of them have proven themselves."""
        if len(self._new.get(address, ())) >= self._max_new:
            self._evict(address)
        elif len(self._addresses) >= self.max_connections:
            if not self._new:
                return False
            self._evict(max(self._new, key=lambda one: len(self._new[one])))
        self._addresses[connection] = address
        self._new.setdefault(address, {})[connection] = None
        return True

    def prove(self, connection: T) -> None:
        """The client of a connection has proven itself."""
        address = self._addresses.get(connection)
        if address is not None:
            self._remove_new(address, connection)

    def leave(self, connection: T) -> None:
        """A connection has ended, or was never taken."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._remove_new(address, connection)

    def _evict(self, address: str) -> None:
        oldest = next(iter(self._new[address]))
        self.leave(oldest)
        self._close(oldest)

    def _remove_new(self, address: str, connection: T) -> None:
        new = self._new.get(address)
        if new is not None:
            new.pop(connection, None)
            if not new:
                del self._new[address]
