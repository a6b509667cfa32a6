"""Which transactions a snapshot of Postgres has seen, decided from its text. No I/O here.

A snapshot of a table and the changes of a slot meet without a gap and without an overlap only by transaction: LSNs
tell when a commit was logged, not when it became visible, and the two do not come in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from headwater.errors import InvalidRequest

_WRAP = 1 << 32


@dataclass(frozen=True, slots=True)
class VisibleTransactions:
    """What `pg_current_snapshot()` says: all below `xmin`, none from `xmax` on, between them all not in `running`."""

    xmin: int
    xmax: int
    running: frozenset[int]


@lru_cache(maxsize=64)
def parse(text: str) -> VisibleTransactions:
    """The meaning of `xmin:xmax:xip,xip,...`."""
    try:
        xmin, xmax, running = text.split(":")
        return VisibleTransactions(int(xmin), int(xmax), frozenset(int(xid) for xid in running.split(",") if xid))
    except ValueError:
        raise InvalidRequest(f"{text[:200]!r} is not a snapshot like 10:20:10,14") from None


def is_visible(xid: int, snapshot: VisibleTransactions | str) -> bool:
    """Whether the snapshot has what this committed transaction did: then its changes must be skipped after it.

    `xid` may be the transaction id of 32 bits that changes carry; it is taken for the one nearest to the snapshot,
    which is right for 2**31 transactions either way.
    """
    seen = parse(snapshot) if isinstance(snapshot, str) else snapshot
    if xid < _WRAP:
        # How far behind or ahead of xmax it is, in a circle.
        xid = seen.xmax + (xid - seen.xmax + _WRAP // 2) % _WRAP - _WRAP // 2
    return xid < seen.xmin or (xid < seen.xmax and xid not in seen.running)


def lsn_number(text: str) -> int:
    """An LSN as Postgres writes it, such as 0/191BFD0, as a number."""
    try:
        high, low = text.split("/")
        return (int(high, 16) << 32) | int(low, 16)
    except ValueError:
        raise InvalidRequest(f"{text[:60]!r} is no LSN") from None
