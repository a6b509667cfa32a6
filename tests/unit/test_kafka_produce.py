"""Do large batches leave the event loop to others, and does what waits count as what it is?"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import google_crc32c
import pytest

from headwater.calls.kafka import AppendBatch, KafkaTopic, ProduceResult
from headwater.servers.kafka import produce
from headwater.servers.kafka.api_keys import ApiKey
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.produce import MAX_BATCH_RECORDS, RECORD_BYTES, SMALL_RECORDS, YIELD_RECORDS, ProduceApi
from headwater.servers.kafka.records import TRANSACTIONAL, Columns, build_batch, read_header, read_records
from headwater.servers.kafka.wire import ErrorCode, Request
from patience import PATIENCE_SECONDS

TOPIC = KafkaTopic(
    1, "t", "sequenced", writable=True, partitions=1, retention=None, max_payload_bytes=10_000_000,
    max_header_bytes=10_000, timestamp_type="CreateTime", compression_type="producer", compacted=False,
    tombstones_kept=timedelta(days=1), retention_bytes=None, schemas=None, deletes=True, settings={},
)  # fmt: skip


def batch(count: int, value: bytes = b"v", codec: int = 0) -> bytes:
    columns = Columns([1] * count, [None] * count, [value] * count, [None] * count)
    return build_batch(range(count), columns, codec=codec)


def transactional(made: bytes) -> bytes:
    changed = bytearray(made)
    changed[22] |= TRANSACTIONAL
    struct.pack_into(">I", changed, 17, google_crc32c.value(bytes(changed[21:])))
    return bytes(changed)


class RunningServer:
    """What takes batches; nothing of it is written unless the test says so."""

    def __init__(self) -> None:
        async def topic_named(name: str) -> KafkaTopic:
            return TOPIC

        self.producing = ProduceApi(cast(Broker, SimpleNamespace(topic_named=topic_named, log=None)))
        self.staged = asyncio.Event()

    @property
    def reserved_bytes(self) -> int:
        return self.producing._budget.reserved_bytes

    async def begin(self, *batches: bytes, transactional_id: str | None = None) -> Any:
        parts = [SimpleNamespace(index=0, records=memoryview(one)) for one in batches]
        data = SimpleNamespace(name="t", partition_data=parts)
        fields = SimpleNamespace(acks=-1, transactional_id=transactional_id, topic_data=[data])
        return await self.producing.begin(Request(ApiKey.PRODUCE, 9, 1, None, fields), self._stage)

    async def _stage(self, transactional_id: str, batch: AppendBatch) -> ProduceResult:
        await self.staged.wait()
        return ProduceResult("staged", -1, -1)


@pytest.fixture
def unpacked_by(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each batch was unpacked by the thread of the event loop."""
    found: list[bool] = []

    def noted(*arguments: Any, **options: Any) -> Columns:
        columns = read_records(*arguments, **options)
        found.append(threading.current_thread() is threading.main_thread())
        return columns

    monkeypatch.setattr(produce, "read_records", noted)
    return found


@pytest.mark.parametrize(
    ("made", "on_loop"),
    [
        (batch(10), True),
        (batch(10, bytes(1000), codec=4), True),
        (batch(SMALL_RECORDS + 1), False),
        (batch(2, bytes(1_000_000)), False),
        # A few bytes that become many.
        (batch(10, bytes(1_000_000), codec=4), False),
    ],
    ids=["small", "small and packed", "many records", "many bytes", "packed well"],
)
def test_only_small_batches_are_unpacked_on_the_event_loop(made: bytes, on_loop: bool, unpacked_by: list[bool]) -> None:
    async def run() -> None:
        (await RunningServer().begin(made)).close()

    asyncio.run(run())
    assert unpacked_by == [on_loop]


def test_others_have_a_turn_between_batches_that_come_together() -> None:
    async def run() -> int:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        server = RunningServer()
        for _ in range(20):
            (await server.begin(batch(YIELD_RECORDS // 2))).close()
        beside.cancel()
        return turns

    assert asyncio.run(run()) >= 5


def test_a_batch_of_too_many_records_is_refused_before_it_is_unpacked(unpacked_by: list[bool]) -> None:
    made = batch(MAX_BATCH_RECORDS + 1)
    assert read_header(memoryview(made)).record_count == MAX_BATCH_RECORDS + 1

    async def run() -> Any:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await (await RunningServer().begin(made))

    (part,) = asyncio.run(run())["responses"][0]["partition_responses"]
    assert part["error_code"] is ErrorCode.message_too_large
    assert unpacked_by == []


def test_many_small_records_count_as_what_they_take_and_so_do_those_of_transactions() -> None:
    async def run() -> Sequence[int]:
        server = RunningServer()
        (await server.begin(batch(1000))).close()
        plain = server.reserved_bytes
        answer = await server.begin(transactional(batch(1000)), transactional_id="x")
        both = server.reserved_bytes
        server.staged.set()
        await answer
        return plain, both, server.reserved_bytes

    plain, both, left = asyncio.run(run())
    assert plain >= 1000 * RECORD_BYTES
    assert (both, left) == (2 * plain, plain)


def test_no_batch_is_taken_while_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce, "MAX_PENDING_BYTES", 50_000)

    async def run() -> None:
        server = RunningServer()
        first = await server.begin(transactional(batch(1000)), transactional_id="x")
        second = asyncio.create_task(server.begin(batch(1000)))
        third = asyncio.create_task(server.begin(batch(SMALL_RECORDS + 1)))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not second.done()
        assert not third.done()
        assert server.reserved_bytes < 2 * 1000 * RECORD_BYTES
        server.staged.set()
        await first
        async with asyncio.timeout(PATIENCE_SECONDS):
            (await second).close()
        third.cancel()

    asyncio.run(run())
