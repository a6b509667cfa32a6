"""Does the bridge serve snapshots, schemas and figures, whoever dies meanwhile? Real Postgres, real NATS, no Spark.

Ranges are read in this process, and changes are published by the function that tasks of Spark run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_SECONDS

pytest.importorskip("pyspark")
pytest.importorskip("nats")

import psycopg

from headwater.capture.connection import connect
from headwater.capture.slot import Slot
from headwater.embedded.nats import Nats
from headwater.errors import InvalidRequest, LogUnavailable
from headwater.nats import codec, streams, subjects
from headwater.nats.errors import NatsUnavailable, ReplicaRefused
from headwater.nats.replica import Replica, ReplicaProgress
from headwater.nats.replica_store import ReplicaStore
from headwater.nats.subjects import Table
from headwater.spark.formats.nats import SinkOptions
from headwater.spark.nats_bridge.bridge import Bridge
from headwater.spark.nats_bridge.changes_task import ChangesTask
from headwater.spark.nats_bridge.schema_documents import SchemaDocuments
from headwater.spark.nats_bridge.snapshot_ranges import LocalRangeExecutor, RangeTask
from headwater.spark.nats_bridge.snapshots import SnapshotTaker

NAMES = iter(f"goods_{n}" for n in range(1000))


@pytest.fixture(scope="module")
def server() -> Iterator[Nats]:
    with tempfile.TemporaryDirectory(prefix="headwater-", ignore_cleanup_errors=True) as directory:
        server = Nats(Path(directory, "nats"))
        server.start()
        yield server
        server.kill()


@pytest.fixture
def table(connection: psycopg.Connection) -> Table:
    """Wide enough for several blocks, with values that are stored apart."""
    name = next(NAMES)
    connection.execute("set synchronous_commit = on")
    connection.execute(f"create table {name} (id bigint primary key, name text, qty int, doc jsonb, large text)")
    connection.execute(f"alter table {name} alter column large set storage external")
    return Table("public", name)


def fill(connection: psycopg.Connection, table: Table, first: int, last: int) -> None:
    connection.execute(
        f"insert into {table.name} select n, 'name ' || n, n %% 7, jsonb_build_object('n', n), "
        "case when n %% 50 = 0 then repeat(n::text, 1500) end from generate_series(%s::int, %s::int) as n",
        (first, last),
    )


class Rig:
    """A bridge and the changes that a stream of Spark would publish."""

    def __init__(self, dsn: str, url: str, table: Table, **options: Any) -> None:
        self.dsn, self.url, self.table = dsn, url, table
        self.bridge = Bridge(
            None,
            dsn=dsn,
            slot=f"s_{table.name}",
            publication=f"p_{table.name}",
            tables=[f"{table.schema}.{table.name}"],
            nats_url=url,
            **{"range_blocks": 4, "chunk_rows": 100, **options},
        )
        self.slot = Slot(dsn, f"s_{table.name}", f"p_{table.name}")
        self.encoding = options.get("encoding", "msgpack")

    def pump(self) -> int:
        """Publish everything that is committed by now."""
        with connect(self.dsn) as connection:
            connection.execute("set synchronous_commit = on")
            connection.execute("select pg_logical_emit_message(true, 'test', 'now')")
        state = self.slot.state()
        task = ChangesTask(
            SinkOptions(self.url, "packed", self.encoding, 20.0, 1000, ready=False),
            frozenset(),
            SchemaDocuments(self.dsn, self.slot.publication, self.url, self.encoding),
        )
        (done,) = [
            row
            for batch in task.publish(self.slot.read(start=state.confirmed_lsn, end=state.flushed_lsn))
            for row in batch.to_pylist()
        ]
        self.slot.advance(state.flushed_lsn)
        self.bridge.note_batch(changes=done["changes"], messages=done["stored"], end=state.flushed_lsn, seconds=0.5)
        return int(done["changes"])

    def sync(self, path: Path, **options: Any) -> tuple[ReplicaProgress, list[dict[str, Any]]]:
        with ReplicaStore(path, self.table) as store:
            replica = Replica(self.url, store, idle_seconds=0.1, snapshot_seconds=20, **options)
            return asyncio.run(asyncio.wait_for(replica.run(once=True), PATIENCE_SECONDS)), store.rows()

    def rows(self) -> list[dict[str, Any]]:
        """The table itself, as a replica has it."""
        with connect(self.dsn) as connection, connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
            found = cursor.execute(f"select * from {self.table.name} order by id").fetchall()
        for row in found:
            row["doc"] = None if row["doc"] is None else json.dumps(row["doc"])
        return found

    def meta(self) -> dict[str, Any]:
        return dict(ask(self.url, lambda js: js.get_last_msg("INIT", subjects.meta_subject(self.table)), decoded=True))


def ask(url: str, question: Callable[[Any], Any], *, decoded: bool = False) -> Any:
    async def run() -> Any:
        async with streams.connect(url) as client:
            return await question(client.jetstream())

    answer = asyncio.run(run())
    return codec.decode(answer.data) if decoded else answer


def request(url: str, subject: str) -> dict[str, Any]:
    async def run() -> bytes:
        async with streams.connect(url) as client:
            return bytes((await client.request(subject, b"", timeout=PATIENCE_SECONDS)).data)

    return dict(codec.decode(asyncio.run(run())))


@contextmanager
def running(rig: Rig) -> Iterator[Rig]:
    rig.bridge.start()
    try:
        yield rig
    finally:
        rig.bridge.stop()


@pytest.fixture
def rig(request: pytest.FixtureRequest, dsn: str, server: Nats, table: Table) -> Iterator[Rig]:
    rig = Rig(dsn, server.url, table, **getattr(request, "param", {}))
    with running(rig):
        yield rig
    rig.slot.drop()


# --- snapshots -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rig", [{}, {"zstd": "plain", "encoding": "json"}, {"zstd": "dictionary"}], indirect=True, ids=str
)
def test_a_requested_snapshot_and_later_changes_are_the_table(
    rig: Rig, connection: psycopg.Connection, table: Table, tmp_path: Path
) -> None:
    fill(connection, table, 1, 1500)
    progress, rows = rig.sync(tmp_path / "r.db")
    assert rows == rig.rows()
    assert (progress.snapshots, progress.rows_loaded) == (1, 1500)
    connection.execute(f"update {table.name} set qty = -1 where id % 3 = 0")
    connection.execute(f"delete from {table.name} where id % 5 = 0")
    rig.pump()
    progress, rows = rig.sync(tmp_path / "r.db")
    assert rows == rig.rows()
    assert progress.snapshots == 0
    meta = rig.meta()
    (shown,) = rig.bridge.status()["snapshots"]
    assert (shown["state"], shown["rows"], shown["chunks"]) == ("done", 1500, meta["batch_count"])
    assert shown["ranges_done"] == shown["ranges"] > 3
    assert "resumed" not in meta


@pytest.mark.parametrize("rig", [{"zstd": "dictionary"}], indirect=True)
def test_a_dictionary_is_published_and_used_again(
    rig: Rig, connection: psycopg.Connection, table: Table, tmp_path: Path, server: Nats
) -> None:
    fill(connection, table, 1, 1500)
    keys = set()
    for number in range(2):
        # Rows to learn other things from.
        connection.execute(f"update {table.name} set name = md5(id::text)")
        rig.pump()
        _, rows = rig.sync(tmp_path / f"{number}.db", fresh_snapshot=True)
        assert rows == rig.rows()
        meta = rig.meta()
        subject = subjects.chunk_subject(table, meta["snapshot_id"], meta["chunks"][0][0])
        chunk = ask(server.url, lambda js, subject=subject: js.get_last_msg("INIT", subject))
        assert chunk.headers[codec.CONTENT_ENCODING] == "zstd"
        keys.add(chunk.headers[codec.DICTIONARY])
    (key,) = keys
    assert ask(server.url, lambda js: streams.get_dictionary(js, key))


def test_requests_that_cannot_be_served_say_why(
    rig: Rig, connection: psycopg.Connection, table: Table, server: Nats, tmp_path: Path
) -> None:
    answer = request(server.url, "snapshot.request.nothing")
    assert (answer["accepted"], answer["reason"]) == (False, "unknown")
    assert "public.nothing" in answer["error"]
    assert request(server.url, "snapshot.request.a.b.c")["reason"] == "unknown"
    with connection.cursor() as cursor:
        cursor.execute(f"create table keyless_{table.name} (a int)")
        cursor.execute(f"alter table keyless_{table.name} replica identity full")
        cursor.execute(f"create table partial_{table.name} (a int primary key, secret text)")
        cursor.execute(f"alter publication p_{table.name} add table keyless_{table.name}, partial_{table.name} (a)")
    rig.bridge.on_columns(["something new"])
    assert request(server.url, f"snapshot.request.keyless_{table.name}")["reason"] == "no key"
    assert request(server.url, f"snapshot.request.partial_{table.name}")["reason"] == "partial"
    with (
        pytest.raises(ReplicaRefused, match="has no key"),
        ReplicaStore(tmp_path / "r.db", Table("public", f"keyless_{table.name}")) as store,
    ):
        asyncio.run(Replica(server.url, store).run(once=True))


def test_requests_for_a_running_snapshot_join_it(
    dsn: str, connection: psycopg.Connection, table: Table, server: Nats, tmp_path: Path
) -> None:
    fill(connection, table, 1, 500)
    answers: list[dict[str, Any]] = []

    class Asking(LocalRangeExecutor):
        def run(self, task: RangeTask) -> Any:
            if not answers:
                answers.append(request(server.url, subjects.request_subject(table)))
            return super().run(task)

    rig = Rig(dsn, server.url, table, ranges=Asking())
    with running(rig):
        _, rows = rig.sync(tmp_path / "r.db")
        assert rows == rig.rows()
        assert answers[0]["joined"]
        assert answers[0]["snapshot_id"] == rig.meta()["snapshot_id"]
        assert rig.bridge.metrics().snapshots_completed == 1
    rig.slot.drop()


def test_two_bridges_take_one_snapshot_of_a_table(
    dsn: str,
    connection: psycopg.Connection,
    table: Table,
    server: Nats,
    caplog: pytest.LogCaptureFixture,
    until: Callable[[Callable[[], Any]], Any],
) -> None:
    fill(connection, table, 1, 500)

    def snapshots(rig: Rig) -> SnapshotTaker:
        assert rig.bridge._snapshots is not None
        return rig.bridge._snapshots

    class Waiting(LocalRangeExecutor):
        def run(self, task: RangeTask) -> Any:
            # The other one gets a request, too, and finds the table claimed.
            snapshots(other).start(table)
            until(lambda: "another process is taking it" in caplog.text)
            return super().run(task)

    first, other = Rig(dsn, server.url, table, ranges=Waiting()), Rig(dsn, server.url, table)
    with running(first), running(other):
        snapshots(first).start(table)
        until(lambda: first.bridge.metrics().snapshots_completed)
        until(lambda: snapshots(other).progress[table].state == "left")
        assert other.bridge.metrics().snapshots_completed == 0
    first.slot.drop()


def test_a_row_that_no_message_can_hold_fails_the_snapshot_with_words(
    dsn: str, connection: psycopg.Connection, table: Table, tmp_path: Path
) -> None:
    fill(connection, table, 1, 10)
    connection.execute(f"insert into {table.name} (id, large) values (11, repeat('x', 200000))")
    with Nats(tmp_path / "nats", max_payload_bytes=100_000) as small:
        rig = Rig(dsn, small.url, table)
        with running(rig):
            with pytest.raises(ReplicaRefused, match="accepts at most 100000"):
                rig.sync(tmp_path / "r.db")
            (shown,) = rig.bridge.status()["snapshots"]
            assert shown["state"] == "failed"
            assert rig.bridge.metrics().snapshots_failed == 1
            assert "accepts at most 100000" in shown["error"]
            # Cut where it must be, the rest fits.
            connection.execute(f"delete from {table.name} where id = 11")
            connection.execute(
                f"insert into {table.name} select n, 'x', 1, null, repeat('y', 9000) "
                "from generate_series(100, 160) as n"
            )
            _, rows = rig.sync(tmp_path / "r.db")
            assert rows == rig.rows()
        rig.slot.drop()


def test_a_stream_that_cannot_hold_a_snapshot_fails_it_with_words(
    dsn: str, connection: psycopg.Connection, table: Table, tmp_path: Path
) -> None:
    fill(connection, table, 1, 1500)
    with Nats(tmp_path / "nats") as own:
        limits = {"INIT": streams.StreamLimits(max_age_seconds=600, max_bytes=30_000)}
        ask(own.url, lambda js: streams.ensure_streams(js, limits=limits))
        rig = Rig(dsn, own.url, table)
        with running(rig), pytest.raises(ReplicaRefused, match="raise its limits"):
            rig.sync(tmp_path / "r.db")
        rig.slot.drop()


# --- crashes -------------------------------------------------------------------------------------------------

DRIVER = """
import os, signal, sys, threading
from headwater.spark.nats_bridge.bridge import Bridge
from headwater.spark.nats_bridge.snapshot_ranges import LocalRangeExecutor
from headwater.nats.subjects import Table

