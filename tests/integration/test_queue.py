"""Does the life of an event in a queue go as promised: claimed, settled, tried again, dead, brought back?"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

import headwater
from headwater import Dead, Lease, NewEvent, Retry, Snooze
from headwater.queue.model import Outcome, QueueOverview
from patience import PATIENCE_SECONDS

_numbers = itertools.count()
LATER = timedelta(hours=1)


@pytest.fixture
def queue() -> str:
    return f"queue-{next(_numbers)}"


class Clock:
    """Moves the times of one queue instead of waiting for them."""

    def __init__(self, connection: psycopg.Connection, queue: str) -> None:
        self.connection, self.queue = connection, queue

    def end_leases(self) -> None:
        self.connection.execute(
            "update headwater_internal.ledger l set expires_at = clock_timestamp() - interval '1 second' "
            "from headwater_internal.queue g where g.id = l.queue_id and g.name = %s and not l.settled",
            (self.queue,),
        )
        self.connection.execute(
            "update headwater_internal.redelivery r set visible_at = clock_timestamp() - interval '1 second' "
            "from headwater_internal.queue g where g.id = r.queue_id and g.name = %s and r.token is not null",
            (self.queue,),
        )

    def end_waits(self) -> None:
        self.connection.execute(
            "update headwater_internal.redelivery r set visible_at = clock_timestamp() - interval '1 second' "
            "from headwater_internal.queue g where g.id = r.queue_id and g.name = %s "
            "and r.token is null and r.visible_at <> 'infinity'",
            (self.queue,),
        )


@pytest.fixture
def clock(connection: psycopg.Connection, queue: str) -> Clock:
    return Clock(connection, queue)


def publish(log: headwater.Headwater, topic: str, keys: Sequence[str | None] | int) -> list[int]:
    if isinstance(keys, int):
        keys = [None] * keys
    return log.publish_batch(topic, [NewEvent(n, key=key) for n, key in enumerate(keys)])


def claim(log: headwater.Headwater, queue: str, batch_size: int = 100, worker: str = "w") -> Lease:
    lease = log.claim(queue, worker=worker, batch_size=batch_size)
    assert lease is not None, "nothing to claim"
    return lease


def positions(lease: Lease | None) -> list[int]:
    return [] if lease is None else [event.position for event in lease.events]


def states(log: headwater.Headwater, queue: str) -> list[str]:
    return [delivery.status for delivery in log.deliveries(queue, batch_size=10_000)]


def overview(log: headwater.Headwater, queue: str) -> QueueOverview:
    (found,) = (one for one in log.queues() if one.name == queue)
    return found


def assert_counts_agree(log: headwater.Headwater, queue: str) -> None:
    """The overview's arithmetic says what counting the view event by event says."""
    counts, seen = overview(log, queue), Counter(states(log, queue))
    # New events are counted up to 1,000; beyond that there may be more.
    counted = counts.ready + counts.retrying
    assert counted == seen["ready"] or (counts.ready_is_more and counted < seen["ready"])
    assert (counts.processing, counts.done, counts.dead) == (
        seen["processing"],
        seen["done"],
        seen["dead"],
    )


# --- claim and acknowledge -------------------------------------------------------------------------------------


def test_a_claim_takes_the_next_events_for_one_worker(log: headwater.Headwater, topic: str, queue: str) -> None:
    p = publish(log, topic, 5)
    log.create_queue(queue, topic)
    before = datetime.now(UTC)
    first = log.claim(queue, worker="a", batch_size=2, lease_seconds=100)
    second = log.claim(queue, worker="b", batch_size=10)
    assert first is not None
    assert (positions(first), positions(second)) == (p[:2], p[2:])
    assert log.claim(queue, worker="c") is None
    assert {event.attempt for event in first.events} == {1}
    assert timedelta(seconds=99) < first.expires_at - before < timedelta(seconds=105)
    assert first.events[0].event == log.read(topic)[0]
    assert [d.worker for d in log.deliveries(queue)] == ["a", "a", "b", "b", "b"]


def test_one_several_or_all_events_are_acknowledged(log: headwater.Headwater, topic: str, queue: str) -> None:
    publish(log, topic, 7)
    log.create_queue(queue, topic)
    lease = claim(log, queue, 6)
    log.ack(lease, lease.events[1])
    assert states(log, queue) == ["processing", "done", *["processing"] * 4, "ready"]
    log.ack(lease, lease.events[0], lease.events[4])
    assert states(log, queue) == ["done", "done", "processing", "processing", "done", "processing", "ready"]
    assert_counts_agree(log, queue)
    log.ack(lease)
    assert states(log, queue) == [*["done"] * 6, "ready"]
    assert_counts_agree(log, queue)
    with pytest.raises(headwater.LeaseLost):
        log.ack(lease)


def test_the_last_event_acknowledged_ends_the_lease(log: headwater.Headwater, topic: str, queue: str) -> None:
    publish(log, topic, 2)
    log.create_queue(queue, topic)
    lease = claim(log, queue)
    for event in lease.events:
        log.ack(lease, event)
    with pytest.raises(headwater.LeaseLost):
        log.extend(lease)


def test_settling_says_how_each_event_ended(log: headwater.Headwater, topic: str, queue: str) -> None:
    p = publish(log, topic, 5)
    log.create_queue(queue, topic)
    lease = claim(log, queue)
    log.settle(lease, {p[0]: Retry(LATER, "again"), p[1]: Dead("never"), p[2]: Snooze(LATER), p[3]: None})
    assert [(d.status, d.attempts, d.last_error) for d in log.deliveries(queue)] == [
        ("ready", 1, "again"),
        ("dead", 1, "never"),
        ("ready", 0, None),
        ("done", 1, None),
        ("done", 1, None),
    ]
    assert_counts_agree(log, queue)


