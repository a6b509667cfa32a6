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
from raw_client import Raw, batch_of

import headwater
from headwater.servers.kafka.api_keys import ApiKey
from headwater.servers.kafka.wire import ErrorCode
from patience import PATIENCE_SECONDS

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition  # noqa: E402

_names = itertools.count()


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
        "select count(*) from headwater_internal.kafka_staged s "
        "join headwater_internal.kafka_transactional_producer t using (producer_id) "
        "where t.transactional_id = %s"
    )
    assert connection.execute(staged, (name,)).fetchone() == (1,)
    # While it is open, everybody can see what holds what.
    raw = Raw(broker)
    (seen,) = raw.ask(ApiKey.DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [name]}).transaction_states
    assert (seen.transaction_state, [(one.topic, one.partitions) for one in seen.topics]) == (
        "Ongoing",
        [(topic, (0,))],
    )
    # Of all brokers, each of which a tool asks, one tells of it.
    ongoing = [
        one.transactional_id
        for address in broker.addresses
        for one in Raw(BrokerProcess(broker.process, [address]))
        .ask(ApiKey.LIST_TRANSACTIONS, 1, {"state_filters": ["Ongoing"], "duration_filter": -1})
        .transaction_states
    ]
    assert ongoing.count(name) == 1
    (partition,) = (
        raw.ask(ApiKey.DESCRIBE_PRODUCERS, 0, {"topics": [{"name": topic, "partition_indexes": [0]}]})
        .topics[0]
        .partitions
    )
    assert [one.producer_id for one in partition.active_producers] == [seen.producer_id]
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


def test_aiokafka_reads_processes_and_writes_in_one_transaction_while_its_group_has_members(
    broker: BrokerProcess, log: headwater.Headwater, topic: str
) -> None:
    aiokafka = pytest.importorskip("aiokafka")
    source = log.create_topic(f"source-{next(_names)}", kind="sequenced").name
    log.publish_many(source, [headwater.NewEvent(b"%d" % number) for number in range(5)])
    group, read = f"aio-{next(_names)}", aiokafka.TopicPartition(source, 0)

    async def run() -> int:
        consumer = aiokafka.AIOKafkaConsumer(
            source, bootstrap_servers=broker.bootstrap, group_id=group, enable_auto_commit=False,
            auto_offset_reset="earliest",
        )  # fmt: skip
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=broker.bootstrap, transactional_id=f"a-{next(_names)}")
        await consumer.start()
        await producer.start()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                messages = [await consumer.getone() for _ in range(5)]
                # Its versions say nothing of the member.
                async with producer.transaction():
                    for message in messages:
                        await producer.send(topic, b"out-" + message.value, partition=0)
                    await producer.send_offsets_to_transaction({read: 5}, group)
                return int(await consumer.committed(read))
        finally:
            await producer.stop()
            await consumer.stop()

    assert asyncio.run(run()) == 5
    assert payloads(log, topic) == [b"out-%d" % number for number in range(5)]


# Transactions with an epoch each (KIP-890), which begin with what is sent


class Transactional:
    """A producer that speaks the newest versions, one request at a time."""

    def __init__(self, broker: BrokerProcess, name: str, topic_id: Any) -> None:
        self.raw = Raw(broker)
        self.name = name
        self.topic_id = topic_id
        self.id, self.epoch = -1, -1

    def init(self, **fields: Any) -> ErrorCode:
        asked = {"transactional_id": self.name, "transaction_timeout": 60_000, "producer_id": -1, "producer_epoch": -1}
        answer = self.raw.ask(ApiKey.INIT_PRODUCER_ID, 5, {**asked, **fields})
        if answer.error_code == ErrorCode.none:
            self.id, self.epoch = answer.producer_id, answer.producer_epoch
        return answer.error_code

    def produce(self, value: bytes, *, sequence: int = 0, epoch: int | None = None, version: int = 13) -> ErrorCode:
        batch = batch_of(
            value, producer=self.id, epoch=self.epoch if epoch is None else epoch, sequence=sequence, transactional=True
        )
        data = {"topic_id": self.topic_id, "partition_data": [{"index": 0, "records": batch}]}
        asked = {"transactional_id": self.name, "acks": -1, "timeout": 1000, "topic_data": [data]}
        return self.raw.ask(ApiKey.PRODUCE, version, asked).responses[0].partition_responses[0].error_code

    def offsets(self, group: str, topic: str, offset: int) -> ErrorCode:
        part = {"partition_index": 0, "committed_offset": offset}
        asked = {"transactional_id": self.name, "group_id": group, "producer_id": self.id, "member_id": "",
                 "producer_epoch": self.epoch, "topics": [{"name": topic, "partitions": [part]}]}  # fmt: skip
        return self.raw.ask(ApiKey.TXN_OFFSET_COMMIT, 5, asked).topics[0].partitions[0].error_code

    def end(self, *, commit: bool, epoch: int | None = None, producer_id: int | None = None) -> Any:
        asked = {"transactional_id": self.name, "producer_id": self.id if producer_id is None else producer_id,
                 "producer_epoch": self.epoch if epoch is None else epoch, "committed": commit}  # fmt: skip
        answer = self.raw.ask(ApiKey.END_TXN, 5, asked)
        if answer.error_code == ErrorCode.none:
            self.id, self.epoch = answer.producer_id, answer.producer_epoch
        return answer


@pytest.fixture
def transactional(broker: BrokerProcess, topic: str) -> Transactional:
    (found,) = Raw(broker).ask(ApiKey.METADATA, 12, {"topics": [{"name": topic}]}).topics
    made = Transactional(broker, f"kip-{next(_names)}", found.topic_id)
    assert made.init() == ErrorCode.none
    return made


