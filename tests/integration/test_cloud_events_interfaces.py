"""Are CloudEvents accepted and produced over HTTP, SSE, Kafka, webhooks and the command line?"""

from __future__ import annotations

import base64
import hmac
import itertools
import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from cloudevents.core.bindings import http as sdk_http
from cloudevents.core.bindings import kafka as sdk_kafka
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from confluent_kafka import Consumer, Producer, TopicPartition
from typer.testing import CliRunner

import headwater
from headwater.access import permissions, scram
from headwater.access.permissions import Permission
from headwater.calls import access as access_calls
from headwater.calls import kafka as kafka_calls
from headwater.cli import app
from http_server import http_server
from patience import PATIENCE_SECONDS
from serve_process import serve_process
from webhook_receiver import Received, Receiver

Until = Callable[[Callable[[], Any]], Any]
JSON = JSONFormat()
SOURCE = "https://log.example"
EVENT_TYPE = "application/cloudevents+json"
BATCH_TYPE = "application/cloudevents-batch+json"
KAFKA_SECONDS = 120
_numbers = itertools.count()


@pytest.fixture(scope="module")
def told(dsn: str) -> Iterator[dict[str, Any]]:
    options = ("--http", "127.0.0.1:0", "--kafka", "127.0.0.1:0", "--webhooks", "--allow-network", "127.0.0.1")
    with serve_process(*options, dsn=dsn, settings={"HEADWATER_CLOUDEVENTS_SOURCE": f"{SOURCE}/"}) as started:
        yield started.told


@pytest.fixture
def http(told: dict[str, Any]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=told["http"], timeout=PATIENCE_SECONDS) as client:
        yield client


@pytest.fixture
def kafka_topic(log: headwater.Headwater) -> str:
    """A topic that Kafka clients may write to."""
    name = f"records-{next(_numbers)}"
    log.run(kafka_calls.kafka_create_topic(name, 1))
    return name


