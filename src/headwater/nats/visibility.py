"""Which transactions a snapshot of Postgres sees, by what its metadata says. No I/O here."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.nats.failure import InvalidMessage


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which transactions a snapshot sees."""

    xmin: int
    xmax: int
    open: frozenset[int]

    @staticmethod
    def parse(text: str) -> Visibility:
        """Of xmin:xmax:xip, as pg_current_snapshot() writes it."""
        try:
            xmin, xmax, listed = text.split(":")
            return Visibility(int(xmin), int(xmax), frozenset(int(xid) for xid in listed.split(",") if xid))
        except ValueError as error:
            raise InvalidMessage(f"{text[:200]!r} is no snapshot of Postgres: xmin:xmax:xip") from error

    def sees(self, xid: int) -> bool:
        """Whether the snapshot sees a committed transaction, by the 32 bits of its number that the WAL has.

        The number is completed to the one nearest to xmax, which is right for 2**31 transactions either way.
        """
        full = (self.xmax & ~0xFFFFFFFF) | (xid & 0xFFFFFFFF)
        if full - self.xmax > 1 << 31:
            full -= 1 << 32
        elif self.xmax - full > 1 << 31:
            full += 1 << 32
        return full < self.xmin or (full < self.xmax and full not in self.open)


def lsn_number(text: str) -> int:
    """An LSN as Postgres writes it, such as 0/191BFD0, as a number."""
    try:
        high, low = text.split("/")
        return (int(high, 16) << 32) | int(low, 16)
    except ValueError as error:
        raise InvalidMessage(f"{text[:60]!r} is no LSN") from error
