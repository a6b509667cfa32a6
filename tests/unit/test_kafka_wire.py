"""Is every request of every offered version read, every answer written, and a frame of lies refused?"""

from __future__ import annotations

import io
import struct
import types
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from effort import effort
from headwater.servers.kafka.dispatch import SUPPORTED_VERSIONS
from headwater.servers.kafka.wire import (
    ErrorCode,
    MalformedRequest,
    Request,
    UnsupportedRequest,
    _entity_writer,
    _shapes,
    encode_response,
    read_request,
)

VERSIONS = [
    (api, version) for api, (oldest, newest) in SUPPORTED_VERSIONS.items() for version in range(oldest, newest + 1)
    if api != 0 or version >= 3
]  # fmt: skip
SOME_ID = uuid.UUID(int=7)


def sample(schema: Any) -> Any:
    """A message of a schema, in the classes of kio, with something in every field."""
    values = {}
    for shape in _shapes(schema):
        one = sample(shape.nested) if shape.nested is not None else sample_value(str(shape.kind))
        values[shape.name] = (one, one) if shape.array else one
    return schema(**values)


def sample_value(kind: str) -> Any:
    return {
        "string": "ünd",
        "bytes": b"\x00b",
        "records": b"r" * 200,
        "bool": True,
        "uuid": SOME_ID,
        "error_code": ErrorCode.fenced_instance_id,
        "timedelta_i32": timedelta(milliseconds=1500),
        "timedelta_i64": timedelta(milliseconds=1500),
        "datetime_i64": datetime.fromtimestamp(1, UTC),
        "float64": 1.5,
    }.get(kind, 3)


def plain(value: Any) -> Any:
    """The same as our side has it."""
    if isinstance(value, tuple):
        return [plain(one) for one in value]
    if isinstance(value, timedelta):
        return round(value.total_seconds() * 1000)
    if isinstance(value, datetime):
        return round(value.timestamp() * 1000)
    if hasattr(value, "__dataclass_fields__"):
        return {shape.name: plain(getattr(value, shape.name)) for shape in _shapes(type(value))}
    return value


def shown(value: Any) -> Any:
    if isinstance(value, types.SimpleNamespace):
        return {name: shown(one) for name, one in vars(value).items()}
    if isinstance(value, list):
        return [shown(one) for one in value]
    return bytes(value) if isinstance(value, memoryview) else value


def frame_of(api: int, version: int, message: Any) -> bytes:
    buffer = io.BytesIO()
    header = message.__header_schema__
    values = {"request_api_key": api, "request_api_version": version, "correlation_id": 5, "client_id": "me"}
    entity_writer(header)(buffer, header(**{f.name: values[f.name] for f in _shapes(header)}))
    entity_writer(type(message))(buffer, message)
    return buffer.getvalue()


@pytest.mark.parametrize(("api", "version"), VERSIONS)
def test_a_request_is_read_as_another_implementation_wrote_it(api: int, version: int) -> None:
    message = sample(load_request_schema(api, version))
    request = read_request(memoryview(frame_of(api, version, message)), SUPPORTED_VERSIONS)
    assert isinstance(request, Request)
    assert (request.api, request.version, request.correlation_id, request.client_id) == (api, version, 5, "me")
    assert shown(request.fields) == plain(message)


@pytest.mark.parametrize(("api", "version"), VERSIONS)
def test_an_answer_is_written_so_that_another_implementation_reads_it(api: int, version: int) -> None:
    schema: Any = load_response_schema(api, version)
    message = sample(schema)
    # Fields that a version does not know are given too, and must not matter.
    frame = encode_response(api, version, 9, {**plain(message), "of_no_version": 1})
    assert struct.unpack_from(">ii", frame) == (len(frame) - 4, 9)
    place = 8 + (schema.__flexible__ and api != 18)
    read, size = entity_reader(schema)(frame, place)
    assert place + size == len(frame)
    assert plain(read) == plain(message)


