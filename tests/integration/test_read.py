"""Does reading keep its promises on a real Postgres?"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import headwater
from headwater import Event, NewEvent, aio
from patience import PATIENCE_SECONDS

Until = Callable[[Callable[[], Any]], Any]


def numbers(events: list[Event]) -> list[Any]:
    return [event.data for event in events]


@pytest.fixture
def topics(log: headwater.Headwater, topic: str) -> list[str]:
    """Three topics whose events alternate: 0, 1, 2, 0, 1, 2 and so on, numbered."""
    names = [topic, *(log.create_topic(f"{topic}-{n}").name for n in (1, 2))]
    for n in range(12):
        log.publish(names[n % 3], n)
    return names


def test_a_topic_is_read_by_itself_several_together_and_the_log_whole(
    log: headwater.Headwater, topics: list[str]
) -> None:
    start = log.read(topics[0])[0].position - 1
    assert numbers(log.read(topics[1])) == [1, 4, 7, 10]
    assert numbers(log.read([topics[2], topics[0]])) == [0, 2, 3, 5, 6, 8, 9, 11]
    assert numbers(log.read(after=start)) == list(range(12))
    assert [event.topic for event in log.read(topics)] == topics * 4


def test_reading_goes_on_from_a_position(log: headwater.Headwater, topics: list[str]) -> None:
    for names in (topics[0], topics[:2], topics):
        whole = log.read(names)
        pages: list[Event] = []
        while page := log.read(names, after=pages[-1].position if pages else None, batch_size=3):
            assert len(page) <= 3
            pages += page
        assert pages == whole


def test_up_to_is_the_last_position_read(log: headwater.Headwater, topics: list[str]) -> None:
    whole = log.read(topics)
    assert log.read(topics, up_to=whole[4].position) == whole[:5]
    assert log.read(topics[0], up_to=whole[4].position) == [whole[0], whole[3]]


def test_backwards_is_the_newest_first(log: headwater.Headwater, topics: list[str]) -> None:
    assert numbers(log.read_backwards(topics[0])) == [9, 6, 3, 0]
    assert numbers(log.read_backwards(topics, batch_size=5)) == [11, 10, 9, 8, 7]
    below = log.read_backwards(topics, batch_size=5)[-1].position
    assert numbers(log.read_backwards(topics[1:], before=below, batch_size=3)) == [5, 4, 2]
    assert numbers(log.read_backwards(batch_size=2)) == [11, 10]


def test_an_unknown_topic_is_named(log: headwater.Headwater, topic: str) -> None:
    for names in ("nowhere", [topic, "nowhere"]):
        with pytest.raises(headwater.TopicNotFound, match="nowhere"):
            log.read(names)
        with pytest.raises(headwater.TopicNotFound, match="nowhere"):
            log.read_backwards(names)
    assert log.read([]) == []


SIZES = [10, None, 10, 10, None, 25, None, 1, 0, 50, None]


@pytest.mark.parametrize("max_bytes", [1, 10, 11, 20, 21, 30, 1000])
@pytest.mark.parametrize("several", [False, True])
def test_the_byte_budget_never_skips_an_event_and_lets_one_pass_whatever_its_size(
    log: headwater.Headwater, topic: str, max_bytes: int, several: bool
) -> None:
    other = log.create_topic(f"{topic}-other").name
    log.publish_batch(topic, [NewEvent(None if size is None else b"x" * size) for size in SIZES])
    names = [topic, other] if several else topic
    whole = log.read(names)
    assert len(whole) == len(SIZES)
    for start in range(len(SIZES)):
        forwards = log.read(names, after=whole[start].position - 1, max_bytes=max_bytes)
        assert forwards == whole[start : start + expected(SIZES[start:], max_bytes)]
        backwards = log.read_backwards(names, before=whole[start].position + 1, max_bytes=max_bytes)
        assert backwards == whole[: start + 1][::-1][: expected(SIZES[: start + 1][::-1], max_bytes)]


def expected(sizes: list[int | None], max_bytes: int) -> int:
    """How many events come: as long as those before them are below the budget."""
    count = total = 0
    for size in sizes:
        if total >= max_bytes:
            break
        count += 1
        total += size or 0
    return count


def test_reading_since_a_time_gives_every_event_from_then_on(
    log: headwater.Headwater, topics: list[str], connection: psycopg.Connection
) -> None:
    whole = log.read(topics)
    for event in whole:
        assert event in log.read(topics, since=event.published_at)
        later = log.read(topics, since=event.published_at + timedelta(microseconds=1))
        assert all(other.published_at > event.published_at for other in later if other.topic == event.topic)
        assert later == [other for other in whole if other.position > event.position]
    assert log.read(topics, since=datetime.now(UTC) + timedelta(days=1)) == []
    assert log.read(topics, since=datetime(2000, 1, 1, tzinfo=UTC)) == whole


def test_a_time_is_found_among_many_events_and_over_the_gaps_of_rotation(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    topic, other = log.create_topic("hours").name, log.create_topic("other-hours").name
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    for day in range(3):
        connection.execute(
            "insert into headwater_internal.event (topic_id, payload, published_at) "
            "select t.id, convert_to(n::text, 'UTF8'), %s + n * interval '10 seconds' "
            "from generate_series(%s::int, %s::int) as n, headwater_internal.topic t where t.name in ('hours', "
            "'other-hours')",
            (begin, day * 5000, day * 5000 + 4999),
        )
        connection.execute("update headwater_internal.segment set opened_at = opened_at - interval '2 days'")
        log.maintain()
    for wanted in (0, 1, 4999, 5000, 5001, 9999, 10000, 14999):
        since = begin + timedelta(seconds=wanted * 10)
        assert log.read(topic, since=since, batch_size=1)[0].data == wanted
        assert log.read([topic, other], since=since, batch_size=1)[0].data == wanted
        just_after = log.read(topic, since=since + timedelta(seconds=1), batch_size=1)
        assert numbers(just_after) == ([wanted + 1] if wanted < 14999 else [])


def test_where_to_start_is_said_once(log: headwater.Headwater, topic: str) -> None:
    now = datetime.now(UTC)
    with pytest.raises(headwater.InvalidRequest, match="only one"):
        log.read(topic, after=1, since=now)
    for arguments in ({"after": 1, "since": now}, {"after": 1, "from_end": True}, {"since": now, "from_end": True}):
        with pytest.raises(headwater.InvalidRequest, match="only one"):
            next(log.follow(topic, **arguments))  # type: ignore[arg-type]
    with pytest.raises(headwater.InvalidRequest, match="time zone"):
        log.read(topic, since=datetime(2026, 1, 1))  # noqa: DTZ001


def test_a_follower_catches_up_and_stays_live(log: headwater.Headwater, topic: str) -> None:
    log.publish_batch(topic, [NewEvent(n) for n in range(10)])
    caught_up = threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def follow() -> list[int]:
            seen = []
            for event in log.follow(topic, batch_size=3):
                seen.append(event.data)
                if len(seen) == 10:
                    caught_up.set()
                if event.data == "end":
                    return seen
            raise AssertionError("a follower has no end")

        following = pool.submit(follow)
        assert caught_up.wait(PATIENCE_SECONDS)
        for n in range(10, 15):
            log.publish(topic, n)
        log.publish(topic, "end")
        assert following.result(timeout=PATIENCE_SECONDS) == [*range(15), "end"]


def test_an_async_follower_catches_up_and_stays_live(dsn: str, log: headwater.Headwater, topic: str) -> None:
    log.publish_batch(topic, [NewEvent(n) for n in range(10)])

    async def both() -> list[Any]:
        seen: list[Any] = []
        async with await aio.connect(dsn) as own:

            async def follow() -> None:
                async for event in own.follow(topic, batch_size=4):
                    seen.append(event.data)
                    if event.data == "end":
                        return
                    if len(seen) == 10:
                        caught_up.set()

            caught_up = asyncio.Event()
            following = asyncio.create_task(follow())
            await asyncio.wait_for(caught_up.wait(), PATIENCE_SECONDS)
            await own.publish(topic, 10)
            await own.publish(topic, "end")
            await asyncio.wait_for(following, PATIENCE_SECONDS)
        return seen

    assert asyncio.run(both()) == [*range(11), "end"]


def test_a_follower_from_the_end_sees_only_what_comes(log: headwater.Headwater, topic: str, until: Until) -> None:
    log.publish(topic, "old")
    follower = log.follow_batches(topic, from_end=True)
    with ThreadPoolExecutor(1) as pool:
        # Its start is taken at the first step; publish until it has taken it.
        first = pool.submit(next, follower)
        published = []

        def arrived() -> bool:
            published.append(log.publish(topic, "new"))
            return first.done()

        until(arrived)
        assert {event.data for event in first.result(timeout=PATIENCE_SECONDS)} == {"new"}


def test_a_follower_can_stop_when_it_has_caught_up(log: headwater.Headwater, topics: list[str]) -> None:
    assert [event.data for event in log.follow(topics, stop_when_caught_up=True, batch_size=5)] == list(range(12))
    assert [event.data for event in log.follow(topics[0], stop_when_caught_up=True, batch_size=1)] == [0, 3, 6, 9]
    sizes = [len(batch) for batch in log.follow_batches(topics[0], stop_when_caught_up=True, batch_size=3)]
    assert sizes == [3, 1]


def test_followers_have_the_same_events_as_a_reader_whatever_the_byte_budget(
    log: headwater.Headwater, topic: str
) -> None:
    log.publish_batch(topic, [NewEvent(None if size is None else b"x" * size) for size in SIZES])
    assert list(log.follow(topic, max_bytes=12, stop_when_caught_up=True)) == log.read(topic)


def test_a_topic_made_later_is_part_of_the_whole_log(log: headwater.Headwater, topic: str) -> None:
    log.publish(topic, "first")
    start = log.read(topic)[0].position - 1
    follower = log.follow(after=start)
    assert next(follower).data == "first"
    log.publish(log.create_topic(f"{topic}-later").name, "second")
    assert next(follower).data == "second"
    follower.close()


def test_a_follower_survives_maintenance_that_cannot_be_done_now(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    """A due event of a sequenced topic waits for its partition; nobody who follows the log suffers for it."""
    partitions = log.create_topic(f"{topic}-partitions", kind="sequenced").name
    elsewhere = log.create_topic(f"{topic}-elsewhere").name
    log.publish(topic, "first")
    with connection.transaction():
        log.publish(partitions, "holds the partition", connection=connection)
        log.schedule(partitions, "due", delay=timedelta(0))
        log.schedule(elsewhere, "due too", delay=timedelta(0))
        assert log.maintain().released == 1
        assert next(log.follow(topic)).data == "first"
    assert log.maintain().released == 1
    assert numbers(log.read(partitions)) == ["holds the partition", "due"]
    assert numbers(log.read(elsewhere)) == ["due too"]


def test_a_due_event_that_its_topic_no_longer_takes_waits_and_holds_up_no_other(
    log: headwater.Headwater, topic: str
) -> None:
    large = log.schedule(topic, "x" * 100, delay=timedelta(0))
    log.schedule(topic, "y", delay=timedelta(0))
    log.alter_topic(topic, max_payload_bytes=50)
    assert log.maintain().released == 1
    assert numbers(log.read(topic)) == ["y"]
    assert [waiting.id for waiting in log.scheduled(topic)] == [large]
    log.alter_topic(topic, max_payload_bytes=200)
    assert large is not None
    log.move_scheduled(large, datetime.now(UTC))
    assert log.maintain().released == 1
    assert numbers(log.read(topic)) == ["y", "x" * 100]


def test_an_event_scheduled_while_its_topic_was_deleted_enters_no_topic_of_that_name(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    old_id = log.topic(topic).id
    log.delete_topic(topic)
    log.create_topic(topic)
    connection.execute("insert into headwater_internal.scheduled (due_at, topic_id) values (now(), %s)", (old_id,))
    assert log.maintain().released == 0
    assert log.read(topic) == []
