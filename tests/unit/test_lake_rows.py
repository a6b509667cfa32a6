"""Do captured rows get the right types, and many changes the right last state?"""

from __future__ import annotations

import io
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequest
from headwater.lake import Location
from headwater.lake.columns import (
    CapturedColumn,
    columns_of,
    members,
    parse_columns,
    reader_of,
    schema_of,
    to_arrow,
    widens,
)
from headwater.lake.files import directory_name, statistics
from headwater.lake.fold import fold, resolve

ID = CapturedColumn("id", "int4", -1, True)
BIG = CapturedColumn("big", "text", -1, False)
NOTE = CapturedColumn("note", "text", -1, False)
COLUMNS = (ID, BIG, NOTE)


def numeric(precision: int, scale: int) -> int:
    """The modifier that Postgres keeps for numeric(precision, scale)."""
    return (precision << 16 | scale & 0x7FF) + 4


@pytest.mark.parametrize(
    ("name", "modifier", "kind"),
    [
        ("int2", -1, pa.int16()),
        ("timestamptz", -1, pa.timestamp("us", "UTC")),
        ("numeric", -1, pa.string()),
        ("numeric", numeric(12, 2), pa.decimal128(12, 2)),
        ("numeric", numeric(38, 38), pa.decimal128(38, 38)),
        ("numeric", numeric(39, 2), pa.string()),
        ("numeric", numeric(3, 5), pa.string()),
        ("numeric", numeric(5, -2), pa.string()),
        ("uuid", -1, pa.string()),
        ("int4[]", -1, pa.string()),
        ("mood", -1, pa.string()),
    ],
)
def test_a_type_of_postgres_has_one_in_the_lake(name: str, modifier: int, kind: Any) -> None:
    assert CapturedColumn("c", name, modifier, False).type == kind
    assert CapturedColumn("c", name, modifier, False, as_text=True).type == pa.string()


def test_a_schema_says_what_it_was_made_from() -> None:
    text = json.dumps(
        [{"name": "id", "type": "int8", "modifier": -1, "key": True},
         {"name": "at", "type": "timestamptz", "modifier": 3, "key": False},
         {"name": "data", "type": "jsonb", "modifier": -1, "key": False}]
    )  # fmt: skip
    columns = parse_columns(text, as_text=["at"])
    assert columns[1] == CapturedColumn("at", "timestamptz", 3, False, as_text=True)
    assert columns_of(schema_of(columns)) == columns


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), json_values, max_size=5))
def test_members_are_found_as_they_were_written(row: dict[str, Any]) -> None:
    text = (
        "{"
        + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{json.dumps(value)}" for name, value in row.items())
        + "}"
    )
    found = members(text, raw=frozenset(row))
    assert found == {name: None if value is None else json.dumps(value) for name, value in row.items()}


def test_numbers_keep_all_their_digits() -> None:
    columns = (ID, CapturedColumn("n", "int8", -1, False), CapturedColumn("j", "jsonb", -1, False))
    text = '{"id":1,"n":9007199254740993,"j":{"x": 0.10000000000000000000000001}}'
    assert reader_of(columns)(text) == {"id": "1", "n": "9007199254740993", "j": '{"x": 0.10000000000000000000000001}'}
    assert to_arrow([reader_of(columns)(text)], columns).to_pylist()[0]["n"] == 9007199254740993


@pytest.mark.parametrize(
    ("kind", "text"),
    [("timestamptz", "infinity"), ("date", "0044-03-15 BC"), ("timestamp", "10000-01-01T00:00:00"), ("numeric", "NaN")],
)
def test_a_value_without_a_place_in_its_type_names_the_way_out(kind: str, text: str) -> None:
    column = CapturedColumn("c", kind, numeric(5, 2) if kind == "numeric" else -1, False)
    with pytest.raises(InvalidRequest, match=r"as_text: \[c\]"):
        to_arrow([{"c": None}, {"c": text}], [column])


@pytest.mark.parametrize(
    ("old", "new", "wide"),
    [
        (pa.int16(), pa.int64(), True),
        (pa.int64(), pa.int32(), False),
        (pa.float32(), pa.float64(), True),
        (pa.decimal128(6, 2), pa.decimal128(8, 4), True),
        (pa.decimal128(6, 2), pa.decimal128(7, 4), False),
        (pa.int32(), pa.decimal128(12, 2), True),
        (pa.int32(), pa.decimal128(11, 2), False),
        (pa.int32(), pa.string(), False),
        (pa.float64(), pa.decimal128(38, 2), False),
        (pa.int32(), pa.float64(), False),
    ],
)
def test_a_type_is_wider_only_if_it_holds_every_value(old: Any, new: Any, wide: bool) -> None:
    assert widens(old, new) is wide


def change(operation: str, key: int, before: int | None = None, unchanged: tuple[str, ...] = (), **after: str) -> Any:
    row = {"id": key, **after}
    return {
        "operation": operation,
        "key": f'{{"id":{key}}}',
        "before": None if before is None else f'{{"id":{before}}}',
        "after": None if operation == "delete" else json.dumps(row, separators=(",", ":")),
        "unchanged": list(unchanged),
    }


def states(*changes: Any) -> dict[str, Any]:
    """What the changes come to: the values of each row that is there, with `kept` and `origin` where it has some."""
    found: dict[str, Any] = {}
    for key, state in fold(changes, COLUMNS).states.items():
        if state is None:
            found[key] = None
            continue
        row = resolve(key, state, frozenset(column.name for column in COLUMNS), reader_of(COLUMNS))
        found[key] = dict(row.values) | ({"kept": set(row.kept), "origin": row.origin} if row.kept else {})
    return found


