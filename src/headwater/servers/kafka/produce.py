"""Produce: batches of records become events. Requests that come together share one transaction."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import psycopg

from headwater.calls import kafka as calls
from headwater.calls.kafka import AppendBatch, Appended, KafkaTopic, Lane
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
from headwater.servers.kafka.batch_cache import Batch
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.compression import codecs_for
from headwater.servers.kafka.record_mapping import NO_PARTS, Parts, parts_of
from headwater.servers.kafka.records import (
    TRANSACTIONAL,
    BadBatch,
    BatchHeader,
    Columns,
    as_appended,
    read_header,
    read_records,
)
from headwater.servers.kafka.schema_validation import CHECKING, Unfitting, Validation
from headwater.servers.kafka.wire import ErrorCode, Request
from headwater.supervisor import supervise

MAX_RECORDS: Final = 20_000
MAX_BYTES: Final = 16 * 1024 * 1024
"""What one transaction takes, unless a single batch is larger."""
MAX_KEY_BYTES: Final = 65_535
MAX_PENDING_BYTES: Final = 128 * 1024 * 1024
"""What may wait to be written. While there is more, no further batch is looked at."""
RECORD_BYTES: Final = 100
"""What a record takes beside its bytes, so that many small ones count as what they are."""
MAX_BATCH_RECORDS: Final = 100_000
UNPACKED_LIMIT_BYTES: Final = 64 * 1024 * 1024
SMALL_RECORDS: Final = 5_000
SMALL_BYTES: Final = 1024 * 1024
"""A batch with more, or that becomes more, is unpacked beside the event loop: others need not wait for it."""
TURN_RECORDS: Final = 2_000
"""After so many that were unpacked on the event loop others have a turn."""
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


class Refused(Exception):
    """A batch that is not taken, with the code that says why."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Arrived(NamedTuple):
    """A batch that is to be appended; as it came, if it may be kept like that for readers; by whose time it is."""

    topic: str
    batch: AppendBatch
    as_it_came: memoryview | None
    codec: int
    by_log_time: bool
    bytes: int


class Room:
    """How much waits to be written, of all partitions, and whether there may be more."""

    def __init__(self) -> None:
        self.taken_bytes = 0
        self._free = asyncio.Event()
        self._free.set()

    async def wait(self) -> None:
        """Until there is room for more."""
        while not self._free.is_set():
            await self._free.wait()

    def take(self, count: int) -> None:
        self.taken_bytes += count
        if self.taken_bytes > MAX_PENDING_BYTES:
            self._free.clear()

    def give_back(self, count: int) -> None:
        self.taken_bytes -= count
        if self.taken_bytes <= MAX_PENDING_BYTES:
            self._free.set()


class _Pending(NamedTuple):
    arrived: Arrived
    done: asyncio.Future[Appended]

    @property
    def batch(self) -> AppendBatch:
        return self.arrived.batch


