"""Keeping the lease of a pipeline while it is run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from headwater import calls
from headwater.errors import HeadwaterError, LeaseLost

if TYPE_CHECKING:
    from headwater import Headwater


@contextmanager
def kept_lease(
    log: Headwater,
    pipeline: str,
    token: int,
    lease: timedelta,
    *,
    on_lost: Callable[[], None],
    on_stop: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Renews a lease for the block, then gives it back. Says when it is lost, and when somebody asked to stop."""
    done = threading.Event()
    seconds = lease.total_seconds()

    def renew() -> None:
        kept_until = time.monotonic() + seconds
        while not done.wait(seconds / 3):
            asked = time.monotonic()
            try:
                if log.run(calls.renew_pipeline(pipeline, token, lease=lease)):
                    on_stop()
                kept_until = asked + seconds
            except LeaseLost:
                on_lost()
                return
            except HeadwaterError:
                # No connection: it is ours until its time is over, and then perhaps another's.
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
        # Without a connection for it, the lease runs out by itself.
        with suppress(HeadwaterError):
            log.run(calls.release_pipeline(pipeline, token))
