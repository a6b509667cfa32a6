"""Calls of the Kafka server: brokers, topics, records, consumer groups and transactions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from psycopg.types.json import Jsonb

from headwater.calls.call import Call, nothing, only_value
from headwater.calls.encoding import (
    packed_bytes,
    packed_bytes_or_null,
    packed_positions_or_null,
    packed_text_or_null,
)


class KafkaTopic(NamedTuple):
    """A topic as the Kafka server sees it."""

    id: int
    name: str
    kind: str
    writable: bool
    partitions: int
    retention: timedelta | None
    max_payload_bytes: int
    max_header_bytes: int
    timestamp_type: str
    compression_type: str
    compacted: bool
    tombstones_kept: timedelta
    retention_bytes: int | None
    # "key", "value" -> subject (None: by the strategy), whether payloads need a schema id, strategy. None: no schema.
    schemas: Mapping[str, tuple[str | None, bool, str]] | None
    # Whether cleanup.policy contains delete, so that retention applies.
    deletes: bool
    # Settings that are stored and returned but have no effect.
    settings: Mapping[str, str]


class KafkaBroker(NamedTuple):
    """A live broker."""

    node_id: int
    incarnation: int
    host: str
    port: int


class TopicPartition(NamedTuple):
    """A partition of a topic."""

    topic_id: int
    partition: int


class Bounds(NamedTuple):
    """The first offset of a partition, and the offset after the last readable one."""

    start: int
    end: int


class AppendBatch(NamedTuple):
    """A batch of records for one partition, in columns. A producer id below 0: the producer is not idempotent."""

    topic_partition: TopicPartition
    producer_id: int
    producer_epoch: int
    first_sequence: int
    payloads: Sequence[bytes | None]
    keys: Sequence[bytes | None]
    types: Sequence[str | None] | None
    routing_keys: Sequence[str | None] | None
    headers: Sequence[str | None] | None
    content_types: Sequence[str | None] | None
    produced_ms: Sequence[int] | None
    record_headers: Sequence[bytes | None] | None


class ProduceResult(NamedTuple):
    """The result of an append. `outcome`: appended, duplicate, out of order, fenced, no topic, reserved.

    The positions of the batch are above `after_position`.
    """

    outcome: str
    base_offset: int | None
    appended_ms: int
    after_position: int = 0
    epoch: int = -1


class PartitionQuery(NamedTuple):
    """What a fetch queries about a partition. No `from_offset`: no page. No `max_bytes`: a plain page.

    `cached`: the last event of each cached batch, as its offset and a position below its own.
    """

    topic_partition: TopicPartition
    from_offset: int | None
    after_position: int
    max_events: int
    max_bytes: int | None
    cached: Sequence[tuple[int, int]]


class Page(NamedTuple):
    """The next events of a partition up to an offset, all of one epoch, with the position and time of the last.

    `plain`: the events were not examined. They are assumed to have contiguous offsets, and only a key and a payload.
    """

    last_offset: int
    last_position: int
    last_ms: int | None
    plain: bool
    epoch: int


class PartitionState(NamedTuple):
    """The state of a partition for a fetch: its bounds, its next page, and when the cached events were published.

    `max_offset`: the highest offset that a consumer may fetch from. `present_epoch`: the leader epoch of this state.
    """

    bounds: Bounds
    page: Page | None
    cached_ms: list[int | None]
    max_offset: int
    present_epoch: int


class Epoch(NamedTuple):
    """An epoch of the log, which is the leader epoch of every partition, and the position after which it began."""

    number: int
    began_after: int


class EpochEnd(NamedTuple):
    """Where an epoch ends in a partition; -1 if it has not begun. `present` is None if the partition does not exist."""

    epoch: int
    end_offset: int
    present: int | None


FetchedRows = list[tuple[int, int, bytes | None, bytes | None, bytes | None, list[Any] | None]]
"""Rows of a fetch: offset, time, key, payload, original record headers and, if present, the list of headers, type,
routing key, content type and event id. Plain tuples: creating named tuples would double the cost of reading."""


PlainRows = list[tuple[int, bytes | None, bytes | None]]
"""Rows of a plain page, in the order of offsets: time, key, payload."""


class CommittedOffset(NamedTuple):
    """The committed offset of a consumer group in a partition."""

    topic: str
    topic_id: int
    partition: int
    offset: int
    leader_epoch: int
    metadata: str


class OffsetToCommit(NamedTuple):
    """An offset that a consumer group commits."""

    topic_partition: TopicPartition
    offset: int
    leader_epoch: int
    metadata: str


class OpenTransaction(NamedTuple):
    """A transactional producer: the start of its open transaction, the outcome of its last one, its partitions."""

    transactional_id: str
    producer_id: int
    epoch: int
    timeout_ms: int
    began_ms: int | None
    last_outcome: str | None
    topic_partitions: list[TopicPartition]


class ActiveProducer(NamedTuple):
    """An idempotent producer of a partition, and the time of its last batch."""

    topic_partition: TopicPartition
    producer_id: int
    epoch: int
    last_sequence: int
    last_batch_ms: int


def kafka_cluster_id() -> Call[UUID]:
    return Call("select id from headwater_internal.kafka_cluster", (), only_value)


def kafka_register(host: str, port: int, *, lease_seconds: float) -> Call[tuple[int, int]]:
    """Register a broker; returns its node id and incarnation."""
    return Call(
        "select node_id, incarnation from headwater_internal.kafka_register(%s, %s, %s)",
        (host, port, lease_seconds),
        lambda rows: (rows[0][0], rows[0][1]),
    )


def kafka_renew(incarnation: int, *, lease_seconds: float) -> Call[bool]:
    return Call("select headwater_internal.kafka_renew(%s, %s)", (incarnation, lease_seconds), only_value)


def kafka_brokers() -> Call[list[KafkaBroker]]:
    return Call(
        "select node_id, incarnation, host, port from headwater.kafka_live_broker order by node_id",
        (),
        lambda rows: [KafkaBroker(*row) for row in rows],
    )


def kafka_cluster() -> Call[tuple[int, list[KafkaBroker]]]:
    """The present epoch, and the live brokers."""
    return Call(
        "select e.epoch, b.node_id, b.incarnation, b.host, b.port "
        "from (select headwater.current_epoch() as epoch) as e "
        "left join headwater.kafka_live_broker b on true order by b.node_id",
        (),
        lambda rows: (rows[0][0], [KafkaBroker(*row[1:]) for row in rows if row[1] is not None]),
    )


def kafka_epochs() -> Call[list[Epoch]]:
    """All epochs of the log, oldest first."""
    return Call(
        "select number, began_after from headwater.epoch_overview order by number",
        (),
        lambda rows: [Epoch(*row) for row in rows],
    )


def kafka_epoch_at(topic_partition: TopicPartition, offset: int) -> Call[int]:
    """The epoch of the first event at or after an offset, or the present epoch if there is none."""
    return Call(
        "select headwater_internal.kafka_epoch_at(%s, %s, %s)",
        (topic_partition.topic_id, topic_partition.partition, offset),
        only_value,
    )


def kafka_epoch_end(topic_partition: TopicPartition, epoch: int) -> Call[EpochEnd]:
    return Call(
        "select epoch, end_offset, present from headwater_internal.kafka_epoch_end(%s, %s, %s)",
        (topic_partition.topic_id, topic_partition.partition, epoch),
        lambda rows: EpochEnd(*rows[0]),
    )


def kafka_topics() -> Call[list[KafkaTopic]]:
    return Call(
        "select id, name, kind, writable, partitions, retention, max_payload_bytes, max_header_bytes, "
        "timestamp_type, compression_type, compacted, tombstones_kept, retention_bytes, schemas, "
        "deletes, settings from headwater_internal.kafka_topic_overview order by name",
        (),
        lambda rows: [KafkaTopic(*row) for row in rows],
    )


def kafka_create_topic(
    name: str,
    partitions: int,
    *,
    retention: timedelta | None = None,
    max_payload_bytes: int | None = None,
    timestamp_type: str | None = None,
    compression_type: str | None = None,
    compacted: bool | None = None,
    tombstones_kept: timedelta | None = None,
    retention_bytes: int | None = None,
    schemas: Mapping[str, Mapping[str, Any]] | None = None,
    deletes: bool | None = None,
    settings: Mapping[str, str | None] | None = None,
) -> Call[int]:
    return Call(
        "select headwater_internal.kafka_create_topic(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            name,
            partitions,
            retention,
            max_payload_bytes,
            timestamp_type,
            compression_type,
            compacted,
            tombstones_kept,
            retention_bytes,
            Jsonb(schemas) if schemas else None,
            deletes,
            Jsonb(settings) if settings else None,
        ),
        only_value,
    )


def kafka_create_missing(name: str, partitions: int) -> Call[int | None]:
    """Create a missing topic if `auto_create_topics` is on; returns its id."""
    return Call("select headwater_internal.kafka_create_missing(%s, %s)", (name, partitions), only_value)


def kafka_alter_topic(
    name: str,
    *,
    timestamp_type: str | None = None,
    compression_type: str | None = None,
    compacted: bool | None = None,
    tombstones_kept: timedelta | None = None,
    retention_bytes: int | None = None,
    retention: timedelta | None = None,
    max_payload_bytes: int | None = None,
    keep_forever: bool = False,
    schemas: Mapping[str, Mapping[str, Any]] | None = None,
    deletes: bool | None = None,
    settings: Mapping[str, str | None] | None = None,
) -> Call[None]:
    """None leaves a setting unchanged; a size of -1 removes the limit."""
    return Call(
        "select headwater_internal.kafka_alter_topic(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            name,
            timestamp_type,
            compression_type,
            compacted,
            tombstones_kept,
            retention_bytes,
            retention,
            max_payload_bytes,
            keep_forever,
            Jsonb(schemas) if schemas else None,
            deletes,
            Jsonb(settings) if settings else None,
        ),
        nothing,
    )


def kafka_compact() -> Call[tuple[int, bool]]:
    """Run a step of compaction; returns the number of removed events, and whether compaction is complete."""
    return Call(
        "select compacted, done from headwater_internal.kafka_compact()", (), lambda rows: (rows[0][0], rows[0][1])
    )


def kafka_new_producer() -> Call[int]:
    return Call("select headwater_internal.kafka_number('headwater_internal.kafka_producer_id')", (), only_value)


def _record_params(batches: Sequence[AppendBatch]) -> tuple[Any, ...]:
    def joined(part: str) -> Sequence[Any]:
        columns = [getattr(batch, part) for batch in batches]
        if all(column is None for column in columns):
            return []
        if len(columns) == 1:
            return tuple(columns[0])
        return [
            value
            for batch, column in zip(batches, columns, strict=True)
            for value in (column or (None,) * len(batch.payloads))
        ]

    return (
        packed_bytes(joined("payloads")),
        packed_bytes_or_null(joined("keys")),
        packed_text_or_null(joined("types"), "type"),
        packed_text_or_null(joined("routing_keys"), "routing key"),
        packed_text_or_null(joined("headers"), "header"),
        packed_text_or_null(joined("content_types"), "content type"),
        packed_positions_or_null(joined("produced_ms")) if any(batch.produced_ms for batch in batches) else None,
        packed_bytes_or_null(joined("record_headers")),
    )


def kafka_append(batches: Sequence[AppendBatch]) -> Call[list[ProduceResult]]:
    """Append batches in order, in one transaction. Batches of idempotent producers are deduplicated."""
    return Call(
        "select outcome, base_offset, appended_ms, after_position, epoch from headwater_internal.kafka_append("
        "%s::int[], %s::int[], %s::int[], %s::bigint[], %s::int[], %s::int[], %b, %b, %b, %b, %b, %b, %b, %b)",
        (
            [batch.topic_partition.topic_id for batch in batches],
            [batch.topic_partition.partition for batch in batches],
            [len(batch.payloads) for batch in batches],
            [batch.producer_id for batch in batches],
            [batch.producer_epoch for batch in batches],
            [batch.first_sequence for batch in batches],
            *_record_params(batches),
        ),
        lambda rows: [ProduceResult(*row) for row in rows],
    )


def kafka_bounds(topic_partitions: Sequence[TopicPartition]) -> Call[dict[TopicPartition, Bounds]]:
    """The bounds of partitions. Partitions that do not exist are left out."""
    return Call(
        "select topic_id, partition, start_offset, end_offset from headwater_internal.kafka_bounds(%s::int[], "
        "%s::int[])",
        (
            [topic_partition.topic_id for topic_partition in topic_partitions],
            [topic_partition.partition for topic_partition in topic_partitions],
        ),
        lambda rows: {
            TopicPartition(topic_id, topic_partition): Bounds(start, end)
            for topic_id, topic_partition, start, end in rows
        },
    )


def kafka_look(queries: Sequence[PartitionQuery]) -> Call[dict[int, PartitionState]]:
    """The state of partitions before a read, by index in `queries`. Partitions that do not exist are left out."""
    cached = [(number, *one) for number, query in enumerate(queries, 1) for one in query.cached]
    return Call(
        "select number, start_offset, end_offset, last_offset, last_position, last_ms, plain, page_epoch, kept_ms, "
        "max_offset, present "
        "from headwater_internal.kafka_look("
        "%s::int[], %s::int[], %s::bigint[], %s::bigint[], %s::int[], %s::bigint[], "
        "%s::int[], %s::bigint[], %s::bigint[])",
        (
            [one.topic_partition.topic_id for one in queries],
            [one.topic_partition.partition for one in queries],
            [one.from_offset for one in queries],
            [one.after_position for one in queries],
            [one.max_events for one in queries],
            [one.max_bytes for one in queries],
            [number for number, _, _ in cached],
            [offset for _, offset, _ in cached],
            [position for _, _, position in cached],
        ),
        lambda rows: {
            number - 1: PartitionState(
                Bounds(start, end), None if last is None else Page(last, *page), kept_ms, limit, present
            )
            for number, start, end, last, *page, kept_ms, limit, present in rows
        },
    )


IN_EPOCH: Final = "where (select headwater.current_epoch()) = %s"
"""Records are read in a later statement than the bounds of their partition. If Postgres failed over in between, the
offsets may belong to other events, so no rows are returned. The epoch cannot change within a session."""


def kafka_fetch_sequenced(
    topic_partition: TopicPartition, page: Page, *, from_offset: int, after_position: int, epoch: int
) -> Call[FetchedRows]:
    """Read the events of an examined page; none if `epoch` is no longer the present one."""
    return Call(
        "select topic_offset, time_ms, key, payload, record_headers, parts "
        f"from headwater_internal.kafka_fetch_sequenced(%s, %s, %s, %s, %s, %s) {IN_EPOCH}",
        (
            topic_partition.topic_id,
            topic_partition.partition,
            from_offset,
            page.last_offset,
            after_position,
            page.last_position,
            epoch,
        ),
        list,
    )


def kafka_fetch_plain(
    topic_partition: TopicPartition,
    page: Page,
    *,
    from_offset: int,
    after_position: int,
    max_part_bytes: int,
    epoch: int,
) -> Call[PlainRows]:
    """Read a plain page. Fewer rows than offsets: it is not plain, or `epoch` is no longer the present one."""
    return Call(
        f"select time_ms, key, payload from headwater_internal.kafka_fetch_plain(%s, %s, %s, %s, %s, %s, %s) "
        f"{IN_EPOCH}",
        (
            topic_partition.topic_id,
            topic_partition.partition,
            from_offset,
            page.last_offset,
            after_position,
            page.last_position,
            max_part_bytes,
            epoch,
        ),
        list,
    )


def kafka_fetch_open(
    topic_partition: TopicPartition, *, from_offset: int, end_offset: int, max_events: int, max_bytes: int, epoch: int
) -> Call[FetchedRows]:
    return Call(
        "select topic_offset, time_ms, key, payload, record_headers, parts "
        f"from headwater_internal.kafka_fetch_open(%s, %s, %s, %s, %s, %s) {IN_EPOCH}",
        (topic_partition.topic_id, topic_partition.partition, from_offset, end_offset, max_events, max_bytes, epoch),
        list,
    )


def kafka_offset_at(
    topic_partition: TopicPartition, at_ms: int | None, *, before_offset: int
) -> Call[tuple[int, int] | None]:
    """The offset and time of the first event at or after `at_ms`; None: of the event with the latest time."""
    return Call(
        "select topic_offset, time_ms from headwater_internal.kafka_offset_at(%s, %s, %s, %s)",
        (topic_partition.topic_id, topic_partition.partition, at_ms, before_offset),
        lambda rows: (rows[0][0], rows[0][1]) if rows else None,
    )


def kafka_coordinator(group: str) -> Call[int | None]:
    """The node id of the broker that coordinates a consumer group."""
    return Call("select headwater_internal.kafka_coordinator(%s)", (group,), only_value)


def kafka_take_up(group: str, incarnation: int) -> Call[int | None]:
    """Take up a consumer group; returns its last generation, or None if another broker coordinates it."""
    return Call("select headwater_internal.kafka_take_up(%s, %s)", (group, incarnation), only_value)


def kafka_note_generation(group: str, incarnation: int, *, generation: int, protocol_type: str) -> Call[bool]:
    return Call(
        "select headwater_internal.kafka_note_generation(%s, %s, %s, %s)",
        (group, incarnation, generation, protocol_type),
        only_value,
    )


def _offset_params(offsets: Sequence[OffsetToCommit]) -> tuple[list[Any], ...]:
    return (
        [one.topic_partition.topic_id for one in offsets],
        [one.topic_partition.partition for one in offsets],
        [one.offset for one in offsets],
        [one.leader_epoch for one in offsets],
        [one.metadata for one in offsets],
    )


def kafka_commit_offsets(group: str, incarnation: int, offsets: Sequence[OffsetToCommit]) -> Call[bool]:
    """Commit offsets. False: the broker no longer coordinates the group, and nothing was written."""
    return Call(
        "select headwater_internal.kafka_commit_offsets(%s, %s, %s::int[], %s::int[], %s::bigint[], %s::int[], "
        "%s::text[])",
        (group, incarnation, *_offset_params(offsets)),
        only_value,
    )


def kafka_committed(group: str) -> Call[list[CommittedOffset]]:
    return Call(
        "select topic, topic_id, partition, committed_offset, leader_epoch, metadata "
        "from headwater.kafka_committed where group_name = %s order by topic, partition",
        (group,),
        lambda rows: [CommittedOffset(*row) for row in rows],
    )


def kafka_forget_offsets(group: str, incarnation: int, topic_partitions: Sequence[TopicPartition]) -> Call[bool]:
    return Call(
        "select headwater_internal.kafka_forget_offsets(%s, %s, %s::int[], %s::int[])",
        (
            group,
            incarnation,
            [topic_partition.topic_id for topic_partition in topic_partitions],
            [topic_partition.partition for topic_partition in topic_partitions],
        ),
        only_value,
    )


def kafka_delete_group(group: str, incarnation: int) -> Call[bool]:
    return Call("select headwater_internal.kafka_delete_group(%s, %s)", (group, incarnation), only_value)


def kafka_note_alive(groups: Sequence[str], incarnation: int) -> Call[None]:
    """Mark groups as having members, so that their offsets do not expire."""
    return Call("select headwater_internal.kafka_note_alive(%s::text[], %s)", (list(groups), incarnation), nothing)


def kafka_groups(incarnation: int) -> Call[list[tuple[str, str]]]:
    """The groups that a broker lists, with their protocol type: those that it coordinates; the first live broker also
    lists those without a live coordinator."""
    return Call(
        # A group that was only looked up has neither a generation nor offsets, and does not count.
        "select g.name, g.protocol_type from headwater_internal.kafka_group g where (g.generation > 0 "
        "or exists (select from headwater_internal.kafka_offset o where o.group_name = g.name)) and (g.coordinator "
        "= %s "
        "or (not exists (select from headwater.kafka_live_broker b where b.incarnation = g.coordinator) "
        "and %s = (select b.incarnation from headwater.kafka_live_broker b order by b.node_id limit 1))) "
        "order by g.name",
        (incarnation, incarnation),
        lambda rows: [(name, protocol_type) for name, protocol_type in rows],
    )


def kafka_group_protocol(group: str) -> Call[str | None]:
    """The last protocol type of a group; None: the group does not exist."""
    return Call(
        "select g.protocol_type from headwater_internal.kafka_group g where g.name = %s and (g.generation > 0 "
        "or exists (select from headwater_internal.kafka_offset o where o.group_name = g.name))",
        (group,),
        lambda rows: rows[0][0] if rows else None,
    )


def kafka_init_transactions(
    transactional_id: str, *, timeout_ms: int, known_id: int, known_epoch: int
) -> Call[tuple[str, int, int]]:
    """Initialize a transactional producer; returns the outcome, its id and its epoch."""
    return Call(
        "select outcome, producer_id, epoch from headwater_internal.kafka_init_transactions(%s, %s, %s, %s)",
        (transactional_id, timeout_ms, known_id, known_epoch),
        lambda rows: (rows[0][0], rows[0][1], rows[0][2]),
    )


def kafka_begin(transactional_id: str, producer_id: int, epoch: int) -> Call[str]:
    return Call("select headwater_internal.kafka_begin(%s, %s, %s)", (transactional_id, producer_id, epoch), only_value)


def kafka_stage(transactional_id: str, batch: AppendBatch, *, may_begin: bool) -> Call[str]:
    """Stage a batch in the open transaction of its producer. `may_begin`: begin a transaction if none is open."""
    return Call(
        "select headwater_internal.kafka_stage(%s, %s, %s, %s, %s, %s, %s, %b, %b, %b, %b, %b, %b, %b, %b, %s)",
        (
            transactional_id,
            batch.topic_partition.topic_id,
            batch.topic_partition.partition,
            len(batch.payloads),
            batch.producer_id,
            batch.producer_epoch,
            batch.first_sequence,
            *_record_params([batch]),
            may_begin,
        ),
        only_value,
    )


def kafka_stage_offsets(
    transactional_id: str,
    producer_id: int,
    epoch: int,
    group: str,
    offsets: Sequence[OffsetToCommit],
    *,
    may_begin: bool,
) -> Call[str]:
    return Call(
        "select headwater_internal.kafka_stage_offsets("
        "%s, %s, %s, %s, %s::int[], %s::int[], %s::bigint[], %s::int[], %s::text[], %s)",
        (transactional_id, producer_id, epoch, group, *_offset_params(offsets), may_begin),
        only_value,
    )


def kafka_staged_offsets(group: str) -> Call[set[TopicPartition]]:
    """The partitions of a group with offsets that are staged in an open transaction."""
    return Call(
        "select topic_id, partition from headwater_internal.kafka_staged_offset where group_name = %s",
        (group,),
        lambda rows: {TopicPartition(*row) for row in rows},
    )


def kafka_end_transaction(
    transactional_id: str, producer_id: int, epoch: int, *, committed: bool, next_epoch: bool
) -> Call[tuple[str, int, int]]:
    """End a transaction; returns the outcome, and the producer's id and epoch from now on."""
    return Call(
        "select outcome, next_id, raised_epoch from headwater_internal.kafka_end_transaction(%s, %s, %s, %s, %s)",
        (transactional_id, producer_id, epoch, committed, next_epoch),
        lambda rows: (rows[0][0], rows[0][1], rows[0][2]),
    )


