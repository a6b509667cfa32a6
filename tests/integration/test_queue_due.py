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
def queue(log: headwater.Headwater, topic: str) -> str:
    name = f"due-{next(_numbers)}"
    log.create_queue(name, topic)
    return name


def claimed(log: headwater.Headwater, queue: str, batch_size: int = 1) -> list[tuple[int, int]]:
    """Claim and acknowledge a batch: its positions, each with which try it was."""
    lease = log.claim(queue, worker="w", batch_size=batch_size)
    if lease is None:
        return []
    log.ack(lease)
    return [(event.position, event.attempt) for event in lease.events]


def look_up_to_now(connection: psycopg.Connection, queue: str) -> None:
    """As if a claim had found nothing due up to now, a second after a failure that is not committed yet."""
    connection.execute(
        "update headwater_internal.ledger set due_after = clock_timestamp() where token = "
        "(select max(l.token) from headwater_internal.ledger l join headwater_internal.queue g on g.id = l.queue_id "
        "where g.name = %s)",
        (queue,),
    )


def test_a_failure_that_is_slow_to_commit_comes_back_with_the_next_reap(
    log: headwater.Headwater, connection: psycopg.Connection, topic: str, queue: str
) -> None:
    first, second, third = log.publish_batch(topic, [NewEvent(None)] * 3)
    lease = log.claim(queue, worker="w")
    assert lease is not None
    assert claimed(log, queue) == [(second, 1)]
    with log.transaction() as slow:
        log.settle(lease, {lease.events[0].position: Retry(timedelta(0))}, connection=slow)
        look_up_to_now(connection, queue)
    assert claimed(log, queue) == [(third, 1)]
    assert claimed(log, queue) == []
    log.reap(queue)
    assert claimed(log, queue) == [(first, 2)]


def test_a_failure_comes_back_without_a_reap(log: headwater.Headwater, topic: str, queue: str) -> None:
    positions = log.publish_batch(topic, [NewEvent(None)] * 20)
    for position in positions:
        lease = log.claim(queue, worker="w")
        assert lease is not None
        assert [(event.position, event.attempt) for event in lease.events] == [(position, 1)]
        log.settle(lease, {lease.events[0].position: Retry(timedelta(0))})
        assert claimed(log, queue) == [(position, 2)]
    assert claimed(log, queue) == []
