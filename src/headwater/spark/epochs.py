"""Offsets that are stored outside of Postgres, in checkpoints and sinks: a position together with its epoch.

Such a position always belongs to an event that was read (see headwater_internal.batch_end), so it stays valid when a
crash of Postgres takes back assigned positions without events. If headwater_internal.last_common_event finds that the
log no longer has that event, the log has lost events that were read: by a failover to a lagging standby, a restore, or
a crash with asynchronous commits. Sinks in the same database have lost them too; other sinks still hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from headwater.calls import pipelines
from headwater.errors import EpochChanged

if TYPE_CHECKING:
    from headwater import Headwater
    from headwater.capture.timeline import WalHistory


class Offset(NamedTuple):
    """How far a source was read: a position of the log with its epoch, or an LSN without one."""

    position: int
    epoch: int | None = None
    history: WalHistory | None = None
    """The cluster and timeline of an LSN."""


class HistoryLost(EpochChanged):
    """The log has lost events that a pipeline has read, and the pipeline is configured to stop in this case."""


def common_position(log: Headwater, offset: Offset, topics: Sequence[str] | None) -> int:
    """The offset's position, or if it is lost, that of the last event of these topics below it that the log has."""
    if offset.epoch is None:
        return offset.position
    return log.run(pipelines.last_common_event(topics, epoch=offset.epoch, position=offset.position))


def epoch_changed_error(offset: Offset, *, present: int, common: int) -> EpochChanged:
    """The error for a reader that stops at an offset of another epoch."""
    if common == offset.position:
        return EpochChanged(
            f"the log is in epoch {present}, but position {offset.position} was read in epoch {offset.epoch}",
            hint="Postgres crashed, failed over or was restored. No events that were read are lost: restart the query.",
            detail={"epoch": present, "requested_epoch": offset.epoch, "common_position": common},
        )
    return EpochChanged(
        f"the log has lost events that were read: it is in epoch {present}, position {offset.position} was read in "
        f"epoch {offset.epoch}, and positions after {common} may have been assigned again",
        hint="Postgres failed over or was restored. Remove everything after that position from the sink, then continue "
        "with the option onEpochChange=rewind.",
        detail={"epoch": present, "requested_epoch": offset.epoch, "common_position": common},
    )


def history_lost_error(pipeline: str, what: str, offset: Offset, *, present: int, common: int) -> HistoryLost:
    """The error with which a pipeline ends if it is configured to stop."""
    return HistoryLost(
        f"the log has lost events that are in {what} of the pipeline {pipeline}: it is in epoch {present}, position "
        f"{offset.position} was read in epoch {offset.epoch}, and everything after {common} is lost",
        hint="Postgres failed over or was restored. Set on_epoch_change: rewind for the pipeline and run it again: it "
        f"continues after {common} and rewinds lakes to it. For tables, run: headwater pipeline rebuild {pipeline}.",
        detail={"epoch": present, "requested_epoch": offset.epoch, "common_position": common},
    )