def test_the_last_state_of_a_row_wins() -> None:
    assert states(
        change("insert", 1, big="a", note="x"), change("update", 1, big="b", note="y"), change("delete", 2)
    ) == {'{"id":1}': {"id": "1", "big": "b", "note": "y"}, '{"id":2}': None}


def test_a_large_value_comes_from_the_change_that_told_it_last() -> None:
    touched = change("update", 1, unchanged=("big",), note="y")
    assert states(change("insert", 1, big="a", note="x"), touched, touched)['{"id":1}']["big"] == "a"
    assert states(touched)['{"id":1}'] == {"id": "1", "note": "y", "kept": {"big"}, "origin": '{"id":1}'}


def test_a_row_that_moves_takes_its_large_value_along() -> None:
    moves = (
        change("update", 2, before=1, unchanged=("big",), note="y"),
        change("update", 3, before=2, unchanged=("big",), note="z"),
    )
    assert states(*moves) == {
        '{"id":1}': None,
        '{"id":2}': None,
        '{"id":3}': {"id": "3", "note": "z", "kept": {"big"}, "origin": '{"id":1}'},
    }
    assert states(change("insert", 1, big="a", note="x"), *moves)['{"id":3}'] == {"id": "3", "big": "a", "note": "z"}


def test_a_whole_row_as_it_was_before_does_not_look_like_a_move() -> None:
    whole = change("update", 1, big="b", note="y")
    whole["before"] = '{"id":1,"big":"a","note":"x"}'
    assert states(whole) == {'{"id":1}': {"id": "1", "big": "b", "note": "y"}}


def test_nothing_from_before_a_truncate_stays() -> None:
    truncate = {"operation": "truncate", "key": None, "before": None, "after": None, "unchanged": []}
    changes = [change("insert", 1, big="a", note="x"), truncate, change("insert", 2, big="b", note="y")]
    folded = fold(changes, COLUMNS)
    assert folded.truncated
    assert set(folded.states) == {'{"id":2}'}


def test_many_changes_of_one_row_take_no_more_than_their_number() -> None:
    # Each step holds on to the one before: recursion would end here.
    many = [change("insert", 1, big="a", note="x"), *[change("update", 1, unchanged=("big",), note="y")] * 20_000]
    assert states(*many)['{"id":1}'] == {"id": "1", "big": "a", "note": "y"}


def statistics_of(rows: Any, **options: Any) -> Any:
    file = io.BytesIO()
    pq.write_table(rows, file, **options)
    return json.loads(statistics(pq.read_metadata(file)))


def test_statistics_are_bounds_over_all_row_groups() -> None:
    at = [datetime(2026, 1, 1, 0, 0, second, 123, tzinfo=UTC) for second in range(6)]
    rows = pa.table(
        {
            "position": pa.array(range(6), pa.int64()),
            "at": pa.array(at, pa.timestamp("us", "UTC")),
            "day": pa.array([date(2026, 1, 1)] * 6),
            "text": ["b", "a", None, None, None, None],
            "long": ["x" * 100] * 6,
            "bytes": [b"x"] * 6,
            "number": [1.0, float("nan"), 2.0, 3.0, 4.0, 5.0],
            "list": [["a"]] * 6,
            "price": [Decimal("1.5")] * 6,
            "flag": [True] * 6,
        }
    )
    found = statistics_of(rows, row_group_size=2)
    assert found["numRecords"] == 6
    assert (found["minValues"]["position"], found["maxValues"]["position"]) == (0, 5)
    assert found["minValues"]["at"] == "2026-01-01T00:00:00.000123Z"
    assert found["maxValues"]["at"] == "2026-01-01T00:00:05.000123Z"
    assert found["minValues"]["day"] == "2026-01-01"
    assert (found["minValues"]["text"], found["maxValues"]["text"]) == ("a", "b")
    assert found["nullCount"]["text"] == 4
    assert set(found["minValues"]) == {"position", "at", "day", "text"}
    assert "list" not in found["nullCount"]


def test_a_column_without_bounds_in_one_row_group_has_none() -> None:
    rows = pa.table({"text": ["a", "x" * 100, "b", "c"]})
    found = statistics_of(rows, row_group_size=2)
    assert found["minValues"] == {}
    assert found["nullCount"] == {"text": 0}
    assert statistics_of(pa.table({"n": [1, 2]}), write_statistics=False)["minValues"] == {}


@pytest.mark.parametrize("name", ["orders-to-lake", "a.b_c"])
def test_a_plain_name_is_its_own_directory(name: str) -> None:
    assert directory_name(name) == name


@given(st.text(min_size=1), st.text(min_size=1))
def test_two_writers_never_share_a_directory(one: str, other: str) -> None:
    assert all(c.isascii() and (c.isalnum() or c in "._-") for c in directory_name(one))
    assert (directory_name(one) == directory_name(other)) == (one == other)


def test_a_place_is_a_directory_or_a_uri() -> None:
    assert Location.parse("lake/x", directory=Path("/data")) == Location("/data/lake/x")
    assert Location.parse("s3://bucket/x/", storage_options={"a": "b"}).uri == "s3://bucket/x"
    assert Location.parse("s3://bucket/x").local is None
    assert Location.parse("s3://bucket/x").child("public.orders").uri == "s3://bucket/x/public.orders"
    for wrong in ("", None, 7, "x%20y"):
        with pytest.raises(InvalidRequest):
            Location.parse(wrong)
