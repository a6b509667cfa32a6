"""Does publishing keep its promises on a real Postgres?"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest

import headwater
from headwater import NewEvent, aio


def payloads(log: headwater.Headwater, topic: str) -> list[bytes | None]:
    return [event.payload for event in log.read(topic, batch_size=1000)]


def test_an_event_comes_back_as_it_was_published(log: headwater.Headwater, topic: str) -> None:
    before = datetime.now(UTC)
    position = log.publish(
        topic,
        {"id": 42, "name": "Ärmel"},
        key="order-42",
        type="OrderPlaced",
        routing_key="orders.eu.placed",
        headers={"trace": "abc", "n": 1},
    )
    (event,) = log.read(topic)
    assert event.position == position
    assert event.topic == topic
    assert event.data == {"id": 42, "name": "Ärmel"}
    assert (event.key, event.key_text) == (b"order-42", "order-42")
    assert (event.type, event.routing_key) == ("OrderPlaced", "orders.eu.placed")
    assert event.headers == {"trace": "abc", "n": 1}
    assert event.content_type == "application/json"
    assert event.event_id is None
    assert before - timedelta(seconds=1) <= event.published_at <= datetime.now(UTC) + timedelta(seconds=1)


def test_bytes_are_kept_to_the_bit(log: headwater.Headwater, topic: str) -> None:
    every_byte = bytes(range(256))
    log.publish(topic, every_byte, key=every_byte)
    (event,) = log.read(topic)
    assert (event.payload, event.key, event.content_type) == (every_byte, every_byte, None)


def test_an_event_may_have_no_payload(log: headwater.Headwater, topic: str) -> None:
    log.publish(topic, None, key="gone")
    (event,) = log.read(topic)
    assert event.payload is None
    assert event.data is None


def test_a_commit_publishes_and_a_rollback_leaves_nothing(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    with connection.transaction():
        log.publish(topic, 1, connection=connection)
        assert log.read(topic) == []
    with pytest.raises(ZeroDivisionError), connection.transaction():
        log.publish(topic, 2, connection=connection)
        raise ZeroDivisionError
    assert payloads(log, topic) == [b"1"]


def test_a_batch_keeps_its_order_and_returns_the_positions(log: headwater.Headwater, topic: str) -> None:
    positions = log.publish_batch(topic, [NewEvent({"n": n}, key=str(n)) for n in range(500)])
    events = log.read(topic, batch_size=1000)
    assert [event.position for event in events] == positions
    assert [event.data["n"] for event in events] == list(range(500))


def test_an_empty_batch_is_nothing(log: headwater.Headwater, topic: str) -> None:
    assert log.publish_batch(topic, []) == []


def test_a_batch_with_one_bad_event_writes_none(log: headwater.Headwater, topic: str) -> None:
    with pytest.raises(headwater.InvalidEvent):
        log.publish_batch(topic, [NewEvent(1), NewEvent(2, type="x" * 201)])
    assert payloads(log, topic) == []


def test_a_repeated_event_id_returns_the_first_position(log: headwater.Headwater, topic: str) -> None:
    first = log.publish(topic, 1, event_id="a")
    assert log.publish(topic, 2, event_id="a") == first
    batch = log.publish_batch(
        topic, [NewEvent(3), NewEvent(4, event_id="a"), NewEvent(5, event_id="b"), NewEvent(6, event_id="b")]
    )
    assert batch[1] == first
    assert batch[2] == batch[3]
    assert payloads(log, topic) == [b"1", b"3", b"5"]


def test_the_same_event_id_in_another_topic_is_another_event(log: headwater.Headwater, topic: str) -> None:
    other = log.create_topic(f"{topic}-other").name
    assert log.publish(topic, 1, event_id="a") != log.publish(other, 1, event_id="a")


def test_concurrent_publishers_of_one_event_id_agree(dsn: str, log: headwater.Headwater, topic: str) -> None:
    async def publish_at_once() -> list[int | None]:
        async with await aio.connect(dsn) as log:
            return await asyncio.gather(*(log.publish(topic, n, event_id="same") for n in range(20)))

    assert len(set(asyncio.run(publish_at_once()))) == 1
    assert len(payloads(log, topic)) == 1


@pytest.mark.parametrize("commit_every", [None, 700])
def test_publish_many_streams_in_order(log: headwater.Headwater, topic: str, commit_every: int | None) -> None:
    events = (NewEvent({"n": n}, key=f"k{n}", type="T", routing_key="a.b", headers={"h": n}) for n in range(2500))
    assert log.publish_many(topic, events, commit_every=commit_every) == 2500
    stored = list(log.follow(topic, stop_when_caught_up=True))
    assert [event.data["n"] for event in stored] == list(range(2500))
    assert stored[7].headers == {"h": 7}
    assert (stored[7].key_text, stored[7].type, stored[7].routing_key) == ("k7", "T", "a.b")


def test_publish_many_takes_what_copy_cannot(log: headwater.Headwater) -> None:
    topic = log.create_topic("many-sequenced", kind="sequenced", partitions=3).name
    count = log.publish_many(topic, (NewEvent(n, key=str(n % 7), event_id=str(n)) for n in range(2100)), chunk_size=500)
    assert count == 2100
    partitions: dict[int, list[int | None]] = {}
    for event in log.follow(topic, stop_when_caught_up=True):
        partitions.setdefault(event.partition, []).append(event.topic_offset)
    assert len(partitions) == 3
    assert all(offsets == list(range(len(offsets))) for offsets in partitions.values())


def test_publish_many_is_all_or_nothing(log: headwater.Headwater, topic: str) -> None:
    def events():
        yield from (NewEvent(n) for n in range(3000))
        yield NewEvent("x" * 2_000_000)

    with pytest.raises(headwater.EventTooLarge):
        log.publish_many(topic, events())
    assert payloads(log, topic) == []


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"payload": float("nan")}, headwater.InvalidEvent, "JSON"),
        ({"payload": object()}, headwater.InvalidEvent, "JSON"),
        ({"payload": "a\x00b"}, headwater.InvalidEvent, "NUL"),
        ({"payload": b"{", "content_type": "application/json"}, headwater.InvalidEvent, "not valid JSON"),
        ({"payload": 1, "type": "a\x00"}, headwater.InvalidEvent, "NUL"),
        ({"payload": 1, "headers": {"a": "\x00"}}, headwater.InvalidEvent, "NUL"),
        ({"payload": 1, "key": "k" * 65536}, headwater.InvalidEvent, "65535"),
        ({"payload": 1, "type": "t" * 201}, headwater.InvalidEvent, "a type is 1 to 200 characters"),
        ({"payload": 1, "routing_key": "r" * 256}, headwater.InvalidEvent, "routing key"),
        ({"payload": 1, "event_id": "i" * 256}, headwater.InvalidEvent, "event id"),
        ({"payload": 1, "headers": [1]}, headwater.InvalidEvent, "headers are a JSON object"),
        ({"payload": "x" * 1_048_577}, headwater.EventTooLarge, "1048576"),
        ({"payload": 1, "headers": {"h": "x" * 70_000}}, headwater.EventTooLarge, "65536"),
        ({"payload": 1, "deliver_at": datetime(2030, 1, 1)}, headwater.InvalidRequest, "time zone"),  # noqa: DTZ001
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(
    log: headwater.Headwater, topic: str, arguments: dict, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        log.publish(topic, **arguments)
    assert payloads(log, topic) == []


def test_an_escaped_backslash_before_u0000_is_no_nul(log: headwater.Headwater, topic: str) -> None:
    log.publish(topic, "\\u0000")
    assert log.read(topic)[0].data == "\\u0000"


def test_an_unknown_topic_is_refused_unless_the_log_makes_missing_ones(log: headwater.Headwater) -> None:
    with pytest.raises(headwater.TopicNotFound, match="nowhere"):
        log.publish("nowhere", 1)
    with pytest.raises(headwater.TopicNotFound):
        log.publish_many("nowhere", [NewEvent(1)])
    log.change_settings(auto_create_topics=True)
    try:
        log.publish("nowhere", 1)
        assert payloads(log, "nowhere") == [b"1"]
    finally:
        log.change_settings(auto_create_topics=False)


def test_sql_publishes_the_same_event(log: headwater.Headwater, topic: str, connection: psycopg.Connection) -> None:
    connection.execute(
        "select headwater.publish(%s, '{\"a\": 1}', key => 'k', type => 'T', routing_key => 'r', "
        "headers => '{\"h\": 1}')",
        (topic,),
    )
    (event,) = log.read(topic)
    assert (event.data, event.key_text, event.type, event.routing_key, event.headers, event.content_type) == (
        {"a": 1},
        "k",
        "T",
        "r",
        {"h": 1},
        "application/json",
    )


def test_a_key_has_its_partition_as_in_kafka(connection: psycopg.Connection) -> None:
    # Kafka's own test values for murmur2.
    known = {
        "21": -973932308,
        "foobar": -790332482,
        "a-little-bit-long-string": -985981536,
        "a-little-bit-longer-string": -1486304829,
        "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        "abc": 479470107,
    }
    for key, hashed in known.items():
        assert connection.execute("select headwater_internal.key_hash(%s::bytea)", (key.encode(),)).fetchone() == (
            hashed & 0x7FFFFFFF,
        )


def test_events_of_one_key_share_a_partition(log: headwater.Headwater) -> None:
    topic = log.create_topic("partitions", partitions=8).name
    log.publish_batch(topic, [NewEvent(n, key=f"k{n % 20}") for n in range(200)])
    partitions: dict[str | None, set[int]] = {}
    for event in log.read(topic, batch_size=1000):
        partitions.setdefault(event.key_text, set()).add(event.partition)
    assert all(len(partition) == 1 for partition in partitions.values())
    assert len(set.union(*partitions.values())) > 3


def test_a_scheduled_event_enters_the_log_when_due(log: headwater.Headwater, topic: str) -> None:
    assert log.publish(topic, "later", delay=timedelta(seconds=0.2)) is None
    far = log.schedule(topic, "far", deliver_at=datetime.now(UTC) + timedelta(days=36500))
    assert [event.topic for event in log.scheduled(topic)] == [topic, topic]
    assert log.read(topic) == []
    event = next(iter(log.follow(topic)))
    assert event.data == "later"
    assert [waiting.id for waiting in log.scheduled(topic)] == [far]


def test_a_scheduled_event_can_be_moved_and_cancelled(log: headwater.Headwater, topic: str) -> None:
    soon = datetime.now(UTC)
    first = log.schedule(topic, 1, delay=timedelta(hours=1), event_id="one")
    assert log.schedule(topic, 1, delay=timedelta(hours=1), event_id="one") == first
    second = log.schedule(topic, 2, delay=timedelta(hours=1))
    assert first is not None
    assert second is not None
    assert log.move_scheduled(second, soon)
    assert log.cancel_scheduled(first)
    assert not log.cancel_scheduled(first)
    log.maintain()
    assert payloads(log, topic) == [b"2"]
    assert not log.move_scheduled(second, soon)
    log.publish(topic, 3, event_id="one")
    assert payloads(log, topic) == [b"2", b"3"]


def test_a_due_event_keeps_its_event_id(log: headwater.Headwater, topic: str) -> None:
    log.schedule(topic, 1, delay=timedelta(milliseconds=1), event_id="one")
    event = next(iter(log.follow(topic)))
    assert event.event_id == "one"
    assert log.publish(topic, 2, event_id="one") == event.position


def test_the_servers_process_keeps_its_memory_from_one_call_to_the_next(dsn: str) -> None:
    with headwater.connect(dsn, pool_size=1) as log, log.connection() as connection:
        stat = Path(f"/proc/{connection.info.backend_pid}/stat")
        if not stat.exists():
            pytest.skip("only Linux tells which memory a process has taken")

        def pages_taken() -> int:
            return int(stat.read_text().rpartition(")")[2].split()[7])

        def use_memory() -> None:
            connection.execute("select count(*) from (select from generate_series(1, 3000) n order by md5(n::text)) s")

        for _ in range(10):
            use_memory()
        before = pages_taken()
        for _ in range(50):
            use_memory()
        # Given back and taken again, it would be some seventy each time.
        assert pages_taken() - before < 50 * 10
