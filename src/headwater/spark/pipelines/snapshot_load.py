"""Loads whole tables into the sinks of a pipeline before their changes, and filters changes that the load contains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from pyspark.sql import Column
from pyspark.sql import functions as f

from headwater.calls import pipeline_runs
from headwater.calls import pipeline_runs as pipeline_runs_calls
from headwater.calls.pipeline_runs import PipelineSnapshot
from headwater.capture.connection import connect
from headwater.capture.queries import query
from headwater.capture.slot import Slot
from headwater.errors import InvalidRequest
from headwater.spark.formats import table as formats_table
from headwater.spark.pipelines.batch import Batch, Sink
from headwater.spark.pipelines.file import PipelineSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater import Headwater

_ROUND: Final = 1 << 32
"""Changes have 32-bit transaction ids, snapshots have 64-bit ones."""


class SnapshotSink(Protocol):
    """A sink that can load a whole table."""

    def write_snapshot(self, rows: DataFrame, table: str, batch: Batch) -> int:
        """Replace the sink's rows of a table by these rows; return their number. Idempotent."""


def load_snapshots(
    spark: SparkSession,
    log: Headwater,
    slot: Slot,
    spec: PipelineSpec,
    token: int,
    sinks: Sequence[Sink],
    *,
    report: Callable[..., None],
) -> list[PipelineSnapshot]:
    """Load each table that this pipeline has not loaded yet; return the snapshots of all tables."""
    tables: list[str] = list(spec.source_options["tables"])
    unable = [kind.kind for kind, sink in zip(spec.sinks, sinks, strict=True) if not hasattr(sink, "write_snapshot")]
    if unable:
        raise InvalidRequest(
            f"the sink {', '.join(unable)} cannot load whole tables",
            hint="Remove snapshot to capture only changes from now on, or use the sink lake with keep: current.",
        )
    # Create the slot before the snapshot: each later commit is in the snapshot or in the changes.
    done = {snapshot.table: snapshot for snapshot in log.run(pipeline_runs_calls.pipeline_snapshots(spec.name))}
    # If some tables are loaded, a new slot would skip changes since then.
    start = slot.prepare(tables, create_slot=not done).confirmed_lsn
    for table in tables:
        if table in done:
            continue
        report(table=table, state="loading")
        with formats_table.shared_snapshot(slot.dsn, [table]) as options:
            rows = spark.read.format("headwater.table").options(**options).load()
            # The end is the start of the stream, so that the offset that the sink records does not hide changes.
            batch = Batch(spec.name, -1, start)
            counts = [cast(SnapshotSink, sink).write_snapshot(rows, table, batch) for sink in sinks]
            visible = options["snapshotVisible"]
        after = slot.end_of_log()
        loaded = PipelineSnapshot(table, visible, after, counts[0])
        log.run(pipeline_runs.record_snapshot(spec.name, token, loaded))
        done[table] = loaded
        report(table=table, state="loaded", rows=counts[0])
    return [done[table] for table in tables]


def not_in_snapshots(dsn: str, snapshots: Sequence[PipelineSnapshot]) -> Column:
    """A Spark condition: the change is not in the snapshot of its table."""
    condition = f.lit(True)
    with connect(dsn) as connection:
        for snapshot in snapshots:
            found = connection.execute(query("table_name"), {"table": snapshot.table}).fetchone()
            if found is None:
                continue  # the table was dropped and has no more changes
            condition = condition & ~is_in_snapshot(snapshot, schema=found[1], table=found[2])
    return condition


def is_in_snapshot(snapshot: PipelineSnapshot, *, schema: str, table: str) -> Column:
    """A Spark condition: the change belongs to this table and is visible in its snapshot."""
    xmin, xmax, running = snapshot.visible.split(":")
    first_open, end = int(xmin), int(xmax)
    # Extend the 32-bit id to the 64-bit id nearest to the snapshot's.
    half = _ROUND // 2
    xid: Any = f.lit(end) + (f.pmod(f.col("xid") - f.lit(end) + f.lit(half), f.lit(_ROUND)) - f.lit(half))
    ended = xid < f.lit(end)
    if running:
        ended = ended & ~xid.isin([int(number) for number in running.split(",")])
    of_table = (f.col("schema") == f.lit(schema)) & (f.col("table") == f.lit(table))
    early = f.col("commit_lsn") < f.lit(snapshot.lsn)
    is_visible: Column = (xid < f.lit(first_open)) | ended
    return of_table & early & is_visible
