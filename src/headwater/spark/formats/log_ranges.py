"""Which positions which task reads. Pure: ranges in, ranges out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Range = tuple[int, int]
"""Positions after the first number, up to the second."""


class Stretch(NamedTuple):
    """A range of positions, and how many events may be in it."""

    after: int
    up_to: int
    events: int


def united(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The same positions in order and without overlaps, with the events of those that did overlap added up."""
    found: list[Stretch] = []
    for stretch in sorted(stretches):
        if found and stretch.after < found[-1].up_to:
            last = found.pop()
            stretch = Stretch(last.after, max(last.up_to, stretch.up_to), last.events + stretch.events)
        found.append(stretch)
    return found


def divide(stretches: Iterable[Stretch], *, pieces: int, least: int) -> list[list[Range]]:
    """Ranges shared out in order among at most so many pieces, alike in events and none without need below `least`."""
    whole = list(stretches)
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


def windows(ranges: Iterable[Range], size: int) -> Iterator[Range]:
    """The same positions in ranges of at most this size."""
    for start, up_to in ranges:
        for after in range(start, up_to, size):
            yield after, min(up_to, after + size)


def common(ranges: Iterable[Range], others: Sequence[Range]) -> list[Range]:
    """The positions that are in both, each given in order and without overlaps."""
    return [
        (max(after, other_after), min(up_to, other_up_to))
        for after, up_to in ranges
        for other_after, other_up_to in others
        if max(after, other_after) < min(up_to, other_up_to)
    ]
