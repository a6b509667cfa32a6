"""Routes of events: publish and read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlencode

from fastapi import Path, Query, Request
from psycopg import AsyncConnection
from starlette.responses import Response

from headwater import calls
from headwater.aio import AsyncHeadwater
from headwater.calls import overview
from headwater.errors import InvalidRequest, epoch_changed
from headwater.model import Event, NewEvent
from headwater.observability import tracing
from headwater.servers.http import responses
from headwater.servers.http.authorization import caller_of, decides, needs
from headwater.servers.http.dependencies import listed, problems, raw_answer, router, served
from headwater.servers.http.errors import NotThere
from headwater.servers.http.event_json import event_json
from headwater.servers.http.idempotency import IdempotencyKey, once
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
from headwater.servers.http.sse_client import Selection

routes = router("events")

# How many events one request looks at in order to find some that fit.
MAX_LOOKED_AT: Final = 20_000
BATCH_SIZE: Final = 1000
BATCH_BYTES: Final = 8 * 1024 * 1024

TypeQuery = Annotated[str | None, Query(min_length=1, max_length=200, description="only events of this type")]
KeyQuery = Annotated[str | None, Query(max_length=10_000, description="only events with this key")]


@routes.post(
    "/v1/topics/{topic}/events",
    dependencies=[needs("write", "topic", "topic")],
    response_model=responses.Published,
    responses=problems(404, 413),
)
async def publish_events(
    request: Request, topic: TopicName, body: Publish, idempotency_key: IdempotencyKey = None
) -> Response:
    """Publish one event, or several: all of them or none, in this order."""
    log = served(request).log
    given = [body] if isinstance(body, EventToPublish) else body.events
    trace = tracing.named_by(request.headers)
    events = [one.new_event()._replace(headers=tracing.joined(one.headers or None, trace)) for one in given]
    later = any(one.deliver_at is not None for one in given)
    if later and any(one.partition is not None for one in given):
        raise InvalidRequest("an event for later cannot choose its partition")

    async def publish(connection: AsyncConnection[Any] | None) -> dict[str, Any]:
        positions: list[int | None] = []
        if later or (len(events) == 1 and events[0].partition is None):
            # One by one, each at its time.
            whole = log.transaction() if connection is None and len(events) > 1 else nullcontext(connection)
            async with whole as used:
                for event, one in zip(events, given, strict=True):
                    positions.append(await _publish(log, topic, event, one.deliver_at, used))
        else:
            positions = await log.publish_batch(topic, events, connection=connection)
        return {"positions": positions}

    return await once(request, idempotency_key, publish)


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
    dependencies=[needs("read", "topic", "topic")],
    response_model=responses.EventPage,
    responses=problems(404, 409, 410),
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
    """Events of a topic, in order or newest first. `header.NAME=VALUE` selects by a header."""
    return await _page(request, [topic], after, before, limit, order, type, key, since, until, epoch)


@routes.get(
    "/v1/events",
    dependencies=[decides("read topic, of each that is named; without any, read topic *")],
    response_model=responses.EventPage,
    responses=problems(404, 409, 410),
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
    """Events of several topics, or of the whole log. `header.NAME=VALUE` selects by a header."""
    need_topics(request, topic)
    return await _page(request, topic, after, before, limit, order, type, key, since, until, epoch)


def need_topics(request: Request, topics: Sequence[str] | None) -> None:
    """Who reads topics may read each; who names none, all."""
    for name in topics or ("*",):
        caller_of(request).need("read", "topic", name)


def selection_of(request: Request, topics: Sequence[str] | None, type: str | None, key: str | None) -> Selection:
    """What a query string selects."""
    headers = tuple(
        (name.removeprefix("header."), value)
        for name, value in request.query_params.multi_items()
        if name.startswith("header.")
    )
    if len(headers) > 20:
        raise InvalidRequest("up to 20 headers select events")
    return Selection(
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
    log = served(request).log
    names = None if topics is None else list(dict.fromkeys(topics))
    selection = selection_of(request, names, type, key)
    skip_expired = after is None
    if since is not None:
        after = max(after or 0, await log.run(calls.position_before(names, since), patience_seconds=5))
    if until is not None:
        last = await log.run(calls.position_before(names, until), patience_seconds=5)
        before = last + 1 if before is None else min(before, last + 1)
    state = await log.run(calls.log_state(names), patience_seconds=5)
    settled = state.settled
    if (epoch is not None and epoch != state.epoch) or (after or 0) > state.drawn:
        # Says which position both epochs share, or that there was no such position.
        asked = (after or 0) if order == "asc" or before is None else before - 1
        common, _ = await log.run(calls.resume(epoch, asked), patience_seconds=5)
        if epoch is not None and epoch != state.epoch:
            raise epoch_changed(epoch, asked, state.epoch, common)
    low, high = after or 0, settled + 1 if before is None else min(before, settled + 1)
    size = min(limit, BATCH_SIZE) if selection.takes_everything else BATCH_SIZE
    found: list[Event] = []
    looked_at, ended = 0, False
    while len(found) < limit and looked_at < MAX_LOOKED_AT and not ended:
        call = (
            calls.read(
                names,
                after=low,
                up_to=high - 1,
                batch_size=size,
                max_bytes=BATCH_BYTES,
                skip_expired=skip_expired,
                epoch=state.epoch,
            )
            if order == "asc"
            else calls.read_backwards(names, before=high, batch_size=size, max_bytes=BATCH_BYTES)
        )
        events = await log.run(call, patience_seconds=5) if high > low + 1 else []
        ended = not events
        looked_at += len(events) + 1
        for event in events:
            if order == "desc" and event.position <= low:
                ended = True
                break
            if order == "asc":
                low = event.position
            else:
                high = event.position
            if selection.fits(event) and (since is None or event.published_at >= since):
                found.append(event)
                if len(found) == limit:
                    break
    if order == "desc" and (present := await log.run(calls.current_epoch(), patience_seconds=5)) != state.epoch:
        raise epoch_changed(state.epoch, high - 1, present, low)
    following = None
    if not ended:
        own = ("after", "before", "epoch")
        given = [(name, value) for name, value in request.query_params.multi_items() if name not in own]
        bounds: list[tuple[str, Any]] = [("after", low)] if order == "asc" else [("before", high)]
        bounds.append(("epoch", state.epoch))
        if order == "asc" and request.query_params.get("before"):
            bounds.append(("before", request.query_params["before"]))
        if order == "desc" and request.query_params.get("after"):
            bounds.append(("after", request.query_params["after"]))
        following = "?" + urlencode(given + bounds)
    return listed("events", map(event_json, found), next=following, settled=settled, epoch=state.epoch)


@routes.get(
    "/v1/events/{position}",
    dependencies=[decides("read topic, of the event's topic")],
    response_model=responses.Event,
    responses=problems(404),
)
async def show_event(request: Request, position: Annotated[int, Path(ge=1, le=MAX_POSITION)]) -> Response:
    """The event at a position."""
    log = served(request).log
    for event in await log.run(overview.events_at([position]), patience_seconds=5):
        stable = (await log.run(calls.log_state([event.topic]), patience_seconds=5)).settled
        if position <= stable and caller_of(request).may("read", "topic", event.topic):
            return raw_answer(event_json(event))
    raise NotThere(f"there is no event at position {position}", detail={"position": position})
