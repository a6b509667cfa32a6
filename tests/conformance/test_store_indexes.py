"""Are indexes on fields the same on Postgres and on SQLite: declared, used, dropped, and never in the way?"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headwater
from effort import effort
from headwater.calls import log as log_calls
from headwater.calls import store as store_calls
from headwater.client.eventstore.postgres import EventStore as BlockingEventStore
from headwater.errors import InvalidRequest
from headwater.eventstore import NewStoreEvent, Query, SqliteEventStore, SqliteStores, StoreEvent, sqlite_rows
from headwater.eventstore.field_index import FieldIndex, IndexCondition, define_index

_numbers = itertools.count()
Store = BlockingEventStore | SqliteEventStore


@pytest.fixture(params=["postgres", "sqlite"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "postgres":
        yield request.getfixturevalue("log")
    else:
        with SqliteStores(tmp_path / "stores") as stores:
            yield stores


@pytest.fixture
def store(stores: Any) -> Store:
    return stores.create_store(f"store-{next(_numbers)}")


def fill(store: Store, *data: Any) -> None:
    store.append([NewStoreEvent("A", value) for value in data])


def looked_at(store: Store, query: Query, dsn: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many events are looked at to answer a query."""
    if isinstance(store, SqliteEventStore):
        looks: list[int] = []
        event = sqlite_rows.event_at

        def counted(connection: Any, position: int) -> StoreEvent:
            looks.append(position)
            return event(connection, position)

        with monkeypatch.context() as patched:
            patched.setattr(sqlite_rows, "event_at", counted)
            store.count(query)
        return len(looks)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("set track_functions = 'all'")
        connection.execute("select pg_stat_reset_single_function_counters('headwater_internal.fields_match'::regproc)")
        connection.execute("select headwater.count_matching(%s, %s)", (store.topic, query.as_json()))
        connection.execute("select pg_stat_force_next_flush()")
        row = connection.execute("select calls from pg_stat_user_functions where funcname = 'fields_match'").fetchone()
        return 0 if row is None else int(row[0])


