"""Does the console take care: of who may see little, of what somebody is at, of what cannot be taken back?"""

from __future__ import annotations

import os
import re
from datetime import timedelta

import psycopg
from playwright.sync_api import Locator, Page, expect
from serving import Serve, Serving

import headwater
from headwater.access import permissions, scram
from headwater.calls import access as access_calls


def row_of(page: Page, table: str, text: str) -> Locator:
    return page.get_by_role("table", name=table).get_by_role("row").filter(has_text=text)


def tile(page: Page, name: str) -> Locator:
    return page.locator(".tile").filter(has_text=name)


def publish(log: headwater.Headwater, topic: str, count: int) -> None:
    log.publish_batch(topic, [headwater.NewEvent({"number": number}) for number in range(count)])


def bury(log: headwater.Headwater, queue: str, count: int) -> None:
    lease = log.claim(queue, worker="undertaker", batch_size=count)
    assert lease is not None
    log.nack(lease, *lease.events, error="no such customer", dead=True)


# --- who may see little ---


def test_missing_permissions_are_shown_once(page: Page, serve: Serve, log: headwater.Headwater) -> None:
    log.create_topic("closed")
    log.create_topic("orders")
    log.create_queue("mailer", "orders")
    log.create_queue("hidden", "closed")
    publish(log, "orders", 2)
    log.run(access_calls.set_account("ben", scram.verifiers("right", os.urandom(16), 4096), administrator=False))
    log.run(access_calls.allow(permissions.Permission("ben", "read", "topic", "orders")))
    log.run(access_calls.allow(permissions.Permission("ben", "alter", "consumer", "mailer")))
    refused: list[str] = []
    page.on("response", lambda answer: refused.append(answer.url) if answer.status == 403 else None)
    alert = page.locator("main").get_by_role("alert")
    notes = page.locator("#notes > *")
    with serve("--authenticate") as server:
        page.goto(server.url)
        page.get_by_label("Account").fill("ben")
        page.get_by_label("Password").fill("right")
        page.get_by_role("button", name="Sign in").click()
        expect(alert).to_have_text(re.compile("ben may not describe the log"))
        queue = row_of(page, "Queues", "mailer")
        expect(queue).to_contain_text("2")
        publish(log, "orders", 40)
        # The page has asked again, though not for what was refused.
        expect(queue).to_contain_text("42")
        expect(row_of(page, "Topics", "closed")).to_have_count(0)
        assert len(refused) == 1

        page.get_by_role("link", name="Events", exact=True).click()
        expect(page.get_by_label("Topic").locator("option")).to_have_text(["orders"])
        expect(page.get_by_role("table", name="Events").locator("tbody tr")).to_have_count(42)
        page.goto(f"{server.url}/#/events?topic=closed")
        expect(alert).to_have_text(re.compile("ben may not read the topic closed"))
        page.get_by_label("Topic").select_option("orders")
        expect(page.get_by_role("table", name="Events").locator("tbody tr")).to_have_count(42)

        refused.clear()
        page.goto(f"{server.url}/#/queues/mailer")
        expect(alert).to_have_text(re.compile("ben may not read the consumer mailer"))
        expect(tile(page, "Ready")).to_contain_text("42")
        expect(row_of(page, "Bindings", "orders")).to_be_visible()
        publish(log, "orders", 1)
        expect(tile(page, "Ready")).to_contain_text("43")
        assert len(refused) == 1
        page.goto(f"{server.url}/#/queues/hidden")
        expect(alert).to_have_text(re.compile("ben may not describe the consumer hidden"))
        for name in ("pipelines", "accounts"):
            page.goto(f"{server.url}/#/{name}")
            expect(alert).to_have_text(re.compile("ben may not describe the log"))
        expect(notes).to_have_count(0)


# --- what somebody is at ---


