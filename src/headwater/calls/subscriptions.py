"""Calls about subscriptions by SQL condition, and about watched tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import checked_text, encode_headers, optional_text
from headwater.calls.reading import EVENT_COLUMNS, topic_names
from headwater.model import (
    Dead,
    Event,
    MatchedEvent,
    Outcome,
    Reading,
    Retry,
    Snooze,
    Subscription,
)


def subscribe(
    group: str,
    condition: str,
    params: Mapping[str, Any] | None = None,
    *,
    expires_after: timedelta | None = None,
    from_position: int | None = None,
    topics: Sequence[str] | None = None,
) -> Call[int]:
    """Subscribe a group to events that fulfil a condition; the answer is the subscription's id."""
    return Call(
        "select id from headwater.subscribe(%s, %s, %s::jsonb, %s, %s, %s::text[])",
        (
            checked_text(group, "group name"),
            checked_text(condition, "condition"),
            encode_headers(params or {}),
            expires_after,
            from_position,
            topic_names(topics),
        ),
        only_value,
    )


def unsubscribe(subscription_id: int) -> Call[bool]:
    return Call("select headwater.unsubscribe(%s)", (subscription_id,), only_value)


def resume_filter(subscription_id: int) -> Call[bool]:
    """Try a stopped filter again, from where it stopped; False if it was not stopped."""
    return Call("select headwater.resume_filter(%s)", (subscription_id,), only_value)


def keep_subscriptions(subscription_ids: Sequence[int]) -> Call[None]:
    return Call("select headwater.keep_subscriptions(%s::bigint[])", (list(subscription_ids),), nothing)


def subscriptions(group: str | None = None, *, batch_size: int = 1000) -> Call[list[Subscription]]:
    return Call(
        "select s.id, g.name, c.expression, s.params, s.from_position, s.expires_after, s.last_active_at, "
        "s.created_at, f.stopped_at is not null, "
        "case when f.stopped_at is null then c.last_error else f.error end, f.stopped_at, "
        "case when f.stopped_at is not null then f.position end, c.errors from headwater.subscription s "
        "join headwater.consumer_group g on g.id = s.group_id join headwater.condition c on c.id = s.condition_id "
        "left join headwater.filter_stop f on f.group_id = s.group_id and f.condition_id = s.condition_id "
        "where %s::text is null or g.name = %s order by s.id limit %s",
        (group, group, batch_size),
        lambda rows: [Subscription(*row) for row in rows],
    )


def read_next(
    group: str,
    *,
    reader: str,
    after: int | None = None,
    batch_size: int = 100,
    lease_seconds: float = 30.0,
    peek: bool = False,
    epoch: int | None = None,
) -> Call[Reading]:
    """The next events of a group with the subscriptions that each one matches; `epoch`: that of `after`."""

    def decode(rows: Rows) -> Reading:
        return Reading(
            rows[-1][0],
            tuple(MatchedEvent(tuple(row[1]), row[2], row[3], row[4], Event._make(row[5:])) for row in rows[:-1]),
        )

    return Call(
        f"select next_position, subscription_ids, retry_id, handler, attempt, {EVENT_COLUMNS} "
        "from headwater.read_next(%s, %s, %s, %s, %s, %s, %s)",
        (
            checked_text(group, "group name"),
            checked_text(reader, "reader name"),
            after,
            batch_size,
            lease_seconds,
            peek,
            epoch,
        ),
        decode,
    )


def set_reading(
    group: str, position: int, *, reader: str, release: bool = False, epoch: int | None = None
) -> Call[None]:
    return Call("select headwater.set_reading(%s, %s, %s, %s, %s)", (group, reader, position, release, epoch), nothing)


def hold_reading(group: str, *, reader: str, lease_seconds: float) -> Call[int]:
    """Become, or stay, the one reader of a group; the answer is its position."""
    return Call("select position from headwater.hold_reading(%s, %s, %s)", (group, reader, lease_seconds), only_value)


