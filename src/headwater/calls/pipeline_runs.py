"""Calls of pipeline runners: the lease of a pipeline, its checkpoint, its batches and its status.

A checkpoint is a position of the log, or an LSN for a pipeline that captures changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import checked_text


class PipelineClaim(NamedTuple):
    """The result of claiming a pipeline. Without a token, the claim failed."""

    token: int | None
    checkpoint: int | None
    checkpoint_epoch: int
    held_by: str | None
    stopped: bool
    rewound_in: int | None
    """The epoch in which the pipeline was last rewound because the log had lost events."""


class PipelineSnapshot(NamedTuple):
    """A table that a pipeline has loaded completely: which transactions the snapshot saw (xmin:xmax:xip), and an
    approximate LSN."""

    table: str
    visible: str
    lsn: int
    rows: int


@dataclass(frozen=True, slots=True)
class PipelineBatch:
    """A batch that the pipeline's runner recorded or, with `error`, a failed attempt."""

    ended_at: datetime
    rows: int
    details: Mapping[str, Any] | None
    error: str | None


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """The state of a pipeline. `checkpoint` is a position of the log or an LSN.

    `behind` counts events of the pipeline's topics, up to 1000 (`behind_is_more`: the true number is greater), or bytes
    of WAL.
    """

    name: str
    source: str
    state: str
    runner: str | None
    leased_until: datetime | None
    started_at: datetime | None
    checkpoint: int | None
    behind: int | None
    behind_is_more: bool
    batches: int
    rows: int
    last_batch: Mapping[str, Any] | None
    last_batch_at: datetime | None
    failures: int
    last_error: str | None
    last_error_at: datetime | None
    definition: Mapping[str, Any]


_STATUS = (
    "name, source, state, runner, leased_until, started_at, checkpoint, behind, behind_is_more, batches, rows, "
    "last_batch, last_batch_at, failures, last_error, last_error_at, definition"
)


def claim_pipeline(
    name: str, runner: str, *, lease: timedelta, source: str, definition: Mapping[str, Any], start: bool
) -> Call[PipelineClaim]:
    """Claim the lease of a pipeline; the token is None if another runner has it or the pipeline is stopped."""
    return Call(
        "select token, checkpoint, checkpoint_epoch, held_by, stopped, rewound_in "
        "from headwater_internal.claim_pipeline(%s, %s, %s, %s, %s::jsonb, %s)",
        (checked_text(name, "pipeline name"), runner, lease, source, json.dumps(definition), start),
        lambda rows: PipelineClaim(*rows[0]),
    )


def take_pipeline(name: str, runner: str, *, lease: timedelta) -> Call[int]:
    """Take the lease of a pipeline from its present runner; returns the token."""
    return Call(
        "select headwater_internal.take_pipeline(%s, %s, %s)",
        (checked_text(name, "pipeline name"), runner, lease),
        only_value,
    )


def renew_pipeline(name: str, token: int, *, lease: timedelta) -> Call[bool]:
    """Extend the lease; True if a stop of the pipeline was requested."""
    return Call("select headwater_internal.renew_pipeline(%s, %s, %s)", (name, token, lease), only_value)


def renew_checkpoint_epoch(name: str, token: int, *, rewound_in: int | None = None) -> Call[int]:
    """Start a new checkpoint epoch; returns its number. `rewound_in`: the log's epoch, if the old checkpoint refers to
    events that the log lost."""
    return Call("select headwater_internal.renew_checkpoint_epoch(%s, %s, %s)", (name, token, rewound_in), only_value)


def record_batch(
    name: str, token: int, *, checkpoint: int, rows: int, details: Mapping[str, Any], epoch: int | None = None
) -> Call[None]:
    """Record the checkpoint that all sinks have reached. `epoch`: its epoch, if it is a position of the log."""
    return Call(
        "select headwater_internal.record_batch(%s, %s, %s, %s, %s::jsonb, %s)",
        (name, token, checkpoint, rows, json.dumps(details), epoch),
        nothing,
    )


def record_failure(name: str, token: int, error: str) -> Call[int | None]:
    """Record a failed run; returns the number of consecutive failures, or None if another runner has the pipeline."""
    return Call(
        "select headwater_internal.record_failure(%s, %s, %s)", (name, token, error.replace("\0", "")), only_value
    )


def record_snapshot(name: str, token: int, snapshot: PipelineSnapshot) -> Call[None]:
    return Call(
        "select headwater_internal.record_snapshot(%s, %s, %s, %s, %s, %s)",
        (name, token, snapshot.table, snapshot.visible, snapshot.lsn, snapshot.rows),
        nothing,
    )


def pipeline_snapshots(name: str) -> Call[list[PipelineSnapshot]]:
    """The tables that a pipeline has loaded completely."""
    return Call(
        "select table_name, visible, lsn, rows from headwater_internal.pipeline_snapshot where pipeline = %s order "
        "by 1",
        (name,),
        lambda rows: [PipelineSnapshot(*row) for row in rows],
    )


def release_pipeline(name: str, token: int) -> Call[None]:
    return Call("select headwater_internal.release_pipeline(%s, %s)", (name, token), nothing)


def stop_pipeline(name: str) -> Call[bool]:
    """Request the runner of a pipeline to stop; True if the pipeline is running."""
    return Call("select headwater_internal.stop_pipeline(%s)", (checked_text(name, "pipeline name"),), only_value)


def reset_pipeline(name: str, *, checkpoint: int | None = None, forget_written: bool = False) -> Call[None]:
    return Call(
        "select headwater_internal.reset_pipeline(%s, %s, %s)",
        (checked_text(name, "pipeline name"), checkpoint, forget_written),
        nothing,
    )


def delete_pipeline(name: str) -> Call[bool]:
    return Call("select headwater_internal.delete_pipeline(%s)", (checked_text(name, "pipeline name"),), only_value)


def pipeline_writer(name: str, sink_number: int) -> Call[str]:
    """The name under which a sink of a pipeline writes to topics."""
    return Call("select headwater_internal.pipeline_writer(%s, %s)", (name, sink_number), only_value)


def pipeline_statuses() -> Call[list[PipelineStatus]]:
    """All pipelines that have ever run on this database."""
    return Call(f"select {_STATUS} from headwater.pipeline_status order by name", (), _decode_statuses)


def pipeline_batches(name: str) -> Call[list[PipelineBatch]]:
    """The most recent batches and failed attempts of a pipeline, newest first."""
    return Call(
        "select ended_at, rows, details, error from headwater_internal.pipeline_batch where pipeline = %s order by "
        "number desc",
        (checked_text(name, "pipeline name"),),
        lambda rows: [PipelineBatch(*row) for row in rows],
    )


def _decode_statuses(rows: Rows) -> list[PipelineStatus]:
    return [PipelineStatus(*row) for row in rows]
