"""Connections of Kafka clients: frames in, answers out in the same order, with a limit on everything."""

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
from headwater.servers.kafka.broker import Broker, Settings, end_tasks
from headwater.servers.kafka.dispatch import OFFERED, Answer, Apis, api_versions
from headwater.servers.kafka.security import AUTHENTICATE, HANDSHAKE, Session
from headwater.servers.kafka.wire import (
    API_VERSIONS,
    PRODUCE,
    ErrorCode,
    Malformed,
    Request,
    Unsupported,
    encode_response,
    read_request,
)

FIRST_BUFFER_BYTES: Final = 64 * 1024
MAX_OTHER_FRAME_BYTES: Final = 16 * 1024 * 1024
"""Only a produce request may be larger."""
WAITING_FRAMES: Final = 32
WAITING_BYTES: Final = 16 * 1024 * 1024
"""What one client may have sent before it was begun; while there is more, nothing is read from it."""
UNANSWERED: Final = 64
UNSENT_BYTES: Final = 4 * 1024 * 1024
"""Of answers to one client. While there are more, nothing of what it asked is begun, but records are still taken."""
MAX_STRANGER_FRAME_BYTES: Final = 64 * 1024
"""Of a client that has yet to say who it is."""
WRITE_HIGH_WATER_BYTES: Final = 4 * 1024 * 1024
IDLE_SECONDS: Final = 600.0


_PRODUCE_PREFIX: Final = PRODUCE.to_bytes(2, "big")
_Queued = tuple[Request | Unsupported, bytes | asyncio.Future[Answer] | None]


