"""Is a replica its table, row by row? Real Postgres, real NATS, changes while the snapshot is taken.

What moves data in Headwater are Spark jobs. Here a small bridge without Spark drives the same parts: the slot, the
messages, the publisher. It is for these tests only.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_SECONDS

pytest.importorskip("pyarrow")
pytest.importorskip("nats")

import psycopg
import pyarrow as pa
from nats.aio.msg import Msg

from headwater.capture import json_text
from headwater.capture.connection import connect
from headwater.capture.slot import Slot
from headwater.embedded.nats import Nats
from headwater.nats import codec, messages, streams, subjects
from headwater.nats.errors import ReplicaRefused
from headwater.nats.publisher import JetStreamPublisher
from headwater.nats.replica import Replica, ReplicaProgress
from headwater.nats.replica_store import Diverged, ReplicaState, ReplicaStore
from headwater.nats.subjects import Table

COLUMNS = """
    select attribute.attname, pg_type.typname, not attribute.attnotnull,
           coalesce(attribute.attnum = any (pg_index.indkey::int2[]), false)
    from pg_attribute as attribute
    join pg_type on pg_type.oid = attribute.atttypid
    left join pg_index on pg_index.indrelid = attribute.attrelid and pg_index.indisprimary
    where attribute.attrelid = %s::regclass and attribute.attnum > 0 and not attribute.attisdropped
    order by attribute.attnum
"""


class Bridge:
    """Publishes one table: its changes when told to, its snapshots when asked."""

    def __init__(self, dsn: str, url: str, table: Table, *, encoding: Any = "msgpack", packed: bool = False) -> None:
        self.table = table
        self._dsn = dsn
        self._url = url
        self._encoding = encoding
        self._packed = packed
        self._slot = Slot(dsn, f"s{abs(hash((dsn, table))) % 10**9}_{os.getpid()}", f"p_{table.name}")
        self._slot.prepare([f"{table.schema}.{table.name}"])
        self._publisher = JetStreamPublisher(url)
        self._stop = threading.Event()
        self.between: Callable[[], None] = lambda: None
        self.snapshots = 0
        asyncio.run(self._announce())
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)
        self._publisher.close()
        self._slot.drop()

    def pump(self, *, advance: bool = True, id_end: str = "") -> int:
        """Publish every change that is committed by now, with so much behind its message id; says how many."""
        with connect(self._dsn) as connection:
            # The tests' server writes its log when it finds the time; what was committed must be in it now.
            connection.execute("set synchronous_commit = on")
            connection.execute("select pg_logical_emit_message(true, 'test', 'now')")
        state = self._slot.state()
        packer = messages.Packer(encoding=self._encoding, packed_changes=7)
        count = 0
        for changes in self._slot.read(start=state.confirmed_lsn, end=state.flushed_lsn):
            count += changes.num_rows
            batch = packer.add(changes) if self._packed else messages.change_messages(changes, encoding=self._encoding)
            ids = pa.array([f"{msg_id}{id_end}" for msg_id in batch.column("msg_id").to_pylist()], pa.string())
            self._publisher.send(batch.set_column(1, batch.schema.field("msg_id"), ids))
        self._publisher.send(packer.finish())
        self._publisher.flush()
        if advance:
            self._slot.advance(state.flushed_lsn)
        return count

    def announce(self) -> None:
        asyncio.run(self._announce())

    async def _announce(self) -> None:
        with connect(self._dsn) as connection:
            columns = [
                messages.SchemaColumn(name, kind, is_nullable=nullable, primary_key=key)
                for name, kind, nullable, key in connection.execute(COLUMNS, (self._quoted(),))
            ]
        async with streams.connect(self._url) as client:
            js = client.jetstream()
            await streams.ensure_streams(js)
            document = messages.schema_document(self.table, columns, timestamp=int(time.time()))
            await streams.put_schema(js, self.table, document, encoding=self._encoding)

    def _quoted(self) -> str:
        return f'"{self.table.schema}"."{self.table.name}"'

    async def _serve(self) -> None:
        async with streams.connect(self._url) as client:
            js = client.jetstream()

            async def serve(message: Msg) -> None:
                assert subjects.requested_table(message.subject) == self.table
                await message.respond(b"")
                await self._snapshot(js)

            await client.subscribe(subjects.request_subject(self.table), cb=serve)
            await client.flush()
            self._ready.set()
            await asyncio.to_thread(self._stop.wait)

    async def _snapshot(self, js: Any) -> None:
        self.snapshots += 1
        before = (await js.stream_info("CDC")).state.last_seq
        with connect(self._dsn) as connection:
            lsn = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()[0]  # type: ignore[index]
            connection.execute("begin isolation level repeatable read read only")
            visible = connection.execute("select pg_current_snapshot()::text").fetchone()[0]  # type: ignore[index]
            # In the middle of the snapshot the world goes on.
            self.between()
            columns = connection.execute(COLUMNS, (self._quoted(),)).fetchall()
            listed = ", ".join(f'"{name}"::text' for name, *_ in columns)
            rows = connection.execute(f"select {listed} from {self._quoted()}".encode()).fetchall()
        with connect(self._dsn) as connection:
            after = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()[0]  # type: ignore[index]
        texts = as_json([(name, kind) for name, kind, *_ in columns], rows)
        snapshot = messages.SnapshotInfo(self.table, f"snap-{time.time_ns()}", lsn, visible, before)
        dictionary = codec.train(messages.samples(texts, self._encoding))
        if dictionary is not None:
            await streams.put_dictionary(js, self.table, dictionary)
        with JetStreamPublisher(self._url) as publisher:
            pieces = [texts[start : start + 300] for start in range(0, len(texts), 300)]
            publisher.publish(
                messages.chunk_messages(
                    snapshot, pieces, encoding=self._encoding, compressed=self._packed, dictionary=dictionary
                )
            )
            publisher.publish(
                messages.meta_message(
                    snapshot,
                    after_lsn=after,
                    batch_count=len(pieces),
                    row_count=len(texts),
                    timestamp=int(time.time()),
                    encoding=self._encoding,
                )
            )


def as_json(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Rows of texts as changes have them."""
    rendered = [
        json_text.render(json_text.cells_of(pa.array([row[n] for row in rows], pa.string())), json_text.form_of(kind))
        for n, (_, kind) in enumerate(columns)
    ]
    return list(json_text.objects([name for name, _ in columns], rendered, len(rows)).to_pylist())