class Appender:
    """Appends batches in the order they come, as many to a transaction as wait when it begins.

    The room that a batch took is given back when it is written.
    """

    def __init__(self, broker: Broker, room: Room) -> None:
        self._broker = broker
        self._room = room
        self._pending: deque[_Pending] = deque()
        self._wanted = asyncio.Event()
        self._apart = asyncio.Semaphore(2)

    def submit(self, arrived: Arrived) -> asyncio.Future[Appended]:
        done: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        self._pending.append(_Pending(arrived, done))
        self._wanted.set()
        return done

    async def run(self) -> None:
        """Append what is submitted, for ever."""
        while True:
            while not self._pending:
                self._wanted.clear()
                await self._wanted.wait()
            taken = self._take()
            try:
                await self._append(taken)
            finally:
                self._room.give_back(sum(one.arrived.bytes for one in taken))
                for one in taken:
                    # Whoever waits must hear something, also when this task is ended.
                    if not one.done.done():
                        one.done.set_exception(LogUnavailable("the broker stops"))

    def _take(self) -> list[_Pending]:
        taken: list[_Pending] = []
        records = size = 0
        while self._pending:
            ahead = self._pending[0]
            records += len(ahead.batch.payloads)
            size += ahead.arrived.bytes
            if taken and (records > MAX_RECORDS or size > MAX_BYTES):
                break
            taken.append(self._pending.popleft())
        return taken

    async def _append(self, taken: Sequence[_Pending]) -> None:
        try:
            answers = await self._run([one.batch for one in taken])
        except (HeadwaterError, psycopg.Error) as error:
            lanes = list(dict.fromkeys(one.batch.lane for one in taken))
            # That somebody holds the lane is true of all of its batches: trying each would take as long each time.
            held = isinstance(error, psycopg.errors.LockNotAvailable) and len(lanes) == 1
            if len(taken) == 1 or held or isinstance(error, LogUnavailable):
                for one in taken:
                    if not one.done.done():
                        one.done.set_exception(error)
            elif len(lanes) == 1:
                # One batch is at fault: the others must not pay for it.
                for one in taken:
                    await self._append([one])
            else:
                # Or one lane, that somebody holds.
                await asyncio.gather(*(self._append_apart(lane, taken) for lane in lanes))
            return
        for one, answer in zip(taken, answers, strict=True):
            if not one.done.done():
                one.done.set_result(answer)
            if answer.outcome == "appended" and answer.base_offset is not None:
                # Before those who wait are woken, so that they find it.
                self._keep(one.arrived, answer.base_offset, answer)
                self._broker.tails.advance(one.batch.lane, answer.base_offset + len(one.batch.payloads))
                COUNTERS.add(PUBLISHED, one.arrived.topic, by=len(one.batch.payloads))

    def _keep(self, arrived: Arrived, first: int, answer: Appended) -> None:
        if arrived.as_it_came is None:
            return
        log_append_ms = answer.appended_ms if arrived.by_log_time else None
        kept = Batch(
            first,
            first + len(arrived.batch.payloads),
            answer.appended_ms,
            answer.after_position,
            arrived.codec,
            arrived.by_log_time,
            as_appended(arrived.as_it_came, first, log_append_ms=log_append_ms, leader_epoch=answer.epoch),
        )
        self._broker.kept.keep(arrived.batch.lane, kept, epoch=answer.epoch)

    async def _append_apart(self, lane: Lane, taken: Sequence[_Pending]) -> None:
        # A few at a time: the lease and others who read need connections too.
        async with self._apart:
            await self._append([one for one in taken if one.batch.lane == lane])

    async def _run(self, batches: Sequence[AppendBatch]) -> list[Appended]:
        for _ in range(5):
            try:
                # No patience: whether a lost commit happened is not known, and only the client may decide to repeat.
                return await self._broker.log.run(calls.kafka_append(batches), patience_seconds=0)
            except TransactionAborted as error:
                logger.warning("append runs again", extra={ERROR: error.message})
        raise LogUnavailable("an append was ended by Postgres again and again")


class _Answer(NamedTuple):
    """What is said of one partition."""

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


class _Landing(NamedTuple):
    """A batch that is on its way into a partition, and whether its records get the log's time."""

    partition: int
    landing: asyncio.Future[Appended]
    log_append: bool


Staging = Callable[[str, AppendBatch], Awaitable[Appended]]
# What names the topic in the answer, and the answers or what brings them, for each partition.
_OfTopic = tuple[dict[str, Any], list[_Answer | _Landing]]