def made(**changed: Any) -> CloudEvent:
    """A CloudEvent with every attribute."""
    attributes = {
        "specversion": "1.0",
        "id": f"order {next(_numbers)}",
        "source": "/shop?a=b",
        "type": "placed",
        "subject": 'order "7" – 100%',
        "time": datetime(2026, 3, 1, 12, 0, 0, 500_000, tzinfo=UTC),
        "datacontenttype": "application/json",
        "dataschema": "https://shop.example/schema#1",
        "partitionkey": "customer-7",
        "routingkey": "orders.eu",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    return CloudEvent({**attributes, **changed}, {"order": 7, "note": "ü"})


def post(http: httpx.Client, topic: str, message: sdk_http.HTTPMessage, **headers: str) -> httpx.Response:
    return http.post(f"/v1/topics/{topic}/events", content=message.body, headers={**message.headers, **headers})


def batch_of(http: httpx.Client, topic: str, **parameters: Any) -> list[CloudEvent]:
    answer = http.get(f"/v1/topics/{topic}/events", params=parameters, headers={"accept": BATCH_TYPE})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == BATCH_TYPE
    return [JSON.read(None, json.dumps(one)) for one in answer.json()]


def same(found: Any, expected: Any) -> None:
    assert found.get_attributes() == expected.get_attributes()
    assert found.get_data() == expected.get_data()


@pytest.mark.parametrize("convert", [sdk_http.to_structured, sdk_http.to_binary])
def test_an_event_of_the_package_is_published_and_read_as_it_was(
    http: httpx.Client, log: headwater.Headwater, topic: str, convert: Callable[..., sdk_http.HTTPMessage]
) -> None:
    one = made()
    answer = post(http, topic, convert(one, JSON))
    assert answer.status_code == 200, answer.text
    (position,) = answer.json()["positions"]
    same(batch_of(http, topic)[0], one)
    single = http.get(f"/v1/events/{position}", headers={"accept": EVENT_TYPE})
    same(sdk_http.from_http(sdk_http.HTTPMessage(dict(single.headers), single.content), JSON), one)
    (event,) = log.read(topic)
    assert (event.type, event.key, event.routing_key) == ("placed", b"customer-7", "orders.eu")
    assert event.data == {"order": 7, "note": "ü"}
    assert event.event_id == f"/shop?a=b {one.get_id()}"
    assert http.get(f"/v1/topics/{topic}/events?type=placed&key=customer-7").json()["events"][0]["position"] == position


def test_a_batch_is_published_atomically_and_in_order(http: httpx.Client, topic: str) -> None:
    events = [made(), made(), made(type="paid")]
    given = json.dumps([json.loads(JSON.write(one)) for one in events])
    url = f"/v1/topics/{topic}/events"
    answer = http.post(url, content=given, headers={"content-type": f"{BATCH_TYPE}; charset=utf-8"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["positions"] == sorted(answer.json()["positions"])
    for found, one in zip(batch_of(http, topic), events, strict=True):
        same(found, one)
    bad = json.dumps([json.loads(JSON.write(made())), {"id": "1"}])
    refused = http.post(url, content=bad, headers={"content-type": BATCH_TYPE})
    assert refused.status_code == 400
    assert (refused.json()["attribute"], refused.json()["index"]) == ("specversion", 1)
    assert len(batch_of(http, topic)) == 3
    assert http.post(url, content="[]", headers={"content-type": BATCH_TYPE}).json() == {"positions": []}
    many = json.dumps([json.loads(JSON.write(made()))] * 1001)
    assert http.post(url, content=many, headers={"content-type": BATCH_TYPE}).status_code == 400


def test_the_same_source_and_id_are_one_event(http: httpx.Client, topic: str) -> None:
    one = made()
    first = post(http, topic, sdk_http.to_structured(one, JSON)).json()
    assert post(http, topic, sdk_http.to_binary(one, JSON)).json() == first
    other = made(id=one.get_id(), source="/other")
    assert post(http, topic, sdk_http.to_structured(other, JSON)).json() != first
    assert [event.get_source() for event in batch_of(http, topic)] == ["/shop?a=b", "/other"]


def test_an_idempotency_key_covers_the_attributes_in_headers(http: httpx.Client, topic: str) -> None:
    one, key = made(), {"idempotency-key": f"key-{next(_numbers)}"}
    first = post(http, topic, sdk_http.to_binary(one, JSON), **key)
    assert first.status_code == 200, first.text
    assert post(http, topic, sdk_http.to_binary(one, JSON), **key).json() == first.json()
    assert post(http, topic, sdk_http.to_binary(made(), JSON), **key).status_code == 422


@pytest.mark.parametrize(
    ("changed", "attribute"),
    [({"id": None}, "id"), ({"source": None}, "source"), ({"type": None}, "type"), ({"BAD": "x"}, "BAD"),
     ({"specversion": None}, "specversion"), ({"specversion": "0.3"}, "specversion"),
     ({"data_base64": "YQ=="}, "data_base64")],
)  # fmt: skip
def test_an_invalid_event_is_refused_with_the_name_of_the_attribute(
    http: httpx.Client, topic: str, changed: dict[str, Any], attribute: str
) -> None:
    given = {**json.loads(JSON.write(made())), **changed}
    answer = http.post(f"/v1/topics/{topic}/events", content=json.dumps(given), headers={"content-type": EVENT_TYPE})
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/problem+json")
    assert answer.json()["attribute"] == attribute
    assert attribute in answer.json()["detail"]
    assert batch_of(http, topic) == []


def test_binary_mode_needs_every_required_header(http: httpx.Client, topic: str) -> None:
    url = f"/v1/topics/{topic}/events"
    headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/a", "ce-type": "t", "content-type": "text/plain"}
    for name in ("specversion", "id", "source", "type"):
        fewer = {key: value for key, value in headers.items() if key != f"ce-{name}"}
        answer = http.post(url, content="hi", headers=fewer)
        assert (answer.status_code, answer.json()["attribute"]) == (400, name)
    assert http.post(url, content="hi", headers=headers).status_code == 200
    # Any type, and as many commas as it likes: the body is data.
    many = {**headers, "ce-id": "2", "content-type": "application/octet-stream"}
    assert http.post(url, content=b"\xff" + b"," * 600_000, headers=many).status_code == 200
    # Without the headers it is no CloudEvent, and other paths accept only JSON.
    assert http.post(url, content="hi", headers={"content-type": "text/plain"}).status_code == 415
    assert http.post("/v1/topics", content="hi", headers=headers).status_code == 415
    assert http.post(url, content="{", headers={"content-type": EVENT_TYPE}).status_code == 400
    assert http.post(url, content="[" * 100_000, headers={"content-type": EVENT_TYPE}).status_code == 400
    avro = http.post(url, content="x", headers={"content-type": "application/cloudevents+avro"})
    assert (avro.status_code, "application/cloudevents+json" in avro.json()["hint"]) == (415, True)
    assert http.post("/v1/topics/missing/events", content="hi", headers=headers).status_code == 404


def test_an_event_without_data_has_none_after_it_was_published(http: httpx.Client, topic: str) -> None:
    one = CloudEvent({"source": "/a", "type": "t"}, None)
    assert post(http, topic, sdk_http.to_binary(one, JSON)).status_code == 200
    same(batch_of(http, topic)[0], one)


def test_a_native_event_is_read_as_a_cloud_event(http: httpx.Client, log: headwater.Headwater, topic: str) -> None:
    position = log.publish(topic, {"a": 1}, key="k", type="t", headers={"region": "eu"})
    (found,) = batch_of(http, topic)
    assert (found.get_id(), found.get_source()) == (f"position:{position}", f"{SOURCE}/topics/{topic}")
    assert (found.get_type(), found.get_data()) == ("t", {"a": 1})
    assert (found.get_extension("partitionkey"), found.get_extension("region")) == ("k", "eu")
    assert found.get_time() == log.read(topic)[0].published_at


def test_a_page_of_cloud_events_names_the_next_one(http: httpx.Client, log: headwater.Headwater, topic: str) -> None:
    positions = log.publish_batch(topic, [headwater.NewEvent(number) for number in range(5)])
    url, found, pages = f"/v1/topics/{topic}/events?limit=2", [], 0
    while url:
        answer = http.get(url, headers={"accept": f"{BATCH_TYPE}, application/json;q=0.5"})
        assert answer.headers["content-type"] == BATCH_TYPE
        events = answer.json()
        found += [one["data"] for one in events]
        if events:
            assert int(answer.headers["headwater-position"]) == positions[len(found) - 1]
        assert int(answer.headers["headwater-stable"]) >= (positions[-1] or 0)
        url = str(answer.url.join(answer.links["next"]["url"])) if "next" in answer.links else ""
        pages += 1
        assert pages < 10
    assert found == list(range(5))


@pytest.mark.parametrize(
    ("accept", "expected"),
    [("*/*", "application/json"), ("application/json", "application/json"), (BATCH_TYPE, BATCH_TYPE),
     (f"{BATCH_TYPE};q=0.5, application/json", "application/json"), (f"{BATCH_TYPE};q=0", "application/json"),
     (f"text/html, {BATCH_TYPE.upper()};q=0.9", BATCH_TYPE), (f"{BATCH_TYPE};q=x", "application/json")],
)  # fmt: skip
def test_a_client_gets_cloud_events_only_if_it_asks_for_them(
    http: httpx.Client, topic: str, accept: str, expected: str
) -> None:
    assert http.get(f"/v1/topics/{topic}/events", headers={"accept": accept}).headers["content-type"] == expected


def test_a_stream_of_cloud_events(http: httpx.Client, topic: str) -> None:
    one = made()
    post(http, topic, sdk_http.to_structured(one, JSON))
    with http.stream("GET", f"/v1/topics/{topic}/follow?after=0&format=cloudevents") as answer:
        data = next(line for line in answer.iter_lines() if line.startswith("data: "))
    same(JSON.read(None, data.removeprefix("data: ")), one)
    assert http.get(f"/v1/topics/{topic}/follow?format=xml").status_code == 422


def verify(secret: str, got: Received) -> None:
    """Verify a signature over a body that need not be JSON, which the package of Standard Webhooks requires."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{got.headers['webhook-id']}.{got.headers['webhook-timestamp']}.".encode() + got.body
    expected = "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
    assert got.headers["webhook-signature"] == expected


@pytest.mark.parametrize("body", ["cloudevents-structured", "cloudevents-binary"])
def test_a_webhook_sends_signed_cloud_events(
    http: httpx.Client, log: headwater.Headwater, topic: str, until: Until, body: str
) -> None:
    one = made()
    with Receiver() as receiver:
        given = {"name": topic, "url": receiver.url, "bindings": [{"topic": topic}], "body": body}
        created = http.post("/v1/webhooks", json={**given, "from_end": False, "gzip_above_bytes": 0})
        assert (created.status_code, created.json()["body"]) == (201, body), created.text
        post(http, topic, sdk_http.to_structured(one, JSON))
        log.publish(topic, b"\xff\x00", content_type="image/png")
        until(lambda: len(receiver.received) == 2)
        first, second = sorted(receiver.received, key=lambda received: received.position)
        for got in (first, second):
            verify(created.json()["secret"], got)
        same(sdk_http.from_http(sdk_http.HTTPMessage(first.headers, first.body), JSON), one)
        other = sdk_http.from_http(sdk_http.HTTPMessage(second.headers, second.body), JSON)
        assert other.get_source() == f"{SOURCE}/topics/{topic}"
        assert other.get_data() == b"\xff\x00"
        tested = http.post(f"/v1/webhooks/{topic}/test").json()
        assert tested["accepted"], tested
        http.delete(f"/v1/webhooks/{topic}")


def test_headers_of_cloud_events_are_not_the_users(http: httpx.Client, topic: str) -> None:
    given = {"name": topic, "url": "https://a.example/", "headers": {"Ce-Id": "1"}}
    assert http.post("/v1/webhooks", json=given).status_code == 400


def consumed(told: dict[str, Any], topic: str, count: int) -> list[sdk_kafka.KafkaMessage]:
    """The first records of a topic. Headwater's own headers are left in."""
    consumer = Consumer({"bootstrap.servers": ",".join(told["kafka"]), "group.id": "none", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, 0)])
    try:
        records = consumer.consume(count, timeout=KAFKA_SECONDS)
    finally:
        consumer.close()
    assert len(records) == count
    assert all(record.error() is None for record in records)
    return [sdk_kafka.KafkaMessage(dict(one.headers() or ()), one.key(), one.value() or b"") for one in records]


def produce(told: dict[str, Any], topic: str, *messages: sdk_kafka.KafkaMessage) -> None:
    producer = Producer({"bootstrap.servers": ",".join(told["kafka"])})
    failures: list[Any] = []
    for one in messages:
        producer.produce(
            topic, one.value, one.key, headers=list(one.headers.items()),
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )  # fmt: skip
    assert producer.flush(KAFKA_SECONDS) == 0
    assert failures == []


@pytest.mark.parametrize("convert", [sdk_http.to_structured, sdk_http.to_binary])
def test_an_event_published_over_http_is_a_cloud_event_in_kafka(
    told: dict[str, Any], http: httpx.Client, kafka_topic: str, convert: Callable[..., sdk_http.HTTPMessage]
) -> None:
    one = made(count="3")
    assert post(http, kafka_topic, convert(one, JSON)).status_code == 200
    (message,) = consumed(told, kafka_topic, 1)
    assert message.headers["content-type"] == b"application/json"
    assert {name for name in message.headers if not name.startswith("ce_")} == {"content-type", "headwater-event-id"}
    same(sdk_kafka.from_kafka(message, JSON), one)


def test_records_with_cloud_events_are_kept_as_they_were_and_read_over_http(
    told: dict[str, Any], http: httpx.Client, log: headwater.Headwater, kafka_topic: str
) -> None:
    binary, structured, keyless = made(), made(), made()
    del keyless.get_attributes()["partitionkey"]
    messages = [
        sdk_kafka.to_binary(binary, JSON),
        sdk_kafka.to_structured(structured, JSON),
        sdk_kafka.to_binary(keyless, JSON),
    ]
    produce(told, kafka_topic, *messages)
    assert [list(one.headers.items()) for one in consumed(told, kafka_topic, 3)] == [
        list(one.headers.items()) for one in messages
    ]
    for found, one in zip(batch_of(http, kafka_topic), (binary, structured, keyless), strict=True):
        same(found, one)
    assert [event.type for event in log.read(kafka_topic)] == ["placed", None, "placed"]
    assert [event.routing_key for event in log.read(kafka_topic)] == ["orders.eu", None, "orders.eu"]
    # Every other reader sees the data.
    assert http.get(f"/v1/topics/{kafka_topic}/events").json()["events"][0]["data"] == binary.get_data()


@pytest.fixture
def run(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command; its output."""

    def run_it(*arguments: str, input: bytes | None = None, code: int = 0) -> str:
        environment = {"HEADWATER_DSN": dsn, "HEADWATER_CLOUDEVENTS_SOURCE": SOURCE}
        result = CliRunner(env=environment).invoke(app, list(arguments), input=input)
        assert result.exit_code == code, result.output
        return result.stdout_bytes.decode() if code == 0 else str(result.exception or result.output)

    return run_it


def test_the_command_line_publishes_and_prints_cloud_events(
    log: headwater.Headwater, topic: str, run: Callable[..., Any]
) -> None:
    events = [made() for _ in range(5)]
    texts = [JSON.write(one) for one in events]
    assert "published to" in run("publish", topic, texts[0].decode(), "--cloudevents")
    assert run("publish", topic, f"[{texts[1].decode()}, {texts[2].decode()}]",
               "--cloudevents") == f"published 2 events to {topic}\n"  # fmt: skip
    assert run("publish", topic, "--cloudevents", input=b"\n".join(texts[3:])) == f"published 2 events to {topic}\n"
    printed = run("read", topic, "--cloudevents")
    for line, one in zip(printed.splitlines(), events, strict=True):
        same(JSON.read(None, line), one)
    assert run("tail", topic, "--cloudevents") == printed
    copy = log.create_topic(f"{topic}-copy").name
    run("publish", copy, "--cloudevents", input=printed.encode())
    assert run("read", copy, "--cloudevents") == printed
    # Publishing them again has no effect.
    run("publish", copy, "--cloudevents", input=printed.encode())
    assert len(log.read(copy)) == 5
    log.publish(topic, 1, type="native")
    last = json.loads(run("read", topic, "--cloudevents", "--backwards", "--limit", "1"))
    assert last["source"] == f"{SOURCE}/topics/{topic}"


def test_the_command_line_refuses_what_is_no_cloud_event(topic: str, run: Callable[..., Any]) -> None:
    run("publish", topic, "{}", "--cloudevents", code=3)
    run("publish", topic, "x", "--cloudevents", code=3)
    run("publish", topic, "{}", "--cloudevents", "--key", "k", code=2)
    run("publish", topic, "--cloudevents", input=b'{"specversion":"1.0"}\n', code=3)


def test_publishing_a_cloud_event_needs_the_permission_to_write(dsn: str, log: headwater.Headwater, topic: str) -> None:
    keys = {}
    for action in ("read", "write"):
        log.run(access_calls.set_account(action, scram.verifiers("secret", os.urandom(16), 4096), administrator=False))
        log.run(access_calls.allow(Permission(action, action, "topic", topic)))
        keys[action] = permissions.encode_api_key(os.urandom(32))
        log.run(access_calls.create_api_key(permissions.hash_api_key(keys[action]), action))
    with (
        http_server(dsn, authenticate=True) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as http,
    ):
        for convert in (sdk_http.to_structured, sdk_http.to_binary):
            message = convert(made(), JSON)
            assert post(http, topic, message).status_code == 401
            assert post(http, topic, message, authorization=f"Bearer {keys['read']}").status_code == 403
            assert post(http, topic, message, authorization=f"Bearer {keys['write']}").status_code == 200
