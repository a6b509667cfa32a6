"""Values of SQL subscriptions. Immutable and without behavior."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from headwater.log.model import Event


@dataclass(frozen=True, slots=True)
class Subscription:
    """A SQL filter with parameters, owned by a queue."""

    id: int
    queue: str
    filter: str
    params: Mapping[str, Any]
    from_position: int
    expires_after: timedelta | None
    last_active_at: datetime
    created_at: datetime
    broken: bool
    last_error: str | None
    stopped_at: datetime | None = None
    stopped_position: int | None = None
    errors: int = 0


class MatchedEvent(NamedTuple):
    """An event and the ids of the subscriptions that it matched. For a retry, `handler` names the only handler that
    receives it."""

    subscription_ids: tuple[int, ...]
    retry_id: int | None
    handler: str | None
    attempt: int
    event: Event


@dataclass(frozen=True, slots=True)
class MatchedBatch:
    """The next matched events of a queue, and the position to read after next."""

    next_position: int
    events: tuple[MatchedEvent, ...]
