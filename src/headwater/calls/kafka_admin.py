"""Administrative calls of the Kafka server: deleting records, cleanup, sizes of partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwater.calls.call import Call, only_value
from headwater.calls.kafka import TopicPartition


class CleanupResult(NamedTuple):
    """The numbers of events removed by compaction and by retention, and whether the cleanup is complete."""

    compacted: int
    expired: int
    done: bool


def delete_before(topic: str, partition: int, before_offset: int) -> Call[int]:
    """Delete the events of a partition before an offset (-1: all); returns the new start offset."""
    return Call("select headwater.delete_before(%s, %s, %s)", (topic, partition, before_offset), only_value)


def clean_up(topic: str) -> Call[CleanupResult]:
    """Run a step of a topic's cleanup policy now, as one transaction of limited size."""
    return Call(
        "select compacted, expired, done from headwater.clean_up(%s)",
        (topic,),
        lambda rows: CleanupResult(*rows[0]),
    )


def kafka_matching_topics(pattern: str) -> Call[frozenset[str]]:
    """The topics whose full name matches a regular expression."""
    return Call(
        "select headwater_internal.kafka_matching_topics(%s)",
        (pattern,),
        lambda rows: frozenset(name for (name,) in rows),
    )


def kafka_sizes(topic_ids: Sequence[int]) -> Call[dict[TopicPartition, int]]:
    """The size of partitions in bytes; empty partitions are left out."""
    return Call(
        "select topic_id, partition, bytes from headwater_internal.kafka_sizes(%s::int[])",
        (list(topic_ids),),
        lambda rows: {TopicPartition(topic_id, topic_partition): size for topic_id, topic_partition, size in rows},
    )
