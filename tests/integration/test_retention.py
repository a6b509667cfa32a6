"""Do segments come and go as they should, and does nobody lose what they still need?"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import headwater
from databases import database
from headwater import Event, NewEvent
from headwater.log.model import MaintenanceResult
from patience import PATIENCE_SECONDS

Until = Callable[[Callable[[], Any]], Any]
DAY = timedelta(days=1)
_numbers = itertools.count()


@pytest.fixture
def dsn(admin_dsn: str, template: str) -> Iterator[str]:
    """A log for each test: retention is about the log as a whole."""
    with database(admin_dsn, template) as dsn:
        yield dsn


class Clock:
    """Lets days pass: what is old becomes older."""

    def __init__(self, log: headwater.Headwater, connection: psycopg.Connection[Any]) -> None:
        self.log, self.connection = log, connection

    def pass_days(self, days: int) -> MaintenanceResult:  # type: ignore[name-defined]
        self.connection.execute(
            "update headwater_internal.segment set opened_at = opened_at - %s, closed_at = closed_at - %s",
            (days * DAY, days * DAY),
        )
        return self.log.maintain()


@pytest.fixture
def clock(log: headwater.Headwater, connection: psycopg.Connection) -> Clock:
    return Clock(log, connection)


def numbers(events: list[Event]) -> list[Any]:
    return [event.data for event in events]


def segments(connection: psycopg.Connection[Any]) -> list[int]:
    """The numbers of the segments; the tables that are there agree."""
    numbers = [
        n
        for (n,) in connection.execute(
            "select lo / headwater_internal.segment_size() from headwater_internal.segment order by lo"
        )
    ]
    tables = connection.execute(
        "select relname from pg_inherits join pg_class on pg_class.oid = inhrelid "
        "where inhparent = 'headwater_internal.event'::regclass order by relname"
    ).fetchall()
    assert [name for (name,) in tables] == [f"event_{n:07}" for n in numbers]
    return numbers


def fill_days(log: headwater.Headwater, clock: Clock, topics: list[str], days: int) -> list[int]:
    """One event a day and topic, each day in its own segment; the first position of each day."""
    firsts = []
    for day in range(days):
        for topic in topics:
            position = log.publish(topic, day)
            if topic == topics[0]:
                assert position is not None
                firsts.append(position)
        clock.pass_days(1)
    return firsts


def test_segments_are_made_ahead(log: headwater.Headwater, connection: psycopg.Connection) -> None:
    assert segments(connection) == [0, 1, 2, 3]
    assert log.maintain().segments_made == 0
    log.change_settings(segments_ahead=5)
    assert log.maintain().segments_made == 2
    assert segments(connection) == [0, 1, 2, 3, 4, 5]


def test_the_log_rotates_when_the_interval_says_so_and_nothing_changes_for_readers(
    log: headwater.Headwater, topic: str, clock: Clock, connection: psycopg.Connection
) -> None:
    positions = fill_days(log, clock, [topic], 4)
    size = connection.execute("select headwater_internal.segment_size()").fetchone()[0]  # type: ignore[index]
    assert [position // size for position in positions] == [0, 1, 2, 3]
    assert numbers(log.read(topic)) == [0, 1, 2, 3]
    assert numbers(list(log.follow(batch_size=2, stop_when_caught_up=True))) == [0, 1, 2, 3]
    assert numbers(list(log.follow(topic, batch_size=1, stop_when_caught_up=True))) == [0, 1, 2, 3]
    assert numbers(log.read_backwards(topic)) == [3, 2, 1, 0]
    assert max(segments(connection)) >= positions[-1] // size + 3


def test_an_empty_segment_is_not_left(log: headwater.Headwater, topic: str, clock: Clock) -> None:
    log.publish(topic, 0)
    clock.pass_days(1)
    before = log.state().head
    clock.pass_days(1)
    clock.pass_days(1)
    assert log.state().head == before


def test_the_interval_changes_on_the_fly(log: headwater.Headwater, topic: str, clock: Clock) -> None:
    first = log.publish(topic, 0)
    assert first is not None
    log.change_settings(segment_interval=7 * DAY)
    clock.pass_days(2)
    assert log.publish(topic, 1) == first + 1
    log.change_settings(segment_interval=timedelta(hours=1))
    log.maintain()
    third = log.publish(topic, 2)
    assert third is not None
    assert third > first + 1_000_000
    with pytest.raises(headwater.InvalidRequest, match="at least 1 second"):
        log.change_settings(segment_interval=timedelta(0))


def test_a_topic_loses_what_is_older_than_its_retention_and_no_other_does(
    log: headwater.Headwater, clock: Clock, connection: psycopg.Connection
) -> None:
    short = log.create_topic("short", retention=2 * DAY).name
    long = log.create_topic("long", retention=5 * DAY).name
    forever = log.create_topic("forever").name
    fill_days(log, clock, [short, long], 8)
    log.publish(short, "new")
    assert numbers(log.read(short)) == [6, 7, "new"]
    assert numbers(log.read(long)) == [3, 4, 5, 6, 7]
    # Segments that nobody wants any more are gone; those that one topic wants are swept of the others.
    assert segments(connection)[0] == 3
    stored = connection.execute(
        "select t.name, count(*) from headwater_internal.event e join headwater_internal.topic t on t.id = "
        "e.topic_id group by 1"
    ).fetchall()
    assert dict(stored) == {"short": 3, "long": 5}
    log.publish(forever, "kept")
    clock.pass_days(1)
    clock.pass_days(1000)
    assert numbers(log.read(forever)) == ["kept"]
    assert log.read(short) == log.read(long) == []
    assert len([n for n in segments(connection) if n <= 9]) <= 2


def test_a_large_retention_keeps_everything_and_stops_no_maintenance(log: headwater.Headwater, clock: Clock) -> None:
    topic = log.create_topic("ages", retention=timedelta(days=1_000_000)).name
    fill_days(log, clock, [topic], 3)
    assert not clock.pass_days(1000).busy
    assert numbers(log.read(topic)) == [0, 1, 2]
    with pytest.raises(headwater.InvalidRequest, match="above zero"):
        log.create_topic("never", retention=timedelta(0))
    with pytest.raises(headwater.InvalidRequest, match="above zero"):
        log.alter_topic(topic, retention=timedelta(milliseconds=-1))


def test_retention_can_be_given_and_taken_back(log: headwater.Headwater, topic: str, clock: Clock) -> None:
    fill_days(log, clock, [topic], 4)
    clock.pass_days(10)
    assert len(log.read(topic)) == 4
    log.alter_topic(topic, retention=30 * DAY)
    log.maintain()
    assert len(log.read(topic)) == 4
    log.alter_topic(topic, keep_forever=True)
    clock.pass_days(100)
    assert len(log.read(topic)) == 4
    log.alter_topic(topic, retention=DAY)
    log.maintain()
    assert log.read(topic) == []


def test_a_reader_behind_retention_is_told_the_earliest_position(log: headwater.Headwater, clock: Clock) -> None:
    topic = log.create_topic("short", retention=2 * DAY).name
    positions = fill_days(log, clock, [topic], 6)
    assert numbers(log.read(topic)) == [4, 5]
    for after in (0, positions[0], positions[1]):
        with pytest.raises(headwater.PositionExpired) as caught:
            log.read(topic, after=after)
        assert caught.value.earliest_position == positions[4]
        with pytest.raises(headwater.PositionExpired):
            next(log.follow(topic, after=after))
        with pytest.raises(headwater.PositionExpired):
            log.read(after=after)
        assert numbers(log.read(topic, after=after, skip_expired=True)) == [4, 5]
        assert numbers(list(log.follow(topic, after=after, skip_expired=True, stop_when_caught_up=True))) == [4, 5]
    assert numbers(log.read(topic, after=caught.value.earliest_position - 1)) == [4, 5]
    # The last that was taken has been read: nothing is missing after it.
    assert numbers(log.read(topic, after=positions[3])) == [4, 5]


def test_when_all_is_gone_the_earliest_position_is_the_next(log: headwater.Headwater, clock: Clock) -> None:
    topic = log.create_topic("short", retention=DAY).name
    fill_days(log, clock, [topic], 2)
    clock.pass_days(5)
    assert log.read(topic) == []
    with pytest.raises(headwater.PositionExpired) as caught:
        log.read(topic, after=0)
    new = log.publish(topic, "new")
    assert new is not None
    assert caught.value.earliest_position <= new
    assert numbers(log.read(topic, after=caught.value.earliest_position - 1)) == ["new"]


def test_a_cursor_behind_retention_says_so_or_skips(log: headwater.Headwater, clock: Clock) -> None:
    topic = log.create_topic("short", retention=2 * DAY).name
    log.publish(topic, "first")
    log.set_cursor("late", position=1, topics=topic)
    fill_days(log, clock, [topic], 6)
    with pytest.raises(headwater.PositionExpired):
        next(log.follow(topic, cursor="late"))
    assert numbers(list(log.follow(topic, cursor="late", skip_expired=True, stop_when_caught_up=True))) == [4, 5]
    assert list(log.follow(topic, cursor="late", stop_when_caught_up=True)) == []


def test_a_new_cursor_begins_at_what_is_kept(log: headwater.Headwater, clock: Clock) -> None:
    short = log.create_topic("short", retention=2 * DAY).name
    forever = log.create_topic("forever").name
    fill_days(log, clock, [short, forever], 4)
    whole = [("forever", 0), ("forever", 1), ("short", 2), ("forever", 2), ("short", 3), ("forever", 3)]
    for topics in (None, [short, forever]):
        for name in (f"new {topics}", None):
            events = log.follow(topics, cursor=name, stop_when_caught_up=True, batch_size=2)
            assert [(event.topic, event.data) for event in events] == whole
    log.set_cursor("replay", position=0, topics=[short, forever])
    events = log.follow([short, forever], cursor="replay", stop_when_caught_up=True)
    assert [(event.topic, event.data) for event in events] == whole


def test_a_cursor_that_holds_retention_is_waited_for(
    log: headwater.Headwater, clock: Clock, connection: psycopg.Connection
) -> None:
    topic = log.create_topic("short", retention=2 * DAY).name
    log.open_cursor("careful", topics=topic, holds_retention=True)
    fill_days(log, clock, [topic], 6)
    assert segments(connection)[0] == 0
    follower = log.follow(topic, cursor="careful", batch_size=1)
    assert [next(follower).data for _ in range(3)] == [0, 1, 2]
    follower.close()
    log.maintain()
    assert numbers(list(log.follow(topic, cursor="careful", stop_when_caught_up=True))) == [2, 3, 4, 5]
    log.maintain()
    assert numbers(log.read(topic)) == [4, 5]


def test_an_open_publisher_keeps_its_segment(
    log: headwater.Headwater, clock: Clock, connection: psycopg.Connection, dsn: str
) -> None:
    topic = log.create_topic("short", retention=DAY).name
    log.publish(topic, 0)
    with psycopg.connect(dsn) as slow:
        log.publish(topic, "slow", connection=slow)
        clock.pass_days(1)
        clock.pass_days(10)
        slow.commit()
    assert numbers(log.read(topic)) == [0, "slow"]


def test_offsets_go_on_when_the_tail_of_a_partition_has_expired(
    log: headwater.Headwater, clock: Clock, connection: psycopg.Connection
) -> None:
    topic = log.create_topic("partitions", kind="sequenced", partitions=2, retention=DAY).name
    forever = log.create_topic("forever").name
    log.publish_batch(topic, [NewEvent(n, partition=0) for n in range(5)])
    log.publish_batch(topic, [NewEvent(n, partition=1) for n in range(3)])
    log.publish(forever, 0)
    clock.pass_days(1)
    clock.pass_days(5)
    assert log.read(topic) == []
    log.publish_batch(topic, [NewEvent("new", partition=0)])
    clock.pass_days(1)
    log.publish_batch(topic, [NewEvent("newer", partition=0), NewEvent("new", partition=1)])
    found = [(event.partition, event.topic_offset, event.data) for event in log.read(topic)]
    assert found == [(0, 5, "new"), (0, 6, "newer"), (1, 3, "new")]
    clock.pass_days(1)
    clock.pass_days(5)
    clock.pass_days(5)
    assert log.read(topic) == []
    log.publish_batch(topic, [NewEvent("last", partition=0), NewEvent("last", partition=1)])
    assert [(event.partition, event.topic_offset) for event in log.read(topic)] == [(0, 7), (1, 4)]


def test_a_partition_long_silent_goes_on_with_its_offsets(log: headwater.Headwater, clock: Clock) -> None:
    topic = log.create_topic("partitions", kind="sequenced", partitions=2).name
    log.publish_batch(topic, [NewEvent(n, partition=0) for n in range(5)])
    for _ in range(3):
        log.publish_batch(topic, [NewEvent("busy", partition=1)])
        clock.pass_days(1)
    log.publish_batch(topic, [NewEvent("again", partition=0), NewEvent("busy", partition=1)])
    assert [(event.partition, event.topic_offset) for event in log.read(topic)][-2:] == [(0, 5), (1, 3)]


def test_a_deleted_topic_is_gone_at_once_and_its_name_is_free(
    log: headwater.Headwater, clock: Clock, connection: psycopg.Connection
) -> None:
    topic, other = log.create_topic("doomed").name, log.create_topic("other").name
    fill_days(log, clock, [topic, other], 2)
    log.publish(topic, "with an id", event_id="one")
    log.schedule(topic, "later", delay=DAY)
    log.delete_topic(topic)
    for act in (lambda: log.read(topic), lambda: log.publish(topic, 0), lambda: log.delete_topic(topic)):
        with pytest.raises(headwater.TopicNotFound):
            act()
    whole = log.follow(stop_when_caught_up=True)
    assert [(event.topic, event.data) for event in whole] == [("other", 0), ("other", 1)]
    assert log.scheduled() == []
    assert [t.name for t in log.topics()] == ["other"]
    log.create_topic(topic)
    log.publish(topic, "new", event_id="one")
    assert numbers(log.read(topic)) == ["new"]
    clock.pass_days(1)
    log.maintain()
    left = connection.execute(
        "select count(*) from headwater_internal.event e where e.position < %s", (log.state().head,)
    )
    assert left.fetchone() == (3,)
    assert numbers(log.read(topic)) == ["new"]
    connection.execute("update headwater_internal.topic set deleted_at = deleted_at - interval '2 days'")
    log.maintain()
    assert connection.execute("select count(*) from headwater_internal.topic").fetchone() == (2,)
    assert connection.execute("select count(*) from headwater_internal.event_identity").fetchone() == (1,)


def test_an_event_id_is_free_again_when_its_event_is_gone(log: headwater.Headwater, clock: Clock) -> None:
    topic = log.create_topic("short", retention=DAY).name
    first = log.publish(topic, 0, event_id="one")
    assert log.publish(topic, 0, event_id="one") == first
    clock.pass_days(1)
    clock.pass_days(5)
    second = log.publish(topic, 1, event_id="one")
    assert second != first
    assert numbers(log.read(topic)) == [1]


def test_many_may_maintain_at_once_while_others_publish_and_read(
    log: headwater.Headwater, dsn: str, connection: psycopg.Connection
) -> None:
    topic = log.create_topic("busy").name
    short = log.create_topic("short", retention=timedelta(seconds=1)).name
    over = threading.Event()

    def maintain() -> int:
        dropped = 0
        with headwater.connect(dsn) as own:
            while not over.is_set():
                dropped += own.maintain().segments_dropped
        return dropped

    def age() -> None:
        with psycopg.connect(dsn, autocommit=True) as own:
            for _ in range(12):
                own.execute(
                    "update headwater_internal.segment set opened_at = opened_at - interval '2 days', "
                    "closed_at = closed_at - interval '2 days'"
                )
                for n in range(20):
                    log.publish(topic, n)
                    log.publish(short, n)

    def follow() -> list[int]:
        seen = []
        for event in log.follow(topic, batch_size=10):
            seen.append(event.position)
            if event.data == "end":
                return seen
        raise AssertionError("a follower has no end")

    with ThreadPoolExecutor(6) as pool:
        maintaining = [pool.submit(maintain) for _ in range(4)]
        following = pool.submit(follow)
        try:
            pool.submit(age).result(timeout=PATIENCE_SECONDS)
            end = log.publish(topic, "end")
            seen = following.result(timeout=PATIENCE_SECONDS)
        finally:
            over.set()
        for future in maintaining:
            future.result(timeout=PATIENCE_SECONDS)
    assert len(seen) == 241
    assert seen == sorted(seen)
    assert seen[-1] == end
    assert len({position // 100_000_000 for position in seen}) > 2
    segments(connection)


def test_a_segment_that_somebody_reads_is_dropped_another_time(
    log: headwater.Headwater, clock: Clock, dsn: str, connection: psycopg.Connection
) -> None:
    topic = log.create_topic("short", retention=DAY).name
    fill_days(log, clock, [topic], 1)
    with psycopg.connect(dsn) as reader:
        reader.execute("select count(*) from headwater_internal.event").fetchone()
        assert clock.pass_days(5).segments_dropped == 0
        assert 0 in segments(connection)
        # What is gone by retention is not read meanwhile.
        assert log.read(topic) == []
        log.publish(topic, "new")
        assert numbers(log.read(topic)) == ["new"]
    assert log.maintain().segments_dropped == 1
    assert 0 not in segments(connection)


def test_positions_that_rotation_passed_over_are_no_lag(
    log: headwater.Headwater, topic: str, clock: Clock, connection: psycopg.Connection
) -> None:
    log.set_cursor("behind", position=0, topics=topic)
    fill_days(log, clock, [topic], 3)
    log.publish(topic, "last")
    (behind,) = log.cursors()
    assert (behind.lag_events, behind.lag_is_more) == (4, False)
    low, high = log.read(topic)[0].position, log.read(topic)[2].position
    between = connection.execute(
        "select headwater_internal.positions_between(%s::bigint, %s::bigint)", (low, high)
    ).fetchone()
    assert between is not None
    assert 2 <= between[0] <= 6
    assert connection.execute("select headwater_internal.positions_between(5::bigint, 5::bigint)").fetchone() == (0,)


@pytest.mark.parametrize("several", [False, True])
def test_a_reader_whom_retention_overtakes_is_told(
    log: headwater.Headwater, clock: Clock, dsn: str, until: Until, connection: psycopg.Connection, several: bool
) -> None:
    topic = log.create_topic("short", retention=3 * DAY).name
    topics = [topic, log.create_topic("other").name] if several else topic
    fill_days(log, clock, [topic], 2)
    assert numbers(log.read(topic, after=0)) == [0, 1]
    with psycopg.connect(dsn) as maintaining, ThreadPoolExecutor(1) as pool:
        maintaining.execute(
            "update headwater_internal.segment set closed_at = closed_at - interval '9 days', opened_at = null"
        )
        maintaining.execute("select headwater.maintain()")
        # It has looked at the topic by now, and waits for the segment that is being dropped.
        reading = pool.submit(log.read, topics, after=0)
        until(lambda: connection.execute("select 1 from pg_locks where not granted").fetchone())
        maintaining.commit()
        with pytest.raises(headwater.PositionExpired):
            reading.result(timeout=PATIENCE_SECONDS)


def test_what_has_expired_is_not_read_while_it_waits_to_be_cleared_away(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    short, forever = log.create_topic("short").name, log.create_topic("forever").name
    for n in range(4):
        last = log.publish(short if n in (1, 2) else forever, n)
        if n == 2:
            connection.execute("update headwater_internal.topic set expired_to = %s - 1 where name = 'short'", (last,))
    assert numbers(log.read(short)) == [2]
    assert numbers(log.read([short, forever])) == numbers(log.read()) == [0, 2, 3]
    assert numbers(log.read_backwards()) == [3, 2, 0]


@pytest.mark.parametrize("binding", ["one topic", "two topics", "pattern", "ordered keys"])
def test_a_queue_does_not_hand_out_what_has_expired_and_waits_to_be_cleared_away(
    log: headwater.Headwater, connection: psycopg.Connection, binding: str
) -> None:
    short, other = log.create_topic("short").name, log.create_topic("other").name
    log.create_queue("late", [short, other] if binding == "two topics" else short, ordered_keys="keys" in binding)
    if binding == "pattern":
        (whole,) = log.bindings("late")
        log.bind("late", pattern="#", topic=short)
        log.unbind("late", whole.id)
    first, second, *_ = log.publish_batch(short, [NewEvent(n, key="k", routing_key="a") for n in range(4)])
    connection.execute("update headwater_internal.topic set expired_to = %s where name = 'short'", (first,))
    assert {one.position: one.status for one in log.deliveries("late")} == dict.fromkeys(
        range(second, second + 3), "ready"
    )
    lease = log.claim("late", worker="me", batch_size=2)
    assert lease is not None
    assert [event.data for event in lease.events] == [1, 2]
    # One that fails, and expires before its next try, is not tried again.
    log.settle(lease, {second: headwater.Retry(after=timedelta(0))}, rest_done=True)
    connection.execute("update headwater_internal.topic set expired_to = %s where name = 'short'", (second + 1,))
    lease = log.claim("late", worker="me", batch_size=10)
    if lease is None and "keys" in binding:
        # It waited behind the one that failed, until that was seen to be gone.
        log.reap("late")
        lease = log.claim("late", worker="me", batch_size=10)
    assert lease is not None
    assert [event.data for event in lease.events] == [3]
    log.settle(lease, {lease.events[0].position: headwater.Dead("no")}, rest_done=True)
    connection.execute("update headwater_internal.topic set expired_to = %s where name = 'short'", (second + 2,))
    assert log.redrive("late") == 0
    assert len(log.dead_letters("late")) == 1


def test_maintenance_that_finds_the_tables_locked_is_done_another_time(
    log: headwater.Headwater, topic: str, dsn: str
) -> None:
    log.publish(topic, 0)
    with psycopg.connect(dsn) as working:
        working.execute("select * from headwater_internal.segment for update")
        log.change_settings(segment_interval=timedelta(seconds=1))
        log.schedule(topic, 1, delay=timedelta(0))
        working.execute("update headwater_internal.segment set opened_at = opened_at - interval '1 hour'")
        maintenance = log.maintain()
        assert (maintenance.busy, maintenance.released) == (True, 1)
        working.commit()
    before = log.state().head
    assert before < 100
    assert not log.maintain().busy
    assert log.state().head > before + 1_000_000
    log.publish(topic, 2)
    assert numbers(log.read(topic)) == [0, 1, 2]


def test_a_rotation_that_was_undone_but_for_the_sequence_leaves_no_lag(
    log: headwater.Headwater, topic: str, clock: Clock, connection: psycopg.Connection
) -> None:
    log.set_cursor("behind", position=0, topics=topic)
    log.publish(topic, 0)
    with pytest.raises(psycopg.errors.DivisionByZero), connection.transaction():
        connection.execute("update headwater_internal.segment set opened_at = opened_at - interval '2 days'")
        connection.execute("select headwater.maintain()")
        connection.execute("select 1 / 0")
    log.publish(topic, 1)
    log.maintain()
    (behind,) = log.cursors()
    assert (behind.lag_events, behind.lag_is_more) == (2, False)
    assert numbers(list(log.follow(topic, cursor="behind", stop_when_caught_up=True))) == [0, 1]


# --- consumers hold the topics that they read ------------------------------------------------------------------


def test_a_forgotten_queue_holds_its_own_topic_and_no_other(log: headwater.Headwater, clock: Clock) -> None:
    log.create_topic("short", retention=DAY)
    log.create_topic("other", retention=DAY)
    log.create_queue("forgotten", "other")
    fill_days(log, clock, ["short", "other"], 5)
    assert numbers(log.read("short")) == [4]
    assert numbers(log.read("other")) == [0, 1, 2, 3, 4]
    log.delete_queue("forgotten")
    log.maintain()
    assert numbers(log.read("other")) == [4]


def test_an_event_that_waits_for_its_retry_holds_its_own_topic_and_no_other(
    log: headwater.Headwater, clock: Clock
) -> None:
    for name in ("short", "other"):
        log.create_topic(name, retention=DAY)
    log.create_queue("worker", ["short", "other"])
    log.publish("other", "waits")
    lease = log.claim("worker", worker="w")
    assert lease is not None
    log.settle(lease, {lease.events[0].position: headwater.Retry(30 * DAY)})
    fill_days(log, clock, ["short", "other"], 4)
    while lease := log.claim("worker", worker="w", batch_size=100):
        log.ack(lease)
    log.maintain()
    assert numbers(log.read("short")) == [3]
    assert numbers(log.read("other"))[0] == "waits"


@pytest.mark.parametrize("consumer", ["cursor", "queue"])
def test_a_consumer_of_the_whole_log_holds_every_topic(log: headwater.Headwater, clock: Clock, consumer: str) -> None:
    log.create_topic("short", retention=DAY)
    if consumer == "cursor":
        log.set_cursor("all", position=0, holds_retention=True)
    else:
        log.create_queue("all")
        log.bind("all", pattern="#")
    fill_days(log, clock, ["short"], 4)
    assert numbers(log.read("short")) == [0, 1, 2, 3]


def test_a_queue_without_bindings_and_one_whose_topic_was_deleted_hold_nothing(
    log: headwater.Headwater, clock: Clock
) -> None:
    log.create_topic("short", retention=DAY)
    log.create_topic("gone")
    log.create_queue("unbound")
    log.create_queue("orphan", "gone")
    log.delete_topic("gone")
    fill_days(log, clock, ["short"], 4)
    assert numbers(log.read("short")) == [3]


def test_a_binding_that_ended_holds_its_topic_until_the_queue_is_past_it(
    log: headwater.Headwater, clock: Clock
) -> None:
    for name in ("short", "other"):
        log.create_topic(name, retention=DAY)
    log.create_queue("worker", "other")
    binding = log.bind("worker", topic="short")
    fill_days(log, clock, ["short", "other"], 2)
    log.unbind("worker", binding.id, to_position=log.state().head)
    fill_days(log, clock, ["short", "other"], 3)
    assert len(numbers(log.read("short"))) == 5
    while lease := log.claim("worker", worker="w", batch_size=100):
        log.ack(lease)
    log.maintain()
    assert numbers(log.read("short", skip_expired=True)) == [2]


def test_a_subscription_queue_holds_retention_of_its_topics_and_its_retries(
    log: headwater.Headwater, clock: Clock
) -> None:
    for name in ("short", "other"):
        log.create_topic(name, retention=DAY)
    log.subscribe("readers", "true", topics=["other"])
    log.alter_queue("readers", holds_retention=True)
    first = log.publish("other", "first")
    reading = log.read_next("readers", reader="r")
    log.retry_later("readers", reading.events[0], handler="h", error="x", delay_seconds=30 * 86400.0)
    log.commit_reading("readers", first or 0, reader="r", release=True)
    fill_days(log, clock, ["short", "other"], 4)
    reading = log.read_next("readers", reader="r")
    log.commit_reading("readers", reading.next_position, reader="r", release=True)
    log.maintain()
    assert numbers(log.read("short")) == [3]
    assert numbers(log.read("other"))[0] == "first"


def test_the_log_says_which_consumer_holds_which_topic(
    log: headwater.Headwater, clock: Clock, connection: psycopg.Connection
) -> None:
    log.create_topic("short", retention=DAY)
    log.create_topic("other", retention=DAY)
    log.create_queue("forgotten", "other")
    log.set_cursor("behind", position=0, topics=["other"], holds_retention=True)
    log.create_queue("done", "short")
    fill_days(log, clock, ["short", "other"], 3)
    while lease := log.claim("done", worker="w", batch_size=100):
        log.ack(lease)
    connection.execute("update headwater_internal.event set published_at = published_at - interval '3 days'")
    held = connection.execute(
        "select consumer_kind, consumer, topic, held_after, events, events_are_more, bytes > 0 "
        "from headwater.retention_held() order by 1"
    ).fetchall()
    assert held == [
        ("cursor", "behind", "other", 0, 3, False, True),
        ("queue", "forgotten", "other", 0, 3, False, True),
    ]


class Consumers:
    """Random consumers of random topics, with a model of what each of them still needs."""

    TOPICS = ("a", "b", "c", "d")

    def __init__(self, log: headwater.Headwater, connection: psycopg.Connection[Any], seed: int) -> None:
        self.log, self.connection, self.random = log, connection, random.Random(seed)
        self.events: dict[int, tuple[str, str, int]] = {}
        self.queues: dict[str, dict[str, Any]] = {}
        self.cursors: dict[str, tuple[list[str] | None, int]] = {}
        self.leases: list[tuple[str, Any]] = []
        for topic in self.TOPICS:
            log.create_topic(topic, retention=None if topic == "d" else DAY)

    def kept(self) -> set[int]:
        return {position for (position,) in self.connection.execute(
            "select e.position from headwater_internal.event e join headwater_internal.topic t on t.id = e.topic_id "
            "where e.position > t.expired_to"
        )}  # fmt: skip

    def act(self, day: int) -> None:
        pick = self.random
        what = pick.choice(
            ["publish"] * 4 + ["queue", "bind", "unbind", "cursor", "advance"] + ["work"] * 4 + ["rewind"]
        )
        queue = pick.choice(sorted(self.queues)) if self.queues else None
        topics = pick.sample(self.TOPICS, pick.randint(1, 2))
        if what == "publish":
            for _ in range(pick.randint(1, 4)):
                topic, key = pick.choice(self.TOPICS), pick.choice(["x.1", "x.2", "y.1"])
                self.events[self.log.publish(topic, 0, routing_key=key) or 0] = (topic, key, day)
        elif what == "queue" and len(self.queues) < 5:
            name = f"queue-{len(self.queues)}"
            must = pick.random() < 0.8
            self.log.create_queue(name, topics, holds_retention=must)
            self.queues[name] = {
                "must": must, "done": set(self.events) - self.kept(), "start": 0, "again": set(),
                "bindings": [[topic, None, 0, None, None] for topic in topics],
            }  # fmt: skip
        elif what == "bind" and queue:
            topic, key = pick.choice([*self.TOPICS, None]), pick.choice([None, "x.*", "y.#"])
            if topic is None and key is None:
                return
            made = self.log.bind(queue, topic=topic, pattern=key)
            self.queues[queue]["bindings"].append([topic, key, made.from_position, None, made.id])
        elif what == "unbind" and queue:
            open_ones = [b for b in self.queues[queue]["bindings"] if b[4] and b[3] is None]
            if open_ones:
                ending = pick.choice(open_ones)
                ending[3] = self.log.unbind(queue, ending[4])
        elif what == "cursor" and len(self.cursors) < 3:
            name = f"cursor-{len(self.cursors)}"
            read = None if pick.random() < 0.2 else topics
            position = max(self.kept(), default=0) if pick.random() < 0.5 else 0
            self.log.set_cursor(name, position=position, topics=read, holds_retention=True)
            gone = set(self.events) - self.kept()
            self.cursors[name] = (read, max([position, *gone], default=0))
        elif what == "advance" and self.cursors:
            name = pick.choice(sorted(self.cursors))
            read, position = self.cursors[name]
            further = [p for p in self.events if p > position]
            if further:
                position = pick.choice(further)
                self.log.set_cursor(name, position=position)
                self.cursors[name] = (read, position)
        elif what == "work" and queue:
            self.work(queue, pick.choice([1, 3, 50]))
        elif what == "rewind" and queue and self.events:
            position = pick.choice([0, *self.events])
            self.log.rewind_queue(queue, position=position)
            known = self.queues[queue]
            leased = {event.position for name, lease in self.leases if name == queue for event in lease.events}
            # What was leased, or waits for another try, at or below the position is still to be done.
            known["again"] = {p for p in known["again"] | leased if p <= position}
            self.leases = [one for one in self.leases if one[0] != queue]
            for binding in known["bindings"]:
                if binding[3] is None:
                    binding[2] = min(binding[2], position)
            kept = self.kept()
            known["start"] = position
            known["done"] = {p for p in known["done"] if p <= position} | (set(self.events) - kept)

    def work(self, queue: str, size: int) -> None:
        lease = self.log.claim(queue, worker="w", batch_size=size)
        if lease is None:
            return
        if self.random.random() < 0.2:
            self.leases.append((queue, lease))
            return
        self.settle(queue, lease)

    def settle(self, queue: str, lease: Any) -> None:
        ends: dict[int, Any] = {}
        for event in lease.events:
            end = self.random.choice(["done", "done", "done", "retry", "dead"])
            if end == "retry" and event.attempt < 4:
                ends[event.position] = headwater.Retry(30 * DAY)
                self.queues[queue]["again"].add(event.position)
                continue
            if end == "dead":
                ends[event.position] = headwater.Dead("x")
            self.queues[queue]["done"].add(event.position)
            self.queues[queue]["again"].discard(event.position)
        self.log.settle(lease, ends)

    def settle_leases(self) -> None:
        for queue, lease in self.leases:
            self.settle(queue, lease)
        self.leases = []

    def wants(self, queue: str, position: int) -> bool:
        topic, key, _ = self.events[position]
        known = self.queues[queue]
        if position in known["again"]:
            return True
        return position > known["start"] and any(
            (b[0] is None or b[0] == topic)
            and (b[1] is None or key.startswith(b[1][0]))
            and position > b[2]
            and (b[3] is None or position <= b[3])
            for b in known["bindings"]
        )

    def needed(self) -> set[int]:
        """What a consumer that must not lose has yet to do."""
        of_queues = {
            p for name, one in self.queues.items() if one["must"]
            for p in self.events if p not in one["done"] and self.wants(name, p)
        }  # fmt: skip
        of_cursors = {
            p for topics, position in self.cursors.values()
            for p, (topic, _, _) in self.events.items() if p > position and (topics is None or topic in topics)
        }  # fmt: skip
        return of_queues | of_cursors

    def looked_after(self) -> set[int]:
        """What may stay although it has expired: above the place of a consumer of its topic, or needed."""
        held = self.needed()
        claimed_positions = {queue.name: queue.claimed_position for queue in self.log.queues()}
        for name, one in self.queues.items():
            if one["must"]:
                for topic, _, low, high, _ in one["bindings"]:
                    if high is None or high > claimed_positions[name]:
                        held |= {
                            p for p, (t, _, _) in self.events.items()
                            if p > max(low, claimed_positions[name]) and topic in (None, t)
                        }  # fmt: skip
        return held


@pytest.mark.parametrize("seed", range(6))
def test_retention_takes_all_that_no_consumer_needs_and_nothing_that_one_needs(
    log: headwater.Headwater, clock: Clock, connection: psycopg.Connection, seed: int
) -> None:
    consumers = Consumers(log, connection, seed)
    for day in range(8):
        for _ in range(25):
            consumers.act(day)
        clock.pass_days(1)
        kept = consumers.kept()
        assert consumers.needed() <= kept
        if not consumers.leases:
            held = consumers.looked_after()
            # By segment: the events of a topic on one day go together.
            for topic in ("a", "b", "c"):
                for old in range(day - 1):
                    up_to_day = {p for p, one in consumers.events.items() if one[0] == topic and one[2] <= old}
                    if not up_to_day & held:
                        assert not up_to_day & kept, (topic, old, day)
        consumers.settle_leases()
    # What every queue still needs comes to it in the end.
    for name, one in consumers.queues.items():
        wanted = {p for p in consumers.events if p not in one["done"] and consumers.wants(name, p)}
        connection.execute(
            "update headwater_internal.redelivery set visible_at = clock_timestamp() where token is null"
        )
        log.reap(name)
        got: set[int] = set()
        while lease := log.claim(name, worker="w", batch_size=100):
            got |= {event.position for event in lease.events}
            log.ack(lease)
        if one["must"]:
            assert got == wanted


# --- what maintenance costs ---------------------------------------------------------------------------------------


def queues_touched(dsn: str) -> set[str]:
    """The queues that one round of maintenance locks, which is the first thing that any work on a queue does."""
    with psycopg.connect(dsn) as maintaining:
        found = maintaining.execute("select busy from headwater.maintain()").fetchone()
        assert found == (False,)
        rows = maintaining.execute(
            "select g.name from pg_locks l join headwater_internal.queue g on g.id = l.objid::bigint "
            "where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.classid::bigint = 29290::bigint << 16"
        ).fetchall()
    return {name for (name,) in rows}


def test_maintenance_touches_only_the_queues_that_have_something_to_do(
    log: headwater.Headwater, dsn: str, connection: psycopg.Connection
) -> None:
    busy, rare = log.create_topic("busy").name, log.create_topic("rare").name
    own = log.publish(rare, "own")
    for number in range(40):
        log.create_queue(f"idle-{number}", rare)
    for name in ("settled", "in-work", "lost", "retrying", "waiting"):
        log.create_queue(name, rare)
    log.create_queue("unbound")
    leases = {
        name: lease
        for name in ("settled", "in-work", "lost", "retrying")
        if (lease := log.claim(name, worker="w")) is not None
    }
    log.ack(leases["settled"])
    log.nack(leases["retrying"], *leases["retrying"].events, error="x", delay=DAY)
    connection.execute(
        "update headwater_internal.ledger l set expires_at = clock_timestamp() - interval '1 second' "
        "from headwater_internal.queue g where g.id = l.queue_id and g.name = 'lost'"
    )
    assert queues_touched(dsn) == {"lost", "retrying"}

    # Far behind the head: a queue is moved past events of others once, unless its own event is the next.
    log.publish_many(busy, (NewEvent(None) for _ in range(10_001)))
    for number in range(40):
        log.delete_queue(f"idle-{number}")
    assert queues_touched(dsn) == {"settled", "in-work", "lost", "retrying", "waiting"}
    assert queues_touched(dsn) == {"lost", "retrying", "waiting"}
    log.ack(leases["in-work"])
    assert log.claim("settled", worker="w") is None
    waited = log.claim("waiting", worker="w")
    assert waited is not None
    assert [event.position for event in waited.events] == [own]


def test_maintenance_of_many_queues_far_behind_ends_and_goes_on_in_the_next_round(
    log: headwater.Headwater, dsn: str, connection: psycopg.Connection
) -> None:
    busy = log.create_topic("busy").name
    names = {f"picky-{number}" for number in range(12)}
    for name in names:
        log.create_queue(name)
        log.bind(name, pattern="rare.#")
    log.create_queue("whole", log.create_topic("rare").name)
    log.publish_many(busy, (NewEvent(None) for _ in range(20_001)))
    # Each looks at 10,000 events twice; a round ends after 100,000.
    first = queues_touched(dsn)
    assert "whole" in first
    assert len(first & names) == 5
    seen = set(first)
    for _ in range(20):
        seen |= queues_touched(dsn)
    assert seen >= names
    assert queues_touched(dsn) == set()


# --- many segments -------------------------------------------------------------------------------------------


def test_reads_over_many_segments_bring_every_event_in_order_within_their_bounds(
    log: headwater.Headwater, clock: Clock, connection: psycopg.Connection
) -> None:
    one, other, silent = (log.create_topic(name).name for name in ("one", "other", "silent"))
    published: list[tuple[str, Any]] = []
    for day in range(14):
        # Some segments have nothing of a topic, one has nothing at all, and the last are for the tail.
        if day != 6:
            for n in range(day % 4):
                log.publish(one, [day, n])
                published.append((one, [day, n]))
            if day % 3 == 0:
                log.publish(other, [day, "other"])
                published.append((other, [day, "other"]))
        else:
            connection.execute("select nextval('headwater_internal.position')")
        clock.pass_days(2)
    log.publish(one, "last")
    published.append((one, "last"))
    assert log.state().stable > 8 * 100_000_000

    for topics in (one, other, silent, [one, other], [one, silent], None):
        wanted = [
            (topic, data)
            for topic, data in published
            if topics is None or topic == topics or (isinstance(topics, list) and topic in topics)
        ]
        whole = log.read(topics, batch_size=1000)
        # Windows of positions: several topics may come in more pages than one.
        while page := log.read(topics, after=whole[-1].position if whole else 0, batch_size=1000):
            whole += page
        assert [(event.topic, event.data) for event in whole] == wanted
        for batch_size, max_bytes in ((1, 16_777_216), (3, 16_777_216), (1000, 1), (1000, 15), (2, 12)):
            after, paged = 0, list[Event]()
            while page := log.read(topics, after=after, batch_size=batch_size, max_bytes=max_bytes):
                assert len(page) <= batch_size
                assert sum(len(event.payload or b"") for event in page[:-1]) < max_bytes
                paged += page
                after = page[-1].position
            assert paged == whole
        for event in whole:
            assert log.read(topics, after=event.position - 1, batch_size=1) == [event]
            up_to_it = log.read(topics, after=event.position - 1, up_to=event.position, batch_size=1000)
            assert up_to_it == [event]
    # A page is as full as its bounds let it be, also where it crosses segments.
    ones = [data for topic, data in published if topic == one]
    assert numbers(log.read(one, batch_size=5)) == ones[:5]
    assert numbers(log.read(one, after=0, batch_size=1000)) == ones


def test_reads_over_many_segments_say_what_is_gone(log: headwater.Headwater, clock: Clock) -> None:
    short, long = log.create_topic("short", retention=5 * DAY).name, log.create_topic("long").name
    fill_days(log, clock, [short, long], 14)
    assert log.state().stable > 8 * 100_000_000
    kept = numbers(log.read(short, skip_expired=True, after=0, batch_size=1000))
    assert kept == list(range(kept[0], 14))
    assert kept[0] > 0
    first = log.read(short, batch_size=1)[0]
    assert first.data == kept[0]
    beside = log.read(long, up_to=first.position, batch_size=1000)[-1]
    for topics, earliest in ((short, first.position), ([short, long], beside.position)):
        with pytest.raises(headwater.PositionExpired) as caught:
            log.read(topics, after=0, batch_size=1000)
        assert caught.value.earliest_position == earliest
    assert numbers(log.read(long, after=0, batch_size=1000)) == list(range(14))
    assert log.read(short, after=first.position - 1, batch_size=1) == [first]
