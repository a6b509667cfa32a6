"""Targets of a replay: a topic, a queue, a table. Writing a part is idempotent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Final

import psycopg
import pyarrow as pa
from psycopg import sql
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

import headwater
from headwater import Headwater
from headwater.calls import Call, pipelines
from headwater.calls import archives as archives_calls
from headwater.calls import queues as queue_calls
from headwater.calls.encoding import JSON_TYPE
from headwater.client.database.connection import rows_of
from headwater.database.driver_errors import translate_error
from headwater.errors import InvalidRequest, TopicNotFound, TransactionAborted
from headwater.queue.model import Binding
from headwater.spark.formats import log_writer
from headwater.spark.formats.log_ranges import Range
from headwater.spark.formats.log_writer import StagedAttempt

POSITION_HEADER: Final = "replayed-position"
TOPIC_HEADER: Final = "replayed-topic"
TIME_HEADER: Final = "replayed-published-at"
ID_HEADER: Final = "replayed-event-id"
_TIME: Final = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"
PRIVATE_PREFIX: Final = "headwater.replay."
# The private topic of a replay to a queue is needed only until the queue has processed it.
PRIVATE_RETENTION: Final = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a replay: the events after one position up to another."""

    dsn: str
    replay: str
    after: int
    up_to: int
    refuse_gone: Callable[[], None]
    """Call it after reading and before committing the events: PositionExpired if some were removed meanwhile."""

    def advance(self, events: int) -> Call[None]:
        """The call that records this part as done."""
        return archives_calls.advance_replay(
            self.replay, from_position=self.after, to_position=self.up_to, more_events=events
        )


@dataclass(frozen=True, slots=True)
class ToTopic:
    """Publishes the events to a topic, in order, with headers that identify the original events."""

    name: str

    def document(self) -> dict[str, str]:
        return {"topic": self.name}

    def prepare(self, log: Headwater) -> None:
        try:
            log.topic(self.name)
        except TopicNotFound:
            # Create it only if needed, because that requires a permission.
            log.create_topic(self.name, if_missing=True)

    def write(self, rows: DataFrame, part: Part) -> int:
        return publish(rows, part, topic=self.name)


@dataclass(frozen=True, slots=True)
class ToQueue:
    """Delivers past events to a queue again: those in the log by a rewind, archived ones through a private topic."""

    name: str

    def document(self) -> dict[str, str]:
        return {"queue": self.name}

    @staticmethod
    def topic(replay: str) -> str:
        """The private topic with the archived events, bound to this queue only."""
        return f"{PRIVATE_PREFIX}{replay}"

    def bound(self, log: Headwater) -> dict[str | None, Range]:
        """The topics that the queue is bound to, with the ranges of their bindings; the key None means all topics."""
        found: dict[str | None, Range] = {}
        for binding in self._own_bindings(log):
            low, high = found.get(binding.topic, (binding.from_position, 0))
            end = 2**62 if binding.to_position is None else binding.to_position
            found[binding.topic] = (min(low, binding.from_position), max(high, end))
        if not found:
            raise InvalidRequest(
                f'queue "{self.name}" has no bindings',
                hint=f"Bind it: headwater queue bind {self.name} --topic ...",
            )
        return found

    def _own_bindings(self, log: Headwater) -> list[Binding]:
        """The bindings of the queue without those of earlier replays."""
        return [one for one in log.bindings(self.name) if not (one.topic or "").startswith(PRIVATE_PREFIX)]

    def also_reached(self, log: Headwater) -> list[str]:
        """Other queues that are bound to all topics, and so receive the private topic, too."""
        queues = [queue.name for queue in log.queues() if queue.name != self.name]
        return [
            name
            for name in queues
            if any(binding.topic is None and binding.to_position is None for binding in log.bindings(name))
        ]

    def begin(self, log: Headwater, connection: psycopg.Connection[Any], replay: str, *, rewind_to: int | None) -> None:
        """Rewind the queue if `rewind_to` is set, and bind it to the private topic with the filters of its bindings."""
        topic = self.topic(replay)
        if rewind_to is not None:
            with connection.cursor(binary=True) as cursor:
                rows_of(cursor, queue_calls.rewind_queue(self.name, rewind_to))
        log.create_topic(topic, retention=PRIVATE_RETENTION, if_missing=True, connection=connection)
        for binding in self._own_bindings(log):
            if binding.topic is not None:
                # Copy the binding, restricted to events of its original topic.
                headers = {**(binding.headers or {}), TOPIC_HEADER: binding.topic}
                log.bind(
                    self.name,
                    topic=topic,
                    type=binding.type,
                    pattern=binding.pattern,
                    headers=headers,
                    connection=connection,
                )

    def write(self, rows: DataFrame, part: Part) -> int:
        return publish(rows, part, topic=self.topic(part.replay))


