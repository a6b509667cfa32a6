"""Do webhooks arrive, signed, as often as they must and no faster than they may, at real receivers?"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook as Verifier
from standardwebhooks import WebhookVerificationError

import headwater
from headwater import NewEvent, aio
from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import WEBHOOK_REQUESTS
from headwater.webhooks.addresses import networks
from headwater.webhooks.deliver import dispatching, send_test
from headwater.webhooks.model import WebhookTest
from headwater.webhooks.requests import WebhookRequest, WebhookResponse
from headwater.webhooks.sender import Sender
from patience import PATIENCE_SECONDS
from webhook_receiver import Received, Receiver, Reply

Until = Callable[[Callable[[], Any]], Any]
HERE = networks(["127.0.0.1"])


@contextmanager
def delivering(dsn: str, **options: Any) -> Iterator[None]:
    """A dispatcher in a thread of its own, until the end of the block: then it stops gracefully."""
    started, stop = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    async def main() -> None:
        chosen = {"allowed": HERE, "refresh_seconds": 0.05, "grace_seconds": 5.0, **options}
        async with await aio.connect(dsn) as log, dispatching(log, **chosen):
            started.set()
            await asyncio.to_thread(stop.wait, 60)

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(PATIENCE_SECONDS)
    try:
        yield
    finally:
        stop.set()
        thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert failures == []


@pytest.fixture(autouse=True)
def _forget_webhooks(log: headwater.Headwater) -> Iterator[None]:
    """A dispatcher delivers every webhook of the log: each test has only its own."""
    yield
    for one in log.webhooks():
        log.delete_webhook(one.name, with_queue=True)


def counts(log: headwater.Headwater, queue: str) -> tuple[int, int, int, int, int]:
    """Ready, processing, retrying, dead, done."""
    (one,) = [one for one in log.queues() if one.name == queue]
    return one.ready, one.processing, one.retrying, one.dead, one.done


def answering(*replies: Reply | None) -> Callable[[Received], Any]:
    """Answers with these in turn, and from then on with the last."""
    left = list(replies)

    async def respond(received: Received) -> Reply | None:
        return left.pop(0) if len(left) > 1 else left[0]

    return respond


def verified(received: Received, secret: str) -> Any:
    """What the scheme's own library makes of a request."""
    body = gzip.decompress(received.body) if received.headers.get("content-encoding") == "gzip" else received.body
    return Verifier(secret).verify(body.decode(), received.headers)


def test_every_event_arrives_signed_with_all_that_is_known_about_it(
    log: headwater.Headwater, dsn: str, topic: str, until: Until
) -> None:
    with Receiver() as receiver:
        hook = log.create_webhook(topic, receiver.url, topic, headers={"Authorization": "Bearer x"})
        to_the_letter = b'{"n": 1.000000000000000000001, "n": 2e999999}'
        positions = log.publish_batch(
            topic,
            [
                NewEvent({"a": "ü"}, key="k", type="T", headers={"h": 1}, event_id="e-1", routing_key="a.b"),
                NewEvent(b"\xff\x00", content_type="image/png", key=b"\xfe"),
                NewEvent(to_the_letter, content_type=None),
                NewEvent(None),
            ],
        )
        with delivering(dsn):
            until(lambda: counts(log, topic) == (0, 0, 0, 0, 4))
    by_position = {one.position: one for one in receiver.received}
    assert sorted(by_position) == sorted(positions)
    assert len({one.id for one in receiver.received}) == 4
    assert {one.target for one in receiver.received} == {"/hook?a=1"}
    bodies = [verified(by_position[position], hook.secrets[0]) for position in positions]
    first = bodies[0]
    assert first == {
        "position": positions[0], "topic": topic, "partition": 0, "offset": None, "type": "T", "key": "k",
        "routing_key": "a.b", "headers": {"h": 1}, "content_type": "application/json", "event_id": "e-1",
        "published_at": first["published_at"], "data": {"a": "ü"},
    }  # fmt: skip
    assert by_position[positions[0]].headers["authorization"] == "Bearer x"
    assert by_position[positions[0]].headers["content-type"] == "application/json"
    assert bodies[1]["content_type"] == "image/png"
    assert base64.b64decode(bodies[1]["base64"]) == b"\xff\x00"
    assert base64.b64decode(bodies[1]["key_base64"]) == b"\xfe"
    assert to_the_letter in by_position[positions[2]].body
    assert bodies[3]["data"] is None
    tampered = Received("", {**receiver.received[0].headers}, receiver.received[0].body + b" ", 0)
    with pytest.raises(WebhookVerificationError):
        verified(tampered, hook.secrets[0])


