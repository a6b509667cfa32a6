"""Subscribers: handlers of SQL subscriptions, fed by the one reader that their group has at a time.

A `GroupReader` reads chunks of events on a connection of its own and gives each subscriber its part of them. A chunk is
done when all handlers are done with it; then the group's position is moved behind it, in the order of the chunks. A
handler that fails at an event gets it again later, by itself, while the group goes on. A slow one does not stop the
others until it is `read_ahead` chunks behind.

What must stay true:
- The position is only moved on the connection that read the chunk. After a lost connection nothing that was read before
  counts: the reader begins again at the position that the database has, so that no event is missed, and none comes
  before one that precedes it. What was read and not noted as done is handled again.
- No error ends a reader: it logs it, waits, and begins again. Errors of handlers are failed attempts. The exception is
  SchemaMismatch: a program that an upgrade has left behind ends.
- Each call of a handler ends: after its timeout it is a failed attempt, whatever the handler does.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection

from headwater import aio, calls
from headwater.errors import HeadwaterError, InvalidRequest, ReaderBusy, SchemaMismatch
from headwater.model import Dead, Event, MatchedEvent, Outcome, Retry, Snooze
from headwater.observability import tracing
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import ERROR, GROUP, HANDLED, POSITION, STOPPED_FILTERS, WAIT_SECONDS, logger
from headwater.supervisor import failure_of

LEASE_SECONDS: Final = 30.0
KEEP_SECONDS: Final = 5.0
# Filters that take too long are stopped by the database at this time.
MATCH_SECONDS: Final = 5.0
DEFAULT_TIMEOUT_SECONDS: Final = 300.0
MAX_TIMEOUT_SECONDS: Final = 86_400.0
MAX_CONCURRENCY: Final = 1000
# How long a handler that was cancelled has to end.
CANCEL_SECONDS: Final = 5.0
# Threads of one handler that hang in a call that timed out. Beyond them its calls fail without a thread.
MAX_HUNG_THREADS: Final = 16
# A reader that failed waits: this long at first, then longer and longer.
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 5.0
# An idle reader asks for the head of the log this often, and reads for retries that came due this often.
POLL_SECONDS: Final = 0.01
LOOK_SECONDS: Final = 0.2
# How often a process looks for subscribers that were added.
TAKE_UP_SECONDS: Final = 0.5
# How long an outcome may wait for the database before its chunk is given up and read again.
PATIENCE_SECONDS: Final = 30.0

_OUTCOMES = (Retry, Dead, Snooze)


@dataclass(frozen=True, slots=True)
class Subscriber:
    """One handler, the events that it wants, and how it is run."""

    name: str
    handler: Callable[..., Any]
    group: str
    condition: str
    params: Mapping[str, Any]
    expires_after: timedelta | None = None
    # It gets lists of up to `batch_size` events.
    batch: bool = False
    batch_size: int = 100
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    # When a failed event comes again: after the first, the second, ... attempt. None: as the group's settings say.
    retry_delays: tuple[float, ...] | None = None
    # Calls at a time. More than one: the order is kept only among events that `split_by` puts into one part.
    concurrency: int = 1
    split_by: Callable[[Event], Hashable] | None = None
    fire_and_forget: bool = False
    # It takes what any subscription of the group matches, whoever made it, and makes none.
    takes_all: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= 1000:
            raise InvalidRequest("batch_size is 1 to 1000")
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise InvalidRequest(f"concurrency is 1 to {MAX_CONCURRENCY}")
        if not 0 < self.timeout_seconds <= MAX_TIMEOUT_SECONDS:
            raise InvalidRequest(f"timeout_seconds is more than 0 and up to {MAX_TIMEOUT_SECONDS:g}")
        if self.retry_delays is not None and self.fire_and_forget:
            raise InvalidRequest("a fire-and-forget handler has no retries: leave out retry_delays")
        if self.retry_delays is not None and not all(0 <= delay <= 30 * 86_400 for delay in self.retry_delays):
            raise InvalidRequest("retry_delays are seconds, 0 to 30 days each")

    @property
    def max_attempts(self) -> int | None:
        return None if self.retry_delays is None else len(self.retry_delays) + 1

    def parts(self, matched: Sequence[MatchedEvent]) -> list[list[MatchedEvent]]:
        """Events that follow each other, apart from those that need not."""
        if self.split_by is not None:
            parts: dict[Hashable, list[MatchedEvent]] = {}
            for one in matched:
                parts.setdefault(self.split_by(one.event), []).append(one)
            return list(parts.values())
        if self.concurrency == 1:
            return [list(matched)]
        return self.batches(matched)

    def batches(self, part: Sequence[MatchedEvent]) -> list[list[MatchedEvent]]:
        """What one call of the handler gets."""
        size = self.batch_size if self.batch else 1
        return [list(part[start : start + size]) for start in range(0, len(part), size)]


class Caught:
    """Keeps the error that ends its block, for code of users: whatever it raises is told to them, and ends nothing."""

    def __init__(self, kind: type[BaseException] = Exception) -> None:
        self._kind = kind
        self.error: BaseException | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return isinstance(error, self._kind)


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def is_expected(error: BaseException) -> bool:
    """Whether an error comes from the database or the network; another is a bug, whose traceback is logged."""
    return isinstance(error, HeadwaterError | psycopg.Error | OSError)


class HandlerThreads:
    """Threads for handlers that are not async. A call that hangs is left behind with its thread, up to a bound; threads
    are daemons, so that one that hangs does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[SimpleQueue[Callable[[], None] | None]] = []
        self._hung = 0

    async def call(self, function: Callable[..., Any], *given: Any) -> Any:
        if self._hung >= MAX_HUNG_THREADS:
            raise TimeoutError(f"{self._hung} earlier calls of this handler have not returned")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        context = copy_context()
        tasks = self._idle.pop() if self._idle else self._start()
        left_behind = False

        def ended(result: Any, error: BaseException | None) -> None:
            if left_behind:
                self._hung -= 1
            self._idle.append(tasks)
            if not answer.done():
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error)

        def work() -> None:
            result: Any = None
            with Caught(BaseException) as caught:
                result = context.run(function, *given)
            error = caught.error
            if isinstance(error, StopIteration):
                # A future takes none.
                error = RuntimeError(f"the handler raised StopIteration: {error}")
            # The loop may be closed by now.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(ended, result, error)

        tasks.put(work)
        try:
            return await answer
        except asyncio.CancelledError:
            left_behind = True
            self._hung += 1
            raise

    def _start(self) -> SimpleQueue[Callable[[], None] | None]:
        tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

        def run() -> None:
            while (task := tasks.get()) is not None:
                task()

        threading.Thread(target=run, name=f"headwater-{self._name}", daemon=True).start()
        return tasks

    def close(self) -> None:
        for tasks in self._idle:
            tasks.put(None)
        self._idle.clear()


