"""Can a person use the console? The main paths, in a real browser against a real server."""

from __future__ import annotations

import os
import re
from datetime import timedelta

import pytest
from confluent_kafka import Consumer, Producer
from playwright.sync_api import Locator, Page, Route, expect
from serving import Serve, Serving

import headwater
from headwater.access import permissions, scram
from headwater.calls import access as access_calls
from headwater.calls import pipeline_runs
from headwater.log.settings import TopicSettings
from headwater.queue.settings import QueueSettings
from headwater.setting_definitions import SettingDefinition, definitions, format_number, values
from headwater.webhooks.settings import NEW_WEBHOOK_SETTINGS
from webhook_receiver import Receiver

PAGES = ("", "topics", "events", "queues", "subscriptions", "stores", "pipelines", "kafka", "webhooks", "accounts")


def row_of(page: Page, table: str, text: str) -> Locator:
    return page.get_by_role("table", name=table).get_by_role("row").filter(has_text=text)


def bury_all(log: headwater.Headwater, queue: str) -> None:
    """Let every event of a queue die of an error."""
    while lease := log.claim(queue, worker="undertaker", batch_size=100):
        log.nack(lease, *lease.events, error="no such customer", dead=True)


def test_the_overview_moves_by_itself(page: Page, server: Serving, log: headwater.Headwater) -> None:
    log.create_topic("seen")
    log.create_queue("seen-by", "seen")
    page.goto(server.url)
    row = row_of(page, "Queues", "seen-by")
    expect(row).to_be_visible()
    log.publish_batch("seen", [headwater.NewEvent({"number": number}) for number in range(25)])
    expect(row.get_by_role("cell", name="25", exact=True)).to_be_visible()
    expect(page.get_by_text("Events per second")).to_be_visible()


def test_a_topic_is_made_published_to_and_deleted_after_it_was_asked(
    page: Page, server: Serving, log: headwater.Headwater
) -> None:
    page.goto(f"{server.url}/#/topics")
    page.get_by_role("button", name="New topic").click()
    page.get_by_label("Name").fill("shop-orders")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", name="shop-orders", level=1)).to_be_visible()
    page.get_by_role("button", name="Publish").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Type").fill("placed")
    dialog.get_by_label("Payload").fill('{"total": 12}')
    dialog.get_by_role("button", name="Publish").click()
    expect(page.get_by_role("status").filter(has_text="Published at position")).to_be_visible()
    (event,) = log.read("shop-orders")
    assert (event.type, event.data) == ("placed", {"total": 12})

    page.get_by_role("button", name="Delete").click()
    expect(dialog.get_by_text("1 event")).to_be_visible()
    delete = dialog.get_by_role("button", name="Delete topic")
    expect(delete).to_be_disabled()
    dialog.get_by_role("button", name="Cancel").click()
    assert [topic.name for topic in log.topics() if topic.name == "shop-orders"]
    page.get_by_role("button", name="Delete").click()
    dialog.get_by_role("textbox").fill("shop-orders")
    delete.click()
    expect(page).to_have_url(re.compile("#/topics$"))
    assert not [topic.name for topic in log.topics() if topic.name == "shop-orders"]


def test_a_bad_name_is_refused_in_the_form_and_can_be_mended(page: Page, server: Serving) -> None:
    page.goto(f"{server.url}/#/topics")
    page.get_by_role("button", name="New topic").click()
    page.get_by_label("Name").fill("x" * 300)
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("characters")
    page.get_by_label("Name").fill("mended")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", name="mended", level=1)).to_be_visible()


