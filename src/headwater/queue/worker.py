"""Workers: handlers declared on an App, run on the events of groups until told to stop.

    app = headwater.App()

    @app.worker("orders", group="mailer", concurrency=10)
    async def send(event): ...

Run it with `headwater work module:app`, or `await app.run(dsn)`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import psycopg

from headwater import aio, calls, client
from headwater.errors import HeadwaterError, InvalidRequest, LeaseLost, SchemaMismatch
from headwater.log.steps import Handle, Handled, Wait, WorkStep, work
from headwater.model import ClaimedEvent, Dead, Event, Lease, NewEvent, Outcome, Retry, Snooze
from headwater.observability import tracing
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import ERROR, GROUP, HANDLED, LEASES_LOST, POSITION, WAIT_SECONDS, logger
from headwater.sql_subscriptions.reader import (
    DEFAULT_TIMEOUT_SECONDS,
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    Subscriber,
    SubscriberProcess,
    is_expected,
    told,
)
from headwater.supervisor import failure_of

Work = ClaimedEvent | Sequence[ClaimedEvent]
"""What a handler is given: one event, or a batch of them."""

Result = Outcome | Mapping[int, Outcome]
"""What a handler gives back: None is done; a batch handler may say it by position."""

Next = Callable[[Work], Awaitable[Result]]
Middleware = Callable[[Work, Next], Awaitable[Result]]
F = TypeVar("F", bound=Callable[..., Any])

_OUTCOMES = (Retry, Dead, Snooze)


@dataclass(frozen=True, slots=True)
class Worker:
    """One handler and how it is to be run."""

    handler: Callable[..., Any]
    group: str
    topics: tuple[str, ...]
    concurrency: int
    prefetch: int
    batch: bool
    transactional: bool
    timeout_seconds: float | None
    ordered_keys: bool
    group_settings: Mapping[str, Any]
    # How many leases are held at a time; None: one is worked on while the next is fetched.
    leases: int | None = None

    @property
    def name(self) -> str:
        return getattr(self.handler, "__name__", type(self.handler).__name__)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.handler)


class App:
    """What a worker process does: its handlers, its middleware, its periodic events."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.subscribers: list[Subscriber] = []
        self._middleware: list[Middleware] = []
        self._periodics: list[dict[str, Any]] = []

    def worker(
        self,
        *topics: str,
        group: str,
        concurrency: int = 1,
        prefetch: int | None = None,
        batch: bool = False,
        transactional: bool = False,
        timeout_seconds: float | None = None,
        lease_seconds: float | None = None,
        max_attempts: int | None = None,
        backoff_seconds: float | None = None,
        backoff_factor: float | None = None,
        backoff_max_seconds: float | None = None,
        backoff_jitter: float | None = None,
        ordered_keys: bool | None = None,
        max_in_flight: int | None = None,
    ) -> Callable[[F], F]:
        """Run a function, async or not, on every event of a group.

        The group is made if it is missing, bound to these topics; settings given here are set on it. The handler
        gets the event and returns None when it is done, or Retry(after), Dead(reason) or Snooze(after); an
        exception is a failed try. `concurrency` handlers run at a time, on events claimed `prefetch` at a time.
        `batch`: the handler gets a list of up to `prefetch` events, and may return outcomes by position.
        `transactional`: it also gets a connection, whose transaction acknowledges the event: what it writes there
        and the acknowledgement commit together, so each event has its effect exactly once.
        """
        if concurrency < 1 or (prefetch is not None and prefetch < 1):
            raise InvalidRequest("concurrency and prefetch are 1 or more")
        if batch and transactional and concurrency != 1:
            raise InvalidRequest("a transactional batch handler works on one batch at a time: concurrency=1")
        settings = {
            "lease_seconds": lease_seconds,
            "max_attempts": max_attempts,
            "backoff_seconds": backoff_seconds,
            "backoff_factor": backoff_factor,
            "backoff_max_seconds": backoff_max_seconds,
            "backoff_jitter": backoff_jitter,
            "max_in_flight": max_in_flight,
        }

        def register(handler: F) -> F:
            self.workers.append(
                Worker(
                    handler=handler,
                    group=group,
                    topics=topics,
                    concurrency=concurrency,
                    prefetch=prefetch or (100 if batch else max(concurrency, 10)),
                    batch=batch,
                    transactional=transactional,
                    timeout_seconds=timeout_seconds,
                    ordered_keys=bool(ordered_keys),
                    group_settings=settings,
                )
            )
            return handler

        return register

    def subscriber(
        self,
        group: str,
        condition: str,
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
        """Run a function, async or not, on every event that fulfils a SQL condition over `e` and `s`.

        One process at a time reads for the group, others stand by. An exception, or Retry(after), has this handler
        get the event again later; the others go on. It has the group's max_attempts, or, with `retry_delays`, an
        attempt after each delay in seconds; then the event is a dead letter. A call that takes longer than
        `timeout_seconds` is a failed attempt.

        `batch`: the handler gets a list of up to `batch_size` events, and may return outcomes by position.
        `split_by`: events for which this function returns equal values form a part; each call gets events of one
        part, and parts fail independently. `concurrency`: calls at a time; more than one keep the order only within
        a part. `fire_and_forget`: calls are not waited for, and what fails is logged and not tried again.

        A subscriber that is declared while the app runs is taken up within a second.
        """

        def register(handler: F) -> F:
            self.subscribers.append(
                Subscriber(
                    name=name or str(getattr(handler, "__name__", type(handler).__name__)),
                    handler=handler,
                    group=group,
                    condition=condition,
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

    def periodic(self, name: str, cron: str, topic: str, event: NewEvent, *, time_zone: str = "UTC") -> None:
        """Publish this event at the times of a cron expression, once, whichever process is alive."""
        self._periodics.append(
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

    async def run(
        self,
        dsn: str,
        *,
        stop: asyncio.Event | None = None,
        grace_seconds: float = 30.0,
        worker_name: str | None = None,
        pool_size: int | None = None,
        read_ahead: int = 10,
        application_name: str = "headwater work",
    ) -> None:
        """Run all workers until `stop` is set. Then running handlers have `grace_seconds` to finish; what was not
        started, or does not finish, is given back."""
        if not self.workers and not self.subscribers and not self._periodics:
            raise InvalidRequest("this app has no workers", hint="Declare one with @app.worker(topic, group=...).")
        stopping = stop or asyncio.Event()
        pool_size = pool_size or 4 + len(self.subscribers) + sum(
            w.concurrency if w.transactional else 2 for w in self.workers
        )
        async with await aio.connect(dsn, pool_size=pool_size, application_name=application_name) as log:
            for settings in self._periodics:
                await log.set_periodic(**settings)
            lease_seconds = {one.group: await _prepare_group(log, one) for one in self.workers}
            blocking = (
                await asyncio.to_thread(client.connect, dsn, pool_size=pool_size, application_name=application_name)
                if any(w.transactional and not w.is_async for w in self.workers)
                else None
            )
            try:
                process = Process(
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
                # A filter that is refused is an error of the app, told now.
                await reading.prepare()
                await process.run(self.workers, [reading.run])
            finally:
                if blocking is not None:
                    await asyncio.to_thread(blocking.close)


async def _prepare_group(log: aio.AsyncHeadwater, one: Worker) -> float:
    """Make the group if it is missing, and set on it what the worker asks for; returns how long its leases are."""
    group = await log.create_group(
        one.group, one.topics or None, ordered_keys=one.ordered_keys, if_missing=True, **one.group_settings
    )
    if group.ordered_keys != one.ordered_keys:
        raise InvalidRequest(
            f'group "{one.group}" has ordered_keys={group.ordered_keys}, its worker {one.name} wants the opposite',
            hint="Give the worker another group, or delete this one.",
        )
    if any(value is not None for value in one.group_settings.values()):
        group = await log.alter_group(one.group, **one.group_settings)
    bound = {binding.topic for binding in await log.bindings(one.group) if binding.to_position is None}
    for topic in one.topics:
        if topic not in bound and None not in bound:
            await log.bind(one.group, topic=topic)
    return group.lease_seconds


@dataclass(slots=True)
class _Gate:
    """Lets handlers run side by side, and one that may kill its process run alone."""

    running: int = 0
    alone: bool = False
    waiting_alone: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def enter(self, *, alone: bool) -> AsyncIterator[None]:
        async with self.changed:
            if alone:
                self.waiting_alone += 1
                try:
                    await self.changed.wait_for(lambda: not self.running and not self.alone)
                finally:
                    self.waiting_alone -= 1
            else:
                await self.changed.wait_for(lambda: not self.alone and not self.waiting_alone)
            self.alone = alone
            self.running += 1
        try:
            yield
        finally:
            async with self.changed:
                self.running -= 1
                self.alone = False
                self.changed.notify_all()


class _NotDone(Exception):
    """Rolls back a transactional handler that returned something other than done."""

    def __init__(self, result: Result) -> None:
        super().__init__("the handler did not finish the event")
        self.result = result


@dataclass(slots=True)
class Process:
    """Workers that run: an App's, or what else sends events on."""

    log: aio.AsyncHeadwater
    blocking: client.Headwater | None
    stopping: asyncio.Event
    grace_seconds: float
    name: str
    middleware: tuple[Middleware, ...]
    lease_seconds: Mapping[str, float]
    poll_seconds: float = 0.01
    look_seconds: float = 0.2
    gate: _Gate = field(default_factory=_Gate)
    out_of_time: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, workers: Sequence[Worker], others: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        """Run workers, and what else ends by itself when it is time to stop. No error of one ends the others."""
        async with asyncio.TaskGroup() as tasks:
            upkeep = tasks.create_task(self._keep_up({one.group for one in workers}))
            clock = tasks.create_task(self._count_grace())
            loops = [tasks.create_task(other()) for other in others]
            for one in workers:
                free = asyncio.Semaphore(one.concurrency)
                leases = one.concurrency if one.batch else math.ceil(one.concurrency / one.prefetch) + 1
                for number in range(one.leases or leases):
                    steps = partial(
                        work,
                        one.group,
                        worker=f"{self.name}/{one.name}/{number}",
                        batch_size=one.prefetch,
                        handler_acks=one.transactional,
                        poll_seconds=self.poll_seconds,
                        look_seconds=self.look_seconds,
                    )
                    loops.append(tasks.create_task(self._supervise(one, free, steps)))
            await (asyncio.gather(*loops) if loops else self.stopping.wait())
            upkeep.cancel()
            clock.cancel()

    async def _count_grace(self) -> None:
        await self.stopping.wait()
        await asyncio.sleep(self.grace_seconds)
        self.out_of_time.set()

    async def _keep_up(self, groups: set[str]) -> None:
        """This process's share of the upkeep, and once a second the leases of its groups that ran out."""
        task = asyncio.current_task()
        # Where Postgres refuses what is being cancelled, the refusal comes instead of the cancellation.
        while task is not None and not task.cancelling():
            await self.log.do_upkeep()
            for group in groups:
                try:
                    await self.log.reap(group)
                except (HeadwaterError, psycopg.Error) as error:
                    logger.warning("reaping failed", extra={GROUP: group, ERROR: str(error)})
            await asyncio.sleep(1.0)

    async def _supervise(
        self, one: Worker, free: asyncio.Semaphore, steps: Callable[[], Generator[WorkStep, Any, None]]
    ) -> None:
        """Run the loop of a lease, and after an error begin it again: its lease ends by itself."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            began = asyncio.get_running_loop().time()
            error = await failure_of(self._drive(one, free, steps()))
            if error is None:
                return
            if isinstance(error, SchemaMismatch):
                # An upgrade has left this program behind: it must end, and leave its events to others.
                raise error
            if asyncio.get_running_loop().time() - began > LONGEST_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            logger.warning(
                "working on a group failed",
                extra={GROUP: one.group, ERROR: told(error), WAIT_SECONDS: pause},
                exc_info=None if is_expected(error) else error,
            )
            if await self._stops_within(pause):
                return
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _drive(self, one: Worker, free: asyncio.Semaphore, steps: Generator[WorkStep, Any, None]) -> None:
        """Carry out the steps of one lease's loop."""
        outcome: Any = None
        failure: HeadwaterError | None = None
        try:
            while True:
                try:
                    step = steps.send(outcome) if failure is None else steps.throw(failure)
                except StopIteration:
                    return
                outcome = failure = None
                match step:
                    case Wait():
                        outcome = await self._stops_within(step.seconds)
                    case Handle():
                        outcomes = await self._handle(one, free, step.lease)
                        _count(one.group, step.lease, outcomes)
                        outcome = Handled(outcomes, stop=self.stopping.is_set())
                    case calls.Call():
                        try:
                            outcome = await self.log.run(step)
                        except LeaseLost as error:
                            COUNTERS.add(LEASES_LOST, one.group)
                            logger.warning("lease lost", extra={GROUP: one.group, ERROR: error.message})
                            failure = error
        finally:
            steps.close()

    async def _stops_within(self, seconds: float) -> bool:
        if seconds and not self.stopping.is_set():
            waiter = asyncio.ensure_future(self.stopping.wait())
            try:
                await asyncio.wait({waiter}, timeout=seconds)
            finally:
                waiter.cancel()
        return self.stopping.is_set()

    async def _handle(self, one: Worker, free: asyncio.Semaphore, lease: Lease) -> dict[int, Outcome]:
        """Run the handlers on a lease, keeping it alive; returns the outcomes that are not done."""
        lost = asyncio.Event()
        heart = asyncio.create_task(self._keep_alive(lease, lost))
        try:
            if one.batch:
                return await self._run_batch(one, free, lease, lost)
            lanes: dict[object, list[ClaimedEvent]] = {}
            for event in lease.events:
                lane: object = event.position if event.key is None or not one.ordered_keys else event.key
                lanes.setdefault(lane, []).append(event)
            ended = await asyncio.gather(*(self._run_lane(one, free, lease, lane, lost) for lane in lanes.values()))
            return {position: outcome for lane in ended for position, outcome in lane.items() if outcome is not None}
        finally:
            heart.cancel()

    async def _keep_alive(self, lease: Lease, lost: asyncio.Event) -> None:
        """Extend the lease at each third of its time, until it is lost."""
        seconds = self.lease_seconds[lease.group]
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
                logger.warning("lease not extended", extra={GROUP: lease.group, ERROR: error.message})
        lost.set()

    async def _run_lane(
        self, one: Worker, free: asyncio.Semaphore, lease: Lease, lane: list[ClaimedEvent], lost: asyncio.Event
    ) -> dict[int, Outcome]:
        """Events that must follow each other: behind one that failed, the others go back."""
        outcomes: dict[int, Outcome] = {}
        for event in lane:
            if any(outcome is not None for outcome in outcomes.values()):
                outcomes[event.position] = Snooze()
                continue
            async with free, self.gate.enter(alone=lease.alone):
                if self.stopping.is_set() or lost.is_set():
                    outcomes[event.position] = Snooze()
                else:
                    result = await self._call(one, lease, event)
                    outcomes[event.position] = result if isinstance(result, _OUTCOMES) else None
        return outcomes

    async def _run_batch(
        self, one: Worker, free: asyncio.Semaphore, lease: Lease, lost: asyncio.Event
    ) -> dict[int, Outcome]:
        async with free, self.gate.enter(alone=lease.alone):
            if self.stopping.is_set() or lost.is_set():
                return {event.position: Snooze() for event in lease.events}
            result = await self._call(one, lease, lease.events)
        if isinstance(result, Mapping):
            return {position: outcome for position, outcome in result.items() if outcome is not None}
        return {event.position: result for event in lease.events} if result is not None else {}

    async def _call(self, one: Worker, lease: Lease, given: Work) -> Result:
        """Run the handler through the middleware. Whatever it raises is a failed try."""

        async def innermost(given: Work) -> Result:
            return await self._invoke(one, lease, given)

        chain: Next = innermost
        for around in reversed(self.middleware):
            chain = _wrapped(around, chain)
        task = asyncio.ensure_future(_traced(one.group, chain, given))
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
        logger.warning("handler failed", extra={GROUP: one.group, POSITION: first.position, ERROR: reason})
        return Retry(reason=reason)

    async def _invoke(self, one: Worker, lease: Lease, given: Work) -> Result:
        if not one.transactional:
            result = await one.handler(given) if one.is_async else await asyncio.to_thread(one.handler, given)
            return _checked(one, result)
        done: dict[int, Outcome] = {e.position: None for e in ([given] if isinstance(given, ClaimedEvent) else given)}
        if not one.is_async:
            return await asyncio.to_thread(self._invoke_blocking, one, lease, given, done)
        async with self.log.transaction() as connection:
            # First: it holds the lease, and fails at once if it is lost.
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


def _count(group: str, lease: Lease, outcomes: Mapping[int, Outcome]) -> None:
    """What became of the events of a lease, for the metrics. What is not named is done."""
    kinds = Counter(type(outcome).__name__.lower() for outcome in outcomes.values() if outcome is not None)
    kinds["done"] = len(lease.events) - kinds.total()
    for kind, events in kinds.items():
        COUNTERS.add(HANDLED, group, kind, by=events)


def _wrapped(around: Middleware, inner: Next) -> Next:
    async def call(given: Work) -> Result:
        return await around(given, inner)

    return call


async def _traced(group: str, inner: Next, given: Work) -> Result:
    """The handler with its middleware, in a span that is linked to the publisher's."""
    events = [given] if isinstance(given, ClaimedEvent) else given
    with tracing.consuming(group, events, no_error=(_NotDone, LeaseLost)) as ended:
        result = await inner(given)
        ended(type(result).__name__.lower() if isinstance(result, _OUTCOMES) else "done")
        return result


def _checked(one: Worker, result: object) -> Result:
    if result is None or isinstance(result, _OUTCOMES) or (one.batch and isinstance(result, Mapping)):
        return result
    raise TypeError(f"handler {one.name} returned {result!r}; expected None, Retry, Dead or Snooze")
