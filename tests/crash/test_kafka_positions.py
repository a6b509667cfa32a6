"""Does a Kafka consumer skip an event whose offset was issued again, after a crash or a failover of Postgres?

The consumers are of librdkafka, which validates its offsets when the leader epoch changes, as the Java client does. A
fetch that is under way at the failover is stopped between its two steps: looking up a partition, and reading its
records.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.crash import postgres_crashes

import headwater
import headwater.aio
from headwater.aio import AsyncHeadwater
from headwater.calls import Call
from headwater.calls import kafka as calls
from headwater.calls import log as log_calls
from headwater.calls.kafka import KafkaTopic
from headwater.errors import LogUnavailable
from headwater.servers.kafka.broker import Broker, BrokerSettings
from headwater.servers.kafka.partition_reader import FetchResult, PartitionFetch, PartitionReader
from headwater.trials.chaos.cluster import Cluster
from headwater.trials.chaos.proxy import Proxy
from patience import PATIENCE_SECONDS
from serve_process import serve_process

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, TopicPartition  # noqa: E402

QUICK_SECONDS = 10.0
# One is open, its offsets are positions; the other is sequenced.
TOPICS = ("quiet", "numbered")

pytestmark = pytest.mark.crash


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="headwater-kafka-positions-", ignore_cleanup_errors=True) as name:
        cluster = postgres_crashes.make_cluster(Path(name))
        try:
            with headwater.connect(cluster.dsn, pool_size=1) as log:
                log.create_topic("quiet")
                log.create_topic("numbered", kind="sequenced")
                log.create_topic("typed", kind="sequenced")
                log.create_topic("busy")
            yield cluster
        finally:
            cluster.close()
            cluster.server.kill()


def publish(cluster: Cluster, name: str, count: int, topics: tuple[str, ...] = TOPICS) -> set[str]:
    numbers = [f"{name}-{number}" for number in range(count)]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            with headwater.connect(cluster.dsn, pool_size=1) as log, log.transaction() as connection:
                for topic in topics:
                    events = [headwater.NewEvent({"n": f"{topic}-{number}"}) for number in numbers]
                    log.publish_batch(topic, events, connection=connection)
            return {f"{topic}-{number}" for topic in topics for number in numbers}
        except LogUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.1)


class Reader:
    """A consumer of both topics, polled in a thread of its own, which notes what it got."""

    def __init__(self, address: str) -> None:
        self._consumer = Consumer({
            "bootstrap.servers": address,
            "group.id": "readers",
            "enable.auto.commit": False,
            "auto.offset.reset": "latest",
            "statistics.interval.ms": 20,
            "stats_cb": self._note,
            "log_level": 0,
        })  # fmt: skip
        self.got: list[str] = []
        self.errors: list[Any] = []
        self._next: dict[str, int] = {}
        self._over = threading.Event()
        self._assignment: dict[str, int] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _note(self, text: str) -> None:
        for name, topic in json.loads(text)["topics"].items():
            self._next[name] = topic["partitions"].get("0", {}).get("next_offset", -1)

    def _run(self) -> None:
        while not self._over.is_set():
            if (wanted := self._assignment) is not None:
                self._assignment = None
                self._consumer.assign([TopicPartition(topic, 0, offset) for topic, offset in wanted.items()])
            message = self._consumer.poll(0.02)
            if message is not None and message.error() is None:
                self.got.append(json.loads(message.value())["n"])
            elif message is not None:
                self.errors.append(message.error())
        self._consumer.close()

    def read_from(self, *, quiet: int) -> None:
        self._assignment = {"quiet": quiet, "numbered": 0}

    def is_beyond(self, position: int, seconds: float) -> bool:
        """Whether the consumer is at the end of the open topic, beyond a position, before the time is up."""
        deadline = time.monotonic() + seconds
        while self._next.get("quiet", -1) <= position and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._next.get("quiet", -1) > position

    def wait_for(self, wanted: set[str]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not wanted <= set(self.got):
            assert time.monotonic() < deadline, f"never delivered: {sorted(wanted - set(self.got))}; {self.errors[-5:]}"
            time.sleep(0.05)

    def end(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE_SECONDS)


def test_after_a_crash_that_takes_positions_back_a_consumer_gets_every_event(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(cluster, "before", 5)
    with serve_process("--kafka", "127.0.0.1:0", dsn=cluster.dsn) as started:
        readers: list[Reader] = []
        went_to: list[int] = []
        stop_at_once = Cluster.stop_at_once

        def stop_with_a_reader_at_the_end(cluster: Cluster, walwriter: int | None) -> None:
            head = postgres_crashes.head(cluster)
            # A new one for each crash: what an old one knows is of the history before the last crash.
            for old in readers:
                old.end()
            readers[:] = [Reader(started.told["kafka"][0])]
            readers[0].read_from(quiet=OFFSET_END)
            if readers[0].is_beyond(head, QUICK_SECONDS):
                went_to.append(head)
            stop_at_once(cluster, walwriter)

        monkeypatch.setattr(Cluster, "stop_at_once", stop_with_a_reader_at_the_end)
        try:
            for _ in range(postgres_crashes.TRIES):
                before, after = postgres_crashes.take_positions_back(cluster, "busy")
                if went_to[-1:] == [before]:
                    break
            assert went_to[-1:] == [before], "the consumer was not at the end of the log before the crash"
            wanted = publish(cluster, "after", 20)
            publish(cluster, "after", before - after, ("busy",))
            wanted |= publish(cluster, "later", 20)
            readers[0].wait_for(wanted)
        finally:
            for reader in readers:
                reader.end()


def test_after_a_failover_to_a_standby_that_lags_a_consumer_gets_every_event(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-proxy-") as name:
        proxy = Proxy(cluster.dsn, Path(name))
        try:
            with serve_process("--kafka", "127.0.0.1:0", dsn=proxy.dsn) as started:
                reader = Reader(started.told["kafka"][0])
                try:
                    reader.read_from(quiet=OFFSET_BEGINNING)
                    reader.wait_for(publish(cluster, "before", 10))
                    standby = cluster.make_standby()
                    cut_off_at = cluster.cut_off(standby)
                    # What the standby never gets, and the consumer does.
                    lost = publish(cluster, "lost", 50)
                    reader.wait_for(lost)
                    before = postgres_crashes.head(cluster)
                    cluster.promote(standby, cut_off_at=cut_off_at)
                    assert postgres_crashes.head(cluster) < before
                    wanted = publish(cluster, "after", 20)
                    publish(cluster, "after", 200, ("busy",))
                    proxy.switch(cluster.dsn)
                    wanted |= publish(cluster, "later", 40)
                    reader.wait_for(wanted)
                finally:
                    reader.end()
        finally:
            proxy.close()


class PausedLog:
    """Carries calls out on a log; the first one that has this in its SQL is held back until `go_on`."""

    def __init__(self, log: AsyncHeadwater, held_back: str) -> None:
        self._log = log
        self._held_back = held_back
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def run(self, call: Call[Any], **options: Any) -> Any:
        if self._held_back in call.sql and not self.go_on.is_set():
            self.reached.set()
            await self.go_on.wait()
        return await self._log.run(call, **options)


# How a fetch reads a topic of each kind.
STATEMENTS = {"numbered": "kafka_fetch_plain", "typed": "kafka_fetch_sequenced", "quiet": "kafka_fetch_open"}


def publish_to_each(cluster: Cluster, name: str, count: int) -> None:
    """An event with no more than its bytes is plain, one with a type is not."""
    with headwater.connect(cluster.dsn, pool_size=1) as log:
        for topic in STATEMENTS:
            kind = "Typed" if topic == "typed" else None
            log.publish_batch(topic, [headwater.NewEvent(name.encode(), type=kind) for _ in range(count)])


async def read_from(reading: PartitionReader, topic: KafkaTopic, offset: int) -> FetchResult:
    asked = PartitionFetch(topic, calls.TopicPartition(topic.id, 0), offset, 1_000_000, True)
    (found,) = await reading.read([asked], max_bytes=1_000_000)
    assert found is not None
    return found


async def fetches_across(
    dsn: str, offsets: dict[str, int], fail_over: Callable[[], None]
) -> dict[str, tuple[FetchResult, FetchResult]]:
    """For each topic what a fetch gets that is between its two steps at a failover, and what the next one gets."""
    async with await headwater.aio.connect(dsn, pool_size=4) as log:
        paused = {name: PausedLog(log, statement) for name, statement in STATEMENTS.items()}
        reads: dict[str, Callable[[], Coroutine[Any, Any, FetchResult]]] = {}
        for name, held_back in paused.items():
            # Without memory of records, so that each fetch reads them.
            broker = Broker(log, BrokerSettings("127.0.0.1", 0, cache_bytes=0))
            topic = await broker.topic_named(name)
            assert topic is not None
            reading = PartitionReader(broker)
            # What kind of events the topic has is known from here on.
            assert (await read_from(reading, topic, 0 if topic.kind == "sequenced" else 1)).records
            broker.log = held_back  # type: ignore[assignment]
            reads[name] = partial(read_from, reading, topic, offsets[name])
        under_way = {name: asyncio.create_task(read()) for name, read in reads.items()}
        async with asyncio.timeout(PATIENCE_SECONDS):
            for one in paused.values():
                await one.reached.wait()
            await asyncio.to_thread(fail_over)
            for one in paused.values():
                one.go_on.set()
            return {name: (await under_way[name], await reads[name]()) for name in reads}


def test_a_fetch_reads_nothing_of_another_history_than_it_looked_up(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-proxy-") as name:
        proxy = Proxy(cluster.dsn, Path(name))
        try:
            publish_to_each(cluster, "before", 10)
            standby = cluster.make_standby()
            cut_off_at = cluster.cut_off(standby)
            common = postgres_crashes.head(cluster)
            publish_to_each(cluster, "lost", 50)

            def fail_over() -> None:
                cluster.promote(standby, cut_off_at=cut_off_at)
                publish_to_each(cluster, "after", 50)
                proxy.switch(cluster.dsn)

            # In the middle of what is lost: the new history has other events before it.
            offsets = {"numbered": 30, "typed": 30, "quiet": common + 120}
            for topic, (read, next_read) in asyncio.run(fetches_across(proxy.dsn, offsets, fail_over)).items():
                assert read.records == b"", topic
                assert next_read.present_epoch > read.present_epoch, topic
                assert next_read.records, topic
        finally:
            proxy.close()


async def commits_across(dsn: str, offset: int, fail_over: Callable[[], None]) -> tuple[list[bool], list[int]]:
    """Commits of an offset by a broker that was there before a failover and by one that came after it; and the offset
    of the group after the last one."""
    async with await headwater.aio.connect(dsn, pool_size=2) as log:
        topic_partition = next(
            calls.TopicPartition(one.id, 0) for one in await log.run(calls.kafka_topics()) if one.name == "numbered"
        )
        epoch = await log.run(log_calls.current_epoch())
        (_, first) = await log.run(calls.kafka_register("127.0.0.1", 1, lease_seconds=60.0))
        assert await log.run(calls.kafka_take_up("readers", first)) is not None
        commit = [calls.OffsetToCommit(topic_partition, offset, epoch, "")]
        outcomes = [await log.run(calls.kafka_commit_offsets("readers", first, commit))]
        await asyncio.to_thread(fail_over)
        # The client has not heard of the new epoch, and the broker has not either.
        outcomes.append(await log.run(calls.kafka_commit_offsets("readers", first, commit)))
        outcomes.append(await log.run(calls.kafka_renew(first, lease_seconds=60.0)))
        # Registered again, with a client that brings what it has stored.
        (_, second) = await log.run(calls.kafka_register("127.0.0.1", 1, lease_seconds=60.0))
        assert await log.run(calls.kafka_take_up("readers", second)) is not None
        outcomes.append(await log.run(calls.kafka_commit_offsets("readers", second, commit)))
        return outcomes, [one.offset for one in await log.run(calls.kafka_committed("readers"))]


def test_a_commit_of_another_history_is_refused_or_ends_with_its_epoch(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-proxy-") as name:
        proxy = Proxy(cluster.dsn, Path(name))
        try:
            publish(cluster, "before", 10, ("numbered",))
            standby = cluster.make_standby()
            cut_off_at = cluster.cut_off(standby)
            publish(cluster, "lost", 50, ("numbered",))

            def fail_over() -> None:
                cluster.promote(standby, cut_off_at=cut_off_at)
                publish(cluster, "after", 50, ("numbered",))
                proxy.switch(cluster.dsn)

            outcomes, committed = asyncio.run(commits_across(proxy.dsn, 40, fail_over))
        finally:
            proxy.close()
    assert outcomes == [True, False, False, True]
    # Events 10 to 39 of the new history were not read by this client.
    assert committed == [10]
