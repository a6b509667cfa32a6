"""The events that a test published, to assert on."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

from headwater.log.model import Event

if TYPE_CHECKING:
    import psycopg

    from headwater.client import Headwater

_PAGE_EVENTS = 1000


class PublishedEvents:
    """The events that were published since this object was created.

    With `connection`, those that this connection sees, so also the ones of its open transaction; without, the committed
    ones.
    """

    def __init__(self, log: Headwater, *, connection: psycopg.Connection[Any] | None = None) -> None:
        self._log = log
        self._connection = connection
        self._after = log.state().head

    def all(self, topic: str | None = None, *, type: str | None = None) -> list[Event]:
        """The events so far, in order, optionally of one topic and one type."""
        return [
            event
            for event in (self._seen() if self._connection is not None else self._committed())
            if topic in (None, event.topic) and type in (None, event.type)
        ]

    def one(self, topic: str | None = None, *, type: str | None = None) -> Event:
        """The only event so far of this topic and type; an AssertionError if there is none or more than one."""
        found = self.all(topic, type=type)
        wanted = "".join([f" of topic {topic!r}" if topic else "", f" of type {type!r}" if type else ""])
        assert len(found) == 1, f"expected exactly one event{wanted}, found {self._shown(found)}"
        return found[0]

    def none(self, topic: str | None = None, *, type: str | None = None) -> None:
        """An AssertionError if there is an event of this topic and type."""
        found = self.all(topic, type=type)
        assert not found, f"expected no event, found {self._shown(found)}"

    def _shown(self, found: list[Event]) -> str:
        shown = found or self.all()
        lines = [f"\n  {event.position} {event.topic} {event.type} {event.payload!r}" for event in shown[:20]]
        return f"{len(found)}; {'these' if found else 'published so far'}:{''.join(lines) or ' none'}"

    def _seen(self) -> list[Event]:
        from psycopg.rows import tuple_row

        assert self._connection is not None
        statement = resources.files(__package__).joinpath("events_seen.sql").read_bytes()
        with self._connection.cursor(binary=True, row_factory=tuple_row) as cursor:
            rows = cursor.execute(statement, (self._after,)).fetchall()
        return [Event._make(row) for row in rows]

    def _committed(self) -> list[Event]:
        found: list[Event] = []
        after = self._after
        while page := self._log.read(after=after, batch_size=_PAGE_EVENTS, skip_expired=True):
            found += page
            after = page[-1].position
        return found
