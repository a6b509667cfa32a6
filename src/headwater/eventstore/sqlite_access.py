"""How an event store on SQLite runs its statements: directly, or from an event loop in threads.

From an event loop, a write waits for the writer lock in the loop, and then runs in the writer thread of its store. So
waiting writes do not occupy the threads for reads, which the handler of a projection may need while the others wait for
it.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from headwater.eventstore.query import StoreEvent
from headwater.eventstore.sqlite_file import SqliteFile, busy
from headwater.eventstore.sqlite_rows import BUSY_SECONDS

P = ParamSpec("P")
T = TypeVar("T")
Handle = Callable[[sqlite3.Connection, Sequence[StoreEvent]], None]


class FileAccess:
    """Runs statements in the calling thread. `claiming`: one competing consumer searches at a time, since all would
    find the same events."""

    def __init__(self, file: SqliteFile) -> None:
        self.file = file
        self.claiming = threading.Lock()

    def read(self, act: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `act` in one snapshot."""
        with self.file.reading() as connection:
            return act(connection, *args, **kwargs)

    def write(self, act: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `act` in a transaction."""
        with self.file.transaction() as connection:
            return act(connection, *args, **kwargs)

    def handle(self, handler: Handle) -> Handle:
        """The handler as a transaction calls it."""
        return handler

    def close(self) -> None:
        self.file.close()


class AsyncFileAccess:
    """The same from an event loop: reads run in any thread, writes in the writer thread."""

    def __init__(self, file: SqliteFile) -> None:
        self.claiming = asyncio.Lock()
        self._blocking = FileAccess(file)
        self._turn = asyncio.Lock()
        self._turns = 0
        self._thread = ThreadPoolExecutor(1, "headwater-store")

    async def read(self, act: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `act` in one snapshot."""
        return await asyncio.to_thread(partial(self._blocking.read, act, *args, **kwargs))

    async def write(self, act: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `act` in a transaction. Raises LogUnavailable if another writer holds the lock for too long."""
        await self._take_turn()
        try:
            bound = partial(copy_context().run, partial(self._blocking.write, act, *args, **kwargs))
            return await asyncio.get_running_loop().run_in_executor(self._thread, bound)
        finally:
            self._turn.release()

    def handle(self, handler: Callable[[Any, Sequence[StoreEvent]], Awaitable[None]]) -> Handle:
        """The handler as a transaction calls it: it runs in the event loop, which is not blocked, while the transaction
        belongs to the writer thread."""
        loop = asyncio.get_running_loop()

        def handle(connection: sqlite3.Connection, events: Sequence[StoreEvent]) -> None:
            asyncio.run_coroutine_threadsafe(_awaited(handler(connection, events)), loop).result()

        return handle

    async def close(self) -> None:
        await asyncio.to_thread(self._blocking.close)

    async def _take_turn(self) -> None:
        while True:
            # A long wait is not an error while other writers make progress.
            turns = self._turns
            try:
                async with asyncio.timeout(BUSY_SECONDS):
                    await self._turn.acquire()
            except TimeoutError:
                if self._turns == turns:
                    raise busy() from None
            else:
                self._turns += 1
                return


def call_directly(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return act(*args, **kwargs)


async def call_in_thread(act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.to_thread(act, *args, **kwargs)


async def _awaited(handling: Awaitable[None]) -> None:
    await handling
