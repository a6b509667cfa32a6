"""Does the log get through a full disk: clear answers, nothing acknowledged lost, and on by itself after it?"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

import headwater
from headwater.database import schema
from headwater.embedded import Postgres
from headwater.errors import StorageFull
from patience import PATIENCE_SECONDS, TEST_SECONDS
from serve_process import serve_process

confluent = pytest.importorskip("confluent_kafka")
DISK_MIB = 400
BALLAST_BYTES = 8 * 1024 * 1024


class Disk:
    """A small disk for the tables of a database. Its WAL is elsewhere, so the server stays up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab") as file:
            try:
                while True:
                    file.write(bytes(65536))
                    file.flush()
            except OSError:
                return

    def give_room(self) -> None:
        self._ballast.unlink()


@pytest.fixture
def disk() -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small tmpfs")
    with tempfile.TemporaryDirectory(prefix="headwater-disk-") as name:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=777", "tmpfs", name]
        if subprocess.run(mount, timeout=PATIENCE_SECONDS, check=False).returncode:
            pytest.skip("a tmpfs cannot be mounted here")
        try:
            yield Disk(Path(name))
        finally:
            subprocess.run(["umount", "-l", name], check=True, timeout=PATIENCE_SECONDS)


@pytest.fixture
def small(disk: Disk) -> Iterator[str]:
    """A log whose database is on the small disk, and whose WAL is not."""
    with tempfile.TemporaryDirectory(prefix="headwater-", ignore_cleanup_errors=True) as directory:
        server = Postgres(Path(directory, "pg"), settings={"fsync": "off"})
        server.start()
        try:
            data = disk.path / "tables"
            data.mkdir()
            owner = Path(directory, "pg").stat()
            os.chown(data, owner.st_uid, owner.st_gid)
            with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
                connection.execute(f"create tablespace small location '{data}'".encode())
                connection.execute("create database small tablespace small")
            dsn = server.dsn("small")
            with psycopg.connect(dsn, autocommit=True) as connection:
                schema.upgrade(connection)
            yield dsn
        finally:
            server.stop(mode="immediate")


def until(question: Any) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (answer := question()):
        assert time.monotonic() < deadline, "the signal did not come in time"
        time.sleep(0.02)
    return answer


def refused_with(bootstrap: str) -> set[int]:
    """The codes that a producer gets which does not retry."""
    codes: set[int] = set()
    once = confluent.Producer({"bootstrap.servers": bootstrap, "retries": 0, "log_level": 0})
    for _ in range(3):
        once.produce("records", os.urandom(200_000), on_delivery=lambda error, _: codes.add(error and error.code()))
    assert once.flush(PATIENCE_SECONDS) == 0
    return codes


def test_a_full_disk_answers_clearly_loses_nothing_and_all_goes_on(small: str, disk: Disk) -> None:
    with headwater.connect(small) as log:
        log.create_topic("orders")
        log.create_topic("records", kind="sequenced", partitions=1)
    with serve_process("--http", "127.0.0.1:0", "--kafka", "127.0.0.1:0", dsn=small) as started:
        client = httpx.Client(base_url=started.told["http"], timeout=PATIENCE_SECONDS)
        producer = confluent.Producer(
            {"bootstrap.servers": started.told["kafka"][0], "enable.idempotence": True, "linger.ms": 5,
             "message.timeout.ms": TEST_SECONDS * 1000, "log_level": 0}
        )  # fmt: skip
        delivered: list[bytes] = []
        failed: list[Any] = []

        def told(error: Any, message: Any) -> None:
            (delivered if error is None else failed).append(message.key() if error is None else error)

        acknowledged = 0
        sent = 0

        def publish() -> httpx.Response:
            nonlocal acknowledged, sent
            for _ in range(20):
                producer.produce("records", bytes(20_000), key=str(sent).encode(), on_delivery=told)
                sent += 1
            producer.poll(0)
            answer = client.post("/v1/topics/orders/events", json={"text": "x" * 200_000})
            acknowledged += answer.status_code == 200
            return answer

        assert publish().status_code == 200
        assert client.get("/ready").status_code == 200
        producer.flush(PATIENCE_SECONDS)
        disk.fill()
        full = until(lambda: answer if (answer := publish()).status_code != 200 else None)
        assert (full.status_code, full.json()["type"]) == (507, "urn:headwater:error:StorageFull")
        assert full.json()["hint"]
        assert "retry-after" in full.headers
        assert client.get("/ready").status_code == 503
        assert refused_with(started.told["kafka"][0]) == {confluent.KafkaError.KAFKA_STORAGE_ERROR}
        # The records meet the full disk as well, and wait.
        for _ in range(10):
            publish()
        assert client.get("/health").status_code == 200
        disk.give_room()
        until(lambda: client.get("/ready").status_code == 200)
        until(lambda: publish().status_code == 200)
        assert producer.flush(PATIENCE_SECONDS) == 0
        assert failed == []
        assert started.process.poll() is None
    with psycopg.connect(small) as connection:
        names = (
            "select e.key from headwater_internal.event e join headwater_internal.topic t on t.id = e.topic_id "
            "where t.name = %s"
        )
        events = connection.execute(names, ("orders",)).fetchall()
        records = [bytes(key) for (key,) in connection.execute(names, ("records",)).fetchall()]
    assert len(events) == acknowledged
    assert sorted(records, key=int) == sorted(delivered, key=int) == [str(number).encode() for number in range(sent)]


def test_the_library_says_that_the_disk_is_full(small: str, disk: Disk) -> None:
    with headwater.connect(small) as log:
        log.create_topic("orders")
        disk.fill()
        with pytest.raises(StorageFull) as refused:
            while True:
                log.publish("orders", bytes(500_000))
        assert refused.value.hint
        disk.give_room()
        log.publish("orders", b"again")
