"""Running pipelines: each under its lease, started again when it fails, stopped between two batches."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import psycopg
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

import headwater
from headwater import calls
from headwater.capture.slot import Slot
from headwater.capture.timeline import WalPlace
from headwater.errors import (
    HeadwaterError,
    InvalidRequest,
    LeaseLost,
    LogUnavailable,
    PipelineBusy,
    ProjectionRebuilt,
    SlotLost,
)
from headwater.spark.epochs import HistoryLost, common_position, history_lost
from headwater.spark.pipelines.batch import Context, Sink, Source
from headwater.spark.pipelines.batch_query import Batches, Done, watched
from headwater.spark.pipelines.checkpoint import Checkpoint
from headwater.spark.pipelines.file import IN_DATABASE, PipelineSpec
from headwater.spark.pipelines.lease import kept_lease
from headwater.spark.pipelines.snapshot_load import load_snapshots, unseen
from headwater.spark.pipelines.transform import Transform, Transformed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from headwater import Headwater
    from headwater.model import PipelineClaim

SINKS: Final[Mapping[str, tuple[str, str]]] = {
    "topic": ("headwater.spark.sinks.topic", "TopicSink"),
    "nats": ("headwater.spark.sinks.nats", "NatsBridgeSink"),
    "lake": ("headwater.spark.sinks.lake", "LakeSink"),
    "table": ("headwater.spark.sinks.table", "TableSink"),
}

LONGEST_PAUSE_SECONDS: Final = 60.0
FAILURES_OF_ONE_RUN: Final = 3
# What may go wrong while a query is run, and may go well the next time.
FAILURES: Final = (HeadwaterError, PySparkException, Py4JError, psycopg.Error, OSError)

What = Literal["started", "standing by", "snapshot", "batch", "failed", "stopped", "done", "ended"]


@dataclass(frozen=True, slots=True)
class Report:
    """What happened to a pipeline, for whoever shows it."""

    pipeline: str
    source: Source
    what: What
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """How pipelines are run, whichever they are."""

    dsn: str
    nats_url: str | None
    directory: Path
    checkpoints: str
    runner: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    lease_seconds: float = 15.0
    grace_seconds: float = 60.0
    once: bool = False
    """End when everything that was there at the start is through."""

    @property
    def lease(self) -> timedelta:
        return timedelta(seconds=self.lease_seconds)

    def checkpoint_of(self, name: str, generation: int) -> str:
        """Where a pipeline's checkpoint is: any URI that Spark can write to, or a directory beside the file."""
        root = self.checkpoints
        if "://" not in root:
            root = str((self.directory / Path(root).expanduser()).resolve())
        return f"{root.rstrip('/')}/{name}/{generation}"


def make_sink(kind: str, options: Mapping[str, Any], context: Context) -> Sink:
    """A sink from its options; InvalidRequest for those that make no sense."""
    module, name = SINKS[kind]
    sink: Sink = getattr(import_module(module), name)(options, context)
    return sink


