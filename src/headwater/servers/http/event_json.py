"""Events as JSON and as parts of an SSE stream. Pure."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from headwater.eventstore.query import StoreEvent
from headwater.log.model import Event

JSON_TYPE: Final = "application/json"
# Event names with another meaning in an SSE stream.
_RESERVED: Final = frozenset({"end", "error", "open", "message"})
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _refuse_constant(text: str) -> Any:
    raise ValueError(text)


_decode: Final = json.JSONDecoder(parse_constant=_refuse_constant).decode


def content(payload: bytes | None, content_type: str | None) -> str:
    """The payload as the last member of an object: data, text or base64. JSON is passed through unchanged."""
    if payload is None:
        return '"data":null'
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return f'"base64":"{base64.b64encode(payload).decode()}"'
    if content_type == JSON_TYPE:
        try:
            _decode(text)
        except (ValueError, RecursionError):
            pass
        else:
            # Valid JSON has line breaks only between tokens; SSE data must be one line.
            return f'"data":{text.replace(chr(10), " ").replace(chr(13), " ")}'
    return f'"text":{_encode(text)}'


def key_json(key: bytes | None) -> dict[str, str | None]:
    """A key as text, or as base64 if it is not UTF-8."""
    if key is None:
        return {"key": None}
    try:
        return {"key": key.decode()}
    except UnicodeDecodeError:
        return {"key_base64": base64.b64encode(key).decode()}


def event_json(event: Event, more: Mapping[str, Any] | None = None) -> str:
    """An event as one line of JSON."""
    parts = {
        "position": event.position,
        "topic": event.topic,
        "partition": event.partition,
        "offset": event.topic_offset,
        "type": event.type,
        **key_json(event.key),
        "routing_key": event.routing_key,
        "headers": event.headers or {},
        "content_type": event.content_type,
        "event_id": event.event_id,
        "published_at": event.published_at.isoformat(),
        **(more or {}),
    }
    return f"{_encode(parts)[:-1]},{content(event.payload, event.content_type)}}}"


def store_event_json(topic: str, event: StoreEvent) -> str:
    """An event of an event store as one line of JSON."""
    parts = {
        "position": event.position,
        "topic": topic,
        "partition": 0,
        "offset": event.topic_offset,
        "type": event.type,
        "tags": event.tags,
        "metadata": event.metadata or {},
        "content_type": event.content_type,
        "event_id": event.event_id,
        "published_at": event.published_at.isoformat(),
    }
    return f"{_encode(parts)[:-1]},{content(event.payload, event.content_type)}}}"


def frame(event: Event, *, named: bool, epoch: int | None = None) -> bytes:
    """An event as an SSE frame. `epoch` is the epoch of its position."""
    kind = ""
    if named:
        plain = event.type is not None and event.type not in _RESERVED and not {"\n", "\r"} & set(event.type)
        kind = f"event: {event.type if plain else 'event'}\n"
    return chunk(f"id: {ResumePoint(event.position, epoch=epoch)}\n{kind}data: {event_json(event)}\n\n".encode())


class ResumePoint(NamedTuple):
    """Where an SSE stream can be resumed: its `id:` and the client's Last-Event-ID.

    `position` is the last event that the stream delivered, or the last one before it began; the stream resumes after
    it. `seen` is how far the log was searched for this stream without another match: events up to there that retention
    removed are not missing. It may be beyond what survives a crash, so reading never resumes from it.
    `epoch` is the epoch of both; None: unknown, as for a position that a user typed.

    Written `17.28150123`, or `17.28150123/90` with `seen`.
    """

    position: int
    seen: int = 0
    epoch: int | None = None

    def __str__(self) -> str:
        text = str(self.position) if self.epoch is None else f"{self.position}.{self.epoch}"
        return f"{text}/{self.seen}" if self.seen > self.position else text

    @classmethod
    def parse(cls, text: str) -> ResumePoint | None:
        """Parse an id of a stream; None if it is invalid."""
        match = _RESUME_POINT.fullmatch(text)
        if match is None:
            return None
        position, epoch, seen = match.groups()
        return cls(int(position), int(seen or 0), None if epoch is None else int(epoch))


RESUME_POINT_PATTERN: Final = r"^([0-9]{1,19})(?:\.([0-9]{1,9}))?(?:/([0-9]{1,19}))?$"
_RESUME_POINT: Final = re.compile(RESUME_POINT_PATTERN)


def opening_frame(point: ResumePoint, *, retry_ms: int) -> bytes:
    """The first frame: a client that is disconnected before its first event resumes where it began."""
    return f"retry: {retry_ms}\nid: {point}\n\n".encode()


def heartbeat_frame(point: ResumePoint | None) -> bytes:
    """A keep-alive comment, with the resume point if it has moved, for streams whose filter rarely matches."""
    return chunk(b":\n\n" if point is None else f":\nid: {point}\n\n".encode())


def closing_frame(reason: str, point: ResumePoint, *, retry_ms: int) -> bytes:
    """The last frame: why the stream ends, and where it can be resumed."""
    data = _encode({"reason": reason, "after": point.position, "epoch": point.epoch})
    return chunk(f"id: {point}\nevent: end\nretry: {retry_ms}\ndata: {data}\n\n".encode()) + b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """Data in HTTP chunked transfer encoding."""
    return b"%x\r\n%s\r\n" % (len(data), data)
