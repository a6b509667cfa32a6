"""Network connections of the Kafka server.

Each connection is a `Connection` with two tasks: `_serve` takes the frames in order and begins each request, `_write`
sends the responses in the order of their requests. Only Produce requests overlap; every other request completes before
the next one begins.
Invariants: every buffer has a limit (frames not begun, responses not sent, bytes of both); an invalid frame ends its
own connection only; records that have arrived are written even if the client disconnects, since a producer with acks=0
may send them and close.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from logging import INFO, WARNING
from typing import Any, Final, cast

import psycopg

from headwater.access.password_checks import PasswordChecks
from headwater.aio import AsyncHeadwater
from headwater.errors import HeadwaterError
from headwater.observability.metrics import ERROR, logger
from headwater.servers.admission import Admission
from headwater.servers.kafka.api_keys import SUPPORTED_VERSIONS, ApiKey
from headwater.servers.kafka.broker import Broker, BrokerSettings, end_tasks
from headwater.servers.kafka.dispatch import ApiDispatcher, Response, api_versions
from headwater.servers.kafka.security import SaslSession
from headwater.servers.kafka.wire import (
    ErrorCode,
    MalformedRequest,
    Request,
    UnsupportedRequest,
    encode_response,
    read_request,
)

INITIAL_BUFFER_BYTES: Final = 64 * 1024
MAX_OTHER_FRAME_BYTES: Final = 16 * 1024 * 1024
"""Maximum frame of any request but Produce."""
MAX_WAITING_FRAMES: Final = 32
MAX_WAITING_BYTES: Final = 16 * 1024 * 1024
"""Limits of frames that were received from one client and not begun. Above them the server stops reading."""
MAX_UNANSWERED: Final = 64
MAX_UNSENT_BYTES: Final = 4 * 1024 * 1024
"""Maximum bytes of unsent responses to one client. Above it no new request begins, except Produce."""
MAX_UNAUTHENTICATED_FRAME_BYTES: Final = 64 * 1024
"""Maximum frame of a client that has not authenticated yet."""
WRITE_HIGH_WATER_BYTES: Final = 4 * 1024 * 1024
IDLE_SECONDS: Final = 600.0


_PRODUCE_PREFIX: Final = ApiKey.PRODUCE.to_bytes(2, "big")
_QueuedResponse = tuple[Request | UnsupportedRequest, bytes | asyncio.Future[Response] | None]


class Connection(asyncio.BufferedProtocol):
    """One client connection. An invalid frame closes it and affects no other connection."""

    def __init__(self, server: KafkaServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(INITIAL_BUFFER_BYTES)
        self._filled = 0
        self._frames: deque[memoryview] = deque()
        self._frames_bytes = 0
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._paused = False
        self._tasks: list[asyncio.Task[None]] = []
        # In the order of the requests: an encoded response, a future that brings it, or None for no response.
        self._responses: asyncio.Queue[_QueuedResponse] = asyncio.Queue(MAX_UNANSWERED)
        self._unsent_bytes = 0
        self._sent = asyncio.Event()
        # Aborts a closing connection whose client does not read the rest of the responses.
        self._abort: asyncio.TimerHandle | None = None
        # Runs until the client has authenticated or sent a valid request.
        self._deadline: asyncio.TimerHandle | None = None
        self.host = ""
        self._session: SaslSession | None = None
        # Set when the client has disconnected.
        self._lost = False
        self._producing = False
        # Produce requests that were begun and have no response yet.
        self._unanswered = 0

    # Callbacks of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, not a check: other event loops have transports that do not derive from asyncio.Transport.
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        peer = transport.get_extra_info("peername")
        self.host = f"/{peer[0]}" if isinstance(peer, tuple) else "/"
        encrypted = transport.get_extra_info("ssl_object") is not None
        self._session = SaslSession(self._server.broker, address=self.host.strip("/"), encrypted=encrypted)
        if not self._server.admit(self):
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._server.broker.settings.admission_seconds, self._time_out)
        self._tasks = [loop.create_task(self._serve()), loop.create_task(self._write())]
        for task in self._tasks:
            task.add_done_callback(self._task_done)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.dismiss(self)
        self._lost = True
        serving = self._tasks[:1]
        for task in self._tasks[1:] if self._producing else self._tasks:
            task.cancel()
        # Records that have arrived are still written: a producer with acks=0 may send them and disconnect.
        self._frames = deque(frame for frame in self._frames if frame[:2] == _PRODUCE_PREFIX)
        if self._frames and not self._producing and self._tasks:
            serving = [asyncio.get_running_loop().create_task(self._serve())]
            serving[0].add_done_callback(self._task_done)
        self._server.keep(serving)
        # Release all buffers, and break reference cycles so that the connection is freed at once.
        self._stop_deadline()
        if self._abort is not None:
            self._abort.cancel()
        self._account(-self._unsent_bytes)
        self._responses = asyncio.Queue(MAX_UNANSWERED)
        self._buffer = bytearray()
        self._tasks = []
        self._transport = None

    def get_buffer(self, size_hint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, count: int) -> None:
        self._filled += count
        try:
            self._extract_frames()
        except MalformedRequest as error:
            self._end(error)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # Frames

    def _extract_frames(self) -> None:
        """Move complete frames out of the buffer, and grow the buffer for an incomplete one."""
        start = 0
        needed = 4
        view = memoryview(self._buffer)
        while self._filled - start >= 4:
            (size,) = struct.unpack_from(">i", view, start)
            admitted = self._session is not None and self._session.admitted
            limit = self._server.broker.settings.max_frame_bytes if admitted else MAX_UNAUTHENTICATED_FRAME_BYTES
            if not 8 <= size <= limit:
                raise MalformedRequest(f"invalid frame length {size}: expected 8 to {limit} bytes")
            if size > MAX_OTHER_FRAME_BYTES and self._filled - start >= 6:
                (api,) = struct.unpack_from(">h", view, start + 4)
                if api != ApiKey.PRODUCE:
                    raise MalformedRequest(
                        f"a frame of {size} bytes for API {api}: expected up to {MAX_OTHER_FRAME_BYTES} bytes"
                    )
            needed = 4 + size
            if self._filled - start < needed:
                break
            self._frames.append(view[start + 4 : start + needed])
            self._frames_bytes += size
            start += needed
            needed = 4
        if start:
            # The frames are views of the old buffer, so the rest moves to a new one.
            rest = view[start : self._filled]
            self._buffer = bytearray(max(INITIAL_BUFFER_BYTES, min(needed, 2 * len(rest))))
            self._buffer[: len(rest)] = rest
            self._filled = len(rest)
            self._arrived.set()
            if len(self._frames) >= MAX_WAITING_FRAMES or self._frames_bytes >= MAX_WAITING_BYTES:
                self._pause()
        elif self._filled == len(self._buffer):
            # Grow with the bytes received, not with the declared length.
            grown = bytearray(min(needed, 4 * len(self._buffer)))
            grown[: self._filled] = self._buffer
            self._buffer = grown

    def _pause(self) -> None:
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    async def _next_frame(self) -> memoryview | None:
        """Wait for the next frame; None: the connection is lost and all frames are taken."""
        while not self._frames:
            if self._lost:
                return None
            self._arrived.clear()
            async with asyncio.timeout(IDLE_SECONDS):
                await self._arrived.wait()
        frame = self._frames.popleft()
        self._frames_bytes -= len(frame)
        if self._paused and len(self._frames) < MAX_WAITING_FRAMES // 2 and self._frames_bytes < MAX_WAITING_BYTES // 2:
            self._paused = False
            if self._transport is not None and not self._lost:
                self._transport.resume_reading()
        return frame

    # Admission

    def _time_out(self) -> None:
        self._end(MalformedRequest("timeout: the client neither authenticated nor sent a valid request"))
        self.abort()

    def _prove(self) -> None:
        if self._deadline is not None:
            self._stop_deadline()
            self._server.prove(self)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def abort(self) -> None:
        """Close at once and discard unsent responses."""
        if self._transport is not None:
            self._transport.abort()

    # Requests and responses

    async def _run_sasl(self, request: Request) -> Response:
        assert self._session is not None
        if request.api == ApiKey.SASL_HANDSHAKE:
            return await self._session.handshake(request)
        return await self._session.authenticate(request)

    async def _serve(self) -> None:
        try:
            # One call per request, so that the memory of a request is freed while the connection is idle.
            while await self._serve_next():
                pass
        except (MalformedRequest, TimeoutError, HeadwaterError, psycopg.Error) as error:
            self._end(error)
        finally:
            self._producing = False

    async def _serve_next(self) -> bool:
        """Begin the next request and, unless it is Produce, complete it. False: the connection has no more requests."""
        frame = await self._next_frame()
        if frame is None:
            return False
        session = self._session
        assert session is not None
        request = read_request(frame, SUPPORTED_VERSIONS)
        if isinstance(request, UnsupportedRequest):
            await self._respond(request, _unsupported_response(request))
            return True
        if request.api != ApiKey.PRODUCE:
            while self._unsent_bytes > MAX_UNSENT_BYTES:
                self._sent.clear()
                await self._sent.wait()
        if request.api in (ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE):
            await self._respond(request, await self._run_sasl(request))
            if session.admitted:
                self._prove()
            return True
        if session.admitted:
            self._prove()
        if not session.admitted and request.api != ApiKey.API_VERSIONS:
            raise MalformedRequest("authentication required")
        # Requests begin one after the other, so that records of one connection are queued in order.
        self._producing = request.api == ApiKey.PRODUCE
        response = await self._server.dispatcher.begin(
            request._replace(allowed=session.allowed, account=session.account), self.host
        )
        self._producing = False
        if self._lost:
            await response
        elif request.api == ApiKey.PRODUCE:
            self._unanswered += 1
            await self._responses.put((request, asyncio.ensure_future(response)))
        else:
            await self._respond(request, await response)
        return True

    async def _respond(self, request: Request | UnsupportedRequest, fields: Response) -> None:
        frame = _encode(request, fields)
        self._account(0 if frame is None else len(frame))
        await self._responses.put((request, frame))

    def _account(self, count: int) -> None:
        self._unsent_bytes += count
        self._server.broker.unsent_bytes += count

    async def _write(self) -> None:
        """Send the responses in the order of their requests."""
        try:
            while True:
                await self._write_next()
        except (MalformedRequest, HeadwaterError, psycopg.Error) as error:
            self._end(error)
        except TimeoutError as error:
            self._end(error)
            # The client does not read, so closing gracefully would wait forever.
            if self._transport is not None:
                self._transport.abort()

    async def _write_next(self) -> None:
        assert self._transport is not None
        request, response = await self._responses.get()
        if isinstance(response, asyncio.Future):
            frame = _encode(request, await response)
            self._account(0 if frame is None else len(frame))
            self._unanswered -= 1
        else:
            frame = response
        if frame is None:
            if isinstance(request, UnsupportedRequest):
                raise MalformedRequest(f"unsupported API {request.api} version {request.version}")
            return
        self._transport.write(frame)
        if self._session is not None and self._session.failed and request.api == ApiKey.SASL_AUTHENTICATE:
            raise MalformedRequest("authentication failed")
        async with asyncio.timeout(IDLE_SECONDS):
            await self._writable.wait()
        self._account(-len(frame))
        self._sent.set()

    def _end(self, error: BaseException) -> None:
        # Earlier responses are still sent. The client then reconnects and retries.
        if self._transport is not None and not self._transport.is_closing():
            lost = isinstance(error, HeadwaterError | psycopg.Error)
            logger.log(WARNING if lost else INFO, "kafka connection ended", extra={ERROR: str(error)})
            self._transport.close()
            self._abort = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._transport.abort)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            # A bug in the server: log it and close this connection only.
            logger.error("kafka connection failed", exc_info=error)
            self._end(error)

    def stop_reading(self) -> None:
        """Read no more requests; those already received are answered."""
        self._pause()
        # Cleared, so that `_next_frame` does not resume reading.
        self._paused = False

    @property
    def has_unanswered_records(self) -> bool:
        """Whether records have been received and not acknowledged yet."""
        return self._producing or self._unanswered > 0 or any(one[:2] == _PRODUCE_PREFIX for one in self._frames)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _encode(request: Request | UnsupportedRequest, fields: Response) -> bytes | None:
    version = 0 if isinstance(request, UnsupportedRequest) else request.version
    return None if fields is None else encode_response(request.api, version, request.correlation_id, fields)


def _unsupported_response(request: UnsupportedRequest) -> Response:
    if request.api == ApiKey.API_VERSIONS:
        # Encoded as version 0, so that any client can read the supported versions.
        return api_versions(ErrorCode.unsupported_version)
    return None


def _evict(connection: Connection) -> None:
    logger.info("kafka connection ended", extra={ERROR: "replaced by a newer connection before it authenticated"})
    connection.abort()


class KafkaServer:
    """The listener of a broker, and its connections."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.dispatcher = ApiDispatcher(broker)
        self._connections: Admission[Connection] = Admission(broker.settings.max_connections, _evict)
        self._last_tasks: set[asyncio.Task[None]] = set()

    def admit(self, connection: Connection) -> bool:
        if not self._connections.enter(connection, connection.host):
            logger.warning("kafka connection refused", extra={ERROR: "too many connections"})
            return False
        return True

    def prove(self, connection: Connection) -> None:
        """Mark a connection as trusted: its client authenticated or, without authentication, sent a valid request."""
        self._connections.prove(connection)

    def dismiss(self, connection: Connection) -> None:
        self._connections.leave(connection)

    def keep(self, tasks: list[asyncio.Task[None]]) -> None:
        """Hold references to the remaining tasks of a closed connection, or they could be garbage collected."""
        self._last_tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._last_tasks.discard)

    async def finish(self, seconds: float) -> None:
        """Stop reading requests, and wait up to `seconds` until received records are written and acknowledged."""
        connections = list(self._connections)
        for connection in connections:
            connection.stop_reading()
        ends = time.monotonic() + seconds
        while self._last_tasks or any(one in self._connections and one.has_unanswered_records for one in connections):
            if time.monotonic() > ends:
                logger.warning("kafka shutdown: records not acknowledged before the timeout")
                return
            await asyncio.sleep(0.01)

    def close_all(self) -> None:
        for connection in list(self._connections):
            connection.close()


