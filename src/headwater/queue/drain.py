"""Run the handlers of an App until nothing is left to do, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Final

from headwater import aio
from headwater.errors import HeadwaterError
from headwater.queue.model import QueueOverview

if TYPE_CHECKING:
    from headwater.queue.worker import App

POLL_SECONDS: Final = 0.02
# For handlers that still run when the time is over.
GRACE_SECONDS: Final = 1.0
# When the retries of queues are due, in seconds from now: the first and the last one.
RETRIES: Final = resources.files(__package__).joinpath("retries_due.sql").read_bytes()


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain has done, in all queues of the app together, and what it has left."""

    done: int
    dead: int
    # Events that wait for their next attempt.
    retrying: int


class DrainTimeout(HeadwaterError):
    """The queues were not empty in time."""


async def drain_once(app: App, dsn: str, *, timeout_seconds: float) -> Drained:
    """Run the app until nothing is ready or in work."""
    names = queues_of(app)
    stop = asyncio.Event()
    async with await aio.connect(dsn, pool_size=1) as log:
        before = {queue.name: queue for queue in await log.queues(names)}
        running = asyncio.create_task(app.run(dsn, stop=stop, grace_seconds=GRACE_SECONDS))
        try:
            async with asyncio.timeout(timeout_seconds):
                while not running.done() and not await _is_idle(log, names):
                    await asyncio.wait({running}, timeout=POLL_SECONDS)
        except TimeoutError:
            left = [
                f"{queue.name}: {queue.ready} ready, {queue.processing} in work"
                for queue in await log.queues(names)
                if queue.ready or queue.processing
            ]
            raise DrainTimeout(
                f"not drained within {timeout_seconds:g} seconds ({'; '.join(left) or 'a publisher is still open'})",
                hint="Look for a handler that does not return, or for a transaction that is still open.",
            ) from None
        finally:
            stop.set()
            await running
        after = await log.queues(names)
    return Drained(
        done=sum(queue.done - (before[queue.name].done if queue.name in before else 0) for queue in after),
        dead=sum(queue.dead - (before[queue.name].dead if queue.name in before else 0) for queue in after),
        retrying=sum(queue.retrying for queue in after),
    )


def queues_of(app: App) -> list[str]:
    return sorted({one.queue for one in app.workers} | {one.queue for one in app.subscribers})


async def _is_idle(log: aio.AsyncHeadwater, names: Sequence[str]) -> bool:
    state = await log.state()
    queues = await log.queues(names)
    async with log.connection() as connection:
        cursor = await connection.execute(RETRIES, (list(names),))
        first, _ = await cursor.fetchone() or (None, None)
    return (
        len(queues) == len(names)
        and state.stable >= state.head
        and not any(_has_work(queue) for queue in queues)
        and (first is None or first > 0)
        # Nothing was published in between.
        and (await log.state()).head == state.head
    )


def _has_work(queue: QueueOverview) -> bool:
    return bool(queue.ready or queue.processing) and not queue.paused
