"""The Kafka wire format: decodes requests and encodes responses for every supported API and version. No I/O.

The fields of each message come from the schema classes of `kio`. Its own reader is not used: it trusts the lengths in a
frame, so that a malicious frame could exhaust the memory of the process. Here every length is checked against the bytes
that are left in the frame. Readers and writers are built once for each API and version and then cached.
"""

from __future__ import annotations

import dataclasses
import struct
import types
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode

from headwater.servers.kafka.api_keys import MIN_PRODUCE_VERSION, ApiKey

__all__ = ["ErrorCode", "Fields", "MalformedRequest", "Request", "encode_response", "read_request"]

MAX_ELEMENTS: Final = 100_000
"""Maximum length of an array in a request. Far above real clients; bounds the memory a malformed frame can claim."""

Fields = Mapping[str, Any]
Read = Callable[[memoryview, int], tuple[Any, int]]
Write = Callable[[list[bytes], Any], None]

_I8, _I16, _I32, _I64 = (struct.Struct(f">{kind}") for kind in "bhiq")
_U16, _U32, _F64 = (struct.Struct(f">{kind}") for kind in "HId")
_FIXED: Final = {
    "int8": _I8,
    "int16": _I16,
    "int32": _I32,
    "int64": _I64,
    "uint16": _U16,
    "uint32": _U32,
    "float64": _F64,
    "error_code": _I16,
    "timedelta_i32": _I32,
    "timedelta_i64": _I64,
    "datetime_i64": _I64,
}
_NO_UUID: Final = bytes(16)


class MalformedRequest(Exception):
    """A client sent bytes that are not valid Kafka protocol. Only its own connection is closed."""


class Request(NamedTuple):
    """A decoded request: its API and version, the correlation id that the response must repeat, and its fields."""

    api: ApiKey
    version: int
    correlation_id: int
    client_id: str | None
    fields: Any
    # Whether the principal has a permission: (action, kind of resource, name of resource).
    allowed: Callable[[str, str, str], bool] = lambda action, kind, name: True
    # The authenticated account; None if authentication is off.
    account: str | None = None


class UnsupportedRequest(NamedTuple):
    """A request for an API or a version that this server does not support."""

    api: int
    version: int
    correlation_id: int


def read_request(frame: memoryview, supported: Mapping[ApiKey, tuple[int, int]]) -> Request | UnsupportedRequest:
    """Decode the request in a frame. Raises MalformedRequest."""
    try:
        api, version, correlation_id = struct.unpack_from(">hhi", frame)
        oldest, newest = supported.get(api, (0, -1))
        if not oldest <= version <= newest or (api == ApiKey.PRODUCE and version < MIN_PRODUCE_VERSION):
            return UnsupportedRequest(api, version, correlation_id)
        reader, flexible = _request_reader(api, version)
        client_id, offset = _read_text(frame, 8)
        if flexible:
            offset = _skip_tags(frame, offset)
        fields, _ = reader(frame, offset)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise MalformedRequest(f"the request is truncated or contains invalid UTF-8: {error}") from None
    # Trailing bytes are ignored, as in Kafka: librdkafka sends three extra bytes when it requests all topics.
    return Request(ApiKey(api), version, correlation_id, client_id, fields)


def encode_response(api: int, version: int, correlation_id: int, fields: Fields) -> bytes:
    """Encode a response as a frame. Fields that the version lacks are dropped; missing fields get their default."""
    writer, flexible = _response_writer(api, version)
    parts: list[bytes] = [b"", _I32.pack(correlation_id)]
    # The response header of ApiVersions is always version 0: a client reads it before it knows the versions.
    if flexible and api != ApiKey.API_VERSIONS:
        parts.append(b"\x00")
    writer(parts, fields)
    parts[0] = _I32.pack(sum(map(len, parts)))
    return b"".join(parts)


@cache
def _request_reader(api: int, version: int) -> tuple[Read, bool]:
    schema: Any = load_request_schema(api, version)
    return _entity_reader(schema), schema.__flexible__


@cache
def _response_writer(api: int, version: int) -> tuple[Write, bool]:
    schema: Any = load_response_schema(api, version)
    return _entity_writer(schema), schema.__flexible__


class _Shape(NamedTuple):
    """One field of a schema. Its element is either of a primitive kind or a nested schema."""

    name: str
    kind: str | None
    nested: Any
    array: bool
    nullable: bool
    tag: int | None
    default: Any


@cache
def _shapes(schema: Any) -> tuple[_Shape, ...]:
    hints = typing.get_type_hints(schema)
    shapes = []
    for field in dataclasses.fields(schema):
        hint = hints[field.name]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        nullable = types.NoneType in options
        (inner,) = [option for option in options if option is not types.NoneType]
        array = typing.get_origin(inner) is tuple
        if array:
            inner = typing.get_args(inner)[0]
        kind = field.metadata.get("kafka_type")
        nested = inner if kind is None else None
        default = _plain_default(field, kind, array=array, nullable=nullable)
        shapes.append(_Shape(field.name, kind, nested, array, nullable, field.metadata.get("tag"), default))
    return tuple(shapes)