def test_an_event_of_another_lease_is_refused_and_nothing_is_changed(
    log: headwater.Headwater, topic: str, queue: str
) -> None:
    publish(log, topic, 4)
    log.create_queue(queue, topic)
    first, second = claim(log, queue, 2), claim(log, queue, 2)
    with pytest.raises(headwater.LeaseLost):
        log.ack(first, first.events[0], second.events[0])
    with pytest.raises(headwater.LeaseLost):
        log.nack(second, first.events[0], error="x")
    assert states(log, queue) == ["processing"] * 4


def test_a_verdict_that_is_none_is_refused(
    log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection
) -> None:
    p = publish(log, topic, 2)
    log.create_queue(queue, topic)
    lease = claim(log, queue)
    for given, verdicts in (([p[0]], ["maybe"]), (p, ["done"]), ([p[0], p[0]], ["done", "dead"]), ([p[0]], [None])):
        with pytest.raises(psycopg.Error) as refused:
            connection.execute("select headwater.settle(%s, %s, %s, %s)", (queue, lease.token, given, verdicts))
        assert refused.value.sqlstate == "HW002"
    assert states(log, queue) == ["processing"] * 2


def test_settle_and_claim_does_both_in_one_trip(log: headwater.Headwater, topic: str, queue: str) -> None:
    p = publish(log, topic, 6)
    log.create_queue(queue, topic)
    lease = claim(log, queue, 2)
    following = log.settle_and_claim(lease, {p[1]: Dead("no")}, worker="w", batch_size=3)
    assert positions(following) == p[2:5]
    assert states(log, queue) == ["done", "dead", *["processing"] * 3, "ready"]
    with pytest.raises(headwater.LeaseLost):
        log.settle_and_claim(lease, worker="w", batch_size=3)
    assert states(log, queue)[-1] == "ready"


def test_an_ack_commits_with_the_callers_transaction_and_rolls_back_with_it(
    log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection
) -> None:
    publish(log, topic, 3)
    log.create_queue(queue, topic, backoff_seconds=0)
    connection.execute("create temporary table effect (n int)")
    lease = claim(log, queue)
    with pytest.raises(ZeroDivisionError), connection.transaction():
        log.ack(lease, lease.events[0], connection=connection)
        connection.execute("insert into effect values (1)")
        raise ZeroDivisionError
    assert states(log, queue) == ["processing"] * 3
    with connection.transaction():
        log.ack(lease, lease.events[0], connection=connection)
        connection.execute("insert into effect values (2)")
        assert states(log, queue) == ["processing"] * 3
    assert states(log, queue) == ["done", "processing", "processing"]
    log.nack(lease, *lease.events[1:], error="x")
    again = claim(log, queue)
    with connection.transaction():
        log.ack(again, connection=connection)
        raise psycopg.Rollback
    assert states(log, queue) == ["done", "processing", "processing"]
    with connection.transaction():
        log.ack(again, connection=connection)
    assert states(log, queue) == ["done"] * 3
    assert connection.execute("select n from effect").fetchall() == [(2,)]


def test_an_ack_in_a_transaction_keeps_the_lease_from_running_out(
    log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection, clock: Clock
) -> None:
    publish(log, topic, 4)
    log.create_queue(queue, topic, backoff_seconds=0)
    lease = claim(log, queue, 2)
    log.nack(lease, *lease.events, error="x")
    # One lease of events that are tried again, one of new events.
    for _ in range(2):
        held = claim(log, queue, 2)
        clock.end_leases()
        with connection.transaction():
            log.ack(held, held.events[0], connection=connection)
            assert log.reap(queue) == 0
        with pytest.raises(headwater.LeaseLost):
            log.ack(held, held.events[0])
        log.ack(held)
    assert states(log, queue) == ["done"] * 4


# --- failing and trying again ----------------------------------------------------------------------------------


def test_a_failed_event_comes_again_after_its_delay_with_its_error(
    log: headwater.Headwater, topic: str, queue: str, clock: Clock
) -> None:
    p = publish(log, topic, 2)
    log.create_queue(queue, topic)
    lease = claim(log, queue)
    before = datetime.now(UTC)
    log.nack(lease, lease.events[0], error="first \x00 error", delay=timedelta(seconds=50))
    log.ack(lease)
    delivery = log.deliveries(queue)[0]
    assert (delivery.status, delivery.attempts, delivery.last_error) == ("ready", 1, "first \ufffd error")
    assert delivery.run_at is not None
    assert timedelta(seconds=49) < delivery.run_at - before < timedelta(seconds=55)
    assert log.claim(queue, worker="w") is None
    assert overview(log, queue).retrying == 1
    clock.end_waits()
    assert (overview(log, queue).retrying, overview(log, queue).ready) == (0, 1)
    again = claim(log, queue)
    assert positions(again) == [p[0]]
    assert again.events[0].attempt == 2
    assert not again.isolated
    delivery = log.deliveries(queue)[0]
    assert (delivery.status, delivery.attempts, delivery.run_at) == ("processing", 2, None)
    assert delivery.leased_until == again.expires_at
    log.ack(again)
    assert states(log, queue) == ["done", "done"]


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_backoff_grows_to_its_cap_and_stays_within_its_jitter(
    log: headwater.Headwater, topic: str, queue: str, clock: Clock, jitter: float
) -> None:
    publish(log, topic, 20)
    log.create_queue(
        queue,
        topic,
        max_attempts=10,
        backoff_seconds=10,
        backoff_factor=3,
        backoff_max_seconds=200,
        backoff_jitter=jitter,
    )
    for expected in (10, 30, 90, 200, 200):
        lease = claim(log, queue)
        assert len(lease.events) == 20
        before = datetime.now(UTC)
        log.nack(lease, *lease.events, error="x")
        after = datetime.now(UTC)
        run_at = [d.run_at for d in log.deliveries(queue)]
        for at in run_at:
            assert at is not None
            assert before + timedelta(seconds=expected * (1 - jitter)) <= at
            assert at <= after + timedelta(seconds=expected * (1 + jitter))
        if jitter:
            spread = max(filter(None, run_at)) - min(filter(None, run_at))
            assert spread > timedelta(seconds=expected * jitter / 2)
        clock.end_waits()


