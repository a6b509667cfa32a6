"""Routes of event stores, in our shape, and in that of dcb.events so that outside suites can run."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

from fastapi import Query, Request
from psycopg import AsyncConnection
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from headwater import calls
from headwater.errors import AppendConflict
from headwater.eventstore.query import NewStoreEvent, NoMatchAfter, StoreEvent
from headwater.servers.http import responses
from headwater.servers.http.authorization import needs
from headwater.servers.http.dependencies import answer, listed, problems, router, served
from headwater.servers.http.errors import invalid
from headwater.servers.http.event_json import store_event_json
from headwater.servers.http.idempotency import IdempotencyKey, once
from headwater.servers.http.requests import MAX_EVENTS, Position, Shape, TopicName, read_json
from headwater.servers.http.store_requests import Append, StoreCount, StoreLatest, StoreQuery, StoreRead, Tagged, Typed

routes = router("event stores")

# How many events the routes of dcb.events, which know no pages, answer with at most.
MAX_DCB_EVENTS: Final = 10_000


@routes.post(
    "/v1/stores/{topic}/append",
    dependencies=[needs("write", "topic", "topic")],
    response_model=responses.Appended,
    responses=problems(404, 409, 413),
)
async def append(request: Request, topic: TopicName, body: Append, idempotency_key: IdempotencyKey = None) -> Response:
    """Append events, all of them or none, if the condition holds. A conflict is 409: read, decide, append again."""
    store = served(request).log.store(topic)
    condition = None if body.condition is None else body.condition.condition()
    events = [one.new_event() for one in body.events]

    async def act(connection: AsyncConnection[Any] | None) -> dict[str, Any]:
        # Asked for before: an epoch that has ended since then is refused when it comes back.
        epoch = await served(request).log.run(calls.current_epoch(), connection=connection, patience_seconds=10)
        done = await store.append(events, condition, connection=connection, patience_seconds=10)
        return {"positions": done.positions, "repeated": done.repeated, "epoch": epoch}

    return await once(request, idempotency_key, act)


@routes.post(
    "/v1/stores/{topic}/read",
    dependencies=[needs("read", "topic", "topic")],
    response_model=responses.StoreEvents,
    responses=problems(404, 409),
)
async def read(request: Request, topic: TopicName, body: StoreRead) -> Response:
    """Events that match, after one position and before another; backwards: the newest first."""
    store = served(request).log.store(topic)
    found = await store.read_page(
        body.query.query(),
        after=body.after,
        before=body.before,
        backwards=body.backwards,
        batch_size=body.limit,
        epoch=body.epoch,
    )
    return listed("events", (store_event_json(topic, event) for event in found.events), epoch=found.epoch)


@routes.post(
    "/v1/stores/{topic}/count",
    dependencies=[needs("read", "topic", "topic")],
    response_model=responses.Count,
    responses=problems(404),
)
async def count(request: Request, topic: TopicName, body: StoreCount) -> Response:
    """How many events match."""
    store = served(request).log.store(topic)
    return answer({"count": await store.count(body.query.query(), after=body.after, before=body.before)})


@routes.post(
    "/v1/stores/{topic}/latest",
    dependencies=[needs("read", "topic", "topic")],
    response_model=responses.LatestEvents,
    responses=problems(404),
)
async def latest(request: Request, topic: TopicName, body: StoreLatest) -> Response:
    """The latest event of each item of the query, and the position of the latest of all."""
    found = await served(request).log.store(topic).latest(body.query.query())
    rows = ("null" if event is None else store_event_json(topic, event) for event in found.events)
    return listed("events", rows, position=found.position, epoch=found.epoch)


# --- dcb.events ---


class DcbNewEvent(Shape):
    """An event in the shape of dcb.events: its data is a text."""

    id: str | None = Field(default=None, min_length=1, max_length=255)
    type: Typed
    data: str = ""
    tags: list[Tagged] = Field(default_factory=list, max_length=100)

    def new_event(self) -> NewStoreEvent:
        payload = self.data.encode()
        try:
            read_json(payload)
            content_type = "application/json"
        except ValueError:
            content_type = "text/plain"
        return NewStoreEvent(self.type, payload, self.tags, None, self.id, content_type)


class DcbCondition(Shape):
    """No event after this one may match."""

    failIfEventsMatch: StoreQuery
    after: Position | None = None


class DcbAppend(Shape):
    """One event or several, and a condition."""

    events: DcbNewEvent | Annotated[list[DcbNewEvent], Field(fail_fast=True)] = Field(
        description=f"one, or 1 to {MAX_EVENTS}"
    )
    condition: DcbCondition | None = None


class DcbOptions(BaseModel):
    """Where to begin, that one included, which way, and how many."""

    model_config = ConfigDict(extra="ignore")

    start: Position | None = Field(default=None, alias="from")
    backwards: Annotated[bool, Field(strict=True)] | None = None
    limit: Annotated[int, Field(strict=True, ge=1, le=MAX_DCB_EVENTS)] | None = None


class DcbRead(Shape):
    """What is asked for."""

    query: StoreQuery = Field(default_factory=StoreQuery)
    options: DcbOptions | None = None


@routes.get(
    "/dcb/{topic}/read",
    dependencies=[needs("read", "topic", "topic")],
    response_model=list[responses.DcbEvent],
    responses=problems(404),
)
async def dcb_read(
    request: Request,
    topic: TopicName,
    query: Annotated[str, Query(max_length=100_000, description="a query as JSON")] = "{}",
    options: Annotated[str | None, Query(max_length=1000, description="from, backwards, limit, as JSON")] = None,
) -> Response:
    """Events that match, as a list, up to 10,000."""
    try:
        asked = DcbRead(
            query=StoreQuery.model_validate_json(query),
            options=None if options is None else DcbOptions.model_validate_json(options),
        )
    except ValidationError as error:
        raise invalid(error.errors()) from None
    return answer([_dcb_event(event) for event in await _dcb_events(request, topic, asked)])


@routes.post(
    "/dcb/{topic}/read",
    dependencies=[needs("read", "topic", "topic")],
    response_model=responses.DcbCounted,
    responses=problems(404),
)
async def dcb_measured_read(request: Request, topic: TopicName, body: DcbRead) -> Response:
    """How many events match, and how long reading them took."""
    started = time.perf_counter()
    found = await _dcb_events(request, topic, body)
    return answer({"durationInMicroseconds": _micros(started), "numberOfMatchingEvents": len(found)})


@routes.post(
    "/dcb/{topic}/append",
    dependencies=[needs("write", "topic", "topic")],
    response_model=responses.DcbAppended,
    responses=problems(404, 413),
)
async def dcb_append(request: Request, topic: TopicName, body: DcbAppend) -> Response:
    """Append under a condition; that it does not hold is an answer here, and no error."""
    events = body.events if isinstance(body.events, list) else [body.events]
    condition = None
    if body.condition is not None:
        condition = NoMatchAfter(body.condition.failIfEventsMatch.query(), body.condition.after or 0)
    started = time.perf_counter()
    failed = False
    try:
        store = served(request).log.store(topic)
        await store.append([one.new_event() for one in events], condition, patience_seconds=10)
    except AppendConflict:
        failed = True
    return answer({"durationInMicroseconds": _micros(started), "appendConditionFailed": failed})


def _micros(started: float) -> int:
    return max(1, int((time.perf_counter() - started) * 1_000_000))


async def _dcb_events(request: Request, topic: str, asked: DcbRead) -> list[StoreEvent]:
    store = served(request).log.store(topic)
    options = asked.options or DcbOptions()
    backwards = bool(options.backwards)
    limit = options.limit or MAX_DCB_EVENTS
    after, before = 0, None
    if options.start is not None:
        after, before = (0, options.start + 1) if backwards else (max(options.start - 1, 0), None)
    found: list[StoreEvent] = []
    while len(found) < limit:
        batch = await store.read(
            asked.query.query(),
            after=after,
            before=before,
            backwards=backwards,
            batch_size=min(1000, limit - len(found)),
        )
        if not batch:
            break
        found += batch
        if backwards:
            before = batch[-1].position
        else:
            after = batch[-1].position
    return found


def _dcb_event(event: StoreEvent) -> dict[str, Any]:
    return {
        "id": event.event_id,
        "type": event.type,
        "data": (event.payload or b"").decode(errors="replace"),
        "tags": event.tags,
        "position": event.position,
    }
