"""An outbox for SQLAlchemy: a flush publishes the events of the objects that it writes, in the same transaction.

`Outbox.listen` adds an `after_flush` listener to sessions. For each new, changed or deleted object it calls the
function that the application registered for the object's class, and publishes the events that this function returns.
It works with Session and AsyncSession; only the driver psycopg is supported.
Invariant: the events of a flush are published once, on the connection of its transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, TypeVar

from sqlalchemy import event
from sqlalchemy.orm import Session, UOWTransaction, scoped_session, sessionmaker
from sqlalchemy.util import await_only

from headwater.aio import AsyncHeadwater
from headwater.client import Headwater
from headwater.errors import InvalidRequest
from headwater.log.model import NewEvent

T = TypeVar("T")
Change = Literal["insert", "update", "delete"]
EventsOf: TypeAlias = Callable[[T, Change], Iterable[NewEvent] | NewEvent | None]
"""The events of one written object. Columns that the database computes in a flush are not loaded in it."""


class Outbox:
    """Publishes events of objects when SQLAlchemy flushes them."""

    def __init__(self, log: Headwater | AsyncHeadwater) -> None:
        self._log = log
        self._sources: dict[type, tuple[str, EventsOf[Any]]] = {}

    def source(self, model: type[T], topic: str) -> Callable[[EventsOf[T]], EventsOf[T]]:
        """Register a function that returns the events of an object of this class, or of a subclass."""

        def register(function: EventsOf[T]) -> EventsOf[T]:
            self._sources[model] = (topic, function)
            return function

        return register

    def listen(self, target: type[Session] | Session | sessionmaker[Any] | scoped_session[Any] = Session) -> None:
        """Publish for these sessions. Of AsyncSession, pass the `sync_session` or the class of the sync session."""
        event.listen(target, "after_flush", self._publish)

    def _publish(self, session: Session, context: UOWTransaction) -> None:
        batches: dict[str, list[NewEvent]] = {}
        changes: list[tuple[Any, Change]] = [(written, "insert") for written in session.new]
        changes += [(written, "update") for written in session.dirty if session.is_modified(written)]
        changes += [(written, "delete") for written in session.deleted]
        for written, change in changes:
            for model in type(written).__mro__:
                if model in self._sources:
                    topic, function = self._sources[model]
                    found = function(written, change)
                    events = [found] if isinstance(found, NewEvent) else list(found or ())
                    batches.setdefault(topic, []).extend(events)
                    break
        for topic, events in batches.items():
            if events:
                self._publish_batch(session, topic, events)

    def _publish_batch(self, session: Session, topic: str, events: list[NewEvent]) -> None:
        if isinstance(self._log, Headwater):
            self._log.publish_batch(topic, events, connection=session)
            return
        connection = session.connection().connection
        if connection.dbapi_connection is None or not hasattr(connection.dbapi_connection, "run_async"):
            raise InvalidRequest(
                "an outbox of an asyncio log needs an AsyncSession", hint="Give the outbox `headwater.connect(...)`."
            )
        await_only(self._log.publish_batch(topic, events, connection=connection))
