"""Does `headwater webhook` make, show, change, try and end webhooks as its help says?"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from typer.testing import Result

import headwater
from webhook_receiver import Receiver


@pytest.fixture
def run(run: Any) -> Any:
    """Runs a command about webhooks."""
    return partial(run, "webhook")


def document(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_life_of_a_webhook(run: Any, log: headwater.Headwater, topic: str) -> None:
    log.publish(topic, 1)
    made = document(run("create", topic, "https://a.example/in", "--topic", topic, "--header", "x-a=b", "--json"))
    secret = made["secret"]
    assert secret.startswith("whsec_")
    assert (made["url"], made["queue"], made["headers"]) == ("https://a.example/in", topic, {"x-a": "b"})
    assert log.queue(topic).max_attempts == 10

    listed = run("list")
    assert topic in listed.stdout
    assert "https://a.example/in" in listed.stdout
    for arguments in (("list",), ("show", topic), ("list", "--json"), ("show", topic, "--json")):
        assert secret not in run(*arguments).output
    shown = document(run("show", topic, "--secrets", "--json"))
    assert shown["secrets"] == [secret]
    assert shown["progress"]["ready"] == 1
    assert secret in run("show", topic, "--secrets").stdout

    changed = document(
        run("update", topic, "--url", "https://b.example/", "--client-errors", "dead", "--no-headers", "--json")
    )
    assert (changed["url"], changed["client_errors"], changed["headers"]) == ("https://b.example/", "dead", {})
    assert document(run("pause", topic, "--reason", "holiday", "--json"))["state_reason"] == "holiday"
    assert document(run("resume", topic, "--json"))["state"] == "active"

    rotated = run("rotate-secret", topic)
    assert "--end-old" in rotated.stderr
    new = log.webhook(topic).secrets[0]
    assert log.webhook(topic).secrets == (new, secret)
    assert new in rotated.stdout
    assert document(run("rotate-secret", topic, "--end-old", "--json"))["secret"] == new
    assert log.webhook(topic).secrets == (new,)

    refused = run("delete", topic)
    assert refused.exit_code == 2
    assert "1 events are not sent" in refused.stderr
    assert document(run("delete", topic, "--yes", "--with-queue", "--json")) == {
        "deleted": topic,
        "queue_deleted": True,
    }
    assert topic not in [one.name for one in log.queues()]
    assert run("show", topic).exit_code == 4


def test_a_webhook_without_its_queue_leaves_it_and_says_so(run: Any, log: headwater.Headwater, topic: str) -> None:
    log.create_queue(topic, topic)
    assert run("create", topic, "https://a.example/", "--queue", topic).exit_code == 0
    ended = run("delete", topic, "--yes")
    assert f"headwater queue delete {topic}" in ended.stderr
    assert log.queue(topic).name == topic
    bound = run("create", f"{topic}-2", "https://a.example/")
    assert "no bindings" in bound.stderr


def test_what_is_wrong_is_said_with_its_code(run: Any, topic: str) -> None:
    refused = run("create", topic, "file:///etc/passwd", "--topic", topic)
    assert (refused.exit_code, refused.stderr.startswith("error: a url is http(s)://, a host without")) == (3, True)
    assert run("create", topic, "https://a.example/", "--topic", f"no-{topic}").exit_code == 4
    assert run("update", topic, "--url", "https://a.example/").exit_code == 4
    assert run("update", topic, "--header", "a=b", "--no-headers").exit_code == 2
    assert run("deliver", "--allow-network", "everything").exit_code == 3
    assert run("create", topic, "https://a.example/", "--topic", topic).exit_code == 0
    assert run("create", topic, "https://a.example/", "--topic", topic).exit_code == 5


def test_a_webhook_is_tried_out(run: Any, topic: str) -> None:
    with Receiver() as receiver:
        document(run("create", topic, receiver.url, "--topic", topic, "--json"))
        refused = run("test", topic)
        assert refused.exit_code == 3
        assert "not allowed unless" in refused.stderr
        assert receiver.connections == 0
        tested = document(run("test", topic, "--allow-network", "127.0.0.0/8", "--json"))
        assert (tested["accepted"], tested["status"]) == (True, 200)
        assert receiver.received[0].id == tested["message_id"]
        assert "latency ms" in run("test", topic, "--allow-network", "127.0.0.1").stdout
