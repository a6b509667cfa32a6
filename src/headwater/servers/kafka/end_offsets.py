"""Waiting for partitions to grow (long polling of Fetch).

Appends of this process wake waiters directly (`advance`). Appends of other processes are found by `watch`, which polls
the state of the log while there are waiters, and reads the end offsets when the head has moved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import psycopg

from headwater.aio import AsyncHeadwater
from headwater.calls import kafka as calls
from headwater.calls import log as log_calls
from headwater.calls.kafka import TopicPartition
from headwater.errors import HeadwaterError
from headwater.observability.metrics import ERROR, logger

MIN_POLL_SECONDS: Final = 0.004
MAX_POLL_SECONDS: Final = 0.05


class _Waiter:
    def __init__(self, seen: Mapping[TopicPartition, int]) -> None:
        self.seen = seen
        self.changed = asyncio.Event()


class EndOffsetWatcher:
    """Wakes waiting fetches when the end offset of one of their partitions changes."""

    def __init__(self, log: AsyncHeadwater) -> None:
        self._log = log
        self._waiters: dict[TopicPartition, set[_Waiter]] = {}
        self._has_waiters = asyncio.Event()
        self._poll_requested = False

    async def wait(self, seen: Mapping[TopicPartition, int], *, seconds: float) -> bool:
        """Wait until the end offset of a partition or the epoch changes. False: the timeout has passed."""
        if not seen or seconds <= 0:
            await asyncio.sleep(max(seconds, 0))
            return False
        waiter = _Waiter(seen)
        for topic_partition in seen:
            self._waiters.setdefault(topic_partition, set()).add(waiter)
        # Poll once more: an append between the read of `seen` and this line would otherwise go unnoticed.
        self._poll_requested = True
        self._has_waiters.set()
        try:
            async with asyncio.timeout(seconds):
                await waiter.changed.wait()
        except TimeoutError:
            return False
        finally:
            for topic_partition in seen:
                self._waiters[topic_partition].discard(waiter)
                if not self._waiters[topic_partition]:
                    del self._waiters[topic_partition]
        return True

    def advance(self, topic_partition: TopicPartition, end: int) -> None:
        """Wake the waiters of a partition that now ends at `end`."""
        for waiter in self._waiters.get(topic_partition, ()):
            if waiter.seen[topic_partition] < end:
                waiter.changed.set()

    async def watch(self) -> None:
        """Poll for appends of other processes. Runs until it is cancelled."""
        head = epoch = -1
        unstable = False
        pause = MIN_POLL_SECONDS
        while True:
            if not self._waiters:
                self._has_waiters.clear()
                await self._has_waiters.wait()
                pause = MIN_POLL_SECONDS
            try:
                # Read the state before the end offsets: all that is stable now is then visible in them.
                state = await self._log.run(log_calls.log_state())
                if state.epoch != epoch:
                    # The same end offset may now belong to other events: wake all waiters.
                    epoch = state.epoch
                    self._wake_all()
                if state.head != head or unstable or self._poll_requested:
                    pause = MIN_POLL_SECONDS if state.head != head else pause
                    head = state.head
                    unstable = state.stable < state.head
                    await self._read_ends()
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("end offsets of partitions not read", extra={ERROR: str(error)})
                unstable = True
                pause = MAX_POLL_SECONDS
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, MAX_POLL_SECONDS)

    def _wake_all(self) -> None:
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.changed.set()

    async def _read_ends(self) -> None:
        self._poll_requested = False
        topic_partitions = list(self._waiters)
        if topic_partitions:
            for topic_partition, bounds in (await self._log.run(calls.kafka_bounds(topic_partitions))).items():
                for waiter in self._waiters.get(topic_partition, ()):
                    # Also if it is lower: after a crash, events that were read may be lost.
                    if waiter.seen[topic_partition] != bounds.end:
                        waiter.changed.set()
