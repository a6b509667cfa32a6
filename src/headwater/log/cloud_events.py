"""CloudEvents 1.0: an event as a CloudEvent, and a CloudEvent as an event to publish. Pure.

An event that was published as a CloudEvent has its attributes as headers, named as in the Kafka protocol binding:
`ce_id`, `ce_source`, `ce_specversion`, `ce_type`, `ce_subject`, ..., each with the type that it had. `datacontenttype`
is the content type of the event. Its type, key, routing key and event id are copies, for bindings, filters and order:

    attribute        part of the event
    type             type
    partitionkey     key
    routingkey       routing key
    source and id    event id: so publishing a CloudEvent again has no effect

Read as a CloudEvent it has exactly the attributes that it was published with. Every other event becomes a CloudEvent
whose attributes are made of its parts (`_attributes`); headers become extension attributes.

The data: JSON stays as it is, character by character, except for line breaks between tokens. Text is `data` if the
content type says that it is text, XML or YAML. Everything else is `data_base64`, so that the form of a payload depends
on its content type and not on its bytes. A missing payload is a CloudEvent without data.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, date
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from headwater.errors import InvalidEvent
from headwater.log.event_json import (
    JSON_TYPE,
    is_json_type,
    json_payload,
    one_line,
    read_array,
    read_object,
)
from headwater.log.model import Event, NewEvent

EVENT_TYPE: Final = "application/cloudevents+json"
BATCH_TYPE: Final = "application/cloudevents-batch+json"
ANY_TYPE: Final = "application/cloudevents"
"""How the content types of all formats begin."""
SPEC_VERSION: Final = "1.0"
# Of attributes as headers of an event and of a Kafka record, and as headers of an HTTP request.
HEADER_PREFIX: Final = "ce_"
HTTP_PREFIX: Final = "ce-"
SPEC_VERSION_HEADER: Final = f"{HEADER_PREFIX}specversion"

# The type of an event without a type: CloudEvents require one.
DEFAULT_TYPE: Final = "headwater.event"
OTHER_HEADERS: Final = "headwaterheaders"
KEY_BASE64: Final = "keybase64"

AttributeValue = str | bool | int
_REQUIRED: Final = ("specversion", "id", "source", "type")
_OPTIONAL: Final = ("subject", "time", "datacontenttype", "dataschema")
_TEXT: Final = frozenset((*_REQUIRED, *_OPTIONAL))
_MAX_CHARACTERS: Final = {"type": 200, "datacontenttype": 200, "routingkey": 255}
_MAX_EVENT_ID: Final = 255
_NAME: Final = re.compile(r"[a-z0-9]+")
# Not allowed in attributes: control characters, surrogates and noncharacters.
_FORBIDDEN: Final = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_TIME: Final = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt](?:[01]\d|2[0-3]):[0-5]\d:(?:[0-5]\d|60)(?:\.\d+)?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)",
    re.ASCII,
)
_MEDIA_TYPE: Final = re.compile(r"[^\s/;]+/[^\s/;]+\s*(?:;.*)?")
_SPACE: Final = re.compile(r"\s")
# The printable ASCII characters that are not percent-encoded in HTTP headers.
_PLAIN: Final = "!#$&'()*+,-./:;<=>?@[\\]^_`{|}~"

_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class CloudEvent(NamedTuple):
    """A valid CloudEvent: its attributes by name, and its data. `payload` None: it has no data."""

    attributes: Mapping[str, AttributeValue]
    payload: bytes | None

    @property
    def content_type(self) -> str | None:
        """The attribute datacontenttype."""
        found = self.attributes.get("datacontenttype")
        return found if isinstance(found, str) else None


# --- read a CloudEvent -------------------------------------------------------------------------------------------


def parse_structured(text: str) -> CloudEvent:
    """A CloudEvent in its JSON format. Raises ValueError if the text is not JSON, InvalidEvent if it is invalid."""
    members, data = read_object(text, content=("data",))
    attributes = {name: value for name, value in members.items() if name not in ("data", "data_base64")}
    encoded = members.get("data_base64")
    if encoded is not None and data not in ("", "null"):
        raise _invalid("data_base64", "data and data_base64 are both given, expected one of them")
    attributes = _checked(attributes)
    if encoded is not None:
        try:
            return CloudEvent(attributes, base64.b64decode(encoded, validate=True))
        except (TypeError, ValueError):
            raise _invalid("data_base64", "data_base64 is not base64") from None
    if data in ("", "null"):
        return CloudEvent(attributes, None)
    # Without a content type, data is JSON; the specification wants it named when the event takes another form.
    content_type = str(attributes.setdefault("datacontenttype", JSON_TYPE))
    if is_json_type(content_type):
        return CloudEvent(attributes, _utf8(data, "data"))
    if not isinstance(members["data"], str):
        raise _invalid("data", f"data is not a string, but datacontenttype is {content_type}")
    return CloudEvent(attributes, _utf8(members["data"], "data"))


def parse_batch(text: str) -> list[CloudEvent]:
    """The CloudEvents of a batch in the JSON format. The error of an invalid one names its index."""
    found: list[CloudEvent] = []
    for element in read_array(text):
        try:
            found.append(parse_structured(element))
        except InvalidEvent as error:
            index = len(found)
            raise InvalidEvent(f"event {index}: {error.message}", detail={**error.detail, "index": index}) from None
    return found


def parse_binary(headers: Iterable[tuple[str, str]], body: bytes) -> CloudEvent:
    """A CloudEvent in binary mode over HTTP, from all headers of the request."""
    attributes: dict[str, Any] = {}
    for given, value in headers:
        name = given.lower()
        if name == "content-type":
            name = "datacontenttype"
        elif name.startswith(HTTP_PREFIX):
            name = name.removeprefix(HTTP_PREFIX)
            value = _from_header(name, value)
            if name in ("data", "datacontenttype"):
                raise _invalid(name, f"{name} cannot be a header: expected the body and its Content-Type")
        else:
            continue
        if name in attributes:
            raise _invalid(name, f"{name} is given twice")
        attributes[name] = value
    return CloudEvent(_checked(attributes), body or None)


def new_event(given: CloudEvent) -> NewEvent:
    """A CloudEvent as an event to publish."""
    attributes = given.attributes
    key, routing_key = attributes.get("partitionkey"), attributes.get("routingkey")
    return NewEvent(
        payload=given.payload,
        key=None if key is None else attribute_text(key),
        type=str(attributes["type"]),
        routing_key=None if routing_key is None else attribute_text(routing_key),
        headers={HEADER_PREFIX + name: value for name, value in attributes.items() if name != "datacontenttype"},
        event_id=event_id_of(str(attributes["source"]), str(attributes["id"])),
        content_type=given.content_type,
    )


def event_id_of(source: str, id: str) -> str:
    """The event id of a CloudEvent: its source and its id with a space between them, or their hash if that is too
    long. A source contains no space, so two CloudEvents have the same event id only if both are equal."""
    text = f"{source} {id}"
    return text if len(text) <= _MAX_EVENT_ID else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


# --- write a CloudEvent ------------------------------------------------------------------------------------------


def cloud_event(event: Event, source: str = "") -> CloudEvent:
    """An event as a CloudEvent. `source` begins the source of events that were not published as a CloudEvent."""
    published = _published(event)
    if published is None:
        return CloudEvent(_attributes(event, source), event.payload)
    if event.key is not None and "partitionkey" not in published.attributes:
        # Kafka clients send the partition key only as the key of the record.
        key = _plain_text(event.key)
        if key is not None:
            return published._replace(attributes={**published.attributes, "partitionkey": key})
    return published


def structured(given: CloudEvent) -> str:
    """A CloudEvent as one line of JSON."""
    data = _data(given.payload, given.content_type)
    return _encode(given.attributes) if data is None else f"{_encode(given.attributes)[:-1]},{data}}}"


def batch(events: Iterable[CloudEvent]) -> str:
    """A batch in the JSON format."""
    return f"[{','.join(map(structured, events))}]"


def binary_headers(given: CloudEvent) -> list[tuple[str, str]]:
    """The headers of a CloudEvent in binary mode over HTTP; its payload is the body."""
    return [
        ("content-type", str(value))
        if name == "datacontenttype"
        else (HTTP_PREFIX + name, quote(attribute_text(value), safe=_PLAIN))
        for name, value in given.attributes.items()
    ]


def attribute_text(value: AttributeValue) -> str:
    """The value of an attribute as text, as the specification defines it."""
    return value if isinstance(value, str) else _encode(value)


def _published(event: Event) -> CloudEvent | None:
    """The CloudEvent that an event was published as; None if it was not, or if that is not valid."""
    try:
        if event.content_type is not None and event.payload is not None and is_structured(event.content_type):
            return parse_structured(event.payload.decode())
        headers = event.headers or {}
        if SPEC_VERSION_HEADER not in headers:
            return None
        attributes = {
            name: value
            for header, value in headers.items()
            if header.startswith(HEADER_PREFIX) and _NAME.fullmatch(name := header.removeprefix(HEADER_PREFIX))
        }
        if event.content_type is not None:
            attributes["datacontenttype"] = event.content_type
        return CloudEvent(_checked(attributes), event.payload)
    except (InvalidEvent, ValueError, RecursionError):
        return None


def is_structured(content_type: str) -> bool:
    """Whether a content type is that of one CloudEvent in the JSON format."""
    return content_type.partition(";")[0].strip().lower() == EVENT_TYPE


def _attributes(event: Event, source: str) -> dict[str, AttributeValue]:
    """The attributes of an event that was not published as a CloudEvent."""
    attributes: dict[str, AttributeValue] = {
        "specversion": SPEC_VERSION,
        "id": event.event_id or f"position:{event.position}",
        "source": f"{source}/topics/{event.topic}",
        "type": event.type or DEFAULT_TYPE,
        "time": event.published_at.astimezone(UTC).isoformat(),
    }
    if event.content_type is not None:
        attributes["datacontenttype"] = event.content_type
    if event.key is not None:
        key = _plain_text(event.key)
        if key is None:
            attributes[KEY_BASE64] = base64.b64encode(event.key).decode()
        else:
            attributes["partitionkey"] = key
    if event.routing_key is not None:
        attributes["routingkey"] = event.routing_key
    reserved = {*_TEXT, "data", "partitionkey", "routingkey", KEY_BASE64, OTHER_HEADERS}
    others: dict[str, Any] = {}
    for name, value in (event.headers or {}).items():
        if _NAME.fullmatch(name) and name not in reserved and _is_value(value):
            attributes[name] = value
        else:
            others[name] = value
    if others:
        attributes[OTHER_HEADERS] = _ascii(others)
    return attributes


def _data(payload: bytes | None, content_type: str | None) -> str | None:
    """The payload as a member of the JSON format; None if there is no payload."""
    if payload is None:
        return None
    text = json_payload(payload, content_type)
    # `"data": null` means that there is no data; the JSON payload null is therefore base64.
    if text is not None and text.strip(" \t\n\r") != "null":
        return f'"data":{one_line(text)}'
    if content_type is not None and not is_json_type(content_type) and _is_text_type(content_type):
        try:
            return f'"data":{_encode(payload.decode())}'
        except UnicodeDecodeError:
            pass
    return f'"data_base64":"{base64.b64encode(payload).decode()}"'


def _is_text_type(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind.startswith("text/") or kind.endswith(("/xml", "+xml", "/yaml", "+yaml"))


def _plain_text(key: bytes) -> str | None:
    """A key as the value of an attribute; None if it is not allowed there."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return None
    return None if _FORBIDDEN.search(text) else text


