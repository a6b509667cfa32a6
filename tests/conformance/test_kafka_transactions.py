"""Are transactions of producers all or nothing, for every client and for SQL, and are zombies fenced?"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from brokers import BrokerProcess
from raw_client import Raw

import headwater

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition  # noqa: E402

_names = itertools.count()
PATIENCE_SECONDS = 30


@pytest.fixture(scope="module")
def broker(cluster: BrokerProcess) -> BrokerProcess:
    return cluster


def producer_of(broker: BrokerProcess, name: str, **config: Any) -> Producer:
    settings = {key.replace("_", "."): value for key, value in config.items()}
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": name, **settings})
    producer.init_transactions(PATIENCE_SECONDS)
    return producer


def payloads(log: headwater.Headwater, topic: str) -> list[bytes | None]:
    return [event.payload for event in log.read(topic, batch_size=1000)]


@pytest.fixture
def topic(log: headwater.Headwater) -> str:
    return log.create_topic(f"txn-{next(_names)}", kind="sequenced", partitions=2).name


def read_committed(broker: BrokerProcess, topic: str, count: int) -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": f"rc-{next(_names)}",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
        }
    )
    consumer.subscribe([topic])
    found: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, found
        found += [message.value() for message in consumer.consume(count, timeout=0.5)]
    consumer.close()
    return found


def test_nothing_is_seen_of_an_open_or_aborted_transaction_and_all_of_a_committed_one(
    broker: BrokerProcess, log: headwater.Headwater, topic: str
) -> None:
    producer = producer_of(broker, f"t-{next(_names)}")
    producer.begin_transaction()
    for partition in (0, 1):
        producer.produce(topic, b"aborted", partition=partition)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert payloads(log, topic) == []
    producer.abort_transaction(PATIENCE_SECONDS)
    producer.begin_transaction()
    for number in range(4):
        producer.produce(topic, b"%d" % number, partition=number % 2, headers=[("h", b"\xff")])
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert payloads(log, topic) == []
    producer.commit_transaction(PATIENCE_SECONDS)
    assert sorted(payloads(log, topic)) == [b"0", b"1", b"2", b"3"]
    assert sorted(read_committed(broker, topic, 4)) == [b"0", b"1", b"2", b"3"]


def test_offsets_and_records_are_committed_together(
    broker: BrokerProcess, log: headwater.Headwater, topic: str
) -> None:
    source = log.create_topic(f"source-{next(_names)}", kind="sequenced").name
    for number in range(10):
        log.publish(source, b"%d" % number)
    group = f"rpw-{next(_names)}"
    consumer = Consumer(
        {"bootstrap.servers": broker.bootstrap, "group.id": group, "auto.offset.reset": "earliest",
         "enable.auto.commit": False, "isolation.level": "read_committed"}
    )  # fmt: skip
    consumer.subscribe([source])
    messages: list[Any] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(messages) < 10:
        assert time.monotonic() < deadline
        messages += consumer.consume(10 - len(messages), timeout=0.5)
    producer = producer_of(broker, f"t-{next(_names)}")

    def transfer(abort: bool) -> None:
        producer.begin_transaction()
        for message in messages:
            producer.produce(topic, b"out-" + message.value(), partition=0)
        producer.send_offsets_to_transaction(
            [TopicPartition(source, 0, 10)], consumer.consumer_group_metadata(), PATIENCE_SECONDS
        )
        if abort:
            producer.abort_transaction(PATIENCE_SECONDS)
        else:
            producer.commit_transaction(PATIENCE_SECONDS)

    def committed() -> int:
        (found,) = consumer.committed([TopicPartition(source, 0)], timeout=PATIENCE_SECONDS)
        return int(found.offset)

    transfer(abort=True)
    assert (committed(), payloads(log, topic)) == (-1001, [])
    transfer(abort=False)
    assert (committed(), len(payloads(log, topic))) == (10, 10)
    consumer.close()


def test_a_producer_of_the_same_name_fences_the_one_before_and_undoes_what_it_left(
    broker: BrokerProcess, log: headwater.Headwater, topic: str
) -> None:
    name = f"t-{next(_names)}"
    zombie = producer_of(broker, name)
    zombie.begin_transaction()
    zombie.produce(topic, b"zombie", partition=0)
    zombie.flush(PATIENCE_SECONDS)
    heir = producer_of(broker, name)
    with pytest.raises(KafkaException) as fenced:
        zombie.commit_transaction(PATIENCE_SECONDS)
    assert fenced.value.args[0].code() in (KafkaError._FENCED, KafkaError.PRODUCER_FENCED)
    heir.begin_transaction()
    heir.produce(topic, b"heir", partition=0)
    heir.commit_transaction(PATIENCE_SECONDS)
    assert payloads(log, topic) == [b"heir"]


def test_a_transaction_that_is_open_for_too_long_is_undone_and_its_producer_fenced(
    broker: BrokerProcess, log: headwater.Headwater, topic: str, connection: psycopg.Connection,
    until: Callable[[Callable[[], Any]], Any],
) -> None:  # fmt: skip
    name = f"t-{next(_names)}"
    producer = producer_of(broker, name, transaction_timeout_ms=1000, message_timeout_ms=1000)
    producer.begin_transaction()
    producer.produce(topic, b"late", partition=0)
    producer.flush(PATIENCE_SECONDS)
    staged = (
        "select count(*) from headwater.kafka_staged s join headwater.kafka_transaction t using (producer_id) "
        "where t.transactional_id = %s"
    )
    assert connection.execute(staged, (name,)).fetchone() == (1,)
    # While it is open, everybody can see what holds what.
    raw = Raw(broker)
    (seen,) = raw.ask(65, 0, {"transactional_ids": [name]}).transaction_states
    assert (seen.transaction_state, [(one.topic, one.partitions) for one in seen.topics]) == (
        "Ongoing",
        [(topic, (0,))],
    )
    ongoing = raw.ask(66, 1, {"state_filters": ["Ongoing"], "duration_filter": -1}).transaction_states
    assert name in [one.transactional_id for one in ongoing]
    (lane,) = raw.ask(61, 0, {"topics": [{"name": topic, "partition_indexes": [0]}]}).topics[0].partitions
    assert [one.producer_id for one in lane.active_producers] == [seen.producer_id]
    until(lambda: connection.execute(staged, (name,)).fetchone() == (0,))
    with pytest.raises(KafkaException):
        producer.commit_transaction(PATIENCE_SECONDS)
    assert payloads(log, topic) == []


def test_aiokafka_and_kafka_python_write_in_transactions_too(
    broker: BrokerProcess, log: headwater.Headwater, topic: str
) -> None:
    aiokafka = pytest.importorskip("aiokafka")
    kafka = pytest.importorskip("kafka")

    async def run() -> None:
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=broker.bootstrap, transactional_id=f"a-{next(_names)}")
        await producer.start()
        try:
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction():
                    await producer.send_and_wait(topic, b"aborted", partition=0)
                    raise ZeroDivisionError
            async with producer.transaction():
                await producer.send_and_wait(topic, b"aio", partition=0)
        finally:
            await producer.stop()

    asyncio.run(run())
    producer = kafka.KafkaProducer(bootstrap_servers=broker.bootstrap, transactional_id=f"k-{next(_names)}")
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(topic, b"kp", partition=0)
    producer.commit_transaction()
    producer.close()
    assert payloads(log, topic) == [b"aio", b"kp"]