def test_focus_and_selection_stay_when_a_page_moves_by_itself(
    page: Page, server: Serving, log: headwater.Headwater
) -> None:
    log.create_topic("moving")
    log.create_queue("moved", "moving")
    publish(log, "moving", 3)
    bury(log, "moved", 3)
    page.goto(server.url)
    link = row_of(page, "Queues", "moved").get_by_role("link")
    link.focus()
    publish(log, "moving", 17)
    # Another queue comes before it.
    log.create_queue("a-first-one", "moving")
    expect(row_of(page, "Queues", "a-first-one")).to_contain_text("20")
    expect(row_of(page, "Queues", "moved")).to_contain_text("17")
    expect(link).to_be_focused()

    page.keyboard.press("Enter")
    rows = page.get_by_role("table", name="Dead letters").locator("tbody tr")
    expect(rows).to_have_count(3)
    discard = rows.last.get_by_role("button", name="Discard")
    discard.focus()
    page.evaluate("getSelection().selectAllChildren(document.querySelectorAll('tbody .code')[2])")
    log.discard("moved", positions=[log.dead_letters("moved")[0].position])
    expect(rows).to_have_count(2)
    expect(discard).to_be_focused()
    assert page.evaluate("getSelection().toString()") == "no such customer"
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    last = log.dead_letters("moved")[-1].position
    expect(dialog).to_contain_text(f"1 dead letter (position {last})")
    page.keyboard.press("Escape")
    expect(discard).to_be_focused()
    pause = page.get_by_role("button", name="Pause")
    pause.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Resume")).to_be_focused()


# --- what cannot be taken back ---


def test_a_shorter_retention_says_what_it_takes_before_it_is_set(
    page: Page, server: Serving, log: headwater.Headwater, dsn: str
) -> None:
    log.create_topic("short-lived")
    publish(log, "short-lived", 3)
    first, last, _ = [event.position for event in log.read("short-lived")]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "update headwater_internal.event set published_at = published_at - interval '90 min' where position in "
            "(%s, %s)",
            (first, last),
        )
    page.goto(f"{server.url}/#/topics/short-lived")
    dialog = page.get_by_role("dialog")

    def set_to(seconds: str) -> None:
        page.get_by_role("button", name="Settings").click()
        dialog.get_by_label("Retention").fill(seconds)
        dialog.get_by_role("button", name="Save").click()

    set_to("3600")
    expect(dialog).to_contain_text(f"This deletes 2 events (positions {first} to {last})")
    dialog.get_by_role("button", name="Cancel").click()
    assert log.topic("short-lived").retention is None
    set_to("3600")
    dialog.get_by_role("textbox").fill("short-lived")
    dialog.get_by_role("button", name="Set retention").click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_text("60 min")).to_be_visible()
    assert log.topic("short-lived").retention == timedelta(hours=1)
    # Longer takes nothing, so nothing is asked.
    set_to("7200")
    expect(dialog).to_have_count(0)
    expect(page.get_by_text("2 h")).to_be_visible()


def test_a_rewind_says_what_comes_again_and_what_is_skipped(
    page: Page, server: Serving, log: headwater.Headwater
) -> None:
    log.create_topic("wound")
    log.create_queue("winder", "wound")
    publish(log, "wound", 5)
    lease = log.claim("winder", worker="w", batch_size=2)
    assert lease is not None
    log.ack(lease)
    first, *_, last = [event.position for event in log.read("wound")]
    page.goto(f"{server.url}/#/queues/winder")
    dialog = page.get_by_role("dialog")
    for to, expected in (
        (first, f"1 event is delivered again (position {first + 1})"),
        (last - 1, f"2 events are skipped (positions {first + 2} to {last - 1})"),
    ):
        page.get_by_role("button", name="Rewind").click()
        dialog.get_by_role("spinbutton").fill(str(to))
        dialog.get_by_role("button", name="Preview").click()
        expect(dialog).to_contain_text(expected)
        dialog.get_by_role("button", name="Cancel").click()


