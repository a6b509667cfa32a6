"""The HTTP server in this process, and as a process of its own, for tests."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from psycopg import conninfo

from headwater import aio
from headwater.servers.http.server import serving
from headwater.servers.options import ServerLimits, ServerOptions
from patience import PATIENCE_SECONDS
from serve_process import serve_process

LOCAL = ServerOptions("127.0.0.1", 0, None, None, authenticate=False, loopback=True)


def free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
        return port


@contextmanager
def http_server(
    dsn: str,
    *,
    authenticate: bool = False,
    limits: ServerLimits | None = None,
    certificate: tuple[str, str] | None = None,
    trusted_proxies: tuple[str, ...] = (),
    counts_directory: str | None = None,
    pool_size: int = 6,
) -> Iterator[str]:
    """Its address. In a thread of its own, as a role that may do what the documents say that it needs."""
    options = replace(LOCAL, port=free_port(), authenticate=authenticate, limits=limits or ServerLimits())
    options = replace(options, trusted_proxies=trusted_proxies, counts_directory=counts_directory)
    if certificate is not None:
        options = replace(options, certificate=certificate[0], private_key=certificate[1])
    started: threading.Event = threading.Event()
    loop = asyncio.new_event_loop()
    stop: list[asyncio.Event] = []
    found: list[str] = []
    failures: list[BaseException] = []

    async def serve() -> None:
        stop.append(asyncio.Event())
        role = conninfo.make_conninfo(dsn, options="-c role=headwater_admin")
        async with (
            await aio.connect(role, pool_size=pool_size, application_name="server") as log,
            serving(log, options) as server,
        ):
            found.append(server.address)
            started.set()
            await stop[0].wait()
            assert not server.failed.is_set()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(PATIENCE_SECONDS)
    assert not failures, failures
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop[0].set)
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


@contextmanager
def http_process(dsn: str, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`headwater serve`, started as a user starts it: its address and the process."""
    with serve_process("--http", "127.0.0.1:0", *options, dsn=dsn) as started:
        yield started.told["http"], started.process
