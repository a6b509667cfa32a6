"""JetStream publisher: sends batches over one socket and waits for acknowledgements.

`send` queues the frames of a batch and returns when it fits into the window of unacknowledged messages; `flush` waits
for the rest. A lost connection is replaced, and all unacknowledged messages are sent again in order with the same
`Nats-Msg-Id`, so that the stream drops duplicates. Used by one thread; `_step` does all socket I/O.
"""

from __future__ import annotations

import secrets
import select
import socket
import ssl
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc

from headwater.nats import frames
from headwater.nats.errors import InvalidMessage, NatsRefused, NatsUnavailable
from headwater.observability.metrics import logger

_RECEIVE_BYTES: Final = 262_144
_FIRST_WAIT_SECONDS: Final = 0.02
_MAX_WAIT_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class PublishTotals:
    """How many messages the streams stored, and how many were duplicates."""

    stored: int
    duplicates: int

    @property
    def acknowledged(self) -> int:
        return self.stored + self.duplicates


class _Chunk:
    """A slice of a batch in flight, with the messages that are still unacknowledged."""

    __slots__ = ("batch", "done", "first_number", "open")

    def __init__(self, batch: pa.RecordBatch, first_number: int) -> None:
        self.batch = batch
        self.first_number = first_number
        self.done = bytearray(batch.num_rows)
        self.open = batch.num_rows


