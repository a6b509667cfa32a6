"""Calls that ask for the log in figures, and whether it can be worked with."""

from __future__ import annotations

from headwater.calls.call import Call
from headwater.model import LogHealth, Sample


def metrics(*, most: int = 200) -> Call[list[Sample]]:
    """Every figure; of topics, groups, cursors and pipelines at most so many each."""
    return Call(
        "select name, labels, value from headwater.metrics(%s)",
        (most,),
        lambda rows: [Sample(name, tuple(labels), value) for name, labels, value in rows],
    )


def log_health() -> Call[LogHealth]:
    return Call(
        "select primary_server, writable, maintained_seconds_ago, positions_left, oldest_publisher_pid, "
        "oldest_publisher_seconds, unsettled from headwater.log_health()",
        (),
        lambda rows: LogHealth(*rows[0]),
    )
