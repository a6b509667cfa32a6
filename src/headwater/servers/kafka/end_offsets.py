"""Who waits for the end of which lane to move, and how it is noticed that it did."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import psycopg

from headwater import calls as log_calls
from headwater.aio import AsyncHeadwater
from headwater.calls import kafka as calls
from headwater.calls.kafka import Lane
from headwater.errors import HeadwaterError
from headwater.observability.metrics import ERROR, logger

SHORTEST_POLL_SECONDS: Final = 0.004
LONGEST_POLL_SECONDS: Final = 0.05


class _Waiter:
    def __init__(self, seen: Mapping[Lane, int]) -> None:
        self.seen = seen
        self.moved = asyncio.Event()


class Tails:
    """Waits for lanes to grow. What this process appends is told at once; what others do is found by polling."""

    def __init__(self, log: AsyncHeadwater) -> None:
        self._log = log
        self._waiters: dict[Lane, set[_Waiter]] = {}
        self._somebody = asyncio.Event()
        self._asked_anew = False

    async def wait(self, seen: Mapping[Lane, int], *, seconds: float) -> bool:
        """Until a lane ends elsewhere than it was seen to, or the log is in another epoch; False: the time is up."""
        if not seen or seconds <= 0:
            await asyncio.sleep(max(seconds, 0))
            return False
        waiter = _Waiter(seen)
        for lane in seen:
            self._waiters.setdefault(lane, set()).add(waiter)
        # What was appended between the look and this line would otherwise be noticed with the next event only.
        self._asked_anew = True
        self._somebody.set()
        try:
            async with asyncio.timeout(seconds):
                await waiter.moved.wait()
        except TimeoutError:
            return False
        finally:
            for lane in seen:
                self._waiters[lane].discard(waiter)
                if not self._waiters[lane]:
                    del self._waiters[lane]
        return True

    def advance(self, lane: Lane, end: int) -> None:
        """Tell those who wait that a lane ends here now."""
        for waiter in self._waiters.get(lane, ()):
            if waiter.seen[lane] < end:
                waiter.moved.set()

    async def watch(self) -> None:
        """Look after those who wait, for ever."""
        drawn = epoch = -1
        unsettled = False
        pause = SHORTEST_POLL_SECONDS
        while True:
            if not self._waiters:
                self._somebody.clear()
                await self._somebody.wait()
                pause = SHORTEST_POLL_SECONDS
            try:
                # The state before the ends: what is settled now was committed, so the ends show it.
                state = await self._log.run(log_calls.log_state(), patience_seconds=0)
                if state.epoch != epoch:
                    # Ends may be where they were, of other events: all who wait look again.
                    epoch = state.epoch
                    self._wake_all()
                if state.drawn != drawn or unsettled or self._asked_anew:
                    pause = SHORTEST_POLL_SECONDS if state.drawn != drawn else pause
                    drawn = state.drawn
                    unsettled = state.settled < state.drawn
                    await self._look()
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("the ends of lanes are not known", extra={ERROR: str(error)})
                unsettled = True
                pause = LONGEST_POLL_SECONDS
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, LONGEST_POLL_SECONDS)

    def _wake_all(self) -> None:
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.moved.set()

    async def _look(self) -> None:
        self._asked_anew = False
        lanes = list(self._waiters)
        if lanes:
            for lane, bounds in (await self._log.run(calls.kafka_bounds(lanes), patience_seconds=0)).items():
                for waiter in self._waiters.get(lane, ()):
                    # Also if it is less: a crash can take back what was seen.
                    if waiter.seen[lane] != bounds.end:
                        waiter.moved.set()
