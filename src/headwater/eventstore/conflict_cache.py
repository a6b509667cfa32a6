"""Pre-check for appends: which conditions the database must verify, given the events that this process already knows.

No I/O. `ConflictCache` holds the index terms of recent events that this process appended. An append condition is
reduced to *possible conflicts*, sets of index terms and a position. If no event above the position has all the terms,
the condition holds, and the append is accepted by the fast path (`append_ahead`). If there is such an event, only a
full check (`append_group`) can decide, since the reduction ignores types and fields.

Invariant: the fast path never accepts an append that the full check would reject.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from headwater.eventstore.query import Condition, Item, LatestMatchIs

MAX_INDEX_TERMS = 50_000


class PossibleConflict(NamedTuple):
    """An event above this position that has all of these index terms may violate the condition."""

    index_terms: tuple[str, ...]
    above: int


class RequiredTerm(NamedTuple):
    """The event at this position must have this index term."""

    index_term: str
    position: int


class Precheck(NamedTuple):
    """Everything to verify before an append can be accepted."""

    conflicts: tuple[PossibleConflict, ...] = ()
    required: tuple[RequiredTerm, ...] = ()


class LastKnownEvent(NamedTuple):
    """The last event up to which an appender knows all events. The id distinguishes it from another event at its
    position."""

    position: int
    event_id: str


class AppendedEvent(NamedTuple):
    """An appended event and its index terms."""

    position: int
    event_id: str
    index_terms: Sequence[str]


def index_terms_of(type_: str, tags: Sequence[str]) -> tuple[str, ...]:
    """The index terms of an event: ':' and its type, '#' and each of its tags."""
    return (f":{type_}", *[f"#{tag}" for tag in tags])


def precheck_for(condition: Condition | None) -> Precheck | None:
    """The pre-check for a condition; None: it needs a full check."""
    if condition is None:
        return Precheck()
    items = condition.query.items
    position = condition.position or 0
    if isinstance(condition, LatestMatchIs) and position:
        if len(items) != 1 or items[0].fields or len(items[0].types) > 1 or not (items[0].tags or items[0].types):
            return None
        index_terms = [f":{type_}" for type_ in items[0].types] + [f"#{tag}" for tag in items[0].tags]
        return Precheck(
            tuple(_possible_conflicts(items[0], position)),
            tuple([RequiredTerm(index_term, position) for index_term in index_terms]),
        )
    if len(items) == 1:
        return Precheck(tuple(_possible_conflicts(items[0], position)))
    return Precheck(
        tuple([conflict for item in items or (Item(),) for conflict in _possible_conflicts(item, position)])
    )


def _possible_conflicts(item: Item, above: int) -> Iterable[PossibleConflict]:
    """Possible conflicts of which at least one exists if an event matches the item. They may exist without a match."""
    if item.tags:
        # Adding the types would rarely exclude more: most events with these tags have one of them.
        return (PossibleConflict(tuple([f"#{tag}" for tag in item.tags]), above),)
    if item.types:
        return [PossibleConflict((f":{type_}",), above) for type_ in item.types]
    return (PossibleConflict((), above),)


def _is_about(precheck: Precheck, index_terms: set[str]) -> bool:
    """Whether an event with some of these index terms could be one of its possible conflicts."""
    if index_terms:
        for conflict in precheck.conflicts:
            if index_terms.issuperset(conflict.index_terms):
                return True
    return False


class ConflictCache:
    """The recent events of a store that this process has appended: for each index term, the last position that has it.

    It does not contain the events of other processes. An append therefore names the last event it knows, and the
    database compares that with the actual last event.
    """

    def __init__(self, *, max_index_terms: int = MAX_INDEX_TERMS) -> None:
        self._max_index_terms = max_index_terms
        self.known: LastKnownEvent | None = None
        # All events above the floor and up to the head are known. At first nothing is known, not even the head.
        self._floor = self._middle = self._head = -1
        self._recent: dict[str, int] = {}
        # Index terms of events up to the middle: dropped when there are too many recent ones.
        self._older: dict[str, int] = {}

    def accept(
        self, appends: Iterable[tuple[Precheck | None, Collection[str], Collection[str]]]
    ) -> list[tuple[int, Precheck]]:
        """Select the appends that can be accepted together, with what remains to verify for each.

        Each append is given by its pre-check and the index terms and ids of its events. It may overtake an earlier one
        only if neither affects the other, so that the result is the same as in order.
        """
        chosen = []
        earlier: set[str] = set()
        # Index terms and ids that must not be appended before the appends that stay behind.
        watched: set[str] = set()
        ids_behind: set[str] = set()
        for number, (precheck, index_terms, ids) in enumerate(appends):
            if precheck is None:
                break
            remaining = self._remaining(precheck)
            if (
                remaining is None
                or (watched and not watched.isdisjoint(index_terms))
                or (ids_behind and not ids_behind.isdisjoint(ids))
                or _is_about(precheck, earlier)
            ):
                if not all(conflict.index_terms for conflict in precheck.conflicts):
                    break
                watched.update(conflict.index_terms[0] for conflict in precheck.conflicts)
                ids_behind.update(ids)
            else:
                chosen.append((number, remaining))
            earlier.update(index_terms)
        return chosen

    def needs_full_check(self, precheck: Precheck | None) -> bool:
        """Whether it is already known that a full check is needed."""
        return precheck is None or self._remaining(precheck) is None

    def record(self, tail: int, appended: Iterable[AppendedEvent]) -> None:
        """Record events that were appended one after the other, the first right after the event at `tail`."""
        if tail != self._head:
            # Another process has appended events that are not known here.
            self.forget()
            self._floor = self._middle = self._head = tail
        for position, event_id, index_terms in appended:
            self._head = position
            self.known = LastKnownEvent(position, event_id)
            for index_term in index_terms:
                self._recent[index_term] = position
        if len(self._recent) > self._max_index_terms:
            self._floor, self._middle = self._middle, self._head
            self._older, self._recent = self._recent, {}

    def forget(self) -> None:
        """Forget everything."""
        self.known = None
        self._floor = self._middle = self._head = -1
        self._recent, self._older = {}, {}

    def _remaining(self, precheck: Precheck) -> Precheck | None:
        """What remains to verify; None: the recent events contain a possible conflict."""
        conflicts = []
        for conflict in precheck.conflicts:
            index_terms, above = conflict
            if above < self._head:
                for index_term in index_terms:
                    if self._last(index_term) <= above:
                        break
                else:
                    return None
                if self._floor <= above and self.known is not None:
                    # No event up to the head is a conflict.
                    conflict = PossibleConflict(index_terms, self._head)
            conflicts.append(conflict)
        required = precheck.required and tuple(
            [term for term in precheck.required if self._last(term.index_term) != term.position]
        )
        return Precheck(tuple(conflicts), required)

    def _last(self, index_term: str) -> int:
        return self._recent.get(index_term) or self._older.get(index_term, 0)
