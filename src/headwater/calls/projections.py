"""Calls for projections, the tables that pipelines write, and their rebuilds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwater.calls.call import Call, Rows, only_value
from headwater.calls.encoding import checked_text

STAGING_COLUMNS = ("headwater_attempt", "headwater_part", "headwater_row_number")
"""The columns of a staging table before those of the rows: the task attempt, the part, and the row's number in it."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A table that a pipeline writes, its checkpoint epoch, and whether a rebuild fills a new table to replace it."""

    pipeline: str
    schema: str
    table: str
    checkpoint_epoch: int = 0
    rebuild: bool = False

    def parameters(self) -> tuple[Any, ...]:
        name = checked_text(self.pipeline, "pipeline name")
        schema, table = checked_text(self.schema, "schema name"), checked_text(self.table, "table name")
        return (name, schema, table, self.checkpoint_epoch, self.rebuild)


@dataclass(frozen=True, slots=True)
class ProjectionState:
    """The progress of a table: the end of its last batch, and the staging table for its rows."""

    done_to: int | None
    staging: str


def _projection_state(rows: Rows) -> ProjectionState:
    done_to, staging = rows[0]
    return ProjectionState(done_to, staging)


def prepare_projection(
    projection: Projection,
    *,
    columns: Sequence[tuple[str, str]],
    staged: Sequence[tuple[str, str]],
    key: Sequence[str],
) -> Call[ProjectionState]:
    """Prepare the table for rows of this shape, each column with its type. Raises InvalidRequest if it does not fit."""
    return Call(
        "select p.done_to, headwater_internal.beside(p.table_name, 'staged') "
        "from headwater_internal.prepare_projection(%s, %s, %s, %s, %s, "
        "%s::text[], %s::text[], %s::text[], %s::text[], %s::text[]) as p",
        (
            *projection.parameters(),
            [name for name, _ in columns],
            [kind for _, kind in columns],
            [name for name, _ in staged],
            [kind for _, kind in staged],
            list(key),
        ),
        _projection_state,
    )


def merge_projection(
    projection: Projection,
    *,
    attempts: Sequence[str],
    expected_rows: int,
    end: int,
    number: int,
    mode: str,
    gone: str | None = None,
    offset_column: str | None = None,
    offset_inclusive: bool = False,
    stateful: bool = False,
    epoch: int | None = None,
) -> Call[tuple[int, int] | None]:
    """Merge the staged rows into the table and record the batch; returns the rows written and removed, or None if the
    batch was merged before."""
    return Call(
        "select written, removed from headwater_internal.merge_projection(%s, %s, %s, %s, %s, "
        "%s::text[], %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            *projection.parameters(),
            list(attempts),
            expected_rows,
            end,
            number,
            mode,
            gone,
            offset_column,
            offset_inclusive,
            stateful,
            epoch,
        ),
        lambda rows: None if rows[0][0] is None else (rows[0][0], rows[0][1]),
    )


def projection_epoch(pipeline: str) -> Call[int]:
    """The checkpoint epoch of the tables that a pipeline must write."""
    return Call(
        "select headwater_internal.projection_epoch(%s)", (checked_text(pipeline, "pipeline name"),), only_value
    )


def begin_rebuild(pipeline: str, *, resume: bool = False) -> Call[int]:
    """Start a rebuild of all tables of a pipeline; returns the checkpoint epoch to write."""
    return Call(
        "select headwater_internal.begin_rebuild(%s, %s)", (checked_text(pipeline, "pipeline name"), resume), only_value
    )


def abandon_rebuild(pipeline: str) -> Call[bool]:
    """Abandon a rebuild; False if there was none."""
    return Call("select headwater_internal.abandon_rebuild(%s)", (checked_text(pipeline, "pipeline name"),), only_value)


def switch_rebuilt(
    pipeline: str, *, checkpoint_epoch: int, caught_up_to: int, read_to: int | None = None, epoch: int | None = None
) -> Call[tuple[int, int]]:
    """Replace the tables by the rebuilt ones; returns the rows written and removed."""
    return Call(
        "select written, removed from headwater_internal.switch_rebuilt(%s, %s, %s, %s, %s)",
        (checked_text(pipeline, "pipeline name"), checkpoint_epoch, caught_up_to, read_to, epoch),
        lambda rows: (rows[0][0], rows[0][1]),
    )
