"""Subscribers: handlers of SQL subscriptions, fed by the one reader that their group has at a time.

Each handler gets its events in order. A slow one does not stop the others until it is `read_ahead` chunks behind;
one that fails at an event gets it again later, by itself, while the group goes on.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from headwater import aio, tracing
from headwater.counters import COUNTERS
from headwater.errors import HeadwaterError, ReaderBusy
from headwater.model import Dead, Event, MatchedEvent, Retry, Snooze
from headwater.telemetry import ERROR, GROUP, HANDLED, POSITION, logger

LEASE_SECONDS = 30.0
KEEP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Subscriber:
    """One handler and the events that it wants."""

    name: str
    handler: Callable[[Event], Any]
    group: str
    condition: str
    params: Mapping[str, Any]
    expires_after: timedelta | None
    # Its events one after the other.
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def call(self, event: Event) -> object:
        with tracing.consuming(self.group, [event]):
            if inspect.iscoroutinefunction(self.handler):
                return await self.handler(event)
            return await asyncio.to_thread(self.handler, event)


@dataclass(slots=True)
class _Chunk:
    """Events that were read together, and the handlers still at work on them."""

    next_position: int
    running: set[asyncio.Task[None]]


@dataclass(slots=True)
class GroupReader:
    """Reads for the subscribers of one group, as long as no other process does."""

    log: aio.AsyncHeadwater
    group: str
    subscribers: Sequence[Subscriber]
    reader: str
    stopping: asyncio.Event
    grace_seconds: float
    read_ahead: int
    batch_size: int
    chunks: deque[_Chunk] = field(default_factory=deque)
    done_to: int | None = None

    async def run(self) -> None:
        wanted = {one.name: await self._subscribe(one) for one in self.subscribers}
        keeping = asyncio.create_task(self._keep(list(wanted.values())))
        after: int | None = None
        try:
            while not self.stopping.is_set():
                try:
                    await self._note_done()
                    if len(self.chunks) >= self.read_ahead:
                        await self._wait(*self.chunks[0].running)
                        continue
                    reading = await self.log.read_next(
                        self.group,
                        reader=self.reader,
                        after=after,
                        batch_size=self.batch_size,
                        lease_seconds=LEASE_SECONDS,
                    )
                except ReaderBusy:
                    # Another process reads. What this one has not noted as done, that one reads again.
                    await self._drop_chunks()
                    after = self.done_to = None
                    await self._wait(seconds=1.0)
                    continue
                running = set()
                for one in self.subscribers:
                    mine = [
                        matched._replace(subscription_ids=(wanted[one.name],))
                        for matched in reading.events
                        if _is_for(matched, one.name, wanted[one.name])
                    ]
                    if mine:
                        running.add(asyncio.create_task(self._handle(one, mine)))
                idle = after == reading.next_position and not reading.events
                if running or not idle:
                    self.chunks.append(_Chunk(reading.next_position, running))
                after = reading.next_position
                if idle:
                    await self._wait(seconds=0.01)
        finally:
            keeping.cancel()
            await self._leave()

    async def _subscribe(self, one: Subscriber) -> int:
        return await self.log.subscribe(one.group, one.condition, one.params, expires_after=one.expires_after)

    async def _wait(self, *tasks: asyncio.Task[None], seconds: float = 1.0) -> None:
        stop = asyncio.ensure_future(self.stopping.wait())
        await asyncio.wait({stop, *tasks}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()

    async def _note_done(self, *, release: bool = False) -> None:
        """Move the group to the end of the chunks that all handlers are done with."""
        moved = False
        while self.chunks and all(task.done() for task in self.chunks[0].running):
            done = self.chunks.popleft()
            for task in done.running:
                # An error in it is one of ours, not of a handler.
                task.result()
            self.done_to = done.next_position
            moved = True
        if self.done_to is not None and (moved or release):
            await self.log.set_reading(self.group, self.done_to, reader=self.reader, release=release)

    async def _keep(self, subscription_ids: list[int]) -> None:
        """Stay the reader while handlers take their time, and keep the subscriptions from expiring."""
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            try:
                if self.done_to is not None:
                    await self.log.set_reading(self.group, self.done_to, reader=self.reader)
                await self.log.keep_subscriptions(subscription_ids)
            except HeadwaterError as error:
                logger.warning("reading not kept", extra={GROUP: self.group, ERROR: error.message})

    async def _drop_chunks(self) -> None:
        tasks = {task for chunk in self.chunks for task in chunk.running}
        self.chunks.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)

    async def _leave(self) -> None:
        tasks = {task for chunk in self.chunks for task in chunk.running}
        if tasks:
            await asyncio.wait(tasks, timeout=self.grace_seconds)
        with suppress(ReaderBusy, asyncio.CancelledError):
            await self._note_done(release=True)
        await self._drop_chunks()

    async def _handle(self, one: Subscriber, matched: Sequence[MatchedEvent]) -> None:
        async with one.turn:
            for this in matched:
                await self._handle_one(one, this)

    async def _handle_one(self, one: Subscriber, this: MatchedEvent) -> None:
        task = asyncio.ensure_future(one.call(this.event))
        await asyncio.wait({task})
        error = task.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        result = Retry(reason=f"{type(error).__name__}: {error}") if error is not None else task.result()
        kind = type(result).__name__.lower() if isinstance(result, Retry | Snooze | Dead) else "done"
        COUNTERS.add(HANDLED, self.group, kind)
        match result:
            case Retry():
                logger.warning(
                    "subscriber failed",
                    extra={GROUP: self.group, POSITION: this.event.position, ERROR: result.reason},
                )
                delay = None if result.after is None else result.after.total_seconds()
                await self.log.retry_later(self.group, this, handler=one.name, delay_seconds=delay, error=result.reason)
            case Snooze():
                again = this._replace(attempt=max(this.attempt - 1, 1))
                await self.log.retry_later(
                    self.group, again, handler=one.name, delay_seconds=result.after.total_seconds()
                )
            case Dead():
                # More tries than any group allows.
                given_up = this._replace(attempt=1_000_000)
                await self.log.retry_later(self.group, given_up, handler=one.name, error=result.reason)
            case _:
                if this.retry_id is not None:
                    await self.log.finish_retry(this.retry_id)


def _is_for(matched: MatchedEvent, handler: str, subscription_id: int) -> bool:
    return subscription_id in matched.subscription_ids and matched.handler in (None, handler)
