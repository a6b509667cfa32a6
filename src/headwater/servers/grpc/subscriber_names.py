"""Names of subscribers: one at a time has a name, among all servers on one Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import psycopg

from headwater import calls
from headwater.aio import AsyncHeadwater
from headwater.errors import HeadwaterError, LogUnavailable
from headwater.observability.metrics import ERROR, logger
from headwater.servers.grpc.errors import NameTaken
from headwater.servers.grpc.interceptor import Call
from headwater.supervisor import supervise

# How often it is seen whether the session that has the names still lives.
WATCH_SECONDS: Final = 1.0


class Names:
    """The names that subscribers of this process have."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str], Call] = {}

    @asynccontextmanager
    async def holding(self, store: str, name: str, call: Call) -> AsyncIterator[None]:
        """Have a name as long as the block lasts. NameTaken: somebody has it. An empty name is none."""
        if not name:
            yield
            return
        key = (store, name)
        if key in self._taken:
            raise _taken(store, name)
        self._taken[key] = call
        try:
            async with self._among_all(store, name):
                yield
        finally:
            del self._taken[key]

    @asynccontextmanager
    async def _among_all(self, store: str, name: str) -> AsyncIterator[None]:
        """This process is the only one."""
        yield


class SharedNames(Names):
    """The same among all who serve one Postgres: the names are locks of one session, which end with it."""

    def __init__(self, log: AsyncHeadwater) -> None:
        super().__init__()
        self._log = log
        self._one_by_one = asyncio.Lock()
        self._stack: AsyncExitStack | None = None
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Give the session back."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._let_go()

    @asynccontextmanager
    async def _among_all(self, store: str, name: str) -> AsyncIterator[None]:
        if not await self._ask(calls.take_subscriber_name(store, name)):
            raise _taken(store, name)
        session = self._connection
        try:
            yield
        finally:
            # With its session the name is gone already.
            if self._connection is session and session is not None:
                giving = asyncio.ensure_future(self._give(store, name))
                await asyncio.shield(giving)

    async def _give(self, store: str, name: str) -> None:
        try:
            await self._ask(calls.give_subscriber_name(store, name))
        except HeadwaterError as error:
            # A session that is lost has no names; the store may be gone with its name, too.
            logger.warning("a subscriber's name could not be given back", extra={ERROR: error.message})

    async def _ask(self, call: calls.Call[bool]) -> bool:
        async with self._one_by_one:
            if self._connection is None:
                stack = AsyncExitStack()
                self._connection = await stack.enter_async_context(self._log.connection())
                self._stack = stack
                self._watch = self._watch or supervise("grpc subscriber names", self._watching)
            try:
                return await self._log._run(call, self._connection)
            except LogUnavailable:
                await self._lost()
                raise

    async def _watching(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._connection is None:
                continue
            try:
                async with self._one_by_one:
                    if self._connection is not None:
                        await self._log._run(calls.head(), self._connection)
            except HeadwaterError as error:
                logger.warning("the session with the names of subscribers is lost", extra={ERROR: error.message})
                await self._lost()

    async def _lost(self) -> None:
        """Another server may give the names away by now, so those who had them here end."""
        for call in tuple(self._taken.values()):
            call.end(LogUnavailable("the subscriber's name is lost with the connection to Postgres: subscribe again"))
        await self._let_go()

    async def _let_go(self) -> None:
        stack, self._stack, connection, self._connection = self._stack, None, self._connection, None
        if connection is not None:
            # Closed, not lent to others: they would have the locks.
            await connection.close()
        if stack is not None:
            await stack.aclose()


def _taken(store: str, name: str) -> NameTaken:
    return NameTaken(
        f'the subscriber "{name}" of "{store}" is connected already',
        hint="Choose another name, or wait until it has gone.",
        detail={"store": store, "subscriber": name},
    )