@pytest.fixture(scope="module")
def server() -> Iterator[Nats]:
    with tempfile.TemporaryDirectory(prefix="headwater-", ignore_cleanup_errors=True) as directory:
        server = Nats(Path(directory, "nats"))
        server.start()
        yield server
        server.kill()


TABLES = iter(f"orders_{n}" for n in range(1000))


@pytest.fixture
def table(connection: psycopg.Connection) -> Table:
    table = Table("public", next(TABLES))
    connection.execute(
        f"create table {table.name} (id bigint primary key, name text, qty int, price numeric(10,2), ok boolean, "
        "doc jsonb, at timestamptz default now(), ratio float8, tags text[])".encode()
    )
    return table


@pytest.fixture
def bridge(request: pytest.FixtureRequest, dsn: str, server: Nats, table: Table) -> Iterator[Bridge]:
    bridge = Bridge(dsn, server.url, table, **getattr(request, "param", {}))
    yield bridge
    bridge.close()


def insert(connection: psycopg.Connection, table: Table, first: int, count: int) -> None:
    connection.execute(
        f"insert into {table.name} select n, 'name ' || n, n %% 7, n / 3.0, n %% 2 = 0, "
        "jsonb_build_object('n', n, 'list', array[n, 1.5]), now(), n / 7.0, array['a', 'b' || n] "
        f"from generate_series(%s::bigint, %s::bigint) as n".encode(),
        (first, first + count - 1),
    )


def in_table(dsn: str, table: Table) -> list[dict[str, Any]]:
    """The rows of the table itself, as a replica has them."""
    with connect(dsn) as connection:
        cursor = connection.execute(f"select * from {table.name} order by 1".encode())
        names = [column.name for column in cursor.description or ()]
        kinds = [connection.adapters.types.get(column.type_code).name for column in cursor.description or ()]  # type: ignore[union-attr]
        listed = ", ".join(f'"{name}"::text' for name in names)
        rows = connection.execute(f"select {listed} from {table.name} order by {table.name}.id".encode()).fetchall()
    parsed = [json.loads(text) for text in as_json(list(zip(names, kinds, strict=True)), rows)]
    for row in parsed:
        for name, kind in zip(names, kinds, strict=True):
            if kind == "jsonb" and row[name] is not None:
                row[name] = json.dumps(row[name], ensure_ascii=False)
            if isinstance(row[name], bool):
                row[name] = int(row[name])
    return parsed


