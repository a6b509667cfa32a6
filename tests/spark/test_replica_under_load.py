"""Is a replica equal to its table when it was loaded while the table changed?

What the docs show was run with HEADWATER_TEST_EFFORT=50.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from databases import database
from effort import effort
from patience import PATIENCE_SECONDS, TEST_SECONDS

pytest.importorskip("nats")

from headwater.capture.slot import Slot
from headwater.embedded.nats import Nats
from headwater.nats.replica import Replica
from headwater.nats.replica_store import ReplicaStore
from headwater.nats.subjects import Table
from headwater.spark.pipelines.file import parse
from headwater.spark.pipelines.runner import Runner, RunnerSettings

ROWS = effort(20_000)
CHANGES = effort(2000)
PIPELINE = "pipelines: {big: {from: {changes: {tables: [public.big]}}, to: {nats: {shape: packed}}, every_seconds: 0}}"


@pytest.fixture
def dsn(admin_dsn: str, template: str) -> Iterator[str]:
    with database(admin_dsn, template) as dsn:
        yield dsn


def change(dsn: str, loading: threading.Event, done: threading.Event) -> None:
    """So many changes in transactions of all sizes, the first half of them before and while the table is read."""
    chosen = random.Random(7)
    made = 0
    with psycopg.connect(dsn, autocommit=True) as connection:
        while made < CHANGES:
            size = min(chosen.choice((1, 3, 10, 100)), CHANGES - made)
            with connection.transaction():
                for _ in range(size):
                    number = chosen.randrange(ROWS * 2)
                    match chosen.randrange(4):
                        case 0:
                            connection.execute("delete from big where id = %s", (number,))
                        case 1:
                            connection.execute(
                                "insert into big values (%s, 'new', 0) on conflict do nothing", (number,)
                            )
                        case _:
                            connection.execute("update big set n = n + 1, v = v || '.' where id = %s", (number % ROWS,))
            made += size
            if made >= CHANGES // 2:
                loading.set()
    done.set()


@pytest.mark.long
def test_a_replica_is_equal_to_its_table(spark: SparkSession, dsn: str, tmp_path: Path) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table big (id integer primary key, v text, n integer)")
        connection.execute(
            "insert into big select n, repeat(md5(n::text), 3), 0 from generate_series(0, %s) n", (ROWS - 1,)
        )
    with Nats(tmp_path / "nats") as broker, ReplicaStore(tmp_path / "big.db", Table("public", "big")) as store:
        started = threading.Event()
        settings = RunnerSettings(dsn=dsn, nats_url=broker.url, directory=tmp_path, checkpoints="checkpoints")
        runner = Runner(
            spark,
            parse(PIPELINE, {}).pipelines,
            settings,
            report=lambda r: started.set() if r.what == "started" else None,
        )
        running = threading.Thread(target=runner.run, daemon=True)
        running.start()
        assert started.wait(PATIENCE_SECONDS)
        loading, done = threading.Event(), threading.Event()
        changing = threading.Thread(target=change, args=(dsn, loading, done), daemon=True)
        changing.start()

        async def replicate() -> float:
            stop = asyncio.Event()
            copying = asyncio.create_task(Replica(broker.url, store, snapshot_seconds=600).run(stop=stop))
            begun = time.monotonic()
            until = begun + TEST_SECONDS
            while not copying.done() and time.monotonic() < until:
                await asyncio.sleep(0.5)
                if done.is_set() and await asyncio.to_thread(equal, dsn, tmp_path / "big.db"):
                    break
            stop.set()
            await copying
            return time.monotonic() - begun

        seconds = asyncio.run(replicate())
        runner.stop()
        running.join(PATIENCE_SECONDS)
        changing.join(PATIENCE_SECONDS)
    Slot(dsn, "big", "big").drop()
    assert done.is_set()
    assert equal(dsn, tmp_path / "big.db")
    print(f"{ROWS} rows and {CHANGES} changes were equal after {seconds:.1f} s")


def equal(dsn: str, copy: Path) -> bool:
    with psycopg.connect(dsn) as connection:
        wanted = connection.execute("select id, v, n from big order by id").fetchall()
    with sqlite3.connect(copy) as connection:
        try:
            return connection.execute('select id, v, n from "big" order by id').fetchall() == wanted
        except sqlite3.OperationalError:
            return False