class Connection(asyncio.BufferedProtocol):
    """One client. A frame that is none ends it, and no other connection notices."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(FIRST_BUFFER_BYTES)
        self._filled = 0
        self._frames: deque[memoryview] = deque()
        self._frames_bytes = 0
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._paused = False
        self._tasks: list[asyncio.Task[None]] = []
        # In the order of the requests: an answer as it is sent, None for none, or what will bring it.
        self._answers: asyncio.Queue[_Queued] = asyncio.Queue(UNANSWERED)
        self._unsent_bytes = 0
        self._sent = asyncio.Event()
        # Ends a connection that is closed and whose client does not take what is still to be sent.
        self._abort: asyncio.TimerHandle | None = None
        # Runs until the client has proven itself.
        self._deadline: asyncio.TimerHandle | None = None
        self.host = ""
        self._session: Session | None = None
        # Set when the client is gone.
        self._lost = False
        self._producing = False
        # Produce requests that were begun and have no answer yet.
        self._unanswered = 0

    # What asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Other event loops have transports of their own, which are none of asyncio's.
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        peer = transport.get_extra_info("peername")
        self.host = f"/{peer[0]}" if isinstance(peer, tuple) else "/"
        encrypted = transport.get_extra_info("ssl_object") is not None
        self._session = Session(self._server.broker, address=self.host.strip("/"), encrypted=encrypted)
        if not self._server.admit(self):
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._server.broker.settings.admission_seconds, self._too_late)
        self._tasks = [loop.create_task(self._serve()), loop.create_task(self._write())]
        for task in self._tasks:
            task.add_done_callback(self._stopped)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.dismiss(self)
        self._lost = True
        serving = self._tasks[:1]
        for task in self._tasks[1:] if self._producing else self._tasks:
            task.cancel()
        # Records that had arrived are written: a client that wants no acknowledgement may send them, close and go.
        self._frames = deque(frame for frame in self._frames if frame[:2] == _PRODUCE_PREFIX)
        if self._frames and not self._producing and self._tasks:
            serving = [asyncio.get_running_loop().create_task(self._serve())]
            serving[0].add_done_callback(self._stopped)
        self._server.keep(serving)
        # Nothing is kept for a client that is gone, and nothing that would keep this in a circle.
        self._stop_deadline()
        if self._abort is not None:
            self._abort.cancel()
        self._account(-self._unsent_bytes)
        self._answers = asyncio.Queue(UNANSWERED)
        self._buffer = bytearray()
        self._tasks = []
        self._transport = None

    def get_buffer(self, size_hint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, count: int) -> None:
        self._filled += count
        try:
            self._cut()
        except Malformed as error:
            self._end(error)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # Frames

    def _cut(self) -> None:
        """Take the whole frames out of the buffer; make room for the rest of one that is not whole yet."""
        place = 0
        needed = 4
        view = memoryview(self._buffer)
        while self._filled - place >= 4:
            (size,) = struct.unpack_from(">i", view, place)
            known = self._session is not None and self._session.admitted
            if not 8 <= size <= (self._server.broker.settings.max_frame_bytes if known else MAX_STRANGER_FRAME_BYTES):
                raise Malformed(f"a frame of {size} bytes")
            if size > MAX_OTHER_FRAME_BYTES and self._filled - place >= 6:
                (api,) = struct.unpack_from(">h", view, place + 4)
                if api != PRODUCE:
                    raise Malformed(f"a frame of {size} bytes for API {api}")
            needed = 4 + size
            if self._filled - place < needed:
                break
            self._frames.append(view[place + 4 : place + needed])
            self._frames_bytes += size
            place += needed
            needed = 4
        if place:
            # The frames keep the old buffer; the rest goes on in a new one.
            rest = view[place : self._filled]
            self._buffer = bytearray(max(FIRST_BUFFER_BYTES, min(needed, 2 * len(rest))))
            self._buffer[: len(rest)] = rest
            self._filled = len(rest)
            self._arrived.set()
            if len(self._frames) >= WAITING_FRAMES or self._frames_bytes >= WAITING_BYTES:
                self._pause()
        elif self._filled == len(self._buffer):
            # It grows with what has come, not with what was announced.
            grown = bytearray(min(needed, 4 * len(self._buffer)))
            grown[: self._filled] = self._buffer
            self._buffer = grown

    def _pause(self) -> None:
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    async def _next_frame(self) -> memoryview | None:
        """The next request; None: there will not be another."""
        while not self._frames:
            if self._lost:
                return None
            self._arrived.clear()
            async with asyncio.timeout(IDLE_SECONDS):
                await self._arrived.wait()
        frame = self._frames.popleft()
        self._frames_bytes -= len(frame)
        if self._paused and len(self._frames) < WAITING_FRAMES // 2 and self._frames_bytes < WAITING_BYTES // 2:
            self._paused = False
            if self._transport is not None and not self._lost:
                self._transport.resume_reading()
        return frame

    # Admission

    def _too_late(self) -> None:
        self._end(Malformed("the client did not authenticate, or send a valid request, in time"))
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
        """Close at once, without what is still to be sent."""
        if self._transport is not None:
            self._transport.abort()

    # Requests and answers

    async def _introduced(self, request: Request) -> Answer:
        assert self._session is not None
        act = self._session.handshake if request.api == HANDSHAKE else self._session.authenticate
        return await act(request)

    async def _serve(self) -> None:
        try:
            # One request a call: what it was made of goes with it, while the next may be long in coming.
            while await self._serve_next():
                pass
        except (Malformed, TimeoutError, HeadwaterError, psycopg.Error) as error:
            self._end(error)
        finally:
            self._producing = False

    async def _serve_next(self) -> bool:
        """Begin the next request, and finish it unless others may be begun before; False: there will be none."""
        frame = await self._next_frame()
        if frame is None:
            return False
        session = self._session
        assert session is not None
        request = read_request(frame, OFFERED)
        if isinstance(request, Unsupported):
            await self._answer(request, _refusal(request))
            return True
        if request.api != PRODUCE:
            while self._unsent_bytes > UNSENT_BYTES:
                self._sent.clear()
                await self._sent.wait()
        if request.api in (HANDSHAKE, AUTHENTICATE):
            await self._answer(request, await self._introduced(request))
            if session.admitted:
                self._prove()
            return True
        if session.admitted:
            self._prove()
        if not session.admitted and request.api != API_VERSIONS:
            raise Malformed("the client did not say who it is")
        # Begun one after the other: records of one connection are queued in the order they came.
        self._producing = request.api == PRODUCE
        answer = await self._server.apis.begin(
            request._replace(allowed=session.allowed, account=session.account), self.host
        )
        self._producing = False
        if self._lost:
            await answer
        elif request.api == PRODUCE:
            self._unanswered += 1
            await self._answers.put((request, asyncio.ensure_future(answer)))
        else:
            await self._answer(request, await answer)
        return True

    async def _answer(self, request: Request | Unsupported, fields: Answer) -> None:
        frame = _encoded(request, fields)
        self._account(0 if frame is None else len(frame))
        await self._answers.put((request, frame))

    def _account(self, count: int) -> None:
        self._unsent_bytes += count
        self._server.broker.unsent_bytes += count

    async def _write(self) -> None:
        """Send the answers in the order of their requests."""
        try:
            while True:
                await self._write_next()
        except (Malformed, HeadwaterError, psycopg.Error) as error:
            self._end(error)
        except TimeoutError as error:
            self._end(error)
            # It takes nothing: what is left would wait for ever.
            if self._transport is not None:
                self._transport.abort()

    async def _write_next(self) -> None:
        assert self._transport is not None
        request, answer = await self._answers.get()
        if isinstance(answer, asyncio.Future):
            frame = _encoded(request, await answer)
            self._account(0 if frame is None else len(frame))
            self._unanswered -= 1
        else:
            frame = answer
        if frame is None:
            if isinstance(request, Unsupported):
                raise Malformed(f"API {request.api} version {request.version} is not offered")
            return
        self._transport.write(frame)
        if self._session is not None and self._session.failed and request.api == AUTHENTICATE:
            raise Malformed("the client is not who it says")
        async with asyncio.timeout(IDLE_SECONDS):
            await self._writable.wait()
        self._account(-len(frame))
        self._sent.set()

    def _end(self, error: BaseException) -> None:
        # What was answered before still goes out. A client takes it as: connect and try again.
        if self._transport is not None and not self._transport.is_closing():
            lost = isinstance(error, HeadwaterError | psycopg.Error)
            logger.log(WARNING if lost else INFO, "kafka connection ended", extra={ERROR: str(error)})
            self._transport.close()
            self._abort = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._transport.abort)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            # A bug of ours: it costs one connection, and is not kept quiet.
            logger.error("kafka connection failed", exc_info=error)
            self._end(error)

    def take_no_more(self) -> None:
        """Requests that have come are answered; no others are read."""
        self._pause()
        # Nobody resumes it.
        self._paused = False

    @property
    def owes_answers(self) -> bool:
        """Whether records that have come are not answered for."""
        return self._producing or self._unanswered > 0 or any(one[:2] == _PRODUCE_PREFIX for one in self._frames)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _encoded(request: Request | Unsupported, fields: Answer) -> bytes | None:
    version = 0 if isinstance(request, Unsupported) else request.version
    return None if fields is None else encode_response(request.api, version, request.correlation_id, fields)


def _refusal(request: Unsupported) -> Answer:
    if request.api == API_VERSIONS:
        # In the oldest form, so that a client of any age can read which versions there are.
        return api_versions(ErrorCode.unsupported_version)
    return None


def _evict(connection: Connection) -> None:
    logger.info("kafka connection ended", extra={ERROR: "a newer one takes its place: it had not authenticated"})
    connection.abort()


class Server:
    """The listening side of a broker."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.apis = Apis(broker)
        self._connections: Admission[Connection] = Admission(broker.settings.max_connections, _evict)
        self._last_tasks: set[asyncio.Task[None]] = set()

    def admit(self, connection: Connection) -> bool:
        if not self._connections.enter(connection, connection.host):
            logger.warning("kafka connection refused", extra={ERROR: "there are too many"})
            return False
        return True

    def prove(self, connection: Connection) -> None:
        """The client of a connection has authenticated, or sent a valid request where nobody has to."""
        self._connections.prove(connection)

    def dismiss(self, connection: Connection) -> None:
        self._connections.leave(connection)

    def keep(self, tasks: list[asyncio.Task[None]]) -> None:
        """What a connection that is gone still has to do. Without somebody who holds it, it could vanish."""
        self._last_tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._last_tasks.discard)

    async def finish(self, seconds: float) -> None:
        """Take no more requests; records that have come are written and answered, if that is done in time."""
        connections = list(self._connections)
        for connection in connections:
            connection.take_no_more()
        ends = time.monotonic() + seconds
        while self._last_tasks or any(one in self._connections and one.owes_answers for one in connections):
            if time.monotonic() > ends:
                logger.warning("kafka records not answered in time")
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
    """A broker that listens, until the block is left. Port 0: any free one; the broker's settings say which.

    At the end records that have come have `grace_seconds` to be written and answered for.
    """
    loop = asyncio.get_running_loop()
    server: Server | None = None

    def connected() -> Connection:
        assert server is not None
        return Connection(server)

    # Bound first, so that the address that is registered is ours, and accepting last, when there is a broker.
    listener = await loop.create_server(connected, listen_host, port, ssl=context, start_serving=False)
    tasks: list[asyncio.Task[None]] = []
    try:
        bound: int = listener.sockets[0].getsockname()[1]
        broker = Broker(log, Settings(advertised_host or listen_host, bound, **settings), passwords=passwords)
        await broker.start()
        try:
            server = Server(broker)
            tasks = server.apis.tasks()
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