def test_an_event_that_used_up_its_tries_is_dead_with_its_whole_history(
    log: headwater.Headwater, topic: str, queue: str
) -> None:
    p = publish(log, topic, ["k", None])
    log.create_queue(queue, topic, max_attempts=3, backoff_seconds=0)
    for number in (1, 2, 3):
        lease = claim(log, queue, 1, worker=f"worker-{number}")
        assert (lease.events[0].position, lease.events[0].attempt) == (p[0], number)
        log.nack(lease, lease.events[0], error=f"error-{number}")
    (dead,) = log.dead_letters(queue)
    assert (dead.position, dead.topic, dead.key, dead.attempts, dead.last_error) == (p[0], topic, b"k", 3, "error-3")
    assert [(tried["attempt"], tried["worker"], tried["error"]) for tried in dead.history] == [
        (number, f"worker-{number}", f"error-{number}") for number in (1, 2, 3)
    ]
    delivery = log.deliveries(queue)[0]
    assert (delivery.status, delivery.attempts, delivery.last_error) == ("dead", 3, "error-3")
    assert positions(claim(log, queue)) == [p[1]]
    assert_counts_agree(log, queue)


def test_with_one_try_the_first_failure_is_death(log: headwater.Headwater, topic: str, queue: str) -> None:
    publish(log, topic, 2)
    log.create_queue(queue, topic, max_attempts=1)
    lease = claim(log, queue)
    log.nack(lease, lease.events[0], error="x")
    assert states(log, queue) == ["dead", "processing"]


def make_older(connection: psycopg.Connection, positions: list[int], seconds: int) -> None:
    connection.execute(
        "update headwater_internal.event set published_at = published_at - make_interval(secs => %s) "
        "where position = any(%s)",
        (seconds, positions),
    )


def test_an_event_past_the_retry_age_dies_at_its_next_failure(
    log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection
) -> None:
    old, young, old_but_fine = publish(log, topic, 3)
    make_older(connection, [old, old_but_fine], 3700)
    log.create_queue(queue, topic, backoff_seconds=0, retry_age_seconds=3600)
    lease = claim(log, queue)
    log.settle(lease, {old: Retry(reason="too late"), young: Retry(reason="not yet")})
    assert [(d.position, d.attempts, d.last_error) for d in log.dead_letters(queue)] == [(old, 1, "too late")]
    # The event grows old between its attempts.
    again = claim(log, queue)
    assert positions(again) == [young]
    make_older(connection, [young], 3700)
    log.nack(again, *again.events, error="in the end")
    assert [(d.position, d.attempts) for d in log.dead_letters(queue)] == [(old, 1), (young, 2)]
    assert states(log, queue) == ["dead", "dead", "done"]
    # Releasing is no failure, and without the limit age does not matter.
    log.alter_queue(queue, retry_age_seconds=0)
    assert log.redrive(queue, positions=[young]) == 1
    freed = claim(log, queue)
    log.nack(freed, *freed.events, error="again")
    assert positions(claim(log, queue)) == [young]
    assert_counts_agree(log, queue)


def test_an_old_event_that_is_released_is_delivered_again(
    log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection
) -> None:
    (old,) = publish(log, topic, 1)
    make_older(connection, [old], 3700)
    log.create_queue(queue, topic, retry_age_seconds=3600)
    for _ in range(2):
        lease = claim(log, queue)
        assert positions(lease) == [old]
        log.release(lease)


@pytest.mark.parametrize("attempts", [1, 2])
def test_an_old_event_whose_lease_expires_dies(
    log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection, attempts: int
) -> None:
    (old,) = publish(log, topic, 1)
    log.create_queue(queue, topic, backoff_seconds=0, retry_age_seconds=3600)
    for _ in range(attempts - 1):
        log.nack(failed := claim(log, queue), *failed.events, error="x")
    claim(log, queue)
    make_older(connection, [old], 3700)
    connection.execute(
        "update headwater_internal.ledger set expires_at = now() - interval '1 second' where not settled"
    )
    connection.execute(
        "update headwater_internal.redelivery set visible_at = now() - interval '1 second' where token is not null"
    )
    log.reap(queue)
    assert [(d.position, d.attempts, d.last_error) for d in log.dead_letters(queue)] == [
        (old, attempts, "lease expired")
    ]


def test_dead_at_once_is_dead_at_any_try(log: headwater.Headwater, topic: str, queue: str) -> None:
    publish(log, topic, 2)
    log.create_queue(queue, topic, backoff_seconds=0)
    lease = claim(log, queue)
    log.settle(lease, {lease.events[0].position: Dead("at first"), lease.events[1].position: Retry()})
    log.nack(again := claim(log, queue), *again.events, error="at last", dead=True)
    assert [(d.attempts, d.last_error) for d in log.dead_letters(queue)] == [(1, "at first"), (2, "at last")]


def test_giving_back_is_not_counted_as_a_try(log: headwater.Headwater, topic: str, queue: str, clock: Clock) -> None:
    publish(log, topic, 1)
    log.create_queue(queue, topic, max_attempts=2, backoff_seconds=0)
    for _ in range(3):
        log.release(claim(log, queue))
        assert log.deliveries(queue)[0].attempts == 0
    lease = claim(log, queue)
    log.nack(lease, *lease.events, error="x")
    for _ in range(3):
        lease = claim(log, queue)
        assert lease.events[0].attempt == 2
        log.settle(lease, {lease.events[0].position: Snooze(LATER)})
        assert log.claim(queue, worker="w") is None
        clock.end_waits()
    lease = claim(log, queue)
    log.nack(lease, *lease.events, error="y")
    assert len(log.dead_letters(queue)[0].history) == 2


