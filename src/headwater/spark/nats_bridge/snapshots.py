"""Publishes snapshots of tables to NATS: one at a time per table, read in ranges by tasks, resumed after a crash.

Steps: claim the table and export a Postgres snapshot; resume the stored record or create one; run a task for each
missing range and record it; publish the metadata, which makes the snapshot visible to readers. The driver holds the
exported snapshot open. If the driver or Postgres crashes, that snapshot is lost: the missing ranges are then read at a
later one, and the metadata contains the LSN up to which readers must apply changes leniently (`consistent_lsn`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

import nats.errors
import psycopg
from nats.js import JetStreamContext
from nats.js.errors import Error as JetStreamError

from headwater.capture import snapshot
from headwater.capture.publication import quoted
from headwater.capture.slot import lsn_text
from headwater.capture.snapshot import Plan, TableBusy
from headwater.errors import HeadwaterError
from headwater.nats import codec, messages, streams, subjects
from headwater.nats.codec import Encoding
from headwater.nats.errors import NatsUnavailable
from headwater.nats.publisher import JetStreamPublisher
from headwater.nats.snapshot_chunks import merge_runs
from headwater.nats.subjects import Table
from headwater.observability.metrics import ERROR, logger
from headwater.spark.nats_bridge.snapshot_ranges import RangeExecutor, RangeFailure, RangeTask
from headwater.spark.nats_bridge.snapshot_record import RangeResult, SnapshotRecord, can_resume, missing_ranges

T = TypeVar("T")

# The minimum size of a range in blocks, and the approximate maximum of ranges per table, since each is recorded.
RANGE_BLOCKS: Final = 2_048
MAX_RANGES: Final = 4_096
MAX_TABLES: Final = 64
TABLES_AT_A_TIME: Final = 4
_TRIES_WITHOUT_PROGRESS: Final = 5
_MAX_WAIT_SECONDS: Final = 10.0
_COMMIT_SECONDS: Final = 1.0
_LOG_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 30.0
_SAMPLE_SPOTS: Final = 8
_SAMPLE_BLOCKS: Final = 4
_SAMPLE_ROWS: Final = 4_000


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """The progress of a snapshot. `about_rows` is Postgres' estimate of all rows."""

    table: str
    snapshot_id: str = ""
    state: Literal["waiting", "running", "done", "failed", "left"] = "waiting"
    ranges_done: int = 0
    ranges: int = 0
    chunks: int = 0
    rows: int = 0
    about_rows: int = 0
    resumed: bool = False
    error: str | None = None


class SnapshotsStopped(Exception):
    """The snapshots were stopped. Completed ranges stay recorded, and the next start resumes them."""


