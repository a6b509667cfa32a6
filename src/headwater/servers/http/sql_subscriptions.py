"""SQL subscription routes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import Path, Query, Request
from starlette.responses import Response

from headwater.aio import AsyncHeadwater
from headwater.calls import log as log_calls
from headwater.calls import overview
from headwater.calls import subscriptions as subscription_calls
from headwater.errors import QueueNotFound
from headwater.servers.http import responses
from headwater.servers.http.authorization import checked_in_route, principal_of, requires
from headwater.servers.http.dependencies import context_of, event_range, json_response, problems, router
from headwater.servers.http.events import need_topics
from headwater.servers.http.requests import MAX_POSITION, DryRun, QueueName, SubscriptionCreate, seconds
from headwater.sql_subscriptions.model import Subscription

routes = router("SQL subscriptions")

# How many events a dry run reads to count those that a subscription has not received yet.
MAX_EXAMINED: Final = 10_000
BATCH_SIZE: Final = 1000


def _subscription_json(one: Subscription) -> dict[str, Any]:
    parts = asdict(one)
    parts["set_aside"] = parts.pop("broken")
    parts["expires_after_seconds"] = parts.pop("expires_after")
    return parts


@routes.get(
    "/v1/subscriptions",
    dependencies=[checked_in_route("describe consumer, for each queue in the list")],
    response_model=responses.Subscriptions,
    responses=problems(),
)
async def list_subscriptions(
    request: Request, queue: Annotated[str | None, Query(min_length=1, max_length=200)] = None
) -> Response:
    """List the SQL subscriptions of a queue, or of all queues; at most 1,000."""
    principal = principal_of(request)
    found = await context_of(request).log.subscriptions(queue)
    return json_response(
        {
            "subscriptions": [
                _subscription_json(one) for one in found if principal.may("describe", "consumer", one.queue)
            ]
        }
    )


@routes.post(
    "/v1/subscriptions",
    status_code=201,
    dependencies=[
        checked_in_route(
            "alter consumer {queue}, and read topic for each topic that the queue reads (read topic * if it reads all)"
        )
    ],
    response_model=responses.CreatedId,
    responses=problems(404),
)
async def subscribe(request: Request, body: SubscriptionCreate) -> Response:
    """Subscribe a queue to the events that match a SQL filter. Subscribing again with the same filter and parameters
    returns the existing subscription."""
    log, principal = context_of(request).log, principal_of(request)
    principal.need("alter", "consumer", body.queue)
    # An existing queue keeps its topics, whatever this request contains.
    reads = await log.run(overview.reading_topics(body.queue))
    need_topics(request, body.topics if reads.missing else reads.topics)
    call = subscription_calls.subscribe(
        body.queue,
        body.filter,
        body.params,
        expires_after=seconds(body.expires_after_seconds),
        from_position=body.from_position,
        topics=body.topics,
    )
    detail = body.model_dump(exclude_unset=True)
    async with log.audited(principal.account, "subscription.create", body.queue, detail) as connection:
        subscription_id = await log.run(call, connection=connection)
        detail["id"] = subscription_id
    return json_response({"id": subscription_id}, status=201)


@routes.delete(
    "/v1/subscriptions/{queue}/{id}",
    dependencies=[requires("alter", "consumer", "queue")],
    response_model=responses.DeleteResult,
    responses=problems(404),
)
async def unsubscribe(
    request: Request, queue: QueueName, id: Annotated[int, Path(ge=1, le=MAX_POSITION)], dry_run: DryRun = False
) -> Response:
    """Delete a SQL subscription."""
    log = context_of(request).log
    found = await log.run(overview.find_subscription(id))
    if found is None or found.queue != queue:
        raise QueueNotFound(f'queue "{queue}" has no subscription {id}', hint="See GET /v1/subscriptions.")
    missed = await count_unread(log, queue, id)
    if not dry_run:
        async with log.audited(principal_of(request).account, "subscription.delete", queue, {"id": id}) as connection:
            await log.run(subscription_calls.unsubscribe(id), connection=connection)
    return json_response({"deleted": not dry_run, **event_range(missed)})


async def count_unread(log: AsyncHeadwater, queue: str, id: int | None = None) -> overview.EventRange:
    """Count the next events of a queue that a subscription, or any of its subscriptions, matches."""
    stable = (await log.run(log_calls.log_state())).stable
    positions: list[int] = []
    after: int | None = None
    for _ in range(MAX_EXAMINED // BATCH_SIZE):
        reading = await log.read_next(queue, reader="count", after=after, batch_size=BATCH_SIZE, peek=True)
        positions += [one.event.position for one in reading.events if id is None or id in one.subscription_ids]
        after = reading.next_position
        if after >= stable:
            break
    is_more = after is not None and after < stable
    return overview.EventRange(len(positions), is_more, min(positions, default=None), max(positions, default=None))
