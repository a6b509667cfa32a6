"""Topic routes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from starlette.responses import Response

from headwater.calls import log as log_calls
from headwater.calls import overview
from headwater.calls import reading as reading_calls
from headwater.calls import store as store_calls
from headwater.errors import InvalidRequest, TopicNotFound
from headwater.log.model import TopicOverview
from headwater.log.settings import TopicSettings
from headwater.servers.http import responses
from headwater.servers.http.authorization import checked_in_route, principal_of, requires
from headwater.servers.http.dependencies import context_of, event_range, json_response, problems, router
from headwater.servers.http.requests import DryRun, TopicCreate, TopicName, TopicUpdate
from headwater.servers.http.setting_fields import settings_json, settings_of
from headwater.setting_definitions import changeable, definitions

routes = router("topics")


def _topic_json(topic: TopicOverview, stores: Collection[str]) -> dict[str, Any]:
    return {
        "name": topic.name,
        "event_store": topic.name in stores,
        "created_at": topic.created_at,
        "expired_to": topic.expired_to,
        "first_position": topic.first_position,
        "last_position": topic.last_position,
        "last_published_at": topic.last_published_at,
        **settings_json(topic, definitions(TopicSettings)),
    }


@routes.get(
    "/v1/topics",
    dependencies=[checked_in_route("describe topic, for each topic in the list")],
    response_model=responses.Topics,
    responses=problems(),
)
async def list_topics(request: Request) -> Response:
    """List the topics with their settings and contents."""
    log, principal = context_of(request).log, principal_of(request)
    stores = await log.run(store_calls.event_stores())
    found = [topic for topic in await log.topics() if principal.may("describe", "topic", topic.name)]
    return json_response({"topics": [_topic_json(topic, stores) for topic in found]})


@routes.post(
    "/v1/topics",
    status_code=201,
    dependencies=[checked_in_route("create topic {name}, or create log")],
    response_model=responses.Topic,
    responses=problems(409),
)
async def create_topic(request: Request, body: TopicCreate) -> Response:
    """Create a topic or an event store. With `if_missing`, an existing one is left unchanged."""
    log, principal = context_of(request).log, principal_of(request)
    if not principal.may("create", "log", "*"):
        principal.need("create", "topic", body.name)
    settings = settings_of(body, definitions(TopicSettings))
    if body.event_store and (settings.pop("partitions", 1) != 1 or settings.pop("retention", None) is not None):
        raise InvalidRequest(
            "an event store has one partition and no retention: leave out partitions and retention_seconds"
        )
    async with log.audited(
        principal.account, "topic.create", body.name, body.model_dump(exclude_unset=True)
    ) as connection:
        if body.event_store:
            settings.pop("kind", None)
            await log.run(
                store_calls.create_event_store(body.name, if_missing=body.if_missing, **settings), connection=connection
            )
        else:
            await log.create_topic(body.name, if_missing=body.if_missing, connection=connection, **settings)
    return await _topic_response(request, body.name, status=201)


@routes.get(
    "/v1/topics/{topic}",
    dependencies=[requires("describe", "topic", "topic")],
    response_model=responses.Topic,
    responses=problems(404),
)
async def show_topic(request: Request, topic: TopicName) -> Response:
    """Show a topic with its settings and contents."""
    return await _topic_response(request, topic)


@routes.patch(
    "/v1/topics/{topic}",
    dependencies=[requires("alter", "topic", "topic")],
    response_model=responses.TopicUpdateResult,
    responses=problems(404),
)
async def change_topic(request: Request, topic: TopicName, body: TopicUpdate) -> Response:
    """Change the settings of a topic. Events that are older than a new retention are removed by the next maintenance,
    or when their segment is closed."""
    log = context_of(request).log
    settings = settings_of(body, changeable(TopicSettings))
    retention = settings.get("retention")
    older = overview.NOTHING
    if retention is not None:
        since = datetime.now(UTC) - retention
        up_to = await log.run(reading_calls.position_before([topic], since))
        older = await log.run(overview.topic_contents(topic, up_to=up_to))
    removed = {**event_range(older), "dry_run": body.dry_run}
    if body.dry_run:
        return await _topic_response(request, topic, removed)
    call = log_calls.alter_topic(topic, keep_forever="retention" in settings and retention is None, **settings)
    changes = body.model_dump(exclude_unset=True, exclude={"dry_run"})
    async with log.audited(principal_of(request).account, "topic.alter", topic, changes) as connection:
        await log.run(call, connection=connection)
    return await _topic_response(request, topic, removed)


@routes.delete(
    "/v1/topics/{topic}",
    dependencies=[requires("delete", "topic", "topic")],
    response_model=responses.DeleteResult,
    responses=problems(404),
)
async def delete_topic(request: Request, topic: TopicName, dry_run: DryRun = False) -> Response:
    """Delete a topic with its events."""
    log = context_of(request).log
    held = await log.run(overview.topic_contents(topic))
    if not dry_run:
        detail = {"last_position": held.last_position}
        async with log.audited(principal_of(request).account, "topic.delete", topic, detail) as connection:
            await log.run(log_calls.delete_topic(topic), connection=connection)
    return json_response({"deleted": not dry_run, **event_range(held)})


async def _topic_response(
    request: Request, name: str, more: Mapping[str, Any] | None = None, *, status: int = 200
) -> Response:
    log = context_of(request).log
    stores = await log.run(store_calls.event_stores())
    for topic in await log.topics():
        if topic.name == name:
            return json_response({**_topic_json(topic, stores), **(more or {})}, status=status)
    raise TopicNotFound(f'topic "{name}" does not exist', hint="See GET /v1/topics.", detail={"topic": name})
