"""The cost of claims while an idle transaction blocks vacuum and dead rows accumulate."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

import headwater
from bench import _measure as measure
from bench import queue
from bench._measure import ClientProcesses, Server
from headwater.log.model import NewEvent
from headwater.queue.model import Lease

# What its page relies on: a number in the last line of every run, also with --quick.
PROMISED = ("claim_cost_end_vs_start", "pgmq_cost_end_vs_start")

TOPIC = "bench"
QUEUE = "bench"
BATCH_SIZE = 100
PER_SECOND = 12_500
REAP_SECONDS = 1.0
WARM_SECONDS = 2.0


@dataclass(frozen=True)
class Window:
    """The cost of claiming and acknowledging one batch, within a time window."""

    batches: int
    events: int
    cpu_us: float | None
    """Server CPU per batch; None if the server is on another machine."""
    wall_us: float
    reap_us: float


# --- the clients ---------------------------------------------------------------------------------------------


def publish(dsn: str, ours: bool, until: float) -> int:
    """Publish batches at a constant rate."""
    total = 0
    if ours:
        log = headwater.connect(dsn, pool_size=1)
        batch = [NewEvent(queue.payload(), content_type="application/octet-stream") for _ in range(BATCH_SIZE)]

        def send() -> None:
            log.publish_batch(TOPIC, batch)
    else:
        cursor = psycopg.connect(dsn, autocommit=True).cursor()

        def send() -> None:
            cursor.execute(queue.VT.fill, (queue.payload(), BATCH_SIZE), prepare=True)

    began = time.monotonic()
    while (now := time.monotonic()) < until:
        time.sleep(max(0.0, began + total / PER_SECOND - now))
        send()
        total += BATCH_SIZE
    return total


def consume(dsn: str, ours: bool, until: float, window_seconds: float) -> list[Window]:
    """Claim batches until the time is over; returns the cost in each window."""
    return _consume_ours(dsn, until, window_seconds) if ours else _consume_vt(dsn, until, window_seconds)


def _consume_ours(dsn: str, until: float, window_seconds: float) -> list[Window]:
    log = headwater.connect(dsn, pool_size=1)
    with log.connection() as connection:
        backend = connection.info.backend_pid
    worker = str(os.getpid())
    lease: Lease | None = None

    def act() -> int:
        nonlocal lease
        if lease is None:
            lease = log.claim(QUEUE, worker=worker, batch_size=BATCH_SIZE)
        else:
            lease = log.settle_and_claim(lease, worker=worker, batch_size=BATCH_SIZE)
        return 0 if lease is None else len(lease.events)

    return _windows(act, lambda: log.reap(QUEUE), backend, until, window_seconds)


def _consume_vt(dsn: str, until: float, window_seconds: float) -> list[Window]:
    connection = psycopg.connect(dsn, autocommit=True)
    cursor = connection.cursor(binary=True)

    def act() -> int:
        rows = cursor.execute(queue.VT.read, (BATCH_SIZE,), prepare=True).fetchall()
        if rows:
            cursor.execute(queue.VT.end, ([row[0] for row in rows],), prepare=True)
        return len(rows)

    return _windows(act, lambda: 0, connection.info.backend_pid, until, window_seconds)


def _windows(
    act: Callable[[], int], reap: Callable[[], int], backend: int, until: float, window_seconds: float
) -> list[Window]:
    found: list[Window] = []
    for _ in range(20):
        act()
    reap_at = time.monotonic() + REAP_SECONDS
    while (now := time.monotonic()) + window_seconds <= until:
        ends = now + window_seconds
        batches = events = 0
        cpu = wall = reaping = 0.0
        known = True
        while (began := time.monotonic()) < ends:
            if began > reap_at:
                reap()
                reap_at = began + REAP_SECONDS
                reaping += time.monotonic() - began
                continue
            before = _cpu_ns(backend)
            handled = act()
            if handled == 0:
                time.sleep(0.001)
                continue
            wall += time.monotonic() - began
            after = _cpu_ns(backend)
            if before is None or after is None:
                known = False
            else:
                cpu += after - before
            batches += 1
            events += handled
        if batches:
            cpu_us = cpu / 1000 / batches if known else None
            found.append(Window(batches, events, cpu_us, wall * 1e6 / batches, reaping * 1e6 / window_seconds))
    return found


def _cpu_ns(pid: int) -> int | None:
    """CPU time of a process on this machine in nanoseconds."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])
    except (OSError, ValueError):
        return None


