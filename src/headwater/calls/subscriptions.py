"""Calls for SQL subscriptions and watched tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import checked_text, encode_headers, optional_text
from headwater.calls.reading import EVENT_COLUMNS, topic_names
from headwater.log.model import Event
from headwater.queue.model import Dead, Outcome, Retry, Snooze
from headwater.sql_subscriptions.model import MatchedBatch, MatchedEvent, Subscription


def subscribe(
    queue: str,
    filter: str,
    params: Mapping[str, Any] | None = None,
    *,
    expires_after: timedelta | None = None,
    from_position: int | None = None,
    topics: Sequence[str] | None = None,
) -> Call[int]:
    """Subscribe a queue to the events that match a filter; returns the subscription's id."""
    return Call(
        "select id from headwater.subscribe(%s, %s, %s::jsonb, %s, %s, %s::text[])",
        (
            checked_text(queue, "queue name"),
            checked_text(filter, "filter"),
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
    """Resume a stopped filter from where it stopped; False if it was not stopped."""
    return Call("select headwater.resume_filter(%s)", (subscription_id,), only_value)


def keep_subscriptions(subscription_ids: Sequence[int]) -> Call[None]:
    return Call("select headwater.keep_subscriptions(%s::bigint[])", (list(subscription_ids),), nothing)


def subscriptions(queue: str | None = None, *, batch_size: int = 1000) -> Call[list[Subscription]]:
    return Call(
        "select s.id, g.name, c.expression, s.params, s.from_position, s.expires_after, s.last_active_at, "
        "s.created_at, f.stopped_at is not null, "
        "case when f.stopped_at is null then c.last_error else f.error end, f.stopped_at, "
        "case when f.stopped_at is not null then f.position end, c.errors from headwater_internal.subscription s "
        "join headwater_internal.queue g on g.id = s.queue_id join headwater_internal.filter c on c.id = s.filter_id "
        "left join headwater_internal.filter_stop f on f.queue_id = s.queue_id and f.filter_id = s.filter_id "
        "where %s::text is null or g.name = %s order by s.id limit %s",
        (queue, queue, batch_size),
        lambda rows: [Subscription(*row) for row in rows],
    )


def read_next(
    queue: str,
    *,
    reader: str,
    after: int | None = None,
    batch_size: int = 100,
    lease_seconds: float = 30.0,
    peek: bool = False,
    epoch: int | None = None,
) -> Call[MatchedBatch]:
    """The next events of a queue with the subscriptions that each one matches; `epoch`: that of `after`."""

    def decode(rows: Rows) -> MatchedBatch:
        return MatchedBatch(
            rows[-1][0],
            tuple(MatchedEvent(tuple(row[1]), row[2], row[3], row[4], Event._make(row[5:])) for row in rows[:-1]),
        )

    return Call(
        f"select next_position, subscription_ids, retry_id, handler, attempt, {EVENT_COLUMNS} "
        "from headwater.read_next(%s, %s, %s, %s, %s, %s, %s)",
        (
            checked_text(queue, "queue name"),
            checked_text(reader, "reader name"),
            after,
            batch_size,
            lease_seconds,
            peek,
            epoch,
        ),
        decode,
    )


def commit_reading(
    queue: str, position: int, *, reader: str, release: bool = False, epoch: int | None = None
) -> Call[None]:
    return Call(
        "select headwater.commit_reading(%s, %s, %s, %s, %s)", (queue, reader, position, release, epoch), nothing
    )


def hold_reading(queue: str, *, reader: str, lease_seconds: float) -> Call[int]:
    """Become or remain the reader of a queue; returns its position."""
    return Call("select position from headwater.hold_reading(%s, %s, %s)", (queue, reader, lease_seconds), only_value)


def release_reading(queue: str, *, reader: str) -> Call[bool]:
    """Let another reader take over immediately."""
    return Call("select headwater.release_reading(%s, %s)", (queue, reader), only_value)


def keep_alive(subscription_ids: Sequence[int]) -> Call[frozenset[int]]:
    """Keep subscriptions from expiring; returns the ids of those that exist."""
    return Call(
        "select headwater_internal.keep_alive(%s::bigint[])",
        (list(subscription_ids),),
        lambda rows: frozenset(row[0] for row in rows),
    )


def stopped_filters(subscription_ids: Sequence[int]) -> Call[dict[int, str]]:
    """The subscriptions whose filter was stopped because it took too long, with the error."""
    return Call(
        "select subscription_id, error from headwater_internal.stopped_subscriptions(%s::bigint[])",
        (list(subscription_ids),),
        dict,
    )


def _error_text(error: str | None) -> str | None:
    return None if error is None else error.replace("\x00", "\ufffd")[:10000]


def settle_matched(
    queue: str,
    ended: Sequence[tuple[MatchedEvent, Outcome]],
    *,
    handler: str,
    max_attempts: int | None = None,
    worker: str | None = None,
) -> Call[int]:
    """Settle events for one handler; returns how many became dead letters. `max_attempts` overrides the queue's."""
    columns: list[tuple[int, int, str, int, str, str | None, float | None]] = []
    for matched, outcome in ended:
        for subscription_id in matched.subscription_ids:
            event = matched.event
            kind, error, delay = _outcome_parts(outcome)
            columns.append((subscription_id, event.position, event.topic, matched.attempt, kind, error, delay))
    return Call(
        "select headwater.settle_matched(%s, %s, %s::bigint[], %s::bigint[], %s::text[], %s::integer[], %s::text[], "
        "%s::text[], %s::float8[], %s, %s)",
        (queue, handler, *map(list, zip(*columns, strict=True)), max_attempts, worker),
        only_value,
    )


def _outcome_parts(outcome: Outcome) -> tuple[str, str | None, float | None]:
    match outcome:
        case None:
            return "done", None, None
        case Retry():
            return (
                "retry",
                _error_text(outcome.reason),
                None if outcome.after is None else outcome.after.total_seconds(),
            )
        case Dead():
            return "dead", _error_text(outcome.reason), None
        case Snooze():
            return "release", None, None if outcome.after is None else outcome.after.total_seconds()


def retry_later(
    queue: str,
    subscription_id: int,
    *,
    handler: str,
    position: int,
    attempt: int,
    delay_seconds: float | None = None,
    error: str | None = None,
    max_attempts: int | None = None,
) -> Call[bool]:
    """Schedule a retry of an event for one handler of one subscription; False if its attempts are used up."""
    return Call(
        "select headwater.retry_later(%s, %s, %s, %s, %s, %s, %s, %s)",
        (queue, subscription_id, handler, position, attempt, delay_seconds, _error_text(error), max_attempts),
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
    """Publish the changes of a table; returns the topic."""
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
