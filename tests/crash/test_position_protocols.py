"""Does a reader by a protocol, or of an event store, skip an event whose position was issued again?"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psycopg
import pytest
from psycopg_pool import PoolClosed
from tests.crash import postgres_crashes

import headwater
from headwater.errors import LogUnavailable
from headwater.eventstore import execute
from headwater.eventstore.decider import Decider, Snapshots
from headwater.eventstore.query import LatestMatchIs, NewStoreEvent, NoMatchAfter, Query
from headwater.servers.grpc.client import service
from headwater.servers.grpc.generated import headwater_pb2 as pb
from headwater.trials.chaos.cluster import Cluster, connected
from headwater.trials.chaos.proxy import Proxy
from patience import PATIENCE_SECONDS
from serve_process import serve_process

TOPIC, BUSY, STORE, QUEUE, FILTERED = "quiet", "busy", "decisions", "workers", "filtered"
# How a reader may fail; at the end it does, since what it reads from is closed.
FAILURES = (
    AssertionError,
    LookupError,
    ValueError,
    OSError,
    RuntimeError,
    httpx.HTTPError,
    httpx.StreamError,
    grpc.RpcError,
    headwater.HeadwaterError,
    psycopg.Error,
    PoolClosed,
)
Take = Callable[[str], None]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="headwater-protocols-", ignore_cleanup_errors=True) as name:
        cluster = postgres_crashes.make_cluster(Path(name))
        try:
            with headwater.connect(cluster.dsn, pool_size=1) as log:
                log.create_topic(TOPIC)
                log.create_topic(BUSY)
                log.create_store(STORE)
                log.create_queue(QUEUE, topics=[TOPIC])
                log.subscribe(FILTERED, "e.topic = 'quiet'", {})
            yield cluster
        finally:
            cluster.close()
            cluster.server.kill()


class Readers:
    """Readers that live on through whatever happens to Postgres, each in a thread."""

    def __init__(self, dsn: str, http: str, rpc: str) -> None:
        self.dsn, self.http, self.rpc = dsn, http, rpc
        self.got: dict[str, list[str]] = {}
        self.errors: list[BaseException] = []
        self.over = threading.Event()
        self.endings: list[Callable[[], None]] = []

    def start(self, name: str, read: Callable[[Readers, Take], None]) -> None:
        got = self.got.setdefault(name, [])

        def run() -> None:
            try:
                read(self, got.append)
                raise AssertionError(f"the reader {name} ended")
            except FAILURES as error:
                if not self.over.is_set():
                    self.errors.append(error)

        threading.Thread(target=run, daemon=True, name=name).start()

    def wait_for(self, topic: set[str], store: set[str]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            missing = {
                name: sorted((store if name.startswith("store") else topic) - set(got))
                for name, got in self.got.items()
            }
            assert not self.errors, (self.errors, missing)
            if not any(missing.values()):
                return
            assert time.monotonic() < deadline, f"never delivered: {missing}"
            time.sleep(0.05)

    def end(self) -> None:
        self.over.set()
        for ending in self.endings:
            ending()


def parsed(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """The parts of an SSE stream, by field."""
    part: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            part[name] = value.removeprefix(" ")
        elif part:
            yield part
            part = {}


def sse(path: str, *, reconnects: bool = False) -> Callable[[Readers, Take], None]:
    """An SSE client: one that stays connected, or one that comes again with its last id after each event."""

    def read(readers: Readers, take: Take) -> None:
        headers: dict[str, str] = {}
        with httpx.Client(base_url=readers.http, timeout=PATIENCE_SECONDS) as client:
            readers.endings.append(client.close)
            while True:
                with client.stream("GET", path, headers=headers) as response:
                    if response.status_code == 503:
                        time.sleep(0.1)
                        continue
                    assert response.status_code == 200, response.read()
                    for part in parsed(response.iter_lines()):
                        if "id" in part:
                            headers["Last-Event-ID"] = part["id"]
                        if part.get("event") == "end":
                            raise AssertionError(f"a stream that went on before ended: {part}")
                        if "data" in part:
                            take(json.loads(part["data"])["data"]["n"])
                            if reconnects:
                                break

    return read


def rpc_follow(readers: Readers, take: Take) -> None:
    channel = grpc.insecure_channel(readers.rpc)
    readers.endings.append(channel.close)
    for answer in service(channel, "headwater.v1.Log").Follow(pb.FollowRequest(topics=[TOPIC])):
        assert answer.epoch
        for event in answer.events:
            take(json.loads(event.payload)["n"])


def rpc_subscribe(readers: Readers, take: Take) -> None:
    channel = grpc.insecure_channel(readers.rpc)
    readers.endings.append(channel.close)
    for answer in service(channel, "headwater.v1.EventStore").Subscribe(pb.SubscribeRequest(store=STORE)):
        assert answer.epoch
        for event in answer.events:
            take(json.loads(event.payload)["n"])


def store_subscribe(**options: Any) -> Callable[[Readers, Take], None]:
    def read(readers: Readers, take: Take) -> None:
        with headwater.connect(readers.dsn, pool_size=2) as log:
            readers.endings.append(log.close)
            for event in log.store(STORE).subscribe(patience_seconds=None, **options):
                take(event.data["n"])

    return read


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    with tempfile.TemporaryDirectory(prefix="headwater-proxy-") as name:
        proxy = Proxy(cluster.dsn, Path(name))
        try:
            yield proxy
        finally:
            proxy.close()


@pytest.fixture
def readers(proxy: Proxy) -> Iterator[Readers]:
    with serve_process("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", dsn=proxy.dsn) as started:
        readers = Readers(proxy.dsn, started.told["http"], started.told["grpc"])
        with connected(proxy.dsn) as connection:
            row = connection.execute("select id from headwater_internal.subscription").fetchone()
            assert row is not None
        readers.start("sse", sse(f"/v1/topics/{TOPIC}/follow?after=0"))
        readers.start("sse that reconnects", sse(f"/v1/topics/{TOPIC}/follow?after=0", reconnects=True))
        readers.start("sse that selects", sse(f"/v1/topics/{TOPIC}/follow?after=0&type=t"))
        readers.start("sse of a queue", sse(f"/v1/queues/{QUEUE}/follow?after=0"))
        readers.start("sse of a filter", sse(f"/v1/subscriptions/{FILTERED}/{row[0]}/follow?after=0"))
        readers.start("gRPC follow", rpc_follow)
        readers.start("store by gRPC", rpc_subscribe)
        readers.start("store", store_subscribe())
        readers.start("store with a cursor", store_subscribe(cursor="projection"))
        try:
            yield readers
        finally:
            readers.end()


def publish(dsn: str, name: str, count: int) -> set[str]:
    """To the quiet topic and to the store."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    numbers = [f"{name}-{n}" for n in range(count)]
    while True:
        try:
            with headwater.connect(dsn, pool_size=1) as log:
                log.publish_batch(TOPIC, [headwater.NewEvent({"n": n}, type="t", event_id=n) for n in numbers])
                log.store(STORE).append([NewStoreEvent("Decided", {"n": n}, event_id=n) for n in numbers])
            return set(numbers)
        except LogUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def move_head(dsn: str, count: int) -> None:
    with connected(dsn) as connection:
        connection.execute("select headwater.publish(%s, '{}') from generate_series(1, %s)", (BUSY, count))


