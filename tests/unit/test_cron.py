"""Does a cron expression come round when people expect it, in their time zone?"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidRequest
from headwater.log.cron import next_time


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def times(cron: str, zone: str, after: datetime, number: int) -> list[datetime]:
    """The next so many times."""
    found = []
    for _ in range(number):
        after = next_time(cron, zone, after)
        found.append(after)
    return found


@pytest.mark.parametrize(
    ("cron", "after", "expected"),
    [
        ("* * * * *", "2026-01-01T00:00:00", "2026-01-01T00:01"),
        ("* * * * *", "2026-01-01T00:00:59.999", "2026-01-01T00:01"),
        ("*/15 * * * *", "2026-01-01T00:07", "2026-01-01T00:15"),
        ("0 3 * * *", "2026-01-01T03:00", "2026-01-02T03:00"),
        ("0 3 * * *", "2026-01-01T02:59:59", "2026-01-01T03:00"),
        ("0 0 1 * *", "2026-01-31T12:00", "2026-02-01T00:00"),
        ("0 0 29 2 *", "2026-01-01T00:00", "2028-02-29T00:00"),
        ("0 0 L * *", "2026-02-01T00:00", "2026-02-28T00:00"),
        ("0 9 * * MON-FRI", "2026-01-02T09:00", "2026-01-05T09:00"),
        ("0 9 * * 0", "2026-01-01T00:00", "2026-01-04T09:00"),
    ],
)
def test_the_next_time_is_the_first_after_the_given_one(cron: str, after: str, expected: str) -> None:
    assert next_time(cron, "UTC", utc(after)) == utc(expected)


def test_the_expression_is_read_in_its_time_zone_and_the_time_is_utc() -> None:
    at = next_time("0 3 * * *", "Europe/Berlin", utc("2026-01-01T00:00"))
    assert (at, at.tzinfo) == (utc("2026-01-01T02:00"), UTC)
    assert next_time("0 3 * * *", "Europe/Berlin", utc("2026-07-01T00:00")) == utc("2026-07-01T01:00")
    assert next_time("0 3 * * *", "Asia/Kolkata", utc("2026-01-01T00:00")) == utc("2026-01-01T21:30")


def test_the_zone_of_the_given_time_does_not_matter() -> None:
    after = utc("2026-01-01T12:34")
    elsewhere = after.astimezone(tz=None)
    assert next_time("5 * * * *", "America/New_York", elsewhere) == next_time("5 * * * *", "America/New_York", after)


# In Berlin, 2026-03-29 has no 02:30, and 2026-10-25 has two.


def test_a_time_that_the_clocks_skip_still_comes_once_that_day() -> None:
    found = times("30 2 * * *", "Europe/Berlin", utc("2026-03-28T00:00"), 3)
    assert [at.date().isoformat() for at in found] == ["2026-03-28", "2026-03-29", "2026-03-30"]
    assert found[1] == utc("2026-03-29T01:00")


def test_a_time_that_the_clocks_repeat_comes_once_that_day() -> None:
    found = times("30 2 * * *", "Europe/Berlin", utc("2026-10-24T12:00"), 2)
    assert [at.date().isoformat() for at in found] == ["2026-10-25", "2026-10-26"]


@pytest.mark.parametrize("day", ["2026-03-28T22:00", "2026-10-24T21:00"], ids=["gap", "repeat"])
def test_what_comes_every_hour_comes_every_hour_when_clocks_change(day: str) -> None:
    found = times("0 * * * *", "Europe/Berlin", utc(day), 8)
    assert {later - earlier for earlier, later in pairwise(found)} == {timedelta(hours=1)}


@given(
    st.sampled_from(["30 2 * * *", "*/7 * * * *", "0 0 * * 1", "15 1,2,3 * * *", "0 * * * *"]),
    st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Chatham"]),
    st.datetimes(datetime(2024, 1, 1), datetime(2030, 1, 1)),  # noqa: DTZ001 (made aware below)
)
def test_the_next_time_is_always_later(cron: str, zone: str, after: datetime) -> None:
    # A cron schedule whose next time were not later would be published again and again.
    start = after.replace(tzinfo=UTC)
    first = next_time(cron, zone, start)
    assert start < first < next_time(cron, zone, first)


@pytest.mark.parametrize(
    "cron", ["", "daily", "* * * *", "* * * * * * *", "60 * * * *", "0 24 * * *", "0 0 0 * *", "x"]
)
def test_what_is_no_expression_is_refused_with_an_example(cron: str) -> None:
    with pytest.raises(InvalidRequest, match="invalid cron expression") as refused:
        next_time(cron, "UTC", utc("2026-01-01T00:00"))
    assert "*/5 * * * *" in (refused.value.hint or "")


@pytest.mark.parametrize("cron", ["0 0 30 2 *", "0 0 31 4,6,9,11 *"])
def test_a_day_that_no_such_month_has_is_refused(cron: str) -> None:
    with pytest.raises(InvalidRequest):
        next_time(cron, "UTC", utc("2026-01-01T00:00"))


def test_an_expression_that_never_comes_is_refused() -> None:
    # The first of a month, and its second Monday.
    with pytest.raises(InvalidRequest, match="matches no future time"):
        next_time("0 0 */31 * 1#2", "UTC", utc("2026-01-01T00:00"))


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../etc/passwd", "Europe/Berlin\x00"])
def test_what_is_no_time_zone_is_refused_with_an_example(zone: str) -> None:
    with pytest.raises(InvalidRequest, match="unknown time zone") as refused:
        next_time("* * * * *", zone, utc("2026-01-01T00:00"))
    assert "Europe/Berlin" in (refused.value.hint or "")
