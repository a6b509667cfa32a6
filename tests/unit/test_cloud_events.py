"""An event as a CloudEvent and back, checked against the `cloudevents` package."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote

import pytest
from cloudevents.core.bindings import http as sdk_http
from cloudevents.core.bindings import kafka as sdk_kafka
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent as SdkEvent
from hypothesis import given
from hypothesis import strategies as st
from test_event_json import events

from headwater import settings
from headwater.errors import InvalidEvent, InvalidSettings
from headwater.log.cloud_events import (
    CloudEvent,
    binary_headers,
    cloud_event,
    event_id_of,
    new_event,
    parse_batch,
    parse_binary,
    parse_structured,
    structured,
)
from headwater.log.event_json import is_json_type
from headwater.log.model import Event, NewEvent
from headwater.servers.kafka.record_mapping import event_parts, header_section
from headwater.servers.kafka.records import read_headers, write_headers

JSON = JSONFormat()
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
GIVEN = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "placed"}

_forbidden = [chr(c) for c in (*range(0xFDD0, 0xFDF0), 0xFFFE, 0xFFFF)]
_unfit = re.compile(f"[\x00-\x1f\x7f-\x9f{''.join(_forbidden)}]")
_string = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters=_forbidden), min_size=1, max_size=20
)
_uri = st.builds(lambda path: "/" + quote(path), _string)
_name = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=20).filter(
    lambda name: name not in {*GIVEN, "subject", "time", "datacontenttype", "dataschema", "data"}
)
_times = st.datetimes(datetime(1970, 1, 1), datetime(9000, 1, 1), timezones=st.sampled_from([UTC, timezone(timedelta(hours=-3, minutes=-30))]))  # noqa: DTZ001, E501  # fmt: skip
_object = st.dictionaries(_string, st.recursive(st.none() | st.booleans() | st.integers() | _string, lambda inner: st.lists(inner, max_size=3), max_leaves=5), max_size=3)  # noqa: E501  # fmt: skip
_content = (
    st.tuples(st.sampled_from(["application/json", "application/vnd.a+json; a=b", "text/json"]), _object)
    | st.tuples(st.sampled_from(["text/plain", "text/csv; charset=utf-8", "application/xml", "image/svg+xml"]), _string)
    | st.tuples(st.sampled_from(["application/octet-stream", "image/png"]), st.binary(min_size=1, max_size=20))
    | st.tuples(st.none(), st.none() | _object)
)
_extension = _string | st.booleans() | st.integers(-(2**31), 2**31 - 1)


@st.composite
def sdk_events(draw: st.DrawFn, extension: st.SearchStrategy[Any] = _extension) -> SdkEvent:
    """A CloudEvent of the package. It has a time: without one the package makes one when it reads an event."""
    content_type, data = draw(_content)
    optional = {
        "subject": draw(st.none() | _string),
        "dataschema": draw(st.none() | _uri),
        "partitionkey": draw(st.none() | _string),
        "routingkey": draw(st.none() | _string),
        "datacontenttype": content_type,
    }
    attributes = {
        **draw(st.dictionaries(_name, extension, max_size=3)),
        "specversion": "1.0",
        "id": draw(_string),
        "source": draw(_uri),
        "type": draw(_string),
        "time": draw(_times),
        **{name: value for name, value in optional.items() if value is not None},
    }
    return SdkEvent(attributes, data)


def published(given: NewEvent, **changed: Any) -> Event:
    """The event in the log, after its headers were stored as JSON."""
    headers = None if given.headers is None else json.loads(json.dumps(given.headers))
    key = given.key.encode() if isinstance(given.key, str) else given.key
    event = Event(
        7, "orders", 0, None, key, given.type, given.routing_key, headers, given.content_type, given.payload,
        given.event_id, NOW,
    )  # fmt: skip
    return event._replace(**changed)


def stored(given: CloudEvent) -> CloudEvent:
    return cloud_event(published(new_event(given)))


def attributes_of(event: Any) -> dict[str, Any]:
    """The attributes of an event of the package. Without a content type, data in JSON is application/json."""
    found = dict(event.get_attributes())
    if event.get_data() is not None:
        found.setdefault("datacontenttype", "application/json")
    return found


def same(found: Any, expected: SdkEvent) -> None:
    assert attributes_of(found) == attributes_of(expected)
    assert found.get_data() == expected.get_data()


@given(one=sdk_events())
def test_a_structured_event_of_the_package_comes_back_to_it_as_it_was(one: SdkEvent) -> None:
    given = parse_structured(sdk_http.to_structured(one, JSON).body.decode())
    text = structured(stored(given))
    assert "\n" not in text
    same(JSON.read(None, text), one)


@given(one=sdk_events(_string))
def test_a_binary_event_of_the_package_comes_back_to_it_as_it_was(one: SdkEvent) -> None:
    message = sdk_http.to_binary(one, JSON)
    given = parse_binary(message.headers.items(), message.body)
    back = stored(given)
    found = sdk_http.from_http(sdk_http.HTTPMessage(dict(binary_headers(back)), back.payload or b""), JSON)
    assert found.get_attributes() == one.get_attributes()
    # In binary mode only the content type says what the bytes are: the package decodes them if it can.
    assert (back.payload or b"") == message.body


@given(one=sdk_events(_string))
def test_structured_and_binary_mode_are_the_same_event(one: SdkEvent) -> None:
    message = sdk_http.to_binary(one, JSON)
    binary = parse_binary(message.headers.items(), message.body)
    other = parse_structured(sdk_http.to_structured(one, JSON).body.decode())
    implied = {} if one.get_data() is None else {"datacontenttype": "application/json"}
    assert {**implied, **binary.attributes} == other.attributes
    if isinstance(one.get_data(), dict):
        assert json.loads(binary.payload or b"") == json.loads(other.payload or b"")
    else:
        assert binary.payload == other.payload


def kafka_headers(event: Event) -> dict[str, bytes]:
    """The headers of the record as which Kafka consumers read an event."""
    section = header_section(
        None if event.headers is None else dict(event.headers), event.type, event.routing_key, event.content_type,
        event.event_id,
    )  # fmt: skip
    return {} if section is None else {name.decode(): value or b"" for name, value in read_headers(section)}


@given(one=sdk_events(_string))
def test_an_event_published_over_http_is_read_from_kafka_by_the_package(one: SdkEvent) -> None:
    event = published(new_event(parse_structured(sdk_http.to_structured(one, JSON).body.decode())))
    headers = kafka_headers(event)
    assert "headwater-type" not in headers
    assert "headwater-content-type" not in headers
    found = sdk_kafka.from_kafka(sdk_kafka.KafkaMessage(headers, event.key, event.payload or b""), JSON)
    assert attributes_of(found) == attributes_of(one)


@given(one=sdk_events(_string))
def test_a_record_of_the_package_is_read_as_the_event_that_it_was(one: SdkEvent) -> None:
    message = sdk_kafka.to_binary(one, JSON)
    section = write_headers([(name.encode(), value) for name, value in message.headers.items()])
    assert section is not None
    parts = event_parts(section)
    key = message.key.encode() if isinstance(message.key, str) else message.key
    event = Event(
        7, "orders", 0, 0, key, parts.type, parts.routing_key, json.loads(parts.headers or "null"), parts.content_type,
        message.value or None, None, NOW,
    )  # fmt: skip
    assert event.type == one.get_type()
    assert event.routing_key == one.get_extension("routingkey")
    # Either the parts make up the same headers, or these are stored as they came.
    again = header_section(dict(event.headers or {}), event.type, event.routing_key, event.content_type, None)
    assert (parts.record_headers or again) == section
    found = sdk_http.from_http(
        sdk_http.HTTPMessage(dict(binary_headers(cloud_event(event))), event.payload or b""), JSON
    )
    assert found.get_attributes() == one.get_attributes()


@given(one=sdk_events())
def test_a_structured_record_is_the_event_inside_it(one: SdkEvent) -> None:
    message = sdk_kafka.to_structured(one, JSON)
    parts = event_parts(write_headers([(name.encode(), value) for name, value in message.headers.items()]) or b"")
    assert parts.content_type == "application/cloudevents+json"
    event = published(NewEvent(message.value, message.key, content_type=parts.content_type))
    same(JSON.read(None, structured(cloud_event(event))), one)
    assert kafka_headers(event) == message.headers


def spaced(payload: bytes | None) -> bytes | None:
    return None if payload is None else payload.replace(b"\n", b" ").replace(b"\r", b" ").strip(b" \t")


@given(one=events)
def test_every_event_is_a_cloud_event_that_the_package_reads(one: Event) -> None:
    one = one._replace(topic="orders", type=one.type or None, event_id=one.event_id or None)
    text = structured(cloud_event(one, "https://log.example"))
    found = JSON.read(None, text)
    assert found.get_id() == one.event_id or found.get_id() == f"position:{one.position}"
    assert found.get_source() == "https://log.example/topics/orders"
    assert found.get_type() == (one.type or "headwater.event")
    assert found.get_time() == one.published_at
    # Published elsewhere, it is an event with the same payload; only line breaks between the tokens of JSON differ.
    if any(_unfit.search(part or "") for part in (one.type, one.event_id, one.routing_key)) or one.routing_key == "":
        # A type or an id with control characters is no valid attribute; it is sent as it is rather than changed.
        with pytest.raises(InvalidEvent):
            parse_structured(text)
        return
    again = parse_structured(text)
    if is_json_type(one.content_type or "application/json"):
        assert spaced(again.payload) == spaced(one.payload)
    else:
        assert again.payload == one.payload


def event(**changed: Any) -> Event:
    return Event(7, "orders", 0, None, None, None, None, None, None, None, None, NOW)._replace(**changed)


def attributes(**changed: Any) -> Mapping[str, Any]:
    return cloud_event(event(**changed)).attributes


def test_the_parts_of_an_event_become_attributes() -> None:
    assert cloud_event(
        event(type="placed", key=b"k", routing_key="a.b", event_id="e", content_type="text/plain", payload=b"a",
              headers={"region": "eu", "urgent": True, "tries": 3, "Trace-Id": "t", "list": [1], "id": "x"})
    ).attributes == {
        "specversion": "1.0", "id": "e", "source": "/topics/orders", "type": "placed",
        "time": "2026-03-01T12:00:00+00:00", "datacontenttype": "text/plain", "partitionkey": "k",
        "routingkey": "a.b", "region": "eu", "urgent": True, "tries": 3,
        "headwaterheaders": '{"Trace-Id":"t","list":[1],"id":"x"}',
    }  # fmt: skip
    assert attributes()["id"] == "position:7"
    assert attributes(event_id="7")["id"] == "7"
    assert attributes(key=b"\xff") == {**attributes(), "keybase64": "/w=="}


@pytest.mark.parametrize(
    ("content_type", "payload", "member"),
    [
        ("application/json", b' {"a":\n1.10}', '"data": {"a": 1.10}'),
        ("application/json", b"12345678901234567890123", '"data":12345678901234567890123'),
        ("application/json", b"null", '"data_base64":"bnVsbA=="'),
        ("application/json", b"{", '"data_base64":"ew=="'),
        ("text/plain", b"hi", '"data":"hi"'),
        ("text/plain", b"\xff", '"data_base64":"/w=="'),
        ("application/atom+xml", b"<a/>", '"data":"<a/>"'),
        ("image/png", b"hi", '"data_base64":"aGk="'),
        (None, b"hi", '"data_base64":"aGk="'),
        (None, b'{"a":1}', '"data":{"a":1}'),
        ("text/plain", b"", '"data":""'),
    ],
)
def test_the_content_type_decides_the_form_of_the_data(content_type: str | None, payload: bytes, member: str) -> None:
    text = structured(cloud_event(event(content_type=content_type, payload=payload)))
    assert text.endswith(f",{member}}}")
    back = parse_structured(text).payload
    assert back is not None
    assert back == (payload.replace(b"\n", b" ").strip() if '"data":' in member else payload)


def test_no_payload_is_no_data() -> None:
    assert "data" not in json.loads(structured(cloud_event(event())))
    assert parse_structured(json.dumps({**GIVEN, "data": None})).payload is None


def test_the_same_source_and_id_are_one_event_id() -> None:
    assert new_event(CloudEvent(GIVEN, None)).event_id == "/shop 1"
    assert event_id_of("/a", "b c") != event_id_of("/a%20b", "c")
    long = {event_id_of("/a", "b" * 300), event_id_of("/a", "b" * 301), event_id_of("/a", "b" * 252)}
    assert len(long) == 3
    assert max(map(len, long)) <= 255


@pytest.mark.parametrize(
    ("changed", "attribute"),
    [
        *(({name: None}, name) for name in GIVEN),
        *(({name: ""}, name) for name in GIVEN),
        *(({name: 1}, name) for name in GIVEN),
        ({"specversion": "0.3"}, "specversion"),
        ({"specversion": "1.0.2"}, "specversion"),
        ({"data": 1, "data_base64": "YQ=="}, "data_base64"),
        ({"data_base64": "?"}, "data_base64"),
        ({"data_base64": 1}, "data_base64"),
        ({"data": 1, "datacontenttype": "text/plain"}, "data"),
        ({"data": "\ud800"}, None),
        ({"source": "a b"}, "source"),
        ({"time": "yesterday"}, "time"),
        ({"time": "2026-02-30T00:00:00Z"}, "time"),
        ({"time": "2026-03-01T12:00:00"}, "time"),
        ({"subject": ""}, "subject"),
        ({"subject": "a\nb"}, "subject"),
        ({"datacontenttype": "json"}, "datacontenttype"),
        ({"type": "t" * 201}, "type"),
        ({"routingkey": "r" * 256}, "routingkey"),
        ({"Region": "eu"}, "Region"),
        ({"my_extension": "eu"}, "my_extension"),
        ({"ratio": 1.5}, "ratio"),
        ({"count": 2**31}, "count"),
        ({"list": []}, "list"),
        ({"object": {}}, "object"),
        ({"note": "a\x00b"}, "note"),
        ({"note": "\ud800"}, "note"),
    ],
)
def test_an_invalid_cloud_event_is_refused_and_its_attribute_is_named(
    changed: dict[str, Any], attribute: str | None
) -> None:
    text = json.dumps({**GIVEN, **changed})
    if attribute is None:
        # Escaped, it is JSON all the same.
        assert parse_structured(text).payload == b'"\\ud800"'
        return
    with pytest.raises(InvalidEvent) as refused:
        parse_structured(text)
    assert refused.value.detail == {"attribute": attribute}
    with pytest.raises(InvalidEvent) as refused:
        parse_batch(f"[{json.dumps(GIVEN)}, {text}]")
    assert refused.value.detail == {"attribute": attribute, "index": 1}


@pytest.mark.parametrize("time", ["2026-03-01t12:00:00.5z", "2016-12-31T23:59:60Z", "2026-03-01T12:00:00-03:30"])
def test_a_time_stays_as_it_was_written(time: str) -> None:
    assert stored(parse_structured(json.dumps({**GIVEN, "time": time}))).attributes["time"] == time


def test_the_key_of_a_record_is_its_partition_key() -> None:
    headers = new_event(CloudEvent(GIVEN, None)).headers
    assert attributes(headers=headers, key=b"k") == {**GIVEN, "partitionkey": "k"}
    assert attributes(headers=headers, key=b"\xff") == GIVEN
    own = new_event(CloudEvent({**GIVEN, "partitionkey": "own"}, None))
    assert own.key == "own"
    assert attributes(headers=own.headers, key=b"k") == {**GIVEN, "partitionkey": "own"}


def test_an_event_has_no_time_that_its_publisher_did_not_give() -> None:
    assert stored(CloudEvent(GIVEN, None)).attributes == GIVEN


def binary(*more: tuple[str, str], body: bytes = b"") -> CloudEvent:
    return parse_binary([(f"ce-{name}", value) for name, value in GIVEN.items()] + list(more), body)


def test_headers_of_binary_mode_are_decoded() -> None:
    assert binary(("ce-subject", "Euro%20%E2%82%AC%20%F0%9F%98%80")).attributes["subject"] == "Euro € 😀"
    assert binary(("CE-Subject", '"a \\"b\\" %25"')).attributes["subject"] == 'a "b" %'
    assert binary(("ce-subject", "€".encode().decode("latin-1"))).attributes["subject"] == "€"
    assert binary(("Content-Type", "text/plain"), ("accept", "x"), body=b"a") == (
        {**GIVEN, "datacontenttype": "text/plain"}, b"a",
    )  # fmt: skip
    assert binary().payload is None


@pytest.mark.parametrize(
    ("more", "attribute"),
    [(("ce-id", "2"), "id"), (("ce-data", "x"), "data"), (("ce-datacontenttype", "text/plain"), "datacontenttype"),
     (("ce-subject", "%ff"), "subject"), (("ce-subject", "%0A"), "subject"), (("ce-my-note", "x"), "my-note")],
)  # fmt: skip
def test_invalid_headers_of_binary_mode_are_refused(more: tuple[str, str], attribute: str) -> None:
    with pytest.raises(InvalidEvent) as refused:
        binary(more)
    assert refused.value.detail == {"attribute": attribute}


def test_headers_that_are_not_valid_attributes_do_not_stop_a_reader() -> None:
    # A Kafka producer may send anything.
    broken = {"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/a b", "ce_type": "t"}
    assert attributes(headers=broken)["source"] == "/topics/orders"
    assert attributes(content_type="application/cloudevents+json", payload=b"{")["source"] == "/topics/orders"
    mixed = {"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/a", "ce_type": "t", "ce_X": "1", "trace": "1"}
    assert attributes(headers=mixed) == {"specversion": "1.0", "id": "1", "source": "/a", "type": "t"}


@pytest.mark.parametrize("text", ["", "[", "[1", "[{}]x", "{}", '[{"specversion": "1.0"}', "[{},]", "[NaN]"])
def test_a_batch_that_is_not_json_is_refused(text: str) -> None:
    with pytest.raises((ValueError, InvalidEvent)):
        parse_batch(text)


@pytest.mark.parametrize("source", ["a b", "a\nb", "\u00e4"])
def test_the_source_of_a_log_is_a_uri(source: str) -> None:
    with pytest.raises(InvalidSettings):
        settings.load({"HEADWATER_CLOUDEVENTS_SOURCE": source})
    assert settings.load({"HEADWATER_CLOUDEVENTS_SOURCE": "urn:log/"}).cloud_events_source == "urn:log"


def test_an_empty_batch_has_no_events() -> None:
    assert parse_batch(" [ ] ") == []
