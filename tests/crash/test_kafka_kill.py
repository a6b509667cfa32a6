"""Is an acknowledged record ever lost, repeated or out of order, when brokers are killed in turn?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

import headwater

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import Consumer, Producer, TopicPartition  # noqa: E402

PARTITIONS = 3
KILLS = int(os.environ.get("CRASH_ROUNDS", "3"))
PATIENCE_SECONDS = 60

pytestmark = [pytest.mark.crash, pytest.mark.slow]


@contextmanager
def broker(dsn: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    program = "from headwater.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", "--kafka", f"127.0.0.1:{port}", "--dsn", dsn, "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        (address,) = json.loads(process.stdout.readline())["kafka"]
        yield process, int(address.rpartition(":")[2])
    finally:
        process.kill()
        process.wait()


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
    with ExitStack() as stack:
        brokers = [stack.enter_context(broker(dsn)) for _ in range(3)]
        bootstrap = ",".join(f"127.0.0.1:{port}" for _, port in brokers)
        writers = [Writer(bootstrap, topic, partition) for partition in range(PARTITIONS)]
        for writer in writers:
            writer.start()
        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
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
                        consumed[message.partition()][message.offset()] = int(message.value())

        for kill in range(KILLS):
            # Work between the kills, so that each hits writers, the group and its offsets in full flight.
            read(time.monotonic() + 1.0)
            with suppress(confluent.KafkaException):
                consumer.commit(asynchronous=False)
            process, port = brokers[kill % 3]
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            if kill < KILLS - 1:
                brokers[kill % 3] = stack.enter_context(broker(dsn, port))
            # The last one stays away: the others do without it.
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

    assert total > 100 * KILLS
    for partition, writer in enumerate(writers):
        in_log = [int(e.payload or b"") for e in log.read(topic, batch_size=10_000_000) if e.partition == partition]
        # Every number once, in order: nothing was lost, repeated or overtaken.
        assert in_log == list(range(len(in_log)))
        assert sorted(writer.acknowledged) == in_log
        assert [consumed[partition][offset] for offset in sorted(consumed[partition])] == in_log
    assert any(one.offset > 0 for one in committed)