def test_after_a_crash_no_reader_of_a_protocol_skips_an_event(cluster: Cluster, readers: Readers) -> None:
    wanted = publish(cluster.dsn, "first", 1)
    readers.wait_for(wanted, wanted)
    for number in range(2):
        before, after = postgres_crashes.take_positions_back(cluster, BUSY)
        assert after < before
        wanted |= publish(cluster.dsn, f"crash{number}", 20)
        # What others publish moves the head beyond where it was.
        move_head(cluster.dsn, before - after + 50)
        wanted |= publish(cluster.dsn, f"later{number}", 1)
        readers.wait_for(wanted, wanted)


def test_after_a_failover_to_a_standby_that_lags_no_reader_of_a_protocol_skips_an_event(
    cluster: Cluster, proxy: Proxy, readers: Readers
) -> None:
    wanted = publish(cluster.dsn, "first", 5)
    readers.wait_for(wanted, wanted)
    standby = cluster.make_standby()
    cut_off_at = cluster.cut_off(standby)
    # These are lost, and readers have them: their positions are issued again.
    lost = publish(cluster.dsn, "lost", 100)
    readers.wait_for(wanted | lost, wanted | lost)
    cluster.promote(standby, cut_off_at=cut_off_at)
    proxy.switch(cluster.dsn)
    wanted |= publish(cluster.dsn, "next", 20)
    move_head(cluster.dsn, 400)
    wanted |= publish(cluster.dsn, "later", 1)
    readers.wait_for(wanted, wanted)


