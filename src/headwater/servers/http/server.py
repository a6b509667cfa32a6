"""The HTTP door: the API, live streams, and the console, on one port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import uvicorn

from headwater.access.password_checks import PasswordChecks
from headwater.aio import AsyncHeadwater
from headwater.errors import InvalidRequest
from headwater.servers.admission import Admission
from headwater.servers.authentication import Callers
from headwater.servers.http.app import application
from headwater.servers.http.dependencies import Served
from headwater.servers.http.sse_hub import Live
from headwater.servers.http.uvicorn_protocol import Connection
from headwater.servers.multiprocess_counters import Counts
from headwater.servers.options import Door, Opening

BACKLOG: Final = 4096
KEEP_ALIVE_SECONDS: Final = 20
# What was called off at the end of the grace may clear up for so long.
LATE_SECONDS: Final = 5.0


class _Server(uvicorn.Server):
    """One that leaves signals to whoever runs it, and tells when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def serving(
    log: AsyncHeadwater, opening: Opening, *, passwords: PasswordChecks | None = None
) -> AsyncIterator[Door]:
    """Serve HTTP until the block is left; requests under way are finished then, and live streams told the end."""
    callers = Callers(log, authenticate=opening.authenticate, passwords=passwords)
    live = Live(log, opening.limits)
    counts = Counts(opening.counts_directory)
    listener = _listener(opening)
    # It warns of every request that is no HTTP, which anybody can send without end.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    async with callers.kept_current(), live.running(), counts.kept_current():
        config = uvicorn.Config(
            application(Served(log, callers, live, opening, counts)),
            # A class for uvicorn: what makes a connection.
            http=partial(Connection, room=Admission(opening.limits.connections, Connection.evict)),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=bool(opening.trusted_proxies),
            forwarded_allow_ips=list(opening.trusted_proxies),
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=opening.limits.grace_seconds,  # type: ignore[arg-type]
            ssl_certfile=opening.certificate,
            ssl_keyfile=opening.private_key,
        )
        server = _Server(config)
        scheme = "http" if opening.certificate is None else "https"
        host = f"[{opening.host}]" if ":" in opening.host else opening.host
        door = Door(f"{scheme}://{host}:{opening.port}")
        task = asyncio.create_task(server.serve(sockets=[listener]))
        task.add_done_callback(lambda _: door.failed.set())
        try:
            await server.listens.wait()
            yield door
        finally:
            server.should_exit = True
            await asyncio.wait([task], timeout=opening.limits.grace_seconds + LATE_SECONDS)
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if called_off := set(server.server_state.tasks):
                await asyncio.wait(called_off, timeout=LATE_SECONDS)


def _listener(opening: Opening) -> socket.socket:
    """A socket of this process's own on a port that others of this server share."""
    family, *_, address = socket.getaddrinfo(
        opening.host, opening.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise InvalidRequest(
            f"{opening.host}:{opening.port} cannot be listened on: {error}", hint="Choose another port, or 0 for any."
        ) from error
    return listener
