"""Typed topics: publish and read objects of one model. Type checkers know the type of `data`."""
# Generated from log/typed.py by tools/unasync.py: write there.

from __future__ import annotations

from collections.abc import (
    Iterator,
    Mapping,
    Sequence,
)
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

from headwater.client.log.follow import FollowApi
from headwater.client.log.publish import PublishApi
from headwater.database.caller_connection import CallerConnection
from headwater.log.model import NewEvent
from headwater.log.payload_hooks import TypedEvent, TypedTopic

T = TypeVar("T")


class TypedApi(PublishApi, FollowApi):
    """Publish and read objects of a model."""

    def typed(self, topic: TypedTopic[T]) -> TypedLog[T]:
        """The log for events of this topic, whose payloads are objects of its model."""
        return TypedLog(self, topic)


class TypedLog(Generic[T]):
    """The events of a typed topic. The `type` of an event is by default the name of the object's class."""

    def __init__(self, log: TypedApi, topic: TypedTopic[T]) -> None:
        self._log = log
        self.topic = topic

    def publish(
        self,
        payload: T,
        *,
        key: str | bytes | None = None,
        type: str | None = None,
        routing_key: str | None = None,
        headers: Mapping[str, Any] | None = None,
        event_id: str | None = None,
        deliver_at: datetime | None = None,
        delay: timedelta | None = None,
        connection: CallerConnection | None = None,
    ) -> int | None:
        """Publish one object, as `Headwater.publish` does."""
        return self._log.publish(
            self.topic.name,
            payload,
            key=key,
            type=type or payload.__class__.__name__,
            routing_key=routing_key,
            headers=headers,
            event_id=event_id,
            deliver_at=deliver_at,
            delay=delay,
            connection=connection,
        )

    def publish_batch(self, payloads: Sequence[T], *, connection: CallerConnection | None = None) -> list[int | None]:
        """Publish all of these objects or none, in this order; returns their positions."""
        events = [NewEvent(payload, type=payload.__class__.__name__) for payload in payloads]
        return self._log.publish_batch(self.topic.name, events, connection=connection)

    def read(
        self,
        *,
        after: int | None = None,
        since: datetime | None = None,
        batch_size: int = 100,
        connection: CallerConnection | None = None,
    ) -> list[TypedEvent[T]]:
        """Stable events after a position or since a time, in order, as `Headwater.read` does."""
        events = self._log.read(self.topic.name, after=after, since=since, batch_size=batch_size, connection=connection)
        return [self.topic.typed_event(event) for event in events]

    def follow(
        self,
        *,
        cursor: str | None = None,
        after: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        stop_when_caught_up: bool = False,
        patience_seconds: float | None = 60.0,
    ) -> Iterator[TypedEvent[T]]:
        """Yield every event: existing events first, then new ones as they are published, as `Headwater.follow` does."""
        for event in self._log.follow(
            self.topic.name,
            cursor=cursor,
            after=after,
            since=since,
            from_end=from_end,
            stop_when_caught_up=stop_when_caught_up,
            patience_seconds=patience_seconds,
        ):
            yield self.topic.typed_event(event)
