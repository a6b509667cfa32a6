"""Positions that are kept outside of Postgres, each with its epoch: in checkpoints and in sinks.

Such a position is always that of an event that was read (see headwater.batch_end), so a crash of Postgres that takes
back positions without events leaves it valid. If the log does not have that event any more, by
headwater.last_common_event, it has lost events that were read: by a failover to a standby that lagged, by a restore, or
by a crash if they were committed asynchronously. Sinks in the same database have lost them too; others still hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from headwater import calls
from headwater.errors import EpochChanged

if TYPE_CHECKING:
    from headwater import Headwater
    from headwater.capture.timeline import History


class Offset(NamedTuple):
    """How far a source was read: a position of the log with its epoch, or an LSN without one."""

    position: int
    epoch: int | None = None
    history: History | None = None
    """Which history of the server's log an LSN is of."""


class HistoryLost(EpochChanged):
    """The log has lost events that a pipeline has read, and the pipeline is not set to go on without them."""


def common_position(log: Headwater, offset: Offset, topics: Sequence[str] | None) -> int:
    """The offset's own position, or that of the last event of these topics below it that the log still has."""
    if offset.epoch is None:
        return offset.position
    return log.run(calls.last_common_event(topics, epoch=offset.epoch, position=offset.position))


def other_epoch(offset: Offset, *, present: int, common: int) -> EpochChanged:
    """What a reader is told that stops at an offset of another epoch."""
    if common == offset.position:
        return EpochChanged(
            f"the log is in epoch {present}, and position {offset.position} was read in epoch {offset.epoch}",
            hint="Postgres crashed, failed over or was restored. Nothing that was read is lost: start the query again.",
            detail={"epoch": present, "requested_epoch": offset.epoch, "common_position": common},
        )
    return EpochChanged(
        f"the log has lost events that were read: it is in epoch {present}, position {offset.position} is of epoch "
        f"{offset.epoch}, and positions after {common} may have been issued again",
        hint="Postgres failed over or was restored. Remove from the sink what came after that position, then go on "
        "with the option onEpochChange set to rewind.",
        detail={"epoch": present, "requested_epoch": offset.epoch, "common_position": common},
    )


def history_lost(pipeline: str, what: str, offset: Offset, *, present: int, common: int) -> HistoryLost:
    """What a pipeline ends with that is set to stop."""
    return HistoryLost(
        f"the log has lost events that are in {what} of the pipeline {pipeline}: it is in epoch {present}, and of "
        f"position {offset.position}, read in epoch {offset.epoch}, nothing after {common} is left",
        hint="Postgres failed over or was restored. Set on_epoch_change: rewind for the pipeline and run it again: it "
        f"goes on after {common}, and lakes are set back to that. Tables: headwater pipeline rebuild {pipeline}.",
        detail={"epoch": present, "requested_epoch": offset.epoch, "common_position": common},
    )
