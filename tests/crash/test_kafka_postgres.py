"""Does a broker come back when Postgres does, with nothing acknowledged lost and nothing written twice?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

import headwater
from headwater.database import schema
from headwater.embedded import Postgres
from patience import PATIENCE_SECONDS
from serve_process import first_line

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import Consumer, Producer  # noqa: E402

pytestmark = pytest.mark.crash


def test_producers_and_a_group_go_on_after_postgres_died() -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-kafka-", ignore_cleanup_errors=True) as directory:
        server = Postgres(Path(directory, "pg"))
        server.start()
        dsn = server.dsn("postgres")
        with psycopg.connect(dsn, autocommit=True) as connection:
            schema.upgrade(connection)
        program = "from headwater.cli import main; main()"
        command = [sys.executable, "-c", program, "serve", "--kafka", "127.0.0.1:0", "--dsn", dsn, "--json"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
        broker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            (address,) = json.loads(first_line(broker))["kafka"]
            _survives(server, dsn, address)
            assert broker.poll() is None
        finally:
            broker.kill()
            broker.wait(PATIENCE_SECONDS)
            server.stop(mode="immediate")


def _survives(server: Postgres, dsn: str, address: str) -> None:
    with headwater.connect(dsn) as log:
        log.create_topic("durable", kind="sequenced")
    acknowledged: list[int] = []
    failed: list[Any] = []
    producer = Producer(
        {
            "bootstrap.servers": address,
            "enable.idempotence": True,
            "linger.ms": 1,
            "message.timeout.ms": PATIENCE_SECONDS * 1000,
            "log_level": 0,
        }
    )
    consumer = Consumer(
        {"bootstrap.servers": address, "group.id": "g", "auto.offset.reset": "earliest", "log_level": 0}
    )
    consumer.subscribe(["durable"])
    consumed: set[int] = set()

    def work(count: int) -> None:
        first = len(acknowledged) + len(failed)
        for number in range(first, first + count):
            producer.produce(
                "durable",
                b"%d" % number,
                on_delivery=lambda e, m, n=number: failed.append(e) if e else acknowledged.append(n),
            )
            producer.poll(0.001)
            if number == first + count // 2 and first:
                # In the middle of it.
                server.stop(mode="immediate")
                server.start()
        assert producer.flush(PATIENCE_SECONDS) == 0
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(consumed) < len(acknowledged):
            assert time.monotonic() < deadline, f"{len(consumed)} of {len(acknowledged)} came"
            consumed.update(int(m.value()) for m in consumer.consume(100, timeout=0.5) if m.error() is None)

    work(300)
    for _ in range(2):
        work(300)
    consumer.close()
    assert failed == []
    assert acknowledged == list(range(900))
    with headwater.connect(dsn) as log:
        assert [int(e.payload or b"") for e in log.read("durable", batch_size=10_000)] == list(range(900))
    # A group starts again from what it had committed, so it may see some twice, but none never.
    assert consumed == set(range(900))
