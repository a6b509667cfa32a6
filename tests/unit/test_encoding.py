"""Does what is sent to Postgres say what the caller said? Encodings decode back; settings and errors speak up."""

from __future__ import annotations

import json
import struct
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater import errors, settings
from headwater.calls import encoding, publishing
from headwater.calls import reading as reading_calls
from headwater.errors import EventTooLarge, InvalidEvent, InvalidRequest, InvalidSettings
from headwater.log.model import NewEvent, Topic

text = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=10,
)
payloads = json_values | st.binary(max_size=50)
new_events = st.builds(
    NewEvent,
    payload=payloads,
    key=st.none() | text | st.binary(max_size=20),
    type=st.none() | text,
    routing_key=st.none() | text,
    headers=st.none() | st.dictionaries(text, json_values, max_size=3),
    event_id=st.none() | text,
    content_type=st.none() | st.just("text/plain"),
    partition=st.none(),
)


def topic(**changes: Any) -> Topic:
    known = {"id": 7, "name": "t", "kind": "open", "partitions": 1, "retention": None}
    limits = {"max_payload_bytes": 1000, "max_header_bytes": 1000, "created_at": datetime(2026, 1, 1, tzinfo=UTC)}
    return Topic(**{**known, **limits, "expired_to": 0, **changes})


def unpacked(packed: bytes) -> tuple[int, list[bytes | None]]:
    """A one-dimensional array in Postgres' binary form, read as its documentation says: element type and elements."""
    dimensions, _, element_oid, size, lower_bound = struct.unpack_from("!iIiii", packed)
    assert (dimensions, lower_bound) == (1, 1)
    at, values = 20, []
    for _ in range(size):
        (length,) = struct.unpack_from("!i", packed, at)
        at += 4
        values.append(None if length < 0 else packed[at : at + length])
        at += max(length, 0)
    assert at == len(packed)
    return element_oid, values


def copied(rows: bytes) -> list[list[bytes | None]]:
    """Rows of a binary COPY."""
    at, found = 0, []
    while at < len(rows):
        (columns,) = struct.unpack_from("!h", rows, at)
        at += 2
        row = []
        for _ in range(columns):
            (length,) = struct.unpack_from("!i", rows, at)
            at += 4
            row.append(None if length < 0 else rows[at : at + length])
            at += max(length, 0)
        found.append(row)
    return found


def as_bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


@given(json_values)
def test_a_payload_of_json_values_decodes_to_itself(payload: Any) -> None:
    body, content_type = encoding.encode_payload(payload, None)
    if payload is None:
        assert (body, content_type) == (None, None)
    else:
        assert body is not None
        assert content_type == "application/json"
        assert json.loads(body) == payload


@given(st.binary(), st.sampled_from([bytes, bytearray, memoryview]))
def test_a_payload_of_bytes_stays_as_it_is(payload: bytes, kind: type) -> None:
    assert encoding.encode_payload(kind(payload), None) == (payload, None)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_only_a_real_nul_is_refused_in_json(payload: str) -> None:
    if "\x00" in payload:
        with pytest.raises(InvalidEvent, match="NUL"):
            encoding.encode_payload(payload, None)
    else:
        body, _ = encoding.encode_payload(payload, None)
        assert json.loads(body or b"") == payload


@given(st.lists(new_events, max_size=6))
def test_a_batch_is_packed_as_postgres_reads_arrays(events: list[NewEvent]) -> None:
    name, bodies, keys, types, routing_keys, headers, content_types, event_ids, partitions = publishing.publish_batch(
        "t", events
    ).params
    assert (name, partitions) == ("t", None)
    encoded = [encoding.encode_payload(event.payload, event.content_type) for event in events]
    assert unpacked(bodies) == (17, [body for body, _ in encoded])
    for packed, element_oid, wanted in (
        (keys, 17, [as_bytes(event.key) for event in events]),
        (types, 25, [as_bytes(event.type) for event in events]),
        (routing_keys, 25, [as_bytes(event.routing_key) for event in events]),
        (content_types, 25, [as_bytes(content_type) for _, content_type in encoded]),
        (event_ids, 25, [as_bytes(event.event_id) for event in events]),
    ):
        if packed is None:
            assert all(value is None for value in wanted)
        else:
            assert unpacked(packed) == (element_oid, wanted)
    decoded = (
        [None] * len(events) if headers is None else [value and json.loads(value) for value in unpacked(headers)[1]]
    )
    assert decoded == [event.headers for event in events]


@given(st.lists(new_events, max_size=6))
def test_copied_rows_hold_what_the_events_say(events: list[NewEvent]) -> None:
    rows = copied(encoding.copy_rows(topic(), events))
    assert len(rows) == len(events)
    for row, event in zip(rows, events, strict=True):
        topic_id, key, kind, routing_key, headers, content_type, payload = row
        assert topic_id == struct.pack("!i", 7)
        assert (key, kind, routing_key) == (as_bytes(event.key), as_bytes(event.type), as_bytes(event.routing_key))
        assert (payload, content_type and content_type.decode()) == encoding.encode_payload(
            event.payload, event.content_type
        )
        # The version of jsonb's binary form, then its text.
        assert headers is None or headers[:1] == b"\x01"
        assert (headers and json.loads(headers[1:])) == event.headers


