"""Does every record come to some member, and to one only, while members come and go under load?"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from brokers import BrokerProcess, broker_process

import headwater
from patience import PATIENCE_SECONDS

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import Consumer, Producer, TopicPartition  # noqa: E402

_names = itertools.count()
PARTITIONS = 3
REFUSALS = (
    confluent.KafkaError.ILLEGAL_GENERATION,
    confluent.KafkaError.UNKNOWN_MEMBER_ID,
    confluent.KafkaError.REBALANCE_IN_PROGRESS,
    confluent.KafkaError.STALE_MEMBER_EPOCH,
    confluent.KafkaError._NO_OFFSET,
)


@pytest.fixture(scope="module")
def three(dsn: str) -> Iterator[BrokerProcess]:
    with broker_process(dsn, "--processes", "3") as started:
        yield started


@pytest.fixture
def topic(log: headwater.Headwater) -> str:
    return log.create_topic(f"load-{next(_names)}", kind="sequenced", partitions=PARTITIONS).name


class Member(threading.Thread):
    """A consumer that commits what it has before it gives up a partition, until told to go."""

    def __init__(self, bootstrap: str, group: str, topic: str, taken: Counter[tuple[int, int]], **config: Any) -> None:
        super().__init__(daemon=True)
        self._topic = topic
        self._taken = taken
        self.leaving = threading.Event()
        self.stable = threading.Event()
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
                    self.stable.set()
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
            assert members[-1].stable.wait(PATIENCE_SECONDS)
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