@asynccontextmanager
async def serving(
    log: AsyncHeadwater,
    *,
    listen_host: str,
    port: int,
    advertised_host: str | None = None,
    context: ssl.SSLContext | None = None,
    grace_seconds: float = 20.0,
    passwords: PasswordChecks | None = None,
    **settings: Any,
) -> AsyncIterator[Broker]:
    """Run a broker until the block is left. Port 0 chooses a free port, which is in the broker's settings.

    On exit, received records have `grace_seconds` to be written and acknowledged.
    """
    loop = asyncio.get_running_loop()
    server: KafkaServer | None = None

    def make_connection() -> Connection:
        assert server is not None
        return Connection(server)

    # Bind before the address is registered, and accept connections only once the broker has started.
    listener = await loop.create_server(make_connection, listen_host, port, ssl=context, start_serving=False)
    tasks: list[asyncio.Task[None]] = []
    try:
        bound: int = listener.sockets[0].getsockname()[1]
        broker = Broker(log, BrokerSettings(advertised_host or listen_host, bound, **settings), passwords=passwords)
        await broker.start()
        try:
            server = KafkaServer(broker)
            tasks = server.dispatcher.tasks()
            await listener.start_serving()
            yield broker
        finally:
            listener.close()
            if server is not None:
                await server.finish(grace_seconds)
                server.close_all()
            await end_tasks(tasks)
            await broker.stop()
    finally:
        listener.close()
