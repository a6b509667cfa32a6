"""Do claims look for failed events only where some can be, and lose none by it?"""

from __future__ import annotations

import itertools
from datetime import timedelta

import psycopg
import pytest

import headwater
from headwater import NewEvent, Retry

_numbers = itertools.count()


@pytest.fixture
def group(log: headwater.Headwater, topic: str) -> str:
    name = f"due-{next(_numbers)}"
    log.create_group(name, topic)
    return name


def claimed(log: headwater.Headwater, group: str, batch_size: int = 1) -> list[tuple[int, int]]:
    """Claim and acknowledge a batch: its positions, each with which try it was."""
    lease = log.claim(group, worker="w", batch_size=batch_size)
    if lease is None:
        return []
    log.ack(lease)
    return [(event.position, event.attempt) for event in lease.events]


def look_up_to_now(connection: psycopg.Connection, group: str) -> None:
    """As if a claim had found nothing due up to now, a second after a failure that is not committed yet."""
    connection.execute(
        "update headwater.ledger set due_after = clock_timestamp() where token = "
        "(select max(l.token) from headwater.ledger l join headwater.consumer_group g on g.id = l.group_id "
        "where g.name = %s)",
        (group,),
    )


def test_a_failure_that_is_slow_to_commit_comes_back_with_the_next_reap(
    log: headwater.Headwater, connection: psycopg.Connection, topic: str, group: str
) -> None:
    first, second, third = log.publish_batch(topic, [NewEvent(None)] * 3)
    lease = log.claim(group, worker="w")
    assert lease is not None
    assert claimed(log, group) == [(second, 1)]
    with log.transaction() as slow:
        log.settle(lease, {lease.events[0].position: Retry(timedelta(0))}, connection=slow)
        look_up_to_now(connection, group)
    assert claimed(log, group) == [(third, 1)]
    assert claimed(log, group) == []
    log.reap(group)
    assert claimed(log, group) == [(first, 2)]


def test_a_failure_comes_back_without_a_reap(log: headwater.Headwater, topic: str, group: str) -> None:
    positions = log.publish_batch(topic, [NewEvent(None)] * 20)
    for position in positions:
        lease = log.claim(group, worker="w")
        assert lease is not None
        assert [(event.position, event.attempt) for event in lease.events] == [(position, 1)]
        log.settle(lease, {lease.events[0].position: Retry(timedelta(0))})
        assert claimed(log, group) == [(position, 2)]
    assert claimed(log, group) == []
