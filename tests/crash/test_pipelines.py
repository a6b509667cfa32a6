"""Is every sink of a pipeline equal to its source, whatever was killed in between?

The driver, a Python worker, Postgres and NATS are killed in turn while a table changes. Afterwards everything that
comes of it is compared to the table, row by row, and to each other, change by change.
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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from effort import effort
from patience import PATIENCE_SECONDS, TEST_SECONDS

pytest.importorskip("pyspark")
pytest.importorskip("nats")

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig

import headwater
from headwater.cli import exit_codes
from headwater.database import schema
from headwater.embedded import Postgres
from headwater.embedded.nats import Nats
from headwater.nats import codec, streams

ROUNDS = effort(1)
VICTIMS = ("driver", "worker", "postgres", "nats")
# The value of the last change: only after it can anything be equal to the table.
LAST = "the last of all"

PIPELINES = """
nats: {nats}
checkpoints: checkpoints
pipelines:
  to-nats:
    from: {{changes: {{tables: [public.items]}}}}
    to: {{nats: {{shape: packed}}}}
  to-topic:
    from: {{changes: {{tables: [public.items]}}}}
    to: {{topic: {{name: changes}}}}
  to-lake:
    from: {{changes: {{tables: [public.items], snapshot: true}}}}
    to: {{lake: {{path: lake/items, keep: current}}}}
  history:
    from: {{log: {{topics: [changes]}}}}
    to: {{lake: {{path: lake/log, archive: true}}}}
  totals:
    from: {{log: {{topics: [changes]}}}}
    transform: {{sql: "select data:operation::string as operation, count(*) as changes from events group by 1"}}
    to: {{table: {{name: public.totals, key: [operation]}}}}
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headwater-crash-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def server(directory: Path) -> Iterator[Postgres]:
    server = Postgres(directory / "server")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def broker(directory: Path) -> Iterator[Nats]:
    broker = Nats(directory / "nats")
    broker.start()
    yield broker
    broker.kill()


class Load(threading.Thread):
    """Changes a table at random until told to stop; a server that is down is waited for."""

    def __init__(self, dsn: Callable[[], str], seed: int) -> None:
        super().__init__(daemon=True)
        self._dsn = dsn
        self._random = random.Random(seed)
        self.ended = threading.Event()
        self.transactions = 0

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                with psycopg.connect(self._dsn(), autocommit=True, connect_timeout=5) as connection:
                    while not self.ended.is_set():
                        with connection.transaction():
                            for _ in range(self._random.choice((1, 1, 2, 5, 50))):
                                self._change(connection)
                            if self._random.random() < 0.05:
                                raise psycopg.Rollback
                        self.transactions += 1
                        time.sleep(self._random.choice((0, 0.002, 0.01)))
            except (psycopg.Error, headwater.HeadwaterError):
                time.sleep(0.1)

    def _change(self, connection: psycopg.Connection[Any]) -> None:
        number = self._random.randrange(300)
        match self._random.randrange(8):
            case 0:
                connection.execute("delete from items where id = %s", (number,))
            case 1:
                connection.execute("update items set n = n + 1 where id = %s", (number,))
            case 2:
                connection.execute(
                    "update items set id = id + 1000 where id = %s and not exists "
                    "(select from items where id = %s)", (number, number + 1000),
                )  # fmt: skip
            case _:
                connection.execute(
                    "insert into items values (%s, %s, 1, repeat(%s, 3000)) "
                    "on conflict (id) do update set v = excluded.v, n = items.n + 1",
                    (number, f"\"{number}'", str(number)),
                )


class Replica(threading.Thread):
    """`headwater replica`, started again when it ends, as it does when nobody is there to serve it."""

    def __init__(self, directory: Path, url: str) -> None:
        super().__init__(daemon=True)
        options = ["--from", url, "--table", "public.items", "--to", f"sqlite:///{directory / 'items.db'}"]
        self._command = [sys.executable, "-c", "from headwater.cli import main; main()", "replica", *options]
        self._said = (directory / "replica").open("ab")
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            process = subprocess.Popen(self._command, stderr=self._said)
            while process.poll() is None and not self._ended.wait(0.2):
                pass
            process.kill()
            process.wait(PATIENCE_SECONDS)
            self._ended.wait(1)

    def end(self) -> None:
        self._ended.set()
        if self.is_alive():
            self.join(PATIENCE_SECONDS)