def committed_offset(raw: Raw, group: str, topic: str) -> int:
    asked = {"group_id": group, "topics": [{"name": topic, "partition_indexes": [0]}]}
    answer = raw.ask(ApiKey.OFFSET_FETCH, 8, {"groups": [asked], "require_stable": False})
    return int(answer.groups[0].topics[0].partitions[0].committed_offset)


def test_what_is_sent_begins_a_transaction_whose_end_raises_the_epoch(
    transactional: Transactional, log: headwater.Headwater, topic: str
) -> None:
    raw = transactional.raw
    features = raw.ask(
        ApiKey.API_VERSIONS, 4, {"client_software_name": "x", "client_software_version": "1"}
    ).finalized_features
    assert {one.name: one.max_version_level for one in features}["transaction.version"] == 2
    group = f"kip-group-{next(_names)}"
    first = transactional.epoch
    assert transactional.produce(b"one") == ErrorCode.none
    assert transactional.produce(b"two", sequence=1) == ErrorCode.none
    assert transactional.offsets(group, topic, 7) == ErrorCode.none
    assert (payloads(log, topic), committed_offset(raw, group, topic)) == ([], -1)
    assert transactional.end(commit=True).error_code == ErrorCode.none
    assert transactional.epoch == first + 1
    assert (payloads(log, topic), committed_offset(raw, group, topic)) == ([b"one", b"two"], 7)
    # Whoever did not hear the answer asks again, and hears the same; the opposite is refused.
    again = transactional.end(commit=True, epoch=first)
    assert (again.error_code, again.producer_epoch) == (ErrorCode.none, first + 1)
    assert transactional.end(commit=False, epoch=first).error_code == ErrorCode.invalid_txn_state
    # What comes late, of a transaction that has ended, becomes part of none.
    assert transactional.produce(b"late", sequence=2, epoch=first) == ErrorCode.invalid_producer_epoch
    # Offsets alone begin one too.
    assert transactional.offsets(group, topic, 9) == ErrorCode.none
    assert transactional.end(commit=True).error_code == ErrorCode.none
    assert (payloads(log, topic), committed_offset(raw, group, topic)) == ([b"one", b"two"], 9)


def test_an_abort_raises_the_epoch_even_of_a_transaction_nothing_of_which_arrived(
    transactional: Transactional, log: headwater.Headwater, topic: str
) -> None:
    first = transactional.epoch
    assert transactional.end(commit=True).error_code == ErrorCode.invalid_txn_state
    assert transactional.end(commit=False).error_code == ErrorCode.none
    assert transactional.epoch == first + 1
    # The record that was on its way when its producer gave up.
    assert transactional.produce(b"late", epoch=first) == ErrorCode.invalid_producer_epoch
    assert transactional.produce(b"undone") == ErrorCode.none
    assert transactional.end(commit=False).error_code == ErrorCode.none
    assert transactional.produce(b"done") == ErrorCode.none
    assert transactional.end(commit=True).error_code == ErrorCode.none
    assert payloads(log, topic) == [b"done"]
    # Before version 12 a transaction is begun by name.
    ended = {
        "transactional_id": transactional.name,
        "producer_id": transactional.id,
        "producer_epoch": transactional.epoch,
        "committed": True,
    }
    assert transactional.raw.ask(ApiKey.END_TXN, 4, ended).error_code == ErrorCode.none


def test_a_zombie_cannot_ask_for_the_epoch_of_its_heir(
    broker: BrokerProcess, transactional: Transactional, log: headwater.Headwater, topic: str
) -> None:
    assert transactional.produce(b"zombie") == ErrorCode.none
    heir = Transactional(broker, transactional.name, transactional.topic_id)
    assert heir.init() == ErrorCode.none
    assert heir.epoch == transactional.epoch + 1
    for commit in (True, False):
        assert transactional.end(commit=commit).error_code == ErrorCode.producer_fenced
    known = {"producer_id": transactional.id, "producer_epoch": transactional.epoch}
    assert transactional.init(**known) == ErrorCode.producer_fenced
    assert transactional.produce(b"zombie", sequence=1) == ErrorCode.invalid_producer_epoch
    assert heir.produce(b"heir") == ErrorCode.none
    # One that asks with its own epoch gets the next, and the same if it has to ask again.
    before = heir.epoch
    known = {"producer_id": heir.id, "producer_epoch": before}
    for _ in range(2):
        assert heir.init(**known) == ErrorCode.none
        assert heir.epoch == before + 1
    assert heir.produce(b"once more") == ErrorCode.none
    assert heir.end(commit=True).error_code == ErrorCode.none
    assert payloads(log, topic) == [b"once more"]


def test_after_its_last_epoch_a_producer_gets_another_id(
    transactional: Transactional, log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    connection.execute(
        "update headwater_internal.kafka_transactional_producer set epoch = 32766 where transactional_id = %s",
        (transactional.name,),
    )
    old, transactional.epoch = transactional.id, 32766
    assert transactional.produce(b"last") == ErrorCode.none
    assert transactional.end(commit=True).error_code == ErrorCode.none
    assert (transactional.id != old, transactional.epoch) == (True, 0)
    again = transactional.end(commit=True, producer_id=old, epoch=32766)
    assert (again.error_code, again.producer_id, again.producer_epoch) == (ErrorCode.none, transactional.id, 0)
    assert transactional.produce(b"first") == ErrorCode.none
    assert transactional.end(commit=True).error_code == ErrorCode.none
    assert payloads(log, topic) == [b"last", b"first"]
