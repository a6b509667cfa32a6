"""Change capture from a real slot: whole transactions, exact replay, nothing lost."""

from __future__ import annotations

import itertools
import json
import random
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, pq, sql

from databases import database
from patience import PATIENCE_SECONDS

pytest.importorskip("pyarrow")

from headwater.capture import connection as capture_connection
from headwater.capture.slot import Slot, SlotLevel, SlotState
from headwater.capture.snapshot import Snapshot, open_snapshot, plan
from headwater.capture.snapshot import read as read_chunk
from headwater.database.pg_snapshot import is_visible
from headwater.embedded import Postgres
from headwater.errors import CaptureRefused, InvalidRequest, SlotBusy, SlotLost

_numbers = itertools.count()
Change = dict[str, Any]


@pytest.fixture(scope="module")
def dsn(admin_dsn: str) -> Iterator[str]:
    """A database without a log: capture needs none."""
    with database(admin_dsn) as dsn:
        with psycopg.connect(dsn) as setup:
            setup.execute("create type capture_mood as enum ('so so', 'good')")
            setup.execute("create domain capture_positive as integer check (value > 0)")
            setup.execute("create type capture_pair as (a integer, b text)")
        yield dsn


@pytest.fixture
def table(connection: psycopg.Connection) -> str:
    name = f"orders_{next(_numbers)}"
    connection.execute(f"create table {name} (id integer primary key, name text, amount numeric)")
    return name


@pytest.fixture
def new_slot(dsn: str) -> Iterator[Callable[..., Slot]]:
    made: list[Slot] = []

    def make(*tables: str, **arguments: Any) -> Slot:
        number = next(_numbers)
        slot = Slot(dsn, f"slot_{number}", f"Publication {number}", **arguments)
        made.append(slot)
        slot.prepare(tables)
        return slot

    yield make
    for slot in made:
        slot.drop()


@pytest.fixture
def slot(table: str, new_slot: Callable[..., Slot]) -> Slot:
    return new_slot(table)


def flushed(slot: Slot) -> int:
    with psycopg.connect(slot.dsn, autocommit=True) as connection:
        # An asynchronous commit is flushed a moment later.
        connection.execute("set synchronous_commit = on")
        connection.execute("select pg_logical_emit_message(true, 'flush', '')")
    return slot.state().flushed_lsn


def changes(slot: Slot, start: int | None = None, end: int | None = None) -> list[Change]:
    begin = slot.state().confirmed_lsn if start is None else start
    stop = flushed(slot) if end is None else end
    return [change for batch in slot.read(start=begin, end=stop) for change in batch.to_pylist()]


