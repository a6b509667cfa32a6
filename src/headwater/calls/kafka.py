"""Calls of the Kafka door: brokers, topics, records and consumer groups."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from psycopg.types.json import Jsonb

from headwater.calls.call import Call, nothing, only_value
from headwater.calls.encoding import PackedBytes, PackedPositions, pack, packed_bytes, packed_text


class KafkaTopic(NamedTuple):
    """A topic as the Kafka door sees it."""

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
    # key and value -> the subject (None: by the strategy), whether an id is needed, the strategy. None: no schema.
    schemas: Mapping[str, tuple[str | None, bool, str]] | None
    # Whether retention takes what is old, or too much.
    deletes: bool
    # Settings that are only told.
    settings: Mapping[str, str]


class KafkaBroker(NamedTuple):
    """A broker process that is alive."""

    node_id: int
    incarnation: int
    host: str
    port: int


class Lane(NamedTuple):
    """A partition of a topic."""

    topic_id: int
    partition: int


class Bounds(NamedTuple):
    """The first offset of a lane that is kept, and the one after the last that can be read."""

    start: int
    end: int


class AppendBatch(NamedTuple):
    """A batch of records for one lane, in columns. A producer id below 0: the producer is not idempotent."""

    lane: Lane
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


class Appended(NamedTuple):
    """What became of a batch: appended, duplicate, out of order, fenced, no topic, reserved; its offset; when; after
    what; in which epoch."""

    outcome: str
    base_offset: int | None
    appended_ms: int
    after_position: int = 0
    epoch: int = -1


class Wanted(NamedTuple):
    """What a fetch asks of a lane. No `from_offset`: no page; no `max_bytes`: a plain one, of the next offsets.

    `kept`: remembered events, each as its offset and a position below its own.
    """

    lane: Lane
    from_offset: int | None
    after_position: int
    max_events: int
    max_bytes: int | None
    kept: Sequence[tuple[int, int]]


class Page(NamedTuple):
    """Events of a lane up to an offset, all of one epoch; where the last is in the log, and when it was published.

    `plain`: nobody looked at them yet. All offsets should be there, and no event have more than a key and a payload.
    """

    last_offset: int
    last_position: int
    last_ms: int | None
    plain: bool
    epoch: int


class Seen(NamedTuple):
    """A lane as a fetch finds it: its bounds, the page it wanted, and when the remembered events were published.

    `max_offset`: up to where a consumer may be. `present_epoch`: the leader epoch in which all of this was so.
    """

    bounds: Bounds
    page: Page | None
    kept_ms: list[int | None]
    max_offset: int
    present_epoch: int


class Epoch(NamedTuple):
    """An epoch of the log, which is a leader epoch of every lane: its number, and the position after which it began."""

    number: int
    began_after: int


class EpochEnd(NamedTuple):
    """Where an epoch ends in a lane, both -1 if it has not begun; the present epoch, None: there is no such lane."""

    epoch: int
    end_offset: int
    present: int | None


FetchedRows = list[tuple[int, int, bytes | None, bytes | None, bytes | None, list[Any] | None]]
"""Events as a fetch reads them: offset, time, key, payload, the headers of a record as they came, and what few have:
headers, type, routing key, content type and id. Plain tuples, since to name them costs as much as to read them."""


PlainRows = list[tuple[int, bytes | None, bytes | None]]
"""The same of a plain page: time, key and payload of one offset after the other."""


class CommittedOffset(NamedTuple):
    """How far a group has read a lane."""

    topic: str
    topic_id: int
    partition: int
    offset: int
    leader_epoch: int
    metadata: str


class OffsetToCommit(NamedTuple):
    """How far a group says it has read a lane."""

    lane: Lane
    offset: int
    leader_epoch: int
    metadata: str


class OpenTransaction(NamedTuple):
    """A transactional producer, since when its transaction is open, how the last one ended, and what it writes to."""

    transactional_id: str
    producer_id: int
    epoch: int
    timeout_ms: int
    began_ms: int | None
    last_outcome: str | None
    lanes: list[Lane]


class ActiveProducer(NamedTuple):
    """An idempotent producer of a lane, and when it was last heard of."""

    lane: Lane
    producer_id: int
    epoch: int
    last_sequence: int
    heard_ms: int


def _packed_integers(values: Sequence[int | None]) -> PackedPositions | None:
    if None not in values:
        return PackedPositions(
            struct.pack("!iIiii", 1, 1, 20, len(values), 1) + b"".join([_INTEGER(8, value) for value in values])
        )
    if all(value is None for value in values):
        return None
    return PackedPositions(pack([None if value is None else struct.pack("!q", value) for value in values], 20))


_INTEGER = struct.Struct("!iq").pack


def kafka_cluster_id() -> Call[UUID]:
    return Call("select id from headwater.kafka_cluster", (), only_value)


def kafka_register(host: str, port: int, *, lease_seconds: float) -> Call[tuple[int, int]]:
    """A broker's node id and incarnation."""
    return Call(
        "select node_id, incarnation from headwater.kafka_register(%s, %s, %s)",
        (host, port, lease_seconds),
        lambda rows: (rows[0][0], rows[0][1]),
    )


