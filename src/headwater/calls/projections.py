"""Calls that keep projections: tables that pipelines write, and their rebuilds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import checked_text

STAGING_COLUMNS = ("headwater_attempt", "headwater_part", "headwater_place")
"""What a staging table has before the columns of the rows: which run of which task, and the place in it."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A table that a pipeline keeps: of which generation, and whether a rebuild fills it to take its place."""

    pipeline: str
    schema: str
    table: str
    generation: int = 0
    rebuild: bool = False

    def parameters(self) -> tuple[Any, ...]:
        name = checked_text(self.pipeline, "pipeline name")
        schema, table = checked_text(self.schema, "schema name"), checked_text(self.table, "table name")
        return (name, schema, table, self.generation, self.rebuild)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a table stands: the end of the last batch that is in it, and where rows for it are staged."""

    done_to: int | None
    staging: str


def _standing(rows: Rows) -> Standing:
    done_to, staging = rows[0]
    return Standing(done_to, staging)


def prepare_projection(
    projection: Projection,
    *,
    columns: Sequence[tuple[str, str]],
    staged: Sequence[tuple[str, str]],
    key: Sequence[str],
) -> Call[Standing]:
    """Get the table ready for rows of this shape, each column with its type; InvalidRequest if it cannot be."""
    return Call(
        "select p.done_to, headwater.beside(p.table_name, 'staged') "
        "from headwater.prepare_projection(%s, %s, %s, %s, %s, "
        "%s::text[], %s::text[], %s::text[], %s::text[], %s::text[]) as p",
        (
            *projection.parameters(),
            [name for name, _ in columns],
            [kind for _, kind in columns],
            [name for name, _ in staged],
            [kind for _, kind in staged],
            list(key),
        ),
        _standing,
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
    place: str | None = None,
    place_reached: bool = False,
    stateful: bool = False,
    epoch: int | None = None,
) -> Call[tuple[int, int] | None]:
    """Put what was staged into the table and note the batch: rows written and removed, None if it was there before."""
    return Call(
        "select written, removed from headwater.merge_projection(%s, %s, %s, %s, %s, "
        "%s::text[], %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            *projection.parameters(),
            list(attempts),
            expected_rows,
            end,
            number,
            mode,
            gone,
            place,
            place_reached,
            stateful,
            epoch,
        ),
        lambda rows: None if rows[0][0] is None else (rows[0][0], rows[0][1]),
    )


def projection_generation(pipeline: str) -> Call[int]:
    """Which generation of its tables a pipeline is to write."""
    return Call("select headwater.projection_generation(%s)", (checked_text(pipeline, "pipeline name"),), only_value)


def begin_rebuild(pipeline: str, *, resume: bool = False) -> Call[int]:
    """Begin to build all tables of a pipeline anew; the answer is the generation to write."""
    return Call("select headwater.begin_rebuild(%s, %s)", (checked_text(pipeline, "pipeline name"), resume), only_value)


def abandon_rebuild(pipeline: str) -> Call[bool]:
    """Give a rebuild up. False if there was none."""
    return Call("select headwater.abandon_rebuild(%s)", (checked_text(pipeline, "pipeline name"),), only_value)


def switch_rebuilt(
    pipeline: str, *, generation: int, caught_up_to: int, read_to: int | None = None, epoch: int | None = None
) -> Call[tuple[int, int]]:
    """Make the tables equal to what was built: rows written and removed."""
    return Call(
        "select written, removed from headwater.switch_rebuilt(%s, %s, %s, %s, %s)",
        (checked_text(pipeline, "pipeline name"), generation, caught_up_to, read_to, epoch),
        lambda rows: (rows[0][0], rows[0][1]),
    )


def forget_projections(pipeline: str) -> Call[None]:
    """Forget the tables of a pipeline; they stay as they are."""
    return Call("select headwater.forget_projections(%s)", (checked_text(pipeline, "pipeline name"),), nothing)