@dataclass(slots=True, eq=False)
class Chunk:
    """Events that were read together, and the handlers still at work on them. One that is dropped is read again."""

    next_position: int
    running: set[asyncio.Task[None]] = field(default_factory=set)
    dropped: bool = False


@dataclass(slots=True, eq=False)
class Runner:
    """Runs one subscriber's handler on its parts of the chunks, one chunk after the other."""

    one: Subscriber
    log: aio.AsyncHeadwater
    reader: str
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    free: asyncio.Semaphore = field(init=False)
    threads: HandlerThreads = field(init=False)
    # Calls of a fire-and-forget handler, which no chunk waits for.
    loose: set[asyncio.Task[None]] = field(default_factory=set)
    # Retries in hand: their lease in the database may end before the handler does.
    retrying: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.free = asyncio.Semaphore(self.one.concurrency)
        self.threads = HandlerThreads(self.one.name)

    async def handle(self, chunk: Chunk, matched: Sequence[MatchedEvent]) -> None:
        retries = {one.retry_id for one in matched if one.retry_id is not None}
        self.retrying |= retries
        try:
            async with self.turn:
                if chunk.dropped:
                    return
                parts: list[list[MatchedEvent]] = []
                with Caught() as caught:
                    parts = self.one.parts(matched)
                if caught.error is not None:
                    # split_by is the user's: its error is a failed attempt of all.
                    failed = Retry(reason=f"split_by: {told(caught.error)}")
                    await self._settle(matched, [failed] * len(matched))
                    return
                if self.one.fire_and_forget:
                    for part in parts:
                        await self._fire(part)
                    return
                async with asyncio.TaskGroup() as tasks:
                    for part in parts:
                        tasks.create_task(self._handle_part(chunk, part))
        except ExceptionGroup as group:
            # Errors of ours, not of handlers: the first says it for all.
            raise group.exceptions[0] from None
        finally:
            self.retrying -= retries

    async def _handle_part(self, chunk: Chunk, part: Sequence[MatchedEvent]) -> None:
        async with self.free:
            for batch in self.one.batches(part):
                if chunk.dropped:
                    return
                await self._settle(batch, await self._outcomes(batch))

    async def _fire(self, part: Sequence[MatchedEvent]) -> None:
        """Start calls without waiting for their end; wait only for one of the `concurrency` places."""
        for batch in self.one.batches(part):
            await self.free.acquire()
            task = asyncio.create_task(self._run_loose(batch))
            self.loose.add(task)
            task.add_done_callback(self.loose.discard)

    async def _run_loose(self, batch: Sequence[MatchedEvent]) -> None:
        try:
            await self._outcomes(batch)
        finally:
            self.free.release()

    async def _outcomes(self, batch: Sequence[MatchedEvent]) -> list[Outcome]:
        """What the handler says of each event of a batch."""
        events = [one.event for one in batch]
        result = await self._call(events)
        if isinstance(result, Mapping):
            outcomes = [result.get(event.position) for event in events]
        else:
            outcomes = [result] * len(events)
        for event, outcome in zip(events, outcomes, strict=True):
            kind = type(outcome).__name__.lower() if outcome is not None else "done"
            COUNTERS.add(HANDLED, self.one.group, kind)
            if isinstance(outcome, Retry):
                logger.warning(
                    "subscriber failed",
                    extra={GROUP: self.one.group, POSITION: event.position, ERROR: outcome.reason},
                )
        return outcomes

    async def _call(self, events: list[Event]) -> Outcome | Mapping[int, Outcome]:
        """Call the handler once, for as long as its timeout. Whatever it raises is a failed attempt."""
        one = self.one
        task = asyncio.ensure_future(self._invoke(events))
        try:
            await asyncio.wait({task}, timeout=one.timeout_seconds)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
            return Retry(reason=f"timed out after {one.timeout_seconds:g} s")
        if task.cancelled():
            return Retry(reason="the handler was cancelled")
        error = task.exception()
        if error is not None:
            if not isinstance(error, Exception):
                raise error
            return Retry(reason=told(error))
        result = task.result()
        if result is None or isinstance(result, _OUTCOMES) or (one.batch and _is_by_position(result)):
            return result  # type: ignore[no-any-return]
        expected = "None, Retry, Dead or Snooze" + (", or a mapping of positions to these" if one.batch else "")
        return Retry(reason=f"TypeError: handler {one.name} returned {result!r:.200}; expected {expected}")

    async def _invoke(self, events: list[Event]) -> Any:
        one = self.one
        given = events if one.batch else events[0]
        with tracing.consuming(one.group, events):
            if inspect.iscoroutinefunction(one.handler):
                return await one.handler(given)
            return await self.threads.call(one.handler, given)

    async def _settle(self, batch: Sequence[MatchedEvent], outcomes: Sequence[Outcome]) -> None:
        """Note what is to be known of a batch: what is done at the first attempt needs no note."""
        ended = [
            (matched, self._delayed(matched, outcome))
            for matched, outcome in zip(batch, outcomes, strict=True)
            if outcome is not None or matched.retry_id is not None
        ]
        if not ended:
            return
        call = calls.settle_matched(
            self.one.group, ended, handler=self.one.name, max_attempts=self.one.max_attempts, worker=self.reader
        )
        # Before the note is committed: from then on a retry may be read again, and one that still counted as in hand
        # would be passed over until its next lease ends.
        self.retrying.difference_update(matched.retry_id for matched in batch if matched.retry_id is not None)
        await self.log.run(call, patience_seconds=PATIENCE_SECONDS)

    def _delayed(self, matched: MatchedEvent, outcome: Outcome) -> Outcome:
        """A retry that names no time comes when the handler's own delays say."""
        delays = self.one.retry_delays
        if isinstance(outcome, Retry) and outcome.after is None and delays and matched.attempt <= len(delays):
            return Retry(after=timedelta(seconds=delays[matched.attempt - 1]), reason=outcome.reason)
        return outcome

    async def finish(self, seconds: float) -> None:
        """Let fire-and-forget calls end, or cancel them."""
        await _finished(self.loose, seconds)
        self.threads.close()