def test_events_are_found_by_key_type_and_header_and_looked_into(
    page: Page, server: Serving, log: headwater.Headwater
) -> None:
    log.create_topic("searched")
    events = [
        headwater.NewEvent(
            {"number": number}, key=f"k{number % 3}", type=f"t{number % 2}", headers={"shop": f"s{number % 5}"}
        )
        for number in range(120)
    ]
    log.publish_batch("searched", events)
    log.publish("searched", b"\x00\xff", type="binary")
    page.goto(f"{server.url}/#/events?topic=searched")
    rows = page.get_by_role("table", name="Events").locator("tbody tr")
    expect(rows).to_have_count(50)
    page.get_by_role("button", name="Older events").click()
    expect(rows).to_have_count(100)
    page.get_by_label("Key").fill("k1")
    page.get_by_label("Type").fill("t0")
    page.get_by_label("Header").fill("shop=s4")
    page.get_by_role("button", name="Search").click()
    # k1 and t0 and s4: those that leave 4 when divided by 6 and by 5.
    expect(rows).to_have_count(4)
    rows.first.get_by_role("button").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text('"number": 94')
    expect(dialog).to_contain_text('"shop": "s4"')
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    for name in ("Key", "Header"):
        page.get_by_label(name).fill("")
    page.get_by_label("Type").fill("binary")
    page.get_by_role("button", name="Search").click()
    expect(rows).to_have_count(1)
    rows.first.get_by_role("button").click()
    expect(dialog).to_contain_text("AP8=")


def test_events_are_followed_live_over_a_restart_of_the_server(
    page: Page, serve: Serve, log: headwater.Headwater
) -> None:
    log.create_topic("live")
    log.publish("live", {"number": 0})
    with serve() as first:
        port = first.url.rpartition(":")[2]
        page.goto(f"{first.url}/#/events?topic=live")
        page.get_by_label("Follow live").check()
        expect(page.get_by_text("live", exact=True).last).to_be_visible()
        expect(page.locator(".badge.good")).to_have_text("live")
        log.publish("live", {"number": 1}, type="counted")
        rows = page.get_by_role("table", name="Events").locator("tbody tr")
        expect(rows).to_have_count(2)
    log.publish("live", {"number": 2})
    with serve(http=f"127.0.0.1:{port}"):
        log.publish("live", {"number": 3})
        # What was published while no server ran is shown too, once, in order.
        expect(rows).to_have_count(4)
        shown = [re.findall(r'"number": (\d)', text)[0] for text in rows.all_inner_texts()]
        assert shown == ["3", "2", "1", "0"]
        page.get_by_label("Follow live").uncheck()


def test_a_search_that_is_answered_late_does_not_follow_beside_the_next_one(
    page: Page, server: Serving, log: headwater.Headwater
) -> None:
    log.create_topic("late")
    log.publish("late", {"number": 0})
    held: list[Route] = []

    def hold_the_first(route: Route) -> None:
        if held:
            route.continue_()
        else:
            held.append(route)

    page.route("**/v1/topics/late/events?*", hold_the_first)
    page.goto(f"{server.url}/#/events?topic=late")
    page.get_by_label("Follow live").check()
    expect(page.locator(".badge.good")).to_have_text("live")
    with page.expect_response("**/v1/topics/late/events?*"):
        held[0].continue_()
    log.publish("late", {"number": 1})
    rows = page.get_by_role("table", name="Events").locator("tbody tr")
    expect(rows.first).to_contain_text('"number": 1')
    expect(rows).to_have_count(2)


def test_dead_letters_are_looked_into_redriven_and_discarded(
    page: Page, server: Serving, log: headwater.Headwater
) -> None:
    log.create_topic("deadly")
    log.create_queue("buried", "deadly", max_attempts=1)
    log.publish_batch("deadly", [headwater.NewEvent({"number": number}) for number in range(3)])
    bury_all(log, "buried")
    page.goto(f"{server.url}/#/queues/buried")
    rows = page.get_by_role("table", name="Dead letters").locator("tbody tr")
    expect(rows).to_have_count(3)
    rows.first.get_by_role("button", name="Details").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("no such customer")
    expect(dialog).to_contain_text('"number"')
    dialog.get_by_role("button", name="Close").click()
    rows.first.get_by_role("button", name="Redrive").click()
    expect(dialog).to_contain_text("1 dead letter")
    dialog.get_by_role("button", name="Redrive").click()
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="Discard all").click()
    expect(dialog).to_contain_text("2 dead letters")
    dialog.get_by_role("button", name="Discard").click()
    expect(page.get_by_text("No dead letters.")).to_be_visible()
    (again,) = log.claim("buried", worker="w", batch_size=10).events
    assert again.topic == "deadly"


