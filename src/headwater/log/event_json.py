"""The JSON of an event: one shape for HTTP, SSE, webhooks, `--json` of the command line and the console. Pure.

The members are those of `Event`, with `topic_offset` as `offset`. Two of them have forms:

- the key is `key` if it is UTF-8 text, else `key_base64`;
- the payload is the last member: `data`, `text` or `base64`.

`data` is a payload that is JSON, character by character: numbers keep their digits and objects their duplicate keys.
Only line breaks between tokens become spaces: SSE and JSON lines need one line. A payload is JSON if its content type
is JSON, or if it has no content type and is a JSON object or array. `"data": null` means that there is no payload; the
JSON payload `null` is therefore written as text. `text` is any other payload that is UTF-8, `base64` the rest.

`parse_event` reverses `event_json`: it returns the same bytes, except for those line breaks.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Container, Mapping
from datetime import UTC
from typing import Any, Final, NoReturn

from headwater.errors import InvalidEvent
from headwater.log.model import Event, NewEvent

JSON_TYPE: Final = "application/json"
TEXT_TYPE: Final = "text/plain"
BYTES_TYPE: Final = "application/octet-stream"

_CONTENT_MEMBERS: Final = ("data", "text", "base64")
_TEXT_MEMBERS: Final = ("key", "key_base64", "type", "routing_key", "content_type", "event_id", "text", "base64")
PARSED_MEMBERS: Final = frozenset({*_CONTENT_MEMBERS, *_TEXT_MEMBERS, "headers"})
# What the log assigns to every event that is published.
ASSIGNED_MEMBERS: Final = frozenset({"position", "topic", "partition", "offset", "published_at"})

_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_SPACE: Final = re.compile(r"[ \t\n\r]*")


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _ignore_number(text: str) -> None:
    return None


_decoder: Final = json.JSONDecoder(parse_constant=_reject_constant)
# Python limits the digits of an integer; JSON does not.
MAX_INTEGER_DIGITS: Final = 4300
_long_number_decoder: Final = json.JSONDecoder(parse_constant=_reject_constant, parse_int=_ignore_number)


def is_json_type(content_type: str) -> bool:
    """Whether a content type is JSON: application/json, text/json or a type with the suffix +json, with any
    parameters."""
    if content_type == JSON_TYPE:
        return True
    kind = content_type.partition(";")[0].strip().lower()
    return kind in (JSON_TYPE, "text/json") or kind.endswith("+json")


def _is_json(text: str) -> bool:
    for decoder in (_decoder, _long_number_decoder) if len(text) > MAX_INTEGER_DIGITS else (_decoder,):
        try:
            decoder.decode(text)
        except RecursionError:
            return False
        except ValueError:
            continue
        return True
    return False


def json_payload(payload: bytes | None, content_type: str | None) -> str | None:
    """A payload that is JSON, as its text; None if it is not JSON."""
    if payload is None:
        return None
    if content_type is None:
        # A number or a word without a content type is text: whether it is JSON would be chance.
        if not payload.lstrip().startswith((b"{", b"[")):
            return None
    elif not is_json_type(content_type):
        return None
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return None
    return text if _is_json(text) else None


def content(payload: bytes | None, content_type: str | None) -> str:
    """The payload as a member of an object: data, text or base64."""
    if payload is None:
        return '"data":null'
    text = json_payload(payload, content_type)
    if text is not None and text.strip(" \t\n\r") != "null":
        return f'"data":{one_line(text)}'
    try:
        return f'"text":{_encode(payload.decode())}'
    except UnicodeDecodeError:
        return f'"base64":"{base64.b64encode(payload).decode()}"'


def one_line(text: str) -> str:
    """JSON text without line breaks."""
    # Inside a JSON string a line break is escaped, so an unescaped one is white space.
    return text.replace("\n", " ").replace("\r", " ")


def key_json(key: bytes | None) -> dict[str, str | None]:
    """A key as text, or as base64 if it is not UTF-8."""
    if key is None:
        return {"key": None}
    try:
        return {"key": key.decode()}
    except UnicodeDecodeError:
        return {"key_base64": base64.b64encode(key).decode()}


def event_json(event: Event, more: Mapping[str, Any] | None = None) -> str:
    """An event as one line of JSON. `more` are further members, such as those of a lease."""
    members = {
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
        "published_at": event.published_at.astimezone(UTC).isoformat(),
        **(more or {}),
    }
    return with_content(members, event.payload, event.content_type)


def with_content(members: Mapping[str, Any], payload: bytes | None, content_type: str | None) -> str:
    """An object with these members and a payload. The payload is not parsed and encoded again: that would change it."""
    return f"{_encode(members)[:-1]},{content(payload, content_type)}}}"


def parse_event(text: str, *, content_type: str | None = None) -> NewEvent:
    """An event to publish from its JSON, as written by `event_json` or by hand. What the log assigns is ignored.

    `content_type` applies to events that do not have one. Without it, and without the member `content_type`, the form
    of the payload decides; `"content_type": null` is an event without a content type.
    """
    members, data = read_object(text, content=_CONTENT_MEMBERS)
    if unknown := sorted(members.keys() - PARSED_MEMBERS - ASSIGNED_MEMBERS):
        raise InvalidEvent(f"unknown field in an event: {', '.join(unknown)}")
    for name in _TEXT_MEMBERS:
        if not isinstance(members.get(name), str | None):
            raise InvalidEvent(f"invalid {name} of an event: expected a string")
    if not isinstance(members.get("headers"), dict | None):
        raise InvalidEvent("invalid headers of an event: expected a JSON object")
    given = [name for name in _CONTENT_MEMBERS if name in members]
    if len(given) != 1:
        raise InvalidEvent("invalid event: expected one of the fields data, text and base64")
    if members.get("key") is not None and members.get("key_base64") is not None:
        raise InvalidEvent("invalid event: give only one of key and key_base64")
    payload, default_type = _payload(given[0], members[given[0]], data)
    if "content_type" in members:
        default_type = None
    key_base64 = members.get("key_base64")
    return NewEvent(
        payload=payload,
        key=members.get("key") if key_base64 is None else from_base64(key_base64, "key_base64"),
        type=members.get("type"),
        routing_key=members.get("routing_key"),
        headers=members.get("headers") or None,
        event_id=members.get("event_id"),
        content_type=members.get("content_type") or content_type or default_type,
    )


def _payload(name: str, value: Any, data: str) -> tuple[bytes | None, str | None]:
    """The payload and its default content type."""
    if data == "null":
        return None, None
    if name == "data":
        return _utf8(data), JSON_TYPE
    if name == "text":
        return _utf8(value), TEXT_TYPE
    return from_base64(value, "base64"), BYTES_TYPE


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidEvent("the payload cannot be encoded as UTF-8") from None


def from_base64(text: str, name: str) -> bytes:
    """Decode base64; `name` is the field for the error message."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidEvent(f"invalid {name}: {error}") from None