def test_releasing_gives_back_what_is_left(log: headwater.Headwater, topic: str, queue: str) -> None:
    p = publish(log, topic, 4)
    log.create_queue(queue, topic, backoff_seconds=0)
    lease = claim(log, queue)
    log.ack(lease, lease.events[1])
    log.nack(lease, lease.events[2], error="x", delay=LATER)
    log.release(lease)
    assert states(log, queue) == ["ready", "done", "ready", "ready"]
    with pytest.raises(headwater.LeaseLost):
        log.release(lease)
    again = claim(log, queue)
    assert positions(again) == [p[0], p[3]]
    log.ack(again, again.events[0])
    log.release(again)
    assert positions(claim(log, queue)) == [p[3]]


def test_a_retry_that_was_long_in_committing_still_comes(
    log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection
) -> None:
    p = publish(log, topic, 6)
    log.create_queue(queue, topic)
    lease = claim(log, queue, 2)
    with connection.transaction():
        log.settle(lease, {p[0]: Retry(timedelta(0), "x")}, connection=connection)
        connection.execute("update headwater_internal.redelivery set visible_at = visible_at - interval '1 hour'")
        # Meanwhile others find that nothing is due, and go on with new events.
        log.ack(claim(log, queue, 2))
        log.ack(claim(log, queue, 2))
    log.reap(queue)
    assert positions(claim(log, queue)) == [p[0]]


# --- leases ----------------------------------------------------------------------------------------------------


def test_a_lease_that_ran_out_gives_its_events_to_others_and_a_late_ack_changes_nothing(
    log: headwater.Headwater, topic: str, queue: str, clock: Clock
) -> None:
    p = publish(log, topic, 3)
    log.create_queue(queue, topic)
    lost = claim(log, queue, worker="slow")
    log.ack(lost, lost.events[0])
    clock.end_leases()
    assert states(log, queue) == ["done", "ready", "ready"]
    assert_counts_agree(log, queue)
    assert log.reap(queue) == 2
    assert log.reap(queue) == 0
    for late in (
        lambda: log.ack(lost),
        lambda: log.ack(lost, lost.events[1]),
        lambda: log.nack(lost, lost.events[1], error="late"),
        lambda: log.release(lost),
        lambda: log.extend(lost),
        lambda: log.settle_and_claim(lost, worker="slow"),
    ):
        with pytest.raises(headwater.LeaseLost, match=queue):
            late()
    assert [(d.status, d.attempts, d.last_error) for d in log.deliveries(queue)] == [
        ("done", 1, None),
        ("ready", 0, "lease expired"),
        ("ready", 0, "lease expired"),
    ]
    assert [positions(log.claim(queue, worker="other", batch_size=10)) for _ in range(3)] == [[p[1]], [p[2]], []]


def test_a_late_ack_counts_while_nobody_else_had_the_events(
    log: headwater.Headwater, topic: str, queue: str, clock: Clock
) -> None:
    publish(log, topic, 2)
    log.create_queue(queue, topic)
    lease = claim(log, queue)
    clock.end_leases()
    log.ack(lease)
    assert log.reap(queue) == 0
    assert states(log, queue) == ["done", "done"]


@pytest.mark.parametrize("tries_before", [0, 1])
def test_an_extended_lease_is_kept(
    log: headwater.Headwater, topic: str, queue: str, clock: Clock, tries_before: int
) -> None:
    publish(log, topic, 2)
    log.create_queue(queue, topic, backoff_seconds=0)
    for _ in range(tries_before):
        log.nack(lease := claim(log, queue), *lease.events, error="x")
    lease = claim(log, queue)
    clock.end_leases()
    ends_at = log.extend(lease, lease_seconds=500)
    assert ends_at > datetime.now(UTC) + timedelta(seconds=450)
    assert {d.leased_until for d in log.deliveries(queue)} == {ends_at}
    assert log.reap(queue) == 0
    assert log.claim(queue, worker="w") is None
    log.ack(lease)
    assert states(log, queue) == ["done", "done"]


@pytest.mark.parametrize("tries_before", [0, 1])
def test_a_lease_of_several_events_that_ran_out_counts_for_none_and_hands_each_out_alone(
    log: headwater.Headwater, topic: str, queue: str, clock: Clock, tries_before: int
) -> None:
    p = publish(log, topic, 3)
    log.create_queue(queue, topic, max_attempts=2, backoff_seconds=0)
    for _ in range(tries_before):
        log.nack(lease := claim(log, queue), *lease.events, error="x")
    lost = claim(log, queue)
    assert positions(lost) == p
    clock.end_leases()
    assert log.reap(queue) == 3
    assert [d.attempts for d in log.deliveries(queue)] == [tries_before] * 3
    assert log.dead_letters(queue) == []
    isolated = [claim(log, queue) for _ in range(3)]
    assert [positions(lease) for lease in isolated] == [[position] for position in p]
    assert all(lease.isolated and lease.events[0].attempt == tries_before + 1 for lease in isolated)
    with pytest.raises(headwater.LeaseLost):
        log.ack(lost)
    # One that failed in a plain way is above suspicion again.
    log.nack(isolated[0], *isolated[0].events, error="plain", delay=timedelta(0))
    if not tries_before:
        assert not claim(log, queue).isolated


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_an_event_that_kills_its_worker_ends_dead_alone_and_its_mates_are_done(
    log: headwater.Headwater, topic: str, queue: str, clock: Clock, max_attempts: int
) -> None:
    p = publish(log, topic, 6)
    log.create_queue(queue, topic, max_attempts=max_attempts, backoff_seconds=0)
    poison, tries = p[2], Counter[int]()
    if max_attempts > 1:
        # They may have failed before, all in one batch.
        log.nack(lease := claim(log, queue), *lease.events, error="x")
    while True:
        log.reap(queue)
        lease = log.claim(queue, worker="w", batch_size=100)
        if lease is None:
            break
        tries.update(positions(lease))
        if poison in positions(lease):
            clock.end_leases()
        else:
            log.ack(lease)
    (dead,) = log.dead_letters(queue)
    assert (dead.position, dead.attempts, dead.last_error) == (poison, max_attempts, "lease expired")
    assert len(dead.history) == (max_attempts + 1)
    assert states(log, queue) == ["done", "done", "dead", "done", "done", "done"]
    assert {count for position, count in tries.items() if position != poison} == {2}
    assert tries[poison] == max_attempts + (1 if max_attempts == 1 else 0)


