"""`headwater demo`: the main job, step by step, on a Postgres that comes along."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import psycopg
import typer

import headwater
from headwater.cli import demo_pipeline, output
from headwater.cli.arguments import Dsn, Json, examples
from headwater.cli.connection import session
from headwater.cli.temporary_log import scratch_log
from headwater.errors import NotAllowed, TopicNotFound
from headwater.model import Dead, Event, Lease, NewEvent, Retry

app = typer.Typer()

# All that the demo makes has these names, and is removed at its end.
TOPIC: Final = "headwater-demo-orders"
TABLE_TOPIC: Final = "headwater-demo-table"
CURSORS: Final = ("headwater-demo-reader", "headwater-demo-totals")
QUEUE: Final = "headwater-demo-mailer"
EUROPE: Final = "headwater-demo-europe"
EVERYTHING: Final = "headwater-demo-everything"
ALERTS: Final = "headwater-demo-alerts"
GROUPS: Final = (QUEUE, EUROPE, EVERYTHING, ALERTS)
REMOVE_TABLES: Final = "drop schema if exists headwater_demo cascade"
MAKE_TABLES: Final = """
create schema headwater_demo;
create table headwater_demo.orders (id integer primary key, customer text not null, cents integer not null);
create table headwater_demo.customer_total (customer text primary key, cents integer not null);
"""
ADD_ORDER: Final = "insert into headwater_demo.orders (id, customer, cents) values (%s, %s, %s)"
ADD_TO_TOTAL: Final = (
    "insert into headwater_demo.customer_total as t (customer, cents) values (%s, %s) "
    "on conflict (customer) do update set cents = t.cents + excluded.cents"
)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a step plays: the log, and how to tell what happens."""

    log: headwater.Headwater
    tell: Callable[[str], None]


Step = Callable[[Stage], Mapping[str, Any]]
"""A step does one thing, tells of it, and returns the facts; its docstring is its title."""


def publish_in_a_transaction(stage: Stage) -> Mapping[str, Any]:
    """Publish in your own transaction"""
    orders = [(1, "ada", 1200), (2, "bob", 550), (3, "ada", 300)]
    for number, customer, cents in orders:
        with stage.log.transaction() as connection:
            connection.execute(ADD_ORDER, (number, customer, cents))
            stage.log.publish(
                TOPIC,
                {"order": number, "customer": customer, "cents": cents},
                key=customer,
                type="OrderPlaced",
                connection=connection,
            )
    stage.tell(f"{len(orders)} orders and their {len(orders)} events were committed together.")
    with suppress(_CardDeclined), stage.log.transaction() as connection:
        connection.execute(ADD_ORDER, (4, "eve", 99))
        stage.log.publish(TOPIC, {"order": 4}, type="OrderPlaced", connection=connection)
        raise _CardDeclined
    events = stage.log.read(TOPIC)
    stage.tell(f"A fourth was rolled back: no order, no event. The log holds {len(events)}:")
    for event in events:
        stage.tell(f"  position {event.position}  {event.type}  {event.data}")
    return {"orders": len(orders), "events": len(events)}


def publish_the_same_again(stage: Stage) -> Mapping[str, Any]:
    """Publish the same event twice, and have it once"""
    first, again = (stage.log.publish(TOPIC, {"paid": 1}, type="OrderPaid", event_id="payment-77") for _ in range(2))
    stage.tell(f"event id payment-77: the first call got position {first}, the repeat got {again}.")
    return {"first": first, "again": again}


def follow_with_a_cursor(stage: Stage) -> Mapping[str, Any]:
    """Follow with a cursor"""

    def follow() -> list[int]:
        return [e.position for e in stage.log.follow(TOPIC, cursor=CURSORS[0], stop_when_caught_up=True)]

    first = follow()
    stage.log.publish(TOPIC, {"order": 1}, key="ada", type="OrderShipped")
    second = follow()
    stage.tell(f"The first run read {_listed(first)} and saved its cursor.")
    stage.tell(f"After one more event, the second run read only {_listed(second)}.")
    stage.log.set_cursor(CURSORS[0], position=0)
    third = follow()
    stage.tell(f"Rewound to the start, the third run read all {len(third)} again.")
    return {"first": first, "second": second, "after_rewind": third}