def test_a_raw_body_is_the_payload_and_is_signed_before_it_is_compressed(
    log: headwater.Headwater, dsn: str, topic: str, until: Until
) -> None:
    with Receiver() as receiver:
        hook = log.create_webhook(topic, receiver.url, topic, body="raw", gzip_above_bytes=100)
        small, large, none = log.publish_batch(
            topic,
            [
                NewEvent(b"abc", content_type="text/plain", key="käse %", type="T"),
                NewEvent({"long": "x" * 200}),
                NewEvent(None),
            ],
        )
        with delivering(dsn):
            until(lambda: counts(log, topic)[4] == 3)
    by_position = {one.position: one for one in receiver.received}
    plain, packed = by_position[small], by_position[large]
    assert (plain.body, plain.headers["content-type"]) == (b"abc", "text/plain")
    assert "content-encoding" not in plain.headers
    assert plain.headers["headwater-key"] == "k%C3%A4se%20%25"
    assert (plain.headers["headwater-topic"], plain.headers["headwater-type"]) == (topic, "T")
    assert verified(packed, hook.secrets[0]) == {"long": "x" * 200}
    assert len(packed.body) < 100
    assert by_position[none].body == b""


def test_while_secrets_change_every_one_of_them_verifies(
    log: headwater.Headwater, dsn: str, topic: str, until: Until
) -> None:
    with Receiver() as receiver:
        old = log.create_webhook(topic, receiver.url, topic).secrets[0]
        both = log.rotate_webhook_secret(topic)
        new = both.secrets[0]
        assert both.secrets == (new, old)
        log.publish(topic, 1)
        with delivering(dsn):
            until(lambda: counts(log, topic)[4] == 1)
        assert log.rotate_webhook_secret(topic, secret=new, keep=0).secrets == (new,)
        log.publish(topic, 2)
        with delivering(dsn):
            until(lambda: counts(log, topic)[4] == 2)
    first, second = receiver.received
    for secret in (old, new):
        assert verified(first, secret)["data"] == 1
    assert verified(second, new)["data"] == 2
    with pytest.raises(WebhookVerificationError):
        verified(second, old)


@pytest.mark.parametrize(
    "failure",
    [Reply(500), Reply(301, {"location": "/elsewhere"}), None],
    ids=["500", "redirect", "cut"],
)
def test_what_failed_is_tried_again_under_the_same_id(
    log: headwater.Headwater, dsn: str, topic: str, until: Until, failure: Reply | None
) -> None:
    with Receiver(answering(failure, failure, Reply(204))) as receiver:
        log.create_webhook(topic, receiver.url, topic, backoff_seconds=0.01)
        log.publish(topic, "x")
        with delivering(dsn):
            until(lambda: counts(log, topic) == (0, 0, 0, 0, 1))
    assert [one.target for one in receiver.received] == ["/hook?a=1"] * 3
    assert len({one.id for one in receiver.received}) == 1