def test_no_more_events_are_in_flight_than_allowed(
    log: headwater.Headwater, topic: str, queue: str, clock: Clock
) -> None:
    publish(log, topic, 10)
    log.create_queue(queue, topic, max_in_flight=4, backoff_seconds=0)
    first, second = claim(log, queue, 3), claim(log, queue, 3)
    assert (len(first.events), len(second.events)) == (3, 1)
    assert log.claim(queue, worker="w", batch_size=3) is None
    log.ack(first, first.events[0])
    log.nack(first, first.events[1], error="x")
    third = claim(log, queue, 10)
    assert len(third.events) == 1
    assert third.events[0].attempt == 2
    assert len(claim(log, queue, 10).events) == 1
    assert log.claim(queue, worker="w", batch_size=3) is None
    assert overview(log, queue).processing == 4
    log.alter_queue(queue, max_in_flight=0)
    assert len(claim(log, queue, 10).events) == 5
    assert_counts_agree(log, queue)


# --- ordered keys ----------------------------------------------------------------------------------------------


def test_a_key_is_in_one_lease_at_a_time_and_other_keys_go_on(log: headwater.Headwater, topic: str, queue: str) -> None:
    p = publish(log, topic, ["a", "b", "a", "c", None, "b", None])
    log.create_queue(queue, topic, ordered_keys=True)
    first = claim(log, queue, 2)
    second = claim(log, queue, 100)
    assert (positions(first), positions(second)) == (p[:2], [p[3], p[4], p[6]])
    assert log.claim(queue, worker="w") is None
    assert_counts_agree(log, queue)
    log.ack(first, first.events[0])
    third = claim(log, queue)
    assert positions(third) == [p[2]]
    assert log.claim(queue, worker="w") is None
    log.ack(first)
    fourth = claim(log, queue)
    assert positions(fourth) == [p[5]]
    for lease in (second, third, fourth):
        log.ack(lease)
    assert set(states(log, queue)) == {"done"}
    assert_counts_agree(log, queue)


def test_events_without_a_key_are_not_ordered(log: headwater.Headwater, topic: str, queue: str) -> None:
    p = publish(log, topic, [None] * 4)
    log.create_queue(queue, topic, ordered_keys=True, backoff_seconds=0)
    first, second = claim(log, queue, 2), claim(log, queue, 2)
    log.nack(first, first.events[0], error="x")
    assert positions(claim(log, queue)) == [p[0]]
    log.ack(first)
    log.ack(second)


@pytest.mark.parametrize("end", ["done", "dead", "expired"])
def test_later_events_of_a_key_wait_behind_a_retry(
    log: headwater.Headwater, topic: str, queue: str, clock: Clock, end: str
) -> None:
    p = publish(log, topic, ["a", "a", "b", "a"])
    log.create_queue(queue, topic, ordered_keys=True, max_attempts=2, backoff_seconds=3600)
    lease = claim(log, queue, 2)
    log.nack(lease, lease.events[0], error="x")
    # Behind a failure in the same lease nothing is done, neither by name nor by the rest.
    with pytest.raises(headwater.LeaseLost):
        log.ack(lease)
    assert [d.status for d in log.deliveries(queue)] == ["ready"] * 4
    other = claim(log, queue)
    assert positions(other) == [p[2]]
    log.ack(other)
    assert log.claim(queue, worker="w") is None
    clock.end_waits()
    again = claim(log, queue)
    assert positions(again) == [p[0]]
    assert log.claim(queue, worker="w") is None
    match end:
        case "done":
            log.ack(again)
        case "dead":
            log.nack(again, *again.events, error="y")
        case "expired":
            clock.end_leases()
            log.reap(queue)
    assert states(log, queue)[0] == ("done" if end == "done" else "dead")
    for position in (p[1], p[3]):
        lease = claim(log, queue)
        assert positions(lease) == [position]
        assert log.claim(queue, worker="w") is None
        log.ack(lease)
    assert_counts_agree(log, queue)


def test_a_lease_that_ran_out_keeps_the_order_of_its_keys(
    log: headwater.Headwater, topic: str, queue: str, clock: Clock
) -> None:
    p = publish(log, topic, ["a", "b", "a", "a"])
    log.create_queue(queue, topic, ordered_keys=True)
    lost = claim(log, queue, 3)
    log.ack(lost, lost.events[0])
    clock.end_leases()
    assert log.reap(queue) == 2
    seen = []
    while lease := log.claim(queue, worker="w", batch_size=10):
        seen += positions(lease)
        if p[2] in seen and p[3] not in seen:
            assert log.claim(queue, worker="w", batch_size=10) is None
        log.ack(lease)
    assert sorted(seen) == p[1:]
    assert seen.index(p[2]) < seen.index(p[3])


def test_released_events_of_a_key_are_claimed_one_by_one(log: headwater.Headwater, topic: str, queue: str) -> None:
    p = publish(log, topic, ["a", "a", "a"])
    log.create_queue(queue, topic, ordered_keys=True)
    log.release(claim(log, queue))
    for position in p:
        lease = claim(log, queue, 1)
        assert positions(lease) == [position]
        assert log.claim(queue, worker="w") is None
        log.release(lease)
        lease = claim(log, queue, 3)
        assert positions(lease) == [position]
        log.ack(lease)