def keep_totals_exactly_once(stage: Stage) -> Mapping[str, Any]:
    """Keep a table up to date, each event counted exactly once"""
    crashes = 1

    def add(connection: psycopg.Connection[Any], events: Sequence[Event]) -> None:
        nonlocal crashes
        for event in events:
            if event.type == "OrderPlaced":
                connection.execute(ADD_TO_TOTAL, (event.data["customer"], event.data["cents"]))
        if crashes > 0:
            crashes -= 1
            raise _PowerCut

    crashed = True
    with suppress(_PowerCut):
        stage.log.process(TOPIC, add, cursor=CURSORS[1], stop_when_caught_up=True)
        crashed = False
    stage.tell("The handler crashed after it had written its sums: they and the cursor were rolled back together.")
    stage.log.process(TOPIC, add, cursor=CURSORS[1], stop_when_caught_up=True)
    with stage.log.connection() as connection:
        totals = dict(
            connection.execute("select customer, cents from headwater_demo.customer_total order by customer").fetchall()
        )
    stage.tell(f"The next run did it again; nothing is counted twice: {totals}")
    return {"crashed": crashed, "totals": totals}


def deliver_later(stage: Stage) -> Mapping[str, Any]:
    """Deliver later"""
    start = stage.log.state().settled
    now = datetime.now(UTC)
    stage.log.schedule(TOPIC, {"remind": 1}, delay=timedelta(milliseconds=300), type="Reminder")
    moved = stage.log.schedule(TOPIC, {"remind": 2}, deliver_at=now + timedelta(days=3650), type="Reminder")
    cancelled = stage.log.schedule(TOPIC, {"remind": 3}, delay=timedelta(hours=1), type="Reminder")
    assert moved is not None
    assert cancelled is not None
    stage.tell(f"{len(stage.log.scheduled(TOPIC))} events wait: in 0.3 s, in an hour, in ten years.")
    stage.log.cancel_scheduled(cancelled)
    stage.log.move_scheduled(moved, now + timedelta(milliseconds=400))
    stage.tell("The second is cancelled, the third is moved to today. A follower sees them come:")
    arrived = []
    for event in stage.log.follow(TOPIC, after=start):
        arrived.append(event.data["remind"])
        stage.tell(f"  position {event.position}  {event.data}")
        if len(arrived) == 2:
            break
    return {"arrived": arrived}


def wait_for_order(stage: Stage) -> Mapping[str, Any]:
    """Nobody overtakes: readers see what is settled"""
    before = stage.log.state().settled
    with stage.log.transaction() as slow:
        stage.log.publish(TOPIC, {"slow": True}, connection=slow)
        stage.log.publish(TOPIC, {"fast": True})
        state = stage.log.state()
        (publisher,) = stage.log.publishers_in_flight()
        seen = stage.log.read(TOPIC, after=before)
        stage.tell(
            f"A transaction has published and is still open (process {publisher.pid}). Another committed after it."
        )
        stage.tell(f"Positions drawn: {state.drawn}, settled: {state.settled}; a reader sees {len(seen)} of both.")
    events = [next(iter(event.data)) for event in stage.log.read(TOPIC, after=before)]
    stage.tell(f"Once it commits, readers see both, in order: {', '.join(events)}.")
    return {"seen_while_open": len(seen), "seen_after": events}


