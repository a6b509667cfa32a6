"""Event routes: publish and read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from fastapi import Path, Query, Request
from psycopg import AsyncConnection
from starlette.responses import Response

from headwater.aio import AsyncHeadwater
from headwater.calls import log as log_calls
from headwater.calls import overview
from headwater.calls import reading as reading_calls
from headwater.errors import InvalidRequest, epoch_changed_error
from headwater.log.cloud_events import BATCH_TYPE, EVENT_TYPE
from headwater.log.event_json import event_json
from headwater.log.model import Event, NewEvent
from headwater.observability import tracing
from headwater.servers.http import cloud_events, responses
from headwater.servers.http.authorization import checked_in_route, principal_of, requires
from headwater.servers.http.dependencies import context_of, list_response, problems, raw_json_response, router
from headwater.servers.http.errors import NotFound
from headwater.servers.http.idempotency import IdempotencyKey, run_once
from headwater.servers.http.requests import (
    MAX_POSITION,
    AfterQuery,
    BeforeQuery,
    EpochQuery,
    EventToPublish,
    Publish,
    Time,
    TopicName,
)
from headwater.servers.http.sse_client import StreamSelection

routes = router("events")

# How many events one request reads to find matching ones.
MAX_EXAMINED: Final = 20_000
BATCH_SIZE: Final = 1000
BATCH_BYTES: Final = 8 * 1024 * 1024

TypeQuery = Annotated[str | None, Query(min_length=1, max_length=200, description="only events of this type")]
KeyQuery = Annotated[str | None, Query(max_length=10_000, description="only events with this key")]


async def publish_cloud_events(request: Request, topic: TopicName, idempotency_key: IdempotencyKey = None) -> Response:
    """Publish one CloudEvent, or a batch of them atomically and in order."""
    log = context_of(request).log
    trace = tracing.named_by(request.headers)
    given = await cloud_events.published_events(request)
    events = [one._replace(headers=tracing.joined(one.headers, trace)) for one in given]

    async def publish(connection: AsyncConnection[Any] | None) -> dict[str, Any]:
        return {"positions": await log.publish_batch(topic, events, connection=connection)}

    content = None if idempotency_key is None else await cloud_events.content_of(request)
    return await run_once(request, idempotency_key, publish, content=content)


# Before the route of other requests, which documents this one as well.
routes.add_api_route(
    "/v1/topics/{topic}/events",
    publish_cloud_events,
    methods=["POST"],
    dependencies=[requires("write", "topic", "topic")],
    include_in_schema=False,
    route_class_override=cloud_events.CloudEventsRoute,
)


@routes.post(
    "/v1/topics/{topic}/events",
    dependencies=[requires("write", "topic", "topic")],
    response_model=responses.PublishResult,
    responses=problems(404, 413),
    openapi_extra={"requestBody": {"content": cloud_events.REQUEST_CONTENT}},
)
async def publish_events(
    request: Request, topic: TopicName, body: Publish, idempotency_key: IdempotencyKey = None
) -> Response:
    """Publish one event, or several atomically and in order. CloudEvents are accepted in structured, batch and binary
    mode."""
    log = context_of(request).log
    given = [body] if isinstance(body, EventToPublish) else body.events
    trace = tracing.named_by(request.headers)
    events = [one.new_event()._replace(headers=tracing.joined(one.headers or None, trace)) for one in given]
    is_scheduled = any(one.deliver_at is not None for one in given)
    if is_scheduled and any(one.partition is not None for one in given):
        raise InvalidRequest("partition cannot be combined with deliver_at")

    async def publish(connection: AsyncConnection[Any] | None) -> dict[str, Any]:
        positions: list[int | None] = []
        if is_scheduled or (len(events) == 1 and events[0].partition is None):
            # publish_batch takes no deliver_at: one call per event, in one transaction.
            transaction = log.transaction() if connection is None and len(events) > 1 else nullcontext(connection)
            async with transaction as used:
                for event, one in zip(events, given, strict=True):
                    positions.append(await _publish(log, topic, event, one.deliver_at, used))
        else:
            positions = await log.publish_batch(topic, events, connection=connection)
        return {"positions": positions}

    return await run_once(request, idempotency_key, publish)


async def _publish(
    log: AsyncHeadwater,
    topic: str,
    event: NewEvent,
    deliver_at: datetime | None,
    connection: AsyncConnection[Any] | None,
) -> int | None:
    return await log.publish(
        topic,
        event.payload,
        key=event.key,
        type=event.type,
        routing_key=event.routing_key,
        headers=event.headers,
        event_id=event.event_id,
        content_type=event.content_type,
        deliver_at=deliver_at,
        connection=connection,
    )


@routes.get(
    "/v1/topics/{topic}/events",
    dependencies=[requires("read", "topic", "topic")],
    response_model=responses.EventPage,
    responses=cloud_events.with_cloud_events(BATCH_TYPE) | problems(404, 409, 410),
)
async def read_topic(
    request: Request,
    topic: TopicName,
    after: AfterQuery = None,
    before: BeforeQuery = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    order: Literal["asc", "desc"] = "asc",
    type: TypeQuery = None,
    key: KeyQuery = None,
    since: Time | None = None,
    until: Time | None = None,
    epoch: EpochQuery = None,
) -> Response:
    """Read a topic, in order or newest first. `header.NAME=VALUE` selects events by a header."""
    return await _page(request, [topic], after, before, limit, order, type, key, since, until, epoch)


@routes.get(
    "/v1/events",
    dependencies=[checked_in_route("read topic, for each topic given; read topic * if none is given")],
    response_model=responses.EventPage,
    responses=cloud_events.with_cloud_events(BATCH_TYPE) | problems(404, 409, 410),
)
async def read_events(
    request: Request,
    topic: Annotated[list[str] | None, Query(max_length=100)] = None,
    after: AfterQuery = None,
    before: BeforeQuery = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    order: Literal["asc", "desc"] = "asc",
    type: TypeQuery = None,
    key: KeyQuery = None,
    since: Time | None = None,
    until: Time | None = None,
    epoch: EpochQuery = None,
) -> Response:
    """Read several topics, or the whole log. `header.NAME=VALUE` selects events by a header."""
    need_topics(request, topic)
    return await _page(request, topic, after, before, limit, order, type, key, since, until, epoch)


def need_topics(request: Request, topics: Sequence[str] | None) -> None:
    """Require permission to read each of these topics; None: every topic."""
    for name in topics or ("*",):
        principal_of(request).need("read", "topic", name)


def selection_of(request: Request, topics: Sequence[str] | None, type: str | None, key: str | None) -> StreamSelection:
    """The selection in a query string."""
    headers = tuple(
        (name.removeprefix("header."), value)
        for name, value in request.query_params.multi_items()
        if name.startswith("header.")
    )
    if len(headers) > 20:
        raise InvalidRequest("too many header.NAME parameters: at most 20 are allowed")
    return StreamSelection(
        None if topics is None else frozenset(topics), type, None if key is None else key.encode(), headers
    )


async def _page(
    request: Request,
    topics: Sequence[str] | None,
    after: int | None,
    before: int | None,
    limit: int,
    order: str,
    type: str | None,
    key: str | None,
    since: datetime | None,
    until: datetime | None,
    epoch: int | None,
) -> Response:
    log = context_of(request).log
    names = None if topics is None else list(dict.fromkeys(topics))
    selection = selection_of(request, names, type, key)
    skip_expired = after is None
    if since is not None:
        after = max(after or 0, await log.run(reading_calls.position_before(names, since)))
    if until is not None:
        last = await log.run(reading_calls.position_before(names, until))
        before = last + 1 if before is None else min(before, last + 1)
    state = await log.run(log_calls.log_state(names))
    stable = state.stable
    if (epoch is not None and epoch != state.epoch) or (after or 0) > state.head:
        # Raises an error if the position never existed; else finds the last position that both epochs share.
        requested = (after or 0) if order == "asc" or before is None else before - 1
        common, _ = await log.run(log_calls.resume(epoch, requested))
        if epoch is not None and epoch != state.epoch:
            raise epoch_changed_error(epoch, requested, state.epoch, common)
    low, high = after or 0, stable + 1 if before is None else min(before, stable + 1)
    size = min(limit, BATCH_SIZE) if selection.takes_everything else BATCH_SIZE
    found: list[Event] = []
    examined, ended = 0, False
    while len(found) < limit and examined < MAX_EXAMINED and not ended:
        call = (
            reading_calls.read(
                names,
                after=low,
                up_to=high - 1,
                batch_size=size,
                max_bytes=BATCH_BYTES,
                skip_expired=skip_expired,
                epoch=state.epoch,
            )
            if order == "asc"
            else reading_calls.read_backwards(names, before=high, batch_size=size, max_bytes=BATCH_BYTES)
        )
        events = await log.run(call) if high > low + 1 else []
        ended = not events
        examined += len(events) + 1
        for event in events:
            if order == "desc" and event.position <= low:
                ended = True
                break
            if order == "asc":
                low = event.position
            else:
                high = event.position
            if selection.matches(event) and (since is None or event.published_at >= since):
                found.append(event)
                if len(found) == limit:
                    break
    if order == "desc" and (present := await log.run(log_calls.current_epoch())) != state.epoch:
        raise epoch_changed_error(state.epoch, high - 1, present, low)
    next_page = None
    if not ended:
        own = ("after", "before", "epoch")
        given = [(name, value) for name, value in request.query_params.multi_items() if name not in own]
        bounds: list[tuple[str, Any]] = [("after", low)] if order == "asc" else [("before", high)]
        bounds.append(("epoch", state.epoch))
        if order == "asc" and request.query_params.get("before"):
            bounds.append(("before", request.query_params["before"]))
        if order == "desc" and request.query_params.get("after"):
            bounds.append(("after", request.query_params["after"]))
        next_page = "?" + urlencode(given + bounds)
    if cloud_events.accepts(request, BATCH_TYPE):
        source = context_of(request).options.cloud_events_source
        return cloud_events.batch_response(found, source, next_page=next_page, stable=stable, epoch=state.epoch)
    return list_response("events", map(event_json, found), next=next_page, stable=stable, epoch=state.epoch)


@routes.get(
    "/v1/events/{position}",
    dependencies=[checked_in_route("read topic, for the event's topic")],
    response_model=responses.Event,
    responses=cloud_events.with_cloud_events(EVENT_TYPE) | problems(404),
)
async def show_event(request: Request, position: Annotated[int, Path(ge=1, le=MAX_POSITION)]) -> Response:
    """Show the event at a position."""
    log = context_of(request).log
    for event in await log.run(overview.events_at([position])):
        stable = (await log.run(log_calls.log_state([event.topic]))).stable
        if position <= stable and principal_of(request).may("read", "topic", event.topic):
            if cloud_events.accepts(request, EVENT_TYPE):
                return cloud_events.event_response(event, context_of(request).options.cloud_events_source)
            return raw_json_response(event_json(event))
    raise NotFound(f"no event at position {position}", detail={"position": position})
