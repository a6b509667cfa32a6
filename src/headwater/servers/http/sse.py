"""SSE routes: follow topics, the bindings of a queue, or a SQL subscription."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import Header, Path, Query, Request
from starlette.responses import Response

from headwater.calls import overview
from headwater.calls import reading as reading_calls
from headwater.calls import subscriptions as subscription_calls
from headwater.errors import InvalidRequest, PositionExpired, QueueNotFound
from headwater.log.sse_frames import RESUME_POINT_PATTERN, FrameStyle, ResumePoint
from headwater.servers.authentication import NotAuthenticated
from headwater.servers.http.authorization import checked_in_route, principal_of, requires
from headwater.servers.http.dependencies import context_of, problems, router
from headwater.servers.http.events import KeyQuery, TypeQuery, need_topics, selection_of
from headwater.servers.http.requests import MAX_POSITION, QueueName, TopicName
from headwater.servers.http.sse_client import SseResponse, SseStream, StreamSelection

routes = router("SSE streams")

# After this time an authenticated client must reconnect and authenticate again.
MAX_STREAM_SECONDS: Final = 3600.0

LastEventId = Annotated[
    str | None,
    Header(max_length=60, description="the last id of the stream, to resume after it; browsers send it automatically"),
]
After = Annotated[
    str | None,
    Query(
        max_length=60,
        pattern=RESUME_POINT_PATTERN,
        description="only events after this position, or after an id of a stream: position.epoch",
        examples=["17", "17.28150123"],
    ),
]
Named = Annotated[
    bool, Query(description="false: omit the event: lines, so that a browser's onmessage receives every event")
]
Format = Annotated[
    Literal["headwater", "cloudevents"],
    Query(description="cloudevents: the data: lines are CloudEvents in the JSON format"),
]
SkipExpired = Annotated[bool, Query(description="skip events removed by retention instead of failing with 410")]
_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "id: position.epoch; event: the event type; data: the event as JSON",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


@routes.get(
    "/v1/topics/{topic}/follow",
    dependencies=[requires("read", "topic", "topic")],
    response_class=Response,
    responses=_STREAM | problems(404, 409, 410),
)
async def follow_topic(
    request: Request,
    topic: TopicName,
    after: After = None,
    type: TypeQuery = None,
    key: KeyQuery = None,
    named: Named = True,
    format: Format = "headwater",
    skip_expired: SkipExpired = False,
    last_event_id: LastEventId = None,
) -> Response:
    """Follow a topic after a position, or from now on. `header.NAME=VALUE` selects events by a header."""
    return await _follow_topics(
        request, [topic], after, type, key, _style(request, named, format), skip_expired, last_event_id
    )


@routes.get(
    "/v1/follow",
    dependencies=[checked_in_route("read topic, for each topic given; read topic * if none is given")],
    response_class=Response,
    responses=_STREAM | problems(404, 409, 410),
)
async def follow_topics(
    request: Request,
    topic: Annotated[list[str] | None, Query(max_length=100)] = None,
    after: After = None,
    type: TypeQuery = None,
    key: KeyQuery = None,
    named: Named = True,
    format: Format = "headwater",
    skip_expired: SkipExpired = False,
    last_event_id: LastEventId = None,
) -> Response:
    """Follow several topics, or the whole log."""
    need_topics(request, topic)
    return await _follow_topics(
        request, topic, after, type, key, _style(request, named, format), skip_expired, last_event_id
    )


@routes.get(
    "/v1/queues/{queue}/follow",
    dependencies=[requires("read", "consumer", "queue")],
    response_class=Response,
    responses=_STREAM | problems(404, 409, 410),
)
async def follow_queue(
    request: Request,
    queue: QueueName,
    after: After = None,
    named: Named = True,
    format: Format = "headwater",
    last_event_id: LastEventId = None,
) -> Response:
    """Follow the events that a queue's bindings select, without claiming them."""
    sse = context_of(request).sse
    start = _start(after, last_event_id)
    point = await sse.begin(None, start)
    try:
        # Fails if the queue does not exist, or if events were removed by retention.
        await _check_readable(request, queue, point.position)
    except PositionExpired as expired:
        # Not an error if the stream has already searched beyond them without a match.
        earliest = expired.detail.get("earliest_position")
        if point.seen <= point.position or earliest is None:
            raise
        await _check_readable(request, queue, point.seen)
        point = point._replace(position=max(point.position, min(point.seen, earliest - 1)))
    return _stream(
        request,
        ("queue", queue),
        StreamSelection(),
        point,
        _style(request, named, format),
        ("read", "consumer", [queue]),
    )


