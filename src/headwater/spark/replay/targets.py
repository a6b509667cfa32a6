"""Where a replay can go: a topic, a group's past, a table. Each takes a part once, however often it comes."""

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
from headwater import Headwater, calls
from headwater.calls import JSON_TYPE, Call
from headwater.client.database.connection import rows_of
from headwater.errors import InvalidRequest, TopicNotFound, TransactionAborted, translated
from headwater.model import Binding
from headwater.spark.formats import log_writer
from headwater.spark.formats.log_ranges import Range
from headwater.spark.formats.log_writer import Staged

POSITION_HEADER: Final = "replayed-position"
TOPIC_HEADER: Final = "replayed-topic"
TIME_HEADER: Final = "replayed-published-at"
ID_HEADER: Final = "replayed-event-id"
_TIME: Final = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"
PRIVATE_PREFIX: Final = "headwater.replay."
# A topic that one group gets its past by is of no use for ever.
PRIVATE_RETENTION: Final = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a replay: the events after one position and up to another."""

    dsn: str
    replay: str
    after: int
    up_to: int
    refuse_gone: Callable[[], None]
    """To be asked when the events were read and before they count: PositionExpired if some were gone by then."""

    def advance(self, events: int) -> Call[None]:
        """The note that this part has arrived."""
        return calls.advance_replay(self.replay, from_position=self.after, to_position=self.up_to, more_events=events)


@dataclass(frozen=True, slots=True)
class ToTopic:
    """Events become events of a topic again, in their order, each with headers that say which one it was."""

    name: str

    def described(self) -> dict[str, str]:
        return {"topic": self.name}

    def prepare(self, log: Headwater) -> None:
        try:
            log.topic(self.name)
        except TopicNotFound:
            # Only who has to make it needs the right to.
            log.create_topic(self.name, if_missing=True)

    def write(self, rows: DataFrame, part: Part) -> int:
        return publish(rows, part, topic=self.name)


@dataclass(frozen=True, slots=True)
class ToGroup:
    """A queue gets its past again: by a rewind what the log has, by a topic of its own what only an archive has."""

    name: str

    def described(self) -> dict[str, str]:
        return {"group": self.name}

    @staticmethod
    def topic(replay: str) -> str:
        """The topic that brings a group its past. Bound to that group alone."""
        return f"{PRIVATE_PREFIX}{replay}"

    def bound(self, log: Headwater) -> dict[str | None, Range]:
        """The topics that the group is bound to, each with the positions that its bindings take; None: all topics."""
        found: dict[str | None, Range] = {}
        for binding in self._own_bindings(log):
            low, high = found.get(binding.topic, (binding.from_position, 0))
            end = 2**62 if binding.to_position is None else binding.to_position
            found[binding.topic] = (min(low, binding.from_position), max(high, end))
        if not found:
            raise InvalidRequest(
                f'group "{self.name}" is bound to nothing',
                hint=f"Bind it: headwater group bind {self.name} --topic ...",
            )
        return found

    def _own_bindings(self, log: Headwater) -> list[Binding]:
        """All but those that an earlier replay made."""
        return [one for one in log.bindings(self.name) if not (one.topic or "").startswith(PRIVATE_PREFIX)]

    def also_reached(self, log: Headwater) -> list[str]:
        """Other groups that get every topic, and so this one's too."""
        queues = [group.name for group in log.groups() if group.name != self.name]
        return [
            name
            for name in queues
            if any(binding.topic is None and binding.to_position is None for binding in log.bindings(name))
        ]

    def begin(self, log: Headwater, connection: psycopg.Connection[Any], replay: str, *, rewind_to: int | None) -> None:
        """Rewind the group, unless told otherwise, and bind it to a topic of its own as it is bound to others."""
        topic = self.topic(replay)
        if rewind_to is not None:
            with connection.cursor(binary=True) as cursor:
                rows_of(cursor, calls.rewind_group(self.name, rewind_to))
        log.create_topic(topic, retention=PRIVATE_RETENTION, if_missing=True, connection=connection)
        for binding in self._own_bindings(log):
            if binding.topic is not None:
                # What a binding means is for Postgres to say: the same again, and of that topic.
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
    """Events become rows of a table, which is made if it is missing. The position is the key: each is there once."""

    schema: str
    table: str

    @classmethod
    def parse(cls, name: str) -> ToTable:
        schema, dot, table = name.rpartition(".")
        if not table or "." in schema or (dot and not schema) or schema == "headwater":
            raise InvalidRequest(
                f"{name!r} is no table to replay to", hint="Write schema.table, of another schema than the log's."
            )
        return cls(schema or "public", table)

    def described(self) -> dict[str, str]:
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
                raise translated(error) from error

    def refuse_unfit(self, connection: psycopg.Connection[Any]) -> None:
        """Say what a table lacks to take events, if it does."""
        columns = self._columns(connection) or {}
        keyed = connection.execute(_KEYED, (f"{self.identifier.as_string()}",)).fetchone()
        if "position" not in columns or keyed is None:
            raise InvalidRequest(
                f"the table {self.schema}.{self.table} has no column position that is its key",
                hint="Name a table that is not there yet, and it is made; or add: position bigint primary key.",
            )

    def columns(self, connection: psycopg.Connection[Any]) -> list[str]:
        """The columns of the table that an event has something for."""
        there = self._columns(connection) or {}
        return [name for name in _COLUMNS if name in there]

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


