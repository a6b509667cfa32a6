"""Publishes the schemas of published tables to the bucket `schemas`: at the start, and when columns change."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Final

import nats.errors
import psycopg
from nats.js import JetStreamContext
from nats.js.errors import Error as JetStreamError

from headwater.capture.connection import connect
from headwater.capture.description import PublishedTable, published_tables
from headwater.nats import messages, streams
from headwater.nats.codec import Encoding
from headwater.nats.errors import NatsUnavailable
from headwater.nats.subjects import Table
from headwater.observability.metrics import ERROR, logger

_MAX_WAIT_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class SchemaDocuments:
    """The schema documents of one publication. Holds no connection, so it can be pickled."""

    dsn: str
    publication: str
    nats_url: str
    encoding: Encoding

    def tables(self) -> dict[Table, PublishedTable]:
        """The currently published tables."""
        with connect(self.dsn) as connection:
            return {Table(found.schema, found.name): found for found in published_tables(connection, self.publication)}

    async def put(self, js: JetStreamContext, tables: dict[Table, PublishedTable]) -> int:
        """Put changed schemas into the bucket, and mark tables that are no longer published; return the count."""
        now = int(time.time())
        changed = 0
        for table, found in tables.items():
            changed += await streams.put_schema(js, table, self._document(table, found, now), encoding=self.encoding)
        for table, known in (await streams.get_schemas(js)).items():
            if known.get("publication") == self.publication and table not in tables and not known.get("dropped"):
                dropped = {**known, "columns": [], "dropped": True, "timestamp": now}
                changed += await streams.put_schema(js, table, dropped, encoding=self.encoding)
        return changed

    def publish(self, *, retry_seconds: float) -> int:
        """Put changed schemas into the bucket, over new connections; retry outages for `retry_seconds`."""
        deadline = time.monotonic() + retry_seconds
        wait = 0.1
        while True:
            try:
                return asyncio.run(self._publish())
            except (
                psycopg.OperationalError,
                NatsUnavailable,
                nats.errors.Error,
                JetStreamError,
                TimeoutError,
            ) as error:
                if time.monotonic() + wait > deadline:
                    raise
                logger.warning("cannot publish schemas; retrying", extra={ERROR: str(error)})
            time.sleep(wait)
            wait = min(2 * wait, _MAX_WAIT_SECONDS)

    async def _publish(self) -> int:
        tables = await asyncio.to_thread(self.tables)
        async with streams.connect(self.nats_url, name="headwater schemas") as client:
            return await self.put(client.jetstream(), tables)

    def _document(self, table: Table, found: PublishedTable, timestamp: int) -> dict[str, Any]:
        columns = [
            messages.SchemaColumn(
                column.column_name,
                column.data_type,
                is_nullable=column.is_nullable,
                column_default=column.column_default,
                primary_key=column.is_key,
            )
            for column in found.columns
        ]
        return messages.schema_document(table, columns, timestamp=timestamp) | {"publication": self.publication}
