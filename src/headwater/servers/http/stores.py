"""Event store routes, and the same in the format of dcb.events, for its conformance tests."""

from __future__ import annotations

import time
from datetime import UTC
from typing import Annotated, Any, Final

from fastapi import Query, Request
from psycopg import AsyncConnection
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from headwater.calls import log as log_calls
from headwater.errors import AppendConflict
from headwater.eventstore.query import NewStoreEvent, NoMatchAfter, StoreEvent
from headwater.log.event_json import with_content
from headwater.servers.http import responses
from headwater.servers.http.authorization import requires
from headwater.servers.http.dependencies import context_of, json_response, list_response, problems, router
from headwater.servers.http.errors import invalid
from headwater.servers.http.idempotency import IdempotencyKey, run_once
from headwater.servers.http.requests import MAX_EVENTS, Position, RequestModel, TopicName, read_json
from headwater.servers.http.store_requests import (
    AppendRequest,
    StoreCount,
    StoreLatest,
    StoreQuery,
    StoreRead,
    TagText,
    TypeText,
)

routes = router("event stores")

# The dcb.events routes have no pages: the maximum number of events in one response.
MAX_DCB_EVENTS: Final = 10_000


def _store_event_json(topic: str, event: StoreEvent) -> str:
    """An event of an event store: the JSON of an event, with tags and metadata instead of key and headers."""
    members = {
        "position": event.position,
        "topic": topic,
        "partition": 0,
        "offset": event.topic_offset,
        "type": event.type,
        "tags": event.tags,
        "metadata": event.metadata or {},
        "content_type": event.content_type,
        "event_id": event.event_id,
        "published_at": event.published_at.astimezone(UTC).isoformat(),
    }
    return with_content(members, event.payload, event.content_type)


@routes.post(
    "/v1/stores/{topic}/append",
    dependencies=[requires("write", "topic", "topic")],
    response_model=responses.AppendResult,
    responses=problems(404, 409, 413),
)
async def append(
    request: Request, topic: TopicName, body: AppendRequest, idempotency_key: IdempotencyKey = None
) -> Response:
    """Append events atomically if the append condition holds. On a conflict (409), read, decide and append again."""
    store = context_of(request).log.store(topic)
    condition = None if body.condition is None else body.condition.condition()
    events = [one.new_event() for one in body.events]

    async def act(connection: AsyncConnection[Any] | None) -> dict[str, Any]:
        # Read before the append: if the epoch changes in between, the client's next request with it is rejected.
        epoch = await context_of(request).log.run(log_calls.current_epoch(), connection=connection)
        result = await store.append(events, condition, connection=connection)
        return {"positions": result.positions, "repeated": result.repeated, "epoch": epoch}

    return await run_once(request, idempotency_key, act)


@routes.post(
    "/v1/stores/{topic}/read",
    dependencies=[requires("read", "topic", "topic")],
    response_model=responses.StoreEventPage,
    responses=problems(404, 409),
)
async def read(request: Request, topic: TopicName, body: StoreRead) -> Response:
    """Read the matching events between two positions; backwards: newest first."""
    store = context_of(request).log.store(topic)
    found = await store.read_page(
        body.query.query(),
        after=body.after,
        before=body.before,
        backwards=body.backwards,
        batch_size=body.limit,
        epoch=body.epoch,
    )
    return list_response("events", (_store_event_json(topic, event) for event in found.events), epoch=found.epoch)


@routes.post(
    "/v1/stores/{topic}/count",
    dependencies=[requires("read", "topic", "topic")],
    response_model=responses.StoreEventCount,
    responses=problems(404),
)
async def count(request: Request, topic: TopicName, body: StoreCount) -> Response:
    """Count the matching events."""
    store = context_of(request).log.store(topic)
    return json_response({"count": await store.count(body.query.query(), after=body.after, before=body.before)})


@routes.post(
    "/v1/stores/{topic}/latest",
    dependencies=[requires("read", "topic", "topic")],
    response_model=responses.LatestEvents,
    responses=problems(404),
)
async def latest(request: Request, topic: TopicName, body: StoreLatest) -> Response:
    """Read the latest event of each item of the query, and the position of the latest of all."""
    found = await context_of(request).log.store(topic).latest(body.query.query())
    rows = ("null" if event is None else _store_event_json(topic, event) for event in found.events)
    return list_response("events", rows, position=found.position, epoch=found.epoch)


# --- dcb.events ---


