"""What an append must ask of the log, and what need not be asked since it is known: the marks of the last events.

No I/O here. An append is accepted ahead if nothing can speak against it. To say so, a condition is brought down to
*doubts*: if none is true, the condition holds. If one is true, only a check in full can tell.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from headwater.eventstore.query import Condition, Item, LatestMatchIs

MAX_MARKS = 50_000


class Doubt(NamedTuple):
    """What would speak against an append: an event above a position that has all of these marks."""

    marks: tuple[str, ...]
    above: int


class Seen(NamedTuple):
    """What must speak for it: the event at this position has this mark."""

    mark: str
    position: int


class Question(NamedTuple):
    """All that has to be asked before an append can be accepted."""

    doubts: tuple[Doubt, ...] = ()
    seen: tuple[Seen, ...] = ()


class Known(NamedTuple):
    """The last event that somebody knows of who knows all before it. The id tells it from any other at its place."""

    position: int
    event_id: str


class Noted(NamedTuple):
    """An event that was appended: where it is, and what it is found by."""

    position: int
    event_id: str
    marks: Sequence[str]


def marks_of(type_: str, tags: Sequence[str]) -> tuple[str, ...]:
    """What an event is found by: ':' and its type, '#' and each of its tags."""
    return (f":{type_}", *[f"#{tag}" for tag in tags])


def question_of(condition: Condition | None) -> Question | None:
    """What to ask for a condition; None: it can only be checked in full."""
    if condition is None:
        return Question()
    items = condition.query.items
    seen = condition.position or 0
    if isinstance(condition, LatestMatchIs) and seen:
        if len(items) != 1 or items[0].fields or len(items[0].types) > 1 or not (items[0].tags or items[0].types):
            return None
        marks = [f":{type_}" for type_ in items[0].types] + [f"#{tag}" for tag in items[0].tags]
        return Question(tuple(_doubts(items[0], seen)), tuple([Seen(mark, seen) for mark in marks]))
    if len(items) == 1:
        return Question(tuple(_doubts(items[0], seen)))
    return Question(tuple([doubt for item in items or (Item(),) for doubt in _doubts(item, seen)]))


def _doubts(item: Item, above: int) -> Iterable[Doubt]:
    """Doubts of which one is true wherever the item matches an event. They may be true where it does not."""
    if item.tags:
        # The types would seldom tell more: of what has the tags, most has one of them.
        return (Doubt(tuple([f"#{tag}" for tag in item.tags]), above),)
    if item.types:
        return [Doubt((f":{type_}",), above) for type_ in item.types]
    return (Doubt((), above),)


def _is_about(question: Question, marks: set[str]) -> bool:
    """Whether an event with some of these marks could make one of its doubts true."""
    if marks:
        for doubt in question.doubts:
            if marks.issuperset(doubt.marks):
                return True
    return False


class Window:
    """The last events of a store as far as this process has appended them: for each mark the last that has it.

    What others append is not in it: whoever appends says which event it knows last, and the log compares that with its
    own last one.
    """

    def __init__(self, *, max_marks: int = MAX_MARKS) -> None:
        self._max_marks = max_marks
        self.known: Known | None = None
        # Every event above the floor and up to the head is known. At first nothing is, not even where the head is.
        self._floor = self._middle = self._head = -1
        self._recent: dict[str, int] = {}
        # Marks of events up to the middle: forgotten when the recent ones are too many.
        self._older: dict[str, int] = {}

    def accept(
        self, wishes: Iterable[tuple[Question | None, Collection[str], Collection[str]]]
    ) -> list[tuple[int, Question]]:
        """Which of several appends can be accepted side by side, and what is left to ask for each.

        A wish is the question of an append, and the marks and ids of its events. One goes before another that came
        first only if neither is about what the other appends, so that each fares as it would have fared in order.
        """
        chosen = []
        earlier: set[str] = set()
        # What those who stay behind must not see appended before them.
        watched: set[str] = set()
        ids_behind: set[str] = set()
        for place, (question, marks, ids) in enumerate(wishes):
            if question is None:
                break
            left = self._left_of(question)
            if (
                left is None
                or (watched and not watched.isdisjoint(marks))
                or (ids_behind and not ids_behind.isdisjoint(ids))
                or _is_about(question, earlier)
            ):
                if not all(doubt.marks for doubt in question.doubts):
                    break
                watched.update(doubt.marks[0] for doubt in question.doubts)
                ids_behind.update(ids)
            else:
                chosen.append((place, left))
            earlier.update(marks)
        return chosen

    def is_in_doubt(self, question: Question | None) -> bool:
        """Whether it is known already that a check in full is needed."""
        return question is None or self._left_of(question) is None

    def note(self, tail: int, appended: Iterable[Noted]) -> None:
        """Add events that were appended one after the other, the first right after the event at `tail`."""
        if tail != self._head:
            # Others have appended, so there are events that are not known here.
            self.forget()
            self._floor = self._middle = self._head = tail
        for position, event_id, marks in appended:
            self._head = position
            self.known = Known(position, event_id)
            for mark in marks:
                self._recent[mark] = position
        if len(self._recent) > self._max_marks:
            self._floor, self._middle = self._middle, self._head
            self._older, self._recent = self._recent, {}

    def forget(self) -> None:
        """Know nothing any more."""
        self.known = None
        self._floor = self._middle = self._head = -1
        self._recent, self._older = {}, {}

    def _left_of(self, question: Question) -> Question | None:
        """What is left to ask; None: something speaks against it, as far as is known here."""
        doubts = []
        for doubt in question.doubts:
            marks, above = doubt
            if above < self._head:
                for mark in marks:
                    if self._last(mark) <= above:
                        break
                else:
                    return None
                if self._floor <= above and self.known is not None:
                    # No event up to the head can make it true.
                    doubt = Doubt(marks, self._head)
            doubts.append(doubt)
        seen = question.seen and tuple([seen for seen in question.seen if self._last(seen.mark) != seen.position])
        return Question(tuple(doubts), seen)

    def _last(self, mark: str) -> int:
        return self._recent.get(mark) or self._older.get(mark, 0)
