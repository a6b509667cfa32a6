"""Is nothing lost, and nothing done twice, when workers are told to stop and started again under load?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

import headwater
from headwater import NewEvent

RESTARTS = 2
STOP_SECONDS = 30

pytestmark = [pytest.mark.crash, pytest.mark.slow]

# What a worker process runs: one group whose effects are its acknowledgements, one with handlers that take a moment.
WORKERS = """
import asyncio, os
import headwater

app = headwater.App()
notes = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@app.worker("load", group="exact", concurrency=2, transactional=True, lease_seconds=600)
async def exact(event, connection):
    await connection.execute("insert into effect values (%s)", (event.position,))

@app.worker("load", group="slow", concurrency=20, lease_seconds=600)
async def slow(event):
    await asyncio.sleep(0.02)
    os.write(notes, b"%d\\n" % event.position)
"""


def test_workers_that_are_told_to_stop_under_load_lose_nothing_and_repeat_nothing(
    dsn: str,
    log: headwater.Headwater,
    connection: psycopg.Connection,
    tmp_path: Path,
    until: Callable[[Callable[[], bool]], bool],
) -> None:
    (tmp_path / "loaded.py").write_text(WORKERS)
    notes = tmp_path / "notes"
    notes.touch()
    connection.execute("create table effect (position bigint)")
    log.create_topic("load")
    for group in ("exact", "slow"):
        log.create_group(group, "load")
    published: list[int] = []
    enough = threading.Event()

    def publish() -> None:
        with headwater.connect(dsn, pool_size=1) as own:
            while not enough.is_set():
                published.extend(p for p in own.publish_batch("load", [NewEvent(n) for n in range(5)]) if p)
                enough.wait(0.05)

    def start() -> subprocess.Popen[bytes]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
        command = [sys.executable, "-c", "from headwater.cli import main; main()", "work", "loaded:app", "--json"]
        started = subprocess.Popen(
            [*command, "--dsn", dsn],
            cwd=tmp_path,
            env={**kept, "NOTES": str(notes)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        # It says that it works when it listens to signals.
        assert started.stdout is not None
        assert b"working" in started.stdout.readline()
        return started

    def done() -> int:
        return len(notes.read_text().splitlines())

    def left() -> int:
        (effects,) = connection.execute("select count(*) from effect").fetchone() or (0,)
        return 2 * len(published) - done() - effects

    publisher = threading.Thread(target=publish)
    publisher.start()
    running = [start(), start()]
    try:
        for turn in range(RESTARTS):
            before = done()
            until(lambda: done() > before + 40)  # noqa: B023
            # One after the other, as a deployment does.
            leaving = running.pop(0)
            leaving.send_signal(signal.SIGTERM if turn % 2 else signal.SIGINT)
            assert leaving.wait(STOP_SECONDS) == 0
            running.append(start())
        enough.set()
        publisher.join(STOP_SECONDS)
        # However slow the machine: as long as it goes on, it may take its time.
        while remaining := left():
            until(lambda: left() < remaining)
        for one in running:
            one.send_signal(signal.SIGTERM)
        assert [one.wait(STOP_SECONDS) for one in running] == [0, 0]
    finally:
        enough.set()
        publisher.join(STOP_SECONDS)
        for one in running:
            one.kill()
            one.wait(STOP_SECONDS)

    once = dict.fromkeys(published, 1)
    assert Counter(position for (position,) in connection.execute("select position from effect")) == once
    # Handlers that ran when the signal came were waited for, and what was not begun was given back at once: with
    # leases of ten minutes, what was merely left behind would still be waiting.
    assert Counter(int(line) for line in notes.read_text().splitlines()) == once
    for one in log.groups():
        assert (one.ready, one.processing, one.retrying, one.dead) == (0, 0, 0, 0)
