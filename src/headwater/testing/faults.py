"""Find handlers that are not idempotent: run them with every fault that at-least-once delivery allows.

`simulate_faults` first runs the handlers without faults and remembers what they leave behind. Then it runs them again
and again, each time from the same state with one fault, and compares. The events are real ones, claimed from real
queues of a real log; only the moment of the fault is chosen:

- crash: the process dies before a line of the handler. Every line that runs is tried.
- repeat: the handler has finished, but its acknowledgement is lost. The event comes again at once.
- late repeat: the same, but the event comes again after all others.
- timeout: an async handler is cancelled at a line (`timeout_seconds`, or a stopping worker).
- overlap: the lease of a handler that hangs at a line expires. Another worker handles the event meanwhile, and then the
  first one continues. Only for blocking handlers, which cannot be cancelled.
- reorder: the events come in another order. Not for events with the same key in a queue with ordered keys.

A transactional handler is acknowledged in its own transaction, so it is never repeated after it has finished.
The same seed gives the same runs.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, Literal, LiteralString

from headwater import aio, client
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.queue.model import ClaimedEvent, Lease, Outcome, Retry
from headwater.queue.worker import WorkerProcess, prepare_queue
from headwater.testing.clock import advance_clock
from headwater.testing.user_tables import UserTables

if TYPE_CHECKING:
    from headwater.client import Headwater
    from headwater.queue.worker import App, Worker

FaultKind = Literal["crash", "repeat", "late repeat", "timeout", "overlap", "reorder"]
MAX_STEPS: Final = 10_000
HANDLER_SECONDS: Final = 60.0
LEASE_SECONDS: Final = 3600.0
LOCK_CHECK_SECONDS: Final = 0.05
MAX_LOCK_CHECKS: Final = 200


class _SimulatedCrash(BaseException):
    """Ends a handler as the end of its process would: not an Exception, so that handlers do not catch it."""


class NotDeterministic(HeadwaterError):
    """Two runs without faults left different results, so faults cannot be found by comparing."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: which handler, at which of its events (counted from 0), and at which line it has executed."""

    kind: FaultKind
    handler: str
    event: int = 0
    line: int = 0
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault after which the handlers left another result than without it."""

    handler: str
    fault: FaultKind
    # For example "at shop.py:17".
    where: str
    difference: str

    def __str__(self) -> str:
        return f"{self.handler} is not idempotent: {self.fault} {self.where}".rstrip() + f"\n    {self.difference}"


@dataclass(frozen=True, slots=True)
class FaultReport:
    """The result of simulate_faults. It is true if no fault changed the result."""

    runs: int
    findings: tuple[Finding, ...]

    @property
    def handlers(self) -> frozenset[str]:
        """The handlers that are not idempotent."""
        return frozenset(finding.handler for finding in self.findings)

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        if not self.findings:
            return f"no fault changed the result, in {self.runs} runs"
        shown = "\n".join(f"  {finding}" for finding in self.findings)
        return f"{len(self.findings)} faults of {self.runs} runs changed the result:\n{shown}"


def simulate_faults(
    app: App,
    dsn: str,
    publish: Callable[[Headwater], object],
    *,
    observe: Callable[[], object] | None = None,
    reset: Callable[[], object] | None = None,
    seed: int = 0,
    max_runs: int = 300,
) -> FaultReport:
    """Run the app's workers on the events that `publish(log)` publishes, with one fault at a time.

    What must be the same after each run: the rows of all tables outside of Headwater's schemas (without columns whose
    default is computed, such as serial numbers and times), the events that handlers published, and what `observe()`
    returns, such as the emails sent to a fake mail server. Each run begins with the tables as they are now; `reset()`
    puts back what is outside of the database.

    Use it on a test database: queues and topics of the app are deleted and created again. More than `max_runs` possible
    faults are sampled. Subscribers of SQL subscriptions are not simulated.
    """
    if not app.workers:
        raise InvalidRequest("this app has no workers", hint="Declare one with @app.worker(topic, queue=...).")
    duplicates = [name for name, count in Counter(one.name for one in app.workers).items() if count > 1]
    if duplicates:
        raise InvalidRequest(f"two handlers have the name {duplicates[0]!r}: rename one to tell them apart")
    with client.connect(dsn, pool_size=4) as log, UserTables(dsn) as tables, _cheap_collections():
        simulation = _Simulation(app, dsn, log, tables, publish, observe or (lambda: None), reset or (lambda: None))
        expected, trace = simulation.run(None)
        again, _ = simulation.run(None)
        if again != expected:
            raise NotDeterministic(
                f"the result differs between two runs without faults: {_difference(expected, again)}",
                hint="Leave random values and times out of what `observe` returns, and out of the tables.",
            )
        faults = list(_faults(app, trace, random.Random(seed)))
        if len(faults) > max_runs:
            chosen = random.Random(seed).sample(range(len(faults)), max_runs)
            faults = [faults[number] for number in sorted(chosen)]
        findings = []
        for fault in faults:
            result, _ = simulation.run(fault)
            if result != expected:
                where = trace.where(fault)
                findings.append(Finding(fault.handler, fault.kind, where, _difference(expected, result)))
        # Leave the tables as they were found.
        tables.restore()
    return FaultReport(len(faults), tuple(findings))


@contextmanager
def _cheap_collections() -> Iterator[None]:
    """Garbage is collected after each crash: do not search the objects of the whole program for it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(slots=True)
