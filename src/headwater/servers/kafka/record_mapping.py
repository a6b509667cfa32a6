"""Records as events and events as records: what becomes of headers, and that both ways lead back to the bit. Pure.

A header whose value is text becomes a field of the event's JSON headers. Headers that JSON cannot give back as they
were (bytes, a name twice, another order) are kept beside it as they came.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from headwater.servers.kafka.records import read_headers, write_headers

# An event's own parts, as headers. The id is only told: what a producer sends under that name dedupes nothing.
TYPE: Final = b"headwater-type"
ROUTING_KEY: Final = b"headwater-routing-key"
CONTENT_TYPE: Final = b"headwater-content-type"
EVENT_ID: Final = b"headwater-event-id"

_to_json: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class Parts(NamedTuple):
    """What the headers of a record become. `kept`: as they came, where the rest would not give them back."""

    headers: str | None = None
    type: str | None = None
    routing_key: str | None = None
    content_type: str | None = None
    kept: bytes | None = None


NO_PARTS: Final = Parts()


def parts_of(section: bytes) -> Parts:
    """The parts of an event for the headers of a record."""
    own: dict[bytes, str] = {}
    headers: dict[str, str | None] = {}
    for name, value in read_headers(section):
        limit = {TYPE: 200, ROUTING_KEY: 255, CONTENT_TYPE: 200}.get(name)
        text = _text(value)
        if limit is not None and text is not None and 1 <= len(text) <= limit:
            own[name] = text
            continue
        named = _text(name)
        if named is not None and (value is None or text is not None):
            headers[named] = text
    parts = Parts(_to_json(headers) if headers else None, own.get(TYPE), own.get(ROUTING_KEY), own.get(CONTENT_TYPE))
    as_told = section_of(headers or None, parts.type, parts.routing_key, parts.content_type, None)
    return parts if as_told == section else parts._replace(kept=section)


def section_of(
    headers: dict[str, Any] | None,
    type: str | None,
    routing_key: str | None,
    content_type: str | None,
    event_id: str | None,
) -> bytes | None:
    """The headers of a record for the parts of an event; None: it has none."""
    told: list[tuple[bytes, bytes | None]] = []
    if headers:
        # The order in which Postgres keeps the fields of JSON, whatever order they came in.
        for name, value in sorted(((n.encode(), v) for n, v in headers.items()), key=lambda h: (len(h[0]), h[0])):
            told.append(
                (name, None if value is None else (value if isinstance(value, str) else _to_json(value)).encode())
            )
    for name, part in ((TYPE, type), (ROUTING_KEY, routing_key), (CONTENT_TYPE, content_type), (EVENT_ID, event_id)):
        if part is not None:
            told.append((name, part.encode()))
    return write_headers(told) if told else None


def _text(value: bytes | None) -> str | None:
    """The bytes as text that Postgres can hold, if they are."""
    if value is None or b"\x00" in value:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None
