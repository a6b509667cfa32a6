"""Calls of the Kafka door that administrators make: deleting what is old, and looking at how much there is."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.calls.call import Call, only_value
from headwater.calls.kafka import Lane


def delete_before(topic: str, partition: int, before_offset: int) -> Call[int]:
    """Delete the events of a lane before an offset, -1 for all; where the lane begins now."""
    return Call("select headwater.delete_before(%s, %s, %s)", (topic, partition, before_offset), only_value)


def kafka_matching_topics(pattern: str) -> Call[frozenset[str]]:
    """The topics whose whole names a regular expression fits."""
    return Call(
        "select headwater.kafka_matching_topics(%s)", (pattern,), lambda rows: frozenset(name for (name,) in rows)
    )


def kafka_sizes(topic_ids: Sequence[int]) -> Call[dict[Lane, int]]:
    """How many bytes lanes hold; those that hold none are left out."""
    return Call(
        "select topic_id, lane, bytes from headwater.kafka_sizes(%s::int[])",
        (list(topic_ids),),
        lambda rows: {Lane(topic_id, lane): size for topic_id, lane, size in rows},
    )
