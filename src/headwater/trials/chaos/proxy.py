"""A TCP proxy between the processes of a trial and Postgres that can cut and stall connections."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from psycopg.conninfo import make_conninfo

from headwater.trials.chaos.cluster import host_and_port

CHUNK_BYTES: Final = 65536
START_SECONDS: Final = 10.0


class Proxy:
    """Forwards bytes in both directions. Runs its own event loop in a thread."""

    def __init__(self, dsn: str, directory: Path) -> None:
        self._host, self._port = host_and_port(dsn)
        # The port in the name of its socket stays the same after a failover.
        self._own_port = self._port
        self._local = self._host.startswith("/")
        self._directory = directory
        self._clients: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._stalled_until = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            raise TimeoutError("the proxy did not start")
        if self._local:
            self.dsn = make_conninfo(dsn, host=str(directory), port=self._own_port)
        else:
            # The host name stays, so that it still matches the certificate.
            self.dsn = make_conninfo(dsn, hostaddr="127.0.0.1", port=self._tcp_port)

    def cut(self, share: float, seed: int) -> None:
        """Cut this share of the connections, including data in transit."""
        self._loop.call_soon_threadsafe(self._cut, share, random.Random(seed))

    def stall(self, seconds: float) -> None:
        """Forward nothing for this long, without closing connections."""
        self._loop.call_soon_threadsafe(self._stall, seconds)

    def switch(self, dsn: str) -> None:
        """Connect to another server from now on, and cut the connections to the old one."""
        host, port = host_and_port(dsn)
        self._loop.call_soon_threadsafe(self._switch, host, port)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(self._listen())
        self._ready.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            self._cut(1.0, random.Random())
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    async def _listen(self) -> asyncio.Server:
        if self._local:
            return await asyncio.start_unix_server(self._handle, self._directory / f".s.PGSQL.{self._own_port}")
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        self._tcp_port: int = server.sockets[0].getsockname()[1]
        return server

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        try:
            if self._local:
                server = await asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._port}")
            else:
                server = await asyncio.open_connection(self._host, self._port)
        except OSError:
            # No server: close the connection of the client.
            self._clients.discard(writer)
            writer.transport.abort()
            return
        server_reader, server_writer = server
        try:
            directions = [
                asyncio.ensure_future(self._forward(reader, server_writer)),
                asyncio.ensure_future(self._forward(server_reader, writer)),
            ]
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for direction in directions:
                direction.cancel()
        finally:
            self._clients.discard(writer)
            for end in (writer, server_writer):
                end.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await asyncio.sleep(self._stalled_until - self._loop.time())
                writer.write(data)
                await writer.drain()

    def _cut(self, share: float, rng: random.Random) -> None:
        for writer in list(self._clients):
            if rng.random() < share:
                writer.transport.abort()

    def _switch(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._cut(1.0, random.Random())

    def _stall(self, seconds: float) -> None:
        self._stalled_until = self._loop.time() + seconds
