"""Rebuilds the tables of a pipeline from the start of the log, while the old tables stay in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException

import headwater
from headwater.calls import log as log_calls
from headwater.calls import pipeline_runs
from headwater.errors import InvalidRequest, LeaseLost, PipelineNotFound
from headwater.spark.pipelines.batch_query import BatchWriter, watch_batches
from headwater.spark.pipelines.checkpoint import Checkpoint
from headwater.spark.pipelines.lease import hold_lease
from headwater.spark.pipelines.runner import Report, RunnerSettings, context_of, source_rows
from headwater.spark.pipelines.transform import Transform
from headwater.spark.sinks import table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater import Headwater
    from headwater.spark.pipelines.file import PipelineSpec


def check_rebuildable(spec: PipelineSpec) -> None:
    """Raise InvalidRequest if a pipeline cannot be rebuilt."""
    if spec.source != "log":
        raise InvalidRequest(
            f"{spec.name} captures changes, which cannot be read again",
            hint="Write the changes to a topic, and build the table from that topic.",
        )
    others = sorted({sink.kind for sink in spec.sinks} - {"table"})
    if others:
        raise InvalidRequest(
            f"{spec.name} also writes to {', '.join(others)}, which cannot be rebuilt",
            hint="Move the table to a separate pipeline.",
        )


def rebuild(
    spark: SparkSession,
    spec: PipelineSpec,
    settings: RunnerSettings,
    *,
    report: Callable[[Report], None] = lambda _: None,
) -> Mapping[str, int]:
    """Rebuild all tables of a pipeline and swap them with the old ones; return counts of what changed.

    The pipeline may keep running. To finish, the rebuild takes its lease, so that the old tables do not change; then
    the runner of the pipeline continues with the checkpoint of the rebuild. A rebuild that is killed changes nothing.
    """
    check_rebuildable(spec)
    with headwater.connect(settings.dsn, pool_size=2) as log:
        known = {status.name for status in log.run(pipeline_runs.pipeline_statuses())}
        if spec.name not in known:
            raise PipelineNotFound(
                f"{spec.name} was never run on this database", hint="Run it first: there is nothing to rebuild."
            )
        # In another epoch, rows built so far may be lost, and the rebuild ends with EpochChanged.
        epoch = log.run(log_calls.current_epoch())
        checkpoint_epoch = table.begin_rebuild(log, spec.name)
        checkpoint = Checkpoint(spark, settings.checkpoint_of(spec.name, checkpoint_epoch))
        # A checkpoint epoch of a lost history may be assigned again.
        checkpoint.delete()
        catch_up(spark, spec, settings, checkpoint, checkpoint_epoch, report, epoch=epoch)
        return _switch(log, spark, spec, settings, checkpoint, checkpoint_epoch, report, epoch)


def _switch(
    log: Headwater,
    spark: SparkSession,
    spec: PipelineSpec,
    settings: RunnerSettings,
    checkpoint: Checkpoint,
    checkpoint_epoch: int,
    report: Callable[[Report], None],
    epoch: int,
) -> Mapping[str, int]:
    token = log.run(pipeline_runs.take_pipeline(spec.name, f"{settings.runner} (rebuild)", lease=settings.lease))
    lost = threading.Event()
    with hold_lease(log, spec.name, token, settings.lease, on_lost=lost.set):
        # The last catch-up reads at least to the current stable position, whether events are there or not.
        read_to = log.run(log_calls.log_state(spec.source_options.get("topics"))).stable
        end = catch_up(spark, spec, settings, checkpoint, checkpoint_epoch, report, epoch=epoch)
        if lost.is_set():
            raise LeaseLost(
                f"another runner took the lease of {spec.name} before its tables were switched",
                hint="Rebuild it again.",
            )
        # This also ends the lease: a standby runner continues with the checkpoint of the rebuild.
        return table.switch(
            log, spec.name, checkpoint_epoch=checkpoint_epoch, caught_up_to=end, read_to=read_to, epoch=epoch
        )


def catch_up(
    spark: SparkSession,
    spec: PipelineSpec,
    settings: RunnerSettings,
    checkpoint: Checkpoint,
    checkpoint_epoch: int,
    report: Callable[[Report], None],
    *,
    epoch: int | None = None,
) -> int:
    """Run the pipeline into its new tables until all current events are processed; return the last position."""
    stream = Transform.parse(spec.transform, directory=settings.directory).apply(
        source_rows(spark, spec, settings.dsn, epoch=epoch), spec.source
    )
    with ExitStack() as stack:
        sinks = []
        for number, sink_spec in enumerate(spec.sinks):
            sink = table.TableSink(
                sink_spec.options, context_of(spark, spec, settings, number), rebuild=checkpoint_epoch
            )
            stack.callback(sink.close)
            sink.prepare()
            sinks.append(sink)
        batches = BatchWriter(spec.name, checkpoint, sinks)
        ended = checkpoint.last_end()
        begun = None if ended is None else ended.position
        query = batches.start(
            stream, name=f"{spec.name} rebuild {checkpoint_epoch} {begun}", trigger={"availableNow": True}
        )
        stack.callback(query.stop)
        try:
            for done in watch_batches(query, offset=begun):
                if done is not None and done.rows:
                    report(Report(spec.name, spec.source, "batch", done.document()))
        except PySparkException as error:
            raise batches.explain(error) from error
    last = checkpoint.last_end()
    return 0 if last is None else last.position