@dataclass(frozen=True, slots=True)
class ToTable:
    """Inserts the events into a table, created if missing. The key is the position, so each event is there once."""

    schema: str
    table: str

    @classmethod
    def parse(cls, name: str) -> ToTable:
        schema, dot, table = name.rpartition(".")
        if not table or "." in schema or (dot and not schema) or schema in ("headwater", "headwater_internal"):
            raise InvalidRequest(
                f"invalid table {name!r}: expected schema.table", hint="Use another schema than headwater."
            )
        return cls(schema or "public", table)

    def document(self) -> dict[str, str]:
        return {"table": f"{self.schema}.{self.table}"}

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.table)

    def prepare(self, log: Headwater) -> None:
        with log.connection() as connection:
            try:
                if self._columns(connection) is None:
                    connection.execute(_CREATE.format(table=self.identifier))
                self.refuse_unfit(connection)
            except psycopg.Error as error:
                raise translate_error(error) from error

    def refuse_unfit(self, connection: psycopg.Connection[Any]) -> None:
        """Raise InvalidRequest if the table cannot hold events."""
        columns = self._columns(connection) or {}
        keyed = connection.execute(_KEYED, (f"{self.identifier.as_string()}",)).fetchone()
        if "position" not in columns or keyed is None:
            raise InvalidRequest(
                f"the table {self.schema}.{self.table} has no unique column position",
                hint="Name a new table, which is then created, or add: position bigint primary key.",
            )

    def columns(self, connection: psycopg.Connection[Any]) -> list[str]:
        """The columns of the table that events have, too."""
        existing = self._columns(connection) or {}
        return [name for name in _COLUMNS if name in existing]

    def _columns(self, connection: psycopg.Connection[Any]) -> dict[str, str] | None:
        rows = connection.execute(_TABLE_COLUMNS, (self.schema, self.table)).fetchall()
        return dict(rows) or None

    def write(self, rows: DataFrame, part: Part) -> int:
        counts = rows.mapInArrow(partial(_insert, dsn=part.dsn, target=self), "events long").collect()
        events: int = sum(row.events for row in counts)
        part.refuse_gone()
        with headwater.connect(part.dsn, pool_size=1) as log:
            log.run(part.advance(events))
        return events


Target = ToTopic | ToQueue | ToTable


def publish(rows: DataFrame, part: Part, *, topic: str) -> int:
    """Publish events to a topic and record the progress of the replay, in one transaction."""
    writer = archives_calls.replay_writer(part.replay)
    staging = partial(_stage, dsn=part.dsn, topic=topic, writer=writer, epoch=part.up_to)
    staged = as_new_events(rows).mapInArrow(staging, "part int, attempt string, events long").collect()
    events: int = sum(row.events for row in staged)
    attempts = [row.attempt for row in sorted(staged, key=lambda row: row.part) if row.events]
    call = pipelines.publish_epoch(writer, part.up_to, attempts=attempts, expected_events=events, replayable=True)
    part.refuse_gone()
    with headwater.connect(part.dsn, pool_size=1) as log:
        for tries_left in reversed(range(log_writer.MAX_PUBLISH_ATTEMPTS)):
            try:
                with log.transaction() as connection, connection.cursor(binary=True) as cursor:
                    # First, because it decides which of two concurrent runs continues.
                    rows_of(cursor, part.advance(events))
                    if events and call.decode(rows_of(cursor, call)) is None:
                        raise InvalidRequest(
                            f'a replay "{part.replay}" has already published under this name',
                            hint=f"Use another name, or run: headwater replay --forget {part.replay}",
                        )
                break
            except TransactionAborted:
                if not tries_left:
                    raise
    return events


