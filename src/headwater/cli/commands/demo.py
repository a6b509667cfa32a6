"""`headwater demo`: the main features, step by step, on a temporary embedded Postgres."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from typing import Annotated, Any, Final

import psycopg
import typer

import headwater
from headwater.cli import installation, output
from headwater.cli.commands import demo_pipeline
from headwater.cli.connection import session
from headwater.cli.options import Dsn, Json, examples
from headwater.cli.temporary_log import temporary_log
from headwater.errors import NotAllowed, TopicNotFound
from headwater.log.model import Event, NewEvent
from headwater.queue.model import Dead, Lease, Retry

app = typer.Typer()

# The demo creates only objects with these names, and removes them at its end.
TOPIC: Final = "headwater-demo-orders"
TABLE_TOPIC: Final = "headwater-demo-table"
CURSORS: Final = ("headwater-demo-reader", "headwater-demo-totals")
QUEUE: Final = "headwater-demo-mailer"
EUROPE: Final = "headwater-demo-europe"
EVERYTHING: Final = "headwater-demo-everything"
ALERTS: Final = "headwater-demo-alerts"
QUEUES: Final = (QUEUE, EUROPE, EVERYTHING, ALERTS)
DROP_TABLES: Final = "drop schema if exists headwater_demo cascade"
CREATE_TABLES: Final = """
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
class DemoContext:
    """What a step works with: the log, and a function that prints a line."""

    log: headwater.Headwater
    explain: Callable[[str], None]


Step = Callable[[DemoContext], Mapping[str, Any]]
"""A step shows one feature, explains it, and returns its results; its docstring is its title."""


def publish_in_a_transaction(demo: DemoContext) -> Mapping[str, Any]:
    """Publish in your own transaction"""
    orders = [(1, "ada", 1200), (2, "bob", 550), (3, "ada", 300)]
    for number, customer, cents in orders:
        with demo.log.transaction() as connection:
            connection.execute(ADD_ORDER, (number, customer, cents))
            demo.log.publish(
                TOPIC,
                {"order": number, "customer": customer, "cents": cents},
                key=customer,
                type="OrderPlaced",
                connection=connection,
            )
    demo.explain(f"{len(orders)} orders and their {len(orders)} events were committed together.")
    with suppress(_CardDeclined), demo.log.transaction() as connection:
        connection.execute(ADD_ORDER, (4, "eve", 99))
        demo.log.publish(TOPIC, {"order": 4}, type="OrderPlaced", connection=connection)
        raise _CardDeclined
    events = demo.log.read(TOPIC)
    demo.explain(f"A fourth order was rolled back: no order, no event. The log has {len(events)} events:")
    for event in events:
        demo.explain(f"  position {event.position}  {event.type}  {event.data}")
    return {"orders": len(orders), "events": len(events)}


def publish_the_same_again(demo: DemoContext) -> Mapping[str, Any]:
    """Publish the same event twice, store it once"""
    first, again = (demo.log.publish(TOPIC, {"paid": 1}, type="OrderPaid", event_id="payment-77") for _ in range(2))
    demo.explain(f"event id payment-77: the first call got position {first}, the repeat got {again}.")
    return {"first": first, "again": again}


def follow_with_a_cursor(demo: DemoContext) -> Mapping[str, Any]:
    """Follow with a cursor"""

    def follow() -> list[int]:
        return [e.position for e in demo.log.follow(TOPIC, cursor=CURSORS[0], stop_when_caught_up=True)]

    first = follow()
    demo.log.publish(TOPIC, {"order": 1}, key="ada", type="OrderShipped")
    second = follow()
    demo.explain(f"The first run read {_join_positions(first)} and saved its cursor.")
    demo.explain(f"After one more event, the second run read only {_join_positions(second)}.")
    demo.log.set_cursor(CURSORS[0], position=0)
    third = follow()
    demo.explain(f"Rewound to the start, the third run read all {len(third)} again.")
    return {"first": first, "second": second, "after_rewind": third}


def keep_totals_exactly_once(demo: DemoContext) -> Mapping[str, Any]:
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
        demo.log.process(TOPIC, add, cursor=CURSORS[1], stop_when_caught_up=True)
        crashed = False
    demo.explain("The handler crashed after it wrote the totals: the totals and the cursor were rolled back together.")
    demo.log.process(TOPIC, add, cursor=CURSORS[1], stop_when_caught_up=True)
    with demo.log.connection() as connection:
        totals = dict(
            connection.execute("select customer, cents from headwater_demo.customer_total order by customer").fetchall()
        )
    demo.explain(f"The next run processed the events again; none is counted twice: {totals}")
    return {"crashed": crashed, "totals": totals}


