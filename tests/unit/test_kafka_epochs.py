"""Do batches and requests get the leader epochs that the log's epochs say?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.calls.kafka import Epoch, TopicPartition
from headwater.servers.kafka.batch_cache import BatchCache, CachedBatch
from headwater.servers.kafka.leader_epochs import EpochHistory, epoch_error
from headwater.servers.kafka.wire import ErrorCode

starts = st.lists(st.integers(0, 50), min_size=1, max_size=5).map(sorted)


@given(starts, st.lists(st.integers(1, 60), min_size=1, unique=True).map(sorted))
def test_positions_are_cut_exactly_where_the_epoch_changes(began_after: list[int], positions: list[int]) -> None:
    epochs = EpochHistory(len(began_after), [Epoch(number, after) for number, after in enumerate(began_after, 1)])
    wanted = []
    for position in positions:
        later = [number for number, after in enumerate(began_after, 1) if after < position]
        wanted.append(max(later, default=1))
    assert [epochs.of(position) for position in positions] == wanted
    changes = [place for place in range(1, len(positions)) if wanted[place] != wanted[place - 1]]
    assert set(changes) <= set(epochs.cuts(positions))


def test_epochs_that_began_after_the_one_that_was_seen_do_not_count() -> None:
    epochs = EpochHistory(2, [Epoch(1, 0), Epoch(2, 10), Epoch(3, 5)])
    assert [epochs.of(position) for position in (6, 10, 11, 99)] == [1, 1, 2, 2]


def test_a_request_of_another_epoch_is_refused() -> None:
    assert epoch_error(-1, 7) is None
    assert epoch_error(7, 7) is None
    assert epoch_error(6, 7) is ErrorCode.fenced_leader_epoch
    assert epoch_error(8, 7) is ErrorCode.unknown_leader_epoch


def test_what_was_kept_in_an_earlier_epoch_is_dropped_and_not_kept_again() -> None:
    cache = BatchCache(10_000)
    topic_partition = TopicPartition(1, 0)
    batch = CachedBatch(0, 1, 0, 0, 0, False, b"r")
    options = {"max_bytes": 100, "codecs": (0,), "by_log_time": False}
    cache.add(topic_partition, batch, epoch=1)
    assert cache.batches(topic_partition, 0, **options) == [batch]
    cache.enter_epoch(2)
    assert cache.batches(topic_partition, 0, **options) == []
    assert cache.bytes == 0
    cache.add(topic_partition, batch, epoch=1)
    assert cache.batches(topic_partition, 0, **options) == []
