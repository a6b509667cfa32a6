"""The Spark task that publishes captured changes to NATS, after the schemas that they need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from headwater.nats.publisher import JetStreamPublisher
from headwater.spark.formats.nats import SinkOptions, message_batches
from headwater.spark.nats_bridge.schema_documents import SchemaDocuments

# The result of a task, one row, as a Spark and an Arrow schema.
OUTCOME: Final = "changes long, stored long, duplicates long, reconnects long, schemas long, hashes array<string>"
_PUBLISHED: Final = pa.schema(
    [
        ("changes", pa.int64()),
        ("stored", pa.int64()),
        ("duplicates", pa.int64()),
        ("reconnects", pa.int64()),
        ("schemas", pa.int64()),
        ("hashes", pa.list_(pa.string())),
    ]
)


@dataclass(frozen=True, slots=True)
class ChangesTask:
    """Publishes changes, and new schemas before the first change that needs them. Sent to Spark workers."""

    options: SinkOptions
    known_hashes: frozenset[str]
    schemas: SchemaDocuments

    def publish(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Publish the changes; then yield one row with the counts. Does not connect if there are no rows."""
        changes = schemas = 0
        shown: set[str] = set()

        def announced() -> Iterator[pa.RecordBatch]:
            nonlocal changes, schemas
            for batch in batches:
                hashes = set(pc.unique(batch.column("columns_hash")).drop_null().to_pylist())
                if not hashes <= self.known_hashes | shown:
                    schemas += self.schemas.publish(retry_seconds=self.options.retry_seconds)
                shown.update(hashes)
                changes += batch.num_rows
                yield batch

        options = self.options
        with JetStreamPublisher(options.url, retry_seconds=options.retry_seconds, window=options.window) as publisher:
            for messages in message_batches(announced(), options):
                publisher.send(messages)
            published = publisher.flush()
        row = (changes, published.stored, published.duplicates, publisher.reconnects, schemas, sorted(shown))
        yield pa.RecordBatch.from_arrays(
            [pa.array([value], field.type) for value, field in zip(row, _PUBLISHED, strict=True)], schema=_PUBLISHED
        )