@pytest.mark.parametrize(
    ("kind", "inside", "outside"),
    [
        ("text", "x7", "nobody has it"),
        ("numeric", 7, "x7"),
        ("boolean", True, "x7"),
        ("timestamp", "2026-01-07T10:00:00Z", "yesterday"),
    ],
)
def test_an_index_of_every_kind_leads_to_its_events_and_takes_every_other(
    kind: Any, inside: Any, outside: Any, store: Store, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [*(f"x{n}" for n in range(20)), *range(20), *(f"2026-01-{n:02}T10:00:00Z" for n in range(1, 20)), True]
    fill(store, *({"k": value} for value in values))
    store.create_index("by_k", {"k": kind}, batch_size=7)
    # Whatever comes later is appended, of the kind or not.
    fill(store, {"k": inside}, {"k": "no number"}, {"k": {"nested": 1}}, {"k": None}, {}, [1], None, b"\xff")
    found = store.index("by_k")
    assert found == FieldIndex("by_k", ("k",), True, (kind,))
    assert found.state == "READY"
    query = Query.of(fields={"k": inside})
    assert [event.data["k"] for event in store.read(query)] == [inside] * 2
    assert looked_at(store, query, dsn, monkeypatch) == 2
    # What is not of the kind is not in the index, which is then of no use.
    others = looked_at(store, Query.of(fields={"k": outside}), dsn, monkeypatch)
    assert others == 0 if kind == "text" else others > 50


def test_a_composite_and_a_partial_index_are_used_where_they_have_all_that_matches(
    store: Store, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, *({"k": n % 3, "l": f"{n}", "amount": n * 10} for n in range(30)))
    large, open_ = IndexCondition("amount", ">=", 200), IndexCondition("state", "=", "open")

    def looks(**fields: Any) -> int:
        return looked_at(store, Query.of(fields=fields), dsn, monkeypatch)

    store.create_index("both", {"k": "numeric", "l": "text"})
    assert looks(k=1, l="4") == 1
    assert looks(k=1) == looks(l="4") == 30
    store.drop_index("both")
    assert looks(k=1, l="4") == 30
    store.create_index("large", ["l"], conditions=[large])
    # 9 is not above 200, and as a text it would be.
    assert looks(l="25", amount=250) == 1
    assert looks(l="1", amount=9) == 30
    assert looks(l="25") == 30
    store.create_index("either", ["k"], conditions=[large, open_], combine="or")
    assert looks(k=1, amount=250) == 3
    assert looks(k=1, state="open") == 3
    assert looks(k=1, state="shut") == 30
    store.create_index("all", ["k"], conditions=[large, open_])
    assert [index.name for index in store.indexes()] == ["all", "either", "large"]
    assert store.index("all") == FieldIndex("all", ("k",), True, ("text",), (large, open_), "and")
    assert looks(k=1, amount=250, state="open") == 0


values = st.sampled_from([0, 1, 10, 9.5, "1", "1.0", "abc", "", True, "true", None, [1], "2026-01-01", "2026-01-01 99"])
data = st.one_of(st.none(), st.just([1]), st.dictionaries(st.sampled_from("kl"), values))
indexes = st.builds(
    lambda fields, conditions, combine: (fields, conditions, combine),
    st.dictionaries(st.sampled_from("kl"), st.sampled_from(["text", "numeric", "boolean", "timestamp"]), min_size=1),
    st.lists(
        st.builds(
            IndexCondition,
            st.sampled_from("kl"),
            st.sampled_from(["=", "!=", "<", "<=", ">", ">="]),
            st.sampled_from([1, "1.0", "9", "abc", True]),
        ),
        max_size=2,
    ),
    st.sampled_from(["and", "or"]),
)


@given(
    before=st.lists(data, min_size=1, max_size=8),
    after=st.lists(data, min_size=1, max_size=8),
    made=st.lists(indexes, min_size=1, max_size=2),
    asked=st.lists(
        st.dictionaries(st.sampled_from("kl"), values.filter(lambda v: v is not None and v != [1]), min_size=1),
        min_size=1, max_size=4,
    ),
)  # fmt: skip
@settings(
    max_examples=effort(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_an_index_changes_no_answer(
    stores: Any,
    before: list[Any],
    after: list[Any],
    made: list[tuple[Any, Any, Any]],
    asked: list[Mapping[str, Any]],
) -> None:
    store = stores.create_store(f"store-{next(_numbers)}")
    fill(store, *before)
    for number, (fields, conditions, combine) in enumerate(made):
        store.create_index(f"i{number}", fields, conditions=conditions, combine=combine, batch_size=3)
    fill(store, *after)
    everything = store.read(batch_size=1000)
    for fields in asked:
        query = Query.of(fields=fields)
        assert store.read(query) == [event for event in everything if query.matches(event)], fields


def test_an_index_that_is_not_filled_yet_is_not_used_and_is_filled_on(store: Store) -> None:
    fill(store, *({"k": n % 2} for n in range(10)))
    index = define_index("by_k", ["k"])
    if isinstance(store, SqliteEventStore):
        with store._access.file.transaction() as connection:
            sqlite_rows.create_field_index(connection, index)
            assert sqlite_rows.fill_field_index(connection, "by_k", 3)
    else:
        log = store._log
        log._run(store_calls.create_field_index(store.topic, index))
        assert log._run(store_calls.fill_field_index(store.topic, "by_k", batch_size=3))
    assert [index.state for index in store.indexes()] == ["BUILDING"]
    fill(store, {"k": 1})
    assert store.count(Query.of(fields={"k": 1})) == 6
    store.create_index("by_k", ["k"])
    assert [index.state for index in store.indexes()] == ["READY"]
    assert store.count(Query.of(fields={"k": 1})) == 6


def test_an_index_that_is_dropped_leaves_nothing_and_its_name_is_free(store: Store) -> None:
    fill(store, {"k": 1}, {"l": 2})
    store.create_index("i", ["k"])
    assert store.drop_index("i")
    assert not store.drop_index("i")
    assert store.index("i") is None
    store.create_index("i", {"l": "numeric"})
    assert store.count(Query.of(fields={"l": 2})) == store.count(Query.of(fields={"k": 1})) == 1


@pytest.mark.parametrize("beside", ["a:b", "a:", "a;", "a", "1", "A"])
def test_an_index_that_is_dropped_takes_nothing_of_another_with_it(store: Store, beside: str) -> None:
    fill(store, {"k": 1, "l": 2})
    store.create_index("a" if beside != "a" else "a:b", ["l"])
    store.create_index(beside, ["k"])
    fill(store, {"k": 1, "l": 2})
    assert store.drop_index("a" if beside != "a" else "a:b")
    if not isinstance(store, SqliteEventStore):
        store._log._run(log_calls.maintain())
    assert store.count(Query.of(fields={"k": 1})) == 2
    assert store.count(Query.of(fields={"l": 2})) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fields": []}, "expected 1 to 8"),
        ({"fields": ["k"] * 2}, "a field twice"),
        ({"fields": [f"k{n}" for n in range(9)]}, "expected 1 to 8"),
        ({"fields": "k"}, "list of strings"),
        ({"fields": {"k": "money"}}, 'invalid kind of field "money"'),
        ({"fields": ["k"], "combine": "xor"}, "invalid combine"),
        ({"name": "", "fields": ["k"]}, "1 to 63 characters"),
        ({"name": "taken", "fields": ["b"]}, "has other fields: a"),
        ({"name": "taken", "fields": {"a": "numeric"}}, "has other fields: a"),
    ],
)
def test_what_is_no_index_is_refused(store: Store, options: dict[str, Any], says: str) -> None:
    store.create_index("taken", ["a"])
    with pytest.raises(InvalidRequest, match=says):
        store.create_index(**{"name": "wrong", **options})
    assert [index.name for index in store.indexes()] == ["taken"]


def test_a_condition_needs_an_operator_and_a_scalar() -> None:
    with pytest.raises(InvalidRequest, match="invalid operator"):
        IndexCondition("k", "~", 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="a string, a number or a boolean"):
        IndexCondition("k", "=", None)  # type: ignore[arg-type]


def test_an_index_is_declared_from_sql(log: headwater.Headwater, connection: psycopg.Connection[Any]) -> None:
    store = log.create_store(f"store-{next(_numbers)}")
    conditions = [{"field": "amount", "operator": ">", "value": "100"}]
    call = "select headwater.create_field_index(%s, 'i', array['k'], array['numeric'], %s, 'or')"
    connection.execute(call, (store.topic, json.dumps(conditions)))
    assert store.index("i") == FieldIndex("i", ("k",), True, ("numeric",), (IndexCondition("amount", ">", 100),), "or")
    for wrong in ('{"a": 1}', '[{"field": "k"}]', '[{"field": "k", "operator": "like", "value": "x"}]'):
        with pytest.raises(psycopg.Error, match="invalid conditions of an index"):
            connection.execute(call, (store.topic, wrong))


def test_the_data_of_an_event_is_read_once_however_many_indexes_there_are(
    log: headwater.Headwater, connection: psycopg.Connection[Any]
) -> None:
    store = log.create_store(f"store-{next(_numbers)}")
    for number in range(3):
        store.create_index(f"i{number}", ["k"])
    connection.execute("set track_functions = 'all'")
    for function in ("as_json", "field_index_term"):
        connection.execute(
            "select pg_stat_reset_single_function_counters(p.oid) from pg_proc p "
            "where p.pronamespace in ('headwater'::regnamespace, 'headwater_internal'::regnamespace) and p.proname "
            "= %s",
            (function,),
        )
    connection.execute(
        "select headwater.append(%s, %s)",
        (store.topic, json.dumps([{"type": "A", "data": {"k": n}} for n in range(4)])),
    )
    connection.execute("select pg_stat_force_next_flush()")
    calls = dict(
        connection.execute(
            "select funcname, calls from pg_stat_user_functions where funcname in ('as_json', 'field_index_term')"
        ).fetchall()
    )
    assert calls == {"as_json": 4, "field_index_term": 12}
