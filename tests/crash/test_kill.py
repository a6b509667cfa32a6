"""Is anything ever lost? Server and clients are killed at random under load; the log is the witness."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

import headwater
from effort import effort
from headwater.database import schema
from headwater.embedded import Postgres
from patience import PATIENCE_SECONDS

ROUNDS = effort(3, least=3)
BATCH_SIZE = 25
PUBLISHERS = ("open:single", "open:id", "open:batch", "open:copy", "sequenced:batch", "sequenced:id")
FOLLOWERS = ("open", "sequenced")


@dataclass
class Client:
    """One client over all of its lives."""

    role: str
    name: str
    journal: Path
    lives: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def notes(self) -> list[tuple[str, Any]]:
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [(kind, json.loads(value)) for kind, _, value in (line.partition(" ") for line in lines)]

    def noted(self) -> int:
        return self.journal.stat().st_size if self.journal.exists() else 0

    def start(self, dsn: str, stop: Path) -> None:
        self.lives += 1
        tried = [n for kind, chunk in self.notes() if kind == "trying" for n in chunk]
        first = max(tried, default=-1) + 1
        program = Path(__file__).with_name("clients.py")
        command = [sys.executable, program, self.role, self.name, dsn, self.journal, str(first), stop]
        with self.journal.with_suffix(".stderr").open("ab") as complaints:
            environment = {**os.environ, "PYTHONPATH": str(program.parents[1])}
            self.process = subprocess.Popen(command, stderr=complaints, env=environment)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="headwater-crash-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def server(directory: Path) -> Iterator[Postgres]:
    """A server of our own, as durable as the defaults make it."""
    server = Postgres(directory / "server")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def clients(directory: Path) -> Iterator[list[Client]]:
    clients = [Client("publish", name, directory / f"publish-{name}") for name in PUBLISHERS]
    clients += [Client("follow", name, directory / f"follow-{name}") for name in FOLLOWERS]
    clients.append(Client("process", "open", directory / "process-open"))
    yield clients
    for client in clients:
        if client.process is not None:
            client.kill()


def wait_for(signal: Callable[[], Any], what: str, clients: list[Client]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not signal():
        assert time.monotonic() < deadline, f"{what} did not happen within {PATIENCE_SECONDS} seconds"
        for client in clients:
            complaints = client.journal.with_suffix(".stderr")
            assert client.process is None or client.process.poll() in (None, 0), (
                f"{client} failed by itself:\n{complaints.read_text()[-3000:]}"
            )
        time.sleep(0.002)


def see_progress(clients: list[Client], written: int) -> None:
    """Every client is at work, and together they have noted so many bytes."""
    before = {id(client): client.noted() for client in clients}
    wait_for(lambda: all(client.noted() > before[id(client)] + 100 for client in clients), "everybody's work", clients)
    wait_for(lambda: sum(client.noted() - before[id(client)] for client in clients) >= written, "progress", clients)


@pytest.mark.crash
def test_nothing_acknowledged_is_lost_when_everything_is_killed_at_random(
    directory: Path, server: Postgres, clients: list[Client]
) -> None:
    rng = random.Random(20261)
    server.ensure_database("headwater")
    dsn = server.dsn("headwater")
    with psycopg.connect(dsn, autocommit=True) as connection:
        schema.upgrade(connection)
        connection.execute("create table effect (place bigserial, position bigint)")
    with headwater.connect(dsn) as log:
        log.create_topic("open")
        log.create_topic("sequenced", kind="sequenced", partitions=3)

    stop = directory / "stop"
    for client in clients:
        client.start(dsn, stop)
    for _ in range(ROUNDS):
        see_progress(clients, rng.randrange(100_000))
        doomed = [client for client in clients if rng.random() < 0.5]
        for act in rng.sample([server.kill, *(client.kill for client in doomed)], len(doomed) + 1):
            act()
        server.start()
        for client in doomed:
            check_cursor(dsn, client)
            client.start(dsn, stop)

    stop.touch()
    publishers = [client for client in clients if client.role == "publish"]
    wait_for(lambda: all(client.process and client.process.poll() == 0 for client in publishers), "the end", clients)
    with headwater.connect(dsn) as log:
        for topic in FOLLOWERS:
            log.publish(topic, "end")
        (end,) = [event.position for event in log.read_backwards("open", batch_size=1)]
    followers = [client for client in clients if client.role == "follow"]
    wait_for(lambda: all(client.process and client.process.poll() == 0 for client in followers), "the end", clients)
    with psycopg.connect(dsn, autocommit=True) as connection:
        wait_for(
            lambda: connection.execute("select 1 from effect where position = %s", (end,)).fetchone(),
            "the last effect",
            clients,
        )
    check_events(dsn, clients)


def check_cursor(dsn: str, client: Client) -> None:
    """A cursor is where its last acknowledged move said, or one batch later: that move's answer was lost."""
    if client.role == "publish":
        return
    batches = [value for kind, value in client.notes() if kind in ("delivered", "handled")]
    with psycopg.connect(dsn) as connection:
        (position,) = connection.execute(
            "select position from headwater_internal.cursor where name = %s", (f"{client.role} {client.name}",)
        ).fetchone() or (0,)
    # A batch may have been noted twice: by a life that ended with it, and by the next.
    last = batches[-1] if batches else [0]
    assert position == last[-1] or position < last[0]
    assert not [p for batch in batches[:-1] for p in batch if position < p < last[0]]


