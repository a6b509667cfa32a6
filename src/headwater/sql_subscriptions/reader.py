"""Subscribers: handlers of SQL subscriptions, and the one reader that their queue has at a time.

A `QueueReader` reads chunks of events on its own connection and passes each subscriber its share. A chunk is done when
all handlers are done with it; then the queue's position is moved behind it, in the order of the chunks. A handler that
fails on an event gets a retry of its own later, while the queue continues. A slow handler does not delay the others
until it is `read_ahead` chunks behind.

What must stay true:
- The position is only moved on the connection that read the chunk. After a lost connection, the reader starts again at
  the position in the database, so that no event is missed or delivered out of order. Events that were read but not
  saved as done are handled again.
- No error ends a reader: it logs the error, waits, and starts again. Errors of handlers are failed attempts. The
  exception is SchemaMismatch: a program that is older than the schema ends.
- Each call of a handler ends: after its timeout it is a failed attempt, whatever the handler does.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
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

from headwater import aio
from headwater.calls import log as log_calls
from headwater.calls import subscriptions as subscription_calls
from headwater.database.log_watcher import AsyncLogWaiter
from headwater.errors import HeadwaterError, InvalidRequest, ReaderBusy, SchemaMismatch
from headwater.log.model import Event
from headwater.observability import tracing
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import ERROR, HANDLED, POSITION, QUEUE, STOPPED_FILTERS, WAIT_SECONDS, logger
from headwater.queue.model import Dead, Outcome, Retry, Snooze
from headwater.sql_subscriptions.model import MatchedEvent
from headwater.supervisor import failure_of

LEASE_SECONDS: Final = 30.0
KEEP_SECONDS: Final = 5.0
# The database stops filters that take longer.
MATCH_SECONDS: Final = 5.0
DEFAULT_TIMEOUT_SECONDS: Final = 300.0
MAX_TIMEOUT_SECONDS: Final = 86_400.0
MAX_CONCURRENCY: Final = 1000
# How long a cancelled handler has to end.
CANCEL_SECONDS: Final = 5.0
# Threads of one handler that hang in a call that timed out. Above this number, its calls fail without a thread.
MAX_HUNG_THREADS: Final = 16
# Exponential backoff after an error.
FIRST_PAUSE_SECONDS: Final = 0.05
MAX_PAUSE_SECONDS: Final = 5.0
# How long an idle reader waits at most before it reads again.
LOOK_SECONDS: Final = 5.0
# How often a process looks for added subscribers.
TAKE_UP_SECONDS: Final = 0.5
# How long saving an outcome may wait for the database before its chunk is dropped and read again.
PATIENCE_SECONDS: Final = 30.0

_OUTCOMES = (Retry, Dead, Snooze)


@dataclass(frozen=True, slots=True)
class Subscriber:
    """A handler, its filter, and how it is run."""

    name: str
    handler: Callable[..., Any]
    queue: str
    filter: str
    params: Mapping[str, Any]
    expires_after: timedelta | None = None
    # The handler gets lists of up to `batch_size` events.
    batch: bool = False
    batch_size: int = 100
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    # The delay before each retry, in seconds. None: the queue's settings apply.
    retry_delays: tuple[float, ...] | None = None
    # Concurrent calls. With more than one, order is kept only among events that `split_by` puts into one part.
    concurrency: int = 1
    split_by: Callable[[Event], Hashable] | None = None
    fire_and_forget: bool = False
    # Handle the matches of every subscription of the queue, and create none.
    takes_all: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= 1000:
            raise InvalidRequest(f"invalid batch_size {self.batch_size}: expected 1 to 1000")
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise InvalidRequest(f"invalid concurrency {self.concurrency}: expected 1 to {MAX_CONCURRENCY}")
        if not 0 < self.timeout_seconds <= MAX_TIMEOUT_SECONDS:
            raise InvalidRequest(
                f"invalid timeout_seconds {self.timeout_seconds:g}: "
                f"expected more than 0 and at most {MAX_TIMEOUT_SECONDS:g}"
            )
        if self.retry_delays is not None and self.fire_and_forget:
            raise InvalidRequest("retry_delays cannot be combined with fire_and_forget")
        if self.retry_delays is not None and not all(0 <= delay <= 30 * 86_400 for delay in self.retry_delays):
            raise InvalidRequest("invalid retry_delays: each must be 0 to 30 days, in seconds")

    @property
    def max_attempts(self) -> int | None:
        return None if self.retry_delays is None else len(self.retry_delays) + 1

    def parts(self, matched: Sequence[MatchedEvent]) -> list[list[MatchedEvent]]:
        """Split events into parts that can run concurrently."""
        if self.split_by is not None:
            parts: dict[Hashable, list[MatchedEvent]] = {}
            for one in matched:
                parts.setdefault(self.split_by(one.event), []).append(one)
            return list(parts.values())
        if self.concurrency == 1:
            return [list(matched)]
        return self.batches(matched)

    def batches(self, part: Sequence[MatchedEvent]) -> list[list[MatchedEvent]]:
        """The batches of a part; each is one call of the handler."""
        size = self.batch_size if self.batch else 1
        return [list(part[start : start + size]) for start in range(0, len(part), size)]


class ErrorCapture:
    """Catches and keeps the error of its block, for user code whose errors must not propagate."""

    def __init__(self, kind: type[BaseException] = Exception) -> None:
        self._kind = kind
        self.error: BaseException | None = None

    def __enter__(self) -> ErrorCapture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error
        return isinstance(error, self._kind)


def error_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def is_expected(error: BaseException) -> bool:
    """Whether an error comes from the database or the network. Any other error is a bug, and its traceback is
    logged."""
    return isinstance(error, HeadwaterError | psycopg.Error | OSError)


class HandlerThreads:
    """Threads for handlers that are not async. A call that hangs keeps its thread, up to MAX_HUNG_THREADS; the threads
    are daemons, so that a hanging one does not keep the process from exiting."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[SimpleQueue[Callable[[], None] | None]] = []
        self._hung = 0

    async def call(self, function: Callable[..., Any], *given: Any) -> Any:
        if self._hung >= MAX_HUNG_THREADS:
            raise TimeoutError(f"{self._hung} earlier calls of this handler are still running after their timeout")
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
            with ErrorCapture(BaseException) as caught:
                result = context.run(function, *given)
            error = caught.error
            if isinstance(error, StopIteration):
                # A future does not accept StopIteration.
                error = RuntimeError(f"the handler raised StopIteration: {error}")
            # The loop may already be closed.
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
class EventChunk:
    """Events that were read together, and the running handlers. A dropped chunk is read again."""

    next_position: int
    running: set[asyncio.Task[None]] = field(default_factory=set)
    dropped: bool = False


