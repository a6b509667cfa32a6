"""The registry of schemas, served over HTTP from a thread of the tests."""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from psycopg import conninfo
from starlette.responses import JSONResponse

from headwater import aio
from headwater.server.callers import Callers, NotAuthenticated
from headwater.server.http import registry

PATIENCE_SECONDS = 20


class _Admission:
    """Finds out who calls, as the HTTP door does."""

    def __init__(self, app: Any, state: Any) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"").decode()
            try:
                if given.startswith("Basic "):
                    name, _, password = base64.b64decode(given[6:]).decode().partition(":")
                    scope["headwater.caller"] = await self._state.callers.by_password(name, password)
                else:
                    scope["headwater.caller"] = self._state.callers.everybody()
            except NotAuthenticated as error:
                await JSONResponse({"error_code": 40101, "message": error.message}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


@contextmanager
def registry_server(dsn: str, *, authenticate: bool = False) -> Iterator[str]:
    """The address of a registry on this database."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # With no more rights than the documents say that it needs.
        own = conninfo.make_conninfo(dsn, options="-c role=headwater_admin")
        async with await aio.connect(own, pool_size=4) as log:
            app.state.log = log
            app.state.callers = Callers(log, authenticate=authenticate)
            async with app.state.callers.kept_current():
                yield

    app = FastAPI(lifespan=lifespan)
    app.include_router(registry.router)
    app.add_middleware(_Admission, state=app.state)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
        ready = threading.Event()
        started = server.startup

        async def startup(sockets: Any = None) -> None:
            await started(sockets)
            ready.set()

        server.startup = startup  # type: ignore[method-assign]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            assert ready.wait(PATIENCE_SECONDS)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(PATIENCE_SECONDS)
