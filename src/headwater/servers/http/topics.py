"""Routes of topics."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import Request
from starlette.responses import Response

from headwater import calls, model
from headwater.calls import overview
from headwater.errors import InvalidRequest, TopicNotFound
from headwater.servers.http import responses
from headwater.servers.http.authorization import caller_of, decides, needs
from headwater.servers.http.dependencies import answer, problems, router, served, some
from headwater.servers.http.requests import DryRun, TopicChanges, TopicName, TopicToCreate, seconds

routes = router("topics")

_SETTINGS = ("kind", "partitions", "max_payload_bytes", "max_header_bytes", "created_at", "expired_to")


def _shown(topic: model.TopicOverview, stores: frozenset[str]) -> dict[str, Any]:
    return {
        "name": topic.name,
        "event_store": topic.name in stores,
        "retention_seconds": None if topic.retention is None else topic.retention.total_seconds(),
        **{name: getattr(topic, name) for name in _SETTINGS},
        "first_position": topic.first_position,
        "last_position": topic.last_position,
        "last_published_at": topic.last_published_at,
    }


@routes.get(
    "/v1/topics",
    dependencies=[decides("describe topic, of each that is shown")],
    response_model=responses.Topics,
    responses=problems(),
)
async def list_topics(request: Request) -> Response:
    """Every topic with what it holds."""
    log, caller = served(request).log, caller_of(request)
    stores = await log.run(overview.event_stores(), patience_seconds=5)
    found = [topic for topic in await log.topics() if caller.may("describe", "topic", topic.name)]
    return answer({"topics": [_shown(topic, stores) for topic in found]})


@routes.post(
    "/v1/topics",
    status_code=201,
    dependencies=[decides("create topic {name}, or create log")],
    response_model=responses.Topic,
    responses=problems(409),
)
async def create_topic(request: Request, body: TopicToCreate) -> Response:
    """Create a topic, or an event store. With `if_missing`, one that is there is left as it is."""
    log, caller = served(request).log, caller_of(request)
    if not caller.may("create", "log", "*"):
        caller.need("create", "topic", body.name)
    limits = {"max_payload_bytes": body.max_payload_bytes, "max_header_bytes": body.max_header_bytes}
    if body.event_store and (body.partitions != 1 or body.retention_seconds is not None):
        raise InvalidRequest("an event store has one partition, and its events are kept")
    async with log.audited(
        caller.account, "topic.create", body.name, body.model_dump(exclude_unset=True)
    ) as connection:
        if body.event_store:
            await log.run(
                calls.create_event_store(body.name, if_missing=body.if_missing, **limits), connection=connection
            )
        else:
            await log.create_topic(
                body.name,
                kind=body.kind,
                partitions=body.partitions,
                retention=seconds(body.retention_seconds),
                if_missing=body.if_missing,
                connection=connection,
                **limits,
            )
    return await _one(request, body.name, status=201)


@routes.get(
    "/v1/topics/{topic}",
    dependencies=[needs("describe", "topic", "topic")],
    response_model=responses.Topic,
    responses=problems(404),
)
async def show_topic(request: Request, topic: TopicName) -> Response:
    """One topic with what it holds."""
    return await _one(request, topic)


@routes.patch(
    "/v1/topics/{topic}",
    dependencies=[needs("alter", "topic", "topic")],
    response_model=responses.ChangedTopic,
    responses=problems(404),
)
async def change_topic(request: Request, topic: TopicName, body: TopicChanges) -> Response:
    """Change settings of a topic. Events that are older than a new retention go with the next upkeep, or when their
    segment is closed."""
    log = served(request).log
    older = overview.NOTHING
    if body.retention_seconds is not None:
        since = datetime.now(UTC) - timedelta(seconds=body.retention_seconds)
        up_to = await log.run(calls.position_before([topic], since), patience_seconds=5)
        older = await log.run(overview.topic_contents(topic, up_to=up_to), patience_seconds=5)
    told = {**some(older), "dry_run": body.dry_run}
    if body.dry_run:
        return await _one(request, topic, told)
    call = calls.alter_topic(
        topic,
        partitions=body.partitions,
        retention=seconds(body.retention_seconds),
        keep_forever="retention_seconds" in body.model_fields_set and body.retention_seconds is None,
        max_payload_bytes=body.max_payload_bytes,
        max_header_bytes=body.max_header_bytes,
    )
    changes = body.model_dump(exclude_unset=True, exclude={"dry_run"})
    async with log.audited(caller_of(request).account, "topic.alter", topic, changes) as connection:
        await log.run(call, connection=connection)
    return await _one(request, topic, told)


@routes.delete(
    "/v1/topics/{topic}",
    dependencies=[needs("delete", "topic", "topic")],
    response_model=responses.Deleted,
    responses=problems(404),
)
async def delete_topic(request: Request, topic: TopicName, dry_run: DryRun = False) -> Response:
    """Delete a topic with its events."""
    log = served(request).log
    held = await log.run(overview.topic_contents(topic), patience_seconds=5)
    if not dry_run:
        detail = {"last_position": held.last_position}
        async with log.audited(caller_of(request).account, "topic.delete", topic, detail) as connection:
            await log.run(calls.delete_topic(topic), connection=connection)
    return answer({"deleted": not dry_run, **some(held)})


async def _one(request: Request, name: str, beside: Mapping[str, Any] | None = None, *, status: int = 200) -> Response:
    log = served(request).log
    stores = await log.run(overview.event_stores(), patience_seconds=5)
    for topic in await log.topics():
        if topic.name == name:
            return answer({**_shown(topic, stores), **(beside or {})}, status=status)
    raise TopicNotFound(f'there is no topic "{name}"', hint="See GET /v1/topics.", detail={"topic": name})