@dataclass(slots=True, eq=False)
class HandlerRunner:
    """Runs one subscriber's handler on its share of each chunk, one chunk after the other."""

    one: Subscriber
    log: aio.AsyncHeadwater
    reader: str
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    free: asyncio.Semaphore = field(init=False)
    threads: HandlerThreads = field(init=False)
    # Running calls of a fire-and-forget handler; no chunk waits for them.
    loose: set[asyncio.Task[None]] = field(default_factory=set)
    # Retries being handled: their lease in the database may expire before the handler ends.
    retrying: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.free = asyncio.Semaphore(self.one.concurrency)
        self.threads = HandlerThreads(self.one.name)

    async def handle(self, chunk: EventChunk, matched: Sequence[MatchedEvent]) -> None:
        retries = {one.retry_id for one in matched if one.retry_id is not None}
        self.retrying |= retries
        try:
            async with self.turn:
                if chunk.dropped:
                    return
                parts: list[list[MatchedEvent]] = []
                with ErrorCapture() as caught:
                    parts = self.one.parts(matched)
                if caught.error is not None:
                    # split_by is user code: its error is a failed attempt of all events.
                    failed = Retry(reason=f"split_by: {error_text(caught.error)}")
                    await self._settle(matched, [failed] * len(matched))
                    return
                if self.one.fire_and_forget:
                    for part in parts:
                        await self._fire(part)
                    return
                async with asyncio.TaskGroup() as tasks:
                    for part in parts:
                        tasks.create_task(self._handle_part(chunk, part))
        except ExceptionGroup as several:
            # Errors of Headwater, not of handlers: report the first one.
            raise several.exceptions[0] from None
        finally:
            self.retrying -= retries

    async def _handle_part(self, chunk: EventChunk, part: Sequence[MatchedEvent]) -> None:
        async with self.free:
            for batch in self.one.batches(part):
                if chunk.dropped:
                    return
                await self._settle(batch, await self._outcomes(batch))

    async def _fire(self, part: Sequence[MatchedEvent]) -> None:
        """Start calls without waiting for their end; at most `concurrency` run at a time."""
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
        """Call the handler on a batch; returns the outcome of each event."""
        events = [one.event for one in batch]
        result = await self._call(events)
        if isinstance(result, Mapping):
            outcomes = [result.get(event.position) for event in events]
        else:
            outcomes = [result] * len(events)
        for event, outcome in zip(events, outcomes, strict=True):
            kind = type(outcome).__name__.lower() if outcome is not None else "done"
            COUNTERS.add(HANDLED, self.one.queue, kind)
            if isinstance(outcome, Retry):
                logger.warning(
                    "subscriber failed",
                    extra={QUEUE: self.one.queue, POSITION: event.position, ERROR: outcome.reason},
                )
        return outcomes

    async def _call(self, events: list[Event]) -> Outcome | Mapping[int, Outcome]:
        """Call the handler once, within its timeout. An exception is a failed attempt."""
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
            return Retry(reason=error_text(error))
        result = task.result()
        if result is None or isinstance(result, _OUTCOMES) or (one.batch and _is_by_position(result)):
            return result  # type: ignore[no-any-return]
        expected = "None, Retry, Dead or Snooze" + (", or a mapping of positions to these" if one.batch else "")
        return Retry(reason=f"TypeError: handler {one.name} returned {result!r:.200}; expected {expected}")

    async def _invoke(self, events: list[Event]) -> Any:
        one = self.one
        given = events if one.batch else events[0]
        with tracing.consuming(one.queue, events):
            if inspect.iscoroutinefunction(one.handler):
                return await one.handler(given)
            return await self.threads.call(one.handler, given)

    async def _settle(self, batch: Sequence[MatchedEvent], outcomes: Sequence[Outcome]) -> None:
        """Save the outcomes of a batch. An event that is done at the first attempt needs none."""
        ended = [
            (matched, self._delayed(matched, outcome))
            for matched, outcome in zip(batch, outcomes, strict=True)
            if outcome is not None or matched.retry_id is not None
        ]
        if not ended:
            return
        call = subscription_calls.settle_matched(
            self.one.queue, ended, handler=self.one.name, max_attempts=self.one.max_attempts, worker=self.reader
        )
        # Before the outcomes commit: after that, a retry may be read again, and if it still counted as being handled it
        # would be skipped until its next lease expires.
        self.retrying.difference_update(matched.retry_id for matched in batch if matched.retry_id is not None)
        await self.log.run(call)

    def _delayed(self, matched: MatchedEvent, outcome: Outcome) -> Outcome:
        """Set the delay of a retry without one from the handler's `retry_delays`."""
        delays = self.one.retry_delays
        if isinstance(outcome, Retry) and outcome.after is None and delays and matched.attempt <= len(delays):
            return Retry(after=timedelta(seconds=delays[matched.attempt - 1]), reason=outcome.reason)
        return outcome

    async def finish(self, seconds: float) -> None:
        """Wait for fire-and-forget calls, then cancel them."""
        await _finished(self.loose, seconds)
        self.threads.close()


