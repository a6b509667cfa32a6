"""Publishing to NATS JetStream from Spark: format "headwater.nats". Repeating a batch adds nothing.

A task publishes its rows and ends when each is acknowledged. A repeated task or micro-batch sends the same message
ids, which the stream drops within its duplicate window; readers tell later repeats by `lsn` and `sequence`.
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
from headwater.nats.publisher import Publisher
from headwater.spark.options import ADDED_BY_SPARK, refuse_unknown_options

Shape = Literal["each", "packed"]
SHAPES: Final = ("each", "packed")
READY_COLUMNS: Final = ("subject", "msg_id", "payload")
OPTIONS: Final = ("url", "shape", "encoding", "retry_seconds", "window")


@dataclass(frozen=True)
class SinkOptions:
    """What the options of a write say."""

    url: str
    shape: Shape
    encoding: Encoding
    retry_seconds: float
    window: int
    ready: bool
    timeline: int | None = None
    """The timeline of the server's log that all the changes are of; for message ids."""

    @classmethod
    def parse(cls, options: Mapping[str, str], schema: StructType) -> SinkOptions:
        refuse_unknown_options(options, OPTIONS, also=ADDED_BY_SPARK)
        if "url" not in options:
            raise InvalidRequest(
                'the format "headwater.nats" needs the option url', hint='Add .option("url", "nats://host:4222").'
            )
        shape, encoding = options.get("shape", "each"), options.get("encoding", "msgpack")
        if shape not in SHAPES:
            raise InvalidRequest(f"{shape!r} is no shape: {', '.join(SHAPES)}")
        if encoding not in codec.ENCODINGS:
            raise InvalidRequest(f"{encoding!r} is no encoding: {', '.join(codec.ENCODINGS)}")
        try:
            retry_seconds, window = float(options.get("retry_seconds", 60)), int(options.get("window", 16_384))
        except ValueError as error:
            raise InvalidRequest("retry_seconds and window are numbers") from error
        if retry_seconds <= 0 or window < 1:
            raise InvalidRequest("retry_seconds and window are above zero")
        return cls(
            options["url"], cast(Shape, shape), cast(Encoding, encoding), retry_seconds, window, is_ready(schema)
        )


def is_ready(schema: StructType) -> bool:
    """Whether the rows are messages already, or changes that become some; refuses what is neither."""
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
                f"these columns do not fit a message: {', '.join(wrong)}",
                hint="A message has subject and msg_id (string), payload (string or binary), headers (map of strings).",
            )
        return True
    missing = [name for name in messages.CHANGE_COLUMNS if name not in names]
    if missing:
        raise InvalidRequest(
            f"rows are neither messages ({', '.join(READY_COLUMNS)}) nor changes: {', '.join(missing)} missing",
            hint='Write what the format "headwater.changes" reads, or make these columns yourself.',
        )
    return False


@dataclass(frozen=True)
class Acknowledged(WriterCommitMessage):
    """What came of one task's messages."""

    stored: int
    duplicates: int


def message_batches(rows: Iterable[pa.RecordBatch], options: SinkOptions) -> Iterator[pa.RecordBatch]:
    """Rows as messages, in their order."""
    packer = messages.Packer(encoding=options.encoding, timeline=options.timeline)
    for batch in rows:
        if options.ready:
            yield ready_messages(batch)
        elif options.shape == "packed":
            yield packer.add(batch)
        else:
            yield messages.each(batch, encoding=options.encoding, timeline=options.timeline)
    yield packer.finish()


def ready_messages(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows that are messages, as the publisher takes them."""
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


def publish(rows: Iterable[pa.RecordBatch], options: SinkOptions) -> Acknowledged:
    """Publish rows; returns when each message is acknowledged. Without rows there is not even a connection."""
    with Publisher(options.url, retry_seconds=options.retry_seconds, window=options.window) as publisher:
        for batch in message_batches(rows, options):
            publisher.send(batch)
        published = publisher.flush()
    return Acknowledged(published.stored, published.duplicates)


class NatsSink(DataSource):
    """The format "headwater.nats": rows that are messages, or changes, to the streams of a NATS server."""

    @classmethod
    def name(cls) -> str:
        return "headwater.nats"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        if overwrite:
            raise InvalidRequest("a stream of NATS is only appended to", hint='Use mode("append").')
        return _BatchWriter(SinkOptions.parse(self.options, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        return _StreamWriter(SinkOptions.parse(self.options, schema))


class _BatchWriter(DataSourceArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return publish(iterator, self._options)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing is left to do: each task's messages are in their stream."""


class _StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return publish(iterator, self._options)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """Nothing is left to do: each task's messages are in their stream."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        """What was published stays; the next try repeats it under the same message ids."""