class _Trace:
    """What happened in the run without faults: for each handler and event the lines that it executed."""

    lines: dict[str, list[list[tuple[str, int]]]] = field(default_factory=dict)
    keys: dict[str, list[object]] = field(default_factory=dict)

    def where(self, fault: Fault) -> str:
        if fault.kind == "reorder":
            return f"(order {', '.join(str(number) for number in fault.order)})"
        if fault.kind in ("repeat", "late repeat"):
            return f"of event {fault.event}"
        file, line = self.lines[fault.handler][fault.event][fault.line]
        return f"before {file.rpartition('/')[2]}:{line}, at event {fault.event}"


def _faults(app: App, trace: _Trace, chance: random.Random) -> Iterator[Fault]:
    for one in app.workers:
        calls = trace.lines.get(one.name, [])
        for event, lines in enumerate(calls):
            if not one.transactional:
                yield Fault("repeat", one.name, event)
                if len(calls) > 1 and not one.ordered_keys:
                    yield Fault("late repeat", one.name, event)
            for line in range(len(lines)):
                yield Fault("crash", one.name, event, line)
                if one.is_async:
                    yield Fault("timeout", one.name, event, line)
                elif not one.transactional:
                    yield Fault("overlap", one.name, event, line)
        for order in {_reordered(trace.keys.get(one.name, []), one.ordered_keys, chance) for _ in range(4)}:
            if list(order) != sorted(order):
                yield Fault("reorder", one.name, order=order)


def _reordered(keys: Sequence[object], ordered_keys: bool, chance: random.Random) -> tuple[int, ...]:
    """A random order of the events; in a queue with ordered keys, those of one key keep theirs."""
    order = list(range(len(keys)))
    chance.shuffle(order)
    if ordered_keys:
        places: dict[object, list[int]] = {}
        for place, number in enumerate(order):
            places.setdefault(keys[number] if keys[number] is not None else object(), []).append(place)
        for own in places.values():
            for place, number in zip(own, sorted(order[place] for place in own), strict=True):
                order[place] = number
    return tuple(order)


def _difference(expected: Sequence[tuple[str, Any]], found: Sequence[tuple[str, Any]]) -> str:
    """The first part that differs, in short."""
    for (name, before), (_, after) in zip(expected, found, strict=True):
        if before == after:
            continue
        if isinstance(before, Counter) and isinstance(after, Counter):
            more, less = after - before, before - after
            parts = [f"{count} more of {item}" for item, count in list(more.items())[:2]]
            parts += [f"{count} fewer of {item}" for item, count in list(less.items())[:2]]
            return f"{name}: {'; '.join(parts)}"
        return f"{name}: {_short(after)} instead of {_short(before)}"
    return "nothing"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


class _LineTracer:
    """Counts the lines that a handler executes, in its own file, and acts before one of them."""

    def __init__(self, handler: Callable[..., Any], act_at: int | None, act: Callable[[], None]) -> None:
        self._file = _code_of(handler).co_filename
        self._act_at = act_at
        self._act = act
        self.lines: list[tuple[str, int]] = []

    def trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != self._file:
            return None
        if event == "line":
            number = len(self.lines)
            self.lines.append((self._file, frame.f_lineno))
            if number == self._act_at:
                self._act()
        return self.trace


def _code_of(handler: Callable[..., Any]) -> CodeType:
    function = inspect.unwrap(handler)
    if not hasattr(function, "__code__"):
        function = inspect.unwrap(type(function).__call__)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        raise InvalidRequest(f"handler {handler!r} is not written in Python: it cannot be simulated")
    return code