Target = ToTopic | ToGroup | ToTable


def publish(rows: DataFrame, part: Part, *, topic: str) -> int:
    """Publish events to a topic and note that the replay came so far: both in one transaction, or neither."""
    writer = calls.replay_writer(part.replay)
    staging = partial(_stage, dsn=part.dsn, topic=topic, writer=writer, epoch=part.up_to)
    staged = as_new_events(rows).mapInArrow(staging, "part int, attempt string, events long").collect()
    events: int = sum(row.events for row in staged)
    attempts = [row.attempt for row in sorted(staged, key=lambda row: row.part) if row.events]
    call = calls.publish_epoch(writer, part.up_to, attempts=attempts, expected_events=events, replayable=True)
    part.refuse_gone()
    with headwater.connect(part.dsn, pool_size=1) as log:
        for tries_left in reversed(range(log_writer.PUBLISH_TRIES)):
            try:
                with log.transaction() as connection, connection.cursor(binary=True) as cursor:
                    # First, since it decides who of two may go on.
                    rows_of(cursor, part.advance(events))
                    if events and call.decode(rows_of(cursor, call)) is None:
                        raise InvalidRequest(
                            f'a replay "{part.replay}" has published under this name before',
                            hint=f"Take another name, or headwater replay --forget {part.replay}.",
                        )
                break
            except TransactionAborted:
                if not tries_left:
                    raise
    return events


def as_new_events(rows: DataFrame) -> DataFrame:
    """Events of the log as events to publish, with headers that say which they were."""
    pairs: list[tuple[str, Column]] = [
        (POSITION_HEADER, f.col("position").cast("string")),
        (TOPIC_HEADER, f.concat(f.lit('"'), f.col("topic"), f.lit('"'))),
        (TIME_HEADER, f.concat(f.lit('"'), f.date_format("published_at", _TIME), f.lit('"'))),
    ]
    parts: list[Column] = []
    for number, (name, value) in enumerate(pairs):
        parts += [f.lit(f'{", " if number else ""}"{name}": '), value]
    # An id may hold anything, so it is for others to write as JSON: of {"name":"..."} less its first brace.
    own_id = f.to_json(f.struct(f.col("event_id").alias(ID_HEADER)))
    own_id = f.when(f.col("event_id").isNull(), f.lit("}")).otherwise(
        f.concat(f.lit(", "), f.substring(own_id, f.lit(2), f.length(own_id)))
    )
    before = f.when(f.col("headers").isNull() | (f.col("headers") == "{}"), f.lit("{")).otherwise(
        f.concat(f.substring("headers", f.lit(1), f.length("headers") - 1), f.lit(", "))
    )
    # Behind the others: of a name that is there twice, Postgres keeps the last.
    return rows.select(
        "payload", "key", "type", "routing_key", f.concat(before, *parts, own_id).alias("headers"), "content_type"
    )


def _stage(
    batches: Iterator[pa.RecordBatch], *, dsn: str, topic: str, writer: str, epoch: int
) -> Iterator[pa.RecordBatch]:
    task = TaskContext.get()
    assert task is not None
    done: Staged = log_writer.stage(dsn, batches, topic=topic, writer=writer, epoch=epoch, part=task.partitionId())
    yield pa.RecordBatch.from_pylist(
        [{"part": done.part, "attempt": done.attempt, "events": done.events}],
        schema=pa.schema([("part", pa.int32()), ("attempt", pa.string()), ("events", pa.int64())]),
    )


def _insert(batches: Iterator[pa.RecordBatch], *, dsn: str, target: ToTable) -> Iterator[pa.RecordBatch]:
    """Put the events of a task into the table, less those that are there: one transaction."""
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
    """The payload as JSON text, if that is what it is."""
    payload = event["payload"]
    if payload is None or event["content_type"] != JSON_TYPE:
        return None
    try:
        text = payload.decode()
        json.loads(text)
    except ValueError:
        return None
    # Postgres' jsonb cannot hold it.
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