class Producing:
    """The API Produce."""

    def __init__(self, broker: Broker, *, appenders: int = 2) -> None:
        self._broker = broker
        self._room = Room()
        self._appenders = [Appender(broker, self._room) for _ in range(appenders)]
        self._validation = Validation(broker.log)
        # One after the other has room for what it becomes, which is not known before.
        self._large = asyncio.Semaphore(2)
        self._in_turn = 0

    def tasks(self) -> list[asyncio.Task[None]]:
        return [supervise("kafka appender", appender.run) for appender in self._appenders]

    async def begin(self, request: Request, stage: Staging) -> Awaitable[dict[str, Any] | None]:
        """Queue the batches of a request, in order, and return what waits for them; that gives the answer."""
        fields = request.fields
        waiting: list[_OfTopic] = []
        for asked in fields.topic_data or ():
            by_id = request.version >= 13
            topic = await (
                self._broker.topic_with_uuid(asked.topic_id) if by_id else self._broker.topic_named(asked.name)
            )
            missing = ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
            answers: list[_Answer | _Landing] = []
            for part in asked.partition_data or ():
                try:
                    answers.append(await self._queue(request, topic, missing, part, stage))
                except Refused as refused:
                    answers.append(_Answer(part.index, refused.code, refused.message))
                except BadBatch as bad:
                    code = ErrorCode.corrupt_message if bad.corrupt else ErrorCode.invalid_record
                    answers.append(_Answer(part.index, code, str(bad)))
                except Unfitting as unfit:
                    answers.append(_Answer(part.index, unfit.code, str(unfit), record_errors=unfit.records))
            named: dict[str, Any] = {"topic_id": asked.topic_id} if by_id else {"name": asked.name}
            waiting.append((named, answers))
        return _answered(waiting, silent=fields.acks == 0)

    async def _queue(
        self, request: Request, topic: KafkaTopic | None, missing: ErrorCode, part: Any, stage: Staging
    ) -> _Landing:
        if request.fields.acks not in (-1, 0, 1):
            raise Refused(ErrorCode.invalid_required_acks, "acks is -1, 0 or 1")
        if topic is not None and not request.allowed("write", "topic", topic.name):
            raise Refused(ErrorCode.topic_authorization_failed, f'topic "{topic.name}" may not be written to')
        if topic is None or not 0 <= part.index < topic.partitions:
            raise Refused(missing, "there is no such topic or partition")
        if topic.name.startswith(RESERVED_PREFIX):
            raise Refused(
                ErrorCode.topic_authorization_failed,
                f'topic "{topic.name}" is written by Headwater alone: names that begin with "{RESERVED_PREFIX}" are '
                "reserved",
            )
        if not topic.writable:
            kind = "open" if topic.kind == "open" else "an event store"
            raise Refused(
                ErrorCode.invalid_request,
                f'topic "{topic.name}" is {kind}: it can be read here, and written by SQL and the library only',
            )
        header = _header(topic, part, version=request.version)
        transactional = bool(header.attributes & TRANSACTIONAL)
        if transactional and not request.fields.transactional_id:
            raise Refused(ErrorCode.invalid_txn_state, "the batch is of a transaction, the request is not")
        if transactional and not request.allowed("write", "transaction", request.fields.transactional_id):
            raise Refused(ErrorCode.transactional_id_authorization_failed, "the transactional id may not be used")
        arrived, columns = await self._unpacked(topic, part, header)
        landing: asyncio.Future[Appended] | None = None
        try:
            if topic.schemas:
                await self._validation.refuse_unfitting(topic, columns)
            if transactional:
                landing = asyncio.ensure_future(stage(request.fields.transactional_id, arrived.batch))
                landing.add_done_callback(lambda _: self._room.give_back(arrived.bytes))
            else:
                landing = self._appenders[hash(arrived.batch.lane) % len(self._appenders)].submit(arrived)
        finally:
            if landing is None:
                self._room.give_back(arrived.bytes)
        return _Landing(part.index, landing, topic.timestamp_type == "LogAppendTime")

    async def _unpacked(self, topic: KafkaTopic, part: Any, header: BatchHeader) -> tuple[Arrived, Columns]:
        """The batch that a client sent for a partition, checked, and the room for it taken."""
        if header.record_count <= SMALL_RECORDS and len(part.records) <= SMALL_BYTES:
            self._in_turn += header.record_count
            if self._in_turn > TURN_RECORDS:
                self._in_turn = 0
                await asyncio.sleep(0)
            await self._room.wait()
            try:
                unpacked = _as_batch(topic, part, header, limit_bytes=SMALL_BYTES)
                self._room.take(unpacked[0].bytes)
                return unpacked
            except BadBatch:
                # It may only be packed well.
                if not header.codec:
                    raise
        async with self._large:
            await self._room.wait()
            make = partial(_as_batch, topic, part, header, limit_bytes=UNPACKED_LIMIT_BYTES)
            unpacked = await asyncio.get_running_loop().run_in_executor(CHECKING, make)
            self._room.take(unpacked[0].bytes)
            return unpacked


async def _answered(waiting: Sequence[_OfTopic], *, silent: bool) -> dict[str, Any] | None:
    lost: LogUnavailable | None = None
    responses = []
    for named, answers in waiting:
        landed = []
        for answer in answers:
            try:
                landed.append((answer if isinstance(answer, _Answer) else await _landed(*answer)).fields())
            except LogUnavailable as error:
                lost = error
        responses.append({**named, "partition_responses": landed})
    if lost is not None:
        # Whether it was committed, nobody knows. The connection is ended, so that the client sends all that is in
        # flight again as it was. Told by a code, it would hear of a gap in the batches behind, begin a new epoch for
        # all partitions, and send under other numbers what may be in the log already.
        raise lost
    return None if silent else {"responses": responses}


