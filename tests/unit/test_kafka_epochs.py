"""Do batches and requests get the leader epochs that the log's epochs say?"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.calls.kafka import Epoch, Lane
from headwater.servers.kafka.batch_cache import Batch, Kept
from headwater.servers.kafka.leader_epochs import Epochs, epoch_refused
from headwater.servers.kafka.wire import ErrorCode

starts = st.lists(st.integers(0, 50), min_size=1, max_size=5).map(sorted)


@given(starts, st.lists(st.integers(1, 60), min_size=1, unique=True).map(sorted))
def test_positions_are_cut_exactly_where_the_epoch_changes(began_after: list[int], positions: list[int]) -> None:
    epochs = Epochs(len(began_after), [Epoch(number, after) for number, after in enumerate(began_after, 1)])
    wanted = []
    for position in positions:
        later = [number for number, after in enumerate(began_after, 1) if after < position]
        wanted.append(max(later, default=1))
    assert [epochs.of(position) for position in positions] == wanted
    changes = [place for place in range(1, len(positions)) if wanted[place] != wanted[place - 1]]
    assert set(changes) <= set(epochs.cuts(positions))


def test_epochs_that_began_after_the_one_that_was_seen_do_not_count() -> None:
    epochs = Epochs(2, [Epoch(1, 0), Epoch(2, 10), Epoch(3, 5)])
    assert [epochs.of(position) for position in (6, 10, 11, 99)] == [1, 1, 2, 2]


def test_a_request_of_another_epoch_is_refused() -> None:
    assert epoch_refused(-1, 7) is None
    assert epoch_refused(7, 7) is None
    assert epoch_refused(6, 7) is ErrorCode.fenced_leader_epoch
    assert epoch_refused(8, 7) is ErrorCode.unknown_leader_epoch


def test_what_was_kept_in_an_earlier_epoch_is_dropped_and_not_kept_again() -> None:
    kept = Kept(10_000)
    lane = Lane(1, 0)
    batch = Batch(0, 1, 0, 0, 0, False, b"r")
    options = {"max_bytes": 100, "codecs": (0,), "by_log_time": False}
    kept.keep(lane, batch, epoch=1)
    assert kept.batches(lane, 0, **options) == [batch]
    kept.enter_epoch(2)
    assert kept.batches(lane, 0, **options) == []
    assert kept.bytes == 0
    kept.keep(lane, batch, epoch=1)
    assert kept.batches(lane, 0, **options) == []
