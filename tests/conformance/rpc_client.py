"""The event stores of a server of gRPC, with the methods that event stores have in a program."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC
from queue import SimpleQueue
from typing import Any

import grpc

from headwater import errors
from headwater.calls import encoding
from headwater.eventstore.query import (
    EVERYTHING,
    Appended,
    Condition,
    Latest,
    NewStoreEvent,
    NoMatchAfter,
    Query,
    StoreEvent,
    StorePage,
    distinct,
)
from headwater.queue.model import DeadLetter
from headwater.servers.grpc.client import service
from headwater.servers.grpc.generated import headwater_pb2 as pb
from patience import PATIENCE_SECONDS


@contextmanager
def translated() -> Iterator[None]:
    """Our errors, from what comes beside a status."""
    try:
        yield
    except grpc.RpcError as error:
        found = dict(error.trailing_metadata() or ()).get("headwater-error-bin")
        if found is None:
            raise
        told = json.loads(found)
        raise getattr(errors, told["error"])(
            told["message"], hint=told.get("hint"), detail=told.get("detail")
        ) from error


class RpcStores:
    """The event stores of one server."""

    def __init__(self, address: str, *options: tuple[str, int]) -> None:
        self.channel = grpc.insecure_channel(address, options)
        self.methods = service(self.channel, "headwater.v1.EventStore")

    def create_store(self, name: str, *, if_missing: bool = False) -> RpcStore:
        with translated():
            self.methods.CreateStore(pb.CreateStoreRequest(store=name, if_missing=if_missing), timeout=PATIENCE_SECONDS)
        return self.store(name)

    def store(self, name: str) -> RpcStore:
        return RpcStore(self.methods, name)

    def close(self) -> None:
        self.channel.close()


class RpcStore:
    """One event store."""

    def __init__(self, methods: Any, topic: str) -> None:
        self.topic = topic
        self._methods = methods

    def append(self, events: NewStoreEvent | Sequence[NewStoreEvent], condition: Condition | None = None) -> Appended:
        batch = [events] if isinstance(events, NewStoreEvent) else events
        request = pb.AppendRequest(
            store=self.topic, events=map(new_event, batch), condition=condition_message(condition)
        )
        with translated():
            answer = self._methods.Append(request, timeout=PATIENCE_SECONDS)
        return Appended(tuple(answer.positions), answer.repeated)

    def read(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        backwards: bool = False,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
        epoch: int | None = None,
    ) -> list[StoreEvent]:
        page = self.read_page(
            query,
            after=after,
            before=before,
            backwards=backwards,
            batch_size=batch_size,
            max_bytes=max_bytes,
            epoch=epoch,
        )
        return list(page.events)

    def read_page(
        self,
        query: Query = EVERYTHING,
        *,
        after: int = 0,
        before: int | None = None,
        backwards: bool = False,
        batch_size: int = 100,
        max_bytes: int = 16_777_216,
        epoch: int | None = None,
    ) -> StorePage:
        request = pb.ReadMatchingRequest(
            store=self.topic,
            query=query_message(query),
            after=after,
            before=before,
            backwards=backwards,
            batch_size=batch_size,
            max_bytes=max_bytes,
            epoch=epoch,
        )
        with translated():
            answer = self._methods.ReadMatching(request, timeout=PATIENCE_SECONDS)
        return StorePage([event(one) for one in answer.events], answer.epoch)

    def read_all(
        self, query: Query = EVERYTHING, *, backwards: bool = False, batch_size: int = 1000
    ) -> Iterator[StoreEvent]:
        after, before = 0, None
        while events := self.read(query, after=after, before=before, backwards=backwards, batch_size=batch_size):
            yield from events
            if backwards:
                before = events[-1].position
            else:
                after = events[-1].position

    def count(self, query: Query = EVERYTHING, *, after: int = 0, before: int | None = None) -> int:
        request = pb.CountRequest(store=self.topic, query=query_message(query), after=after, before=before)
        with translated():
            return int(self._methods.Count(request, timeout=PATIENCE_SECONDS).count)

    def latest(self, query: Query) -> Latest:
        request = pb.LatestRequest(store=self.topic, query=query_message(query))
        with translated():
            answer = self._methods.Latest(request, timeout=PATIENCE_SECONDS)
        found = tuple(event(item.event) if item.HasField("event") else None for item in answer.items)
        return Latest(found, answer.position, answer.epoch)

    def head(self) -> int:
        with translated():
            return int(self._methods.Head(pb.HeadRequest(store=self.topic), timeout=PATIENCE_SECONDS).position)

    def subscribe(self, query: Query = EVERYTHING, **options: Any) -> Iterator[StoreEvent]:
        for events in self.subscribe_batches(query, **options):
            yield from events

    def subscribe_batches(
        self,
        query: Query = EVERYTHING,
        *,
        after: int | None = None,
        from_end: bool = False,
        cursor: str | None = None,
        batch_size: int = 1000,
        stop_when_caught_up: bool = False,
    ) -> Iterator[Sequence[StoreEvent]]:
        if cursor is not None:
            opening = pb.OpenStoreCursorRequest(store=self.topic, cursor=cursor, start_after=after or 0)
            with translated():
                after = self._methods.OpenStoreCursor(opening, timeout=PATIENCE_SECONDS).position
        request = pb.SubscribeRequest(
            store=self.topic,
            query=query_message(query),
            after=after,
            from_end=from_end,
            batch_size=batch_size,
            stop_when_caught_up=stop_when_caught_up,
        )
        answers = self._methods.Subscribe(request)
        try:
            with translated():
                for answer in answers:
                    events = [event(one) for one in answer.events]
                    yield events
                    if cursor is not None:
                        move = pb.AdvanceStoreCursorRequest(
                            store=self.topic, cursor=cursor, from_position=after, to_position=events[-1].position
                        )
                        self._methods.AdvanceStoreCursor(move, timeout=PATIENCE_SECONDS)
                        after = events[-1].position
        finally:
            answers.cancel()

    def compete(
        self,
        queue: str,
        query: Query = EVERYTHING,
        *,
        worker: str,
        batch_size: int = 100,
        lease_seconds: float | None = None,
        stop_when_caught_up: bool = False,
    ) -> Iterator[Sequence[StoreEvent]]:
        asking: SimpleQueue[pb.CompeteRequest | None] = SimpleQueue()
        asking.put(
            pb.CompeteRequest(
                store=self.topic,
                queue=queue,
                query=query_message(query),
                worker=worker,
                batch_size=batch_size,
                lease_seconds=lease_seconds,
                stop_when_caught_up=stop_when_caught_up,
            )
        )
        answers = self._methods.Compete(iter(asking.get, None))
        try:
            with translated():
                for answer in answers:
                    yield [event(one) for one in answer.events]
                    asking.put(pb.CompeteRequest())
        finally:
            answers.cancel()
            asking.put(None)

    def dead_letters(
        self, queue: str, *, positions: Sequence[int] | None = None, after: int = 0, batch_size: int = 100
    ) -> list[DeadLetter]:
        request = pb.DeadLettersRequest(
            store=self.topic, queue=queue, positions=positions, after=after, batch_size=batch_size
        )
        with translated():
            letters = self._methods.DeadLetters(request, timeout=PATIENCE_SECONDS).letters
        return [
            DeadLetter(
                one.position,
                self.topic,
                None,
                one.type if one.HasField("type") else None,
                one.attempts,
                one.last_error if one.HasField("last_error") else None,
                tuple(json.loads(one.history)),
                one.died_at.ToDatetime(tzinfo=UTC),
            )
            for one in letters
        ]

    def redrive(self, queue: str, *, positions: Sequence[int] | None = None) -> int:
        request = pb.RedriveRequest(store=self.topic, queue=queue, positions=positions, all=positions is None)
        with translated():
            return int(self._methods.Redrive(request, timeout=PATIENCE_SECONDS).count)


def new_event(one: NewStoreEvent) -> pb.NewStoreEvent:
    payload, content_type = encoding.encode_payload(one.data, one.content_type)
    return pb.NewStoreEvent(
        type=one.type,
        payload=payload,
        content_type=content_type,
        # One text would be sent as its letters.
        tags=distinct(one.tags, "tags") if isinstance(one.tags, str) else one.tags,
        metadata=None if one.metadata is None else json.dumps(one.metadata),
        event_id=one.event_id,
    )


def query_message(query: Query) -> pb.Query:
    items = [pb.Item(types=item.types, tags=item.tags, fields=dict(item.fields)) for item in query.items]
    return pb.Query(items=items)


def condition_message(condition: Condition | None) -> pb.Condition | None:
    if condition is None:
        return None
    query = query_message(condition.query)
    if isinstance(condition, NoMatchAfter):
        return pb.Condition(query=query, no_match_after=condition.position, epoch=condition.epoch)
    return pb.Condition(query=query, latest_match_is=condition.position or 0, epoch=condition.epoch)


def event(message: pb.StoreEvent) -> StoreEvent:
    def given(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    metadata = given("metadata")
    return StoreEvent(
        message.position,
        message.topic_offset,
        given("event_id"),
        given("type"),
        tuple(message.tags),
        None if metadata is None else json.loads(metadata),
        given("content_type"),
        given("payload"),
        message.published_at.ToDatetime(tzinfo=UTC),
    )