def sync(server: Nats, path: Path, table: Table, **options: Any) -> tuple[ReplicaProgress, list[dict[str, Any]]]:
    """Run a replica until it has everything; what it did, and its rows."""
    with ReplicaStore(path, table) as store:
        replica = Replica(server.url, store, idle_seconds=0.2, **options)
        progress = asyncio.run(asyncio.wait_for(replica.run(once=True), PATIENCE_SECONDS))
        return progress, store.rows()


@pytest.mark.parametrize(
    "bridge", [{}, {"packed": True}, {"encoding": "json"}, {"encoding": "json", "packed": True}], indirect=True
)
def test_a_replica_is_the_table_also_after_changes_during_its_snapshot(
    dsn: str, connection: psycopg.Connection, server: Nats, bridge: Bridge, table: Table, tmp_path: Path
) -> None:
    chance = random.Random(7)
    insert(connection, table, 1, 1000)
    with psycopg.connect(dsn) as early, psycopg.connect(dsn) as late:
        # Open when the snapshot is taken, committed after it: not in it, though its number is lower.
        insert(early, table, 2000, 5)
        early.execute(f"update {table.name} set name = 'early' where id < 10".encode())

        def meanwhile() -> None:
            late.execute(f"delete from {table.name} where id between 500 and 520".encode())
            early.commit()
            late.commit()
            connection.execute(f"update {table.name} set id = id + 5000 where id between 100 and 110".encode())
            bridge.pump()

        bridge.between = meanwhile
        connection.execute(f"update {table.name} set qty = null where id > 990".encode())
        progress, rows = sync(server, tmp_path / "r.db", table)
        assert rows == in_table(dsn, table)
        assert (progress.snapshots, progress.rows_loaded) == (1, 1000)
        assert progress.changes_skipped >= 1010
        for _ in range(30):
            number = chance.randrange(1, 1000)
            match chance.randrange(4):
                case 0:
                    connection.execute(f"delete from {table.name} where id = %s".encode(), (number,))
                case 1:
                    connection.execute(f"update {table.name} set id = id + 9000 where id = %s".encode(), (number,))
                case 2:
                    connection.execute(
                        f"update {table.name} set name = '\"é', doc = null, ratio = 'NaN' where id = %s".encode(),
                        (number,),
                    )
                case 3:
                    insert(connection, table, chance.randrange(10**6, 10**7), 3)
        bridge.pump()
        progress, rows = sync(server, tmp_path / "r.db", table)
    assert rows == in_table(dsn, table)
    assert progress.snapshots == 0
    assert bridge.snapshots == 1


def test_a_replica_of_a_stream_without_any_change_is_in_sync(
    dsn: str, connection: psycopg.Connection, table: Table, tmp_path: Path
) -> None:
    insert(connection, table, 1, 10)
    # A server of its own: on one that other tests used, the stream is not empty.
    with Nats(tmp_path / "nats") as server:
        bridge = Bridge(dsn, server.url, table)
        try:
            with ReplicaStore(tmp_path / "r.db", table) as store:
                replica = Replica(server.url, store, idle_seconds=0.2)
                progress = asyncio.run(asyncio.wait_for(replica.run(once=True), PATIENCE_SECONDS))
                assert store.rows() == in_table(dsn, table)
        finally:
            bridge.close()
    assert (progress.caught_up, progress.stream_sequence) == (True, 0)


def test_a_truncated_table_is_truncated_in_the_replica(
    dsn: str, connection: psycopg.Connection, server: Nats, bridge: Bridge, table: Table, tmp_path: Path
) -> None:
    insert(connection, table, 1, 10)
    bridge.pump()
    sync(server, tmp_path / "r.db", table)
    connection.execute(f"truncate {table.name}".encode())
    insert(connection, table, 5, 2)
    bridge.pump()
    _, rows = sync(server, tmp_path / "r.db", table)
    assert [row["id"] for row in rows] == [5, 6] == [row["id"] for row in in_table(dsn, table)]