def test_a_queue_is_paused_rewound_and_deleted(page: Page, server: Serving, log: headwater.Headwater) -> None:
    log.create_topic("turned")
    log.create_queue("turning", "turned")
    log.publish_batch("turned", [headwater.NewEvent({}) for _ in range(4)])
    lease = log.claim("turning", worker="w", batch_size=10)
    log.ack(lease)
    page.goto(f"{server.url}/#/queues/turning")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("paused", exact=True)).to_be_visible()
    assert log.queue("turning").paused
    page.get_by_role("button", name="Rewind").click()
    page.get_by_role("button", name="Preview").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("4 events are delivered again")
    dialog.get_by_role("textbox").fill("turning")
    dialog.get_by_role("button", name="Rewind").click()
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".tile").filter(has_text="Ready")).to_contain_text("4")
    page.get_by_role("button", name="Delete").click()
    expect(dialog).to_contain_text("4 events ready")
    dialog.get_by_role("textbox").fill("turning")
    dialog.get_by_role("button", name="Delete queue").click()
    expect(page).to_have_url(re.compile("#/queues$"))
    assert "turning" not in [queue.name for queue in log.queues()]


def test_an_event_store_is_browsed_by_tag(page: Page, server: Serving, log: headwater.Headwater) -> None:
    store = log.create_store("ledger")
    for number in range(6):
        tags = [f"account:{number % 2}", "all"]
        store.append([headwater.NewStoreEvent("Paid", {"number": number}, tags=tags, metadata={"by": "anna"})])
    page.goto(f"{server.url}/#/stores")
    page.get_by_role("link", name="ledger").click()
    rows = page.get_by_role("table", name="Events").locator("tbody tr")
    expect(rows).to_have_count(6)
    page.get_by_label("Tags (all)").fill("all, account:1")
    page.get_by_role("button", name="Search").click()
    expect(rows).to_have_count(3)
    expect(page.get_by_text("3 events match")).to_be_visible()
    expect(rows.first).to_contain_text("account:1, all")
    rows.first.get_by_role("button").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("account:1, all")
    expect(dialog).to_contain_text('"by": "anna"')
    expect(dialog).not_to_contain_text("Key")