# Escapes what attributes must not contain.
_ascii: Final = json.JSONEncoder(separators=(",", ":")).encode


# --- checks ------------------------------------------------------------------------------------------------------


def _checked(given: Mapping[str, Any]) -> dict[str, AttributeValue]:
    """The attributes in the order of the specification; InvalidEvent if one is missing or invalid. null is absent."""
    attributes = {name: value for name, value in given.items() if value is not None}
    for name in _REQUIRED:
        if name not in attributes:
            raise _invalid(name, f"{name} is missing")
    for name, value in attributes.items():
        if name == "data" or _NAME.fullmatch(name) is None:
            raise _invalid(name, f"invalid name {name!r}: expected lowercase letters and digits")
        _check_value(name, value)
    if attributes["specversion"] != SPEC_VERSION:
        raise _invalid("specversion", f"unsupported specversion {attributes['specversion']!r}: expected '1.0'")
    for name in ("source", "dataschema"):
        if _SPACE.search(attributes.get(name, "")):
            raise _invalid(name, f"{name} contains white space: expected a URI")
    time = attributes.get("time")
    if time is not None and not _is_time(time):
        raise _invalid("time", f"invalid time {time!r}: expected RFC 3339 such as 2026-03-01T12:00:00Z")
    content_type = attributes.get("datacontenttype")
    if content_type is not None and _MEDIA_TYPE.fullmatch(content_type) is None:
        raise _invalid("datacontenttype", f"invalid datacontenttype {content_type!r}: expected such as text/plain")
    ordered = [name for name in (*_REQUIRED, *_OPTIONAL) if name in attributes]
    return {name: attributes[name] for name in [*ordered, *(name for name in attributes if name not in _TEXT)]}


