"""Calls of the Kafka door that administrators make: deleting what is old, and looking at how much there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwater.calls.call import Call, only_value
from headwater.calls.kafka import Lane


class CleanedUp(NamedTuple):
    """How many events went because newer ones of their key are there, how many by retention; whether that is all."""

    compacted: int
    expired: int
    done: bool


def delete_before(topic: str, partition: int, before_offset: int) -> Call[int]:
    """Delete the events of a lane before an offset, -1 for all; where the lane begins now."""
    return Call("select headwater.delete_before(%s, %s, %s)", (topic, partition, before_offset), only_value)


def clean_up(topic: str) -> Call[CleanedUp]:
    """Apply a topic's cleanup policy now, as much as one transaction should do."""
    return Call(
        "select compacted, expired, done from headwater.clean_up(%s)", (topic,), lambda rows: CleanedUp(*rows[0])
    )


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
