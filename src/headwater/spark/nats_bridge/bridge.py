"""The NATS bridge of a pipeline from changes to NATS: schemas, snapshots on request, metrics and HTTP endpoints.

The NATS sink creates one for each pipeline::

    bridge = Bridge(spark, dsn=dsn, slot=slot, publication=publication, nats_url=url, ask_to_stop=...)
    bridge.start()                                   # streams, buckets, schemas, request subscriptions, endpoints
    published = bridge.publish(rows, shape="packed", end=batch.end)   # in foreachBatch; also counts the batch
    bridge.stop()

Code that publishes rows in another way calls `on_columns` before and `note_batch` after each batch.

One background thread runs an asyncio loop with the NATS client; it answers snapshot requests, watches the slot and
refreshes schemas. Public methods may be called from any thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import nats.errors
import psycopg
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError

from headwater.capture.description import PublishedTable
from headwater.capture.slot import Slot, SlotLevel, SlotState, lsn_text, watch
from headwater.errors import HeadwaterError, InvalidRequest, LogUnavailable
from headwater.nats import codec, streams, subjects
from headwater.nats.bridge_http import BridgeCallbacks, BridgeHttpServer
from headwater.nats.bridge_metrics import BridgeMetrics, log_line, prometheus
from headwater.nats.codec import Encoding
from headwater.nats.errors import InvalidMessage, NatsRefused, NatsUnavailable
from headwater.nats.messages import CHUNK_ROWS
from headwater.nats.publisher import PublishTotals
from headwater.nats.subjects import Table
from headwater.observability.metrics import ERROR, logger
from headwater.spark.formats.nats import SHAPES, Shape, SinkOptions
from headwater.spark.nats_bridge.changes_task import OUTCOME, ChangesTask
from headwater.spark.nats_bridge.schema_documents import SchemaDocuments
from headwater.spark.nats_bridge.snapshot_ranges import LocalRangeExecutor, RangeExecutor, SparkRangeExecutor
from headwater.spark.nats_bridge.snapshots import RANGE_BLOCKS, SnapshotTaker, unfinished_tables

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")
Zstd = Literal["off", "plain", "dictionary"]
ZSTD: Final = ("off", "plain", "dictionary")

_QUEUE: Final = "headwater"
_STRAYS: Final = "headwater-strays"
_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 120.0
_ANSWER_SECONDS: Final = 30.0
_MAX_HASHES: Final = 10_000
_OUTAGES: Final = (psycopg.Error, nats.errors.Error, JetStreamError, TimeoutError, NatsUnavailable)


class Bridge:
    """Everything of a pipeline to NATS except the stream of changes. Runs in the driver; thread-safe.

    `start` raises CaptureRefused, LogUnavailable, NatsUnavailable, NatsRefused or InvalidRequest. Later outages of
    Postgres or NATS are retried and shown in `status`. `ask_to_stop` is called for POST /shutdown if `allow_shutdown`
    is set. `ranges` reads snapshots: by default in Spark tasks, or in this process without `spark`, which `publish`
    requires.
    """

    def __init__(
        self,
        spark: SparkSession | None,
        *,
        dsn: str,
        slot: str,
        nats_url: str,
        publication: str | None = None,
        tables: Sequence[str] = (),
        encoding: Encoding = "msgpack",
        zstd: Zstd = "off",
        port: int | None = None,
        host: str = "127.0.0.1",
        allow_shutdown: bool = False,
        ask_to_stop: Callable[[], None] = lambda: None,
        metrics_seconds: float = 15.0,
        watch_seconds: float = 30.0,
        chunk_rows: int = CHUNK_ROWS,
        range_blocks: int = RANGE_BLOCKS,
        ranges: RangeExecutor | None = None,
    ) -> None:
        if encoding not in codec.ENCODINGS:
            raise InvalidRequest(f"invalid encoding {encoding!r}: expected {' or '.join(codec.ENCODINGS)}")
        if zstd not in ZSTD:
            raise InvalidRequest(f"invalid zstd {zstd!r}: expected one of {', '.join(ZSTD)}")
        if port is not None and not 0 <= port <= 65_535:
            raise InvalidRequest(f"invalid port {port}: expected 0 to 65535", hint="Use 0 for a free port.")
        if metrics_seconds <= 0 or watch_seconds <= 0:
            raise InvalidRequest("invalid metrics_seconds or watch_seconds: expected numbers above 0")
        if chunk_rows < 1 or range_blocks < 1:
            raise InvalidRequest("invalid chunk_rows or range_blocks: expected whole numbers from 1")
        self._spark: Final = spark
        self._ranges: Final = ranges
        self._chunk_rows: Final = chunk_rows
        self._range_blocks: Final = range_blocks
        self._slot: Final = Slot(dsn, slot, publication or slot)
        self._wanted_tables: Final = tuple(tables)
        self._schemas: Final = SchemaDocuments(dsn, publication or slot, nats_url, encoding)
        self._encoding: Final[Encoding] = encoding
        self._zstd: Final = zstd
        self._address: Final = None if port is None else (host, port)
        self._allow_shutdown: Final = allow_shutdown
        self._ask_to_stop: Final = ask_to_stop
        self._metrics_seconds: Final = metrics_seconds
        self._watch_seconds: Final = watch_seconds

        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_asked: asyncio.Event | None = None
        self._client: Client | None = None
        self._snapshots: SnapshotTaker | None = None
        self._endpoints: BridgeHttpServer | None = None
        self._tables: dict[Table, PublishedTable] = {}
        self._listening: dict[Table, Subscription] = {}
        self._refreshing: Final = asyncio.Lock()
        self._known_hashes: set[str] = set()
        self._metrics: Final = BridgeMetrics()
        self._lock: Final = threading.Lock()
        self._started_at = time.monotonic()
        self._slot_state: SlotState | None = None
        self._slot_problem: str | None = "not checked yet"
        self._postgres_was_away = False

    # -- called by the sink

    def start(self) -> None:
        """Create streams and buckets, publish all schemas, subscribe to snapshot requests, and serve the endpoints.

        Creates the publication and the slot if they are missing, and resumes unfinished_tables snapshots.
        """
        ready: Future[None] = Future()
        self._started_at = time.monotonic()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(ready)), name="headwater-bridge", daemon=True
        )
        self._thread.start()
        try:
            ready.result(_START_SECONDS)
        except psycopg.OperationalError as error:
            raise LogUnavailable(f"the bridge cannot reach Postgres: {error}") from error
        except TimeoutError as error:
            self.stop()
            raise NatsUnavailable(f"the bridge did not start within {_START_SECONDS:.0f} seconds") from error
        except nats.errors.Error as error:
            raise NatsRefused(
                f"NATS rejected a request of the bridge: {error}",
                hint="Check that JetStream is enabled and that this user has permission to use it.",
            ) from error

    def stop(self) -> None:
        """Stop all work. A running snapshot is resumed at the next start."""
        loop, stop_asked, thread = self._loop, self._stop_asked, self._thread
        if thread is None:
            return
        if loop is not None and stop_asked is not None and thread.is_alive():
            loop.call_soon_threadsafe(stop_asked.set)
        thread.join(_STOP_SECONDS)
        self._thread = None

    def publish(
        self,
        rows: DataFrame,
        *,
        shape: Shape = "each",
        end: int,
        timeline: int | None = None,
        retry_seconds: float = 60.0,
        window: int = 16_384,
    ) -> PublishTotals:
        """Publish changed schemas and then the changes of one micro-batch; count it as `note_batch` does.

        `rows` come from "headwater.changes", in one partition. `end` is the LSN at which the batch ends, and
        `timeline` the WAL timeline on which it was planned.
        """
        if shape not in SHAPES:
            raise InvalidRequest(f"invalid shape {shape!r}: expected {' or '.join(SHAPES)}")
        began = time.monotonic()
        task = ChangesTask(
            SinkOptions(
                self._schemas.nats_url, shape, self._encoding, retry_seconds, window, ready=False, timeline=timeline
            ),
            frozenset(self._known_hashes),
            self._schemas,
        )
        # A plain function, because Spark inspects its name and arguments.
        outcomes = rows.mapInArrow(lambda batches: task.publish(batches), OUTCOME).collect()
        published = PublishTotals(sum(row.stored for row in outcomes), sum(row.duplicates for row in outcomes))
        hashes = {found for row in outcomes for found in row.hashes}
        if not hashes <= self._known_hashes:
            self._learn(hashes)
            self._metrics.schemas += sum(row.schemas for row in outcomes)
            # The task has published the new schemas; requests for new tables need subscriptions, too.
            self._soon(self._refresh())
        self.note_batch(
            changes=sum(row.changes for row in outcomes),
            messages=published.acknowledged,
            end=end,
            seconds=time.monotonic() - began,
            nats_reconnects=sum(row.reconnects for row in outcomes),
        )
        return published

    def on_columns(self, columns_hashes: Iterable[str]) -> bool:
        """Announce the columns of a batch before its changes are published.

        If any are new, publish the schemas before returning. Return whether any were new.
        """
        hashes = set(columns_hashes)
        if hashes <= self._known_hashes:
            return False
        try:
            self._ask(self._refresh())
        except (nats.errors.Error, TimeoutError) as error:
            raise NatsUnavailable(f"cannot publish schemas: {error}", hint="Retrying is safe.") from error
        self._learn(hashes)
        return True

    def note_batch(self, *, changes: int, messages: int, end: int, seconds: float, nats_reconnects: int = 0) -> None:
        """Count a batch that NATS has acknowledged: its changes and messages, its end LSN, and its duration."""
        with self._lock:
            metrics = self._metrics
            metrics.wal_messages += changes
            metrics.cdc_events += changes
            metrics.messages += messages
            metrics.batches += 1
            metrics.nats_reconnects += nats_reconnects
            metrics.last_ack_lsn = max(metrics.last_ack_lsn, end)
            if changes:
                metrics.last_processing_time_us = round(seconds * 1_000_000 / changes)

    # -- status

    @property
    def port(self) -> int | None:
        """The port of the HTTP endpoints; None if they are not served."""
        return None if self._endpoints is None else self._endpoints.port

    def metrics(self) -> BridgeMetrics:
        """A copy of the current metrics."""
        with self._lock:
            metrics = self._metrics
            metrics.uptime_seconds = int(time.monotonic() - self._started_at)
            metrics.connected = int(self._is_nats_connected() and not self._postgres_was_away)
            state = self._slot_state
            metrics.slot_active = int(state is not None and self._slot_problem is None)
            if state is not None:
                metrics.wal_lag_bytes = state.retained_bytes
                metrics.wal_confirmed_lag_bytes = state.lag_bytes
            if self._snapshots is not None:
                metrics.snapshots_running = sum(
                    found.state in ("waiting", "running") for found in self._snapshots.progress.values()
                )
                metrics.snapshots_completed = self._snapshots.completed
                metrics.snapshots_failed = self._snapshots.failed
                metrics.snapshot_rows = self._snapshots.rows_published
            reconnects = 0 if self._client is None else int(self._client.stats["reconnects"])
            copy = BridgeMetrics(**metrics.document())
            copy.nats_reconnects += reconnects
            return copy

    def problems(self) -> list[str]:
        """The current problems; empty if the bridge is healthy."""
        found = []
        if self._thread is None or not self._thread.is_alive():
            found.append("the bridge is not running")
        if not self._is_nats_connected():
            found.append("NATS is not reachable")
        if self._postgres_was_away:
            found.append("Postgres is not reachable")
        if self._slot_problem is not None:
            found.append(f"the slot {self._slot.name}: {self._slot_problem}")
        elif self._slot_state is not None and self._slot_state.level() is SlotLevel.CRITICAL:
            found.append(f"the slot {self._slot.name} retains {self._slot_state.retained_bytes} bytes of WAL")
        return found

    def status(self) -> dict[str, Any]:
        """The document of GET /status."""
        metrics = self.metrics()
        problems = self.problems()
        snapshots = {} if self._snapshots is None else dict(self._snapshots.progress)
        return {
            "status": "connected" if not problems else "troubled",
            "problems": problems,
            "slot": self._slot.name,
            "publication": self._slot.publication,
            "tables": sorted(table.full_name for table in self._tables),
            "encoding": self._encoding,
            "zstd": self._zstd,
            "last_ack_lsn": lsn_text(metrics.last_ack_lsn),
            "wal_level": "unknown" if self._slot_state is None else self._slot_state.level().value,
            "figures": metrics.document(),
            "snapshots": [asdict(found) for found in snapshots.values()],
        }

    # -- the loop

    async def _run(self, ready: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_asked = asyncio.Event()
        try:
            async with streams.connect(self._schemas.nats_url, name="headwater bridge") as client:
                self._client = client
                try:
                    await self._begin(client)
                    ready.set_result(None)
                    await self._maintain()
                finally:
                    await self._end()
        except (HeadwaterError, psycopg.Error, nats.errors.Error, TimeoutError) as error:
            if ready.done():
                raise
            ready.set_exception(error)
        finally:
            if not ready.done():
                ready.set_exception(HeadwaterError("the bridge ended during its start; see the log"))

    async def _begin(self, client: Client) -> None:
        js = client.jetstream()
        await streams.ensure_streams(js)
        self._note_slot(await asyncio.to_thread(self._slot.prepare, self._wanted_tables))
        assert self._loop is not None
        ranges = self._ranges or (LocalRangeExecutor() if self._spark is None else SparkRangeExecutor(self._spark))
        self._snapshots = SnapshotTaker(
            js,
            self._loop,
            ranges,
            dsn=self._slot.dsn,
            nats_url=self._schemas.nats_url,
            encoding=self._encoding,
            compressed=self._zstd != "off",
            with_dictionary=self._zstd == "dictionary",
            chunk_rows=self._chunk_rows,
            range_blocks=self._range_blocks,
        )
        await self._refresh()
        await client.subscribe(f"{subjects.REQUESTS}.>", queue=_STRAYS, cb=self._refuse_stray)
        await client.flush()
        if self._address is not None:
            host, port = self._address
            answers = BridgeCallbacks(
                metrics=lambda: prometheus(self.metrics()),
                status=self.status,
                problems=self.problems,
                stream=self._stream,
                shutdown=self._ask_to_stop if self._allow_shutdown else None,
            )
            self._endpoints = BridgeHttpServer(answers, host=host, port=port)
        records = {table: await streams.get_snapshot(js, table) for table in self._tables}
        for table in unfinished_tables(records):
            self._snapshots.start(table)

    async def _end(self) -> None:
        if self._endpoints is not None:
            await asyncio.to_thread(self._endpoints.close)
            self._endpoints = None
        if self._snapshots is not None:
            await asyncio.to_thread(self._snapshots.stop)

    async def _maintain(self) -> None:
        """Until the bridge stops: log METRICS lines, check the slot, and follow added and removed tables."""
        assert self._stop_asked is not None
        watch_at = time.monotonic() + self._watch_seconds
        while True:
            try:
                await asyncio.wait_for(self._stop_asked.wait(), min(self._metrics_seconds, self._watch_seconds))
                return
            except TimeoutError:
                await self._check_slot()
                logger.info("METRICS %s", log_line(self.metrics()))
            if time.monotonic() >= watch_at:
                watch_at = time.monotonic() + self._watch_seconds
                if self._slot_state is not None:
                    watch(self._slot_state, slot=self._slot.name)
                await self._refresh_if_possible()

    async def _check_slot(self) -> None:
        try:
            self._note_slot(await asyncio.to_thread(self._slot.state))
        except HeadwaterError as error:
            self._slot_problem = error.message
        except psycopg.Error as error:
            self._postgres_was_away = True
            logger.warning("the bridge cannot connect to Postgres", extra={ERROR: str(error)})

    def _note_slot(self, state: SlotState) -> None:
        if self._postgres_was_away:
            self._postgres_was_away = False
            self._metrics.reconnects += 1
        self._slot_state, self._slot_problem = state, None

    # -- schemas and subscriptions

    async def _refresh(self) -> None:
        """Publish changed schemas, and subscribe to snapshot requests for the published tables."""
        async with self._refreshing:
            await self._refresh_locked()

    async def _refresh_locked(self) -> None:
        assert self._client is not None
        tables = await asyncio.to_thread(self._schemas.tables)
        self._metrics.schemas += await self._schemas.put(self._client.jetstream(), tables)
        self._tables = tables
        for table in tables.keys() - self._listening.keys():
            # One subject per table: several bridges can share a server, each answering for its own tables. Bridges
            # with the same table form a NATS queue group, so that only one answers.
            self._listening[table] = await self._client.subscribe(
                subjects.request_subject(table), queue=_QUEUE, cb=self._answer
            )
        for table in self._listening.keys() - tables.keys():
            await self._listening.pop(table).unsubscribe()

    async def _refresh_if_possible(self) -> None:
        try:
            await self._refresh()
        except _OUTAGES as error:
            logger.warning("the bridge cannot refresh schemas", extra={ERROR: str(error)})

    def _learn(self, hashes: set[str]) -> None:
        if len(self._known_hashes) + len(hashes) > _MAX_HASHES:
            self._known_hashes = set()
        self._known_hashes |= hashes

    # -- requests

    async def _answer(self, message: Msg) -> None:
        """Answer a request for a snapshot of one of the published tables."""
        table = subjects.requested_table(message.subject)
        found = self._tables.get(table)
        assert self._snapshots is not None
        if found is None:
            await self._refuse(message, "unknown", f"{table.full_name} is no longer published")
        elif not found.has_key:
            await self._refuse(
                message, "no key", f"{table.full_name} has no key, which snapshots require", "Add a primary key."
            )
        elif not found.is_whole:
            await self._refuse(
                message,
                "partial",
                f"the publication {self._slot.publication} leaves out rows or columns of {table.full_name}",
                "A snapshot would include them. Publish the whole table.",
            )
        elif (started := self._snapshots.start(table)) is None:
            await self._refuse(message, "busy", "too many snapshots are in progress", "Retry later.")
        else:
            joined, progress = started
            answer = {"accepted": True, "table": table.name, "schema": table.schema, "joined": joined}
            if progress.snapshot_id:
                answer["snapshot_id"] = progress.snapshot_id
            await self._respond(message, answer)

    async def _refuse_stray(self, message: Msg) -> None:
        """Reject a request for a table that no bridge publishes."""
        assert self._client is not None
        try:
            table = subjects.requested_table(message.subject)
            if table in self._tables:
                return
            document = await streams.get_schema(self._client.jetstream(), table)
            if document is not None and not document.get("dropped"):
                return  # another bridge publishes it
            await self._refuse(message, "unknown", f"table {table.full_name} is not published", "Check its name.")
        except InvalidMessage as error:
            await self._refuse(message, "unknown", error.message)
        except _OUTAGES as error:
            logger.warning("cannot answer a snapshot request", extra={ERROR: str(error)})

    async def _refuse(self, message: Msg, reason: str, error: str, hint: str | None = None) -> None:
        logger.warning("snapshot request rejected: %s", error)
        await self._respond(message, {"accepted": False, "reason": reason, "error": error, "hint": hint})

    async def _respond(self, message: Msg, answer: dict[str, Any]) -> None:
        if message.reply:
            await message.respond(codec.encode(answer, self._encoding))

    # -- internals

    def _is_nats_connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    def _stream(self, name: str) -> dict[str, Any] | None:
        assert self._client is not None
        js: JetStreamContext = self._client.jetstream()
        try:
            info = self._ask(js.stream_info(name))
        except (NotFoundError, ValueError):
            return None
        except (nats.errors.Error, JetStreamError, TimeoutError) as error:
            raise NatsUnavailable(f"NATS is not reachable: {error}") from error
        return {
            "name": name,
            "subjects": info.config.subjects,
            "messages": info.state.messages,
            "bytes": info.state.bytes,
            "first_seq": info.state.first_seq,
            "last_seq": info.state.last_seq,
            "consumer_count": info.state.consumer_count,
            "created": str(info.created),
        }

    def _ask(self, request: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop's thread and wait for its result."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(request, self._loop).result(_ANSWER_SECONDS)

    def _soon(self, action: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background. Errors are logged; the next periodic refresh makes up for them."""
        assert self._loop is not None

        def note(done: Future[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                logger.warning("the bridge cannot refresh schemas", extra={ERROR: str(error)})

        asyncio.run_coroutine_threadsafe(action, self._loop).add_done_callback(note)
