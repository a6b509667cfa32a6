"""Is a log that was dumped under load and restored elsewhere whole, and does it go on without losing anything?"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo, sql

import headwater
from headwater import NewEvent
from headwater.database import schema
from headwater.embedded import EmbeddedError, find_binaries
from patience import PATIENCE_SECONDS


@pytest.fixture
def restored_dsn(admin_dsn: str) -> Iterator[str]:
    """An empty database to restore into."""
    name = f"headwater_restored_{os.getpid()}"
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {} template template0").format(sql.Identifier(name)))
    yield conninfo.make_conninfo(admin_dsn, dbname=name)
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def run(program: str, *arguments: str) -> None:
    try:
        found = find_binaries().program(program)
    except EmbeddedError:
        pytest.skip("no Postgres programs here")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr


def claimed(log: headwater.Headwater, queue: str) -> list[object]:
    """The data of all that the queue can get now, each stable."""
    found: list[object] = []
    while lease := log.claim(queue, worker="w", batch_size=100):
        found += [event.data for event in lease.events]
        log.settle(lease, {})
    return found


def test_a_log_that_was_dumped_under_load_goes_on_where_it_was_restored(
    log: headwater.Headwater, dsn: str, restored_dsn: str, topic: str, tmp_path: Path
) -> None:
    partitions = log.create_topic(f"{topic}-partitions", kind="sequenced", partitions=2).name
    log.create_queue(topic, [topic, partitions])
    for where in (topic, partitions):
        log.publish_batch(where, [NewEvent(f"{where} {n}", key=str(n)) for n in range(50)])
    before = claimed(log, topic)[:]
    assert len(before) == 100
    acknowledged = [f"more {n}" for n in range(30)]
    log.publish_batch(topic, [NewEvent(one) for one in acknowledged])
    stop = threading.Event()

    def publish() -> None:
        with headwater.connect(dsn, pool_size=1) as own:
            while not stop.is_set():
                own.publish_batch(topic, [NewEvent("while it was dumped") for _ in range(5)])

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        run("pg_dump", "--format=custom", f"--file={tmp_path / 'dump'}", f"--dbname={dsn}")
    finally:
        stop.set()
        publisher.join(PATIENCE_SECONDS)
    run("pg_restore", f"--dbname={restored_dsn}", "--exit-on-error", str(tmp_path / "dump"))
    with psycopg.connect(restored_dsn, autocommit=True) as connection:
        # A dump reads sequences one after the other, so what was known to be stable may be ahead of what was assigned.
        connection.execute("select setval('headwater_internal.stable_register', headwater.head() + 1000)")
        assert schema.upgrade(connection) == []

    with headwater.connect(restored_dsn) as restored:
        state = restored.state()
        held = [event.data for event in restored.follow([topic, partitions], stop_when_caught_up=True)]
        assert len(held) == len(set(held) - {"while it was dumped"}) + held.count("while it was dumped")
        assert set(before) | set(acknowledged) <= set(held)
        # What was done there is done here.
        assert claimed(restored, topic) == held[100:]
        offsets = [event.topic_offset for event in restored.read(partitions)]

        with psycopg.connect(restored_dsn) as late:
            restored.publish(topic, "late", connection=late)
            position = restored.publish(topic, "early")
            assert position is not None
            assert position > state.head
            # Nothing of it can be read while one below it is in flight.
            assert claimed(restored, topic) == []
            late.commit()
        assert claimed(restored, topic) == ["late", "early"]
        restored.publish(partitions, "next", key="0")
        assert [event.topic_offset for event in restored.read(partitions)][:-1] == offsets
        assert [event.data for event in restored.follow(topic, stop_when_caught_up=True)][-2:] == ["late", "early"]
