"""The API Produce: validates record batches and appends them as events. Concurrent requests share one transaction.

Steps: `ProduceApi.begin` checks permissions and headers, unpacks each batch and submits it to an `Appender` (by
partition), or stages it if it belongs to a transaction. The appender writes all batches that wait when it begins, in
one transaction. `begin` returns an awaitable that waits for the appends and makes the response.
Invariants: batches of one partition are appended in the order of arrival; the memory of waiting batches is bounded
(`MemoryBudget`); an append with an unknown outcome is never retried here, since only the client can do that safely.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import psycopg

from headwater.calls import kafka as calls
from headwater.calls.kafka import AppendBatch, KafkaTopic, ProduceResult, TopicPartition
from headwater.errors import (
    EventTooLarge,
    HeadwaterError,
    InvalidRequest,
    LogUnavailable,
    StorageFull,
    TransactionAborted,
)
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import ERROR, PUBLISHED, logger
from headwater.servers.kafka.batch_cache import CachedBatch
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.compression import codecs_for
from headwater.servers.kafka.record_mapping import NO_EVENT_PARTS, EventParts, event_parts
from headwater.servers.kafka.records import (
    TRANSACTIONAL,
    BadBatch,
    BatchHeader,
    Columns,
    read_header,
    read_records,
    stamp_batch,
)
from headwater.servers.kafka.schema_validation import VALIDATION_POOL, SchemaValidator, UnfitRecords
from headwater.servers.kafka.wire import ErrorCode, Request
from headwater.supervisor import supervise

MAX_RECORDS: Final = 20_000
MAX_BYTES: Final = 16 * 1024 * 1024
"""Limits of one transaction, unless a single batch is larger."""
MAX_KEY_BYTES: Final = 65_535
MAX_PENDING_BYTES: Final = 128 * 1024 * 1024
"""Limit of batches that wait to be written. Above it no further batch is unpacked."""
RECORD_BYTES: Final = 100
"""Memory of a record besides its bytes, so that many small records are counted correctly."""
MAX_BATCH_RECORDS: Final = 100_000
MAX_UNPACKED_BYTES: Final = 64 * 1024 * 1024
SMALL_RECORDS: Final = 5_000
SMALL_BYTES: Final = 1024 * 1024
"""Larger batches are unpacked in a thread, so that they do not block the event loop."""
YIELD_RECORDS: Final = 2_000
"""After unpacking this many records on the event loop, yield to other tasks."""
_INT64: Final = 2**63
RESERVED_PREFIX: Final = "headwater."

OUTCOMES: Final = {
    "appended": ErrorCode.none,
    "staged": ErrorCode.none,
    "duplicate": ErrorCode.none,
    "out of order": ErrorCode.out_of_order_sequence_number,
    "fenced": ErrorCode.invalid_producer_epoch,
    "no topic": ErrorCode.unknown_topic_or_partition,
    "reserved": ErrorCode.topic_authorization_failed,
    "no transaction": ErrorCode.invalid_txn_state,
    "unknown": ErrorCode.invalid_producer_id_mapping,
}


class ProduceError(Exception):
    """A batch is rejected with this error code."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class IncomingBatch(NamedTuple):
    """A batch to append. `original`: its bytes, if they may be cached for readers."""

    topic: str
    batch: AppendBatch
    original: memoryview | None
    codec: int
    by_log_time: bool
    bytes: int


