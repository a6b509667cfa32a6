"""Leader epochs: the leader epoch of every partition is the epoch of the log. No I/O.

The epoch changes when positions, and therefore offsets, may be assigned again: after a crash of Postgres, the promotion
of a standby or a restore. Requests carry the epoch that the client knows, record batches the epoch of their events. A
client with an older epoch gets an error, refreshes its metadata, asks where its epoch ends (OffsetForLeaderEpoch), and
truncates its offset to that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from headwater.calls.kafka import Epoch
from headwater.servers.kafka.wire import ErrorCode


def epoch_error(requested: int, present: int) -> ErrorCode | None:
    """The error for a client that knows the epoch `requested`, if any. Below 0: the client knows none."""
    if requested < 0 or requested == present:
        return None
    return ErrorCode.fenced_leader_epoch if requested < present else ErrorCode.unknown_leader_epoch


class EpochHistory:
    """The epochs of the log as of the present one. Without a list, all events belong to the present epoch."""

    def __init__(self, present: int, epochs: Sequence[Epoch] = ()) -> None:
        self.present = present
        self.complete = bool(epochs)
        known = [one for one in epochs if one.number <= present] or [Epoch(present, 0)]
        self._numbers = [one.number for one in known]
        # Events before the first epoch count as part of it. Both lists are ascending.
        self._starts = [one.began_after + 1 for one in known]

    def of(self, position: int) -> int:
        """The epoch of the event at a position."""
        return self._numbers[max(bisect_right(self._starts, position) - 1, 0)]

    def cuts(self, positions: Sequence[int]) -> list[int]:
        """The indexes in an ascending list of positions at which a later epoch begins."""
        if not positions or self.of(positions[0]) == self.of(positions[-1]):
            return []
        indexes = [bisect_right(positions, start - 1) for start in self._starts]
        return sorted({index for index in indexes if 0 < index < len(positions)})
