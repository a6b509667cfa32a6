"""How events look in JSON and in a live stream. Pure."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from headwater.eventstore.query import StoreEvent
from headwater.model import Event

JSON_TYPE: Final = "application/json"
# Names that mean something else to who reads a live stream.
_RESERVED: Final = frozenset({"end", "error", "open", "message"})
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _refuse_constant(text: str) -> Any:
    raise ValueError(text)


_decode: Final = json.JSONDecoder(parse_constant=_refuse_constant).decode


def content(payload: bytes | None, content_type: str | None) -> str:
    """The payload as the last member of an object: data, text or base64. JSON stays as it was published."""
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
            # Between the tokens of JSON only: inside a text they could not be.
            return f'"data":{text.replace(chr(10), " ").replace(chr(13), " ")}'
    return f'"text":{_encode(text)}'


def key_of(key: bytes | None) -> dict[str, str | None]:
    """A key as text; in base64 where it is none."""
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
        **key_of(event.key),
        "routing_key": event.routing_key,
        "headers": event.headers or {},
        "content_type": event.content_type,
        "event_id": event.event_id,
        "published_at": event.published_at.isoformat(),
        **(more or {}),
    }
    return f"{_encode(parts)[:-1]},{content(event.payload, event.content_type)}}}"


def store_event_json(topic: str, event: StoreEvent) -> str:
    """An event of an event store."""
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
    """An event as a part of a live stream. `epoch` is the one that its position is of."""
    kind = ""
    if named:
        plain = event.type is not None and event.type not in _RESERVED and not {"\n", "\r"} & set(event.type)
        kind = f"event: {event.type if plain else 'event'}\n"
    return chunk(f"id: {Mark(event.position, epoch=epoch)}\n{kind}data: {event_json(event)}\n\n".encode())


class Mark(NamedTuple):
    """Where a stream may be resumed: the `id:` of an SSE stream, and its Last-Event-ID.

    `position` is the last event that the stream delivered, or the last before it began; a stream is resumed after it.
    `seen` is how far the log was looked through for this stream without finding more: it only says that what retention
    took up to there is not missing. It may lie beyond what survives a crash, so nothing is ever read from it on.
    `epoch` is the one that both are of; None: not known, as of a position that somebody typed.

    Written `17.28150123`, or `17.28150123/90` with `seen`.
    """

    position: int
    seen: int = 0
    epoch: int | None = None

    def __str__(self) -> str:
        place = str(self.position) if self.epoch is None else f"{self.position}.{self.epoch}"
        return f"{place}/{self.seen}" if self.seen > self.position else place

    @classmethod
    def parsed(cls, text: str) -> Mark | None:
        """None: that is no id of a stream."""
        found = _MARK.fullmatch(text)
        if found is None:
            return None
        position, epoch, seen = found.groups()
        return cls(int(position), int(seen or 0), None if epoch is None else int(epoch))


MARK_PATTERN: Final = r"^([0-9]{1,19})(?:\.([0-9]{1,9}))?(?:/([0-9]{1,19}))?$"
_MARK: Final = re.compile(MARK_PATTERN)


def beginning(mark: Mark, *, retry_ms: int) -> bytes:
    """The first part of a stream: a client that gets no event before it is cut off resumes where it began."""
    return f"retry: {retry_ms}\nid: {mark}\n\n".encode()


def heartbeat(mark: Mark | None) -> bytes:
    """A comment; for a stream that selects little also how far it has looked, for Last-Event-ID."""
    return chunk(b":\n\n" if mark is None else f":\nid: {mark}\n\n".encode())


def ending(reason: str, mark: Mark, *, retry_ms: int) -> bytes:
    """The last part of a stream: why it ends, and where it may be taken up again."""
    told = _encode({"reason": reason, "after": mark.position, "epoch": mark.epoch})
    return chunk(f"id: {mark}\nevent: end\nretry: {retry_ms}\ndata: {told}\n\n".encode()) + b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """As HTTP sends a part of something whose length it does not know."""
    return b"%x\r\n%s\r\n" % (len(data), data)