class MemoryBudget:
    """Limits the memory of batches that wait to be written, over all partitions."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._free = asyncio.Event()
        self._free.set()

    async def wait(self) -> None:
        """Wait until the budget is not exceeded."""
        while not self._free.is_set():
            await self._free.wait()

    def reserve(self, count: int) -> None:
        self.reserved_bytes += count
        if self.reserved_bytes > MAX_PENDING_BYTES:
            self._free.clear()

    def release(self, count: int) -> None:
        self.reserved_bytes -= count
        if self.reserved_bytes <= MAX_PENDING_BYTES:
            self._free.set()


class _QueuedBatch(NamedTuple):
    incoming: IncomingBatch
    done: asyncio.Future[ProduceResult]

    @property
    def batch(self) -> AppendBatch:
        return self.incoming.batch


class Appender:
    """Appends batches in the order of arrival. A transaction takes all batches that wait when it begins.

    The memory of a batch is released when it is written.
    """

    def __init__(self, broker: Broker, budget: MemoryBudget) -> None:
        self._broker = broker
        self._budget = budget
        self._pending: deque[_QueuedBatch] = deque()
        self._wanted = asyncio.Event()
        self._slots = asyncio.Semaphore(2)

    def submit(self, incoming: IncomingBatch) -> asyncio.Future[ProduceResult]:
        done: asyncio.Future[ProduceResult] = asyncio.get_running_loop().create_future()
        self._pending.append(_QueuedBatch(incoming, done))
        self._wanted.set()
        return done

    async def run(self) -> None:
        """Append submitted batches. Runs until it is cancelled."""
        while True:
            while not self._pending:
                self._wanted.clear()
                await self._wanted.wait()
            taken = self._take()
            try:
                await self._append(taken)
            finally:
                self._budget.release(sum(one.incoming.bytes for one in taken))
                for one in taken:
                    # The waiting request must get a result also if this task is cancelled.
                    if not one.done.done():
                        one.done.set_exception(LogUnavailable("the broker is stopping"))

    def _take(self) -> list[_QueuedBatch]:
        taken: list[_QueuedBatch] = []
        records = size = 0
        while self._pending:
            ahead = self._pending[0]
            records += len(ahead.batch.payloads)
            size += ahead.incoming.bytes
            if taken and (records > MAX_RECORDS or size > MAX_BYTES):
                break
            taken.append(self._pending.popleft())
        return taken

    async def _append(self, taken: Sequence[_QueuedBatch]) -> None:
        try:
            answers = await self._run([one.batch for one in taken])
        except (HeadwaterError, psycopg.Error) as error:
            topic_partitions = list(dict.fromkeys(one.batch.topic_partition for one in taken))
            # A lock on the partition affects all of its batches: trying each would wait for the timeout each time.
            locked = isinstance(error, psycopg.errors.LockNotAvailable) and len(topic_partitions) == 1
            if len(taken) == 1 or locked or isinstance(error, LogUnavailable):
                for one in taken:
                    if not one.done.done():
                        one.done.set_exception(error)
            elif len(topic_partitions) == 1:
                # One batch caused the error: append each alone, so that the others succeed.
                for one in taken:
                    await self._append([one])
            else:
                # Or one partition is locked: append each partition alone.
                await asyncio.gather(
                    *(self._append_partition(topic_partition, taken) for topic_partition in topic_partitions)
                )
            return
        for one, answer in zip(taken, answers, strict=True):
            if not one.done.done():
                one.done.set_result(answer)
            if answer.outcome == "appended" and answer.base_offset is not None:
                # Cache before waking waiting fetches, so that they find the batch.
                self._cache(one.incoming, answer.base_offset, answer)
                self._broker.end_offsets.advance(
                    one.batch.topic_partition, answer.base_offset + len(one.batch.payloads)
                )
                COUNTERS.add(PUBLISHED, one.incoming.topic, by=len(one.batch.payloads))

    def _cache(self, incoming: IncomingBatch, first: int, answer: ProduceResult) -> None:
        if incoming.original is None:
            return
        log_append_ms = answer.appended_ms if incoming.by_log_time else None
        cached = CachedBatch(
            first,
            first + len(incoming.batch.payloads),
            answer.appended_ms,
            answer.after_position,
            incoming.codec,
            incoming.by_log_time,
            stamp_batch(incoming.original, first, log_append_ms=log_append_ms, leader_epoch=answer.epoch),
        )
        self._broker.batch_cache.add(incoming.batch.topic_partition, cached, epoch=answer.epoch)

    async def _append_partition(self, topic_partition: TopicPartition, taken: Sequence[_QueuedBatch]) -> None:
        # A few at a time, so that connections remain for other requests.
        async with self._slots:
            await self._append([one for one in taken if one.batch.topic_partition == topic_partition])

    async def _run(self, batches: Sequence[AppendBatch]) -> list[ProduceResult]:
        for _ in range(5):
            try:
                # No retry on a lost connection: the commit may have happened, and only the client can retry safely.
                return await self._broker.impatient.run(calls.kafka_append(batches))
            except TransactionAborted as error:
                logger.warning("append retried", extra={ERROR: error.message})
        raise LogUnavailable("the append failed: Postgres aborted its transaction 5 times")


class _PartitionResponse(NamedTuple):
    """The response for one partition."""

    partition: int
    code: ErrorCode = ErrorCode.none
    message: str | None = None
    base_offset: int = -1
    log_append_ms: int = -1
    record_errors: Sequence[dict[str, Any]] = ()

    def fields(self) -> dict[str, Any]:
        return {
            "index": self.partition,
            "error_code": self.code,
            "error_message": self.message,
            "base_offset": self.base_offset,
            "log_append_time": self.log_append_ms,
            "log_start_offset": -1,
            "record_errors": self.record_errors,
        }


class _PendingAppend(NamedTuple):
    """An append that has not completed. `log_append`: the topic uses LogAppendTime."""

    partition: int
    append: asyncio.Future[ProduceResult]
    log_append: bool


Staging = Callable[[str, AppendBatch], Awaitable[ProduceResult]]
# The topic's name or id in the response, and for each partition its response or its pending append.
_TopicResponse = tuple[dict[str, Any], list[_PartitionResponse | _PendingAppend]]


class ProduceApi:
    """The API Produce."""

    def __init__(self, broker: Broker, *, appenders: int = 2) -> None:
        self._broker = broker
        self._budget = MemoryBudget()
        self._appenders = [Appender(broker, self._budget) for _ in range(appenders)]
        self._validator = SchemaValidator(broker.log)
        # Few at a time: the unpacked size is not known in advance.
        self._large_batches = asyncio.Semaphore(2)
        self._unpacked_since_yield = 0

    def tasks(self) -> list[asyncio.Task[None]]:
        return [supervise("kafka appender", appender.run) for appender in self._appenders]

    async def begin(self, request: Request, stage: Staging) -> Awaitable[dict[str, Any] | None]:
        """Submit the batches of a request in order, and return an awaitable for the response."""
        fields = request.fields
        waiting: list[_TopicResponse] = []
        for requested in fields.topic_data or ():
            by_id = request.version >= 13
            topic = await (
                self._broker.topic_with_uuid(requested.topic_id) if by_id else self._broker.topic_named(requested.name)
            )
            missing = ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
            answers: list[_PartitionResponse | _PendingAppend] = []
            for part in requested.partition_data or ():
                try:
                    answers.append(await self._submit(request, topic, missing, part, stage))
                except ProduceError as error:
                    answers.append(_PartitionResponse(part.index, error.code, error.message))
                except BadBatch as error:
                    code = ErrorCode.corrupt_message if error.corrupt else ErrorCode.invalid_record
                    answers.append(_PartitionResponse(part.index, code, str(error)))
                except UnfitRecords as error:
                    answers.append(_PartitionResponse(part.index, error.code, str(error), record_errors=error.records))
            named: dict[str, Any] = {"topic_id": requested.topic_id} if by_id else {"name": requested.name}
            waiting.append((named, answers))
        return _await_response(waiting, silent=fields.acks == 0)

    async def _submit(
        self, request: Request, topic: KafkaTopic | None, missing: ErrorCode, part: Any, stage: Staging
    ) -> _PendingAppend:
        if request.fields.acks not in (-1, 0, 1):
            raise ProduceError(
                ErrorCode.invalid_required_acks, f"invalid acks {request.fields.acks}: expected -1, 0 or 1"
            )
        if topic is not None and not request.allowed("write", "topic", topic.name):
            raise ProduceError(ErrorCode.topic_authorization_failed, f'not authorized to write to topic "{topic.name}"')
        if topic is None or not 0 <= part.index < topic.partitions:
            raise ProduceError(missing, "the topic or partition does not exist")
        if topic.name.startswith(RESERVED_PREFIX):
            raise ProduceError(
                ErrorCode.topic_authorization_failed,
                f'topic "{topic.name}" is reserved: only Headwater writes to topics whose names begin with '
                f'"{RESERVED_PREFIX}"',
            )
        if not topic.writable:
            kind = "open" if topic.kind == "open" else "an event store"
            raise ProduceError(
                ErrorCode.invalid_request,
                f'topic "{topic.name}" is {kind}: Kafka clients can only read it. Publish to it by SQL or the library.',
            )
        header = _check_header(topic, part, version=request.version)
        transactional = bool(header.attributes & TRANSACTIONAL)
        if transactional and not request.fields.transactional_id:
            raise ProduceError(
                ErrorCode.invalid_txn_state, "the batch is transactional, but the request has no transactional id"
            )
        if transactional and not request.allowed("write", "transaction", request.fields.transactional_id):
            raise ProduceError(
                ErrorCode.transactional_id_authorization_failed, "not authorized to use the transactional id"
            )
        incoming, columns = await self._unpack(topic, part, header)
        append: asyncio.Future[ProduceResult] | None = None
        try:
            if topic.schemas:
                await self._validator.validate(topic, columns)
            if transactional:
                append = asyncio.ensure_future(stage(request.fields.transactional_id, incoming.batch))
                append.add_done_callback(lambda _: self._budget.release(incoming.bytes))
            else:
                append = self._appenders[hash(incoming.batch.topic_partition) % len(self._appenders)].submit(incoming)
        finally:
            if append is None:
                self._budget.release(incoming.bytes)
        return _PendingAppend(part.index, append, topic.timestamp_type == "LogAppendTime")

    async def _unpack(self, topic: KafkaTopic, part: Any, header: BatchHeader) -> tuple[IncomingBatch, Columns]:
        """Unpack and check the batch of a partition, and reserve memory for it."""
        if header.record_count <= SMALL_RECORDS and len(part.records) <= SMALL_BYTES:
            self._unpacked_since_yield += header.record_count
            if self._unpacked_since_yield > YIELD_RECORDS:
                self._unpacked_since_yield = 0
                await asyncio.sleep(0)
            await self._budget.wait()
            try:
                unpacked = _unpack_batch(topic, part, header, limit_bytes=SMALL_BYTES)
                self._budget.reserve(unpacked[0].bytes)
                return unpacked
            except BadBatch:
                # It may just be larger than the small limit when decompressed.
                if not header.codec:
                    raise
        async with self._large_batches:
            await self._budget.wait()
            unpack = partial(_unpack_batch, topic, part, header, limit_bytes=MAX_UNPACKED_BYTES)
            unpacked = await asyncio.get_running_loop().run_in_executor(VALIDATION_POOL, unpack)
            self._budget.reserve(unpacked[0].bytes)
            return unpacked


async def _await_response(waiting: Sequence[_TopicResponse], *, silent: bool) -> dict[str, Any] | None:
    lost: LogUnavailable | None = None
    responses = []
    for named, answers in waiting:
        partitions = []
        for answer in answers:
            try:
                partitions.append(
                    (answer if isinstance(answer, _PartitionResponse) else await _await_append(*answer)).fields()
                )
            except LogUnavailable as error:
                lost = error
        responses.append({**named, "partition_responses": partitions})
    if lost is not None:
        # Whether the append was committed is unknown. The connection is closed, so that the client resends all batches
        # in flight unchanged. After an error code instead, it would see a gap in the sequence of the following batches,
        # start a new producer epoch, and resend batches that may be in the log under new sequence numbers.
        raise lost
    return None if silent else {"responses": responses}


async def _await_append(index: int, append: Awaitable[ProduceResult], log_append: bool) -> _PartitionResponse:
    try:
        appended = await append
    except StorageFull as error:
        # Nothing was written; clients retry on this code.
        return _PartitionResponse(index, ErrorCode.kafka_storage_error, error.message)
    except LogUnavailable:
        raise
    except EventTooLarge as error:
        return _PartitionResponse(index, ErrorCode.message_too_large, error.message)
    except InvalidRequest as error:
        return _PartitionResponse(index, ErrorCode.invalid_record, error.message)
    except psycopg.errors.LockNotAvailable:
        return _PartitionResponse(
            index, ErrorCode.request_timed_out, "timeout: another transaction holds the lock of the partition"
        )
    except (HeadwaterError, psycopg.Error) as error:
        logger.error("append failed", extra={ERROR: str(error)})
        return _PartitionResponse(index, ErrorCode.unknown_server_error, str(error))
    code = OUTCOMES[appended.outcome]
    offset = -1 if appended.base_offset is None else appended.base_offset
    fresh = log_append and appended.outcome == "appended"
    return _PartitionResponse(index, code, None, offset, appended.appended_ms if fresh else -1)


def _check_header(topic: KafkaTopic, part: Any, *, version: int) -> BatchHeader:
    """Read and check the header of the batch of a partition."""
    if part.records is None:
        raise ProduceError(ErrorCode.invalid_record, "the request has no records for the partition")
    if len(part.records) > topic.max_payload_bytes:
        raise ProduceError(
            ErrorCode.message_too_large,
            f"a batch of {len(part.records)} bytes exceeds max.message.bytes ({topic.max_payload_bytes})",
        )
    header = read_header(part.records)
    if header.codec == 4 and version < 7:
        raise ProduceError(ErrorCode.unsupported_compression_type, "zstd needs Produce version 7 or newer")
    if header.record_count > MAX_BATCH_RECORDS:
        # On this code, clients that support it split the batch and retry.
        raise ProduceError(
            ErrorCode.message_too_large,
            f"a batch of {header.record_count} records: expected up to {MAX_BATCH_RECORDS}",
        )
    return header


def _unpack_batch(
    topic: KafkaTopic, part: Any, header: BatchHeader, *, limit_bytes: int
) -> tuple[IncomingBatch, Columns]:
    """Unpack and check a batch; returns it ready for the append, and its columns."""
    columns = read_records(part.records, header, limit_bytes=limit_bytes)
    batch = _append_batch(topic, TopicPartition(topic.id, part.index), header, columns)
    # Both the original and the unpacked bytes stay in memory until the append.
    size = 2 * len(part.records) + RECORD_BYTES * header.record_count
    if header.codec:
        size += sum(sum(map(len, filter(None, parts))) for parts in (columns.keys, columns.values, columns.headers))
    # Cacheable if the codec suits the topic, and compaction cannot remove single records.
    cacheable = header.codec in codecs_for(topic.compression_type, zstd=True) and not topic.compacted
    by_log_time = topic.timestamp_type == "LogAppendTime"
    return IncomingBatch(
        topic.name, batch, part.records if cacheable else None, header.codec, by_log_time, size
    ), columns


def _append_batch(
    topic: KafkaTopic, topic_partition: TopicPartition, header: BatchHeader, columns: Columns
) -> AppendBatch:
    if header.producer_id >= 0 and (header.producer_epoch < 0 or header.first_sequence < 0):
        raise BadBatch("an idempotent batch needs a producer epoch and a sequence number")
    if max(map(len, filter(None, columns.keys)), default=0) > MAX_KEY_BYTES:
        raise BadBatch(f"a key exceeds {MAX_KEY_BYTES} bytes")
    if max(map(len, filter(None, columns.values)), default=0) > topic.max_payload_bytes:
        raise ProduceError(ErrorCode.message_too_large, f"a value exceeds {topic.max_payload_bytes} bytes")
    if not all(-_INT64 <= time_ms < _INT64 for time_ms in (min(columns.times_ms), max(columns.times_ms))):
        raise BadBatch("a timestamp does not fit into 64 bits")
    if topic.compacted and None in columns.keys:
        raise BadBatch("a record of a compacted topic needs a key")
    parts = _parts(topic, columns)
    # Columns is in the order of a record, AppendBatch in that of the SQL function.
    return AppendBatch(
        topic_partition,
        header.producer_id,
        header.producer_epoch,
        header.first_sequence,
        columns.values,
        columns.keys,
        None if parts is None else [part.type for part in parts],
        None if parts is None else [part.routing_key for part in parts],
        None if parts is None else [part.headers for part in parts],
        None if parts is None else [part.content_type for part in parts],
        None if topic.timestamp_type == "LogAppendTime" else columns.times_ms,
        None if parts is None else [part.record_headers for part in parts],
    )


def _parts(topic: KafkaTopic, columns: Columns) -> list[EventParts] | None:
    if not any(columns.headers):
        return None
    parts = [NO_EVENT_PARTS if section is None else event_parts(section) for section in columns.headers]
    if any(section is not None and len(section) > topic.max_header_bytes for section in columns.headers):
        raise ProduceError(
            ErrorCode.message_too_large, f"the headers of a record exceed {topic.max_header_bytes} bytes"
        )
    return parts
