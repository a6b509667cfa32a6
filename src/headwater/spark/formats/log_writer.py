"""Writing to the log from Spark, exactly once: tasks stage events, one transaction publishes a batch of them.

A task commits its events into a staging table under a name of its own. When all tasks are done, one transaction
notes the epoch and publishes what the successful attempts staged. A replayed epoch finds the note and adds nothing;
attempts that failed, or that nobody named, are never published.
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
from headwater import calls
from headwater.calls import JSON_TYPE, encode_payload
from headwater.errors import InvalidEvent, InvalidRequest, TransactionAborted
from headwater.spark import arrow
from headwater.spark.formats.read_options import required_dsn
from headwater.spark.options import ADDED_BY_SPARK, refuse_unknown_options

WRITE_OPTIONS = ("dsn", "topic", "writer", "epoch")
TEXT = ("topic", "data", "type", "routing_key", "headers", "event_id", "content_type")
TEXT_OR_BYTES = ("payload", "key")
COLUMNS = TEXT + TEXT_OR_BYTES

CHUNK_BYTES = 8 * 1024 * 1024
CHUNK_EVENTS = 10_000
PUBLISH_TRIES = 5


@dataclass(frozen=True)
class WriteOptions:
    """What the options of a write say."""

    dsn: str
    topic: str | None
    writer: str | None
    epoch: int

    @classmethod
    def parse(cls, options: Mapping[str, str], schema: StructType) -> WriteOptions:
        refuse_unknown_options(options, WRITE_OPTIONS, purpose=" for writing", also=ADDED_BY_SPARK)
        dsn = required_dsn(options)
        topic = options.get("topic")
        refuse_misfit(schema, topic)
        epoch = options.get("epoch", "0")
        if not epoch.isdecimal() or ("epoch" in options and "writer" not in options):
            raise InvalidRequest("an epoch is a whole number, and it is of a writer", hint="Give both, or neither.")
        return cls(dsn, topic, options.get("writer"), int(epoch))


def refuse_misfit(schema: StructType, topic: str | None) -> None:
    """Say what a DataFrame lacks, or has too much of, to be written as events."""
    names = schema.fieldNames()
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise InvalidRequest(
            f"an event has no column {', '.join(unknown)} that can be written",
            hint=f"Select from {', '.join(COLUMNS)}; put more into the payload.",
        )
    if (topic is None) == ("topic" not in names):
        raise InvalidRequest("the topic comes either from the column topic or from the option topic")
    if ("payload" in names) == ("data" in names):
        raise InvalidRequest("an event's content comes either from the column payload or, as JSON text, from data")
    wrong: list[str] = []
    for field in schema.fields:
        allowed: tuple[type[DataType], ...] = (StringType,) if field.name in TEXT else (StringType, BinaryType)
        if not isinstance(field.dataType, allowed):
            wrong.append(f"{field.name} ({field.dataType.simpleString()})")
    if wrong:
        raise InvalidRequest(
            f"these columns are neither text nor, where that is allowed, binary: {', '.join(wrong)}",
            hint="Use cast('string') or to_json(...).",
        )


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What one attempt of one task has staged."""

    writer: str
    epoch: int
    part: int
    attempt: str
    events: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Events of one topic, in order, as columns: what one row of the staging table holds."""

    topic: str
    columns: Mapping[str, pa.Array]

    def __len__(self) -> int:
        return len(self.columns["payload"])


def chunks(batch: pa.RecordBatch, topic: str | None) -> Iterator[Chunk]:
    """The events of a batch by topic, each topic's in the order of the rows, in chunks of bounded size."""
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
        yield from _bounded(topic, columns)
        return
    if topics.null_count:
        raise InvalidEvent("an event has no topic", hint="Fill the column topic, or name one by the option topic.")
    for name in pc.unique(topics).to_pylist():
        rows = pc.indices_nonzero(pc.equal(topics, name))
        yield from _bounded(name, {column: values.take(rows) for column, values in columns.items()})


def _bounded(topic: str, columns: Mapping[str, pa.Array]) -> Iterator[Chunk]:
    sizes = pc.fill_null(pc.binary_length(columns["payload"]), 0).to_numpy()
    start = bytes_taken = 0
    for row, size in enumerate(sizes):
        if row > start and (row - start == CHUNK_EVENTS or bytes_taken + size > CHUNK_BYTES):
            yield Chunk(topic, {name: values.slice(start, row - start) for name, values in columns.items()})
            start, bytes_taken = row, 0
        bytes_taken += int(size)
    if len(sizes) > start:
        yield Chunk(topic, {name: values.slice(start) for name, values in columns.items()})


