"""Are records written once and read once when connections break and groups change, with any client and any number of
brokers?"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from brokers import BrokerProcess, broker_process
from cutting_proxy import PROXY_HOST, CuttingProxy

import headwater

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import Consumer, Producer, TopicPartition  # noqa: E402

_names = itertools.count()
PATIENCE_SECONDS = 20
PARTITIONS = 3
REFUSALS = (
    confluent.KafkaError.ILLEGAL_GENERATION,
    confluent.KafkaError.UNKNOWN_MEMBER_ID,
    confluent.KafkaError.REBALANCE_IN_PROGRESS,
    confluent.KafkaError.STALE_MEMBER_EPOCH,
    confluent.KafkaError._NO_OFFSET,
)


@pytest.fixture
def topic(log: headwater.Headwater) -> str:
    return log.create_topic(f"fault-{next(_names)}", kind="sequenced", partitions=PARTITIONS).name


def in_log(log: headwater.Headwater, topic: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
    for event in log.read(topic, batch_size=100_000):
        found[event.partition].append(int((event.payload or b"").split(b" ")[0]))
    return found


# Connections that break


@pytest.fixture(scope="module", params=[1, 3], ids=["one-broker", "three-brokers"])
def proxied(request: pytest.FixtureRequest, dsn: str) -> Iterator[list[str]]:
    with broker_process(dsn, "--processes", str(request.param), "--advertise", PROXY_HOST) as started:
        yield started.addresses


@pytest.fixture
def proxy(proxied: list[str]) -> Iterator[CuttingProxy]:
    ports = [int(address.rpartition(":")[2]) for address in proxied]
    with CuttingProxy(ports, seed=len(ports)).running() as running:
        yield running


def by_librdkafka(bootstrap: str, topic: str, values: list[bytes]) -> None:
    failed: list[Any] = []
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "batch.size": 1000,
            "linger.ms": 1,
            "reconnect.backoff.ms": 5,
            "reconnect.backoff.max.ms": 50,
            "retry.backoff.ms": 5,
            "retry.backoff.max.ms": 50,
            "message.timeout.ms": PATIENCE_SECONDS * 1000,
            "log_level": 0,
        }
    )
    for number, value in enumerate(values):
        producer.produce(topic, value, partition=number % PARTITIONS, on_delivery=lambda e, m: e and failed.append(e))
        producer.poll(0.0005)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert failed == []


def by_kafka_python(bootstrap: str, topic: str, values: list[bytes]) -> None:
    kafka = pytest.importorskip("kafka")
    producer = kafka.KafkaProducer(
        bootstrap_servers=bootstrap, enable_idempotence=True, batch_size=1000, linger_ms=1, retry_backoff_ms=20,
        reconnect_backoff_ms=5, reconnect_backoff_max_ms=50, delivery_timeout_ms=PATIENCE_SECONDS * 1000,
    )  # fmt: skip
    sent = [producer.send(topic, value, partition=number % PARTITIONS) for number, value in enumerate(values)]
    producer.flush(PATIENCE_SECONDS)
    for one in sent:
        one.get(PATIENCE_SECONDS)
    producer.close()


def by_aiokafka(bootstrap: str, topic: str, values: list[bytes]) -> None:
    aiokafka = pytest.importorskip("aiokafka")

    async def run() -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=bootstrap, enable_idempotence=True, max_batch_size=1000, linger_ms=1, retry_backoff_ms=20
        )
        await producer.start()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                sent = [
                    await producer.send(topic, value, partition=number % PARTITIONS)
                    for number, value in enumerate(values)
                ]
                await asyncio.gather(*sent)
        finally:
            await producer.stop()

    asyncio.run(run())


@pytest.mark.parametrize("produce", [by_librdkafka, by_kafka_python, by_aiokafka])
def test_an_idempotent_producer_whose_connections_break_writes_everything_once_and_in_order(
    proxy: CuttingProxy, proxied: list[str], produce: Any, log: headwater.Headwater, topic: str
) -> None:
    count = 1200
    produce(",".join(proxied), topic, [b"%d " % number + b"x" * 150 for number in range(count)])
    assert proxy.cuts > 5
    assert in_log(log, topic) == {p: list(range(p, count, PARTITIONS)) for p in range(PARTITIONS)}


# Groups that change


class Member(threading.Thread):
    """A consumer that commits what it has before it gives up a partition, until told to go."""

    def __init__(self, bootstrap: str, group: str, topic: str, taken: Counter[tuple[int, int]], **config: Any) -> None:
        super().__init__(daemon=True)
        self._topic = topic
        self._taken = taken
        self.leaving = threading.Event()
        self.settled = threading.Event()
        self.refused: set[int] = set()
        self.failure: BaseException | None = None
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                **config,
            }
        )
        self._places: dict[int, int] = {}

    def _commit(self, partitions: list[Any]) -> None:
        """Of those that it gives up, where it is."""
        offsets = [
            TopicPartition(self._topic, part.partition, self._places.pop(part.partition))
            for part in partitions
            if part.partition in self._places
        ]
        try:
            if offsets:
                self._consumer.commit(offsets=offsets, asynchronous=False)
        except confluent.KafkaException as refused:
            # The next generation began before this one heard of it, as it may in Kafka: then what it had comes again.
            if refused.args[0].code() not in REFUSALS:
                raise
            self.refused |= {part.partition for part in offsets}

    def run(self) -> None:
        try:
            self._consumer.subscribe([self._topic], on_revoke=lambda consumer, given_up: self._commit(given_up))
            while not self.leaving.is_set():
                for message in self._consumer.consume(50, timeout=0.1):
                    assert message.error() is None, message.error()
                    self._taken[(message.partition(), message.offset())] += 1
                    self._places[message.partition()] = message.offset() + 1
                if self._consumer.assignment():
                    self.settled.set()
            self._commit(self._consumer.assignment())
        except (AssertionError, confluent.KafkaException) as failure:
            self.failure = failure
        finally:
            self._consumer.close()


@pytest.mark.parametrize(
    "config",
    [
        {"partition.assignment.strategy": "range", "heartbeat.interval.ms": 200, "session.timeout.ms": 6000},
        {
            "partition.assignment.strategy": "cooperative-sticky",
            "heartbeat.interval.ms": 200,
            "session.timeout.ms": 6000,
        },
        {"group.protocol": "consumer"},
    ],
    ids=["eager", "cooperative", "server-side"],
)
def test_members_that_come_and_go_under_load_read_every_record_once(
    three: BrokerProcess, log: headwater.Headwater, topic: str, config: dict[str, Any]
) -> None:
    group = f"load-{next(_names)}"
    taken: Counter[tuple[int, int]] = Counter()
    stopping = threading.Event()
    failed: list[Any] = []
    written = [0]

    def write() -> None:
        producer = Producer({"bootstrap.servers": three.bootstrap, "enable.idempotence": True, "linger.ms": 2})
        while not stopping.is_set():
            number = written[0]
            producer.produce(topic, b"%d" % number, partition=number % PARTITIONS,
                             on_delivery=lambda e, m: e and failed.append(e))  # fmt: skip
            written[0] += 1
            producer.poll(0.001)
        producer.flush(PATIENCE_SECONDS)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    everybody = []
    members: list[Member] = []
    for change in ("come", "come", "go", "come", "come", "go"):
        if change == "come":
            members.append(Member(three.bootstrap, group, topic, taken, **config))
            everybody.append(members[-1])
            members[-1].start()
            assert members[-1].settled.wait(PATIENCE_SECONDS)
        else:
            # The oldest, which may be the leader.
            leaver = members.pop(0)
            leaver.leaving.set()
            leaver.join(PATIENCE_SECONDS)
    stopping.set()
    writer.join(PATIENCE_SECONDS)
    assert failed == []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(taken) < written[0]:
        assert time.monotonic() < deadline, f"{len(taken)} of {written[0]} came"
        time.sleep(0.01)
    for member in members:
        member.leaving.set()
    for member in everybody:
        member.join(PATIENCE_SECONDS)
        assert member.failure is None
    refused = {partition for member in everybody for partition in member.refused}
    assert {partition for (partition, _), times in taken.items() if times > 1} <= refused
    ends = Counter(partition for partition, _ in taken)
    watcher = Consumer({"bootstrap.servers": three.bootstrap, "group.id": group})
    committed = watcher.committed([TopicPartition(topic, p) for p in range(PARTITIONS)], timeout=PATIENCE_SECONDS)
    watcher.close()
    for part in committed:
        assert part.offset == ends[part.partition] or part.partition in refused
