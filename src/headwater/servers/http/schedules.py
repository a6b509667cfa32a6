"""Routes of events for later: once, and at the times of a cron expression."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Path, Query, Request
from psycopg import AsyncConnection
from starlette.responses import Response

from headwater import calls, model
from headwater.calls import overview
from headwater.log.cron import next_time
from headwater.observability import tracing
from headwater.servers.http import responses
from headwater.servers.http.authorization import caller_of, decides
from headwater.servers.http.dependencies import answer, problems, router, served
from headwater.servers.http.errors import NotThere
from headwater.servers.http.event_json import key_of
from headwater.servers.http.idempotency import IdempotencyKey, once
from headwater.servers.http.requests import MAX_POSITION, EventToSchedule, PeriodicChange, PeriodicToSet, ScheduleChange

routes = router("schedules")

ScheduleId = Annotated[int, Path(ge=1, le=MAX_POSITION)]
PeriodicName = Annotated[str, Path(min_length=1, max_length=200)]


def _shown(one: model.Scheduled) -> dict[str, Any]:
    return {
        "id": one.id,
        "deliver_at": one.due_at,
        "topic": one.topic,
        **key_of(one.key),
        "type": one.type,
        "event_id": one.event_id,
    }


@routes.get(
    "/v1/schedules",
    dependencies=[decides("describe topic, of each whose events are shown")],
    response_model=responses.Schedules,
    responses=problems(),
)
async def list_schedules(
    request: Request,
    topic: Annotated[str | None, Query(min_length=1, max_length=249)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """The events that wait for their time, the next one first."""
    log, caller = served(request).log, caller_of(request)
    asked = [one.name for one in await log.topics()] if topic is None else [topic]
    # Before the limit: who may see few must not get an empty list because others have many.
    topics = [name for name in asked if caller.may("describe", "topic", name)]
    found = await log.run(calls.scheduled(topics=topics, batch_size=limit), patience_seconds=5)
    return answer({"schedules": [_shown(one) for one in found]})


@routes.post(
    "/v1/schedules",
    status_code=201,
    dependencies=[decides("write topic {topic}")],
    response_model=responses.Made,
    responses=problems(404, 413),
)
async def schedule(request: Request, body: EventToSchedule, idempotency_key: IdempotencyKey = None) -> Response:
    """Schedule one event, however far ahead. With an `event_id` that is in the log, the id is null."""
    caller_of(request).need("write", "topic", body.topic)
    payload, content_type = body.payload()

    async def act(connection: AsyncConnection[Any] | None) -> dict[str, Any]:
        made = await served(request).log.schedule(
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
        return {"id": made}

    return await once(request, idempotency_key, act, status=201)


async def _found(request: Request, id: int) -> model.Scheduled:
    found = await served(request).log.run(overview.find_scheduled(id), patience_seconds=5)
    if found is None or not caller_of(request).may("describe", "topic", found.topic):
        raise NotThere(f"no event waits under {id}", hint="See GET /v1/schedules.", detail={"id": id})
    caller_of(request).need("write", "topic", found.topic)
    return found


@routes.patch(
    "/v1/schedules/{id}",
    dependencies=[decides("write topic, of the event's topic")],
    response_model=responses.Scheduled,
    responses=problems(404),
)
async def move_schedule(request: Request, id: ScheduleId, body: ScheduleChange) -> Response:
    """Give a scheduled event another time."""
    found = await _found(request, id)
    if not await served(request).log.run(calls.move_scheduled(id, body.deliver_at), patience_seconds=5):
        raise NotThere(f"no event waits under {id}: it is in the log", detail={"id": id})
    return answer({**_shown(found), "deliver_at": body.deliver_at})


@routes.delete(
    "/v1/schedules/{id}",
    dependencies=[decides("write topic, of the event's topic")],
    response_model=responses.Gone,
    responses=problems(404),
)
async def cancel_schedule(request: Request, id: ScheduleId) -> Response:
    """Take back a scheduled event."""
    await _found(request, id)
    if not await served(request).log.run(calls.cancel_scheduled(id), patience_seconds=5):
        raise NotThere(f"no event waits under {id}: it is in the log", detail={"id": id})
    return answer({"deleted": True})


@routes.get(
    "/v1/periodics",
    dependencies=[decides("describe topic, of each whose events are shown")],
    response_model=responses.Periodics,
    responses=problems(),
)
async def list_periodics(request: Request) -> Response:
    """Every periodic event with its next time."""
    caller = caller_of(request)
    found = [one for one in await served(request).log.periodics() if caller.may("describe", "topic", one.topic)]
    return answer({"periodics": found})


@routes.post(
    "/v1/periodics",
    status_code=201,
    dependencies=[decides("write topic {topic}, and of the topic that the one of that name had")],
    response_model=responses.Named,
    responses=problems(404, 413),
)
async def set_periodic(request: Request, body: PeriodicToSet) -> Response:
    """Publish an event at the times of a cron expression; one of that name is changed."""
    log, caller = served(request).log, caller_of(request)
    caller.need("write", "topic", body.topic)
    for one in await log.periodics():
        if one.name == body.name:
            caller.need("write", "topic", one.topic)
    payload, content_type = body.payload()
    call = calls.set_periodic(
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
    async with log.audited(caller.account, "periodic.set", body.name, detail) as connection:
        await log.run(call, connection=connection)
    return answer({"name": body.name}, status=201)


async def _need_periodic(request: Request, name: str) -> None:
    for one in await served(request).log.periodics():
        if one.name == name and caller_of(request).may("describe", "topic", one.topic):
            caller_of(request).need("write", "topic", one.topic)
            return
    raise NotThere(f'there is no periodic event "{name}"', hint="See GET /v1/periodics.", detail={"name": name})


@routes.patch(
    "/v1/periodics/{name}",
    dependencies=[decides("write topic, of the event's topic")],
    response_model=responses.Paused,
    responses=problems(404),
)
async def pause_periodic(request: Request, name: PeriodicName, body: PeriodicChange) -> Response:
    """Stop a periodic event from being published, or let it go on."""
    log = served(request).log
    await _need_periodic(request, name)
    action = "periodic.pause" if body.paused else "periodic.resume"
    async with log.audited(caller_of(request).account, action, name, {}) as connection:
        await log.run(calls.pause_periodic(name, paused=body.paused), connection=connection)
    return answer({"paused": body.paused})


@routes.delete(
    "/v1/periodics/{name}",
    dependencies=[decides("write topic, of the event's topic")],
    response_model=responses.Gone,
    responses=problems(404),
)
async def delete_periodic(request: Request, name: PeriodicName) -> Response:
    """Forget a periodic event."""
    log = served(request).log
    await _need_periodic(request, name)
    async with log.audited(caller_of(request).account, "periodic.delete", name, {}) as connection:
        await log.run(calls.delete_periodic(name), connection=connection)
    return answer({"deleted": True})
