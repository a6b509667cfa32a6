"""Admission of network connections: the limit of one process, and the share of connections that have sent nothing yet.

A connection is *new* until its client sends a valid request or authenticates. New connections cost an attacker nothing,
so each address may have only a share of them. When the share or the limit is reached, the oldest new connection is
closed in favour of the next one; a real client sends its request at once and stays.
Invariant: a connection that is no longer new is never closed in favour of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Admission(Generic[T]):
    """The connections of one process. `close` closes one; call `leave` for every connection that ends."""

    def __init__(self, max_connections: int, close: Callable[[T], None]) -> None:
        self.max_connections = max_connections
        self._close = close
        self._max_new = max(1, max_connections // 8)
        self._addresses: dict[T, str] = {}
        # New connections by address, the oldest first.
        self._new: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._addresses))

    def __contains__(self, connection: T) -> bool:
        return connection in self._addresses

    def enter(self, connection: T, address: str) -> bool:
        """Admit a connection; False if the limit is reached and no connection is new."""
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
        """The client has sent a valid request or authenticated: the connection is no longer new."""
        address = self._addresses.get(connection)
        if address is not None:
            self._remove_new(address, connection)

    def leave(self, connection: T) -> None:
        """Forget a connection that has ended or was not admitted."""
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
