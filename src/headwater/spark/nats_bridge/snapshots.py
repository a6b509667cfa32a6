"""Snapshots of tables to NATS: one at a time for a table, read in ranges by tasks, resumed after a crash.

The driver holds the exported snapshot. When it or Postgres dies, that moment in time is lost; the ranges that are
missing are then read at a later one, and the metadata says from which transactions on changes must be replayed.
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
from headwater.capture.snapshot import Plan, TableClaimed
from headwater.errors import HeadwaterError
from headwater.nats import codec, messages, streams, subjects
from headwater.nats.codec import Encoding
from headwater.nats.errors import NatsUnavailable
from headwater.nats.publisher import Publisher
from headwater.nats.snapshot_chunks import runs
from headwater.nats.subjects import Table
from headwater.observability.metrics import ERROR, logger
from headwater.spark.nats_bridge.snapshot_ranges import RangeFailed, Ranges, RangeTask
from headwater.spark.nats_bridge.snapshot_record import RangeDone, Record, can_resume, missing

T = TypeVar("T")

# A range is at least so many blocks; a table is cut into about so many ranges at most, since each is noted.
RANGE_BLOCKS: Final = 2_048
MOST_RANGES: Final = 4_096
MOST_TABLES: Final = 64
TABLES_AT_A_TIME: Final = 4
_TRIES_WITHOUT_PROGRESS: Final = 5
_LONGEST_WAIT_SECONDS: Final = 10.0
_COMMIT_SECONDS: Final = 1.0
_TELL_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 30.0
_SAMPLE_SPOTS: Final = 8
_SAMPLE_BLOCKS: Final = 4
_SAMPLE_ROWS: Final = 4_000


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a snapshot is. How many rows there are in all is what Postgres guesses."""

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


class Stopped(Exception):
    """The snapshots were told to stop. What is done is kept, and resumed by whoever comes next."""


class _Failed(Exception):
    """A snapshot cannot go on; `final` if trying again would not help."""

    def __init__(self, reason: str, *, final: bool) -> None:
        super().__init__(reason)
        self.final = final


_OUTAGES: Final = (
    *(psycopg.OperationalError, psycopg.InterfaceError),
    *(nats.errors.Error, JetStreamError, TimeoutError, NatsUnavailable),
)