def test_groups_of_kafka_clients_are_seen_with_their_lag(page: Page, server: Serving, log: headwater.Headwater) -> None:
    log.create_topic("from-kafka", kind="sequenced")
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
    for number in range(10):
        producer.produce("from-kafka", b"%d" % number)
    assert producer.flush(30) == 0
    consumer = Consumer(
        {
            "bootstrap.servers": server.kafka,
            "group.id": "readers",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    consumer.subscribe(["from-kafka"])
    got = [consumer.poll(30) for _ in range(4)]
    assert all(message is not None and message.error() is None for message in got)
    consumer.commit(got[-1], asynchronous=False)
    consumer.close()
    page.goto(f"{server.url}/#/kafka")
    page.get_by_role("link", name="readers").click()
    row = row_of(page, "Offsets", "from-kafka")
    expect(row.get_by_role("cell")).to_contain_text(["from-kafka", "0", "4", "10", "6"])


def test_a_pipeline_is_seen_with_its_last_batches_and_errors(
    page: Page, server: Serving, log: headwater.Headwater
) -> None:
    claimed = log.run(
        pipeline_runs.claim_pipeline(
            "totals",
            "runner-1",
            lease=timedelta(seconds=60),
            source="log",
            definition={"to": {"table": {"name": "public.totals"}}},
            start=True,
        )
    )
    assert claimed.token is not None
    for rows in (7, 8):
        log.run(pipeline_runs.record_batch("totals", claimed.token, checkpoint=0, rows=rows, details={"seconds": 1.5}))
    log.run(pipeline_runs.record_failure("totals", claimed.token, "the table public.totals is gone"))
    page.goto(f"{server.url}/#/pipelines")
    page.get_by_role("link", name="totals").click()
    expect(page.get_by_text("failing")).to_be_visible()
    expect(page.get_by_text("runner-1")).to_be_visible()
    expect(page.locator("pre").first).to_have_text("the table public.totals is gone")
    expect(page.get_by_text("1 failure in a row")).to_be_visible()
    rows = page.get_by_role("table", name="Last batches").locator("tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_contain_text("the table public.totals is gone")
    expect(rows.nth(1).get_by_role("cell")).to_contain_text(["ago", "8", "1.5 s"])
    expect(rows.nth(2).get_by_role("cell")).to_contain_text(["ago", "7", "1.5 s"])
    expect(page.locator("pre").last).to_contain_text('"public.totals"')


def test_a_webhook_is_made_tried_and_paused(page: Page, server: Serving, log: headwater.Headwater) -> None:
    log.create_topic("hooked")
    with Receiver() as receiver:
        page.goto(f"{server.url}/#/webhooks")
        page.get_by_role("button", name="New webhook").click()
        page.get_by_label("Name").fill("shop")
        page.get_by_label("URL").fill(receiver.url)
        page.get_by_label("Topic").fill("hooked")
        page.get_by_role("button", name="Create").click()
        expect(page.locator("pre")).to_contain_text("whsec_")
        page.get_by_role("button", name="I have saved it").click()
        page.get_by_role("link", name="shop").first.click()
        page.get_by_role("button", name="Send a test").click()
        expect(page.get_by_role("dialog")).to_contain_text("The receiver accepted the event")
        page.get_by_role("button", name="Close").click()
        page.get_by_role("button", name="Pause").click()
        expect(page.locator(".badge")).to_have_text("paused")
    assert log.webhook("shop").state == "paused"


@pytest.mark.parametrize(
    ("noun", "found"),
    [
        ("topic", definitions(TopicSettings)),
        ("queue", definitions(QueueSettings)),
        ("webhook", NEW_WEBHOOK_SETTINGS),
    ],
    ids=["topic", "queue", "webhook"],
)
def test_a_form_has_a_field_for_every_setting(
    page: Page, server: Serving, noun: str, found: tuple[SettingDefinition, ...]
) -> None:
    page.goto(f"{server.url}/#/{noun}s")
    page.get_by_role("button", name=f"New {noun}").click()
    dialog = page.get_by_role("dialog")
    for one in found:
        field = dialog.locator("label").filter(has_text=one.label).locator(f"[name={one.json_name}]")
        expect(field).to_have_count(1)
        expect(dialog).to_contain_text(one.help)
        if one.maximum is not None:
            expect(field).to_have_attribute("max", format_number(one.maximum))
        if one.minimum is not None and not one.removable:
            expect(field).to_have_attribute("min", format_number(one.minimum))
        if one.choices:
            for choice in one.choices:
                expect(field.locator(f"option[value={choice}]")).to_have_count(1)


def test_settings_of_a_queue_are_set_and_changed(page: Page, server: Serving, log: headwater.Headwater) -> None:
    page.goto(f"{server.url}/#/queues")
    page.get_by_role("button", name="New queue").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("set-up")
    dialog.get_by_label("Maximum attempts").fill("7")
    dialog.get_by_label("Ordered keys").check()
    dialog.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", name="set-up", level=1)).to_be_visible()
    created = log.queue("set-up")
    assert (created.max_attempts, created.ordered_keys, created.lease_seconds) == (7, True, 30)
    for text, limit in (("20", 20), ("", None)):
        page.get_by_role("button", name="Settings").click()
        dialog.get_by_label("Maximum in flight").fill(text)
        dialog.get_by_role("button", name="Save").click()
        expect(dialog).to_have_count(0)
        assert values(QueueSettings, log.queue("set-up")) == {**values(QueueSettings, created), "max_in_flight": limit}
    page.get_by_role("button", name="Settings").click()
    dialog.get_by_label("Lease in seconds").fill("")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("a lease is 0.1 seconds to 1 day")


def test_who_is_not_signed_in_sees_nothing(page: Page, serve: Serve, log: headwater.Headwater) -> None:
    kept = scram.verifiers("right", os.urandom(16), 4096)
    log.run(access_calls.set_account("anna", kept, administrator=True))
    log.run(access_calls.set_account("ben", kept, administrator=False))
    log.run(access_calls.allow(permissions.Permission("ben", "read", "topic", "open-to-ben")))
    log.create_topic("open-to-ben")
    log.create_topic("closed-to-ben")
    with serve("--authenticate") as server:
        page.goto(f"{server.url}/#/topics")
        page.get_by_label("Account").fill("anna")
        page.get_by_label("Password").fill("wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert").filter(has_text="wrong")).to_be_visible()
        page.get_by_label("Password").fill("right")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("link", name="closed-to-ben")).to_be_visible()
        page.set_viewport_size({"width": 1280, "height": 800})
        for way in page.get_by_role("navigation").get_by_role("link").all():
            expect(way).to_be_in_viewport(ratio=1)
        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("Account").fill("ben")
        page.get_by_label("Password").fill("right")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("link", name="open-to-ben")).to_be_visible()
        expect(page.get_by_role("link", name="closed-to-ben")).to_have_count(0)
        # The cookie is the browser's alone.
        assert page.evaluate("document.cookie") == ""


