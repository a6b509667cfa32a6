"""Does a bridge on Spark bring a table to a replica: a snapshot by tasks, then changes, its schema before them?"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from databases import database
from patience import PATIENCE_SECONDS

pytest.importorskip("pyspark")
pytest.importorskip("nats")

from headwater.capture.slot import Slot
from headwater.embedded.nats import Nats
from headwater.nats.replica import Replica, ReplicaProgress
from headwater.nats.replica_store import ReplicaStore
from headwater.nats.subjects import Table
from headwater.spark.nats_bridge.bridge import Bridge

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
TABLE = Table("public", "bridged")


@pytest.fixture
def dsn(admin_dsn: str) -> Iterator[str]:
    """A database without a log: capture needs none."""
    with database(admin_dsn) as dsn:
        yield dsn


def sync(url: str, path: Path) -> tuple[ReplicaProgress, list[tuple[int, str, int | None]]]:
    with ReplicaStore(path, TABLE) as store:
        progress = asyncio.run(asyncio.wait_for(Replica(url, store, idle_seconds=0.1).run(once=True), PATIENCE_SECONDS))
        return progress, [(row["id"], row["name"], row.get("extra")) for row in store.rows()]


def test_a_table_reaches_a_replica_by_tasks_of_spark(spark: SparkSession, dsn: str, tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="headwater-", ignore_cleanup_errors=True) as directory,
        Nats(Path(directory, "nats")) as server,
        psycopg.connect(dsn, autocommit=True) as connection,
    ):
        connection.execute("set synchronous_commit = on")
        connection.execute("create table bridged (id int primary key, name text)")
        connection.execute("insert into bridged select n, 'name ' || n from generate_series(1, 2000) as n")
        bridge = Bridge(
            spark, dsn=dsn, slot="bridged", tables=["public.bridged"], nats_url=server.url, zstd="plain", range_blocks=4
        )
        bridge.start()
        try:
            progress, rows = sync(server.url, tmp_path / "r.db")
            assert progress.rows_loaded == 2000
            assert rows == [(n, f"name {n}", None) for n in range(1, 2001)]
            assert bridge.status()["snapshots"][0]["ranges"] == 3

            connection.execute("update bridged set name = 'new' where id <= 10")
            connection.execute("alter table bridged add column extra int")
            connection.execute("update bridged set extra = id where id between 6 and 15")
            counted = []

            def publish(rows: DataFrame, number: int) -> None:
                counted.append(bridge.publish(rows, shape="packed", end=1000 + number))

            query = (
                spark.readStream.format("headwater.changes")
                .options(dsn=dsn, slot="bridged", waitSeconds="0")
                .load()
                .writeStream.foreachBatch(publish)
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            assert query.awaitTermination(60)
            progress, rows = sync(server.url, tmp_path / "r.db")
            assert progress.snapshots == 0
            assert rows[:16] == connection.execute("select * from bridged order by id limit 16").fetchall()
            figures = bridge.metrics()
            assert (figures.cdc_events, figures.messages) == (20, sum(found.stored for found in counted))
            assert (figures.last_ack_lsn, figures.schemas) == (1000, 2)
        finally:
            bridge.stop()
            Slot(dsn, "bridged", "bridged").drop()