def test_what_fails_at_every_try_is_a_dead_letter_that_says_why(
    log: headwater.Headwater, dsn: str, topic: str, until: Until
) -> None:
    with Receiver(answering(Reply(500, body=b"no\x00 stock\n"))) as receiver:
        log.create_webhook(topic, receiver.url, topic, max_attempts=2, backoff_seconds=0.01)
        position = log.publish(topic, "x")
        with delivering(dsn):
            until(lambda: counts(log, topic)[3] == 1)
            (dead,) = log.dead_letters(topic)
            assert (dead.position, dead.attempts, dead.last_error) == (position, 2, "500: no stock")
            assert len(receiver.received) == 2
            receiver.respond = None
            assert log.redrive(topic) == 1
            until(lambda: counts(log, topic) == (0, 0, 0, 0, 1))
    assert len({one.id for one in receiver.received}) == 1
    sent = {labels: n for metric, labels, n in COUNTERS.samples() if metric is WEBHOOK_REQUESTS}
    assert {answer: n for (name, answer), n in sent.items() if name == topic} == {"5xx": 2, "2xx": 1}


def test_what_a_filter_matches_is_sent_signed_retried_and_ends_as_a_dead_letter(
    log: headwater.Headwater, dsn: str, topic: str, until: Until
) -> None:
    big = "e.topic = s.params ->> 'topic' and (e.data ->> 'cents')::int > (s.params ->> 'over')::int"
    refuse = threading.Event()

    async def respond(received: Received) -> Reply | None:
        fails = json.loads(received.body)["data"]["cents"] == 3000 and not refuse.is_set()
        return Reply(500, body=b"not now") if fails else Reply()

    with Receiver(respond) as receiver:
        made = log.create_webhook(
            f"big-{topic}",
            receiver.url,
            filter=big,
            params={"topic": topic, "over": 1000},
            max_attempts=2,
            backoff_seconds=0.01,
        )
        positions = log.publish_batch(topic, [NewEvent({"cents": cents}) for cents in (500, 2000, 3000, 4000)])
        with delivering(dsn):
            until(lambda: len(receiver.received) >= 4 and log.dead_letters(made.queue))
            (letter,) = log.dead_letters(made.queue)
            assert (letter.position, letter.attempts, letter.last_error) == (positions[2], 2, "500: not now")
            refuse.set()
            assert log.redrive(made.queue) == 1
            until(lambda: len(receiver.received) == 5)
    told = [(verified(one, made.secrets[0])["position"], one.id) for one in receiver.received]
    assert {position for position, _ in told} == set(positions[1:])
    # Every try of an event has its id, and no other event has.
    assert len(set(told)) == 3
    with pytest.raises(headwater.QueueExists):
        log.create_webhook(topic, receiver.url, topic)
        log.create_webhook(topic, receiver.url, filter="true")


@pytest.mark.parametrize(("status", "client_errors"), [(422, "retry"), (400, "dead"), (404, "dead")])
def test_what_the_receiver_will_never_take_is_dead_at_once(
    log: headwater.Headwater, dsn: str, topic: str, until: Until, status: int, client_errors: str
) -> None:
    with Receiver(answering(Reply(status))) as receiver:
        log.create_webhook(topic, receiver.url, topic, client_errors=client_errors)
        log.publish(topic, "x")
        with delivering(dsn):
            until(lambda: counts(log, topic) == (0, 0, 0, 1, 0))
    assert len(receiver.received) == 1
    assert log.dead_letters(topic)[0].last_error == str(status)


def test_a_receiver_that_is_gone_disables_its_webhook_and_nothing_is_lost(
    log: headwater.Headwater, dsn: str, topic: str, until: Until
) -> None:
    with Receiver(answering(Reply(410, body=b"moved away"))) as receiver:
        log.create_webhook(topic, receiver.url, topic, max_concurrency=1, max_attempts=1)
        log.publish_batch(topic, [NewEvent(n) for n in range(5)])
        with delivering(dsn):
            until(lambda: log.webhook(topic).state == "disabled")
            until(lambda: counts(log, topic) == (5, 0, 0, 0, 0))
            assert log.webhook(topic).state_reason == "the receiver responded with 410: moved away"
            assert len(receiver.received) == 1
            receiver.respond = None
            assert log.resume_webhook(topic).state_reason is None
            until(lambda: counts(log, topic) == (0, 0, 0, 0, 5))


