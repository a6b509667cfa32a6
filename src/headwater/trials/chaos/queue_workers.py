"""The queue workers of a trial: handlers that sometimes fail, and are killed by a poison event."""

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
from headwater.queue.model import Outcome
from headwater.trials.chaos.config import EXACT, ORDERED, PLAIN, TrialConfig, id_of
from headwater.trials.chaos.journal import DeliveryLog

INSERT_EFFECT: Final = "insert into headwater_chaos.effect (consumer, event) values (%s, %s)"


def work(config: TrialConfig, name: str, rng: random.Random) -> None:
    directory = Path(config.directory)
    # Two processes write to one file; each line is one write.
    deliveries = {queue: DeliveryLog(directory, queue, process=name) for queue in (PLAIN, ORDERED)}
    app = App()
    settings: dict[str, Any] = {
        "lease_seconds": config.lease_seconds,
        "max_attempts": config.max_attempts,
        "backoff_seconds": 0.05,
        "backoff_max_seconds": 0.5,
    }

    def handle(queue: str, event: ClaimedEvent) -> Outcome:
        die_if_poison(event)
        roll = rng.randrange(500)
        if roll == 0:
            return Dead("the handler rejected the event")
        if roll < 10:
            return Retry(reason="the handler failed")
        deliveries[queue].record([id_of(event.data)])
        return None

    @app.worker(*config.topics_of(PLAIN), queue=config.consumer(PLAIN), concurrency=4, prefetch=50, **settings)
    async def plain(event: ClaimedEvent) -> Outcome:
        return handle(PLAIN, event)

    @app.worker(*config.topics_of(ORDERED), queue=config.consumer(ORDERED), ordered_keys=True, prefetch=20, **settings)
    async def ordered(event: ClaimedEvent) -> Outcome:
        return handle(ORDERED, event)

    @app.worker(
        *config.topics_of(EXACT), queue=config.consumer(EXACT), batch=True, transactional=True, prefetch=50, **settings
    )
    async def exact(events: Sequence[ClaimedEvent], connection: psycopg.AsyncConnection[Any]) -> Outcome:
        for event in events:
            die_if_poison(event)
        async with connection.cursor() as cursor:
            await cursor.executemany(INSERT_EFFECT, [(EXACT, id_of(event.data)) for event in events])
        if rng.randrange(30) == 0:
            raise RuntimeError("the handler failed after it wrote its effects")
        return None

    run_app(app, config, name)


def run_app(app: App, config: TrialConfig, name: str) -> None:
    """Run an app until SIGTERM."""

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await app.run(config.dsn, stop=stop, grace_seconds=5.0, worker_name=name, application_name=config.name)

    asyncio.run(run())


def die_if_poison(event: ClaimedEvent) -> None:
    if event.type == "Poison":
        os.kill(os.getpid(), signal.SIGKILL)
