"""Which transactions a Postgres snapshot has seen, decided from its text. No I/O.

A snapshot of a table and the changes of a replication slot can only be combined without gap or overlap by transaction:
LSNs tell when a commit was logged, not when it became visible, and these orders may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from headwater.errors import InvalidRequest

_WRAP = 1 << 32


@dataclass(frozen=True, slots=True)
class VisibleTransactions:
    """The content of `pg_current_snapshot()`: it has seen all transactions below `xmin`, none from `xmax` on, and
    between them those not in `running`."""

    xmin: int
    xmax: int
    running: frozenset[int]


@lru_cache(maxsize=64)
def parse(text: str) -> VisibleTransactions:
    """Parse `xmin:xmax:xip,xip,...`."""
    try:
        xmin, xmax, running = text.split(":")
        return VisibleTransactions(int(xmin), int(xmax), frozenset(int(xid) for xid in running.split(",") if xid))
    except ValueError:
        raise InvalidRequest(f"invalid snapshot {text[:200]!r}: expected a form like 10:20:10,14") from None


def is_visible(xid: int, snapshot: VisibleTransactions | str) -> bool:
    """Whether the snapshot has seen this committed transaction: its changes must then be skipped.

    `xid` may be the 32-bit transaction id of a change; it is taken for the one nearest to the snapshot, which is right
    within 2**31 transactions in either direction.
    """
    seen = parse(snapshot) if isinstance(snapshot, str) else snapshot
    if xid < _WRAP:
        # The distance from xmax, modulo 2**32.
        xid = seen.xmax + (xid - seen.xmax + _WRAP // 2) % _WRAP - _WRAP // 2
    return xid < seen.xmin or (xid < seen.xmax and xid not in seen.running)


def lsn_number(text: str) -> int:
    """Convert an LSN such as 0/191BFD0 to a number."""
    try:
        high, low = text.split("/")
        return (int(high, 16) << 32) | int(low, 16)
    except ValueError:
        raise InvalidRequest(f"invalid LSN {text[:60]!r}: expected a form like 0/191BFD0") from None