class _AttemptFailed(Exception):
    """An attempt failed; `final` if a retry would not help."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


_OUTAGES: Final = (
    *(psycopg.OperationalError, psycopg.InterfaceError),
    *(nats.errors.Error, JetStreamError, TimeoutError, NatsUnavailable),
)


class SnapshotTaker:
    """Takes snapshots of tables in background threads. `loop` is the event loop of `js`, in another thread."""

    def __init__(
        self,
        js: JetStreamContext,
        loop: asyncio.AbstractEventLoop,
        ranges: RangeExecutor,
        *,
        dsn: str,
        nats_url: str,
        encoding: Encoding = "msgpack",
        compressed: bool = False,
        with_dictionary: bool = False,
        chunk_rows: int = messages.CHUNK_ROWS,
        range_blocks: int = RANGE_BLOCKS,
        retry_seconds: float = 60.0,
    ) -> None:
        self._js: Final = js
        self._loop: Final = loop
        self._ranges: Final = ranges
        self._dsn: Final = dsn
        self._nats_url: Final = nats_url
        self._encoding: Final[Encoding] = encoding
        self._compressed: Final = compressed or with_dictionary
        self._with_dictionary: Final = with_dictionary
        self._chunk_rows: Final = chunk_rows
        self._range_blocks: Final = range_blocks
        self._retry_seconds: Final = retry_seconds
        self._tables: Final = ThreadPoolExecutor(TABLES_AT_A_TIME, "headwater-snapshot")
        self._workers: Final = ThreadPoolExecutor(max(1, ranges.parallel), "headwater-range")
        self._lock: Final = threading.Lock()
        self._stopping: Final = threading.Event()
        self._running: dict[Table, Future[None]] = {}
        self.progress: dict[Table, SnapshotProgress] = {}
        self.completed = 0
        self.failed = 0
        self.rows_published = 0

    # -- public methods, thread-safe

    def start(self, table: Table) -> tuple[bool, SnapshotProgress] | None:
        """Start a snapshot of a table, or join the running one; return whether it was joined, and its progress.

        None if too many tables are waiting."""
        with self._lock:
            running = self._running.get(table)
            if running is not None and not running.done():
                return True, self.progress[table]
            busy = sum(not future.done() for future in self._running.values())
            if busy >= MAX_TABLES or self._stopping.is_set():
                return None
            self.progress[table] = SnapshotProgress(table.full_name)
            self._running[table] = self._tables.submit(self._take, table)
            self._running[table].add_done_callback(lambda future: self._note_mistake(table, future))
            return False, self.progress[table]

    def wait(self, table: Table, seconds: float) -> SnapshotProgress:
        """Wait for the running snapshot of a table."""
        self._running[table].result(seconds)
        return self.progress[table]

    def stop(self) -> None:
        """Stop running snapshots and wait for the threads. The next start resumes them."""
        self._stopping.set()
        self._ranges.cancel()
        self._tables.shutdown(wait=True, cancel_futures=True)
        self._workers.shutdown(wait=True, cancel_futures=True)

    # -- internals

    def _take(self, table: Table) -> None:
        """Run attempts until the snapshot is complete or fails for good."""
        tries, wait_seconds, claimed = 0, 0.2, False
        while True:
            before = self.progress[table].ranges_done
            if claimed and not self._is_running_elsewhere(table):
                self._update(table, state="left")
                return
            try:
                claimed = False
                self._try(table)
                return
            except SnapshotsStopped:
                self._update(table, state="left")
                return
            except TableBusy:
                # Its snapshot serves this request, too. If that process crashes, this one continues.
                reason, final = "another process is taking it", False
                tries, claimed = 0, True
            except _AttemptFailed as error:
                reason, final = str(error), error.final
            except _OUTAGES as error:
                reason, final = str(error) or type(error).__name__, False
            except (HeadwaterError, psycopg.Error) as error:
                reason, final = str(error), True
            tries = 1 if self.progress[table].ranges_done > before else tries + 1
            if final or tries >= _TRIES_WITHOUT_PROGRESS:
                self._fail(table, reason)
                return
            logger.warning("snapshot of %s will be retried: %s", table.full_name, reason)
            if self._stopping.wait(wait_seconds):
                self._update(table, state="left")
                return
            wait_seconds = min(2 * wait_seconds, _MAX_WAIT_SECONDS)

    def _note_mistake(self, table: Table, future: Future[None]) -> None:
        """Mark the snapshot as failed after an unexpected error, so that it does not look like a running one."""
        if not future.cancelled() and (error := future.exception()) is not None:
            self.failed += 1
            self._update(table, state="failed", error=f"{type(error).__name__}: {error}")
            logger.error("snapshot of %s failed", table.full_name, exc_info=error)

    def _is_running_elsewhere(self, table: Table) -> bool:
        try:
            record = SnapshotRecord.of_document(self._ask(streams.get_snapshot(self._js, table)))
        except _OUTAGES:
            return True
        return record is None or record.state == "running"

    def _try(self, table: Table) -> None:
        # Read the end of the stream before the snapshot: changes up to it are visible to the snapshot.
        info = self._ask(self._js.stream_info(subjects.CDC_STREAM))
        name = f"{quoted(table.schema)}.{quoted(table.name)}"
        with snapshot.open_snapshot(self._dsn, [name], claimed=True, commit_seconds=_COMMIT_SECONDS) as (
            taken,
            connection,
        ):
            plan = snapshot.plan(
                connection,
                taken,
                name,
                chunk_blocks=self._range_blocks,
                max_chunks=MAX_RANGES,
                needs_key=True,
            )
            after_lsn = snapshot.current_lsn(connection)
            known = SnapshotRecord.of_document(self._ask(streams.get_snapshot(self._js, table)))
            record, done = self._left(table, known, plan, str(info.created), info.state.first_seq)
            dictionary = self._dictionary(table, plan, known)
            if record is None:
                record = SnapshotRecord.create(
                    f"snap-{time.time_ns() // 1_000_000}",
                    plan,
                    after_lsn=after_lsn,
                    stream_created=str(info.created),
                    stream_sequence=info.state.last_seq,
                    started_at=int(time.time()),
                    dictionary=None,
                )
            elif missing_ranges(record, done):
                record = record.resumed(after_lsn=after_lsn)
            if dictionary is not None:
                record = replace(record, dictionary=subjects.dictionary_key(table, codec.dictionary_id(dictionary)))
            self._ask(streams.put_snapshot(self._js, table, record.document()))
            self._update(
                table,
                snapshot_id=record.snapshot_id,
                state="running",
                ranges=len(record.ranges),
                about_rows=plan.about_rows,
                resumed=bool(done),
            )
            logger.info(
                "snapshot %s of %s: %s of %s ranges to read, about %s rows in all",
                record.snapshot_id,
                table.full_name,
                len(record.ranges) - len(done),
                len(record.ranges),
                plan.about_rows,
            )
            done = self._publish(table, record, plan, done, dictionary)
            # While the claim is held, so that no other process finds all ranges done and the snapshot still running.
            self._finish(table, record, done)

    def _left(
        self, table: Table, known: SnapshotRecord | None, plan: Plan, stream_created: str, first_sequence: int
    ) -> tuple[SnapshotRecord | None, list[RangeResult]]:
        """The unfinished_tables snapshot, if it can be resumed; otherwise delete its chunks and records."""
        if known is None or known.state != "running":
            return None, []
        done = [RangeResult(**found) for found in self._ask(streams.get_ranges(self._js, table, known.snapshot_id))]
        if done and can_resume(
            known,
            fingerprint=plan.fingerprint,
            has_key=bool(plan.relation.key),
            stream_created=stream_created,
            first_sequence=first_sequence,
        ):
            return known, done
        self._ask(streams.drop_chunks(self._js, table, known.snapshot_id))
        self._ask(streams.forget_ranges(self._js, table, known.snapshot_id))
        return None, []

    def _publish(
        self, table: Table, record: SnapshotRecord, plan: Plan, done: list[RangeResult], dictionary: bytes | None
    ) -> list[RangeResult]:
        """Run a task for each missing range, and record completed ones."""
        described = messages.SnapshotInfo(
            table, record.snapshot_id, lsn_text(plan.snapshot.lsn), plan.snapshot.visible, record.stream_sequence
        )
        waiting = iter(missing_ranges(record, done))
        tasks: set[Future[RangeResult | RangeFailure]] = set()
        done = list(done)
        logged_at = time.monotonic()
        self._count(table, done)

        def next_tasks() -> Iterator[Future[RangeResult | RangeFailure]]:
            while len(tasks) < self._ranges.parallel and (part := next(waiting, None)) is not None:
                yield self._workers.submit(
                    self._ranges.run,
                    RangeTask(
                        dsn=self._dsn,
                        nats_url=self._nats_url,
                        plan=replace(plan, chunks=()),
                        part=part,
                        snapshot=described,
                        first_chunk=record.first_chunk(part.number),
                        chunk_rows=self._chunk_rows,
                        encoding=self._encoding,
                        compressed=self._compressed,
                        dictionary=dictionary,
                        retry_seconds=self._retry_seconds,
                    ),
                )

        for task in next_tasks():
            tasks.add(task)
        while tasks:
            ended, tasks_left = wait(tasks, return_when=FIRST_COMPLETED)
            tasks.clear()
            tasks.update(tasks_left)
            for future in ended:
                outcome = future.result()
                if self._stopping.is_set():
                    raise SnapshotsStopped
                if isinstance(outcome, RangeFailure):
                    wait(tasks)
                    raise _AttemptFailed(outcome.error, final=outcome.final)
                self._ask(
                    streams.put_range(
                        self._js,
                        table,
                        record.snapshot_id,
                        outcome.number,
                        {name: getattr(outcome, name) for name in ("number", "first_chunk", "chunks", "rows")},
                    )
                )
                done.append(outcome)
                self.rows_published += outcome.rows
                self._count(table, done)
            if time.monotonic() - logged_at >= _LOG_SECONDS:
                logged_at = time.monotonic()
                now = self.progress[table]
                logger.info(
                    "snapshot %s of %s: %s of %s ranges, %s of about %s rows, %s chunks",
                    *(now.snapshot_id, now.table, now.ranges_done, now.ranges, now.rows, now.about_rows, now.chunks),
                )
            for task in next_tasks():
                tasks.add(task)
        return done

    def _finish(self, table: Table, record: SnapshotRecord, done: list[RangeResult]) -> None:
        """Publish the metadata: the snapshot is complete."""
        chunk_runs = merge_runs([(part.first_chunk, part.chunks) for part in done])
        mixed = record.is_mixed(done)
        if record.tries > 1:
            # Chunks of unfinished_tables ranges, and of tasks that outlived their driver.
            self._ask(streams.drop_chunks(self._js, table, record.snapshot_id, but=chunk_runs))
        rows, chunks = sum(part.rows for part in done), sum(part.chunks for part in done)
        stored = self._ask(streams.count_chunks(self._js, table, record.snapshot_id))
        if stored < min(chunks, streams.MAX_LISTED_SUBJECTS):
            raise _AttemptFailed(
                f"the stream {subjects.INIT_STREAM} kept only {stored} of {chunks} chunks: raise its limits", final=True
            )
        meta = messages.meta_message(
            messages.SnapshotInfo(
                table, record.snapshot_id, lsn_text(record.lsn), record.visible, record.stream_sequence
            ),
            after_lsn=lsn_text(record.after_lsn),
            batch_count=chunks,
            row_count=rows,
            timestamp=int(time.time()),
            chunk_runs=chunk_runs,
            consistent_lsn=lsn_text(record.after_lsn) if mixed else None,
            encoding=self._encoding,
        )
        with JetStreamPublisher(
            self._nats_url, name="headwater snapshot", retry_seconds=self._retry_seconds
        ) as publisher:
            publisher.publish(meta)
        self._ask(streams.put_snapshot(self._js, table, replace(record, state="done", rows=rows).document()))
        self._ask(streams.forget_ranges(self._js, table, record.snapshot_id))
        self.completed += 1
        self._update(table, state="done", resumed=mixed)
        logger.info("snapshot %s of %s is complete: %s rows", record.snapshot_id, table.full_name, rows)

    def _fail(self, table: Table, reason: str) -> None:
        self.failed += 1
        self._update(table, state="failed", error=reason)
        logger.error("snapshot of %s failed: %s", table.full_name, reason)
        document = {
            "table": table.name,
            "schema": table.schema,
            "snapshot_id": self.progress[table].snapshot_id,
            "error": reason,
            "timestamp": int(time.time()),
        }
        try:
            record = SnapshotRecord.of_document(self._ask(streams.get_snapshot(self._js, table)))
            if record is not None and record.state == "running":
                self._ask(streams.drop_chunks(self._js, table, record.snapshot_id))
                self._ask(streams.forget_ranges(self._js, table, record.snapshot_id))
                failed = replace(record, state="failed", error=reason)
                self._ask(streams.put_snapshot(self._js, table, failed.document()))
            self._ask(streams.publish_error(self._js, table, document, encoding=self._encoding))
        except _OUTAGES as error:
            logger.warning("the failure could not be published to NATS", extra={ERROR: str(error)})

    def _dictionary(self, table: Table, plan: Plan, known: SnapshotRecord | None) -> bytes | None:
        """The compression dictionary of this table: the one of the last snapshot if the columns match, or a new one."""
        if not self._with_dictionary:
            return None
        if known is not None and known.dictionary is not None and known.fingerprint == plan.fingerprint:
            found: bytes | None = self._ask(streams.get_dictionary(self._js, known.dictionary))
            if found is not None:
                return found
        dictionary = codec.train(messages.samples(self._sample(plan), self._encoding))
        if dictionary is not None:
            self._ask(streams.put_dictionary(self._js, table, dictionary))
        return dictionary

    def _sample(self, plan: Plan) -> list[str]:
        """Sample rows from several parts of the table."""
        spots = plan.chunks[:: max(1, len(plan.chunks) // _SAMPLE_SPOTS)][:_SAMPLE_SPOTS]
        rows: list[str] = []
        for spot in spots:
            few = replace(spot, end_block=spot.first_block + _SAMPLE_BLOCKS * _SAMPLE_SPOTS // len(spots))
            for batch in snapshot.read(self._dsn, plan, few):
                rows += batch.column("row").to_pylist()
            if len(rows) >= _SAMPLE_ROWS:
                break
        return rows[:_SAMPLE_ROWS]

    def _count(self, table: Table, done: list[RangeResult]) -> None:
        self._update(
            table,
            ranges_done=len(done),
            chunks=sum(part.chunks for part in done),
            rows=sum(part.rows for part in done),
        )

    def _update(self, table: Table, **changes: Any) -> None:
        self.progress[table] = replace(self.progress[table], **changes)

    def _ask(self, request: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop's thread and wait for its result."""
        return asyncio.run_coroutine_threadsafe(request, self._loop).result(_ANSWER_SECONDS)


def unfinished_tables(records: Mapping[Table, Mapping[str, Any] | None]) -> list[Table]:
    """The tables with a running snapshot, of a process that crashed or of another process."""
    found = {table: SnapshotRecord.of_document(document) for table, document in records.items()}
    return [table for table, record in found.items() if record is not None and record.state == "running"]
