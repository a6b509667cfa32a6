"""The HTTP server: publishing, and 2,000 SSE streams on one process with one publisher."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import headwater
import headwater.aio
from bench import _measure as measure
from bench._serving import serving
from headwater.cli import open_files

# What its page relies on: a number in the last line of every run, also with --quick.
PROMISED = ("publish_per_s", "publish_batched_per_s", "sse_events_per_s", "kib_per_connection")

PAYLOAD = {"customer": "c-17", "total": 4250, "note": "x" * 60}
TOPIC = "bench"


@contextmanager
def http_server(dsn: str) -> Iterator[tuple[str, int, int]]:
    """Run one HTTP server process; yields its host, port and process id."""
    with serving(dsn, "--http", "127.0.0.1:0", "--requests-per-second", "0") as (ready, pid):
        host, _, port = ready["http"].removeprefix("http://").partition(":")
        yield host, int(port), pid


class Client:
    """A cheap client: one connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader, self._writer, self._host = reader, writer, host

    async def post(self, path: str, body: bytes) -> None:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        status = await self._reader.readline()
        assert b" 200 " in status, status
        length = 0
        while (line := await self._reader.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def clients(host: str, port: int, count: int) -> AsyncIterator[list[Client]]:
    made = [Client(*await asyncio.open_connection(host, port), f"{host}:{port}") for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.close()


async def publish(host: str, port: int, *, connections: int, batch: int, seconds: float) -> float:
    """Events per second, with a number of events per request and of connections."""
    event = {"type": "order.placed", "key": "c-17", "data": PAYLOAD}
    body = json.dumps(event if batch == 1 else {"events": [event] * batch}).encode()
    done = 0

    async def work(client: Client, until: float) -> None:
        nonlocal done
        while time.monotonic() < until:
            await client.post(f"/v1/topics/{TOPIC}/events", body)
            done += batch

    async with clients(host, port, connections) as made:
        started = time.monotonic()
        await asyncio.gather(*(work(client, started + seconds) for client in made))
        return done / (time.monotonic() - started)


def resident_kib(pid: int) -> int:
    """The memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


class Counter(asyncio.Protocol):
    """Count the events of an SSE stream."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._rest = b""
        self.events = 0
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        whole = self._rest + data
        self.events += whole.count(b"\ndata: ")
        self._rest = whole[-6:] if not whole.endswith(b"\ndata: ") else b""
        if not self.answered.done():
            self.answered.set_result(None)


async def streams(host: str, port: int, pid: int, dsn: str, *, count: int, events: int) -> dict[str, float]:
    """SSE streams with one publisher: memory per stream, and delivered events per second."""
    loop = asyncio.get_running_loop()
    request = f"GET /v1/topics/{TOPIC}/follow HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
    before = resident_kib(pid)
    transports, counters = [], []
    started = time.monotonic()
    for first in range(0, count, 100):
        for _ in range(min(100, count - first)):
            transport, counter = await loop.create_connection(lambda: Counter(request), host, port)
            transports.append(transport)
            counters.append(counter)
        await asyncio.wait_for(asyncio.gather(*(one.answered for one in counters)), 60)
    opened = time.monotonic() - started
    await asyncio.sleep(1)
    kib = (resident_kib(pid) - before) / count
    async with await headwater.aio.connect(dsn, pool_size=1) as log:
        batch = [headwater.NewEvent(PAYLOAD, type="order.placed", key="c-17") for _ in range(10)]
        started = time.monotonic()
        for _ in range(events // 10):
            await log.publish_batch(TOPIC, batch)
        deadline = time.monotonic() + 120
        while any(counter.events < events for counter in counters):
            assert time.monotonic() < deadline, "events did not arrive"
            await asyncio.sleep(0.01)
        spent = time.monotonic() - started
    for transport in transports:
        transport.close()
    return {"kib": kib, "per_s": count * events / spent, "opened_per_s": count / opened}


def main() -> None:
    options = measure.arguments(__doc__ or "")
    open_files.raise_limit(65536)
    seconds = options.sized(10.0, 2.0, 0.1)
    count, events = options.sized((2000, 1000), (2000, 100), (20, 10))
    with measure.measured_server(options.dsn) as server, http_server(server.dsn) as (host, port, pid):
        with headwater.connect(server.dsn) as log:
            log.create_topic(TOPIC)
        one = asyncio.run(publish(host, port, connections=16, batch=1, seconds=seconds))
        many = asyncio.run(publish(host, port, connections=4, batch=100, seconds=seconds))
        live = asyncio.run(streams(host, port, pid, server.dsn, count=count, events=events))
        rows: list[tuple[Any, ...]] = [
            ("publish, one event per request, 16 connections", f"{one:,.0f} events/s"),
            ("publish, 100 events a request, 4 connections", f"{many:,.0f} events/s"),
            (f"{count:,} SSE streams, opened", f"{live['opened_per_s']:,.0f} /s"),
            (f"{count:,} SSE streams, events brought", f"{live['per_s']:,.0f} events/s"),
            (f"{count:,} SSE streams, memory of each", f"{live['kib']:.1f} KiB"),
        ]
        measure.table("one process, one publisher", ("", "figure"), rows)
        measure.finish(
            server,
            options,
            "http",
            {
                "publish_per_s": round(one),
                "publish_batched_per_s": round(many),
                "sse_events_per_s": round(live["per_s"]),
                "kib_per_connection": round(live["kib"], 1),
                "connections": count,
            },
        )


if __name__ == "__main__":
    main()