def runs_of(notes: list[tuple[str, Any]]) -> list[list[int]]:
    """The positions that a follower was given, by life and epoch."""
    runs: dict[tuple[int, int], list[int]] = {}
    life = epoch = 0
    for kind, value in notes:
        if kind == "started":
            life += 1
        elif kind == "epoch":
            epoch = value
        elif kind == "delivered":
            runs.setdefault((life, epoch), []).extend(value)
    return list(runs.values())


def check_events(dsn: str, clients: list[Client]) -> None:
    with headwater.connect(dsn) as log:
        stored = {topic: list(log.follow(topic, stop_when_caught_up=True)) for topic in FOLLOWERS}
    with psycopg.connect(dsn) as connection:
        effects = [position for (position,) in connection.execute("select position from effect order by place")]

    acknowledged = lost = duplicates = in_doubt = repeated = 0
    for client in clients:
        notes = client.notes()
        if client.role == "publish":
            topic, style = client.name.split(":")
            found = [
                event.data["n"] for event in stored[topic] if event.data != "end" and event.key_text == client.name
            ]
            acked = {n for kind, chunk in notes if kind == "acknowledged" for n in chunk}
            tried = {n for kind, chunk in notes if kind == "trying" for n in chunk}
            acknowledged += len(acked)
            lost += len(acked - set(found))
            duplicates += sum(count - 1 for count in Counter(found).values())
            in_doubt += len(tried - acked)
            assert set(found) <= tried
            # In the order in which they were published, whatever happened in between.
            assert found == sorted(found)
            size = {"single": 1, "id": 1, "batch": 10, "copy": 20}[style]
            assert all(count == size for count in Counter(n // size for n in found).values()), "half a batch"
        elif client.role == "follow":
            positions = [event.position for event in stored[client.name]]
            runs = runs_of(notes)
            delivered = [p for run in runs for p in run]
            assert sorted(set(delivered)) == positions
            # Each life goes forwards within an epoch. A new life, and a life in a new epoch, continues from the cursor:
            # the batch in hand is repeated if its move was not acknowledged, or rejected because of the new epoch.
            assert all(earlier < later for run in runs for earlier, later in pairwise(run))
            assert len(delivered) - len(positions) <= (len(runs) - 1) * BATCH_SIZE
            repeated += len(delivered) - len(positions)
    assert effects == [event.position for event in stored["open"]]
    partitions: dict[int, list[int | None]] = {}
    for event in stored["sequenced"]:
        partitions.setdefault(event.partition, []).append(event.topic_offset)
    assert all(offsets == list(range(len(offsets))) for offsets in partitions.values())
    print(
        f"\n{ROUNDS} rounds, {sum(client.lives for client in clients)} lives of {len(clients)} clients: "
        f"{acknowledged} events acknowledged, lost={lost}, duplicates={duplicates}; "
        f"{in_doubt} in doubt; {repeated} delivered again; {len(effects)} effects, each once"
    )
    assert (lost, duplicates) == (0, 0)