@dataclass(slots=True)
class _Simulation:
    """Runs the app on the events once for each fault."""

    app: App
    dsn: str
    log: Headwater
    tables: UserTables
    publish: Callable[[Headwater], object]
    observe: Callable[[], object]
    reset: Callable[[], object]

    def run(self, fault: Fault | None) -> tuple[list[tuple[str, Any]], _Trace]:
        """One run from the state at the beginning; returns the result, and what the handlers executed."""
        self.tables.restore()
        self.reset()
        for queue in {one.queue for one in self.app.workers}:
            self.log.delete_queue(queue)
        topics = {topic.name: topic for topic in self.log.topics() if not topic.name.startswith("headwater.")}
        for name, topic in topics.items():
            # A new topic: event ids of earlier runs do not count as duplicates.
            self.log.delete_topic(name)
            self.log.create_topic(name, kind=topic.kind, partitions=topic.partitions)
        self.log.maintain()
        start = self.log.state().head
        self.publish(self.log)
        published = self.log.state().head
        trace = asyncio.run(self._handle_all(fault, start))
        others = Counter(
            f"event of {event.topic}: {event.type} {event.key!r} {event.payload!r}" for event in self._events(published)
        )
        return [*self.tables.contents(), ("events published", others), ("observed", self.observe())], trace

    def _events(self, after: int) -> Iterator[Any]:
        while page := self.log.read(after=after, batch_size=1000):
            yield from page
            after = page[-1].position

    async def _handle_all(self, fault: Fault | None, start: int) -> _Trace:
        trace = _Trace()
        async with await aio.connect(self.dsn, pool_size=4) as log:
            lease_seconds = {}
            for one in self.app.workers:
                settings = {**one.queue_settings, "lease_seconds": LEASE_SECONDS}
                lease_seconds[one.queue] = await prepare_queue(log, replace(one, queue_settings=settings))
                await log.rewind_queue(one.queue, position=start)
            process = WorkerProcess(
                log=log,
                blocking=self.log,
                stopping=asyncio.Event(),
                grace_seconds=HANDLER_SECONDS,
                name="simulation",
                middleware=self.app.all_middleware,
                lease_seconds=lease_seconds,
            )
            runs = [_HandlerRun(self, process, one, fault, trace) for one in self.app.workers]
            for _ in range(MAX_STEPS):
                # Handlers may publish events for each other: go round until none has anything left.
                if not any([await run.run() for run in runs]):
                    return trace
        raise InvalidRequest(f"the handlers did not finish in {MAX_STEPS} rounds: they publish events without end")