def test_an_answer_of_gone_to_what_was_changed_meanwhile_disables_nothing(
    log: headwater.Headwater, dsn: str, topic: str, until: Until
) -> None:
    asked, changed = threading.Event(), asyncio.Event()

    async def respond(received: Received) -> Reply:
        asked.set()
        await changed.wait()
        return Reply(410)

    with Receiver(respond) as old, Receiver() as new:
        log.create_webhook(topic, old.url, topic)
        log.publish(topic, "x")
        with delivering(dsn):
            assert asked.wait(PATIENCE_SECONDS)
            log.alter_webhook(topic, url=new.url)
            old.call(changed.set)
            until(lambda: counts(log, topic) == (0, 0, 0, 0, 1))
        assert log.webhook(topic).state == "active"
        assert len(new.received) == 1


def test_a_receiver_that_asks_for_a_pause_gets_it(log: headwater.Headwater, dsn: str, topic: str, until: Until) -> None:
    with Receiver(answering(Reply(429, {"Retry-After": "1"}), Reply())) as receiver:
        log.create_webhook(topic, receiver.url, topic, backoff_seconds=0.01, max_concurrency=1)
        log.publish_batch(topic, [NewEvent(n) for n in range(3)])
        with delivering(dsn):
            until(lambda: counts(log, topic) == (0, 0, 0, 0, 3))
    refused, *later = receiver.received
    assert len(later) == 3
    # For all events, not for the one alone.
    assert all(one.at - refused.at >= 1.0 for one in later)


def test_an_event_is_not_tried_before_the_time_that_its_receiver_named(
    log: headwater.Headwater, dsn: str, topic: str, until: Until
) -> None:
    with Receiver(answering(Reply(503, {"retry-after": "1000"}))) as receiver:
        log.create_webhook(topic, receiver.url, topic, backoff_seconds=0.01)
        log.publish(topic, 1)
        with delivering(dsn):
            until(lambda: counts(log, topic) == (0, 0, 1, 0, 0))
    (waiting,) = log.deliveries(topic)
    assert waiting.run_at is not None
    assert waiting.run_at - datetime.now(UTC) > timedelta(seconds=900)


def test_a_receiver_that_hangs_or_is_dead_delays_no_other(
    log: headwater.Headwater, dsn: str, topic: str, until: Until
) -> None:
    async def hang(received: Received) -> None:
        await asyncio.Event().wait()

    with Receiver(hang) as hanging, Receiver() as fine, socket.socket() as nobody:
        # A port that takes connections and never a word.
        nobody.bind(("127.0.0.1", 0))
        nobody.listen(1)
        log.create_webhook(f"{topic}-hangs", hanging.url, topic, timeout_seconds=60, max_concurrency=50)
        log.create_webhook(f"{topic}-mute", f"http://127.0.0.1:{nobody.getsockname()[1]}/", topic, timeout_seconds=60)
        log.create_webhook(f"{topic}-fine", fine.url, topic)
        log.publish_batch(topic, [NewEvent(n) for n in range(100)])
        with delivering(dsn, grace_seconds=0.1):
            until(lambda: counts(log, f"{topic}-fine") == (0, 0, 0, 0, 100))
            until(lambda: len(hanging.received) == 50)
            assert counts(log, f"{topic}-hangs")[4] == 0
        # What had no answer when it was time to stop is given back, and no try of it is counted.
        assert counts(log, f"{topic}-hangs") == (100, 0, 0, 0, 0)
        assert all(one.attempts == 0 for one in log.deliveries(f"{topic}-hangs"))


def test_an_answer_that_never_comes_is_a_failed_try(
    log: headwater.Headwater, dsn: str, topic: str, until: Until
) -> None:
    async def hang_once(received: Received) -> Reply:
        if len(receiver.received) == 1:
            await asyncio.Event().wait()
        return Reply()

    with Receiver(hang_once) as receiver:
        log.create_webhook(topic, receiver.url, topic, timeout_seconds=0.2, max_attempts=1)
        log.publish(topic, 1)
        with delivering(dsn):
            until(lambda: counts(log, topic)[3] == 1)
    assert log.dead_letters(topic)[0].last_error == "no response within 0.2 s"


