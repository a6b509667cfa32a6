"""Writes to the log from Spark, exactly once: tasks stage events, and one transaction publishes the batch.

Each attempt of a task commits its events to a staging table under a unique name. When all tasks are done, one
transaction records the epoch and publishes the events of the successful attempts. A replayed epoch finds the record and
adds nothing; the events of failed attempts are never published.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import BinaryType, DataType, StringType, StructType

import headwater
from headwater.calls import pipelines
from headwater.calls import pipelines as pipelines_calls
from headwater.calls.encoding import JSON_TYPE, encode_payload
from headwater.errors import InvalidEvent, InvalidRequest, TransactionAborted
from headwater.spark import arrow
from headwater.spark.formats.read_options import required_dsn
from headwater.spark.options import ADDED_BY_SPARK, refuse_unknown_options

WRITE_OPTIONS = ("dsn", "topic", "writer", "epoch")
TEXT_COLUMNS = ("topic", "data", "type", "routing_key", "headers", "event_id", "content_type")
TEXT_OR_BYTES = ("payload", "key")
COLUMNS = TEXT_COLUMNS + TEXT_OR_BYTES

CHUNK_BYTES = 8 * 1024 * 1024
CHUNK_EVENTS = 10_000
MAX_PUBLISH_ATTEMPTS = 5


@dataclass(frozen=True)
class WriteOptions:
    """The parsed options of a write."""

    dsn: str
    topic: str | None
    writer: str | None
    epoch: int

    @classmethod
    def parse(cls, options: Mapping[str, str], schema: StructType) -> WriteOptions:
        refuse_unknown_options(options, WRITE_OPTIONS, purpose=" for writing", also=ADDED_BY_SPARK)
        dsn = required_dsn(options)
        topic = options.get("topic")
        check_columns(schema, topic)
        epoch = options.get("epoch", "0")
        if not epoch.isdecimal() or ("epoch" in options and "writer" not in options):
            raise InvalidRequest(
                "invalid option epoch: expected a whole number, together with the option writer",
                hint="Set both options, or neither.",
            )
        return cls(dsn, topic, options.get("writer"), int(epoch))


def check_columns(schema: StructType, topic: str | None) -> None:
    """Raise InvalidRequest if the columns of a DataFrame cannot be written as events."""
    names = schema.fieldNames()
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise InvalidRequest(
            f"unknown columns for an event: {', '.join(unknown)}",
            hint=f"Select from {', '.join(COLUMNS)}; put other values into the payload.",
        )
    if (topic is None) == ("topic" not in names):
        raise InvalidRequest("give the topic either as the column topic or as the option topic")
    if ("payload" in names) == ("data" in names):
        raise InvalidRequest("give the content of an event either as the column payload or, as JSON text, as data")
    wrong: list[str] = []
    for field in schema.fields:
        allowed: tuple[type[DataType], ...] = (StringType,) if field.name in TEXT_COLUMNS else (StringType, BinaryType)
        if not isinstance(field.dataType, allowed):
            wrong.append(f"{field.name} ({field.dataType.simpleString()})")
    if wrong:
        raise InvalidRequest(
            f"columns with an invalid type: {', '.join(wrong)}; expected text (for payload and key also binary)",
            hint="Use cast('string') or to_json(...).",
        )


@dataclass(frozen=True)
class StagedAttempt(WriterCommitMessage):
    """The events that one attempt of one task has staged."""

    writer: str
    epoch: int
    part: int
    attempt: str
    events: int


@dataclass(frozen=True, slots=True)
class TopicChunk:
    """Events of one topic, in order, as columns: one row of the staging table."""

    topic: str
    columns: Mapping[str, pa.Array]

    def __len__(self) -> int:
        return len(self.columns["payload"])


def chunks(batch: pa.RecordBatch, topic: str | None) -> Iterator[TopicChunk]:
    """Split a batch into chunks of bounded size, each of one topic and in the order of the rows."""
    columns = {name: batch.column(index) for index, name in enumerate(batch.schema.names)}
    if "data" in columns:
        columns["payload"] = columns.pop("data")
        columns["content_type"] = pa.array([JSON_TYPE] * batch.num_rows, pa.string())
    for name, column in columns.items():
        wanted = pa.binary() if name in ("payload", "key") else pa.string()
        columns[name] = column if column.type == wanted else column.cast(wanted)
    _refuse_bad_json(columns)
    topics = columns.pop("topic", None)
    if topics is None:
        assert topic is not None
        yield from _bounded_chunks(topic, columns)
        return
    if topics.null_count:
        raise InvalidEvent("an event has no topic", hint="Fill the column topic, or set the option topic.")
    for name in pc.unique(topics).to_pylist():
        rows = pc.indices_nonzero(pc.equal(topics, name))
        yield from _bounded_chunks(name, {column: values.take(rows) for column, values in columns.items()})


def _bounded_chunks(topic: str, columns: Mapping[str, pa.Array]) -> Iterator[TopicChunk]:
    sizes = pc.fill_null(pc.binary_length(columns["payload"]), 0).to_numpy()
    start = bytes_taken = 0
    for row, size in enumerate(sizes):
        if row > start and (row - start == CHUNK_EVENTS or bytes_taken + size > CHUNK_BYTES):
            yield TopicChunk(topic, {name: values.slice(start, row - start) for name, values in columns.items()})
            start, bytes_taken = row, 0
        bytes_taken += int(size)
    if len(sizes) > start:
        yield TopicChunk(topic, {name: values.slice(start) for name, values in columns.items()})


def _refuse_bad_json(columns: Mapping[str, pa.Array]) -> None:
    """Raise InvalidEvent for JSON payloads and headers that are not valid JSON, or that Postgres cannot parse."""
    if "content_type" in columns:
        claimed = pc.fill_null(pc.equal(columns["content_type"], JSON_TYPE), False)
        for payload in columns["payload"].filter(claimed).to_pylist():
            encode_payload(payload, JSON_TYPE)
    for headers in columns.get("headers", ()):
        if headers.is_valid:
            try:
                is_object = isinstance(json.loads(headers.as_py()), dict)
            except ValueError as error:
                raise InvalidEvent(f"the headers are not valid JSON: {error}") from None
            if not is_object:
                raise InvalidEvent("invalid headers: expected a JSON object")


# Column of an event -> column of the staging table.
STAGED_COLUMNS = {
    "payload": "payloads",
    "key": "keys",
    "type": "types",
    "routing_key": "routing_keys",
    "headers": "headers",
    "content_type": "content_types",
    "event_id": "event_ids",
}


def staging_row(chunk: TopicChunk, *, writer: str, epoch: int, attempt: str, chunk_number: int) -> pa.RecordBatch:
    """A chunk as one row of the staging table. Its arrays are not copied."""
    row: dict[str, pa.Array] = {
        "writer": pa.array([writer], pa.string()),
        "epoch": pa.array([epoch], pa.int64()),
        "attempt": pa.array([attempt], pa.string()),
        "chunk_number": pa.array([chunk_number], pa.int32()),
        "topic": pa.array([chunk.topic], pa.string()),
    }
    for name, target in STAGED_COLUMNS.items():
        values = chunk.columns.get(name)
        # Omit a column that is null in all events, so that publishing takes its fast path.
        if values is not None and (name == "payload" or values.null_count < len(values)):
            row[target] = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    return pa.RecordBatch.from_pydict(row)


def stage(
    dsn: str, batches: Iterable[pa.RecordBatch], *, topic: str | None, writer: str, epoch: int, part: int
) -> StagedAttempt:
    """Insert all events of one task into the staging table, in one transaction."""
    attempt = uuid.uuid4().hex
    events = 0
    parts = chain.from_iterable(chunks(batch, topic) for batch in batches)
    first = next(parts, None)
    if first is None:
        return StagedAttempt(writer, epoch, part, attempt, 0)
    with arrow.connect(dsn, autocommit=False) as connection:
        for chunk_number, chunk in enumerate(chain((first,), parts)):
            row = staging_row(chunk, writer=writer, epoch=epoch, attempt=attempt, chunk_number=chunk_number)
            arrow.add(connection, row, schema=pipelines_calls.STAGED_SCHEMA, table=pipelines_calls.STAGED_TABLE)
            events += len(chunk)
        connection.commit()
    return StagedAttempt(writer, epoch, part, attempt, events)


def publish(dsn: str, messages: Sequence[StagedAttempt], *, replayable: bool) -> int | None:
    """Publish the staged events of these attempts, exactly once; None if they were already published."""
    attempts = sorted(messages, key=lambda message: message.part)
    if not any(message.events for message in attempts):
        # Without events, the epoch needs no record: a replay adds nothing either.
        return 0
    call = pipelines.publish_epoch(
        attempts[0].writer,
        attempts[0].epoch,
        attempts=[message.attempt for message in attempts if message.events],
        expected_events=sum(message.events for message in attempts),
        replayable=replayable,
    )
    with headwater.connect(dsn, pool_size=1) as log:
        for _ in range(MAX_PUBLISH_ATTEMPTS - 1):
            try:
                return log.run(call)
            except TransactionAborted:
                continue
        return log.run(call)


def discard(dsn: str, messages: Iterable[StagedAttempt]) -> None:
    """Delete the staged events of these attempts. Harmless after publishing: published events are not affected."""
    with headwater.connect(dsn, pool_size=1) as log:
        for message in messages:
            if message.events:
                log.run(pipelines.discard_staged(message.writer, message.epoch, attempts=[message.attempt]))


def _staged_attempts(messages: Iterable[WriterCommitMessage | None]) -> list[StagedAttempt]:
    """The messages of the attempts that reported; Spark passes None for the others."""
    return [message for message in messages if isinstance(message, StagedAttempt)]


class LogWriter(DataSourceArrowWriter):
    """A batch write. With the option `writer` it is idempotent.

    A writer with several batches sets a higher `epoch` for each.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidRequest("the log cannot be overwritten", hint='Write with mode("append").')
        self.options = WriteOptions.parse(options, schema)
        # Part of this object, which Spark sends to the tasks, so that all of them stage under one name.
        self.writer = self.options.writer or f"batch-{uuid.uuid4().hex}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = TaskContext.get()
        assert task is not None
        return stage(
            self.options.dsn,
            iterator,
            topic=self.options.topic,
            writer=self.writer,
            epoch=self.options.epoch,
            part=task.partitionId(),
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        publish(self.options.dsn, _staged_attempts(messages), replayable=self.options.writer is not None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        discard(self.options.dsn, _staged_attempts(messages))


class LogStreamWriter(DataSourceStreamArrowWriter):
    """A stream write. The writer is the query id in the checkpoint; the epoch is the micro-batch."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.options = WriteOptions.parse(options, schema)
        if self.options.writer is not None:
            raise InvalidRequest(
                "the option writer is not allowed for a stream: its checkpoint identifies the writer",
                hint="Omit the option writer.",
            )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = TaskContext.get()
        assert task is not None
        query = task.getLocalProperty("sql.streaming.queryId")
        epoch = task.getLocalProperty("streaming.sql.batchId")
        assert query is not None
        assert epoch is not None
        return stage(
            self.options.dsn,
            iterator,
            topic=self.options.topic,
            writer=f"query-{query}",
            epoch=int(epoch),
            part=task.partitionId(),
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        publish(self.options.dsn, _staged_attempts(messages), replayable=True)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        discard(self.options.dsn, _staged_attempts(messages))
