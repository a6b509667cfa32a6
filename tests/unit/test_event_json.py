"""The JSON of an event: the same from every interface, and back to the same event."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cli.commands import read
from headwater.errors import InvalidEvent
from headwater.log.event_json import content, event_json, parse_event
from headwater.log.model import Event, NewEvent
from headwater.log.sse_frames import FrameStyle, frame
from headwater.servers.http.dependencies import list_response, raw_json_response
from headwater.servers.http.uvicorn_protocol import chunk
from headwater.webhooks.model import Webhook
from headwater.webhooks.requests import request_for

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)

# Postgres stores neither NUL nor lone surrogates in text.
_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=8,
)
_payload = st.none() | st.binary(max_size=40) | _text.map(str.encode)
_payload |= st.builds(lambda value, indent: json.dumps(value, indent=indent).encode(), _json, st.none() | st.just(1))
_types = ["application/json", "application/json; charset=utf-8", "application/vnd.a+json", "text/plain", "image/png"]
events = st.builds(
    Event,
    position=st.integers(1, 2**53 - 1),
    topic=_text,
    partition=st.integers(0, 1023),
    topic_offset=st.none() | st.integers(0, 2**53),
    key=st.none() | st.binary(max_size=20) | _text.map(str.encode),
    type=st.none() | _text,
    routing_key=st.none() | _text,
    headers=st.none() | st.dictionaries(_text, _json, max_size=3),
    content_type=st.none() | st.sampled_from(_types),
    payload=_payload,
    event_id=st.none() | _text,
    published_at=st.datetimes(
        datetime(1970, 1, 3),  # noqa: DTZ001 - as hypothesis wants it
        datetime(9000, 1, 1),  # noqa: DTZ001
        timezones=st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30))]),
    ),
)


def event(payload: bytes | None, content_type: str | None = "application/json", **changed: Any) -> Event:
    made = Event(7, "orders", 0, None, b"k", "T", None, None, content_type, payload, None, NOW)
    return made._replace(**changed)


WEBHOOK = Webhook(
    id=1, name="w", queue="q", url="https://a.example/", headers={}, body="envelope", timeout_seconds=15.0,
    max_concurrency=10, rate_per_second=None, gzip_above_bytes=None, client_errors="retry", state="active",
    state_reason=None, created_at=NOW, updated_at=NOW, uid="0a" * 16, version=1, secrets=("whsec_" + "A" * 32,),
)  # fmt: skip


def sse_data(one: Event) -> bytes:
    """The data of an SSE frame, out of its chunk of the HTTP body."""
    size, _, rest = chunk(frame(one, style=FrameStyle(), epoch=3)).partition(b"\r\n")
    text = rest[: int(size, 16)]
    assert rest[int(size, 16) :] == b"\r\n"
    lines = text.removesuffix(b"\n\n").replace(b"\r", b"\n").split(b"\n")
    (data,) = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    assert len(lines) == 3
    return data


@given(one=events)
def test_every_interface_shows_an_event_with_the_same_bytes(one: Event) -> None:
    over_http = bytes(raw_json_response(event_json(one)).body)
    page = bytes(list_response("events", [event_json(one)], next=None).body)
    assert over_http in page
    assert sse_data(one) == over_http
    assert request_for(WEBHOOK, one, "i", now=NOW).body == over_http
    assert read.json_line(one) == over_http.decode() + "\n"
    assert b"\n" not in over_http


@given(one=events)
def test_an_event_comes_back_from_its_json(one: Event) -> None:
    shown = event_json(one)
    back = parse_event(shown)
    key = back.key.encode() if isinstance(back.key, str) else back.key
    assert (key, back.type, back.routing_key, back.event_id) == (one.key, one.type, one.routing_key, one.event_id)
    assert back.content_type == one.content_type
    assert back.headers == (one.headers or None)
    members = json.loads(shown)
    assert (members["position"], members["topic"], members["partition"]) == (one.position, one.topic, one.partition)
    assert members["offset"] == one.topic_offset
    assert datetime.fromisoformat(members["published_at"]) == one.published_at
    if "data" in members and one.payload is not None:
        # To the letter, but for the white space around it and the line breaks in it.
        assert back.payload == one.payload.replace(b"\n", b" ").replace(b"\r", b" ").strip(b" \t")
    else:
        assert back.payload == one.payload


@pytest.mark.parametrize("text", [b"1e400000", b"9" * 5000, b'{"a": 1, "a": 2}', b'"\\ud83d"', b"[1.10]"])
def test_json_is_shown_and_read_to_the_letter(text: bytes) -> None:
    assert event_json(event(text)).encode().endswith(b',"data":' + text + b"}")
    assert parse_event(event_json(event(text))).payload == text


@pytest.mark.parametrize("text", [b"NaN", b"{broken", b"[" * 100_000, b"1}", b'1,"topic":"x"', b""])
def test_a_payload_that_is_not_json_is_text_whatever_its_content_type_says(text: bytes) -> None:
    assert json.loads(event_json(event(text)))["text"] == text.decode()


def test_bytes_that_are_not_utf8_are_base64() -> None:
    shown = json.loads(event_json(event(b"\xff\x00", key=b"\xfe")))
    assert base64.b64decode(shown["base64"]) == b"\xff\x00"
    assert base64.b64decode(shown["key_base64"]) == b"\xfe"
    assert "key" not in shown


def test_without_a_content_type_objects_and_arrays_are_json_and_words_are_text() -> None:
    assert content(b' {"a":1}', None) == '"data": {"a":1}'
    assert content(b"[1]", None) == '"data":[1]'
    assert content(b"12", None) == '"text":"12"'
    assert content(b'{"a":1}', "text/plain") == '"text":"{\\"a\\":1}"'


def test_no_payload_and_the_json_null_are_two_things() -> None:
    assert content(None, "application/json") == '"data":null'
    assert content(b"null", "application/json") == '"text":"null"'
    assert parse_event(event_json(event(None))).payload is None
    assert parse_event(event_json(event(b"null"))).payload == b"null"


def test_an_event_written_by_hand_gets_the_content_type_of_its_form() -> None:
    assert parse_event(' { "data" : [1] } ') == NewEvent(b"[1]", content_type="application/json")
    assert parse_event('{"text": "a", "key": "k"}') == NewEvent(b"a", "k", content_type="text/plain")
    assert parse_event('{"base64": "/w=="}') == NewEvent(b"\xff", content_type="application/octet-stream")
    assert parse_event('{"text": "a"}', content_type="text/csv").content_type == "text/csv"
    assert parse_event('{"text": "a", "content_type": null}').content_type is None


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"data": 1, "text": "a"}', '{"data": 1, "data": 2}', '{"text": 1}', '{"base64": "?"}',
     '{"data": 1, "headers": []}', '{"data": 1, "dta": 1}', '{"data": 1, "key": 1}',
     '{"data":1,"key":"a","key_base64":"YQ=="}'],
)  # fmt: skip
def test_what_is_not_an_event_is_refused(text: str) -> None:
    with pytest.raises(InvalidEvent):
        parse_event(text)


@pytest.mark.parametrize(
    "text", ["", "{", '{"data": 1', '{"data": 1,}', '{"data" 1}', "{1: 2}", '{"data": NaN}', '{"data":1} x']
)
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_event(text)


def test_line_breaks_between_tokens_become_spaces() -> None:
    assert content(b'{"a":\r\n"\\n"}', "application/json") == '"data":{"a":  "\\n"}'
