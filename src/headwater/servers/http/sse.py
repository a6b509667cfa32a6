"""Routes of live streams: server-sent events of topics, of a queue's bindings, of a SQL subscription."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

from fastapi import Header, Path, Query, Request
from starlette.responses import Response

from headwater import calls
from headwater.calls import overview
from headwater.errors import GroupNotFound, InvalidRequest, PositionExpired
from headwater.servers.authentication import NotAuthenticated
from headwater.servers.http.authorization import caller_of, decides, needs
from headwater.servers.http.dependencies import problems, router, served
from headwater.servers.http.event_json import MARK_PATTERN, Mark
from headwater.servers.http.events import KeyQuery, TypeQuery, need_topics, selection_of
from headwater.servers.http.requests import MAX_POSITION, GroupName, TopicName
from headwater.servers.http.sse_client import EventStream, Selection, Stream

routes = router("live streams")

# After that long a client of an account has to come again, with a key or a session that is still good.
LONGEST_SECONDS: Final = 3600.0

LastEventId = Annotated[
    str | None,
    Header(max_length=60, description="the last id of the stream, to resume after it; browsers send it by themselves"),
]
After = Annotated[
    str | None,
    Query(
        max_length=60,
        pattern=MARK_PATTERN,
        description="only events after this position, or after an id of a stream: position.epoch",
        examples=["17", "17.28150123"],
    ),
]
Named = Annotated[bool, Query(description="false: no event: lines, so that a browser's onmessage gets every event")]
SkipExpired = Annotated[bool, Query(description="go on behind what retention took, and do not refuse")]
_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "id: is position.epoch, event: the type, data: the event as JSON",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


@routes.get(
    "/v1/topics/{topic}/follow",
    dependencies=[needs("read", "topic", "topic")],
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
    skip_expired: SkipExpired = False,
    last_event_id: LastEventId = None,
) -> Response:
    """Follow a topic: what comes after a position, or from now on. `header.NAME=VALUE` selects by a header."""
    return await _follow_topics(request, [topic], after, type, key, named, skip_expired, last_event_id)


@routes.get(
    "/v1/follow",
    dependencies=[decides("read topic, of each that is named; without any, read topic *")],
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
    skip_expired: SkipExpired = False,
    last_event_id: LastEventId = None,
) -> Response:
    """Follow several topics, or the whole log."""
    need_topics(request, topic)
    return await _follow_topics(request, topic, after, type, key, named, skip_expired, last_event_id)


@routes.get(
    "/v1/groups/{group}/follow",
    dependencies=[needs("read", "group", "group")],
    response_class=Response,
    responses=_STREAM | problems(404, 409, 410),
)
async def follow_group(
    request: Request,
    group: GroupName,
    after: After = None,
    named: Named = True,
    last_event_id: LastEventId = None,
) -> Response:
    """Follow what a queue's bindings select, without claiming it."""
    live = served(request).live
    start = _start(after, last_event_id)
    mark = await live.begin(None, start)
    try:
        # Says that there is no such queue, or that retention took what is asked for.
        await _look(request, group, mark.position)
    except PositionExpired as expired:
        # Unless the stream has looked beyond it already, and found nothing that it would have got.
        earliest = expired.detail.get("earliest_position")
        if mark.seen <= mark.position or earliest is None:
            raise
        await _look(request, group, mark.seen)
        mark = mark._replace(position=max(mark.position, min(mark.seen, earliest - 1)))
    return _stream(request, ("group", group), Selection(), mark, named, ("read", "group", [group]))


@routes.get(
    "/v1/subscriptions/{group}/{id}/follow",
    dependencies=[needs("read", "group", "group")],
    response_class=Response,
    responses=_STREAM | problems(404, 409),
)
async def follow_subscription(
    request: Request,
    group: GroupName,
    id: Annotated[int, Path(ge=1, le=MAX_POSITION)],
    after: After = None,
    named: Named = True,
    last_event_id: LastEventId = None,
) -> Response:
    """Follow what a SQL subscription matches. What retention took is passed over."""
    log, live = served(request).log, served(request).live
    found = await log.run(overview.find_subscription(id), patience_seconds=5)
    if found is None or found.group != group:
        raise GroupNotFound(f'group "{group}" has no subscription {id}', hint="See GET /v1/subscriptions.")
    start = _start(after, last_event_id)
    mark = await live.begin(None, start)
    # From now on the stream keeps it from expiring.
    await log.run(calls.keep_alive([id]), patience_seconds=5)
    return _stream(
        request, ("subscriptions", group), Selection(subscription=id), mark, named, ("read", "group", [group])
    )


async def _look(request: Request, group: str, after: int) -> None:
    """PositionExpired, if retention took something after a position that the queue would have got."""
    call = overview.read_bound(group, after=after, up_to=after, batch_size=1)
    await served(request).log.run(call, patience_seconds=5)


async def _follow_topics(
    request: Request,
    topics: Sequence[str] | None,
    after: str | None,
    type: str | None,
    key: str | None,
    named: bool,
    skip_expired: bool,
    last_event_id: str | None,
) -> Response:
    log, live = served(request).log, served(request).live
    names = None if topics is None else list(dict.fromkeys(topics))
    selection = selection_of(request, names, type, key)
    start = _start(after, last_event_id)
    # Says which topic is missing.
    gone_to = await log.run(calls.expired_to(names), patience_seconds=5)
    mark = await live.begin(names, start)
    if gone_to > max(mark.position, mark.seen) and not skip_expired:
        # Says what is the first that is there.
        await log.run(calls.read(names, after=mark.position, batch_size=1), patience_seconds=5)
    return _stream(request, ("topics",), selection, mark, named, ("read", "topic", names or ["*"]), gone_to)


def _start(after: str | None, last_event_id: str | None) -> Mark | None:
    """Where to begin. A client that comes again knows better than the address that it was once given."""
    given = last_event_id or after
    if given is None or given == "":
        return None
    mark = Mark.parsed(given)
    if mark is None or max(mark.position, mark.seen) > MAX_POSITION:
        raise InvalidRequest(
            f"invalid {'Last-Event-ID' if last_event_id else 'after'}: expected an id of the stream, or a position",
            hint="An id is written as its id: lines have it: position.epoch.",
        )
    return mark


def _stream(
    request: Request,
    key: tuple[str, ...],
    selection: Selection,
    mark: Mark,
    named: bool,
    right: tuple[str, str, list[str]],
    gone_to: int = 0,
) -> Response:
    here = served(request)
    here.live.refuse_too_many()
    known = here.opening.authenticate
    stream = Stream(
        selection,
        mark,
        named=named,
        allowed=_still_allowed(request, right) if known else _always,
        ends_at=time.monotonic() + LONGEST_SECONDS if known else None,
        selective=key != ("topics",) or not selection.takes_everything,
        gone_to=gone_to,
    )
    return EventStream(here.live, key, stream)


def _always() -> bool:
    return True


def _still_allowed(request: Request, right: tuple[str, str, list[str]]) -> Callable[[], bool]:
    callers, came = served(request).callers, caller_of(request)
    action, kind, names = right
    callers.watch(came)

    def allowed() -> bool:
        try:
            caller = callers.still(came)
        except NotAuthenticated:
            return False
        return all(caller.may(action, kind, name) for name in names)

    return allowed
