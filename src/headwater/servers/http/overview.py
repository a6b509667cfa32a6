"""Overview routes: log state, pipelines, Kafka consumer groups."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Path, Request
from starlette.responses import Response

from headwater.calls import log as log_calls
from headwater.calls import overview, pipeline_runs
from headwater.calls.overview import KafkaGroupOverview
from headwater.calls.pipeline_runs import PipelineStatus
from headwater.errors import PipelineNotFound
from headwater.servers.http import responses
from headwater.servers.http.authorization import checked_in_route, principal_of, requires
from headwater.servers.http.cursors import cursor_json
from headwater.servers.http.dependencies import context_of, json_response, problems, router
from headwater.servers.http.errors import NotFound

routes = router("overview")

PipelineName = Annotated[str, Path(min_length=1, max_length=200, description="the pipeline's name")]


class PublishRate:
    """Positions assigned per second, measured between two readings of the head."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._rate: float | None = None

    def update(self, head: int, now: float) -> float | None:
        """The rate with this reading. Readings less than half a second after the last are ignored."""
        if self._last is None:
            self._last = (head, now)
        elif now - self._last[1] >= 0.5:
            before, then = self._last
            self._rate = max(0.0, (head - before) / (now - then))
            self._last = (head, now)
        return self._rate


def _group_json(one: KafkaGroupOverview) -> dict[str, Any]:
    return {
        "name": one.name,
        "active": one.active,
        "generation": one.generation,
        "partitions": one.partitions,
        "lag": one.lag_events,
        "lag_is_more": one.lag_is_more,
        "committed_at": one.updated_at,
    }


@routes.get(
    "/v1/overview", dependencies=[requires("describe", "log")], response_model=responses.Overview, responses=problems()
)
async def show_overview(request: Request) -> Response:
    """An overview of the log and its consumers."""
    log = context_of(request).log
    state = await log.run(log_calls.log_state())
    publishers = await log.run(log_calls.publishers_in_flight())
    size = await log.run(overview.log_size())
    oldest = publishers[0] if publishers else None
    publish_rate: PublishRate = request.app.state.publish_rate
    return json_response(
        {
            "head": state.head,
            "stable": state.stable,
            "epoch": state.epoch,
            "oldest_publisher": None
            if oldest is None
            else {"pid": oldest.pid, "age_seconds": None if oldest.age is None else oldest.age.total_seconds()},
            "topics": await log.run(overview.topic_count()),
            "events_estimate": size.events_estimate,
            "rates": {"published_per_s": publish_rate.update(state.head, time.monotonic())},
            "queues": [asdict(one) for one in await log.run(overview.queue_lags())],
            "cursors": [cursor_json(one) for one in await log.cursors()],
            "pipelines": [asdict(one) for one in await log.run(pipeline_runs.pipeline_statuses())],
            "kafka_groups": [_group_json(one) for one in await log.run(overview.kafka_group_overview())],
            "segments": size.segments,
            "bytes": size.bytes,
            "retention": {"oldest": size.oldest},
            "streams": len(context_of(request).sse.streams()),
        }
    )


@routes.get(
    "/v1/pipelines",
    dependencies=[requires("describe", "log")],
    response_model=responses.Pipelines,
    responses=problems(),
)
async def list_pipelines(request: Request) -> Response:
    """List the pipelines that have run, with their state."""
    found = await context_of(request).log.run(pipeline_runs.pipeline_statuses())
    return json_response({"pipelines": [asdict(one) for one in found]})


@routes.get(
    "/v1/pipelines/{name}",
    dependencies=[requires("describe", "log")],
    response_model=responses.Pipeline,
    responses=problems(404),
)
async def show_pipeline(request: Request, name: PipelineName) -> Response:
    """Show the state of a pipeline."""
    return json_response(asdict(await _pipeline(request, name)))


@routes.get(
    "/v1/pipelines/{name}/batches",
    dependencies=[requires("describe", "log")],
    response_model=responses.PipelineBatches,
    responses=problems(404),
)
async def list_batches(request: Request, name: PipelineName) -> Response:
    """List the last 20 batches and failed attempts of a pipeline, newest first."""
    await _pipeline(request, name)
    found = await context_of(request).log.run(pipeline_runs.pipeline_batches(name))
    return json_response({"batches": [{**asdict(one), "seconds": (one.details or {}).get("seconds")} for one in found]})


async def _pipeline(request: Request, name: str) -> PipelineStatus:
    for one in await context_of(request).log.run(pipeline_runs.pipeline_statuses()):
        if one.name == name:
            return one
    raise PipelineNotFound(f'no pipeline "{name}" has run on this log', hint="See GET /v1/pipelines.")


@routes.get(
    "/v1/kafka/groups",
    dependencies=[checked_in_route("describe consumer, for each group in the list")],
    response_model=responses.KafkaGroups,
    responses=problems(),
)
async def list_kafka_groups(request: Request) -> Response:
    """List the Kafka consumer groups with their lag."""
    principal = principal_of(request)
    found = await context_of(request).log.run(overview.kafka_group_overview())
    return json_response(
        {"groups": [_group_json(one) for one in found if principal.may("describe", "consumer", one.name)]}
    )


@routes.get(
    "/v1/kafka/groups/{group}",
    dependencies=[requires("describe", "consumer", "group")],
    response_model=responses.KafkaOffsets,
    responses=problems(404),
)
async def show_kafka_group(request: Request, group: Annotated[str, Path(min_length=1, max_length=1000)]) -> Response:
    """Show the committed offsets of a Kafka consumer group."""
    found = await context_of(request).log.run(overview.kafka_group_offsets(group))
    if found is None:
        raise NotFound(f'consumer group "{group}" does not exist', detail={"group": group})
    return json_response({"name": group, "offsets": [asdict(one) for one in found]})
