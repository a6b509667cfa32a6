"""Do rows of Spark reach the lake once each, and can others read them there?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars
import psycopg
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

import headwater
from headwater.calls import archives as archive_calls
from headwater.capture import snapshot
from headwater.capture.slot import Slot
from headwater.errors import InvalidRequest, LakeBusy
from headwater.lake import Location, all_files, files_between, open_table, version_of
from headwater.spark.arrow import EVENT
from headwater.spark.formats import table as formats_table
from headwater.spark.pipelines.batch import Batch, SinkContext, Source
from headwater.spark.sinks import lake
from headwater.spark.sinks.lake import LakeSink

NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC)


def context(spark: SparkSession, directory: Path, source: Source = "log") -> SinkContext:
    return SinkContext(spark, "archive", source, {}, "", None, directory)


def events(spark: SparkSession, first: int, last: int) -> DataFrame:
    """Events at these positions, a minute apart, from five minutes before the year 2026 on."""
    rows = [
        (n, "orders", 0, None, b"k", "made", None, "{}", "application/json", b'{"n":%d}' % n, f"e{n}",
         NEW_YEAR + timedelta(minutes=n - 5))
        for n in range(first, last + 1)
    ]  # fmt: skip
    return spark.createDataFrame(rows, EVENT).repartition(2)


def positions(path: Path) -> list[int]:
    table = open_table(Location.parse(str(path)))
    assert table is not None
    found: list[int] = ds.dataset(all_files(table)).to_table(columns=["position"])["position"].to_pylist()
    return sorted(found)


def test_the_log_is_appended_by_date_and_others_can_read_it(spark: SparkSession, tmp_path: Path) -> None:
    sink = LakeSink({"path": "lake/log"}, context(spark, tmp_path))
    sink.prepare()
    path = tmp_path / "lake" / "log"
    assert sink.write(events(spark, 1, 10), Batch("archive", 0, 10))["rows"] == 10
    assert sink.write(events(spark, 11, 20), Batch("archive", 1, 20))["rows"] == 10
    sink.close()

    table = open_table(Location.parse(str(path)))
    assert table is not None
    assert version_of(table, "archive") == 20
    assert table.metadata().partition_columns == ["date"]
    late = files_between(table, "position", after=10, up_to=20)
    assert late
    assert not set(late) & set(files_between(table, "position", after=0, up_to=10))

    files = all_files(table)
    stored = pq.ParquetFile(files[0]).schema
    assert stored.column(stored.names.index("published_at")).physical_type == "INT64"
    days = {"2025-12-31": 4, "2026-01-01": 16}
    by_day = "select date::varchar, count(*) from read_parquet(?, hive_partitioning = true) group by 1"
    assert dict(duckdb.execute(by_day, [files]).fetchall()) == days
    frame = polars.read_delta(str(path))
    assert sorted(frame["position"]) == list(range(1, 21))
    assert {str(row["date"]): row["len"] for row in frame.group_by("date").len().to_dicts()} == days
    assert frame.filter(polars.col("position") == 5)["published_at"].item() == NEW_YEAR
    assert frame.filter(polars.col("position") == 5)["payload"].item() == b'{"n":5}'
    again = spark.read.parquet(*files)
    assert {row["position"]: row["published_at"].astimezone(UTC) for row in again.collect()} == {
        n: NEW_YEAR + timedelta(minutes=n - 5) for n in range(1, 21)
    }


@pytest.mark.parametrize("killed", ["after the files", "after the commit"])
def test_a_batch_that_is_repeated_after_a_kill_is_there_once(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    class Killed(BaseException):
        pass

    committing: Any = lake.commit_files

    def kill(*arguments: Any, **named: Any) -> bool:
        if killed == "after the commit":
            committing(*arguments, **named)
        raise Killed

    options, batch = {"path": "my log"}, Batch("archive", 0, 10)
    with monkeypatch.context() as patched:
        patched.setattr(lake, "commit_files", kill)
        with pytest.raises(Killed):
            LakeSink(options, context(spark, tmp_path)).write(events(spark, 1, 10), batch)
    LakeSink(options, context(spark, tmp_path)).write(events(spark, 1, 10), batch)
    assert positions(tmp_path / "my log") == list(range(1, 11))
    # What the first try left behind is gone, and nothing that is needed.
    assert len(list((tmp_path / "my log" / "batches" / "archive").iterdir())) == 1

    # With a lost checkpoint, the same rows come in other batches.
    sink = LakeSink(options, context(spark, tmp_path))
    sink.write(events(spark, 5, 14), Batch("archive", 0, 14))
    sink.write(events(spark, 15, 20), Batch("archive", 1, 20))
    assert positions(tmp_path / "my log") == list(range(1, 21))
    # What is known to be there is not even written.
    monkeypatch.setattr(lake, "write_parquet", None)
    assert sink.write(events(spark, 15, 20), Batch("archive", 1, 20))["rows"] == 0


def test_of_two_runners_of_one_pipeline_the_second_to_commit_adds_nothing(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, quick = (LakeSink({"path": "log"}, context(spark, tmp_path)) for _ in range(2))
    quick.write(events(spark, 1, 2), Batch("archive", 0, 2))
    writing = lake.write_parquet

    def overtaken(*arguments: Any, **named: Any) -> None:
        writing(*arguments, **named)
        monkeypatch.setattr(lake, "write_parquet", writing)
        quick.write(events(spark, 3, 6), Batch("archive", 1, 6))

    monkeypatch.setattr(lake, "write_parquet", overtaken)
    with pytest.raises(LakeBusy, match="another process"):
        late.write(events(spark, 3, 10), Batch("archive", 1, 10))
    late.write(events(spark, 3, 10), Batch("archive", 1, 10))
    assert positions(tmp_path / "log") == list(range(1, 11))


def test_rows_of_any_shape_are_kept_and_new_columns_added(spark: SparkSession, tmp_path: Path) -> None:
    sink = LakeSink({"path": "totals", "date_from": "day"}, context(spark, tmp_path))
    sink.write(spark.sql("select 'a' as customer, date'2026-02-01' as day, 1.5d as total"), Batch("archive", 0, 1))
    sink.write(
        spark.sql("select 'b' as customer, date'2026-02-02' as day, 2d as total, 3 as n"), Batch("archive", 1, 2)
    )
    frame = polars.read_delta(str(tmp_path / "totals")).sort("customer")
    assert frame["n"].to_list() == [None, 3]
    assert [str(day) for day in frame["date"]] == ["2026-02-01", "2026-02-02"]
    with pytest.raises(InvalidRequest, match="total"):
        sink.write(spark.sql("select 'b' as customer, date'2026-02-02' as day, 'x' as total"), Batch("archive", 2, 3))
    assert sink.write(spark.sql("select 'x' as customer, current_date() as day, 1d as total limit 0"),
                      Batch("archive", 3, 4)) == {"rows": 0, "files": 0}  # fmt: skip


def test_an_archive_is_noted_in_the_log_after_each_batch(spark: SparkSession, dsn: str, tmp_path: Path) -> None:
    archiving = SinkContext(spark, "archive", "log", {"max_events": 10}, dsn, None, tmp_path)
    sink = LakeSink({"path": "log", "archive": True}, archiving)
    sink.prepare()
    with headwater.connect(dsn) as log:
        log.create_topic("orders", if_missing=True)
        for number in range(10):
            log.publish("orders", {"n": number})
        sink.write(events(spark, 1, 10), Batch("archive", 0, 10))
        (archive,) = log.run(archive_calls.archives())
    assert (archive.name, archive.location, archive.archived_to) == ("archive", str(tmp_path / "log"), 10)
    with pytest.raises(InvalidRequest, match="lack"):
        sink.write(events(spark, 1, 2).drop("key"), Batch("archive", 1, 12))


@pytest.fixture
def orders(dsn: str) -> Iterator[tuple[str, psycopg.Connection]]:
    name = f"orders_{os.getpid()}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("set synchronous_commit = on")
        connection.execute(
            f"create table {name} (id integer primary key, total numeric(10, 2), at timestamp, note text)"
        )
        yield name, connection
        Slot(dsn, name, name).drop()
        connection.execute(f"drop table {name}")


def test_a_table_is_loaded_and_then_follows_its_changes(
    spark: SparkSession, dsn: str, orders: tuple[str, psycopg.Connection], tmp_path: Path
) -> None:
    name, connection = orders
    connection.execute(
        f"insert into {name} select n, n / 4.0, '2026-01-01', 'n' || n from generate_series(1, 500) as n"
    )
    start = Slot(dsn, name, name).prepare([name]).confirmed_lsn
    path = tmp_path / "lake" / f"public.{name}"
    sink = LakeSink({"path": "lake", "keep": "current"}, context(spark, tmp_path, "changes"))
    sink.prepare()

    load = Batch("archive", -1, start)
    with formats_table.shared_snapshot(dsn, [f"public.{name}"]) as shared:
        rows = spark.read.format("headwater.table").options(**shared, chunkBlocks="4").load()
        assert sink.write_snapshot(rows, f"public.{name}", load) == 500
    assert (
        polars.read_delta(str(path)).sort("id").rows()
        == connection.execute(f"select * from {name} order by id").fetchall()
    )

    connection.execute(f"update {name} set id = -id, total = total + 1 where id <= 10")
    connection.execute(f"delete from {name} where id > 20")
    connection.execute(f"insert into {name} (id) values (21)")
    counted: list[int] = []

    def write(rows: DataFrame, number: int) -> None:
        end = Slot(dsn, name, name).state().flushed_lsn
        counted.extend(sink.write(rows, Batch("archive", number, end))["rows"] for _ in range(2))

    query = (
        spark.readStream.format("headwater.changes")
        .options(dsn=dsn, slot=name, tables=name)
        .load()
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert counted == [10 + 480 + 1, 0]
    expected = connection.execute(f"select * from {name} order by id").fetchall()
    assert polars.read_delta(str(path)).sort("id").rows() == expected
    assert not list((tmp_path / "lake" / "_staged").rglob("*.parquet"))

    nothing = spark.createDataFrame([], from_arrow_schema(snapshot.SCHEMA))
    assert sink.write_snapshot(nothing, f"public.{name}", load) == 0
    assert polars.read_delta(str(path)).rows() == []


@pytest.mark.parametrize(
    ("options", "source", "says"),
    [
        ({}, "log", "requires a path"),
        ({"path": "x", "kept": 1}, "log", "unknown keys: kept"),
        ({"path": "x%20y"}, "log", "% is not allowed"),
        ({"path": "x", "keep": "all"}, "log", "history or current"),
        ({"path": "x", "keep": "current"}, "log", "requires captured changes"),
        ({"path": "x", "keep": "current", "date_from": "y"}, "changes", "date_from"),
        ({"path": "x", "as_text": ["y"]}, "changes", "as_text"),
        ({"path": "x", "as_text": "y"}, "changes", "list of columns"),
        ({"path": "x", "storage": "y"}, "log", "storage"),
        ({"path": "x", "compact_every": -1}, "log", "compact_every"),
        ({"path": "x", "archive": "yes"}, "log", "archive"),
        ({"path": "x", "archive": True}, "changes", "archive requires the source log"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_made(
    tmp_path: Path, options: dict[str, Any], source: Source, says: str
) -> None:
    no_session: Any = None
    with pytest.raises(InvalidRequest, match=says):
        LakeSink(options, context(no_session, tmp_path, source))
    assert not list(tmp_path.iterdir())
