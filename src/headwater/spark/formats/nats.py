"""The format "headwater.nats": publishes to NATS JetStream from Spark. Idempotent within the duplicate window.

A task publishes its rows and ends when all are acknowledged. A retried task or micro-batch sends the same message ids,
which the stream drops within its duplicate window; readers detect later duplicates by `lsn` and `sequence`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import BinaryType, MapType, StringType, StructType

from headwater.errors import InvalidRequest
from headwater.nats import codec, frames, messages
from headwater.nats.codec import Encoding
from headwater.nats.publisher import JetStreamPublisher
from headwater.spark.options import ADDED_BY_SPARK, refuse_unknown_options

Shape = Literal["each", "packed"]
SHAPES: Final = ("each", "packed")
READY_COLUMNS: Final = ("subject", "msg_id", "payload")
OPTIONS: Final = ("url", "shape", "encoding", "retry_seconds", "window")


@dataclass(frozen=True)
class SinkOptions:
    """The parsed options of a write."""

    url: str
    shape: Shape
    encoding: Encoding
    retry_seconds: float
    window: int
    ready: bool
    timeline: int | None = None
    """The WAL timeline of the changes, for message ids."""

    @classmethod
    def parse(cls, options: Mapping[str, str], schema: StructType) -> SinkOptions:
        refuse_unknown_options(options, OPTIONS, also=ADDED_BY_SPARK)
        if "url" not in options:
            raise InvalidRequest(
                'the format "headwater.nats" requires the option url', hint='Add .option("url", "nats://host:4222").'
            )
        shape, encoding = options.get("shape", "each"), options.get("encoding", "msgpack")
        if shape not in SHAPES:
            raise InvalidRequest(f"invalid shape {shape!r}: expected {' or '.join(SHAPES)}")
        if encoding not in codec.ENCODINGS:
            raise InvalidRequest(f"invalid encoding {encoding!r}: expected {' or '.join(codec.ENCODINGS)}")
        try:
            retry_seconds, window = float(options.get("retry_seconds", 60)), int(options.get("window", 16_384))
        except ValueError as error:
            raise InvalidRequest("invalid retry_seconds or window: expected numbers") from error
        if retry_seconds <= 0 or window < 1:
            raise InvalidRequest("invalid retry_seconds or window: expected numbers above 0")
        return cls(
            options["url"], cast(Shape, shape), cast(Encoding, encoding), retry_seconds, window, is_ready(schema)
        )


def is_ready(schema: StructType) -> bool:
    """Whether the rows are messages (True) or changes (False); InvalidRequest if they are neither."""
    names = schema.fieldNames()
    if set(READY_COLUMNS) <= set(names):
        wrong = [
            f"{field.name} ({field.dataType.simpleString()})"
            for field in schema.fields
            if not (
                (field.name in ("subject", "msg_id") and isinstance(field.dataType, StringType))
                or (field.name == "payload" and isinstance(field.dataType, (StringType, BinaryType)))
                or (field.name == "headers" and isinstance(field.dataType, MapType))
            )
        ]
        if wrong:
            raise InvalidRequest(
                f"unknown columns or invalid types for a message: {', '.join(wrong)}",
                hint="A message has subject and msg_id (string), payload (string or binary), headers (map of strings).",
            )
        return True
    missing = [name for name in messages.CHANGE_COLUMNS if name not in names]
    if missing:
        raise InvalidRequest(
            f"rows are neither messages ({', '.join(READY_COLUMNS)}) nor changes: {', '.join(missing)} missing",
            hint='Write rows of the format "headwater.changes", or add these columns.',
        )
    return False


@dataclass(frozen=True)
class PublishCounts(WriterCommitMessage):
    """The acknowledgements of one task's messages."""

    stored: int
    duplicates: int


def message_batches(rows: Iterable[pa.RecordBatch], options: SinkOptions) -> Iterator[pa.RecordBatch]:
    """Convert rows to messages, in order."""
    packer = messages.Packer(encoding=options.encoding, timeline=options.timeline)
    for batch in rows:
        if options.ready:
            yield ready_messages(batch)
        elif options.shape == "packed":
            yield packer.add(batch)
        else:
            yield messages.change_messages(batch, encoding=options.encoding, timeline=options.timeline)
    yield packer.finish()


def ready_messages(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert rows that are messages to the publisher's schema."""
    headers = pa.nulls(batch.num_rows, pa.binary())
    if "headers" in batch.schema.names:
        lines = [frames.header_lines(dict(pairs)) if pairs else None for pairs in batch.column("headers").to_pylist()]
        headers = pa.array(lines, pa.binary())
    columns = [
        batch.column("subject").cast(pa.string()),
        batch.column("msg_id").cast(pa.string()),
        headers,
        batch.column("payload").cast(pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=frames.SCHEMA)


def publish(rows: Iterable[pa.RecordBatch], options: SinkOptions) -> PublishCounts:
    """Publish rows; return when all messages are acknowledged. Does not connect if there are no rows."""
    with JetStreamPublisher(options.url, retry_seconds=options.retry_seconds, window=options.window) as publisher:
        for batch in message_batches(rows, options):
            publisher.send(batch)
        published = publisher.flush()
    return PublishCounts(published.stored, published.duplicates)


class NatsSink(DataSource):
    """The format "headwater.nats": writes messages or changes to the streams of a NATS server."""

    @classmethod
    def name(cls) -> str:
        return "headwater.nats"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        if overwrite:
            raise InvalidRequest("a NATS stream cannot be overwritten", hint='Use mode("append").')
        return _BatchWriter(SinkOptions.parse(self.options, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return _StreamWriter(SinkOptions.parse(self.options, schema))


class _BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return publish(iterator, self._options)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing to do: the messages of all tasks are already acknowledged."""


class _StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return publish(iterator, self._options)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing to do: the messages of all tasks are already acknowledged."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing to do: published messages stay, and the retry uses the same message ids."""
