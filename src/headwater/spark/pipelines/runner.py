"""Runs pipelines: each under a lease, restarted after failures, stopped between two batches.

A `Runner` has one `PipelineRun` thread per pipeline. Its states: standing by (another runner holds the lease), running
a query, waiting before a retry, ended. For each query, `_begin` decides whether Spark's checkpoint fits the database or
the query starts after the recorded offset with a new checkpoint epoch. Invariants: only the holder of the lease writes;
a query never continues from a checkpoint of a lost history; a batch is recorded after all sinks have stored it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import psycopg
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

import headwater
from headwater.calls import log as log_calls
from headwater.calls import pipeline_runs
from headwater.calls import pipeline_runs as pipeline_runs_calls
from headwater.capture.slot import Slot
from headwater.capture.timeline import WalPosition
from headwater.errors import (
    HeadwaterError,
    InvalidRequest,
    LeaseLost,
    LogUnavailable,
    PipelineBusy,
    ProjectionRebuilt,
    SlotLost,
)
from headwater.spark.epochs import HistoryLost, common_position, history_lost_error
from headwater.spark.pipelines.batch import Sink, SinkContext, Source
from headwater.spark.pipelines.batch_query import BatchResult, BatchWriter, watch_batches
from headwater.spark.pipelines.checkpoint import Checkpoint
from headwater.spark.pipelines.file import IN_DATABASE, PipelineSpec
from headwater.spark.pipelines.lease import hold_lease
from headwater.spark.pipelines.snapshot_load import load_snapshots, not_in_snapshots
from headwater.spark.pipelines.transform import Transform, TransformResult

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from headwater import Headwater
    from headwater.calls.pipeline_runs import PipelineClaim

SINKS: Final[Mapping[str, tuple[str, str]]] = {
    "topic": ("headwater.spark.sinks.topic", "TopicSink"),
    "nats": ("headwater.spark.sinks.nats", "NatsBridgeSink"),
    "lake": ("headwater.spark.sinks.lake", "LakeSink"),
    "table": ("headwater.spark.sinks.table", "TableSink"),
}

MAX_PAUSE_SECONDS: Final = 60.0
FAILURES_OF_ONE_RUN: Final = 3
# Errors of a query that may be transient.
FAILURES: Final = (HeadwaterError, PySparkException, Py4JError, psycopg.Error, OSError)

ReportKind = Literal["started", "standing by", "snapshot", "batch", "failed", "stopped", "done", "ended"]


@dataclass(frozen=True, slots=True)
class Report:
    """An event in the life of a pipeline, for display."""

    pipeline: str
    source: Source
    what: ReportKind
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """Settings that apply to all pipelines of a run."""

    dsn: str
    nats_url: str | None
    directory: Path
    checkpoints: str
    runner: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    lease_seconds: float = 15.0
    grace_seconds: float = 60.0
    once: bool = False
    """End when everything that existed at the start is processed."""

    @property
    def lease(self) -> timedelta:
        return timedelta(seconds=self.lease_seconds)

    def checkpoint_of(self, name: str, checkpoint_epoch: int) -> str:
        """The path of a pipeline's checkpoint: a URI that Spark can write to, or a directory next to the file."""
        root = self.checkpoints
        if "://" not in root:
            root = str((self.directory / Path(root).expanduser()).resolve())
        return f"{root.rstrip('/')}/{name}/{checkpoint_epoch}"


def make_sink(kind: str, options: Mapping[str, Any], context: SinkContext) -> Sink:
    """Create a sink from its options; InvalidRequest if they are invalid."""
    module, name = SINKS[kind]
    sink: Sink = getattr(import_module(module), name)(options, context)
    return sink


