"""A network that fails: connections to brokers go through here, and are cut after some bytes, answers and all."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from patience import PATIENCE_SECONDS

PROXY_HOST = "127.0.0.2"
"""What brokers advertise. They listen on 127.0.0.1, with the same ports."""


class CuttingProxy:
    """Passes bytes on between clients and brokers, and cuts each connection when it has had its share of them."""

    def __init__(self, ports: list[int], *, seed: int, least_bytes: int = 500, most_bytes: int = 30_000) -> None:
        self._ports = ports
        self._random = random.Random(seed)
        self._least, self._most = least_bytes, most_bytes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self.cuts = 0

    async def _between(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            broker_reader, broker_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.transport.abort()
            return
        left = [self._random.randint(self._least, self._most)]

        async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                while chunk := await source.read(4096):
                    left[0] -= len(chunk)
                    if left[0] < 0:
                        self.cuts += 1
                        return
                    target.write(chunk)
                    await target.drain()

        ways = [
            asyncio.ensure_future(carry(reader, broker_writer)),
            asyncio.ensure_future(carry(broker_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            # What the broker has got it goes on with; what it would answer, nobody hears.
            broker_writer.close()
            writer.transport.abort()

    async def _run(self, listening: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        for port in self._ports:
            await asyncio.start_server(partial(self._between, port), PROXY_HOST, port)
        listening.set()
        await self._stopping.wait()

    @contextmanager
    def running(self) -> Iterator[CuttingProxy]:
        listening = threading.Event()
        # What is still being carried when it stops, asyncio.run ends.
        thread = threading.Thread(target=lambda: asyncio.run(self._run(listening)), daemon=True)
        thread.start()
        assert listening.wait(PATIENCE_SECONDS)
        assert self._loop is not None
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stopping.set)
            thread.join(PATIENCE_SECONDS)