class Runner:
    """Runs pipelines side by side in one Spark session, until they end or `stop` is called."""

    def __init__(
        self,
        spark: SparkSession,
        specs: Sequence[PipelineSpec],
        settings: Settings,
        *,
        report: Callable[[Report], None] = lambda _: None,
    ) -> None:
        self._runs: Final = [PipelineRun(spark, spec, settings, report) for spec in specs]

    def run(self) -> None:
        """Returns when every pipeline has ended; raises what ended the first of those that failed for good."""
        threads = [threading.Thread(target=run.run, name=f"pipeline {run.name}", daemon=True) for run in self._runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            # In turns, since a wait without an end would not let signals through.
            while thread.is_alive():
                thread.join(0.2)
        for run in self._runs:
            if run.error is not None:
                raise run.error

    def stop(self) -> None:
        """Ask all pipelines to end after their batch. Returns at once."""
        for run in self._runs:
            run.stop()


class PipelineRun:
    """One pipeline: waits for its lease, then runs its query and starts it again when it fails."""

    def __init__(
        self, spark: SparkSession, spec: PipelineSpec, settings: Settings, report: Callable[[Report], None]
    ) -> None:
        self.name: Final = spec.name
        # Until it has ended as it should: a mistake of ours ends its thread, with a traceback.
        self.error: Exception | None = HeadwaterError(f"{spec.name} ended by a mistake in Headwater; see above")
        self._spark: Final = spark
        self._spec: Final = spec
        self._settings: Final = settings
        self._report: Final = report
        self._stop: Final = threading.Event()
        self._lost: Final = threading.Event()
        self._batch: Final = threading.Lock()
        self._checkpoint = Checkpoint(spark, "")
        self._batches: Batches | None = None
        self._place: int | None = None
        self._rewound_in: int | None = None

    def stop(self) -> None:
        self._stop.set()

    def run(self) -> None:
        """Until it is stopped, is through, or fails for good: then `error` says why."""
        try:
            with headwater.connect(self._settings.dsn, pool_size=2) as log:
                self._run(log)
            self.error = None
        except FAILURES as error:
            self.error = error
            self._tell("ended", error=str(error))

    def _run(self, log: Headwater) -> None:
        start, told = True, False
        while not self._stop.is_set():
            try:
                claim = log.run(
                    calls.claim_pipeline(
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
                        f"{self.name} is run by {claim.held_by} now", hint="Stop it, or run without --once to stand by."
                    )
                if not told:
                    self._tell("standing by", runner=claim.held_by)
                told = True
                self._stop.wait(min(1.0, self._settings.lease_seconds / 3))
                continue
            told = False
            self._lost.clear()
            with kept_lease(
                log, self.name, claim.token, self._settings.lease, on_lost=self._lost.set, on_stop=self._stop.set
            ):
                self._work(log, claim, claim.token)
            if not self._lost.is_set():
                break
        self._tell("done" if self._settings.once and not self._stop.is_set() else "stopped", place=self._place)

    def _ending(self) -> bool:
        return self._stop.is_set() or self._lost.is_set()

    # -- the query

    def _work(self, log: Headwater, claim: PipelineClaim, token: int) -> None:
        self._place, self._rewound_in = claim.place, claim.rewound_in
        self._use_checkpoint(claim.generation)
        in_a_row = 0
        while not self._ending():
            try:
                self._run_query(log, token)
                return
            except FAILURES as error:
                failure = error if self._batches is None else self._batches.explained(error)
                if self._ending():
                    return
                if isinstance(failure, LeaseLost | ProjectionRebuilt):
                    # Another has it; or its tables were built anew, with a checkpoint of their own. Claim it again.
                    self._lost.set()
                    return
                if java_is_gone(self._spark):
                    raise SparkGone("Spark's Java has ended", hint="Start the command again: it goes on.") from error
                in_a_row += 1
                with suppress(HeadwaterError):
                    in_a_row = log.run(calls.record_failure(self.name, token, str(failure))) or in_a_row
                if is_final(failure) or (self._settings.once and in_a_row >= FAILURES_OF_ONE_RUN):
                    raise failure from error
                pause = min(LONGEST_PAUSE_SECONDS, 0.5 * 2 ** min(in_a_row, 10))
                self._tell("failed", error=str(failure), failures=in_a_row, again_in_seconds=pause)
                self._pause(pause)

    def _use_checkpoint(self, generation: int) -> None:
        self._checkpoint = Checkpoint(self._spark, self._settings.checkpoint_of(self.name, generation))
        self._checkpoint.delete_older()

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._ending():
            self._stop.wait(min(0.2, seconds))

    def _run_query(self, log: Headwater, token: int) -> None:
        self._batches = None
        # First: what is found out from here on holds in this epoch, and the source ends the query in any other.
        epoch = log.run(calls.current_epoch()) if self._spec.source == "log" else None
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
            # Still ours: what they have prepared for is what this claim's checkpoint belongs to.
            log.run(calls.renew_pipeline(self.name, token, lease=self._settings.lease))
            stream = self._stream(log, token, sinks, begin, epoch)
            self._batches = Batches(self.name, self._checkpoint, sinks)
            query = self._start(self._batches, stream)
            stack.callback(self._end, query)
            self._tell("started", place=self._place)
            self._watch(query, log, token)
        if self._spec.source == "changes" and self._place is not None and not self._lost.is_set():
            # Spark tells the source of a batch only with the next one; the server need not keep it until then.
            done, slot = self._checkpoint.last_done(), slot_of(self._spec, self._settings.dsn)
            if done is not None:
                with suppress(HeadwaterError):
                    slot.verify(WalPlace(done.position, done.history))
                    slot.advance(done.position)

    def _context(self, number: int) -> Context:
        return context_of(
            self._spark, self._spec, self._settings, number, rewound_in=self._rewound_in, ask_to_stop=self.stop
        )

    def _begin(self, log: Headwater, epoch: int | None) -> Begin:
        """Where the query goes on: with its checkpoint, if that fits to the database as it is now."""
        planned = self._checkpoint.last_end()
        if self._spec.source == "changes" and (planned is not None or self._place is not None):
            # Before anything makes a slot where it is missing. It has read before, so that would leave out changes.
            slot_of(self._spec, self._settings.dsn).state()
        if planned is None:
            return Begin(self._place, None if self._place is None else "its checkpoint is gone")
        if epoch is not None and planned.epoch not in (None, epoch):
            done, in_database = self._checkpoint.last_done(), any(sink.kind in IN_DATABASE for sink in self._spec.sinks)
            topics = self._spec.source_options.get("topics")
            common = common_position(log, planned, topics)
            if common < planned.position:
                if self._spec.on_epoch_change == "stop":
                    raise history_lost(self.name, "sinks", planned, present=epoch, common=common)
                after = self._place if in_database or done is None else common_position(log, done, topics)
                return Begin(after, "the log has lost events that it read", renew=True, rewound_in=epoch)
            if in_database and done is not None and (self._place is None or self._place < done.position):
                # The events are there, and what the sinks had made of them is perhaps not.
                return Begin(self._place, "the database has lost what was done since", renew=True)
        if self._place is not None and planned.position < self._place:
            # It is of an earlier run, before another machine took over.
            return Begin(self._place, "its checkpoint is older than what was done since", renew=True)
        return Begin(None, None)

    def _stream(
        self, log: Headwater, token: int, sinks: Sequence[Sink], begin: Begin, epoch: int | None
    ) -> Transformed:
        """What goes to the sinks, from where it was left; with a checkpoint that fits to that."""
        rows = source_rows(self._spark, self._spec, self._settings.dsn, after=begin.after, epoch=epoch)
        if self._spec.source_options.get("snapshot"):
            slot = slot_of(self._spec, self._settings.dsn)
            snapshots = load_snapshots(
                self._spark, log, slot, self._spec, token, sinks, tell=lambda **about: self._tell("snapshot", **about)
            )
            rows = rows.where(unseen(slot.dsn, snapshots))
        transform = Transform.parse(self._spec.transform, directory=self._settings.directory)
        result = transform.apply(rows, self._spec.source)
        if begin.lacking and result.stateful:
            raise InvalidRequest(
                f"{self.name} keeps state from batch to batch, and {begin.lacking}",
                hint=f"Bring back {self._checkpoint.directory}, or run: headwater pipeline rebuild {self.name}",
            )
        if begin.renew:
            self._use_checkpoint(log.run(calls.renew_generation(self.name, token, rewound_in=begin.rewound_in)))
            # A number that was given in a lost history may be given again.
            self._checkpoint.delete()
        return result

    def _start(self, batches: Batches, stream: Transformed) -> StreamingQuery:
        def around(write: Callable[[], None]) -> None:
            # Locked, so that whoever stops the query can wait for the end of a batch.
            with self._batch:
                if self._ending():
                    raise Stopping
                write()

        every = {"processingTime": f"{self._spec.every_seconds} seconds"}
        trigger = {"availableNow": True} if self._settings.once else every
        return batches.start(stream, name=self.name, trigger=trigger, around=around)

    def _watch(self, query: StreamingQuery, log: Headwater, token: int) -> None:
        """Until the query ends: tell and record its batches."""
        for done in watched(query, place=self._place):
            if done is not None:
                self._note(done, log, token)
            elif self._ending():
                return

    def _note(self, done: Done, log: Headwater, token: int) -> None:
        self._place = done.place
        details = asdict(done)
        try:
            call = calls.record_batch(
                self.name, token, place=done.place, rows=done.rows, details=details, epoch=done.epoch
            )
            log.run(call)
        except LeaseLost:
            self._lost.set()
        except HeadwaterError as error:
            details["unrecorded"] = str(error)
        self._tell("batch", **details)

    def _end(self, query: StreamingQuery) -> None:
        """Stop a query after its batch, or at once if the pipeline is another's now."""
        patience = 0.0 if self._lost.is_set() else self._settings.grace_seconds
        if self._batch.acquire(timeout=patience) if patience else self._batch.acquire(blocking=False):
            self._batch.release()
            # What is left is to note that the batch is done; without it, it would be repeated.
            until = time.monotonic() + min(patience, 5.0)
            while query.isActive and query.status["isTriggerActive"] and time.monotonic() < until:
                time.sleep(0.02)
        with suppress(Exception):  # it has ended, or the JVM has
            query.stop()

    def _tell(self, what: What, **details: Any) -> None:
        self._report(Report(self.name, self._spec.source, what, details))


@dataclass(frozen=True, slots=True)
class Begin:
    """Where a query begins: after a position instead of its checkpoint, if that is `lacking`."""

    after: int | None
    lacking: str | None
    renew: bool = False
    """Whether there is a checkpoint, which must not be used."""
    rewound_in: int | None = None
    """The present epoch, if the log has lost events that the pipeline has read."""


class SparkGone(HeadwaterError):
    """The session is dead, and a process has only one."""


def java_is_gone(spark: SparkSession) -> bool:
    try:
        spark.sparkContext._jvm.System.nanoTime()  # type: ignore[union-attr]
    except (Py4JError, OSError):
        return True
    return False


class Stopping(Exception):
    """Ends a query that is to start no more batches."""


def slot_of(spec: PipelineSpec, dsn: str) -> Slot:
    """The replication slot of a pipeline that captures changes."""
    return Slot(dsn, spec.slot, spec.source_options.get("publication", spec.slot))


def context_of(
    spark: SparkSession,
    spec: PipelineSpec,
    settings: Settings,
    number: int,
    *,
    rewound_in: int | None = None,
    ask_to_stop: Callable[[], None] = lambda: None,
) -> Context:
    """What the sink of this number is made with."""
    own = {"slot": spec.slot} if spec.source == "changes" else {}
    return Context(
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
    """The stream of a pipeline's source: without a checkpoint it begins after a position, or where the file says.

    In another epoch than this, the query ends."""
    given = spec.source_options
    if spec.source == "changes":
        slot = slot_of(spec, dsn)
        # Where it begins is the slot's to say: it keeps whatever was not yet durable in the sinks.
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
    """A value of the file as an option of Spark."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_final(error: Exception) -> bool:
    """Whether trying again cannot help: somebody has to change something first."""
    return isinstance(error, InvalidRequest | SlotLost | HistoryLost)
