"""The workers of a trial's queues: handlers that fail now and then, and die of a poisonous event."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psycopg

from headwater import App, ClaimedEvent, Dead, Retry
from headwater.model import Outcome
from headwater.trials.chaos.journal import Deliveries
from headwater.trials.chaos.stage import EXACT, ORDERED, PLAIN, Stage, id_of

INSERT_EFFECT: Final = "insert into headwater_chaos.effect (consumer, event) values (%s, %s)"


def work(stage: Stage, name: str, chance: random.Random) -> None:
    directory = Path(stage.directory)
    # Two processes write to one file; each line is one write.
    noted = {queue: Deliveries(directory, queue, process=name) for queue in (PLAIN, ORDERED)}
    app = App()
    settings: dict[str, Any] = {
        "lease_seconds": stage.lease_seconds,
        "max_attempts": stage.max_attempts,
        "backoff_seconds": 0.05,
        "backoff_max_seconds": 0.5,
    }

    def handle(queue: str, event: ClaimedEvent) -> Outcome:
        die_of(event)
        roll = chance.randrange(500)
        if roll == 0:
            return Dead("a handler gave up on it")
        if roll < 10:
            return Retry(reason="a handler failed")
        noted[queue].note([id_of(event.data)])
        return None

    @app.worker(*stage.topics_of(PLAIN), group=stage.consumer(PLAIN), concurrency=4, prefetch=50, **settings)
    async def plain(event: ClaimedEvent) -> Outcome:
        return handle(PLAIN, event)

    @app.worker(*stage.topics_of(ORDERED), group=stage.consumer(ORDERED), ordered_keys=True, prefetch=20, **settings)
    async def ordered(event: ClaimedEvent) -> Outcome:
        return handle(ORDERED, event)

    @app.worker(
        *stage.topics_of(EXACT), group=stage.consumer(EXACT), batch=True, transactional=True, prefetch=50, **settings
    )
    async def exact(events: Sequence[ClaimedEvent], connection: psycopg.AsyncConnection[Any]) -> Outcome:
        for event in events:
            die_of(event)
        async with connection.cursor() as cursor:
            await cursor.executemany(INSERT_EFFECT, [(EXACT, id_of(event.data)) for event in events])
        if chance.randrange(30) == 0:
            raise RuntimeError("a handler failed after it had written")
        return None

    run_app(app, stage, name)


def run_app(app: App, stage: Stage, name: str) -> None:
    """Run an app until SIGTERM."""

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await app.run(stage.dsn, stop=stop, grace_seconds=5.0, worker_name=name, application_name=stage.name)

    asyncio.run(run())


def die_of(event: ClaimedEvent) -> None:
    if event.type == "Poison":
        os.kill(os.getpid(), signal.SIGKILL)
