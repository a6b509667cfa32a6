"""Waiting for partitions to grow (long polling of Fetch).

Appends of this process wake waiters directly (`advance`). Appends of other processes are found by `watch`: while
there are waiters, it reads the end offsets whenever the watcher of the process sees the log grow.
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

# The end offsets are read at most this often, and at least every LOOK_SECONDS.
MIN_POLL_SECONDS: Final = 0.004
LOOK_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.05


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
        self._growth = log.watcher.waiter()

    async def wait(self, seen: Mapping[TopicPartition, int], *, seconds: float) -> bool:
        """Wait until the end offset of a partition or the epoch changes. False: the timeout has passed."""
        if not seen or seconds <= 0:
            await asyncio.sleep(max(seconds, 0))
            return False
        waiter = _Waiter(seen)
        for topic_partition in seen:
            self._waiters.setdefault(topic_partition, set()).add(waiter)
        # Poll once more: an append between the read of `seen` and this line would otherwise go unnoticed.
        self._growth.wake()
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
        """Find appends of other processes. Runs until it is cancelled."""
        epoch = -1
        while True:
            if not self._waiters:
                self._has_waiters.clear()
                await self._has_waiters.wait()
            failed = False
            try:
                # Read the state before the end offsets: all that is stable now is then visible in them.
                state = await self._log.run(log_calls.log_state())
                if state.epoch != epoch:
                    # The same end offset may now belong to other events: wake all waiters.
                    epoch = state.epoch
                    self._wake_all()
                await self._read_ends()
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("end offsets of partitions not read", extra={ERROR: str(error)})
                failed = True
            await asyncio.sleep(RETRY_SECONDS if failed else MIN_POLL_SECONDS)
            if not failed:
                await self._growth.wait(LOOK_SECONDS)

    def _wake_all(self) -> None:
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.changed.set()

    async def _read_ends(self) -> None:
        topic_partitions = list(self._waiters)
        if topic_partitions:
            for topic_partition, bounds in (await self._log.run(calls.kafka_bounds(topic_partitions))).items():
                for waiter in self._waiters.get(topic_partition, ()):
                    # Also if it is lower: after a crash, events that were read may be lost.
                    if waiter.seen[topic_partition] != bounds.end:
                        waiter.changed.set()
