"""Is a captured table in the lake what it is in Postgres, whatever happened to it and to us?"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from databases import database
from headwater.capture.slot import Slot
from headwater.errors import CaptureRefused, InvalidRequest, LakeBusy
from headwater.lake import Location, all_files, current, open_table, written_files
from headwater.lake.columns import CapturedColumn, parse_columns, to_arrow
from headwater.lake.current import CurrentTables
from headwater.lake.files import attempt_directory

_numbers = itertools.count()


@pytest.fixture(scope="module")
def dsn(admin_dsn: str) -> Iterator[str]:
    """A database without a log: capture needs none."""
    with database(admin_dsn) as dsn:
        yield dsn


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        # Else what was committed could not be read from the slot at once.
        connection.execute("set synchronous_commit = on")
        yield connection


class Captured:
    """A table with a slot of its own, and its copy in a lake."""

    def __init__(self, dsn: str, name: str, root: Path) -> None:
        self.name = name
        self.slot = Slot(dsn, name, name)
        self.offset = self.slot.prepare([name]).confirmed_lsn
        self.path = root / f"public.{name}"
        self.tables = CurrentTables(Location.parse(str(root)), app="copy")

    def batch(self) -> list[Any]:
        """What was changed since the last batch, which is what a repeated one has, too."""
        end = self.slot.state().flushed_lsn
        batch = list(self.slot.read(start=self.offset, end=end))
        self.offset = end
        return batch

    def catch_up(self) -> dict[str, int]:
        return self.tables.apply(self.batch())

    def rows(self) -> list[dict[str, Any]]:
        """What a reader of the lake finds."""
        frame = polars.read_delta(str(self.path))
        return sorted(frame.to_dicts(), key=lambda row: json.dumps(row, default=str))


@pytest.fixture
def capture(dsn: str, connection: psycopg.Connection, tmp_path: Path) -> Iterator[Callable[..., Captured]]:
    made: list[Captured] = []

    def make(columns: str, identity: str = "default") -> Captured:
        name = f"things_{next(_numbers)}"
        connection.execute(f"create table {name} ({columns})")
        connection.execute(f"alter table {name} replica identity {identity}")
        made.append(Captured(dsn, name, tmp_path / "lake"))
        return made[-1]

    yield make
    for captured in made:
        captured.slot.drop()


def in_postgres(connection: psycopg.Connection, name: str) -> list[dict[str, Any]]:
    with connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        rows = cursor.execute(f"select * from {name}").fetchall()
    return sorted(rows, key=lambda row: json.dumps(row, default=str))


BIG = "id integer, part text, amount numeric(12, 2), note text, document text, primary key (id, part)"


def change_at_random(connection: psycopg.Connection, name: str, chance: random.Random) -> None:
    """One transaction of a few changes of any kind."""
    with connection.transaction():
        for _ in range(chance.randint(1, 6)):
            # So few keys that the same ones come again and again, within a batch and within a transaction.
            key, other = (chance.randint(1, 12), chance.choice("ab")), (chance.randint(1, 12), chance.choice("ab"))
            kind = chance.choices(("put", "touch", "move", "delete", "truncate", "document"), (6, 6, 5, 3, 0.3, 2))[0]
            amount = Decimal(chance.randint(-(10**9), 10**9)) / 100
            if kind == "put":
                # Random, or it would be compressed and stored with the row.
                document = chance.randbytes(3000).hex() if chance.random() < 0.6 else None
                connection.execute(
                    f"insert into {name} values (%s, %s, %s, %s, %s) on conflict (id, part) do update "
                    "set amount = excluded.amount, document = excluded.document",
                    (*key, amount, chance.choice(("ä\n\"'", None)), document),
                )
            elif kind == "touch":
                connection.execute(f"update {name} set amount = %s where (id, part) = (%s, %s)", (amount, *key))
            elif kind == "document":
                connection.execute(
                    f"update {name} set document = %s where (id, part) = (%s, %s)", (chance.randbytes(3000).hex(), *key)
                )
            elif kind == "move":
                free = f"not exists (select from {name} where (id, part) = (%s, %s))"
                connection.execute(
                    f"update {name} set id = %s, part = %s where (id, part) = (%s, %s) and {free}",
                    (*other, *key, *other),
                )
            elif kind == "delete":
                connection.execute(f"delete from {name} where (id, part) = (%s, %s)", key)
            else:
                connection.execute(f"truncate {name}")


@pytest.mark.parametrize("identity", ["default", "full"])
@pytest.mark.parametrize("seed", [1, 2])
def test_after_random_changes_the_lake_has_what_the_table_has(
    capture: Callable[..., Captured],
    connection: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    identity: str,
    seed: int,
) -> None:
    chance = random.Random(seed)
    captured = capture(BIG, identity)
    connection.execute(f"alter table {captured.name} alter document set storage external")
    # So that a batch is merged in several steps, some of them within a transaction.
    monkeypatch.setattr(current, "CHANGES_PER_MERGE", 7)
    past: list[Any] = []
    for _ in range(12):
        for _ in range(chance.randint(1, 12)):
            change_at_random(connection, captured.name, chance)
        # In small pieces, since a merge is due only between two of them.
        batch = [piece.slice(n, 5) for piece in captured.batch() for n in range(0, piece.num_rows, 5)]
        known = past[-chance.randint(1, 10) :]
        captured.tables.apply(known + batch)
        assert captured.rows() == in_postgres(connection, captured.name)
        # The past alone would take it back.
        assert captured.tables.apply(known) == {}
        past += batch
    assert past
    assert captured.rows()


@pytest.mark.parametrize("killed", ["before a commit", "after a commit"])
def test_a_batch_that_is_repeated_after_a_kill_is_merged_once(
    capture: Callable[..., Captured], connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    class Killed(BaseException):
        pass

    captured = capture("id integer primary key, counted integer")
    connection.execute(f"insert into {captured.name} select n, 0 from generate_series(1, 30) as n")
    connection.execute(f"update {captured.name} set counted = counted + 1")
    batch = [piece.slice(n, 10) for piece in captured.batch() for n in range(0, piece.num_rows, 10)]
    monkeypatch.setattr(current, "CHANGES_PER_MERGE", 10)
    merging, merges = current._merge, itertools.count(1)

    def kill(*arguments: Any) -> None:
        if next(merges) < 4:
            merging(*arguments)
            return
        if killed == "after a commit":
            merging(*arguments)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(current, "_merge", kill)
        with pytest.raises(Killed):
            captured.tables.apply(batch)
    again = CurrentTables(Location.parse(str(captured.path.parent)), app="copy")
    left = 30 if killed == "before a commit" else 20
    assert again.apply(batch) == {f"public.{captured.name}": left}
    assert again.apply(batch) == {}
    assert captured.rows() == in_postgres(connection, captured.name)


ALL_TYPES = """
    "Id" uuid primary key, "a b" int2, c int4, d int8, e float4, f float8, g bool, h text, i varchar(20), j char(4),
    k numeric(10, 3), l numeric, m numeric(60, 2), n date, o timestamp, p timestamptz, q bytea, r json, s jsonb,
    t int4[], u time, v interval, w int4range