def test_a_position_of_another_epoch_is_refused_by_every_protocol(cluster: Cluster) -> None:
    publish(cluster.dsn, "first", 5)
    with (
        serve_process("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", dsn=cluster.dsn) as started,
        httpx.Client(base_url=started.told["http"], timeout=PATIENCE_SECONDS) as client,
        grpc.insecure_channel(started.told["grpc"]) as channel,
    ):
        page = client.get(f"/v1/topics/{TOPIC}/events", params={"limit": 2}).json()
        assert f"epoch={page['epoch']}" in page["next"]
        assert len(client.get(f"/v1/topics/{TOPIC}/events{page['next']}").json()["events"]) == 2
        read = {"query": {"items": [{"types": ["Decided"]}]}}
        decided = client.post(f"/v1/stores/{STORE}/read", json=read).json()
        assert decided["epoch"] == page["epoch"]
        last = decided["events"][-1]["position"]
        cluster.server.kill()
        cluster.server.start()
        publish(cluster.dsn, "second", 1)
        refused = client.get(f"/v1/topics/{TOPIC}/events", params={"after": last, "epoch": page["epoch"]})
        problem = refused.json()
        assert (refused.status_code, problem["type"]) == (409, "urn:headwater:error:EpochChanged")
        assert problem["epoch"] > page["epoch"]
        assert problem["common_position"] <= last
        beyond = client.get(f"/v1/topics/{TOPIC}/follow", params={"after": 1 << 40})
        assert (beyond.status_code, beyond.json()["type"]) == (409, "urn:headwater:error:EpochChanged")
        assert client.get(f"/v1/topics/{TOPIC}/events", params={"after": 1 << 40}).status_code == 409
        for condition in ({"after": last}, {"latest": last}):
            append = {
                "events": [{"type": "Decided", "data": {"n": "x"}}],
                "condition": {**read, **condition, "epoch": decided["epoch"]},
            }
            refused = client.post(f"/v1/stores/{STORE}/append", json=append)
            assert (refused.status_code, refused.json()["type"]) == (409, "urn:headwater:error:EpochChanged")
        log, store = service(channel, "headwater.v1.Log"), service(channel, "headwater.v1.EventStore")
        epoch = page["epoch"]
        condition_message = pb.Condition(no_match_after=last, epoch=epoch)
        for call, request in (
            (log.Read, pb.ReadRequest(topics=[TOPIC], after=last, epoch=epoch)),
            (log.AdvanceCursor, pb.AdvanceCursorRequest(cursor="c", to_position=last, epoch=epoch)),
            (store.ReadMatching, pb.ReadMatchingRequest(store=STORE, after=last, epoch=epoch)),
            (
                store.Append,
                pb.AppendRequest(store=STORE, events=[pb.NewStoreEvent(type="A")], condition=condition_message),
            ),
        ):
            with pytest.raises(grpc.RpcError) as error:
                call(request, timeout=PATIENCE_SECONDS)
            assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            told = json.loads(dict(error.value.trailing_metadata())["headwater-error-bin"])
            assert told["error"] == "EpochChanged"
            assert told["detail"]["epoch"] == problem["epoch"]


def test_a_decision_on_events_that_a_failover_lost_is_refused_and_made_again(cluster: Cluster, proxy: Proxy) -> None:
    seats = Query.of(tags=["show:1"])
    counting: Decider[int, str] = Decider(
        query=lambda _: seats,
        initial=lambda: 0,
        evolve=lambda count, _: count + 1,
        decide=lambda count, name: [NewStoreEvent("SeatTaken", {"seat": count, "by": name}, ["show:1"])],
    )
    kept: Snapshots[int] = Snapshots()
    with headwater.connect(proxy.dsn, pool_size=2) as log:
        store = log.store(STORE)
        execute(store, counting, "a", snapshots=kept)
        standby = cluster.make_standby()
        cut_off_at = cluster.cut_off(standby)
        # Lost: what the process knows of them, it must not go by.
        for name in "bcdefghijklmnopqrstuvwxyz" * 4:
            execute(store, counting, name, snapshots=kept)
        page = store.read_page(seats, batch_size=1000)
        latest = store.latest(seats)
        assert (len(page.events), latest.epoch) == (101, page.epoch)
        cluster.promote(standby, cut_off_at=cut_off_at)
        proxy.switch(cluster.dsn)
        publish(cluster.dsn, "other", 1)
        move_head(cluster.dsn, 300)
        with headwater.connect(cluster.dsn, pool_size=1) as other:
            # At a position that was issued again, below that of the lost ones or not.
            assert execute(other.store(STORE), counting, "other").state == 1
        taken = NewStoreEvent("SeatTaken", {"seat": 101, "by": "late"}, ["show:1"])
        for condition in (
            NoMatchAfter(seats, page.events[-1].position, page.epoch),
            LatestMatchIs(seats, latest.position, latest.epoch),
        ):
            with pytest.raises(headwater.EpochChanged) as refused:
                store.append(taken, condition)
            assert refused.value.epoch > page.epoch
        with pytest.raises(headwater.EpochChanged):
            store.append(taken, NoMatchAfter(seats, 1 << 40))
        with pytest.raises(headwater.EpochChanged):
            store.read(seats, after=page.events[-1].position, epoch=page.epoch)
        # The state that it had kept is of lost events: it begins again, and finds those that are there.
        assert execute(store, counting, "again", snapshots=kept).state == 2
        assert [event.data["by"] for event in store.read(seats)] == ["a", "other", "again"]
