"""Calls of whoever runs pipelines: the right to run one, how far it is, and what people ask about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import checked_text
from headwater.model import PipelineBatch, PipelineClaim, PipelineSnapshot, PipelineStatus

_STATUS = (
    "name, source, state, runner, leased_until, started_at, place, behind, behind_is_more, batches, rows, last_batch, "
    "last_batch_at, failures, last_error, last_error_at, definition"
)


def claim_pipeline(
    name: str, runner: str, *, lease: timedelta, source: str, definition: Mapping[str, Any], start: bool
) -> Call[PipelineClaim]:
    """The right to run a pipeline for a while; its token is None if another has it or if it is stopped."""
    return Call(
        "select token, place, generation, held_by, stopped, rewound_in "
        "from headwater.claim_pipeline(%s, %s, %s, %s, %s::jsonb, %s)",
        (checked_text(name, "pipeline name"), runner, lease, source, json.dumps(definition), start),
        lambda rows: PipelineClaim(*rows[0]),
    )


def take_pipeline(name: str, runner: str, *, lease: timedelta) -> Call[int]:
    """The right to run a pipeline, taken from whoever has it; its token."""
    return Call(
        "select headwater.take_pipeline(%s, %s, %s)", (checked_text(name, "pipeline name"), runner, lease), only_value
    )


def renew_pipeline(name: str, token: int, *, lease: timedelta) -> Call[bool]:
    """Keep the right; True if somebody asked for the pipeline to stop."""
    return Call("select headwater.renew_pipeline(%s, %s, %s)", (name, token, lease), only_value)


def renew_generation(name: str, token: int, *, rewound_in: int | None = None) -> Call[int]:
    """Begin with a new checkpoint; its number. `rewound_in`: the epoch, if the old one is of a lost history."""
    return Call("select headwater.renew_generation(%s, %s, %s)", (name, token, rewound_in), only_value)


def record_batch(
    name: str, token: int, *, place: int, rows: int, details: Mapping[str, Any], epoch: int | None = None
) -> Call[None]:
    """Note how far all sinks are. `epoch`: that of the place, where it is a position of the log."""
    return Call(
        "select headwater.record_batch(%s, %s, %s, %s, %s::jsonb, %s)",
        (name, token, place, rows, json.dumps(details), epoch),
        nothing,
    )


def record_failure(name: str, token: int, error: str) -> Call[int | None]:
    """Note that a run failed; how often in a row, or None if the pipeline is another's now."""
    return Call("select headwater.record_failure(%s, %s, %s)", (name, token, error.replace("\0", "")), only_value)


def record_snapshot(name: str, token: int, snapshot: PipelineSnapshot) -> Call[None]:
    return Call(
        "select headwater.record_snapshot(%s, %s, %s, %s, %s, %s)",
        (name, token, snapshot.table, snapshot.visible, snapshot.lsn, snapshot.rows),
        nothing,
    )


def pipeline_snapshots(name: str) -> Call[list[PipelineSnapshot]]:
    """The tables that a pipeline has loaded whole."""
    return Call(
        "select table_name, visible, lsn, rows from headwater.pipeline_snapshot where pipeline = %s order by 1",
        (name,),
        lambda rows: [PipelineSnapshot(*row) for row in rows],
    )


def release_pipeline(name: str, token: int) -> Call[None]:
    return Call("select headwater.release_pipeline(%s, %s)", (name, token), nothing)


def stop_pipeline(name: str) -> Call[bool]:
    """Ask whoever runs it to stop; True if somebody does."""
    return Call("select headwater.stop_pipeline(%s)", (checked_text(name, "pipeline name"),), only_value)


def reset_pipeline(name: str, *, place: int | None = None, forget_written: bool = False) -> Call[None]:
    return Call(
        "select headwater.reset_pipeline(%s, %s, %s)",
        (checked_text(name, "pipeline name"), place, forget_written),
        nothing,
    )


def delete_pipeline(name: str) -> Call[bool]:
    return Call("select headwater.delete_pipeline(%s)", (checked_text(name, "pipeline name"),), only_value)


def pipeline_writer(name: str, sink_number: int) -> Call[str]:
    """The name under which a sink of a pipeline writes to topics."""
    return Call("select headwater.pipeline_writer(%s, %s)", (name, sink_number), only_value)


def pipeline_statuses() -> Call[list[PipelineStatus]]:
    """Every pipeline that was ever run on this database."""
    return Call(f"select {_STATUS} from headwater.pipeline_status order by name", (), _decode_statuses)


def pipeline_batches(name: str) -> Call[list[PipelineBatch]]:
    """The last batches of a pipeline and the tries that failed, the newest first."""
    return Call(
        "select ended_at, rows, details, error from headwater.pipeline_batch where pipeline = %s order by number desc",
        (checked_text(name, "pipeline name"),),
        lambda rows: [PipelineBatch(*row) for row in rows],
    )


def _decode_statuses(rows: Rows) -> list[PipelineStatus]:
    return [PipelineStatus(*row) for row in rows]
