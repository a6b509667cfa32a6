"""Does a topic lose what its cleanup policy says, all of it and nothing else, and begin where it did?"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import headwater
from headwater.calls import kafka as calls
from headwater.calls import kafka_admin
from headwater.calls.kafka import Bounds, TopicPartition
from headwater.servers.kafka.configs import parse_configs, topic_values

_numbers = itertools.count()
DAY = timedelta(days=1)


class Topic:
    """A sequenced topic with Kafka's settings."""

    def __init__(self, log: headwater.Headwater, partitions: int = 1, **configs: str) -> None:
        self.log = log
        self.name = f"cleaned-{next(_numbers)}"
        self.id = log.run(calls.kafka_create_topic(self.name, partitions))
        self.set(**configs)

    def set(self, **configs: str | None) -> None:
        change = parse_configs({name.replace("_", "."): value for name, value in configs.items()})
        self.log.run(calls.kafka_alter_topic(self.name, **change._asdict()))

    def values(self) -> dict[str, str]:
        (known,) = [one for one in self.log.run(calls.kafka_topics()) if one.name == self.name]
        return topic_values(known)

    def publish(self, *keys: str, payload: bytes | None = b"x") -> None:
        for key in keys:
            self.log.publish(self.name, payload, key=key)

    def bounds(self, partition: int = 0) -> Bounds:
        topic_partition = TopicPartition(self.id, partition)
        return self.log.run(calls.kafka_bounds([topic_partition]))[topic_partition]

    def kept(self) -> list[tuple[int, str]]:
        """The offsets that are left, each with its key."""
        return [(e.topic_offset or 0, (e.key or b"").decode()) for e in self.log.read(self.name, batch_size=100_000)]

    def clean(self) -> Any:
        return self.log.run(kafka_admin.clean_up(self.name))


def pass_days(connection: psycopg.Connection, log: headwater.Headwater, days: int = 2) -> None:
    """What is there grows older, and retention looks at it: once to leave the segment, once to drop it."""
    for _ in range(2):
        connection.execute(
            "update headwater_internal.segment set opened_at = opened_at - %(by)s, closed_at = closed_at - %(by)s",
            {"by": timedelta(days=days)},
        )
        log.maintain()


# Where a partition begins