@pytest.mark.parametrize("reply", [Reply(200, body=b"x" * 5_000_000), Reply(200, drip=True)], ids=["huge", "drip"])
def test_a_status_is_an_answer_however_long_its_body(
    log: headwater.Headwater, dsn: str, topic: str, until: Until, reply: Reply
) -> None:
    with Receiver(answering(reply)) as receiver:
        log.create_webhook(topic, receiver.url, topic, max_attempts=1, timeout_seconds=60)
        log.publish_batch(topic, [NewEvent(n) for n in range(4)])
        with delivering(dsn):
            until(lambda: counts(log, topic) == (0, 0, 0, 0, 4))
    assert len(receiver.received) == 4


@pytest.mark.parametrize("hang_up", [False, True])
def test_connections_are_kept_and_one_that_was_closed_costs_no_try(
    log: headwater.Headwater, dsn: str, topic: str, until: Until, hang_up: bool
) -> None:
    with Receiver(answering(Reply(hang_up=hang_up))) as receiver:
        log.create_webhook(topic, receiver.url, topic, max_attempts=1, max_concurrency=2)
        log.publish_batch(topic, [NewEvent(n) for n in range(30)])
        with delivering(dsn):
            until(lambda: sum(counts(log, topic)[3:]) == 30)
    assert counts(log, topic) == (0, 0, 0, 0, 30)
    assert receiver.connections == 30 if hang_up else receiver.connections <= 2