def test_a_redriven_event_goes_ahead_of_its_key_but_not_beside_it(
    log: headwater.Headwater, topic: str, queue: str
) -> None:
    p = publish(log, topic, ["a", "a", "a", "a"])
    log.create_queue(queue, topic, ordered_keys=True, backoff_seconds=0)
    lease = claim(log, queue, 1)
    log.nack(lease, *lease.events, error="x", dead=True)
    # A new event of the key is leased, then one that is tried again: the redriven one waits for each.
    for give_up in (True, False):
        lease = claim(log, queue, 1)
        assert positions(lease) == [p[1]]
        assert log.redrive(queue) == 1
        assert log.claim(queue, worker="w") is None
        log.nack(lease, *lease.events, error="y")
        lease = claim(log, queue, 1)
        assert positions(lease) == [p[0]]
        assert log.claim(queue, worker="w") is None
        log.nack(lease, *lease.events, error="x", dead=give_up)
    lease = claim(log, queue)
    assert positions(lease) == [p[0]]
    log.ack(lease)
    for position in p[1:]:
        lease = claim(log, queue, 1)
        assert positions(lease) == [position]
        log.ack(lease)
    assert states(log, queue) == ["done"] * 4


def test_a_failed_event_is_tried_again_while_its_batch_mates_are_at_work(
    log: headwater.Headwater, topic: str, queue: str
) -> None:
    p = publish(log, topic, ["a", "b"])
    log.create_queue(queue, topic, ordered_keys=True, backoff_seconds=0)
    lease = claim(log, queue)
    log.nack(lease, lease.events[0], error="x")
    assert positions(claim(log, queue)) == [p[0]]


@pytest.mark.parametrize("batch_size", [1, 7])
def test_many_workers_handle_every_key_in_order_and_finish(
    dsn: str, log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection, batch_size: int
) -> None:
    keys = [f"k{n * n % 11}" for n in range(400)]
    p = publish(log, topic, keys)
    key_of = dict(zip(p, keys, strict=True))
    log.create_queue(queue, topic, ordered_keys=True, max_attempts=3, backoff_seconds=0)
    handled: list[tuple[int, str]] = []
    working: Counter[str] = Counter()
    broken: list[str] = []
    guard = threading.Lock()

    def finished() -> bool:
        counts = overview(log, queue)
        return counts.done + counts.dead == len(p)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        with headwater.connect(dsn) as mine:
            while not broken:
                lease = mine.claim(queue, worker=f"w{seed}", batch_size=batch_size)
                if lease is None:
                    mine.reap(queue)
                    if finished():
                        return
                    continue
                lease_keys = {key_of[event.position] for event in lease.events}
                with guard:
                    working.update(lease_keys)
                    broken.extend(key for key in lease_keys if working[key] > 1)
                outcomes: dict[int, Outcome] = {}
                failed: set[str] = set()
                entries = []
                for event in lease.events:
                    key = key_of[event.position]
                    if key in failed:
                        continue
                    match chance.randrange(12):
                        case 0:
                            outcomes[event.position] = Retry()
                        case 1:
                            outcomes[event.position] = Dead("no")
                        case 2:
                            outcomes[event.position] = Snooze()
                    outcome = outcomes.get(event.position)
                    if outcome is None or isinstance(outcome, Dead):
                        entries.append((event.position, "dead" if outcome else "done"))
                    else:
                        failed.add(key)
                with guard:
                    working.subtract(lease_keys)
                    handled.extend(entries)
                mine.settle(lease, outcomes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in threads), states(log, queue)
    assert broken == []
    by_key: dict[str, list[int]] = {}
    for position, _ in handled:
        by_key.setdefault(key_of[position], []).append(position)
    assert all(order == sorted(order) for order in by_key.values())
    assert len({position for position, _ in handled}) == len(handled)
    assert {d.position: d.status for d in log.deliveries(queue, batch_size=1000)} == dict(handled) | {
        d.position: "dead" for d in log.dead_letters(queue, batch_size=1000)
    }
    assert connection.execute(
        "select count(*) from headwater_internal.redelivery r join headwater_internal.queue g on g.id = r.queue_id "
        "where g.name = %s",
        (queue,),
    ).fetchone() == (0,)


# --- dead letters ----------------------------------------------------------------------------------------------


@pytest.fixture
def dead(log: headwater.Headwater, topic: str, queue: str) -> list[int]:
    """Six dead letters: of two topics, with two errors."""
    other = log.create_topic(f"{topic}-other").name
    p = [log.publish(name, n) for n, name in enumerate((topic, topic, topic, other, other, other))]
    log.create_queue(queue, [topic, other], max_attempts=2, backoff_seconds=0)
    lease = claim(log, queue)
    log.settle(lease, {position: Dead("timeout 7" if n % 2 else "refused") for n, position in enumerate(p)})
    return p


@pytest.mark.parametrize("act", ["redrive", "discard"])
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"positions": [4]}, [4]),
        ({"positions": [0, 3, 5]}, [0, 3, 5]),
        ({"positions": []}, []),
        ({"error_like": "timeout%"}, [1, 3, 5]),
        ({"topic": "other"}, [3, 4, 5]),
        ({"topic": "other", "error_like": "refused"}, [4]),
    ],
)
def test_dead_letters_are_listed_redriven_and_discarded_as_chosen(
    log: headwater.Headwater, topic: str, queue: str, dead: list[int], act: str, chosen: dict, expected: list[int]
) -> None:
    if "positions" in chosen:
        chosen = {"positions": [dead[n] for n in chosen["positions"]]}
    if "topic" in chosen:
        chosen = chosen | {"topic": f"{topic}-other"}
    assert [letter.position for letter in log.dead_letters(queue, **chosen)] == [dead[n] for n in expected]
    assert getattr(log, act)(queue, **chosen) == len(expected)
    assert states(log, queue) == [
        "dead" if n not in expected else "ready" if act == "redrive" else "done" for n in range(6)
    ]
    assert_counts_agree(log, queue)
    assert positions(log.claim(queue, worker="w", batch_size=10)) == (
        [dead[n] for n in expected] if act == "redrive" else []
    )


