"""Is lag what a consumer has yet to get of its own topics, and is a state what it says?"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import headwater
from headwater import NewEvent, Retry
from headwater.calls import overview, pipeline_runs
from headwater.calls.pipeline_runs import PipelineStatus
from headwater.log.model import Cursor
from headwater.queue.model import QueueOverview

_numbers = itertools.count()


@pytest.fixture
def other(log: headwater.Headwater) -> str:
    """Another topic, with events that are none of the consumer's business."""
    name = log.create_topic(f"other-{next(_numbers)}").name
    log.publish_batch(name, [NewEvent(None)] * 50)
    return name


def queue_of(log: headwater.Headwater, name: str) -> QueueOverview:
    (found,) = log.queues([name])
    return found


def cursor_of(log: headwater.Headwater, name: str) -> Cursor:
    (found,) = [one for one in log.cursors() if one.name == name]
    return found


def unseen(connection: psycopg.Connection, queue: str, seconds: int = 120) -> None:
    """As if no worker had asked for events since then."""
    connection.execute(
        "update headwater_internal.queue_activity a set claimed_at = clock_timestamp() - make_interval(secs => %s) "
        "from headwater_internal.queue g where g.id = a.queue_id and g.name = %s",
        (seconds, queue),
    )


# --- lag -----------------------------------------------------------------------------------------------------


def test_a_queue_that_is_bound_to_nothing_is_not_behind(log: headwater.Headwater, topic: str, other: str) -> None:
    log.create_queue(topic)
    found = queue_of(log, topic)
    assert (found.ready, found.lag_events, found.lag_is_more, found.lag_seconds) == (0, 0, False, None)


def test_events_of_other_topics_are_no_lag_of_a_queue_or_a_cursor(
    log: headwater.Headwater, topic: str, other: str
) -> None:
    log.create_queue(topic, topic)
    log.set_cursor(topic, position=0, topics=topic)
    log.publish_batch(topic, [NewEvent(None)] * 3)
    log.publish_batch(other, [NewEvent(None)] * 7)
    queue, cursor = queue_of(log, topic), cursor_of(log, topic)
    assert (queue.lag_events, queue.lag_is_more) == (3, False)
    assert (cursor.lag_events, cursor.lag_is_more) == (3, False)
    assert queue.lag_seconds is not None
    assert cursor.oldest_unread_age is not None


def test_a_count_that_is_bounded_says_so(log: headwater.Headwater, topic: str) -> None:
    log.create_queue(topic, topic)
    log.set_cursor(topic, position=0, topics=topic)
    log.publish_batch(topic, [NewEvent(None)] * 1000)
    assert (queue_of(log, topic).lag_events, queue_of(log, topic).lag_is_more) == (1000, False)
    assert (cursor_of(log, topic).lag_events, cursor_of(log, topic).lag_is_more) == (1000, False)
    log.publish(topic, None)
    assert (queue_of(log, topic).lag_events, queue_of(log, topic).lag_is_more) == (1000, True)
    assert (cursor_of(log, topic).lag_events, cursor_of(log, topic).lag_is_more) == (1000, True)


def test_lag_counts_what_a_binding_selects(log: headwater.Headwater, topic: str) -> None:
    log.create_queue(topic, from_end=True)
    log.bind(topic, topic=topic, type="A")
    log.bind(topic, pattern=f"{topic}.*")
    log.publish_batch(topic, [NewEvent(None, type="A"), NewEvent(None, type="B"), NewEvent(None, type="A")])
    log.publish(topic, None, type="B", routing_key=f"{topic}.eu")
    assert (queue_of(log, topic).lag_events, queue_of(log, topic).lag_is_more) == (3, False)


def test_lag_of_a_queue_is_what_it_has_not_finished(log: headwater.Headwater, topic: str) -> None:
    log.create_queue(topic, topic)
    log.publish_batch(topic, [NewEvent(None)] * 10)
    lease = log.claim(topic, worker="w", batch_size=4)
    assert lease is not None
    log.settle(lease, {lease.events[0].position: Retry(timedelta(hours=1))}, rest_done=True)
    assert log.claim(topic, worker="w", batch_size=2) is not None
    found = queue_of(log, topic)
    assert (found.ready, found.processing, found.retrying, found.done, found.lag_events) == (4, 2, 1, 3, 7)


