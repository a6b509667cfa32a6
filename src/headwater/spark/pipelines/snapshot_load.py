"""Loading whole tables into the sinks of a pipeline before their changes, and which changes are in them already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from pyspark.sql import Column
from pyspark.sql import functions as f

from headwater import calls
from headwater.capture.connection import connect
from headwater.capture.queries import query
from headwater.capture.slot import Slot
from headwater.errors import InvalidRequest
from headwater.model import PipelineSnapshot
from headwater.spark.formats import table as formats_table
from headwater.spark.pipelines.batch import Batch, Sink
from headwater.spark.pipelines.file import PipelineSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater import Headwater

_ROUND: Final = 1 << 32
"""Transactions are numbered in 32 bits where changes are told, and in 64 where snapshots are."""


class LoadingSink(Protocol):
    """A sink that can take a whole table."""

    def write_snapshot(self, rows: DataFrame, table: str, batch: Batch) -> int:
        """Replace what the sink has of a table by these rows; says how many there were. Repeating it is harmless."""


def load_snapshots(
    spark: SparkSession,
    log: Headwater,
    slot: Slot,
    spec: PipelineSpec,
    token: int,
    sinks: Sequence[Sink],
    *,
    tell: Callable[..., None],
) -> list[PipelineSnapshot]:
    """Load each table that this pipeline has not loaded yet; then all of them, as they were loaded."""
    tables: list[str] = list(spec.source_options["tables"])
    unable = [kind.kind for kind, sink in zip(spec.sinks, sinks, strict=True) if not hasattr(sink, "write_snapshot")]
    if unable:
        raise InvalidRequest(
            f"{', '.join(unable)} cannot take whole tables",
            hint="Leave out snapshot: the changes from now on are taken; or use the sink lake with keep: current.",
        )
    # The slot before the snapshot: what commits after it is in the one or in the other.
    done = {snapshot.table: snapshot for snapshot in log.run(calls.pipeline_snapshots(spec.name))}
    # A new slot would leave out what was committed since the first of them was loaded.
    start = slot.prepare(tables, create_slot=not done).confirmed_lsn
    for table in tables:
        if table in done:
            continue
        tell(table=table, state="loading")
        with formats_table.opened(slot.dsn, [table]) as options:
            rows = spark.read.format("headwater.table").options(**options).load()
            # Its end is the stream's start, since what the sink notes must not hide any change.
            batch = Batch(spec.name, -1, start)
            counts = [cast(LoadingSink, sink).write_snapshot(rows, table, batch) for sink in sinks]
            visible = options["snapshotVisible"]
        after = slot.end_of_log()
        loaded = PipelineSnapshot(table, visible, after, counts[0])
        log.run(calls.record_snapshot(spec.name, token, loaded))
        done[table] = loaded
        tell(table=table, state="loaded", rows=counts[0])
    return [done[table] for table in tables]


def unseen(dsn: str, snapshots: Sequence[PipelineSnapshot]) -> Column:
    """The condition on captured changes that they are not in the snapshot of their table."""
    condition = f.lit(True)
    with connect(dsn) as connection:
        for snapshot in snapshots:
            found = connection.execute(query("table_name"), {"table": snapshot.table}).fetchone()
            if found is None:
                continue  # it was dropped, and has no changes any more
            condition = condition & ~seen(snapshot, schema=found[1], table=found[2])
    return condition


def seen(snapshot: PipelineSnapshot, *, schema: str, table: str) -> Column:
    """The condition that a change is one of this table which its snapshot saw."""
    xmin, xmax, running = snapshot.visible.split(":")
    first_open, end = int(xmin), int(xmax)
    # The number nearest to the snapshot's that ends in these 32 bits.
    half = _ROUND // 2
    xid: Any = f.lit(end) + (f.pmod(f.col("xid") - f.lit(end) + f.lit(half), f.lit(_ROUND)) - f.lit(half))
    ended = xid < f.lit(end)
    if running:
        ended = ended & ~xid.isin([int(number) for number in running.split(",")])
    of_table = (f.col("schema") == f.lit(schema)) & (f.col("table") == f.lit(table))
    early = f.col("commit_lsn") < f.lit(snapshot.lsn)
    is_visible: Column = (xid < f.lit(first_open)) | ended
    return of_table & early & is_visible