def kafka_renew(incarnation: int, *, lease_seconds: float) -> Call[bool]:
    return Call("select headwater.kafka_renew(%s, %s)", (incarnation, lease_seconds), only_value)


def kafka_brokers() -> Call[list[KafkaBroker]]:
    return Call(
        "select node_id, incarnation, host, port from headwater.kafka_live_broker order by node_id",
        (),
        lambda rows: [KafkaBroker(*row) for row in rows],
    )


def kafka_cluster() -> Call[tuple[int, list[KafkaBroker]]]:
    """The present epoch, and the brokers that live."""
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


def kafka_epoch_at(lane: Lane, offset: int) -> Call[int]:
    """The epoch of the event at an offset, or else of the next one, or else the present one."""
    return Call("select headwater.kafka_epoch_at(%s, %s, %s)", (lane.topic_id, lane.partition, offset), only_value)


def kafka_epoch_end(lane: Lane, epoch: int) -> Call[EpochEnd]:
    return Call(
        "select epoch, end_offset, present from headwater.kafka_epoch_end(%s, %s, %s)",
        (lane.topic_id, lane.partition, epoch),
        lambda rows: EpochEnd(*rows[0]),
    )


def kafka_topics() -> Call[list[KafkaTopic]]:
    return Call(
        "select id, name, kind, writable, partitions, retention, max_payload_bytes, max_header_bytes, "
        "timestamp_type, compression_type, compacted, tombstones_kept, retention_bytes, schemas, "
        "deletes, settings from headwater.kafka_topic_overview order by name",
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
        "select headwater.kafka_create_topic(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
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
    """The id of a topic that is made now, if the log is set to make missing ones."""
    return Call("select headwater.kafka_create_missing(%s, %s)", (name, partitions), only_value)


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
    """None leaves a setting as it is; a size of -1 removes the limit."""
    return Call(
        "select headwater.kafka_alter_topic(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
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
    """How many events went because newer ones of their key are there, and whether there is no more to do by now."""
    return Call("select compacted, done from headwater.kafka_compact()", (), lambda rows: (rows[0][0], rows[0][1]))


def kafka_new_producer() -> Call[int]:
    return Call("select headwater.kafka_number('headwater.kafka_producer_id')", (), only_value)


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
        PackedBytes(pack(joined("payloads"), 17)),
        packed_bytes(joined("keys")),
        packed_text(joined("types"), "type"),
        packed_text(joined("routing_keys"), "routing key"),
        packed_text(joined("headers"), "header"),
        packed_text(joined("content_types"), "content type"),
        _packed_integers(joined("produced_ms")) if any(batch.produced_ms for batch in batches) else None,
        packed_bytes(joined("record_headers")),
    )


def kafka_append(batches: Sequence[AppendBatch]) -> Call[list[Appended]]:
    """Append batches in order, each producer's batch once, in one transaction."""
    return Call(
        "select outcome, base_offset, appended_ms, after_position, epoch from headwater.kafka_append("
        "%s::int[], %s::int[], %s::int[], %s::bigint[], %s::int[], %s::int[], %b, %b, %b, %b, %b, %b, %b, %b)",
        (
            [batch.lane.topic_id for batch in batches],
            [batch.lane.partition for batch in batches],
            [len(batch.payloads) for batch in batches],
            [batch.producer_id for batch in batches],
            [batch.producer_epoch for batch in batches],
            [batch.first_sequence for batch in batches],
            *_record_params(batches),
        ),
        lambda rows: [Appended(*row) for row in rows],
    )


def kafka_bounds(lanes: Sequence[Lane]) -> Call[dict[Lane, Bounds]]:
    """Where lanes begin and end; one that does not exist is left out."""
    return Call(
        "select topic_id, lane, start_offset, end_offset from headwater.kafka_bounds(%s::int[], %s::int[])",
        ([lane.topic_id for lane in lanes], [lane.partition for lane in lanes]),
        lambda rows: {Lane(topic_id, lane): Bounds(start, end) for topic_id, lane, start, end in rows},
    )


def kafka_look(wanted: Sequence[Wanted]) -> Call[dict[int, Seen]]:
    """What a fetch must know before it reads, by the place in `wanted`; a lane that does not exist is left out."""
    kept = [(number, *one) for number, lane in enumerate(wanted, 1) for one in lane.kept]
    return Call(
        "select number, start_offset, end_offset, last_offset, last_position, last_ms, plain, page_epoch, kept_ms, "
        "max_offset, present "
        "from headwater.kafka_look("
        "%s::int[], %s::int[], %s::bigint[], %s::bigint[], %s::int[], %s::bigint[], "
        "%s::int[], %s::bigint[], %s::bigint[])",
        (
            [one.lane.topic_id for one in wanted],
            [one.lane.partition for one in wanted],
            [one.from_offset for one in wanted],
            [one.after_position for one in wanted],
            [one.max_events for one in wanted],
            [one.max_bytes for one in wanted],
            [number for number, _, _ in kept],
            [offset for _, offset, _ in kept],
            [position for _, _, position in kept],
        ),
        lambda rows: {
            number - 1: Seen(Bounds(start, end), None if last is None else Page(last, *page), kept_ms, limit, present)
            for number, start, end, last, *page, kept_ms, limit, present in rows
        },
    )


IN_EPOCH: Final = "where (select headwater.current_epoch()) = %s"
"""Records are read in a later statement than the bounds of their lane. If Postgres failed over in between, the offsets
may be those of other events: then there are no rows. A session is of one epoch, and so is its statement."""


def kafka_fetch_sequenced(
    lane: Lane, page: Page, *, from_offset: int, after_position: int, epoch: int
) -> Call[FetchedRows]:
    """The events of a page, if `epoch`, in which it was looked for, is still the present one; else none."""
    return Call(
        "select topic_offset, time_ms, key, payload, record_headers, parts "
        f"from headwater.kafka_fetch_sequenced(%s, %s, %s, %s, %s, %s) {IN_EPOCH}",
        (lane.topic_id, lane.partition, from_offset, page.last_offset, after_position, page.last_position, epoch),
        list,
    )


def kafka_fetch_plain(
    lane: Lane, page: Page, *, from_offset: int, after_position: int, max_part_bytes: int, epoch: int
) -> Call[PlainRows]:
    """The events of a plain page; fewer than its offsets: it is not plain, or `epoch` is not the present one."""
    return Call(
        f"select time_ms, key, payload from headwater.kafka_fetch_plain(%s, %s, %s, %s, %s, %s, %s) {IN_EPOCH}",
        (
            lane.topic_id,
            lane.partition,
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
    lane: Lane, *, from_offset: int, end_offset: int, max_events: int, max_bytes: int, epoch: int
) -> Call[FetchedRows]:
    return Call(
        "select topic_offset, time_ms, key, payload, record_headers, parts "
        f"from headwater.kafka_fetch_open(%s, %s, %s, %s, %s, %s) {IN_EPOCH}",
        (lane.topic_id, lane.partition, from_offset, end_offset, max_events, max_bytes, epoch),
        list,
    )


def kafka_offset_at(lane: Lane, at_ms: int | None, *, before_offset: int) -> Call[tuple[int, int] | None]:
    """The offset and time of the first event at or after a time; without one, of the event with the latest time."""
    return Call(
        "select topic_offset, time_ms from headwater.kafka_offset_at(%s, %s, %s, %s)",
        (lane.topic_id, lane.partition, at_ms, before_offset),
        lambda rows: (rows[0][0], rows[0][1]) if rows else None,
    )


def kafka_coordinator(group: str) -> Call[int | None]:
    """The node id of the broker that coordinates a group."""
    return Call("select headwater.kafka_coordinator(%s)", (group,), only_value)


def kafka_take_up(group: str, incarnation: int) -> Call[int | None]:
    """The generation to count on from; None: another broker coordinates the group."""
    return Call("select headwater.kafka_take_up(%s, %s)", (group, incarnation), only_value)


def kafka_note_generation(group: str, incarnation: int, *, generation: int, protocol_type: str) -> Call[bool]:
    return Call(
        "select headwater.kafka_note_generation(%s, %s, %s, %s)",
        (group, incarnation, generation, protocol_type),
        only_value,
    )


def _offset_params(offsets: Sequence[OffsetToCommit]) -> tuple[list[Any], ...]:
    return (
        [one.lane.topic_id for one in offsets],
        [one.lane.partition for one in offsets],
        [one.offset for one in offsets],
        [one.leader_epoch for one in offsets],
        [one.metadata for one in offsets],
    )


def kafka_commit_offsets(group: str, incarnation: int, offsets: Sequence[OffsetToCommit]) -> Call[bool]:
    """False: the broker does not coordinate the group any more, and nothing was written."""
    return Call(
        "select headwater.kafka_commit_offsets(%s, %s, %s::int[], %s::int[], %s::bigint[], %s::int[], %s::text[])",
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


def kafka_forget_offsets(group: str, incarnation: int, lanes: Sequence[Lane]) -> Call[bool]:
    return Call(
        "select headwater.kafka_forget_offsets(%s, %s, %s::int[], %s::int[])",
        (group, incarnation, [lane.topic_id for lane in lanes], [lane.partition for lane in lanes]),
        only_value,
    )


def kafka_delete_group(group: str, incarnation: int) -> Call[bool]:
    return Call("select headwater.kafka_delete_group(%s, %s)", (group, incarnation), only_value)


def kafka_note_alive(groups: Sequence[str], incarnation: int) -> Call[None]:
    """These groups have members: their offsets do not expire."""
    return Call("select headwater.kafka_note_alive(%s::text[], %s)", (list(groups), incarnation), nothing)


def kafka_groups(incarnation: int) -> Call[list[tuple[str, str]]]:
    """The groups that a broker tells of, with their kind of protocol: those that it coordinates, and the first of the
    living also those that nobody does now."""
    return Call(
        # One that was only looked for has neither, and is none.
        "select g.name, g.protocol_type from headwater.kafka_group g where (g.generation > 0 "
        "or exists (select from headwater.kafka_offset o where o.group_name = g.name)) and (g.coordinator = %s "
        "or (not exists (select from headwater.kafka_live_broker b where b.incarnation = g.coordinator) "
        "and %s = (select b.incarnation from headwater.kafka_live_broker b order by b.node_id limit 1))) "
        "order by g.name",
        (incarnation, incarnation),
        lambda rows: [(name, protocol_type) for name, protocol_type in rows],
    )


def kafka_group_protocol(group: str) -> Call[str | None]:
    """The kind of protocol that a group had last; None: there is no such group."""
    return Call(
        "select g.protocol_type from headwater.kafka_group g where g.name = %s and (g.generation > 0 "
        "or exists (select from headwater.kafka_offset o where o.group_name = g.name))",
        (group,),
        lambda rows: rows[0][0] if rows else None,
    )


def kafka_init_transactions(
    transactional_id: str, *, timeout_ms: int, known_id: int, known_epoch: int
) -> Call[tuple[str, int, int]]:
    """The outcome, and the producer's id and epoch."""
    return Call(
        "select outcome, producer_id, epoch from headwater.kafka_init_transactions(%s, %s, %s, %s)",
        (transactional_id, timeout_ms, known_id, known_epoch),
        lambda rows: (rows[0][0], rows[0][1], rows[0][2]),
    )


def kafka_begin(transactional_id: str, producer_id: int, epoch: int) -> Call[str]:
    return Call("select headwater.kafka_begin(%s, %s, %s)", (transactional_id, producer_id, epoch), only_value)


def kafka_stage(transactional_id: str, batch: AppendBatch, *, may_begin: bool) -> Call[str]:
    """Put a batch aside for the open transaction of its producer, which it may begin."""
    return Call(
        "select headwater.kafka_stage(%s, %s, %s, %s, %s, %s, %s, %b, %b, %b, %b, %b, %b, %b, %b, %s)",
        (
            transactional_id,
            batch.lane.topic_id,
            batch.lane.partition,
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
        "select headwater.kafka_stage_offsets("
        "%s, %s, %s, %s, %s::int[], %s::int[], %s::bigint[], %s::int[], %s::text[], %s)",
        (transactional_id, producer_id, epoch, group, *_offset_params(offsets), may_begin),
        only_value,
    )


def kafka_staged_offsets(group: str) -> Call[set[Lane]]:
    """The lanes of a group whose offsets are part of an open transaction."""
    return Call(
        "select topic_id, partition from headwater.kafka_staged_offset where group_name = %s",
        (group,),
        lambda rows: {Lane(*row) for row in rows},
    )


def kafka_end_transaction(
    transactional_id: str, producer_id: int, epoch: int, *, committed: bool, next_epoch: bool
) -> Call[tuple[str, int, int]]:
    """The outcome, and the id and epoch that the producer has from now on."""
    return Call(
        "select outcome, next_id, raised_epoch from headwater.kafka_end_transaction(%s, %s, %s, %s, %s)",
        (transactional_id, producer_id, epoch, committed, next_epoch),
        lambda rows: (rows[0][0], rows[0][1], rows[0][2]),
    )


def kafka_transactions() -> Call[list[OpenTransaction]]:
    return Call(
        "select t.transactional_id, t.producer_id, t.epoch, t.timeout_ms, "
        "(extract(epoch from t.began_at) * 1000)::bigint, t.last_outcome, "
        "array(select distinct s.topic_id::bigint << 16 | s.partition from headwater.kafka_staged s "
        "where s.producer_id = t.producer_id order by 1) from headwater.kafka_transaction t order by 1",
        (),
        lambda rows: [OpenTransaction._make((*row[:6], [Lane(o >> 16, o & 65535) for o in row[6]])) for row in rows],
    )


def kafka_producers(topic_id: int) -> Call[list[ActiveProducer]]:
    return Call(
        "select topic_id, partition, producer_id, epoch, last_sequences[cardinality(last_sequences)], "
        "(extract(epoch from updated_at) * 1000)::bigint from headwater.kafka_producer_lane where topic_id = %s "
        "order by partition, producer_id",
        (topic_id,),
        lambda rows: [ActiveProducer(Lane(row[0], row[1]), *row[2:]) for row in rows],
    )


def kafka_reap_transactions() -> Call[int]:
    return Call("select headwater.kafka_reap_transactions()", (), only_value)


def kafka_upkeep() -> Call[None]:
    return Call("select headwater.kafka_upkeep()", (), nothing)