class Snapshots:
    """Takes snapshots of tables in threads of its own. `loop` is where `js` lives, in another thread."""

    def __init__(
        self,
        js: JetStreamContext,
        loop: asyncio.AbstractEventLoop,
        ranges: Ranges,
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
        self.progress: dict[Table, Progress] = {}
        self.completed = 0
        self.failed = 0
        self.rows_published = 0

    # -- what can be asked, from any thread

    def start(self, table: Table) -> tuple[bool, Progress] | None:
        """Take a snapshot of a table, or join the one that runs: whether it was joined, and how far it is.

        Nothing if too many tables wait already."""
        with self._lock:
            running = self._running.get(table)
            if running is not None and not running.done():
                return True, self.progress[table]
            busy = sum(not future.done() for future in self._running.values())
            if busy >= MOST_TABLES or self._stopping.is_set():
                return None
            self.progress[table] = Progress(table.full_name)
            self._running[table] = self._tables.submit(self._take, table)
            self._running[table].add_done_callback(lambda future: self._note_mistake(table, future))
            return False, self.progress[table]

    def wait(self, table: Table, seconds: float) -> Progress:
        """Wait for the snapshot of a table that was started."""
        self._running[table].result(seconds)
        return self.progress[table]

    def stop(self) -> None:
        """Stop what runs; it is resumed by whoever starts next. Waits for the threads."""
        self._stopping.set()
        self._ranges.cancel()
        self._tables.shutdown(wait=True, cancel_futures=True)
        self._workers.shutdown(wait=True, cancel_futures=True)

    # -- how

    def _take(self, table: Table) -> None:
        """A snapshot from its beginning or from where it was left, until it is whole or cannot be."""
        tries, wait_seconds, claimed = 0, 0.2, False
        while True:
            before = self.progress[table].ranges_done
            if claimed and not self._is_running_elsewhere(table):
                self._tell(table, state="left")
                return
            try:
                claimed = False
                self._try(table)
                return
            except Stopped:
                self._tell(table, state="left")
                return
            except TableClaimed:
                # It serves for this request, too. If that process dies, this one goes on in its place.
                reason, final = "another process takes it", False
                tries, claimed = 0, True
            except _Failed as error:
                reason, final = str(error), error.final
            except _OUTAGES as error:
                reason, final = str(error) or type(error).__name__, False
            except (HeadwaterError, psycopg.Error) as error:
                reason, final = str(error), True
            tries = 1 if self.progress[table].ranges_done > before else tries + 1
            if final or tries >= _TRIES_WITHOUT_PROGRESS:
                self._fail(table, reason)
                return
            logger.warning("snapshot of %s goes on soon: %s", table.full_name, reason)
            if self._stopping.wait(wait_seconds):
                self._tell(table, state="left")
                return
            wait_seconds = min(2 * wait_seconds, _LONGEST_WAIT_SECONDS)

    def _note_mistake(self, table: Table, future: Future[None]) -> None:
        """An error that nobody foresaw must not look like a snapshot that runs."""
        if not future.cancelled() and (error := future.exception()) is not None:
            self.failed += 1
            self._tell(table, state="failed", error=f"{type(error).__name__}: {error}")
            logger.error("snapshot of %s failed", table.full_name, exc_info=error)

    def _is_running_elsewhere(self, table: Table) -> bool:
        try:
            record = Record.of_document(self._ask(streams.get_snapshot(self._js, table)))
        except _OUTAGES:
            return True
        return record is None or record.state == "running"

    def _try(self, table: Table) -> None:
        # The end of the stream before the snapshot: what is in the stream by now, the snapshot sees.
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
                most_chunks=MOST_RANGES,
                needs_key=True,
            )
            after_lsn = snapshot.current_lsn(connection)
            known = Record.of_document(self._ask(streams.get_snapshot(self._js, table)))
            record, done = self._left(table, known, plan, str(info.created), info.state.first_seq)
            dictionary = self._dictionary(table, plan, known)
            if record is None:
                record = Record.begun(
                    f"snap-{time.time_ns() // 1_000_000}",
                    plan,
                    after_lsn=after_lsn,
                    stream_created=str(info.created),
                    stream_sequence=info.state.last_seq,
                    started_at=int(time.time()),
                    dictionary=None,
                )
            elif missing(record, done):
                record = record.resumed(after_lsn=after_lsn)
            if dictionary is not None:
                record = replace(record, dictionary=subjects.dictionary_key(table, codec.dictionary_id(dictionary)))
            self._ask(streams.put_snapshot(self._js, table, record.document()))
            self._tell(
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
            # Still with the claim: nobody else may find all ranges done and the snapshot running.
            self._finish(table, record, done)

    def _left(
        self, table: Table, known: Record | None, plan: Plan, stream_created: str, first_sequence: int
    ) -> tuple[Record | None, list[RangeDone]]:
        """The snapshot that was left unfinished, if it can be resumed; else what is left of it is dropped."""
        if known is None or known.state != "running":
            return None, []
        done = [RangeDone(**found) for found in self._ask(streams.get_ranges(self._js, table, known.snapshot_id))]
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
        self, table: Table, record: Record, plan: Plan, done: list[RangeDone], dictionary: bytes | None
    ) -> list[RangeDone]:
        """Have every range that is missing read and published."""
        described = messages.Snapshot(
            table, record.snapshot_id, lsn_text(plan.snapshot.lsn), plan.snapshot.visible, record.stream_sequence
        )
        waiting = iter(missing(record, done))
        tasks: set[Future[RangeDone | RangeFailed]] = set()
        done = list(done)
        told_at = time.monotonic()
        self._count(table, done)

        def next_tasks() -> Iterator[Future[RangeDone | RangeFailed]]:
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
                    raise Stopped
                if isinstance(outcome, RangeFailed):
                    wait(tasks)
                    raise _Failed(outcome.error, final=outcome.final)
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
            if time.monotonic() - told_at >= _TELL_SECONDS:
                told_at = time.monotonic()
                now = self.progress[table]
                logger.info(
                    "snapshot %s of %s: %s of %s ranges, %s of about %s rows, %s chunks",
                    *(now.snapshot_id, now.table, now.ranges_done, now.ranges, now.rows, now.about_rows, now.chunks),
                )
            for task in next_tasks():
                tasks.add(task)
        return done

    def _finish(self, table: Table, record: Record, done: list[RangeDone]) -> None:
        """Say that the snapshot is whole."""
        chunk_runs = runs([(part.first_chunk, part.chunks) for part in done])
        mixed = record.is_mixed(done)
        if record.tries > 1:
            # What was read of a range that was not finished; and what a task wrote that outlived its driver.
            self._ask(streams.drop_chunks(self._js, table, record.snapshot_id, but=chunk_runs))
        rows, chunks = sum(part.rows for part in done), sum(part.chunks for part in done)
        there = self._ask(streams.count_chunks(self._js, table, record.snapshot_id))
        if there < min(chunks, streams.MOST_SUBJECTS):
            raise _Failed(
                f"the stream {subjects.INIT_STREAM} kept {there} of {chunks} chunks: raise what it may hold", final=True
            )
        meta = messages.meta(
            messages.Snapshot(table, record.snapshot_id, lsn_text(record.lsn), record.visible, record.stream_sequence),
            after_lsn=lsn_text(record.after_lsn),
            batch_count=chunks,
            row_count=rows,
            timestamp=int(time.time()),
            chunk_runs=chunk_runs,
            settles_at=lsn_text(record.after_lsn) if mixed else None,
            encoding=self._encoding,
        )
        with Publisher(self._nats_url, name="headwater snapshot", retry_seconds=self._retry_seconds) as publisher:
            publisher.publish(meta)
        self._ask(streams.put_snapshot(self._js, table, replace(record, state="done", rows=rows).document()))
        self._ask(streams.forget_ranges(self._js, table, record.snapshot_id))
        self.completed += 1
        self._tell(table, state="done", resumed=mixed)
        logger.info("snapshot %s of %s is whole: %s rows", record.snapshot_id, table.full_name, rows)

    def _fail(self, table: Table, reason: str) -> None:
        self.failed += 1
        self._tell(table, state="failed", error=reason)
        logger.error("snapshot of %s failed: %s", table.full_name, reason)
        document = {
            "table": table.name,
            "schema": table.schema,
            "snapshot_id": self.progress[table].snapshot_id,
            "error": reason,
            "timestamp": int(time.time()),
        }
        try:
            record = Record.of_document(self._ask(streams.get_snapshot(self._js, table)))
            if record is not None and record.state == "running":
                self._ask(streams.drop_chunks(self._js, table, record.snapshot_id))
                self._ask(streams.forget_ranges(self._js, table, record.snapshot_id))
                failed = replace(record, state="failed", error=reason)
                self._ask(streams.put_snapshot(self._js, table, failed.document()))
            self._ask(streams.publish_error(self._js, table, document, encoding=self._encoding))
        except _OUTAGES as error:
            logger.warning("nobody could be told of it", extra={ERROR: str(error)})

    def _dictionary(self, table: Table, plan: Plan, known: Record | None) -> bytes | None:
        """A dictionary for the rows of this table: the one that was used for such rows before, or a new one."""
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
        """Rows from some places of the table."""
        spots = plan.chunks[:: max(1, len(plan.chunks) // _SAMPLE_SPOTS)][:_SAMPLE_SPOTS]
        rows: list[str] = []
        for spot in spots:
            few = replace(spot, end_block=spot.first_block + _SAMPLE_BLOCKS * _SAMPLE_SPOTS // len(spots))
            for batch in snapshot.read(self._dsn, plan, few):
                rows += batch.column("row").to_pylist()
            if len(rows) >= _SAMPLE_ROWS:
                break
        return rows[:_SAMPLE_ROWS]

    def _count(self, table: Table, done: list[RangeDone]) -> None:
        self._tell(
            table,
            ranges_done=len(done),
            chunks=sum(part.chunks for part in done),
            rows=sum(part.rows for part in done),
        )

    def _tell(self, table: Table, **changes: Any) -> None:
        self.progress[table] = replace(self.progress[table], **changes)

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        """The answer of NATS, from its loop."""
        return asyncio.run_coroutine_threadsafe(question, self._loop).result(_ANSWER_SECONDS)


def unfinished(records: Mapping[Table, Mapping[str, Any] | None]) -> list[Table]:
    """The tables whose snapshots were left running by a process that is gone, or that runs elsewhere."""
    found = {table: Record.of_document(document) for table, document in records.items()}
    return [table for table, record in found.items() if record is not None and record.state == "running"]
