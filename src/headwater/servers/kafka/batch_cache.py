"""In-memory cache of record batches that were just written or read. FIFO, bounded by bytes. Pure: no I/O.

A cached batch must be validated before use: the reader asks Postgres whether the last record of the batch still has the
publication time that the batch says. A partition is written in the order of its offsets and loses records only at its
end (crash, failover) or at its beginning (retention), so if the last record of a batch is valid, all of them are.
Compacted topics lose records in the middle and are never cached. When the log enters a new epoch, offsets may be
assigned again, so the whole cache is dropped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Container
from typing import Final, NamedTuple

from headwater.calls.kafka import TopicPartition

MAX_BATCH_BYTES: Final = 4 * 1024 * 1024
"""Larger batches are not cached: they would evict too many others."""
MAX_BATCHES: Final = 100
"""Maximum batches of one lookup: each is validated in Postgres."""
BATCH_OVERHEAD_BYTES: Final = 500
"""Memory of a batch besides its records, so that many small batches are counted correctly."""


class CachedBatch(NamedTuple):
    """The records of a partition from `first` up to, not including, `end`.

    The last record was published at `published_ms` and has a position above `after_position`.
    """

    first: int
    end: int
    published_ms: int
    after_position: int
    codec: int
    by_log_time: bool
    records: bytes


class BatchCache:
    """The cached batches of all partitions in this process."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.epoch = -1
        self._batches: OrderedDict[tuple[TopicPartition, int], CachedBatch] = OrderedDict()
        self._firsts: dict[TopicPartition, list[int]] = {}

    def enter_epoch(self, epoch: int) -> None:
        """Drop the batches of earlier epochs if this is a later one."""
        if epoch > self.epoch:
            self.epoch = epoch
            for topic_partition in list(self._firsts):
                self.forget(topic_partition)

    def add(self, topic_partition: TopicPartition, batch: CachedBatch, *, epoch: int) -> None:
        """Add a batch that was written or read in an epoch of the log."""
        self.enter_epoch(epoch)
        if epoch < self.epoch:
            return
        # Of two batches with the same first offset the newer wins: the other may be from a lost history.
        self._drop(topic_partition, batch.first)
        size = len(batch.records) + BATCH_OVERHEAD_BYTES
        if len(batch.records) > MAX_BATCH_BYTES or size > self.max_bytes:
            return
        self._batches[topic_partition, batch.first] = batch
        firsts = self._firsts.setdefault(topic_partition, [])
        firsts.insert(bisect_left(firsts, batch.first), batch.first)
        self.bytes += size
        while self.bytes > self.max_bytes:
            oldest, first = next(iter(self._batches))
            self._drop(oldest, first)

    def batches(
        self, topic_partition: TopicPartition, offset: int, *, max_bytes: int, codecs: Container[int], by_log_time: bool
    ) -> list[CachedBatch]:
        """Consecutive batches, starting with the one that contains `offset`.

        The first is returned whatever its size. Batches with another codec or timestamp type end the list.
        """
        firsts = self._firsts.get(topic_partition)
        if not firsts:
            return []
        found: list[CachedBatch] = []
        index = bisect_right(firsts, offset) - 1
        first: int | None = firsts[index] if index >= 0 else None
        left = max_bytes
        while first is not None and len(found) < MAX_BATCHES:
            batch = self._batches.get((topic_partition, first))
            if batch is None or batch.end <= offset or batch.codec not in codecs or batch.by_log_time != by_log_time:
                break
            left -= len(batch.records)
            if left < 0 and found:
                break
            found.append(batch)
            first = batch.end
        return found

    def forget(self, topic_partition: TopicPartition) -> None:
        """Drop all batches of a partition."""
        for first in list(self._firsts.get(topic_partition, ())):
            self._drop(topic_partition, first)

    def _drop(self, topic_partition: TopicPartition, first: int) -> None:
        batch = self._batches.pop((topic_partition, first), None)
        if batch is None:
            return
        self.bytes -= len(batch.records) + BATCH_OVERHEAD_BYTES
        firsts = self._firsts[topic_partition]
        del firsts[bisect_left(firsts, first)]
        if not firsts:
            del self._firsts[topic_partition]
