"""What administrators ask of the Kafka server: deleting records, sizes, settings, who is who."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from brokers import BrokerProcess
from raw_client import Raw, batch_of

import headwater
from headwater import InvalidRequest, PositionExpired
from headwater.calls import kafka_admin
from headwater.servers.kafka.api_keys import ApiKey
from headwater.servers.kafka.records import Columns, build_batch
from headwater.servers.kafka.wire import ErrorCode
from patience import PATIENCE_SECONDS

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import KafkaError, KafkaException, TopicPartition  # noqa: E402
from confluent_kafka.admin import AdminClient, NewTopic  # noqa: E402

_numbers = itertools.count(1)
EARLIEST, LATEST = -2, -1


@pytest.fixture
def raw(broker: BrokerProcess) -> Iterator[Raw]:
    connection = Raw(broker)
    yield connection
    connection.socket.close()


@pytest.fixture
def admin(broker: BrokerProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap})


@pytest.fixture
def topic(log: headwater.Headwater) -> str:
    """A sequenced topic of two partitions."""
    return log.create_topic(f"admin-{next(_numbers)}", kind="sequenced", partitions=2).name


def offset_of(raw: Raw, topic: str, which: int, partition: int = 0) -> int:
    asked = {"name": topic, "partitions": [{"partition_index": partition, "timestamp": which}]}
    found = raw.ask(ApiKey.LIST_OFFSETS, 7, {"replica_id": -1, "topics": [asked]}).topics[0].partitions[0]
    assert found.error_code == ErrorCode.none
    return int(found.offset)


def delete(raw: Raw, topic: str, offset: int, partition: int = 0) -> tuple[ErrorCode, int]:
    asked = {"name": topic, "partitions": [{"partition_index": partition, "offset": offset}]}
    (found,) = raw.ask(ApiKey.DELETE_RECORDS, 2, {"topics": [asked], "timeout": 1000}).topics[0].partitions
    return found.error_code, found.low_watermark


def payloads(log: headwater.Headwater, topic: str) -> list[bytes | None]:
    return [event.payload for event in log.read(topic, batch_size=1000)]


# Deleting records


def test_deleted_records_are_gone_for_everybody_and_the_partition_counts_on(
    raw: Raw, admin: AdminClient, log: headwater.Headwater, topic: str
) -> None:
    for partition in (0, 1):
        raw.produce(topic, batch_of(*(b"%d-%d" % (partition, n) for n in range(5))), partition=partition)
    where = TopicPartition(topic, 0, 3)
    assert admin.delete_records([where])[where].result(PATIENCE_SECONDS).low_watermark == 3
    assert (offset_of(raw, topic, EARLIEST), offset_of(raw, topic, LATEST)) == (3, 5)
    part = raw.fetch(topic, 2).responses[0].partitions[0]
    assert (part.error_code, part.log_start_offset) == (ErrorCode.offset_out_of_range, 3)
    assert raw.values(topic, 3) == [b"0-3", b"0-4"]
    # The other partition has all of its records, and so have those who read both.
    assert offset_of(raw, topic, EARLIEST, partition=1) == 0
    assert payloads(log, topic) == [b"0-3", b"0-4", *(b"1-%d" % n for n in range(5))]
    # Again, and less, changes nothing; -1 is all; more than there is, is refused.
    assert delete(raw, topic, 2) == (ErrorCode.none, 3)
    assert delete(raw, topic, 6) == (ErrorCode.offset_out_of_range, -1)
    assert delete(raw, topic, -2) == (ErrorCode.offset_out_of_range, -1)
    assert delete(raw, topic, -1) == (ErrorCode.none, 5)
    assert delete(raw, topic, 0, partition=7) == (ErrorCode.unknown_topic_or_partition, -1)
    assert (offset_of(raw, topic, EARLIEST), offset_of(raw, topic, LATEST)) == (5, 5)
    assert raw.produce(topic, batch_of(b"next")).base_offset == 5
    assert raw.values(topic, 5) == [b"next"]


def test_sql_deletes_as_kafka_does_and_who_reads_by_position_hears_of_it(
    raw: Raw, log: headwater.Headwater, connection: psycopg.Connection, topic: str
) -> None:
    first = log.publish(topic, b"a", event_id="one")
    assert first is not None
    log.publish(topic, b"b", key="k")
    (partition,) = connection.execute(
        "select partition from headwater_internal.event where event_id = 'one'"
    ).fetchone() or (0,)
    assert connection.execute("select headwater.delete_before(%s, %s, 1)", (topic, partition)).fetchone() == (1,)
    assert payloads(log, topic) == [b"b"]
    assert offset_of(raw, topic, EARLIEST, partition=partition) == 1
    with pytest.raises(PositionExpired):
        list(log.read(topic, after=first - 1))
    # The id went with its event.
    assert log.publish(topic, b"a", event_id="one") != first


def test_the_offsets_of_an_open_topic_that_are_deleted_are_positions(
    raw: Raw, log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    name = log.create_topic(f"open-{next(_numbers)}", partitions=2).name
    for number in range(12):
        log.publish(name, b"%d" % number, key=str(number))
    query = (
        "select e.partition, e.position from headwater_internal.event e join headwater_internal.topic t on t.id "
        "= e.topic_id "
    )
    found = connection.execute(query + "where t.name = %s order by 2", (name,)).fetchall()
    # Of the partition that the oldest event is not in, so that not all below is gone.
    partition = 1 - found[0][0]
    positions = [position for number, position in found if number == partition]
    assert delete(raw, name, positions[1], partition) == (ErrorCode.none, positions[1])
    assert offset_of(raw, name, EARLIEST, partition) == positions[1]
    assert offset_of(raw, name, EARLIEST, 1 - partition) == 1
    part = raw.fetch(name, positions[0], partition=partition).responses[0].partitions[0]
    assert (part.error_code, part.log_start_offset) == (ErrorCode.offset_out_of_range, positions[1])
    assert len(payloads(log, name)) == 11
    code, start = delete(raw, name, -1, partition)
    assert (code, start > positions[-1]) == (ErrorCode.none, True)
    assert len(payloads(log, name)) == 12 - len(positions)
    part = raw.fetch(name, start, partition=partition).responses[0].partitions[0]
    # The end of an open topic is the log's, where what was deleted here has been told since.
    end = log.state().stable + 1
    assert (part.error_code, part.records or b"", part.high_watermark) == (ErrorCode.none, b"", end)


def test_what_must_not_be_lost_is_not_deleted(raw: Raw, log: headwater.Headwater, topic: str) -> None:
    raw.produce(topic, batch_of(b"a", b"b"))
    log.set_cursor("careful", position=0, topics=topic, holds_retention=True)
    assert delete(raw, topic, 1) == (ErrorCode.policy_violation, -1)
    with pytest.raises(InvalidRequest, match="cursor careful"):
        log.run(kafka_admin.delete_before(topic, 0, 1))
    log.delete_cursor("careful")
    log.create_queue("careful-too", topic, holds_retention=True)
    assert delete(raw, topic, 1) == (ErrorCode.policy_violation, -1)
    log.delete_queue("careful-too")
    store = f"store-{next(_numbers)}"
    log.create_store(store).append([headwater.NewStoreEvent("Decided", {}, tags=["t:1"])])
    assert delete(raw, store, 1) == (ErrorCode.policy_violation, -1)
    raw.ask(ApiKey.CREATE_TOPICS, 5, {"topics": [{"name": f"c-{topic}", "num_partitions": 1, "replication_factor": 1,
                                "configs": [{"name": "cleanup.policy", "value": "compact"}]}]})  # fmt: skip
    assert delete(raw, f"c-{topic}", 0) == (ErrorCode.policy_violation, -1)
    assert delete(raw, topic, 1) == (ErrorCode.none, 1)


def test_a_partition_whose_records_are_deleted_while_others_write_loses_none_of_theirs(
    raw: Raw, broker: BrokerProcess, log: headwater.Headwater, topic: str
) -> None:
    other = Raw(broker)
    sent = 0
    for _ in range(20):
        for _ in range(5):
            raw.send_produce(topic, batch_of(b"%d" % sent), correlation=sent)
            sent += 1
        # All that is there now, while five more are on their way.
        code, start = delete(other, topic, -1)
        assert code == ErrorCode.none
        offsets = [raw.receive(ApiKey.PRODUCE, 9, correlation=n).responses[0].partition_responses[0].base_offset
                   for n in range(sent - 5, sent)]  # fmt: skip
        assert offsets == list(range(sent - 5, sent))
        assert payloads(log, topic) == [b"%d" % n for n in range(start, sent)]


# Size


def test_a_partition_that_is_larger_than_its_topic_says_loses_its_oldest_records(
    raw: Raw, admin: AdminClient, log: headwater.Headwater, topic: str
) -> None:
    for partition in (0, 1):
        raw.produce(topic, batch_of(*[b"x" * 100] * (10 * (1 - partition) + 3)), partition=partition)
    log.maintain()
    assert len(payloads(log, topic)) == 16
    _set(admin, topic, "retention.bytes", "500")
    assert _configs(admin, topic)["retention.bytes"] == "500"
    log.set_cursor("reads-slowly", position=0, topics=topic, holds_retention=True)
    log.maintain()
    assert len(payloads(log, topic)) == 16
    log.delete_cursor("reads-slowly")
    log.maintain()
    # The limit is that of a partition: the small one has all of its own.
    assert offset_of(raw, topic, EARLIEST) == 8
    assert offset_of(raw, topic, EARLIEST, partition=1) == 0
    assert len(payloads(log, topic)) == 8
    raw.produce(topic, batch_of(b"y" * 300, b"z" * 200))
    log.maintain()
    assert raw.values(topic, offset_of(raw, topic, EARLIEST)) == [b"y" * 300, b"z" * 200]
    _set(admin, topic, "retention.bytes", "-1")
    raw.produce(topic, batch_of(b"x" * 5000))
    log.maintain()
    assert offset_of(raw, topic, EARLIEST) == 13
    # A partition that may hold nothing goes on counting.
    _set(admin, topic, "retention.bytes", "0")
    log.maintain()
    assert payloads(log, topic) == []
    assert raw.produce(topic, batch_of(b"on")).base_offset == 16


def test_the_size_of_a_partition_is_told_as_it_is(
    raw: Raw, log: headwater.Headwater, connection: psycopg.Connection, topic: str
) -> None:
    def sizes() -> list[int]:
        (directory,) = raw.ask(
            ApiKey.DESCRIBE_LOG_DIRS, 4, {"topics": [{"topic": topic, "partitions": [0, 1]}]}
        ).results
        (found,) = directory.topics
        return [one.partition_size for one in sorted(found.partitions, key=lambda one: one.partition_index)]

    assert sizes() == [0, 0]
    raw.produce(topic, batch_of(b"x" * 100, b"x" * 50))
    assert sizes() == [150, 0]
    log.publish(topic, b"y" * 30, key="k")
    (partition,) = connection.execute("select partition from headwater_internal.event where key = 'k'").fetchone() or (
        0,
    )
    assert sizes() == [150 + 31 * (partition == 0), 31 * (partition == 1)]
    assert delete(raw, topic, 1) == (ErrorCode.none, 1)
    assert sizes() == [50 + 31 * (partition == 0), 31 * (partition == 1)]
    # What was deleted before it was measured is not counted twice.
    raw.produce(topic, batch_of(b"z" * 7))
    delete(raw, topic, -1)
    assert sizes() == [0, 31 * (partition == 1)]
    everything = raw.ask(ApiKey.DESCRIBE_LOG_DIRS, 4, {"topics": None}).results[0].topics
    assert topic in [one.name for one in everything]


# Settings


def _configs(admin: AdminClient, topic: str) -> dict[str, str]:
    resource = confluent.admin.ConfigResource(confluent.admin.ConfigResource.Type.TOPIC, topic)
    return {
        name: one.value for name, one in admin.describe_configs([resource])[resource].result(PATIENCE_SECONDS).items()
    }


def _set(admin: AdminClient, topic: str, name: str, value: str | None, operation: str = "SET") -> None:
    entry = confluent.admin.ConfigEntry(name, value, incremental_operation=confluent.admin.AlterConfigOpType[operation])
    change = confluent.admin.ConfigResource(
        confluent.admin.ConfigResource.Type.TOPIC, topic, incremental_configs=[entry]
    )
    admin.incremental_alter_configs([change])[change].result(PATIENCE_SECONDS)


def test_settings_are_added_to_taken_from_and_changed_all_or_none(admin: AdminClient, topic: str) -> None:
    _set(admin, topic, "retention.ms", "60000")
    _set(admin, topic, "cleanup.policy", "compact", "APPEND")
    assert _configs(admin, topic)["cleanup.policy"] == "compact,delete"
    _set(admin, topic, "cleanup.policy", "compact", "SUBTRACT")
    assert (_configs(admin, topic)["cleanup.policy"], _configs(admin, topic)["retention.ms"]) == ("delete", "60000")
    for name, value, operation in (
        ("retention.ms", "5", "APPEND"),
        ("retention.bytes", "-2", "SET"),
        ("retention.bytes", "many", "SET"),
        ("cleanup.policy", "delete", "SUBTRACT"),
    ):
        with pytest.raises(KafkaException) as refused:
            _set(admin, topic, name, value, operation)
        assert refused.value.args[0].code() == KafkaError.INVALID_CONFIG
    before = _configs(admin, topic)
    entries: list[Any] = [
        confluent.admin.ConfigEntry(name, value, incremental_operation=confluent.admin.AlterConfigOpType.SET)
        for name, value in (("compression.type", "zstd"), ("max.message.bytes", "999999999"))
    ]
    change = confluent.admin.ConfigResource(
        confluent.admin.ConfigResource.Type.TOPIC, topic, incremental_configs=entries
    )
    with pytest.raises(KafkaException):
        admin.incremental_alter_configs([change])[change].result(PATIENCE_SECONDS)
    assert _configs(admin, topic) == before
    _set(admin, topic, "retention.ms", None, "DELETE")
    assert _configs(admin, topic)["retention.ms"] == "-1"


def test_the_older_way_to_change_settings_gives_the_others_their_defaults(
    raw: Raw, admin: AdminClient, topic: str
) -> None:
    for name, value in (("retention.ms", "60000"), ("retention.bytes", "99"), ("delete.retention.ms", "7")):
        _set(admin, topic, name, value)
    _set(admin, topic, "cleanup.policy", "compact,delete")
    resource = {"resource_type": 2, "resource_name": topic, "configs": [{"name": "retention.ms", "value": "5000"}]}
    (answer,) = raw.ask(ApiKey.ALTER_CONFIGS, 2, {"resources": [resource]}).responses
    assert answer.error_code == ErrorCode.none
    found = _configs(admin, topic)
    assert [found[name] for name in ("retention.ms", "retention.bytes", "delete.retention.ms", "cleanup.policy")] == [
        "5000", "-1", "86400000", "delete",
    ]  # fmt: skip


def test_settings_that_mean_nothing_here_are_taken_told_and_forgotten(admin: AdminClient) -> None:
    name = f"settings-{next(_numbers)}"
    given = {"segment.ms": "60000", "min.insync.replicas": "2", "min.cleanable.dirty.ratio": "0.1"}
    admin.create_topics([NewTopic(name, 1, 1, config=given)])[name].result(PATIENCE_SECONDS)
    told = _configs(admin, name)
    assert {one: told[one] for one in given} == given
    _set(admin, name, "flush.ms", "5")
    _set(admin, name, "segment.ms", None, "DELETE")
    told = _configs(admin, name)
    assert (told["flush.ms"], told["segment.ms"], told["min.insync.replicas"]) == ("5", "604800000", "2")
    with pytest.raises(KafkaException) as refused:
        _set(admin, name, "segment.bytes", "much")
    assert refused.value.args[0].code() == KafkaError.INVALID_CONFIG


def test_a_fetch_below_what_compaction_left_goes_on_after_the_gap(
    raw: Raw, admin: AdminClient, log: headwater.Headwater, topic: str
) -> None:
    _set(admin, topic, "cleanup.policy", "compact,delete")
    for value in (b"0", b"1", b"2", b"3"):
        columns = Columns([1], [b"k"], [value], [None])
        assert raw.produce(topic, build_batch([0], columns)).error_code == ErrorCode.none
    assert delete(raw, topic, 1) == (ErrorCode.none, 1)
    assert log.run(kafka_admin.clean_up(topic)).compacted == 2
    for policy in ("compact,delete", "delete"):
        _set(admin, topic, "cleanup.policy", policy)
        assert (offset_of(raw, topic, EARLIEST), offset_of(raw, topic, LATEST)) == (1, 4)
        assert raw.values(topic, 1) == [b"3"]


# Looking around


def test_brokers_tell_their_settings_and_do_not_change_them(raw: Raw, topic: str) -> None:
    def broker_settings(name: str) -> Any:
        asked = {"resource_type": 4, "resource_name": name, "configuration_keys": None}
        return raw.ask(ApiKey.DESCRIBE_CONFIGS, 4, {"resources": [asked]}).results[0]

    told = broker_settings("1")
    assert {one.name: (one.value, one.read_only) for one in told.configs}["node.id"] == ("1", True)
    assert (broker_settings("").error_code, broker_settings("").configs) == (ErrorCode.none, ())
    assert broker_settings("99").error_code == ErrorCode.invalid_request
    for api, version in ((33, 2), (44, 1)):
        change = {"name": "num.partitions", "value": "9", "config_operation": 0}
        asked = {"resource_type": 4, "resource_name": "1", "configs": [change]}
        (answer,) = raw.ask(api, version, {"resources": [asked]}).responses
        assert (answer.error_code, "start" in (answer.error_message or "")) == (ErrorCode.invalid_request, True)


def test_what_there_is_to_configure_is_listed(raw: Raw, topic: str) -> None:
    raw.ask(ApiKey.METADATA, 12, {"topics": [{"name": topic}]})
    listed = {
        (one.resource_type, one.resource_name) for one in raw.ask(ApiKey.LIST_CONFIG_RESOURCES, 1, {}).config_resources
    }
    assert {(2, topic), (4, "1")} <= listed
    only = raw.ask(ApiKey.LIST_CONFIG_RESOURCES, 1, {"resource_types": [4]}).config_resources
    assert [(one.resource_type, one.resource_name) for one in only] == [(4, "1")]
    assert raw.ask(ApiKey.LIST_CONFIG_RESOURCES, 1, {"resource_types": [32]}).config_resources == ()
    assert (
        raw.ask(ApiKey.LIST_CONFIG_RESOURCES, 1, {"resource_types": [77]}).error_code == ErrorCode.unsupported_version
    )
    assert raw.ask(ApiKey.LIST_CONFIG_RESOURCES, 0, {}).config_resources == ()


def test_there_is_nothing_to_elect_to_move_and_no_quota(raw: Raw, topic: str) -> None:
    asked = {"topic_partitions": [{"topic": topic, "partitions": [0, 5]}], "timeout": 1000}
    (answer,) = raw.ask(ApiKey.ELECT_LEADERS, 2, asked).replica_election_results
    assert [one.error_code for one in answer.partition_result] == [
        ErrorCode.election_not_needed,
        ErrorCode.unknown_topic_or_partition,
    ]
    assert raw.ask(ApiKey.ELECT_LEADERS, 2, {"topic_partitions": None, "timeout": 1000}).replica_election_results == ()
    assert raw.ask(ApiKey.LIST_PARTITION_REASSIGNMENTS, 0, {"topics": None, "timeout": 1000}).topics == ()
    # Not null, which the Java client cannot read.
    assert raw.ask(ApiKey.DESCRIBE_CLIENT_QUOTAS, 1, {"components": [], "strict": False}).entries == ()


def test_a_group_that_nobody_has_is_looked_for_described_and_deleted_without_being_made(
    raw: Raw, connection: psycopg.Connection
) -> None:
    name = f"nobodys-{next(_numbers)}"
    found = raw.ask(ApiKey.FIND_COORDINATOR, 3, {"key": name, "key_type": 0})
    assert (found.error_code, found.node_id > 0) == (ErrorCode.none, True)
    (described,) = raw.ask(ApiKey.DESCRIBE_GROUPS, 5, {"groups": [name]}).groups
    assert (described.error_code, described.group_state) == (ErrorCode.none, "Dead")
    (described,) = raw.ask(ApiKey.DESCRIBE_GROUPS, 6, {"groups": [name]}).groups
    assert described.error_code == ErrorCode.group_id_not_found
    (deleted,) = raw.ask(ApiKey.DELETE_GROUPS, 2, {"groups_names": [name]}).results
    assert deleted.error_code == ErrorCode.group_id_not_found
    assert raw.ask(ApiKey.OFFSET_DELETE, 0, {"group_id": name, "topics": []}).error_code == ErrorCode.group_id_not_found
    assert connection.execute("select from headwater_internal.kafka_group where name = %s", (name,)).fetchone() is None


def test_kafka_python_administers_what_librdkafka_cannot(broker: BrokerProcess, topic: str) -> None:
    kafka = pytest.importorskip("kafka")
    admin = kafka.KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    try:
        producer = kafka.KafkaProducer(bootstrap_servers=broker.bootstrap)
        for number in range(4):
            producer.send(topic, b"%d" % number, partition=1)
        producer.flush(PATIENCE_SECONDS)
        producer.close()
        partition = kafka.TopicPartition(topic, 1)
        assert admin.delete_records({partition: 3})[partition]["low_watermark"] == 3
        (directory,) = admin.describe_log_dirs()
        assert topic in str(directory)
    finally:
        admin.close()


def test_what_administrators_do_is_told_in_the_log_with_what_they_do(
    admin: AdminClient, raw: Raw, log: headwater.Headwater
) -> None:
    name = f"audited-{next(_numbers)}"
    admin.create_topics([NewTopic(name, 2, config={"retention.ms": "5000"})])[name].result(PATIENCE_SECONDS)
    _set(admin, name, "retention.ms", "6000")
    raw.produce(name, batch_of(b"1", b"2"))
    assert delete(raw, name, 1) == (ErrorCode.none, 1)
    # What is refused is not told.
    with pytest.raises(KafkaException):
        _set(admin, name, "retention.ms", "soon")
    admin.delete_topics([name])[name].result(PATIENCE_SECONDS)
    told = [event.data for event in log.read("headwater.audit") if event.data["subject"] == name]
    assert [(one["actor"], one["action"]) for one in told] == [
        ("everybody", f"topic.{verb}") for verb in ("create", "alter", "delete_records", "delete")
    ]
    assert told[0]["detail"] == {"partitions": 2, "retention.ms": "5000"}
    # And stays told.
    with pytest.raises(KafkaException, match="authorization"):
        admin.delete_topics(["headwater.audit"])["headwater.audit"].result(PATIENCE_SECONDS)
    with pytest.raises(KafkaException) as refused:
        _set(admin, "headwater.audit", "retention.ms", "1")
    assert refused.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
