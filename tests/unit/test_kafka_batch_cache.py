"""Is what a broker keeps in memory bounded, in order, and without a gap or a repetition?"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headwater.calls.kafka import Lane
from headwater.servers.kafka.batch_cache import BESIDES_BYTES, MAX_BATCH_BYTES, MAX_BATCHES, Batch, Kept

LANES = (Lane(1, 0), Lane(1, 1), Lane(2, 0))


def batch(first: int, count: int, size: int = 10) -> Batch:
    return Batch(first, first + count, 0, 0, 0, False, b"r" * size)


def found(kept: Kept, lane: Lane, offset: int, max_bytes: int = 10**9) -> list[Batch]:
    return kept.batches(lane, offset, max_bytes=max_bytes, codecs=(0,), by_log_time=False)


kept_batches = st.lists(
    st.tuples(st.sampled_from(LANES), st.integers(0, 20), st.integers(1, 8), st.integers(0, 2000)), max_size=40
)


@given(kept_batches, st.integers(0, 10_000), st.integers(0, 30), st.integers(0, 5000))
def test_there_are_never_more_bytes_than_allowed_and_batches_follow_each_other(
    batches: list[tuple[Lane, int, int, int]], max_bytes: int, offset: int, wanted_bytes: int
) -> None:
    kept = Kept(max_bytes)
    newest: dict[tuple[Lane, int], Batch] = {}
    for lane, first, count, size in batches:
        newest[lane, first] = batch(first, count, size)
        kept.keep(lane, newest[lane, first], epoch=1)
        assert kept.bytes <= max_bytes
    for lane in LANES:
        run = found(kept, lane, offset, wanted_bytes)
        if run:
            assert run[0].first <= offset < run[0].end
            assert all(before.end == after.first for before, after in pairwise(run))
            assert len(run) == 1 or sum(len(one.records) for one in run) <= wanted_bytes
            assert all(newest[lane, one.first] == one for one in run)
        kept.forget(lane)
        assert found(kept, lane, offset) == []
    assert kept.bytes == 0


def test_the_oldest_goes_first_and_one_that_is_too_large_is_not_kept() -> None:
    lane = LANES[0]
    kept = Kept(3 * (BESIDES_BYTES + 10))
    for first in range(4):
        kept.keep(lane, batch(first, 1), epoch=1)
    assert found(kept, lane, 0) == []
    assert [one.first for one in found(kept, lane, 1)] == [1, 2, 3]
    kept.keep(lane, batch(4, 1, size=10_000), epoch=1)
    assert [one.first for one in found(kept, lane, 1)] == [1, 2, 3]
    large = Kept(10 * MAX_BATCH_BYTES)
    large.keep(lane, batch(0, 1, size=MAX_BATCH_BYTES + 1), epoch=1)
    assert large.bytes == 0


def test_no_more_batches_come_at_once_than_can_be_asked_about() -> None:
    kept = Kept(10**6)
    for first in range(MAX_BATCHES + 5):
        kept.keep(LANES[0], batch(first, 1), epoch=1)
    assert len(found(kept, LANES[0], 0)) == MAX_BATCHES
