"""Does a reader skip an event whose position was issued again? After a crash, a failover, a restore."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.crash import postgres_crashes

import headwater
from headwater.embedded import Binaries, EmbeddedError, find_binaries
from headwater.errors import LogUnavailable
from headwater.trials.chaos.cluster import Cluster, connected
from headwater.trials.chaos.proxy import Proxy
from patience import PATIENCE_SECONDS

OLDEST = 15
# Stopped at any moment, it would keep commits waiting in a few of a hundred.
STOPS = 100


def _binaries(which: str) -> Binaries:
    if which == "newest":
        return find_binaries()
    try:
        return find_binaries(major=OLDEST)
    except EmbeddedError as error:
        pytest.skip(f"needs Postgres {OLDEST}: {error}")


def _major(cluster: Cluster) -> int:
    with connected(cluster.dsn) as connection:
        return connection.info.server_version // 10000


@pytest.fixture(params=["newest", pytest.param("oldest", marks=pytest.mark.long)])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="headwater-positions-", ignore_cleanup_errors=True) as name:
        cluster = postgres_crashes.make_cluster(Path(name), binaries=_binaries(request.param))
        try:
            yield cluster
        finally:
            cluster.close()
            cluster.server.kill()


def test_the_walwriter_is_stopped_only_while_commits_can_do_without_it(cluster: Cluster) -> None:
    with connected(cluster.dsn) as connection:
        connection.execute("create table written (n integer)")
        connection.execute("create table committed (n integer)")
    over = threading.Event()

    def write() -> None:
        with connected(cluster.dsn) as connection:
            # The walwriter is the one that flushes these.
            connection.execute("set synchronous_commit = off")
            while not over.is_set():
                connection.execute("insert into written select generate_series(1, 5000)")

    with ThreadPoolExecutor() as threads, connected(cluster.dsn) as committing:
        writing = threads.submit(write)
        try:
            for number in range(STOPS):
                walwriter = cluster.stop_walwriter()
                assert walwriter is not None
                try:
                    committed = threads.submit(committing.execute, "insert into committed values (%s)", (number,))
                    committed.result(PATIENCE_SECONDS)
                finally:
                    os.kill(walwriter, signal.SIGCONT)
        finally:
            over.set()
        writing.result(PATIENCE_SECONDS)


class Readers:
    """Readers of one quiet topic that live on through whatever happens to the server, each in a thread."""

    def __init__(self, dsn: Callable[[], str], topic: str) -> None:
        self.dsn = dsn
        self.topic = topic
        self.got: dict[str, list[str]] = {}
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []
        self.errors: list[Exception] = []
        self.logs: list[headwater.Headwater] = []

    def end(self) -> None:
        self.over.set()
        for log in self.logs:
            log.close()
        for thread in self.threads:
            thread.join(PATIENCE_SECONDS)

    def start(self, name: str, read: Callable[[headwater.Headwater, Callable[[Any], None]], None]) -> None:
        got = self.got.setdefault(name, [])

        def run() -> None:
            try:
                with headwater.connect(self.dsn(), pool_size=2) as log:
                    self.logs.append(log)
                    read(log, lambda event: got.append(event.data["n"]))
            except (headwater.HeadwaterError, psycopg.Error) as error:
                if not self.over.is_set():
                    self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.threads.append(thread)

    def wait_for(self, wanted: set[str]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(not wanted <= set(got) for got in self.got.values()):
            assert not self.errors, self.errors
            missing = {name: sorted(wanted - set(got)) for name, got in self.got.items()}
            assert time.monotonic() < deadline, f"never delivered: {missing}"
            time.sleep(0.05)


def follow(**options: Any) -> Callable[[headwater.Headwater, Callable[[Any], None]], None]:
    def read(log: headwater.Headwater, take: Callable[[Any], None]) -> None:
        for event in log.follow("quiet", patience_seconds=None, **options):
            take(event)

    return read


def process(log: headwater.Headwater, take: Callable[[Any], None]) -> None:
    def handle(connection: psycopg.Connection[Any], events: Any) -> None:
        for event in events:
            connection.execute("insert into effect values (%s)", (event.data["n"],))
            take(event)

    log.process("quiet", handle, cursor="processor", holds_retention=True, patience_seconds=None)


def publish(dsn: str, topic: str, numbers: range) -> set[str]:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with headwater.connect(dsn, pool_size=1) as log:
                log.publish_batch(topic, [headwater.NewEvent({"n": f"{topic}-{n}"}) for n in numbers])
            return {f"{topic}-{n}" for n in numbers}
        except LogUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def prepare(cluster: Cluster) -> None:
    with headwater.connect(cluster.dsn, pool_size=1) as log:
        log.create_topic("quiet")
        log.create_topic("busy")
    with connected(cluster.dsn) as connection:
        connection.execute("create table effect (n text primary key)")


@pytest.fixture
def readers(cluster: Cluster) -> Iterator[Readers]:
    prepare(cluster)
    readers = Readers(lambda: cluster.dsn, "quiet")
    readers.start("follow", follow())
    readers.start("cursor", follow(cursor="follower", holds_retention=True))
    readers.start("process", process)
    yield readers
    readers.end()


def test_after_a_crash_that_takes_positions_back_no_reader_skips_an_event(cluster: Cluster, readers: Readers) -> None:
    wanted = publish(cluster.dsn, "quiet", range(1))
    readers.wait_for(wanted)
    for round_number in range(1, 3):
        before, after = postgres_crashes.take_positions_back(cluster, "busy")
        wanted |= publish(cluster.dsn, "quiet", range(round_number * 100, round_number * 100 + 20))
        # What others publish moves the head beyond where it was.
        publish(cluster.dsn, "busy", range(before - after + 50))
        wanted |= publish(cluster.dsn, "quiet", range(round_number * 100 + 20, round_number * 100 + 21))
        readers.wait_for(wanted)
    with connected(cluster.dsn) as connection:
        assert connection.execute("select count(*) from effect").fetchone() == (len(wanted),)
        rows = connection.execute("select count(*), min(began_after) from headwater.epoch_overview").fetchone()
        assert rows is not None
        assert rows[0] >= 3


def test_a_clean_restart_keeps_the_epoch(cluster: Cluster) -> None:
    prepare(cluster)
    publish(cluster.dsn, "quiet", range(3))
    with headwater.connect(cluster.dsn, pool_size=1) as log:
        before = log.state()
    cluster.server.stop()
    cluster.server.start()
    with headwater.connect(cluster.dsn, pool_size=1) as log:
        assert log.state() == before
        cluster.server.kill()
        cluster.server.start()
    with headwater.connect(cluster.dsn, pool_size=1) as log:
        assert log.state().epoch > before.epoch


def test_the_first_publisher_of_an_epoch_notes_it_before_its_events(cluster: Cluster) -> None:
    """No reader looks between two crashes; what an old reader must go back to is known all the same."""
    prepare(cluster)
    publish(cluster.dsn, "quiet", range(1))
    with headwater.connect(cluster.dsn, pool_size=1) as log:
        old = log.state()
    _, common = postgres_crashes.take_positions_back(cluster, "busy")
    publish(cluster.dsn, "quiet", range(10, 20))
    cluster.server.kill()
    cluster.server.start()
    publish(cluster.dsn, "quiet", range(20, 30))
    with headwater.connect(cluster.dsn, pool_size=1) as log:
        seen = [
            e.data["n"] for e in log.follow("quiet", after=old.head + 600, epoch=old.epoch, stop_when_caught_up=True)
        ]
        assert seen == [f"quiet-{n}" for n in range(10, 30)]
        state = log.state()
        assert (state.epoch > old.epoch, state.head > common) == (True, True)
        with pytest.raises(headwater.EpochChanged) as refused:
            log.read("quiet", after=old.stable, epoch=old.epoch)
        assert refused.value.epoch == state.epoch
        with pytest.raises(headwater.EpochChanged):
            log.read("quiet", after=state.head + 1)


@pytest.fixture(params=["newest", pytest.param("oldest", marks=pytest.mark.long)])
def failing_over(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="headwater-failover-", ignore_cleanup_errors=True) as name:
        cluster = postgres_crashes.make_cluster(Path(name), binaries=_binaries(request.param))
        try:
            yield cluster
        finally:
            cluster.close()
            cluster.server.kill()


def test_after_a_failover_to_a_standby_that_lags_no_reader_skips_an_event(failing_over: Cluster) -> None:
    cluster = failing_over
    prepare(cluster)
    with tempfile.TemporaryDirectory(prefix="headwater-proxy-") as name:
        proxy = Proxy(cluster.dsn, Path(name))
        readers = Readers(lambda: proxy.dsn, "quiet")
        try:
            readers.start("follow", follow())
            readers.start("cursor", follow(cursor="follower", holds_retention=True))
            readers.start("process", process)
            wanted = publish(cluster.dsn, "quiet", range(10))
            readers.wait_for(wanted)
            before, after = postgres_crashes.fail_over(cluster, "busy")
            assert after < before
            proxy.switch(cluster.dsn)
            wanted |= publish(cluster.dsn, "quiet", range(50, 100))
            publish(cluster.dsn, "busy", range(600))
            wanted |= publish(cluster.dsn, "quiet", range(100, 150))
            readers.wait_for(wanted)
        finally:
            readers.end()
            proxy.close()


def test_a_restored_dump_is_another_epoch(cluster: Cluster) -> None:
    prepare(cluster)
    publish(cluster.dsn, "quiet", range(5))
    with headwater.connect(cluster.dsn, pool_size=1) as log:
        old = log.state()
    binaries = find_binaries(major=_major(cluster))
    dump = [binaries.program("pg_dump"), cluster.dsn]
    dumped = subprocess.run(dump, check=True, capture_output=True, timeout=PATIENCE_SECONDS).stdout
    publish(cluster.dsn, "quiet", range(5, 9))
    cluster.server.ensure_database("restored")
    restored = cluster.server.dsn("restored")
    psql = [binaries.program("psql"), "-q", restored]
    subprocess.run(psql, input=dumped, check=True, timeout=PATIENCE_SECONDS, capture_output=True)
    with headwater.connect(restored, pool_size=1) as log:
        log.publish("quiet", {"n": "after the restore"})
        assert log.state().epoch > old.epoch
        seen = [e.data["n"] for e in log.follow("quiet", after=old.head + 4, epoch=old.epoch, stop_when_caught_up=True)]
        assert seen == ["after the restore"]


def claimed_beside_an_open_publisher(log: headwater.Headwater, connection: psycopg.Connection[Any]) -> list[str]:
    """What a queue claims in all if a publisher is open behind which many events are committed at the first claim."""
    claimed: list[str] = []

    def claim_all() -> None:
        while lease := log.claim("mailer", worker="w", batch_size=10):
            claimed.extend(event.data["n"] for event in lease.events)
            log.ack(lease)

    with connection.transaction():
        log.publish("quiet", {"n": "in flight"}, connection=connection)
        log.publish_batch("quiet", [headwater.NewEvent({"n": f"behind {n}"}) for n in range(100)])
        claim_all()
        assert claimed == []
    claim_all()
    return claimed


def test_a_queue_passes_over_no_publisher_that_is_open_after_a_crash(cluster: Cluster) -> None:
    prepare(cluster)
    with headwater.connect(cluster.dsn, pool_size=1) as log:
        log.create_queue("mailer", ["quiet"])
    cluster.kill()
    with headwater.connect(cluster.dsn, pool_size=2) as log, connected(cluster.dsn) as connection:
        claimed = claimed_beside_an_open_publisher(log, connection)
    assert claimed == ["in flight", *(f"behind {n}" for n in range(100))]


def test_a_queue_passes_over_no_publisher_that_is_open_after_a_restore(cluster: Cluster) -> None:
    prepare(cluster)
    with headwater.connect(cluster.dsn, pool_size=1) as log:
        log.create_queue("mailer", ["quiet"])
    binaries = find_binaries(major=_major(cluster))
    dumped = subprocess.run(
        [binaries.program("pg_dump"), cluster.dsn], check=True, capture_output=True, timeout=PATIENCE_SECONDS
    ).stdout
    # pg_dump reads one sequence after the other while both go on: the one read last may be far ahead.
    dumped += b"select setval('headwater_internal.stable_register', 1000000);\n"
    cluster.server.ensure_database("restored")
    restored = cluster.server.dsn("restored")
    psql = [binaries.program("psql"), "-q", restored]
    subprocess.run(psql, input=dumped, check=True, timeout=PATIENCE_SECONDS, capture_output=True)
    with headwater.connect(restored, pool_size=2) as log, connected(restored) as connection:
        claimed = claimed_beside_an_open_publisher(log, connection)
    assert claimed == ["in flight", *(f"behind {n}" for n in range(100))]