def _plain_default(field: dataclasses.Field[Any], kind: str | None, *, array: bool, nullable: bool) -> Any:
    if kind is not None and field.default is not dataclasses.MISSING:
        if kind.startswith("timedelta"):
            return round(field.default.total_seconds() * 1000)
        return -1 if kind == "datetime_i64" and field.default is None else field.default
    if array:
        return ()
    if nullable or kind is None:
        return None
    if kind == "string":
        return ""
    if kind in ("bytes", "records"):
        return b""
    return False if kind == "bool" else 0


# Reading


def _entity_reader(schema: Any) -> Read:
    plain: list[tuple[str, Read]] = []
    tagged: dict[int, tuple[str, Read]] = {}
    defaults: dict[str, Any] = {}
    flexible: bool = schema.__flexible__
    for shape in _shapes(schema):
        reader = _field_reader(shape, flexible)
        if shape.tag is None:
            plain.append((shape.name, reader))
        else:
            tagged[shape.tag] = (shape.name, reader)
            defaults[shape.name] = shape.default

    def read(frame: memoryview, offset: int) -> tuple[Any, int]:
        entity = types.SimpleNamespace(**defaults)
        values = entity.__dict__
        for name, reader in plain:
            values[name], offset = reader(frame, offset)
        if flexible:
            count, offset = _read_unsigned(frame, offset)
            for _ in range(count):
                tag, offset = _read_unsigned(frame, offset)
                size, offset = _read_unsigned(frame, offset)
                _within(frame, offset, size)
                if tag in tagged:
                    name, reader = tagged[tag]
                    values[name], end = reader(frame, offset)
                    if end != offset + size:
                        raise MalformedRequest(f"the tagged field {name} does not have the length that it declares")
                offset += size
        return entity, offset

    return read


def _field_reader(shape: _Shape, flexible: bool) -> Read:
    if shape.nested is not None:
        element = _entity_reader(shape.nested)
        if not shape.array:
            return _nullable_entity_reader(element) if shape.nullable and shape.tag is None else element
    else:
        element = _element_reader(str(shape.kind), flexible)
    sized = shape.kind in ("string", "bytes", "records")
    if shape.array:
        # No Kafka schema has an array with nullable elements.
        element, sized = (_present_reader(element, f"an element of {shape.name}") if sized else element), True
        element = _array_reader(element, flexible)
    return _present_reader(element, shape.name) if sized and not shape.nullable else element


def _present_reader(element: Read, name: str) -> Read:
    """Reject null. All non-nullable fields are read through this, so handlers need not check."""

    def read(frame: memoryview, offset: int) -> tuple[Any, int]:
        value, offset = element(frame, offset)
        if value is None:
            raise MalformedRequest(f"{name} must not be null")
        return value, offset

    return read


def _element_reader(kind: str, flexible: bool) -> Read:
    if kind in _FIXED:
        packed = _FIXED[kind]

        def read_fixed(frame: memoryview, offset: int) -> tuple[Any, int]:
            return packed.unpack_from(frame, offset)[0], offset + packed.size

        return read_fixed
    if kind == "bool":
        return lambda frame, offset: (frame[offset] != 0, offset + 1)
    if kind == "uuid":
        return _read_uuid
    if kind == "string":
        return _read_compact_text if flexible else _read_text
    if kind in ("bytes", "records"):
        return _read_compact_view if flexible else _read_view
    raise NotImplementedError(kind)


def _array_reader(element: Read, flexible: bool) -> Read:
    def read(frame: memoryview, offset: int) -> tuple[list[Any] | None, int]:
        if flexible:
            count, offset = _read_unsigned(frame, offset)
            count -= 1
        else:
            count = _I32.unpack_from(frame, offset)[0]
            offset += 4
        if count < 0:
            return None, offset
        # Each element takes at least one byte.
        if count > min(len(frame) - offset, MAX_ELEMENTS):
            raise MalformedRequest(f"an array of {count} elements does not fit into the frame")
        values = []
        for _ in range(count):
            value, offset = element(frame, offset)
            values.append(value)
        return values, offset

    return read


def _nullable_entity_reader(element: Read) -> Read:
    def read(frame: memoryview, offset: int) -> tuple[Any, int]:
        if _I8.unpack_from(frame, offset)[0] < 0:
            return None, offset + 1
        return element(frame, offset + 1)

    return read