def test_the_views_say_the_same_for_every_consumer_at_once(
    log: headwater.Headwater, connection: psycopg.Connection, topic: str, other: str
) -> None:
    """With all queues the topics' ends are shared; with one they are looked up for it alone."""
    log.create_queue(f"{topic}-named", topic)
    log.create_queue(f"{topic}-all")
    log.bind(f"{topic}-all", pattern="#")
    log.publish_batch(topic, [NewEvent(None)] * 5)
    listed = {one.name: one for one in log.queues()}
    for name in (f"{topic}-named", f"{topic}-all"):
        isolated = queue_of(log, name)
        assert (listed[name].lag_events, listed[name].state) == (isolated.lag_events, isolated.state)
        row = connection.execute("select lag_events from headwater.queue_lag where name = %s", (name,)).fetchone()
        assert row == (isolated.lag_events,)
    counted = connection.execute(
        "select count(*) from headwater.delivery where queue_name = %s and status = 'ready'", (f"{topic}-all",)
    ).fetchone()
    found = listed[f"{topic}-all"]
    assert counted is not None
    assert found.lag_events == counted[0] or found.lag_is_more


def test_a_consumer_group_of_kafka_lags_by_records_of_its_partition(
    log: headwater.Headwater, connection: psycopg.Connection, topic: str, other: str
) -> None:
    last = log.publish_batch(topic, [NewEvent(None)] * 5)[2]
    log.publish_batch(other, [NewEvent(None)] * 5)
    connection.execute("insert into headwater_internal.kafka_group (name, coordinator) values (%s, 0)", (topic,))
    connection.execute(
        "insert into headwater_internal.kafka_offset (group_name, topic_id, partition, committed_offset) "
        "select %s, id, 0, %s from headwater_internal.topic where name = %s",
        (topic, last, topic),
    )
    found = log.run(overview.kafka_group_offsets(topic))
    assert found is not None
    assert [(one.lag, one.lag_is_more) for one in found] == [(3, False)]


# --- the work that it takes ----------------------------------------------------------------------------------


def scans(connection: psycopg.Connection, act: Any) -> int:
    """How many lookups by index the events took meanwhile."""
    counted = (
        "select coalesce(sum(s.idx_scan), 0)::bigint from pg_stat_all_indexes s "
        "where s.schemaname = 'headwater_internal' and s.relname like 'event\\_0%%'"
    )
    connection.execute("select pg_stat_force_next_flush()")
    before = connection.execute(counted).fetchone()
    act()
    connection.execute("select pg_stat_force_next_flush()")
    after = connection.execute(counted).fetchone()
    assert before is not None
    assert after is not None
    return int(after[0] - before[0])


def test_a_claim_of_many_topics_looks_each_up_once(log: headwater.Headwater, connection: psycopg.Connection) -> None:
    names = [log.create_topic(f"wide-{number}").name for number in range(200)]
    log.create_queue("wide", names, from_end=True)

    def claim() -> list[int]:
        found = connection.execute("select position from headwater.claim('wide', 'w', 100)").fetchall()
        return [position for (position,) in found]

    positions = log.publish_batch(names[7], [NewEvent(None)] * 3)
    assert claim() == positions
    positions = [log.publish(name, None) for name in names]
    claimed: list[int] = []
    # One lookup a topic, by the index, and one an event that is handed out.
    assert scans(connection, lambda: claimed.extend(claim())) <= 200 + 100 + 20
    assert claimed == positions[:100]
    assert claim() == positions[100:]


