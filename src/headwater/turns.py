"""One works for all while the others wait for what it brings: among threads, and among the tasks of an event loop.

Who gives the turn back wakes those who have what they waited for, and hands the turn to the first of the others. Nobody
is woken in vain: with many who wait, that would cost more than the work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


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

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._parked: list[_Parked] = []

    def take_unless(self, done: Callable[[], bool], seconds: float) -> bool:
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

    __slots__ = ("done", "has_turn", "wants_turn", "woken")

    def __init__(self, done: Callable[[], bool], wants_turn: bool) -> None:
        self.done = done
        self.wants_turn = wants_turn
        self.has_turn = False
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class AsyncTurn:
    """The same of one task at a time."""

    def __init__(self) -> None:
        self._taken = False
        self._parked: list[_ParkedTask] = []

    async def take_unless(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait for the turn and take it. False: `done` became true first, or the time is over."""
        return await self._wait(done, seconds, wants_turn=True)

    async def wait_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait, without the turn, until what others bring makes `done` true. False: the time is over."""
        await self._wait(done, seconds, wants_turn=False)
        return done()

    def give(self) -> None:
        """Give the turn back, or rather on."""
        asleep = []
        self._taken = False
        for parked in self._parked:
            if parked.done():
                pass
            elif parked.wants_turn and not self._taken:
                self._taken = parked.has_turn = True
            else:
                asleep.append(parked)
                continue
            if not parked.woken.done():
                parked.woken.set_result(None)
        self._parked = asleep

    async def _wait(self, done: Callable[[], bool], seconds: float, *, wants_turn: bool) -> bool:
        if done():
            return False
        if wants_turn and not self._taken:
            self._taken = True
            return True
        parked = _ParkedTask(done, wants_turn)
        self._parked.append(parked)
        try:
            async with asyncio.timeout(seconds):
                await parked.woken
        except TimeoutError:
            pass
        except BaseException:
            if parked.has_turn:
                self.give()
            raise
        finally:
            if parked in self._parked:
                self._parked.remove(parked)
        return parked.has_turn