def _check_value(name: str, value: Any) -> None:
    if name in _TEXT:
        if not isinstance(value, str) or not value:
            raise _invalid(name, f"{name} is not a string, or it is empty")
    elif not isinstance(value, (str, bool, int)) or (type(value) is int and not -(2**31) <= value < 2**31):
        raise _invalid(name, f"{name} is not a string, a boolean or an integer of 32 bits")
    if isinstance(value, str) and _FORBIDDEN.search(value):
        raise _invalid(name, f"{name} contains a control character, a surrogate or a noncharacter")
    limit = _MAX_CHARACTERS.get(name)
    if limit is not None and not 1 <= len(attribute_text(value)) <= limit:
        raise _invalid(name, f"{name} has {len(attribute_text(value))} characters: expected 1 to {limit}")


def _is_value(value: Any) -> bool:
    """Whether a header can be an attribute as it is."""
    try:
        _check_value("extension", value)
    except InvalidEvent:
        return False
    return True


def _is_time(text: str) -> bool:
    match = _TIME.fullmatch(text)
    if match is None:
        return False
    try:
        date(*map(int, match.groups()))
    except ValueError:
        return False
    return True


def _from_header(name: str, value: str) -> str:
    """Decode the value of an HTTP header: quoted text is unquoted, then percent-encoding is decoded as UTF-8."""
    if len(value) >= 2 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    try:
        # HTTP servers decode headers as Latin-1; some clients send UTF-8 there.
        value = value.encode("latin-1").decode()
        return unquote(value, errors="strict")
    except UnicodeError:
        raise _invalid(name, f"{name} is not percent-encoded UTF-8") from None


def _utf8(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _invalid(name, f"{name} cannot be encoded as UTF-8") from None


def _invalid(attribute: str, problem: str) -> InvalidEvent:
    # A name or a value may be as long as the request.
    return InvalidEvent(f"invalid CloudEvent: {problem[:400]}", detail={"attribute": attribute[:100]})