def image(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def short(change: Change) -> tuple[Any, ...]:
    return change["operation"], image(change["before"]), image(change["after"])


# -- what a change says


def test_a_change_tells_transaction_time_table_and_row(slot: Slot, table: str, connection: psycopg.Connection) -> None:
    with connection.transaction():
        (xid,) = connection.execute("select pg_current_xact_id()::text::bigint").fetchone()
        connection.execute(f"insert into {table} values (1, 'a \"quoted\" \\ name\n', 12.50), (2, null, null)")
        connection.execute(f"update {table} set name = 'é' where id = 1")
        connection.execute(f"update {table} set id = 3 where id = 2")
        connection.execute(f"delete from {table} where id = 3")
    found = changes(slot)
    assert [short(change) for change in found] == [
        ("insert", None, {"id": 1, "name": 'a "quoted" \\ name\n', "amount": "12.50"}),
        ("insert", None, {"id": 2, "name": None, "amount": None}),
        ("update", None, {"id": 1, "name": "é", "amount": "12.50"}),
        ("update", {"id": 2}, {"id": 3, "name": None, "amount": None}),
        ("delete", {"id": 3}, None),
    ]
    assert [image(change["key"]) for change in found] == [{"id": 1}, {"id": 2}, {"id": 1}, {"id": 3}, {"id": 3}]
    assert {(change["xid"], change["schema"], change["table"]) for change in found} == {(xid, "public", table)}
    assert [change["sequence"] for change in found] == [0, 1, 2, 3, 4]
    (now,) = connection.execute("select now()").fetchone()
    assert abs((now - found[0]["committed_at"]).total_seconds()) < 60


EVERY_TYPE = {
    "smallint": ("-3", -3),
    "bigint": ("9223372036854775807", 9223372036854775807),
    "oid": ("4294967295", 4294967295),
    "real": ("1.5", 1.5),
    "double precision": ("'NaN'", "NaN"),
    "float8": ("'-Infinity'", "-Infinity"),
    "float4": ("1e20", 1e20),
    "numeric": ("12345678901234567890.50", "12345678901234567890.50"),
    "numeric(5,1)": ("'NaN'", "NaN"),
    "money": ("12.5", "$12.50"),
    "boolean": ("false", False),
    "text": ("E'tab\\t quote\" control\\x01'", 'tab\t quote" control\x01'),
    "varchar(10)": ("''", ""),
    "char(3)": ("'a'", "a  "),
    '"char"': ("'x'", "x"),
    "bytea": ("'\\x00ff'", "\\x00ff"),
    "uuid": ("'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    "json": ('\'{"a": [1, {"b": null}]}\'', {"a": [1, {"b": None}]}),
    "jsonb": ("'[\"\\u00e9\\n\", 1.50]'", ["é\n", 1.50]),
    "date": ("'2024-02-29'", "2024-02-29"),
    "timestamp": ("'2024-02-29 12:00:00.5'", "2024-02-29T12:00:00.5"),
    "timestamptz": ("'2024-02-29 12:00:00+02'", "2024-02-29T10:00:00Z"),
    "timestamptz(0)": ("'infinity'", "infinity"),
    "timestamp(3)": ("'0044-03-15 10:00:00 BC'", "0044-03-15T10:00:00 BC"),
    "timestamp(6)": ("'12345-01-02 03:04:05'", "12345-01-02T03:04:05"),
    "time": ("'03:04:05'", "03:04:05"),
    "timetz": ("'03:04:05+02'", "03:04:05+02"),
    "interval": ("'1 day 2 hours'", "P1DT2H"),
    "integer[]": ("'{1,null,3}'", "{1,NULL,3}"),
    "text[]": ("array['a b', 'c\"d']", '{"a b","c\\"d"}'),
    "int4range": ("'[1,5)'", "[1,5)"),
    "tstzrange": ("'[2024-01-01 00:00+00,)'", '["2024-01-01 00:00:00+00",)'),
    "int4multirange": ("'{[1,3),[7,9)}'", "{[1,3),[7,9)}"),
    "inet": ("'10.0.0.1/8'", "10.0.0.1/8"),
    "macaddr": ("'08:00:2b:01:02:03'", "08:00:2b:01:02:03"),
    "point": ("'(1,2)'", "(1,2)"),
    "bit(3)": ("B'101'", "101"),
    "tsvector": ("'a:1 b'", "'a':1 'b'"),
    "pg_lsn": ("'1/AB'", "1/AB"),
    "xid8": ("'77'", 77),
    "capture_mood": ("'so so'", "so so"),
    "capture_positive": ("5", 5),
    "capture_pair": ("row(1,'x y')", '(1,"x y")'),
}


def test_every_type_has_a_json_value(connection: psycopg.Connection, new_slot: Callable[..., Slot]) -> None:
    columns = [f"c{number} {kind}" for number, kind in enumerate(EVERY_TYPE)]
    connection.execute(f"create table every_type (id integer primary key, {', '.join(columns)})")
    slot = new_slot("every_type")
    # The texts must not depend on how the writer or the database is set.
    connection.execute("alter role current_user set datestyle = 'German'")
    try:
        values = ", ".join(f"{value}::{kind}" for kind, (value, _) in EVERY_TYPE.items())
        connection.execute(f"insert into every_type values (1, {values})")
        connection.execute("insert into every_type values (2)")
        first, second = changes(slot)
    finally:
        connection.execute("alter role current_user reset datestyle")
    found = image(first["after"])
    wanted = {f"c{number}": value for number, (_, value) in enumerate(EVERY_TYPE.values())}
    assert found == {"id": 1, **wanted}
    assert image(second["after"]) == {"id": 2, **dict.fromkeys(wanted)}
    described = {column["name"]: column["type"] for column in json.loads(first["columns"])}
    assert described["c1"] == "int8"
    assert described[f"c{len(EVERY_TYPE) - 3}"] == "capture_mood"
    assert described[f"c{len(EVERY_TYPE) - 2}"] == "int4"  # what the domain is made of


def test_a_large_value_that_was_not_touched_is_told_from_null(
    slot: Slot, table: str, connection: psycopg.Connection
) -> None:
    connection.execute(f"alter table {table} alter column name set storage external")
    connection.execute(f"insert into {table} values (1, repeat('x', 100000), 1), (2, null, 1)")
    connection.execute(f"update {table} set amount = 2")
    *_, large, small = changes(slot)
    assert (image(large["after"]), large["unchanged"]) == ({"id": 1, "amount": "2"}, ["name"])
    assert (image(small["after"]), small["unchanged"]) == ({"id": 2, "name": None, "amount": "2"}, [])


def test_a_full_identity_gives_the_whole_row_before(slot: Slot, table: str, connection: psycopg.Connection) -> None:
    connection.execute(f"alter table {table} replica identity full")
    connection.execute(f"alter table {table} alter column name set storage external")
    connection.execute(f"insert into {table} values (1, repeat('x', 5000), 1)")
    connection.execute(f"update {table} set amount = 2")
    connection.execute(f"delete from {table}")
    _, updated, deleted = changes(slot)
    large = "x" * 5000
    assert image(updated["before"]) == {"id": 1, "name": large, "amount": "1"}
    assert image(updated["after"]) == {"id": 1, "name": large, "amount": "2"}  # the untouched value, from before
    assert updated["unchanged"] == []
    assert short(deleted) == ("delete", {"id": 1, "name": large, "amount": "2"}, None)
    assert image(deleted["key"]) == {"id": 1}


def test_no_identity_can_be_captured_by_inserts_only(
    connection: psycopg.Connection, new_slot: Callable[..., Slot], dsn: str
) -> None:
    connection.execute("create table nameless (x integer)")
    with pytest.raises(CaptureRefused, match="replica identity full"):
        new_slot("nameless")
    connection.execute("create publication nameless for table nameless with (publish = 'insert')")
    slot = Slot(dsn, "nameless", "nameless")
    slot.prepare(["nameless"])
    connection.execute("insert into nameless values (1)")
    (change,) = changes(slot)
    assert (change["key"], image(change["after"])) == (None, {"x": 1})
    slot.drop()


def test_truncate_is_a_change_of_each_table(
    connection: psycopg.Connection, table: str, new_slot: Callable[..., Slot]
) -> None:
    connection.execute(f"create table {table}_lines (id integer primary key, parent integer references {table})")
    slot = new_slot(table, f"{table}_lines")
    connection.execute(f"insert into {table} values (1)")
    connection.execute(f"truncate {table} cascade")
    first, *rest = changes(slot)
    assert first["operation"] == "insert"
    assert {(change["table"], change["operation"]) for change in rest} == {
        (table, "truncate"),
        (f"{table}_lines", "truncate"),
    }
    assert [change["sequence"] for change in rest] == [0, 1]


def test_rows_of_one_copy_have_ids_of_their_own(slot: Slot, table: str, connection: psycopg.Connection) -> None:
    with connection.cursor() as cursor, cursor.copy(f"copy {table} (id) from stdin") as copy:
        for number in range(5000):
            copy.write_row((number,))
    found = changes(slot)
    ids = [change["id"] for change in found]
    assert len(set(ids)) == 5000
    assert ids == sorted(ids)
    assert [image(change["after"])["id"] for change in found] == list(range(5000))


def test_partitions_are_captured_as_their_table(connection: psycopg.Connection, new_slot: Callable[..., Slot]) -> None:
    connection.execute("create table parted (id integer primary key) partition by range (id)")
    connection.execute("create table parted_1 partition of parted for values from (0) to (10)")
    connection.execute("create table parted_2 partition of parted for values from (10) to (20)")
    slot = new_slot("parted")
    connection.execute("insert into parted values (1), (11)")
    assert [change["table"] for change in changes(slot)] == ["parted", "parted"]


def test_columns_that_change_in_the_middle_are_noticed(slot: Slot, table: str, connection: psycopg.Connection) -> None:
    connection.execute(f"insert into {table} values (1, 'a', 1)")
    with connection.transaction():
        connection.execute(f"insert into {table} values (2, 'b', 1)")
        connection.execute(f"alter table {table} add column extra boolean default true, drop column amount")
        connection.execute(f"insert into {table} values (3, 'c', false)")
    connection.execute(f"alter table {table} rename column name to title")
    connection.execute(f"insert into {table} values (4, 'd', null)")
    found = changes(slot)
    assert [image(change["after"]) for change in found] == [
        {"id": 1, "name": "a", "amount": "1"},
        {"id": 2, "name": "b", "amount": "1"},
        {"id": 3, "name": "c", "extra": False},
        {"id": 4, "title": "d", "extra": None},
    ]
    hashes = [change["columns_hash"] for change in found]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3
    assert [change["columns"] is not None for change in found] == [True, False, True, True]


# -- order and replay


def storm(dsn: str, table: str, *, transactions: int, seed: int) -> None:
    """Transactions that overlap, roll back, and roll back in part; the table's columns change meanwhile."""
    rng = random.Random(seed)
    connections = [psycopg.connect(dsn) for _ in range(4)]
    connections[0].execute(f"set lock_timeout = '{PATIENCE_SECONDS}s'")
    numbers = itertools.count(1)
    for step in range(transactions):
        connection = rng.choice(connections)
        for _ in range(rng.randrange(1, 30)):
            connection.execute(
                f"insert into {table} (id, name) values (%s, %s)", (next(numbers), "x" * rng.randrange(9))
            )
        if rng.random() < 0.3:
            connection.execute("savepoint s")
            connection.execute(f"insert into {table} (id) values (%s)", (next(numbers),))
            connection.execute("rollback to s" if rng.random() < 0.5 else "release s")
        if rng.random() < 0.2:
            connection.rollback()
        elif rng.random() < 0.7:
            connection.commit()
        if step == transactions // 2:
            for each in connections:
                each.commit()
            connection.execute(f"alter table {table} add column later integer")
            connection.commit()
        if rng.random() < 0.1:
            connection.execute(f"update {table} set name = 'y' where id = %s", (next(numbers) - 40,))
            connection.commit()
    for connection in connections:
        connection.commit()
        connection.close()


def same(change: Change) -> Change:
    """A change without its description, which comes once in a read."""
    return {name: value for name, value in change.items() if name != "columns"}


def test_however_it_is_cut_and_repeated_the_same_changes_come(slot: Slot, table: str, dsn: str) -> None:
    storm(dsn, table, transactions=120, seed=1)
    start, end = slot.state().confirmed_lsn, flushed(slot)
    everything = [same(change) for change in changes(slot, start, end)]
    assert len(everything) > 1000
    assert [change["commit_lsn"] for change in everything] == sorted(change["commit_lsn"] for change in everything)
    # Whole transactions: the changes of each one are numbered from 0.
    by_transaction: dict[int, list[int]] = {}
    for change in everything:
        by_transaction.setdefault(change["commit_lsn"], []).append(change["sequence"])
    assert all(numbers == list(range(len(numbers))) for numbers in by_transaction.values())

    rng = random.Random(2)
    commits = sorted(by_transaction)
    for trial in range(3):
        near = [commit + rng.choice([-1, 0, 1]) for commit in rng.sample(commits, 3)]
        cuts = sorted({start, end, *near, *(rng.randrange(start, end) for _ in range(3))})
        tiled: list[Change] = []
        for low, high in itertools.pairwise(cuts):
            part = changes(slot, low, high)
            assert part == changes(slot, low, high)
            tiled += map(same, part)
            if trial == 2:
                # Now with a slot that moves, one step behind as Spark does it.
                slot.advance(low)
        assert tiled == everything


def test_a_rolled_back_transaction_leaves_no_trace(slot: Slot, table: str, connection: psycopg.Connection) -> None:
    with connection.transaction(force_rollback=True):
        connection.execute(f"insert into {table} values (1)")
    with connection.transaction():
        connection.execute(f"insert into {table} values (2)")
        with connection.transaction(force_rollback=True):
            connection.execute(f"insert into {table} values (3)")
        connection.execute(f"insert into {table} values (4)")
    assert [(image(change["after"])["id"], change["sequence"]) for change in changes(slot)] == [(2, 0), (4, 1)]


def test_what_was_committed_while_nobody_read_is_delivered(
    slot: Slot, table: str, connection: psycopg.Connection
) -> None:
    connection.execute(f"insert into {table} values (1)")
    end = flushed(slot)
    assert len(changes(slot, end=end)) == 1
    slot.advance(end)
    connection.execute(f"insert into {table} values (2)")
    connection.execute("select pg_switch_wal()")
    connection.execute(f"insert into {table} values (3)")
    assert [image(change["after"])["id"] for change in changes(Slot(slot.dsn, slot.name, slot.publication))] == [2, 3]


def test_an_advance_never_goes_back_and_may_be_repeated(slot: Slot, table: str, connection: psycopg.Connection) -> None:
    start = slot.state().confirmed_lsn
    connection.execute(f"insert into {table} values (1)")
    end = flushed(slot)
    for lsn in (end, end, start):
        slot.advance(lsn)
        assert slot.state().confirmed_lsn == end
    with pytest.raises(SlotLost, match="it was advanced"):
        list(slot.read(start=start, end=end))


def test_advancing_keeps_what_has_to_be_read_again_small(
    slot: Slot, table: str, connection: psycopg.Connection
) -> None:
    if connection.info.server_version < 160000:
        pytest.skip("the server can be asked for it since 16")
    for number in range(4):
        connection.execute(
            f"insert into {table} select generate_series({number * 10000 + 1}, {number * 10000 + 10000})"
        )
        slot.advance(flushed(slot))
    assert slot.state().reread_bytes < 2_000_000


def test_without_the_arrow_driver_the_same_changes_come(
    slot: Slot, table: str, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.execute(f"insert into {table} select n, 'name' || n from generate_series(1, 30000) as n")
    end = flushed(slot)
    with_driver = changes(slot, end=end)
    monkeypatch.setattr(capture_connection, "adbc_driver_postgresql", None)
    assert changes(slot, end=end) == with_driver


# -- limits and failures


def test_one_large_transaction_passes_in_little_memory(slot: Slot, table: str, connection: psycopg.Connection) -> None:
    connection.execute(f"insert into {table} values (0)")
    list(slot.read(start=slot.state().confirmed_lsn, end=flushed(slot)))
    connection.execute(f"insert into {table} select n, repeat('name', 100) || n from generate_series(1, 300000) as n")
    end = flushed(slot)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    count = largest = 0
    for batch in slot.read(start=slot.state().confirmed_lsn, end=end):
        count += batch.num_rows
        largest = max(largest, batch.num_rows)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert count == 300_001
    assert largest <= 20_000
    assert grown < 100_000, f"{grown} kB for a transaction of about 140,000 kB"


def test_a_busy_slot_is_waited_for_and_then_reported(slot: Slot, table: str, connection: psycopg.Connection) -> None:
    connection.execute(f"insert into {table} values (1)")
    end = flushed(slot)
    holder = pq.PGconn.connect(conninfo.make_conninfo(slot.dsn, replication="database").encode())
    try:
        options = f"proto_version '1', publication_names '\"{slot.publication}\"'"
        started = holder.exec_(f"START_REPLICATION SLOT {slot.name} LOGICAL 0/0 ({options})".encode())
        assert started.status == pq.ExecStatus.COPY_BOTH, started.error_message
        impatient = Slot(slot.dsn, slot.name, slot.publication, busy_seconds=0.2)
        with pytest.raises(SlotBusy, match="A slot has one reader"):
            list(impatient.read(start=slot.state().confirmed_lsn, end=end))
        free = threading.Timer(0.3, holder.finish)
        free.start()
        assert len(changes(slot, end=end)) == 1
        free.join()
    finally:
        if holder.status == 0:
            holder.finish()


def test_a_slot_that_is_gone_is_said_so(slot: Slot, dsn: str) -> None:
    slot.drop()
    with pytest.raises(SlotLost, match="new snapshot"):
        slot.state()


@pytest.mark.parametrize(
    ("retained", "level"), [(0, SlotLevel.OK), (512 << 20, SlotLevel.WARNING), (1 << 30, SlotLevel.CRITICAL)]
)
def test_what_a_slot_keeps_has_levels(retained: int, level: SlotLevel) -> None:
    state = SlotState("pgoutput", "d", False, "extended", 5, 5, 5 + retained, "d", 1, 1, 5)
    assert state.level() is level
    assert SlotState("pgoutput", "d", False, "unreserved", 5, 5, 5, "d", 1, 1, 5).level() is SlotLevel.CRITICAL


def test_what_cannot_be_captured_is_refused_with_the_way_out(
    connection: psycopg.Connection, dsn: str, table: str, new_slot: Callable[..., Slot]
) -> None:
    with pytest.raises(CaptureRefused, match="table 'missing' does not exist"):
        new_slot("missing")
    with pytest.raises(CaptureRefused, match="Give the tables"):
        new_slot()
    connection.execute("create temporary view seen as select 1")
    connection.execute("create unlogged table quick (id integer primary key)")
    with pytest.raises(CaptureRefused, match="is not a logged table"):
        new_slot("quick")
    connection.execute(f"create publication narrow for table {table}")
    connection.execute("create table other (id integer primary key)")
    with pytest.raises(CaptureRefused, match=r"alter publication .* add table"):
        Slot(dsn, "narrow", "narrow").prepare(["other"])
    connection.execute("create role plain login")
    try:
        with pytest.raises(CaptureRefused, match=r"alter role .plain. replication"):
            Slot(conninfo.make_conninfo(dsn, user="plain"), "narrow", "narrow").prepare([table])
    finally:
        connection.execute("drop role plain")


@pytest.mark.crash
def test_a_killed_server_loses_and_repeats_nothing(tmp_path: Path) -> None:
    server = Postgres(tmp_path / "pg")
    server.start()
    try:
        seen: dict[str, Any] = {}
        repeated = 0
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
            connection.execute("create table kept (id integer primary key)")
        slot = Slot(server.dsn("postgres"), "kept", "kept")
        start = slot.prepare(["kept"]).confirmed_lsn
        for round_number in range(3):
            with psycopg.connect(slot.dsn, autocommit=True) as connection:
                for number in range(20):
                    connection.execute("insert into kept values (%s)", (round_number * 20 + number,))
            end = slot.state().flushed_lsn
            first = changes(slot, start, end)
            if round_number == 1:
                slot.advance(end)  # the crash may take this back
            server.kill()
            server.start()
            slot = Slot(server.dsn("postgres"), "kept", "kept")
            if round_number != 1:
                # Between reading and advancing: the same read gives the same again.
                again = changes(slot, start, end)
                assert again == first
                repeated += len(again)
                slot.advance(end)
            for change in first:
                assert change["id"] not in seen
                seen[change["id"]] = image(change["after"])["id"]
            start = end
        assert sorted(seen.values()) == list(range(60))
        assert repeated == 40
    finally:
        server.stop(mode="immediate")


@pytest.mark.crash
def test_a_slot_that_the_server_gave_up_says_to_take_a_snapshot(tmp_path: Path) -> None:
    server = Postgres(tmp_path / "pg", settings={"max_slot_wal_keep_size": "1MB", "fsync": "off"})
    server.start()
    try:
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
            connection.execute("create table kept (id integer primary key)")
            slot = Slot(server.dsn("postgres"), "kept", "kept")
            slot.prepare(["kept"])
            for _ in range(3):
                connection.execute("insert into kept values ((select count(*) from kept))")
                connection.execute("select pg_switch_wal()")
            connection.execute("checkpoint")
            with pytest.raises(SlotLost, match="new snapshot"):
                slot.state()
    finally:
        server.stop(mode="immediate")


@pytest.mark.crash
def test_the_way_out_of_a_refusal_is_one(connection: psycopg.Connection, new_slot: Callable[..., Slot]) -> None:
    connection.execute("create table keyless (v text)")
    with pytest.raises(CaptureRefused, match="replica identity full"):
        new_slot("keyless")
    connection.execute("alter table keyless replica identity full")
    slot = new_slot("keyless")
    connection.execute("insert into keyless values ('a')")
    connection.execute("delete from keyless")
    assert [change["operation"] for change in changes(slot)] == ["insert", "delete"]
    connection.execute("create table anonymous (id integer primary key)")
    connection.execute("alter table anonymous replica identity nothing")
    with pytest.raises(CaptureRefused, match="has no replica identity"):
        new_slot("anonymous")


def test_a_server_that_does_not_log_for_it_is_refused(tmp_path: Path) -> None:
    server = Postgres(tmp_path / "pg", settings={"wal_level": "replica", "fsync": "off"})
    server.start()
    try:
        with pytest.raises(CaptureRefused, match="wal_level = logical"):
            Slot(server.dsn("postgres"), "kept", "kept").prepare(["pg_class"])
    finally:
        server.stop(mode="immediate")


def test_names_need_no_care(connection: psycopg.Connection, dsn: str) -> None:
    connection.execute(sql.SQL('create table "Odd "" Name" ("Key ""\'\\" integer primary key)'))
    slot = Slot(dsn, "odd_names", "Odd \"publication' \\")
    slot.prepare(['"Odd "" Name"'])
    try:
        connection.execute('insert into "Odd "" Name" values (1)')
        (change,) = changes(slot)
        assert image(change["key"]) == {"Key \"'\\": 1}
    finally:
        slot.drop()


# -- snapshots


def snapshot_rows(dsn: str, table: str, **arguments: Any) -> tuple[Snapshot, list[dict[str, Any]]]:
    with open_snapshot(dsn, [table]) as (taken, connection):
        how = plan(connection, taken, table, **arguments)
        rows = [row for chunk in how.chunks for batch in read_chunk(dsn, how, chunk) for row in batch.to_pylist()]
    return taken, rows


def test_a_row_reads_the_same_in_a_snapshot_and_in_a_change(
    connection: psycopg.Connection, dsn: str, new_slot: Callable[..., Slot]
) -> None:
    columns = [f"c{number} {kind}" for number, kind in enumerate(EVERY_TYPE)]
    connection.execute(f"create table every_type_again (id integer primary key, {', '.join(columns)})")
    slot = new_slot("every_type_again")
    values = ", ".join(f"{value}::{kind}" for kind, (value, _) in EVERY_TYPE.items())
    with connection.transaction():
        connection.execute(f"insert into every_type_again values (1, {values})")
        connection.execute("insert into every_type_again values (2)")
    _, rows = snapshot_rows(dsn, "every_type_again")
    found = changes(slot)
    for column, in_change in (("row", "after"), ("key", "key"), ("columns_hash", "columns_hash"), ("columns",) * 2):
        assert [row[column] for row in rows] == [change[in_change] for change in found], column


def test_chunks_cover_the_table_once(connection: psycopg.Connection, dsn: str, table: str) -> None:
    connection.execute(f"insert into {table} select n, repeat('x', 50) from generate_series(1, 30000) as n")
    connection.execute(f"delete from {table} where id % 3 = 0")
    _, rows = snapshot_rows(dsn, table, chunk_blocks=37)
    assert len({row["chunk"] for row in rows}) > 5
    assert sorted(image(row["key"])["id"] for row in rows) == [n for n in range(1, 30001) if n % 3]


def test_partitions_and_tables_without_columns_or_key_are_read_whole(connection: psycopg.Connection, dsn: str) -> None:
    connection.execute("create table leafy (id integer) partition by list (id)")
    connection.execute("create table leafy_1 partition of leafy for values in (1)")
    connection.execute("create table leafy_2 partition of leafy for values in (2)")
    connection.execute("insert into leafy values (1), (2), (2)")
    _, rows = snapshot_rows(dsn, "leafy")
    assert [(row["table"], row["row"], row["key"]) for row in rows] == [
        ("leafy", '{"id":1}', None),
        ("leafy", '{"id":2}', None),
        ("leafy", '{"id":2}', None),
    ]
    with pytest.raises(CaptureRefused, match="has no key"):
        snapshot_rows(dsn, "leafy", needs_key=True)
    connection.execute("create table bare ()")
    connection.execute("insert into bare default values")
    assert [row["row"] for row in snapshot_rows(dsn, "bare")[1]] == ["{}"]
    with pytest.raises(InvalidRequest, match="does not exist"):
        snapshot_rows(dsn, "absent")
    with pytest.raises(InvalidRequest, match="is not a table"):
        snapshot_rows(dsn, "pg_catalog.pg_class_oid_index")


def apply(replica: dict[int, Any], change: Change) -> None:
    """What a replica does with a change. It minds an insert of what is there, and a change of what is not."""
    if change["operation"] == "truncate":
        replica.clear()
        return
    (key,) = image(change["key"]).values()
    if change["operation"] == "insert":
        assert key not in replica, "inserted twice"
    else:
        assert key in replica, "changed before it was there"
    if change["operation"] == "delete":
        del replica[key]
    else:
        replica[key] = change["after"]


def churn(dsn: str, table: str, *, seed: int, count: int, started: threading.Event, enough: threading.Event) -> None:
    """Changes in many small transactions, over keys of this writer's own, until there are so many and enough."""
    rng = random.Random(seed)
    own: list[int] = []
    fresh = itertools.count(seed * 1_000_000)
    done = 0
    with psycopg.connect(dsn) as connection:
        while done < count or not enough.is_set():
            for _ in range(rng.randrange(1, 20)):
                kind = rng.random()
                if kind < 0.5 or not own:
                    own.append(next(fresh))
                    connection.execute(f"insert into {table} values (%s, 'new', 0)", (own[-1],))
                elif kind < 0.8:
                    connection.execute(f"update {table} set amount = amount + 1 where id = %s", (rng.choice(own),))
                else:
                    connection.execute(f"delete from {table} where id = %s", (own.pop(rng.randrange(len(own))),))
                done += 1
            connection.commit()
            if done > count // 10:
                started.set()


def test_a_snapshot_and_the_changes_after_it_are_exactly_the_table(
    slot: Slot, table: str, dsn: str, connection: psycopg.Connection
) -> None:
    connection.execute(f"insert into {table} select n, 'old', n from generate_series(1, 5000) as n")
    started, enough = threading.Event(), threading.Event()
    start = slot.state().confirmed_lsn
    writers = [
        threading.Thread(
            target=churn,
            args=(dsn, table),
            kwargs={"seed": seed, "count": 5000, "started": started, "enough": enough},
            daemon=True,
        )
        for seed in range(1, 5)
    ]
    for writer in writers:
        writer.start()
    assert started.wait(PATIENCE_SECONDS)
    try:
        taken = [snapshot_rows(dsn, table, chunk_blocks=50) for _ in range(5)]
    finally:
        enough.set()
    for writer in writers:
        writer.join(PATIENCE_SECONDS)
    found = changes(slot, start)
    assert len(found) >= 25_000
    truth = {row["key"]: row["row"] for row in snapshot_rows(dsn, table)[1]}
    for snapshot, rows in taken:
        replica = {image(row["key"])["id"]: row["row"] for row in rows}
        for change in found:
            if not is_visible(change["xid"], snapshot.visible):
                apply(replica, change)
        assert {json.dumps({"id": key}, separators=(",", ":")): row for key, row in replica.items()} == truth


def test_deciding_by_lsn_alone_loses_or_repeats_a_transaction(
    slot: Slot, table: str, dsn: str, connection: psycopg.Connection
) -> None:
    connection.execute("set synchronous_commit = on")
    start = slot.state().confirmed_lsn
    lsn_of = "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint"
    (lsn_before,) = connection.execute(lsn_of).fetchone()
    connection.execute(f"insert into {table} values (1)")
    taken, rows = snapshot_rows(dsn, table)
    connection.execute(f"insert into {table} values (2)")
    (lsn_after,) = connection.execute(lsn_of).fetchone()
    found = changes(slot, start)
    in_snapshot = [image(row["key"])["id"] for row in rows]

    def handed_over(is_new: Callable[[Change], bool]) -> list[int]:
        return sorted(in_snapshot + [image(change["key"])["id"] for change in found if is_new(change)])

    assert handed_over(lambda change: not is_visible(change["xid"], taken.visible)) == [1, 2]
    assert handed_over(lambda change: change["commit_lsn"] >= lsn_after) == [1]  # lost
    assert handed_over(lambda change: change["commit_lsn"] >= lsn_before) == [1, 1, 2]  # repeated


def test_visibility_survives_the_wrap_of_transaction_ids() -> None:
    era = 5 << 32
    snapshot = f"{era + 10}:{era + 20}:{era + 10},{era + 14}"
    assert [xid for xid in range(8, 23) if is_visible(xid, snapshot)] == [8, 9, 11, 12, 13, 15, 16, 17, 18, 19]
    assert is_visible((1 << 32) - 3, snapshot)  # just before the wrap
    assert not is_visible((1 << 31) - 1, snapshot)  # far ahead
    young = f"{era - 5}:{era - 1}:"
    assert not is_visible(3, young)  # just after it
    assert is_visible((1 << 32) - 6, young)
    with pytest.raises(InvalidRequest, match="invalid snapshot"):
        is_visible(1, "10")
