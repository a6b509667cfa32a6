"""Does an event store fit into Postgres? Transactions, queues, plain SQL, roles, and the rest of the log beside it."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

import headwater
from headwater import aio
from headwater.calls import queues as queue_calls
from headwater.calls import store as store_calls
from headwater.client.eventstore.postgres import EventStore
from headwater.errors import (
    AppendConflict,
    InvalidRequest,
    LogUnavailable,
    NotAllowed,
    TransactionAborted,
    WrongTransaction,
)
from headwater.eventstore import LatestMatchIs, NewStoreEvent, NoMatchAfter, Query, StoreEvent
from headwater.eventstore.field_index import define_index
from patience import PATIENCE_SECONDS

_numbers = itertools.count()
Until = Callable[[Callable[[], Any]], Any]


@pytest.fixture
def store(log: headwater.Headwater) -> EventStore:
    return log.create_store(f"store-{next(_numbers)}")


def tagged(*tags: str) -> Query:
    return Query.of(tags=tags)


def happened(type: str = "Happened", *tags: str) -> NewStoreEvent:
    return NewStoreEvent(type, tags=tags)


def waiting_for_partitions(connection: psycopg.Connection[Any]) -> int:
    """How many transactions wait for an advisory lock."""
    row = connection.execute(
        "select count(*) from pg_locks where locktype = 'advisory' and not granted "
        "and database = (select oid from pg_database where datname = current_database())"
    ).fetchone()
    assert row is not None
    return int(row[0])


# --- transactions ------------------------------------------------------------------------------------------------


def test_an_append_commits_with_the_rows_beside_it_or_not_at_all(
    log: headwater.Headwater, store: EventStore, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("create table if not exists business (n integer)")
    with log.transaction() as own:
        own.execute("insert into business values (1)")
        store.append(happened("A", "x"), NoMatchAfter(tagged("x")), connection=own)
        assert [event.type for event in store.read(connection=own)] == ["A"]
        assert store.read() == []
    assert store.count() == 1
    with pytest.raises(ZeroDivisionError), log.transaction() as own:
        store.append([happened("B", "x"), happened("B", "y")], connection=own)
        raise ZeroDivisionError
    assert store.count() == 1
    assert store.append(happened("C", "y"), NoMatchAfter(tagged("y"))).positions
    assert [event.topic_offset for event in store.read()] == [0, 1]


def test_a_conflict_leaves_the_transaction_as_it_was(log: headwater.Headwater, store: EventStore) -> None:
    store.append(happened("A", "x"))
    with log.transaction() as own:
        with pytest.raises(AppendConflict):
            store.append(happened("B"), NoMatchAfter(tagged("x")), connection=own)
        store.append(happened("C"), connection=own)
    assert [event.type for event in store.read()] == ["A", "C"]


def test_a_savepoint_takes_its_append_with_it(log: headwater.Headwater, store: EventStore) -> None:
    with log.transaction() as own:
        store.append(happened("A"), connection=own)
        with pytest.raises(ZeroDivisionError), own.transaction():
            store.append(happened("B", "x"), connection=own)
            raise ZeroDivisionError
        store.append(happened("C"), NoMatchAfter(tagged("x")), connection=own)
    assert [(event.type, event.topic_offset) for event in store.read()] == [("A", 0), ("C", 1)]


def test_who_appends_later_sees_what_an_open_transaction_appended(
    log: headwater.Headwater, store: EventStore, connection: psycopg.Connection[Any], until: Until
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with log.transaction() as own:
            first = store.append(happened("A", "x"), connection=own)
            later = pool.submit(store.append, happened("B", "x"), NoMatchAfter(tagged("x")))
            until(lambda: waiting_for_partitions(connection) == 1)
        with pytest.raises(AppendConflict) as refused:
            later.result(PATIENCE_SECONDS)
    assert refused.value.actual_position == first.position
    assert store.count() == 1


def test_an_older_snapshot_cannot_append(log: headwater.Headwater, store: EventStore) -> None:
    with log.connection() as own:
        own.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        try:
            with pytest.raises(WrongTransaction), own.transaction():
                store.append(happened(), connection=own)
        finally:
            own.isolation_level = None


def test_who_holds_a_store_for_too_long_is_named_as_the_reason(
    log: headwater.Headwater, store: EventStore, connection: psycopg.Connection[Any]
) -> None:
    # Ten seconds are the function's own; here it is asked what happens when they are over.
    sources = [
        source
        for (source,) in connection.execute(
            "select pg_get_functiondef(p.oid) from pg_proc p where p.proname in ('append_group', 'append_ahead')"
        )
    ]
    assert len(sources) == 2
    for source in sources:
        assert "'10s'" in source
        connection.execute(source.replace("'10s'", "'50ms'").encode())
    try:
        with log.transaction() as own:
            store.append(happened(), connection=own)
            with pytest.raises(TransactionAborted, match="another transaction has locked"):
                store.append(happened())
    finally:
        for source in sources:
            connection.execute(source.encode())
    assert store.append(happened()).positions


# --- queues ------------------------------------------------------------------------------------------------------


def test_appends_that_wait_share_one_transaction_and_each_has_its_verdict(
    log: headwater.Headwater, store: EventStore, connection: psycopg.Connection[Any], until: Until
) -> None:
    def append(n: int) -> str:
        try:
            # Of each two, the second finds what the first has just appended.
            store.append(happened(f"{n}", f"pair{n // 2}"), NoMatchAfter(tagged(f"pair{n // 2}")))
        except AppendConflict:
            return "refused"
        return "appended"

    with ThreadPoolExecutor(21) as pool:
        with log.transaction() as own:
            store.append(happened("first"), connection=own)
            isolated = pool.submit(store.append, happened("isolated"))
            until(lambda: waiting_for_partitions(connection) == 1)
            others = [pool.submit(append, n) for n in range(20)]
            until(lambda: len(store._group_commit._waiting) == 20)
        isolated.result(PATIENCE_SECONDS)
        verdicts = [other.result(PATIENCE_SECONDS) for other in others]
    assert sorted(verdicts) == ["appended"] * 10 + ["refused"] * 10
    assert [sorted(verdicts[n : n + 2]) for n in range(0, 20, 2)] == [["appended", "refused"]] * 10
    row = connection.execute(
        "select count(distinct e.xmin::text) from headwater_internal.event e join headwater_internal.topic t on "
        "t.id = e.topic_id "
        "where t.name = %s and e.type not in ('first', 'isolated')",
        (store.topic,),
    ).fetchone()
    assert row == (1,)


def test_an_append_whose_answer_is_lost_is_sent_again_and_done_once(
    store: EventStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = store._group_commit._send
    sent: list[int] = []

    def losing(appends: Sequence[store_calls.EncodedAppend]) -> Any:
        verdicts = send(appends)
        sent.append(len(appends))
        if len(sent) == 1:
            raise LogUnavailable("the connection to Postgres is lost")
        return verdicts

    monkeypatch.setattr(store._group_commit, "_send", losing)
    appended = store.append([happened("A", "x"), happened("B", "x")], NoMatchAfter(tagged("x")))
    assert sent == [1, 1]
    assert appended.repeated
    assert [event.position for event in store.read()] == list(appended.positions)


def test_many_tasks_append_in_queues_and_one_that_is_cancelled_takes_nobody_with_it(
    dsn: str, connection: psycopg.Connection[Any]
) -> None:
    async def until(true: Callable[[], bool]) -> None:
        for _ in iter(true, True):
            await asyncio.sleep(0)

    async def run() -> None:
        async with await aio.connect(dsn, pool_size=4) as log:
            store = await log.create_store(f"store-{next(_numbers)}")
            async with log.transaction() as own:
                await store.append(happened("first"), connection=own)
                # The one that works for all waits for the partition, with the others behind it.
                leader = asyncio.create_task(store.append(happened("leader")))
                await asyncio.wait_for(until(lambda: waiting_for_partitions(connection) == 1), PATIENCE_SECONDS)
                others = [asyncio.create_task(store.append(happened(f"{n}"))) for n in range(30)]
                await asyncio.wait_for(until(lambda: len(store._group_commit._waiting) == 30), PATIENCE_SECONDS)
                leader.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await leader
            appended = await asyncio.wait_for(asyncio.gather(*others), PATIENCE_SECONDS)
            assert len({answer.position for answer in appended}) == 30
            assert await store.count() == 31
            assert await store.count(Query.of(types=["leader"])) == 0
            got = [event async for event in store.subscribe(stop_when_caught_up=True)]
            assert [event.topic_offset for event in got] == list(range(31))
            latest = await store.latest(Query.of(types=["first"]))
            assert latest.position == got[0].position

    asyncio.run(run())


# --- plain SQL ---------------------------------------------------------------------------------------------------


def test_the_plain_form_appends_and_reads_json(store: EventStore, connection: psycopg.Connection[Any]) -> None:
    def append(events: Any, condition: Any = None) -> Any:
        row = connection.execute(
            "select headwater.append(%s, %s, %s)",
            (store.topic, json.dumps(events), None if condition is None else json.dumps(condition)),
        ).fetchone()
        assert row is not None
        return row[0]

    first = append([{"type": "A", "id": "a", "data": {"k": 1}, "tags": ["x", "{}"], "metadata": {"m": 1}}])
    assert append([{"type": "A", "id": "a"}]) == first
    (event,) = store.read(Query.of(tags=["{}"], fields={"k": 1}))
    assert (event.data, event.metadata, event.event_id) == ({"k": 1}, {"m": 1}, "a")
    with pytest.raises(psycopg.Error) as refused:
        append([{"type": "B"}], {"query": [{"tags": ["x"]}], "after": 0})
    assert refused.value.sqlstate == "HW001"
    assert json.loads(refused.value.diag.message_detail or "") == {
        "actual_position": first[0],
        "expected_position": 0,
    }
    append([{"type": "B"}], {"query": [{"tags": ["x"]}], "latest": first[0]})
    for bad in (
        {},
        {"query": {}},
        {"query": [], "before": 1},
        {"query": [], "after": 1, "latest": 1},
        [],
        {"query": [1]},
        {"query": [], "after": -1},
        {"query": [], "after": 1.5},
        {"query": [], "latest": 1e30},
    ):
        with pytest.raises(psycopg.Error) as refused:
            append([{"type": "C"}], bad)
        assert refused.value.sqlstate == "HW002", bad
    for worse in ({}, [], [{}], "x"):
        with pytest.raises(psycopg.Error) as refused:
            append(worse)
        assert refused.value.sqlstate == "HW002", worse
    with pytest.raises(psycopg.Error, match="up to 100 tags"):
        append([{"type": "C", "tags": [None]}])
    assert store.count() == 2
    for levels, error in ((199, None), (200, "HW002"), (2000, "HW002")):
        deep = '[{"type": "A"}, {"type": "A", "data": {"n": ' + "[" * levels + "]" * levels + "}}]"
        if error is None:
            connection.execute("select headwater.append(%s, %s)", (store.topic, deep))
            continue
        with pytest.raises(psycopg.Error, match="up to 200 levels") as refused:
            connection.execute("select headwater.append(%s, %s)", (store.topic, deep))
        assert refused.value.sqlstate == error
    assert store.count() == 4


@pytest.mark.parametrize(
    "item",
    [
        {"tags": ["x"], "types": []},
        {"tags": ["x"], "types": [], "fields": {}},
        {"tags": ["x"], "types": ["A"], "fields": {}},
        {"tags": [], "types": ["A"], "fields": {}},
        {"tags": [], "types": [], "fields": {"k": 1}},
        {"tags": ["x"], "types": [], "fields": {"k": "1"}},
        {"tags": [], "types": [], "fields": {}},
        {},
    ],
)
def test_what_an_item_names_empty_it_does_not_ask_for(
    store: EventStore, connection: psycopg.Connection[Any], item: Any
) -> None:
    appended = store.append([NewStoreEvent("A", {"k": 1}, ["x"])])
    with pytest.raises(psycopg.Error) as refused:
        connection.execute(
            "select headwater.append(%s, %s, %s)",
            (store.topic, '[{"type": "B"}]', json.dumps({"query": [item], "after": 0})),
        )
    assert refused.value.sqlstate == "HW001"
    found = connection.execute(
        "select position from headwater.read_matching(%s, %s)", (store.topic, json.dumps([item]))
    ).fetchall()
    assert found == [appended.positions]


@pytest.mark.parametrize(
    "item",
    [
        {"tags": [None]},
        {"tags": [1]},
        {"tags": [["x"]]},
        {"tags": [""]},
        {"tags": ["x" * 256]},
        {"types": [None]},
        {"types": [{}]},
        {"types": ["x" * 201]},
        {"fields": {"k": None}},
        {"fields": {"k": {"a": 1}}},
        {"fields": {"k": [1]}},
        {"tags": "x"},
        {"tag": ["x"]},
    ],
)
def test_what_no_event_can_have_is_no_query(store: EventStore, connection: psycopg.Connection[Any], item: Any) -> None:
    query = json.dumps([item])
    for statement, parameters in (
        ("select headwater.append(%s, %s, %s)", ('[{"type": "B"}]', f'{{"query": {query}, "after": 0}}')),
        ("select headwater.read_matching(%s, %s)", (query,)),
        ("select headwater.count_matching(%s, %s)", (query,)),
        ("select headwater.latest_matching(%s, %s)", (query,)),
    ):
        with pytest.raises(psycopg.Error) as refused:
            connection.execute(statement, (store.topic, *parameters))
        assert refused.value.sqlstate == "HW002", statement
    assert store.count() == 0


def test_what_is_published_to_a_store_is_found_like_the_rest(log: headwater.Headwater, store: EventStore) -> None:
    position = log.publish(store.topic, {"k": 1}, type="Published", event_id="p1")
    log.publish(store.topic, {"k": 2})
    with pytest.raises(AppendConflict) as refused:
        store.append(happened(), NoMatchAfter(Query.of(types=["Published"])))
    assert refused.value.actual_position == position
    assert [event.position for event in store.read(Query.of(fields={"k": 1}))] == [position]
    assert store.append(NewStoreEvent("Published", event_id="p1")).repeated
    store.append(NewStoreEvent("Appended", event_id="a1"))
    assert log.publish(store.topic, {}, type="Published", event_id="a1") == store.head()
    assert [event.topic_offset for event in store.read()] == [0, 1, 2]


def test_what_is_appended_is_in_the_log_like_the_rest(log: headwater.Headwater, store: EventStore) -> None:
    appended = store.append([happened("A", "x"), happened("B")])
    assert [event.position for event in log.read(store.topic)] == list(appended.positions)
    assert [event.type for event in log.follow(store.topic, stop_when_caught_up=True)] == ["A", "B"]


def test_a_store_keeps_its_events_and_its_order(log: headwater.Headwater, store: EventStore, topic: str) -> None:
    from datetime import timedelta

    for change in ({"retention": timedelta(days=1)}, {"partitions": 2}):
        with pytest.raises(InvalidRequest, match="one sequenced partition and no retention"):
            log.alter_topic(store.topic, **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="is not an event store"):
        log.store(topic).append(happened())
    with pytest.raises(InvalidRequest, match="is not an event store"):
        log.create_store(topic, if_missing=True)


def test_a_deleted_store_gives_its_room_back(
    log: headwater.Headwater, store: EventStore, connection: psycopg.Connection[Any]
) -> None:
    store.append([happened("A", "x", "y")])
    log.delete_topic(store.topic)
    log.maintain()
    row = connection.execute(
        "select count(*) from headwater_internal.event_index_term m "
        "join headwater_internal.topic t on t.id = m.topic_id where t.name = %s",
        (store.topic,),
    ).fetchone()
    assert row == (0,)


def test_a_plain_topic_has_no_index_terms(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection[Any]
) -> None:
    log.publish(topic, {}, type="A")
    log.create_topic(f"{topic}-sequenced", kind="sequenced")
    log.publish(f"{topic}-sequenced", {}, type="A")
    row = connection.execute(
        "select count(*) from headwater_internal.event_index_term m "
        "join headwater_internal.topic t on t.id = m.topic_id where t.name like %s",
        (f"{topic}%",),
    ).fetchone()
    assert row == (0,)


# --- indexes on fields -------------------------------------------------------------------------------------------


def index_terms(connection: psycopg.Connection[Any], store: EventStore) -> int:
    row = connection.execute(
        "select count(*) from headwater_internal.event_index_term m join headwater_internal.topic t on t.id = "
        "m.topic_id "
        "where t.name = %s and m.index_term like '=%%'",
        (store.topic,),
    ).fetchone()
    assert row is not None
    return int(row[0])


def with_data(*several: Any) -> list[NewStoreEvent]:
    return [NewStoreEvent("A", data, ["x"]) for data in several]


def test_an_index_finds_what_was_there_and_what_comes_and_nothing_else(
    log: headwater.Headwater, store: EventStore, connection: psycopg.Connection[Any]
) -> None:
    odd = [{"k": 5}, {"k": "5"}, {"k": 6, "l": True}, {"k": None}, {"k": [5]}, {"l": "true"}, [5], None, b"raw"]
    store.append(with_data(*odd))
    queries = [
        Query.of(fields=fields) for fields in ({"k": 5}, {"k": 6}, {"k": 6, "l": True}, {"l": True}, {"k": "no"})
    ]
    queries += [Query.of(fields={"k": 5}, tags=["x"]), Query.of(fields={"k": 5}, types=["A", "B"])]
    queries += [Query.of(fields={"k": 5}, tags=["y"]), Query.of(fields={"k": 5}, types=["B"])]
    before = [[event.position for event in store.read(query)] for query in queries]
    store.create_index("by_k", ["k"], batch_size=2)
    store.create_index("by_k_l", ["k", "l"], batch_size=100)
    assert [(index.name, index.fields, index.ready) for index in store.indexes()] == [
        ("by_k", ("k",), True),
        ("by_k_l", ("k", "l"), True),
    ]
    assert index_terms(connection, store) == 4
    assert [[event.position for event in store.read(query)] for query in queries] == before
    later = store.append(with_data(*odd)).positions
    published = log.publish(store.topic, {"k": 5}, type="A")
    assert index_terms(connection, store) == 9
    shift = later[0] - store.read(batch_size=1)[0].position
    expected = [[*found, *(position + shift for position in found)] for found in before]
    for query, positions in zip(queries, expected, strict=True):
        found = [event.position for event in store.read(query)]
        assert [position for position in found if position != published] == positions
        everything = store.read(batch_size=1000)
        assert found == [event.position for event in everything if query.matches(event)]
        if found:
            with pytest.raises(AppendConflict) as refused:
                store.append(happened(), NoMatchAfter(query))
            assert refused.value.actual_position == found[-1]
    assert store.drop_index("by_k")
    assert not store.drop_index("by_k")
    assert [index.name for index in store.indexes()] == ["by_k_l"]
    log.maintain()
    log.maintain()
    assert index_terms(connection, store) == 2
    assert [event.position for event in store.read(queries[0])][-1] == published


def test_an_index_leads_to_events_without_looking_at_the_others(
    store: EventStore, connection: psycopg.Connection[Any]
) -> None:
    store.append(with_data(*({"k": n} for n in range(500))))

    def looked_at() -> int:
        connection.execute("select pg_stat_force_next_flush()")
        connection.execute("set track_functions = 'all'")
        connection.execute("select pg_stat_reset_single_function_counters('headwater_internal.fields_match'::regproc)")
        connection.execute(
            "select count(*) from headwater.read_matching(%s, %s)", (store.topic, json.dumps([{"fields": {"k": "7"}}]))
        )
        connection.execute("select pg_stat_force_next_flush()")
        row = connection.execute("select calls from pg_stat_user_functions where funcname = 'fields_match'").fetchone()
        return 0 if row is None else int(row[0])

    assert looked_at() == 500
    store.create_index("by_k", ["k"])
    assert looked_at() == 1


def test_an_index_that_is_being_filled_is_not_used(store: EventStore, log: headwater.Headwater) -> None:
    store.append(with_data({"k": 1}, {"k": 2}, {"k": 1}))
    log._run(store_calls.create_field_index(store.topic, define_index("by_k", ["k"])))
    store.append(with_data({"k": 1}))
    assert [index.ready for index in store.indexes()] == [False]
    assert store.count(Query.of(fields={"k": 1})) == 3
    assert log._run(store_calls.fill_field_index(store.topic, "by_k", batch_size=2))
    assert store.count(Query.of(fields={"k": 1})) == 3
    store.create_index("by_k", ["k"])
    assert [index.ready for index in store.indexes()] == [True]
    assert store.count(Query.of(fields={"k": 1})) == 3


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ([], "expected 1 to 8"),
        (["k"] * 2, "a field twice"),
        ([f"k{n}" for n in range(9)], "expected 1 to 8"),
        ("k", "list of strings"),
    ],
)
def test_what_is_no_index_is_refused(store: EventStore, fields: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        store.create_index("wrong", fields)
    store.create_index("taken", ["a"])
    with pytest.raises(InvalidRequest, match="has other fields: a"):
        store.create_index("taken", ["b"])


# --- roles -------------------------------------------------------------------------------------------------------


@pytest.fixture
def login(dsn: str, admin_dsn: str) -> Iterator[Callable[[str], headwater.Headwater]]:
    """Opens the log as a member of one role."""
    opened: list[headwater.Headwater] = []
    names: list[str] = []

    def make(role: str) -> headwater.Headwater:
        names.append(f"store_user_{next(_numbers)}_{len(names)}")
        with psycopg.connect(admin_dsn, autocommit=True) as admin:
            admin.execute(
                sql.SQL("create role {} login password 'secret' in role {}").format(
                    sql.Identifier(names[-1]), sql.Identifier(role)
                )
            )
        opened.append(headwater.connect(conninfo.make_conninfo(dsn, user=names[-1], password="secret")))
        return opened[-1]

    yield make
    for log in opened:
        log.close()
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        for name in names:
            admin.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


def test_who_may_publish_may_append_and_who_may_consume_may_read(
    login: Callable[[str], headwater.Headwater], store: EventStore
) -> None:
    publisher, consumer, admin = map(login, ("headwater_publisher", "headwater_consumer", "headwater_admin"))
    appended = publisher.store(store.topic).append(
        NewStoreEvent("A", {"k": 1}, ["x"]), NoMatchAfter(Query.of(fields={"k": 1}))
    )
    publisher.publish(store.topic, {}, type="B")
    with pytest.raises(AppendConflict):
        publisher.store(store.topic).append(happened(), LatestMatchIs(tagged("x"), None))
    with pytest.raises(NotAllowed):
        publisher.store(store.topic).read()
    with pytest.raises(NotAllowed):
        publisher.create_store("theirs")
    reading = consumer.store(store.topic)
    assert [event.position for event in reading.read(Query.of(fields={"k": 1}))] == [appended.position]
    assert reading.count() == 2
    assert reading.latest(tagged("x")).position == appended.position
    assert len(list(reading.subscribe(cursor="theirs", stop_when_caught_up=True))) == 2
    with pytest.raises(NotAllowed):
        reading.append(happened())
    made = admin.create_store(f"store-{next(_numbers)}")
    assert made.append(happened()).positions
    made.create_index("by_k", ["k"])
    publisher.store(made.topic).append(NewStoreEvent("A", {"k": 1}))
    publisher.publish(made.topic, {"k": 1}, type="A")
    assert consumer.store(made.topic).count(Query.of(fields={"k": 1})) == 2
    assert made.drop_index("by_k")


# --- consume -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["elsewhere", "to more", "in part", "to nothing", "to all"])
def test_who_competes_in_a_queue_that_is_bound_otherwise_is_refused(
    log: headwater.Headwater, store: EventStore, topic: str, bound: str
) -> None:
    queue = f"queue-{next(_numbers)}"
    log.create_queue(queue, {"elsewhere": [topic], "to more": [store.topic, topic]}.get(bound))
    if bound == "in part":
        log.bind(queue, topic=store.topic, type="A")
    elif bound == "to all":
        log.bind(queue)
    log.publish(topic, {"n": 1})
    store.append(happened())
    with pytest.raises(InvalidRequest, match="is not bound to exactly"):
        list(store.compete(queue, worker="w", stop_when_caught_up=True))
    # Nothing was taken.
    claimed = log.claim(queue, worker="other", batch_size=1000)
    mine = (topic, store.topic)
    got = [] if claimed is None else [event.topic for event in claimed.events if event.topic in mine]
    expected = {"elsewhere": [topic], "to more": [topic, store.topic], "to all": [topic, store.topic]}
    assert got == expected.get(bound, [])


def test_who_competes_takes_nothing_of_what_the_queue_is_bound_to_later(
    log: headwater.Headwater, store: EventStore, topic: str, until: Until
) -> None:
    queue = f"queue-{next(_numbers)}"
    competing = store.compete(queue, worker="w", lease_seconds=0.2, stop_when_caught_up=True)
    store.append(happened("A"))
    assert [event.type for event in next(competing)] == ["A"]
    log.bind(queue, topic=topic)
    log.publish(topic, {"n": 1})
    with pytest.raises(InvalidRequest, match="is not bound to exactly"):
        until(lambda: list(competing))

    def given_to_another() -> Any:
        log._run(queue_calls.reap(queue))
        return log.claim(queue, worker="other")

    assert [event.topic for event in until(given_to_another).events] == [topic]


@pytest.mark.parametrize("topics", [["elsewhere"], ["elsewhere", "store"], None])
def test_a_cursor_of_other_topics_is_refused(
    log: headwater.Headwater, store: EventStore, topic: str, topics: list[str] | None
) -> None:
    cursor = f"cursor-{next(_numbers)}"
    names = {"elsewhere": topic, "store": store.topic}
    store.append(happened())
    log.set_cursor(cursor, position=store.head(), topics=None if topics is None else [names[name] for name in topics])
    for using in (
        lambda: list(store.subscribe(cursor=cursor, stop_when_caught_up=True)),
        lambda: store.process(Query(), lambda connection, events: None, cursor=cursor, stop_when_caught_up=True),
    ):
        with pytest.raises(InvalidRequest, match=f'not to "{store.topic}"'):
            using()


def test_a_live_subscriber_gets_what_commits_long_after_it_was_assigned(
    log: headwater.Headwater, store: EventStore, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    read_after = store._live_reader._read_after
    monkeypatch.setattr(store._live_reader, "_read_after", lambda *arguments: looks.append(1) or read_after(*arguments))
    got: list[StoreEvent] = []

    def follow() -> None:
        for event in store.subscribe():
            got.append(event)
            if len(got) == 2:
                return

    store.append(happened("first"))
    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    until(lambda: got and looks)
    with log.transaction() as own:
        store.append(happened("late"), connection=own)
        # The head of the log has moved, and the event cannot be seen: the follower must look again without a sign.
        seen = len(looks)
        until(lambda: len(looks) > seen + 3)
    follower.join(PATIENCE_SECONDS)
    assert [event.type for event in got] == ["first", "late"]


def test_hundreds_of_tasks_follow_with_one_reader(dsn: str) -> None:
    async def run() -> None:
        async with await aio.connect(dsn, pool_size=4) as log:
            store = await log.create_store(f"store-{next(_numbers)}")
            reading, at_once = 0, 0
            read_after = store._live_reader._read_after

            async def watched(position: int, batch_size: int) -> list[StoreEvent]:
                nonlocal reading, at_once
                reading += 1
                at_once = max(at_once, reading)
                try:
                    return await read_after(position, batch_size)
                finally:
                    reading -= 1

            store._live_reader._read_after = watched

            async def follow(number: int) -> list[int]:
                got = []
                async for event in store.subscribe(tagged(f"t{number % 3}") | Query.of(types=["End"])):
                    got.append(event.topic_offset)
                    if event.type == "End":
                        break
                return got

            followers = [asyncio.create_task(follow(n)) for n in range(300)]
            for n in range(9):
                await store.append(happened("A", f"t{n % 3}"))
            # One that goes away takes nobody with it.
            followers[0].cancel()
            await store.append(happened("End"))
            received = await asyncio.wait_for(asyncio.gather(*followers[1:]), PATIENCE_SECONDS)
            assert received == [[*range(n % 3, 9, 3), 9] for n in range(1, 300)]
            assert at_once <= 1

    asyncio.run(run())


def test_a_projection_commits_with_its_cursor(
    log: headwater.Headwater, store: EventStore, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("create table if not exists total (position bigint primary key)")
    store.append([happened("A", "x" if n % 2 else "y") for n in range(10)])
    cursor = f"cursor-{next(_numbers)}"
    failing = [True]

    def handle(own: psycopg.Connection[Any], events: Sequence[StoreEvent]) -> None:
        for event in events:
            own.execute("insert into total values (%s)", (event.position,))
        if failing and len(events) == 2 and events[0].topic_offset == 5:
            failing.clear()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.process(tagged("x"), handle, cursor=cursor, batch_size=2, stop_when_caught_up=True)
    store.process(tagged("x"), handle, cursor=cursor, batch_size=2, stop_when_caught_up=True)
    rows = connection.execute("select position from total order by 1").fetchall()
    assert [position for (position,) in rows] == [event.position for event in store.read(tagged("x"))]
