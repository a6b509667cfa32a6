"""Is every event done or dead in every queue when workers are killed, and repeated only where a lease was lost?"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

import headwater
from headwater import Dead, Lease, NewEvent, Retry
from headwater.queue.model import Outcome
from patience import PATIENCE_SECONDS

KILLS = 14
WORKERS_A_QUEUE = 2
MAX_ATTEMPTS = 3
LEASE_SECONDS = 1.5


# --- a worker: `python test_workers.py DSN QUEUE NAME FILE` -------------------------------------------------------


class Line(NamedTuple):
    """What a worker notes in a file of its own: claimed, handled (with its outcome), settled or lost."""

    at: int
    what: str
    token: int
    position: int


def work(dsn: str, queue: str, name: str, path: str) -> None:
    """Claim, handle and settle until killed."""
    notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    chance = random.Random(name)

    def note(what: str, token: int, position: int = 0) -> None:
        os.write(notes, f"{time.monotonic_ns()} {what} {token} {position}\n".encode())

    def handle(event: headwater.ClaimedEvent) -> Outcome:
        if event.payload == b'"poison"':
            os.kill(os.getpid(), signal.SIGKILL)
        match chance.randrange(200):
            case 0:
                return Dead("no")
            case n if n < 10:
                return Retry(None, "again")
        return None

    with headwater.connect(dsn) as log:
        lease: Lease | None = None
        while True:
            batch_size = chance.randrange(1, 20)
            if lease is None:
                log.reap(queue)
                lease = log.claim(queue, worker=name, batch_size=batch_size)
                if lease is None:
                    time.sleep(0.01)
                    continue
            note("claimed", lease.token)
            try:
                if queue == "exact":
                    for event in lease.events:
                        outcome = handle(event)
                        with log.transaction() as connection:
                            log.settle(lease, {event.position: outcome}, rest_done=False, connection=connection)
                            if outcome is None:
                                connection.execute("insert into effect values (%s)", (event.position,))
                            note("done" if outcome is None else "failed", lease.token, event.position)
                    note("settled", lease.token)
                    lease = None
                    continue
                outcomes: dict[int, Outcome] = {}
                failed = set()
                for event in lease.events:
                    # A worker does not go on with a key behind an event of it that failed.
                    if event.key in failed:
                        continue
                    note("begun", lease.token, event.position)
                    outcome = handle(event)
                    over = outcome is None or isinstance(outcome, Dead) or event.attempt >= MAX_ATTEMPTS
                    note("done" if outcome is None else "over" if over else "failed", lease.token, event.position)
                    if outcome is not None:
                        outcomes[event.position] = outcome
                    if not over:
                        failed.add(event.key)
                ended = lease.token
                lease = log.settle_and_claim(lease, outcomes, worker=name, batch_size=batch_size)
                note("settled", ended)
            except headwater.LeaseLost:
                assert lease is not None
                note("lost", lease.token)
                lease = None


if __name__ == "__main__":
    work(*sys.argv[1:])


# --- the test ----------------------------------------------------------------------------------------------------


class Crew:
    """Worker processes of the queues, each with its file of notes."""

    def __init__(self, dsn: str, directory: Path) -> None:
        self.dsn, self.directory = dsn, directory
        self.running: dict[str, list[subprocess.Popen[bytes]]] = defaultdict(list)
        self.started = self.killed = 0

    def start(self, queue: str) -> None:
        self.started += 1
        path = self.directory / f"{queue}-{self.started}"
        self.running[queue].append(
            subprocess.Popen([sys.executable, __file__, self.dsn, queue, f"{queue}-{self.started}", str(path)])
        )

    def kill(self, queue: str, which: int) -> None:
        victim = self.running[queue].pop(which)
        victim.send_signal(signal.SIGKILL)
        victim.wait(PATIENCE_SECONDS)
        self.killed += 1

    def replace_the_fallen(self) -> None:
        for queue, processes in self.running.items():
            for process in list(processes):
                if process.poll() is not None:
                    assert process.returncode == -signal.SIGKILL, "a worker failed by itself"
                    processes.remove(process)
                    self.killed += 1
            while len(processes) < WORKERS_A_QUEUE:
                self.start(queue)

    def stop(self) -> None:
        for queue in self.running:
            while self.running[queue]:
                self.kill(queue, 0)

    def notes(self, queue: str) -> list[Line]:
        lines = [
            Line(int(at), what, int(token), int(position))
            for path in self.directory.glob(f"{queue}-*")
            for at, what, token, position in (line.split() for line in path.read_text().splitlines())
        ]
        return sorted(lines)


@pytest.mark.crash
def test_workers_killed_under_load_lose_nothing_and_repeat_only_what_their_leases_held(
    dsn: str,
    log: headwater.Headwater,
    connection: psycopg.Connection,
    tmp_path: Path,
    until: Callable[[Callable[[], bool]], bool],
) -> None:
    chance = random.Random(7)
    topics = [log.create_topic(name).name for name in ("orders", "payments")]
    queues = ("plain", "exact")
    for queue in queues:
        log.create_queue(
            queue,
            topics,
            lease_seconds=LEASE_SECONDS,
            max_attempts=MAX_ATTEMPTS,
            backoff_seconds=0.01,
            ordered_keys=queue == "plain",
        )
    connection.execute("create table effect (position bigint)")
    keys: dict[int, str | None] = {}

    def publish(count: int) -> None:
        for topic in topics:
            new = [NewEvent(n, key=f"k{chance.randrange(60)}") for n in range(count // 2)]
            keys.update(zip(log.publish_batch(topic, new), (event.key for event in new), strict=True))

    def counts(queue: str) -> tuple[int, int]:
        (one,) = (one for one in log.queues() if one.name == queue)
        return one.done, one.dead

    publish(400)
    poison = log.publish(topics[0], "poison")
    keys[poison] = None
    crew = Crew(dsn, tmp_path)
    try:
        for queue in queues:
            for _ in range(WORKERS_A_QUEUE):
                crew.start(queue)
        for _ in range(KILLS):
            queue = chance.choice(queues)
            publish(300)
            before = sum(counts(queue))

            def at_work() -> bool:
                crew.replace_the_fallen()
                return sum(counts(queue)) > before + 20  # noqa: B023

            until(at_work)
            crew.kill(queue, chance.randrange(WORKERS_A_QUEUE))
            crew.replace_the_fallen()

        def left() -> int:
            crew.replace_the_fallen()
            return sum(len(keys) - sum(counts(queue)) for queue in queues)

        # However slow the machine: as long as it goes on, it may take its time.
        while remaining := left():
            until(lambda: left() < remaining)
    finally:
        crew.stop()

    for queue in queues:
        states = {d.position: d.status for d in log.deliveries(queue, batch_size=100_000)}
        assert set(states) == set(keys)
        assert set(states.values()) == {"done", "dead"}
        dead = {letter.position: letter for letter in log.dead_letters(queue, batch_size=100_000)}
        assert dead[poison].attempts == MAX_ATTEMPTS
        assert dead[poison].last_error == "lease expired"

        notes = crew.notes(queue)
        settled = {line.token for line in notes if line.what == "settled"}
        claimed = {line.token for line in notes if line.what == "claimed"}
        lost = {line.token for line in notes if line.what == "lost"}
        # A process has one lease at a time, so what was never settled was lost, or was in hand when it was killed.
        assert len(claimed - settled - lost) <= crew.killed
        done = defaultdict(list)
        for line in notes:
            if line.what == "done":
                done[line.position].append(line.token)
        assert all(position in done for position, state in states.items() if state == "done")
        repeated = {position: tokens for position, tokens in done.items() if len(tokens) > 1}
        for position, tokens in repeated.items():
            assert len(settled & set(tokens)) <= 1, f"{position} was done in two leases that were kept"
        print(
            f"\n{queue}: {Counter(states.values())}, {len(claimed)} leases, {len(claimed - settled)} of them lost, "
            f"{len(repeated)} events repeated, {crew.killed} workers killed"
        )

    effects = connection.execute("select position from effect").fetchall()
    exact = {d.position for d in log.deliveries("exact", status="done", batch_size=100_000)}
    assert len(effects) == len(exact)
    assert {position for (position,) in effects} == exact

    begun: dict[int, int] = {}
    over: dict[int, int] = {}
    for line in crew.notes("plain"):
        if line.what == "begun":
            begun.setdefault(line.position, line.at)
        elif line.what in ("done", "over"):
            over.setdefault(line.position, line.at)
    expired = {letter.position for letter in log.dead_letters("plain", error_like="lease expired", batch_size=100_000)}
    last: dict[str | None, int] = {}
    for position in sorted(set(keys) - expired):
        key = keys[position]
        if key in last:
            assert begun[position] > over[last[key]], f"{position} did not wait for {last[key]}"
        last[key] = position