@pytest.mark.parametrize(("api", "version"), VERSIONS)
def test_an_answer_without_fields_has_their_defaults(api: int, version: int) -> None:
    schema: Any = load_response_schema(api, version)
    frame = encode_response(api, version, 9, {})
    place = 8 + (schema.__flexible__ and api != 18)
    _, size = entity_reader(schema)(frame, place)
    assert place + size == len(frame)


def with_a_null(schema: Any) -> list[tuple[str, bool, Any]]:
    """The same sample again and again, each time with null in another place: where, whether it may be null, and all."""
    whole = plain(sample(schema))
    found: list[tuple[str, bool, Any]] = []
    for shape in _shapes(schema):
        if shape.array or shape.kind in ("string", "bytes", "records"):
            found.append((shape.name, shape.nullable, {**whole, shape.name: None}))
        if shape.array and shape.kind in ("string", "bytes"):
            found.append((f"{shape.name}[1]", False, {**whole, shape.name: [whole[shape.name][0], None]}))
        if shape.nested is not None:
            for where, nullable, inner in with_a_null(shape.nested):
                value = [plain(sample(shape.nested)), inner] if shape.array else inner
                found.append((f"{shape.name}.{where}", nullable, {**whole, shape.name: value}))
    return found


@pytest.mark.parametrize(("api", "version"), VERSIONS)
def test_null_is_refused_in_every_field_that_the_schema_does_not_call_nullable(api: int, version: int) -> None:
    schema: Any = load_request_schema(api, version)
    header = struct.pack(">hhih", api, version, 5, -1) + (b"\x00" if schema.__flexible__ else b"")
    for where, nullable, fields in with_a_null(schema):
        parts = [header]
        _entity_writer(schema)(parts, fields)
        tagged = any(shape.tag is not None and where.startswith(shape.name) for shape in _shapes(schema))
        if tagged and fields.get(where) is None:
            # A tagged field without a value is not sent at all.
            continue
        try:
            read_request(memoryview(b"".join(parts)), SUPPORTED_VERSIONS)
            taken = True
        except MalformedRequest:
            taken = False
        assert taken == nullable, where


@settings(max_examples=effort(300))
@given(st.sampled_from(VERSIONS), st.data())
def test_a_damaged_request_is_refused_or_read_and_nothing_else(which: tuple[int, int], data: Any) -> None:
    frame = bytearray(frame_of(*which, sample(load_request_schema(*which))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(8, len(frame) - 1))] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    try:
        read_request(memoryview(frame)[: data.draw(st.integers(0, len(frame)))], SUPPORTED_VERSIONS)
    except MalformedRequest:
        return


def test_an_array_that_says_it_has_billions_of_elements_is_refused() -> None:
    for version, topics in ((5, struct.pack(">i", 2**31 - 1)), (12, b"\xff\xff\xff\xff\x0f")):
        header = struct.pack(">hhih", 3, version, 1, -1) + (b"\x00" if version >= 9 else b"")
        with pytest.raises(MalformedRequest):
            read_request(memoryview(header + topics + bytes(100)), SUPPORTED_VERSIONS)


def test_an_array_of_more_elements_than_anybody_needs_is_refused_though_the_frame_has_them() -> None:
    header = struct.pack(">hhih", 3, 5, 1, -1)
    for count, fits in ((100_000, True), (100_001, False)):
        frame = memoryview(header + struct.pack(">i", count) + bytes(2 * count) + b"\x00")
        if fits:
            assert isinstance(read_request(frame, SUPPORTED_VERSIONS), Request)
        else:
            with pytest.raises(MalformedRequest):
                read_request(frame, SUPPORTED_VERSIONS)


def test_what_is_not_offered_is_told_with_the_number_of_the_request() -> None:
    for api, version in ((18, 99), (3, 99), (999, 0), (0, 2)):
        header = struct.pack(">hhih", api, version, 8, -1)
        assert read_request(memoryview(header), SUPPORTED_VERSIONS) == UnsupportedRequest(api, version, 8)