def test_a_name_that_is_never_resolved_delays_no_other_webhook(
    log: headwater.Headwater, dsn: str, topic: str, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, enough = socket.getaddrinfo, threading.Event()

    def slow(host: Any, *arguments: Any, **options: Any) -> Any:
        if host == "slow.test":
            enough.wait(PATIENCE_SECONDS)
            raise OSError("nobody knows")
        return real(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    # More of them than asyncio has threads for all lookups together.
    many = (os.cpu_count() or 1) + 8
    with Receiver() as receiver:
        for number in range(many):
            log.create_webhook(f"{topic}-{number}", "http://slow.test/", topic)
        log.publish(topic, 1)
        try:
            with delivering(dsn, grace_seconds=0.1):
                until(lambda: all(counts(log, f"{topic}-{number}")[1] for number in range(many)))
                log.create_webhook(topic, receiver.url.replace("127.0.0.1", "localhost"), topic)
                until(lambda: counts(log, topic) == (0, 0, 0, 0, 1))
        finally:
            enough.set()


def test_of_an_endless_body_only_the_beginning_is_kept(log: headwater.Headwater, topic: str) -> None:
    async def sent(url: str) -> WebhookResponse:
        hook = log.create_webhook(topic, url, topic)
        sender = Sender(hook, allowed=HERE, tls=ssl.create_default_context())
        try:
            return await sender.send(WebhookRequest((), b"{}"))
        finally:
            sender.close()

    with Receiver(answering(Reply(500, body=b"x" * 1_000_000))) as receiver:
        answer = asyncio.run(sent(receiver.url))
    assert (answer.status, len(answer.body), len(answer.excerpt)) == (500, 16_384, 500)


def test_limits_hold_over_all_processes(log: headwater.Headwater, dsn: str, topic: str, until: Until) -> None:
    events, rate = 120, 40.0

    async def respond(received: Received) -> Reply:
        await asyncio.sleep(0.02)
        return Reply()

    with Receiver(respond) as wide, Receiver(respond) as paced, ExitStack() as stack:
        log.create_webhook(f"{topic}-wide", wide.url, topic, max_concurrency=3)
        log.create_webhook(f"{topic}-paced", paced.url, topic, rate_per_second=rate)
        log.publish_batch(topic, [NewEvent(n) for n in range(events)])
        started = time.monotonic()
        for number in range(2):
            stack.enter_context(delivering(dsn, name=f"process-{number}"))
        for name in (f"{topic}-wide", f"{topic}-paced"):
            until(lambda name=name: counts(log, name) == (0, 0, 0, 0, events))  # type: ignore[misc]
    assert 1 < wide.most_at_once <= 3
    assert sorted(one.data for one in wide.received) == list(range(events))
    times = [one.at for one in paced.received]
    assert len(times) == events
    # From before the first delivery to the last one: a busy machine only makes it longer.
    assert max(times) - started >= (events - 1) / rate


def test_events_of_a_key_arrive_in_order_though_one_fails(
    log: headwater.Headwater, dsn: str, topic: str, until: Until
) -> None:
    async def respond(received: Received) -> Reply:
        tries = [one for one in receiver.received if one.position == received.position]
        return Reply(500 if received.data % 7 == 0 and len(tries) == 1 else 200)

    with Receiver(respond) as receiver:
        log.create_webhook(topic, receiver.url, topic, ordered_keys=True, backoff_seconds=0.01)
        log.publish_batch(topic, [NewEvent(n, key=str(n % 3)) for n in range(30)])
        with delivering(dsn):
            until(lambda: counts(log, topic) == (0, 0, 0, 0, 30))
    for key in range(3):
        of_key = [one.data for one in receiver.received if one.data % 3 == key]
        # Nothing is sent behind one that failed until that is accepted.
        assert of_key == sorted(of_key)
        assert set(of_key) == {n for n in range(30) if n % 3 == key}


def test_webhooks_are_taken_up_changed_and_left_while_delivery_runs(
    log: headwater.Headwater, dsn: str, topic: str, until: Until
) -> None:
    with Receiver() as first, Receiver() as second, delivering(dsn):
        log.create_webhook(topic, first.url, topic)
        log.publish(topic, 1)
        until(lambda: counts(log, topic)[4] == 1)
        log.alter_webhook(topic, url=second.url)
        # Whoever delivers may notice only after some events.
        until(lambda: log.publish(topic, 2) and second.received)
        until(lambda: counts(log, topic)[0] == 0)
        assert log.pause_webhook(topic, reason="their holiday").state_reason == "their holiday"
        until(lambda: counts(log, topic)[1] == 0)
        with Receiver() as other:
            # A webhook made after the pause is sent: by then the pause was noticed, too.
            log.create_webhook(f"{topic}-other", other.url, topic)
            until(lambda: other.received)
            before = len(first.received) + len(second.received)
            last = log.publish(topic, 4)
            until(lambda: any(one.position == last for one in other.received))
            until(lambda: counts(log, topic)[:2] == (1, 0))
            assert len(first.received) + len(second.received) == before
            log.delete_webhook(f"{topic}-other", with_queue=True)
        log.resume_webhook(topic)
        until(lambda: any(one.position == last for one in second.received))
        log.delete_webhook(topic)
        assert log.webhooks() == []
        assert log.delete_queue(topic)


def test_what_is_under_way_at_the_end_is_settled(log: headwater.Headwater, dsn: str, topic: str, until: Until) -> None:
    asked, go_on = threading.Event(), asyncio.Event()

    async def respond(received: Received) -> Reply:
        asked.set()
        await go_on.wait()
        return Reply()

    with Receiver(respond) as receiver:
        log.create_webhook(topic, receiver.url, topic, max_concurrency=1)
        log.publish_batch(topic, [NewEvent(n) for n in range(3)])
        with delivering(dsn):
            assert asked.wait(PATIENCE_SECONDS)
            # The answer comes while it waits for it, at the end of the block.
            threading.Timer(0.3, receiver.call, (go_on.set,)).start()
        assert counts(log, topic) == (2, 0, 0, 0, 1)
        assert len(receiver.received) == 1


# --- where to ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0.0.0.0", "[::1]"])
def test_addresses_of_this_machine_are_refused_unless_allowed(
    log: headwater.Headwater, dsn: str, topic: str, host: str
) -> None:
    with Receiver() as receiver:
        log.create_webhook(topic, f"http://{host}:{receiver.port}/", topic)
        tested = asyncio.run(tried(dsn, topic, allowed=()))
    assert not tested.accepted
    assert tested.error is not None
    assert "not allowed unless" in tested.error
    assert receiver.connections == 0


def test_the_address_that_was_looked_at_is_the_one_connected_to(
    log: headwater.Headwater, dsn: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[str] = []
    real = socket.getaddrinfo
    answers: list[list[str]] = []

    def rebinding(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host != "rebind.test":
            return real(host, port, *arguments, **options)
        found = answers.pop(0)
        looked_up.extend(found)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    with Receiver() as meant, Receiver(host="127.0.0.2", port=meant.port) as forbidden:
        log.create_webhook(topic, f"http://rebind.test:{meant.port}/", topic)
        # At the second look it would be another.
        answers[:] = [["127.0.0.1"], ["127.0.0.2"]]
        assert asyncio.run(tried(dsn, topic)).accepted
        assert looked_up == ["127.0.0.1"]
        # Of several only those that are allowed; IPv4 in the clothes of IPv6 is what it is.
        answers[:] = [["127.0.0.2", "::ffff:127.0.0.2", "127.0.0.1"]]
        assert asyncio.run(tried(dsn, topic)).accepted
        answers[:] = [["127.0.0.2"]]
        assert "127.0.0.2" in str(asyncio.run(tried(dsn, topic)).error)
        assert (meant.connections, forbidden.connections) == (2, 0)
        assert meant.received[0].headers["host"] == f"rebind.test:{meant.port}"


async def tried(dsn: str, name: str, **options: Any) -> WebhookTest:  # type: ignore[name-defined]
    async with await aio.connect(dsn, pool_size=1) as log:
        return await send_test(log, name, **{"allowed": HERE, **options})


def test_a_test_is_sent_once_and_touches_nothing(log: headwater.Headwater, dsn: str, topic: str) -> None:
    with Receiver(answering(Reply(418, {"Location": "/"}, b"<b>short &\n stout</b>"), Reply(200))) as receiver:
        hook = log.create_webhook(topic, receiver.url, topic)
        log.pause_webhook(topic)
        log.publish(topic, 1)
        refused = asyncio.run(tried(dsn, topic))
        assert (refused.accepted, refused.status, refused.error) == (False, 418, None)
        assert refused.response == "<b>short & stout</b>"
        assert refused.latency_ms > 0
        accepted = asyncio.run(tried(dsn, topic))
        assert (accepted.accepted, accepted.status) == (True, 200)
    first, second = receiver.received
    assert first.id == refused.message_id != second.id
    assert verified(second, hook.secrets[0])["type"] == "headwater.webhook.test"
    assert counts(log, topic) == (1, 0, 0, 0, 0)
    assert asyncio.run(tried(dsn, topic)).error is not None
    with pytest.raises(headwater.QueueNotFound, match="does not exist"):
        asyncio.run(tried(dsn, "nobody"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_a_certificate_that_nobody_vouches_for_is_refused(
    log: headwater.Headwater, dsn: str, topic: str, tmp_path: Path
) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "chain.pem")],
        check=True, capture_output=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(tmp_path / "chain.pem", tmp_path / "key.pem")
    trusting = ssl.create_default_context(cafile=str(tmp_path / "chain.pem"))
    with Receiver(tls=serving) as receiver:
        log.create_webhook(topic, f"https://localhost:{receiver.port}/", topic)
        stranger = asyncio.run(tried(dsn, topic))
        assert (stranger.accepted, stranger.status) == (False, None)
        assert "certificate" in str(stranger.error).lower()
        assert asyncio.run(tried(dsn, topic, tls=trusting)).accepted
        # The name in the certificate counts, not only who signed it.
        log.alter_webhook(topic, url=f"https://127.0.0.1:{receiver.port}/")
        assert not asyncio.run(tried(dsn, topic, tls=trusting)).accepted
    assert len(receiver.received) == 1


# --- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"url": "ftp://a.example/"}, "a url is"),
        ({"url": "https://user:word@a.example/"}, "a url is"),
        ({"url": "https://a.example/\r\nx: y"}, "a url is"),
        ({"url": "https://a.example:99999/"}, "a url is"),
        ({"url": "https://ä.example/"}, "a url is"),
        ({"secret": "whsec_short"}, "invalid secret"),
        ({"secret": "x" * 40}, "invalid secret"),
        ({"secret": "whsec_" + base64.b64encode(b"s" * 23).decode()}, "invalid secret"),
        ({"headers": {"a b": "c"}}, "invalid header"),
        ({"headers": {"a": "c\r\nd: e"}}, "invalid header"),
        ({"headers": {"a": 1}}, "invalid header"),
        ({"headers": {"Webhook-Id": "1"}}, "the delivery sets it"),
        ({"headers": {"HOST": "b"}}, "the delivery sets it"),
        ({"body": "xml"}, "envelope, raw, cloudevents-structured"),
        ({"timeout_seconds": 0.0}, "a timeout is"),
        ({"rate_per_second": -1.0}, "a rate is"),
        ({"gzip_above_bytes": -1}, "compressed above"),
        ({"client_errors": "ignore"}, "retry or dead"),
        ({"max_concurrency": 0}, "in flight"),
        ({"queue": "nobody"}, "cannot be combined"),
    ],
    ids=str,
)
def test_what_cannot_be_sent_is_refused_and_nothing_is_left(
    log: headwater.Headwater, topic: str, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(headwater.InvalidRequest, match=message) as refused:
        log.create_webhook(topic, **{"url": "https://a.example/", "topics": topic, **wrong})
    assert "whsec_s" not in str(refused.value)
    assert log.webhooks() == []
    assert topic not in [one.name for one in log.queues()]


def test_a_queue_has_one_webhook_and_takes_it_along(log: headwater.Headwater, topic: str) -> None:
    log.create_queue(f"{topic}-g", topic)
    with pytest.raises(headwater.QueueNotFound):
        log.create_webhook(topic, "https://a.example/", queue="nobody")
    made = log.create_webhook(topic, "https://a.example/", queue=f"{topic}-g", max_concurrency=2)
    assert (made.queue, made.max_concurrency, log.queue(f"{topic}-g").max_in_flight) == (f"{topic}-g", 2, 2)
    assert made.secrets[0] not in repr(made)
    with pytest.raises(headwater.QueueExists, match="already has the webhook"):
        log.create_webhook(f"{topic}-2", "https://a.example/", queue=f"{topic}-g")
    with pytest.raises(headwater.QueueExists, match="already exists"):
        log.create_webhook(topic, "https://a.example/", topic)
    with pytest.raises(headwater.QueueNotFound, match="does not exist"):
        log.alter_webhook("nobody", url="https://a.example/")
    log.delete_queue(f"{topic}-g")
    assert log.webhooks() == []
    assert not log.delete_webhook(topic)


def test_settings_change_one_by_one(log: headwater.Headwater, topic: str) -> None:
    log.create_webhook(topic, "https://a.example/", topic, rate_per_second=5, gzip_above_bytes=10, headers={"a": "b"})
    changed = log.alter_webhook(topic, timeout_seconds=3, max_concurrency=7)
    assert (changed.timeout_seconds, changed.max_concurrency, changed.rate_per_second) == (3, 7, 5)
    assert changed.headers == {"a": "b"}
    changed = log.alter_webhook(topic, rate_per_second=0, gzip_above_bytes=0, headers={})
    assert (changed.rate_per_second, changed.gzip_above_bytes, changed.headers) == (None, None, {})
    with pytest.raises(headwater.InvalidRequest):
        log.alter_webhook(topic, max_concurrency=9, url="nowhere")
    assert log.webhook(topic) == changed
    assert json.dumps(changed.headers) == "{}"
    assert changed.updated_at - changed.created_at < timedelta(minutes=5)