dsn, url, name, ranges = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

class Dying(LocalRangeExecutor):
    done = 0

    def run(self, task):
        outcome = super().run(task)
        self.done += 1
        if self.done > ranges:
            # Its chunks are in the stream, but not recorded.
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome

bridge = Bridge(
    None, dsn=dsn, slot="s_" + name, publication="p_" + name, tables=["public." + name], nats_url=url,
    range_blocks=1, chunk_rows=100, ranges=Dying(),
)
bridge.start()
if bridge.metrics().snapshots_running == 0:
    bridge._snapshots.start(Table("public", name))
threading.Event().wait(20)
"""


def die_after(rig: Rig, ranges: int) -> None:
    """A driver that takes or resumes a snapshot and is killed when so many ranges are done."""
    command = [sys.executable, "-c", DRIVER, rig.dsn, rig.url, rig.table.name, str(ranges)]
    driver = subprocess.run(command, timeout=PATIENCE_SECONDS, check=False, capture_output=True, text=True)
    assert driver.returncode == -signal.SIGKILL, driver.stderr[-2000:]


def change_at_random(
    connection: psycopg.Connection, table: Table, chance: random.Random, count: int, *, large: bool = True
) -> None:
    for _ in range(count):
        number = chance.randrange(1, 2000)
        match chance.randrange(6 if large else 5):
            case 0:
                connection.execute(f"delete from {table.name} where id = %s", (number,))
            case 1:
                # A longer row moves to another block.
                connection.execute(
                    f"update {table.name} set name = repeat('n', %s) where id between %s and %s",
                    (chance.randrange(2000), number, number + 10),
                )
            case 2:
                connection.execute(f"update {table.name} set qty = qty + 1 where id %% 97 = %s", (number % 97,))
            case 3:
                connection.execute(
                    f"insert into {table.name} values (%s, 'new', 0, null, null) on conflict do nothing", (number,)
                )
            case 4:
                connection.execute(
                    f"update {table.name} set id = id + 100000 where id = %s and large is null", (number,)
                )
            case 5:
                connection.execute(f"update {table.name} set large = repeat('l', 3000) where id = %s", (number,))


@pytest.mark.crash
@pytest.mark.parametrize(("seed", "large"), [(1, False), (2, False), (3, True)])
def test_a_snapshot_whose_driver_was_killed_is_resumed_and_is_the_table(
    dsn: str,
    connection: psycopg.Connection,
    table: Table,
    server: Nats,
    tmp_path: Path,
    until: Callable[[Callable[[], Any]], Any],
    seed: int,
    large: bool,
) -> None:
    chance = random.Random(seed)

    def change(count: int) -> None:
        change_at_random(connection, table, chance, count, large=large)

    fill(connection, table, 1, 1500)
    if not large:
        connection.execute(f"update {table.name} set large = null")

    class Changing(LocalRangeExecutor):
        def run(self, task: RangeTask) -> Any:
            change(2)
            return super().run(task)

    rig = Rig(dsn, server.url, table, ranges=Changing())
    rig.slot.prepare([table.name])
    change(20)
    die_after(rig, 3)
    change(60)
    connection.execute(f"vacuum {table.name}")  # and rows come where others were
    change(60)
    die_after(rig, 5)
    change(60)
    with running(rig):
        until(lambda: rig.bridge.metrics().snapshots_completed)
        (shown,) = rig.bridge.status()["snapshots"]
        assert shown["resumed"]
        assert shown["rows"] > rig.bridge.metrics().snapshot_rows > 0
        meta = rig.meta()
        change(20)
        rig.pump()
        progress, rows = rig.sync(tmp_path / "r.db")
        assert rows == rig.rows()
        # A large value that was not touched, of a row that moved, may be missing; then the replica takes another.
        assert progress.snapshots == rig.bridge.metrics().snapshots_completed == 1 or large
        assert meta["resumed"]
        stored = ask(
            server.url,
            lambda js: js.stream_info("INIT", subjects_filter=subjects.chunks_filter(table, shown["snapshot_id"])),
        )
        assert sum(stored.state.subjects.values()) == shown["chunks"]
        # From where it settles on, the replica is strict again.
        change(20)
        rig.pump()
        progress, rows = rig.sync(tmp_path / "r.db")
        assert rows == rig.rows()
        assert progress.snapshots == 0
    rig.slot.drop()


@pytest.mark.crash
def test_a_snapshot_of_a_table_that_was_rewritten_begins_anew(
    dsn: str,
    connection: psycopg.Connection,
    table: Table,
    server: Nats,
    tmp_path: Path,
    until: Callable[[Callable[[], Any]], Any],
) -> None:
    fill(connection, table, 1, 1500)
    rig = Rig(dsn, server.url, table)
    rig.slot.prepare([table.name])
    die_after(rig, 3)
    connection.execute(f"delete from {table.name} where id < 300")
    connection.execute(f"vacuum full {table.name}")
    with running(rig):
        until(lambda: rig.bridge.metrics().snapshots_completed)
        meta = rig.meta()
        assert "resumed" not in meta
        assert meta["row_count"] == 1201
        rig.pump()
        _, rows = rig.sync(tmp_path / "r.db")
        assert rows == rig.rows()
    rig.slot.drop()


@pytest.mark.crash
@pytest.mark.parametrize("killed", ["nats", "postgres"])
def test_a_snapshot_survives_the_death_of_a_server(
    connection: psycopg.Connection, table: Table, tmp_path: Path, killed: str
) -> None:
    from headwater.embedded import Postgres

    class Killing(LocalRangeExecutor):
        done = 0

        def run(self, task: RangeTask) -> Any:
            self.done += 1
            if self.done == 4:
                if killed == "nats":
                    server.kill()
                    server.start()
                else:
                    database.stop(mode="immediate")
                    database.start()
            return super().run(task)

    with tempfile.TemporaryDirectory(prefix="headwater-", ignore_cleanup_errors=True) as directory:
        server = Nats(Path(directory, "nats"))
        server.start()
        database = Postgres(Path(directory, "pg"), settings={"fsync": "off"})
        database.start()
        try:
            dsn = database.dsn("postgres")
            with psycopg.connect(dsn, autocommit=True) as own:
                own.execute(
                    f"create table {table.name} (id bigint primary key, name text, qty int, doc jsonb, large text)"
                )
                fill(own, table, 1, 1500)
            rig = Rig(dsn, server.url, table, ranges=Killing())
            with running(rig):
                progress, rows = rig.sync(tmp_path / "r.db")
                assert rows == rig.rows()
                assert progress.snapshots == 1
                assert rig.meta().get("resumed", False) == (killed == "postgres")
        finally:
            server.kill()
            database.stop(mode="immediate")


# --- schemas -------------------------------------------------------------------------------------------------


def test_a_schema_that_changed_is_in_the_bucket_before_its_changes(
    rig: Rig, connection: psycopg.Connection, table: Table, server: Nats
) -> None:
    known = ask(server.url, lambda js: streams.get_schema(js, table))
    assert [(c["name"], c["data_type"], c["primary_key"], c["is_nullable"]) for c in known["columns"]] == [
        ("id", "bigint", True, False),
        ("name", "text", False, True),
        ("qty", "integer", False, True),
        ("doc", "jsonb", False, True),
        ("large", "text", False, True),
    ]
    fill(connection, table, 1, 3)
    rig.pump()
    connection.execute(f"alter table {table.name} add column extra numeric(10, 2) default 1.5")
    fill_extra = f"insert into {table.name} (id, extra) values (100, 2.5)"
    connection.execute(fill_extra)
    rig.pump()

    async def times(js: Any) -> tuple[Any, Any]:
        bucket = await js.get_last_msg("KV_schemas", f"$KV.schemas.{table.token}")
        change = await js.get_last_msg("CDC", f"cdc.{table.token}.insert.batch")
        assert codec.decode(change.data)[0]["data"]["extra"] == "2.50"
        return bucket, change

    bucket, change = ask(server.url, times)
    columns = codec.decode(bucket.data)["columns"]
    assert (columns[-1]["name"], columns[-1]["data_type"], columns[-1]["column_default"]) == ("extra", "numeric", "1.5")
    assert bucket.time < change.time


def test_tables_that_come_and_go_are_told(
    rig: Rig, connection: psycopg.Connection, table: Table, server: Nats, tmp_path: Path
) -> None:
    more = Table("public", f"more_{table.name}")
    connection.execute(f"create table {more.name} (id int primary key)")
    connection.execute(f"alter publication p_{table.name} add table {more.name}")
    assert rig.bridge.on_columns(["new"])
    assert not rig.bridge.on_columns(["new"])
    assert ask(server.url, lambda js: streams.get_schema(js, more))["columns"][0]["name"] == "id"
    assert request(server.url, subjects.request_subject(more))["accepted"]
    connection.execute(f"alter publication p_{table.name} drop table {more.name}")
    rig.bridge.on_columns(["other"])
    assert ask(server.url, lambda js: streams.get_schema(js, more))["dropped"]
    assert request(server.url, subjects.request_subject(more))["reason"] == "unknown"
    with (
        pytest.raises(ReplicaRefused, match="is not in the bucket schemas"),
        ReplicaStore(tmp_path / "r.db", more) as store,
    ):
        asyncio.run(Replica(server.url, store).run(once=True))


# --- figures and endpoints -----------------------------------------------------------------------------------


def get(rig: Rig, path: str, *, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, str]:
    asked = urllib.request.Request(f"http://127.0.0.1:{rig.bridge.port}{path}", method=method, headers=headers or {})
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_endpoints_say_how_the_bridge_is(
    dsn: str,
    connection: psycopg.Connection,
    table: Table,
    tmp_path: Path,
    until: Callable[[Callable[[], Any]], Any],
) -> None:
    stopped: list[bool] = []
    fill(connection, table, 1, 10)
    with Nats(tmp_path / "nats") as server:
        rig = Rig(
            dsn,
            server.url,
            table,
            port=0,
            allow_shutdown=True,
            ask_to_stop=lambda: stopped.append(True),
            metrics_seconds=0.1,
        )
        with running(rig):
            fill(connection, table, 11, 17)
            rig.pump()
            rig.sync(tmp_path / "r.db")
            code, text = get(rig, "/metrics")
            metrics = dict(line.split() for line in text.splitlines() if not line.startswith("#"))
            assert code == 200
            assert metrics.keys() >= {
                *("bridge_uptime_seconds", "bridge_wal_messages_received_total", "bridge_cdc_events_published_total"),
                *("bridge_last_ack_lsn", "bridge_connected", "bridge_reconnects_total", "bridge_nats_reconnects_total"),
                *("bridge_last_processing_time_us", "bridge_slot_active", "bridge_wal_lag_bytes"),
            }
            assert metrics["bridge_cdc_events_published_total"] == "7"
            assert metrics["bridge_snapshot_rows_published_total"] == "17"
            assert (metrics["bridge_connected"], metrics["bridge_slot_active"]) == ("1", "1")
            assert int(metrics["bridge_last_ack_lsn"]) > 0
            status = json.loads(get(rig, "/status")[1])
            assert (status["status"], status["tables"]) == ("connected", [table.full_name])
            assert status["snapshots"][0]["state"] == "done"
            assert get(rig, "/health")[0] == 200
            code, text = get(rig, "/streams/info?stream=CDC")
            assert (code, json.loads(text)["messages"]) == (200, 1)
            assert [get(rig, path)[0] for path in ("/streams/info", "/streams/info?stream=no", "/x")] == [400, 404, 404]
            assert get(rig, "/shutdown")[0] == 405
            assert get(rig, "/shutdown", method="POST", headers={"Origin": "http://evil"})[0] == 403
            assert not stopped
            assert get(rig, "/shutdown", method="POST")[0] == 202
            assert stopped
            server.kill()
            until(lambda: get(rig, "/health")[0] == 503)
            assert "NATS is not reachable" in get(rig, "/health")[1]
            server.start()
            until(lambda: get(rig, "/health")[0] == 200)
            assert rig.bridge.metrics().nats_reconnects == 1
            rig.slot.drop()
            until(lambda: get(rig, "/health")[0] == 503)
            assert "does not exist" in get(rig, "/health")[1]


@pytest.mark.parametrize("rig", [{"metrics_seconds": 0.05, "port": 0}], indirect=True)
def test_the_metrics_line_and_an_endpoint_that_may_not_stop(
    rig: Rig, caplog: pytest.LogCaptureFixture, until: Callable[[Callable[[], Any]], Any]
) -> None:
    with caplog.at_level(logging.INFO, "headwater"):
        until(lambda: "METRICS" in caplog.text)
    line = next(record.getMessage() for record in caplog.records if "METRICS" in record.getMessage())
    assert line.startswith("METRICS uptime=")
    pairs = dict(pair.split("=") for pair in line.split()[1:])
    assert [*pairs][:9] == [
        *("uptime", "wal_messages", "cdc_events", "lsn", "connected", "reconnects", "nats_reconnects"),
        *("lag_bytes", "slot_active"),
    ]
    assert pairs["lsn"] == "0/0"
    assert pairs["connected"] == "1"
    assert get(rig, "/shutdown", method="POST")[0] == 403
    with pytest.raises(InvalidRequest, match="cannot listen"):
        Rig(rig.dsn, rig.url, rig.table, port=rig.bridge.port).bridge.start()


def test_what_cannot_start_says_so(dsn: str, table: Table, server: Nats) -> None:
    with pytest.raises(LogUnavailable, match="cannot reach Postgres"):
        Rig("host=127.0.0.1 port=1", server.url, table).bridge.start()
    with pytest.raises(InvalidRequest, match="does not exist"):
        Rig(dsn, server.url, Table("public", "nothing")).bridge.start()
    with pytest.raises(NatsUnavailable):
        Rig(dsn, "nats://127.0.0.1:1", table).bridge.start()
    for wrong in ({"zstd": "yes"}, {"encoding": "xml"}, {"port": 70_000}, {"metrics_seconds": 0}):
        with pytest.raises(InvalidRequest):
            Rig(dsn, "nats://127.0.0.1:1", table, **wrong)