class DcbNewEvent(RequestModel):
    """An event in the format of dcb.events: its data is text."""

    id: str | None = Field(default=None, min_length=1, max_length=255)
    type: TypeText
    data: str = ""
    tags: list[TagText] = Field(default_factory=list, max_length=100)

    def new_event(self) -> NewStoreEvent:
        payload = self.data.encode()
        try:
            read_json(payload)
            content_type = "application/json"
        except ValueError:
            content_type = "text/plain"
        return NewStoreEvent(self.type, payload, self.tags, None, self.id, content_type)


class DcbCondition(RequestModel):
    """The append condition: no event after this position may match."""

    failIfEventsMatch: StoreQuery
    after: Position | None = None


class DcbAppend(RequestModel):
    """One or more events and an append condition."""

    events: DcbNewEvent | Annotated[list[DcbNewEvent], Field(fail_fast=True)] = Field(
        description=f"one event, or a list of 1 to {MAX_EVENTS}"
    )
    condition: DcbCondition | None = None


class DcbOptions(BaseModel):
    """The first position (inclusive), the direction, and the limit."""

    model_config = ConfigDict(extra="ignore")

    start: Position | None = Field(default=None, alias="from")
    backwards: Annotated[bool, Field(strict=True)] | None = None
    limit: Annotated[int, Field(strict=True, ge=1, le=MAX_DCB_EVENTS)] | None = None


class DcbRead(RequestModel):
    """A query and its options."""

    query: StoreQuery = Field(default_factory=StoreQuery)
    options: DcbOptions | None = None


@routes.get(
    "/dcb/{topic}/read",
    dependencies=[requires("read", "topic", "topic")],
    response_model=list[responses.DcbEvent],
    responses=problems(404),
)
async def dcb_read(
    request: Request,
    topic: TopicName,
    query: Annotated[str, Query(max_length=100_000, description="a query as JSON")] = "{}",
    options: Annotated[str | None, Query(max_length=1000, description="from, backwards, limit, as JSON")] = None,
) -> Response:
    """Read the matching events as a list, up to 10,000."""
    try:
        body = DcbRead(
            query=StoreQuery.model_validate_json(query),
            options=None if options is None else DcbOptions.model_validate_json(options),
        )
    except ValidationError as error:
        raise invalid(error.errors()) from None
    return json_response([_dcb_event(event) for event in await _dcb_events(request, topic, body)])


@routes.post(
    "/dcb/{topic}/read",
    dependencies=[requires("read", "topic", "topic")],
    response_model=responses.DcbReadResult,
    responses=problems(404),
)
async def dcb_measured_read(request: Request, topic: TopicName, body: DcbRead) -> Response:
    """Count the matching events, and measure how long reading them takes."""
    started = time.perf_counter()
    found = await _dcb_events(request, topic, body)
    return json_response({"durationInMicroseconds": _micros(started), "numberOfMatchingEvents": len(found)})


@routes.post(
    "/dcb/{topic}/append",
    dependencies=[requires("write", "topic", "topic")],
    response_model=responses.DcbAppendResult,
    responses=problems(404, 413),
)
async def dcb_append(request: Request, topic: TopicName, body: DcbAppend) -> Response:
    """Append under a condition. A failed condition is reported in the response, not as an error."""
    events = body.events if isinstance(body.events, list) else [body.events]
    condition = None
    if body.condition is not None:
        condition = NoMatchAfter(body.condition.failIfEventsMatch.query(), body.condition.after or 0)
    started = time.perf_counter()
    failed = False
    try:
        store = context_of(request).log.store(topic)
        await store.append([one.new_event() for one in events], condition, patience_seconds=10)
    except AppendConflict:
        failed = True
    return json_response({"durationInMicroseconds": _micros(started), "appendConditionFailed": failed})


def _micros(started: float) -> int:
    return max(1, int((time.perf_counter() - started) * 1_000_000))


async def _dcb_events(request: Request, topic: str, body: DcbRead) -> list[StoreEvent]:
    store = context_of(request).log.store(topic)
    options = body.options or DcbOptions()
    backwards = bool(options.backwards)
    limit = options.limit or MAX_DCB_EVENTS
    after, before = 0, None
    if options.start is not None:
        after, before = (0, options.start + 1) if backwards else (max(options.start - 1, 0), None)
    found: list[StoreEvent] = []
    while len(found) < limit:
        batch = await store.read(
            body.query.query(),
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
