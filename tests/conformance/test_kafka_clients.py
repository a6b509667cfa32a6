"""Do clients of others, as they come from PyPI, take the log for Kafka?"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from brokers import BrokerProcess

import headwater
from headwater import NewStoreEvent, Query
from headwater.calls import log as log_calls
from patience import PATIENCE_SECONDS

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition  # noqa: E402
from confluent_kafka.admin import AdminClient, ConfigEntry, ConfigResource, NewPartitions, NewTopic  # noqa: E402

_names = itertools.count()


@pytest.fixture(scope="module")
def broker(cluster: BrokerProcess) -> BrokerProcess:
    return cluster


@pytest.fixture
def admin(broker: BrokerProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap})


@pytest.fixture
def make_topic(admin: AdminClient) -> Callable[..., str]:
    def make(partitions: int = 1, **config: str) -> str:
        name = f"kafka-{next(_names)}"
        settings = {key.replace("_", "."): value for key, value in config.items()}
        admin.create_topics([NewTopic(name, partitions, 1, config=settings)])[name].result(PATIENCE_SECONDS)
        return name

    return make


def produce(broker: BrokerProcess, topic: str, values: list[bytes], **config: Any) -> list[tuple[int, int]]:
    """Produce values with librdkafka; returns partition and offset of each."""
    settings = {key.replace("_", "."): value for key, value in config.items()}
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5, **settings})
    landed: list[tuple[int, int]] = []

    def note(error: KafkaError | None, message: Any) -> None:
        assert error is None, error
        landed.append((message.partition(), message.offset()))

    for value in values:
        producer.produce(topic, value, key=value[:4], on_delivery=note)
        producer.poll(0)
    assert producer.flush(PATIENCE_SECONDS) == 0
    return landed


def consume(broker: BrokerProcess, topic: str, count: int, *, group: str | None = None, **config: Any) -> list[Any]:
    """The first messages of a topic, by a consumer group of librdkafka."""
    settings = {key.replace("_", "."): value for key, value in config.items()}
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": group or f"group-{next(_names)}",
            "auto.offset.reset": "earliest",
            **settings,
        }
    )
    consumer.subscribe([topic])
    try:
        return take(consumer, count)
    finally:
        consumer.close()


def take(consumer: Any, count: int) -> list[Any]:
    messages: list[Any] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(messages) < count:
        assert time.monotonic() < deadline, f"only {len(messages)} of {count} messages came"
        for message in consumer.consume(count - len(messages), timeout=0.5):
            assert message.error() is None, message.error()
            messages.append(message)
    return messages


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_librdkafka_gets_back_what_it_produced_with_every_codec(
    broker: BrokerProcess, make_topic: Callable[..., str], codec: str
) -> None:
    # Packed on the way in by the client, and on the way out by the broker.
    topic = make_topic(3, compression_type="uncompressed" if codec == "none" else codec)
    values = [b"%04d" % number + b"x" * (number % 300) for number in range(500)]
    landed = produce(broker, topic, values, compression_type=codec)
    offsets: dict[int, list[int]] = {}
    for partition, offset in landed:
        offsets.setdefault(partition, []).append(offset)
    assert all(sorted(found) == list(range(len(found))) for found in offsets.values())
    assert sorted(message.value() for message in consume(broker, topic, 500)) == sorted(values)


def test_keys_values_headers_and_times_come_back_to_the_bit(
    broker: BrokerProcess, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    headers = [("b", b"\x00\xff"), ("a", None), ("b", b""), ("a", "ü".encode())]
    records = [
        (None, None, None),
        (b"", b"", []),
        (b"\x00\xfe", bytes(range(256)), headers),
        (b"k", b"x" * 900_000, [("headwater-type", b"t"), ("z", b"1")]),
    ]
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for number, (key, value, extra) in enumerate(records):
        producer.produce(topic, value, key=key, headers=extra, timestamp=1_600_000_000_123 + number)
    assert producer.flush(PATIENCE_SECONDS) == 0
    got = consume(broker, topic, len(records))
    assert [(m.key(), m.value(), m.headers() or None) for m in got] == [(k, v, h or None) for k, v, h in records]
    assert [m.timestamp() for m in got] == [(1, 1_600_000_000_123 + number) for number in range(len(records))]


def test_a_record_is_an_event_and_an_event_is_a_record(
    broker: BrokerProcess, make_topic: Callable[..., str], log: headwater.Headwater
) -> None:
    topic = make_topic()
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce(topic, b'{"id":1}', key=b"k", headers=[("headwater-type", b"made"), ("trace", b"abc")])
    assert producer.flush(PATIENCE_SECONDS) == 0
    log.publish(topic, {"id": 2}, key="k", type="paid", routing_key="a.b", headers={"n": 5}, event_id="e-2")
    first, second = log.read(topic)
    assert (first.key, first.data, first.type, first.headers) == (b"k", {"id": 1}, "made", {"trace": "abc"})
    assert (first.topic_offset, second.topic_offset) == (0, 1)
    got = consume(broker, topic, 2)
    assert [m.offset() for m in got] == [0, 1]
    assert got[0].headers() == [("headwater-type", b"made"), ("trace", b"abc")]
    assert got[1].value() == b'{"id":2}'
    assert got[1].headers() == [
        ("n", b"5"),
        ("headwater-type", b"paid"),
        ("headwater-routing-key", b"a.b"),
        ("headwater-content-type", b"application/json"),
        ("headwater-event-id", b"e-2"),
    ]


def test_an_open_topic_is_read_by_its_positions_and_not_written(
    broker: BrokerProcess, log: headwater.Headwater
) -> None:
    topic = log.create_topic(f"open-{next(_names)}", partitions=2).name
    positions = [log.publish(topic, {"n": number}, key=str(number)) for number in range(20)]
    got = consume(broker, topic, 20)
    assert sorted(m.offset() for m in got) == positions
    assert {m.partition() for m in got} == {0, 1}
    failed: list[Any] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce(topic, b"x", on_delivery=lambda error, message: failed.append(error))
    producer.flush(PATIENCE_SECONDS)
    assert failed[0].code() == KafkaError.INVALID_REQUEST


def test_an_event_store_is_read_and_not_written(broker: BrokerProcess, log: headwater.Headwater) -> None:
    name = f"store-{next(_names)}"
    store = log.create_store(name)
    store.append([NewStoreEvent("Decided", {"n": 1}, tags=["t:1"])])
    failed: list[Any] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    # What came in past its functions, its conditions would not see.
    producer.produce(name, b"x", on_delivery=lambda error, message: failed.append(error))
    producer.flush(PATIENCE_SECONDS)
    assert failed[0].code() == KafkaError.INVALID_REQUEST
    assert [message.value() for message in consume(broker, name, 1)] == [b'{"n":1}']
    assert store.count(Query()) == 1


def test_a_reader_that_waits_is_woken_by_a_producer_and_by_sql(
    broker: BrokerProcess, make_topic: Callable[..., str], log: headwater.Headwater
) -> None:
    topic = make_topic()
    # Without waking, a fetch would be held for half a minute, and the test give up.
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "w", "fetch.wait.max.ms": 60_000,
                         "socket.timeout.ms": PATIENCE_SECONDS * 1000})  # fmt: skip
    consumer.assign([TopicPartition(topic, 0, 0)])
    assert consumer.poll(0.3) is None
    produce(broker, topic, [b"one"])
    assert take(consumer, 1)[0].value() == b"one"
    log.publish(topic, b"two")
    assert take(consumer, 1)[0].value() == b"two"
    consumer.close()


def test_a_group_goes_on_from_what_it_committed(broker: BrokerProcess, make_topic: Callable[..., str]) -> None:
    topic = make_topic()
    produce(broker, topic, [b"%04d" % number for number in range(10)])
    assert len(consume(broker, topic, 10, group="goes-on")) == 10
    produce(broker, topic, [b"last"])
    assert [m.value() for m in consume(broker, topic, 1, group="goes-on")] == [b"last"]


def test_members_share_the_partitions_and_take_over_from_one_that_leaves(
    broker: BrokerProcess, make_topic: Callable[..., str], admin: AdminClient
) -> None:
    topic = make_topic(4)
    group = f"shared-{next(_names)}"
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "partition.assignment.strategy": "cooperative-sticky",
        "heartbeat.interval.ms": 300,
        "session.timeout.ms": 6000,
    }
    one, two = Consumer(settings), Consumer(settings)
    try:
        for consumer in (one, two):
            consumer.subscribe([topic])

        def shared() -> bool:
            one.poll(0.05)
            two.poll(0.05)
            return len(one.assignment()) == len(two.assignment()) == 2

        _until(shared)
        described = admin.describe_consumer_groups([group])[group].result(PATIENCE_SECONDS)
        assert (str(described.state), len(described.members)) == ("ConsumerGroupState.STABLE", 2)
        assert {a.partition for m in described.members for a in m.assignment.topic_partitions} == {0, 1, 2, 3}
        two.close()
        _until(lambda: one.poll(0.05) is None and len(one.assignment()) == 4)
    finally:
        one.close()
    assert group in {found.group_id for found in admin.list_consumer_groups().result(PATIENCE_SECONDS).valid}
    admin.delete_consumer_groups([group])[group].result(PATIENCE_SECONDS)
    assert group not in {found.group_id for found in admin.list_consumer_groups().result(PATIENCE_SECONDS).valid}


def test_members_of_the_server_side_protocol_share_and_take_over_too(
    broker: BrokerProcess, make_topic: Callable[..., str], admin: AdminClient
) -> None:
    topic = make_topic(4)
    produce(broker, topic, [b"%04d" % number for number in range(100)])
    group = f"assigned-{next(_names)}"
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": group,
        "auto.offset.reset": "earliest",
        "group.protocol": "consumer",
        "enable.auto.commit": False,
    }
    one, two = Consumer(settings), Consumer(settings)
    try:
        one.subscribe([topic])
        assert len(take(one, 100)) == 100
        one.commit(asynchronous=False)
        two.subscribe([topic])

        def shared() -> bool:
            assert one.poll(0.05) is None
            assert two.poll(0.05) is None
            return len(one.assignment()) == len(two.assignment()) == 2

        _until(shared)
        described = admin.describe_consumer_groups([group])[group].result(PATIENCE_SECONDS)
        assert len(described.members) == 2
        with pytest.raises(AssertionError, match="INCONSISTENT_GROUP_PROTOCOL"):
            consume(broker, topic, 1, group=group)
        one.close()
        _until(lambda: two.poll(0.05) is None and len(two.assignment()) == 4)
        produce(broker, topic, [b"more"])
        assert [message.value() for message in take(two, 1)] == [b"more"]
    finally:
        two.close()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_static_member_that_comes_back_gets_what_it_had_and_nobody_else_notices(
    broker: BrokerProcess, make_topic: Callable[..., str], protocol: str
) -> None:
    topic = make_topic(4)
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": f"static-{next(_names)}",
        "group.protocol": protocol,
        "auto.offset.reset": "earliest",
    }
    changes: list[str] = []
    one = Consumer(settings)
    two = Consumer({**settings, "group.instance.id": "two"})
    try:
        one.subscribe([topic], on_revoke=lambda *_: changes.append("revoked"))
        two.subscribe([topic])

        def shared() -> bool:
            one.poll(0.05)
            two.poll(0.05)
            return len(one.assignment()) == len(two.assignment()) == 2

        _until(shared)
        had = {part.partition for part in two.assignment()}
        changes.clear()
        two.close()
        assert one.poll(0.3) is None
        two = Consumer({**settings, "group.instance.id": "two"})
        two.subscribe([topic])
        _until(shared)
        assert {part.partition for part in two.assignment()} == had
        assert changes == []
    finally:
        one.close()
        two.close()


def _until(question: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not question():
        assert time.monotonic() < deadline


def test_topics_are_made_changed_and_deleted(
    admin: AdminClient, make_topic: Callable[..., str], connection: psycopg.Connection
) -> None:
    topic = make_topic(2, retention_ms="60000")
    with pytest.raises(confluent.KafkaException) as exists:
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(PATIENCE_SECONDS)
    assert exists.value.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    found = admin.describe_configs([resource])[resource].result(PATIENCE_SECONDS)
    assert (found["retention.ms"].value, found["cleanup.policy"].value) == ("60000", "delete")
    change = ConfigResource(
        ConfigResource.Type.TOPIC,
        topic,
        incremental_configs=[
            ConfigEntry("retention.ms", "-1", incremental_operation=confluent.admin.AlterConfigOpType.SET),
            ConfigEntry("max.message.bytes", "5000", incremental_operation=confluent.admin.AlterConfigOpType.SET),
        ],
    )
    admin.incremental_alter_configs([change])[change].result(PATIENCE_SECONDS)
    found = admin.describe_configs([resource])[resource].result(PATIENCE_SECONDS)
    assert (found["retention.ms"].value, found["max.message.bytes"].value) == ("-1", "5000")
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(PATIENCE_SECONDS)
    assert len(admin.list_topics(topic, timeout=PATIENCE_SECONDS).topics[topic].partitions) == 3
    row = connection.execute(
        "select kind, partitions, retention, max_payload_bytes from headwater_internal.topic where name = %s", (topic,)
    ).fetchone()
    assert row == ("sequenced", 3, None, 5000)
    admin.delete_topics([topic])[topic].result(PATIENCE_SECONDS)
    assert topic not in admin.list_topics(timeout=PATIENCE_SECONDS).topics
    bad = admin.create_topics([NewTopic("bad", 1, 1, config={"cleanup.policy": "shrink"})])["bad"]
    with pytest.raises(confluent.KafkaException) as refused:
        bad.result(PATIENCE_SECONDS)
    assert refused.value.args[0].code() == KafkaError.INVALID_CONFIG


def test_a_compacted_topic_keeps_the_newest_of_each_key(
    broker: BrokerProcess,
    make_topic: Callable[..., str],
    log: headwater.Headwater,
    connection: psycopg.Connection,
    until: Callable[[Callable[[], bool]], bool],
) -> None:
    topic = make_topic(1, cleanup_policy="compact", delete_retention_ms="0")
    codes: list[Any] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap})

    def send(*records: tuple[bytes | None, bytes | None]) -> None:
        for key, value in records:
            producer.produce(topic, value, key=key, on_delivery=lambda e, m: codes.append(e and e.code()))
        assert producer.flush(PATIENCE_SECONDS) == 0

    def compact() -> list[tuple[int, bytes, bytes | None]]:
        connection.execute("select headwater_internal.kafka_compact()")
        return [(e.topic_offset or 0, e.key or b"", e.payload) for e in log.read(topic)]

    log.set_cursor("careful", position=0, topics=topic, holds_retention=True)
    send((b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"c", b"1"), (b"b", None), (b"a", b"3"))
    # Somebody who must see every event has not yet.
    assert len(compact()) == 6
    log.delete_cursor("careful")
    # Until: compaction leaves the topic alone while a broker compacts, or while a publisher of the log is open.
    until(lambda: compact() == [(3, b"c", b"1"), (5, b"a", b"3")])
    assert [(m.offset(), m.key(), m.value()) for m in consume(broker, topic, 2)] == compact()
    # A reader that stands where events were goes on after the gap.
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "x", "auto.offset.reset": "error"})
    for offset, found in ((0, 3), (4, 5)):
        consumer.assign([TopicPartition(topic, 0, offset)])
        assert take(consumer, 1)[0].offset() == found
    consumer.close()
    # The last one stays, whatever it is: the partition counts on from it.
    send((b"c", None))
    until(lambda: compact() == [(5, b"a", b"3"), (6, b"c", None)])
    send((b"d", b"1"))
    until(lambda: compact() == [(5, b"a", b"3"), (7, b"d", b"1")])
    assert codes == [None] * 8
    send((None, b"of no key"))
    assert codes[-1] == KafkaError.INVALID_RECORD


def test_a_batch_above_the_limit_is_refused_and_others_are_not(
    broker: BrokerProcess, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(1, max_message_bytes="2000")
    codes: list[Any] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0})
    for size in (100, 3000, 200):
        producer.produce(topic, b"x" * size, on_delivery=lambda e, m: codes.append(e and e.code()))
        producer.flush(PATIENCE_SECONDS)
    assert codes == [None, KafkaError.MSG_SIZE_TOO_LARGE, None]


def test_offsets_are_found_by_time_and_reading_beyond_the_end_is_refused(
    broker: BrokerProcess, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for time_ms in (3000, 1000, 2000, 5000):
        producer.produce(topic, b"x", timestamp=time_ms)
    producer.flush(PATIENCE_SECONDS)
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "times", "auto.offset.reset": "error"})

    def at(time_ms: int) -> int:
        (found,) = consumer.offsets_for_times([TopicPartition(topic, 0, time_ms)], timeout=PATIENCE_SECONDS)
        return int(found.offset)

    assert [at(1), at(3000), at(3001), at(5001)] == [0, 0, 3, -1]
    assert consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=PATIENCE_SECONDS) == (0, 4)
    consumer.assign([TopicPartition(topic, 0, 99)])
    message = None
    deadline = time.monotonic() + PATIENCE_SECONDS
    while message is None:
        assert time.monotonic() < deadline
        message = consumer.poll(1)
    assert message.error().code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
    consumer.close()


def test_the_logs_own_time_is_told_where_the_topic_says_so(
    broker: BrokerProcess, make_topic: Callable[..., str]
) -> None:
    topic = make_topic(1, message_timestamp_type="LogAppendTime")
    before = int(time.time() * 1000) - 1
    told: list[Any] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": "all"})
    for _ in range(3):
        producer.produce(topic, b"x", timestamp=7, on_delivery=lambda e, m: told.append(m.timestamp()))
        producer.flush(PATIENCE_SECONDS)
    got = [m.timestamp() for m in consume(broker, topic, 3)]
    assert all(kind == 2 and before <= time_ms for kind, time_ms in got)
    assert [time_ms for _, time_ms in got] == [time_ms for _, time_ms in told]


def test_unknown_topics_are_made_only_if_the_log_says_so(broker: BrokerProcess, log: headwater.Headwater) -> None:
    failed: list[Any] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap, "message.timeout.ms": 2000,
                         "topic.metadata.propagation.max.ms": 500})  # fmt: skip
    producer.produce("nobody-made-it", b"x", on_delivery=lambda error, message: failed.append(error))
    producer.flush(PATIENCE_SECONDS)
    assert failed[0] is not None
    log.change_settings(auto_create_topics=True)
    try:
        produce(broker, "made-by-need", [b"x"])
        assert log.run(log_calls.find_topic("made-by-need")).kind == "sequenced"
    finally:
        log.change_settings(auto_create_topics=False)


@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_kafka_python_produces_and_consumes(
    broker: BrokerProcess, make_topic: Callable[..., str], acks: int | str
) -> None:
    kafka = pytest.importorskip("kafka")
    topic = make_topic(2)
    producer = kafka.KafkaProducer(
        bootstrap_servers=broker.bootstrap, acks=acks, enable_idempotence=acks == "all", compression_type="gzip"
    )
    sent = [producer.send(topic, value=b"%d" % n, key=b"k%d" % n, headers=[("h", b"1")]) for n in range(200)]
    producer.flush(PATIENCE_SECONDS)
    if acks != 0:
        assert sorted(one.get(PATIENCE_SECONDS).offset for one in sent)[0] == 0
    producer.close()
    consumer = kafka.KafkaConsumer(
        topic,
        bootstrap_servers=broker.bootstrap,
        group_id=f"kp-{next(_names)}",
        auto_offset_reset="earliest",
        consumer_timeout_ms=PATIENCE_SECONDS * 1000,
    )
    got = list(itertools.islice(consumer, 200))
    assert sorted(int(record.value) for record in got) == list(range(200))
    assert got[0].headers[0][0] == "h"
    consumer.commit()
    consumer.close()


def test_kafka_python_administers(broker: BrokerProcess, make_topic: Callable[..., str]) -> None:
    kafka = pytest.importorskip("kafka")
    topic = make_topic(2)
    admin = kafka.KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    assert topic in admin.list_topics()
    assert len(admin.describe_topics([topic])[0]["partitions"]) == 2
    assert admin.describe_cluster()["brokers"]
    admin.close()


def test_aiokafka_produces_and_consumes_in_a_group(broker: BrokerProcess, make_topic: Callable[..., str]) -> None:
    aiokafka = pytest.importorskip("aiokafka")
    topic = make_topic(2)

    async def run() -> list[int]:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=broker.bootstrap, enable_idempotence=True, compression_type="lz4"
        )
        await producer.start()
        try:
            for number in range(100):
                await producer.send(topic, b"%d" % number, key=b"%d" % number)
            await producer.flush()
        finally:
            await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(
            topic, bootstrap_servers=broker.bootstrap, group_id="aio", auto_offset_reset="earliest"
        )
        await consumer.start()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                return [int((await consumer.getone()).value) for _ in range(100)]
        finally:
            await consumer.stop()

    assert sorted(asyncio.run(run())) == list(range(100))