def kafka_transactions() -> Call[list[OpenTransaction]]:
    return Call(
        "select t.transactional_id, t.producer_id, t.epoch, t.timeout_ms, "
        "(extract(epoch from t.began_at) * 1000)::bigint, t.last_outcome, "
        "array(select distinct s.topic_id::bigint << 16 | s.partition from headwater_internal.kafka_staged s "
        "where s.producer_id = t.producer_id order by 1) "
        "from headwater_internal.kafka_transactional_producer t order by 1",
        (),
        lambda rows: [
            OpenTransaction._make((*row[:6], [TopicPartition(o >> 16, o & 65535) for o in row[6]])) for row in rows
        ],
    )


def kafka_producers(topic_id: int) -> Call[list[ActiveProducer]]:
    return Call(
        "select topic_id, partition, producer_id, epoch, last_sequences[cardinality(last_sequences)], "
        "(extract(epoch from updated_at) * 1000)::bigint from headwater_internal.kafka_producer_partition where "
        "topic_id = %s "
        "order by partition, producer_id",
        (topic_id,),
        lambda rows: [ActiveProducer(TopicPartition(row[0], row[1]), *row[2:]) for row in rows],
    )


def kafka_reap_transactions() -> Call[int]:
    return Call("select headwater_internal.kafka_reap_transactions()", (), only_value)


def kafka_maintenance() -> Call[None]:
    return Call("select headwater_internal.kafka_maintenance()", (), nothing)