def read_object(text: str, *, content: Container[str]) -> tuple[dict[str, Any], str]:
    """The members of an object, and the text of its payload as it stands there: that of a member named in `content`.

    Raises ValueError if the text is not JSON.
    """
    members: dict[str, Any] = {}
    content_text = ""
    at = _skip_space(text, 0)
    if text[at : at + 1] != "{":
        _decoder.decode(text)
        raise InvalidEvent("invalid event: expected a JSON object")
    at = _skip_space(text, at + 1)
    while text[at : at + 1] != "}":
        if members:
            at = _skip_space(text, _expect(text, at, ","))
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("expected a name in double quotes", text, at)
        name, at = _decoder.raw_decode(text, at)
        at = _skip_space(text, _expect(text, _skip_space(text, at), ":"))
        decoder = _long_number_decoder if name == "data" else _decoder
        if name in members:
            raise InvalidEvent(f"invalid event: the field {name} is given twice")
        members[name], end = decoder.raw_decode(text, at)
        if name in content:
            content_text = text[at:end]
        at = _skip_space(text, end)
    if _skip_space(text, at + 1) != len(text):
        raise json.JSONDecodeError("extra characters after the object", text, at + 1)
    return members, content_text


def read_array(text: str) -> list[str]:
    """The texts of the elements of an array. Raises ValueError if the text is not JSON."""
    elements: list[str] = []
    at = _skip_space(text, _expect(text, _skip_space(text, 0), "["))
    while text[at : at + 1] != "]":
        if elements:
            at = _skip_space(text, _expect(text, at, ","))
        _, end = _long_number_decoder.raw_decode(text, at)
        elements.append(text[at:end])
        at = _skip_space(text, end)
    if _skip_space(text, at + 1) != len(text):
        raise json.JSONDecodeError("extra characters after the array", text, at + 1)
    return elements


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _expect(text: str, at: int, character: str) -> int:
    if text[at : at + 1] != character:
        raise json.JSONDecodeError(f"expected {character!r}", text, at)
    return at + 1
