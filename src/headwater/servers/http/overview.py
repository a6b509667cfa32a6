"""Routes of who looks at the whole: the log at a glance, pipelines, consumer groups of Kafka's clients."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Path, Request
from starlette.responses import Response

from headwater import calls
from headwater.calls import overview
from headwater.calls.overview import KafkaGroupOverview
from headwater.errors import PipelineNotFound
from headwater.model import PipelineStatus
from headwater.servers.http import responses
from headwater.servers.http.authorization import caller_of, decides, needs
from headwater.servers.http.cursors_and_subscriptions import shown_cursor
from headwater.servers.http.dependencies import answer, problems, router, served
from headwater.servers.http.errors import NotThere

routes = router("overview")

PipelineName = Annotated[str, Path(min_length=1, max_length=200, description="the pipeline's name")]


class Pace:
    """How many positions are drawn a second, from one look at the head to the next."""

    def __init__(self) -> None:
        self._seen: tuple[int, float] | None = None
        self._rate: float | None = None

    def at(self, head: int, now: float) -> float | None:
        """As of now. Looks that are less than half a second apart are one."""
        if self._seen is None:
            self._seen = (head, now)
        elif now - self._seen[1] >= 0.5:
            before, then = self._seen
            self._rate = max(0.0, (head - before) / (now - then))
            self._seen = (head, now)
        return self._rate


def _kafka(one: KafkaGroupOverview) -> dict[str, Any]:
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
    "/v1/overview", dependencies=[needs("describe", "log")], response_model=responses.Overview, responses=problems()
)
async def show_overview(request: Request) -> Response:
    """The log at a glance."""
    log = served(request).log
    state = await log.run(calls.log_state(), patience_seconds=5)
    publishers = await log.run(calls.publishers_in_flight(), patience_seconds=5)
    size = await log.run(overview.log_size(), patience_seconds=5)
    oldest = publishers[0] if publishers else None
    pace: Pace = request.app.state.pace
    return answer(
        {
            "head": state.drawn,
            "settled": state.settled,
            "epoch": state.epoch,
            "oldest_publisher": None
            if oldest is None
            else {"pid": oldest.pid, "age_seconds": None if oldest.age is None else oldest.age.total_seconds()},
            "topics": await log.run(overview.topic_count(), patience_seconds=5),
            "events_estimate": size.events_estimate,
            "rates": {"published_per_s": pace.at(state.drawn, time.monotonic())},
            "groups": [asdict(one) for one in await log.run(overview.group_lags(), patience_seconds=5)],
            "cursors": [shown_cursor(one) for one in await log.cursors()],
            "pipelines": [asdict(one) for one in await log.run(calls.pipeline_statuses(), patience_seconds=5)],
            "kafka_groups": [_kafka(one) for one in await log.run(overview.kafka_group_overview(), patience_seconds=5)],
            "segments": size.segments,
            "bytes": size.bytes,
            "retention": {"oldest": size.oldest},
            "streams": len(served(request).live.streams()),
        }
    )


@routes.get(
    "/v1/pipelines", dependencies=[needs("describe", "log")], response_model=responses.Pipelines, responses=problems()
)
async def list_pipelines(request: Request) -> Response:
    """Every pipeline that has run, as it stands."""
    found = await served(request).log.run(calls.pipeline_statuses(), patience_seconds=5)
    return answer({"pipelines": [asdict(one) for one in found]})


@routes.get(
    "/v1/pipelines/{name}",
    dependencies=[needs("describe", "log")],
    response_model=responses.Pipeline,
    responses=problems(404),
)
async def show_pipeline(request: Request, name: PipelineName) -> Response:
    """One pipeline as it stands."""
    return answer(asdict(await _pipeline(request, name)))


@routes.get(
    "/v1/pipelines/{name}/batches",
    dependencies=[needs("describe", "log")],
    response_model=responses.PipelineBatches,
    responses=problems(404),
)
async def list_batches(request: Request, name: PipelineName) -> Response:
    """The last 20 batches of a pipeline and tries that failed, the newest first."""
    await _pipeline(request, name)
    found = await served(request).log.run(calls.pipeline_batches(name), patience_seconds=5)
    return answer({"batches": [{**asdict(one), "seconds": (one.details or {}).get("seconds")} for one in found]})


async def _pipeline(request: Request, name: str) -> PipelineStatus:
    for one in await served(request).log.run(calls.pipeline_statuses(), patience_seconds=5):
        if one.name == name:
            return one
    raise PipelineNotFound(f'no pipeline "{name}" ever ran here', hint="See GET /v1/pipelines.")


@routes.get(
    "/v1/kafka/groups",
    dependencies=[decides("describe group, of each that is shown")],
    response_model=responses.KafkaGroups,
    responses=problems(),
)
async def list_kafka_groups(request: Request) -> Response:
    """Consumer groups of Kafka's clients, and how far behind they are."""
    caller = caller_of(request)
    found = await served(request).log.run(overview.kafka_group_overview(), patience_seconds=5)
    return answer({"groups": [_kafka(one) for one in found if caller.may("describe", "group", one.name)]})


@routes.get(
    "/v1/kafka/groups/{group}",
    dependencies=[needs("describe", "group", "group")],
    response_model=responses.KafkaOffsets,
    responses=problems(404),
)
async def show_kafka_group(request: Request, group: Annotated[str, Path(min_length=1, max_length=1000)]) -> Response:
    """How far a consumer group is in each partition."""
    found = await served(request).log.run(overview.kafka_group_offsets(group), patience_seconds=5)
    if found is None:
        raise NotThere(f'no client of Kafka has used the group "{group}"', detail={"group": group})
    return answer({"name": group, "offsets": [asdict(one) for one in found]})
