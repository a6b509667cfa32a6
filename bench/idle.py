"""What an idle process costs, and how long an event takes to its handler.

Transactions per second with 1, 10 and 100 idle queues and as many followers, also after a minute without events.
The process under test runs an App with the queues, and followers with cursors on the same handle. Transactions
are those of the database (`xact_commit`), less those of the measurement. For the latency, one more queue of the same
process gets events at random intervals of 20 to 60 ms, published by another process.

    ./dev bench idle
    PYTHONPATH=/path/to/other/src .venv/bin/python -m bench.idle    measures other code
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import random
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

import headwater
from bench._measure import Server, arguments, finish, measured_server, number, percentile, say, table
from headwater import App, aio

SIZES = (1, 10, 100)
PROMISED = tuple(
    f"{name}_{size}"
    for name in ("transactions_per_s", "publish_to_handler_p50_ms", "publish_to_handler_p99_ms")
    for size in SIZES
)
QUIET, BUSY = "quiet", "busy"
WARM_SECONDS = 5.0
IDLE_SECONDS = 70.0
START_TIMEOUT_SECONDS = 60.0


async def _run(dsn: str, queues: int, followers: int, pipe: Pipe) -> None:
    app, stop = App(), asyncio.Event()
    delays: list[float] = []

    def add(number: int) -> None:
        @app.worker(QUIET, queue=f"q{number}")
        async def nothing(event: headwater.ClaimedEvent) -> None: ...

    for n in range(queues):
        add(n)

    @app.worker(BUSY, queue="busy")
    async def handle(event: headwater.ClaimedEvent) -> None:
        delays.append(time.monotonic() - event.data)

    async def follow(log: aio.AsyncHeadwater, cursor: str) -> None:
        async for _ in log.follow(QUIET, cursor=cursor):
            pass

    async with await aio.connect(dsn) as log:
        # Older code: the app needs a handle of its own.
        running = [asyncio.create_task(app.run(log if hasattr(log, "watcher") else dsn, stop=stop, pool_size=10))]
        running += [asyncio.create_task(follow(log, f"c{n}")) for n in range(followers)]
        while len(await log.queues()) < queues + 1 or len(await log.cursors()) < followers:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        pipe.send("started")
        while (await asyncio.to_thread(pipe.recv)) != "stop":
            pipe.send(delays.copy())
            delays.clear()
        stop.set()
        await running[0]
        for task in running[1:]:
            task.cancel()
        await asyncio.gather(*running[1:], return_exceptions=True)


def _process(dsn: str, queues: int, followers: int, pipe: Pipe) -> None:
    logging.disable(logging.WARNING)
    asyncio.run(_run(dsn, queues, followers, pipe))
    pipe.send("stopped")


class IdleProcess:
    """The process under test."""

    def __init__(self, server: Server, queues: int, followers: int) -> None:
        self._pipe, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._child = context.Process(target=_process, args=(server.dsn, queues, followers, other), daemon=True)
        self._child.start()
        self._answer()

    def delays(self) -> list[float]:
        """The delays of the events handled since the last call."""
        self._pipe.send("delays")
        found: list[float] = self._answer()
        return found

    def stop(self) -> None:
        self._pipe.send("stop")
        self._answer()
        self._child.join(START_TIMEOUT_SECONDS)

    def _answer(self) -> Any:
        if not self._pipe.poll(START_TIMEOUT_SECONDS):
            raise TimeoutError("the process under test does not answer")
        return self._pipe.recv()


def transactions_per_second(server: Server, seconds: float) -> float:
    def committed() -> int:
        # One transaction each, and one before: sessions report what they did after up to a second.
        return int(server.execute("select xact_commit from pg_stat_database where datname = current_database()")[0][0])

    before, started = committed(), time.monotonic()
    time.sleep(seconds)
    return (committed() - before - 1) / (time.monotonic() - started)


def latencies(server: Server, process: IdleProcess, count: int) -> list[float]:
    dice = random.Random(1)
    with headwater.connect(server.dsn, pool_size=1) as log:
        log.publish(BUSY, time.monotonic())
        time.sleep(0.5)
        process.delays()
        for _ in range(count):
            time.sleep(dice.uniform(0.02, 0.06))
            log.publish(BUSY, time.monotonic())
    time.sleep(0.5)
    return [delay * 1000 for delay in process.delays()]


def main() -> None:
    given = arguments(__doc__ or "")
    result: dict[str, Any] = {}
    rows: list[list[str] | None] = []
    loads = [os.getloadavg()[0]]
    with measured_server(given.dsn) as server:
        with headwater.connect(server.dsn, pool_size=1) as log:
            log.create_topic(QUIET)
            log.create_topic(BUSY)
        sizes = [size for size in SIZES if not given.only or str(size) in given.only]
        for size in sizes:
            process = IdleProcess(server, size, size)
            say(f"{size} idle queues and followers")
            time.sleep(given.sized(WARM_SECONDS, WARM_SECONDS, 0.5))
            rate = transactions_per_second(server, given.sized(10.0, 3.0, 1.0))
            later = None
            if given.size == "full":
                time.sleep(IDLE_SECONDS)
                later = transactions_per_second(server, 10.0)
            waits = latencies(server, process, given.sized(500, 40, 3))
            process.stop()
            p50, p99 = percentile(waits, 50), percentile(waits, 99)
            rows.append([f"{size} queues and followers", number(rate), number(later), number(p50, 1), number(p99, 1)])
            result |= {
                f"transactions_per_s_{size}": round(rate, 1),
                f"transactions_per_s_{size}_after_a_minute": None if later is None else round(later, 1),
                f"publish_to_handler_p50_ms_{size}": round(p50, 2),
                f"publish_to_handler_p99_ms_{size}": round(p99, 2),
            }
            loads.append(os.getloadavg()[0])
        table("An idle process", ("", "transactions/s", "after a minute", "p50 ms", "p99 ms"), rows)
        finish(server, given, "idle", {**result, "load": round(max(loads), 1)})


if __name__ == "__main__":
    main()
