"""Queues of SQL subscriptions: their state, and which commands they do not support."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import headwater
from headwater.cli import output
from headwater.cli.queries import run_query
from headwater.errors import InvalidRequest
from headwater.queue.model import QueueOverview
from headwater.sql_subscriptions.model import Subscription


@dataclass(frozen=True, slots=True)
class SubscriptionQueue:
    """A queue of SQL subscriptions: it has one position, no state for each event."""

    name: str
    position: int
    state: str
    lag_events: int
    lag_is_more: bool
    lag_seconds: float | None
    topics: tuple[str, ...] | None
    reader: str | None
    subscriptions: int
    retrying: int
    given_up: int


def subscription_queues(log: headwater.Headwater, queues: Sequence[QueueOverview]) -> dict[str, SubscriptionQueue]:
    """Return these queues of SQL subscriptions by name."""
    known = {queue.name: queue for queue in queues}
    if not known:
        return {}
    return {
        name: SubscriptionQueue(
            name,
            position,
            known[name].state,
            known[name].lag_events,
            known[name].lag_is_more,
            known[name].lag_seconds,
            None if topics is None else tuple(topics),
            *rest,
        )
        for name, position, topics, *rest in run_query(log, "subscription_queues", list(known))
    }


def subscription_queue(log: headwater.Headwater, name: str) -> SubscriptionQueue | None:
    """Return the queue of that name; None if it has bindings. Raises QueueNotFound if no queue has that name."""
    log.queue(name)
    return subscription_queues(log, [queue for queue in log.queues([name]) if queue.kind == "subscriptions"]).get(name)


def reject_subscription_queue(log: headwater.Headwater, name: str, *, reason: str) -> None:
    """Raise InvalidRequest if the queue reads for SQL subscriptions: it has no bindings, leases or pauses."""
    if subscription_queue(log, name) is not None:
        raise InvalidRequest(
            f'queue "{name}" is a queue of SQL subscriptions: {reason}',
            hint=f"See headwater sub list {name}, or headwater queue describe {name}.",
        )


def print_subscriptions(subscriptions: Sequence[Subscription]) -> None:
    output.print_table(
        ("id", "queue", "filter", "params", "last active", "stopped after", "last error"),
        (
            (s.id, s.queue, s.filter, json.dumps(s.params), s.last_active_at, s.stopped_position, s.last_error)
            for s in subscriptions
        ),
        empty="no subscriptions; create one with headwater sub create",
    )