def deliver_later(demo: DemoContext) -> Mapping[str, Any]:
    """Deliver later"""
    start = demo.log.state().stable
    now = datetime.now(UTC)
    demo.log.schedule(TOPIC, {"remind": 1}, delay=timedelta(milliseconds=300), type="Reminder")
    moved = demo.log.schedule(TOPIC, {"remind": 2}, deliver_at=now + timedelta(days=3650), type="Reminder")
    cancelled = demo.log.schedule(TOPIC, {"remind": 3}, delay=timedelta(hours=1), type="Reminder")
    assert moved is not None
    assert cancelled is not None
    demo.explain(f"{len(demo.log.scheduled(TOPIC))} events are scheduled: in 0.3 s, in an hour, in ten years.")
    demo.log.cancel_scheduled(cancelled)
    demo.log.move_scheduled(moved, now + timedelta(milliseconds=400))
    demo.explain(
        "The one in an hour is cancelled, the one in ten years is moved to now. A follower receives the events:"
    )
    arrived = []
    for event in demo.log.follow(TOPIC, after=start):
        arrived.append(event.data["remind"])
        demo.explain(f"  position {event.position}  {event.data}")
        if len(arrived) == 2:
            break
    return {"arrived": arrived}


def wait_for_order(demo: DemoContext) -> Mapping[str, Any]:
    """Keep the order: readers see events up to the stable position"""
    before = demo.log.state().stable
    with demo.log.transaction() as slow:
        demo.log.publish(TOPIC, {"slow": True}, connection=slow)
        demo.log.publish(TOPIC, {"fast": True})
        state = demo.log.state()
        (publisher,) = demo.log.publishers_in_flight()
        seen = demo.log.read(TOPIC, after=before)
        demo.explain(
            f"One transaction has published and is still open (process {publisher.pid}). A later one has committed."
        )
        demo.explain(f"Head {state.head}, stable position {state.stable}: a reader sees {len(seen)} of the two events.")
    events = [next(iter(event.data)) for event in demo.log.read(TOPIC, after=before)]
    demo.explain(f"After the first commits, readers see both, in order: {', '.join(events)}.")
    return {"seen_while_open": len(seen), "seen_after": events}


def share_work_in_a_queue(demo: DemoContext) -> Mapping[str, Any]:
    """Process events with a queue: two workers, a retry, a dead letter"""
    log = demo.log
    log.create_queue(QUEUE, TOPIC, from_end=True, max_attempts=3, backoff_seconds=0)
    log.publish_batch(TOPIC, [NewEvent({"mail": number}) for number in range(1, 7)])
    leases = [_claim(log, QUEUE, worker=name, batch_size=3) for name in ("worker-a", "worker-b")]
    shared = [[event.data["mail"] for event in lease.events] for lease in leases]
    demo.explain(f"Two workers claim: one gets mails {shared[0]}, the other {shared[1]}.")
    log.ack(leases[0])
    first, second, _ = leases[1].events
    log.settle(leases[1], {first.position: Retry(reason="mail server busy"), second.position: Dead("no such address")})
    again = _claim(log, QUEUE, worker="worker-a", batch_size=3)
    demo.explain(
        f"In the second batch one event failed and one is a dead letter. Only mail {again.events[0].data['mail']} is "
        f"delivered again, as attempt {again.events[0].attempt}."
    )
    log.ack(again)
    (letter,) = log.dead_letters(QUEUE)
    demo.explain(f"The dead letter has the error {letter.last_error!r}. After the cause is fixed, it is redriven:")
    log.redrive(QUEUE)
    log.ack(_claim(log, QUEUE, worker="worker-b", batch_size=3))
    (overview,) = log.queues([QUEUE])
    demo.explain(f"  done {overview.done}, ready {overview.ready}, dead {overview.dead}")
    return {"shared": shared, "tries": again.events[0].attempt, "dead": letter.last_error, "done": overview.done}


def route_to_queues(demo: DemoContext) -> Mapping[str, Any]:
    """Route with bindings: an event is stored once and delivered to every matching queue"""
    log = demo.log
    log.create_queue(EVERYTHING, TOPIC, from_end=True)
    log.create_queue(EUROPE, from_end=True)
    log.bind(EUROPE, topic=TOPIC, pattern="orders.eu.#")
    for routing_key in ("orders.eu.placed", "orders.us.placed", "orders.eu.paid"):
        log.publish(TOPIC, {}, routing_key=routing_key)
    got = {
        name: [event.routing_key for event in _claim(log, name, worker="demo", batch_size=10).events]
        for name in (EUROPE, EVERYTHING)
    }
    demo.explain(f"A queue bound to orders.eu.# gets {', '.join(map(str, got[EUROPE]))}.")
    demo.explain(f"Another, bound to the whole topic, gets all {len(got[EVERYTHING])}, at its own pace.")
    return {"europe": got[EUROPE], "everything": got[EVERYTHING]}


def subscribe_by_sql(demo: DemoContext) -> Mapping[str, Any]:
    """Subscribe with an SQL filter"""
    filter = "e.type = 'OrderPlaced' and (e.data ->> 'cents')::int > (s.params ->> 'over')::int"
    try:
        ids = {demo.log.subscribe(ALERTS, filter, {"over": over}, topics=TOPIC): over for over in (1_000, 100_000)}
    except NotAllowed as error:
        demo.explain(f"Not available in this database: {error.message}.")
        return {"matched": None}
    demo.log.publish_batch(TOPIC, [NewEvent({"cents": cents}, type="OrderPlaced") for cents in (500, 5_000, 500_000)])
    reading = demo.log.read_next(ALERTS, reader="demo")
    demo.explain(f"{filter}")
    demo.explain("Two subscriptions use this filter with different parameters. Of three orders:")
    matched = {one.event.data["cents"]: [ids[one_id] for one_id in one.subscription_ids] for one in reading.events}
    for cents, overs in matched.items():
        demo.explain(f"  {cents} cents is over {' and '.join(map(str, overs))}")
    return {"matched": matched}


