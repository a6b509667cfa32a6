"""Does Spark get every change once, in order, and again the same if it asks again?"""

from __future__ import annotations

import itertools
import json
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes

from databases import database
from headwater.capture.slot import Slot
from headwater.database.pg_snapshot import is_visible
from headwater.errors import CaptureRefused, InvalidRequest
from headwater.spark.formats import table as formats_table
from headwater.spark.formats.changes import ChangesReader, ChangesSource
from headwater.spark.formats.table import TableSource
from patience import PATIENCE_SECONDS

_numbers = itertools.count()


@pytest.fixture(scope="module")
def dsn(admin_dsn: str) -> Iterator[str]:
    """A database without a log: capture needs none."""
    with database(admin_dsn) as dsn:
        yield dsn


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("set synchronous_commit = on")
        yield connection


@pytest.fixture
def table(connection: psycopg.Connection) -> str:
    name = f"items_{next(_numbers)}"
    connection.execute(f"create table {name} (id integer primary key, name text)")
    return name


@pytest.fixture
def options(dsn: str, table: str) -> Iterator[dict[str, str]]:
    yield {"dsn": dsn, "slot": table, "tables": table, "waitSeconds": "0"}
    Slot(dsn, table, table).drop()


def stream(options: dict[str, str], **more: str) -> ChangesReader:
    source = ChangesSource({**options, **more})
    return source.streamReader(source.schema())


def rows_of(reader: ChangesReader, start: dict[str, int], end: dict[str, int]) -> list[dict[str, Any]]:
    """What the tasks bring, each in a reader that was sent to it."""
    sent = pickle.loads(pickle.dumps(reader))
    return [row for part in reader.partitions(start, end) for batch in sent.read(part) for row in batch.to_pylist()]


# Without a session: what the source decides, and what it asks of Postgres.


def test_batches_follow_each_other_and_can_be_repeated(
    options: dict[str, str], table: str, connection: psycopg.Connection
) -> None:
    reader = stream(options)
    start = reader.initialOffset()
    for number in range(3):
        connection.execute(f"insert into {table} values (%s)", (number,))
        end = reader.latestOffset(start, ReadAllAvailable())
        rows = rows_of(reader, start, end)
        assert [json.loads(row["key"])["id"] for row in rows] == [number]
        assert rows_of(reader, start, end) == rows
        reader.commit(start)
        start = end
    reader.stop()


def test_a_batch_is_cut_by_bytes_of_the_log_and_never_within_a_transaction(
    options: dict[str, str], table: str, connection: psycopg.Connection
) -> None:
    reader = stream(options, maxBytesPerTrigger="20000")
    start = reader.initialOffset()
    with connection.transaction():
        connection.execute(f"insert into {table} select generate_series(1, 5000)")
    for number in range(5001, 5101):
        connection.execute(f"insert into {table} values (%s, repeat('x', 500))", (number,))
    reader.prepareForTriggerAvailableNow()
    batches = []
    while (end := reader.latestOffset(start, reader.getDefaultReadLimit())) != start:
        assert end["lsn"] - start["lsn"] <= 20_000
        batches.append([json.loads(row["key"])["id"] for row in rows_of(reader, start, end)])
        start = end
    assert list(itertools.chain(*batches)) == list(range(1, 5101))
    assert next(len(batch) for batch in batches if 1 in batch) >= 5000
    assert len([batch for batch in batches if batch]) > 3
    connection.execute(f"insert into {table} values (0)")
    assert reader.latestOffset(start, ReadAllAvailable()) == start  # later than the target
    reader.stop()


def test_what_others_write_makes_no_batch(options: dict[str, str], table: str, connection: psycopg.Connection) -> None:
    reader = stream(options)
    start = reader.initialOffset()
    connection.execute(f"create table {table}_other as select generate_series(1, 1000)")
    assert reader.latestOffset(start, ReadMaxBytes(1 << 30)) == start
    connection.execute(f"insert into {table} values (1)")
    end = reader.latestOffset(start, ReadMaxBytes(1 << 30))
    assert len(rows_of(reader, start, end)) == 1
    # Its own commit writes to the log, and makes no batch either.
    reader.commit(end)
    assert reader.latestOffset(end, ReadMaxBytes(1 << 30)) == end
    # So much of it does, that the slot can let go.
    for _ in range(5):
        # In a transaction, whose commit flushes it: what is not flushed yet is not there for a reader.
        connection.execute("select pg_logical_emit_message(true, 'filler', repeat('x', 4000000))")
    later = reader.latestOffset(end, ReadMaxBytes(1 << 30))
    assert later != end
    assert rows_of(reader, end, later) == []
    reader.stop()