def _read_unsigned(frame: memoryview, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = frame[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
        if shift > 28:
            raise MalformedRequest("a varint is longer than five bytes")


def _within(frame: memoryview, offset: int, size: int) -> None:
    if size < 0 or offset + size > len(frame):
        raise MalformedRequest(f"a length of {size} bytes exceeds the {len(frame) - offset} bytes left in the frame")


def _skip_tags(frame: memoryview, offset: int) -> int:
    count, offset = _read_unsigned(frame, offset)
    for _ in range(count):
        _, offset = _read_unsigned(frame, offset)
        size, offset = _read_unsigned(frame, offset)
        _within(frame, offset, size)
        offset += size
    return offset


def _read_uuid(frame: memoryview, offset: int) -> tuple[uuid.UUID | None, int]:
    _within(frame, offset, 16)
    value = bytes(frame[offset : offset + 16])
    return None if value == _NO_UUID else uuid.UUID(bytes=value), offset + 16


def _read_text(frame: memoryview, offset: int) -> tuple[str | None, int]:
    size = _I16.unpack_from(frame, offset)[0]
    return _text(frame, offset + 2, size)


def _read_compact_text(frame: memoryview, offset: int) -> tuple[str | None, int]:
    size, offset = _read_unsigned(frame, offset)
    return _text(frame, offset, size - 1)


def _text(frame: memoryview, offset: int, size: int) -> tuple[str | None, int]:
    if size < 0:
        return None, offset
    _within(frame, offset, size)
    return str(frame[offset : offset + size], "utf-8"), offset + size


def _read_view(frame: memoryview, offset: int) -> tuple[memoryview | None, int]:
    size = _I32.unpack_from(frame, offset)[0]
    return _view(frame, offset + 4, size)


def _read_compact_view(frame: memoryview, offset: int) -> tuple[memoryview | None, int]:
    size, offset = _read_unsigned(frame, offset)
    return _view(frame, offset, size - 1)


def _view(frame: memoryview, offset: int, size: int) -> tuple[memoryview | None, int]:
    if size < 0:
        return None, offset
    _within(frame, offset, size)
    return frame[offset : offset + size], offset + size


# Writing


def _entity_writer(schema: Any) -> Write:
    plain: list[tuple[str, Write, Any]] = []
    tagged: list[tuple[int, str, Write]] = []
    flexible: bool = schema.__flexible__
    for shape in _shapes(schema):
        writer = _field_writer(shape, flexible)
        if shape.tag is None:
            plain.append((shape.name, writer, shape.default))
        else:
            tagged.append((shape.tag, shape.name, writer))
    tagged.sort(key=lambda entry: entry[0])

    def write(parts: list[bytes], fields: Fields) -> None:
        for name, writer, default in plain:
            writer(parts, fields.get(name, default))
        if flexible:
            # A missing tagged field has its default and is not sent.
            present = [entry for entry in tagged if fields.get(entry[1]) is not None]
            parts.append(_unsigned(len(present)))
            for tag, name, writer in present:
                value: list[bytes] = []
                writer(value, fields[name])
                parts += (_unsigned(tag), _unsigned(sum(map(len, value))), *value)

    return write


def _field_writer(shape: _Shape, flexible: bool) -> Write:
    if shape.nested is not None:
        element = _entity_writer(shape.nested)
        if not shape.array:
            return _nullable_entity_writer(element) if shape.nullable and shape.tag is None else element
    else:
        element = _element_writer(str(shape.kind), flexible)
    return _array_writer(element, flexible) if shape.array else element


def _element_writer(kind: str, flexible: bool) -> Write:
    if kind in _FIXED:
        pack = _FIXED[kind].pack
        return lambda parts, value: parts.append(pack(value))
    if kind == "bool":
        return lambda parts, value: parts.append(b"\x01" if value else b"\x00")
    if kind == "uuid":
        return lambda parts, value: parts.append(_NO_UUID if value is None else value.bytes)
    if kind == "string":
        size = _compact_size if flexible else _text_size
        return lambda parts, value: _write_sized(parts, None if value is None else value.encode(), size)
    if kind in ("bytes", "records"):
        size = _compact_size if flexible else _bytes_size
        return lambda parts, value: _write_sized(parts, value, size)
    raise NotImplementedError(kind)


def _array_writer(element: Write, flexible: bool) -> Write:
    size = _compact_size if flexible else _bytes_size

    def write(parts: list[bytes], values: Sequence[Any] | None) -> None:
        parts.append(size(None if values is None else len(values)))
        for value in values or ():
            element(parts, value)

    return write


def _nullable_entity_writer(element: Write) -> Write:
    def write(parts: list[bytes], value: Any) -> None:
        if value is None:
            parts.append(b"\xff")
        else:
            parts.append(b"\x01")
            element(parts, value)

    return write


def _write_sized(parts: list[bytes], value: bytes | None, size: Callable[[int | None], bytes]) -> None:
    parts.append(size(None if value is None else len(value)))
    if value:
        parts.append(value)


def _compact_size(size: int | None) -> bytes:
    return b"\x00" if size is None else _unsigned(size + 1)


def _text_size(size: int | None) -> bytes:
    return _I16.pack(-1 if size is None else size)


def _bytes_size(size: int | None) -> bytes:
    return _I32.pack(-1 if size is None else size)


def _unsigned(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
