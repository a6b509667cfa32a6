"""Groups that compete for the events of a store on SQLite: what was given to whom, and what is to be given again.

The rules are those of `database/schema/functions/lease.sql`: nobody knows which event of several was at fault when
their lease ran out, so none is counted down, and each is given again alone.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from headwater.errors import GroupNotFound, LeaseLost
from headwater.eventstore import sqlite_rows as rows
from headwater.eventstore.limits import MAX_ATTEMPTS
from headwater.eventstore.query import Query, StoreEvent, StoreLease
from headwater.eventstore.recent_events import MAX_BYTES
from headwater.model import DeadLetter

EXPIRED = "lease expired"


class Found(NamedTuple):
    """What a group can be given now: one event again, or new ones, all matches up to `to_position`."""

    group: str
    from_position: int
    to_position: int
    again: bool
    events: Sequence[StoreEvent]


def has_group(connection: sqlite3.Connection, group: str) -> bool:
    return rows.value(connection, "select 1 from consumer_group where name = ?", group) is not None


def open_group(connection: sqlite3.Connection, group: str) -> None:
    """Make a group that begins with the first event, unless it is there."""
    connection.execute(
        "insert into consumer_group (name, position, last_token) values (?, 0, 0) on conflict do nothing", (group,)
    )


def look(connection: sqlite3.Connection, group: str, query: Query, batch_size: int) -> Found | None:
    """What the next lease can be of, and what is passed over on the way; None: nothing has come."""
    number = _number(connection, group)
    position = int(rows.value(connection, "select position from consumer_group where id = ?", number))
    # Those that were tried less come first: one that kills its workers holds up nobody.
    given_back = rows.value(
        connection,
        "select position from claimed_event where group_id = ? and token is null order by attempt, position limit 1",
        number,
    )
    if given_back is not None:
        return Found(group, position, position, True, (rows.event_at(connection, given_back),))
    events = rows.batch(rows.matching(connection, query, position, None, False), batch_size, MAX_BYTES)
    to = events[-1].position if events else rows.head(connection)
    return Found(group, position, to, False, events) if to > position else None


def take(connection: sqlite3.Connection, found: Found, worker: str, lease_seconds: float) -> StoreLease | None:
    """Lease to a worker what was found. None: another was faster, or nothing was a match."""
    moved = connection.execute(
        "update consumer_group set position = ?, last_token = last_token + 1 where name = ? and position = ? "
        "returning id, last_token",
        (found.to_position, found.group, found.from_position),
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
        "where group_id = ? and position = ? and token is null",
        (token, number, found.events[0].position),
    ).rowcount:
        return None
    expires_at = rows.microseconds(datetime.now(UTC) + timedelta(seconds=lease_seconds))
    connection.execute("insert into lease values (?, ?, ?, ?)", (number, token, worker, expires_at))
    return StoreLease(found.group, token, found.events)


def settle(connection: sqlite3.Connection, lease: StoreLease) -> None:
    """The events of a lease are done; LeaseLost if they may be another's by now."""
    held = (_number(connection, lease.group), lease.token)
    if not connection.execute("delete from lease where group_id = ? and token = ?", held).rowcount:
        raise LeaseLost(
            f'lease {lease.token} of group "{lease.group}" is lost: it ended or ran out',
            hint="Another worker may have its events. Drop this result, and claim anew.",
            detail={"group": lease.group, "token": lease.token},
        )
    connection.execute("delete from claimed_event where group_id = ? and token = ?", held)


def has_lapsed(connection: sqlite3.Connection, group: str) -> bool:
    """Whether `reap` has anything to do."""
    return bool(_lapsed(connection, _number(connection, group)))


def reap(connection: sqlite3.Connection, group: str) -> None:
    """Let the events of leases that ran out be given again, each alone; after five tries of its own one is dead."""
    number = _number(connection, group)
    for token, worker in _lapsed(connection, number):
        held = connection.execute(
            "select position, attempt, history from claimed_event where group_id = ? and token = ?", (number, token)
        ).fetchall()
        alone = len(held) == 1
        for position, attempt, history in held:
            tried = attempt if alone else attempt - 1
            told = _with_try(history, tried, worker)
            if alone and tried >= MAX_ATTEMPTS:
                _bury(connection, number, position, tried, told)
            else:
                connection.execute(
                    "update claimed_event set token = null, attempt = ?, history = ? "
                    "where group_id = ? and position = ?",
                    (tried, told, number, position),
                )
        connection.execute("delete from lease where group_id = ? and token = ?", (number, token))


def dead_letters(
    connection: sqlite3.Connection, topic: str, group: str, positions: Sequence[int] | None, after: int, batch_size: int
) -> list[DeadLetter]:
    """The events that a group has given up on, in order; all, or those named."""
    found = connection.execute(
        "select d.position, e.type, d.attempts, d.last_error, d.history, d.died_at "
        "from dead_letter d join event e on e.position = d.position "
        "where d.group_id = :group and d.position > :after "
        "and (:positions is null or d.position in (select value from json_each(:positions))) "
        "order by d.position limit :batch_size",
        {**_chosen(connection, group, positions), "after": after, "batch_size": batch_size},
    )
    return [
        DeadLetter(position, topic, None, type_, attempts, error, tuple(json.loads(history)), rows.moment(died_at))
        for position, type_, attempts, error, history, died_at in found
    ]


def redrive(connection: sqlite3.Connection, group: str, positions: Sequence[int] | None) -> int:
    """Give dead letters a fresh set of tries, all or those named; returns how many."""
    chosen = _chosen(connection, group, positions)
    where = "where group_id = :group and (:positions is null or position in (select value from json_each(:positions)))"
    connection.execute(
        f"insert into claimed_event select group_id, position, null, 0, history from dead_letter {where}", chosen
    )
    return connection.execute(f"delete from dead_letter {where}", chosen).rowcount


def _number(connection: sqlite3.Connection, group: str) -> int:
    number: int | None = rows.value(connection, "select id from consumer_group where name = ?", group)
    if number is None:
        raise GroupNotFound(
            f'there is no group "{group}"', hint="It is made by competing in it: compete().", detail={"group": group}
        )
    return number


def _lapsed(connection: sqlite3.Connection, number: int) -> list[tuple[int, str]]:
    return connection.execute(
        "select token, worker from lease where group_id = ? and expires_at < ? order by token",
        (number, rows.microseconds(datetime.now(UTC))),
    ).fetchall()


def _bury(connection: sqlite3.Connection, number: int, position: int, attempts: int, history: str) -> None:
    connection.execute("delete from claimed_event where group_id = ? and position = ?", (number, position))
    died_at = rows.microseconds(datetime.now(UTC))
    connection.execute(
        "insert into dead_letter values (?, ?, ?, ?, ?, ?)", (number, position, attempts, EXPIRED, history, died_at)
    )


def _with_try(history: str, attempt: int, worker: str) -> str:
    one = {"attempt": attempt, "at": datetime.now(UTC).isoformat(), "worker": worker, "error": EXPIRED}
    return json.dumps([*json.loads(history), one], ensure_ascii=False)


def _chosen(connection: sqlite3.Connection, group: str, positions: Sequence[int] | None) -> dict[str, int | str | None]:
    named = None if positions is None else json.dumps(list(positions))
    return {"group": _number(connection, group), "positions": named}
