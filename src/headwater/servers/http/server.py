"""The HTTP server: the API, SSE streams, and the console, on one port."""

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
from headwater.servers.authentication import Authenticator
from headwater.servers.http.app import create_application
from headwater.servers.http.dependencies import ServerContext
from headwater.servers.http.sse_hub import SseHub
from headwater.servers.http.uvicorn_protocol import HttpConnection
from headwater.servers.multiprocess_counters import MultiprocessCounters
from headwater.servers.options import REQUEST_PATIENCE_SECONDS, RunningServer, ServerOptions

BACKLOG: Final = 4096
KEEP_ALIVE_SECONDS: Final = 20
# How long requests that were cancelled at the end of the grace period may take to clean up.
CLEANUP_SECONDS: Final = 5.0


class _UvicornServer(uvicorn.Server):
    """A uvicorn server without signal handlers, since its process has them. `listening` is set when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@asynccontextmanager
async def serving(
    log: AsyncHeadwater, options: ServerOptions, *, passwords: PasswordChecks | None = None
) -> AsyncIterator[RunningServer]:
    """Serve HTTP until the block is left. Then requests in progress are finished and SSE streams are closed."""
    log = log.with_patience(REQUEST_PATIENCE_SECONDS)
    authenticator = Authenticator(log, authenticate=options.authenticate, passwords=passwords)
    sse = SseHub(log, options.limits)
    counters = MultiprocessCounters(options.counts_directory)
    listener = _listener(options)
    # It logs a warning for every invalid request, and any client can send those without end.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    async with authenticator.keep_current(), sse.running(), counters.keep_current():
        config = uvicorn.Config(
            create_application(ServerContext(log, authenticator, sse, options, counters)),
            # uvicorn expects a protocol class; any factory works.
            http=partial(HttpConnection, admission=Admission(options.limits.connections, HttpConnection.evict)),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=bool(options.trusted_proxies),
            forwarded_allow_ips=list(options.trusted_proxies),
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=options.limits.grace_seconds,  # type: ignore[arg-type]
            ssl_certfile=options.certificate,
            ssl_keyfile=options.private_key,
        )
        server = _UvicornServer(config)
        scheme = "http" if options.certificate is None else "https"
        host = f"[{options.host}]" if ":" in options.host else options.host
        running = RunningServer(f"{scheme}://{host}:{options.port}")
        task = asyncio.create_task(server.serve(sockets=[listener]))
        task.add_done_callback(lambda _: running.failed.set())
        try:
            await server.listening.wait()
            yield running
        finally:
            server.should_exit = True
            await asyncio.wait([task], timeout=options.limits.grace_seconds + CLEANUP_SECONDS)
            if not task.done():
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if cancelled := set(server.server_state.tasks):
                await asyncio.wait(cancelled, timeout=CLEANUP_SECONDS)


def _listener(options: ServerOptions) -> socket.socket:
    """This process's own socket on the port that the processes of the server share (SO_REUSEPORT)."""
    family, *_, address = socket.getaddrinfo(
        options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
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
            f"cannot listen on {options.host}:{options.port}: {error}",
            hint="Choose another port, or 0 for any free port.",
        ) from error
    return listener