def test_it_waits_for_a_change_and_no_longer(
    options: dict[str, str], table: str, connection: psycopg.Connection
) -> None:
    reader = stream(options, waitSeconds=f"{2 * PATIENCE_SECONDS}")
    start = reader.initialOffset()
    writer = threading.Timer(0.3, connection.execute, (f"insert into {table} values (1)",))
    began = time.monotonic()
    writer.start()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert 0.2 < time.monotonic() - began < PATIENCE_SECONDS
    assert len(rows_of(reader, start, end)) == 1
    reader.stop()


def test_a_lost_connection_is_made_anew(options: dict[str, str], table: str, connection: psycopg.Connection) -> None:
    reader = stream(options, waitSeconds="10")
    start = reader.initialOffset()
    reader.reportLatestOffset()
    connection.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'headwater capture'"
    )
    connection.execute(f"insert into {table} values (1)")
    end = reader.latestOffset(start, ReadAllAvailable())
    assert len(rows_of(reader, start, end)) == 1
    reader.stop()


def test_options_that_cannot_be_are_refused(dsn: str) -> None:
    with pytest.raises(InvalidRequest, match="unknown options: slots"):
        stream({"dsn": dsn, "slots": "x"})
    with pytest.raises(InvalidRequest, match="requires the options slot"):
        stream({"dsn": dsn})
    with pytest.raises(InvalidRequest, match="maxBytesPerTrigger '-1'"):
        stream({"dsn": dsn, "slot": "s", "maxBytesPerTrigger": "-1"})
    with pytest.raises(InvalidRequest, match="requires the options tables"):
        TableSource({"dsn": dsn}).reader(TableSource({}).schema())


# With one.


@pytest.mark.spark
def test_a_query_delivers_what_was_committed_while_it_was_down(
    spark: SparkSession, options: dict[str, str], table: str, connection: psycopg.Connection, tmp_path: Path
) -> None:
    seen: list[list[str]] = []

    def keep(batch: DataFrame, _: int) -> None:
        seen.append([row["id"] for row in batch.orderBy("id").collect()])

    def run() -> None:
        query = (
            spark.readStream.format("headwater.changes")
            .options(**options)
            .load()
            .writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)

    run()
    connection.execute(f"insert into {table} select generate_series(1, 50)")
    run()
    connection.execute(f"update {table} set name = 'x' where id = 1")
    connection.execute(f"delete from {table} where id = 2")
    connection.execute(f"truncate {table}")
    run()
    ids = list(itertools.chain(*seen))
    assert len(ids) == len(set(ids)) == 53
    assert ids == sorted(ids)


@pytest.mark.spark
def test_a_shared_snapshot_is_one_point_in_time_for_all_tasks(
    spark: SparkSession, dsn: str, table: str, connection: psycopg.Connection
) -> None:
    connection.execute(f"insert into {table} select n, repeat('x', 100) from generate_series(1, 5000) as n")
    with formats_table.shared_snapshot(dsn, [table]) as shared:
        connection.execute(f"insert into {table} values (0)")
        connection.execute(f"delete from {table} where id > 100")
        frame = spark.read.format("headwater.table").options(**shared, chunkBlocks="20").load()
        rows = frame.collect()
    assert sorted(json.loads(row["key"])["id"] for row in rows) == list(range(1, 5001))
    assert len({row["chunk"] for row in rows}) > 2
    assert {row["snapshot"] for row in rows} == {shared["snapshotVisible"]}
    (xid,) = connection.execute("select pg_current_xact_id()::text::bigint").fetchone()
    assert not is_visible(xid, rows[0]["snapshot"])


@pytest.mark.spark
def test_without_a_shared_snapshot_one_task_reads_all(
    spark: SparkSession, dsn: str, table: str, connection: psycopg.Connection
) -> None:
    connection.execute(f"insert into {table} values (1, 'é')")
    connection.execute(f"create table {table}_second (x boolean)")
    connection.execute(f"insert into {table}_second values (true)")
    frame = spark.read.format("headwater.table").options(dsn=dsn, tables=f"{table},{table}_second").load()
    assert {(row["table"], row["row"]) for row in frame.collect()} == {
        (table, '{"id":1,"name":"é"}'),
        (f"{table}_second", '{"x":true}'),
    }


def test_a_key_that_is_needed_and_missing_is_refused(dsn: str, table: str, connection: psycopg.Connection) -> None:
    connection.execute(f"create table {table}_keyless (x integer)")
    source = TableSource({"dsn": dsn, "tables": f"{table}_keyless", "needsKey": "true"})
    reader = source.reader(source.schema())
    (part,) = reader.partitions()
    with pytest.raises(CaptureRefused, match="has no key"):
        list(reader.read(part))
