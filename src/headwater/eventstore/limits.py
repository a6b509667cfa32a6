"""The limits of those who compete for the events of an event store, the same wherever it lives. No I/O here."""

from __future__ import annotations

from typing import Final

from headwater.calls.encoding import checked_text
from headwater.errors import InvalidRequest

MAX_NAME: Final = 200
MAX_LEASE_SECONDS: Final = 86_400.0
# Those of a group that is made by competing in it.
LEASE_SECONDS: Final = 30.0
MAX_ATTEMPTS: Final = 5


def refuse_bad_competitor(group: str, worker: str, batch_size: int, lease_seconds: float | None) -> None:
    """Raise InvalidRequest for what nobody can compete with."""
    for name, what in ((group, "group name"), (worker, "worker name")):
        if not 1 <= len(checked_text(name, what)) <= MAX_NAME:
            raise InvalidRequest(f"a {what} is 1 to {MAX_NAME} characters")
    if batch_size < 1:
        raise InvalidRequest("a batch is 1 event or more")
    # Asked like this, what is not a number is refused, too.
    if lease_seconds is not None and not 0 < lease_seconds <= MAX_LEASE_SECONDS:
        raise InvalidRequest(f"a lease is more than 0 seconds and up to 1 day, not {lease_seconds:g}")