@pytest.mark.parametrize(
    ("event", "limit"),
    [
        (NewEvent(b"x" * 1001), 1001),
        (NewEvent("é" * 500), 1002),
        (NewEvent(1, headers={"h": "é" * 500}), 1008),
    ],
)
def test_copy_counts_bytes_against_the_limits_not_characters(event: NewEvent, limit: int) -> None:
    with pytest.raises(EventTooLarge) as caught:
        encoding.copy_rows(topic(), [event])
    assert caught.value.detail == {"bytes": limit, "limit": 1000}


@pytest.mark.parametrize(
    ("changes", "event", "possible"),
    [
        ({}, NewEvent(1), True),
        ({"kind": "sequenced"}, NewEvent(1), False),
        ({"partitions": 2}, NewEvent(1), False),
        ({}, NewEvent(1, event_id="a"), False),
        ({}, NewEvent(1, partition=0), False),
    ],
)
def test_only_events_that_need_no_care_are_copied(changes: dict[str, Any], event: NewEvent, possible: bool) -> None:
    assert encoding.can_copy(topic(**changes), [NewEvent(0), event]) is possible


@pytest.mark.parametrize(
    "refused",
    [
        lambda: publishing.publish("t", {1, 2}),
        lambda: publishing.publish("t", float("inf")),
        lambda: publishing.publish("t", b"{", content_type="application/json"),
        lambda: publishing.publish("t", 1, key="\ud800"),
        lambda: publishing.publish("t", 1, key="k" * 65536),
        lambda: publishing.publish("t\x00", 1),
        lambda: publishing.publish("t", 1, event_id="\x00"),
        lambda: publishing.publish("t", 1, headers={"a": {1}}),
        lambda: publishing.publish("t", 1, headers={"\x00": 1}),
        lambda: publishing.publish("t", "\ud800"),
        lambda: publishing.publish("t", 1, type="\ud800"),
        lambda: publishing.publish("t", 1, headers={"a": "\ud800"}),
        lambda: publishing.publish_batch("t", [NewEvent(1, type="\ud800")]),
        lambda: publishing.publish_batch("t", [NewEvent(1, headers={"a": "\ud800"})]),
        lambda: encoding.copy_rows(topic(), [NewEvent(1, type="\ud800")]),
        lambda: encoding.copy_rows(topic(), [NewEvent(1, headers={"a": "\ud800"})]),
    ],
)
def test_what_postgres_cannot_hold_is_refused_before_it_is_sent(refused: Any) -> None:
    with pytest.raises(InvalidEvent):
        refused()


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="time zone"):
        reading_calls.position_before(None, datetime(2026, 1, 1))  # noqa: DTZ001


def test_settings_have_defaults() -> None:
    loaded = settings.load({})
    assert (loaded.dsn, loaded.pool_size, loaded.log_level) == (None, 10, "warning")
    assert loaded.home.is_absolute()


def test_all_problems_of_the_settings_are_reported_together() -> None:
    with pytest.raises(InvalidSettings) as caught:
        settings.load(
            {
                "HEADWATER_DSN": "somewhere",
                "HEADWATER_POOL_SIZE": "many",
                "HEADWATER_LOG_LEVEL": "loud",
                "HEADWATER_POOLSIZE": "3",
                "PATH": "/bin",
            }
        )
    for problem in ("HEADWATER_DSN", "'many'", "'loud'", "unknown setting HEADWATER_POOLSIZE"):
        assert problem in caught.value.message
    assert "PATH" not in caught.value.message


@pytest.mark.parametrize("size", ["0", "1001", "-1", "1.5", "²"])
def test_a_pool_size_that_cannot_be_is_refused(size: str) -> None:
    with pytest.raises(InvalidSettings, match="HEADWATER_POOL_SIZE"):
        settings.load({"HEADWATER_POOL_SIZE": size})


@pytest.mark.parametrize(("sqlstate", "kind"), [*errors.BY_SQLSTATE.items(), ("08006", errors.LogUnavailable)])
def test_each_code_is_its_error(sqlstate: str, kind: type[errors.HeadwaterError]) -> None:
    error = errors.from_sqlstate(sqlstate, "what", detail='{"earliest_position": 5}', hint="do")
    assert type(error) is kind
    assert error.message == "what"
    assert error.detail["earliest_position"] == 5
    assert error.hint is not None
    assert error.hint in str(error)


def test_a_code_that_is_not_ours_is_not_explained() -> None:
    assert errors.from_sqlstate("XX000", "internal error") is None


def test_a_broken_limit_is_told_by_its_name() -> None:
    error = errors.from_sqlstate("23514", "new row violates", constraint="a key is short", table="event_0000001")
    assert isinstance(error, InvalidEvent)
    assert str(error) == "a key is short"
    assert type(errors.from_sqlstate("23514", "x", constraint="c", table="topic")) is InvalidRequest


def test_a_detail_that_is_no_json_is_kept_as_text() -> None:
    error = errors.from_sqlstate("42501", "denied", detail="some text")
    assert error is not None
    assert error.detail == {"detail": "some text"}


def test_a_missing_schema_names_the_command() -> None:
    assert "headwater migrate" in str(errors.from_sqlstate("3F000", "no schema"))
