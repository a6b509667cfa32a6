"""Building the tables of a pipeline anew, from the beginning of the log, while the old ones are served."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

import headwater
from headwater import calls
from headwater.errors import HeadwaterError, InvalidRequest, LeaseLost, PipelineNotFound
from headwater.spark import to_table
from headwater.spark.batch import Batch
from headwater.spark.checkpoint import Checkpoint
from headwater.spark.lease import kept_lease
from headwater.spark.runner import Report, Settings, context_of, explained, place_in, source_rows, write_to_all
from headwater.spark.transform import Transform

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater import Headwater
    from headwater.spark.pipeline_file import PipelineSpec

POLL_SECONDS: Final = 0.2


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
        generation = to_table.begin_rebuild(log, spec.name)
        checkpoint = Checkpoint(spark, settings.checkpoint_of(spec.name, generation))
        catch_up(spark, spec, settings, checkpoint, generation, report)
        return _switch(log, spark, spec, settings, checkpoint, generation, report)


def _switch(
    log: Headwater,
    spark: SparkSession,
    spec: PipelineSpec,
    settings: Settings,
    checkpoint: Checkpoint,
    generation: int,
    report: Callable[[Report], None],
) -> Mapping[str, int]:
    token = log.run(calls.take_pipeline(spec.name, f"{settings.runner} (rebuild)", lease=settings.lease))
    lost = threading.Event()
    with kept_lease(log, spec.name, token, settings.lease, on_lost=lost.set):
        # What is settled now, the last stretch will have read, whether it finds an event there or not.
        read_to = log.run(calls.log_state()).settled
        end = catch_up(spark, spec, settings, checkpoint, generation, report)
        if lost.is_set():
            raise LeaseLost(f"another took {spec.name} before its tables could be switched", hint="Rebuild it again.")
        # The lease ends with it: whoever stands by goes on with the checkpoint of the rebuild.
        return to_table.switch(log, spec.name, generation=generation, caught_up_to=end, read_to=read_to)


def catch_up(
    spark: SparkSession,
    spec: PipelineSpec,
    settings: Settings,
    checkpoint: Checkpoint,
    generation: int,
    report: Callable[[Report], None],
) -> int:
    """Run the pipeline into its new tables until everything that is there now is through; says up to where."""
    stream = Transform.parse(spec.transform, directory=settings.directory).apply(
        source_rows(spark, spec, settings.dsn), spec.source
    )
    failed: list[BaseException] = []
    with ExitStack() as stack:
        sinks = []
        for place, sink_spec in enumerate(spec.sinks):
            sink = to_table.TableSink(sink_spec.options, context_of(spark, spec, settings, place), rebuild=generation)
            stack.callback(sink.close)
            sink.prepare()
            sinks.append(sink)

        def on_batch(rows: DataFrame, batch_number: int) -> None:
            batch = Batch(spec.name, batch_number, checkpoint.end_of(batch_number))
            try:
                write_to_all(sinks, rows, batch)
            except BaseException as error:
                failed.append(error)
                raise

        query = (
            stream.rows.writeStream.foreachBatch(on_batch)
            .queryName(f"{spec.name} rebuild {generation} {checkpoint.last_end()}")
            .outputMode(stream.mode)
            .option("checkpointLocation", checkpoint.directory)
            .trigger(availableNow=True)
            .start()
        )
        stack.callback(query.stop)
        told = -1
        while True:
            ended = query.awaitTermination(POLL_SECONDS)  # type: ignore[arg-type]
            for progress in query.recentProgress:
                if progress["batchId"] > told and progress["numInputRows"]:
                    told = progress["batchId"]
                    seconds = progress["durationMs"].get("triggerExecution", 0) / 1000
                    details = {"batch": told, "rows": progress["numInputRows"], "seconds": seconds}
                    report(Report(spec.name, spec.source, "batch", details | {"place": place_in(progress)}))
            if ended:
                break
        failure = query.exception()
        if failure is not None:
            if failed and isinstance(failed[0], HeadwaterError):
                raise failed[0]
            raise explained(str(failure)) from failure
    return checkpoint.last_end() or 0
