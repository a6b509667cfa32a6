"""Is each record processed exactly once, when whoever reads, processes and writes is killed, and brokers are too?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kafka_brokers import Brokers

import headwater
from effort import effort
from headwater import NewEvent
from patience import PATIENCE_SECONDS

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import Consumer  # noqa: E402

ROUNDS = effort(3)
PER_ROUND = 400
PROGRAM = Path(__file__).parent / "kafka_transformer.py"

pytestmark = pytest.mark.crash


def test_each_input_is_processed_once_when_processors_and_brokers_are_killed(
    dsn: str, log: headwater.Headwater
) -> None:
    source = log.create_topic("input", kind="sequenced", partitions=2).name
    sink = log.create_topic("output", kind="sequenced", partitions=2).name
    deadline = time.monotonic() + PATIENCE_SECONDS * ROUNDS
    transformers: list[subprocess.Popen[bytes]] = []
    with Brokers(dsn, 3) as brokers:

        def start(number: int) -> subprocess.Popen[bytes]:
            command = [sys.executable, str(PROGRAM), brokers.bootstrap, source, sink, f"transformer-{number}"]
            environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[1])}
            return subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)

        def written() -> int:
            return sum(1 for _ in log.read(sink, batch_size=1_000_000))

        try:
            transformers = [start(0), start(1)]
            for round_number in range(ROUNDS):
                first = round_number * PER_ROUND
                log.publish_batch(source, [NewEvent(b"%d" % n, key=str(n)) for n in range(first, first + PER_ROUND)])
                # Killed when some of it is done and some is not: transactions are open, offsets not committed.
                while written() < first + 40:
                    assert time.monotonic() < deadline, f"{written()} were written"
                victim = round_number % 2
                os.kill(transformers[victim].pid, signal.SIGKILL)
                transformers[victim].wait(PATIENCE_SECONDS)
                brokers.kill(round_number % 3)
                transformers[victim] = start(victim)
                brokers.restart(round_number % 3)
            while written() < ROUNDS * PER_ROUND:
                assert time.monotonic() < deadline, f"{written()} were written"
                time.sleep(0.05)
        finally:
            for process in transformers:
                process.kill()
                process.wait(PATIENCE_SECONDS)
        consumer = Consumer({"bootstrap.servers": brokers.bootstrap, "group.id": "check", "log_level": 0,
                             "auto.offset.reset": "earliest", "isolation.level": "read_committed"})  # fmt: skip
        consumer.subscribe([sink])
        seen: list[int] = []
        while len(seen) < ROUNDS * PER_ROUND:
            assert time.monotonic() < deadline, f"{len(seen)} came"
            seen += [int(message.value()) for message in consumer.consume(500, timeout=0.5) if not message.error()]
        consumer.close()
    assert sorted(seen) == list(range(ROUNDS * PER_ROUND))
    assert sorted(int(event.payload or b"") for event in log.read(sink, batch_size=1_000_000)) == sorted(seen)
