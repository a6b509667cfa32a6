"""Is what a webhook sends what the scheme asks for, and is every response, and every address, judged correctly?"""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import Any

import pytest

from headwater.errors import InvalidRequest
from headwater.log.model import Event
from headwater.queue.model import Dead, Retry
from headwater.webhooks.addresses import may_reach, networks
from headwater.webhooks.model import Webhook
from headwater.webhooks.requests import (
    ReceiverGone,
    WebhookResponse,
    judge,
    message_id,
    parse_retry_after,
    request_for,
    signatures,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def webhook(**changed: Any) -> Webhook:
    settings: dict[str, Any] = {
        "id": 1, "name": "w", "queue": "g", "url": "https://a.example/", "headers": {}, "body": "envelope",
        "timeout_seconds": 15.0, "max_concurrency": 10, "rate_per_second": None, "gzip_above_bytes": None,
        "client_errors": "retry", "state": "active", "state_reason": None, "created_at": NOW, "updated_at": NOW,
        "uid": "0a" * 16, "version": 1, "secrets": (SECRET,),
    }  # fmt: skip
    return Webhook(**{**settings, **changed})


def event(payload: bytes | None, content_type: str | None = "application/json", **changed: Any) -> Event:
    made = Event(7, "orders", 0, None, b"k", "T", None, None, content_type, payload, None, NOW)
    return made._replace(**changed)


def test_a_signature_is_the_one_that_the_scheme_gives_as_its_example() -> None:
    signed = signatures([SECRET], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_every_secret_signs() -> None:
    other = "whsec_" + base64.b64encode(b"o" * 24).decode()
    both = signatures([SECRET, other], "i", 1, b"b")
    assert both == f"{signatures([SECRET], 'i', 1, b'b')} {signatures([other], 'i', 1, b'b')}"


def test_an_event_has_one_id_for_a_webhook_and_another_for_every_other() -> None:
    assert message_id(webhook(), 7) == message_id(webhook(version=2, url="https://b.example"), 7)
    assert message_id(webhook(), 7) not in (message_id(webhook(), 8), message_id(webhook(uid="0b" * 16), 7))
    assert "." not in message_id(webhook(), 7)


def test_what_no_header_can_hold_is_escaped() -> None:
    raw = webhook(body="raw", headers={"X-A": "b"})
    headers = dict(request_for(raw, event(b"x", "te\nxt", key=b"a\r\nb\xff", type="ü"), "i", now=NOW).headers)
    assert headers["headwater-key"] == "a%0D%0Ab%FF"
    assert headers["headwater-type"] == "%C3%BC"
    assert headers["content-type"] == "application/octet-stream"
    assert headers["X-A"] == "b"
    assert all(value.isascii() and value.isprintable() for value in headers.values())


def test_the_trace_of_an_event_is_sent_along_if_it_can_be_read() -> None:
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"

    def sent(named: Any, **settings: Any) -> dict[str, str]:
        about = event(b"1")._replace(headers=named)
        headers = dict(request_for(webhook(**settings), about, "i", now=NOW).headers)
        return {name: value for name, value in headers.items() if name.startswith("trace")}

    assert sent({"traceparent": parent, "tracestate": "a=1"}) == {"traceparent": parent, "tracestate": "a=1"}
    assert sent({"traceparent": parent, "tracestate": "a\r\nx: y"}) == {"traceparent": parent}
    assert sent({"traceparent": parent}, headers={"traceparent": "own"}) == {"traceparent": "own"}
    for unreadable in (None, {}, {"traceparent": 7}, {"traceparent": f"{parent}\r\nx: y"}, {"tracestate": "a=1"}):
        assert sent(unreadable) == {}


@pytest.mark.parametrize(
    ("status", "on_retry", "on_dead"),
    [
        (200, "done", "done"),
        (204, "done", "done"),
        (299, "done", "done"),
        (302, "retry", "retry"),
        (400, "retry", "dead"),
        (401, "retry", "dead"),
        (404, "retry", "dead"),
        (408, "retry", "retry"),
        (410, "gone", "gone"),
        (422, "dead", "dead"),
        (425, "retry", "retry"),
        (429, "retry", "retry"),
        (500, "retry", "retry"),
        (503, "retry", "retry"),
        (None, "retry", "retry"),
        (199, "retry", "retry"),
    ],
)
def test_each_status_means_what_is_set(status: int | None, on_retry: str, on_dead: str) -> None:
    kinds = {type(None): "done", Retry: "retry", Dead: "dead", ReceiverGone: "gone"}
    answer = WebhookResponse(status, body=b"why\n\x1b[0m not")
    for client_errors, expected in (("retry", on_retry), ("dead", on_dead)):
        outcome = judge(webhook(client_errors=client_errors), answer, now=NOW)
        assert kinds[type(outcome)] == expected
        if status is not None and outcome is not None:
            assert "why [0m not" in outcome.reason


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        (" 120 ", 120),
        ("99999999999999999999", 86400),
        ("-5", None),
        ("soon", None),
        ("1.5", None),
        ("٣", None),
        ("", None),
        ("Sun, 01 Mar 2026 12:01:00 GMT", 60),
        ("Sun, 01 Mar 2026 11:00:00 GMT", 0),
        ("Sun, 01 Mar 2099 11:00:00 GMT", 86400),
    ],
)
def test_a_pause_is_read_in_seconds_or_as_a_date_and_has_an_end(text: str, seconds: int | None) -> None:
    expected = None if seconds is None else timedelta(seconds=seconds)
    assert parse_retry_after(text, now=NOW) == expected
    for status in (429, 503):
        outcome = judge(webhook(), WebhookResponse(status, text), now=NOW)
        assert isinstance(outcome, Retry)
        assert outcome.after == expected
    other = judge(webhook(), WebhookResponse(500, text), now=NOW)
    assert isinstance(other, Retry)
    assert other.after is None


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "100.100.100.200", "192.0.0.192", "168.63.129.16", "224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1",
        "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "fe80::1", "fe80::1%eth0", "fc00::1",
        "fd00:ec2::254", "fec0::1", "ff02::1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::",
        "2001:0:4136:e378:8000:63bf:80ff:fffe", "2001:db8::1", "64:ff9b:1::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not may_reach(ip_address(address), ())


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "1.1.1.1", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_the_internet_may_be_reached(address: str) -> None:
    assert may_reach(ip_address(address), ())


def test_a_network_is_allowed_in_every_way_to_write_it_and_no_other_is() -> None:
    allowed = networks(["10.1.0.0/16", "fd00::1"])
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::a01:203", "fd00::1"):
        assert may_reach(ip_address(address), allowed)
    for address in ("10.2.0.1", "::ffff:10.2.0.1", "fd00::2", "127.0.0.1"):
        assert not may_reach(ip_address(address), allowed)
    with pytest.raises(InvalidRequest, match="invalid network"):
        networks(["10.1.0.0/99"])
