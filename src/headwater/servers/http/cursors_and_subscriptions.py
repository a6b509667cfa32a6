"""Routes of those who read and remember where: cursors, and SQL subscriptions."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import Path, Query, Request
from starlette.responses import Response

from headwater import calls, model
from headwater.aio import AsyncHeadwater
from headwater.calls import overview
from headwater.errors import GroupNotFound, InvalidRequest
from headwater.servers.http import responses
from headwater.servers.http.authorization import caller_of, decides, needs
from headwater.servers.http.dependencies import answer, problems, router, served, some
from headwater.servers.http.errors import NotThere
from headwater.servers.http.events import need_topics
from headwater.servers.http.requests import MAX_POSITION, CursorToSet, DryRun, GroupName, SubscriptionToMake, seconds

routes = router("cursors and subscriptions")

# How many events a dry run looks at in order to find those that a subscription has yet to get.
MAX_LOOKED_AT: Final = 10_000
BATCH_SIZE: Final = 1000

CursorName = Annotated[str, Path(min_length=1, max_length=200, description="the cursor's name")]


def shown_cursor(cursor: model.Cursor) -> dict[str, Any]:
    age = cursor.oldest_unread_age
    return {
        "name": cursor.name,
        "position": cursor.position,
        "topics": cursor.topics,
        "must_not_lose": cursor.must_not_lose,
        "updated_at": cursor.updated_at,
        "lag_events": cursor.lag_events,
        "lag_is_more": cursor.lag_is_more,
        "lag_seconds": None if age is None else age.total_seconds(),
    }


@routes.get(
    "/v1/cursors",
    dependencies=[decides("describe group, of each that is shown: cursors have the rights of groups")],
    response_model=responses.Cursors,
    responses=problems(),
)
async def list_cursors(request: Request) -> Response:
    """Every cursor with what it has yet to read."""
    caller = caller_of(request)
    found = [one for one in await served(request).log.cursors() if caller.may("describe", "group", one.name)]
    return answer({"cursors": [shown_cursor(one) for one in found]})


@routes.put(
    "/v1/cursors/{name}",
    dependencies=[needs("read", "group", "name")],
    response_model=responses.CursorSet,
    responses=problems(404),
)
async def set_cursor(request: Request, name: CursorName, body: CursorToSet) -> Response:
    """Set a cursor to a position or a time, back or forth, making it if need be."""
    log = served(request).log
    if (body.position is None) == (body.since is None):
        raise InvalidRequest("say where to once: position or since")
    detail = body.model_dump(exclude_unset=True)
    async with log.audited(caller_of(request).account, "cursor.set", name, detail) as connection:
        position = await log.set_cursor(
            name,
            position=body.position,
            since=body.since,
            topics=body.topics,
            must_not_lose=body.must_not_lose,
            epoch=body.epoch,
            connection=connection,
        )
        epoch = await log.run(calls.current_epoch(), connection=connection)
    return answer({"name": name, "position": position, "epoch": epoch})


@routes.delete(
    "/v1/cursors/{name}",
    dependencies=[needs("delete", "group", "name")],
    response_model=responses.Gone,
    responses=problems(404),
)
async def delete_cursor(request: Request, name: CursorName) -> Response:
    """Forget a cursor."""
    log = served(request).log
    async with log.audited(caller_of(request).account, "cursor.delete", name, {}) as connection:
        if not await log.run(calls.delete_cursor(name), connection=connection):
            raise NotThere(f'there is no cursor "{name}"', hint="See GET /v1/cursors.", detail={"cursor": name})
    return answer({"deleted": True})


def _shown(one: model.Subscription) -> dict[str, Any]:
    parts = asdict(one)
    parts["set_aside"] = parts.pop("broken")
    parts["expires_after_seconds"] = parts.pop("expires_after")
    return parts


@routes.get(
    "/v1/subscriptions",
    dependencies=[decides("describe group, of each whose subscriptions are shown")],
    response_model=responses.Subscriptions,
    responses=problems(),
)
async def list_subscriptions(
    request: Request, group: Annotated[str | None, Query(min_length=1, max_length=200)] = None
) -> Response:
    """The subscriptions of a group, or of all: the first 1,000."""
    caller = caller_of(request)
    found = await served(request).log.subscriptions(group)
    return answer({"subscriptions": [_shown(one) for one in found if caller.may("describe", "group", one.group)]})


@routes.post(
    "/v1/subscriptions",
    status_code=201,
    dependencies=[decides("alter group {group}, and read topic, of each that the group reads; unnamed, read topic *")],
    response_model=responses.Made,
    responses=problems(404),
)
async def subscribe(request: Request, body: SubscriptionToMake) -> Response:
    """Subscribe a group to the events that fulfil a SQL condition. Equal subscriptions are one."""
    log, caller = served(request).log, caller_of(request)
    caller.need("alter", "group", body.group)
    # A group that is there reads what it reads, whatever this request says.
    reads = await log.run(overview.reading_topics(body.group), patience_seconds=5)
    need_topics(request, body.topics if reads.missing else reads.topics)
    call = calls.subscribe(
        body.group,
        body.condition,
        body.params,
        expires_after=seconds(body.expires_after_seconds),
        from_position=body.from_position,
        topics=body.topics,
    )
    detail = body.model_dump(exclude_unset=True)
    async with log.audited(caller.account, "subscription.create", body.group, detail) as connection:
        made = await log.run(call, connection=connection)
        detail["id"] = made
    return answer({"id": made}, status=201)


@routes.delete(
    "/v1/subscriptions/{group}/{id}",
    dependencies=[needs("alter", "group", "group")],
    response_model=responses.Deleted,
    responses=problems(404),
)
async def unsubscribe(
    request: Request, group: GroupName, id: Annotated[int, Path(ge=1, le=MAX_POSITION)], dry_run: DryRun = False
) -> Response:
    """End a subscription."""
    log = served(request).log
    found = await log.run(overview.find_subscription(id), patience_seconds=5)
    if found is None or found.group != group:
        raise GroupNotFound(f'group "{group}" has no subscription {id}', hint="See GET /v1/subscriptions.")
    missed = await unread(log, group, id)
    if not dry_run:
        async with log.audited(caller_of(request).account, "subscription.delete", group, {"id": id}) as connection:
            await log.run(calls.unsubscribe(id), connection=connection)
    return answer({"deleted": not dry_run, **some(missed)})


async def unread(log: AsyncHeadwater, group: str, id: int | None = None) -> overview.Contents:
    """What a subscription, or any of them, matches of the next events that its group reads."""
    settled = (await log.run(calls.log_state(), patience_seconds=5)).settled
    found: list[int] = []
    after: int | None = None
    for _ in range(MAX_LOOKED_AT // BATCH_SIZE):
        reading = await log.read_next(group, reader="look", after=after, batch_size=BATCH_SIZE, peek=True)
        found += [one.event.position for one in reading.events if id is None or id in one.subscription_ids]
        after = reading.next_position
        if after >= settled:
            break
    is_more = after is not None and after < settled
    return overview.Contents(len(found), is_more, min(found, default=None), max(found, default=None))
