"""One works for all while the others wait for what it brings: among threads, and among the tasks of an event loop.

Who gives the turn back wakes those who have what they waited for, and hands the turn to the first of the others. Nobody
is woken in vain: with many who wait, that would cost more than the work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

# A pace is kept for so many groups, and the other one tried for so many.
KEEP_GROUPS = 300
TRY_GROUPS = 6
LONGEST_GROUP_SECONDS = 0.1
SMOOTHING = 0.3
# Two halves cost a commit more than all at once: only for a tenth of the time is that worth it.
WORTH_IT = 0.9


def _always() -> bool:
    return True


def _never() -> bool:
    return False


class _Parked:
    """A thread that waits until it is `done`, or if it wants the turn, until it has it."""

    __slots__ = ("done", "has_turn", "sleep", "wants_turn")

    def __init__(self, done: Callable[[], bool], wants_turn: bool) -> None:
        self.done = done
        self.wants_turn = wants_turn
        self.has_turn = False
        # Held as long as the thread is to sleep.
        self.sleep = threading.Lock()
        self.sleep.acquire()


class Turn:
    """The right to work for all, of one thread at a time. No thread is needed that does nothing else."""

    def __init__(self, enough: Callable[[], bool] | None = None, most: Callable[[], int] | None = None) -> None:
        # Nobody knows when other threads get to run: the turn never waits for enough of them, and is one.
        self._lock = threading.Lock()
        self._taken = False
        self._parked: list[_Parked] = []

    def take_unless(self, done: Callable[[], bool], seconds: float, wants: Callable[[], bool] = _always) -> bool:
        """Wait for the turn and take it. False: `done` became true first, or the time is over."""
        return self._wait(done, seconds, wants_turn=True)

    def wait_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait, without the turn, until what others bring makes `done` true. False: the time is over."""
        self._wait(done, seconds, wants_turn=False)
        return done()

    def give(self) -> None:
        """Give the turn back, or rather on."""
        with self._lock:
            awake, asleep = [], []
            self._taken = False
            for parked in self._parked:
                if parked.done():
                    awake.append(parked)
                elif parked.wants_turn and not self._taken:
                    self._taken = parked.has_turn = True
                    # First, so that the next work begins before those who are done get going.
                    awake.insert(0, parked)
                else:
                    asleep.append(parked)
            self._parked = asleep
        for parked in awake:
            parked.sleep.release()

    def _wait(self, done: Callable[[], bool], seconds: float, *, wants_turn: bool) -> bool:
        with self._lock:
            if done():
                return False
            if wants_turn and not self._taken:
                self._taken = True
                return True
            parked = _Parked(done, wants_turn)
            self._parked.append(parked)
        try:
            if parked.sleep.acquire(timeout=seconds):
                return parked.has_turn
        except BaseException:
            if not self._left(parked):
                self.give()
            raise
        return not self._left(parked)

    def _left(self, parked: _Parked) -> bool:
        """Stop waiting; False if it has got the turn meanwhile."""
        with self._lock:
            if parked in self._parked:
                self._parked.remove(parked)
            return not parked.has_turn


class _ParkedTask:
    """The same of a task."""

    __slots__ = ("done", "has_turn", "until", "wants", "woken")

    def __init__(
        self, done: Callable[[], bool], until: float, wants: Callable[[], bool], woken: asyncio.Future[None]
    ) -> None:
        self.done = done
        self.until = until
        self.wants = wants
        self.has_turn = False
        self.woken = woken


class AsyncTurn:
    """The same of one task at a time, or of as many as `most` says: there are so many turns then.

    While `enough` is false the turn waits for more to come, but only for tasks that can run now: if they bring nothing,
    the first that waits gets it all the same. So those who were served together are not served one by one from then on.
    """

    def __init__(self, enough: Callable[[], bool] = _always, most: Callable[[], int] = lambda: 1) -> None:
        self._enough = enough
        self._most = most
        self._taken = 0
        self._parked: list[_ParkedTask] = []
        # One for all who wait: most wait equally long, and nearly none to the end.
        self._timer: asyncio.TimerHandle | None = None

    def take_unless(
        self, done: Callable[[], bool], seconds: float, wants: Callable[[], bool] = _always
    ) -> Awaitable[bool]:
        """Wait for the turn and take it. False: `done` became true first, or the time is over.

        It is handed on only to who `wants` it by then: what one waits for may be under way in the turn of another.
        """
        return self._wait(done, seconds, wants)

    async def wait_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait, without the turn, until what others bring makes `done` true. False: the time is over."""
        await self._wait(done, seconds, _never)
        return done()

    def give(self) -> None:
        """Give the turn back, or rather on."""
        self._taken -= 1
        self._wake(hand_on=self._enough())

    def _wake(self, *, hand_on: bool) -> None:
        awake, asleep = [], []
        handed_on = not hand_on
        for parked in self._parked:
            if parked.done():
                awake.append(parked)
            elif not handed_on and self._taken < self._most() and parked.wants():
                handed_on = parked.has_turn = True
                self._taken += 1
                # First, so that the next work begins before those who are done get going.
                awake.insert(0, parked)
            else:
                asleep.append(parked)
        self._parked = asleep
        for parked in awake:
            if not parked.woken.done():
                parked.woken.set_result(None)
        if asleep and not hand_on:
            # Behind those who are woken: they are what the turn waits for.
            asleep[0].woken.get_loop().call_soon(self._hand_on)

    def _hand_on(self) -> None:
        if self._taken < self._most() and self._parked:
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
        parked = _ParkedTask(done, loop.time() + seconds, wants, loop.create_future())
        self._parked.append(parked)
        if self._timer is None or parked.until < self._timer.when():
            self._set_timer(loop, parked.until)
        try:
            await parked.woken
        except BaseException:
            if parked.has_turn:
                self.give()
            raise
        finally:
            if parked in self._parked:
                self._parked.remove(parked)
            if not self._parked and self._timer is not None:
                self._timer.cancel()
                self._timer = None
        return parked.has_turn

    def _set_timer(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(when, self._end_waits, loop)

    def _end_waits(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake those whose time is over."""
        self._timer = None
        waiting = [parked for parked in self._parked if not parked.woken.done()]
        for parked in waiting:
            if parked.until <= loop.time():
                parked.woken.set_result(None)
        if left := [parked.until for parked in waiting if not parked.woken.done()]:
            self._set_timer(loop, min(left))


class Pace:
    """How those who are served together go out: all at once, or one half while the other half gets ready.

    Which is faster depends on how many they are, on what they bring, and on who serves them. So both are tried now and
    then, and the faster one is kept to; all at once, if it makes little difference.
    """

    def __init__(self) -> None:
        self.in_halves = False
        self._trying = False
        self._groups = 0
        self._ended = 0.0
        # What each of a group took of late, either way.
        self._seconds = {False: 0.0, True: 0.0}

    def note(self, size: int, now: float, *, alone: bool = False) -> None:
        """Count a group that has just ended."""
        seconds, self._ended = now - self._ended, now
        if alone or seconds > LONGEST_GROUP_SECONDS:
            # Nobody else was there, or nobody at all for a while.
            return
        self._groups += 1
        if self._groups > 1:
            # The first of a way began in the other.
            known = self._seconds[self.in_halves] or seconds / size
            self._seconds[self.in_halves] = known + (seconds / size - known) * SMOOTHING
        if self._groups == (TRY_GROUPS if self._trying else KEEP_GROUPS):
            self._trying = not self._trying
            self.in_halves = (
                not self.in_halves if self._trying else self._seconds[True] < self._seconds[False] * WORTH_IT
            )
            self._groups = 0