@dataclass(slots=True, eq=False)
class QueueReader:
    """Reads for the subscribers of one queue while no other process does."""

    log: aio.AsyncHeadwater
    queue: str
    subscribers: Sequence[Subscriber]
    reader: str
    stopping: asyncio.Event
    grace_seconds: float
    read_ahead: int
    batch_size: int
    _chunks: deque[EventChunk] = field(default_factory=deque)
    # By subscription id: several handlers may share a subscription.
    _runners: dict[int, list[HandlerRunner]] = field(default_factory=dict)
    _by_name: dict[str, HandlerRunner] = field(default_factory=dict)
    # True while this process is the queue's reader.
    _holds: bool = False
    _epoch: int | None = None
    _subscribed: bool = False
    _stopped: set[int] = field(default_factory=set)
    _pause: float = FIRST_PAUSE_SECONDS
    _waiter: AsyncLogWaiter = field(init=False)

    def __post_init__(self) -> None:
        self._waiter = self.log.watcher.waiter(queue=self.queue)

    async def prepare(self) -> None:
        """Create the subscriptions. Raises the error of an invalid filter."""
        found: dict[int, list[HandlerRunner]] = {}
        for one in self.subscribers:
            runner = self._by_name.get(one.name)
            if runner is None or runner.one != one:
                runner = self._by_name[one.name] = HandlerRunner(
                    one, self.log.with_patience(PATIENCE_SECONDS), self.reader
                )
            if not one.takes_all:
                call = subscription_calls.subscribe(one.queue, one.filter, one.params, expires_after=one.expires_after)
                found.setdefault(await self.log.run(call), []).append(runner)
        self._runners = found
        self._subscribed = True
        for name in self._by_name.keys() - {one.name for one in self.subscribers}:
            self._by_name.pop(name).threads.close()

    def change(self, subscribers: Sequence[Subscriber]) -> None:
        """Replace the subscribers; events that were read but are not done are read again."""
        self.subscribers = subscribers
        self._subscribe_again()

    def _subscribe_again(self) -> None:
        self._subscribed = False
        self._waiter.wake()

    async def run(self) -> None:
        """Read until stopped. Errors are logged, and reading is retried after a pause."""
        keeping = asyncio.create_task(self._keep())
        try:
            while not self.stopping.is_set():
                error = await failure_of(self._read())
                if error is None:
                    continue
                if isinstance(error, SchemaMismatch):
                    # The schema is newer than this program, which must end and leave its events to other processes.
                    raise error
                if isinstance(error, ReaderBusy):
                    # Another process is the reader. It reads again what this one has not saved as done.
                    self._pause = FIRST_PAUSE_SECONDS
                    seconds = 1.0
                else:
                    seconds = self._pause * random.uniform(0.5, 1.0)
                    self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS)
                    logger.warning(
                        "reading for subscriptions failed",
                        extra={QUEUE: self.queue, ERROR: error_text(error), WAIT_SECONDS: seconds},
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
        """Read on one connection until stopped, or until the subscribers change."""
        if not self._subscribed:
            await self.prepare()
        async with self.log.own_connection() as connection:
            after: int | None = None
            # The database rejects reads and commits of another epoch; reading then starts again at the stored position.
            self._epoch = await self.log.run(log_calls.current_epoch(), connection=connection)
            while not self.stopping.is_set() and self._subscribed:
                await self._note_done(connection)
                if len(self._chunks) >= self.read_ahead:
                    await self._wait(*self._chunks[0].running)
                    continue
                try:
                    next_position, events = await self._read_next(connection, after)
                except psycopg.errors.QueryCanceled as error:
                    # The connection still works, and nothing was read: retry after a short pause.
                    logger.warning("reading was cancelled", extra={QUEUE: self.queue, ERROR: str(error)})
                    await self._wait(seconds=0.1)
                    continue
                self._holds = True
                self._pause = FIRST_PAUSE_SECONDS
                chunk = EventChunk(next_position)
                for runner, mine in self._shares(events):
                    chunk.running.add(asyncio.create_task(runner.handle(chunk, mine)))
                idle = after == next_position and not events
                if chunk.running or not idle:
                    self._chunks.append(chunk)
                after = next_position
                if idle:
                    await self._wait_for_more()
            await self._finish(connection)

    async def _read_next(self, connection: AsyncConnection[Any], after: int | None) -> tuple[int, list[MatchedEvent]]:
        reading = await self.log.read_next(
            self.queue,
            reader=self.reader,
            after=after,
            batch_size=self.batch_size,
            lease_seconds=LEASE_SECONDS,
            timeout_seconds=MATCH_SECONDS,
            epoch=self._epoch,
            connection=connection,
        )
        return reading.next_position, list(reading.events)

    def _shares(self, events: Sequence[MatchedEvent]) -> list[tuple[HandlerRunner, list[MatchedEvent]]]:
        """The share of a chunk for each handler."""
        shares: dict[str, tuple[HandlerRunner, list[MatchedEvent]]] = {}
        for matched in events:
            for runner in self._by_name.values():
                if runner.one.takes_all and matched.retry_id not in runner.retrying:
                    mine = shares.setdefault(runner.one.name, (runner, []))[1]
                    # Once, however many subscriptions match.
                    mine.append(matched._replace(subscription_ids=matched.subscription_ids[:1]))
            for subscription_id in matched.subscription_ids:
                for runner in self._runners.get(subscription_id, ()):
                    if matched.handler not in (None, runner.one.name) or matched.retry_id in runner.retrying:
                        continue
                    mine = shares.setdefault(runner.one.name, (runner, []))[1]
                    mine.append(matched._replace(subscription_ids=(subscription_id,)))
        return list(shares.values())

    async def _wait(self, *tasks: asyncio.Future[Any], seconds: float = 1.0) -> None:
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({stop, *tasks}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()

    async def _wait_for_more(self) -> None:
        """Wait until the log has grown, the queue has changed or a retry is due, or the first chunk is done."""
        growth = asyncio.ensure_future(self._waiter.wait(LOOK_SECONDS))
        try:
            while not self.stopping.is_set() and self._subscribed and not growth.done():
                running = {task for task in self._chunks[0].running if not task.done()} if self._chunks else set()
                if self._chunks and not running:
                    return
                await self._wait(growth, *running, seconds=LOOK_SECONDS)
        finally:
            growth.cancel()

    async def _note_done(self, connection: AsyncConnection[Any], *, release: bool = False) -> None:
        """Save the end of the chunks that all handlers are done with as the queue's position."""
        done_to: int | None = None
        while self._chunks and all(task.done() for task in self._chunks[0].running):
            for task in self._chunks[0].running:
                # An error here is one of Headwater, not of a handler: everything not saved is read again.
                task.result()
            done_to = self._chunks.popleft().next_position
        if done_to is not None:
            call = subscription_calls.commit_reading(
                self.queue, done_to, reader=self.reader, release=release, epoch=self._epoch
            )
            await self.log.run(call, connection=connection)
        elif release:
            await self.log.run(
                subscription_calls.release_reading(self.queue, reader=self.reader), connection=connection
            )

    async def _keep(self) -> None:
        """Extend the reader's lease while handlers run, keep the subscriptions from expiring, and create missing ones
        again."""
        while True:
            await asyncio.sleep(self._keep_seconds())
            error = await failure_of(self._keep_once())
            if error is not None:
                logger.warning(
                    "reader lease not extended",
                    extra={QUEUE: self.queue, ERROR: error_text(error)},
                    exc_info=None if is_expected(error) else error,
                )

    async def _keep_once(self) -> None:
        once = self.log.with_patience(0)
        if self._holds:
            hold = subscription_calls.hold_reading(self.queue, reader=self.reader, lease_seconds=LEASE_SECONDS)
            await once.run(hold)
        ids = list(self._runners)
        alive = await once.run(subscription_calls.keep_alive(ids))
        if self._subscribed and ids == list(self._runners) and not alive.issuperset(ids):
            logger.warning(
                "subscription was removed",
                extra={QUEUE: self.queue, ERROR: f"subscriptions {sorted(set(ids) - alive)}"},
            )
            self._subscribe_again()
        await self._look_for_stopped(ids)

    def _keep_seconds(self) -> float:
        """The interval, short enough for the subscription that expires first."""
        lives = [one.expires_after.total_seconds() / 4 for one in self.subscribers if one.expires_after is not None]
        return max(0.1, min([KEEP_SECONDS, *lives]))

    async def _look_for_stopped(self, ids: Sequence[int]) -> None:
        """Log, once for each, the filters that were stopped because they took too long."""
        stopped = await self.log.with_patience(0).run(subscription_calls.stopped_filters(ids))
        for subscription_id, error in stopped.items():
            if subscription_id not in self._stopped:
                COUNTERS.add(STOPPED_FILTERS, self.queue)
                logger.error(
                    "filter stopped", extra={QUEUE: self.queue, ERROR: f"subscription {subscription_id}: {error}"}
                )
        self._stopped = set(stopped)

    async def _drop_chunks(self, seconds: float) -> None:
        """Drop all chunks. Running calls may end; their further events are read again."""
        tasks = {task for chunk in self._chunks for task in chunk.running}
        for chunk in self._chunks:
            chunk.dropped = True
        self._chunks.clear()
        await _finished(tasks, seconds)

    async def _finish(self, connection: AsyncConnection[Any]) -> None:
        """Stop: wait `grace_seconds` for handlers, save what is done, and let another process read."""
        tasks = {task for chunk in self._chunks for task in chunk.running}
        if tasks:
            await asyncio.wait(tasks, timeout=self.grace_seconds)
        self._holds = False
        await self._note_done(connection, release=True)
        await self._drop_chunks(CANCEL_SECONDS)


@dataclass(slots=True, eq=False)
class SubscriberProcess:
    """All readers of a process, one for each queue with subscribers. Subscribers may be added while it runs."""

    log: aio.AsyncHeadwater
    subscribers: Sequence[Subscriber]
    reader: str
    stopping: asyncio.Event
    grace_seconds: float
    read_ahead: int = 10
    batch_size: int = 100
    _readers: dict[str, QueueReader] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def prepare(self) -> None:
        """Create the subscriptions, so that they match what is published from now on."""
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
                    logger.warning("invalid subscriber", extra={ERROR: error.message})
                for queue, reader in self._readers.items():
                    if queue not in self._tasks:
                        self._tasks[queue] = asyncio.create_task(reader.run())
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
        by_queue: dict[str, list[Subscriber]] = {}
        for one in self.subscribers:
            by_queue.setdefault(one.queue, []).append(one)
        for queue, wanted in by_queue.items():
            if len({one.name for one in wanted}) < len(wanted):
                raise InvalidRequest(
                    f'two subscribers of queue "{queue}" have the same name',
                    hint="Give one of them another name with name=...",
                )
            reader = self._readers.get(queue)
            if reader is None:
                self._readers[queue] = QueueReader(
                    log=self.log,
                    queue=queue,
                    subscribers=wanted,
                    reader=self.reader,
                    stopping=self.stopping,
                    grace_seconds=self.grace_seconds,
                    read_ahead=self.read_ahead,
                    batch_size=self.batch_size,
                )
            elif list(reader.subscribers) != wanted:
                reader.change(wanted)


async def _finished(tasks: set[asyncio.Task[None]], seconds: float) -> None:
    """Wait for tasks up to `seconds`, then cancel them. Their errors are ignored."""
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
            # Retrieve the exception, or asyncio logs that it was never retrieved.
            task.exception()


def _is_by_position(result: object) -> bool:
    return isinstance(result, Mapping) and all(
        outcome is None or isinstance(outcome, _OUTCOMES) for outcome in result.values()
    )
