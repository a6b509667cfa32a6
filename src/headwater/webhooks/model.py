"""Values of webhooks. Immutable and without behavior."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple

from headwater.webhooks.settings import WebhookSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook(WebhookSettings):
    """A webhook: sends the events of a queue, or those that its SQL subscriptions match, to a URL. The queue's settings
    control retries and concurrency."""

    id: int
    name: str
    queue: str
    url: str
    state: Literal["active", "paused", "disabled"]
    state_reason: str | None
    created_at: datetime
    updated_at: datetime
    uid: str
    version: int
    # Not in the repr, which ends up in logs.
    secrets: tuple[str, ...] = field(repr=False)


class WebhookRoute(NamedTuple):
    """An active webhook, with the queue settings that its worker needs."""

    webhook: Webhook
    lease_seconds: float
    ordered_keys: bool
    # 'bindings', or 'subscriptions' if its events are those that the queue's SQL subscriptions match.
    kind: str = "bindings"


@dataclass(frozen=True, slots=True)
class WebhookTest:
    """The result of a test delivery: the status and the beginning of the response body, or the error."""

    webhook: str
    accepted: bool
    message_id: str
    status: int | None
    latency_ms: float
    response: str
    error: str | None
