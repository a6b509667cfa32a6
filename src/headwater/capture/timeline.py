"""WAL positions that stay meaningful after a failover: an LSN together with its cluster and timeline.

A promotion or a point-in-time restore starts a new timeline at a switch point. Up to the switch point an LSN means the
same on both timelines; after it, the same LSN is another change. A position that is stored outside of Postgres (in a
checkpoint or a message id) therefore includes its timeline, and a reader compares it with the server's before it
continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import psycopg
from psycopg import conninfo

from headwater.capture.connection import pin_settings


class WalHistory(NamedTuple):
    """The cluster and timeline that an LSN belongs to."""

    system_identifier: int
    timeline: int


class WalPosition(NamedTuple):
    """A position in the WAL. The history is missing if an older version of Headwater stored the position."""

    lsn: int
    history: WalHistory | None = None

    @classmethod
    def parse(cls, offset: Mapping[str, Any]) -> WalPosition:
        """Parse a position that `offset` returned."""
        system, timeline = offset.get("system"), offset.get("timeline")
        known = isinstance(system, int) and isinstance(timeline, int)
        return cls(int(offset["lsn"]), WalHistory(system, timeline) if known else None)  # type: ignore[arg-type]

    @property
    def offset(self) -> dict[str, int]:
        """The position as a checkpoint stores it."""
        if self.history is None:
            return {"lsn": self.lsn}
        return {"lsn": self.lsn, "timeline": self.history.timeline, "system": self.history.system_identifier}


@lru_cache(maxsize=8)
def switch_points(dsn: str, history: WalHistory) -> Mapping[int, int]:
    """The LSN at which the server's history left each earlier timeline, by timeline."""
    if history.timeline == 1:
        return {}  # the first timeline has no history file
    # The replication protocol also serves the file to roles that may replicate but are not superusers.
    replicating = conninfo.make_conninfo(pin_settings(dsn), replication="database")
    with psycopg.connect(replicating, autocommit=True) as connection:
        row = connection.execute(f"TIMELINE_HISTORY {history.timeline:d}".encode()).fetchone()
    assert row is not None
    return parse_history(row[1])


def parse_history(content: str | bytes) -> dict[int, int]:
    """Parse a timeline history file: each line has a timeline, its switch point and the reason."""
    text = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
    found = {}
    for line in text.splitlines():
        words = line.split(None, 2)
        if len(words) >= 2 and words[0].isdecimal():
            high, low = words[1].split("/")
            found[int(words[0])] = (int(high, 16) << 32) | int(low, 16)
    return found