def watch_a_table(demo: DemoContext) -> Mapping[str, Any]:
    """Watch a table: publish its changes as events"""
    demo.log.watch_table("headwater_demo.orders", topic=TABLE_TOPIC, when_changed=["cents"])
    with demo.log.transaction() as connection:
        connection.execute("update headwater_demo.orders set cents = cents + 1 where customer = 'bob'")
        connection.execute("delete from headwater_demo.orders where id = 1")
    events = demo.log.read(TABLE_TOPIC)
    demo.explain("An update and a delete were committed together with their events:")
    for event in events:
        demo.explain(f"  {event.type}  before {event.data['before']}  after {event.data['after']}")
    return {"changes": [event.type for event in events]}


STEPS: Final[tuple[Step, ...]] = (
    publish_in_a_transaction,
    publish_the_same_again,
    follow_with_a_cursor,
    keep_totals_exactly_once,
    deliver_later,
    wait_for_order,
    share_work_in_a_queue,
    route_to_queues,
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
        bool,
        typer.Option("--pipeline", help="Show pipelines on Spark instead: one change, delivered to five destinations."),
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show the main features in a few seconds, and clean up.

    Without --dsn or HEADWATER_DSN it runs on a temporary embedded Postgres.
    """
    explain = (lambda text: None) if as_json else output.print_line
    started = time.monotonic()
    if pipeline:
        if dsn is not None:
            raise typer.BadParameter(
                "--pipeline uses temporary servers; it cannot be combined with --dsn", param_hint="--dsn"
            )
        steps = demo_pipeline.show(explain)
        if as_json:
            output.emit({"steps": steps, "seconds": time.monotonic() - started})
        return
    if not (dsn or session(context).settings.dsn):
        explain("Starting a temporary embedded Postgres ...")
    results = []
    with temporary_log(session(context), dsn) as log:
        _remove(log)
        with log.connection() as connection:
            connection.execute(CREATE_TABLES)
        log.create_topic(TOPIC)
        try:
            for number, step in enumerate(STEPS, 1):
                title = step.__doc__
                explain(f"\n{number}. {title}")
                results.append(
                    {
                        "step": step.__name__,
                        "title": title,
                        **step(DemoContext(log, lambda text: explain(f"   {text}"))),
                    }
                )
        finally:
            _remove(log)
    seconds = time.monotonic() - started
    if as_json:
        output.emit({"steps": results, "seconds": seconds})
        return
    explain(f"\nThe demo took {seconds:.1f} s and removed everything that it created. Next:")
    for command, purpose in _next_commands():
        explain(f"   {command}\n      {purpose}")


def _next_commands() -> Iterator[tuple[str, str]]:
    """Commands to try next, as they work in the user's shell, and what each is for."""
    name = installation.program()
    yield f"{name} up --detach", f"start an embedded Postgres that keeps its data; {name} down stops it"
    yield f"{name} docs tutorial", "the same steps in Python, SQL and on the command line"
    yield f"{name} docs", "all pages: queues, routing, SQL subscriptions, watched tables and more"
    yield f"{name} --help", "all commands"
    pipeline = "change capture, NATS, Kafka, a lake and projections, on Spark"
    if all(find_spec(module) is not None for module in ("pyspark", "nats", "kio")):
        yield f"{name} demo --pipeline", pipeline
    elif installation.checkout() is not None:
        yield "./dev demo --pipeline", f"{pipeline} (installs Spark first)"
    else:
        yield "pip install 'headwater[all]'", f"and then {name} demo --pipeline: {pipeline}"


def _remove(log: headwater.Headwater) -> None:
    """Remove the objects of this demo, and of an earlier one that was interrupted."""
    with log.connection() as connection:
        connection.execute(DROP_TABLES)
    for name in QUEUES:
        log.delete_queue(name)
    for name in CURSORS:
        log.delete_cursor(name)
    for name in (TOPIC, TABLE_TOPIC):
        with suppress(TopicNotFound):
            log.delete_topic(name)


def _claim(log: headwater.Headwater, queue: str, *, worker: str, batch_size: int) -> Lease:
    lease = log.claim(queue, worker=worker, batch_size=batch_size)
    # No other worker uses the queues of the demo, so events are always available.
    assert lease is not None
    return lease


def _join_positions(positions: list[int]) -> str:
    return f"position{'' if len(positions) == 1 else 's'} {', '.join(map(str, positions))}"


class _CardDeclined(Exception):
    """Rolls back an order."""


class _PowerCut(Exception):
    """Simulates a crash of a handler."""