def test_accounts_get_and_lose_permissions(page: Page, server: Serving, log: headwater.Headwater) -> None:
    page.goto(f"{server.url}/#/accounts")
    page.get_by_role("button", name="New account").click()
    page.get_by_label("Name").fill("carla")
    page.get_by_label("Password").fill("secret")
    page.get_by_role("button", name="Create").click()
    row = row_of(page, "Accounts", "carla")
    row.get_by_role("button", name="Grant").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("shop-*")
    dialog.get_by_role("button", name="Grant").click()
    expect(row).to_contain_text("read topic shop-*")
    assert permissions.Permission("carla", "read", "topic", "shop-", True) in log.run(access_calls.permissions())
    row.get_by_role("button", name="Keys").click()
    page.get_by_role("button", name="New API key").click()
    page.get_by_role("button", name="Create").click()
    expect(page.locator("pre").filter(has_text=permissions.KEY_PREFIX)).to_be_visible()
    page.get_by_role("button", name="I have saved it").click()
    row.get_by_role("button", name="read topic shop-*").click()
    dialog.get_by_role("button", name="Revoke").click()
    expect(row).to_contain_text("none")


@pytest.mark.parametrize("name", PAGES)
def test_every_page_fits_a_phone(phone: Page, server: Serving, name: str) -> None:
    phone.goto(f"{server.url}/#/{name}")
    expect(phone.get_by_role("heading", level=1)).to_be_visible()
    wide = phone.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0
    # The way to the page that is shown is in sight, too.
    expect(phone.locator('nav [aria-current="page"]')).to_be_in_viewport(ratio=1)


def test_the_description_of_the_api_fits_a_phone(phone: Page, server: Serving) -> None:
    phone.goto(f"{server.url}/docs")
    assert phone.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


def test_the_console_can_be_used_with_the_keyboard_alone(page: Page, server: Serving) -> None:
    page.goto(server.url)
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    for _ in range(3):
        page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Topics")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Topics")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="New topic")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_light_and_dark_are_kept(page: Page, server: Serving) -> None:
    page.goto(server.url)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Toggle light and dark theme").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark


def test_nothing_comes_from_elsewhere(page: Page, server: Serving) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in PAGES:
        page.goto(f"{server.url}/#/{name}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
    assert asked
    assert [url for url in asked if not url.startswith(server.url)] == []