def test_compaction_does_not_move_the_beginning_of_a_partition_that_retention_moved(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    topic = Topic(log, cleanup_policy="compact,delete", retention_ms="86400000")
    topic.publish(*"abcdefghij")
    pass_days(connection, log)
    topic.publish(*"aabbccdd")
    assert topic.bounds() == (10, 18)
    topic.clean()
    assert [offset for offset, _ in topic.kept()] == [11, 13, 15, 17]
    assert topic.bounds() == (10, 18)


def test_a_topic_that_comes_to_compaction_later_and_leaves_it_again_begins_where_it_did(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    topic = Topic(log)
    topic.publish(*"aab")
    topic.set(cleanup_policy="compact")
    topic.clean()
    assert [offset for offset, _ in topic.kept()] == [1, 2]
    assert topic.bounds() == (0, 3)
    topic.set(cleanup_policy="delete")
    assert topic.bounds() == (0, 3)
    topic.set(retention_ms="86400000")
    topic.publish(*"ab")
    pass_days(connection, log)
    assert topic.bounds() == (5, 5)
    topic.publish(*"aab")
    topic.set(cleanup_policy="compact")
    topic.clean()
    assert topic.kept() == [(6, "a"), (7, "b")]
    assert topic.bounds() == (5, 8)


def test_what_is_deleted_up_to_is_where_the_partition_begins_whatever_is_compacted(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    topic = Topic(log, cleanup_policy="compact,delete")
    topic.publish(*"aabbcc")
    assert log.run(kafka_admin.delete_before(topic.name, 0, 2)) == 2
    topic.clean()
    assert topic.kept() == [(3, "b"), (5, "c")]
    assert topic.bounds() == (2, 6)


# The policy


def test_retention_of_a_topic_that_is_only_compacted_is_told_and_takes_nothing(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    topic = Topic(log, cleanup_policy="compact")
    topic.publish(*"abc")
    topic.set(retention_ms="86400000", retention_bytes="1")
    told = topic.values()
    assert (told["cleanup.policy"], told["retention.ms"], told["retention.bytes"]) == ("compact", "86400000", "1")
    pass_days(connection, log)
    connection.execute("update headwater_internal.event set published_at = published_at - %s", (DAY * 4,))
    topic.clean()
    assert topic.kept() == [(0, "a"), (1, "b"), (2, "c")]
    # Once it may delete, it does.
    topic.set(cleanup_policy="compact,delete")
    assert topic.values()["cleanup.policy"] == "compact,delete"
    assert topic.clean().expired == 3
    assert topic.bounds() == (3, 3)


def test_both_policies_are_told_without_any_retention_too(log: headwater.Headwater) -> None:
    assert Topic(log, cleanup_policy="compact,delete").values()["cleanup.policy"] == "compact,delete"


# Cleaning up at once


def test_events_that_are_too_old_go_at_once_to_the_event(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    topic = Topic(log, partitions=3, retention_ms="86400000")
    topic.publish(*(str(number) for number in range(12)))
    positions = [event.position for event in log.read(topic.name)]
    connection.execute(
        "update headwater_internal.event set published_at = published_at - %s where topic_id = %s and position <= %s",
        (DAY * 2, topic.id, positions[7]),
    )
    cleaned = topic.clean()
    assert (cleaned.compacted, cleaned.expired, cleaned.done) == (0, 8, True)
    assert [event.position for event in log.read(topic.name)] == positions[8:]
    # Who reads by position hears of what is gone, up to the last of it.
    assert log.topic(topic.name).expired_to == positions[7]


def test_what_a_reader_that_holds_retention_needs_is_not_cleaned_up(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    topic = Topic(log, cleanup_policy="compact,delete", retention_bytes="1")
    log.set_cursor("keeps", position=0, topics=topic.name, holds_retention=True)
    try:
        topic.publish(*"aabb")
        assert topic.clean() == (0, 0, True)
        assert len(topic.kept()) == 4
    finally:
        log.delete_cursor("keeps")


def test_the_size_is_kept_to_in_sweeps_that_tell_whether_there_is_more(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    topic = Topic(log, partitions=2, retention_bytes="100")
    log.publish_many(topic.name, [headwater.NewEvent(b"x" * 9, key=str(number)) for number in range(400)])
    query = "select expired, done from headwater.clean_up(%s, sweep_size => 60)"
    sweeps = []
    while not sweeps or not sweeps[-1][1]:
        sweeps.append(connection.execute(query, (topic.name,)).fetchone() or (0, True))
    assert len(sweeps) >= 4
    sizes = log.run(kafka_admin.kafka_sizes([topic.id]))
    assert len(sizes) == 2
    assert all(80 < size <= 100 for size in sizes.values())
    assert sum(expired for expired, _ in sweeps) + len(topic.kept()) == 400


def test_the_command_cleans_up_one_topic(log: headwater.Headwater, dsn: str) -> None:
    from typer.testing import CliRunner

    from headwater.cli import app

    topic = Topic(log, cleanup_policy="compact")
    topic.publish(*"aaab")
    result = CliRunner().invoke(app, ["topic", "clean", topic.name, "--dsn", dsn, "--json"])
    assert (result.exit_code, '"compacted": 2' in result.stdout) == (0, True), result.output
    assert topic.kept() == [(2, "a"), (3, "b")]


# Compaction goes on from where it was


@pytest.mark.parametrize("sweep_size", [1, 2, 3, 100])
def test_compaction_in_parts_leaves_the_newest_of_each_key(
    log: headwater.Headwater, connection: psycopg.Connection, sweep_size: int
) -> None:
    topic = Topic(log, partitions=2, cleanup_policy="compact", delete_retention_ms="0")
    expected: dict[str, int] = {}
    for turn in range(3):
        for number, key in enumerate("abacadbzbcy" * (turn + 1)):
            payload = None if key == "z" or (turn, number) == (1, 4) else b"x"
            position = log.publish(topic.name, payload, key=key)
            assert position is not None
            expected[key] = position
        expected.pop("z", None)
        done = False
        while not done:
            row = connection.execute("select done from headwater.clean_up(%s, %s)", (topic.name, sweep_size)).fetchone()
            assert row is not None
            done = row[0]
        assert [(event.key or b"").decode() for event in log.read(topic.name)].count("z") == 0
        assert {(event.key or b"").decode(): event.position for event in log.read(topic.name)} == expected
    sizes = log.run(kafka_admin.kafka_sizes([topic.id]))
    assert sum(sizes.values()) == 2 * len(expected)


def test_compaction_reads_only_what_is_new(log: headwater.Headwater, connection: psycopg.Connection) -> None:
    topic = Topic(log, cleanup_policy="compact")
    log.publish_many(topic.name, [headwater.NewEvent(b"x", key=str(number)) for number in range(3000)])
    topic.clean()
    # That they are not looked at: a lower event of a known key stays, since nothing tells of it any more.
    connection.execute(
        "update headwater_internal.event set key = '1' where topic_id = %s and topic_offset = 0", (topic.id,)
    )
    topic.publish("2", "3")
    assert topic.clean().compacted == 2
    offsets = [offset for offset, _ in topic.kept()]
    assert offsets[:3] == [0, 1, 4]
    assert len(offsets) == 3000
