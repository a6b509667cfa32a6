"""Are events shown as they are stored, found where they are, and published as they were typed?"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from playwright.sync_api import Locator, Page, Route, expect
from serving import Serving

import headwater

# What JavaScript's own reading of JSON makes something else of: numbers, the order of keys, a key that comes twice.
WRITTEN = '{"id": 9007199254740993, "amount": 12.30, "10": 1e2, "2": [], "note": "\\"}: \\\\", "10": -0}'


def rows_of(page: Page) -> Locator:
    return page.get_by_role("table", name="Events").locator("tbody tr")


def search(page: Page, **fields: str) -> None:
    for name, text in fields.items():
        page.get_by_label(name, exact=True).fill(text)
    page.get_by_role("button", name="Search").click()


def test_json_is_shown_to_the_letter(page: Page, server: Serving, log: headwater.Headwater) -> None:
    log.create_topic("exact")
    log.publish("exact", WRITTEN.encode(), content_type="application/json", headers={"big": 9007199254740993})
    page.goto(f"{server.url}/#/events?topic=exact")
    rows = rows_of(page)
    expect(rows).to_have_count(1)
    for part in ("9007199254740993", "12.30", "1e2"):
        expect(rows.first).to_contain_text(part)
    rows.first.get_by_role("button").click()
    headers, body = page.get_by_role("dialog").locator("pre").all()
    lines = (
        "{",
        '"id": 9007199254740993,',
        '"amount": 12.30,',
        '"10": 1e2,',
        '"2": [],',
        r'"note": "\"}: \\",',
        '"10": -0',
        "}",
    )
    assert [line.strip() for line in body.inner_text().splitlines()] == list(lines)
    expect(headers).to_contain_text("9007199254740993")
    page.keyboard.press("Escape")
    page.get_by_label("Follow live").check()
    expect(page.locator(".badge.good")).to_have_text("live")
    log.publish("exact", WRITTEN.replace("993", "995").encode(), content_type="application/json")
    expect(rows.first).to_contain_text("9007199254740995")


def test_json_is_published_as_it_was_typed(page: Page, server: Serving, log: headwater.Headwater) -> None:
    log.create_topic("typed")
    page.goto(f"{server.url}/#/topics/typed")
    dialog = page.get_by_role("dialog")

    def publish(body: str, headers: str = "{}") -> None:
        page.get_by_role("button", name="Publish").click()
        dialog.get_by_label("Headers").fill(headers)
        dialog.get_by_label("Payload").fill(body)
        dialog.get_by_role("button", name="Publish").click()
        expect(dialog).to_have_count(0)

    publish(WRITTEN, '{"big": 9007199254740993}')
    publish("no {JSON}")
    exact, text = log.read("typed")
    assert (exact.payload, exact.content_type) == (WRITTEN.encode(), "application/json")
    assert exact.headers == {"big": 9007199254740993}
    assert (text.payload, text.content_type) == (b"no {JSON}", "text/plain")
    page.get_by_role("button", name="Publish").click()
    dialog.get_by_label("Headers").fill('[1], "text": "x"')
    dialog.get_by_role("button", name="Publish").click()
    expect(dialog.get_by_role("alert")).to_contain_text("must be a JSON object")


def test_events_are_found_by_time_and_the_search_can_be_gone_back_to(
    page: Page, server: Serving, log: headwater.Headwater
) -> None:
    log.create_topic("timed")
    log.publish("timed", {"number": 1}, type="a")
    (first,) = log.read("timed")
    log.publish("timed", {"number": 2}, type="b")
    page.goto(f"{server.url}/#/events?topic=timed")
    rows = rows_of(page)
    expect(rows).to_have_count(2)

    def as_typed(time: datetime) -> str:
        """A time as the form of this browser wants it: its own time zone, whole seconds."""
        away = page.evaluate("seconds => new Date(seconds * 1000).getTimezoneOffset()", time.timestamp())
        return (time.astimezone(UTC) - timedelta(minutes=away)).strftime("%Y-%m-%dT%H:%M:%S")

    hour = timedelta(hours=1)
    search(page, To=as_typed(first.published_at - hour))
    expect(page.get_by_text("No matching events.")).to_be_visible()
    search(page, To="", From=as_typed(first.published_at + hour))
    expect(page.get_by_text("No matching events.")).to_be_visible()
    search(page, To=as_typed(first.published_at + hour), From=as_typed(first.published_at - hour))
    expect(rows).to_have_count(2)
    search(page, To="", From="", Type="a")
    expect(rows).to_have_count(1)
    expect(page).to_have_url(re.compile("type=a"))
    page.reload()
    expect(rows).to_have_count(1)
    page.go_back()
    expect(rows).to_have_count(2)
    expect(page.get_by_label("Type", exact=True)).to_have_value("")
    expect(page.get_by_label("From", exact=True)).not_to_have_value("")


def test_a_search_that_has_not_seen_everything_says_so_and_goes_on(
    page: Page, server: Serving, log: headwater.Headwater
) -> None:
    log.create_topic("deep")
    log.publish("deep", {}, type="rare")
    for _ in range(3):
        log.publish_batch("deep", [headwater.NewEvent(None, type="common")] * 7000)
    page.goto(f"{server.url}/#/events?topic=deep&type=rare")
    expect(page.get_by_text("no matching event so far")).to_contain_text("Searched back to position")
    page.get_by_role("button", name="Search further back").click()
    expect(rows_of(page)).to_have_count(1)
    expect(page.get_by_role("button", name="Search further back")).to_be_hidden()


def test_no_event_is_missed_between_the_page_and_what_follows_live(
    page: Page, server: Serving, log: headwater.Headwater
) -> None:
    log.create_topic("seamless")
    log.publish("seamless", {"number": 0})

    def meanwhile(route: Route) -> None:
        log.publish("seamless", {"number": 1})
        route.continue_()

    page.route("**/v1/topics/seamless/follow?*", meanwhile)
    page.goto(f"{server.url}/#/events?topic=seamless")
    expect(rows_of(page)).to_have_count(1)
    page.get_by_label("Follow live").check()
    expect(rows_of(page)).to_have_count(2)
    expect(rows_of(page).first).to_contain_text('"number": 1')
