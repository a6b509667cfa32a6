"""Batches of records in memory, as they were just written or read: so many bytes, the oldest go first. Pure.

Nothing here is true by itself. Whoever takes batches from here asks Postgres whether the last record of each is still
the one that was published when the batch says. Since a lane is written in the order of its offsets, and loses from its
end (a crash, a failover) or from its beginning (retention) only, then so are the others of the batch. All that was kept
in one epoch of the log is dropped when another is seen: offsets may then be issued again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Container
from typing import Final, NamedTuple

from headwater.calls.kafka import Lane

MAX_BATCH_BYTES: Final = 4 * 1024 * 1024
"""One larger is not kept: it would push out too many others."""
MAX_BATCHES: Final = 100
"""How many are taken at a time: each is asked about."""
BESIDES_BYTES: Final = 500
"""What a batch takes beside its records, so that many small ones count as what they are."""


class Batch(NamedTuple):
    """The records of a lane from `first` up to, not including, `end`.

    The last of them was published at `published_ms`, and has a position above `after_position`.
    """

    first: int
    end: int
    published_ms: int
    after_position: int
    codec: int
    by_log_time: bool
    records: bytes


class Kept:
    """What a process remembers of lanes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.epoch = -1
        self._batches: OrderedDict[tuple[Lane, int], Batch] = OrderedDict()
        self._firsts: dict[Lane, list[int]] = {}

    def enter_epoch(self, epoch: int) -> None:
        """Drop all that was kept in earlier epochs, if this is a later one."""
        if epoch > self.epoch:
            self.epoch = epoch
            for lane in list(self._firsts):
                self.forget(lane)

    def keep(self, lane: Lane, batch: Batch, *, epoch: int) -> None:
        """Keep a batch that was written or read while the log was in an epoch."""
        self.enter_epoch(epoch)
        if epoch < self.epoch:
            return
        # Of two from the same offset the newer: the other may be of a past that is no more.
        self._drop(lane, batch.first)
        size = len(batch.records) + BESIDES_BYTES
        if len(batch.records) > MAX_BATCH_BYTES or size > self.max_bytes:
            return
        self._batches[lane, batch.first] = batch
        firsts = self._firsts.setdefault(lane, [])
        firsts.insert(bisect_left(firsts, batch.first), batch.first)
        self.bytes += size
        while self.bytes > self.max_bytes:
            oldest, first = next(iter(self._batches))
            self._drop(oldest, first)

    def batches(
        self, lane: Lane, offset: int, *, max_bytes: int, codecs: Container[int], by_log_time: bool
    ) -> list[Batch]:
        """The batches from the one that has an offset on, each beginning where the one before ends.

        The first comes whatever its size; none that the reader cannot take.
        """
        firsts = self._firsts.get(lane)
        if not firsts:
            return []
        found: list[Batch] = []
        place = bisect_right(firsts, offset) - 1
        first: int | None = firsts[place] if place >= 0 else None
        left = max_bytes
        while first is not None and len(found) < MAX_BATCHES:
            batch = self._batches.get((lane, first))
            if batch is None or batch.end <= offset or batch.codec not in codecs or batch.by_log_time != by_log_time:
                break
            left -= len(batch.records)
            if left < 0 and found:
                break
            found.append(batch)
            first = batch.end
        return found

    def forget(self, lane: Lane) -> None:
        """Nothing is remembered of a lane any more."""
        for first in list(self._firsts.get(lane, ())):
            self._drop(lane, first)

    def _drop(self, lane: Lane, first: int) -> None:
        batch = self._batches.pop((lane, first), None)
        if batch is None:
            return
        self.bytes -= len(batch.records) + BESIDES_BYTES
        firsts = self._firsts[lane]
        del firsts[bisect_left(firsts, first)]
        if not firsts:
            del self._firsts[lane]