class Runner:
    """Runs pipelines in parallel in one Spark session, until they end or `stop` is called."""

    def __init__(
        self,
        spark: SparkSession,
        specs: Sequence[PipelineSpec],
        settings: RunnerSettings,
        *,
        report: Callable[[Report], None] = lambda _: None,
    ) -> None:
        self._runs: Final = [PipelineRun(spark, spec, settings, report) for spec in specs]

    def run(self) -> None:
        """Return when all pipelines have ended; raise the error of the first one that failed for good."""
        threads = [threading.Thread(target=run.run, name=f"pipeline {run.name}", daemon=True) for run in self._runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            # Short waits, because an unbounded wait would block signals.
            while thread.is_alive():
                thread.join(0.2)
        for run in self._runs:
            if run.error is not None:
                raise run.error

    def stop(self) -> None:
        """Ask all pipelines to end after their current batch. Returns immediately."""
        for run in self._runs:
            run.stop()


class PipelineRun:
    """One pipeline: waits for its lease, then runs its query and restarts it after failures."""

    def __init__(
        self, spark: SparkSession, spec: PipelineSpec, settings: RunnerSettings, report: Callable[[Report], None]
    ) -> None:
        self.name: Final = spec.name
        # Replaced when `run` returns. It remains if a bug in Headwater ends the thread with a traceback.
        self.error: Exception | None = HeadwaterError(f"{spec.name} ended by a bug in Headwater; see the traceback")
        self._spark: Final = spark
        self._spec: Final = spec
        self._settings: Final = settings
        self._report: Final = report
        self._stop: Final = threading.Event()
        self._lost: Final = threading.Event()
        self._batch: Final = threading.Lock()
        self._checkpoint = Checkpoint(spark, "")
        self._batches: BatchWriter | None = None
        self._offset: int | None = None
        self._rewound_in: int | None = None

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        """Run until the pipeline is stopped, is done, or fails for good; then `error` is the reason."""
        try:
            with headwater.connect(self._settings.dsn, pool_size=2) as log:
                self._run(log)
            self.error = None
        except FAILURES as error:
            self.error = error
            self._emit("ended", error=str(error))

    def _run(self, log: Headwater) -> None:
        start, reported = True, False
        while not self._stop.is_set():
            try:
                claim = log.run(
                    pipeline_runs.claim_pipeline(
                        self.name,
                        self._settings.runner,
                        lease=self._settings.lease,
                        source=self._spec.source,
                        definition=self._spec.definition,
                        start=start,
                    )
                )
            except LogUnavailable:
                if start:
                    raise
                self._stop.wait(1.0)
                continue
            start = False
            if claim.token is None:
                if claim.stopped and claim.held_by is None:
                    break
                if self._settings.once:
                    raise PipelineBusy(
                        f"{self.name} is already running: {claim.held_by} holds its lease",
                        hint="Stop it, or run without --once to stand by.",
                    )
                if not reported:
                    self._emit("standing by", runner=claim.held_by)
                reported = True
                self._stop.wait(min(1.0, self._settings.lease_seconds / 3))
                continue
            reported = False
            self._lost.clear()
            with hold_lease(
                log, self.name, claim.token, self._settings.lease, on_lost=self._lost.set, on_stop=self._stop.set
            ):
                self._work(log, claim, claim.token)
            if not self._lost.is_set():
                break
        self._emit("done" if self._settings.once and not self._stop.is_set() else "stopped", checkpoint=self._offset)

    def _ending(self) -> bool:
        return self._stop.is_set() or self._lost.is_set()

    # -- the query

    def _work(self, log: Headwater, claim: PipelineClaim, token: int) -> None:
        self._offset, self._rewound_in = claim.checkpoint, claim.rewound_in
        self._use_checkpoint(claim.checkpoint_epoch)
        in_a_row = 0
        while not self._ending():
            try:
                self._run_query(log, token)
                return
            except FAILURES as error:
                failure = error if self._batches is None else self._batches.explain(error)
                if self._ending():
                    return
                if isinstance(failure, LeaseLost | ProjectionRebuilt):
                    # Another runner has the lease, or the tables were rebuilt with a new checkpoint. Claim it again.
                    self._lost.set()
                    return
                if java_is_gone(self._spark):
                    raise SparkSessionLost(
                        "Spark's Java process has ended", hint="Run the command again: it continues."
                    ) from error
                in_a_row += 1
                with suppress(HeadwaterError):
                    in_a_row = log.run(pipeline_runs.record_failure(self.name, token, str(failure))) or in_a_row
                if is_final(failure) or (self._settings.once and in_a_row >= FAILURES_OF_ONE_RUN):
                    raise failure from error
                pause = min(MAX_PAUSE_SECONDS, 0.5 * 2 ** min(in_a_row, 10))
                self._emit("failed", error=str(failure), failures=in_a_row, again_in_seconds=pause)
                self._pause(pause)

    def _use_checkpoint(self, checkpoint_epoch: int) -> None:
        self._checkpoint = Checkpoint(self._spark, self._settings.checkpoint_of(self.name, checkpoint_epoch))
        self._checkpoint.delete_older()

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._ending():
            self._stop.wait(min(0.2, seconds))

    def _run_query(self, log: Headwater, token: int) -> None:
        self._batches = None
        # Read the epoch first: all decisions below hold in this epoch, and the source ends the query in any other.
        epoch = log.run(log_calls.current_epoch()) if self._spec.source == "log" else None
        begin = self._begin(log, epoch)
        self._rewound_in = begin.rewound_in or self._rewound_in
        with ExitStack() as stack:
            sinks = []
            for number, spec in enumerate(self._spec.sinks):
                sink = make_sink(spec.kind, spec.options, self._context(number))
                stack.callback(sink.close)
                sinks.append(sink)
            for sink in sinks:
                sink.prepare()
            # Check that the lease is still held, so that the sinks were prepared for this claim's checkpoint.
            log.run(pipeline_runs_calls.renew_pipeline(self.name, token, lease=self._settings.lease))
            stream = self._stream(log, token, sinks, begin, epoch)
            self._batches = BatchWriter(self.name, self._checkpoint, sinks)
            query = self._start(self._batches, stream)
            stack.callback(self._end, query)
            self._emit("started", checkpoint=self._offset)
            self._watch(query, log, token)
        if self._spec.source == "changes" and self._offset is not None and not self._lost.is_set():
            # Spark commits a batch to the source only with the next one. Advance the slot now to release the WAL.
            done, slot = self._checkpoint.last_done(), slot_of(self._spec, self._settings.dsn)
            if done is not None:
                with suppress(HeadwaterError):
                    slot.verify(WalPosition(done.position, done.history))
                    slot.advance(done.position)

    def _context(self, number: int) -> SinkContext:
        return context_of(
            self._spark, self._spec, self._settings, number, rewound_in=self._rewound_in, ask_to_stop=self.stop
        )

    def _begin(self, log: Headwater, epoch: int | None) -> StartPoint:
        """Decide where the query continues: with its checkpoint, if that fits the current state of the database."""
        planned = self._checkpoint.last_end()
        if self._spec.source == "changes" and (planned is not None or self._offset is not None):
            # Raise SlotLost before a missing slot is created: the pipeline has read before and would skip changes.
            slot_of(self._spec, self._settings.dsn).state()
        if planned is None:
            return StartPoint(self._offset, None if self._offset is None else "its checkpoint is missing")
        if epoch is not None and planned.epoch not in (None, epoch):
            done, in_database = self._checkpoint.last_done(), any(sink.kind in IN_DATABASE for sink in self._spec.sinks)
            topics = self._spec.source_options.get("topics")
            common = common_position(log, planned, topics)
            if common < planned.position:
                if self._spec.on_epoch_change == "stop":
                    raise history_lost_error(self.name, "sinks", planned, present=epoch, common=common)
                after = self._offset if in_database or done is None else common_position(log, done, topics)
                return StartPoint(after, "the log has lost events that it read", renew=True, rewound_in=epoch)
            if in_database and done is not None and (self._offset is None or self._offset < done.position):
                # The log has the events, but the database may have lost the rows that the sinks made of them.
                return StartPoint(self._offset, "the database has lost later batches", renew=True)
        if self._offset is not None and planned.position < self._offset:
            # The checkpoint belongs to an earlier run, before another machine took over.
            return StartPoint(self._offset, "its checkpoint is older than the recorded offset", renew=True)
        return StartPoint(None, None)

    def _stream(
        self, log: Headwater, token: int, sinks: Sequence[Sink], begin: StartPoint, epoch: int | None
    ) -> TransformResult:
        """The rows for the sinks, from where the query continues; starts a new checkpoint epoch if needed."""
        rows = source_rows(self._spark, self._spec, self._settings.dsn, after=begin.after, epoch=epoch)
        if self._spec.source_options.get("snapshot"):
            slot = slot_of(self._spec, self._settings.dsn)
            snapshots = load_snapshots(
                self._spark, log, slot, self._spec, token, sinks, report=lambda **about: self._emit("snapshot", **about)
            )
            rows = rows.where(not_in_snapshots(slot.dsn, snapshots))
        transform = Transform.parse(self._spec.transform, directory=self._settings.directory)
        result = transform.apply(rows, self._spec.source)
        if begin.lacking and result.stateful:
            raise InvalidRequest(
                f"{self.name} keeps state between batches and cannot continue: {begin.lacking}",
                hint=f"Restore {self._checkpoint.directory}, or run: headwater pipeline rebuild {self.name}",
            )
        if begin.renew:
            self._use_checkpoint(
                log.run(pipeline_runs_calls.renew_checkpoint_epoch(self.name, token, rewound_in=begin.rewound_in))
            )
            # A checkpoint epoch of a lost history may be assigned again.
            self._checkpoint.delete()
        return result

    def _start(self, batches: BatchWriter, stream: TransformResult) -> StreamingQuery:
        def around(write: Callable[[], None]) -> None:
            # Locked, so that `_end` can wait for the end of a batch.
            with self._batch:
                if self._ending():
                    raise QueryStopped
                write()

        every = {"processingTime": f"{self._spec.every_seconds} seconds"}
        trigger = {"availableNow": True} if self._settings.once else every
        return batches.start(stream, name=self.name, trigger=trigger, around=around)

    def _watch(self, query: StreamingQuery, log: Headwater, token: int) -> None:
        """Report and record the batches of a query until it ends."""
        for done in watch_batches(query, offset=self._offset):
            if done is not None:
                self._note(done, log, token)
            elif self._ending():
                return

    def _note(self, done: BatchResult, log: Headwater, token: int) -> None:
        self._offset = done.offset
        details = done.document()
        try:
            call = pipeline_runs_calls.record_batch(
                self.name, token, checkpoint=done.offset, rows=done.rows, details=details, epoch=done.epoch
            )
            log.run(call)
        except LeaseLost:
            self._lost.set()
        except HeadwaterError as error:
            details["unrecorded"] = str(error)
        self._emit("batch", **details)

    def _end(self, query: StreamingQuery) -> None:
        """Stop a query after its batch, or immediately if the lease is lost."""
        patience = 0.0 if self._lost.is_set() else self._settings.grace_seconds
        if self._batch.acquire(timeout=patience) if patience else self._batch.acquire(blocking=False):
            self._batch.release()
            # Let Spark commit the batch to its checkpoint; otherwise it would be repeated.
            until = time.monotonic() + min(patience, 5.0)
            while query.isActive and query.status["isTriggerActive"] and time.monotonic() < until:
                time.sleep(0.02)
        with suppress(PySparkException, Py4JError, OSError):  # the query or the JVM has already ended
            query.stop()

    def _emit(self, what: ReportKind, **details: Any) -> None:
        self._report(Report(self.name, self._spec.source, what, details))


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where a query starts. `lacking` is the reason for starting after an offset instead of the checkpoint."""

    after: int | None
    lacking: str | None
    renew: bool = False
    """Whether an existing checkpoint must be replaced by a new checkpoint epoch."""
    rewound_in: int | None = None
    """The current epoch, if the log has lost events that the pipeline has read."""


class SparkSessionLost(HeadwaterError):
    """The Spark session has ended. A process cannot start another one."""


def java_is_gone(spark: SparkSession) -> bool:
    try:
        spark.sparkContext._jvm.System.nanoTime()  # type: ignore[union-attr]
    except (Py4JError, OSError):
        return True
    return False


class QueryStopped(Exception):
    """Raised in a batch to end a query that must not start more batches."""


def slot_of(spec: PipelineSpec, dsn: str) -> Slot:
    """The replication slot of a pipeline that captures changes."""
    return Slot(dsn, spec.slot, spec.source_options.get("publication", spec.slot))


def context_of(
    spark: SparkSession,
    spec: PipelineSpec,
    settings: RunnerSettings,
    number: int,
    *,
    rewound_in: int | None = None,
    ask_to_stop: Callable[[], None] = lambda: None,
) -> SinkContext:
    """The context of the sink with this number."""
    own = {"slot": spec.slot} if spec.source == "changes" else {}
    return SinkContext(
        spark=spark,
        pipeline=spec.name,
        source=spec.source,
        source_options={**spec.source_options, **own},
        dsn=settings.dsn,
        nats_url=settings.nats_url,
        directory=settings.directory,
        sink_number=number,
        on_epoch_change=spec.on_epoch_change,
        rewound_in=rewound_in,
        ask_to_stop=ask_to_stop,
    )


def source_rows(
    spark: SparkSession, spec: PipelineSpec, dsn: str, *, after: int | None = None, epoch: int | None = None
) -> DataFrame:
    """The stream of a pipeline's source. Without a checkpoint it starts after `after`, or where the file declares.

    In another epoch than `epoch`, the query ends."""
    given = spec.source_options
    if spec.source == "changes":
        slot = slot_of(spec, dsn)
        # The slot determines the start: it retains everything that is not durable in the sinks yet.
        options = {"slot": slot.name, "publication": slot.publication, "tables": ",".join(given.get("tables", ()))}
        names = {"max_bytes": "maxBytesPerTrigger"}
    else:
        options = {} if epoch is None else {"inEpoch": str(epoch)}
        names = {
            "skip_expired": "skipExpired",
            "max_events": "maxEventsPerTrigger",
            "max_bytes": "maxBytesPerTrigger",
            "partitions": "partitions",
        }
        if after is not None:
            options["after"] = str(after)
        else:
            names |= {"after": "after", "since": "since", "from_end": "fromEnd"}
        if given.get("topics"):
            options["topics"] = ",".join(given["topics"])
    options |= {option: option_text(given[name]) for name, option in names.items() if name in given}
    form = "headwater.changes" if spec.source == "changes" else "headwater"
    return spark.readStream.format(form).option("dsn", dsn).options(**options).load()


def option_text(value: Any) -> str:
    """A value of the file as a Spark option."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_final(error: Exception) -> bool:
    """Whether a retry cannot help without intervention."""
    return isinstance(error, InvalidRequest | SlotLost | HistoryLost)