@dataclass(slots=True, eq=False)
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
    poll_seconds: float = POLL_SECONDS
    _chunks: deque[Chunk] = field(default_factory=deque)
    # By subscription: several handlers may share one.
    _runners: dict[int, list[Runner]] = field(default_factory=dict)
    _by_name: dict[str, Runner] = field(default_factory=dict)
    # Set while this process is the group's reader.
    _holds: bool = False
    _epoch: int | None = None
    _subscribed: bool = False
    _stopped: set[int] = field(default_factory=set)
    _pause: float = FIRST_PAUSE_SECONDS

    async def prepare(self) -> None:
        """Make the subscriptions, with the errors of a filter that is refused."""
        found: dict[int, list[Runner]] = {}
        for one in self.subscribers:
            runner = self._by_name.get(one.name)
            if runner is None or runner.one != one:
                runner = self._by_name[one.name] = Runner(one, self.log, self.reader)
            if not one.takes_all:
                call = calls.subscribe(one.group, one.condition, one.params, expires_after=one.expires_after)
                found.setdefault(await self.log.run(call), []).append(runner)
        self._runners = found
        self._subscribed = True
        for name in self._by_name.keys() - {one.name for one in self.subscribers}:
            self._by_name.pop(name).threads.close()

    def change(self, subscribers: Sequence[Subscriber]) -> None:
        """Have other subscribers from now on; what was read and not done is read again."""
        self.subscribers = subscribers
        self._subscribed = False

    async def run(self) -> None:
        """Read until stopped. Whatever fails is logged, and tried again after a pause."""
        keeping = asyncio.create_task(self._keep())
        try:
            while not self.stopping.is_set():
                error = await failure_of(self._read())
                if error is None:
                    continue
                if isinstance(error, SchemaMismatch):
                    # An upgrade has left this program behind: it must end, and leave its events to others.
                    raise error
                if isinstance(error, ReaderBusy):
                    # Another process reads. What this one has not noted as done, that one reads again.
                    self._pause = FIRST_PAUSE_SECONDS
                    seconds = 1.0
                else:
                    seconds = self._pause * random.uniform(0.5, 1.0)
                    self._pause = min(self._pause * 2, LONGEST_PAUSE_SECONDS)
                    logger.warning(
                        "reading for subscriptions failed",
                        extra={GROUP: self.group, ERROR: told(error), WAIT_SECONDS: seconds},
                        exc_info=None if is_expected(error) else error,
                    )
                self._holds = False
                await self._drop_chunks(self.grace_seconds)
                await self._wait(seconds=seconds)
        finally:
            keeping.cancel()
            await self._drop_chunks(CANCEL_SECONDS)
            for runner in self._by_name.values():
                await runner.finish(self.grace_seconds if self.stopping.is_set() else CANCEL_SECONDS)

    async def _read(self) -> None:
        """Read on one connection until it is time to stop, or the subscribers change."""
        if not self._subscribed:
            await self.prepare()
        async with self.log.own_connection() as connection:
            after: int | None = None
            # What is read and noted here is refused in another epoch: then all begins again at the stored position.
            self._epoch = await self.log.run(calls.current_epoch(), connection=connection)
            while not self.stopping.is_set() and self._subscribed:
                await self._note_done(connection)
                if len(self._chunks) >= self.read_ahead:
                    await self._wait(*self._chunks[0].running)
                    continue
                head = await self.log.run(calls.head(), connection=connection)
                try:
                    next_position, events = await self._read_next(connection, after)
                except psycopg.errors.QueryCanceled as error:
                    # The connection is good, and nothing was read: the same again, a little later.
                    logger.warning("reading was cancelled", extra={GROUP: self.group, ERROR: str(error)})
                    await self._wait(seconds=0.1)
                    continue
                self._holds = True
                self._pause = FIRST_PAUSE_SECONDS
                chunk = Chunk(next_position)
                for runner, mine in self._shares(events):
                    chunk.running.add(asyncio.create_task(runner.handle(chunk, mine)))
                idle = after == next_position and not events
                if chunk.running or not idle:
                    self._chunks.append(chunk)
                after = next_position
                if idle:
                    await self._wait_for_more(connection, head, settled=after >= head)
            await self._finish(connection)

    async def _read_next(self, connection: AsyncConnection[Any], after: int | None) -> tuple[int, list[MatchedEvent]]:
        reading = await self.log.read_next(
            self.group,
            reader=self.reader,
            after=after,
            batch_size=self.batch_size,
            lease_seconds=LEASE_SECONDS,
            timeout_seconds=MATCH_SECONDS,
            epoch=self._epoch,
            connection=connection,
        )
        return reading.next_position, list(reading.events)

    def _shares(self, events: Sequence[MatchedEvent]) -> list[tuple[Runner, list[MatchedEvent]]]:
        """What each handler gets of a chunk."""
        shares: dict[str, tuple[Runner, list[MatchedEvent]]] = {}
        for matched in events:
            for runner in self._by_name.values():
                if runner.one.takes_all and matched.retry_id not in runner.retrying:
                    mine = shares.setdefault(runner.one.name, (runner, []))[1]
                    # Once, however many of them match.
                    mine.append(matched._replace(subscription_ids=matched.subscription_ids[:1]))
            for subscription_id in matched.subscription_ids:
                for runner in self._runners.get(subscription_id, ()):
                    if matched.handler not in (None, runner.one.name) or matched.retry_id in runner.retrying:
                        continue
                    mine = shares.setdefault(runner.one.name, (runner, []))[1]
                    mine.append(matched._replace(subscription_ids=(subscription_id,)))
        return list(shares.values())

    async def _wait(self, *tasks: asyncio.Task[None], seconds: float = 1.0) -> None:
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({stop, *tasks}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()

    async def _wait_for_more(self, connection: AsyncConnection[Any], head: int, *, settled: bool) -> None:
        """Wait until the log has grown, a handler is done, or it is time to look for retries."""
        look_at = time.monotonic() + LOOK_SECONDS
        while not self.stopping.is_set() and self._subscribed:
            await self._wait(*(self._chunks[0].running if self._chunks else ()), seconds=self.poll_seconds)
            if not settled or time.monotonic() >= look_at:
                return
            if self._chunks and all(task.done() for task in self._chunks[0].running):
                return
            # Not "above": a crash may take the head back.
            if await self.log.run(calls.head(), connection=connection) != head:
                return

    async def _note_done(self, connection: AsyncConnection[Any], *, release: bool = False) -> None:
        """Move the group to the end of the chunks that all handlers are done with."""
        done_to: int | None = None
        while self._chunks and all(task.done() for task in self._chunks[0].running):
            for task in self._chunks[0].running:
                # An error in it is one of ours, not of a handler: all that is not noted is read again.
                task.result()
            done_to = self._chunks.popleft().next_position
        if done_to is not None:
            call = calls.set_reading(self.group, done_to, reader=self.reader, release=release, epoch=self._epoch)
            await self.log.run(call, connection=connection)
        elif release:
            await self.log.run(calls.release_reading(self.group, reader=self.reader), connection=connection)

    async def _keep(self) -> None:
        """Stay the reader while handlers take their time, keep the subscriptions from expiring, and make those that
        are missing again."""
        while True:
            await asyncio.sleep(self._keep_seconds())
            error = await failure_of(self._keep_once())
            if error is not None:
                logger.warning(
                    "reading not kept",
                    extra={GROUP: self.group, ERROR: told(error)},
                    exc_info=None if is_expected(error) else error,
                )

    async def _keep_once(self) -> None:
        if self._holds:
            hold = calls.hold_reading(self.group, reader=self.reader, lease_seconds=LEASE_SECONDS)
            await self.log.run(hold, patience_seconds=0)
        ids = list(self._runners)
        alive = await self.log.run(calls.keep_alive(ids), patience_seconds=0)
        if self._subscribed and ids == list(self._runners) and not alive.issuperset(ids):
            logger.warning(
                "subscription was removed",
                extra={GROUP: self.group, ERROR: f"subscriptions {sorted(set(ids) - alive)}"},
            )
            self._subscribed = False
        await self._look_for_stopped(ids)

    def _keep_seconds(self) -> float:
        """Often enough for the subscription that expires first."""
        lives = [one.expires_after.total_seconds() / 4 for one in self.subscribers if one.expires_after is not None]
        return max(0.1, min([KEEP_SECONDS, *lives]))

    async def _look_for_stopped(self, ids: Sequence[int]) -> None:
        """Say once, when it happens, that a filter took too long and its subscriptions stand still."""
        stopped = await self.log.run(calls.stopped_filters(ids), patience_seconds=0)
        for subscription_id, error in stopped.items():
            if subscription_id not in self._stopped:
                COUNTERS.add(STOPPED_FILTERS, self.group)
                logger.error(
                    "filter stopped", extra={GROUP: self.group, ERROR: f"subscription {subscription_id}: {error}"}
                )
        self._stopped = set(stopped)

    async def _drop_chunks(self, seconds: float) -> None:
        """Forget what was read. Calls that run may end; what they would get next they get again."""
        tasks = {task for chunk in self._chunks for task in chunk.running}
        for chunk in self._chunks:
            chunk.dropped = True
        self._chunks.clear()
        await _finished(tasks, seconds)

    async def _finish(self, connection: AsyncConnection[Any]) -> None:
        """The reader stops: handlers have their grace, what is done is noted, and another process may read."""
        tasks = {task for chunk in self._chunks for task in chunk.running}
        if tasks:
            await asyncio.wait(tasks, timeout=self.grace_seconds)
        self._holds = False
        await self._note_done(connection, release=True)
        await self._drop_chunks(CANCEL_SECONDS)


@dataclass(slots=True, eq=False)
class SubscriberProcess:
    """All readers of a process: one for each group that a subscriber names. Subscribers may be added while it runs."""

    log: aio.AsyncHeadwater
    subscribers: Sequence[Subscriber]
    reader: str
    stopping: asyncio.Event
    grace_seconds: float
    read_ahead: int = 10
    batch_size: int = 100
    poll_seconds: float = POLL_SECONDS
    _readers: dict[str, GroupReader] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def prepare(self) -> None:
        """Make the subscriptions, so that what is published from now on is theirs."""
        self._take_up()
        for reader in self._readers.values():
            await reader.prepare()

    async def run(self) -> None:
        """Run until stopped."""
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            while not self.stopping.is_set():
                try:
                    self._take_up()
                except InvalidRequest as error:
                    logger.warning("subscriber refused", extra={ERROR: error.message})
                for group, reader in self._readers.items():
                    if group not in self._tasks:
                        self._tasks[group] = asyncio.create_task(reader.run())
                for task in self._tasks.values():
                    if task.done() and not self.stopping.is_set():
                        task.result()
                await asyncio.wait({stop, *self._tasks.values()}, timeout=TAKE_UP_SECONDS)
        finally:
            stop.cancel()
            for task in self._tasks.values():
                if not self.stopping.is_set():
                    task.cancel()
            if self._tasks:
                await asyncio.wait(set(self._tasks.values()))
        for task in self._tasks.values():
            task.result()

    def _take_up(self) -> None:
        by_group: dict[str, list[Subscriber]] = {}
        for one in self.subscribers:
            by_group.setdefault(one.group, []).append(one)
        for group, wanted in by_group.items():
            if len({one.name for one in wanted}) < len(wanted):
                raise InvalidRequest(
                    f'two subscribers of group "{group}" have one name', hint="Give one of them name=..."
                )
            reader = self._readers.get(group)
            if reader is None:
                self._readers[group] = GroupReader(
                    log=self.log,
                    group=group,
                    subscribers=wanted,
                    reader=self.reader,
                    stopping=self.stopping,
                    grace_seconds=self.grace_seconds,
                    read_ahead=self.read_ahead,
                    batch_size=self.batch_size,
                    poll_seconds=self.poll_seconds,
                )
            elif list(reader.subscribers) != wanted:
                reader.change(wanted)


async def _finished(tasks: set[asyncio.Task[None]], seconds: float) -> None:
    """Wait for tasks, then cancel them. None of them is waited for beyond a bound, and none of their errors counts."""
    tasks = set(tasks)
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late, timeout=CANCEL_SECONDS)
    for task in tasks:
        if task.done() and not task.cancelled():
            # Looked at, so that asyncio does not complain.
            task.exception()


def _is_by_position(result: object) -> bool:
    return isinstance(result, Mapping) and all(
        outcome is None or isinstance(outcome, _OUTCOMES) for outcome in result.values()
    )
