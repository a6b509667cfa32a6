"""Limits of competing consumers of an event store, the same on Postgres and SQLite. No I/O."""

from __future__ import annotations

from typing import Final

from headwater.calls.encoding import checked_text
from headwater.errors import InvalidRequest

MAX_NAME: Final = 200
MAX_LEASE_SECONDS: Final = 86_400.0
# Defaults of a queue that is created by competing in it.
LEASE_SECONDS: Final = 30.0
MAX_ATTEMPTS: Final = 5


def check_competitor(queue: str, worker: str, batch_size: int, lease_seconds: float | None) -> None:
    """Raise InvalidRequest for invalid parameters of a competing consumer."""
    for name, what in ((queue, "queue name"), (worker, "worker name")):
        if not 1 <= len(checked_text(name, what)) <= MAX_NAME:
            raise InvalidRequest(f"invalid {what}: expected 1 to {MAX_NAME} characters")
    if batch_size < 1:
        raise InvalidRequest(f"invalid batch_size {batch_size}: expected at least 1")
    # Written so that NaN is rejected as well.
    if lease_seconds is not None and not 0 < lease_seconds <= MAX_LEASE_SECONDS:
        raise InvalidRequest(f"invalid lease_seconds {lease_seconds:g}: expected more than 0 and at most 86400")
