"""Is everything that happens to a watched table published, whole, once and in order, however many rows at a time?"""

from __future__ import annotations

import itertools
import random
from typing import Any

import psycopg
import pytest

import headwater

_numbers = itertools.count()
ROWS = 2_500


@pytest.fixture
def table(connection: psycopg.Connection) -> str:
    name = f"watched_{next(_numbers)}"
    connection.execute(f"create table {name} (id integer primary key, name text, total numeric)")
    return name


def told(log: headwater.Headwater, topic: str) -> list[tuple[Any, Any, Any]]:
    """What was published: the kind, and `id` before and after."""
    events: list[tuple[Any, Any, Any]] = []
    for event in log.follow(topic, batch_size=1000, stop_when_caught_up=True):
        before, after = event.data["before"], event.data["after"]
        events.append((event.type, before and before["id"], after and after["id"]))
    return events


@pytest.mark.parametrize("kind", ["open", "sequenced"])
@pytest.mark.parametrize("partitions", [1, 3])
def test_a_statement_of_many_rows_is_published_row_by_row_in_their_order(
    log: headwater.Headwater, table: str, connection: psycopg.Connection, kind: Any, partitions: int
) -> None:
    topic = log.create_topic(f"{table}-{kind}", kind=kind, partitions=partitions).name
    log.watch_table(table, topic=topic)
    ids = random.Random(7).sample(range(10 * ROWS), ROWS)
    connection.execute(f"insert into {table} select i, 'name ' || i, i from unnest(%s::integer[]) as i", (ids,))
    connection.execute(f"update {table} set id = -id - 1, total = total + 1 where total % 2 = 0")
    connection.execute(f"update {table} set name = name")
    connection.execute(f"delete from {table} where id >= 0")
    events = list(log.follow(topic, batch_size=1000, stop_when_caught_up=True))
    inserted = [event for event in events if event.type == "insert"]
    assert [event.data["after"]["id"] for event in inserted] == ids
    assert [event.key_text for event in inserted] == [str(i) for i in ids]
    assert all(
        event.data["before"] is None and event.data["after"]["name"] == f"name {event.key_text}" for event in inserted
    )
    updated = [event for event in events if event.type == "update"]
    assert sorted(event.data["before"]["id"] for event in updated) == sorted(i for i in ids if i % 2 == 0)
    for event in updated:
        before, after = event.data["before"], event.data["after"]
        assert after == {**before, "id": -before["id"] - 1, "total": before["total"] + 1}
        assert event.data["changed"] == ["id", "total"]
        assert event.key_text == str(after["id"])
    deleted = [event for event in events if event.type == "delete"]
    assert sorted(event.data["before"]["id"] for event in deleted) == sorted(i for i in ids if i % 2)
    assert all(event.data["after"] is None for event in deleted)
    assert events == inserted + updated + deleted
    if kind == "sequenced":
        for partition in range(partitions):
            offsets = [event.topic_offset for event in events if event.partition == partition]
            assert offsets == list(range(len(offsets)))
    elif partitions > 1:
        of_keys: dict[str | None, set[int]] = {}
        for event in events:
            of_keys.setdefault(event.key_text, set()).add(event.partition)
        assert all(len(partition) == 1 for partition in of_keys.values())
        assert len({partition for one in of_keys.values() for partition in one}) == partitions


def test_an_upsert_publishes_what_it_inserted_and_what_it_updated(
    log: headwater.Headwater, table: str, topic: str, connection: psycopg.Connection
) -> None:
    log.watch_table(table, topic=topic)
    connection.execute(f"insert into {table} values (1, 'a', 1), (2, 'b', 2)")
    connection.execute(
        f"insert into {table} values (2, 'b2', 2), (3, 'c', 3), (1, 'a2', 1) "
        "on conflict (id) do update set name = excluded.name"
    )
    events = log.read(topic)[2:]
    assert sorted((event.type, event.key_text) for event in events) == [
        ("insert", "3"),
        ("update", "1"),
        ("update", "2"),
    ]
    images = {e.key_text: (e.data["before"]["name"], e.data["after"]["name"]) for e in events if e.type == "update"}
    assert images == {"1": ("a", "a2"), "2": ("b", "b2")}