class JetStreamPublisher:
    """A connection to a NATS server that publishes to JetStream. Not thread-safe.

    A message is published when its stream has acknowledged it. After a lost connection, all unacknowledged messages
    are sent again in order with their `Nats-Msg-Id`, so that the stream drops duplicates. The stream has the messages
    of one publisher in the order in which they were sent.

    At most `window` messages and `window_bytes` are unacknowledged at a time. Without an acknowledgement for
    `ack_seconds` the connection counts as lost; without one for `retry_seconds`, NatsUnavailable is raised.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "headwater publisher",
        window: int = 16_384,
        window_bytes: int = 33_554_432,
        chunk: int = 2_048,
        connect_seconds: float = 5.0,
        ack_seconds: float = 10.0,
        retry_seconds: float = 60.0,
    ) -> None:
        self._addresses: Final = [_Address.parse(part) for part in url.split(",")]
        self._name: Final = name
        self._window: Final = window
        self._window_bytes: Final = window_bytes
        self._chunk: Final = min(chunk, window)
        self._connect_seconds: Final = connect_seconds
        self._ack_seconds: Final = ack_seconds
        self._retry_seconds: Final = retry_seconds
        self._socket: socket.socket | None = None
        self._parser = frames.Parser()
        self._inbox = ""
        self._max_payload_bytes = 1_048_576
        self._outgoing: deque[memoryview] = deque()
        self._chunks: deque[_Chunk] = deque()
        self._next_number = 0
        self._open = 0
        self._open_bytes = 0
        self._stored = 0
        self._duplicates = 0
        self._progress_at = 0.0
        self.reconnects = 0

    @property
    def progress(self) -> PublishTotals:
        """The messages acknowledged since the last flush. May be read from any thread."""
        return PublishTotals(self._stored, self._duplicates)

    @property
    def max_payload_bytes(self) -> int:
        """The server's limit for a message, headers included; connects if there is no connection yet."""
        if self._socket is None:
            self._progress_at = time.monotonic()
            self._recover(None)
        return self._max_payload_bytes

    # -- public methods

    def publish(self, batch: pa.RecordBatch) -> PublishTotals:
        """Publish a batch; return when all of its messages are acknowledged."""
        self.send(batch)
        return self.flush()

    def send(self, batch: pa.RecordBatch) -> None:
        """Publish a batch; return when it fits into the window. `flush` waits for the rest."""
        if batch.num_rows == 0:
            return
        if self._socket is None:
            self._progress_at = time.monotonic()
            self._recover(None)
        frames.check(batch, max_payload_bytes=self._max_payload_bytes)
        for start, length in _pieces(batch, rows=self._chunk, size=max(1, self._window_bytes // 4)):
            chunk = _Chunk(batch.slice(start, length), self._next_number)
            size = _size(chunk.batch)
            while self._open and (self._open + length > self._window or self._open_bytes + size > self._window_bytes):
                self._step()
            if not self._open:
                self._progress_at = time.monotonic()
            self._next_number += length
            self._chunks.append(chunk)
            self._open += length
            self._open_bytes += size
            self._queue(chunk)
            self._step(wait=False)

    def flush(self) -> PublishTotals:
        """Wait until everything sent is acknowledged; return the counts since the last flush."""
        while self._open:
            self._step()
        published = self.progress
        self._stored = self._duplicates = 0
        return published

    def close(self) -> None:
        """Close the connection. The outcome of unacknowledged messages is unknown."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- internals

    def _queue(self, chunk: _Chunk) -> None:
        """Queue the frames of the unacknowledged messages of a chunk."""
        run_start: int | None = None
        for row in range(chunk.batch.num_rows + 1) if chunk.open < chunk.batch.num_rows else ():
            is_open = row < chunk.batch.num_rows and not chunk.done[row]
            if is_open and run_start is None:
                run_start = row
            elif not is_open and run_start is not None:
                self._queue_rows(chunk, run_start, row)
                run_start = None
        if chunk.open == chunk.batch.num_rows:
            self._queue_rows(chunk, 0, chunk.batch.num_rows)

    def _queue_rows(self, chunk: _Chunk, start: int, end: int) -> None:
        piece = chunk.batch.slice(start, end - start)
        self._outgoing.append(frames.publish_frames(piece, inbox=self._inbox, first_number=chunk.first_number + start))

    def _step(self, *, wait: bool = True) -> None:
        """Send and receive once; reconnect if the connection was lost."""
        try:
            self._exchange(self._ack_seconds if wait else 0.0)
        except (OSError, _ConnectionLost) as problem:
            self._recover(problem)

    def _exchange(self, seconds: float) -> None:
        connection = self._connection()
        if isinstance(connection, ssl.SSLSocket) and connection.pending():
            seconds = 0.0  # the data is buffered in the TLS layer, where select does not see it
            self._read(connection)
        readable, writable, _ = select.select([connection], [connection] if self._outgoing else [], [], seconds)
        if writable:
            self._write(connection)
        if readable:
            self._read(connection)
        elif seconds and self._open and time.monotonic() - self._progress_at > self._ack_seconds:
            raise _ConnectionLost(f"no acknowledgement for {self._ack_seconds:g} seconds")

    def _write(self, connection: socket.socket) -> None:
        try:
            while self._outgoing:
                sent = connection.send(self._outgoing[0])
                if sent < len(self._outgoing[0]):
                    self._outgoing[0] = self._outgoing[0][sent:]
                else:
                    self._outgoing.popleft()
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return

    def _read(self, connection: socket.socket) -> None:
        try:
            piece = connection.recv(_RECEIVE_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        if not piece:
            raise _ConnectionLost("the server closed the connection")
        for message in self._parser.feed(piece):
            self._handle(message)

    def _handle(self, message: frames.ServerMessage) -> None:
        match message:
            case frames.Acks():
                self._settle(message.numbers, message.duplicates)
            case frames.Message():
                self._acknowledge(message)
            case frames.Ping():
                # After any partly sent frame, never inside it.
                self._outgoing.append(memoryview(b"PONG\r\n"))
            case frames.Failure():
                raise _server_error(message.text)
            case frames.Info():
                self._max_payload_bytes = int(message.options.get("max_payload", self._max_payload_bytes))

    def _settle(self, numbers: list[int], duplicates: list[bool]) -> None:
        """Mark the messages with these numbers as acknowledged. Most runs have no gap and are handled as a whole."""
        first, end = numbers[0], numbers[-1] + 1
        if end - first != len(numbers) or numbers != list(range(first, end)):
            for number, duplicate in zip(numbers, duplicates, strict=True):
                self._settle_range(number, number + 1, [duplicate])
        else:
            self._settle_range(first, end, duplicates)
        self._progress_at = time.monotonic()
        while self._chunks and not self._chunks[0].open:
            self._open_bytes -= _size(self._chunks.popleft().batch)

    def _settle_range(self, first: int, end: int, duplicates: list[bool]) -> None:
        for chunk in self._chunks:
            start = max(first, chunk.first_number) - chunk.first_number
            stop = min(end - chunk.first_number, len(chunk.done))
            if start >= stop:
                continue
            shift = chunk.first_number - first
            newly = chunk.done.count(0, start, stop)
            if newly == stop - start:
                again = sum(duplicates[start + shift : stop + shift])
            else:  # the server acknowledged some of them twice
                again = sum(duplicates[row + shift] for row in range(start, stop) if not chunk.done[row])
            chunk.done[start:stop] = b"\1" * (stop - start)
            chunk.open -= newly
            self._open -= newly
            self._duplicates += again
            self._stored += newly - again

    def _acknowledge(self, message: frames.Message) -> None:
        """Handle an answer that is not a plain acknowledgement, or has an unusual format."""
        prefix, _, digits = message.subject.rpartition(".")
        if prefix != self._inbox or not digits.isdecimal():
            return
        number = int(digits)
        chunk = next((c for c in self._chunks if 0 <= number - c.first_number < len(c.done)), None)
        if chunk is None:
            return
        row = number - chunk.first_number
        match frames.parse_acknowledgement(message):
            case frames.NoStreamReply():
                raise _ConnectionLost(
                    f"no stream has the subject {chunk.batch.column('subject')[row].as_py()}", no_stream=True
                )
            case frames.PubError(code, description):
                self.close()
                raise NatsRefused(
                    f"the stream rejected {chunk.batch.column('msg_id')[row].as_py()}: {description} ({code})",
                    hint="Check the stream's limits and the server's disk; retrying is safe.",
                )
            case frames.PubAck(_, _, duplicate):
                self._settle([number], [duplicate])

    # -- the connection

    def _connection(self) -> socket.socket:
        if self._socket is None:
            raise _ConnectionLost("not connected")
        return self._socket

    def _recover(self, problem: Exception | None) -> None:
        """Connect, and queue all unacknowledged messages again, in order."""
        if problem is not None:
            self.reconnects += 1
            logger.warning("connection to NATS lost", extra={"error": str(problem), "open": self._open})
        wait = _FIRST_WAIT_SECONDS
        attempt = 0
        while True:
            self.close()
            late = time.monotonic() - self._progress_at > self._retry_seconds
            if problem is not None and late:
                if isinstance(problem, _ConnectionLost) and problem.no_stream:
                    raise NatsRefused(str(problem), hint="Create the stream first, with `ensure_streams`.") from problem
                raise NatsUnavailable(
                    f"no acknowledgement from NATS for {self._retry_seconds:g} seconds: {problem}",
                    hint="Retrying is safe: the stream drops duplicates.",
                ) from problem
            if problem is not None:
                time.sleep(wait)
                wait = min(wait * 2, _MAX_WAIT_SECONDS)
            try:
                self._connect(self._addresses[attempt % len(self._addresses)])
                break
            except (OSError, _ConnectionLost) as error:
                problem = error
                attempt += 1
        for chunk in self._chunks:
            if chunk.open:
                self._queue(chunk)

    def _connect(self, address: _Address) -> None:
        deadline = time.monotonic() + self._connect_seconds
        self._outgoing.clear()
        # A new inbox for each connection, so that late answers to an earlier one are ignored.
        self._inbox = f"_INBOX.{secrets.token_hex(11)}"
        self._parser = frames.Parser(inbox=self._inbox)
        connection = socket.create_connection((address.host, address.port), timeout=self._connect_seconds)
        self._socket = connection
        if connection.getsockname() == connection.getpeername():
            # TCP self-connect: the kernel may choose the unused target port as the local port.
            raise _ConnectionLost("connection refused")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        info = self._await(connection, frames.Info, deadline)
        assert isinstance(info, frames.Info)
        self._max_payload_bytes = int(info.options.get("max_payload", self._max_payload_bytes))
        if not info.options.get("headers"):
            raise NatsRefused("the NATS server does not support headers, which JetStream requires")
        if address.tls or info.options.get("tls_required"):
            connection = ssl.create_default_context().wrap_socket(connection, server_hostname=address.host)
            self._socket = connection
        connection.sendall(
            frames.connect_frame(user=address.user, password=address.password, token=address.token, name=self._name)
            + frames.subscribe_frame(f"{self._inbox}.*", sid=1)
            + b"PING\r\n"
        )
        self._await(connection, frames.Pong, deadline)
        connection.setblocking(False)

    def _await(self, connection: socket.socket, kind: type, deadline: float) -> frames.ServerMessage:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _ConnectionLost(
                    f"the server did not complete the handshake within {self._connect_seconds:g} seconds"
                )
            connection.settimeout(left)
            piece = connection.recv(_RECEIVE_BYTES)
            if not piece:
                raise _ConnectionLost("the server closed the connection")
            try:
                received = list(self._parser.feed(piece))
            except InvalidMessage as error:
                raise NatsRefused(f"not a NATS server: {error.message}") from error
            for message in received:
                if isinstance(message, frames.Failure):
                    raise _server_error(message.text)
                if isinstance(message, kind):
                    return message


class _ConnectionLost(Exception):
    """The connection is lost; a new one may work."""

    def __init__(self, reason: str, *, no_stream: bool = False) -> None:
        super().__init__(reason)
        self.no_stream = no_stream


@dataclass(frozen=True, slots=True)
class _Address:
    """The address of a server, and the credentials."""

    host: str
    port: int
    tls: bool
    user: str | None
    password: str | None
    token: str | None

    @staticmethod
    def parse(url: str) -> _Address:
        parts = urlsplit(url.strip() if "://" in url else f"nats://{url.strip()}")
        try:
            port = parts.port or 4222
        except ValueError as error:
            raise InvalidMessage(f"invalid port in the address of {parts.hostname}: expected 1 to 65535") from error
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            raise InvalidMessage(
                "invalid NATS address: expected nats://[user:password@|token@]host[:port], or the same with tls://"
            )
        user = unquote(parts.username) if parts.username else None
        password = unquote(parts.password) if parts.password is not None else None
        only_token = user is not None and password is None
        return _Address(
            host=parts.hostname,
            port=port,
            tls=parts.scheme == "tls",
            user=None if only_token else user,
            password=password,
            token=user if only_token else None,
        )


def _server_error(text: str) -> Exception:
    """The exception for a server error: NatsRefused for permissions and limits, else a lost connection."""
    lowered = text.lower()
    if "authoriz" in lowered or "authentic" in lowered or "permissions" in lowered or "payload" in lowered:
        return NatsRefused(f"NATS refused: {text}", hint="Check the address, the user or token, and its permissions.")
    return _ConnectionLost(text)


def _size(batch: pa.RecordBatch) -> int:
    return int(pc.sum(frames.payload_sizes(batch)).as_py() or 0) + 256 * int(batch.num_rows)


def _pieces(batch: pa.RecordBatch, *, rows: int, size: int) -> list[tuple[int, int]]:
    """Split a batch into pieces of at most `rows` rows and `size` bytes; a larger message is a separate piece."""
    if batch.num_rows <= rows and _size(batch) <= size:
        return [(0, batch.num_rows)]
    pieces: list[tuple[int, int]] = []
    start = total = 0
    for row, length in enumerate(frames.payload_sizes(batch).to_pylist()):
        if row > start and (row - start >= rows or total + length + 256 > size):
            pieces.append((start, row - start))
            start, total = row, 0
        total += length + 256
    pieces.append((start, batch.num_rows - start))
    return pieces
