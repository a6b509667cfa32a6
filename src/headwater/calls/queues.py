"""Calls for queues: bindings, leases and dead letters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Unpack

from headwater.calls.call import Call, Rows, Selected, named_arguments, nothing, only_value, setting_columns
from headwater.calls.encoding import checked_text, encode_headers, optional_text
from headwater.calls.reading import EVENT_COLUMNS, topic_names
from headwater.queue.model import (
    Binding,
    ClaimedEvent,
    Dead,
    DeadLetter,
    Delivery,
    Lease,
    Outcome,
    Queue,
    QueueOverview,
    Retry,
    Snooze,
)
from headwater.queue.settings import NewQueueSettings, QueueChanges, QueueSettings
from headwater.setting_definitions import changeable, checked, definitions

if TYPE_CHECKING:
    from headwater.eventstore.query import StoreLease

_QUEUE = Selected(
    Queue,
    {
        "name": "name",
        "start_position": "start_position",
        "paused": "paused_at is not null",
        "created_at": "created_at",
        **setting_columns(QueueSettings),
    },
)
_OVERVIEW = Selected(
    QueueOverview,
    {
        "name": "o.name",
        "kind": "o.kind",
        "state": "o.state",
        "paused": "o.paused",
        "claimed_position": "o.claimed_position",
        "ready": "o.ready",
        "ready_is_more": "o.ready_is_more",
        "lag_events": "o.lag_events",
        "lag_is_more": "o.lag_is_more",
        "lag_seconds": "o.lag_seconds",
        "unfinished_seconds": "o.unfinished_seconds",
        "processing": "o.processing",
        "retrying": "o.retrying",
        "dead": "o.dead",
        "done": "o.done",
        "last_claimed_at": "o.last_claimed_at",
        "last_worker": "o.last_worker",
        "created_at": "g.created_at",
        **setting_columns(QueueSettings, "g."),
    },
)


def create_queue(
    name: str,
    *,
    topics: Sequence[str] | None = None,
    start_position: int | None = None,
    if_missing: bool = False,
    **settings: Unpack[NewQueueSettings],
) -> Call[Queue]:
    arguments, params = named_arguments(
        {
            "queue_name": checked_text(name, "queue name"),
            "topics": topic_names(topics),
            "start_position": start_position,
            "if_missing": if_missing,
            **checked(definitions(QueueSettings), settings),
        }
    )
    return Call(f"select {_QUEUE.sql} from headwater.create_queue({arguments})", params, _QUEUE.first)


def alter_queue(name: str, **changes: Unpack[QueueChanges]) -> Call[Queue]:
    """Change settings; None leaves a setting unchanged, 0 removes a limit."""
    arguments, params = named_arguments(
        {"queue_name": checked_text(name, "queue name"), **checked(changeable(QueueSettings), changes)}
    )
    return Call(f"select {_QUEUE.sql} from headwater.alter_queue({arguments})", params, _QUEUE.first)


def find_queue(name: str) -> Call[Queue]:
    return Call(
        f"select {_QUEUE.sql} from headwater_internal.find_queue(%s)",
        (checked_text(name, "queue name"),),
        _QUEUE.first,
    )


def queues(names: Sequence[str] | None = None) -> Call[list[QueueOverview]]:
    """All queues, or those of these names that exist, ordered by name."""
    return Call(
        f"select {_OVERVIEW.sql} "
        "from headwater_internal.queue_overviews(%s::text[]) o join headwater_internal.queue g on g.name = o.name "
        "order by o.name",
        (None if names is None else list(names),),
        _OVERVIEW.all,
    )


def pause_queue(name: str) -> Call[None]:
    return Call("select headwater.pause_queue(%s)", (checked_text(name, "queue name"),), nothing)


def resume_queue(name: str) -> Call[None]:
    return Call("select headwater.resume_queue(%s)", (checked_text(name, "queue name"),), nothing)


def delete_queue(name: str) -> Call[bool]:
    return Call("select headwater.delete_queue(%s)", (checked_text(name, "queue name"),), only_value)


def rewind_queue(name: str, position: int) -> Call[None]:
    return Call("select headwater.rewind_queue(%s, %s)", (checked_text(name, "queue name"), position), nothing)


def bind(
    queue: str,
    *,
    topic: str | None = None,
    pattern: str | None = None,
    headers: Mapping[str, Any] | None = None,
    type: str | None = None,
    from_position: int | None = None,
) -> Call[Binding]:
    return Call(
        "select b.id, %s, t.name, b.type, b.pattern, b.headers, b.from_position, b.to_position "
        "from headwater.bind(%s, %s, %s, %s::jsonb, %s, %s) b left join headwater_internal.topic t on t.id = "
        "b.topic_id",
        (
            queue,
            checked_text(queue, "queue name"),
            optional_text(topic, "topic name"),
            optional_text(pattern, "pattern"),
            encode_headers(headers),
            optional_text(type, "type"),
            from_position,
        ),
        lambda rows: Binding(*rows[0]),
    )


def unbind(queue: str, binding_id: int, *, to_position: int | None = None) -> Call[int]:
    """End a binding; returns the last position that it still applies to."""
    return Call(
        "select headwater.unbind(%s, %s, %s)", (checked_text(queue, "queue name"), binding_id, to_position), only_value
    )


def bindings(queue: str) -> Call[list[Binding]]:
    return Call(
        "select b.id, g.name, t.name, b.type, b.pattern, b.headers, b.from_position, b.to_position "
        "from headwater_internal.find_queue(%s) g join headwater_internal.binding b on b.queue_id = g.id "
        "left join headwater_internal.topic t on t.id = b.topic_id order by b.id",
        (checked_text(queue, "queue name"),),
        lambda rows: [Binding(*row) for row in rows],
    )


_CLAIMED = "token, attempt, isolated, expires_at, " + EVENT_COLUMNS


def _lease(queue: str) -> Callable[[Rows], Lease | None]:
    def decode(rows: Rows) -> Lease | None:
        if not rows:
            return None
        events = tuple(map(ClaimedEvent._make, rows))
        return Lease(queue, events[0].token, events[0].expires_at, events)

    return decode


def claim(
    queue: str, *, worker: str, batch_size: int, lease_seconds: float | None = None, relaxed: bool = False
) -> Call[Lease | None]:
    """Claim up to `batch_size` events; None if none is ready. `relaxed` is only allowed outside a transaction."""
    return Call(
        f"select {_CLAIMED} from headwater.claim(%s, %s, %s, %s, %s)",
        (checked_text(queue, "queue name"), checked_text(worker, "worker name"), batch_size, lease_seconds, relaxed),
        _lease(queue),
    )


Outcomes = Mapping[int, Outcome]
"""Outcomes of the events of a lease, by position."""


def _outcome_arrays(outcomes: Outcomes) -> tuple[Any, ...]:
    """Outcomes as four arrays; all null if there are none."""
    if not outcomes:
        return None, None, None, None
    ends = [_outcome_parts(outcome) for outcome in outcomes.values()]
    kinds = [kind for kind, _, _ in ends]
    errors = [None if error is None else error.replace("\x00", "\ufffd")[:10000] for _, error, _ in ends]
    delays = [None if after is None else after.total_seconds() for _, _, after in ends]
    return list(outcomes), kinds, errors, delays


def _outcome_parts(outcome: Outcome) -> tuple[str, str | None, timedelta | None]:
    match outcome:
        case None:
            return "done", None, None
        case Retry():
            return "retry", outcome.reason, outcome.after
        case Dead():
            return "dead", outcome.reason, None
        case Snooze():
            return "release", None, outcome.after


def settle(lease: Lease | StoreLease, outcomes: Outcomes, *, rest_done: bool, relaxed: bool = False) -> Call[None]:
    """Settle events of a lease. `rest_done`: the other events are done, and the lease ends."""
    return Call(
        "select headwater.settle(%s, %s, %s::bigint[], %s::text[], %s::text[], %s::float8[], %s, %s)",
        (lease.queue, lease.token, *_outcome_arrays(outcomes), rest_done, relaxed),
        nothing,
    )


def settle_and_claim(
    lease: Lease,
    outcomes: Outcomes,
    *,
    worker: str,
    batch_size: int,
    lease_seconds: float | None = None,
    relaxed: bool = True,
) -> Call[Lease | None]:
    """End a lease and claim the next batch in one round trip. Events without an outcome are done."""
    return Call(
        f"select {_CLAIMED} from headwater.settle_and_claim"
        "(%s, %s, %s, %s, %s, %s::bigint[], %s::text[], %s::text[], %s::float8[], %s)",
        (lease.queue, worker, batch_size, lease_seconds, lease.token, *_outcome_arrays(outcomes), relaxed),
        _lease(lease.queue),
    )


def extend_lease(lease: Lease, *, lease_seconds: float | None = None) -> Call[datetime]:
    """Extend a lease; returns its new expiry."""
    return Call("select headwater.extend_lease(%s, %s, %s)", (lease.queue, lease.token, lease_seconds), only_value)


def queues_to_reap(names: Sequence[str]) -> Call[list[str]]:
    """Those of these queues for which `reap` may have work."""
    return Call(
        "select name from headwater_internal.queues_to_reap(%s::text[]) as name",
        (list(names),),
        lambda rows: [name for (name,) in rows],
    )


def reap(queue: str) -> Call[int]:
    """Return the events of expired leases to the queue; returns their number."""
    return Call("select headwater.reap(%s)", (queue,), only_value)


def deliveries(queue: str, *, status: str | None = None, after: int = 0, batch_size: int = 100) -> Call[list[Delivery]]:
    return Call(
        "select queue_name, position, topic, status, attempts, run_at, leased_until, worker, last_error "
        "from headwater.delivery where queue_name = %s and position > %s and (%s::text is null or status = %s) "
        "order by position limit %s",
        (queue, after, status, status, batch_size),
        lambda rows: [Delivery(*row) for row in rows],
    )


def dead_letters(
    queue: str,
    *,
    positions: Sequence[int] | None = None,
    topic: str | None = None,
    error_like: str | None = None,
    handler: str | None = None,
    subscription_id: int | None = None,
    after: int = 0,
    batch_size: int = 100,
) -> Call[list[DeadLetter]]:
    """Dead letters in the order of their events. Those of one event are not split, so there may be more than
    `batch_size`; the next page starts after the last position."""
    return Call(
        "select position, topic_name, key, type, attempts, last_error, history, died_at, subscription, handler_name "
        "from headwater.dead_letters(%s, %s::bigint[], %s, %s, %s, %s, %s, %s)",
        (*_letters(queue, positions, topic, error_like), after, batch_size, handler, subscription_id),
        lambda rows: [DeadLetter(*row[:6], tuple(row[6]), *row[7:]) for row in rows],  # type: ignore[call-arg]
    )


def _letters(
    queue: str, positions: Sequence[int] | None, topic: str | None, error_like: str | None
) -> tuple[object, ...]:
    return queue, None if positions is None else list(positions), topic, error_like


def redrive(
    queue: str,
    *,
    positions: Sequence[int] | None = None,
    topic: str | None = None,
    error_like: str | None = None,
    handler: str | None = None,
    subscription_id: int | None = None,
) -> Call[int]:
    """Retry dead letters with a new set of attempts; returns their number."""
    return Call(
        "select headwater.redrive(%s, %s::bigint[], %s, %s, handler => %s, subscription_id => %s)",
        (*_letters(queue, positions, topic, error_like), handler, subscription_id),
        only_value,
    )


def discard(
    queue: str,
    *,
    positions: Sequence[int] | None = None,
    topic: str | None = None,
    error_like: str | None = None,
    handler: str | None = None,
    subscription_id: int | None = None,
) -> Call[int]:
    """Delete dead letters permanently; returns their number."""
    return Call(
        "select headwater.discard(%s, %s::bigint[], %s, %s, handler => %s, subscription_id => %s)",
        (*_letters(queue, positions, topic, error_like), handler, subscription_id),
        only_value,
    )
