"""Leader/follower batching: the first waiter becomes the leader and works for all, among threads or asyncio tasks.

When the leader releases, it wakes the waiters whose result is ready and makes the first of the others the next leader.
A waiter is only woken if it is done or the leader: waking all would cost more than the work. There is no background
thread or task that could die.

`SplitTuner` decides whether a group is sent as a whole or in two overlapping halves. `group_commit` and `live_reader`
use this module.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

# The chosen way is used for KEEP_GROUPS groups, then the other one is tried for TRY_GROUPS groups.
KEEP_GROUPS = 300
TRY_GROUPS = 6
MAX_GROUP_SECONDS = 0.1
SMOOTHING = 0.3
# Two halves cost one commit more than a whole group: they must save at least a tenth of the time.
WORTH_IT = 0.9


def _always() -> bool:
    return True


def _never() -> bool:
    return False


class _Waiter:
    """A thread that waits until it is `done` or, if it wants to lead, until it is the leader."""

    __slots__ = ("done", "is_leader", "sleep", "wants_lead")

    def __init__(self, done: Callable[[], bool], wants_lead: bool) -> None:
        self.done = done
        self.wants_lead = wants_lead
        self.is_leader = False
        # Held while the thread is to sleep.
        self.sleep = threading.Lock()
        self.sleep.acquire()


class LeaderLock:
    """A lock whose holder works for all waiting threads."""

    def __init__(self, enough: Callable[[], bool] | None = None, most: Callable[[], int] | None = None) -> None:
        # It is not predictable when other threads run: the lock never waits for more of them, and has one leader.
        self._lock = threading.Lock()
        self._taken = False
        self._waiters: list[_Waiter] = []

    def acquire_unless(self, done: Callable[[], bool], seconds: float, wants: Callable[[], bool] = _always) -> bool:
        """Wait to become the leader. Returns False if `done` became true first, or after `seconds`."""
        return self._wait(done, seconds, wants_lead=True)

    def wait_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait, without becoming the leader, until the work of others makes `done` true. Returns False after
        `seconds`."""
        self._wait(done, seconds, wants_lead=False)
        return done()

    def release(self) -> None:
        """Release leadership, or pass it to the next waiter."""
        with self._lock:
            awake, asleep = [], []
            self._taken = False
            for waiter in self._waiters:
                if waiter.done():
                    awake.append(waiter)
                elif waiter.wants_lead and not self._taken:
                    self._taken = waiter.is_leader = True
                    # First, so that the next work starts before the finished waiters run.
                    awake.insert(0, waiter)
                else:
                    asleep.append(waiter)
            self._waiters = asleep
        for waiter in awake:
            waiter.sleep.release()

    def _wait(self, done: Callable[[], bool], seconds: float, *, wants_lead: bool) -> bool:
        with self._lock:
            if done():
                return False
            if wants_lead and not self._taken:
                self._taken = True
                return True
            waiter = _Waiter(done, wants_lead)
            self._waiters.append(waiter)
        try:
            if waiter.sleep.acquire(timeout=seconds):
                return waiter.is_leader
        except BaseException:
            if not self._left(waiter):
                self.release()
            raise
        return not self._left(waiter)

    def _left(self, waiter: _Waiter) -> bool:
        """Stop waiting; False if it has become the leader meanwhile."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            return not waiter.is_leader


class _TaskWaiter:
    """The same for a task."""

    __slots__ = ("done", "is_leader", "until", "wants", "woken")

    def __init__(
        self, done: Callable[[], bool], until: float, wants: Callable[[], bool], woken: asyncio.Future[None]
    ) -> None:
        self.done = done
        self.until = until
        self.wants = wants
        self.is_leader = False
        self.woken = woken


class AsyncLeaderLock:
    """The same for tasks, with up to `most()` leaders at a time.

    While `enough()` is false, the lock is not passed on until the tasks that can run now have run: if they add nothing,
    the first waiter becomes the leader all the same. So waiters that were served as one group are not served one by one
    afterwards.
    """

    def __init__(self, enough: Callable[[], bool] = _always, most: Callable[[], int] = lambda: 1) -> None:
        self._enough = enough
        self._most = most
        self._taken = 0
        self._waiters: list[_TaskWaiter] = []
        # One timer for all waiters: most wait equally long, and few until the end.
        self._timer: asyncio.TimerHandle | None = None

    def acquire_unless(
        self, done: Callable[[], bool], seconds: float, wants: Callable[[], bool] = _always
    ) -> Awaitable[bool]:
        """Wait to become the leader. Returns False if `done` became true first, or after `seconds`.

        A waiter only becomes the leader if `wants()` is still true: another leader may already be doing its work.
        """
        return self._wait(done, seconds, wants)

    async def wait_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait, without becoming the leader, until the work of others makes `done` true. Returns False after
        `seconds`."""
        await self._wait(done, seconds, _never)
        return done()

    def release(self) -> None:
        """Release leadership, or pass it to the next waiter."""
        self._taken -= 1
        self._wake(hand_on=self._enough())

    def _wake(self, *, hand_on: bool) -> None:
        awake, asleep = [], []
        handed_on = not hand_on
        for waiter in self._waiters:
            if waiter.done():
                awake.append(waiter)
            elif not handed_on and self._taken < self._most() and waiter.wants():
                handed_on = waiter.is_leader = True
                self._taken += 1
                # First, so that the next work starts before the finished waiters run.
                awake.insert(0, waiter)
            else:
                asleep.append(waiter)
        self._waiters = asleep
        for waiter in awake:
            if not waiter.woken.done():
                waiter.woken.set_result(None)
        if asleep and not hand_on:
            # After the woken tasks, which may be what the lock waits for.
            asleep[0].woken.get_loop().call_soon(self._hand_on)

    def _hand_on(self) -> None:
        if self._taken < self._most() and self._waiters:
            self._wake(hand_on=True)

    async def _wait(self, done: Callable[[], bool], seconds: float, wants: Callable[[], bool]) -> bool:
        if done():
            return False
        loop = asyncio.get_running_loop()
        if self._taken < self._most() and wants():
            if self._enough():
                self._taken += 1
                return True
            loop.call_soon(self._hand_on)
        waiter = _TaskWaiter(done, loop.time() + seconds, wants, loop.create_future())
        self._waiters.append(waiter)
        if self._timer is None or waiter.until < self._timer.when():
            self._set_timer(loop, waiter.until)
        try:
            await waiter.woken
        except BaseException:
            if waiter.is_leader:
                self.release()
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            if not self._waiters and self._timer is not None:
                self._timer.cancel()
                self._timer = None
        return waiter.is_leader

    def _set_timer(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(when, self._end_waits, loop)

    def _end_waits(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the waiters whose time is over."""
        self._timer = None
        waiting = [waiter for waiter in self._waiters if not waiter.woken.done()]
        for waiter in waiting:
            if waiter.until <= loop.time():
                waiter.woken.set_result(None)
        if left := [waiter.until for waiter in waiting if not waiter.woken.done()]:
            self._set_timer(loop, min(left))


class SplitTuner:
    """Chooses how a group is sent: as a whole, or one half while the other half gets ready.

    Which way is faster depends on the number of waiters, their work, and the server. So both are tried from time to
    time, and the faster one is used; the whole group if the difference is small.
    """

    def __init__(self) -> None:
        self.in_halves = False
        self._trying = False
        self._groups = 0
        self._ended = 0.0
        # The recent seconds per append, for either way.
        self._seconds = {False: 0.0, True: 0.0}

    def note(self, size: int, now: float, *, alone: bool = False) -> None:
        """Record a group that has just ended."""
        seconds, self._ended = now - self._ended, now
        if alone or seconds > MAX_GROUP_SECONDS:
            # There was only one waiter, or none for a while.
            return
        self._groups += 1
        if self._groups > 1:
            # The first group of a way began in the other way.
            known = self._seconds[self.in_halves] or seconds / size
            self._seconds[self.in_halves] = known + (seconds / size - known) * SMOOTHING
        if self._groups == (TRY_GROUPS if self._trying else KEEP_GROUPS):
            self._trying = not self._trying
            self.in_halves = (
                not self.in_halves if self._trying else self._seconds[True] < self._seconds[False] * WORTH_IT
            )
            self._groups = 0
