"""Does the simulator of faults name the handlers that are not idempotent, and no others?

Each case is an app with one handler `handle`. The cases are those that people write: ten with a fault, and the same ten
done right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

import headwater
from headwater import App, ClaimedEvent
from headwater.errors import InvalidRequest
from headwater.testing import FaultReport, simulate_faults
from headwater.testing.faults import NotDeterministic

TABLES = """
drop table if exists entry, total, invoice, line, mark;
create table entry (id bigserial primary key, order_id integer, made_at timestamptz not null default now());
create table total (customer text primary key, cents integer not null);
create table invoice (id bigserial primary key, order_id integer unique, sent boolean not null default false);
create table line (invoice_id bigint not null references invoice (id), item text, unique (invoice_id, item));
create table mark (position bigint primary key);
insert into total values ('ada', 100);
"""


@dataclass(slots=True)
class World:
    """What handlers use: a connection in autocommit, the log, and a mail server."""

    dsn: str
    log: headwater.Headwater
    sql: psycopg.Connection[Any]
    mails: list[Any] = field(default_factory=list)
    # By the key that the mail server knows a repeat by.
    mails_by_key: dict[str | None, Any] = field(default_factory=dict)

    def do(self, statement: str, *values: Any) -> list[Any]:
        done = self.sql.execute(statement.encode(), values)
        return done.fetchall() if done.description else []


@pytest.fixture
def world(dsn: str, log: headwater.Headwater) -> Iterator[World]:
    for topic in ("orders", "shipments"):
        log.create_topic(topic, if_missing=True)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TABLES)
        yield World(dsn, log, connection)


def simulate(world: World, app: App, **options: Any) -> FaultReport:
    def publish(log: headwater.Headwater) -> None:
        for number in (1, 2, 3):
            log.publish("orders", {"id": number, "customer": "ada", "cents": number}, key="ada", event_id=f"o-{number}")

    def observe() -> object:
        return sorted(world.mails), sorted(world.mails_by_key.items())

    def reset() -> None:
        world.mails.clear()
        world.mails_by_key.clear()

    return simulate_faults(app, world.dsn, publish, observe=observe, reset=reset, **options)


Case = Callable[[App, World], None]


def appends_a_row(app: App, world: World) -> None:
    @app.worker("orders", queue="q")
    def handle(event: ClaimedEvent) -> None:
        world.do("insert into entry (order_id) values (%s)", event.data["id"])


def appends_a_row_in_the_transaction(app: App, world: World) -> None:
    @app.worker("orders", queue="q", transactional=True)
    def handle(event: ClaimedEvent, connection: psycopg.Connection[Any]) -> None:
        connection.execute("insert into entry (order_id) values (%s)", (event.data["id"],))


def adds_to_a_total(app: App, world: World) -> None:
    @app.worker("orders", queue="q")
    async def handle(event: ClaimedEvent) -> None:
        await asyncio.to_thread(world.do, "update total set cents = cents + %s", event.data["cents"])


def adds_to_a_total_in_the_transaction(app: App, world: World) -> None:
    @app.worker("orders", queue="q", transactional=True)
    async def handle(event: ClaimedEvent, connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("update total set cents = cents + %s", (event.data["cents"],))


def sends_a_mail(app: App, world: World) -> None:
    @app.worker("orders", queue="q")
    def handle(event: ClaimedEvent) -> None:
        world.mails.append(event.data["id"])


def sends_a_mail_with_an_idempotency_key(app: App, world: World) -> None:
    @app.worker("orders", queue="q")
    def handle(event: ClaimedEvent) -> None:
        world.mails_by_key[event.event_id] = event.data["id"]


def publishes_again(app: App, world: World) -> None:
    @app.worker("orders", queue="q")
    def handle(event: ClaimedEvent) -> None:
        world.log.publish("shipments", event.data["id"])


def publishes_with_an_event_id(app: App, world: World) -> None:
    @app.worker("orders", queue="q")
    def handle(event: ClaimedEvent) -> None:
        world.log.publish("shipments", event.data["id"], event_id=f"ship-{event.data['id']}")


def marks_before_the_work(app: App, world: World) -> None:
    """A crash after the mark loses the work."""

    @app.worker("orders", queue="q")
    def handle(event: ClaimedEvent) -> None:
        if world.do("insert into mark values (%s) on conflict do nothing returning 1", event.data["id"]):
            world.mails.append(event.data["id"])


def marks_and_works_in_one_transaction(app: App, world: World) -> None:
    @app.worker("orders", queue="q")
    def handle(event: ClaimedEvent) -> None:
        with psycopg.connect(world.dsn) as connection:
            if connection.execute(
                "insert into mark values (%s) on conflict do nothing returning 1", (event.data["id"],)
            ).fetchall():
                connection.execute("insert into entry (order_id) values (%s)", (event.data["id"],))


def marks_after_the_work(app: App, world: World) -> None:
    """A crash before the mark repeats the work."""

    @app.worker("orders", queue="q")
    def handle(event: ClaimedEvent) -> None:
        if not world.do("select from mark where position = %s", event.data["id"]):
            world.mails.append(event.data["id"])
            world.do("insert into mark values (%s) on conflict do nothing", event.data["id"])


def upserts_a_row(app: App, world: World) -> None:
    @app.worker("orders", queue="q")
    def handle(event: ClaimedEvent) -> None:
        world.do("insert into invoice (order_id) values (%s) on conflict (order_id) do nothing", event.data["id"])


def writes_outside_of_the_transaction(app: App, world: World) -> None:
    @app.worker("orders", queue="q", transactional=True)
    def handle(event: ClaimedEvent, connection: psycopg.Connection[Any]) -> None:
        world.mails.append(event.data["id"])
        connection.execute("insert into entry (order_id) values (%s)", (event.data["id"],))


def writes_two_tables_in_the_transaction(app: App, world: World) -> None:
    @app.worker("orders", queue="q", transactional=True)
    def handle(event: ClaimedEvent, connection: psycopg.Connection[Any]) -> None:
        row = connection.execute(
            "insert into invoice (order_id) values (%s) returning id", (event.data["id"],)
        ).fetchone()
        assert row is not None
        connection.execute("insert into line values (%s, 'tea')", (row[0],))


def last_event_wins(app: App, world: World) -> None:
    """In another order, another event is the last."""

    @app.worker("orders", queue="q")
    def handle(event: ClaimedEvent) -> None:
        world.do("update total set cents = %s where customer = %s", event.data["cents"], event.data["customer"])


def last_event_wins_with_ordered_keys(app: App, world: World) -> None:
    @app.worker("orders", queue="q", ordered_keys=True, transactional=True)
    def handle(event: ClaimedEvent, connection: psycopg.Connection[Any]) -> None:
        connection.execute("update total set cents = %s where customer = %s", (event.data["cents"], "ada"))


def swallows_a_repeat_as_an_error(app: App, world: World) -> None:
    """The second step is skipped if the first one was done by an earlier attempt."""

    @app.worker("orders", queue="q", max_attempts=5)
    def handle(event: ClaimedEvent) -> None:
        try:
            world.do("insert into invoice (order_id) values (%s)", event.data["id"])
        except psycopg.errors.UniqueViolation:
            return
        world.do("update invoice set sent = true where order_id = %s", event.data["id"])


def completes_a_repeat(app: App, world: World) -> None:
    @app.worker("orders", queue="q")
    def handle(event: ClaimedEvent) -> None:
        world.do("insert into invoice (order_id) values (%s) on conflict do nothing", event.data["id"])
        world.do("update invoice set sent = true where order_id = %s", event.data["id"])


def counts_a_batch(app: App, world: World) -> None:
    @app.worker("orders", queue="q", batch=True)
    def handle(events: list[ClaimedEvent]) -> None:
        world.do("update total set cents = cents + %s", sum(event.data["cents"] for event in events))


def counts_a_batch_in_the_transaction(app: App, world: World) -> None:
    @app.worker("orders", queue="q", batch=True, transactional=True)
    async def handle(events: list[ClaimedEvent], connection: psycopg.AsyncConnection[Any]) -> None:
        cents = sum(event.data["cents"] for event in events)
        await connection.execute("update total set cents = cents + %s", (cents,))


WRONG = (
    appends_a_row,
    adds_to_a_total,
    sends_a_mail,
    publishes_again,
    marks_before_the_work,
    marks_after_the_work,
    writes_outside_of_the_transaction,
    last_event_wins,
    swallows_a_repeat_as_an_error,
    counts_a_batch,
)
RIGHT = (
    appends_a_row_in_the_transaction,
    adds_to_a_total_in_the_transaction,
    sends_a_mail_with_an_idempotency_key,
    publishes_with_an_event_id,
    marks_and_works_in_one_transaction,
    upserts_a_row,
    writes_two_tables_in_the_transaction,
    last_event_wins_with_ordered_keys,
    completes_a_repeat,
    counts_a_batch_in_the_transaction,
)


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.__name__)
def test_a_handler_that_is_not_idempotent_is_named(case: Case, world: World) -> None:
    app = App()
    case(app, world)
    report = simulate(world, app)
    assert not report
    assert report.handlers == {"handle"}
    assert "handle is not idempotent: " in str(report)


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: case.__name__)
def test_an_idempotent_handler_is_not_named(case: Case, world: World) -> None:
    app = App()
    case(app, world)
    report = simulate(world, app)
    assert report, str(report)
    assert report.runs > 0


def test_only_the_wrong_one_of_two_handlers_is_named(world: World) -> None:
    app = App()

    @app.worker("orders", queue="right", transactional=True)
    def right(event: ClaimedEvent, connection: psycopg.Connection[Any]) -> None:
        connection.execute("insert into entry (order_id) values (%s)", (event.data["id"],))
        world.log.publish("shipments", event.data["id"], connection=connection)

    @app.worker("shipments", queue="wrong")
    def wrong(event: ClaimedEvent) -> None:
        world.mails.append(event.data)

    assert simulate(world, app).handlers == {"wrong"}


def test_the_same_seed_gives_the_same_findings_and_the_tables_are_put_back(world: World) -> None:
    app = App()
    adds_to_a_total(app, world)
    reports = [simulate(world, app, seed=7, max_runs=8) for _ in range(2)]
    assert reports[0] == reports[1]
    assert reports[0].runs == 8
    assert world.do("select cents from total") == [(100,)]


def test_handlers_with_a_random_result_are_refused(world: World) -> None:
    app = App()

    @app.worker("orders", queue="q")
    def handle(event: ClaimedEvent) -> None:
        world.mails.append(event.published_at.isoformat())

    with pytest.raises(NotDeterministic, match="observed"):
        simulate(world, app)
    with pytest.raises(InvalidRequest, match="no workers"):
        simulate(world, App())