async def _landed(index: int, landing: Awaitable[Appended], log_append: bool) -> _Answer:
    try:
        appended = await landing
    except StorageFull as error:
        # Nothing was written, and the code makes clients send it again.
        return _Answer(index, ErrorCode.kafka_storage_error, error.message)
    except LogUnavailable:
        raise
    except EventTooLarge as error:
        return _Answer(index, ErrorCode.message_too_large, error.message)
    except InvalidRequest as error:
        return _Answer(index, ErrorCode.invalid_record, error.message)
    except psycopg.errors.LockNotAvailable:
        return _Answer(index, ErrorCode.request_timed_out, "another transaction holds the partition")
    except (HeadwaterError, psycopg.Error) as error:
        logger.error("append failed", extra={ERROR: str(error)})
        return _Answer(index, ErrorCode.unknown_server_error, str(error))
    code = OUTCOMES[appended.outcome]
    offset = -1 if appended.base_offset is None else appended.base_offset
    fresh = log_append and appended.outcome == "appended"
    return _Answer(index, code, None, offset, appended.appended_ms if fresh else -1)


def _header(topic: KafkaTopic, part: Any, *, version: int) -> BatchHeader:
    """What the batch that a client sent for a partition says of itself, checked."""
    if part.records is None:
        raise Refused(ErrorCode.invalid_record, "there are no records")
    if len(part.records) > topic.max_payload_bytes:
        raise Refused(
            ErrorCode.message_too_large,
            f"a batch of {len(part.records)} bytes is above max.message.bytes, {topic.max_payload_bytes}",
        )
    header = read_header(part.records)
    if header.codec == 4 and version < 7:
        raise Refused(ErrorCode.unsupported_compression_type, "zstd needs Produce version 7 or newer")
    if header.record_count > MAX_BATCH_RECORDS:
        # With this code clients that can send the batch again in halves.
        raise Refused(ErrorCode.message_too_large, f"a batch is of up to {MAX_BATCH_RECORDS} records")
    return header


def _as_batch(topic: KafkaTopic, part: Any, header: BatchHeader, *, limit_bytes: int) -> tuple[Arrived, Columns]:
    """The batch, ready to be appended, and the same as columns."""
    columns = read_records(part.records, header, limit_bytes=limit_bytes)
    batch = _checked(topic, Lane(topic.id, part.index), header, columns)
    # As it came and unpacked: both wait.
    size = 2 * len(part.records) + RECORD_BYTES * header.record_count
    if header.codec:
        size += sum(sum(map(len, filter(None, parts))) for parts in (columns.keys, columns.values, columns.headers))
    # As the topic packs its records, and whole: compaction takes single ones.
    fits = header.codec in codecs_for(topic.compression_type, zstd=True) and not topic.compacted
    by_log_time = topic.timestamp_type == "LogAppendTime"
    return Arrived(topic.name, batch, part.records if fits else None, header.codec, by_log_time, size), columns


def _checked(topic: KafkaTopic, lane: Lane, header: BatchHeader, columns: Columns) -> AppendBatch:
    if header.producer_id >= 0 and (header.producer_epoch < 0 or header.first_sequence < 0):
        raise BadBatch("an idempotent batch needs an epoch and a sequence")
    if max(map(len, filter(None, columns.keys)), default=0) > MAX_KEY_BYTES:
        raise BadBatch(f"a key is up to {MAX_KEY_BYTES} bytes")
    if max(map(len, filter(None, columns.values)), default=0) > topic.max_payload_bytes:
        raise Refused(ErrorCode.message_too_large, f"a value is up to {topic.max_payload_bytes} bytes")
    if not all(-_INT64 <= time_ms < _INT64 for time_ms in (min(columns.times_ms), max(columns.times_ms))):
        raise BadBatch("a timestamp is outside of 64 bits")
    if topic.compacted and None in columns.keys:
        raise BadBatch("a compacted topic takes no record without a key")
    parts = _parts(topic, columns)
    # The order of Columns is that of a record; that of AppendBatch is the database's.
    return AppendBatch(
        lane,
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
        None if parts is None else [part.kept for part in parts],
    )


def _parts(topic: KafkaTopic, columns: Columns) -> list[Parts] | None:
    if not any(columns.headers):
        return None
    parts = [NO_PARTS if section is None else parts_of(section) for section in columns.headers]
    if any(section is not None and len(section) > topic.max_header_bytes for section in columns.headers):
        raise Refused(ErrorCode.message_too_large, f"headers are up to {topic.max_header_bytes} bytes")
    return parts