"""


def test_types_are_those_of_postgres_where_the_lake_has_them(
    capture: Callable[..., Captured], connection: psycopg.Connection
) -> None:
    captured = capture(ALL_TYPES)
    connection.execute(
        rf"""insert into {captured.name} values ('01234567-89ab-cdef-0123-456789abcdef', 1, 2, 3000000000, 0.5, 'NaN',
        true, 'ä"\', 'v', 'ch', 1234567.891, 1.50, 12345678901234567890.12, '2026-02-03', '2026-02-03 04:05:06.789',
        '2026-02-03 04:05:06.000001+02', '\x00ff', '{{"a":  1.10}}', '"text"', '{{1,null}}', '04:05', '1 day',
        '[1,5)')"""
    )
    connection.execute(f"""insert into {captured.name} ("Id") values ('00000000-0000-0000-0000-000000000000')""")
    captured.catch_up()
    empty, row = captured.rows()
    assert set(empty.values()) == {None, "00000000-0000-0000-0000-000000000000"}
    assert row.pop("f") != row.get("f")
    assert row == {
        "Id": "01234567-89ab-cdef-0123-456789abcdef", "a b": 1, "c": 2, "d": 3_000_000_000, "e": 0.5, "g": True,
        "h": 'ä"\\', "i": "v", "j": "ch  ", "k": Decimal("1234567.891"), "l": "1.50", "m": "12345678901234567890.12",
        "n": datetime(2026, 2, 3).date(), "o": datetime(2026, 2, 3, 4, 5, 6, 789000),  # noqa: DTZ001
        "p": datetime(2026, 2, 3, 2, 5, 6, 1, tzinfo=UTC), "q": b"\0\xff", "r": '{"a":  1.10}', "s": '"text"',
        "t": "{1,NULL}", "u": "04:05:00", "v": "P1D", "w": "[1,5)",
    }  # fmt: skip
    connection.execute(f"""update {captured.name} set "a b" = 7""")
    connection.execute(f"delete from {captured.name} where d is null")
    captured.catch_up()
    files = all_files(open_table(Location.parse(str(captured.path))))
    assert duckdb.execute('select "a b", k, s from read_parquet(?)', [files]).fetchall() == [
        (7, Decimal("1234567.891"), '"text"')
    ]


def test_a_value_that_its_type_in_the_lake_cannot_hold_can_be_text(
    capture: Callable[..., Captured], connection: psycopg.Connection
) -> None:
    captured = capture("id integer primary key, at timestamptz")
    connection.execute(f"insert into {captured.name} values (1, 'infinity')")
    batch = captured.batch()
    with pytest.raises(InvalidRequest, match=r"as_text: \[at\]"):
        captured.tables.apply(batch)
    root = Location.parse(str(captured.path.parent / "texts"))
    CurrentTables(root, app="copy", as_text=["at"]).apply(batch)
    frame = polars.read_delta(str(captured.path.parent / "texts" / captured.path.name))
    assert frame.to_dicts() == [{"id": 1, "at": "infinity"}]


def test_columns_come_go_and_widen_as_in_postgres(
    capture: Callable[..., Captured], connection: psycopg.Connection
) -> None:
    captured = capture("id integer primary key, small int2, price numeric(6, 2), gone text")
    name = captured.name
    connection.execute(f"insert into {name} values (1, 1, 1.5, 'x'), (2, 2, 2.5, 'y')")
    captured.catch_up()
    connection.execute(f"insert into {name} values (3, 3, 3.5, 'z')")
    connection.execute(f"alter table {name} add added timestamptz, drop gone, alter small type int8")
    connection.execute(f"alter table {name} alter price type numeric(20, 4)")
    connection.execute(f"insert into {name} values (4, 5000000000, 123456789.1234, '2026-01-01Z')")
    captured.catch_up()
    lake = {row["id"]: row for row in captured.rows()}
    assert {number: row.pop("gone") for number, row in lake.items()} == {1: "x", 2: "y", 3: "z", 4: None}
    assert list(lake.values()) == in_postgres(connection, name)

    # A change from before all this, as it may come after a load of the table of now.
    older = {"id": 9, "small": 9, "price": "9.50", "gone": "old"}
    kinds = (("id", "int4", -1), ("small", "int2", -1), ("price", "numeric", (6 << 16 | 2) + 4), ("gone", "text", -1))
    columns = [{"name": n, "type": kind, "modifier": m, "key": n == "id"} for n, kind, m in kinds]
    current = captured.tables.table("public", name)
    change = {"operation": "insert", "key": '{"id":9}', "before": None, "after": json.dumps(older), "unchanged": []}
    at = {"commit_lsn": captured.offset, "sequence": 0}
    current.merge(pa.Table.from_pylist([change | at]), parse_columns(json.dumps(columns)))
    (row,) = [row for row in captured.rows() if row["id"] == 9]
    assert row == {"id": 9, "small": 9, "price": Decimal("9.5000"), "gone": "old", "added": None}

    connection.execute(f"alter table {name} alter small type text")
    connection.execute(f"update {name} set price = 0")
    with pytest.raises(InvalidRequest, match=r"'small' of .* changed from int64 to string"):
        captured.catch_up()


def test_changes_whose_description_was_filtered_out_are_read_by_the_tables_own(
    capture: Callable[..., Captured], connection: psycopg.Connection
) -> None:
    captured = capture("id integer primary key, data jsonb")
    connection.execute(f"insert into {captured.name} values (1, '\"a\"')")
    captured.catch_up()
    connection.execute(f"insert into {captured.name} values (2, '\"b\"')")
    connection.execute(f"insert into {captured.name} values (3, '\"c\"')")
    without = [piece.slice(1) for piece in captured.batch()]
    CurrentTables(Location.parse(str(captured.path.parent)), app="copy").apply(without)
    assert captured.rows() == [{"id": 1, "data": '"a"'}, {"id": 3, "data": '"c"'}]

    connection.execute(f"alter table {captured.name} add more text")
    connection.execute(f"insert into {captured.name} values (4), (5)")
    without = [piece.slice(1) for piece in captured.batch()]
    with pytest.raises(InvalidRequest, match="more"):
        CurrentTables(Location.parse(str(captured.path.parent)), app="copy").apply(without)


def test_a_table_without_a_key_is_refused(capture: Callable[..., Captured], connection: psycopg.Connection) -> None:
    captured = capture("id integer primary key", "full")
    connection.execute(f"alter table {captured.name} drop constraint {captured.name}_pkey")
    connection.execute(f"insert into {captured.name} values (1)")
    with pytest.raises(CaptureRefused, match="no key"):
        captured.catch_up()
    assert not captured.path.exists()


def test_a_table_that_is_loaded_again_has_the_rows_and_types_of_then(
    capture: Callable[..., Captured], connection: psycopg.Connection
) -> None:
    captured = capture("id integer primary key, small text, gone text")
    connection.execute(f"insert into {captured.name} values (1, 'x', 'y')")
    captured.catch_up()
    offset = captured.tables.table("public", captured.name).offset()
    loaded = CurrentTables(Location.parse(str(captured.path.parent)), app="copy").table("public", captured.name)
    columns = (CapturedColumn("id", "int4", -1, True), CapturedColumn("small", "int2", -1, False))
    directory = attempt_directory("copy.load", 1)
    (captured.path / directory).mkdir(parents=True)
    pq.write_table(to_arrow([{"id": "2", "small": "7"}], columns), captured.path / directory / "part.parquet")
    (captured.path / directory / "_SUCCESS").touch()
    files = written_files(loaded.delta, directory)
    loaded.load(files, columns, found=0)
    assert captured.rows() == [{"id": 2, "small": 7}]
    # What it notes of changes stays, and another load that began before this one is refused.
    assert loaded.offset() == offset
    with pytest.raises(LakeBusy, match="has loaded"):
        loaded.load(files, columns, found=0)