class Driver:
    """`headwater pipeline run` over all of its lives."""

    def __init__(self, directory: Path, dsn: str) -> None:
        self._directory = directory
        self._dsn = dsn
        self._said = (directory / "said").open("ab")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        command = [
            sys.executable,
            "-c",
            "from headwater.cli import main; main()",
            "pipeline",
            "run",
            "--dsn",
            self._dsn,
        ]
        options = ("--lease-seconds", "3", "--json", *options)
        self.process = subprocess.Popen([*command, *options], cwd=self._directory, stdout=self._said, stderr=self._said)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)

    def kill_worker(self, chosen: random.Random) -> None:
        """Kill one of the Python processes that Spark runs tasks in."""
        assert self.process is not None
        workers = [
            pid for pid in descendants(self.process.pid) if command_of(pid).startswith(f"{sys.executable} -m pyspark")
        ]
        if workers:
            kill_quietly(chosen.choice(workers))

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def said(self) -> str:
        return (self._directory / "said").read_text(errors="replace")[-4000:]


def descendants(pid: int) -> list[int]:
    command = ["ps", "-e", "-o", "pid=,ppid="]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS).stdout
    children: dict[int, list[int]] = {}
    for line in listed.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found, open_ones = [], [pid]
    while open_ones:
        for child in children.get(open_ones.pop(), []):
            found.append(child)
            open_ones.append(child)
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def kill_quietly(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def table_rows(dsn: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute("select id, v, n, big from items order by id").fetchall()


def lake_rows(path: Path) -> list[tuple[Any, ...]]:
    table = DeltaTable(path).to_pyarrow_table(columns=["id", "v", "n", "big"])
    return sorted(zip(*(column.to_pylist() for column in table.columns), strict=True))


def replica_rows(path: Path) -> list[tuple[Any, ...]]:
    with sqlite3.connect(path) as connection:
        return connection.execute('select id, v, n, big from "items" order by id').fetchall()


async def published_ids(url: str) -> Counter[str]:
    """The id of every change that is in the stream, in whatever message."""
    found: Counter[str] = Counter()
    async with streams.connect(url) as client:
        js = client.jetstream()
        info = await js.stream_info("CDC")
        reader = await js.pull_subscribe("cdc.>", stream="CDC", config=ConsumerConfig(ack_policy=AckPolicy.NONE))
        left = info.state.messages
        while left:
            for message in await reader.fetch(min(left, 500), timeout=PATIENCE_SECONDS):
                body = codec.decode(message.data)
                found.update(event["msg_id"][:25] for event in (body if isinstance(body, list) else [body]))
                left -= 1
    return found


def topic_events(dsn: str) -> list[headwater.Event]:
    events: list[headwater.Event] = []
    with headwater.connect(dsn) as log:
        while page := log.read("changes", after=events[-1].position if events else 0, batch_size=10_000):
            events += page
    return events


def differences(dsn: str, broker: Nats, directory: Path) -> list[str]:
    """What is not as the table says, by name."""
    wanted = table_rows(dsn)
    events = topic_events(dsn)
    ids = [event.event_id for event in events]
    found = []
    if not events or LAST.encode() not in (events[-1].payload or b""):
        found.append("the topic has not the last change yet")
    if lake_rows(directory / "lake/items/public.items") != wanted:
        found.append("the lake is not the table")
    if not (directory / "items.db").exists() or replica_rows(directory / "items.db") != wanted:
        found.append("the replica is not the table")
    if len(set(ids)) != len(ids) or ids != sorted(str(one) for one in ids):
        found.append("the topic has changes twice or out of order")
    in_stream = asyncio.run(published_ids(broker.url))
    if set(in_stream) != set(ids):
        found.append(f"NATS has {len(in_stream)} changes, the topic {len(ids)}")
    history = DeltaTable(directory / "lake/log").to_pyarrow_table(columns=["position"])["position"].to_pylist()
    if sorted(history) != [event.position for event in events]:
        found.append(
            f"the history has {len(history)} events, {len(set(history))} of them different; the log {len(events)}"
        )
    with psycopg.connect(dsn) as connection:
        totals = dict(connection.execute("select operation, changes from totals").fetchall())
    if totals != Counter(json.loads(event.payload or b"")["operation"] for event in events):
        found.append(f"the totals are {totals}")
    return found


@pytest.mark.long
def test_whatever_is_killed_every_sink_ends_up_equal_to_the_table(
    directory: Path, server: Postgres, broker: Nats
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}, {ROUNDS} rounds")
    chosen = random.Random(seed)
    server.ensure_database("headwater")
    dsn = server.dsn("headwater")
    with psycopg.connect(dsn, autocommit=True) as connection:
        schema.upgrade(connection)
        connection.execute("create table items (id integer primary key, v text, n integer, big text)")
        connection.execute("alter table items alter column big set storage external")
        connection.execute("insert into items select n, 'old', 0, repeat('x', 3000) from generate_series(0, 199) n")
    with headwater.connect(dsn) as log:
        log.create_topic("changes")
    (directory / "pipelines.yaml").write_text(PIPELINES.format(nats=broker.url))

    driver, load = Driver(directory, dsn), Load(lambda: dsn, seed)
    replica = Replica(directory, broker.url)
    try:
        driver.start()
        wait_for(lambda: b"loaded" in (directory / "said").read_bytes(), "the start", driver)
        load.start()
        replica.start()
        for _ in range(ROUNDS):
            for victim in chosen.sample(VICTIMS, len(VICTIMS)):
                time.sleep(chosen.uniform(0.5, 4.0))
                match victim:
                    case "driver":
                        driver.kill()
                        driver.start()
                        time.sleep(6)
                    case "worker":
                        driver.kill_worker(chosen)
                    case "postgres":
                        server.kill()
                        time.sleep(chosen.uniform(0, 1))
                        server.start()
                    case "nats":
                        broker.kill()
                        time.sleep(chosen.uniform(0, 2))
                        broker.start()
        time.sleep(1)
        load.ended.set()
        load.join(PATIENCE_SECONDS)
        assert not load.is_alive()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("insert into items values (-1, %s, 0, '')", (LAST,))
        wait_for(
            lambda: agrees(dsn, broker, directory), "equality", driver, lambda: differences(dsn, broker, directory)
        )
    finally:
        load.ended.set()
        replica.end()
        driver.stop()
    print(f"{load.transactions} transactions, {len(topic_events(dsn))} changes, {len(table_rows(dsn))} rows")
    assert load.transactions > 50 * ROUNDS
    # It stays equal after an orderly end, too.
    assert differences(dsn, broker, directory) == []


def agrees(dsn: str, broker: Nats, directory: Path) -> bool:
    try:
        return not differences(dsn, broker, directory)
    except (psycopg.Error, headwater.HeadwaterError, sqlite3.Error, DeltaError, NatsError, TimeoutError):
        return False  # what is not there yet is not equal yet


def wait_for(true: Callable[[], bool], what: str, driver: Driver, details: Callable[[], Any] = lambda: None) -> None:
    until = time.monotonic() + TEST_SECONDS
    while not true():
        if driver.process is not None and (ended := driver.process.poll()) is not None:
            if ended != exit_codes.UNAVAILABLE:
                pytest.fail(f"the driver ended before {what}: {driver.said()}")
            # Postgres was killed while it started. Whoever looks after it starts it again.
            driver.start()
        assert time.monotonic() < until, f"no {what}: {details()}\n{driver.said()}"
        time.sleep(0.5)