def test_taking_away_a_binding_a_subscription_or_a_webhook_says_which_events_that_costs(
    page: Page, server: Serving, log: headwater.Headwater
) -> None:
    log.create_topic("taken")
    log.create_queue("losing", "taken")
    log.subscribe("vips", "e.topic = 'taken' and (e.data ->> 'number')::int < 2", from_position=0)
    log.create_webhook("hook", "http://127.0.0.1:9/", "taken")
    publish(log, "taken", 4)
    positions = [event.position for event in log.read("taken")]
    dialog = page.get_by_role("dialog")
    page.goto(f"{server.url}/#/queues/losing")
    page.get_by_role("button", name="Unbind").click()
    expect(dialog).to_contain_text(f"4 events (positions {positions[0]} to {positions[3]}) that no other binding")
    dialog.get_by_role("button", name="Unbind").click()
    expect(page.get_by_text("ended")).to_be_visible()

    page.goto(f"{server.url}/#/subscriptions")
    # The last page also has a button of this name, until it is replaced.
    expect(page.get_by_text("e.topic = 'taken'")).to_be_visible()
    page.get_by_role("button", name="Delete").click()
    expect(dialog).to_contain_text(f"2 events (positions {positions[0]} to {positions[1]})")
    dialog.get_by_role("button", name="Delete").click()
    expect(page.get_by_text("No SQL subscriptions.")).to_be_visible()

    page.goto(f"{server.url}/#/webhooks/hook")
    expect(page.get_by_text("http://127.0.0.1:9/")).to_be_visible()
    page.get_by_role("button", name="Delete").click()
    expect(dialog).to_contain_text("4 events")
    dialog.get_by_role("textbox").fill("hook")
    dialog.get_by_role("button", name="Delete webhook").click()
    expect(page).to_have_url(re.compile("#/webhooks$"))
    assert log.webhooks() == []


# --- queues and what died ---


def test_queues_of_sql_subscriptions_lead_to_their_subscriptions(
    page: Page, server: Serving, log: headwater.Headwater
) -> None:
    log.subscribe("watchers", "e.type = 'seldom'")
    log.subscribe("others", "e.type = 'often'")
    page.goto(server.url)
    row = row_of(page, "SQL subscriptions", "watchers")
    expect(row).to_be_visible()
    expect(row_of(page, "Queues", "watchers")).to_have_count(0)
    row.get_by_role("link").click()
    expect(page.get_by_text("e.type = 'seldom'")).to_be_visible()
    expect(page.get_by_text("e.type = 'often'")).to_have_count(0)
    page.goto(f"{server.url}/#/queues/others")
    expect(page.get_by_role("heading", name="Subscriptions of others")).to_be_visible()
    expect(page.get_by_text("e.type = 'often'")).to_be_visible()


def test_a_dead_letter_shows_its_tries_and_what_the_event_said_about_itself(
    page: Page, server: Serving, log: headwater.Headwater
) -> None:
    log.create_topic("tried")
    log.create_queue("trying", "tried", max_attempts=2, backoff_seconds=0)
    log.publish("tried", {"number": 1}, type="placed", headers={"shop": "s1"})
    for number in (1, 2):
        lease = log.claim("trying", worker=f"worker-{number}", batch_size=1)
        assert lease is not None
        log.nack(lease, *lease.events, error=f"error {number}", delay=timedelta(0))
    page.goto(f"{server.url}/#/queues/trying")
    page.get_by_role("button", name="Details").click()
    tries = page.get_by_role("table", name="Attempts").locator("tbody tr")
    expect(tries).to_have_count(2)
    for number in (1, 2):
        expect(tries.nth(number - 1)).to_contain_text(f"worker-{number}")
        expect(tries.nth(number - 1)).to_contain_text(f"error {number}")
    dialog = page.get_by_role("dialog")
    for part in ("placed", '"shop": "s1"', '"number": 1'):
        expect(dialog).to_contain_text(part)


def test_all_dead_letters_can_be_reached(page: Page, server: Serving, log: headwater.Headwater) -> None:
    log.create_topic("many")
    log.create_queue("burying", "many")
    publish(log, "many", 101)
    bury(log, "burying", 101)
    page.goto(f"{server.url}/#/queues/burying")
    rows = page.get_by_role("table", name="Dead letters").locator("tbody tr")
    expect(rows).to_have_count(100)
    page.get_by_role("button", name="Next page").click()
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="First page").click()
    expect(rows).to_have_count(100)