def test_changes_that_come_twice_are_applied_once(
    dsn: str, connection: psycopg.Connection, server: Nats, bridge: Bridge, table: Table, tmp_path: Path
) -> None:
    insert(connection, table, 1, 10)
    sync(server, tmp_path / "r.db", table)
    # Not to be repeated: a second insert finds the row there.
    insert(connection, table, 11, 1)
    bridge.pump(advance=False)
    # As after the time in which the stream knows its message ids: what comes again is stored again.
    bridge.pump(advance=False, id_end="-again")
    progress, rows = sync(server, tmp_path / "r.db", table)
    assert rows == in_table(dsn, table)
    assert progress.snapshots == 0
    assert progress.changes_applied == 1


def test_a_stream_that_lost_changes_leads_to_a_new_snapshot(
    dsn: str, connection: psycopg.Connection, server: Nats, bridge: Bridge, table: Table, tmp_path: Path
) -> None:
    insert(connection, table, 1, 10)
    sync(server, tmp_path / "r.db", table)
    insert(connection, table, 11, 10)
    bridge.pump()

    async def lose() -> None:
        async with streams.connect(server.url) as client:
            await client.jetstream().purge_stream("CDC")

    asyncio.run(lose())
    insert(connection, table, 21, 10)
    bridge.pump()
    progress, rows = sync(server, tmp_path / "r.db", table)
    assert rows == in_table(dsn, table)
    assert progress.snapshots == 1
    assert bridge.snapshots == 2


def test_a_replica_that_was_tampered_with_is_built_anew(
    dsn: str, connection: psycopg.Connection, server: Nats, bridge: Bridge, table: Table, tmp_path: Path
) -> None:
    insert(connection, table, 1, 10)
    sync(server, tmp_path / "r.db", table)
    with sqlite3.connect(tmp_path / "r.db") as tampered:
        tampered.execute(f"delete from {table.name} where id = 4")
    connection.execute(f"update {table.name} set qty = 5 where id = 4".encode())
    bridge.pump()
    progress, rows = sync(server, tmp_path / "r.db", table)
    assert rows == in_table(dsn, table)
    assert progress.snapshots == 1


def test_a_new_column_comes_with_the_first_change_that_has_it(
    dsn: str, connection: psycopg.Connection, server: Nats, bridge: Bridge, table: Table, tmp_path: Path
) -> None:
    insert(connection, table, 1, 3)
    sync(server, tmp_path / "r.db", table)
    connection.execute(f"alter table {table.name} add column extra int".encode())
    bridge.announce()
    connection.execute(f"update {table.name} set extra = 42 where id = 2".encode())
    bridge.pump()
    progress, rows = sync(server, tmp_path / "r.db", table)
    assert [row["extra"] for row in rows] == [None, 42, None]
    assert progress.snapshots == 0


def test_two_replicas_share_one_snapshot(
    dsn: str, connection: psycopg.Connection, server: Nats, bridge: Bridge, table: Table, tmp_path: Path
) -> None:
    insert(connection, table, 1, 10)
    sync(server, tmp_path / "a.db", table)
    insert(connection, table, 11, 10)
    bridge.pump()
    _, rows = sync(server, tmp_path / "b.db", table)
    assert rows == in_table(dsn, table)
    assert bridge.snapshots == 1


@pytest.mark.crash
def test_a_replica_that_is_killed_goes_on_where_its_rows_are(
    dsn: str,
    connection: psycopg.Connection,
    server: Nats,
    bridge: Bridge,
    table: Table,
    tmp_path: Path,
    until: Callable[[Callable[[], Any]], Any],
) -> None:
    insert(connection, table, 1, 500)
    path = tmp_path / "r.db"
    command = [
        *(sys.executable, "-c", "from headwater.cli import main; main()", "replica", "--from", server.url),
        *("--table", f"public.{table.name}", "--to", f"sqlite:///{path}"),
    ]

    def rows_of() -> int:
        try:
            with sqlite3.connect(path) as replica:
                return int(replica.execute(f"select count(*) from {table.name}").fetchone()[0])
        except sqlite3.OperationalError:
            return 0

    stop = threading.Event()

    def keep_changing() -> None:
        first = 1000
        with psycopg.connect(dsn, autocommit=True) as own:
            while not stop.is_set():
                insert(own, table, first, 40)
                own.execute(f"update {table.name} set qty = qty + 1 where id % 10 = 1".encode())
                own.execute(f"delete from {table.name} where id = %s".encode(), (first,))
                bridge.pump()
                first += 40

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(keep_changing)
        try:
            least = 0
            for _ in range(3):
                replica = subprocess.Popen(command, stdout=subprocess.DEVNULL)
                until(lambda least=least: rows_of() > max(least, 499))
                replica.send_signal(signal.SIGKILL)
                replica.wait(PATIENCE_SECONDS)
                least = rows_of()
        finally:
            stop.set()
        changing.result(PATIENCE_SECONDS)
    progress, rows = sync(server, path, table)
    assert rows == in_table(dsn, table)
    assert progress.snapshots == 0
    assert bridge.snapshots == 1