# --- the run -------------------------------------------------------------------------------------------------


def steady(
    server: Server, clients: ClientProcesses, *, ours: bool, seconds: float, window_seconds: float
) -> list[Window]:
    """Publish and consume concurrently while an idle transaction holds its snapshot."""
    with psycopg.connect(server.dsn) as idle:
        idle.execute("set transaction isolation level repeatable read")
        idle.execute("select count(*) from pg_class").fetchone()
        until = time.monotonic() + WARM_SECONDS + seconds
        publishing = clients.begin(publish, client=0, ours=ours, until=until)
        consuming = clients.begin(consume, client=1, ours=ours, until=until, window_seconds=window_seconds)
        # The clients respond when their time is over.
        time.sleep(max(0.0, until - time.monotonic()))
        windows: list[Window] = consuming()
        publishing()
        idle.rollback()
    return windows


def cost(window: Window) -> float:
    return window.wall_us if window.cpu_us is None else window.cpu_us


def growth(windows: Sequence[Window]) -> float:
    """The cost at the end relative to the start, each the median of a fifth of the windows."""
    fifth = max(1, len(windows) // 5)
    start = statistics.median(cost(window) for window in windows[:fifth])
    return statistics.median(cost(window) for window in windows[-fifth:]) / start


def show(name: str, windows: Sequence[Window], window_seconds: float) -> None:
    every = max(1, len(windows) // 12)
    measure.table(
        f"{name}, a transaction holding xmin: one batch of {BATCH_SIZE}, claimed and acknowledged",
        ("after", "events", "batches", "server CPU us/batch", "us/event", "elapsed us/batch", "reap us/s"),
        [
            (
                f"{(number + 1) * window_seconds:.0f} s",
                measure.number(sum(window.events for window in windows[: number + 1])),
                measure.number(window.batches),
                measure.number(window.cpu_us),
                measure.number(None if window.cpu_us is None else window.cpu_us * window.batches / window.events, 2),
                measure.number(window.wall_us),
                measure.number(window.reap_us),
            )
            for number, window in enumerate(windows)
            if number % every == every - 1
        ],
    )


def main() -> None:
    options = measure.arguments(__doc__ or "")
    seconds, other_seconds, window_seconds = options.sized(
        (5_000_000 / PER_SECOND, 60.0, 5.0), (15.0, 10.0, 1.0), (2.0, 2.0, 0.5)
    )
    with measure.measured_server(options.dsn) as server:
        server.execute(queue.OTHERS)
        with headwater.connect(server.dsn, pool_size=1) as log, ClientProcesses(server.dsn, 2) as clients:
            log.create_topic(TOPIC)
            log.create_queue(QUEUE, topics=TOPIC)
            # Longer than a new process takes to start.
            clients.begin(publish, client=0, ours=True, until=0.0)()
            clients.begin(consume, client=1, ours=True, until=0.0, window_seconds=1.0)()
            measure.say(f"headwater, {seconds:.0f} s")
            windows = steady(server, clients, ours=True, seconds=seconds, window_seconds=window_seconds)
            measure.say(f"pgmq-style, {other_seconds:.0f} s")
            others = steady(server, clients, ours=False, seconds=other_seconds, window_seconds=window_seconds)
        show("headwater", windows, window_seconds)
        show("pgmq-style", others, window_seconds)
        measure.finish(
            server,
            options,
            "held-xmin",
            {
                "claim_cost_end_vs_start": round(growth(windows), 2),
                "pgmq_cost_end_vs_start": round(growth(others), 2),
                "events": sum(window.events for window in windows),
                "pgmq_events": sum(window.events for window in others),
                "claim_us_start": round(cost(windows[0])),
                "claim_us_end": round(cost(windows[-1])),
                "pgmq_us_start": round(cost(others[0])),
                "pgmq_us_end": round(cost(others[-1])),
            },
        )


if __name__ == "__main__":
    main()
