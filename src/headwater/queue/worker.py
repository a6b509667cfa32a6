"""Workers: an App declares handlers and runs them on the events of queues until it is stopped.

    app = headwater.App()

    @app.worker("orders", queue="mailer", concurrency=10)
    async def send(event): ...

Run it with `headwater work module:app`, or `await app.run(dsn)`.

`WorkerProcess` runs the handlers. For each handler, one or more loops (`log/steps.py:work`) claim a lease, handle its
events and settle it; the lease is extended while handlers run. A lost lease discards the outcomes, since another worker
may have the events. An isolated event, which may have crashed a worker, runs while no other handler does. No error of a
handler or of the database ends the process; a schema that is newer than the program does.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import socket
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Hashable,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

import psycopg

from headwater import aio, client
from headwater.calls import Call
from headwater.calls import queues as queue_calls
from headwater.database.log_watcher import AsyncLogWaiter
from headwater.errors import HeadwaterError, InvalidRequest, LeaseLost, SchemaMismatch
from headwater.log.model import Event, NewEvent
from headwater.log.payload_hooks import Dumps, Loads
from headwater.log.steps import HandleResult, HandleStep, WaitForGrowthStep, Wake, WorkStep, work
from headwater.observability import tracing
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import ERROR, HANDLED, LEASES_LOST, POSITION, QUEUE, WAIT_SECONDS, logger
from headwater.queue.model import ClaimedEvent, Dead, Lease, Outcome, Retry, Snooze
from headwater.queue.settings import NewQueueSettings, QueueSettings
from headwater.setting_definitions import checked, definitions
from headwater.sql_subscriptions.reader import (
    DEFAULT_TIMEOUT_SECONDS,
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    Subscriber,
    SubscriberProcess,
    error_text,
    is_expected,
)
from headwater.supervisor import failure_of

if TYPE_CHECKING:
    from headwater.queue.drain import Drained

Work = ClaimedEvent | Sequence[ClaimedEvent]
"""What a handler is called with: one event, or a batch of them."""

Result = Outcome | Mapping[int, Outcome]
"""What a handler returns: None means done; a batch handler may return outcomes by position."""

Next = Callable[[Work], Awaitable[Result]]
Middleware = Callable[[Work, Next], Awaitable[Result]]

# The kinds of handlers, so that type checkers report one with the wrong parameters or result. Each is async or not.
F = TypeVar("F", bound=Callable[..., Any])
H = TypeVar("H", bound=Callable[[ClaimedEvent], Awaitable[Outcome]] | Callable[[ClaimedEvent], Outcome])
BatchH = TypeVar(
    "BatchH",
    bound=Callable[[list[ClaimedEvent]], Awaitable[Result]] | Callable[[list[ClaimedEvent]], Result],
)
TransactionalH = TypeVar(
    "TransactionalH",
    bound=Callable[[ClaimedEvent, psycopg.AsyncConnection[Any]], Awaitable[Outcome]]
    | Callable[[ClaimedEvent, psycopg.Connection[Any]], Outcome],
)
TransactionalBatchH = TypeVar(
    "TransactionalBatchH",
    bound=Callable[[list[ClaimedEvent], psycopg.AsyncConnection[Any]], Awaitable[Result]]
    | Callable[[list[ClaimedEvent], psycopg.Connection[Any]], Result],
)
SubscriberH = TypeVar("SubscriberH", bound=Callable[[Event], Awaitable[Outcome]] | Callable[[Event], Outcome])
SubscriberBatchH = TypeVar(
    "SubscriberBatchH", bound=Callable[[list[Event]], Awaitable[Result]] | Callable[[list[Event]], Result]
)


class WorkerOptions(NewQueueSettings, total=False):
    """Options of App.worker that do not change what its handler is called with. The settings are those of its queue."""

    concurrency: int
    prefetch: int | None
    timeout_seconds: float | None


class SubscriberOptions(TypedDict, total=False):
    """Options of App.subscriber that do not change what its handler is called with."""

    name: str | None
    expires_after: timedelta | None
    batch_size: int
    timeout_seconds: float
    retry_delays: Sequence[float] | None
    concurrency: int
    split_by: Callable[[Event], Hashable] | None
    fire_and_forget: bool


_OUTCOMES = (Retry, Dead, Snooze)


@dataclass(frozen=True, slots=True)
class Worker:
    """A handler and how it is run."""

    handler: Callable[..., Any]
    queue: str
    topics: tuple[str, ...]
    concurrency: int
    prefetch: int
    batch: bool
    transactional: bool
    timeout_seconds: float | None
    ordered_keys: bool
    # The other settings that were given.
    queue_settings: Mapping[str, Any]
    # Routing keys that the queue is bound to; None: the whole topics.
    pattern: str | None = None
    # Leases held at a time; None: one is handled while the next is fetched.
    leases: int | None = None

    @property
    def name(self) -> str:
        return getattr(self.handler, "__name__", type(self.handler).__name__)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.handler)


class _ConnectOptions(TypedDict):
    pool_size: int
    application_name: str
    dumps: Dumps | None
    loads: Loads | None


class App:
    """The handlers, middleware and cron schedules of a worker process.

    `dumps` and `loads` encode and decode payloads, as in `headwater.connect`.
    """

    def __init__(self, *, dumps: Dumps | None = None, loads: Loads | None = None) -> None:
        self._dumps = dumps
        self._loads = loads
        self.workers: list[Worker] = []
        self.subscribers: list[Subscriber] = []
        self._middleware: list[Middleware] = []
        self._cron_schedules: list[dict[str, Any]] = []

    @overload
    def worker(
        self,
        *topics: str,
        queue: str,
        batch: Literal[False] = False,
        transactional: Literal[False] = False,
        pattern: str | None = None,
        **options: Unpack[WorkerOptions],
    ) -> Callable[[H], H]: ...

    @overload
    def worker(
        self,
        *topics: str,
        queue: str,
        batch: Literal[True],
        transactional: Literal[False] = False,
        pattern: str | None = None,
        **options: Unpack[WorkerOptions],
    ) -> Callable[[BatchH], BatchH]: ...

    @overload
    def worker(
        self,
        *topics: str,
        queue: str,
        batch: Literal[False] = False,
        transactional: Literal[True],
        pattern: str | None = None,
        **options: Unpack[WorkerOptions],
    ) -> Callable[[TransactionalH], TransactionalH]: ...

    @overload
    def worker(
        self,
        *topics: str,
        queue: str,
        batch: Literal[True],
        transactional: Literal[True],
        pattern: str | None = None,
        **options: Unpack[WorkerOptions],
    ) -> Callable[[TransactionalBatchH], TransactionalBatchH]: ...

    # The values of batch and transactional are not known to the type checker.
    @overload
    def worker(
        self,
        *topics: str,
        queue: str,
        batch: bool = False,
        transactional: bool = False,
        pattern: str | None = None,
        **options: Unpack[WorkerOptions],
    ) -> Callable[[F], F]: ...

    def worker(
        self,
        *topics: str,
        queue: str,
        concurrency: int = 1,
        prefetch: int | None = None,
        batch: bool = False,
        transactional: bool = False,
        timeout_seconds: float | None = None,
        pattern: str | None = None,
        **settings: Unpack[NewQueueSettings],
    ) -> Callable[[F], F]:
        """Run a function, async or not, on every event of a queue.

        The queue is created, bound to these topics, if it does not exist; settings given here are set on it. With
        `pattern`, it is bound to the events of these topics whose routing key matches (see bind). The handler gets the
        event and returns None when it is done, or Retry(after), Dead(reason) or Snooze(after); an exception is a failed
        attempt. Events are delivered at least once. Up to `concurrency` handlers run at a time, on events claimed
        `prefetch` at a time. `batch`: the handler gets a list of up to `prefetch` events, and may return outcomes by
        position. `transactional`: the handler also gets a connection, whose transaction acknowledges the event: the
        handler's writes and the acknowledgement commit together, so each event takes effect exactly once.
        """
        if concurrency < 1 or (prefetch is not None and prefetch < 1):
            raise InvalidRequest("concurrency and prefetch must be at least 1")
        if batch and transactional and concurrency != 1:
            raise InvalidRequest("a transactional batch handler needs concurrency=1")
        if pattern is not None and not topics:
            raise InvalidRequest("a worker with a pattern needs the topics that it applies to")
        queue_settings = checked(definitions(QueueSettings), settings)
        ordered_keys = queue_settings.pop("ordered_keys", False)

        def register(handler: F) -> F:
            self.workers.append(
                Worker(
                    handler=handler,
                    queue=queue,
                    topics=topics,
                    concurrency=concurrency,
                    prefetch=prefetch or (100 if batch else max(concurrency, 10)),
                    batch=batch,
                    transactional=transactional,
                    timeout_seconds=timeout_seconds,
                    ordered_keys=ordered_keys,
                    queue_settings=queue_settings,
                    pattern=pattern,
                )
            )
            return handler

        return register

    @overload
    def subscriber(
        self,
        queue: str,
        filter: str,
        params: Mapping[str, Any] | None = None,
        *,
        batch: Literal[False] = False,
        **options: Unpack[SubscriberOptions],
    ) -> Callable[[SubscriberH], SubscriberH]: ...

    @overload
    def subscriber(
        self,
        queue: str,
        filter: str,
        params: Mapping[str, Any] | None = None,
        *,
        batch: Literal[True],
        **options: Unpack[SubscriberOptions],
    ) -> Callable[[SubscriberBatchH], SubscriberBatchH]: ...

    # The value of batch is not known to the type checker.
    @overload
    def subscriber(
        self,
        queue: str,
        filter: str,
        params: Mapping[str, Any] | None = None,
        *,
        batch: bool = False,
        **options: Unpack[SubscriberOptions],
    ) -> Callable[[F], F]: ...

    def subscriber(
        self,
        queue: str,
        filter: str,
        params: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
        expires_after: timedelta | None = None,
        batch: bool = False,
        batch_size: int = 100,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        retry_delays: Sequence[float] | None = None,
        concurrency: int = 1,
        split_by: Callable[[Event], Hashable] | None = None,
        fire_and_forget: bool = False,
    ) -> Callable[[F], F]:
        """Run a function, async or not, on every event that matches a SQL filter over `e` and `s`.

        One process at a time reads for the queue; the others stand by. After an exception or Retry(after), only this
        handler gets the event again. It has the queue's max_attempts or, with `retry_delays`, one retry after each
        delay in seconds; then the event becomes a dead letter. A call that takes longer than `timeout_seconds` is a
        failed attempt.

        `batch`: the handler gets a list of up to `batch_size` events, and may return outcomes by position. `split_by`:
        events for which this function returns equal values form a part; each call gets events of one part, and parts
        fail independently. `concurrency`: calls at a time; with more than one, order is kept only within a part.
        `fire_and_forget`: calls are not awaited, and failures are logged and not retried.

        A subscriber that is declared while the app runs starts within a second.
        """

        def register(handler: F) -> F:
            self.subscribers.append(
                Subscriber(
                    name=name or str(getattr(handler, "__name__", type(handler).__name__)),
                    handler=handler,
                    queue=queue,
                    filter=filter,
                    params=params or {},
                    expires_after=expires_after,
                    batch=batch,
                    batch_size=batch_size,
                    timeout_seconds=timeout_seconds,
                    retry_delays=None if retry_delays is None else tuple(retry_delays),
                    concurrency=concurrency,
                    split_by=split_by,
                    fire_and_forget=fire_and_forget,
                )
            )
            return handler

        return register

    def middleware(self, around: Middleware) -> Middleware:
        """Run this around every handler: `async def around(event, call_next): return await call_next(event)`.

        The first one declared is the outermost.
        """
        self._middleware.append(around)
        return around

    def cron_schedule(self, name: str, cron: str, topic: str, event: NewEvent, *, time_zone: str = "UTC") -> None:
        """Publish this event at the times of a cron expression, exactly once each, by any running process."""
        self._cron_schedules.append(
            {
                "name": name,
                "cron": cron,
                "topic": topic,
                "payload": event.payload,
                "time_zone": time_zone,
                "key": event.key,
                "type": event.type,
                "routing_key": event.routing_key,
                "headers": event.headers,
                "content_type": event.content_type,
            }
        )

    async def drain(self, dsn: str, *, timeout_seconds: float = 60.0) -> Drained:
        """Run the workers and subscribers until no event is ready or in work, for tests. Events that wait for a retry
        are left. In code without an event loop: headwater.testing.drain(app, dsn)."""
        from headwater.queue.drain import drain_once

        return await drain_once(self, dsn, timeout_seconds=timeout_seconds)

    @property
    def all_middleware(self) -> tuple[Middleware, ...]:
        """The middleware, the outermost first."""
        return tuple(self._middleware)

    async def run(
        self,
        log: str | aio.AsyncHeadwater,
        *,
        stop: asyncio.Event | None = None,
        grace_seconds: float = 30.0,
        worker_name: str | None = None,
        pool_size: int | None = None,
        read_ahead: int = 10,
        application_name: str = "headwater work",
    ) -> None:
        """Run all workers until `stop` is set. Running handlers then have `grace_seconds` to finish; events that were
        not started or did not finish return to the queue.

        `log`: a DSN, or a handle that the program also uses for other things. Then both wait for the log together, and
        its pool needs a connection for each transactional handler that runs at a time, and a few more.
        """
        if not self.workers and not self.subscribers and not self._cron_schedules:
            raise InvalidRequest(
                "this app has no workers, subscribers or cron schedules",
                hint="Declare one with @app.worker(topic, queue=...).",
            )
        stopping = stop or asyncio.Event()
        pool_size = pool_size or 4 + len(self.subscribers) + sum(
            w.concurrency if w.transactional else 2 for w in self.workers
        )
        options: _ConnectOptions = {
            "pool_size": pool_size,
            "application_name": application_name,
            "dumps": self._dumps,
            "loads": self._loads,
        }
        async with AsyncExitStack() as stack:
            if isinstance(log, str):
                dsn = log
                log = await stack.enter_async_context(await aio.connect(dsn, **options))
            else:
                dsn = str(log._pool.conninfo)
            for settings in self._cron_schedules:
                await log.set_cron_schedule(**settings)
            lease_seconds = {one.queue: await prepare_queue(log, one) for one in self.workers}
            blocking = (
                await asyncio.to_thread(client.connect, dsn, **options)
                if any(w.transactional and not w.is_async for w in self.workers)
                else None
            )
            try:
                process = WorkerProcess(
                    log=log,
                    blocking=blocking,
                    stopping=stopping,
                    grace_seconds=grace_seconds,
                    name=worker_name or f"{socket.gethostname()}:{os.getpid()}",
                    middleware=tuple(self._middleware),
                    lease_seconds=lease_seconds,
                )
                reading = SubscriberProcess(
                    log=log,
                    subscribers=self.subscribers,
                    reader=process.name,
                    stopping=stopping,
                    grace_seconds=grace_seconds,
                    read_ahead=read_ahead,
                )
                # An invalid filter is an error of the app: raise it before the workers start.
                await reading.prepare()
                await process.run(self.workers, [reading.run])
            finally:
                if blocking is not None:
                    await asyncio.to_thread(blocking.close)


async def prepare_queue(log: aio.AsyncHeadwater, one: Worker) -> float:
    """Create the queue if it is missing and apply the worker's settings; returns the length of its leases in
    seconds."""
    whole_topics = one.topics if one.pattern is None else ()
    # One transaction: a queue that exists has its bindings.
    async with log.transaction() as connection:
        queue = await log.create_queue(
            one.queue,
            whole_topics or None,
            ordered_keys=one.ordered_keys,
            if_missing=True,
            connection=connection,
            **one.queue_settings,
        )
        if queue.ordered_keys != one.ordered_keys:
            raise InvalidRequest(
                f'queue "{one.queue}" has ordered_keys={queue.ordered_keys}, '
                f"but worker {one.name} has ordered_keys={one.ordered_keys}",
                hint="ordered_keys cannot be changed: use another queue, or delete this one.",
            )
        bindings = await log._run(queue_calls.bindings(one.queue), connection)
        bound = {binding.topic for binding in bindings if binding.to_position is None}
        for topic in one.topics:
            if topic not in bound and None not in bound:
                await log.bind(one.queue, topic=topic, pattern=one.pattern, connection=connection)
    if one.queue_settings:
        queue = await log.alter_queue(one.queue, **one.queue_settings)
    return queue.lease_seconds


@dataclass(slots=True)
class _IsolationGate:
    """Lets handlers run concurrently, but an isolated event run by itself, since it may crash the process."""

    running: int = 0
    isolated: bool = False
    waiting_isolated: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def enter(self, *, isolated: bool) -> AsyncIterator[None]:
        async with self.changed:
            if isolated:
                self.waiting_isolated += 1
                try:
                    await self.changed.wait_for(lambda: not self.running and not self.isolated)
                finally:
                    self.waiting_isolated -= 1
            else:
                await self.changed.wait_for(lambda: not self.isolated and not self.waiting_isolated)
            self.isolated = isolated
            self.running += 1
        try:
            yield
        finally:
            async with self.changed:
                self.running -= 1
                self.isolated = False
                self.changed.notify_all()


class _NotDone(Exception):
    """Rolls back a transactional handler that returned another outcome than done."""

    def __init__(self, result: Result) -> None:
        super().__init__("the handler returned an outcome other than done")
        self.result = result


@dataclass(slots=True)
class WorkerProcess:
    """Runs workers: those of an App, or the deliveries of webhooks."""

    log: aio.AsyncHeadwater
    blocking: client.Headwater | None
    stopping: asyncio.Event
    grace_seconds: float
    name: str
    middleware: tuple[Middleware, ...]
    lease_seconds: Mapping[str, float]
    # Whether it runs its share of the maintenance, and reaps its queues.
    maintains: bool = True
    gate: _IsolationGate = field(default_factory=_IsolationGate)
    out_of_time: asyncio.Event = field(default_factory=asyncio.Event)
    waiters: set[AsyncLogWaiter] = field(default_factory=set)

    async def run(self, workers: Sequence[Worker], others: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Run workers and other loops until they end by themselves after `stopping`. An error of one does not end the
        others."""
        async with asyncio.TaskGroup() as tasks:
            maintenance = tasks.create_task(self._maintain({one.queue for one in workers})) if self.maintains else None
            clock = tasks.create_task(self._count_grace())
            loops = [tasks.create_task(other()) for other in others]
            for one in workers:
                free = asyncio.Semaphore(one.concurrency)
                leases = one.concurrency if one.batch else math.ceil(one.concurrency / one.prefetch) + 1
                for number in range(one.leases or leases):
                    steps = partial(
                        work,
                        one.queue,
                        worker=f"{self.name}/{one.name}/{number}",
                        batch_size=one.prefetch,
                        handler_acks=one.transactional,
                    )
                    loops.append(tasks.create_task(self._supervise(one, free, steps)))
            await (asyncio.gather(*loops) if loops else self.stopping.wait())
            if maintenance is not None:
                maintenance.cancel()
            clock.cancel()

    async def _count_grace(self) -> None:
        await self.stopping.wait()
        for waiter in self.waiters:
            waiter.wake()
        await asyncio.sleep(self.grace_seconds)
        self.out_of_time.set()

    async def _maintain(self, queues: set[str]) -> None:
        """Run this process's share of the maintenance and, once a second, reap the expired leases of its queues."""
        task = asyncio.current_task()
        # If Postgres rejects a call while it is being cancelled, that error arrives instead of the cancellation.
        while task is not None and not task.cancelling():
            await self.log.run_maintenance()
            await reap_queues(self.log, queues)
            await asyncio.sleep(1.0)

    async def _supervise(
        self, one: Worker, free: asyncio.Semaphore, steps: Callable[[], Generator[WorkStep, Any, None]]
    ) -> None:
        """Run one worker loop, and restart it after an error; its lease expires by itself."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            began = asyncio.get_running_loop().time()
            error = await failure_of(self._drive(one, free, steps()))
            if error is None:
                return
            if isinstance(error, SchemaMismatch):
                # The schema is newer than this program, which must end and leave its events to other processes.
                raise error
            if asyncio.get_running_loop().time() - began > MAX_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            logger.warning(
                "worker loop failed",
                extra={QUEUE: one.queue, ERROR: error_text(error), WAIT_SECONDS: pause},
                exc_info=None if is_expected(error) else error,
            )
            if await self._stops_within(pause):
                return
            pause = min(pause * 2, MAX_PAUSE_SECONDS)

    async def _drive(self, one: Worker, free: asyncio.Semaphore, steps: Generator[WorkStep, Any, None]) -> None:
        """Carry out the steps of one worker loop."""
        outcome: Any = None
        failure: HeadwaterError | None = None
        waiter = self.log.watcher.waiter(queue=one.queue)
        self.waiters.add(waiter)
        try:
            while True:
                try:
                    step = steps.send(outcome) if failure is None else steps.throw(failure)
                except StopIteration:
                    return
                outcome = failure = None
                match step:
                    case WaitForGrowthStep():
                        outcome = await self._wait_for_growth(waiter, step.seconds)
                    case HandleStep():
                        outcomes = await self._handle(one, free, step.lease)
                        _count(one.queue, step.lease, outcomes)
                        outcome = HandleResult(outcomes, stop=self.stopping.is_set())
                    case Call():
                        try:
                            outcome = await self.log.run(step)
                        except LeaseLost as error:
                            COUNTERS.add(LEASES_LOST, one.queue)
                            logger.warning("lease lost", extra={QUEUE: one.queue, ERROR: error.message})
                            failure = error
        finally:
            self.waiters.discard(waiter)
            steps.close()

    async def _wait_for_growth(self, waiter: AsyncLogWaiter, seconds: float) -> Wake:
        if self.stopping.is_set():
            return Wake("stop", 0.0)
        woken = await waiter.wait(seconds)
        return Wake("stop", woken.seconds) if self.stopping.is_set() else woken

    async def _stops_within(self, seconds: float) -> bool:
        if seconds and not self.stopping.is_set():
            waiter = asyncio.ensure_future(self.stopping.wait())
            try:
                await asyncio.wait({waiter}, timeout=seconds)
            finally:
                waiter.cancel()
        return self.stopping.is_set()

    async def _handle(self, one: Worker, free: asyncio.Semaphore, lease: Lease) -> dict[int, Outcome]:
        """Run the handlers on a lease while extending it; returns the outcomes that are not done."""
        lost = asyncio.Event()
        heart = asyncio.create_task(self._keep_alive(lease, lost))
        try:
            if one.batch:
                return await self._run_batch(one, free, lease, lost)
            runs: dict[object, list[ClaimedEvent]] = {}
            for event in lease.events:
                run: object = event.position if event.key is None or not one.ordered_keys else event.key
                runs.setdefault(run, []).append(event)
            ended = await asyncio.gather(*(self._run_in_order(one, free, lease, run, lost) for run in runs.values()))
            return {position: outcome for run in ended for position, outcome in run.items() if outcome is not None}
        finally:
            heart.cancel()

    async def _keep_alive(self, lease: Lease, lost: asyncio.Event) -> None:
        """Extend the lease at each third of its length, until it is lost."""
        seconds = self.lease_seconds[lease.queue]
        left = 3
        while left:
            await asyncio.sleep(seconds / 3)
            try:
                await self.log.extend(lease)
                left = 3
            except LeaseLost:
                left = 0
            except HeadwaterError as error:
                left -= 1
                logger.warning("lease not extended", extra={QUEUE: lease.queue, ERROR: error.message})
        lost.set()

    async def _run_in_order(
        self, one: Worker, free: asyncio.Semaphore, lease: Lease, run: list[ClaimedEvent], lost: asyncio.Event
    ) -> dict[int, Outcome]:
        """Handle events one after the other: after one that is not done, the others return to the queue."""
        outcomes: dict[int, Outcome] = {}
        for event in run:
            if any(outcome is not None for outcome in outcomes.values()):
                outcomes[event.position] = Snooze()
                continue
            async with free, self.gate.enter(isolated=lease.isolated):
                if self.stopping.is_set() or lost.is_set():
                    outcomes[event.position] = Snooze()
                else:
                    result = await self.call(one, lease, event)
                    outcomes[event.position] = result if isinstance(result, _OUTCOMES) else None
        return outcomes

    async def _run_batch(
        self, one: Worker, free: asyncio.Semaphore, lease: Lease, lost: asyncio.Event
    ) -> dict[int, Outcome]:
        async with free, self.gate.enter(isolated=lease.isolated):
            if self.stopping.is_set() or lost.is_set():
                return {event.position: Snooze() for event in lease.events}
            result = await self.call(one, lease, list(lease.events))
        if isinstance(result, Mapping):
            return {position: outcome for position, outcome in result.items() if outcome is not None}
        return {event.position: result for event in lease.events} if result is not None else {}

    async def call(self, one: Worker, lease: Lease, given: Work) -> Result:
        """Run the handler through the middleware. An exception is a failed attempt."""

        async def innermost(given: Work) -> Result:
            return await self._invoke(one, lease, given)

        chain: Next = innermost
        for around in reversed(self.middleware):
            chain = _wrapped(around, chain)
        task = asyncio.ensure_future(_traced(one.queue, chain, given))
        late = asyncio.ensure_future(self.out_of_time.wait())
        try:
            await asyncio.wait({task, late}, timeout=one.timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=5.0)
                if late.done():
                    return Snooze()
                return self._failed(one, given, f"timed out after {one.timeout_seconds:g} s")
        finally:
            late.cancel()
        if task.cancelled():
            return Snooze()
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, _NotDone):
            return error.result
        if isinstance(error, LeaseLost):
            return None
        if not isinstance(error, Exception):
            raise error
        return self._failed(one, given, f"{type(error).__name__}: {error}")

    def _failed(self, one: Worker, given: Work, reason: str) -> Retry:
        first = given if isinstance(given, ClaimedEvent) else given[0]
        logger.warning("handler failed", extra={QUEUE: one.queue, POSITION: first.position, ERROR: reason})
        return Retry(reason=reason)

    async def _invoke(self, one: Worker, lease: Lease, given: Work) -> Result:
        if not one.transactional:
            result = await one.handler(given) if one.is_async else await asyncio.to_thread(one.handler, given)
            return _checked(one, result)
        done: dict[int, Outcome] = {e.position: None for e in ([given] if isinstance(given, ClaimedEvent) else given)}
        if not one.is_async:
            return await asyncio.to_thread(self._invoke_blocking, one, lease, given, done)
        async with self.log.transaction() as connection:
            # Settle first: this locks the lease, and fails immediately if it is lost.
            await self.log.settle(lease, done, rest_done=False, connection=connection)
            result = _checked(one, await one.handler(given, connection))
            if result is not None:
                raise _NotDone(result)
        return None

    def _invoke_blocking(self, one: Worker, lease: Lease, given: Work, done: Mapping[int, Outcome]) -> Result:
        assert self.blocking is not None
        with self.blocking.transaction() as connection:
            self.blocking.settle(lease, done, rest_done=False, connection=connection)
            result = _checked(one, one.handler(given, connection))
            if result is not None:
                raise _NotDone(result)
        return None


async def reap_queues(log: aio.AsyncHeadwater, queues: Collection[str]) -> None:
    """Return the events of expired leases to those of these queues that have any."""
    left: list[str] = []
    try:
        left = await log._run(queue_calls.queues_to_reap(list(queues)))
    except (HeadwaterError, psycopg.Error) as error:
        logger.warning("reaping failed", extra={ERROR: str(error)})
    for queue in left:
        try:
            await log.reap(queue)
        except (HeadwaterError, psycopg.Error) as error:
            logger.warning("reaping failed", extra={QUEUE: queue, ERROR: str(error)})


def _count(queue: str, lease: Lease, outcomes: Mapping[int, Outcome]) -> None:
    """Count the outcomes of a lease's events for the metrics. Events without an outcome are done."""
    kinds = Counter(type(outcome).__name__.lower() for outcome in outcomes.values() if outcome is not None)
    kinds["done"] = len(lease.events) - kinds.total()
    for kind, events in kinds.items():
        COUNTERS.add(HANDLED, queue, kind, by=events)


def _wrapped(around: Middleware, inner: Next) -> Next:
    async def call(given: Work) -> Result:
        return await around(given, inner)

    return call


async def _traced(queue: str, inner: Next, given: Work) -> Result:
    """Run the handler with its middleware in a span that is linked to the publisher's."""
    events = [given] if isinstance(given, ClaimedEvent) else given
    with tracing.consuming(queue, events, no_error=(_NotDone, LeaseLost)) as ended:
        result = await inner(given)
        ended(type(result).__name__.lower() if isinstance(result, _OUTCOMES) else "done")
        return result


def _checked(one: Worker, result: object) -> Result:
    if result is None or isinstance(result, _OUTCOMES) or (one.batch and isinstance(result, Mapping)):
        return result
    raise TypeError(f"handler {one.name} returned {result!r}; expected None, Retry, Dead or Snooze")
