"""Is what a broker keeps in memory bounded, in order, and without a gap or a repetition?"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headwater.calls.kafka import TopicPartition
from headwater.servers.kafka.batch_cache import (
    BATCH_OVERHEAD_BYTES,
    MAX_BATCH_BYTES,
    MAX_BATCHES,
    BatchCache,
    CachedBatch,
)

PARTITIONS = (TopicPartition(1, 0), TopicPartition(1, 1), TopicPartition(2, 0))


def batch(first: int, count: int, size: int = 10) -> CachedBatch:
    return CachedBatch(first, first + count, 0, 0, 0, False, b"r" * size)


def found(cache: BatchCache, topic_partition: TopicPartition, offset: int, max_bytes: int = 10**9) -> list[CachedBatch]:
    return cache.batches(topic_partition, offset, max_bytes=max_bytes, codecs=(0,), by_log_time=False)


kept_batches = st.lists(
    st.tuples(st.sampled_from(PARTITIONS), st.integers(0, 20), st.integers(1, 8), st.integers(0, 2000)), max_size=40
)


@given(kept_batches, st.integers(0, 10_000), st.integers(0, 30), st.integers(0, 5000))
def test_there_are_never_more_bytes_than_allowed_and_batches_follow_each_other(
    batches: list[tuple[TopicPartition, int, int, int]], max_bytes: int, offset: int, wanted_bytes: int
) -> None:
    cache = BatchCache(max_bytes)
    newest: dict[tuple[TopicPartition, int], CachedBatch] = {}
    for topic_partition, first, count, size in batches:
        newest[topic_partition, first] = batch(first, count, size)
        cache.add(topic_partition, newest[topic_partition, first], epoch=1)
        assert cache.bytes <= max_bytes
    for topic_partition in PARTITIONS:
        run = found(cache, topic_partition, offset, wanted_bytes)
        if run:
            assert run[0].first <= offset < run[0].end
            assert all(before.end == after.first for before, after in pairwise(run))
            assert len(run) == 1 or sum(len(one.records) for one in run) <= wanted_bytes
            assert all(newest[topic_partition, one.first] == one for one in run)
        cache.forget(topic_partition)
        assert found(cache, topic_partition, offset) == []
    assert cache.bytes == 0


def test_the_oldest_goes_first_and_one_that_is_too_large_is_not_kept() -> None:
    topic_partition = PARTITIONS[0]
    cache = BatchCache(3 * (BATCH_OVERHEAD_BYTES + 10))
    for first in range(4):
        cache.add(topic_partition, batch(first, 1), epoch=1)
    assert found(cache, topic_partition, 0) == []
    assert [one.first for one in found(cache, topic_partition, 1)] == [1, 2, 3]
    cache.add(topic_partition, batch(4, 1, size=10_000), epoch=1)
    assert [one.first for one in found(cache, topic_partition, 1)] == [1, 2, 3]
    large = BatchCache(10 * MAX_BATCH_BYTES)
    large.add(topic_partition, batch(0, 1, size=MAX_BATCH_BYTES + 1), epoch=1)
    assert large.bytes == 0


def test_no_more_batches_come_at_once_than_can_be_asked_about() -> None:
    cache = BatchCache(10**6)
    for first in range(MAX_BATCHES + 5):
        cache.add(PARTITIONS[0], batch(first, 1), epoch=1)
    assert len(found(cache, PARTITIONS[0], 0)) == MAX_BATCHES
