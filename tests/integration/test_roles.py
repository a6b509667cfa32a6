"""Can each role do its work, and nothing else?"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

import headwater
from headwater import NewEvent
from headwater.calls import webhooks as calls

_numbers = itertools.count()
Login = Callable[[str], headwater.Headwater]
ROLES = ("headwater_publisher", "headwater_consumer", "headwater_admin")


@pytest.fixture
def login_dsn(dsn: str, admin_dsn: str) -> Iterator[Callable[[str], str]]:
    """Makes users that are members of one role."""
    made: list[str] = []

    def make(role: str) -> str:
        name = f"user_{os.getpid()}_{next(_numbers)}"
        with psycopg.connect(admin_dsn, autocommit=True) as connection:
            connection.execute(
                sql.SQL("create role {} login password 'secret' in role {}").format(
                    sql.Identifier(name), sql.Identifier(role)
                )
            )
        made.append(name)
        return conninfo.make_conninfo(dsn, user=name, password="secret")

    yield make
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        for name in made:
            connection.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@pytest.fixture
def login(login_dsn: Callable[[str], str]) -> Iterator[Login]:
    """Opens the log as such a user."""
    opened: list[headwater.Headwater] = []

    def make(role: str) -> headwater.Headwater:
        opened.append(headwater.connect(login_dsn(role)))
        return opened[-1]

    yield make
    for log in opened:
        log.close()


@pytest.fixture
def publisher(login: Login) -> headwater.Headwater:
    return login("headwater_publisher")


@pytest.fixture
def consumer(login: Login) -> headwater.Headwater:
    return login("headwater_consumer")


@pytest.fixture
def admin(login: Login) -> headwater.Headwater:
    return login("headwater_admin")


def data(log: headwater.Headwater, topic: str) -> list[Any]:
    return [event.data for event in log.follow(topic, stop_when_caught_up=True)]


def test_a_publisher_can_do_every_kind_of_publish(
    log: headwater.Headwater, topic: str, publisher: headwater.Headwater
) -> None:
    publisher.publish(topic, 0, key="k", headers={"h": 1})
    publisher.publish_batch(topic, [NewEvent(1), NewEvent(2, type="T")])
    publisher.publish_many(topic, (NewEvent(n) for n in range(3, 6)))
    first = publisher.publish(topic, 6, event_id="six")
    assert publisher.publish(topic, "again", event_id="six") == first
    with publisher.transaction() as connection:
        connection.execute("select headwater.publish(%s, '7')", (topic,))
    publisher.publish(topic, 8, delay=timedelta(milliseconds=1))
    cancelled = publisher.schedule(topic, "never", delay=timedelta(days=1), event_id="never")
    moved = publisher.schedule(topic, 9, delay=timedelta(days=1))
    assert cancelled is not None
    assert moved is not None
    assert publisher.cancel_scheduled(cancelled)
    assert publisher.move_scheduled(moved, datetime.now(UTC))
    assert publisher.maintain().released + publisher.maintain().released >= 1
    assert sorted(data(log, topic)) == list(range(10))


def test_a_publisher_can_write_a_sequence(log: headwater.Headwater, topic: str, publisher: headwater.Headwater) -> None:
    partitions = log.create_topic(f"{topic}-partitions", kind="sequenced", partitions=2).name
    publisher.publish(partitions, 0, key="a")
    publisher.publish_many(partitions, [NewEvent(1, key="a", event_id="one"), NewEvent(2, key="a")])
    assert [(event.topic_offset, event.data) for event in log.read(partitions)] == [(0, 0), (1, 1), (2, 2)]


def test_a_publisher_makes_missing_topics_if_the_log_is_set_to(
    log: headwater.Headwater, publisher: headwater.Headwater
) -> None:
    with pytest.raises(headwater.TopicNotFound):
        publisher.publish("made-by-publisher", 0)
    log.change_settings(auto_create_topics=True)
    try:
        publisher.publish("made-by-publisher", 0)
        publisher.publish_many("made-by-copier", [NewEvent(0)])
    finally:
        log.change_settings(auto_create_topics=False)
    assert data(log, "made-by-publisher") == data(log, "made-by-copier") == [0]


@pytest.mark.parametrize(
    "act",
    [
        lambda log, topic: log.read(topic),
        lambda log, topic: log.read_backwards(topic),
        lambda log, topic: next(log.follow(topic)),
        lambda log, topic: log.position_before(datetime.now(UTC), topic),
        lambda log, topic: log.state(),
        lambda log, topic: log.open_cursor("mine"),
        lambda log, topic: log.set_cursor("mine", position=0),
        lambda log, topic: log.advance_cursor("mine", from_position=0, to_position=1),
        lambda log, topic: log.delete_cursor("mine"),
        lambda log, topic: log.cursors(),
        lambda log, topic: log.create_topic("mine"),
        lambda log, topic: log.alter_topic(topic, partitions=2),
        lambda log, topic: log.delete_topic(topic),
        lambda log, topic: log.change_settings(auto_create_topics=True),
    ],
)
def test_a_publisher_can_neither_read_nor_move_cursors_nor_manage(
    topic: str, publisher: headwater.Headwater, act: Callable[[headwater.Headwater, str], Any]
) -> None:
    with pytest.raises(headwater.NotAllowed):
        act(publisher, topic)


def test_a_consumer_can_do_every_kind_of_read(
    log: headwater.Headwater, topic: str, consumer: headwater.Headwater
) -> None:
    log.publish_batch(topic, [NewEvent(n) for n in range(3)])
    events = consumer.read(topic)
    assert [event.data for event in events] == [0, 1, 2]
    assert consumer.read([topic]) == consumer.read(topic, since=events[0].published_at) == events
    assert consumer.read(after=events[0].position - 1) == events
    assert consumer.read_backwards(topic) == events[::-1]
    assert [event.data for event in consumer.follow(topic, cursor="c", stop_when_caught_up=True)] == [0, 1, 2]
    assert consumer.set_cursor("c", position=events[0].position) == events[0].position
    consumer.advance_cursor("c", from_position=events[0].position, to_position=events[1].position)
    seen: list[Any] = []
    consumer.process(
        topic,
        lambda connection, events: seen.extend(event.data for event in events),
        cursor="c",
        stop_when_caught_up=True,
    )
    assert seen == [2]
    assert [cursor.name for cursor in consumer.cursors()] == ["c"]
    assert consumer.delete_cursor("c")
    assert consumer.topic(topic).name == topic
    assert topic in [found.name for found in consumer.topics()]
    assert consumer.state().stable >= events[-1].position
    assert consumer.settings() == log.settings()


def test_a_consumer_sees_who_holds_it_back(
    log: headwater.Headwater, topic: str, consumer: headwater.Headwater, connection: psycopg.Connection
) -> None:
    with connection.transaction():
        log.publish(topic, 0, connection=connection)
        assert [p.pid for p in consumer.publishers_in_flight()] == [connection.info.backend_pid]


@pytest.mark.parametrize("role", ROLES)
def test_whoever_uses_the_log_does_its_maintenance(
    log: headwater.Headwater, topic: str, login: Login, connection: psycopg.Connection, role: str
) -> None:
    """Segments are made and dropped, and due events enter, with the rights of the owner."""
    log.alter_topic(topic, retention=timedelta(days=1))
    partitions = log.create_topic(f"{topic}-partitions", kind="sequenced", retention=timedelta(days=1)).name
    log.publish(topic, 0)
    for name in (topic, partitions):
        log.schedule(name, "due", delay=timedelta(0), event_id="one")
    own = login(role)
    log.change_settings(segments_ahead=log.settings().segments_ahead + 2)
    connection.execute("update headwater_internal.segment set opened_at = opened_at - interval '2 days'")
    maintenance = own.maintain()
    assert (maintenance.busy, maintenance.released) == (False, 2)
    assert maintenance.segments_made >= 1
    connection.execute(
        "update headwater_internal.segment set closed_at = closed_at - interval '2 days', opened_at = null"
    )
    maintenance = own.maintain()
    # Dropped whole, or swept where a topic of another test keeps the segment.
    assert maintenance.segments_dropped + maintenance.events_swept >= 1


ON_THE_TABLES = (
    "insert into headwater_internal.event (topic_id) values (1)",
    "update headwater_internal.event set payload = null",
    "delete from headwater_internal.event",
    "truncate headwater_internal.event",
    "insert into headwater_internal.topic (name) values ('mine')",
    "update headwater_internal.topic set retention = '1 second'",
    "delete from headwater_internal.topic",
    "update headwater_internal.setting set auto_create_topics = true",
    "insert into headwater_internal.scheduled (due_at, topic_id) values (now(), 1)",
    "delete from headwater_internal.event_identity",
    "update headwater_internal.segment set closed_at = now()",
    "delete from headwater_internal.migration",
)


@pytest.mark.parametrize(
    "act",
    [
        lambda log, topic: log.publish(topic, 0),
        lambda log, topic: log.publish(topic, 0, event_id="a"),
        lambda log, topic: log.publish(topic, 0, delay=timedelta(days=1)),
        lambda log, topic: log.publish_batch(topic, [NewEvent(0)]),
        lambda log, topic: log.publish_many(topic, [NewEvent(0)]),
        lambda log, topic: log.schedule(topic, 0, delay=timedelta(days=1)),
        lambda log, topic: log.cancel_scheduled(1),
        lambda log, topic: log.create_topic("mine"),
        lambda log, topic: log.alter_topic(topic, partitions=2),
        lambda log, topic: log.delete_topic(topic),
        lambda log, topic: log.change_settings(auto_create_topics=True),
    ],
)
def test_a_consumer_can_neither_publish_nor_manage(
    log: headwater.Headwater, topic: str, consumer: headwater.Headwater, act: Callable[[headwater.Headwater, str], Any]
) -> None:
    with pytest.raises(headwater.NotAllowed):
        act(consumer, topic)
    assert log.read(topic) == []


def test_a_consumer_can_neither_insert_nor_copy(
    topic: str, log: headwater.Headwater, login_dsn: Callable[[str], str]
) -> None:
    topic_id = log.topic(topic).id
    with psycopg.connect(login_dsn("headwater_consumer"), autocommit=True) as connection:
        for statement in ON_THE_TABLES:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("insert into headwater_internal.event (topic_id, payload) values (%s, '0')", (topic_id,))
        with (
            pytest.raises(psycopg.errors.InsufficientPrivilege),
            connection.cursor() as cursor,
            cursor.copy("copy headwater_internal.event (topic_id) from stdin") as copy,
        ):
            copy.write(f"{topic_id}\n")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("select nextval('headwater_internal.position')")
    assert log.read(topic) == []


def test_a_publisher_can_insert_and_copy_and_do_nothing_else_to_an_event(
    topic: str, log: headwater.Headwater, login_dsn: Callable[[str], str]
) -> None:
    partitions = log.create_topic(f"{topic}-partitions", kind="sequenced").name
    with psycopg.connect(login_dsn("headwater_publisher"), autocommit=True) as connection:
        connection.execute("insert into headwater.new_event (topic, payload) values (%s, '0')", (topic,))
        with (
            connection.cursor() as cursor,
            cursor.copy("copy headwater.new_event (topic, payload, key) from stdin") as copy,
        ):
            copy.write(f"{topic}\t1\tk\n{partitions}\t2\tk\n{partitions}\t3\tk\n")
        for statement in (
            "insert into headwater_internal.event (topic_id, payload) values (1, '0')",
            "insert into headwater_internal.event (topic_id, position, payload) values (1, 7, '0')",
            "insert into headwater_internal.event_0000000 (topic_id, position) values (1, 7)",
            "copy headwater_internal.event (topic_id, position) from stdin",
            "select nextval('headwater_internal.position')",
            "select headwater_internal.advertise_publisher('x')",
            "select headwater_internal.assign_position()",
            "insert into headwater_internal.event_index_term (topic_id, index_term, position) values (1, 'x', 7)",
            "select payload from headwater_internal.event",
            "select headers from headwater_internal.event",
            "select * from headwater_internal.cursor",
            "select headwater.stable_position()",
            "insert into headwater_internal.event (topic_id, published_at) values (1, '2000-01-01')",
            *ON_THE_TABLES,
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())
    assert data(log, topic) == [0, 1]
    assert [(event.topic_offset, event.data) for event in log.read(partitions)] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    "statement",
    [
        "select headwater.publish('headwater.audit', '{}')",
        "select headwater.publish_batch('headwater.audit', array['x'::bytea])",
        "select headwater.publish('headwater.audit', '{}', delay => '1 hour')",
        "select headwater.publish('headwater.audit', '{}', event_id => 'forged')",
        "insert into headwater.new_event (topic, payload) values ('headwater.audit', '{}')",
        "select headwater.set_cron_schedule('p', '* * * * *', 'UTC', 'headwater.audit', now(), 'x')",
        "select headwater_internal.audit('root', 'topic.delete', 'x')",
    ],
)
def test_the_audit_cannot_be_forged(
    log: headwater.Headwater, connection: psycopg.Connection, login_dsn: Callable[[str], str], statement: str
) -> None:
    connection.execute("select headwater_internal.audit('me', 'test', 'audit')")
    before = len(log.read("headwater.audit", batch_size=1000))
    with (
        psycopg.connect(login_dsn("headwater_publisher"), autocommit=True) as publisher,
        pytest.raises(psycopg.Error) as refused,
    ):
        publisher.execute(statement.encode())
    assert refused.value.sqlstate in ("HW015", "42501")
    assert len(log.read("headwater.audit", batch_size=1000)) == before


def test_a_publisher_cannot_be_fooled_by_its_own_search_path(
    topic: str, log: headwater.Headwater, connection: psycopg.Connection, login_dsn: Callable[[str], str]
) -> None:
    """What runs as the owner takes no function or operator of its caller."""
    with psycopg.connect(login_dsn("headwater_publisher"), autocommit=True) as publisher:
        publisher.execute("create temporary table evidence (who text)")
        publisher.execute(
            "create function pg_temp.octet_length(bytea) returns integer language plpgsql as "
            "$$ begin insert into pg_temp.evidence values (current_user); return 0; end $$"
        )
        publisher.execute("set search_path = pg_temp, pg_catalog")
        publisher.execute("select headwater.publish(%s, '1')", (topic,))
        assert publisher.execute("select count(*) from pg_temp.evidence").fetchone() == (0,)
    assert data(log, topic) == [1]


def test_an_admin_manages_topics_and_does_what_the_others_do(
    log: headwater.Headwater, topic: str, admin: headwater.Headwater
) -> None:
    name = admin.create_topic(f"{topic}-admin", retention=timedelta(days=1)).name
    assert admin.alter_topic(name, partitions=3, keep_forever=True).partitions == 3
    admin.publish(name, 0)
    admin.publish(name, 1, event_id="one")
    admin.publish_many(topic, [NewEvent(2)])
    assert data(admin, name) == [0, 1]
    assert [event.data for event in admin.follow(name, cursor="admin", stop_when_caught_up=True)] == [0, 1]
    admin.schedule(name, "never", delay=timedelta(days=1))
    admin.change_settings(auto_create_topics=True)
    admin.change_settings(auto_create_topics=False)
    admin.delete_topic(name)
    with pytest.raises(headwater.TopicNotFound):
        admin.read(name)
    admin.delete_cursor("admin")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "statement",
    [
        "select setval('headwater_internal.position', 1)",
        "alter sequence headwater_internal.position restart",
        "create table headwater.mine (n integer)",
        "drop table headwater_internal.cursor",
        "drop function headwater.head()",
        "alter table headwater_internal.event disable trigger advertise",
        "create or replace function headwater.head() returns bigint language sql return 1",
        "alter table headwater_internal.event owner to current_user",
        "drop schema headwater cascade",
        "select headwater_internal.make_segment(1000000000000)",
        "update headwater_internal.segment set hi = 1",
        "update headwater_internal.event set payload = null",
        "delete from headwater_internal.event",
        "delete from headwater_internal.migration",
    ],
)
def test_no_role_changes_the_log_itself(connection: psycopg.Connection, role: str, statement: str) -> None:
    connection.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(statement.encode())


def test_what_is_not_opened_is_closed(connection: psycopg.Connection) -> None:
    open_to_all = connection.execute(
        "select p.oid::regprocedure::text from pg_proc p "
        "where p.pronamespace in ('headwater'::regnamespace, 'headwater_internal'::regnamespace) and "
        "has_function_privilege('public', p.oid, 'execute')"
    ).fetchall()
    assert open_to_all == []
    tables = connection.execute(
        "select c.relname from pg_class c where c.relnamespace in ('headwater'::regnamespace, "
        "'headwater_internal'::regnamespace) "
        "and exists (select from aclexplode(c.relacl) a where a.grantee = 0)"
    ).fetchall()
    assert tables == []


def test_a_stranger_is_told_what_is_missing(login_dsn: Callable[[str], str], dsn: str) -> None:
    stranger = conninfo.make_conninfo(
        login_dsn("pg_read_all_settings"), dbname=conninfo.conninfo_to_dict(dsn)["dbname"]
    )
    with pytest.raises(headwater.NotAllowed, match="permission denied"):
        headwater.connect(stranger)


def test_functions_that_run_with_the_owners_rights_trust_no_search_path(connection: psycopg.Connection) -> None:
    careless = connection.execute(
        "select p.proname from pg_proc p where p.pronamespace in ('headwater'::regnamespace, "
        "'headwater_internal'::regnamespace) and p.prosecdef "
        "and not coalesce('search_path=pg_catalog, pg_temp' = any (p.proconfig), false)"
    ).fetchall()
    assert careless == []


def test_webhooks_and_their_secrets_are_for_administrators(login: Login, log: headwater.Headwater, topic: str) -> None:
    admin = login("headwater_admin")
    made = admin.create_webhook(topic, "https://a.example/", topic, rate_per_second=10)
    assert admin.run(calls.next_webhook_turn(made)) is not None
    assert [one.webhook.name for one in admin.run(calls.webhook_routes())] == [topic]
    admin.publish(topic, 1)
    assert admin.claim(made.queue, worker="me") is not None
    assert admin.rotate_webhook_secret(topic).secrets != made.secrets
    admin.run(calls.set_webhook_state(topic, "disabled", reason="gone"))
    for role in ("headwater_consumer", "headwater_publisher"):
        other = login(role)
        with pytest.raises(headwater.NotAllowed):
            other.webhooks()
        with pytest.raises(headwater.NotAllowed):
            other.webhook(topic)
        with pytest.raises(headwater.NotAllowed):
            other.resume_webhook(topic)
    assert log.webhook(topic).state == "disabled"
    assert admin.delete_webhook(topic, with_queue=True)
