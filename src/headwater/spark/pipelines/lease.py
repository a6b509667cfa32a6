"""Renews the lease of a pipeline while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from headwater.calls import pipeline_runs
from headwater.errors import HeadwaterError, LeaseLost

if TYPE_CHECKING:
    from headwater import Headwater


@contextmanager
def hold_lease(
    log: Headwater,
    pipeline: str,
    token: int,
    lease: timedelta,
    *,
    on_lost: Callable[[], None],
    on_stop: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Renew a lease during the block, then release it. Calls `on_lost` when it is lost, `on_stop` on a stop request."""
    done = threading.Event()
    seconds = lease.total_seconds()

    def renew() -> None:
        kept_until = time.monotonic() + seconds
        while not done.wait(seconds / 3):
            renewed_at = time.monotonic()
            try:
                if log.run(pipeline_runs.renew_pipeline(pipeline, token, lease=lease)):
                    on_stop()
                kept_until = renewed_at + seconds
            except LeaseLost:
                on_lost()
                return
            except HeadwaterError:
                # Without a connection, the lease is valid until it expires; then another runner may take it.
                if time.monotonic() > kept_until:
                    on_lost()
                    return

    thread = threading.Thread(target=renew, name=f"lease of {pipeline}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(seconds)
        # If this fails, the lease expires by itself.
        with suppress(HeadwaterError):
            log.run(pipeline_runs.release_pipeline(pipeline, token))
