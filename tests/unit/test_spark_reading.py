"""What is decided about a read from Spark: options, filters, who reads which positions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from pyspark.sql.datasource import (
    CaseInsensitiveDict,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from headwater.calls import Call
from headwater.calls.pipelines import Filters
from headwater.errors import InvalidRequest
from headwater.spark.arrow import text_of
from headwater.spark.formats.log_ranges import EstimatedRange, divide, intersect, merge_ranges, split_ranges
from headwater.spark.formats.read_options import PushedFilters, ReadOptions, push

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def options(**given: str) -> ReadOptions:
    return ReadOptions.parse(CaseInsensitiveDict({"dsn": "dbname=x"} | given))


def test_options_say_what_to_read_whatever_their_case() -> None:
    parsed = options(topics="orders, payments,orders", maxEventsPerTrigger="10", after="7", SKIPEXPIRED="True")
    assert parsed.topics == ("orders", "payments")
    assert (parsed.max_events, parsed.after, parsed.skip_expired) == (10, 7, True)
    assert options(since="2026-01-01T12:00:00Z").since == NOON


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"topic": "orders"}, "unknown options for reading: topic"),
        ({"after": "-1"}, "after"),
        ({"after": "1", "fromEnd": "true"}, "give only one of the options"),
        ({"since": "2026-01-01"}, "has no time zone"),
        ({"since": "yesterday"}, "expected a time"),
        ({"topics": " , "}, "topics is empty"),
        ({"skipExpired": "yes"}, "expected true or false"),
        ({"partitions": "0"}, "partitions"),
    ],
)
def test_an_option_that_cannot_be_is_refused_with_its_name(given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        options(**given)
    assert message in refusal.value.message


def test_a_read_without_a_database_says_how_to_name_one() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ReadOptions.parse({})
    assert 'option("dsn"' in str(refusal.value)


def test_filters_on_events_are_taken_and_others_are_left_to_spark() -> None:
    others: list[Filter] = [
        EqualTo(("routing_key",), "a.b"),
        Not(EqualTo(("type",), "x")),
        IsNotNull(("type",)),
        EqualTo(("key",), 5),
        EqualTo(("headers", "a"), "b"),
    ]
    pushed, left = push(
        [
            EqualTo(("type",), "placed"),
            In(("topic",), ("orders", "payments")),
            EqualTo(("topic",), "orders"),
            EqualTo(("key",), b"k"),
            GreaterThan(("position",), 5),
            LessThan(("position",), 100),
            GreaterThanOrEqual(("published_at",), NOON),
            LessThanOrEqual(("published_at",), NOON + timedelta(hours=1)),
            *others,
        ]
    )
    assert left == others
    assert pushed == PushedFilters(
        topics=frozenset({"orders"}),
        after=5,
        up_to=99,
        filters=Filters(
            types=("placed",),
            keys=(b"k",),
            published_from=NOON,
            published_before=NOON + timedelta(hours=1, microseconds=1),
        ),
    )


COMPARISONS: list[tuple[Any, Any]] = [
    (EqualTo, lambda position, value: position == value),
    (GreaterThan, lambda position, value: position > value),
    (GreaterThanOrEqual, lambda position, value: position >= value),
    (LessThan, lambda position, value: position < value),
    (LessThanOrEqual, lambda position, value: position <= value),
]


@given(st.lists(st.tuples(st.sampled_from(COMPARISONS), st.integers(1, 20)), max_size=4))
def test_filters_on_the_position_mean_the_same_as_a_range(filters: list[tuple[Any, int]]) -> None:
    pushed, left = push([kind(("position",), value) for (kind, _), value in filters])
    assert left == []
    for position in range(1, 25):
        wanted = all(holds(position, value) for (_, holds), value in filters)
        assert (pushed.after < position <= (pushed.up_to if pushed.up_to is not None else 1000)) == wanted


RANGES = st.lists(st.integers(0, 50), min_size=2, max_size=8, unique=True).map(
    lambda edges: [(a, b) for a, b in zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False)]
)


def positions(ranges: Any) -> list[int]:
    return [position for after, up_to in ranges for position in range(after + 1, up_to + 1)]


@given(RANGES, st.integers(1, 6), st.integers(1, 20))
def test_dividing_gives_every_position_to_one_task_in_order(
    ranges: list[tuple[int, int]], pieces: int, least: int
) -> None:
    shared = divide(
        [EstimatedRange(after, up_to, up_to - after) for after, up_to in ranges], pieces=pieces, least=least
    )
    assert [position for piece in shared for position in positions(piece)] == positions(ranges)
    assert len(shared) <= pieces
    assert all(len(positions(piece)) >= least for piece in shared[:-1])


@given(RANGES, st.integers(1, 20))
def test_windows_are_the_same_positions_in_small_ranges(ranges: list[tuple[int, int]], size: int) -> None:
    cut = list(split_ranges(ranges, size))
    assert positions(cut) == positions(ranges)
    assert all(0 < up_to - after <= size for after, up_to in cut)


STRETCHES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 15), st.integers(1, 200)).map(
        lambda s: EstimatedRange(s[0], s[0] + s[1], s[2])
    ),
    max_size=8,
)


@given(STRETCHES, st.integers(1, 6), st.integers(1, 100))
def test_stretches_that_overlap_are_shared_out_whole_and_once(
    stretches: list[EstimatedRange], pieces: int, least: int
) -> None:
    whole = merge_ranges(stretches)
    assert sum(stretch.events for stretch in whole) == sum(stretch.events for stretch in stretches)
    wanted = sorted(set(positions((stretch.after, stretch.up_to) for stretch in stretches)))
    assert positions((stretch.after, stretch.up_to) for stretch in whole) == wanted
    shared = divide(whole, pieces=pieces, least=least)
    assert [position for piece in shared for position in positions(piece)] == wanted
    assert len(shared) <= pieces


def test_a_sparse_stretch_is_shared_out_by_its_events() -> None:
    # A file that lies across the hundred million positions that a rotation passed over.
    shared = divide([EstimatedRange(0, 1000, 1000), EstimatedRange(5000, 100_005_000, 1000)], pieces=4, least=1)
    assert shared == [[(0, 500)], [(500, 1000)], [(5000, 50_005_000)], [(50_005_000, 100_005_000)]]


@given(RANGES, RANGES)
def test_what_is_common_is_in_both(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    assert positions(intersect(some, others)) == sorted(set(positions(some)) & set(positions(others)))


def test_a_call_is_written_out_with_its_values_quoted() -> None:
    call: Call[None] = Call("select f(%s, %s, %s::bigint)", ("it's", None, 5), lambda rows: None)
    assert text_of(call) == "select f('it''s', NULL, 5::bigint)"
