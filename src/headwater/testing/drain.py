"""Run the handlers of an App until nothing is left to do, from code without an event loop."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from headwater import client
from headwater.queue.drain import RETRIES, Drained, DrainTimeout, drain_once, queues_of
from headwater.testing.clock import advance_clock

if TYPE_CHECKING:
    from headwater.queue.worker import App

MAX_ROUNDS: Final = 100


def drain(app: App, dsn: str, *, with_retries: bool = False, timeout_seconds: float = 60.0) -> Drained:
    """Run the app's workers and subscribers until no event is ready or in work, also of those that handlers publish.

    Events that wait for a retry are left, unless `with_retries`: then time passes for them (see advance_clock) until
    they are done or dead. In asynchronous code, `await app.drain(dsn)`.
    """
    drained = Drained(0, 0, 0)
    for _ in range(MAX_ROUNDS):
        found = asyncio.run(drain_once(app, dsn, timeout_seconds=timeout_seconds))
        drained = Drained(drained.done + found.done, drained.dead + found.dead, found.retrying)
        if not with_retries or not found.retrying:
            return drained
        with client.connect(dsn, pool_size=1) as log:
            with log.connection() as connection:
                _, last = connection.execute(RETRIES, (queues_of(app),)).fetchone() or (None, None)
            if last is not None and last > 0:
                advance_clock(log, timedelta(seconds=last + 1))
    raise DrainTimeout(f"{drained.retrying} events were still retried after {MAX_ROUNDS} rounds")
