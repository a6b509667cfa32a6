"""Mapping between the headers of a record and the parts of an event, lossless in both directions. No I/O.

A header with a text value becomes a field of the event's JSON headers. If JSON cannot represent the headers exactly
(bytes, a repeated name, another order), the original header section is stored beside it.

CloudEvents use the headers of their Kafka protocol binding: `ce_*`, which stay headers of the event, and `content-type`
instead of `headwater-content-type`. `ce_type` and `ce_routingkey` are also the type and the routing key.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from headwater.log.cloud_events import ANY_TYPE, SPEC_VERSION_HEADER
from headwater.servers.kafka.records import read_headers, write_headers

# The parts of an event as headers. The event id is only sent to consumers: producers cannot set it.
TYPE: Final = b"headwater-type"
ROUTING_KEY: Final = b"headwater-routing-key"
CONTENT_TYPE: Final = b"headwater-content-type"
EVENT_ID: Final = b"headwater-event-id"
# Of a CloudEvent.
CLOUD_CONTENT_TYPE: Final = b"content-type"
CLOUD_TYPE: Final = b"ce_type"
CLOUD_ROUTING_KEY: Final = b"ce_routingkey"
_CLOUD_COPIES: Final = {CLOUD_TYPE: TYPE, CLOUD_ROUTING_KEY: ROUTING_KEY}
_LIMITS: Final = {TYPE: 200, ROUTING_KEY: 255, CONTENT_TYPE: 200}

_to_json: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class EventParts(NamedTuple):
    """Parts of an event from the headers of a record. `record_headers`: the original, if the rest is not lossless."""

    headers: str | None = None
    type: str | None = None
    routing_key: str | None = None
    content_type: str | None = None
    record_headers: bytes | None = None


NO_EVENT_PARTS: Final = EventParts()


def event_parts(section: bytes) -> EventParts:
    """Convert the headers of a record to parts of an event."""
    own: dict[bytes, str] = {}
    copies: dict[bytes, str] = {}
    headers: dict[str, str | None] = {}
    pairs = list(read_headers(section))
    is_cloud_event = any(
        name == SPEC_VERSION_HEADER.encode()
        or (name == CLOUD_CONTENT_TYPE and value is not None and value.startswith(ANY_TYPE.encode()))
        for name, value in pairs
    )
    for name, value in pairs:
        part = CONTENT_TYPE if is_cloud_event and name == CLOUD_CONTENT_TYPE else name
        text = _text(value)
        if text is not None and part in _LIMITS and 1 <= len(text) <= _LIMITS[part]:
            own[part] = text
            continue
        if is_cloud_event and name in _CLOUD_COPIES and text is not None:
            copy = _CLOUD_COPIES[name]
            if 1 <= len(text) <= _LIMITS[copy]:
                copies[copy] = text
        named = _text(name)
        if named is not None and (value is None or text is not None):
            headers[named] = text
    own = copies | own
    parts = EventParts(
        _to_json(headers) if headers else None, own.get(TYPE), own.get(ROUTING_KEY), own.get(CONTENT_TYPE)
    )
    rebuilt = header_section(headers or None, parts.type, parts.routing_key, parts.content_type, None)
    return parts if rebuilt == section else parts._replace(record_headers=section)


def header_section(
    headers: dict[str, Any] | None,
    type: str | None,
    routing_key: str | None,
    content_type: str | None,
    event_id: str | None,
) -> bytes | None:
    """Convert parts of an event to the header section of a record; None: no headers."""
    pairs: list[tuple[bytes, bytes | None]] = []
    if headers:
        # The order of the fields of jsonb in Postgres: by length, then by bytes.
        for name, value in sorted(((n.encode(), v) for n, v in headers.items()), key=lambda h: (len(h[0]), h[0])):
            pairs.append(
                (name, None if value is None else (value if isinstance(value, str) else _to_json(value)).encode())
            )
    content_type_name = CONTENT_TYPE
    if headers is not None and SPEC_VERSION_HEADER in headers:
        content_type_name = CLOUD_CONTENT_TYPE
        # They are headers already.
        type = None if headers.get(CLOUD_TYPE.decode()) == type else type
        routing_key = None if headers.get(CLOUD_ROUTING_KEY.decode()) == routing_key else routing_key
    elif content_type is not None and content_type.startswith(ANY_TYPE):
        content_type_name = CLOUD_CONTENT_TYPE
    own = ((TYPE, type), (ROUTING_KEY, routing_key), (content_type_name, content_type), (EVENT_ID, event_id))
    pairs += [(name, part.encode()) for name, part in own if part is not None]
    return write_headers(pairs) if pairs else None


def _text(value: bytes | None) -> str | None:
    """Decode bytes as text that Postgres can store; None if that is not possible."""
    if value is None or b"\x00" in value:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None