@pytest.mark.crash
def test_a_replica_survives_the_death_of_the_nats_server(
    dsn: str,
    connection: psycopg.Connection,
    server: Nats,
    bridge: Bridge,
    table: Table,
    tmp_path: Path,
    until: Callable[[Callable[[], Any]], Any],
) -> None:
    insert(connection, table, 1, 50)

    async def keep(store: ReplicaStore, stop: threading.Event) -> ReplicaProgress:
        replica = Replica(server.url, store, idle_seconds=0.1)
        done = asyncio.Event()
        task = asyncio.create_task(replica.run(stop=done))
        while not stop.is_set() and not task.done():
            await asyncio.sleep(0.01)
            seen.append(replica.progress)
        done.set()
        return await task

    seen: list[ReplicaProgress] = []
    stop = threading.Event()

    def run() -> ReplicaProgress:
        with ReplicaStore(tmp_path / "r.db", table) as store:
            return asyncio.run(keep(store, stop))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            until(lambda: running.done() or (seen and seen[-1].caught_up))
            server.kill()
            server.start()
            insert(connection, table, 51, 50)
            bridge.pump()
            until(lambda: running.done() or seen[-1].changes_applied >= 50)
        finally:
            stop.set()
        assert running.result(PATIENCE_SECONDS).snapshots == 1
    with ReplicaStore(tmp_path / "r.db", table) as store:
        assert store.rows() == in_table(dsn, table)


# --- refusals ------------------------------------------------------------------------------------------------


def test_what_nobody_publishes_is_refused(server: Nats, tmp_path: Path, bridge: Bridge) -> None:
    with pytest.raises(ReplicaRefused, match="is not in the bucket schemas"):
        sync(server, tmp_path / "r.db", Table("public", "nothing"))


def test_a_snapshot_that_nobody_serves_is_refused(server: Nats, tmp_path: Path, bridge: Bridge, table: Table) -> None:
    bridge.close()
    with pytest.raises(ReplicaRefused, match="no bridge serves"):
        sync(server, tmp_path / "r.db", table)


def test_the_command_ends_with_a_code_that_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from headwater.cli import main; main()", "replica", "--table", "public.o"]
    away = ["--from", "nats://127.0.0.1:1", "--to", f"sqlite:///{tmp_path}/r.db"]
    result = subprocess.run([*command, *away], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert result.returncode == 9, result.stderr
    assert "cannot connect to NATS" in result.stderr
    wrong = ["--from", "nats://127.0.0.1:1", "--to", "orders.db"]
    result = subprocess.run([*command, *wrong], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert result.returncode == 2
    assert "sqlite:///path" in result.stderr


def test_a_table_that_is_no_replica_is_left_alone(server: Nats, tmp_path: Path, bridge: Bridge, table: Table) -> None:
    with sqlite3.connect(tmp_path / "r.db") as mine:
        mine.execute(f"create table {table.name} (id int)")
    with pytest.raises(ReplicaRefused, match="not a replica"):
        sync(server, tmp_path / "r.db", table)


def test_a_change_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    table = Table("sales", "o")
    columns = messages.schema_document(table, [messages.SchemaColumn("id", "int4", primary_key=True)], timestamp=0)[
        "columns"
    ]
    with ReplicaStore(tmp_path / "r.db", table) as store:
        with store.transaction():
            store.rebuild(columns)
            store.load([{"id": 1}])
            store.save(ReplicaState("snap-1", "1:1:", 0, "", 0, -1, -1))
        for event in (
            {"operation": "INSERT", "data": {"id": 1}},
            {"operation": "DELETE", "data": {"id": 2}},
            {"operation": "UPDATE", "data": {"id": 2}},
        ):
            with pytest.raises(Diverged), store.transaction():
                store.load([{"id": 9}])
                store.apply(event)
            assert store.rows() == [{"id": 1}]
