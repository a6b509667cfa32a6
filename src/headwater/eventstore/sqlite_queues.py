"""Queues of an event store on SQLite: leases of competing consumers, redelivery and dead letters.

The rules are those of `database/schema/functions/lease.sql`: when the lease of several events expires, it is unknown
which event was at fault. So no attempt is counted, and each event is delivered again in isolation.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from headwater.errors import LeaseLost, QueueNotFound
from headwater.eventstore import sqlite_rows as rows
from headwater.eventstore.limits import MAX_ATTEMPTS
from headwater.eventstore.query import Query, StoreEvent, StoreLease
from headwater.eventstore.recent_events import MAX_BYTES
from headwater.queue.model import DeadLetter

EXPIRED = "lease expired"


class NextEvents(NamedTuple):
    """What a queue can lease now: one event again, or new events, all matches up to `to_position`."""

    queue: str
    from_position: int
    to_position: int
    again: bool
    events: Sequence[StoreEvent]


def has_queue(connection: sqlite3.Connection, queue: str) -> bool:
    return rows.value(connection, "select 1 from queue where name = ?", queue) is not None


def open_queue(connection: sqlite3.Connection, queue: str) -> None:
    """Create a queue that starts with the first event, unless it exists."""
    connection.execute(
        "insert into queue (name, position, last_token) values (?, 0, 0) on conflict do nothing", (queue,)
    )


def find_next(connection: sqlite3.Connection, queue: str, query: Query, batch_size: int) -> NextEvents | None:
    """Find the events for the next lease, and the position to skip to; None: there is nothing new."""
    number = _number(connection, queue)
    position = int(rows.value(connection, "select position from queue where id = ?", number))
    # Events with fewer attempts come first, so that one that crashes its workers does not delay the others.
    given_back = rows.value(
        connection,
        "select position from claimed_event where queue_id = ? and token is null order by attempt, position limit 1",
        number,
    )
    if given_back is not None:
        return NextEvents(queue, position, position, True, (rows.event_at(connection, given_back),))
    events = rows.batch(rows.matching(connection, query, position, None, False), batch_size, MAX_BYTES)
    to = events[-1].position if events else rows.head(connection)
    return NextEvents(queue, position, to, False, events) if to > position else None


def take(connection: sqlite3.Connection, found: NextEvents, worker: str, lease_seconds: float) -> StoreLease | None:
    """Lease the events to a worker. None: another consumer was faster, or nothing matched."""
    moved = connection.execute(
        "update queue set position = ?, last_token = last_token + 1 where name = ? and position = ? "
        "returning id, last_token",
        (found.to_position, found.queue, found.from_position),
    ).fetchone()
    if moved is None or not found.events:
        return None
    number, token = moved
    if not found.again:
        connection.executemany(
            "insert into claimed_event values (?, ?, ?, 1, '[]')",
            [(number, event.position, token) for event in found.events],
        )
    elif not connection.execute(
        "update claimed_event set token = ?, attempt = attempt + 1 "
        "where queue_id = ? and position = ? and token is null",
        (token, number, found.events[0].position),
    ).rowcount:
        return None
    expires_at = rows.microseconds(datetime.now(UTC) + timedelta(seconds=lease_seconds))
    connection.execute("insert into lease values (?, ?, ?, ?)", (number, token, worker, expires_at))
    return StoreLease(found.queue, token, found.events)


def settle(connection: sqlite3.Connection, lease: StoreLease) -> None:
    """Mark the events of a lease as done. Raises LeaseLost if the lease has expired."""
    held = (_number(connection, lease.queue), lease.token)
    if not connection.execute("delete from lease where queue_id = ? and token = ?", held).rowcount:
        raise LeaseLost(
            f'lease {lease.token} of queue "{lease.queue}" is lost: it was ended or has expired',
            hint="Another worker may have its events. Discard this result and claim again.",
            detail={"queue": lease.queue, "token": lease.token},
        )
    connection.execute("delete from claimed_event where queue_id = ? and token = ?", held)


def has_lapsed(connection: sqlite3.Connection, queue: str) -> bool:
    """Whether `reap` has anything to do."""
    return bool(_lapsed(connection, _number(connection, queue)))


def reap(connection: sqlite3.Connection, queue: str) -> None:
    """Return the events of expired leases to the queue, each isolated. An event that has used MAX_ATTEMPTS becomes a
    dead letter."""
    number = _number(connection, queue)
    for token, worker in _lapsed(connection, number):
        held = connection.execute(
            "select position, attempt, history from claimed_event where queue_id = ? and token = ?", (number, token)
        ).fetchall()
        isolated = len(held) == 1
        for position, attempt, history in held:
            attempts = attempt if isolated else attempt - 1
            new_history = _with_attempt(history, attempts, worker)
            if isolated and attempts >= MAX_ATTEMPTS:
                _make_dead_letter(connection, number, position, attempts, new_history)
            else:
                connection.execute(
                    "update claimed_event set token = null, attempt = ?, history = ? "
                    "where queue_id = ? and position = ?",
                    (attempts, new_history, number, position),
                )
        connection.execute("delete from lease where queue_id = ? and token = ?", (number, token))


def dead_letters(
    connection: sqlite3.Connection, topic: str, queue: str, positions: Sequence[int] | None, after: int, batch_size: int
) -> list[DeadLetter]:
    """The dead letters of a queue, in order; all, or those at `positions`."""
    found = connection.execute(
        "select d.position, e.type, d.attempts, d.last_error, d.history, d.died_at "
        "from dead_letter d join event e on e.position = d.position "
        "where d.queue_id = :queue and d.position > :after "
        "and (:positions is null or d.position in (select value from json_each(:positions))) "
        "order by d.position limit :batch_size",
        {**_chosen(connection, queue, positions), "after": after, "batch_size": batch_size},
    )
    return [
        DeadLetter(position, topic, None, type_, attempts, error, tuple(json.loads(history)), rows.moment(died_at))
        for position, type_, attempts, error, history, died_at in found
    ]


def redrive(connection: sqlite3.Connection, queue: str, positions: Sequence[int] | None) -> int:
    """Retry dead letters with a new set of attempts, all or those at `positions`; returns their number."""
    chosen = _chosen(connection, queue, positions)
    where = "where queue_id = :queue and (:positions is null or position in (select value from json_each(:positions)))"
    connection.execute(
        f"insert into claimed_event select queue_id, position, null, 0, history from dead_letter {where}", chosen
    )
    return connection.execute(f"delete from dead_letter {where}", chosen).rowcount


def _number(connection: sqlite3.Connection, queue: str) -> int:
    number: int | None = rows.value(connection, "select id from queue where name = ?", queue)
    if number is None:
        raise QueueNotFound(f'queue "{queue}" does not exist', hint="compete() creates it.", detail={"queue": queue})
    return number


def _lapsed(connection: sqlite3.Connection, number: int) -> list[tuple[int, str]]:
    return connection.execute(
        "select token, worker from lease where queue_id = ? and expires_at < ? order by token",
        (number, rows.microseconds(datetime.now(UTC))),
    ).fetchall()


def _make_dead_letter(connection: sqlite3.Connection, number: int, position: int, attempts: int, history: str) -> None:
    connection.execute("delete from claimed_event where queue_id = ? and position = ?", (number, position))
    died_at = rows.microseconds(datetime.now(UTC))
    connection.execute(
        "insert into dead_letter values (?, ?, ?, ?, ?, ?)", (number, position, attempts, EXPIRED, history, died_at)
    )


def _with_attempt(history: str, attempt: int, worker: str) -> str:
    one = {"attempt": attempt, "at": datetime.now(UTC).isoformat(), "worker": worker, "error": EXPIRED}
    return json.dumps([*json.loads(history), one], ensure_ascii=False)


def _chosen(connection: sqlite3.Connection, queue: str, positions: Sequence[int] | None) -> dict[str, int | str | None]:
    named = None if positions is None else json.dumps(list(positions))
    return {"queue": _number(connection, queue), "positions": named}
