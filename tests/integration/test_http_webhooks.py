"""Are webhooks made, tried, steered and delivered by a server alone, over HTTP?"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook as Signature

import headwater
from http_server import http_process
from patience import PATIENCE_SECONDS
from webhook_receiver import Receiver


@pytest.fixture(scope="module")
def http(dsn: str) -> Iterator[httpx.Client]:
    with (
        http_process(dsn, "--webhooks", "--allow-network", "127.0.0.1") as (address, _),
        httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client,
    ):
        yield client


def test_a_server_delivers_what_is_bound_signed_by_the_secret_that_it_told_once(
    http: httpx.Client, log: headwater.Headwater, topic: str, until: Callable[[Callable[[], Any]], Any]
) -> None:
    log.publish(topic, "before")
    with Receiver() as receiver:
        made = http.post("/v1/webhooks", json={"name": topic, "url": receiver.url, "bindings": [{"topic": topic}]})
        assert made.status_code == 201, made.text
        secret = made.json()["secret"]
        log.publish(topic, {"number": 1})
        until(lambda: len(receiver.received) == 1)
        (got,) = receiver.received
        assert got.data == {"number": 1}
        Signature(secret).verify(got.body, got.headers)
        for answer in (http.get("/v1/webhooks"), http.get(f"/v1/webhooks/{topic}")):
            assert answer.status_code == 200
            assert secret not in answer.text

        tested = http.post(f"/v1/webhooks/{topic}/test").json()
        assert (tested["accepted"], tested["status"]) == (True, 200)

        rotated = http.post(f"/v1/webhooks/{topic}/secret").json()["secret"]
        assert rotated != secret
        until(lambda: http.post(f"/v1/webhooks/{topic}/test").json()["accepted"])
        # Receivers change over when they can: both secrets sign.
        for one in (secret, rotated):
            Signature(one).verify(receiver.received[-1].body, receiver.received[-1].headers)
        assert (
            http.patch(f"/v1/webhooks/{topic}", json={"timeout_seconds": 3, "max_concurrency": 2}).json()[
                "max_concurrency"
            ]
            == 2
        )
        assert http.post(f"/v1/webhooks/{topic}/pause", json={"reason": "holiday"}).json()["state_reason"] == "holiday"
        assert http.post(f"/v1/webhooks/{topic}/resume").json()["state"] == "active"
        http.post(f"/v1/webhooks/{topic}/pause")
    # What was not sent yet is told before it is too late.
    until(lambda: http.delete(f"/v1/webhooks/{topic}?dry_run=true").json()["events"] == 0)
    late = log.publish(topic, "late")
    would = {"events": 1, "events_is_more": False, "first": late, "last": late}
    assert http.delete(f"/v1/webhooks/{topic}?dry_run=true").json() == {**would, "deleted": False}
    assert http.delete(f"/v1/webhooks/{topic}").json() == {**would, "deleted": True}
    assert http.get(f"/v1/webhooks/{topic}").status_code == 404
    noted = [event.data for event in log.read("headwater.audit") if event.data["subject"] == topic]
    assert [one["action"] for one in noted] == [
        f"webhook.{action}" for action in ("create", "rotate_secret", "alter", "pause", "resume", "pause", "delete")
    ]
    raw = base64.b64decode(secret.removeprefix("whsec_"))
    assert not [one for one in noted if secret in str(one) or raw.hex() in str(one)]


def test_a_token_in_a_url_is_not_written_down(http: httpx.Client, log: headwater.Headwater, topic: str) -> None:
    url = "https://a.example/hooks?token=hush#hush"
    assert (
        http.post("/v1/webhooks", json={"name": topic, "url": url, "bindings": [{"topic": topic}]}).status_code == 201
    )
    assert http.patch(f"/v1/webhooks/{topic}", json={"url": f"{url}-2"}).json()["url"] == f"{url}-2"
    http.delete(f"/v1/webhooks/{topic}")
    told = [event.data["detail"] for event in log.read("headwater.audit") if event.data["subject"] == topic]
    assert [one.get("url") for one in told] == ["https://a.example/hooks", "https://a.example/hooks", None]
    assert "hush" not in str(told)


def test_what_cannot_be_a_webhook_leaves_no_queue_behind(http: httpx.Client, log: headwater.Headwater) -> None:
    for url in ("ftp://a.example/", "https://user:secret@a.example/", "not a url"):
        refused = http.post("/v1/webhooks", json={"name": "refused", "url": url})
        assert refused.status_code == 400, refused.text
        assert refused.headers["content-type"] == "application/problem+json"
    assert "refused" not in [queue.name for queue in log.queues()]
    refused = http.post(
        "/v1/webhooks", json={"name": "refused", "url": "https://a.example/", "bindings": [{"topic": "nowhere"}]}
    )
    assert refused.status_code == 404
    assert "refused" not in [queue.name for queue in log.queues()]
