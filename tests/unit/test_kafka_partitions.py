"""Do requests that look through whole partitions leave connections for others?"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from headwater.calls import Call
from headwater.calls.kafka import Bounds, TopicPartition
from headwater.servers.kafka.api_keys import ApiKey
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.partitions import MAX_TIMESTAMP, SCANS_AT_A_TIME, PartitionApis
from headwater.servers.kafka.wire import Request


def test_few_partitions_are_looked_through_for_a_time_at_once() -> None:
    running = most = 0

    async def run_call(call: Call[Any]) -> Any:
        nonlocal running, most
        if "epoch" in call.sql:
            return 1
        if "kafka_offset_at" not in call.sql:
            return {TopicPartition(1, 0): Bounds(0, 100)}
        running += 1
        most = max(most, running)
        for _ in range(10):
            await asyncio.sleep(0)
        running -= 1
        return (7, 1000)

    async def topic_named(name: str) -> Any:
        return SimpleNamespace(id=1)

    async def run() -> list[int]:
        topic_partitions = PartitionApis(
            cast(Broker, SimpleNamespace(topic_named=topic_named, log=SimpleNamespace(run=run_call)))
        )
        requests = []
        for time_ms in (*range(15), MAX_TIMESTAMP):
            part = SimpleNamespace(partition_index=0, timestamp=time_ms)
            fields = SimpleNamespace(topics=[SimpleNamespace(name="t", partitions=[part])])
            requests.append(topic_partitions.list_offsets(Request(ApiKey.LIST_OFFSETS, 7, 1, None, fields)))
        answers = await asyncio.gather(*requests)
        return [answer["topics"][0]["partitions"][0]["offset"] for answer in answers]

    assert asyncio.run(run()) == [7] * 16
    assert most == SCANS_AT_A_TIME
