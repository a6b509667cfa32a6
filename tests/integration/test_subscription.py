"""Do SQL subscriptions get what they ask for, and nothing that they may not have?"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import headwater
from headwater import App, NewEvent, Retry
from patience import PATIENCE_SECONDS

BY_USER = "s.params @> jsonb_build_object('user', e.data -> 'user')"


def positions(reading: Any) -> dict[int, tuple[int, ...]]:
    return {matched.event.position: matched.subscription_ids for matched in reading.events}


def test_an_event_comes_once_with_every_subscription_that_it_matches(log: headwater.Headwater, topic: str) -> None:
    all_of_topic = log.subscribe(topic, f"e.topic = '{topic}'")
    of_three = log.subscribe(topic, BY_USER, {"user": 3})
    of_four = log.subscribe(topic, BY_USER, {"user": 4})
    published = log.publish_batch(topic, [NewEvent({"user": user}) for user in (1, 3, 4, 3)])
    reading = log.read_next(topic, reader="me")
    assert positions(reading) == dict(
        zip(
            published,
            [(all_of_topic,), (all_of_topic, of_three), (all_of_topic, of_four), (all_of_topic, of_three)],
            strict=True,
        )
    )
    assert reading.next_position == published[-1]


def test_equal_subscriptions_are_one_and_different_ones_are_not(log: headwater.Headwater, topic: str) -> None:
    first = log.subscribe(topic, BY_USER, {"user": 1, "b": 2})
    assert log.subscribe(topic, BY_USER, {"b": 2, "user": 1}) == first
    assert log.subscribe(topic, BY_USER, {"user": 2}) != first
    assert log.subscribe(topic, BY_USER + " ", {"user": 1, "b": 2}) != first
    assert log.subscribe(f"{topic}-other", BY_USER, {"user": 1, "b": 2}) != first


def test_reading_moves_nothing_until_it_is_set(log: headwater.Headwater, topic: str) -> None:
    log.subscribe(topic, "true")
    published = log.publish_batch(topic, [NewEvent(n) for n in range(5)])
    first = log.read_next(topic, reader="me", batch_size=2)
    assert list(positions(first)) == published[:2]
    assert list(positions(log.read_next(topic, reader="me", batch_size=2))) == published[:2]
    ahead = log.read_next(topic, reader="me", after=first.next_position, batch_size=2)
    assert list(positions(ahead)) == published[2:4]
    log.commit_reading(topic, first.next_position, reader="me")
    assert list(positions(log.read_next(topic, reader="me", batch_size=10))) == published[2:]


def test_one_reader_at_a_time_and_anybody_may_peek(log: headwater.Headwater, topic: str, connection: Any) -> None:
    log.subscribe(topic, "true")
    log.publish(topic, 1)
    log.read_next(topic, reader="me")
    with pytest.raises(headwater.ReaderBusy, match="me"):
        log.read_next(topic, reader="you")
    with pytest.raises(headwater.ReaderBusy):
        log.commit_reading(topic, 1, reader="you")
    assert len(log.read_next(topic, reader="you", peek=True).events) == 1
    log.commit_reading(topic, 0, reader="me", release=True)
    log.read_next(topic, reader="you")
    connection.execute("update headwater_internal.reading set leased_until = now() - interval '1 s'")
    log.read_next(topic, reader="me")


def test_filters_see_every_part_of_an_event(log: headwater.Headwater, topic: str) -> None:
    wanted = [
        log.subscribe(topic, filter)
        for filter in (
            "e.key = 'k1'",
            "e.type = 'T' and e.routing_key like 'a.%'",
            "e.headers @> '{\"h\": 1}'",
            "(e.data ->> 'n')::int between 1 and 5",
            "e.data -> 'tags' ? 'x'",
            "e.published_at > now() - interval '1 hour'",
            "e.content_type = 'application/json' and e.partition = 0 and e.event_id is null",
            "e.payload is not null and e.position > 0",
        )
    ]
    log.publish(topic, {"n": 3, "tags": ["x"]}, key="k1", type="T", routing_key="a.b", headers={"h": 1})
    (matched,) = log.read_next(topic, reader="me").events
    assert list(matched.subscription_ids) == wanted


def test_an_event_that_is_no_json_has_no_data_and_harms_nobody(log: headwater.Headwater, topic: str) -> None:
    by_data = log.subscribe(topic, "e.data is null")
    for payload in (b"\xff\xfe", b"{broken", b'"\\u0000"', b"1e400000", None):
        log.publish(topic, payload)
    assert [m.subscription_ids for m in log.read_next(topic, reader="me").events] == [(by_data,)] * 5


def test_a_filter_that_fails_on_an_event_does_not_match_it_and_says_why(log: headwater.Headwater, topic: str) -> None:
    numbers = log.subscribe(topic, "(e.data ->> 'n')::int > 1")
    every = log.subscribe(topic, "true")
    log.publish_batch(topic, [NewEvent({"n": 2}), NewEvent({"n": "many"}), NewEvent({"n": 3})])
    found = [m.subscription_ids for m in log.read_next(topic, reader="me").events]
    assert found == [(numbers, every), (every,), (numbers, every)]
    (told,) = [one for one in log.subscriptions(topic) if one.id == numbers]
    assert "many" in (told.last_error or "")
    assert not told.broken


@pytest.mark.parametrize(
    "hostile",
    [
        "exists (select from headwater_internal.event)",
        "(select count(*) from headwater_internal.subscription) > 0",
        "(select true)",
        "pg_sleep(1) is null",
        "true); drop table headwater_internal.event; --",
        "true; select 1",
        "true) from headwater_internal.topic union select (true",
        "true $$; select 1; $$",
        "nextval('headwater_internal.position') > 0",
        "set_config('role', 'postgres', false) is null",
        "query_to_xml('select 1', true, true, '') is null",
        "table_to_xml('headwater_internal.subscription', true, true, '')::text like '%x%'",
        "pg_read_file('/etc/hostname') like '%'",
        "current_setting('data_directory') like '%'",
        "has_table_privilege('pg_class', 'select')",
        "generate_series(1, 1000000000) > 0",
        "count(*) > 0",
        "headwater.head() > 0",
        "headwater_filter.install('true') is null",
        "e.nothing = 1",
        "not a filter",
        "1",
        "",
    ],
)
def test_a_hostile_or_wrong_filter_is_refused_and_leaves_nothing(
    log: headwater.Headwater, topic: str, hostile: str
) -> None:
    with pytest.raises(headwater.InvalidRequest):
        log.subscribe(topic, hostile)
    with pytest.raises(headwater.QueueNotFound):
        log.queue(topic)
    assert log.publish(topic, 1) is not None


def test_a_function_of_a_user_cannot_be_called(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    connection.execute("create or replace function public.leak() returns boolean immutable language sql return true")
    connection.execute("grant usage on schema public to public")
    with pytest.raises(headwater.InvalidRequest):
        log.subscribe(topic, "public.leak()")


@pytest.mark.parametrize(
    "harmless",
    [
        "e.topic like 'a%b' or true",
        "/* words */ true -- and more",
        "e.data ->> '50%' is distinct from '%s %I %L'",
        "e.data ->> 'a;b' is null",
        "'it''s' <> 'x'",
        "e'it\\'s' <> 'x'",
    ],
)
def test_odd_characters_in_a_filter_do_no_harm(log: headwater.Headwater, topic: str, harmless: str) -> None:
    log.subscribe(topic, harmless)
    log.publish(topic, {})
    assert len(log.read_next(topic, reader="me").events) == 1


# Long for an event with a large number, nothing for the others.
SLOW = "case when e.data ->> 'slow' is null then true else factorial((e.data ->> 'slow')::int) > 0 end"


def read_all(log: headwater.Headwater, queue: str, **options: Any) -> list[tuple[int, tuple[int, ...]]]:
    """Read and note as done until the end of the log; what came, in order."""
    came: list[tuple[int, tuple[int, ...]]] = []
    end = log.state().stable
    for _ in range(200):
        reading = log.read_next(queue, reader="me", **options)
        came += [(one.event.position, one.subscription_ids) for one in reading.events]
        log.commit_reading(queue, reading.next_position, reader="me")
        if reading.next_position >= end and not reading.events:
            return came
    raise AssertionError("the reader does not come to the end")


def test_a_slow_filter_stops_at_its_event_while_the_others_go_on_and_loses_nothing(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    slow = log.subscribe(topic, SLOW, topics=[topic])
    every = log.subscribe(topic, "true")
    data: list[Any] = [{}] * 5 + [{"slow": 32000}] + [{}] * 5
    published = log.publish_batch(topic, [NewEvent(one) for one in data])
    came = read_all(log, topic, batch_size=100, timeout_seconds=0.2)
    # Each event once, in order: the slow filter had those before the one that it stopped at.
    assert came == [(position, (slow, every)) for position in published[:5]] + [
        (position, (every,)) for position in published[5:]
    ]
    told = {one.id: one for one in log.subscriptions(topic)}
    assert (told[slow].broken, told[every].broken) == (True, False)
    assert told[slow].stopped_position == published[5] - 1
    assert "timed out" in (told[slow].last_error or "")
    assert connection.execute(
        "select filter, position, expired, subscriptions from headwater.stopped_filter where queue_name = %s", (topic,)
    ).fetchall() == [(SLOW, published[5] - 1, False, 1)]
    more = log.publish_batch(topic, [NewEvent({}) for _ in range(3)])
    assert read_all(log, topic, timeout_seconds=0.2) == [(position, (every,)) for position in more]
    # Resumed with enough time, it has the events since then, and the others do not have them again.
    assert log.subscribe(topic, SLOW) == slow
    latest = log.publish(topic, {})
    came = read_all(log, topic, batch_size=4, timeout_seconds=600)
    assert came == [(position, (slow,)) for position in [*published[5:], *more]] + [(latest, (slow, every))]
    assert not any(one.broken for one in log.subscriptions(topic))
    assert connection.execute("select count(*) from headwater_internal.filter_stop").fetchone() == (0,)


def test_a_filter_that_is_still_slow_stops_again_and_costs_the_others_nothing(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    slow = log.subscribe(topic, SLOW, topics=[topic])
    every = log.subscribe(topic, "true")
    published = log.publish_batch(topic, [NewEvent({"slow": 32000}), NewEvent({})])
    assert read_all(log, topic, timeout_seconds=0.2) == [(position, (every,)) for position in published]
    assert connection.execute(
        "select headwater.resume_filter(%s), headwater.resume_filter(%s)", (slow, slow)
    ).fetchone() == (
        True,
        False,
    )
    assert read_all(log, topic, timeout_seconds=0.2) == []
    (stopped, _) = log.subscriptions(topic)
    assert stopped.stopped_position == published[0] - 1
    latest = log.publish(topic, {})
    assert read_all(log, topic, timeout_seconds=0.2) == [(latest, (every,))]


def test_a_reader_that_dies_while_a_filter_catches_up_gets_its_events_again(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    slow = log.subscribe(topic, SLOW, topics=[topic])
    every = log.subscribe(topic, "true")
    published = log.publish_batch(topic, [NewEvent({"slow": 32000}), *[NewEvent({}) for _ in range(5)]])
    assert len(read_all(log, topic, timeout_seconds=0.2)) == 6
    connection.execute("select headwater.resume_filter(%s)", (slow,))
    first = log.read_next(topic, reader="me", batch_size=2, timeout_seconds=600)
    assert list(positions(first)) == published[:2]
    # It never says that it is done. The next reader begins where that one did.
    connection.execute("update headwater_internal.reading set leased_until = now() - interval '1 s'")
    latest = log.publish(topic, {})
    came = read_all(log, topic, batch_size=100, timeout_seconds=600)
    assert came == [(position, (slow,)) for position in published] + [(latest, (slow, every))]


def test_what_was_read_ahead_is_done_before_a_filter_catches_up(log: headwater.Headwater, topic: str) -> None:
    slow = log.subscribe(topic, SLOW, topics=[topic])
    every = log.subscribe(topic, "true")
    published = log.publish_batch(topic, [NewEvent({"slow": 32000}), *[NewEvent({}) for _ in range(3)]])
    after = 0
    while not (reading := log.read_next(topic, reader="me", after=after, timeout_seconds=0.2)).events:
        after = reading.next_position
    log.subscribe(topic, SLOW)
    ahead = log.read_next(topic, reader="me", after=reading.next_position, timeout_seconds=600)
    while ahead.events:
        reading = ahead
        ahead = log.read_next(topic, reader="me", after=reading.next_position, timeout_seconds=600)
    assert (ahead.events, ahead.next_position) == ((), reading.next_position)
    log.commit_reading(topic, reading.next_position, reader="me")
    read_to = published.index(reading.next_position) + 1
    assert read_all(log, topic, timeout_seconds=600) == [
        *((position, (slow,)) for position in published[:read_to]),
        *((position, (slow, every)) for position in published[read_to:]),
    ]


def test_a_stopped_filter_holds_retention_only_of_a_queue_that_holds_retention(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    log.subscribe(topic, SLOW, topics=[topic])
    position = log.publish(topic, {"slow": 32000})
    read_all(log, topic, timeout_seconds=0.2)
    low_water = "select headwater_internal.queue_low_water(g) from headwater_internal.queue g where g.name = %s"
    assert connection.execute(low_water, (topic,)).fetchone() == (position - 1,)
    assert log.queue(topic).holds_retention is False
    connection.execute("update headwater_internal.topic set expired_to = %s where name = %s", (position, topic))
    assert connection.execute(
        "select expired from headwater.stopped_filter where queue_name = %s", (topic,)
    ).fetchone() == (True,)
    log.subscribe(topic, SLOW)
    read_all(log, topic, timeout_seconds=600)
    (told,) = log.subscriptions(topic)
    assert "expired while the filter was stopped" in (told.last_error or "")


def test_a_chunk_that_takes_too_long_is_halved_and_no_filter_is_blamed(log: headwater.Headwater, topic: str) -> None:
    # Many events of some milliseconds each: too much for one statement, little for each event.
    some = log.subscribe(topic, SLOW, {"n": 1}, topics=[topic])
    published = log.publish_batch(topic, [NewEvent({"slow": 3000}) for _ in range(200)])
    began = time.monotonic()
    assert len(log.read_next(topic, reader="me", batch_size=200, timeout_seconds=600, peek=True).events) == 200
    needed = time.monotonic() - began
    came = read_all(log, topic, batch_size=200, timeout_seconds=needed / 4)
    assert came == [(position, (some,)) for position in published]
    assert not log.subscriptions(topic)[0].broken


@pytest.mark.parametrize("filters", [1, 20])
def test_subscriptions_are_found_by_index_without_any_statistics(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection, filters: int
) -> None:
    """The number of index entries that were looked at: one for each event, not one for each subscription."""
    texts = [f"{BY_USER} and e.type is distinct from '{topic} {number}'" for number in range(filters)]
    connection.execute(
        "select headwater.subscribe(%s, (%s::text[])[1 + i %% %s], jsonb_build_object('user', i)) "
        "from generate_series(1, 10000) as i",
        (topic, texts, filters),
    )
    log.publish_batch(topic, [NewEvent({"user": user}) for user in range(1, 501)])
    used = "select idx_tup_read from pg_stat_user_indexes where indexrelname = %s"
    scanned = "select seq_tup_read from pg_stat_user_tables where relid = 'headwater_internal.subscription'::regclass"

    def counts() -> tuple[int, int]:
        connection.execute("select pg_stat_clear_snapshot()")
        probed = connection.execute(used, ("subscription_probe",)).fetchone()
        by_scan = connection.execute(scanned).fetchone()
        assert probed is not None
        assert by_scan is not None
        return probed[0], by_scan[0]

    connection.execute("select pg_stat_force_next_flush()")
    with psycopg.connect(connection.info.dsn, autocommit=True) as other:
        before = counts()
        matched = other.execute(
            "select position, subscription_ids from headwater.read_next(%s, 'me', null, 500)", (topic,)
        ).fetchall()
        other.execute("select pg_stat_force_next_flush()")
        other.execute("select 1")
        after = counts()
    assert len(matched) == 501
    assert all(len(ids) == 1 for _, ids in matched[:-1])
    assert (after[0] - before[0], after[1] - before[1]) == (500, 0)


def test_a_queue_does_not_look_at_the_filters_of_other_queues(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    """By the number of rows of filters that a reading fetches."""
    texts = [f"{BY_USER} and e.type is distinct from '{topic} {number}'" for number in range(50)]
    for queue, wanted in ((f"{topic}-other", texts), (topic, texts[:2])):
        connection.execute(
            "select headwater.subscribe(%s, t, jsonb_build_object('user', 1)) from unnest(%s::text[]) as t",
            (queue, wanted),
        )
    log.publish(topic, {"user": 1})
    fetched = (
        "select seq_tup_read + coalesce(idx_tup_fetch, 0) from pg_stat_user_tables "
        "where schemaname = 'headwater_internal' and relname = 'filter'"
    )

    def count() -> int:
        connection.execute("select pg_stat_clear_snapshot()")
        row = connection.execute(fetched).fetchone()
        assert row is not None
        return int(row[0])

    connection.execute("select pg_stat_force_next_flush()")
    with psycopg.connect(connection.info.dsn, autocommit=True) as other:
        before = count()
        matched = other.execute("select subscription_ids from headwater.read_next(%s, 'me')", (topic,)).fetchall()
        other.execute("select pg_stat_force_next_flush()")
        other.execute("select 1")
        after = count()
    assert len(matched[0][0]) == 2
    # Its own two; a session that ended before may add a few.
    assert after - before < 10


def test_events_that_many_filters_do_not_want_never_reach_a_key_that_fails_on_them(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    """By the number of probes: one for the event that is wanted, and no second try after an error."""
    connection.execute(
        "select headwater.subscribe(%s, t, jsonb_build_object('n', 1)) from unnest(%s::text[]) as t",
        (
            topic,
            [
                f"e.type = '{topic} {number}' and s.params @> jsonb_build_object('n', (e.data ->> 'n')::integer)"
                for number in range(20)
            ],
        ),
    )
    wanted = NewEvent({"n": 1}, type=f"{topic} 7")
    log.publish_batch(topic, [wanted, *[NewEvent({"n": "none"}, type="other") for _ in range(5)]])

    def probes() -> int:
        connection.execute("select pg_stat_clear_snapshot()")
        row = connection.execute(
            "select idx_scan from pg_stat_user_indexes where indexrelname = 'subscription_probe'"
        ).fetchone()
        assert row is not None
        return int(row[0])

    connection.execute("select pg_stat_force_next_flush()")
    with psycopg.connect(connection.info.dsn, autocommit=True) as other:
        before = probes()
        matched = other.execute("select subscription_ids from headwater.read_next(%s, 'me')", (topic,)).fetchall()
        other.execute("select pg_stat_force_next_flush()")
        other.execute("select 1")
        after = probes()
    assert [len(ids) for (ids,) in matched[:-1]] == [1]
    assert after - before == 1


def test_eight_processes_may_subscribe_to_a_new_filter_at_once(log: headwater.Headwater, topic: str) -> None:
    for number in range(10):
        text = f"e.data ->> '{topic}' = 'k{number}' and s.params @> jsonb_build_object('a', e.data -> 'a')"
        start = threading.Barrier(8, timeout=PATIENCE_SECONDS)
        made: list[int] = []
        failed: list[Exception] = []

        def subscribe(
            text: str = text,
            start: threading.Barrier = start,
            made: list[int] = made,
            failed: list[Exception] = failed,
        ) -> None:
            start.wait()
            try:
                made.append(log.subscribe(topic, text))
            except headwater.HeadwaterError as error:
                failed.append(error)

        threads = [threading.Thread(target=subscribe) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        assert failed == []
        assert len(made) == 8
        assert len(set(made)) == 1


def test_a_subscription_ends_when_it_was_not_in_use(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    kept = log.subscribe(topic, "true", {"n": 1}, expires_after=timedelta(minutes=10))
    log.subscribe(topic, "true", {"n": 2}, expires_after=timedelta(minutes=10))
    for_ever = log.subscribe(topic, "true", {"n": 3})
    connection.execute("update headwater_internal.subscription set last_active_at = now() - interval '11 minutes'")
    log.keep_subscriptions([kept])
    log.maintain()
    assert [one.id for one in log.subscriptions(topic)] == [kept, for_ever]
    assert log.unsubscribe(kept)
    assert not log.unsubscribe(kept)


def test_the_longest_life_that_anybody_asked_for_counts(log: headwater.Headwater, topic: str) -> None:
    hour, day = timedelta(hours=1), timedelta(days=1)
    lives = []
    for life in (hour, day, hour, None, hour):
        log.subscribe(topic, "true", expires_after=life)
        lives.append(log.subscriptions(topic)[0].expires_after)
    assert lives == [hour, day, day, None, None]


def run_until(app: App, dsn: str, finished: Callable[[], bool]) -> None:
    async def main() -> None:
        stop = asyncio.Event()
        running = asyncio.create_task(app.run(dsn, stop=stop, read_ahead=3))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not running.done() and not finished():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            stop.set()
            await running

    asyncio.run(main())


def test_subscribers_get_their_events_in_order_and_only_theirs(log: headwater.Headwater, dsn: str, topic: str) -> None:
    app = App()
    even: list[int] = []
    odd: list[int] = []

    @app.subscriber(topic, "(e.data ->> 'n')::int % 2 = 0")
    async def take_even(event: headwater.Event) -> None:
        even.append(event.data["n"])

    @app.subscriber(topic, "(e.data ->> 'n')::int % 2 = (s.params ->> 'rest')::int", {"rest": 1})
    def take_odd(event: headwater.Event) -> None:
        odd.append(event.data["n"])

    for one in app.subscribers:
        log.subscribe(topic, one.filter, one.params)
    log.publish_batch(topic, [NewEvent({"n": n}) for n in range(500)])
    run_until(app, dsn, lambda: len(even) + len(odd) == 500)
    assert even == list(range(0, 500, 2))
    assert odd == list(range(1, 500, 2))
    assert log.read_next(topic, reader="after").events == ()


def test_a_failed_event_comes_again_to_its_handler_alone(log: headwater.Headwater, dsn: str, topic: str) -> None:
    app = App()
    calls: list[tuple[str, int]] = []

    @app.subscriber(topic, "true")
    async def fails(event: headwater.Event) -> Any:
        calls.append(("fails", event.data))
        tries = calls.count(("fails", event.data))
        if event.data == 1 and tries < 3:
            raise RuntimeError("not yet")
        return Retry(timedelta(0)) if event.data == 2 and tries < 2 else None

    @app.subscriber(topic, "true")
    async def works(event: headwater.Event) -> None:
        calls.append(("works", event.data))

    log.subscribe(topic, "true")
    log.alter_queue(topic, backoff_seconds=0)
    log.publish_batch(topic, [NewEvent(n) for n in range(4)])
    run_until(app, dsn, lambda: len(calls) == 4 + 4 + 3)
    assert [n for name, n in calls if name == "works"] == [0, 1, 2, 3]
    assert calls.count(("fails", 1)) == 3
    assert calls.count(("fails", 2)) == 2


def test_a_handler_that_never_succeeds_is_given_up_and_its_event_is_kept_to_see(
    log: headwater.Headwater, dsn: str, topic: str
) -> None:
    app = App()
    tries = 0

    @app.subscriber(topic, "true")
    async def hopeless(event: headwater.Event) -> None:
        nonlocal tries
        tries += 1
        raise RuntimeError("never")

    log.subscribe(topic, "true")
    log.alter_queue(topic, backoff_seconds=0, max_attempts=3)
    log.publish(topic, 1)

    def given_up() -> bool:
        return bool(log.dead_letters(topic))

    run_until(app, dsn, given_up)
    assert tries == 3
    (letter,) = log.dead_letters(topic)
    assert (letter.attempts, letter.last_error, letter.handler) == (3, "RuntimeError: never", "hopeless")
    assert [one["attempt"] for one in letter.history] == [1, 2, 3]


def test_a_subscriber_gives_up_on_an_event_past_the_retry_age_of_its_queue(
    log: headwater.Headwater, dsn: str, topic: str, connection: psycopg.Connection
) -> None:
    app = App()

    @app.subscriber(topic, "true")
    async def hopeless(event: headwater.Event) -> None:
        raise RuntimeError("never")

    log.subscribe(topic, "true")
    log.alter_queue(topic, backoff_seconds=3600, max_attempts=1000, retry_age_seconds=3600)
    log.publish(topic, 1)
    connection.execute(
        "update headwater_internal.event set published_at = published_at - interval '2 hours' "
        "where topic_id = (select id from headwater_internal.topic where name = %s)",
        (topic,),
    )
    run_until(app, dsn, lambda: bool(log.dead_letters(topic)))
    (letter,) = log.dead_letters(topic)
    assert (letter.attempts, letter.last_error) == (1, "RuntimeError: never")


def test_a_slow_handler_does_not_stop_the_others_within_the_read_ahead(
    log: headwater.Headwater, dsn: str, topic: str
) -> None:
    app = App()
    fast: list[int] = []
    most_while_slow = 0
    let_go = threading.Event()

    @app.subscriber(topic, "true")
    def slow(event: headwater.Event) -> None:
        nonlocal most_while_slow
        if event.data == 0:
            let_go.wait(PATIENCE_SECONDS)
            most_while_slow = len(fast)

    @app.subscriber(topic, "true")
    async def quick(event: headwater.Event) -> None:
        fast.append(event.data)
        if len(fast) == 300:
            # Three chunks of a hundred: the read-ahead that this run has.
            asyncio.get_running_loop().call_later(0.3, let_go.set)

    log.subscribe(topic, "true")
    log.publish_batch(topic, [NewEvent(n) for n in range(600)])
    run_until(app, dsn, lambda: len(fast) == 600)
    assert most_while_slow == 300
    assert fast == list(range(600))


def test_a_table_is_watched(log: headwater.Headwater, topic: str, connection: psycopg.Connection) -> None:
    connection.execute(
        f'create table "{topic}" (id integer, region text, total numeric, note text, primary key (id, region))'
    )
    assert log.watch_table(f'"{topic}"', topic=topic) == topic
    connection.execute(f"insert into \"{topic}\" values (1, 'eu', 10.50, null), (2, 'us', 20, 'x')")
    connection.execute(f'update "{topic}" set total = 11 where id = 1')
    connection.execute(f'update "{topic}" set total = 11 where id = 1')
    connection.execute(f'delete from "{topic}" where id = 2')
    with connection.transaction(force_rollback=True):
        connection.execute(f'delete from "{topic}"')
    connection.execute(f'truncate "{topic}"')
    events = log.read(topic)
    assert [(event.type, event.key_text) for event in events] == [
        ("insert", '[1, "eu"]'),
        ("insert", '[2, "us"]'),
        ("update", '[1, "eu"]'),
        ("delete", '[2, "us"]'),
        ("truncate", None),
    ]
    assert events[2].routing_key == f"public.{topic}.update"
    assert events[2].data == {
        "op": "update",
        "schema": "public",
        "table": topic,
        "changed": ["total"],
        "before": {"id": 1, "region": "eu", "total": 10.5, "note": None},
        "after": {"id": 1, "region": "eu", "total": 11, "note": None},
    }
    assert events[0].data["before"] is None
    assert events[3].data["after"] is None
    assert log.unwatch_table(f'"{topic}"')
    assert not log.unwatch_table(f'"{topic}"')
    connection.execute(f"insert into \"{topic}\" values (3, 'eu', 1, null)")
    assert len(log.read(topic)) == 5


def test_a_watch_shows_only_the_columns_and_changes_asked_for(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    connection.execute(f'create table "{topic}" (id integer primary key, total numeric, secret text)')
    log.watch_table(f'"{topic}"', topic=topic, columns=["id", "total"], when_changed=["total"], deletes=False)
    connection.execute(f"insert into \"{topic}\" values (1, 1, 's')")
    connection.execute(f"update \"{topic}\" set secret = 't'")
    connection.execute(f"update \"{topic}\" set total = 2, secret = 'u'")
    connection.execute(f'delete from "{topic}"')
    assert [event.data for event in log.read(topic)] == [
        {"op": "insert", "schema": "public", "table": topic, "before": None, "after": {"id": 1, "total": 1}},
        {
            "op": "update",
            "schema": "public",
            "table": topic,
            "changed": ["total"],
            "before": {"id": 1, "total": 1},
            "after": {"id": 1, "total": 2},
        },
    ]
    with pytest.raises(headwater.InvalidRequest, match="no column"):
        log.watch_table(f'"{topic}"', columns=["nope"])
    with pytest.raises(headwater.InvalidRequest, match="cannot be watched"):
        log.watch_table("headwater_internal.event")


def test_who_may_write_a_watched_table_need_not_be_a_publisher(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    connection.execute(f'create table "{topic}" (id integer primary key)')
    connection.execute("do $$ begin create role plain_writer; exception when duplicate_object then null; end $$")
    connection.execute(f'grant insert on "{topic}" to plain_writer')
    log.watch_table(f'"{topic}"', topic=topic)
    with connection.transaction():
        connection.execute("set local role plain_writer")
        connection.execute(f'insert into "{topic}" values (1)')
    assert len(log.read(topic)) == 1


def test_a_reader_of_another_epoch_is_refused_and_moves_nothing(log: headwater.Headwater, topic: str) -> None:
    queue = f"{topic}-epoch"
    log.subscribe(queue, f"e.topic = '{topic}'")
    log.publish(topic, 1)
    reading = log.read_next(queue, reader="me")
    assert [matched.event.data for matched in reading.events] == [1]
    epoch = log.state().epoch
    for refused in (
        lambda: log.read_next(queue, reader="me", after=reading.next_position, epoch=epoch - 1),
        lambda: log.read_next(queue, reader="me", after=reading.next_position + 1000),
        lambda: log.commit_reading(queue, reading.next_position, reader="me", epoch=epoch - 1),
        lambda: log.commit_reading(queue, reading.next_position + 1000, reader="me"),
    ):
        with pytest.raises(headwater.EpochChanged):
            refused()
    assert [matched.event.data for matched in log.read_next(queue, reader="me", epoch=epoch).events] == [1]
    log.commit_reading(queue, reading.next_position, reader="me", epoch=epoch)
    assert log.read_next(queue, reader="me").events == ()


def test_an_open_publisher_of_another_topic_does_not_hold_up_a_queue_of_named_topics(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    elsewhere = log.create_topic(f"{topic}-elsewhere").name
    queue = f"{topic}-named"
    log.subscribe(queue, "true", topics=[topic])
    with connection.transaction():
        log.publish(elsewhere, "held", connection=connection)
        log.publish(topic, 1)
        assert [matched.event.data for matched in log.read_next(queue, reader="me").events] == [1]
