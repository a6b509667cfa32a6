"""What was asked of an event store and what it answered, and whether its log bears that out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.errors import AppendConflict
from headwater.eventstore import Condition, LatestMatchIs, NewStoreEvent, Query, StoreEvent


@dataclass(frozen=True)
class Asked:
    """One append and its answer: positions, the position that a conflict named, or neither if no answer came."""

    ids: tuple[str, ...]
    condition: Condition | None
    positions: tuple[int, ...] | None = None
    moved_to: int | None = None


class Violation(AssertionError):
    """An answer that the log does not bear out."""


def ask(store: object, events: Sequence[NewStoreEvent], condition: Condition | None, **options: object) -> Asked:
    """Append, and note the answer."""
    ids = tuple(event.event_id or "" for event in events)
    try:
        appended = store.append(events, condition, **options)  # type: ignore[attr-defined]
    except AppendConflict as conflict:
        return Asked(ids, condition, moved_to=conflict.actual_position)
    return Asked(ids, condition, appended.positions)


def check(history: Sequence[Asked], log: Sequence[StoreEvent]) -> None:
    """Every append that was accepted had its condition true at its place; every refusal was right; nothing else is."""
    places = {event.event_id: n for n, event in enumerate(log)}
    if len(places) != len(log):
        raise Violation("an event is in the log twice")
    if [event.topic_offset for event in log] != list(range(len(log))):
        raise Violation("the log has a gap")
    asked = {event_id for append in history for event_id in append.ids}
    if not places.keys() <= asked:
        raise Violation("an event is in the log that nobody appended")
    for append in history:
        found = [places.get(event_id) for event_id in append.ids]
        if append.moved_to is not None:
            if any(place is not None for place in found):
                raise Violation(f"{append} was refused and is in the log")
            assert append.condition is not None
            _check_refusal(append.condition, append.moved_to, log)
            continue
        if append.positions is None and all(place is None for place in found):
            continue
        first = found[0]
        if first is None or found != list(range(first, first + len(found))):
            raise Violation(f"{append} is not in the log as one run: {found}")
        run = log[first : first + len(found)]
        if append.positions is not None and append.positions != tuple(event.position for event in run):
            raise Violation(f"{append} is elsewhere than it was told")
        if append.condition is not None:
            _check_acceptance(append, log[:first])


def _latest(query: Query, events: Sequence[StoreEvent]) -> int:
    return max((event.position for event in events if query.matches(event)), default=0)


def _check_acceptance(append: Asked, before: Sequence[StoreEvent]) -> None:
    assert append.condition is not None
    latest, seen = _latest(append.condition.query, before), append.condition.position or 0
    true = latest == seen if isinstance(append.condition, LatestMatchIs) else latest <= seen
    if not true:
        raise Violation(f"{append} was accepted, and its latest match was at {latest}")


def _check_refusal(condition: Condition, moved_to: int, log: Sequence[StoreEvent]) -> None:
    matches = [event.position for event in log if condition.query.matches(event)]
    seen = condition.position or 0
    if moved_to and moved_to not in matches:
        raise Violation(f"{condition} was refused for {moved_to}, which is no match")
    if isinstance(condition, LatestMatchIs):
        # What was seen was there when it was seen, so the latest match cannot be an earlier one.
        if moved_to == seen or (moved_to < seen and seen in matches):
            raise Violation(f"{condition} was refused for {moved_to}")
    elif moved_to <= seen:
        raise Violation(f"{condition} was refused for {moved_to}, which is not after it")
