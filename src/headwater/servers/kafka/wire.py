"""Bytes of the Kafka protocol as plain values and back, for every API and version that is offered. Pure.

The shapes of requests and responses come from the schemas of `kio`; its own reader is not used, since it trusts the
lengths in a frame, and a hostile one would end the whole process. Here every length is checked against what is there.
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

__all__ = ["ErrorCode", "Fields", "Malformed", "Request", "encode_response", "read_request"]

API_VERSIONS: Final = 18
PRODUCE: Final = 0
MAX_ELEMENTS: Final = 100_000
"""How long an array in a request may be. No client comes near; a frame of lies must not become gigabytes."""

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


class Malformed(Exception):
    """What a client sent is not the protocol. Its connection is closed; no other notices."""


class Request(NamedTuple):
    """One request: which API in which version, the number that its answer must carry, and its fields."""

    api: int
    version: int
    correlation_id: int
    client_id: str | None
    fields: Any
    # Whether whoever asks may do something (an action) to something (a kind and a name).
    allowed: Callable[[str, str, str], bool] = lambda action, kind, name: True
    # Who asks; None: nobody is asked who they are.
    account: str | None = None


class Unsupported(NamedTuple):
    """A request for an API or a version that is not offered."""

    api: int
    version: int
    correlation_id: int


def read_request(frame: memoryview, offered: Mapping[int, tuple[int, int]]) -> Request | Unsupported:
    """The request in a frame, or Malformed."""
    try:
        api, version, correlation_id = struct.unpack_from(">hhi", frame)
        oldest, newest = offered.get(api, (0, -1))
        if not oldest <= version <= newest or (api == PRODUCE and version < 3):
            return Unsupported(api, version, correlation_id)
        reader, flexible = _request_reader(api, version)
        client_id, place = _read_text(frame, 8)
        if flexible:
            place = _skip_tags(frame, place)
        fields, _ = reader(frame, place)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise Malformed(f"a request ends too early or is no text: {error}") from None
    # What follows is ignored, as Kafka does: librdkafka sends three bytes too many when it asks for all topics.
    return Request(api, version, correlation_id, client_id, fields)


def encode_response(api: int, version: int, correlation_id: int, fields: Fields) -> bytes:
    """A response as a frame. Fields that the version does not know are left out; those not given have their default."""
    writer, flexible = _response_writer(api, version)
    parts: list[bytes] = [b"", _I32.pack(correlation_id)]
    # A client reads the answer that tells the versions before it knows any: its header is always the oldest.
    if flexible and api != API_VERSIONS:
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
    """One field of a schema: its name, its element as a kind or a nested schema, and what it may be."""

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
    found = []
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
        found.append(_Shape(field.name, kind, nested, array, nullable, field.metadata.get("tag"), default))
    return tuple(found)


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

    def read(frame: memoryview, place: int) -> tuple[Any, int]:
        entity = types.SimpleNamespace(**defaults)
        values = entity.__dict__
        for name, reader in plain:
            values[name], place = reader(frame, place)
        if flexible:
            count, place = _read_unsigned(frame, place)
            for _ in range(count):
                tag, place = _read_unsigned(frame, place)
                size, place = _read_unsigned(frame, place)
                _within(frame, place, size)
                if tag in tagged:
                    name, reader = tagged[tag]
                    values[name], end = reader(frame, place)
                    if end != place + size:
                        raise Malformed(f"the tagged field {name} is not as long as it says")
                place += size
        return entity, place

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
        # No schema of Kafka has an array whose elements may be null.
        element, sized = (_present_reader(element, f"an element of {shape.name}") if sized else element), True
        element = _array_reader(element, flexible)
    return _present_reader(element, shape.name) if sized and not shape.nullable else element


def _present_reader(element: Read, name: str) -> Read:
    """Refuses null. Every field that may not be null is read through this, so handlers need not ask."""

    def read(frame: memoryview, place: int) -> tuple[Any, int]:
        value, place = element(frame, place)
        if value is None:
            raise Malformed(f"{name} must not be null")
        return value, place

    return read


def _element_reader(kind: str, flexible: bool) -> Read:
    if kind in _FIXED:
        packed = _FIXED[kind]

        def read_fixed(frame: memoryview, place: int) -> tuple[Any, int]:
            return packed.unpack_from(frame, place)[0], place + packed.size

        return read_fixed
    if kind == "bool":
        return lambda frame, place: (frame[place] != 0, place + 1)
    if kind == "uuid":
        return _read_uuid
    if kind == "string":
        return _read_compact_text if flexible else _read_text
    if kind in ("bytes", "records"):
        return _read_compact_view if flexible else _read_view
    raise NotImplementedError(kind)


def _array_reader(element: Read, flexible: bool) -> Read:
    def read(frame: memoryview, place: int) -> tuple[list[Any] | None, int]:
        if flexible:
            count, place = _read_unsigned(frame, place)
            count -= 1
        else:
            count = _I32.unpack_from(frame, place)[0]
            place += 4
        if count < 0:
            return None, place
        # An element takes a byte at the least.
        if count > min(len(frame) - place, MAX_ELEMENTS):
            raise Malformed(f"an array of {count} elements is more than the frame holds")
        values = []
        for _ in range(count):
            value, place = element(frame, place)
            values.append(value)
        return values, place

    return read


def _nullable_entity_reader(element: Read) -> Read:
    def read(frame: memoryview, place: int) -> tuple[Any, int]:
        if _I8.unpack_from(frame, place)[0] < 0:
            return None, place + 1
        return element(frame, place + 1)

    return read


def _read_unsigned(frame: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = frame[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 28:
            raise Malformed("a varint is longer than five bytes")


def _within(frame: memoryview, place: int, size: int) -> None:
    if size < 0 or place + size > len(frame):
        raise Malformed(f"{size} bytes are announced, {len(frame) - place} are there")


def _skip_tags(frame: memoryview, place: int) -> int:
    count, place = _read_unsigned(frame, place)
    for _ in range(count):
        _, place = _read_unsigned(frame, place)
        size, place = _read_unsigned(frame, place)
        _within(frame, place, size)
        place += size
    return place


def _read_uuid(frame: memoryview, place: int) -> tuple[uuid.UUID | None, int]:
    _within(frame, place, 16)
    value = bytes(frame[place : place + 16])
    return None if value == _NO_UUID else uuid.UUID(bytes=value), place + 16


def _read_text(frame: memoryview, place: int) -> tuple[str | None, int]:
    size = _I16.unpack_from(frame, place)[0]
    return _text(frame, place + 2, size)


def _read_compact_text(frame: memoryview, place: int) -> tuple[str | None, int]:
    size, place = _read_unsigned(frame, place)
    return _text(frame, place, size - 1)


def _text(frame: memoryview, place: int, size: int) -> tuple[str | None, int]:
    if size < 0:
        return None, place
    _within(frame, place, size)
    return str(frame[place : place + size], "utf-8"), place + size


def _read_view(frame: memoryview, place: int) -> tuple[memoryview | None, int]:
    size = _I32.unpack_from(frame, place)[0]
    return _view(frame, place + 4, size)


def _read_compact_view(frame: memoryview, place: int) -> tuple[memoryview | None, int]:
    size, place = _read_unsigned(frame, place)
    return _view(frame, place, size - 1)


def _view(frame: memoryview, place: int, size: int) -> tuple[memoryview | None, int]:
    if size < 0:
        return None, place
    _within(frame, place, size)
    return frame[place : place + size], place + size


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
            # A tagged field that is not given is one that has its default: it is not sent.
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
