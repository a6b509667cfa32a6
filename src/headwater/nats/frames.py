"""The NATS client protocol: builds the frames of a whole batch at once, and parses the server's messages. No I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from headwater.nats.errors import InvalidMessage

# A batch of messages to publish. `headers` holds further header lines, each with its line ending, or null.
SCHEMA: Final = pa.schema(
    [
        pa.field("subject", pa.string(), nullable=False),
        pa.field("msg_id", pa.string(), nullable=False),
        pa.field("headers", pa.binary(), nullable=True),
        pa.field("payload", pa.binary(), nullable=False),
    ]
)

MAX_SUBJECT_BYTES: Final = 1_000
MAX_MSG_ID_BYTES: Final = 1_000
MAX_HEADER_BYTES: Final = 65_536
# An Arrow binary array holds less than 2 GiB; batches stay far below that.
MAX_FRAMES_BYTES: Final = 1_000_000_000
# Large, because a server may list every address of its cluster in one line.
_MAX_LINE_BYTES: Final = 1_048_576

_VERSION: Final = b"NATS/1.0\r\n"
_ID: Final = b"Nats-Msg-Id: "
_FIXED_HEADER_BYTES: Final = len(_VERSION) + len(_ID) + len(b"\r\n\r\n")

_SUBJECT: Final = r"^[^\x00-\x20\x7f.*>]+(\.[^\x00-\x20\x7f.*>]+)*$"
_MSG_ID: Final = r"^[^\x00-\x20\x7f]+$"
_HEADER_LINES: Final = re.compile(rb"(?:[!-9;-~]+:[^\x00\r\n]*\r\n)*")


# --- to the server -------------------------------------------------------------------------------------------


def check(batch: pa.RecordBatch, *, max_payload_bytes: int) -> None:
    """Raise InvalidMessage if a server would reject a message of the batch or parse it as other frames."""
    if batch.schema.names != SCHEMA.names:
        raise InvalidMessage(f"invalid columns {batch.schema.names} in a batch of messages: expected {SCHEMA.names}")
    subject, msg_id, headers, payload = batch.columns
    for name, column, limit, pattern in (
        ("subject", subject, MAX_SUBJECT_BYTES, _SUBJECT),
        ("message id", msg_id, MAX_MSG_ID_BYTES, _MSG_ID),
    ):
        if column.null_count:
            raise InvalidMessage(f"a message has no {name}")
        fits = pc.and_(pc.match_substring_regex(column, pattern), pc.less_equal(pc.binary_length(column), limit))
        _reject_first(
            column, fits, name, f"expected 1 to {limit} bytes without white space, empty tokens and wildcards"
        )
    if payload.null_count:
        raise InvalidMessage("a message has no payload: use zero bytes for an empty one")
    if headers.null_count < len(headers):
        for lines in pc.unique(pc.drop_null(headers)).to_pylist():
            if len(lines) > MAX_HEADER_BYTES or not _HEADER_LINES.fullmatch(lines):
                raise InvalidMessage(
                    f"invalid header lines {lines[:100]!r}: expected `Name: value` and a line ending in each"
                )
    sizes = pc.add(payload_sizes(batch), header_sizes(batch))
    fits = pc.less_equal(sizes, max_payload_bytes)
    if not pc.all(fits, min_count=0).as_py():
        row = pc.index(fits, pa.scalar(False)).as_py()
        raise InvalidMessage(
            f"the message {msg_id[row].as_py()!r} has {sizes[row].as_py()} bytes; "
            f"the server accepts at most {max_payload_bytes}",
            hint="Raise the server's max_payload, or send less in one message.",
        )


def payload_sizes(batch: pa.RecordBatch) -> pa.Array:
    return pc.cast(pc.binary_length(batch.column("payload")), pa.int64())


def header_sizes(batch: pa.RecordBatch) -> pa.Array:
    further = pc.fill_null(pc.binary_length(batch.column("headers")), 0)
    return pc.cast(pc.add(pc.add(pc.binary_length(batch.column("msg_id")), further), _FIXED_HEADER_BYTES), pa.int64())


def publish_frames(batch: pa.RecordBatch, *, inbox: str, first_number: int) -> memoryview:
    """The frames that publish a checked batch. Message n is acknowledged to `inbox`.`first_number + n`."""
    if batch.num_rows == 0:
        return memoryview(b"")
    header_size = header_sizes(batch)
    total_size = pc.add(header_size, payload_sizes(batch))
    if pc.sum(total_size).as_py() > MAX_FRAMES_BYTES:
        raise InvalidMessage(f"the batch has more than {MAX_FRAMES_BYTES} bytes: split it")
    numbers = pa.array(range(first_number, first_number + batch.num_rows), pa.int64())
    joined = pc.binary_join_element_wise(
        b"HPUB ",
        _bytes(batch.column("subject")),
        f" {inbox}.".encode(),
        _digits(numbers),
        b" ",
        _digits(header_size),
        b" ",
        _digits(total_size),
        b"\r\n" + _VERSION + _ID,
        _bytes(batch.column("msg_id")),
        b"\r\n",
        pc.fill_null(batch.column("headers"), b""),
        b"\r\n",
        batch.column("payload"),
        b"\r\n",
        b"",  # the separator
    )
    _, offsets, data = joined.buffers()
    ends = memoryview(offsets).cast("i")
    return memoryview(data)[ends[joined.offset] : ends[joined.offset + len(joined)]]


def header_lines(headers: dict[str, str]) -> bytes:
    """Format headers as lines."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
    if not _HEADER_LINES.fullmatch(lines) or lines.count(b"\r\n") != len(headers):
        raise InvalidMessage(f"invalid headers {headers!r}: expected names of visible ASCII and no line breaks")
    return lines


