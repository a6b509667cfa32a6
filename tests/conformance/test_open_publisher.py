"""Do live readers by gRPC, by Kafka and of an event store wait for publishers of their own topics only?"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from brokers import BrokerProcess
from raw_client import Raw

import headwater
from headwater.eventstore import NewStoreEvent
from headwater.servers.kafka.wire import ErrorCode
from patience import PATIENCE_SECONDS

grpc = pytest.importorskip("grpc")
from rpc_servers import rpc_server  # noqa: E402

from headwater.servers.grpc.client import service  # noqa: E402
from headwater.servers.grpc.generated import headwater_pb2 as pb  # noqa: E402

FETCH = 1


@pytest.fixture
def elsewhere(log: headwater.Headwater, topic: str, connection: psycopg.Connection[Any]) -> Iterator[str]:
    """Another topic that a transaction has published to, which stays open."""
    other = log.create_topic(f"{topic}-elsewhere").name
    with connection.transaction(force_rollback=True):
        log.publish(other, "held", connection=connection)
        assert log.state().stable < log.state().head
        yield other


def test_a_grpc_follower_goes_on_beside_a_publisher_to_another_topic(
    dsn: str, log: headwater.Headwater, topic: str, elsewhere: str
) -> None:
    with rpc_server(dsn=dsn) as server, grpc.insecure_channel(server.address) as channel:
        answers = service(channel, "headwater.v1.Log").Follow(
            pb.FollowRequest(topics=[topic]), timeout=PATIENCE_SECONDS
        )
        for n in range(3):
            log.publish(topic, n)
            assert [event.payload for event in next(answers).events] == [b"%d" % n]
        answers.cancel()


def test_a_kafka_fetch_that_waits_goes_on_beside_a_publisher_to_another_topic(
    broker: BrokerProcess, log: headwater.Headwater, topic: str, elsewhere: str
) -> None:
    raw = Raw(broker)
    with closing(raw.socket):
        last = log.publish(topic, "first")
        for n in range(2):
            part = {"partition": 0, "fetch_offset": (last or 0) + 1, "partition_max_bytes": 1000}
            fields = {"max_wait": PATIENCE_SECONDS * 1000, "min_bytes": 1, "max_bytes": 1000}
            raw.send(FETCH, 12, {**fields, "topics": [{"topic": topic, "partitions": [part]}]})
            last = log.publish(topic, n)
            answer = raw.receive(FETCH, 12).responses[0].partitions[0]
            assert answer.error_code == ErrorCode.none
            assert answer.records


def test_an_event_store_goes_on_beside_a_publisher_to_another_topic(
    log: headwater.Headwater, topic: str, elsewhere: str
) -> None:
    store = log.create_store(f"{topic}-store")
    got: list[str] = []
    arrived = threading.Semaphore(0)

    def follow() -> None:
        for event in store.subscribe():
            got.append(event.type)
            arrived.release()
            if len(got) == 2:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    for n in range(2):
        store.append([NewStoreEvent(f"Type{n}", {})])
        assert arrived.acquire(timeout=PATIENCE_SECONDS)
    thread.join(PATIENCE_SECONDS)
    assert got == ["Type0", "Type1"]
