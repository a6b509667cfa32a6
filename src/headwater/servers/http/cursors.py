"""Cursor routes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path, Request
from starlette.responses import Response

from headwater.calls import log as log_calls
from headwater.calls import reading as reading_calls
from headwater.errors import InvalidRequest
from headwater.log.model import Cursor
from headwater.servers.http import responses
from headwater.servers.http.authorization import checked_in_route, principal_of, requires
from headwater.servers.http.dependencies import context_of, json_response, problems, router
from headwater.servers.http.errors import NotFound
from headwater.servers.http.requests import CursorUpdate

routes = router("cursors")

CursorName = Annotated[str, Path(min_length=1, max_length=200, description="the cursor's name")]


def cursor_json(cursor: Cursor) -> dict[str, Any]:
    age = cursor.oldest_unread_age
    return {
        "name": cursor.name,
        "position": cursor.position,
        "topics": cursor.topics,
        "holds_retention": cursor.holds_retention,
        "updated_at": cursor.updated_at,
        "lag_events": cursor.lag_events,
        "lag_is_more": cursor.lag_is_more,
        "lag_seconds": None if age is None else age.total_seconds(),
    }


@routes.get(
    "/v1/cursors",
    dependencies=[
        checked_in_route("describe consumer, for each cursor in the list (cursors have the permissions of queues)")
    ],
    response_model=responses.Cursors,
    responses=problems(),
)
async def list_cursors(request: Request) -> Response:
    """List the cursors with their lag."""
    principal = principal_of(request)
    found = [one for one in await context_of(request).log.cursors() if principal.may("describe", "consumer", one.name)]
    return json_response({"cursors": [cursor_json(one) for one in found]})


@routes.put(
    "/v1/cursors/{name}",
    dependencies=[requires("read", "consumer", "name")],
    response_model=responses.CursorSet,
    responses=problems(404),
)
async def set_cursor(request: Request, name: CursorName, body: CursorUpdate) -> Response:
    """Set a cursor to a position or a time. A missing cursor is created."""
    log = context_of(request).log
    if (body.position is None) == (body.since is None):
        raise InvalidRequest("give exactly one of position and since")
    detail = body.model_dump(exclude_unset=True)
    async with log.audited(principal_of(request).account, "cursor.set", name, detail) as connection:
        position = await log.set_cursor(
            name,
            position=body.position,
            since=body.since,
            topics=body.topics,
            holds_retention=body.holds_retention,
            epoch=body.epoch,
            connection=connection,
        )
        epoch = await log.run(log_calls.current_epoch(), connection=connection)
    return json_response({"name": name, "position": position, "epoch": epoch})


@routes.delete(
    "/v1/cursors/{name}",
    dependencies=[requires("delete", "consumer", "name")],
    response_model=responses.DeleteConfirmation,
    responses=problems(404),
)
async def delete_cursor(request: Request, name: CursorName) -> Response:
    """Delete a cursor."""
    log = context_of(request).log
    async with log.audited(principal_of(request).account, "cursor.delete", name, {}) as connection:
        if not await log.run(reading_calls.delete_cursor(name), connection=connection):
            raise NotFound(f'cursor "{name}" does not exist', hint="See GET /v1/cursors.", detail={"cursor": name})
    return json_response({"deleted": True})
