"""Waiting for the log to grow: one watcher for all waiters of a process.

A handle has one watcher. While anything waits, its task polls the head of the log, and also the open publishing
transactions while events are not stable yet. If either has changed, it wakes the waiters of the topics that have grown,
which then read what they need. So the idle cost of a process does not depend on the number of its queues and followers.

Waiters of a queue or a cursor are also woken if that has changed or has an event to hand out again: one call reads the
states of all of them (`states_of_waiters`).

What must stay true:
- No wake-up is lost. A waiter remembers what the watcher knew when its last wait ended, which is before it looked at
  the log itself. If the watcher knows something else now, the next wait ends at once.
- "Changed" means different, not greater: a crash may move the head back.
- After an error (a lost connection, a restart of Postgres) all waiters are woken and find the error themselves, each
  with its own patience.
- Every wait ends after its time, whatever happens to the watcher; while a poll hangs, after STALLED_SECONDS. When the
  handle is closed, all waits end.

`LogWatcher` is the same for programs without an event loop: each waiter polls for itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import psycopg

from headwater.calls import Call
from headwater.calls import log as log_calls
from headwater.calls import queues as queue_calls
from headwater.errors import HeadwaterError
from headwater.log.model import Growth, WaitedState, WaitKey
from headwater.log.steps import MaintenanceSchedule, Wake, WakeReason
from headwater.observability.metrics import ERROR, logger
from headwater.supervisor import FailureGuard

MIN_POLL_SECONDS: Final = 0.001
MAX_POLL_SECONDS: Final = 0.01
# How often queues and cursors are read, and the epoch, which a crash may change without the head.
LOOK_SECONDS: Final = 0.25
EPOCH_SECONDS: Final = 1.0
# With this many topics, growth of any topic wakes all waiters.
MAX_TOPICS: Final = 500
# After this time without growth, both are polled less often.
IDLE_AFTER_SECONDS: Final = 60.0
IDLE_POLL_SECONDS: Final = 0.05
IDLE_LOOK_SECONDS: Final = 1.0
# How often the events of expired leases are returned to the queues that are waited for.
REAP_SECONDS: Final = 1.0
# While the log cannot be read.
RETRY_SECONDS: Final = 0.25
# If a poll takes longer, its connection may hang: each waiter then looks at the log by itself, this often.
STALLED_SECONDS: Final = 5.0
# How long a blocking waiter waits at most: it does not read the states of queues and cursors.
BLOCKING_LOOK_SECONDS: Final = 0.5


class _Known(NamedTuple):
    """What the watcher knows of the log."""

    head: int
    epoch: int
    # The position bounds of the publishers that hold events back: while they and the head do not change, no further
    # event becomes stable.
    bounds: tuple[int, ...]

    @property
    def stable(self) -> int:
        """The stable position of the whole log."""
        return min((self.head, *self.bounds))


def _known_from(growth: Growth) -> _Known:
    return _Known(growth.head, growth.epoch, tuple(bound for bound in growth.bounds if bound < growth.head))


class AsyncLogWatcher:
    """Polls the log for all waiters of a handle while there are any."""

    def __init__(
        self,
        run: Callable[[Call[Any]], Awaitable[Any]],
        maintain: Callable[[], Awaitable[None]],
        schedule: MaintenanceSchedule,
    ) -> None:
        self._run = run
        self._maintain = maintain
        self._schedule = schedule
        # How often the log was found changed, and how often the states were read.
        self.version = 0
        self.looks = 0
        # The version in which a topic grew last, and in which any topic may have.
        self.topic_versions: dict[str, int] = {}
        self.all_version = 0
        # All waiters that exist: one that does not wait now must hear later of the growth of its topics.
        self._users: WeakSet[AsyncLogWaiter] = WeakSet()
        self.states: dict[WaitKey, WaitedState] = {}
        self.is_stopped = False
        self._known: _Known | None = None
        self._failing = False
        self._waiters: set[AsyncLogWaiter] = set()
        self._hint = asyncio.Event()
        self._pause = MIN_POLL_SECONDS
        self._grown_at = self._polled_at = time.monotonic()
        self._look_at = self._epoch_at = self._reap_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._maintenance: asyncio.Task[None] | None = None

    def waiter(
        self, *, queue: str | None = None, cursor: str | None = None, topics: Sequence[str] | None = None
    ) -> AsyncLogWaiter:
        """A place to wait for the log (None: for any topic, or those of the queue), and for a queue or a cursor, again
        and again."""
        key = WaitKey("queue", queue) if queue is not None else None if cursor is None else WaitKey("cursor", cursor)
        waiter = AsyncLogWaiter(self, key, topics)
        self._users.add(waiter)
        return waiter

    def hint(self) -> None:
        """This process has published: poll soon. Nothing depends on it."""
        self._hint.set()

    async def stop(self) -> None:
        """End the task and all waits: the waiters find out that the handle is closed."""
        self.is_stopped = True
        tasks = [task for task in (self._task, self._maintenance) if task is not None and not task.done()]
        while tasks:
            # Cancel repeatedly: a task that is just receiving a connection from the pool can miss a cancellation.
            for task in tasks:
                task.cancel()
            _, left = await asyncio.wait(tasks, timeout=1.0)
            tasks = list(left)
        for waiter in tuple(self._waiters):
            waiter.check()

    def add(self, waiter: AsyncLogWaiter) -> None:
        self._waiters.add(waiter)
        if waiter.key is not None:
            self._look_at = min(self._look_at, time.monotonic() + LOOK_SECONDS)
        if self._task is None or self._task.done():
            self._polled_at = time.monotonic()
            # Not in the context of the first waiter, whose trace and request are not those of the others.
            self._task = asyncio.create_task(self._watch(), name="log watcher", context=Context())

    def is_stalled(self) -> bool:
        return time.monotonic() - self._polled_at > STALLED_SECONDS

    def remove(self, waiter: AsyncLogWaiter) -> None:
        self._waiters.discard(waiter)

    async def _watch(self) -> None:
        with FailureGuard("log watcher") as guard:
            while self._waiters:
                try:
                    await self._poll()
                    self._failing = False
                except (HeadwaterError, psycopg.Error) as error:
                    if not self._failing:
                        logger.warning("the log could not be polled", extra={ERROR: str(error)})
                    self._failing = True
                    self._change(None)
                    self._pause = RETRY_SECONDS * random.uniform(0.5, 1.0)
                    # A look that is overdue must not shorten the pause.
                    self._look_at = max(self._look_at, time.monotonic() + self._pause)
                self._polled_at = time.monotonic()
                self._run_maintenance()
                await self._sleep()
        if guard.failed:
            # The next waiter starts the task again.
            await asyncio.sleep(RETRY_SECONDS)
            self._change(None)

    async def _poll(self) -> None:
        now = time.monotonic()
        known, topics = self._known, self._topics()
        # While events are not stable yet, they may become so without the head.
        reads_all = known is None or known.bounds or now >= self._epoch_at
        seen_head = None if known is None or reads_all else known.head
        growth = await self._run(log_calls.growth(seen_head, 0 if known is None else known.stable, topics))
        if growth is not None:
            self._epoch_at = now + EPOCH_SECONDS
            present = _known_from(growth)
            if present != known:
                # After a crash, a topic may have lost events and got others.
                is_same_log = known is not None and known.epoch == present.epoch and known.head <= present.head
                # A waiter may have come while the database answered.
                asked_all = len(topics) < MAX_TOPICS and set(self._topics()) <= set(topics)
                self._change(present, growth.topics if is_same_log and asked_all else None)
        is_idle = time.monotonic() - self._grown_at > IDLE_AFTER_SECONDS
        self._pause = min(self._pause * 2, IDLE_POLL_SECONDS if is_idle else MAX_POLL_SECONDS)
        if now >= self._look_at:
            await self._look(IDLE_LOOK_SECONDS if is_idle else LOOK_SECONDS)

    def _topics(self) -> list[str]:
        """The topics that the waiters want events of, waiting or not, up to MAX_TOPICS."""
        topics = {topic for waiter in self._users for topic in waiter.topics or ()}
        return list(topics)[:MAX_TOPICS]

    def _change(self, known: _Known | None, topics: frozenset[str] | None = None) -> None:
        """Wake all waiters, or those of these topics and those of any topic."""
        if known is not None:
            self._grown_at = time.monotonic()
        self._known = known
        self._pause = MIN_POLL_SECONDS / 2
        self.version += 1
        if topics is None:
            self.all_version = self.version
        else:
            self.topic_versions.update(dict.fromkeys(topics, self.version))
            if len(self.topic_versions) > 2 * MAX_TOPICS:
                # Topics of waiters that no longer exist.
                wanted = self._topics()
                self.topic_versions = {t: v for t, v in self.topic_versions.items() if t in wanted}
        for waiter in tuple(self._waiters):
            waiter.check()

    async def _look(self, seconds: float) -> None:
        """Read the states of the queues and cursors that are waited for."""
        keys = {waiter.key for waiter in self._waiters if waiter.key is not None}
        self._look_at = time.monotonic() + seconds
        if not keys:
            return
        found: dict[WaitKey, WaitedState] = await self._run(
            log_calls.states_of_waiters(
                [key.name for key in keys if key.kind == "queue"], [key.name for key in keys if key.kind == "cursor"]
            )
        )
        self.looks += 1
        # A deleted one is a change, too.
        self.states = {key: found.get(key, WaitedState(None)) for key in keys}
        for waiter in tuple(self._users):
            if waiter.key is not None and waiter.key.kind == "queue" and waiter.key in self.states:
                waiter.change_topics(self.states[waiter.key].topics)
        due = min((one.due_seconds for one in found.values() if one.due_seconds is not None), default=seconds)
        self._look_at = time.monotonic() + min(due, seconds)
        for waiter in tuple(self._waiters):
            waiter.check()

    def _run_maintenance(self) -> None:
        running = self._maintenance is not None and not self._maintenance.done()
        now = time.monotonic()
        # Reaping has its own time: other loops of the process may do all of the scheduled maintenance.
        if not running and (now >= self._reap_at or self._schedule.is_due(now)):
            self._maintenance = asyncio.create_task(self._maintain_once(), name="log maintenance", context=Context())

    async def _maintain_once(self) -> None:
        with FailureGuard("log maintenance"):
            await self._reap()
            await self._maintain()

    async def _reap(self) -> None:
        """Return the events of expired leases to the queues that are waited for."""
        now = time.monotonic()
        if now < self._reap_at:
            return
        self._reap_at = now + REAP_SECONDS
        queues = sorted({waiter.key.name for waiter in self._waiters if waiter.key and waiter.key.kind == "queue"})
        if not queues:
            return
        try:
            for queue in await self._run(queue_calls.queues_to_reap(queues)):
                await self._run(queue_calls.reap(queue))
        except (HeadwaterError, psycopg.Error) as error:
            logger.warning("reaping failed", extra={ERROR: str(error)})

    async def _sleep(self) -> None:
        # Not shorter, however often there is a hint.
        await asyncio.sleep(MIN_POLL_SECONDS)
        pause = min(self._pause, max(self._look_at - time.monotonic(), 0.0) if self._has_keys() else self._pause)
        if pause > MIN_POLL_SECONDS and not self._hint.is_set():
            try:
                async with asyncio.timeout(pause - MIN_POLL_SECONDS):
                    await self._hint.wait()
            except TimeoutError:
                return
        if self._hint.is_set():
            self._hint.clear()
            self._pause = MIN_POLL_SECONDS / 2

    def _has_keys(self) -> bool:
        return any(waiter.key is not None for waiter in self._waiters)


class AsyncLogWaiter:
    """Waits for the log, again and again. One task at a time may use it."""

    __slots__ = (
        "__weakref__",
        "_ended",
        "_seen",
        "_seen_look",
        "_seen_state",
        "_watcher",
        "_woken",
        "key",
        "topics",
    )

    def __init__(self, watcher: AsyncLogWatcher, key: WaitKey | None, topics: Sequence[str] | None) -> None:
        self.key = key
        # None: any topic.
        self.topics = topics
        self._watcher = watcher
        self._ended: asyncio.Future[None] | None = None
        self._woken = False
        self._seen_state: str | None = None
        self._note()

    async def wait(self, seconds: float) -> Wake:
        """Wait until the log has grown, or the queue or cursor has changed, since the last wait ended; or until the
        time has passed."""
        started = time.monotonic()
        if self._reason() == "time":
            ended = self._ended = asyncio.get_running_loop().create_future()
            self._watcher.add(self)
            try:
                while (left := started + seconds - time.monotonic()) > 0:
                    await asyncio.wait((ended,), timeout=min(left, STALLED_SECONDS))
                    if ended.done() or self._watcher.is_stalled():
                        break
            finally:
                # Another wait may have begun since this one was cancelled.
                if self._ended is ended:
                    self._watcher.remove(self)
                    self._ended = None
        reason = self._reason()
        self._note()
        return Wake(reason, time.monotonic() - started)

    def wake(self) -> None:
        """End the present or the next wait."""
        self._woken = True
        self.check()

    def change_topics(self, topics: Sequence[str] | None) -> None:
        if topics != self.topics:
            # The growth so far is known for the former topics only.
            self._woken = self._woken or self._watcher.version > self._seen
            self.topics = topics

    def check(self) -> None:
        if self._ended is not None and not self._ended.done() and self._reason() != "time":
            self._ended.set_result(None)

    def _reason(self) -> WakeReason:
        if self._woken or self._watcher.is_stopped:
            return "change"
        state = None if self.key is None else self._watcher.states.get(self.key)
        if state is not None and (
            state.state != self._seen_state or (state.due and self._watcher.looks != self._seen_look)
        ):
            return "change"
        if self.topics is None:
            return "growth" if self._watcher.version > self._seen else "time"
        versions = self._watcher.topic_versions
        has_grown = self._watcher.all_version > self._seen or any(
            versions.get(topic, 0) > self._seen for topic in self.topics
        )
        return "growth" if has_grown else "time"

    def _note(self) -> None:
        """Remember what the watcher knows, before the caller looks at the log."""
        self._woken = False
        self._seen = self._watcher.version
        self._seen_look = self._watcher.looks
        if self.key is not None and self.key in self._watcher.states:
            self._seen_state = self._watcher.states[self.key].state


class LogWatcher:
    """The watcher of a program without an event loop. Each of its waiters polls for itself."""

    def __init__(
        self, run: Callable[[Call[Any]], Any], maintain: Callable[[], None], schedule: MaintenanceSchedule
    ) -> None:
        self.run = run
        self.maintain = maintain

    def waiter(
        self, *, queue: str | None = None, cursor: str | None = None, topics: Sequence[str] | None = None
    ) -> LogWaiter:
        """A place to wait for the log. A wait for a queue or cursor ends after BLOCKING_LOOK_SECONDS."""
        return LogWaiter(self)

    def hint(self) -> None:
        """Nothing to do: a waiter polls by itself."""

    def stop(self) -> None:
        """Nothing to stop."""


class LogWaiter:
    """Waits for the log, again and again. One thread at a time may use it."""

    __slots__ = ("_known", "_watcher")

    def __init__(self, watcher: LogWatcher) -> None:
        self._watcher = watcher
        self._known: _Known | None = None

    def wait(self, seconds: float) -> Wake:
        """Wait until the log has grown since the last wait ended, or until the time has passed."""
        started = time.monotonic()
        deadline = started + min(seconds, BLOCKING_LOOK_SECONDS)
        pause = MIN_POLL_SECONDS
        # The first poll also reads the epoch: it may have changed since the last wait.
        is_first = True
        while True:
            try:
                changed = self._poll(with_epoch=is_first)
            except (HeadwaterError, psycopg.Error):
                # The caller looks at the log with its own patience.
                self._known, changed = None, True
                time.sleep(pause)
            is_first = False
            if changed:
                return Wake("growth", time.monotonic() - started)
            left = deadline - time.monotonic()
            if left <= 0:
                return Wake("time", time.monotonic() - started)
            self._watcher.maintain()
            time.sleep(min(pause, left))
            pause = min(pause * 2, MAX_POLL_SECONDS)

    def _poll(self, *, with_epoch: bool) -> bool:
        known = self._known
        seen_head = None if known is None or known.bounds or with_epoch else known.head
        growth = self._watcher.run(log_calls.growth(seen_head, 0, ()))
        if growth is None:
            return False
        self._known = _known_from(growth)
        return self._known != known
