"""Does the HTTP API do to the log what it says, and refuse the rest with a clear problem?"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import psycopg
import pytest

import headwater
from headwater.calls import pipeline_runs
from headwater.errors import LogUnavailable
from headwater.servers.http.schema_registry import _error_response as registry_error_response
from headwater.servers.options import ServerLimits
from http_server import http_process, http_server
from patience import PATIENCE_SECONDS

MAX_BODY = 1024 * 1024


@pytest.fixture(scope="module")
def address(dsn: str) -> Iterator[str]:
    with http_server(dsn, limits=ServerLimits(max_body_bytes=MAX_BODY)) as found:
        yield found


def problem(response: httpx.Response, status: int, kind: str) -> Any:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    told = response.json()
    assert told["type"] == f"urn:headwater:error:{kind}", told
    assert told["status"] == status
    assert told["title"]
    assert told["detail"]
    return told


def audit(log: headwater.Headwater, after: int) -> list[tuple[str, str, str]]:
    found = [event.data for event in log.read("headwater.audit", after=after)]
    return [(one["actor"], one["action"], one["subject"]) for one in found]


def test_what_is_published_is_read_as_it_was(http: httpx.Client, log: headwater.Headwater, topic: str) -> None:
    events: list[dict[str, Any]] = [
        {"type": "a", "key": "k", "routing_key": "x.y", "headers": {"h": 1}, "data": {"n": [1, "ä", None]}},
        {"text": '{"to": "the letter",  "x": 1.10}', "content_type": "application/json"},
        {"text": "plain\nlines"},
        {"base64": "/wA=", "key_base64": "/w=="},
        {"data": None},
    ]
    positions = http.post(f"/v1/topics/{topic}/events", json={"events": events}).json()["positions"]
    stored = log.read(topic)
    assert [event.position for event in stored] == positions
    assert [event.payload for event in stored] == [
        '{"n":[1,"ä",null]}'.encode(),
        b'{"to": "the letter",  "x": 1.10}',
        b"plain\nlines",
        b"\xff\x00",
        None,
    ]
    page = http.get(f"/v1/topics/{topic}/events").json()
    assert page["next"] is None or page["next"].startswith("?")
    shown = page["events"]
    assert (shown[0]["type"], shown[0]["key"], shown[0]["headers"], shown[0]["data"]) == (
        "a",
        "k",
        {"h": 1},
        {"n": [1, "ä", None]},
    )
    assert shown[1]["data"] == {"to": "the letter", "x": 1.1}
    assert "1.10" in http.get(f"/v1/events/{positions[1]}").text
    assert shown[2]["text"] == "plain\nlines"
    assert (shown[3]["base64"], shown[3]["key_base64"], "key" in shown[3]) == ("/wA=", "/w==", False)
    assert shown[4]["data"] is None
    one = http.post(f"/v1/topics/{topic}/events", json={"data": 1}).json()["positions"]
    assert http.get(f"/v1/events/{one[0]}").json()["data"] == 1
    problem(http.get("/v1/events/999999999"), 404, "NotFound")


def test_a_batch_is_published_whole_or_not_at_all(http: httpx.Client, log: headwater.Headwater, topic: str) -> None:
    log.alter_topic(topic, max_payload_bytes=100)
    bad = {"events": [{"data": 1}, {"data": "x" * 200}]}
    told = problem(http.post(f"/v1/topics/{topic}/events", json=bad), 413, "EventTooLarge")
    assert told["limit"] == 100
    problem(http.post("/v1/topics/nowhere/events", json={"data": 1}), 404, "TopicNotFound")
    problem(http.post(f"/v1/topics/{topic}/events", json={"events": [{"data": 1}] * 1001}), 422, "Unprocessable")
    problem(http.post(f"/v1/topics/{topic}/events", json={"data": 1, "text": "x"}), 422, "Unprocessable")
    assert log.read(topic) == []


def test_an_idempotency_key_makes_a_repeat_harmless(http: httpx.Client, log: headwater.Headwater, topic: str) -> None:
    body = {"events": [{"data": 1}, {"data": 2}]}
    headers = {"Idempotency-Key": "order-7"}
    first = http.post(f"/v1/topics/{topic}/events", json=body, headers=headers).json()
    assert http.post(f"/v1/topics/{topic}/events", json=body, headers=headers).json() == first
    other = {"events": [{"data": 1}, {"data": 3}, {"data": 4}]}
    problem(http.post(f"/v1/topics/{topic}/events", json=other, headers=headers), 422, "KeyReused")
    assert [event.data for event in log.read(topic)] == [1, 2]
    # Another topic is another request.
    second = log.create_topic(f"{topic}-b").name
    assert http.post(f"/v1/topics/{second}/events", json=body, headers=headers).json() != first


def test_an_idempotency_key_is_for_one_request_to_the_letter(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    headers = {"Idempotency-Key": "one"}
    path = f"/v1/topics/{topic}/events"
    one = {"data": 1, "type": "a", "key": "k"}
    first = http.post(path, json={"events": [one]}, headers=headers)
    for events in (
        [one, one],
        [{**one, "headers": {"h": 1}}],
        [{**one, "routing_key": "x"}],
        [{**one, "event_id": "x"}],
        [{**one, "content_type": "text/json"}],
        [{**one, "deliver_at": "2999-01-01T00:00:00Z"}],
    ):
        problem(http.post(path, json={"events": events}, headers=headers), 422, "KeyReused")
    # Written otherwise, it says the same.
    again = json.dumps({"events": [dict(reversed(one.items()))]}, indent=3)
    repeat = http.post(path, content=again, headers={**headers, "content-type": "application/json"})
    assert repeat.json() == first.json()
    assert [event.data for event in log.read(topic)] == [1]
    # An event for later has its key for itself, too.
    later = {"data": 2, "deliver_at": "2999-01-01T00:00:00Z"}
    for _ in range(2):
        assert http.post(path, json=later, headers={"Idempotency-Key": "two"}).json() == {"positions": [None]}
    assert len(log.scheduled(topic)) == 1
    problem(http.post(path, json={"data": 2}, headers={"Idempotency-Key": "two"}), 422, "KeyReused")


def test_what_was_refused_has_not_used_up_its_idempotency_key(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    headers = {"Idempotency-Key": "late"}
    log.alter_topic(topic, max_payload_bytes=100)
    body = {"data": "x" * 200}
    problem(http.post(f"/v1/topics/{topic}/events", json=body, headers=headers), 413, "EventTooLarge")
    log.alter_topic(topic, max_payload_bytes=1000)
    for _ in range(2):
        assert http.post(f"/v1/topics/{topic}/events", json=body, headers=headers).status_code == 200
    assert len(log.read(topic)) == 1


def test_appending_and_scheduling_with_an_idempotency_key_are_done_once(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    store = f"store-{topic}"
    http.post("/v1/topics", json={"name": store, "event_store": True})
    headers = {"Idempotency-Key": "one"}
    query = {"items": [{"tags": ["a:1"]}]}
    body = {"events": [{"type": "A", "tags": ["a:1"]}], "condition": {"query": query}}
    first = http.post(f"/v1/stores/{store}/append", json=body, headers=headers)
    assert first.status_code == 200, first.text
    # Without the key its own event would speak against it.
    assert http.post(f"/v1/stores/{store}/append", json=body, headers=headers).json() == first.json()
    problem(http.post(f"/v1/stores/{store}/append", json=body), 409, "AppendConflict")
    other = {"events": [{"type": "B"}]}
    problem(http.post(f"/v1/stores/{store}/append", json=other, headers=headers), 422, "KeyReused")
    problem(http.post(f"/v1/stores/{store}/append", json=body, headers={"Idempotency-Key": "2"}), 409, "AppendConflict")
    assert http.post(f"/v1/stores/{store}/append", json=other, headers={"Idempotency-Key": "2"}).status_code == 200
    assert len(log.read(store)) == 2
    due = {"topic": topic, "data": 1, "deliver_at": "2999-01-01T00:00:00Z"}
    made = [http.post("/v1/schedules", json=due, headers=headers) for _ in range(2)]
    assert [one.status_code for one in made] == [201, 201]
    assert made[0].json() == made[1].json()
    assert len(log.scheduled(topic)) == 1
    problem(http.post("/v1/schedules", json={**due, "topic": store}, headers=headers), 422, "KeyReused")


def test_of_many_who_send_one_idempotency_key_at_once_one_is_served_and_all_hear_of_it(
    address: str, log: headwater.Headwater, topic: str
) -> None:
    def send(_: int) -> Any:
        headers = {"Idempotency-Key": "at once"}
        return httpx.post(
            f"{address}/v1/topics/{topic}/events", json={"data": 1}, headers=headers, timeout=PATIENCE_SECONDS
        ).json()

    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(send, range(16)))
    (event,) = log.read(topic)
    assert told == [{"positions": [event.position]}] * 16


def test_kept_answers_are_forgotten_after_a_day(
    http: httpx.Client,
    log: headwater.Headwater,
    topic: str,
    connection: psycopg.Connection,
    until: Callable[[Callable[[], Any]], Any],
) -> None:
    headers = {"Idempotency-Key": "old"}
    first = http.post(f"/v1/topics/{topic}/events", json={"data": 1}, headers=headers).json()
    for age, same in (("23 hours", True), ("25 hours", False)):
        connection.execute(
            "update headwater_internal.kept_answer set kept_at = clock_timestamp() - %s::interval", (age,)
        )
        until(lambda: not log.maintain().busy)
        assert (http.post(f"/v1/topics/{topic}/events", json={"data": 1}, headers=headers).json() == first) is same


def test_the_trace_of_a_request_goes_into_its_events(http: httpx.Client, log: headwater.Headwater, topic: str) -> None:
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    headers = {"traceparent": parent, "tracestate": "a=1"}
    own = {"data": 2, "headers": {"traceparent": "own", "x": 1}}
    path = f"/v1/topics/{topic}/events"
    assert http.post(path, json={"data": 1}, headers=headers).status_code == 200
    assert http.post(path, json={"events": [own, {"data": 3, "headers": {"x": 1}}]}, headers=headers).status_code == 200
    assert http.post(path, json={"data": 4}, headers={"traceparent": "not one"}).status_code == 200
    assert [event.headers for event in log.read(topic)] == [headers, own["headers"], {"x": 1, **headers}, None]


def test_what_is_published_over_http_is_counted(http: httpx.Client, topic: str) -> None:
    path = f"/v1/topics/{topic}/events"
    http.post(path, json={"data": 1})
    http.post(path, json={"events": [{"data": 1}, {"data": 2}]}, headers={"Idempotency-Key": "a"})
    http.post(path, json={"events": [{"data": 1}, {"data": 2}]}, headers={"Idempotency-Key": "a"})
    http.post(path, json={"data": 1, "deliver_at": "2999-01-01T00:00:00Z"})
    http.post(path, json={"data": 1, "partition": 1})
    assert f'headwater_published_events_total{{topic="{topic}"}} 3' in http.get("/metrics").text


def test_events_are_found_page_by_page_both_ways(http: httpx.Client, log: headwater.Headwater, topic: str) -> None:
    events = [
        headwater.NewEvent(n, key=f"k{n % 3}", type="odd" if n % 2 else "even", headers={"n": str(n % 5)})
        for n in range(25)
    ]
    positions = log.publish_batch(topic, events)

    def pages(query: str) -> list[int]:
        found: list[int] = []
        following: str | None = query
        while following:
            page = http.get(f"/v1/topics/{topic}/events{following}").json()
            found += [event["position"] for event in page["events"]]
            following = page["next"]
        return found

    assert pages("?limit=4") == positions
    assert pages("?limit=4&order=desc") == positions[::-1]
    assert pages("?limit=2&type=odd") == positions[1::2]
    assert pages("?limit=2&type=odd&order=desc") == positions[1::2][::-1]
    assert pages("?limit=3&key=k1&header.n=4") == [p for n, p in enumerate(positions) if n % 3 == 1 and n % 5 == 4]
    assert pages(f"?limit=3&after={positions[4]}&before={positions[12]}") == positions[5:12]
    assert pages(f"?limit=3&after={positions[4]}&before={positions[12]}&order=desc") == positions[5:12][::-1]
    late = (datetime.now(UTC) + timedelta(hours=1)).isoformat().replace("+00:00", "Z")
    assert pages(f"?since={late}") == []
    assert pages(f"?until={late}&limit=100") == positions
    both = http.get("/v1/events", params=[("topic", topic), ("limit", "2")]).json()
    assert [event["topic"] for event in both["events"]] == [topic, topic]
    problem(http.get("/v1/events", params={"topic": "nowhere"}), 404, "TopicNotFound")
    problem(http.get(f"/v1/topics/{topic}/events?limit=0"), 422, "Unprocessable")
    problem(http.get(f"/v1/topics/{topic}/events?until=0.5"), 422, "Unprocessable")
    problem(http.get(f"/v1/topics/{topic}/events?after=99999999999999999999"), 422, "Unprocessable")


def test_topics_are_made_changed_and_deleted_and_it_is_told(
    http: httpx.Client, log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    before = log.state().head
    made = http.post("/v1/topics", json={"name": "made", "kind": "sequenced", "partitions": 2})
    assert made.status_code == 201
    assert (made.json()["partitions"], made.json()["event_store"]) == (2, False)
    problem(http.post("/v1/topics", json={"name": "made"}), 409, "TopicExists")
    assert http.post("/v1/topics", json={"name": "made", "if_missing": True}).status_code == 201
    problem(http.post("/v1/topics", json={"name": "not a name"}), 400, "InvalidRequest")
    changed = http.patch("/v1/topics/made", json={"retention_seconds": 60.5, "max_payload_bytes": 5000}).json()
    assert (changed["retention_seconds"], changed["max_payload_bytes"]) == (60.5, 5000)
    assert http.patch("/v1/topics/made", json={"retention_seconds": None}).json()["retention_seconds"] is None
    problem(http.patch("/v1/topics/made", json={"partitions": 1}), 400, "InvalidRequest")
    positions = log.publish_batch("made", [headwater.NewEvent(1), headwater.NewEvent(2)])
    # Nobody looked whether it is root.
    assert http.patch("/v1/topics/made", json={}, auth=("root", "x")).status_code == 200
    would = http.delete("/v1/topics/made?dry_run=true").json()
    assert would == {
        "deleted": False,
        "events": 2,
        "events_is_more": False,
        "first": positions[0],
        "last": positions[1],
    }
    assert http.get("/v1/topics/made").status_code == 200
    assert http.delete("/v1/topics/made").json()["deleted"] is True
    problem(http.get("/v1/topics/made"), 404, "TopicNotFound")
    told = audit(log, before)
    assert told == [
        ("everybody", "topic.create", "made"),
        ("everybody", "topic.create", "made"),
        ("everybody", "topic.alter", "made"),
        ("everybody", "topic.alter", "made"),
        ("everybody", "topic.alter", "made"),
        ("everybody", "topic.delete", "made"),
    ]
    # Nobody writes or deletes the record of what was done.
    problem(http.post("/v1/topics/headwater.audit/events", json={"data": 1}), 403, "NotAllowed")
    problem(http.delete("/v1/topics/headwater.audit"), 403, "NotAllowed")
    problem(http.patch("/v1/topics/headwater.audit", json={"retention_seconds": 60}), 403, "NotAllowed")


def test_an_act_and_its_record_are_one_transaction(
    http: httpx.Client, log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    log.create_topic("headwater.audit", if_missing=True)
    before = log.state().head
    # The record cannot be written: then the act must not be either.
    connection.execute(
        "alter table headwater_internal.event add constraint no_audit check (type <> 'topic.create') not valid"
    )
    try:
        assert http.post("/v1/topics", json={"name": "half"}).status_code in (400, 500)
        problem(http.get("/v1/topics/half"), 404, "TopicNotFound")
    finally:
        connection.execute("alter table headwater_internal.event drop constraint no_audit")
    assert audit(log, before) == []
    # And the other way round: the act fails at the last moment, when it is committed.
    connection.execute(
        "create function public.refuse() returns trigger language plpgsql as $$ begin raise 'no'; end; $$;"
        "create constraint trigger refuse after insert on headwater_internal.topic deferrable initially deferred "
        "for each row execute function public.refuse()"
    )
    try:
        assert http.post("/v1/topics", json={"name": "half"}).status_code == 500
        problem(http.get("/v1/topics/half"), 404, "TopicNotFound")
    finally:
        connection.execute("drop trigger refuse on headwater_internal.topic; drop function public.refuse()")
    assert audit(log, before) == []


def test_a_queue_is_worked_over_http(http: httpx.Client, log: headwater.Headwater, topic: str) -> None:
    queue = f"g-{topic}"
    made = http.post("/v1/queues", json={"name": queue, "bindings": [{"topic": topic}], "max_attempts": 3})
    assert made.status_code == 201, made.text
    problem(http.post("/v1/queues", json={"name": queue}), 409, "QueueExists")
    positions = log.publish_batch(topic, [headwater.NewEvent(n) for n in range(5)])
    lease = http.post(f"/v1/queues/{queue}/claim", json={"worker": "w", "batch_size": 4}).json()
    assert [event["data"] for event in lease["events"]] == [0, 1, 2, 3]
    assert lease["events"][0]["attempt"] == 1
    held = http.get(f"/v1/queues/{queue}/leases").json()["leases"]
    assert [(one["token"], one["worker"], one["events"]) for one in held] == [(lease["token"], "w", 4)]
    extended = http.post(f"/v1/queues/{queue}/extend", json={"token": lease["token"], "lease_seconds": 60})
    assert extended.json()["expires_at"] > lease["expires_at"]
    settled = {
        "token": lease["token"],
        "done": [positions[0]],
        "failed": [
            {"position": positions[1], "error": "later", "retry_in_seconds": 3600},
            {"position": positions[2], "error": "never", "dead": True},
        ],
        "released": [{"position": positions[3]}],
    }
    assert http.post(f"/v1/queues/{queue}/settle", json=settled).json() == {"settled": True}
    shown = http.get(f"/v1/queues/{queue}").json()
    assert (shown["ready"], shown["retrying"], shown["dead"], shown["done"]) == (2, 1, 1, 1)
    dead = http.get(f"/v1/queues/{queue}/dead").json()["dead"]
    assert [(one["position"], one["error"], one["event"]["data"]) for one in dead] == [(positions[2], "never", 2)]
    would = http.post(f"/v1/queues/{queue}/dead/redrive", json={"all": True, "dry_run": True}).json()
    assert would == {"count": 1, "first": positions[2], "last": positions[2], "dry_run": True}
    assert http.post(f"/v1/queues/{queue}/dead/redrive", json={"positions": [positions[2]]}).json()["count"] == 1
    problem(http.post(f"/v1/queues/{queue}/dead/redrive", json={}), 400, "InvalidRequest")
    rest = []
    while True:
        lease = http.post(f"/v1/queues/{queue}/claim", json={"worker": "w", "batch_size": 10}).json()
        if not lease["events"]:
            break
        rest += [event["position"] for event in lease["events"]]
        assert http.post(f"/v1/queues/{queue}/settle", json={"token": lease["token"], "done": "all"}).status_code == 200
    assert sorted(rest) == sorted([positions[2], positions[3], positions[4]])
    # A lease ends once.
    lost = http.post(f"/v1/queues/{queue}/settle", json={"token": "12345", "done": "all"})
    problem(lost, 409, "LeaseLost")
    assert http.post(f"/v1/queues/{queue}/rewind", json={"to": positions[2], "dry_run": True}).json()["events"] == 2
    assert http.post(f"/v1/queues/{queue}/rewind", json={"to": positions[2]}).json()["to"] == positions[2]
    assert http.get(f"/v1/queues/{queue}").json()["ready"] == 2
    assert http.post(f"/v1/queues/{queue}/pause").json() == {"paused": True}
    assert http.post(f"/v1/queues/{queue}/claim", json={"worker": "w"}).json()["events"] == []
    assert http.post(f"/v1/queues/{queue}/resume").json() == {"paused": False}
    assert http.patch(f"/v1/queues/{queue}", json={"lease_seconds": 45}).json()["lease_seconds"] == 45
    bound = http.post(f"/v1/queues/{queue}/bindings", json={"pattern": "a.*"})
    assert bound.status_code == 201
    assert len(http.get(f"/v1/queues/{queue}/bindings").json()["bindings"]) == 2
    assert http.delete(f"/v1/queues/{queue}/bindings/{bound.json()['id']}").status_code == 200
    assert http.delete(f"/v1/queues/{queue}?dry_run=true").json()["deleted"] is False
    assert http.delete(f"/v1/queues/{queue}").json()["deleted"] is True
    problem(http.get(f"/v1/queues/{queue}"), 404, "QueueNotFound")
    problem(http.post(f"/v1/queues/{queue}/claim", json={"worker": "w"}), 404, "QueueNotFound")


def test_a_dry_run_of_a_rewind_counts_what_comes_again_and_what_is_skipped(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    queue = f"r-{topic}"
    http.post("/v1/queues", json={"name": queue, "bindings": [{"topic": topic}]})
    positions = log.publish_batch(topic, [headwater.NewEvent(n) for n in range(6)])
    lease = http.post(f"/v1/queues/{queue}/claim", json={"worker": "w", "batch_size": 3}).json()
    http.post(f"/v1/queues/{queue}/settle", json={"token": lease["token"], "done": "all"})
    none = {"events": 0, "events_is_more": False, "first": None, "last": None}

    def rewound(to: int | None, *, dry_run: bool = True) -> Any:
        return http.post(f"/v1/queues/{queue}/rewind", json={"to": to, "dry_run": dry_run}).json()

    back = rewound(positions[0])
    assert (back["events"], back["skipped"]) == (5, none)
    assert back["again"] == {"events": 2, "events_is_more": False, "first": positions[1], "last": positions[2]}
    forth = rewound(positions[4])
    assert (forth["events"], forth["again"]) == (1, none)
    assert forth["skipped"] == {"events": 2, "events_is_more": False, "first": positions[3], "last": positions[4]}
    assert rewound(positions[4], dry_run=False) == {**forth, "dry_run": False}
    lease = http.post(f"/v1/queues/{queue}/claim", json={"worker": "w", "batch_size": 10}).json()
    assert [event["position"] for event in lease["events"]] == [positions[5]]


def test_a_dry_run_of_unbinding_counts_what_no_other_binding_selects(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    queue = f"u-{topic}"
    http.post("/v1/queues", json={"name": queue, "bindings": [{"topic": topic, "type": "a"}]})
    whole = http.post(f"/v1/queues/{queue}/bindings", json={"topic": topic}).json()["id"]
    positions = log.publish_batch(topic, [headwater.NewEvent(n, type=kind) for n, kind in enumerate("bbabab")])
    http.post(f"/v1/queues/{queue}/claim", json={"worker": "w"})
    path = f"/v1/queues/{queue}/bindings/{whole}"
    would = http.delete(f"{path}?dry_run=true").json()
    assert would == {
        "to_position": positions[0],
        "events": 3,
        "events_is_more": False,
        "first": positions[1],
        "last": positions[5],
        "dry_run": True,
    }
    assert http.delete(path).json() == {**would, "dry_run": False}
    rest = http.post(f"/v1/queues/{queue}/claim", json={"worker": "w", "batch_size": 10}).json()["events"]
    assert [event["position"] for event in rest] == [positions[2], positions[4]]
    problem(http.delete(f"{path}?dry_run=true"), 404, "QueueNotFound")
    # What was not done with goes with the queue.
    would = http.delete(f"/v1/queues/{queue}?dry_run=true").json()
    assert (would["events"], would["first"], would["last"]) == (3, positions[0], positions[4])


def test_a_dry_run_of_a_shorter_retention_counts_what_it_takes(
    http: httpx.Client, log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    positions = log.publish_batch(topic, [headwater.NewEvent(n) for n in range(4)])
    connection.execute(
        "update headwater_internal.event set published_at = published_at - interval '1 hour' where position = any (%s)",
        (positions[:3],),
    )
    body = {"retention_seconds": 1800.0}
    would = http.patch(f"/v1/topics/{topic}", json={**body, "dry_run": True}).json()
    assert (would["events"], would["events_is_more"]) == (3, False)
    assert (would["first"], would["last"], would["dry_run"]) == (positions[0], positions[2], True)
    assert would["retention_seconds"] is None
    assert http.get(f"/v1/topics/{topic}").json()["retention_seconds"] is None
    done = http.patch(f"/v1/topics/{topic}", json=body).json()
    assert (done["events"], done["retention_seconds"], done["dry_run"]) == (3, 1800, False)
    assert http.patch(f"/v1/topics/{topic}", json={"retention_seconds": 7200.0, "dry_run": True}).json()["events"] == 0
    assert http.patch(f"/v1/topics/{topic}", json={"retention_seconds": None, "dry_run": True}).json()["events"] == 0


def test_a_dry_run_of_deleting_a_subscription_counts_what_it_has_yet_to_get(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    body = {"queue": f"s-{topic}", "filter": "(e.data)::int > 1", "topics": [topic]}
    made = http.post("/v1/subscriptions", json=body).json()["id"]
    http.post("/v1/subscriptions", json={**body, "filter": "true"})
    positions = log.publish_batch(topic, [headwater.NewEvent(n) for n in range(4)])
    path = f"/v1/subscriptions/s-{topic}/{made}"
    would = http.delete(f"{path}?dry_run=true").json()
    assert would == {
        "deleted": False,
        "events": 2,
        "events_is_more": False,
        "first": positions[2],
        "last": positions[3],
    }
    assert http.delete(path).json() == {**would, "deleted": True}
    problem(http.delete(f"{path}?dry_run=true"), 404, "QueueNotFound")


def test_numbers_of_thousands_of_digits_are_refused_by_the_registry(http: httpx.Client) -> None:
    for digits in ("00000000001" + "0" * 5000, "9" * 5000, "1" * 21):
        assert http.get(f"/registry/schemas/ids/{digits}").status_code == 404
        assert http.get(f"/registry/subjects/x/versions/{digits}").status_code == 422


def test_without_a_database_the_registry_says_so() -> None:
    for error in (LogUnavailable("gone"), psycopg.OperationalError("gone")):
        assert registry_error_response(error).status_code == 503


def test_every_route_with_a_body_is_described_with_what_its_body_may_be_refused_for(http: httpx.Client) -> None:
    described = http.get("/openapi.json").json()["paths"]
    with_body = [route for methods in described.values() for route in methods.values() if "requestBody" in route]
    assert len(with_body) > 25
    for route in with_body:
        assert {"413", "415", "504"} <= route["responses"].keys(), route["operationId"]


def test_a_claim_waits_for_something_to_do(http: httpx.Client, log: headwater.Headwater, topic: str) -> None:
    http.post("/v1/queues", json={"name": f"w-{topic}", "bindings": [{"topic": topic}]})
    got: list[Any] = []

    def ask() -> None:
        body = {"worker": "w", "wait_seconds": 15}
        got.append(http.post(f"/v1/queues/w-{topic}/claim", json=body).json())

    asking = threading.Thread(target=ask)
    asking.start()
    while not asking.is_alive():
        pass
    log.publish(topic, "now")
    asking.join(PATIENCE_SECONDS)
    assert [event["data"] for event in got[0]["events"]] == ["now"]


def test_cursors_subscriptions_and_schedules_are_kept(
    http: httpx.Client, log: headwater.Headwater, topic: str, until: Callable[[Callable[[], Any]], Any]
) -> None:
    position = log.publish(topic, 1)
    assert http.put("/v1/cursors/c1", json={"position": position, "topics": [topic]}).json()["position"] == position
    assert {one["name"]: one["position"] for one in http.get("/v1/cursors").json()["cursors"]}["c1"] == position
    problem(http.put("/v1/cursors/c1", json={}), 400, "InvalidRequest")
    assert http.delete("/v1/cursors/c1").json() == {"deleted": True}
    problem(http.delete("/v1/cursors/c1"), 404, "NotFound")

    made = http.post("/v1/subscriptions", json={"queue": f"s-{topic}", "filter": "e.type = 'x'", "topics": [topic]})
    assert made.status_code == 201, made.text
    listed = http.get("/v1/subscriptions", params={"queue": f"s-{topic}"}).json()["subscriptions"]
    assert [(one["id"], one["filter"], one["set_aside"]) for one in listed] == [
        (made.json()["id"], "e.type = 'x'", False)
    ]
    bad = http.post("/v1/subscriptions", json={"queue": f"s-{topic}", "filter": "drop table x"})
    problem(bad, 400, "InvalidRequest")
    assert http.delete(f"/v1/subscriptions/s-{topic}/{made.json()['id']}").status_code == 200
    problem(http.delete(f"/v1/subscriptions/s-{topic}/{made.json()['id']}"), 404, "QueueNotFound")

    far = "2999-01-01T00:00:00Z"
    waits = http.post("/v1/schedules", json={"topic": topic, "deliver_at": far, "data": "later"}).json()["id"]
    also = http.post(f"/v1/topics/{topic}/events", json={"data": "too", "deliver_at": far}).json()
    assert also == {"positions": [None]}
    listed = http.get("/v1/schedules", params={"topic": topic}).json()["schedules"]
    assert len(listed) == 2
    moved = http.patch(f"/v1/schedules/{waits}", json={"deliver_at": "2026-01-01T00:00:00Z"})
    assert moved.status_code == 200
    # The server does its share of the maintenance: what is due enters the log.
    until(lambda: [event.data for event in log.read(topic)] == [1, "later"])
    other = next(one["id"] for one in listed if one["id"] != waits)
    assert http.delete(f"/v1/schedules/{other}").json() == {"deleted": True}
    problem(http.delete(f"/v1/schedules/{other}"), 404, "NotFound")

    cron = {"name": f"p-{topic}", "cron": "0 0 1 1 *", "topic": topic, "data": 1}
    assert http.post("/v1/cron-schedules", json=cron).status_code == 201
    problem(http.post("/v1/cron-schedules", json={**cron, "cron": "nonsense"}), 400, "InvalidRequest")
    assert http.patch(f"/v1/cron-schedules/p-{topic}", json={"paused": True}).json() == {"paused": True}
    assert [one["paused"] for one in http.get("/v1/cron-schedules").json()["cron_schedules"]] == [True]
    assert http.delete(f"/v1/cron-schedules/p-{topic}").json() == {"deleted": True}
    problem(http.delete(f"/v1/cron-schedules/p-{topic}"), 404, "NotFound")


def test_an_event_store_is_appended_to_under_a_condition(http: httpx.Client, topic: str) -> None:
    store = f"store-{topic}"
    assert http.post("/v1/topics", json={"name": store, "event_store": True}).json()["event_store"] is True
    query = {"items": [{"types": ["Planned"], "tags": ["course:c1"]}]}
    event = {"type": "Planned", "tags": ["course:c1"], "data": {"seats": 3}}
    append = {"events": [event], "condition": {"query": query}}
    (position,) = http.post(f"/v1/stores/{store}/append", json=append).json()["positions"]
    told = problem(http.post(f"/v1/stores/{store}/append", json=append), 409, "AppendConflict")
    assert told["actual_position"] == position
    append["condition"] = {"query": query, "after": position}
    assert http.post(f"/v1/stores/{store}/append", json=append).status_code == 200
    read = http.post(f"/v1/stores/{store}/read", json={"query": query, "backwards": True, "limit": 1}).json()
    assert [(one["type"], one["tags"], one["data"]) for one in read["events"]] == [
        ("Planned", ["course:c1"], {"seats": 3})
    ]
    assert http.post(f"/v1/stores/{store}/count", json={"query": {"items": [{"fields": {"seats": 3}}]}}).json() == {
        "count": 2
    }
    latest = http.post(f"/v1/stores/{store}/latest", json={"query": {"items": [{"tags": ["none"]}, {}]}}).json()
    assert latest["events"][0] is None
    assert latest["position"] == latest["events"][1]["position"]
    problem(http.post(f"/v1/stores/{topic}/read", json={}), 400, "InvalidRequest")


def test_the_routes_of_dcb_events_answer_as_its_suite_expects(http: httpx.Client, topic: str) -> None:
    store = f"dcb-{topic}"
    http.post("/v1/topics", json={"name": store, "event_store": True})
    query = {"items": [{"types": ["A"], "tags": ["t:1"]}]}
    body = {
        "events": {"type": "A", "data": '{"x": 1}', "tags": ["t:1"]},
        "condition": {"failIfEventsMatch": query},
    }
    first = http.post(f"/dcb/{store}/append", json=body).json()
    assert first["appendConditionFailed"] is False
    assert first["durationInMicroseconds"] > 0
    assert http.post(f"/dcb/{store}/append", json=body).json()["appendConditionFailed"] is True
    found = http.get(f"/dcb/{store}/read", params={"query": json.dumps(query)}).json()
    assert [(one["type"], one["data"], one["tags"]) for one in found] == [("A", '{"x": 1}', ["t:1"])]
    body["condition"] = {"failIfEventsMatch": query, "after": found[-1]["position"]}
    body["events"] = [{"type": "A", "data": "not json", "tags": ["t:1"]}]  # type: ignore[assignment]
    assert http.post(f"/dcb/{store}/append", json=body).json()["appendConditionFailed"] is False
    last = http.get(
        f"/dcb/{store}/read", params={"query": "{}", "options": json.dumps({"backwards": True, "limit": 1})}
    ).json()
    assert [one["data"] for one in last] == ["not json"]
    measured = http.post(f"/dcb/{store}/read", json={"query": query}).json()
    assert measured["numberOfMatchingEvents"] == 2
    problem(http.get(f"/dcb/{store}/read", params={"query": "[1"}), 400, "InvalidRequest")


HOSTILE = [
    (b"", 422),
    (b"{", 400),
    (b'{"data": NaN}', 400),
    (b'{"data": Infinity}', 400),
    (b'{"data": 1e400000}', 400),
    (b'{"data": ' + b"9" * 5000 + b"}", 400),
    (b'{"data": "\\ud800"}', 400),
    (b'{"data": "\\u0000"}', 400),
    (b'{"key": "\\u0000", "data": 1}', 200),
    (b'{"type": "\\u0000", "data": 1}', 400),
    (b'{"headers": {"a": "\\u0000"}}', 400),
    (b'{"headers": {"a": 1e400}}', 400),
    (b'{"event_id": "\\u0000"}', 400),
    (b'{"data": "\xff"}', 400),
    (b"\xff\xfe", 400),
    (b"[" * 100_000, 400),
    (b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    (b'{"data": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", 400),
    (b"[]", 422),
    (b"null", 422),
    (b'"text"', 422),
    (b'{"events": []}', 422),
    (b'{"events": {}}', 422),
    (b'{"data": 1, "surprise": 2}', 422),
    (b'{"partition": 99999999999999999999}', 422),
    (b'{"partition": true}', 422),
    (b'{"type": 5}', 422),
    (b'{"type": ""}', 422),
    (b'{"base64": "!!"}', 400),
    (b'{"deliver_at": "0001-01-01T00:00:00+14:00"}', 422),
    (b'{"deliver_at": 5}', 422),
    (b'{"deliver_at": "2026-01-01T00:00:00"}', 422),
]


@pytest.mark.parametrize(("body", "status"), HOSTILE, ids=[body[:30].decode("latin-1") for body, _ in HOSTILE])
def test_hostile_bodies_are_refused_and_leave_nothing(
    http: httpx.Client, log: headwater.Headwater, topic: str, body: bytes, status: int
) -> None:
    response = http.post(f"/v1/topics/{topic}/events", content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    if status != 200:
        assert response.headers["content-type"] == "application/problem+json"
        assert "Traceback" not in response.text
        assert log.read(topic) == []


def test_what_is_in_paths_queries_and_headers_is_not_trusted(
    http: httpx.Client, log: headwater.Headwater, topic: str
) -> None:
    for path in (
        "/v1/topics/%00",
        "/v1/topics/%ff%fe",
        "/v1/topics/..%2f..%2fetc%2fpasswd",
        "/v1/queues/%00/dead",
        "/v1/queues/x'%3b drop table headwater_internal.event%3b--",
        "/v1/subscriptions?queue=%00",
        "/v1/schedules?topic=%00",
        "/v1/events?topic=%00",
        "/v1/events?type=%00",
        "/v1/events?header.%00=%00",
        "/v1/events/-1",
        "/v1/events/99999999999999999999999",
        "/v1/kafka/queues/%00",
        "/v1/pipelines/%00",
        "/v1/accounts/%00/keys",
        "/dcb/x/read?query=%00",
        "/v1/topics/x/follow?after=abc",
        "/nowhere",
        "/../../etc/passwd",
        "/console/",
        "/pages/",
    ):
        response = http.get(path)
        assert response.status_code in (200, 400, 404, 422), (path, response.text)
    problem(http.get(f"/v1/topics/{topic}/follow", headers={"last-event-id": "x"}), 400, "InvalidRequest")
    many = http.get("/v1/events?" + "&".join(f"header.{n}=1" for n in range(30)))
    problem(many, 400, "InvalidRequest")
    problem(http.put("/v1/topics", json={}), 405, "WrongMethod")
    posted = http.post(f"/v1/topics/{topic}/events", content=b'{"data": 1}', headers={"content-type": "text/plain"})
    problem(posted, 415, "NotJson")
    injected = http.post(f"/v1/topics/{topic}/events", json={"type": "a\r\nid: 99\r\ndata: x", "data": 1})
    assert injected.status_code == 200


def raw(address: str, data: bytes) -> bytes:
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(data)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def test_broken_http_is_refused(address: str, http: httpx.Client) -> None:
    for data in (
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /\xff\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"POST /v1/topics HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    ):
        answer = raw(address, data)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"application/problem+json" in answer
    # A head without an end.
    assert raw(address, b"GET / HTTP/1.1\r\nX: " + b"x" * 140_000).startswith(b"HTTP/1.1 400")
    # Whoever leaves in the middle leaves nothing behind.
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/topics HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"name": "half-sent"'
        )
    problem(http.get("/v1/topics/half-sent"), 404, "TopicNotFound")


def test_a_body_above_the_limit_is_refused_while_it_comes(address: str, http: httpx.Client, topic: str) -> None:
    large = {"data": "x" * (MAX_BODY + 1000)}
    told = problem(http.post(f"/v1/topics/{topic}/events", json=large), 413, "BodyTooLarge")
    assert told["limit"] == MAX_BODY

    # One that never says how long it is, and never ends.
    host, _, port = address.removeprefix("http://").partition(":")
    part = b"x" * 65536
    with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
        connection.sendall(
            f"POST /v1/topics/{topic}/events HTTP/1.1\r\nHost: {host}:{port}\r\n"
            "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        for _ in range(MAX_BODY // len(part) + 2):
            connection.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_pipeline_is_told_of_with_its_last_batches(http: httpx.Client, log: headwater.Headwater, topic: str) -> None:
    name = f"p-{topic}"
    problem(http.get(f"/v1/pipelines/{name}/batches"), 404, "PipelineNotFound")
    claim = pipeline_runs.claim_pipeline(
        name, "runner", lease=timedelta(seconds=60), source="log", definition={"to": {}}, start=True
    )
    token = log.run(claim).token
    assert token is not None
    assert http.get(f"/v1/pipelines/{name}/batches").json() == {"batches": []}
    log.run(pipeline_runs.record_batch(name, token, checkpoint=3, rows=7, details={"seconds": 1.5, "checkpoint": 3}))
    log.run(pipeline_runs.record_failure(name, token, "no luck"))
    failed, done = http.get(f"/v1/pipelines/{name}/batches").json()["batches"]
    assert (failed["rows"], failed["seconds"], failed["details"], failed["error"]) == (0, None, None, "no luck")
    assert (done["rows"], done["seconds"], done["details"]["checkpoint"], done["error"]) == (7, 1.5, 3, None)
    assert http.get(f"/v1/pipelines/{name}").json()["state"] == "failing"


def test_another_site_cannot_use_the_server_through_a_browser(http: httpx.Client, topic: str) -> None:
    body = {"data": 1}
    foreign = http.post(f"/v1/topics/{topic}/events", json=body, headers={"origin": "https://evil.example"})
    problem(foreign, 403, "ForeignOrigin")
    own = http.post(f"/v1/topics/{topic}/events", json=body, headers={"origin": str(http.base_url).rstrip("/")})
    assert own.status_code == 200
    rebound = http.get("/v1/topics", headers={"host": "evil.example"})
    problem(rebound, 421, "Misdirected")
    assert http.get("/v1/topics", headers={"host": "localhost:1"}).status_code == 200


def test_the_console_and_the_description_are_served(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    again = http.get("/", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert http.get("/docs").text.count("<h2") > 40
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            assert route["x-headwater-permission"], (path, method)
    assert http.get("/health").json() == {"status": "alive"}
    assert http.get("/ready").status_code in (200, 503)
    assert http.get("/metrics").status_code in (200, 503)


def test_too_many_requests_of_one_caller_are_told_so(dsn: str) -> None:
    with (
        http_server(dsn, limits=ServerLimits(requests_per_second=0.01)) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client,
    ):
        codes = [client.get("/v1/me").status_code for _ in range(12)]
        assert codes == [200] * 10 + [429] * 2
        assert client.get("/health").status_code == 429


def test_a_request_that_takes_too_long_is_ended(
    dsn: str, connection: psycopg.Connection, log: headwater.Headwater
) -> None:
    store = log.create_topic("locked", kind="sequenced").name
    with (
        http_server(dsn, limits=ServerLimits(request_seconds=0.5)) as address,
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client,
        connection.transaction(),
    ):
        connection.execute("select headwater.publish('locked', '1')")
        problem(client.post(f"/v1/topics/{store}/events", json={"data": 1}), 504, "RequestTimeout")
    assert [event.data for event in log.read(store)] == [1]


def test_a_server_that_is_killed_leaves_no_half_and_a_repeat_completes_the_rest(
    dsn: str, log: headwater.Headwater, topic: str
) -> None:
    batches = {f"batch-{n}": {"events": [{"data": [n, m]} for m in range(50)]} for n in range(40)}
    sent: list[str] = []

    def send(address: str, keys: list[str]) -> None:
        with httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client:
            for key in keys:
                sent.append(key)
                path = f"/v1/topics/{topic}/events"
                assert client.post(path, json=batches[key], headers={"idempotency-key": key}).status_code == 200

    def until_it_dies(address: str) -> None:
        with contextlib.suppress(httpx.TransportError):
            send(address, list(batches))

    with http_process(dsn) as (address, process):
        sending = threading.Thread(target=until_it_dies, args=(address,))
        sending.start()
        while len(sent) < 5:
            assert sending.is_alive()
        process.kill()
        sending.join(PATIENCE_SECONDS)
    found = [event.data for event in log.read(topic, batch_size=5000)]
    assert len(found) % 50 == 0
    assert 4 * 50 <= len(found) <= len(sent) * 50
    with http_process(dsn) as (address, _):
        send(address, list(batches))
    found = [event.data for event in log.read(topic, batch_size=5000)]
    assert sorted(found) == [[n, m] for n in range(40) for m in range(50)]
