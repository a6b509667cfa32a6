"""A receiver of webhooks for tests: a real HTTP server in a thread that records what comes and answers as told."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from patience import PATIENCE_SECONDS


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came."""

    target: str
    headers: dict[str, str]
    body: bytes
    at: float

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def position(self) -> int:
        return int(self.id.rpartition("-")[2])

    @property
    def data(self) -> Any:
        return json.loads(self.body)["data"]


@dataclass(frozen=True, slots=True)
class Reply:
    """What is answered. `drip`: the body never ends, and comes byte by byte. `hang_up`: when the next request comes."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    drip: bool = False
    hang_up: bool = False


Responder = Callable[[Received], Awaitable[Reply | None]]
"""Answers a request; None closes the connection instead."""


class Receiver:
    """Listens on a free port of this machine, from entering to leaving."""

    def __init__(
        self,
        respond: Responder | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.received: list[Received] = []
        self.connections = 0
        self.most_at_once = 0
        self.respond = respond
        self._host, self._port, self._tls = host, port, tls
        self._at_once = 0
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"http{'s' * (self._tls is not None)}://{self._host}:{self._port}/hook?a=1"

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run a function in the receiver's own thread."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(PATIENCE_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call(self._stop.set)
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._accept, self._host, self._port, ssl=self._tls)
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.ensure_future(self._converse(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.rstrip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                received = Received(first.split()[1], headers, body, time.monotonic())
                self.received.append(received)
                self._at_once += 1
                self.most_at_once = max(self.most_at_once, self._at_once)
                try:
                    reply = Reply() if self.respond is None else await self.respond(received)
                finally:
                    self._at_once -= 1
                if reply is None:
                    return
                await self._answer(writer, reply)
                if reply.hang_up:
                    await reader.read(1)
                    return
        except (asyncio.IncompleteReadError, OSError):
            return
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, reply: Reply) -> None:
        length = 1_000_000_000 if reply.drip else len(reply.body)
        lines = [f"HTTP/1.1 {reply.status} X", f"content-length: {length}"]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + reply.body)
        await writer.drain()
        while reply.drip:
            writer.write(b".")
            await writer.drain()
            await asyncio.sleep(0.01)
