"""Is an acknowledged record ever lost, repeated or out of order, when brokers are killed in turn?"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from kafka_brokers import Brokers

import headwater
from effort import effort
from patience import PATIENCE_SECONDS

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import Consumer, Producer, TopicPartition  # noqa: E402

PARTITIONS = 3
# More for a soak.
KILLS = effort(3)
BETWEEN_KILLS = 200

pytestmark = pytest.mark.crash


class Writer(threading.Thread):
    """An idempotent producer that writes numbers until told to stop, and remembers which were acknowledged."""

    def __init__(self, bootstrap: str, topic: str, partition: int) -> None:
        super().__init__(daemon=True)
        self.acknowledged: list[int] = []
        self.failed: list[Any] = []
        self.stopping = threading.Event()
        self._topic = topic
        self._partition = partition
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "acks": "all",
                "linger.ms": 2,
                "message.timeout.ms": PATIENCE_SECONDS * 1000,
                "log_level": 0,
            }
        )

    def run(self) -> None:
        number = 0
        while not self.stopping.is_set():
            self._producer.produce(
                self._topic, b"%d" % number, partition=self._partition, on_delivery=self._note(number)
            )
            number += 1
            self._producer.poll(0.002)
        self._producer.flush(PATIENCE_SECONDS)

    def _note(self, number: int) -> Any:
        def note(error: Any, message: Any) -> None:
            (self.acknowledged if error is None else self.failed).append(number if error is None else error)

        return note


def test_nothing_acknowledged_is_lost_repeated_or_out_of_order_when_brokers_are_killed(
    dsn: str, log: headwater.Headwater
) -> None:
    topic = log.create_topic("killed", kind="sequenced", partitions=PARTITIONS).name
    with Brokers(dsn, 3) as brokers:
        writers = [Writer(brokers.bootstrap, topic, partition) for partition in range(PARTITIONS)]
        for writer in writers:
            writer.start()
        consumer = Consumer(
            {
                "bootstrap.servers": brokers.bootstrap,
                "group.id": "survivors",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 6000,
                "heartbeat.interval.ms": 500,
                "log_level": 0,
            }
        )
        consumer.subscribe([topic])
        consumed: dict[int, dict[int, int]] = {partition: {} for partition in range(PARTITIONS)}

        def read(until: float) -> None:
            while time.monotonic() < until:
                for message in consumer.consume(500, timeout=0.2):
                    if message.error() is None:
                        of_partition = consumed[message.partition()]
                        # Whoever takes over may begin again a little before, and never after what was read.
                        assert message.offset() <= len(of_partition), "a record was passed over"
                        of_partition[message.offset()] = int(message.value())

        def count() -> tuple[int, int]:
            return sum(len(writer.acknowledged) for writer in writers), sum(map(len, consumed.values()))

        for kill in range(KILLS):
            # Work between the kills, so that each hits writers, the group and its offsets in full flight.
            wanted = [done + BETWEEN_KILLS for done in count()]
            deadline = time.monotonic() + PATIENCE_SECONDS
            while any(done < enough for done, enough in zip(count(), wanted, strict=True)):
                assert time.monotonic() < deadline, f"written and read: {count()}, wanted: {wanted}"
                read(time.monotonic() + 0.1)
            with suppress(confluent.KafkaException):
                consumer.commit(asynchronous=False)
            brokers.kill(kill % 3)
            brokers.restart(kill % 3)
        # The last one stays away: the others do without it.
        brokers.kill(KILLS % 3)
        for writer in writers:
            writer.stopping.set()
        for writer in writers:
            writer.join(PATIENCE_SECONDS)
            assert writer.failed == []
        total = sum(len(writer.acknowledged) for writer in writers)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while sum(map(len, consumed.values())) < total and time.monotonic() < deadline:
            read(time.monotonic() + 0.5)
        committed = consumer.committed([TopicPartition(topic, p) for p in range(PARTITIONS)], timeout=PATIENCE_SECONDS)
        consumer.close()

    assert total >= BETWEEN_KILLS * KILLS
    for partition, writer in enumerate(writers):
        in_log = [int(e.payload or b"") for e in log.read(topic, batch_size=10_000_000) if e.partition == partition]
        # Every number once, in order: nothing was lost, repeated or overtaken.
        assert in_log == list(range(len(in_log)))
        assert sorted(writer.acknowledged) == in_log
        assert [consumed[partition][offset] for offset in sorted(consumed[partition])] == in_log
    assert any(one.offset > 0 for one in committed)
