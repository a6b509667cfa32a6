"""Leader epochs: every partition's leader epoch is the epoch of the log. Pure.

The epoch changes when positions, and with them offsets, may be issued again: after a crash of Postgres, the promotion
of a standby, a restore. Every request carries the epoch that its client knows, every batch of records that of its
events. A client that knows an older epoch is refused, asks for metadata, asks where its epoch ends
(OffsetForLeaderEpoch), and goes back to there if it is beyond.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from headwater.calls.kafka import Epoch
from headwater.servers.kafka.wire import ErrorCode


def epoch_refused(asked: int, present: int) -> ErrorCode | None:
    """Why a request of a client that knows this epoch (below 0: none) is refused, if it is."""
    if asked < 0 or asked == present:
        return None
    return ErrorCode.fenced_leader_epoch if asked < present else ErrorCode.unknown_leader_epoch


class Epochs:
    """The epochs of the log as they were in one of them. Without a list of them, all events are of that one."""

    def __init__(self, present: int, epochs: Sequence[Epoch] = ()) -> None:
        self.present = present
        self.complete = bool(epochs)
        known = [one for one in epochs if one.number <= present] or [Epoch(present, 0)]
        self._numbers = [one.number for one in known]
        # What came before the first epoch counts as of it. The lists of both go up.
        self._starts = [one.began_after + 1 for one in known]

    def of(self, position: int) -> int:
        """The epoch of the event at a position."""
        return self._numbers[max(bisect_right(self._starts, position) - 1, 0)]

    def cuts(self, positions: Sequence[int]) -> list[int]:
        """The places in a list of positions, which go up, at which a later epoch begins."""
        if not positions or self.of(positions[0]) == self.of(positions[-1]):
            return []
        places = [bisect_right(positions, start - 1) for start in self._starts]
        return sorted({place for place in places if 0 < place < len(positions)})
