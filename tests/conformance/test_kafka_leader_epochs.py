"""Does every API of the Kafka protocol tell and check the epoch of the log as a leader epoch?"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from brokers import BrokerProcess
from raw_client import Raw, batch_of, batches

import headwater
from headwater.servers.kafka.api_keys import ApiKey
from headwater.servers.kafka.wire import ErrorCode

LATEST, EARLIEST = -1, -2


@pytest.fixture
def raw(broker: BrokerProcess) -> Iterator[Raw]:
    client = Raw(broker)
    yield client
    client.socket.close()


@pytest.fixture
def topics(log: headwater.Headwater) -> tuple[str, str]:
    """An open topic and a sequenced one."""
    name = uuid.uuid4().hex
    log.create_topic(f"open-{name}")
    log.create_topic(f"numbered-{name}", kind="sequenced")
    return f"open-{name}", f"numbered-{name}"


def begin_epoch(connection: psycopg.Connection[Any]) -> tuple[int, int]:
    """What a crash of Postgres does to its unlogged sequences: the next look begins an epoch. The old and the new."""
    old = connection.execute("select headwater.current_epoch()").fetchone()
    connection.execute("alter sequence headwater_internal.epoch_register restart")
    connection.execute("alter sequence headwater_internal.epoch_start restart")
    new = connection.execute("select headwater.current_epoch()").fetchone()
    assert old is not None
    assert new is not None
    assert new[0] > old[0]
    return old[0], new[0]


def metadata_epochs(raw: Raw, topic: str) -> set[int]:
    found = raw.ask(ApiKey.METADATA, 9, {"topics": [{"name": topic}]}).topics[0].partitions
    return {part.leader_epoch for part in found}


def fetch(raw: Raw, topic: str, offset: int, *, epoch: int = -1, version: int = 12) -> Any:
    part = {"partition": 0, "fetch_offset": offset, "current_leader_epoch": epoch, "partition_max_bytes": 1_000_000}
    fields = {
        "max_wait": 0,
        "min_bytes": 1,
        "max_bytes": 1_000_000,
        "topics": [{"topic": topic, "partitions": [part]}],
    }
    return raw.ask(ApiKey.FETCH, version, fields).responses[0].partitions[0]


def list_offset(raw: Raw, topic: str, timestamp: int, *, epoch: int = -1) -> Any:
    part = {"partition_index": 0, "current_leader_epoch": epoch, "timestamp": timestamp}
    fields = {"replica_id": -1, "topics": [{"name": topic, "partitions": [part]}]}
    return raw.ask(ApiKey.LIST_OFFSETS, 7, fields).topics[0].partitions[0]


def epoch_end(raw: Raw, topic: str, asked: int, *, epoch: int = -1) -> Any:
    part = {"partition": 0, "current_leader_epoch": epoch, "leader_epoch": asked}
    fields = {"replica_id": -1, "topics": [{"topic": topic, "partitions": [part]}]}
    return raw.ask(ApiKey.OFFSET_FOR_LEADER_EPOCH, 4, fields).topics[0].partitions[0]


def epochs_of_batches(records: bytes) -> list[int]:
    found = []
    while records:
        (_, length, epoch) = struct.unpack_from(">qii", records)
        found.append(epoch)
        records = records[12 + length :]
    return found


def publish(log: headwater.Headwater, topics: tuple[str, str], count: int) -> int:
    for topic in topics:
        log.publish_batch(topic, [headwater.NewEvent(number) for number in range(count)])
    return log.state().head


def test_metadata_tells_the_epoch_of_the_log(
    raw: Raw, topics: tuple[str, str], connection: psycopg.Connection[Any]
) -> None:
    _, present = begin_epoch(connection)
    for topic in topics:
        assert metadata_epochs(raw, topic) == {present}
        described = raw.ask(
            ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, {"topics": [{"name": topic}], "response_partition_limit": 10}
        )
        assert [part.leader_epoch for part in described.topics[0].partitions] == [present]


@pytest.mark.parametrize("api", ["fetch", "list offsets", "epoch end"])
def test_a_client_that_knows_another_epoch_is_refused(
    raw: Raw, topics: tuple[str, str], connection: psycopg.Connection[Any], api: str
) -> None:
    asks = {
        "fetch": lambda topic, epoch: fetch(raw, topic, list_offset(raw, topic, EARLIEST).offset, epoch=epoch),
        "list offsets": lambda topic, epoch: list_offset(raw, topic, LATEST, epoch=epoch),
        "epoch end": lambda topic, epoch: epoch_end(raw, topic, 0, epoch=epoch),
    }
    ask = asks[api]
    old, present = begin_epoch(connection)
    for topic in topics:
        assert ask(topic, old).error_code == ErrorCode.fenced_leader_epoch
        assert ask(topic, present + 1).error_code == ErrorCode.unknown_leader_epoch
        for epoch in (present, -1):
            assert ask(topic, epoch).error_code == ErrorCode.none


def test_a_fetch_that_waits_hears_of_a_new_epoch(
    raw: Raw, topics: tuple[str, str], connection: psycopg.Connection[Any]
) -> None:
    _, present = begin_epoch(connection)
    for topic in topics:
        end = list_offset(raw, topic, LATEST).offset
        part = {
            "partition": 0,
            "fetch_offset": end,
            "current_leader_epoch": present,
            "partition_max_bytes": 1000,
        }
        fields = {"max_wait": 80_000, "min_bytes": 1, "max_bytes": 1000}
        raw.send(ApiKey.FETCH, 12, {**fields, "topics": [{"topic": topic, "partitions": [part]}]})
        _, present = begin_epoch(connection)
        answer = raw.receive(ApiKey.FETCH, 12).responses[0].partitions[0]
        assert answer.error_code == ErrorCode.fenced_leader_epoch


def test_an_epoch_ends_where_the_next_begins(
    raw: Raw, log: headwater.Headwater, topics: tuple[str, str], connection: psycopg.Connection[Any]
) -> None:
    open_topic, numbered = topics
    head = publish(log, topics, 5)
    first, second = begin_epoch(connection)
    publish(log, topics, 3)
    end = list_offset(raw, open_topic, LATEST).offset
    wanted = {
        open_topic: {first: (first, head + 1), second: (second, end)},
        numbered: {first: (first, 5), second: (second, 8)},
    }
    for topic, ends in wanted.items():
        for asked, expected in ends.items():
            found = epoch_end(raw, topic, asked, epoch=second)
            assert (found.leader_epoch, found.end_offset) == expected
        unknown = epoch_end(raw, topic, second + 1)
        assert (unknown.error_code, unknown.leader_epoch, unknown.end_offset) == (ErrorCode.none, -1, -1)
    # One between two that are known, which a failover took with it.
    if second - first > 1:
        found = epoch_end(raw, numbered, second - 1)
        assert (found.leader_epoch, found.end_offset) == (first, 5)
    begin_epoch(connection)
    found = epoch_end(raw, numbered, second)
    # Nothing was published since.
    assert (found.leader_epoch, found.end_offset) == (second, 8)


def test_offsets_are_listed_with_the_epochs_of_their_events(
    raw: Raw, log: headwater.Headwater, topics: tuple[str, str], connection: psycopg.Connection[Any]
) -> None:
    for topic in topics:
        log.publish(topic, 1)
    first, second = begin_epoch(connection)
    for topic in topics:
        log.publish(topic, 2)
    # The first offset of the open topic is the first position of the log, whatever epoch that is of.
    earliest = [list_offset(raw, topic, EARLIEST) for topic in topics]
    assert all(one.leader_epoch <= first for one in earliest)
    assert earliest[1].leader_epoch == first
    for topic in topics:
        assert list_offset(raw, topic, LATEST).leader_epoch == second
        assert list_offset(raw, topic, 1).leader_epoch == first


def test_no_batch_of_records_spans_two_epochs(
    raw: Raw, log: headwater.Headwater, topics: tuple[str, str], connection: psycopg.Connection[Any]
) -> None:
    start = list_offset(raw, topics[0], LATEST).offset
    publish(log, topics, 4)
    first, second = begin_epoch(connection)
    publish(log, topics, 3)
    _, third = begin_epoch(connection)
    publish(log, topics, 2)
    for topic, offset in zip(topics, (start, 0), strict=True):
        found: list[tuple[int, int]] = []
        while sum(count for _, count in found) < 9:
            records = fetch(raw, topic, offset, epoch=third).records
            for epoch, batch in zip(epochs_of_batches(records), batches(records), strict=True):
                found.append((epoch, len(batch.values)))
            last = records
            while True:
                base, length = struct.unpack_from(">qi", last)
                offset = base + struct.unpack_from(">i", last, 23)[0] + 1
                last = last[12 + length :]
                if not last:
                    break
        assert found == [(first, 4), (second, 3), (third, 2)], topic


def test_a_batch_that_is_read_as_it_was_produced_has_its_epoch(
    raw: Raw, topics: tuple[str, str], connection: psycopg.Connection[Any]
) -> None:
    _, numbered = topics
    assert raw.produce(numbered, batch_of(b"a", b"b")).error_code == ErrorCode.none
    first, second = begin_epoch(connection)
    assert raw.produce(numbered, batch_of(b"c")).error_code == ErrorCode.none
    # Twice: from Postgres, and from what the broker remembers by then.
    for _ in range(2):
        assert epochs_of_batches(fetch(raw, numbered, 0).records)[0] == first
        assert epochs_of_batches(fetch(raw, numbered, 2).records) == [second]


def test_a_consumer_of_an_open_topic_between_its_end_and_the_head_waits(
    raw: Raw, dsn: str, log: headwater.Headwater, topics: tuple[str, str]
) -> None:
    open_topic, numbered = topics
    with psycopg.connect(dsn) as publisher:
        publisher.execute("select headwater.publish(%s, '1')", (open_topic,))
        log.publish(numbered, 1)
        head = log.state().head
        end = list_offset(raw, open_topic, LATEST).offset
        assert end <= head
        answer = fetch(raw, open_topic, head + 1)
        assert (answer.error_code, answer.records or b"") == (ErrorCode.none, b"")
        assert fetch(raw, open_topic, head + 2).error_code == ErrorCode.offset_out_of_range
        publisher.rollback()


def test_a_batch_of_an_open_topic_ends_at_its_last_record(
    raw: Raw, log: headwater.Headwater, topics: tuple[str, str]
) -> None:
    open_topic, numbered = topics
    start = list_offset(raw, open_topic, LATEST).offset
    position = log.publish(open_topic, 1)
    publish(log, (numbered, numbered), 20)
    answer = fetch(raw, open_topic, start)
    base, _ = struct.unpack_from(">qi", answer.records)
    (last_delta,) = struct.unpack_from(">i", answer.records, 23)
    assert answer.high_watermark > position + 1
    assert base + last_delta == position


def test_a_committed_offset_keeps_its_leader_epoch(
    raw: Raw, topics: tuple[str, str], connection: psycopg.Connection[Any], until: Callable[[Callable[[], Any]], Any]
) -> None:
    _, numbered = topics
    old, _ = begin_epoch(connection)
    group = uuid.uuid4().hex
    raw.ask(ApiKey.FIND_COORDINATOR, 3, {"key": group, "key_type": 0})
    part = {"partition_index": 0, "committed_offset": 0, "committed_leader_epoch": old, "committed_metadata": ""}
    fields = {"group_id": group, "generation_id_or_member_epoch": -1, "member_id": "", "group_instance_id": None}
    commit = {**fields, "topics": [{"name": numbered, "partitions": [part]}]}

    def is_committed() -> bool:
        code = raw.ask(ApiKey.OFFSET_COMMIT, 8, commit).topics[0].partitions[0].error_code
        # Until the broker has registered in the new epoch; a client tries again.
        assert code in (ErrorCode.none, ErrorCode.not_coordinator)
        return code == ErrorCode.none

    until(is_committed)
    asked = {"group_id": group, "topics": [{"name": numbered, "partition_indexes": [0]}], "require_stable": False}
    found = raw.ask(ApiKey.OFFSET_FETCH, 7, asked).topics[0].partitions[0]
    assert (found.committed_offset, found.committed_leader_epoch) == (0, old)


@pytest.mark.parametrize("transactional_id", [None, "t"])
def test_a_producer_id_is_not_issued_again_after_a_failover(
    raw: Raw, connection: psycopg.Connection[Any], transactional_id: str | None
) -> None:
    """Two producers of one id would take each other's records for repetitions of their own."""
    fields = {"transaction_timeout": 1000, "producer_id": -1, "producer_epoch": -1}
    ids = []
    for run in range(2):
        begin_epoch(connection)
        connection.execute("select setval('headwater_internal.kafka_producer_id', 1, false)")
        name = None if transactional_id is None else f"{transactional_id}-{uuid.uuid4().hex}-{run}"
        ids.append(raw.ask(ApiKey.INIT_PRODUCER_ID, 4, {**fields, "transactional_id": name}).producer_id)
    assert ids[0] != ids[1]


def test_a_reserved_topic_is_not_produced_to(
    raw: Raw, log: headwater.Headwater, connection: psycopg.Connection[Any]
) -> None:
    name = "headwater.audit"
    log.create_topic(name, kind="sequenced")
    assert raw.produce(name, batch_of(b"forged")).error_code == ErrorCode.topic_authorization_failed
    found = connection.execute("select id from headwater_internal.topic where name = %s", (name,)).fetchone()
    assert found is not None
    # Nor past a broker, by the function that it calls.
    appended = connection.execute(
        "select outcome from headwater_internal.kafka_append(array[%s::int], array[0], array[1], array[-1::bigint], "
        "array[-1], "
        "array[-1], array['forged'::bytea], null, null, null, null, null, null, null)",
        found,
    ).fetchone()
    assert appended == ("reserved",)
    with pytest.raises(psycopg.Error) as refused:
        connection.execute(
            "select headwater_internal.kafka_write(array[%s::int], array[0], array[1], array[0::bigint], now(), "
            "array['forged'::bytea], null, null, null, null, null, null, null)",
            found,
        )
    assert refused.value.sqlstate == "HW015"