def share_work_in_a_queue(stage: Stage) -> Mapping[str, Any]:
    """Work the log as a queue: two workers, a retry, a dead letter"""
    log = stage.log
    log.create_group(QUEUE, TOPIC, from_end=True, max_attempts=3, backoff_seconds=0)
    log.publish_batch(TOPIC, [NewEvent({"mail": number}) for number in range(1, 7)])
    leases = [_claimed(log, QUEUE, worker=name, batch_size=3) for name in ("worker-a", "worker-b")]
    shared = [[event.data["mail"] for event in lease.events] for lease in leases]
    stage.tell(f"Two workers claim: one gets mails {shared[0]}, the other {shared[1]}.")
    log.ack(leases[0])
    first, second, _ = leases[1].events
    log.settle(leases[1], {first.position: Retry(reason="mail server busy"), second.position: Dead("no such address")})
    again = _claimed(log, QUEUE, worker="worker-a", batch_size=3)
    stage.tell(
        f"Of the second batch one failed and one is hopeless. Again comes only mail {again.events[0].data['mail']}, "
        f"as try {again.events[0].attempt}."
    )
    log.ack(again)
    (letter,) = log.dead_letters(QUEUE)
    stage.tell(f"The hopeless one is a dead letter: {letter.last_error!r}. Its address is mended, so it is redriven:")
    log.redrive(QUEUE)
    log.ack(_claimed(log, QUEUE, worker="worker-b", batch_size=3))
    (overview,) = log.groups([QUEUE])
    stage.tell(f"  done {overview.done}, ready {overview.ready}, dead {overview.dead}")
    return {"shared": shared, "tries": again.events[0].attempt, "dead": letter.last_error, "done": overview.done}


def route_to_groups(stage: Stage) -> Mapping[str, Any]:
    """Route by binding: stored once, for every group that wants it"""
    log = stage.log
    log.create_group(EVERYTHING, TOPIC, from_end=True)
    log.create_group(EUROPE, from_end=True)
    log.bind(EUROPE, topic=TOPIC, pattern="orders.eu.#")
    for routing_key in ("orders.eu.placed", "orders.us.placed", "orders.eu.paid"):
        log.publish(TOPIC, {}, routing_key=routing_key)
    got = {
        name: [event.routing_key for event in _claimed(log, name, worker="demo", batch_size=10).events]
        for name in (EUROPE, EVERYTHING)
    }
    stage.tell(f"A group bound to orders.eu.# gets {', '.join(map(str, got[EUROPE]))}.")
    stage.tell(f"Another, bound to the whole topic, gets all {len(got[EVERYTHING])}, at its own pace.")
    return {"europe": got[EUROPE], "everything": got[EVERYTHING]}


def subscribe_by_sql(stage: Stage) -> Mapping[str, Any]:
    """Subscribe by SQL condition"""
    condition = "e.type = 'OrderPlaced' and (e.data ->> 'cents')::int > (s.params ->> 'over')::int"
    try:
        ids = {stage.log.subscribe(ALERTS, condition, {"over": over}, topics=TOPIC): over for over in (1_000, 100_000)}
    except NotAllowed as error:
        stage.tell(f"Not in this database: {error.message}.")
        return {"matched": None}
    stage.log.publish_batch(TOPIC, [NewEvent({"cents": cents}, type="OrderPlaced") for cents in (500, 5_000, 500_000)])
    reading = stage.log.read_next(ALERTS, reader="demo")
    stage.tell(f"{condition}")
    stage.tell("Two subscriptions share it, with different parameters. Of three orders:")
    matched = {one.event.data["cents"]: [ids[one_id] for one_id in one.subscription_ids] for one in reading.events}
    for cents, overs in matched.items():
        stage.tell(f"  {cents} cents is over {' and '.join(map(str, overs))}")
    return {"matched": matched}