def test_a_redriven_event_has_all_its_tries_again_and_keeps_its_history(
    log: headwater.Headwater, queue: str, dead: list[int]
) -> None:
    log.redrive(queue, positions=[dead[0]])
    assert next((d.status, d.attempts) for d in log.deliveries(queue)) == ("ready", 0)
    for number in (1, 2):
        lease = claim(log, queue)
        assert lease.events[0].attempt == number
        log.nack(lease, *lease.events, error=f"again {number}")
    letter = log.dead_letters(queue, positions=[dead[0]])[0]
    assert [tried["error"] for tried in letter.history] == ["refused", "again 1", "again 2"]


def test_dead_letters_are_paged(log: headwater.Headwater, queue: str, dead: list[int]) -> None:
    first = log.dead_letters(queue, batch_size=4)
    rest = log.dead_letters(queue, after=first[-1].position, batch_size=4)
    assert [letter.position for letter in (*first, *rest)] == dead


# --- the view, the counts, the maintenance --------------------------------------------------------------------------


def test_the_view_has_every_event_in_its_state(log: headwater.Headwater, topic: str, queue: str, clock: Clock) -> None:
    p = publish(log, topic, 8)
    log.create_queue(queue, topic, backoff_seconds=0)
    lease = claim(log, queue, 5, worker="first")
    log.settle(
        lease, {p[0]: Retry(LATER, "slow"), p[1]: Retry(None, "soon"), p[2]: Dead("no"), p[3]: None}, rest_done=False
    )
    again = claim(log, queue, 1, worker="second")
    new = claim(log, queue, 1, worker="third")
    found = {d.position: d for d in log.deliveries(queue)}
    assert list(found) == p
    assert {(d.queue, d.topic) for d in found.values()} == {(queue, topic)}
    assert [(d.status, d.attempts, d.worker, d.last_error) for d in found.values()] == [
        ("ready", 1, None, "slow"),
        ("processing", 2, "second", "soon"),
        ("dead", 1, None, "no"),
        ("done", 1, None, None),
        ("processing", 1, "first", None),
        ("processing", 1, "third", None),
        ("ready", 0, None, None),
        ("ready", 0, None, None),
    ]
    assert [d.leased_until for d in found.values()] == [
        None,
        again.expires_at,
        None,
        None,
        lease.expires_at,
        new.expires_at,
        None,
        None,
    ]
    assert [position for position, d in found.items() if d.run_at] == [p[0]]
    for status in ("ready", "processing", "done", "dead"):
        assert {d.position for d in log.deliveries(queue, status=status)} == {
            position for position, d in found.items() if d.status == status
        }
    assert_counts_agree(log, queue)
    clock.end_leases()
    assert [d.status for d in log.deliveries(queue)] == ["ready", "ready", "dead", "done", *["ready"] * 4]
    assert_counts_agree(log, queue)


def test_forgetting_old_claims_keeps_the_counts_and_the_claimed_position(
    log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection
) -> None:
    p = publish(log, topic, 2300)
    log.create_queue(queue, topic)
    kept = [claim(log, queue, 1)]
    log.nack(kept[0], *kept[0].events, error="x", dead=True)
    # A claim that stays open holds back the forgetting of all after it.
    connection.execute(
        "do $$ declare lease bigint; begin for n in 1 .. 1100 loop "
        f"select token into lease from headwater.claim('{queue}', 'w', 1); perform headwater.settle('{queue}', lease); "
        "end loop; end $$"
    )
    kept.append(claim(log, queue, 1))
    before = overview(log, queue)
    log.reap(queue)

    def rows() -> int:
        found = connection.execute(
            "select count(*) from headwater_internal.ledger l join headwater_internal.queue g on g.id = l.queue_id "
            "where g.name = %s",
            (queue,),
        ).fetchone()
        assert found is not None
        return int(found[0])

    assert rows() == 1
    after = overview(log, queue)
    # Ages grow while one looks.
    assert replace(after, lag_seconds=before.lag_seconds, unfinished_seconds=before.unfinished_seconds) == before
    assert (before.done, before.dead, before.processing) == (1100, 1, 1)
    assert_counts_agree(log, queue)
    connection.execute(
        "do $$ declare lease bigint; begin for n in 1 .. 1100 loop "
        f"select token into lease from headwater.claim('{queue}', 'w', 1); perform headwater.settle('{queue}', lease); "
        "end loop; end $$"
    )
    log.reap(queue)
    assert rows() == 1101
    log.ack(kept[1])
    log.reap(queue)
    assert rows() == 1
    assert_counts_agree(log, queue)
    assert positions(claim(log, queue, 1000)) == p[2202:]


def test_maintenance_ends_leases_that_ran_out(log: headwater.Headwater, topic: str, queue: str, clock: Clock) -> None:
    publish(log, topic, 2)
    log.create_queue(queue, topic)
    lost = claim(log, queue)
    clock.end_leases()
    assert not log.maintain().busy
    with pytest.raises(headwater.LeaseLost):
        log.ack(lost)
    assert claim(log, queue).isolated


@pytest.fixture
def one_log(log: headwater.Headwater) -> Iterator[headwater.Headwater]:
    """The log with no queue of another test that retention would wait for."""
    for one in log.queues():
        log.delete_queue(one.name)
    yield log
    for one in log.queues():
        log.delete_queue(one.name)


def releasable(connection: psycopg.Connection) -> int:
    found = connection.execute("select headwater_internal.releasable()").fetchone()
    assert found is not None
    return int(found[0])


def test_retention_waits_for_what_a_queue_that_holds_retention_has_not_done(
    one_log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection, clock: Clock
) -> None:
    p = publish(one_log, topic, 8)
    one_log.create_queue("careless", topic, holds_retention=False)
    assert releasable(connection) == one_log.state().stable
    one_log.create_queue(queue, topic)
    assert releasable(connection) == 0
    first, second = claim(one_log, queue, 3), claim(one_log, queue, 5)
    assert releasable(connection) == 0
    one_log.ack(first)
    assert releasable(connection) == p[2]
    one_log.nack(second, second.events[0], error="x", delay=LATER)
    one_log.nack(second, second.events[1], error="x", dead=True)
    one_log.ack(second)
    assert releasable(connection) == p[3] - 1
    clock.end_waits()
    again = claim(one_log, queue)
    assert releasable(connection) == p[3] - 1
    one_log.ack(again)
    # Dead letters are not waited for: they would hold the log for ever.
    assert releasable(connection) == p[7]


