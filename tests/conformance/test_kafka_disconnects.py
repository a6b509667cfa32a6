"""Does an idempotent producer write everything once and in order when its connections break?"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from brokers import broker_process
from cutting_proxy import PROXY_HOST, CuttingProxy

import headwater
from patience import PATIENCE_SECONDS

confluent = pytest.importorskip("confluent_kafka")
from confluent_kafka import Producer  # noqa: E402

_names = itertools.count()
PARTITIONS = 3


@pytest.fixture
def topic(log: headwater.Headwater) -> str:
    return log.create_topic(f"fault-{next(_names)}", kind="sequenced", partitions=PARTITIONS).name


def in_log(log: headwater.Headwater, topic: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
    for event in log.read(topic, batch_size=100_000):
        found[event.partition].append(int((event.payload or b"").split(b" ")[0]))
    return found


@pytest.fixture(scope="module", params=[1, 3], ids=["one-broker", "three-brokers"])
def proxied(request: pytest.FixtureRequest, dsn: str) -> Iterator[list[str]]:
    with broker_process(dsn, "--processes", str(request.param), "--advertise", PROXY_HOST) as started:
        yield started.addresses


@pytest.fixture
def proxy(proxied: list[str]) -> Iterator[CuttingProxy]:
    ports = [int(address.rpartition(":")[2]) for address in proxied]
    with CuttingProxy(ports, seed=len(ports)).running() as running:
        yield running


def by_librdkafka(bootstrap: str, topic: str, values: list[bytes]) -> None:
    failed: list[Any] = []
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "batch.size": 1000,
            "linger.ms": 1,
            "reconnect.backoff.ms": 5,
            "reconnect.backoff.max.ms": 50,
            "retry.backoff.ms": 5,
            "retry.backoff.max.ms": 50,
            "message.timeout.ms": PATIENCE_SECONDS * 1000,
            "log_level": 0,
        }
    )
    for number, value in enumerate(values):
        producer.produce(topic, value, partition=number % PARTITIONS, on_delivery=lambda e, m: e and failed.append(e))
        producer.poll(0.0005)
    assert producer.flush(PATIENCE_SECONDS) == 0
    assert failed == []


def by_kafka_python(bootstrap: str, topic: str, values: list[bytes]) -> None:
    kafka = pytest.importorskip("kafka")
    producer = kafka.KafkaProducer(
        bootstrap_servers=bootstrap, enable_idempotence=True, batch_size=1000, linger_ms=1, retry_backoff_ms=20,
        reconnect_backoff_ms=5, reconnect_backoff_max_ms=50, delivery_timeout_ms=PATIENCE_SECONDS * 1000,
    )  # fmt: skip
    sent = [producer.send(topic, value, partition=number % PARTITIONS) for number, value in enumerate(values)]
    producer.flush(PATIENCE_SECONDS)
    for one in sent:
        one.get(PATIENCE_SECONDS)
    producer.close()


def by_aiokafka(bootstrap: str, topic: str, values: list[bytes]) -> None:
    aiokafka = pytest.importorskip("aiokafka")

    async def run() -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=bootstrap, enable_idempotence=True, max_batch_size=1000, linger_ms=1, retry_backoff_ms=20
        )
        await producer.start()
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                sent = [
                    await producer.send(topic, value, partition=number % PARTITIONS)
                    for number, value in enumerate(values)
                ]
                await asyncio.gather(*sent)
        finally:
            await producer.stop()

    asyncio.run(run())


@pytest.mark.parametrize("produce", [by_librdkafka, by_kafka_python, by_aiokafka])
def test_an_idempotent_producer_whose_connections_break_writes_everything_once_and_in_order(
    proxy: CuttingProxy, proxied: list[str], produce: Any, log: headwater.Headwater, topic: str
) -> None:
    count = 1200
    produce(",".join(proxied), topic, [b"%d " % number + b"x" * 150 for number in range(count)])
    assert proxy.cuts > 5
    assert in_log(log, topic) == {p: list(range(p, count, PARTITIONS)) for p in range(PARTITIONS)}