class _HandlerRun:
    """Handles all events that one handler's queue has now."""

    def __init__(
        self, simulation: _Simulation, process: WorkerProcess, one: Worker, fault: Fault | None, trace: _Trace
    ) -> None:
        self._simulation = simulation
        self._process = process
        self._one = one
        self._fault = fault if fault is not None and fault.handler == one.name else None
        self._trace = trace
        self._number = 0

    async def run(self) -> int:
        handled = 0
        late: Lease | None = None
        for _ in range(MAX_STEPS):
            lease = await self._claim()
            if lease is None:
                if late is None and not await self._make_retries_due():
                    return handled
                if late is not None:
                    late = None
                    await self._expire_leases()
                continue
            for given in self._calls(lease):
                handled += 1
                first = self._number
                self._number += 1
                fault = self._fault if self._fault is not None and self._fault.event == first else None
                if fault is None or fault.kind == "reorder":
                    await self._settle(lease, given, await self._call(lease, given))
                elif fault.kind in ("repeat", "late repeat"):
                    await self._call(lease, given)
                    late = lease
                    if fault.kind == "repeat":
                        late = None
                        await self._expire_leases()
                else:
                    await self._call_with_fault(lease, given, fault)
        raise InvalidRequest(f"handler {self._one.name} did not finish its events in {MAX_STEPS} steps")

    async def _claim(self) -> Lease | None:
        one, log = self._one, self._process.log
        reorder = self._fault is not None and self._fault.kind == "reorder" and self._number == 0
        size = 1000 if reorder else one.prefetch if one.batch else 1
        lease = await log.claim(one.queue, worker="simulation", batch_size=size)
        if lease is None or not reorder:
            return lease
        assert self._fault is not None
        known = [number for number in self._fault.order if number < len(lease.events)]
        rest = [number for number in range(len(lease.events)) if number not in known]
        return replace(lease, events=tuple(lease.events[number] for number in [*known, *rest]))

    def _calls(self, lease: Lease) -> list[Any]:
        return [list(lease.events)] if self._one.batch else list(lease.events)

    async def _call(
        self, lease: Lease, given: Any, act_at: int | None = None, act: Callable[[], None] = lambda: None
    ) -> Any:
        """Run the handler once, as a worker does; returns its outcome."""
        tracer = _LineTracer(self._one.handler, act_at, act)
        # The simulation decides what takes too long.
        one = replace(self._one, handler=_traced(self._one, tracer), timeout_seconds=None)
        try:
            return await asyncio.wait_for(self._process.call(one, lease, given), HANDLER_SECONDS)
        except TimeoutError:
            # A thread cannot be cancelled, and the end of the event loop waits for it.
            await self._end_sessions(await self._sessions("wait_event_type = 'Lock'"))
            raise InvalidRequest(
                f"handler {one.name} did not return within {HANDLER_SECONDS:g} seconds",
                hint="Look for a lock or a connection that it does not release when it fails.",
            ) from None
        finally:
            if act_at is None:
                self._trace.lines.setdefault(self._one.name, []).append(tracer.lines)
                first = given[0] if isinstance(given, list) else given
                self._trace.keys.setdefault(self._one.name, []).append(first.key)

    async def _call_with_fault(self, lease: Lease, given: Any, fault: Fault) -> None:
        if fault.kind == "overlap":
            await self._overlap(lease, given, fault)
            return

        def crash() -> None:
            raise _SimulatedCrash if fault.kind == "crash" else asyncio.CancelledError

        sessions = await self._sessions()
        crashed, outcome = False, None
        try:
            outcome = await self._call(lease, given, fault.line, crash)
        except _SimulatedCrash:
            crashed = True
        if crashed:
            # The end of a process closes its connections. Here, those that the handler left open may live as long as
            # its frames: end the sessions that it has opened.
            gc.collect()
            await self._end_sessions(await self._sessions() - sessions)
            await self._expire_leases()
            return
        if fault.kind == "timeout":
            outcome = Retry(reason="timed out")
        await self._settle(lease, given, outcome)

    async def _overlap(self, lease: Lease, given: Any, fault: Fault) -> None:
        """The handler hangs at a line while another worker handles the same event; then it continues."""
        hangs, continues = threading.Event(), threading.Event()

        def hang() -> None:
            hangs.set()
            continues.wait(HANDLER_SECONDS)

        first = asyncio.ensure_future(self._call(lease, given, fault.line, hang))
        try:
            hanging = asyncio.ensure_future(asyncio.to_thread(hangs.wait, HANDLER_SECONDS))
            await asyncio.wait({first, hanging}, return_when=asyncio.FIRST_COMPLETED)
            hangs.set()
            if not first.done():
                await self._expire_leases()
                second = asyncio.ensure_future(self._handle_again())
                # The second may need a lock that the first one holds.
                for _ in range(MAX_LOCK_CHECKS):
                    await asyncio.wait({second}, timeout=LOCK_CHECK_SECONDS)
                    if second.done() or await self._sessions("wait_event_type = 'Lock'"):
                        break
                continues.set()
                await second
        finally:
            continues.set()
        outcome = await first
        # The lease has expired: if the event was not handled meanwhile, it comes again.
        try:
            await self._settle(lease, given, outcome)
        except HeadwaterError:
            return

    async def _handle_again(self) -> None:
        lease = await self._claim()
        for given in self._calls(lease) if lease is not None else ():
            assert lease is not None
            await self._settle(lease, given, await self._call(lease, given, act_at=-1))

    async def _sessions(self, condition: LiteralString = "state like 'idle in transaction%%'") -> set[int]:
        """The process ids of the sessions of this database in that state."""
        async with self._process.log.connection() as connection:
            statement = f"select pid from pg_stat_activity where datname = current_database() and {condition}"
            return {pid for (pid,) in await (await connection.execute(statement, ())).fetchall()}

    async def _end_sessions(self, pids: set[int]) -> None:
        async with self._process.log.connection() as connection:
            await connection.execute(
                "select pg_terminate_backend(pid) from unnest(%s::integer[]) as s (pid)", (list(pids),)
            )

    async def _settle(self, lease: Lease, given: Any, outcome: Any) -> None:
        if self._one.transactional and outcome is None:
            return
        events: Sequence[ClaimedEvent] = given if isinstance(given, list) else [given]
        if isinstance(outcome, dict):
            outcomes: dict[int, Outcome] = {event.position: outcome.get(event.position) for event in events}
        else:
            outcomes = {event.position: outcome for event in events}
        await self._process.log.settle(lease, outcomes, rest_done=False)

    async def _make_retries_due(self) -> bool:
        """Let time pass until the next attempt of events that failed; False if there are none."""
        queue = (await self._process.log.queues([self._one.queue]))[0]
        if not queue.retrying:
            return False
        await asyncio.to_thread(advance_clock, self._simulation.log, timedelta(days=366))
        return True

    async def _expire_leases(self) -> None:
        await asyncio.to_thread(advance_clock, self._simulation.log, timedelta(seconds=LEASE_SECONDS * 2))
        await self._process.log.reap(self._one.queue)


def _traced(one: Worker, tracer: _LineTracer) -> Callable[..., Any]:
    handler = one.handler
    if one.is_async:

        async def run_async(*given: Any) -> Any:
            before = sys.gettrace()
            sys.settrace(tracer.trace)
            try:
                result: Awaitable[Any] = handler(*given)
                return await result
            finally:
                sys.settrace(before)

        return run_async

    def run(*given: Any) -> Any:
        before = sys.gettrace()
        sys.settrace(tracer.trace)
        try:
            return handler(*given)
        finally:
            sys.settrace(before)

    return run
