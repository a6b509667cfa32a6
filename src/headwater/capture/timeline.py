"""Places in the server's log (WAL) that outlive a failover: an LSN together with the history that it is of.

A promotion, or a restore to a point in time, begins a new timeline at its switch point. Up to there an LSN stands for
the same on both timelines; beyond it, the same LSN is another change. A place that is kept outside of Postgres (in a
checkpoint, in a message id) therefore names its timeline, and a reader compares it with the server's before it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import psycopg
from psycopg import conninfo

from headwater.capture.connection import fixed


class History(NamedTuple):
    """Which log it is: of this cluster, on this timeline."""

    system_identifier: int
    timeline: int


class WalPlace(NamedTuple):
    """A place in a log. Without a history it was kept by a version that noted none."""

    lsn: int
    history: History | None = None

    @classmethod
    def parse(cls, offset: Mapping[str, Any]) -> WalPlace:
        """A place as `offset` wrote it."""
        system, timeline = offset.get("system"), offset.get("timeline")
        known = isinstance(system, int) and isinstance(timeline, int)
        return cls(int(offset["lsn"]), History(system, timeline) if known else None)  # type: ignore[arg-type]

    @property
    def offset(self) -> dict[str, int]:
        """As a checkpoint keeps it."""
        if self.history is None:
            return {"lsn": self.lsn}
        return {"lsn": self.lsn, "timeline": self.history.timeline, "system": self.history.system_identifier}


@lru_cache(maxsize=8)
def switch_points(dsn: str, history: History) -> Mapping[int, int]:
    """Where the server, which has this history, left each of the timelines before its own: LSNs by timeline."""
    if history.timeline == 1:
        return {}  # the first one has no file
    # Only the replication protocol gives it to roles that may replicate but are not superusers.
    replicating = conninfo.make_conninfo(fixed(dsn), replication="database")
    with psycopg.connect(replicating, autocommit=True) as connection:
        row = connection.execute(f"TIMELINE_HISTORY {history.timeline:d}".encode()).fetchone()
    assert row is not None
    return parse_history(row[1])


def parse_history(content: str | bytes) -> dict[int, int]:
    """A timeline history file: lines of a timeline, where it was left, and why."""
    text = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
    found = {}
    for line in text.splitlines():
        words = line.split(None, 2)
        if len(words) >= 2 and words[0].isdecimal():
            high, low = words[1].split("/")
            found[int(words[0])] = (int(high, 16) << 32) | int(low, 16)
    return found
