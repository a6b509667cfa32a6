"""The bridge to NATS beside a stream of changes: schemas, snapshots on request, figures and endpoints.

A runner makes one for each pipeline from changes to NATS::

    bridge = Bridge(spark, dsn=dsn, slot=slot, publication=publication, nats_url=url, ask_to_stop=...)
    bridge.start()                                   # streams, buckets, schemas, the listener, the endpoints
    published = bridge.publish(rows, shape="packed", end=batch.end)   # in foreachBatch; counts the batch, too
    bridge.stop()

Who publishes rows in another way calls `on_columns` before and `note_batch` after each batch.
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
from headwater.capture.slot import Level, Slot, SlotState, lsn_text, watch
from headwater.errors import HeadwaterError, InvalidRequest, LogUnavailable
from headwater.nats import codec, streams, subjects
from headwater.nats.bridge_http import Answers, Endpoints
from headwater.nats.bridge_metrics import Figures, log_line, prometheus
from headwater.nats.codec import Encoding
from headwater.nats.errors import InvalidMessage, NatsRefused, NatsUnavailable
from headwater.nats.messages import CHUNK_ROWS
from headwater.nats.publisher import Published
from headwater.nats.subjects import Table
from headwater.observability.metrics import ERROR, logger
from headwater.spark.formats.nats import SHAPES, Shape, SinkOptions
from headwater.spark.nats_bridge.changes_task import OUTCOME, ChangesTask
from headwater.spark.nats_bridge.schema_documents import SchemaDocuments
from headwater.spark.nats_bridge.snapshot_ranges import HereRanges, Ranges, SparkRanges
from headwater.spark.nats_bridge.snapshots import RANGE_BLOCKS, Snapshots, unfinished

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
_MOST_HASHES: Final = 10_000
_OUTAGES: Final = (psycopg.Error, nats.errors.Error, JetStreamError, TimeoutError, NatsUnavailable)


class Bridge:
    """Everything of a pipeline to NATS but the stream of changes itself. Used in the driver, from any thread.

    `start` raises what cannot work: CaptureRefused, LogUnavailable, NatsUnavailable, NatsRefused, InvalidRequest.
    Afterwards outages of Postgres or NATS are waited for, and shown in `status`. `ask_to_stop` is called for POST
    /shutdown, which `allow_shutdown` allows. Snapshots are read by `ranges`: tasks of Spark if nothing else is said, or
    this process if there is no `spark`, without which `publish` cannot be used.
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
        ranges: Ranges | None = None,
    ) -> None:
        if encoding not in codec.ENCODINGS:
            raise InvalidRequest(f"{encoding!r} is no encoding: {', '.join(codec.ENCODINGS)}")
        if zstd not in ZSTD:
            raise InvalidRequest(f"zstd is {zstd!r}, none of {', '.join(ZSTD)}")
        if port is not None and not 0 <= port <= 65_535:
            raise InvalidRequest(f"{port} is no port", hint="Write a number from 0, for a free one, to 65535.")
        if metrics_seconds <= 0 or watch_seconds <= 0:
            raise InvalidRequest("metrics_seconds and watch_seconds are above zero")
        if chunk_rows < 1 or range_blocks < 1:
            raise InvalidRequest("chunk_rows and range_blocks are whole numbers from 1")
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
        self._snapshots: Snapshots | None = None
        self._endpoints: Endpoints | None = None
        self._tables: dict[Table, PublishedTable] = {}
        self._listening: dict[Table, Subscription] = {}
        self._refreshing: Final = asyncio.Lock()
        self._known_hashes: set[str] = set()
        self._figures: Final = Figures()
        self._lock: Final = threading.Lock()
        self._started_at = time.monotonic()
        self._slot_state: SlotState | None = None
        self._slot_problem: str | None = "not looked at yet"
        self._postgres_was_away = False

    # -- what the runner does

    def start(self) -> None:
        """Make streams and buckets, publish every table's schema, listen for requests, serve the endpoints.

        Snapshots that were left unfinished are resumed. The publication and the slot are made if they are missing.
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
                f"NATS does not do what the bridge needs: {error}",
                hint="Is its JetStream on, and may this user use it?",
            ) from error

    def stop(self) -> None:
        """Stop listening and serving. A snapshot that runs is left to be resumed."""
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
    ) -> Published:
        """Publish the changes of one micro-batch, schemas that changed first; counts it as `note_batch` does.

        `rows` are as "headwater.changes" reads them, in their one partition. `end` is the batch's end, an LSN, and
        `timeline` the one of the server's log on which the batch was planned.
        """
        if shape not in SHAPES:
            raise InvalidRequest(f"{shape!r} is no shape: {', '.join(SHAPES)}")
        began = time.monotonic()
        task = ChangesTask(
            SinkOptions(
                self._schemas.nats_url, shape, self._encoding, retry_seconds, window, ready=False, timeline=timeline
            ),
            frozenset(self._known_hashes),
            self._schemas,
        )
        # A plain function: Spark looks at its name and its arguments.
        outcomes = rows.mapInArrow(lambda batches: task.publish(batches), OUTCOME).collect()
        published = Published(sum(row.stored for row in outcomes), sum(row.duplicates for row in outcomes))
        shown = {found for row in outcomes for found in row.hashes}
        if not shown <= self._known_hashes:
            self._learn(shown)
            self._figures.schemas += sum(row.schemas for row in outcomes)
            # The task has published what is new; a table that is new is to be listened for, too.
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
        """Say which columns a batch shows, before its changes are published.

        If any are new, the schemas are published before this returns. Says whether any were.
        """
        shown = set(columns_hashes)
        if shown <= self._known_hashes:
            return False
        try:
            self._ask(self._refresh())
        except (nats.errors.Error, TimeoutError) as error:
            raise NatsUnavailable(f"schemas could not be published: {error}", hint="Trying again is safe.") from error
        self._learn(shown)
        return True

    def note_batch(self, *, changes: int, messages: int, end: int, seconds: float, nats_reconnects: int = 0) -> None:
        """Count a batch that NATS has in full: so many changes as so many messages, up to this LSN, in this time."""
        with self._lock:
            figures = self._figures
            figures.wal_messages += changes
            figures.cdc_events += changes
            figures.messages += messages
            figures.batches += 1
            figures.nats_reconnects += nats_reconnects
            figures.last_ack_lsn = max(figures.last_ack_lsn, end)
            if changes:
                figures.last_processing_time_us = round(seconds * 1_000_000 / changes)

    # -- what others ask

    @property
    def port(self) -> int | None:
        """Where the endpoints are, if they are served."""
        return None if self._endpoints is None else self._endpoints.port

    def figures(self) -> Figures:
        """Everything that is counted, as it is now."""
        with self._lock:
            figures = self._figures
            figures.uptime_seconds = int(time.monotonic() - self._started_at)
            figures.connected = int(self._nats_is_there() and not self._postgres_was_away)
            state = self._slot_state
            figures.slot_active = int(state is not None and self._slot_problem is None)
            if state is not None:
                figures.wal_lag_bytes = state.retained_bytes
                figures.wal_confirmed_lag_bytes = state.lag_bytes
            if self._snapshots is not None:
                figures.snapshots_running = sum(
                    found.state in ("waiting", "running") for found in self._snapshots.progress.values()
                )
                figures.snapshots_completed = self._snapshots.completed
                figures.snapshots_failed = self._snapshots.failed
                figures.snapshot_rows = self._snapshots.rows_published
            reconnects = 0 if self._client is None else int(self._client.stats["reconnects"])
            shown = Figures(**figures.document())
            shown.nats_reconnects += reconnects
            return shown

    def problems(self) -> list[str]:
        """What is wrong now; nothing if all is well."""
        found = []
        if self._thread is None or not self._thread.is_alive():
            found.append("the bridge does not run")
        if not self._nats_is_there():
            found.append("NATS does not answer")
        if self._postgres_was_away:
            found.append("Postgres does not answer")
        if self._slot_problem is not None:
            found.append(f"the slot {self._slot.name}: {self._slot_problem}")
        elif self._slot_state is not None and self._slot_state.level() is Level.CRITICAL:
            found.append(
                f"the slot {self._slot.name} keeps {self._slot_state.retained_bytes} bytes of the server's log"
            )
        return found

    def status(self) -> dict[str, Any]:
        """Everything that /status shows."""
        figures = self.figures()
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
            "last_ack_lsn": lsn_text(figures.last_ack_lsn),
            "wal_level": "unknown" if self._slot_state is None else self._slot_state.level().value,
            "figures": figures.document(),
            "snapshots": [asdict(found) for found in snapshots.values()],
        }

    # -- the loop

    async def _run(self, ready: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop_asked = asyncio.Event()
        try:
            async with streams.connected(self._schemas.nats_url, name="headwater bridge") as client:
                self._client = client
                try:
                    await self._begin(client)
                    ready.set_result(None)
                    await self._look_after()
                finally:
                    await self._end()
        except (HeadwaterError, psycopg.Error, nats.errors.Error, TimeoutError) as error:
            if ready.done():
                raise
            ready.set_exception(error)
        finally:
            if not ready.done():
                ready.set_exception(HeadwaterError("the bridge ended while it started; see the log"))

    async def _begin(self, client: Client) -> None:
        js = client.jetstream()
        await streams.ensure_streams(js)
        self._note_slot(await asyncio.to_thread(self._slot.prepare, self._wanted_tables))
        assert self._loop is not None
        ranges = self._ranges or (HereRanges() if self._spark is None else SparkRanges(self._spark))
        self._snapshots = Snapshots(
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
            answers = Answers(
                metrics=lambda: prometheus(self.figures()),
                status=self.status,
                problems=self.problems,
                stream=self._stream,
                shutdown=self._ask_to_stop if self._allow_shutdown else None,
            )
            self._endpoints = Endpoints(answers, host=host, port=port)
        records = {table: await streams.get_snapshot(js, table) for table in self._tables}
        for table in unfinished(records):
            self._snapshots.start(table)

    async def _end(self) -> None:
        if self._endpoints is not None:
            await asyncio.to_thread(self._endpoints.close)
            self._endpoints = None
        if self._snapshots is not None:
            await asyncio.to_thread(self._snapshots.stop)

    async def _look_after(self) -> None:
        """Until it is to stop: the METRICS line, the slot, tables that come and go."""
        assert self._stop_asked is not None
        watch_at = time.monotonic() + self._watch_seconds
        while True:
            try:
                await asyncio.wait_for(self._stop_asked.wait(), min(self._metrics_seconds, self._watch_seconds))
                return
            except TimeoutError:
                await self._look_at_slot()
                logger.info("METRICS %s", log_line(self.figures()))
            if time.monotonic() >= watch_at:
                watch_at = time.monotonic() + self._watch_seconds
                if self._slot_state is not None:
                    watch(self._slot_state, slot=self._slot.name)
                await self._refresh_if_possible()

    async def _look_at_slot(self) -> None:
        try:
            self._note_slot(await asyncio.to_thread(self._slot.state))
        except HeadwaterError as error:
            self._slot_problem = error.message
        except psycopg.Error as error:
            self._postgres_was_away = True
            logger.warning("the bridge has no connection to Postgres", extra={ERROR: str(error)})

    def _note_slot(self, state: SlotState) -> None:
        if self._postgres_was_away:
            self._postgres_was_away = False
            self._figures.reconnects += 1
        self._slot_state, self._slot_problem = state, None

    # -- schemas and who listens for what

    async def _refresh(self) -> None:
        """Publish schemas that changed; listen for requests for the tables that are published now."""
        async with self._refreshing:
            await self._refresh_alone()

    async def _refresh_alone(self) -> None:
        assert self._client is not None
        tables = await asyncio.to_thread(self._schemas.tables)
        self._figures.schemas += await self._schemas.put(self._client.jetstream(), tables)
        self._tables = tables
        for table in tables.keys() - self._listening.keys():
            # A subject for each table: several bridges share a server, and each answers for its own tables; those
            # that have the same ones answer once.
            self._listening[table] = await self._client.subscribe(
                subjects.request_subject(table), queue=_QUEUE, cb=self._answer
            )
        for table in self._listening.keys() - tables.keys():
            await self._listening.pop(table).unsubscribe()

    async def _refresh_if_possible(self) -> None:
        try:
            await self._refresh()
        except _OUTAGES as error:
            logger.warning("the bridge cannot look after schemas now", extra={ERROR: str(error)})

    def _learn(self, hashes: set[str]) -> None:
        if len(self._known_hashes) + len(hashes) > _MOST_HASHES:
            self._known_hashes = set()
        self._known_hashes |= hashes

    # -- requests

    async def _answer(self, message: Msg) -> None:
        """A request for a snapshot of a table of ours."""
        table = subjects.requested(message.subject)
        found = self._tables.get(table)
        assert self._snapshots is not None
        if found is None:
            await self._refuse(message, "unknown", f"{table.full_name} is not published any more")
        elif not found.has_key:
            await self._refuse(
                message, "no key", f"{table.full_name} has no key, so its rows cannot be told apart", "Give it one."
            )
        elif not found.is_whole:
            await self._refuse(
                message,
                "partial",
                f"the publication {self._slot.publication} leaves out rows or columns of {table.full_name}",
                "A snapshot would show them. Publish the whole table.",
            )
        elif (started := self._snapshots.start(table)) is None:
            await self._refuse(message, "busy", "too many snapshots are being taken", "Try again later.")
        else:
            joined, progress = started
            answer = {"accepted": True, "table": table.name, "schema": table.schema, "joined": joined}
            if progress.snapshot_id:
                answer["snapshot_id"] = progress.snapshot_id
            await self._respond(message, answer)

    async def _refuse_stray(self, message: Msg) -> None:
        """A request for a table that nobody publishes."""
        assert self._client is not None
        try:
            table = subjects.requested(message.subject)
            if table in self._tables:
                return
            document = await streams.get_schema(self._client.jetstream(), table)
            if document is not None and not document.get("dropped"):
                return  # another bridge's
            await self._refuse(message, "unknown", f"no table {table.full_name} is published", "Is its name right?")
        except InvalidMessage as error:
            await self._refuse(message, "unknown", error.message)
        except _OUTAGES as error:
            logger.warning("a request for a snapshot could not be answered", extra={ERROR: str(error)})

    async def _refuse(self, message: Msg, reason: str, error: str, hint: str | None = None) -> None:
        logger.warning("a request for a snapshot is refused: %s", error)
        await self._respond(message, {"accepted": False, "reason": reason, "error": error, "hint": hint})

    async def _respond(self, message: Msg, answer: dict[str, Any]) -> None:
        if message.reply:
            await message.respond(codec.encode(answer, self._encoding))

    # -- how

    def _nats_is_there(self) -> bool:
        return self._client is not None and self._client.is_connected

    def _stream(self, name: str) -> dict[str, Any] | None:
        assert self._client is not None
        js: JetStreamContext = self._client.jetstream()
        try:
            info = self._ask(js.stream_info(name))
        except (NotFoundError, ValueError):
            return None
        except (nats.errors.Error, JetStreamError, TimeoutError) as error:
            raise NatsUnavailable(f"NATS does not answer: {error}") from error
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

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(question, self._loop).result(_ANSWER_SECONDS)

    def _soon(self, action: Coroutine[Any, Any, None]) -> None:
        """Have it done without waiting; what goes wrong with it is made up for by the next look."""
        assert self._loop is not None

        def note(done: Future[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                logger.warning("the bridge cannot look after schemas now", extra={ERROR: str(error)})

        asyncio.run_coroutine_threadsafe(action, self._loop).add_done_callback(note)
