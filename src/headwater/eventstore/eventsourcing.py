"""An event store as the recorder for dynamic consistency boundaries of the `eventsourcing` library.

Set PERSISTENCE_MODULE=headwater.eventstore.eventsourcing and HEADWATER_STORE_ADDRESS to use Headwater in an
application.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from eventsourcing.dcb.api import (
    DCBAppendCondition,
    DCBEvent,
    DCBQuery,
    DCBReadResponse,
    DCBRecorder,
    DCBSequencedEvent,
    DCBSubscription,
)
from eventsourcing.dcb.persistence import DCBInfrastructureFactory
from eventsourcing.persistence import IntegrityError, OperationalError, ProgrammingError
from eventsourcing.popo import POPOTrackingRecorder
from eventsourcing.utils import Environment, EnvType

from headwater.client.eventstore.postgres import EventStore
from headwater.client.eventstore.sqlite import SqliteEventStore
from headwater.errors import AppendConflict, EpochChanged, HeadwaterError, LogUnavailable
from headwater.eventstore.addresses import open
from headwater.eventstore.query import EVERYTHING, Item, NewStoreEvent, NoMatchAfter, Query, StoreEvent

AnyEventStore: TypeAlias = EventStore | SqliteEventStore
BATCH_SIZE = 500


class HeadwaterRecorder(DCBRecorder):
    """Appends to and reads from one event store. Its positions are those of the store."""

    def __init__(self, store: AnyEventStore) -> None:
        self.store = store
        # The library's conditions have no epoch: an append uses the epoch of the last read in its thread.
        self._read_in = threading.local()

    def read(
        self, query: DCBQuery | None = None, *, after: int | None = None, limit: int | None = None
    ) -> DCBReadResponse:
        """Matching events. Without a limit the head is the end of the store, otherwise the last event read."""
        with _translated():
            if limit is None:
                head, self._read_in.epoch = self.store._end()
                events = self.store.read_all(_query(query), after=after or 0, before=head + 1)
                return _Response(events, head or None)
            events_read: Sequence[StoreEvent] = []
            if limit >= 1:
                events_read, self._read_in.epoch = self.store.read_page(
                    _query(query), after=after or 0, batch_size=limit
                )
            return _Response(iter(events_read), events_read[-1].position if events_read else None)

    def append(self, events: Sequence[DCBEvent], condition: DCBAppendCondition | None = None) -> int:
        """Append events; returns the position of the last one. Raises IntegrityError if the condition fails."""
        if not events:
            raise ProgrammingError("an append needs at least one event")
        new = [NewStoreEvent(event.type, event.data, event.tags) for event in events]
        asked = None
        if condition is not None:
            epoch: int | None = getattr(self._read_in, "epoch", None)
            asked = NoMatchAfter(_query(condition.fail_if_events_match), condition.after or 0, epoch)
        with _translated():
            return self.store.append(new, asked).position

    def subscribe(self, query: DCBQuery | None = None, *, after: int | None = None) -> HeadwaterSubscription:
        """Yield every matching event, including future ones."""
        return HeadwaterSubscription(self, query, after)


class HeadwaterSubscription(DCBSubscription[HeadwaterRecorder]):
    """Yields existing events, then new ones, until it is stopped."""

    def __init__(self, recorder: HeadwaterRecorder, query: DCBQuery | None, after: int | None) -> None:
        super().__init__(recorder, query, after)
        self._wanted = _query(query)
        self._epoch: int | None = None
        self._fetched: Iterator[StoreEvent] = iter(())
        self._fetching = threading.Lock()

    def __next__(self) -> DCBSequencedEvent:
        with self._fetching:
            while not self._has_been_stopped:
                event = next(self._fetched, None)
                if event is not None:
                    return _sequenced(event)
                with _translated():
                    self._fetched = iter(self._fetch())
            raise StopIteration

    def _fetch(self) -> Sequence[StoreEvent]:
        """Fetch events; returns within half a second, so that a stop takes effect."""
        store, after = self._recorder.store, self._last_position
        if self._epoch is None:
            after, self._epoch = store._begin(after, None, False, None, "rewind")
        try:
            self._last_position, events = store._next(self._wanted, after, self._epoch, BATCH_SIZE, False, 60.0)
        except EpochChanged as error:
            self._last_position, self._epoch = store._rewind(error, after, self._epoch, None, "rewind", 60.0)
            return ()
        return events


class _Response(DCBReadResponse):
    def __init__(self, events: Iterator[StoreEvent], head: int | None) -> None:
        self._events = events
        self._head = head

    @property
    def head(self) -> int | None:
        return self._head

    def __next__(self) -> DCBSequencedEvent:
        with _translated():
            return _sequenced(next(self._events))


class HeadwaterFactory(DCBInfrastructureFactory[POPOTrackingRecorder]):
    """Creates recorders for the event store that the environment names."""

    ADDRESS = "HEADWATER_STORE_ADDRESS"
    STORE = "HEADWATER_STORE"

    def __init__(self, env: Environment | EnvType | None) -> None:
        super().__init__(env)
        address = self.env.get(self.ADDRESS)
        if not address:
            raise OSError(f"{self.ADDRESS} is not set: expected postgresql://user@host/database or sqlite:///directory")
        self._stores = open(address)

    def dcb_recorder(self) -> DCBRecorder:
        name = self.env.get(self.STORE) or self.env.name.lower() or "events"
        with _translated():
            return HeadwaterRecorder(self._stores.create_store(name, if_missing=True))

    def tracking_recorder(
        self, tracking_recorder_class: type[POPOTrackingRecorder] | None = None
    ) -> POPOTrackingRecorder:
        """An in-memory tracking recorder, as in the library. Projections of Headwater save their position in cursors
        instead."""
        return (tracking_recorder_class or POPOTrackingRecorder)()

    def close(self) -> None:
        self._stores.close()


def _query(query: DCBQuery | None) -> Query:
    return EVERYTHING if query is None else Query([Item(item.types, item.tags) for item in query.items])


def _sequenced(event: StoreEvent) -> DCBSequencedEvent:
    return DCBSequencedEvent(
        event=DCBEvent(type=event.type or "", data=event.payload or b"", tags=list(event.tags)),
        position=event.position,
    )


@contextmanager
def _translated() -> Iterator[None]:
    """Translate Headwater's errors to those of the library."""
    try:
        yield
    except (AppendConflict, EpochChanged) as error:
        raise IntegrityError(error.message) from error
    except LogUnavailable as error:
        raise OperationalError(error.message) from error
    except HeadwaterError as error:
        raise ProgrammingError(error.message) from error
