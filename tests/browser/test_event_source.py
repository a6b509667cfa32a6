"""Does a browser's own EventSource see every event once, whatever happens to the connection?"""

from __future__ import annotations

import signal

from playwright.sync_api import Page
from serving import Serve, Serving

import headwater
from patience import PATIENCE_SECONDS

FOLLOW = """address => {
    window.seen = [];
    window.opened = 0;
    window.source = new EventSource(address);
    const take = message => window.seen.push(JSON.parse(message.data).data.number);
    window.source.onmessage = take;
    window.source.addEventListener("counted", take);
    window.source.addEventListener("event", take);
    window.source.onopen = () => window.opened++;
}"""


def publish(log: headwater.Headwater, topic: str, numbers: range) -> None:
    log.publish_batch(topic, [headwater.NewEvent({"number": number}, type="counted") for number in numbers])


def test_events_come_as_they_are_published(page: Page, server: Serving, log: headwater.Headwater) -> None:
    log.create_topic("streamed")
    publish(log, "streamed", range(3))
    page.goto(f"{server.url}/health")
    page.evaluate(FOLLOW, "/v1/topics/streamed/follow?after=0")
    page.wait_for_function("window.seen.length === 3")
    publish(log, "streamed", range(3, 10))
    page.wait_for_function("window.seen.length >= 10")
    assert page.evaluate("window.seen") == list(range(10))


def test_a_server_that_is_killed_costs_no_event_and_repeats_none(
    page: Page, serve: Serve, log: headwater.Headwater
) -> None:
    log.create_topic("resumed")
    with serve() as first:
        port = first.url.rpartition(":")[2]
        page.goto(f"{first.url}/health")
        page.evaluate(FOLLOW, "/v1/topics/resumed/follow?after=0")
        publish(log, "resumed", range(5))
        page.wait_for_function("window.seen.length === 5")
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(PATIENCE_SECONDS)
    publish(log, "resumed", range(5, 50))
    with serve(http=f"127.0.0.1:{port}"):
        page.wait_for_function("window.seen.length >= 50")
        publish(log, "resumed", range(50, 60))
        page.wait_for_function("window.seen.length >= 60")
        assert page.evaluate("window.seen") == list(range(60))
        assert page.evaluate("window.opened") >= 2