def watch_a_table(stage: Stage) -> Mapping[str, Any]:
    """Watch a table: what happens to it, as events"""
    stage.log.watch_table("headwater_demo.orders", topic=TABLE_TOPIC, when_changed=["cents"])
    with stage.log.transaction() as connection:
        connection.execute("update headwater_demo.orders set cents = cents + 1 where customer = 'bob'")
        connection.execute("delete from headwater_demo.orders where id = 1")
    events = stage.log.read(TABLE_TOPIC)
    stage.tell("An update and a delete were committed, and with them their events:")
    for event in events:
        stage.tell(f"  {event.type}  before {event.data['before']}  after {event.data['after']}")
    return {"changes": [event.type for event in events]}


# What is to be shown grows by a line here.
STEPS: Final[tuple[Step, ...]] = (
    publish_in_a_transaction,
    publish_the_same_again,
    follow_with_a_cursor,
    keep_totals_exactly_once,
    deliver_later,
    wait_for_order,
    share_work_in_a_queue,
    route_to_groups,
    subscribe_by_sql,
    watch_a_table,
)


@app.command(
    epilog=examples(
        "headwater demo", "headwater demo --pipeline", "headwater demo --dsn postgresql://localhost/scratch"
    )
)
def demo(
    context: typer.Context,
    pipeline: Annotated[
        bool, typer.Option("--pipeline", help="Show pipelines on Spark instead: one change, seen in five places.")
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show the log at work, in a few seconds, and clean up.

    Without a database given it starts a temporary embedded one.
    """
    tell = (lambda text: None) if as_json else output.say
    started = time.monotonic()
    if pipeline:
        if dsn is not None:
            raise typer.BadParameter("the pipelines are shown on servers of their own", param_hint="--dsn")
        found = demo_pipeline.show(tell)
        if as_json:
            output.emit({"steps": found, "seconds": time.monotonic() - started})
        return
    if not (dsn or session(context).settings.dsn):
        tell("Starting a Postgres of our own in a temporary directory ...")
    results = []
    with scratch_log(session(context), dsn) as log:
        _remove(log)
        with log.connection() as connection:
            connection.execute(MAKE_TABLES)
        log.create_topic(TOPIC)
        try:
            for number, step in enumerate(STEPS, 1):
                title = step.__doc__
                tell(f"\n{number}. {title}")
                results.append(
                    {"step": step.__name__, "title": title, **step(Stage(log, lambda text: tell(f"   {text}")))}
                )
        finally:
            _remove(log)
    seconds = time.monotonic() - started
    if as_json:
        output.emit({"steps": results, "seconds": seconds})
        return
    tell(f"\nThat was the log, in {seconds:.1f} s, and all of it is removed again. Where to look next:")
    tell("   headwater demo --pipeline  capture, NATS, Kafka, a lake and projections, on Spark")
    tell("   headwater up               a Postgres with the log in it, to keep")
    tell("   headwater --help           all commands, each with examples")
    tell("   docs/tutorial.md           the same by hand, in Python, SQL and on the command line")
    tell("   docs/how-to/               work a queue, route events, subscribe by SQL, watch a table")
    tell("   examples/worker.py         a worker to start from: headwater work examples.worker:app")


def _remove(log: headwater.Headwater) -> None:
    """Remove what this demo made, or one that was cut short."""
    with log.connection() as connection:
        connection.execute(REMOVE_TABLES)
    for name in GROUPS:
        log.delete_group(name)
    for name in CURSORS:
        log.delete_cursor(name)
    for name in (TOPIC, TABLE_TOPIC):
        with suppress(TopicNotFound):
            log.delete_topic(name)


def _claimed(log: headwater.Headwater, group: str, *, worker: str, batch_size: int) -> Lease:
    lease = log.claim(group, worker=worker, batch_size=batch_size)
    # Nobody else works on the groups of the demo, so that there is always something for it.
    assert lease is not None
    return lease


def _listed(positions: list[int]) -> str:
    return f"position{'' if len(positions) == 1 else 's'} {', '.join(map(str, positions))}"


class _CardDeclined(Exception):
    """Why an order does not happen."""


class _PowerCut(Exception):
    """What a handler must survive."""
