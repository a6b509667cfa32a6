"""Does a client that takes no answers cost a broker more than a bounded amount, and nothing once it is gone?"""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import headwater
from headwater import aio
from headwater.servers.kafka.server import MAX_UNSENT_BYTES, Connection, serving
from patience import PATIENCE_SECONDS

EVENT_BYTES = 1_000_000
EVENTS = 8
ANSWER_BYTES = EVENTS * EVENT_BYTES
ASKED = 40


def fetch(topic: str, correlation: int) -> bytes:
    """A request for all of a topic, by version 4."""
    body = struct.pack(">hhih", 1, 4, correlation, -1)
    body += struct.pack(">iiiib", -1, 0, 1, 2**31 - 1, 0)
    body += struct.pack(">ih", 1, len(topic)) + topic.encode() + struct.pack(">iiqi", 1, 0, 0, 2**31 - 1)
    return struct.pack(">i", len(body)) + body


class Client:
    """One that asks, and reads when it is told to."""

    def __init__(self, port: int) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(("127.0.0.1", port))
        self.socket.setblocking(False)
        self._loop = asyncio.get_running_loop()

    async def send(self, request: bytes) -> None:
        await self._loop.sock_sendall(self.socket, request)

    async def answer(self) -> tuple[int, int]:
        """The number of the request, and the size of the answer."""
        size = struct.unpack(">i", await self._exactly(4))[0]
        (correlation,) = struct.unpack(">i", await self._exactly(4))
        await self._exactly(size - 4)
        return correlation, size

    async def _exactly(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            part = await self._loop.sock_recv(self.socket, min(count - len(found), 2**20))
            assert part, "the connection ended"
            found += part
        return bytes(found)


async def until(question: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not question():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@pytest.fixture(scope="module", autouse=True)
def large(dsn: str) -> None:
    with headwater.connect(dsn) as log:
        log.create_topic("large", kind="sequenced", partitions=1)
        log.publish_many("large", [headwater.NewEvent(bytes(EVENT_BYTES)) for _ in range(EVENTS)])


def with_broker(dsn: str, act: Callable[[Any, list[Connection]], Awaitable[None]]) -> None:
    """Run `act` on a broker, and the connections that it got."""
    made: list[Connection] = []
    begin = Connection.connection_made

    def noted(self: Connection, transport: asyncio.BaseTransport) -> None:
        made.append(self)
        begin(self, transport)

    async def run() -> None:
        async with (
            await aio.connect(dsn, pool_size=4) as log,
            serving(log, listen_host="127.0.0.1", port=0) as broker,
        ):
            await act(broker, made)

    Connection.connection_made = noted  # type: ignore[method-assign]
    try:
        asyncio.run(run())
    finally:
        Connection.connection_made = begin  # type: ignore[method-assign]


def held_bytes(connection: Connection) -> int:
    """What waits for a client, and what its transport has of it."""
    assert connection._transport is not None
    queued = sum(len(frame) for _, frame in connection._responses._queue if isinstance(frame, bytes))  # type: ignore[attr-defined]
    return queued + connection._transport.get_write_buffer_size()


def test_a_client_that_asks_and_does_not_read_costs_little_and_nothing_once_it_is_gone(dsn: str) -> None:
    async def act(broker: Any, made: list[Connection]) -> None:
        stubborn = Client(broker.settings.port)
        for number in range(ASKED):
            await stubborn.send(fetch("large", number))
        await until(lambda: made and held_bytes(made[0]) > MAX_UNSENT_BYTES)
        # Others are served as ever. Each of their answers is time in which another for the first could be made.
        other = Client(broker.settings.port)
        for number in range(5):
            await other.send(fetch("large", number))
            correlation, size = await other.answer()
            assert (correlation, size > EVENT_BYTES) == (number, True)
            assert held_bytes(made[0]) < MAX_UNSENT_BYTES + 2 * ANSWER_BYTES
        assert made[0]._unsent_bytes <= broker.unsent_bytes < MAX_UNSENT_BYTES + 2 * ANSWER_BYTES
        other.socket.close()
        gone = weakref.ref(made[0])
        gc.disable()
        try:
            del made[:]
            stubborn.socket.close()
            await until(lambda: gone() is None)
        finally:
            gc.enable()
        await until(lambda: broker.unsent_bytes == 0)

    with_broker(dsn, act)


def test_a_client_that_reads_late_gets_every_answer_in_order(dsn: str) -> None:
    async def act(broker: Any, made: list[Connection]) -> None:
        late = Client(broker.settings.port)
        for number in range(6):
            await late.send(fetch("large", number))
        await until(lambda: made and held_bytes(made[0]) > MAX_UNSENT_BYTES)
        assert [(await late.answer())[0] for _ in range(6)] == list(range(6))
        await until(lambda: broker.unsent_bytes == 0)
        late.socket.close()

    with_broker(dsn, act)


def test_when_much_is_unsent_clients_get_a_little_at_a_time(dsn: str) -> None:
    async def act(broker: Any, made: list[Connection]) -> None:
        client = Client(broker.settings.port)
        await client.send(fetch("large", 1))
        assert (await client.answer())[1] > 2 * EVENT_BYTES
        broker.unsent_bytes += 2**40
        await client.send(fetch("large", 2))
        assert EVENT_BYTES < (await client.answer())[1] < 2 * EVENT_BYTES
        client.socket.close()

    with_broker(dsn, act)
