"""Building the tables of a pipeline anew, from the beginning of the log, while the old ones are served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException

import headwater
from headwater import calls
from headwater.errors import InvalidRequest, LeaseLost, PipelineNotFound
from headwater.spark.pipelines.batch_query import Batches, watched
from headwater.spark.pipelines.checkpoint import Checkpoint
from headwater.spark.pipelines.lease import kept_lease
from headwater.spark.pipelines.runner import Report, Settings, context_of, source_rows
from headwater.spark.pipelines.transform import Transform
from headwater.spark.sinks import table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater import Headwater
    from headwater.spark.pipelines.file import PipelineSpec


def refuse_unfit(spec: PipelineSpec) -> None:
    """Say why a pipeline cannot be rebuilt, if it cannot."""
    if spec.source != "log":
        raise InvalidRequest(
            f"{spec.name} captures changes, which are gone once they are read",
            hint="Let changes go to a topic, and make the table from that.",
        )
    others = sorted({sink.kind for sink in spec.sinks} - {"table"})
    if others:
        raise InvalidRequest(
            f"{spec.name} also writes to {', '.join(others)}, which cannot be built anew beside what is there",
            hint="Give the table a pipeline of its own.",
        )


def rebuild(
    spark: SparkSession,
    spec: PipelineSpec,
    settings: Settings,
    *,
    report: Callable[[Report], None] = lambda _: None,
) -> Mapping[str, int]:
    """Build all tables of a pipeline anew and put them in the place of the old ones; says what that changed.

    The pipeline may go on running meanwhile. For the last stretch its lease is taken, so that the old tables stand
    still; then whoever ran it goes on from where the rebuild was. A rebuild that is killed has changed nothing.
    """
    refuse_unfit(spec)
    with headwater.connect(settings.dsn, pool_size=2) as log:
        known = {status.name for status in log.run(calls.pipeline_statuses())}
        if spec.name not in known:
            raise PipelineNotFound(
                f"{spec.name} was never run on this database", hint="Run it: there is nothing to rebuild."
            )
        # In another one, what was built so far may be lost, and the rebuild ends with EpochChanged.
        epoch = log.run(calls.current_epoch())
        generation = table.begin_rebuild(log, spec.name)
        checkpoint = Checkpoint(spark, settings.checkpoint_of(spec.name, generation))
        # A number that was given in a lost history may be given again.
        checkpoint.delete()
        catch_up(spark, spec, settings, checkpoint, generation, report, epoch=epoch)
        return _switch(log, spark, spec, settings, checkpoint, generation, report, epoch)


def _switch(
    log: Headwater,
    spark: SparkSession,
    spec: PipelineSpec,
    settings: Settings,
    checkpoint: Checkpoint,
    generation: int,
    report: Callable[[Report], None],
    epoch: int,
) -> Mapping[str, int]:
    token = log.run(calls.take_pipeline(spec.name, f"{settings.runner} (rebuild)", lease=settings.lease))
    lost = threading.Event()
    with kept_lease(log, spec.name, token, settings.lease, on_lost=lost.set):
        # What is stable now, the last stretch will have read, whether it finds an event there or not.
        read_to = log.run(calls.log_state(spec.source_options.get("topics"))).settled
        end = catch_up(spark, spec, settings, checkpoint, generation, report, epoch=epoch)
        if lost.is_set():
            raise LeaseLost(f"another took {spec.name} before its tables could be switched", hint="Rebuild it again.")
        # The lease ends with it: whoever stands by goes on with the checkpoint of the rebuild.
        return table.switch(log, spec.name, generation=generation, caught_up_to=end, read_to=read_to, epoch=epoch)


def catch_up(
    spark: SparkSession,
    spec: PipelineSpec,
    settings: Settings,
    checkpoint: Checkpoint,
    generation: int,
    report: Callable[[Report], None],
    *,
    epoch: int | None = None,
) -> int:
    """Run the pipeline into its new tables until everything that is there now is through; says up to where."""
    stream = Transform.parse(spec.transform, directory=settings.directory).apply(
        source_rows(spark, spec, settings.dsn, epoch=epoch), spec.source
    )
    with ExitStack() as stack:
        sinks = []
        for place, sink_spec in enumerate(spec.sinks):
            sink = table.TableSink(sink_spec.options, context_of(spark, spec, settings, place), rebuild=generation)
            stack.callback(sink.close)
            sink.prepare()
            sinks.append(sink)
        batches = Batches(spec.name, checkpoint, sinks)
        ended = checkpoint.last_end()
        begun = None if ended is None else ended.position
        query = batches.start(stream, name=f"{spec.name} rebuild {generation} {begun}", trigger={"availableNow": True})
        stack.callback(query.stop)
        try:
            for done in watched(query, place=begun):
                if done is not None and done.rows:
                    report(Report(spec.name, spec.source, "batch", asdict(done)))
        except PySparkException as error:
            raise batches.explained(error) from error
    last = checkpoint.last_end()
    return 0 if last is None else last.position