def _refuse_bad_json(columns: Mapping[str, pa.Array]) -> None:
    """Refuse what says that it is JSON and is not, or that Postgres could never look into."""
    if "content_type" in columns:
        claimed = pc.fill_null(pc.equal(columns["content_type"], JSON_TYPE), False)
        for payload in columns["payload"].filter(claimed).to_pylist():
            encode_payload(payload, JSON_TYPE)
    for headers in columns.get("headers", ()):
        if headers.is_valid:
            try:
                is_object = isinstance(json.loads(headers.as_py()), dict)
            except ValueError as error:
                raise InvalidEvent(f"the headers are not JSON: {error}") from None
            if not is_object:
                raise InvalidEvent("headers are a JSON object")


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


def staging_row(chunk: Chunk, *, writer: str, epoch: int, attempt: str, place: int) -> pa.RecordBatch:
    """A chunk as one row of the staging table. Its arrays are those of the batch, not copies."""
    row: dict[str, pa.Array] = {
        "writer": pa.array([writer], pa.string()),
        "epoch": pa.array([epoch], pa.int64()),
        "attempt": pa.array([attempt], pa.string()),
        "place": pa.array([place], pa.int32()),
        "topic": pa.array([chunk.topic], pa.string()),
    }
    for name, target in STAGED_COLUMNS.items():
        values = chunk.columns.get(name)
        # A part that no event has is left out, so that publishing takes its short ways.
        if values is not None and (name == "payload" or values.null_count < len(values)):
            row[target] = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    return pa.RecordBatch.from_pydict(row)


def stage(
    dsn: str, batches: Iterable[pa.RecordBatch], *, topic: str | None, writer: str, epoch: int, part: int
) -> Staged:
    """Put all events of one task into the staging table, in one transaction."""
    attempt = uuid.uuid4().hex
    events = 0
    parts = chain.from_iterable(chunks(batch, topic) for batch in batches)
    first = next(parts, None)
    if first is None:
        return Staged(writer, epoch, part, attempt, 0)
    with arrow.connect(dsn, autocommit=False) as connection:
        for place, chunk in enumerate(chain((first,), parts)):
            row = staging_row(chunk, writer=writer, epoch=epoch, attempt=attempt, place=place)
            arrow.add(connection, row, schema=calls.STAGED_SCHEMA, table=calls.STAGED_TABLE)
            events += len(chunk)
        connection.commit()
    return Staged(writer, epoch, part, attempt, events)


def publish(dsn: str, messages: Sequence[Staged], *, replayable: bool) -> int | None:
    """Publish what these attempts staged, once; None if that was done before."""
    attempts = sorted(messages, key=lambda message: message.part)
    if not any(message.events for message in attempts):
        # Nothing to add needs no note either: replayed, it is nothing again.
        return 0
    call = calls.publish_epoch(
        attempts[0].writer,
        attempts[0].epoch,
        attempts=[message.attempt for message in attempts if message.events],
        expected_events=sum(message.events for message in attempts),
        replayable=replayable,
    )
    with headwater.connect(dsn, pool_size=1) as log:
        for _ in range(PUBLISH_TRIES - 1):
            try:
                return log.run(call)
            except TransactionAborted:
                continue
        return log.run(call)


def discard(dsn: str, messages: Iterable[Staged]) -> None:
    """Forget what these attempts staged. Harmless after publishing, since only staged events are touched."""
    with headwater.connect(dsn, pool_size=1) as log:
        for message in messages:
            if message.events:
                log.run(calls.discard_staged(message.writer, message.epoch, attempts=[message.attempt]))


def _staged(messages: Iterable[WriterCommitMessage | None]) -> list[Staged]:
    """Those of the attempts that were heard of."""
    return [message for message in messages if isinstance(message, Staged)]


class LogWriter(DataSourceArrowWriter):
    """A batch write. With the option `writer` it can be repeated and still happens once.

    A writer with several batches gives each an `epoch`, each above the last.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        if overwrite:
            raise InvalidRequest("the log is only ever added to", hint='Write with mode("append").')
        self.options = WriteOptions.parse(options, schema)
        # Told to the tasks with this object, so that all of them stage under one name.
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
        publish(self.options.dsn, _staged(messages), replayable=self.options.writer is not None)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        discard(self.options.dsn, _staged(messages))


class LogStreamWriter(DataSourceStreamArrowWriter):
    """A stream write. The query, as its checkpoint names it, is the writer; the micro-batch is the epoch."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.options = WriteOptions.parse(options, schema)
        if self.options.writer is not None:
            raise InvalidRequest(
                "a stream is named by its checkpoint",
                hint="Leave out the option writer: a new checkpoint counts its batches anew.",
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
        publish(self.options.dsn, _staged(messages), replayable=True)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        discard(self.options.dsn, _staged(messages))
