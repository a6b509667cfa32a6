"""How events look in JSON and in a live stream. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from headwater.model import Event
from headwater.query import StoreEvent

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


def frame(event: Event, *, named: bool) -> bytes:
    """An event as a part of a live stream."""
    kind = ""
    if named:
        plain = event.type is not None and event.type not in _RESERVED and not {"\n", "\r"} & set(event.type)
        kind = f"event: {event.type if plain else 'event'}\n"
    return chunk(f"id: {event.position}\n{kind}data: {event_json(event)}\n\n".encode())


def heartbeat(position: int) -> bytes:
    """Nothing, said aloud; and where to resume, which whoever selects little would otherwise not learn."""
    return chunk(f":\nid: {position}\n\n".encode())


def ending(reason: str, position: int, *, retry_ms: int) -> bytes:
    """The last part of a stream: why it ends, and where it may be taken up again."""
    told = _encode({"reason": reason, "after": position})
    return chunk(f"id: {position}\nevent: end\nretry: {retry_ms}\ndata: {told}\n\n".encode()) + b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """As HTTP sends a part of something whose length it does not know."""
    return b"%x\r\n%s\r\n" % (len(data), data)
