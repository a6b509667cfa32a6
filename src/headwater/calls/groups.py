"""Calls about groups: what they are bound to, and the life of events in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import checked_text, encode_headers, optional_text
from headwater.calls.reading import EVENT_COLUMNS, topic_names
from headwater.eventstore.query import StoreLease
from headwater.model import (
    Binding,
    ClaimedEvent,
    Dead,
    DeadLetter,
    Delivery,
    Group,
    GroupOverview,
    Lease,
    Outcome,
    Retry,
    Snooze,
)

_GROUP = (
    "name, start_position, lease_seconds, max_attempts, backoff_seconds, backoff_factor, backoff_max_seconds, "
    "backoff_jitter, ordered_keys, max_in_flight, must_not_lose, paused_at is not null, created_at"
)


def _group(rows: Rows) -> Group:
    return Group(*rows[0])


def create_group(
    name: str,
    *,
    topics: Sequence[str] | None = None,
    start_position: int | None = None,
    lease_seconds: float | None = None,
    max_attempts: int | None = None,
    backoff_seconds: float | None = None,
    backoff_factor: float | None = None,
    backoff_max_seconds: float | None = None,
    backoff_jitter: float | None = None,
    ordered_keys: bool | None = None,
    max_in_flight: int | None = None,
    must_not_lose: bool | None = None,
    if_missing: bool = False,
) -> Call[Group]:
    return Call(
        f"select {_GROUP} from headwater.create_group(%s, %s::text[], %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            checked_text(name, "group name"),
            topic_names(topics),
            start_position,
            lease_seconds,
            max_attempts,
            backoff_seconds,
            backoff_factor,
            backoff_max_seconds,
            backoff_jitter,
            ordered_keys,
            max_in_flight,
            must_not_lose,
            if_missing,
        ),
        _group,
    )


def alter_group(
    name: str,
    *,
    lease_seconds: float | None = None,
    max_attempts: int | None = None,
    backoff_seconds: float | None = None,
    backoff_factor: float | None = None,
    backoff_max_seconds: float | None = None,
    backoff_jitter: float | None = None,
    max_in_flight: int | None = None,
    must_not_lose: bool | None = None,
) -> Call[Group]:
    """Change settings; None leaves one as it is, max_in_flight=0 removes the limit."""
    return Call(
        f"select {_GROUP} from headwater.alter_group(%s, %s, %s, %s, %s, %s, %s, %s, %s)",
        (
            checked_text(name, "group name"),
            lease_seconds,
            max_attempts,
            backoff_seconds,
            backoff_factor,
            backoff_max_seconds,
            backoff_jitter,
            max_in_flight,
            must_not_lose,
        ),
        _group,
    )


def find_group(name: str) -> Call[Group]:
    return Call(f"select {_GROUP} from headwater.find_group(%s)", (checked_text(name, "group name"),), _group)


def groups(names: Sequence[str] | None = None) -> Call[list[GroupOverview]]:
    """Every group, or those of these names that exist, in the order of their names."""
    return Call(
        "select o.name, o.kind, o.state, o.paused, o.frontier, o.ready, o.ready_is_more, o.lag_events, o.lag_is_more, "
        "o.lag_seconds, o.unfinished_seconds, o.processing, o.retrying, o.dead, o.done, o.last_claimed_at, "
        "o.last_worker, g.ordered_keys, g.max_attempts, g.lease_seconds, g.max_in_flight, g.must_not_lose, "
        "g.created_at "
        "from headwater.group_overviews(%s::text[]) o join headwater.consumer_group g on g.name = o.name "
        "order by o.name",
        (None if names is None else list(names),),
        lambda rows: [GroupOverview(*row) for row in rows],
    )


def pause_group(name: str) -> Call[None]:
    return Call("select headwater.pause_group(%s)", (checked_text(name, "group name"),), nothing)


def resume_group(name: str) -> Call[None]:
    return Call("select headwater.resume_group(%s)", (checked_text(name, "group name"),), nothing)


def delete_group(name: str) -> Call[bool]:
    return Call("select headwater.delete_group(%s)", (checked_text(name, "group name"),), only_value)


def rewind_group(name: str, position: int) -> Call[None]:
    return Call("select headwater.rewind_group(%s, %s)", (checked_text(name, "group name"), position), nothing)


def bind(
    group: str,
    *,
    topic: str | None = None,
    pattern: str | None = None,
    headers: Mapping[str, Any] | None = None,
    type: str | None = None,
    from_position: int | None = None,
) -> Call[Binding]:
    return Call(
        "select b.id, %s, t.name, b.type, b.pattern, b.headers, b.from_position, b.to_position "
        "from headwater.bind(%s, %s, %s, %s::jsonb, %s, %s) b left join headwater.topic t on t.id = b.topic_id",
        (
            group,
            checked_text(group, "group name"),
            optional_text(topic, "topic name"),
            optional_text(pattern, "pattern"),
            encode_headers(headers),
            optional_text(type, "type"),
            from_position,
        ),
        lambda rows: Binding(*rows[0]),
    )


def unbind(group: str, binding_id: int, *, to_position: int | None = None) -> Call[int]:
    """End a binding; the answer is the last position that it still takes."""
    return Call(
        "select headwater.unbind(%s, %s, %s)", (checked_text(group, "group name"), binding_id, to_position), only_value
    )


def bindings(group: str) -> Call[list[Binding]]:
    return Call(
        "select b.id, g.name, t.name, b.type, b.pattern, b.headers, b.from_position, b.to_position "
        "from headwater.find_group(%s) g join headwater.binding b on b.group_id = g.id "
        "left join headwater.topic t on t.id = b.topic_id order by b.id",
        (checked_text(group, "group name"),),
        lambda rows: [Binding(*row) for row in rows],
    )


_CLAIMED = "token, attempt, alone, expires_at, " + EVENT_COLUMNS


def _lease(group: str) -> Callable[[Rows], Lease | None]:
    def decode(rows: Rows) -> Lease | None:
        if not rows:
            return None
        events = tuple(map(ClaimedEvent._make, rows))
        return Lease(group, events[0].token, events[0].expires_at, events)

    return decode


def claim(
    group: str, *, worker: str, batch_size: int, lease_seconds: float | None = None, relaxed: bool = False
) -> Call[Lease | None]:
    """A lease on up to `batch_size` events, or None. `relaxed` only where the call is a transaction by itself."""
    return Call(
        f"select {_CLAIMED} from headwater.claim(%s, %s, %s, %s, %s)",
        (checked_text(group, "group name"), checked_text(worker, "worker name"), batch_size, lease_seconds, relaxed),
        _lease(group),
    )


Outcomes = Mapping[int, Outcome]
"""How the events of a lease ended, by position."""


def _verdicts(outcomes: Outcomes) -> tuple[Any, ...]:
    """Outcomes as four arrays; all null where nothing is to be said."""
    if not outcomes:
        return None, None, None, None
    ends = [_verdict(outcome) for outcome in outcomes.values()]
    verdicts = [verdict for verdict, _, _ in ends]
    errors = [None if error is None else error.replace("\x00", "\ufffd")[:10000] for _, error, _ in ends]
    delays = [None if after is None else after.total_seconds() for _, _, after in ends]
    return list(outcomes), verdicts, errors, delays


def _verdict(outcome: Outcome) -> tuple[str, str | None, timedelta | None]:
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
    """Say how events of a lease ended. `rest_done`: those not named are done, and the lease ends."""
    return Call(
        "select headwater.settle(%s, %s, %s::bigint[], %s::text[], %s::text[], %s::float8[], %s, %s)",
        (lease.group, lease.token, *_verdicts(outcomes), rest_done, relaxed),
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
    """End a lease, its events done but for the outcomes named, and claim the next batch in the same trip."""
    return Call(
        f"select {_CLAIMED} from headwater.settle_and_claim"
        "(%s, %s, %s, %s, %s, %s::bigint[], %s::text[], %s::text[], %s::float8[], %s)",
        (lease.group, worker, batch_size, lease_seconds, lease.token, *_verdicts(outcomes), relaxed),
        _lease(lease.group),
    )


def extend_lease(lease: Lease, *, lease_seconds: float | None = None) -> Call[datetime]:
    """Keep a lease; the answer is when it ends now."""
    return Call("select headwater.extend_lease(%s, %s, %s)", (lease.group, lease.token, lease_seconds), only_value)


def reap(group: str) -> Call[int]:
    """Give events of leases that ran out to others; the answer is how many."""
    return Call("select headwater.reap(%s)", (group,), only_value)


def deliveries(group: str, *, status: str | None = None, after: int = 0, batch_size: int = 100) -> Call[list[Delivery]]:
    return Call(
        "select group_name, position, topic, status, attempts, run_at, leased_until, worker, last_error "
        "from headwater.delivery where group_name = %s and position > %s and (%s::text is null or status = %s) "
        "order by position limit %s",
        (group, after, status, status, batch_size),
        lambda rows: [Delivery(*row) for row in rows],
    )


def dead_letters(
    group: str,
    *,
    positions: Sequence[int] | None = None,
    topic: str | None = None,
    error_like: str | None = None,
    handler: str | None = None,
    subscription_id: int | None = None,
    after: int = 0,
    batch_size: int = 100,
) -> Call[list[DeadLetter]]:
    """Dead letters in the order of their events. All of one event come together, so there may be more than
    `batch_size`: the next page begins after the last position."""
    return Call(
        "select position, topic_name, key, type, attempts, last_error, history, died_at, subscription, handler_name "
        "from headwater.dead_letters(%s, %s::bigint[], %s, %s, %s, %s, %s, %s)",
        (*_letters(group, positions, topic, error_like), after, batch_size, handler, subscription_id),
        lambda rows: [DeadLetter(*row[:6], tuple(row[6]), *row[7:]) for row in rows],  # type: ignore[call-arg]
    )


def _letters(
    group: str, positions: Sequence[int] | None, topic: str | None, error_like: str | None
) -> tuple[object, ...]:
    return group, None if positions is None else list(positions), topic, error_like


def redrive(
    group: str,
    *,
    positions: Sequence[int] | None = None,
    topic: str | None = None,
    error_like: str | None = None,
    handler: str | None = None,
    subscription_id: int | None = None,
) -> Call[int]:
    """Give dead letters a fresh set of tries; the answer is how many."""
    return Call(
        "select headwater.redrive(%s, %s::bigint[], %s, %s, handler => %s, subscription_id => %s)",
        (*_letters(group, positions, topic, error_like), handler, subscription_id),
        only_value,
    )


def discard(
    group: str,
    *,
    positions: Sequence[int] | None = None,
    topic: str | None = None,
    error_like: str | None = None,
    handler: str | None = None,
    subscription_id: int | None = None,
) -> Call[int]:
    """Drop dead letters for good; the answer is how many."""
    return Call(
        "select headwater.discard(%s, %s::bigint[], %s, %s, handler => %s, subscription_id => %s)",
        (*_letters(group, positions, topic, error_like), handler, subscription_id),
        only_value,
    )
