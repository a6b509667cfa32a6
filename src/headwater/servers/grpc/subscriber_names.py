"""Exclusive names of subscribers: at most one subscriber of an event store is connected under a name.

With Postgres this holds among all servers: a name is an advisory lock of one dedicated session. If that session is
lost, another server may grant the names, so the subscribers that hold them here are ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import psycopg

from headwater.aio import AsyncHeadwater
from headwater.calls import Call as DatabaseCall
from headwater.calls import log as log_calls
from headwater.calls import store as store_calls
from headwater.errors import HeadwaterError, LogUnavailable
from headwater.observability.metrics import ERROR, logger
from headwater.servers.grpc.errors import SubscriberNameInUse
from headwater.servers.grpc.interceptor import GrpcCall
from headwater.supervisor import supervise

# How often the session that holds the names is checked.
WATCH_SECONDS: Final = 1.0


class SubscriberNames:
    """The names that subscribers of this process hold."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, str], GrpcCall] = {}

    @asynccontextmanager
    async def hold(self, store: str, name: str, call: GrpcCall) -> AsyncIterator[None]:
        """Hold a name during the block. Raises SubscriberNameInUse. An empty name is not exclusive."""
        if not name:
            yield
            return
        key = (store, name)
        if key in self._taken:
            raise _name_in_use(store, name)
        self._taken[key] = call
        try:
            async with self._hold_globally(store, name):
                yield
        finally:
            del self._taken[key]

    @asynccontextmanager
    async def _hold_globally(self, store: str, name: str) -> AsyncIterator[None]:
        """Nothing to do: this is the only process."""
        yield


class SharedSubscriberNames(SubscriberNames):
    """Names that are exclusive among all servers on one Postgres: locks of one session, which end with it."""

    def __init__(self, log: AsyncHeadwater) -> None:
        super().__init__()
        self._log = log
        self._lock = asyncio.Lock()
        self._stack: AsyncExitStack | None = None
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._watch: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Release the session."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._release_session()

    @asynccontextmanager
    async def _hold_globally(self, store: str, name: str) -> AsyncIterator[None]:
        if not await self._run(store_calls.take_subscriber_name(store, name)):
            raise _name_in_use(store, name)
        session = self._connection
        try:
            yield
        finally:
            # If the session was lost, the name was released with it.
            if self._connection is session and session is not None:
                release = asyncio.ensure_future(self._release_name(store, name))
                await asyncio.shield(release)

    async def _release_name(self, store: str, name: str) -> None:
        try:
            await self._run(store_calls.give_subscriber_name(store, name))
        except HeadwaterError as error:
            # The session may be lost, or the store deleted: both have released the name.
            logger.warning("subscriber name not released", extra={ERROR: error.message})

    async def _run(self, call: DatabaseCall[bool]) -> bool:
        async with self._lock:
            if self._connection is None:
                stack = AsyncExitStack()
                self._connection = await stack.enter_async_context(self._log.connection())
                self._stack = stack
                self._watch = self._watch or supervise("grpc subscriber names", self._watch_session)
            try:
                return await self._log.run(call, connection=self._connection)
            except LogUnavailable:
                await self._end_holders()
                raise

    async def _watch_session(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._connection is None:
                continue
            try:
                async with self._lock:
                    if self._connection is not None:
                        await self._log.run(log_calls.head(), connection=self._connection)
            except HeadwaterError as error:
                logger.warning("session with subscriber names lost", extra={ERROR: error.message})
                await self._end_holders()

    async def _end_holders(self) -> None:
        """End the subscribers that hold names: another server may grant the names now."""
        for call in tuple(self._taken.values()):
            call.end(LogUnavailable("connection to Postgres lost: subscribe again"))
        await self._release_session()

    async def _release_session(self) -> None:
        stack, self._stack, connection, self._connection = self._stack, None, self._connection, None
        if connection is not None:
            # Closed and not returned to the pool, since it holds locks.
            await connection.close()
        if stack is not None:
            await stack.aclose()


def _name_in_use(store: str, name: str) -> SubscriberNameInUse:
    return SubscriberNameInUse(
        f'subscriber "{name}" of "{store}" is already connected',
        hint="Choose another name, or wait until it disconnects.",
        detail={"store": store, "subscriber": name},
    )
