"""Divides ranges of positions among tasks. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Range = tuple[int, int]
"""Positions after the first number, up to the second."""


class EstimatedRange(NamedTuple):
    """A range of positions, with an estimate of its events."""

    after: int
    up_to: int
    events: int


def merge_ranges(ranges: Iterable[EstimatedRange]) -> list[EstimatedRange]:
    """Sort ranges and merge overlapping ones, adding up their events."""
    found: list[EstimatedRange] = []
    for current in sorted(ranges):
        if found and current.after < found[-1].up_to:
            last = found.pop()
            current = EstimatedRange(last.after, max(last.up_to, current.up_to), last.events + current.events)
        found.append(current)
    return found


def divide(ranges: Iterable[EstimatedRange], *, pieces: int, least: int) -> list[list[Range]]:
    """Divide ranges, in order, into at most `pieces` lists with similar numbers of events, about `least` or more."""
    whole = list(ranges)
    total = sum(events for _, _, events in whole)
    if total == 0:
        return []
    size = max(least, -(-total // pieces))
    shared: list[list[Range]] = [[]]
    room = size
    for start, up_to, held in whole:
        after, events = start, held
        while after < up_to:
            if room == 0:
                shared.append([])
                room = size
            taken = min(events, room)
            end = up_to if taken == events else after + max(1, (up_to - after) * room // events)
            shared[-1].append((after, end))
            room -= taken
            events -= taken
            after = end
    return shared


def split_ranges(ranges: Iterable[Range], size: int) -> Iterator[Range]:
    """Split ranges into ranges of at most this size."""
    for start, up_to in ranges:
        for after in range(start, up_to, size):
            yield after, min(up_to, after + size)


def intersect(ranges: Iterable[Range], others: Sequence[Range]) -> list[Range]:
    """The intersection of two lists of sorted ranges without overlaps."""
    return [
        (max(after, other_after), min(up_to, other_up_to))
        for after, up_to in ranges
        for other_after, other_up_to in others
        if max(after, other_after) < min(up_to, other_up_to)
    ]