def test_a_merge_publishes_each_row_as_what_was_done_to_it(
    log: headwater.Headwater, table: str, topic: str, connection: psycopg.Connection
) -> None:
    log.watch_table(table, topic=topic)
    connection.execute(f"insert into {table} values (1, 'a', 1), (2, 'b', 2)")
    connection.execute(
        f"merge into {table} t using (values (1), (2), (3)) as s (id) on t.id = s.id "
        "when matched and t.id = 1 then delete when matched then update set total = 20 "
        "when not matched then insert values (s.id, 'new', 0)"
    )
    assert sorted(told(log, topic)[2:]) == [("delete", 1, None), ("insert", None, 3), ("update", 2, 2)]


def test_a_statement_that_touches_no_row_publishes_nothing(
    log: headwater.Headwater, table: str, topic: str, connection: psycopg.Connection
) -> None:
    log.watch_table(table, topic=topic)
    connection.execute(f"delete from {table}")
    connection.execute(f"update {table} set total = 1")
    connection.execute(f"insert into {table} select 1, 'x', 1 where false")
    assert log.read(topic) == []


def test_a_table_without_a_primary_key_and_with_equal_rows_is_published_whole(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    name = f"watched_{next(_numbers)}"
    connection.execute(f"create table {name} (id integer, total integer)")
    log.watch_table(name, topic=topic)
    connection.execute(f"insert into {name} select 1, 1 from generate_series(1, 5)")
    connection.execute(f"update {name} set total = 2")
    connection.execute(f"delete from {name}")
    events = log.read(topic)
    assert [event.type for event in events] == ["insert"] * 5 + ["update"] * 5 + ["delete"] * 5
    assert {event.key_text for event in events} == {None}
    assert all(e.data["before"]["total"] == 1 and e.data["after"]["total"] == 2 for e in events[5:10])


def test_a_partitioned_table_is_watched_also_where_a_partition_is_written_directly(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    name = f"watched_{next(_numbers)}"
    connection.execute(f"create table {name} (id integer primary key, total integer) partition by range (id)")
    connection.execute(f"create table {name}_low partition of {name} for values from (0) to (10)")
    log.watch_table(name, topic=topic)
    # Also one that is made later.
    connection.execute(f"create table {name}_high partition of {name} for values from (10) to (20)")
    connection.execute(f"insert into {name} values (1, 1), (11, 1)")
    connection.execute(f"insert into {name}_low values (2, 1)")
    connection.execute(f"insert into {name}_high values (12, 1)")
    connection.execute(f"update {name} set total = 2 where id = 11")
    connection.execute(f"delete from {name}_low where id = 1")
    assert told(log, topic) == [
        ("insert", None, 1),
        ("insert", None, 11),
        ("insert", None, 2),
        ("insert", None, 12),
        ("update", 11, 11),
        ("delete", 1, None),
    ]


def test_a_partition_is_watched_also_where_its_table_is_written(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    name = f"watched_{next(_numbers)}"
    connection.execute(f"create table {name} (id integer primary key, total integer) partition by range (id)")
    connection.execute(f"create table {name}_low partition of {name} for values from (0) to (10)")
    connection.execute(f"create table {name}_high partition of {name} for values from (10) to (20)")
    log.watch_table(f"{name}_low", topic=topic)
    connection.execute(f"insert into {name} values (1, 1), (11, 1)")
    assert told(log, topic) == [("insert", None, 1)]


def test_rows_of_a_child_table_are_not_those_of_the_table_that_is_watched(
    log: headwater.Headwater, table: str, topic: str, connection: psycopg.Connection
) -> None:
    connection.execute(f"create table {table}_child () inherits ({table})")
    log.watch_table(table, topic=topic)
    connection.execute(f"insert into {table} values (1, 'a', 1)")
    connection.execute(f"insert into {table}_child values (2, 'b', 1)")
    connection.execute(f"update {table} set total = 2")
    assert told(log, topic) == [("insert", None, 1), ("update", 1, 1)]


def test_what_another_trigger_writes_comes_after_what_caused_it(
    log: headwater.Headwater, table: str, topic: str, connection: psycopg.Connection
) -> None:
    connection.execute(
        f"create function {table}_touch() returns trigger language plpgsql as $$ begin "
        f"update {table} set total = 0 where id = new.id and total <> 0; return null; end $$"
    )
    connection.execute(f"create trigger touch after insert on {table} for each row execute function {table}_touch()")
    log.watch_table(table, topic=topic)
    connection.execute(f"insert into {table} values (1, 'a', 5), (2, 'b', 5)")
    assert [one for one in told(log, topic) if one[2] == 1] == [("insert", None, 1), ("update", 1, 1)]
    assert [one for one in told(log, topic) if one[2] == 2] == [("insert", None, 2), ("update", 2, 2)]


def test_a_column_that_is_added_later_is_shown_at_once(
    log: headwater.Headwater, table: str, topic: str, connection: psycopg.Connection
) -> None:
    log.watch_table(table, topic=topic)
    connection.execute(f"insert into {table} values (1, 'a', 5)")
    connection.execute(f"alter table {table} add column more text default 'm'")
    connection.execute(f"insert into {table} values (2, 'b', 5, 'n')")
    connection.execute(f"update {table} set more = 'o' where id = 2")
    connection.execute(f"alter table {table} drop column name")
    connection.execute(f"delete from {table} where id = 2")
    events = log.read(topic)
    assert events[1].data["after"]["more"] == "n"
    assert events[2].data["changed"] == ["more"]
    assert events[3].data["before"] == {"id": 2, "total": 5, "more": "o"}


def test_a_table_of_another_schema_with_names_to_be_quoted_is_watched(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    schema = f'od"d {next(_numbers)}'
    quoted = '"' + schema.replace('"', '""') + '"'
    connection.execute(f"create schema {quoted}")
    connection.execute(f'create table {quoted}."Ta""ble" ("Id" integer primary key, "va,l""ue" text)')
    topic = log.watch_table(f'{quoted}."Ta""ble"', columns=["Id", 'va,l"ue'], when_changed=['va,l"ue'])
    connection.execute(f'insert into {quoted}."Ta""ble" values (1, \'x\')')
    connection.execute(f'update {quoted}."Ta""ble" set "va,l""ue" = \'y\'')
    inserted, updated = log.read(topic)
    assert inserted.data == {
        "op": "insert", "schema": schema, "table": 'Ta"ble', "before": None, "after": {"Id": 1, 'va,l"ue': "x"},
    }  # fmt: skip
    assert (updated.key_text, updated.data["changed"]) == ("1", ['va,l"ue'])


def test_a_row_that_is_too_large_for_the_topic_refuses_the_whole_statement(
    log: headwater.Headwater, table: str, connection: psycopg.Connection
) -> None:
    topic = log.create_topic(f"{table}-small", max_payload_bytes=500).name
    log.watch_table(table, topic=topic)
    with pytest.raises(psycopg.Error) as refused:
        connection.execute(f"insert into {table} values (1, 'small', 1), (2, repeat('x', 1000), 1)")
    assert refused.value.sqlstate == "HW003"
    assert connection.execute(f"select from {table}").fetchall() == []
    assert log.read(topic) == []


def test_a_watch_of_an_earlier_version_goes_on_and_is_replaced(
    log: headwater.Headwater, table: str, topic: str, connection: psycopg.Connection
) -> None:
    connection.execute(
        f"create trigger headwater_watch after insert or update or delete on {table} for each row "
        f"execute function headwater_internal.publish_table_change('{topic}', '', '', '{{id}}')"
    )
    connection.execute(f"insert into {table} values (1, 'a', 5)")
    log.watch_table(table, topic=topic)
    connection.execute(f"insert into {table} values (2, 'b', 5)")
    assert told(log, topic) == [("insert", None, 1), ("insert", None, 2)]
    assert log.unwatch_table(table)
    connection.execute(f"insert into {table} values (3, 'c', 5)")
    assert len(told(log, topic)) == 2
