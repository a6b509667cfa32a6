"""Routes for scheduled events and cron schedules."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Path, Query, Request
from psycopg import AsyncConnection
from starlette.responses import Response

from headwater.calls import overview, publishing
from headwater.log.cron import next_time
from headwater.log.event_json import key_json
from headwater.log.model import ScheduledEvent
from headwater.observability import tracing
from headwater.servers.http import responses
from headwater.servers.http.authorization import checked_in_route, principal_of
from headwater.servers.http.dependencies import context_of, json_response, problems, router
from headwater.servers.http.errors import NotFound
from headwater.servers.http.idempotency import IdempotencyKey, run_once
from headwater.servers.http.requests import (
    MAX_POSITION,
    CronScheduleCreate,
    CronScheduleUpdate,
    EventToSchedule,
    ScheduleUpdate,
)

routes = router("schedules")

ScheduleId = Annotated[int, Path(ge=1, le=MAX_POSITION)]
CronScheduleName = Annotated[str, Path(min_length=1, max_length=200)]


def _scheduled_json(one: ScheduledEvent) -> dict[str, Any]:
    return {
        "id": one.id,
        "deliver_at": one.due_at,
        "topic": one.topic,
        **key_json(one.key),
        "type": one.type,
        "event_id": one.event_id,
    }


@routes.get(
    "/v1/schedules",
    dependencies=[checked_in_route("describe topic, for each topic in the list")],
    response_model=responses.Schedules,
    responses=problems(),
)
async def list_schedules(
    request: Request,
    topic: Annotated[str | None, Query(min_length=1, max_length=249)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """List the scheduled events, the next one first."""
    log, principal = context_of(request).log, principal_of(request)
    names = [one.name for one in await log.topics()] if topic is None else [topic]
    # Filtered before the limit applies; otherwise topics that are hidden could fill the page.
    topics = [name for name in names if principal.may("describe", "topic", name)]
    found = await log.run(publishing.scheduled(topics=topics, batch_size=limit))
    return json_response({"schedules": [_scheduled_json(one) for one in found]})


@routes.post(
    "/v1/schedules",
    status_code=201,
    dependencies=[checked_in_route("write topic {topic}")],
    response_model=responses.CreatedId,
    responses=problems(404, 413),
)
async def schedule(request: Request, body: EventToSchedule, idempotency_key: IdempotencyKey = None) -> Response:
    """Schedule an event. The id is null if the log already contains its `event_id`."""
    principal_of(request).need("write", "topic", body.topic)
    payload, content_type = body.payload()

    async def act(connection: AsyncConnection[Any] | None) -> dict[str, Any]:
        schedule_id = await context_of(request).log.schedule(
            body.topic,
            payload,
            deliver_at=body.deliver_at,
            key=body.key_bytes(),
            type=body.type,
            routing_key=body.routing_key,
            headers=tracing.joined(body.headers or None, tracing.named_by(request.headers)),
            event_id=body.event_id,
            content_type=content_type,
            connection=connection,
        )
        return {"id": schedule_id}

    return await run_once(request, idempotency_key, act, status=201)


async def _find(request: Request, id: int) -> ScheduledEvent:
    found = await context_of(request).log.run(overview.find_scheduled(id))
    if found is None or not principal_of(request).may("describe", "topic", found.topic):
        raise NotFound(f"scheduled event {id} does not exist", hint="See GET /v1/schedules.", detail={"id": id})
    principal_of(request).need("write", "topic", found.topic)
    return found


@routes.patch(
    "/v1/schedules/{id}",
    dependencies=[checked_in_route("write topic, for the event's topic")],
    response_model=responses.ScheduledEvent,
    responses=problems(404),
)
async def move_schedule(request: Request, id: ScheduleId, body: ScheduleUpdate) -> Response:
    """Change the time of a scheduled event."""
    found = await _find(request, id)
    if not await context_of(request).log.run(publishing.move_scheduled(id, body.deliver_at)):
        raise NotFound(f"scheduled event {id} has already been published", detail={"id": id})
    return json_response({**_scheduled_json(found), "deliver_at": body.deliver_at})


@routes.delete(
    "/v1/schedules/{id}",
    dependencies=[checked_in_route("write topic, for the event's topic")],
    response_model=responses.DeleteConfirmation,
    responses=problems(404),
)
async def cancel_schedule(request: Request, id: ScheduleId) -> Response:
    """Cancel a scheduled event."""
    await _find(request, id)
    if not await context_of(request).log.run(publishing.cancel_scheduled(id)):
        raise NotFound(f"scheduled event {id} has already been published", detail={"id": id})
    return json_response({"deleted": True})


@routes.get(
    "/v1/cron-schedules",
    dependencies=[checked_in_route("describe topic, for each topic in the list")],
    response_model=responses.CronSchedules,
    responses=problems(),
)
async def list_cron_schedules(request: Request) -> Response:
    """List the cron schedules with their next time."""
    principal = principal_of(request)
    found = [
        one for one in await context_of(request).log.cron_schedules() if principal.may("describe", "topic", one.topic)
    ]
    return json_response({"cron_schedules": found})


@routes.post(
    "/v1/cron-schedules",
    status_code=201,
    dependencies=[
        checked_in_route("write topic {topic}, and write topic for the previous topic of a schedule that is replaced")
    ],
    response_model=responses.CronScheduleName,
    responses=problems(404, 413),
)
async def set_cron_schedule(request: Request, body: CronScheduleCreate) -> Response:
    """Create a cron schedule, or replace the one with this name."""
    log, principal = context_of(request).log, principal_of(request)
    principal.need("write", "topic", body.topic)
    for one in await log.cron_schedules():
        if one.name == body.name:
            principal.need("write", "topic", one.topic)
    payload, content_type = body.payload()
    call = publishing.set_cron_schedule(
        body.name,
        body.cron,
        body.topic,
        payload,
        next_at=next_time(body.cron, body.time_zone, datetime.now(UTC)),
        time_zone=body.time_zone,
        key=body.key_bytes(),
        type=body.type,
        routing_key=body.routing_key,
        headers=body.headers or None,
        content_type=content_type,
    )
    detail = body.model_dump(include={"cron", "time_zone", "topic", "type"})
    async with log.audited(principal.account, "cron.set", body.name, detail) as connection:
        await log.run(call, connection=connection)
    return json_response({"name": body.name}, status=201)


async def _need_cron_schedule(request: Request, name: str) -> None:
    for one in await context_of(request).log.cron_schedules():
        if one.name == name and principal_of(request).may("describe", "topic", one.topic):
            principal_of(request).need("write", "topic", one.topic)
            return
    raise NotFound(f'cron schedule "{name}" does not exist', hint="See GET /v1/cron-schedules.", detail={"name": name})


@routes.patch(
    "/v1/cron-schedules/{name}",
    dependencies=[checked_in_route("write topic, for the event's topic")],
    response_model=responses.PauseState,
    responses=problems(404),
)
async def pause_cron_schedule(request: Request, name: CronScheduleName, body: CronScheduleUpdate) -> Response:
    """Pause or resume a cron schedule."""
    log = context_of(request).log
    await _need_cron_schedule(request, name)
    action = "cron.pause" if body.paused else "cron.resume"
    async with log.audited(principal_of(request).account, action, name, {}) as connection:
        await log.run(publishing.pause_cron_schedule(name, paused=body.paused), connection=connection)
    return json_response({"paused": body.paused})


@routes.delete(
    "/v1/cron-schedules/{name}",
    dependencies=[checked_in_route("write topic, for the event's topic")],
    response_model=responses.DeleteConfirmation,
    responses=problems(404),
)
async def delete_cron_schedule(request: Request, name: CronScheduleName) -> Response:
    """Delete a cron schedule."""
    log = context_of(request).log
    await _need_cron_schedule(request, name)
    async with log.audited(principal_of(request).account, "cron.delete", name, {}) as connection:
        await log.run(publishing.delete_cron_schedule(name), connection=connection)
    return json_response({"deleted": True})