def release_reading(group: str, *, reader: str) -> Call[bool]:
    """Let another reader take over at once."""
    return Call("select headwater.release_reading(%s, %s)", (group, reader), only_value)


def keep_alive(subscription_ids: Sequence[int]) -> Call[frozenset[int]]:
    """Keep subscriptions from expiring; the answer is which of them exist."""
    return Call(
        "select headwater.keep_alive(%s::bigint[])",
        (list(subscription_ids),),
        lambda rows: frozenset(row[0] for row in rows),
    )


def stopped_filters(subscription_ids: Sequence[int]) -> Call[dict[int, str]]:
    """Which of these subscriptions have a filter that took too long, and what is known of it."""
    return Call(
        "select subscription_id, error from headwater.stopped_subscriptions(%s::bigint[])",
        (list(subscription_ids),),
        dict,
    )


def _told(error: str | None) -> str | None:
    return None if error is None else error.replace("\x00", "\ufffd")[:10000]


def settle_matched(
    group: str,
    ended: Sequence[tuple[MatchedEvent, Outcome]],
    *,
    handler: str,
    max_attempts: int | None = None,
    worker: str | None = None,
) -> Call[int]:
    """Say how events ended for one handler; the answer is how many became dead letters. `max_attempts` instead of the
    group's."""
    columns: list[tuple[int, int, str, int, str, str | None, float | None]] = []
    for matched, outcome in ended:
        for subscription_id in matched.subscription_ids:
            event = matched.event
            verdict, error, delay = _verdict(outcome)
            columns.append((subscription_id, event.position, event.topic, matched.attempt, verdict, error, delay))
    return Call(
        "select headwater.settle_matched(%s, %s, %s::bigint[], %s::bigint[], %s::text[], %s::integer[], %s::text[], "
        "%s::text[], %s::float8[], %s, %s)",
        (group, handler, *map(list, zip(*columns, strict=True)), max_attempts, worker),
        only_value,
    )


def _verdict(outcome: Outcome) -> tuple[str, str | None, float | None]:
    match outcome:
        case None:
            return "done", None, None
        case Retry():
            return "retry", _told(outcome.reason), None if outcome.after is None else outcome.after.total_seconds()
        case Dead():
            return "dead", _told(outcome.reason), None
        case Snooze():
            return "release", None, None if outcome.after is None else outcome.after.total_seconds()


def retry_later(
    group: str,
    subscription_id: int,
    *,
    handler: str,
    position: int,
    attempt: int,
    delay_seconds: float | None = None,
    error: str | None = None,
    max_attempts: int | None = None,
) -> Call[bool]:
    """Have one handler of one subscription get an event again; False if its tries are used up."""
    return Call(
        "select headwater.retry_later(%s, %s, %s, %s, %s, %s, %s, %s)",
        (group, subscription_id, handler, position, attempt, delay_seconds, _told(error), max_attempts),
        only_value,
    )


def finish_retry(retry_id: int) -> Call[bool]:
    return Call("select headwater.finish_retry(%s)", (retry_id,), only_value)


def watch_table(
    table: str,
    *,
    topic: str | None = None,
    inserts: bool = True,
    updates: bool = True,
    deletes: bool = True,
    truncates: bool = True,
    columns: Sequence[str] | None = None,
    when_changed: Sequence[str] | None = None,
) -> Call[str]:
    """Publish what happens to a table; the answer is the topic."""
    return Call(
        "select headwater.watch_table(to_regclass(%s), %s, %s, %s, %s, %s, %s::text[], %s::text[])",
        (
            table,
            optional_text(topic, "topic name"),
            inserts,
            updates,
            deletes,
            truncates,
            None if columns is None else list(columns),
            None if when_changed is None else list(when_changed),
        ),
        only_value,
    )


def unwatch_table(table: str) -> Call[bool]:
    return Call("select headwater.unwatch_table(to_regclass(%s))", (table,), only_value)
