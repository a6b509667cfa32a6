"""Calls for metrics and for the health of the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headwater.calls.call import Call


class Sample(NamedTuple):
    """One sample of a metric: its name, the values of its labels, and its value."""

    name: str
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class LogHealth:
    """Whether the log can be read and written. None: there is no value, or a standby cannot determine it."""

    primary_server: bool
    writable: bool
    maintained_seconds_ago: float | None
    positions_left: int | None
    oldest_publisher_pid: int | None
    oldest_publisher_seconds: float | None
    unstable: int | None


def metrics(*, most: int = 200) -> Call[list[Sample]]:
    """All metrics, with at most `most` topics, queues, cursors and pipelines each."""
    return Call(
        "select name, labels, value from headwater.metrics(%s)",
        (most,),
        lambda rows: [Sample(name, tuple(labels), value) for name, labels, value in rows],
    )


def log_health() -> Call[LogHealth]:
    return Call(
        "select primary_server, writable, maintained_seconds_ago, positions_left, oldest_publisher_pid, "
        "oldest_publisher_seconds, unstable from headwater_internal.log_health()",
        (),
        lambda rows: LogHealth(*rows[0]),
    )
