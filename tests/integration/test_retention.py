"""Do segments come and go as they should, and does nobody lose what they still need?"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql

import headwater
from headwater import Event, NewEvent

Until = Callable[[Callable[[], Any]], Any]
DAY = timedelta(days=1)
_numbers = itertools.count()


@pytest.fixture
def dsn(admin_dsn: str, template: str) -> Iterator[str]:
    """A log for each test: retention is about the log as a whole."""
    name = f"headwater_retention_{next(_numbers)}_{template}"
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        connection.execute(
            sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
        )
        yield conninfo.make_conninfo(admin_dsn, dbname=name)
        connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


class Clock:
    """Lets days pass: what is old becomes older."""

    def __init__(self, log: headwater.Headwater, connection: psycopg.Connection[Any]) -> None:
        self.log, self.connection = log, connection

    def pass_days(self, days: int) -> headwater.model.Upkeep:  # type: ignore[name-defined]
        self.connection.execute(
            "update headwater.segment set opened_at = opened_at - %s, closed_at = closed_at - %s",
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
        n for (n,) in connection.execute("select lo / headwater.segment_size() from headwater.segment order by lo")
    ]
    tables = connection.execute(
        "select relname from pg_inherits join pg_class on pg_class.oid = inhrelid "
        "where inhparent = 'headwater.event'::regclass order by relname"
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
    size = connection.execute("select headwater.segment_size()").fetchone()[0]  # type: ignore[index]
    assert [position // size for position in positions] == [0, 1, 2, 3]
    assert numbers(log.read(topic)) == [0, 1, 2, 3]
    assert numbers(list(log.follow(batch_size=2, stop_when_caught_up=True))) == [0, 1, 2, 3]
    assert numbers(list(log.follow(topic, batch_size=1, stop_when_caught_up=True))) == [0, 1, 2, 3]
    assert numbers(log.read_backwards(topic)) == [3, 2, 1, 0]
    assert max(segments(connection)) >= positions[-1] // size + 3


def test_an_empty_segment_is_not_left(log: headwater.Headwater, topic: str, clock: Clock) -> None:
    log.publish(topic, 0)
    clock.pass_days(1)
    before = log.state().drawn
    clock.pass_days(1)
    clock.pass_days(1)
    assert log.state().drawn == before


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
        "select t.name, count(*) from headwater.event e join headwater.topic t on t.id = e.topic_id group by 1"
    ).fetchall()
    assert dict(stored) == {"short": 3, "long": 5}
    log.publish(forever, "kept")
    clock.pass_days(1)
    clock.pass_days(1000)
    assert numbers(log.read(forever)) == ["kept"]
    assert log.read(short) == log.read(long) == []
    assert len([n for n in segments(connection) if n <= 9]) <= 2


def test_a_large_retention_keeps_everything_and_stops_no_upkeep(log: headwater.Headwater, clock: Clock) -> None:
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


def test_a_cursor_that_must_not_lose_is_waited_for(
    log: headwater.Headwater, clock: Clock, connection: psycopg.Connection
) -> None:
    topic = log.create_topic("short", retention=2 * DAY).name
    log.open_cursor("careful", topics=topic, must_not_lose=True)
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


def test_offsets_go_on_when_the_tail_of_a_lane_has_expired(
    log: headwater.Headwater, clock: Clock, connection: psycopg.Connection
) -> None:
    topic = log.create_topic("lanes", kind="sequenced", partitions=2, retention=DAY).name
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


def test_a_lane_long_silent_goes_on_with_its_offsets(log: headwater.Headwater, clock: Clock) -> None:
    topic = log.create_topic("lanes", kind="sequenced", partitions=2).name
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
    left = connection.execute("select count(*) from headwater.event e where e.position < %s", (log.state().drawn,))
    assert left.fetchone() == (3,)
    assert numbers(log.read(topic)) == ["new"]
    connection.execute("update headwater.topic set deleted_at = deleted_at - interval '2 days'")
    log.maintain()
    assert connection.execute("select count(*) from headwater.topic").fetchone() == (2,)
    assert connection.execute("select count(*) from headwater.event_identity").fetchone() == (1,)


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
                    "update headwater.segment set opened_at = opened_at - interval '2 days', "
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
            pool.submit(age).result(timeout=60)
            end = log.publish(topic, "end")
            seen = following.result(timeout=60)
        finally:
            over.set()
        for future in maintaining:
            future.result(timeout=60)
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
        reader.execute("select count(*) from headwater.event").fetchone()
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
    # Sequences may pass over some positions, segments a hundred million.
    assert 4 <= behind.positions_behind <= 10
    low, high = log.read(topic)[0].position, log.read(topic)[2].position
    between = connection.execute("select headwater.positions_between(%s::bigint, %s::bigint)", (low, high)).fetchone()
    assert between is not None
    assert 2 <= between[0] <= 6
    assert connection.execute("select headwater.positions_between(5::bigint, 5::bigint)").fetchone() == (0,)


@pytest.mark.parametrize("several", [False, True])
def test_a_reader_whom_retention_overtakes_is_told(
    log: headwater.Headwater, clock: Clock, dsn: str, until: Until, connection: psycopg.Connection, several: bool
) -> None:
    topic = log.create_topic("short", retention=3 * DAY).name
    topics = [topic, log.create_topic("other").name] if several else topic
    fill_days(log, clock, [topic], 2)
    assert numbers(log.read(topic, after=0)) == [0, 1]
    with psycopg.connect(dsn) as maintaining, ThreadPoolExecutor(1) as pool:
        maintaining.execute("update headwater.segment set closed_at = closed_at - interval '9 days', opened_at = null")
        maintaining.execute("select headwater.maintain()")
        # It has looked at the topic by now, and waits for the segment that is being dropped.
        reading = pool.submit(log.read, topics, after=0)
        until(lambda: connection.execute("select 1 from pg_locks where not granted").fetchone())
        maintaining.commit()
        with pytest.raises(headwater.PositionExpired):
            reading.result(timeout=20)


def test_what_has_expired_is_not_read_while_it_waits_to_be_cleared_away(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    short, forever = log.create_topic("short").name, log.create_topic("forever").name
    for n in range(4):
        last = log.publish(short if n in (1, 2) else forever, n)
        if n == 2:
            connection.execute("update headwater.topic set expired_to = %s - 1 where name = 'short'", (last,))
    assert numbers(log.read(short)) == [2]
    assert numbers(log.read([short, forever])) == numbers(log.read()) == [0, 2, 3]
    assert numbers(log.read_backwards()) == [3, 2, 0]


@pytest.mark.parametrize("binding", ["one topic", "two topics", "pattern", "ordered keys"])
def test_a_queue_does_not_hand_out_what_has_expired_and_waits_to_be_cleared_away(
    log: headwater.Headwater, connection: psycopg.Connection, binding: str
) -> None:
    short, other = log.create_topic("short").name, log.create_topic("other").name
    log.create_group("late", [short, other] if binding == "two topics" else short, ordered_keys="keys" in binding)
    if binding == "pattern":
        (whole,) = log.bindings("late")
        log.bind("late", pattern="#", topic=short)
        log.unbind("late", whole.id)
    first, second, *_ = log.publish_batch(short, [NewEvent(n, key="k", routing_key="a") for n in range(4)])
    connection.execute("update headwater.topic set expired_to = %s where name = 'short'", (first,))
    assert {one.position: one.status for one in log.deliveries("late")} == dict.fromkeys(
        range(second, second + 3), "ready"
    )
    lease = log.claim("late", worker="me", batch_size=2)
    assert lease is not None
    assert [event.data for event in lease.events] == [1, 2]
    # One that fails, and expires before its next try, is not tried again.
    log.settle(lease, {second: headwater.Retry(after=timedelta(0))}, rest_done=True)
    connection.execute("update headwater.topic set expired_to = %s where name = 'short'", (second + 1,))
    lease = log.claim("late", worker="me", batch_size=10)
    if lease is None and "keys" in binding:
        # It waited behind the one that failed, until that was seen to be gone.
        log.reap("late")
        lease = log.claim("late", worker="me", batch_size=10)
    assert lease is not None
    assert [event.data for event in lease.events] == [3]
    log.settle(lease, {lease.events[0].position: headwater.Dead("no")}, rest_done=True)
    connection.execute("update headwater.topic set expired_to = %s where name = 'short'", (second + 2,))
    assert log.redrive("late") == 0
    assert len(log.dead_letters("late")) == 1


def test_upkeep_that_finds_the_tables_locked_is_done_another_time(
    log: headwater.Headwater, topic: str, dsn: str
) -> None:
    log.publish(topic, 0)
    with psycopg.connect(dsn) as working:
        working.execute("select * from headwater.segment for update")
        log.change_settings(segment_interval=timedelta(seconds=1))
        log.schedule(topic, 1, delay=timedelta(0))
        working.execute("update headwater.segment set opened_at = opened_at - interval '1 hour'")
        upkeep = log.maintain()
        assert (upkeep.busy, upkeep.released) == (True, 1)
        working.commit()
    before = log.state().drawn
    assert before < 100
    assert not log.maintain().busy
    assert log.state().drawn > before + 1_000_000
    log.publish(topic, 2)
    assert numbers(log.read(topic)) == [0, 1, 2]


def test_a_rotation_that_was_undone_but_for_the_sequence_leaves_no_lag(
    log: headwater.Headwater, topic: str, clock: Clock, connection: psycopg.Connection
) -> None:
    log.set_cursor("behind", position=0, topics=topic)
    log.publish(topic, 0)
    with pytest.raises(psycopg.errors.DivisionByZero), connection.transaction():
        connection.execute("update headwater.segment set opened_at = opened_at - interval '2 days'")
        connection.execute("select headwater.maintain()")
        connection.execute("select 1 / 0")
    log.publish(topic, 1)
    log.maintain()
    (behind,) = log.cursors()
    assert 2 <= behind.positions_behind <= 10
    assert numbers(list(log.follow(topic, cursor="behind", stop_when_caught_up=True))) == [0, 1]
