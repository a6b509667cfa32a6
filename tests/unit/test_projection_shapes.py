"""What is decided about projections without Spark and Postgres: options, shapes of rows, what a refusal shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import types as t

from headwater.errors import InvalidRequest
from headwater.spark.pipelines import file, transform
from headwater.spark.pipelines.transform import Transform, marked_line
from headwater.spark.sinks.table import TableColumns, TableOptions

KEYED = {"name": "totals", "key": ["id"]}


def shape(frame: t.StructType, **options: Any) -> TableColumns:
    return TableColumns.of(frame, TableOptions.parse(KEYED | options))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("totals", ("public", "totals")),
        ("sales.totals", ("sales", "totals")),
        ('My Sales.To"tals', ("My Sales", 'To"tals')),
        (["a.b", "c.d"], ("a.b", "c.d")),
    ],
)
def test_a_name_is_taken_as_it_is_written(name: Any, meant: tuple[str, str]) -> None:
    options = TableOptions.parse({"name": name, "key": "id"})
    assert (options.schema, options.table) == meant
    assert (options.key, options.mode, options.deletes) == (("id",), "upsert", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "invalid table name None"),
        ({"name": "a.b.c"}, "invalid table name 'a.b.c'"),
        ({"name": ".b"}, "invalid table name"),
        ({"name": ["a", 1]}, "invalid table name"),
        ({"name": "headwater_internal.event"}, "the schema headwater_internal is reserved"),
        ({"name": "ä" * 32}, "longer than 63 bytes"),
        ({"name": "t"}, "requires a key"),
        ({"name": "t", "key": [1]}, "invalid key"),
        ({"name": "t", "key": ["a", "a"]}, "twice"),
        ({"name": "t", "key": ["a"], "mode": "merge"}, "invalid mode 'merge'"),
        ({"name": "t", "key": ["a"], "deletes": "a"}, "cannot be part of the key"),
        ({"name": "t", "key": ["a"], "deletes": True}, "invalid deletes True"),
        ({"name": "t", "mode": "append", "deletes": "gone"}, "cannot be combined with mode append"),
        ({"name": "t", "keys": ["a"]}, "unknown keys: keys"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        TableOptions.parse(options)
    assert message in refusal.value.message


def test_every_type_has_its_like_in_postgres_and_what_is_nested_is_json() -> None:
    kinds: dict[str, tuple[t.DataType, str]] = {
        "id": (t.LongType(), "bigint"),
        "small": (t.ByteType(), "smallint"),
        "price": (t.DecimalType(20, 4), "numeric(20,4)"),
        "at": (t.TimestampType(), "timestamptz"),
        "local": (t.TimestampNTZType(), "timestamp"),
        "day": (t.DateType(), "date"),
        "took": (t.DayTimeIntervalType(), "interval"),
        "raw": (t.BinaryType(), "bytea"),
        "tags": (t.ArrayType(t.StringType()), "jsonb"),
        "sizes": (t.MapType(t.StringType(), t.LongType()), "jsonb"),
        "data": (t.VariantType(), "jsonb"),
    }
    made = shape(t.StructType([t.StructField(name, kind) for name, (kind, _) in kinds.items()]))
    assert dict(made.columns) == {name: wanted for name, (_, wanted) in kinds.items()}
    assert {name for name, kind in made.staged if kind != dict(made.columns)[name]} == {"tags", "sizes", "data"}


def test_the_column_that_says_what_goes_is_staged_and_not_kept() -> None:
    made = shape(t.StructType().add("id", "long").add("gone", "boolean"), deletes="gone")
    assert [name for name, _ in made.columns] == ["id"]
    assert [name for name, _ in made.staged] == ["id", "gone"]


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (t.StructType().add("total", "long"), {}, "the rows have no column id"),
        (t.StructType().add("id", "long"), {"deletes": "gone"}, "the rows have no column gone"),
        (t.StructType().add("id", "long").add("gone", "string"), {"deletes": "gone"}, "is text: expected boolean"),
        (t.StructType().add("id", "long").add("ID", "long"), {}, "two columns have the same name"),
        (t.StructType().add("id", "long").add("headwater_part", "long"), {}, "invalid column name"),
        (t.StructType().add("id", "long").add("x" * 64, "long"), {}, "invalid column name"),
        (t.StructType().add("id", t.VariantType()), {}, "is JSON, which is not allowed"),
        (t.StructType().add("id", "long").add("nothing", t.NullType()), {}, "nothing has the type void"),
    ],
)
def test_rows_that_cannot_be_a_table_are_refused(frame: t.StructType, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        shape(frame, **options)
    assert message in refusal.value.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("select 1", "invalid transform 'select 1'"),
        ({}, "either sql or python"),
        ({"sql": "select 1", "python": "a:b"}, "either sql or python"),
        ({"sql": " "}, "the transform's sql is ' '"),
        ({"python": "totals.by_customer"}, "the transform's python"),
        ({"sql": "select 1", "mode": "replace"}, "the transform's mode is 'replace'"),
        ({"query": "select 1"}, "unknown keys: query"),
    ],
)
def test_a_transform_that_makes_no_sense_is_refused(options: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Transform.parse(options)
    assert message in refusal.value.message


def test_a_function_is_found_beside_the_file_or_its_absence_is_reported(tmp_path: Path) -> None:
    (tmp_path / "projection_found.py").write_text("def pass_on(rows):\n    return rows\nNUMBER = 1\n")
    (tmp_path / "projection_broken.py").write_text("def (")
    assert Transform.parse({"python": "projection_found:pass_on"}, directory=tmp_path).function()(7) == 7
    for function, message in (
        ("projection_nowhere:x", "cannot be imported"),
        ("projection_broken:x", "cannot be imported"),
        ("projection_found:missing", "has no function missing"),
        ("projection_found:NUMBER", "has no function NUMBER"),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            transform.check({"python": function}, directory=tmp_path)
        assert message in refusal.value.message


def test_a_refusal_shows_the_line_and_the_place() -> None:
    assert marked_line("select a,\n  nope\nfrom events", 12) == "line 2:   nope\n            ^"
    assert marked_line("select 1", None) == "select 1"


def test_the_example_declares_what_can_run() -> None:
    folder = Path(__file__).parents[2] / "examples" / "pipelines"
    declared = file.parse((folder / "pipelines.yaml").read_text(), {})
    assert [spec.name for spec in declared.pipelines] == ["totals", "running-totals"]
    for spec in declared.pipelines:
        transform.check(spec.transform, directory=folder)
        for sink in spec.sinks:
            TableOptions.parse(sink.options)