def as_new_events(rows: DataFrame) -> DataFrame:
    """Convert events of the log to events to publish, with headers that identify the originals."""
    pairs: list[tuple[str, Column]] = [
        (POSITION_HEADER, f.col("position").cast("string")),
        (TOPIC_HEADER, f.concat(f.lit('"'), f.col("topic"), f.lit('"'))),
        (TIME_HEADER, f.concat(f.lit('"'), f.date_format("published_at", _TIME), f.lit('"'))),
    ]
    parts: list[Column] = []
    for number, (name, value) in enumerate(pairs):
        parts += [f.lit(f'{", " if number else ""}"{name}": '), value]
    # An id may contain any character, so Spark encodes it: {"name":"..."} without its first brace.
    own_id = f.to_json(f.struct(f.col("event_id").alias(ID_HEADER)))
    own_id = f.when(f.col("event_id").isNull(), f.lit("}")).otherwise(
        f.concat(f.lit(", "), f.substring(own_id, f.lit(2), f.length(own_id)))
    )
    before = f.when(f.col("headers").isNull() | (f.col("headers") == "{}"), f.lit("{")).otherwise(
        f.concat(f.substring("headers", f.lit(1), f.length("headers") - 1), f.lit(", "))
    )
    # After the existing headers: Postgres keeps the last of duplicate names.
    return rows.select(
        "payload", "key", "type", "routing_key", f.concat(before, *parts, own_id).alias("headers"), "content_type"
    )


def _stage(
    batches: Iterator[pa.RecordBatch], *, dsn: str, topic: str, writer: str, epoch: int
) -> Iterator[pa.RecordBatch]:
    task = TaskContext.get()
    assert task is not None
    done: StagedAttempt = log_writer.stage(
        dsn, batches, topic=topic, writer=writer, epoch=epoch, part=task.partitionId()
    )
    yield pa.RecordBatch.from_pylist(
        [{"part": done.part, "attempt": done.attempt, "events": done.events}],
        schema=pa.schema([("part", pa.int32()), ("attempt", pa.string()), ("events", pa.int64())]),
    )


def _insert(batches: Iterator[pa.RecordBatch], *, dsn: str, target: ToTable) -> Iterator[pa.RecordBatch]:
    """Insert the events of a task that the table does not have yet, in one transaction."""
    events = 0
    with psycopg.connect(dsn, application_name="headwater spark") as connection:
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
        columns = target.columns(connection)
        connection.execute(_TEMPORARY)
        with connection.cursor() as cursor, cursor.copy(_COPY) as copy:
            for batch in batches:
                for event in batch.to_pylist():
                    copy.write_row([*(event[name] for name in _PLAIN), _data_of(event) if "data" in columns else None])
                events += batch.num_rows
        names = sql.SQL(", ").join(map(sql.Identifier, columns))
        connection.execute(_INSERT.format(table=target.identifier, columns=names))
    yield pa.RecordBatch.from_pylist([{"events": events}], schema=pa.schema([("events", pa.int64())]))


def _data_of(event: Mapping[str, Any]) -> str | None:
    """The payload as JSON text, if it is valid JSON."""
    payload = event["payload"]
    if payload is None or event["content_type"] != JSON_TYPE:
        return None
    try:
        text = payload.decode()
        json.loads(text)
    except ValueError:
        return None
    # Postgres' jsonb does not support \u0000.
    return None if "\\u0000" in text else text


_PLAIN: Final = (
    "position",
    "topic",
    "partition",
    "topic_offset",
    "key",
    "type",
    "routing_key",
    "headers",
    "content_type",
    "payload",
    "event_id",
    "published_at",
)
_COLUMNS: Final = (*_PLAIN, "data")
_TYPES: Final = """
    position     bigint{key},
    topic        text,
    partition    integer,
    topic_offset bigint,
    key          bytea,
    type         text,
    routing_key  text,
    headers      jsonb,
    content_type text,
    payload      bytea,
    event_id     text,
    published_at timestamptz,
    data         jsonb
"""
_CREATE: Final = sql.SQL("create table if not exists {table} (" + _TYPES.format(key=" primary key") + ")")
_TEMPORARY: Final = "create temporary table replayed (" + _TYPES.format(key="") + ") on commit drop"
_COPY: Final = "copy replayed from stdin"
_INSERT: Final = sql.SQL(
    "insert into {table} ({columns}) select {columns} from replayed order by position on conflict (position) do nothing"
)
_TABLE_COLUMNS: Final = (
    "select a.attname::text, format_type(a.atttypid, a.atttypmod) from pg_attribute a "
    "join pg_class c on c.oid = a.attrelid join pg_namespace n on n.oid = c.relnamespace "
    "where n.nspname = %s and c.relname = %s and c.relkind in ('r', 'p') and a.attnum > 0 and not a.attisdropped"
)
_KEYED: Final = (
    "select 1 from pg_index i join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0] "
    "where i.indrelid = %s::regclass and i.indisunique and i.indpred is null and i.indnkeyatts = 1 "
    "and a.attname = 'position'"
)