@pytest.mark.parametrize("bound_to", ["topic", "pattern"])
def test_a_queue_of_a_silent_topic_does_not_hold_retention(
    one_log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection, bound_to: str
) -> None:
    busy = one_log.create_topic(f"{topic}-busy").name
    if bound_to == "topic":
        one_log.create_queue(queue, topic)
    else:
        one_log.create_queue(queue, after=one_log.state().stable)
        one_log.bind(queue, pattern="rare.#")
    first = one_log.publish(topic, 1, routing_key="rare.a")
    lease = claim(one_log, queue)
    assert positions(lease) == [first]
    one_log.ack(lease)
    one_log.publish_many(busy, (NewEvent(None) for _ in range(25_000)))
    waiting = one_log.publish(topic, 1, routing_key="rare.b")
    one_log.publish_many(busy, (NewEvent(None) for _ in range(15_000)))
    for _ in range(5):
        one_log.maintain()
    # What it did not claim yet is waited for.
    assert waiting - 10_000 <= releasable(connection) < waiting
    lease = claim(one_log, queue)
    assert positions(lease) == [waiting]
    one_log.ack(lease)
    for _ in range(3):
        one_log.maintain()
    assert releasable(connection) >= waiting + 10_000
    assert_counts_agree(one_log, queue)
    after = one_log.publish(topic, 1, routing_key="rare.c")
    assert positions(claim(one_log, queue)) == [after]


def test_a_queue_that_was_never_bound_keeps_its_beginning(one_log: headwater.Headwater, topic: str, queue: str) -> None:
    one_log.create_queue(queue, after=one_log.state().stable)
    one_log.publish_many(topic, (NewEvent(None) for _ in range(10_001)))
    one_log.maintain()
    one_log.bind(queue, topic=topic)
    assert len(claim(one_log, queue, 20_000).events) == 10_001


def test_what_retention_took_is_not_tried_again_and_holds_up_nobody(
    one_log: headwater.Headwater, topic: str, queue: str, connection: psycopg.Connection
) -> None:
    other = one_log.create_topic(f"{topic}-short").name
    p = [one_log.publish(name, 1, key="k") for name in (other, topic, other)]
    kept = one_log.publish(other, 1)
    one_log.create_queue(queue, [topic, other], ordered_keys=True, holds_retention=False, backoff_seconds=0)
    lease = claim(one_log, queue)
    assert positions(lease) == [*p, kept]
    one_log.settle(lease, {p[0]: Retry(), p[2]: Dead("kept for the record")})
    connection.execute("delete from headwater_internal.event e where position = any (%s)", ([p[0], p[2]],))
    connection.execute("update headwater_internal.topic set expired_to = %s where name = %s", (p[2], other))
    one_log.reap(queue)
    lease = claim(one_log, queue)
    assert positions(lease) == [p[1]]
    one_log.ack(lease)
    assert one_log.redrive(queue) == 0
    assert [letter.position for letter in one_log.dead_letters(queue)] == [p[2]]
    assert one_log.discard(queue) == 1


@pytest.mark.parametrize("analyze_late", [False, True])
@pytest.mark.parametrize("others", [0, 3, 60, 600, 6000])
def test_claims_and_acks_read_few_of_the_events_that_wait_for_their_keys(
    log: headwater.Headwater, connection: psycopg.Connection, topic: str, queue: str, others: int, analyze_late: bool
) -> None:
    # One retry in each of many other queues: by these statistics, a scan of a whole queue reads one row.
    connection.autocommit = True
    connection.execute("delete from headwater_internal.redelivery where queue_id > 100000")
    connection.execute(
        "insert into headwater_internal.redelivery "
        "(queue_id, position, topic_id, attempt, visible_at, key_hash, token) "
        "select 100000 + n, n, 1, 1, now() - n * interval '1 s', n, case when n %% 2 = 0 then n end "
        "from generate_series(1, %s) as n",
        (others,),
    )
    if others:
        connection.execute("vacuum analyze headwater_internal.redelivery")
    log.create_queue(queue, [topic], ordered_keys=True)
    keys, waiting = 20, 3000
    log.publish_batch(topic, [NewEvent(n, key=f"k{n % keys}") for n in range(keys + waiting)])
    # The first of each key is leased, so that the others wait.
    first = log.claim(queue, worker="w", batch_size=keys)
    assert first is not None
    while log.claim(queue, worker="w", batch_size=keys) is not None:
        pass
    assert [event.data for event in first.events] == list(range(keys))
    # As autovacuum does at any moment.
    if analyze_late:
        connection.execute("vacuum analyze headwater_internal.redelivery")

    def rows_read() -> int:
        row = connection.execute(
            "select coalesce(idx_tup_fetch, 0) + coalesce(seq_tup_read, 0) from pg_stat_xact_user_tables "
            "where relid = 'headwater_internal.redelivery'::regclass"
        ).fetchone()
        assert row is not None
        return int(row[0])

    # A few rows for each key, not the waiting events of each key.
    with connection.transaction():
        before = rows_read()
        log.ack(first, connection=connection)
        assert rows_read() - before < waiting / 10
    with connection.transaction():
        before = rows_read()
        lease = log.claim(queue, worker="w", batch_size=keys, connection=connection)
        assert lease is not None
        assert [event.data for event in lease.events] == list(range(keys, 2 * keys))
        assert rows_read() - before < waiting / 10
    p = [event.position for event in lease.events]
    with connection.transaction():
        before = rows_read()
        log.settle(lease, {p[0]: Retry(), p[1]: Dead("broken")}, connection=connection)
        assert rows_read() - before < waiting / 10
    assert [letter.last_error for letter in log.dead_letters(queue)] == ["broken"]