@routes.get(
    "/v1/subscriptions/{queue}/{id}/follow",
    dependencies=[requires("read", "consumer", "queue")],
    response_class=Response,
    responses=_STREAM | problems(404, 409),
)
async def follow_subscription(
    request: Request,
    queue: QueueName,
    id: Annotated[int, Path(ge=1, le=MAX_POSITION)],
    after: After = None,
    named: Named = True,
    format: Format = "headwater",
    last_event_id: LastEventId = None,
) -> Response:
    """Follow the events that a SQL subscription matches. Events removed by retention are skipped."""
    log, sse = context_of(request).log, context_of(request).sse
    found = await log.run(overview.find_subscription(id))
    if found is None or found.queue != queue:
        raise QueueNotFound(f'queue "{queue}" has no subscription {id}', hint="See GET /v1/subscriptions.")
    start = _start(after, last_event_id)
    point = await sse.begin(None, start)
    # From now on the stream keeps the subscription from expiring.
    await log.run(subscription_calls.keep_alive([id]))
    return _stream(
        request,
        ("subscriptions", queue),
        StreamSelection(subscription=id),
        point,
        _style(request, named, format),
        ("read", "consumer", [queue]),
    )


async def _check_readable(request: Request, queue: str, after: int) -> None:
    """Raise PositionExpired if retention removed events after a position that the queue would have received."""
    call = overview.read_bound(queue, after=after, up_to=after, batch_size=1)
    await context_of(request).log.run(call)


async def _follow_topics(
    request: Request,
    topics: Sequence[str] | None,
    after: str | None,
    type: str | None,
    key: str | None,
    style: FrameStyle,
    skip_expired: bool,
    last_event_id: str | None,
) -> Response:
    log, sse = context_of(request).log, context_of(request).sse
    names = None if topics is None else list(dict.fromkeys(topics))
    selection = selection_of(request, names, type, key)
    start = _start(after, last_event_id)
    # Fails if a topic does not exist.
    expired_to = await log.run(reading_calls.expired_to(names))
    point = await sse.begin(names, start)
    if expired_to > max(point.position, point.seen) and not skip_expired:
        # Raises PositionExpired, with the first position that still exists.
        await log.run(reading_calls.read(names, after=point.position, batch_size=1))
    return _stream(request, ("topics",), selection, point, style, ("read", "topic", names or ["*"]), expired_to)


def _start(after: str | None, last_event_id: str | None) -> ResumePoint | None:
    """Where to start. On a reconnect, Last-Event-ID takes precedence over `after` in the URL."""
    given = last_event_id or after
    if given is None or given == "":
        return None
    point = ResumePoint.parse(given)
    if point is None or max(point.position, point.seen) > MAX_POSITION:
        raise InvalidRequest(
            f"invalid {'Last-Event-ID' if last_event_id else 'after'}: expected an id of the stream, or a position",
            hint="Send an id: value of the stream unchanged: position.epoch.",
        )
    return point


def _stream(
    request: Request,
    key: tuple[str, ...],
    selection: StreamSelection,
    point: ResumePoint,
    style: FrameStyle,
    permission: tuple[str, str, list[str]],
    expired_to: int = 0,
) -> Response:
    context = context_of(request)
    context.sse.check_feed_limit()
    authenticated = context.options.authenticate
    stream = SseStream(
        selection,
        point,
        style=style,
        allowed=_still_allowed(request, permission) if authenticated else _always,
        ends_at=time.monotonic() + MAX_STREAM_SECONDS if authenticated else None,
        selective=key != ("topics",) or not selection.takes_everything,
        expired_to=expired_to,
    )
    return SseResponse(context.sse, key, stream)


def _style(request: Request, named: bool, format: str) -> FrameStyle:
    source = context_of(request).options.cloud_events_source
    return FrameStyle(named, source if format == "cloudevents" else None)


def _always() -> bool:
    return True


def _still_allowed(request: Request, permission: tuple[str, str, list[str]]) -> Callable[[], bool]:
    authenticator, original = context_of(request).authenticator, principal_of(request)
    action, kind, names = permission
    authenticator.watch(original)

    def allowed() -> bool:
        try:
            principal = authenticator.revalidate(original)
        except NotAuthenticated:
            return False
        return all(principal.may(action, kind, name) for name in names)

    return allowed