def connect_frame(*, user: str | None, password: str | None, token: str | None, name: str) -> bytes:
    """The CONNECT frame with options and credentials."""
    options: dict[str, Any] = {
        "verbose": False,
        "pedantic": False,
        "headers": True,
        "no_responders": True,
        "lang": "python",
        "version": "headwater",
        "name": name,
        "protocol": 1,
    }
    if token is not None:
        options["auth_token"] = token
    if user is not None:
        options["user"] = user
        options["pass"] = password or ""
    return b"CONNECT " + json.dumps(options).encode() + b"\r\n"


def subscribe_frame(subject: str, *, sid: int) -> bytes:
    return f"SUB {subject} {sid}\r\n".encode()


def _bytes(column: pa.Array) -> pa.Array:
    return pc.cast(column, pa.binary())


def _digits(numbers: pa.Array) -> pa.Array:
    return pc.cast(pc.cast(numbers, pa.string()), pa.binary())


def _reject_first(column: pa.Array, fits: pa.Array, name: str, expected: str) -> None:
    if not pc.all(fits, min_count=0).as_py():
        row = pc.index(fits, pa.scalar(False)).as_py()
        raise InvalidMessage(f"invalid {name} {column[row].as_py()[:200]!r}: {expected}")


# --- from the server -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Info:
    """The server's description of itself: its first message, repeated when it changes."""

    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ping:
    """The server checks that the client is alive."""


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to the client's ping: everything sent before it was processed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error reported by the server. Most of them end the connection."""

    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a subscription."""

    subject: str
    sid: int
    reply: str | None
    headers: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class Acks:
    """A run of acknowledged messages: their numbers, and which of them were duplicates."""

    numbers: list[int]
    duplicates: list[bool]


ServerMessage = Info | Ping | Pong | Failure | Message | Acks

_MESSAGE: Final = re.compile(rb"MSG ([^\s]+) (\d{1,10})(?: ([^\s]+))? (\d{1,10})\r\n")
_HEADER_MESSAGE: Final = re.compile(rb"HMSG ([^\s]+) (\d{1,10})(?: ([^\s]+))? (\d{1,10}) (\d{1,10})\r\n")


class Parser:
    """Parses the byte stream of a server, in pieces of any size. InvalidMessage if it violates the protocol."""

    def __init__(self, *, inbox: str | None = None, max_payload_bytes: int = 8_388_608) -> None:
        """With an `inbox`, plain acknowledgements to it are parsed in runs, which is five times as fast."""
        self._buffer = bytearray()
        self._max_payload_bytes = max_payload_bytes
        self._ack = self._acks = None
        if inbox is not None:
            ack = (
                rb"MSG " + re.escape(inbox.encode()) + rb"\.(\d{1,18}) \d{1,10} \d{1,4}\r\n"
                rb'\{"stream":"[^"\r\n]*",(?: ?"domain":"[^"\r\n]*",)? ?"seq":\d{1,18}(, ?"duplicate": ?true)?\}\r\n'
            )
            self._ack = re.compile(ack)
            self._acks = re.compile(rb"(?:" + ack.replace(rb"(\d{1,18})", rb"\d{1,18}", 1) + rb")+")

    def feed(self, piece: bytes) -> Iterator[ServerMessage]:
        """Yield the messages that this piece completes."""
        self._buffer += piece
        data = bytes(self._buffer)
        start = 0
        try:
            while start < len(data):
                step = self._next(data, start)
                if step is None:
                    break
                message, start = step
                if message is not None:
                    yield message
        finally:
            del self._buffer[:start]

    def _next(self, data: bytes, start: int) -> tuple[ServerMessage | None, int] | None:
        if self._ack is not None and self._acks is not None and (run := self._acks.match(data, start)):
            found = self._ack.findall(data, start, run.end())
            return Acks([int(number) for number, _ in found], [bool(again) for _, again in found]), run.end()
        match = _MESSAGE.match(data, start)
        if match:
            subject, sid, reply, size = match.groups()
            return self._message(data, match.end(), subject, sid, reply, 0, int(size))
        match = _HEADER_MESSAGE.match(data, start)
        if match:
            subject, sid, reply, header_size, size = match.groups()
            return self._message(data, match.end(), subject, sid, reply, int(header_size), int(size))
        end = data.find(b"\r\n", start)
        if end < 0:
            if len(data) - start > _MAX_LINE_BYTES:
                raise InvalidMessage(f"the server sent a line of more than {_MAX_LINE_BYTES} bytes")
            return None
        return _control(data[start:end]), end + 2

    def _message(
        self, data: bytes, start: int, subject: bytes, sid: bytes, reply: bytes | None, header_size: int, size: int
    ) -> tuple[ServerMessage, int] | None:
        if size > self._max_payload_bytes or header_size > size:
            raise InvalidMessage(f"the server announced {size} bytes with {header_size} of headers")
        end = start + size
        if len(data) < end + 2:
            return None
        if data[end : end + 2] != b"\r\n":
            raise InvalidMessage("the server sent a message of another size than announced")
        middle = start + header_size
        message = Message(
            subject.decode(errors="replace"),
            int(sid),
            None if reply is None else reply.decode(errors="replace"),
            data[start:middle],
            data[middle:end],
        )
        return message, end + 2


def _control(line: bytes) -> ServerMessage | None:
    verb, _, rest = line.partition(b" ")
    match verb.upper():
        case b"PING":
            return Ping()
        case b"PONG":
            return Pong()
        case b"+OK":
            return None
        case b"-ERR":
            return Failure(rest.decode(errors="replace").strip(" '"))
        case b"INFO":
            try:
                options = json.loads(rest)
            except ValueError as error:
                raise InvalidMessage(f"the server's INFO is not valid JSON: {rest[:200]!r}") from error
            if not isinstance(options, dict):
                raise InvalidMessage(f"the server's INFO is not a JSON object: {rest[:200]!r}")
            return Info(options)
    raise InvalidMessage(f"the server sent {line[:200]!r}, which is not the NATS protocol")


# --- acknowledgements ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PubAck:
    """The stream has stored the message; `duplicate` if it already had it."""

    stream: str
    sequence: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class PubError:
    """The stream rejected the message."""

    code: int
    description: str


@dataclass(frozen=True, slots=True)
class NoStreamReply:
    """No stream listens on the subject of the message."""


def parse_acknowledgement(message: Message) -> PubAck | PubError | NoStreamReply:
    """Parse the answer to a published message."""
    if message.headers.startswith(b"NATS/1.0 503"):
        return NoStreamReply()
    try:
        answer = json.loads(message.payload)
        error = answer.get("error")
        if error is not None:
            return PubError(int(error.get("code", 0)), str(error.get("description", "")))
        return PubAck(str(answer["stream"]), int(answer["seq"]), answer.get("duplicate") is True)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise InvalidMessage(f"not a JetStream acknowledgement: {message.payload[:200]!r}") from problem
