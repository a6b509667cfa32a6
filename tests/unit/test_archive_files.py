"""What is decided about reading an archive: whose events are there, in which files, in which order they leave."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

import pyarrow as pa

from headwater.calls.archives import TopicCoverage
from headwater.errors import PositionExpired
from headwater.spark.formats import archive_reader
from headwater.spark.formats.archive_reader import ArchiveFile, archived_ranges, merge_sorted
from headwater.spark.formats.log import known_archives, refuse_lost, refuse_overtaken
from headwater.spark.sinks.archive import topics_of

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def kept(
    topic: str, *, expired_to: int, lost_to: int = 0, created_after: int = 0, at: str | None = "here"
) -> TopicCoverage:
    return TopicCoverage(topic, created_after, expired_to, lost_to, at)


def test_of_each_topic_the_archive_is_asked_for_what_retention_took() -> None:
    topics = [
        kept("whole", expired_to=50),
        kept("late", expired_to=50, lost_to=20),
        kept("anew", expired_to=50, created_after=30),
        kept("elsewhere", expired_to=40, at="there"),
        kept("lost", expired_to=50, lost_to=50, at=None),
        kept("untouched", expired_to=0),
    ]
    assert archived_ranges(topics, after=10, up_to=45) == {
        "here": {"whole": (10, 45), "late": (20, 45), "anew": (30, 45)},
        "there": {"elsewhere": (10, 40)},
    }
    assert archived_ranges(topics, after=50, up_to=90) == {}
    assert archived_ranges(known_archives(topics, use=False), after=0, up_to=90) == {}


def test_who_asks_for_what_is_nowhere_is_told_from_where_on_it_is() -> None:
    topics = [kept("late", expired_to=50, lost_to=20), kept("lost", expired_to=30, lost_to=30, at=None)]
    refuse_lost(topics, after=30)
    with pytest.raises(PositionExpired) as gone:
        refuse_lost(topics, after=10)
    assert gone.value.earliest_position == 31
    with pytest.raises(PositionExpired):
        refuse_lost(known_archives(topics, use=False), after=40)


@pytest.mark.parametrize(
    ("before", "now", "overtaken"),
    [
        (10, 10, False),
        (10, 30, True),
        # All that went was before what was read, or what was read had gone before.
        (5, 20, False),
        (60, 70, False),
    ],
)
def test_a_read_is_overtaken_when_what_it_reads_goes_meanwhile(before: int, now: int, overtaken: bool) -> None:
    def look() -> None:
        refuse_overtaken([kept("a", expired_to=before)], [kept("a", expired_to=now)], after=20, up_to=50)

    if overtaken:
        with pytest.raises(PositionExpired, match="repeat the read"):
            look()
    else:
        look()


def batches(positions: list[int], size: int) -> list[Any]:
    return [
        pa.RecordBatch.from_pydict({"position": pa.array(positions[start : start + size], pa.int64())})
        for start in range(0, len(positions), size)
    ]


@settings(deadline=None)
@given(st.sets(st.integers(1, 60)), st.sets(st.integers(1, 60)), st.integers(1, 9), st.integers(1, 9))
def test_two_streams_in_order_are_one_in_order(one: set[int], other: set[int], size: int, other_size: int) -> None:
    other = other - one
    found = merge_sorted(iter(batches(sorted(one), size)), iter(batches(sorted(other), other_size)))
    assert [row for batch in found for row in batch.column("position").to_pylist()] == sorted(one | other)


def test_a_file_of_which_nothing_is_known_may_hold_anything() -> None:
    actions = pa.table({"path": ["a%20b.parquet"], "size_bytes": [10], "num_records": pa.array([None], pa.int64())})
    (file,) = archive_reader._files_in_range(actions, after=5, up_to=9)
    assert (file.path, file.first, file.last) == ("a b.parquet", 1, 9)
    known = actions.append_column("min.position", [[10]]).append_column("max.position", [[20]])
    assert archive_reader._files_in_range(known, after=5, up_to=9) == []
    assert archive_reader._files_in_range(known, after=20, up_to=90) == []
    assert len(archive_reader._files_in_range(known, after=19, up_to=20)) == 1


def test_a_time_is_found_by_what_the_files_say() -> None:
    def file(first: int, newest: datetime | None) -> ArchiveFile:
        return ArchiveFile("x", 1, 1, first, first + 9, newest)

    files = [file(1, NOON), file(11, NOON + timedelta(hours=1)), file(21, NOON + timedelta(hours=2))]
    assert archive_reader.position_before(files, NOON + timedelta(minutes=30)) == 10
    assert archive_reader.position_before(files, NOON + timedelta(hours=3)) is None
    # Cut to a millisecond, the newest may seem older than it is.
    assert archive_reader.position_before(files, NOON + timedelta(microseconds=900)) == 0
    assert archive_reader.position_before([file(5, None), *files[2:]], NOON + timedelta(hours=1)) == 4


def test_topics_are_named_in_either_way() -> None:
    assert topics_of({"topics": "b, a"}) == topics_of({"topics": ["a", "b", "a"]}) == ("a", "b")
    assert topics_of({}) is None
