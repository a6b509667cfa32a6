"""The sink `topic`: publishes rows as events. The changes of a captured transaction stay together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

import headwater
from headwater.calls import pipeline_runs
from headwater.errors import InvalidRequest
from headwater.spark.formats import log_writer
from headwater.spark.options import refuse_unknown_keys
from headwater.spark.pipelines.batch import Batch, SinkContext

OPTIONS: Final = ("name", "per_table")
CHANGE_COLUMNS: Final = frozenset({"id", "xid", "commit_lsn", "sequence", "operation", "before", "after", "unchanged"})
# Columns that belong to the original position of an event and have no meaning in another topic.
POSITION_COLUMNS: Final = frozenset({"position", "partition", "topic_offset", "published_at"})
_TIME: Final = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"


def change_events(changes: DataFrame, *, topic: str, per_table: bool) -> DataFrame:
    """Convert captured changes to events, in order.

    The type is table and operation, the key is the row's key, and the event id is the change's id, for deduplication.
    """
    table = f.concat_ws(".", "schema", "table")
    kind = f.concat_ws(".", "schema", "table", "operation")
    head = f.to_json(
        f.struct(table.alias("table"), f.col("operation"), f.col("committed_at")), {"timestampFormat": _TIME}
    )
    # The row images are JSON texts: concatenate them without parsing.
    payload = f.concat(
        f.substring(head, f.lit(1), f.length(head) - 1),
        f.lit(',"key":'), _or_null("key"),
        f.lit(',"before":'), _or_null("before"),
        f.lit(',"after":'), _or_null("after"),
        f.lit(',"unchanged":'), f.coalesce(f.to_json("unchanged"), f.lit("[]")),
        f.lit("}"),
    )  # fmt: skip
    headers = f.to_json(f.struct(f.col("xid"), f.col("commit_lsn"), f.col("sequence")))
    return changes.select(
        (f.concat_ws(".", f.lit(topic), table) if per_table else f.lit(topic)).alias("topic"),
        payload.alias("data"),
        f.col("key"),
        kind.alias("type"),
        kind.alias("routing_key"),
        headers.alias("headers"),
        f.col("id").alias("event_id"),
    )


def _or_null(name: str) -> Column:
    return f.coalesce(f.col(name), f.lit("null"))


def events(rows: DataFrame, *, topic: str | None, pipeline: str) -> DataFrame:
    """Convert rows to events: event columns are kept; without a payload, the other columns become it, as JSON."""
    names = rows.columns
    if topic is not None and "topic" in names:
        rows = rows.drop("topic")
    if "position" in names:
        # Derive the event id from the position, so that a repeated read does not duplicate events.
        own = f.concat(f.lit(f"{pipeline}-"), f.col("position").cast("string"))
        rows = rows.withColumn("event_id", f.coalesce(f.col("event_id"), own) if "event_id" in names else own)
    rows = rows.drop(*POSITION_COLUMNS)
    others = [name for name in rows.columns if name not in log_writer.COLUMNS]
    if "payload" not in names and "data" not in names:
        rows = rows.withColumn("data", f.to_json(f.struct(*others)))
    return rows.drop(*others)


class TopicSink:
    """Publishes rows to topics. A batch is published in one Postgres transaction."""

    def __init__(self, options: Mapping[str, Any], context: SinkContext) -> None:
        refuse_unknown_keys(options, OPTIONS, "the sink topic")
        name, per_table = options.get("name"), options.get("per_table", False)
        if name is not None and not (isinstance(name, str) and name):
            raise InvalidRequest(f"invalid topic name {name!r}: expected a text")
        if not isinstance(per_table, bool):
            raise InvalidRequest(f"invalid per_table {per_table!r}: expected true or false")
        if per_table and (context.source != "changes" or not context.source_options.get("tables")):
            raise InvalidRequest("per_table requires the source changes with tables")
        if context.source == "changes" and name is None:
            raise InvalidRequest("captured changes require the name of a topic", hint="Write topic: {name: ...}.")
        self._name: Final[str | None] = name
        self._per_table: Final = per_table
        self._context: Final = context
        self._writer = ""

    def prepare(self) -> None:
        with headwater.connect(self._context.dsn, pool_size=1) as log:
            self._writer = log.run(pipeline_runs.pipeline_writer(self._context.pipeline, self._context.sink_number))
            for name in self._topics():
                log.create_topic(name, if_missing=True)

    def _topics(self) -> list[str]:
        if self._name is None:
            return []
        if not self._per_table:
            return [self._name]
        tables = self._context.source_options["tables"]
        return [f"{self._name}.{table if '.' in table else f'public.{table}'}" for table in tables]

    def write(self, rows: DataFrame, batch: Batch) -> Mapping[str, int]:
        if self._name is not None and set(rows.columns) >= CHANGE_COLUMNS:
            ready = change_events(rows, topic=self._name, per_table=self._per_table)
        else:
            ready = events(rows, topic=self._name, pipeline=batch.pipeline)
        # In the order of the plan: a repeated batch stages the same events in the same order.
        writer = ready.write.format("headwater").mode("append")
        writer = writer.option("dsn", self._context.dsn).option("writer", self._writer).option("epoch", str(batch.end))
        if "topic" not in ready.columns:
            assert self._name is not None
            writer = writer.option("topic", self._name)
        writer.save()
        return {}

    def close(self) -> None:
        """Nothing to close: each batch opens its own connections."""