def test_a_claim_far_behind_on_many_busy_topics_is_one_scan(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    names = [log.create_topic(f"busy-{number}").name for number in range(200)]
    log.create_queue("busy", names, from_end=True)
    for name in names:
        log.publish_batch(name, [NewEvent(None)] * 6)
    found: list[Any] = []
    claim = "select position from headwater.claim('busy', 'w', 50)"
    taken = scans(connection, lambda: found.extend(connection.execute(claim).fetchall()))
    assert len(found) == 50
    # One scan for all topics, which older servers count as one for each; and one lookup an event that is handed out.
    assert taken <= (1 if connection.info.server_version >= 170_000 else 200) + 50 + 20


def test_a_claim_of_many_topics_leaves_out_those_that_were_deleted(log: headwater.Headwater, other: str) -> None:
    names = [log.create_topic(f"gone-{number}").name for number in range(10)]
    log.create_queue("gone", names, from_end=True)
    expected = []
    for _ in range(2):
        expected += [log.publish(name, None) for name in names if name != "gone-3"]
        log.publish("gone-3", None)
        log.publish_batch(other, [NewEvent(None)] * 1500)
    log.delete_topic("gone-3")
    claimed: list[int] = []
    while (lease := log.claim("gone", worker="w", batch_size=4)) is not None:
        claimed += [event.position for event in lease.events]
        log.ack(lease)
    assert claimed == expected


def test_a_claim_far_behind_on_many_topics_comes_in_order(log: headwater.Headwater, other: str) -> None:
    names = [log.create_topic(f"far-{number}").name for number in range(20)]
    log.create_queue("far", names)
    expected = []
    for number in range(60):
        expected.append(log.publish(names[number % 20], None))
        if number % 20 == 0:
            log.publish_batch(other, [NewEvent(None)] * 1500)
    claimed: list[int] = []
    while (lease := log.claim("far", worker="w", batch_size=7)) is not None:
        claimed += [event.position for event in lease.events]
        log.ack(lease)
    assert claimed == expected


def test_looking_at_all_queues_looks_each_topic_up_once(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    names = [log.create_topic(f"look-{number}").name for number in range(100)]
    for number in range(50):
        log.create_queue(f"look-{number}", names, from_end=True)
    everything = connection.execute("select count(*) from headwater_internal.topic").fetchone()
    segments = connection.execute("select count(*) from headwater_internal.segment").fetchone()
    assert everything is not None
    assert segments is not None
    connection.execute("delete from headwater_internal.queue where name not like 'look-%'")
    log.publish(names[0], None)
    taken = scans(
        connection, lambda: connection.execute("select * from headwater_internal.queue_overviews()").fetchall()
    )
    assert taken <= everything[0] * segments[0] + 50 * 10


def test_a_queue_that_reads_for_subscriptions_lags_by_events_of_its_topics(
    log: headwater.Headwater, topic: str
) -> None:
    log.subscribe(topic, "true", from_position=log.state().stable)
    log.publish_batch(topic, [NewEvent(None)] * 2)
    found = queue_of(log, topic)
    assert (found.kind, found.state) == ("subscriptions", "no_reader")
    assert found.lag_events >= 2 or found.lag_is_more


# --- states --------------------------------------------------------------------------------------------------


def test_a_queue_without_workers_says_so(log: headwater.Headwater, connection: psycopg.Connection, topic: str) -> None:
    log.create_queue(topic, topic)
    assert queue_of(log, topic).state == "no_workers"
    assert log.claim(topic, worker="bert") is None
    found = queue_of(log, topic)
    assert (found.state, found.last_worker) == ("running", "bert")
    unseen(connection, topic)
    assert queue_of(log, topic).state == "no_workers"


def test_a_worker_that_holds_a_lease_is_there_however_long_it_takes(
    log: headwater.Headwater, connection: psycopg.Connection, topic: str
) -> None:
    log.create_queue(topic, topic)
    log.publish(topic, None)
    lease = log.claim(topic, worker="w", lease_seconds=600)
    assert lease is not None
    unseen(connection, topic)
    assert queue_of(log, topic).state == "running"
    log.ack(lease)
    assert queue_of(log, topic).state == "no_workers"


def test_a_paused_queue_is_paused_with_and_without_workers(log: headwater.Headwater, topic: str) -> None:
    log.create_queue(topic, topic)
    log.pause_queue(topic)
    assert queue_of(log, topic).state == "paused"


def test_a_queue_is_stalled_where_workers_ask_and_get_nothing_of_what_waits(
    log: headwater.Headwater, connection: psycopg.Connection, topic: str
) -> None:
    log.create_queue(topic, topic)
    log.publish(topic, None)
    connection.execute("update headwater_internal.event set published_at = published_at - interval '2 minutes'")
    assert queue_of(log, topic).state == "no_workers"
    # As one that asked, and was kept from what waits.
    connection.execute(
        "insert into headwater_internal.queue_activity (queue_id, claimed_at, worker) "
        "select id, clock_timestamp(), 'w' from headwater_internal.queue where name = %s",
        (topic,),
    )
    assert queue_of(log, topic).state == "stalled"
    assert log.claim(topic, worker="w") is not None
    assert queue_of(log, topic).state == "running"


def test_a_pipeline_that_ended_with_an_error_is_failed(log: headwater.Headwater, topic: str, other: str) -> None:
    def status() -> PipelineStatus:
        (found,) = [one for one in log.run(pipeline_runs.pipeline_statuses()) if one.name == topic]
        return found

    def claim() -> int:
        claimed = log.run(
            pipeline_runs.claim_pipeline(
                topic,
                runner="r",
                lease=timedelta(seconds=30),
                source="log",
                definition={"from": {"log": {"topics": topic}}},
                start=True,
            )
        )
        assert claimed.token is not None
        return claimed.token

    token = claim()
    checkpoint = log.publish(topic, None)
    log.run(pipeline_runs.record_batch(topic, token, checkpoint=checkpoint, rows=1, details={}))
    log.publish_batch(topic, [NewEvent(None)] * 2)
    log.publish_batch(other, [NewEvent(None)] * 9)
    assert (status().state, status().behind, status().behind_is_more) == ("running", 2, False)
    log.run(pipeline_runs.record_failure(topic, token, "no such table"))
    assert status().state == "failing"
    log.run(pipeline_runs.release_pipeline(topic, token))
    assert (status().state, status().last_error, status().behind) == ("failed", "no such table", 2)
    token = claim()
    log.run(pipeline_runs.record_batch(topic, token, checkpoint=checkpoint, rows=1, details={}))
    log.run(pipeline_runs.release_pipeline(topic, token))
    assert status().state == "idle"
