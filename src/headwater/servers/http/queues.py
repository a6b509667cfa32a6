"""Queue routes: settings, bindings, claiming and settling events, dead letters."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Path, Query, Request
from starlette.responses import Response

from headwater.calls import Call, overview
from headwater.calls import log as log_calls
from headwater.calls import queues as queue_calls
from headwater.calls import reading as reading_calls
from headwater.errors import InvalidRequest, QueueNotFound
from headwater.log.event_json import event_json
from headwater.log.model import Event
from headwater.queue.model import Binding, Dead, Lease, Outcome, Queue, QueueOverview, Retry, Snooze
from headwater.queue.settings import QueueSettings
from headwater.servers.http import responses
from headwater.servers.http.authorization import checked_in_route, principal_of, requires
from headwater.servers.http.dependencies import context_of, event_range, json_response, list_response, problems, router
from headwater.servers.http.requests import (
    MAX_POSITION,
    AfterQuery,
    BindingCreate,
    ClaimRequest,
    DeadLetterSelection,
    DryRun,
    ExtendRequest,
    QueueCreate,
    QueueName,
    QueueUpdate,
    RewindRequest,
    SettleRequest,
)
from headwater.servers.http.setting_fields import settings_of
from headwater.setting_definitions import changeable, definitions

routes = router("queues")

# How long a waiting claim waits at most before it claims again, whether or not it was woken.
MAX_CLAIM_WAIT_SECONDS: Final = 1.0


def _need_binding(request: Request, binding: BindingCreate) -> None:
    """Readers of a queue read its bound topics, so binding requires permission to read the topic."""
    principal_of(request).need("read", "topic", binding.topic or "*")


def _lease(queue: str, token: int) -> Lease:
    """A lease that is identified by its token alone."""
    return Lease(queue, token, datetime.now(UTC), ())


async def _overview(request: Request, name: str) -> QueueOverview:
    for queue in await context_of(request).log.queues([name]):
        return queue
    raise QueueNotFound(f'queue "{name}" does not exist', hint="See GET /v1/queues.", detail={"queue": name})


def _queue_json(queue: QueueOverview, settings: Queue | None = None) -> dict[str, Any]:
    more = {} if settings is None else {"start_position": settings.start_position}
    return {name: getattr(queue, name) for name in responses.Queue.model_fields} | more


@routes.get(
    "/v1/queues",
    dependencies=[checked_in_route("describe consumer, for each queue in the list")],
    response_model=responses.Queues,
    responses=problems(),
)
async def list_queues(request: Request) -> Response:
    """List the queues with their state and lag."""
    log, principal = context_of(request).log, principal_of(request)
    found = [queue for queue in await log.queues() if principal.may("describe", "consumer", queue.name)]
    return json_response({"queues": [_queue_json(queue) for queue in found]})


@routes.post(
    "/v1/queues",
    status_code=201,
    dependencies=[checked_in_route("create consumer {name}, and read topic for each bound topic")],
    response_model=responses.QueueDetail,
    responses=problems(404, 409),
)
async def create_queue(request: Request, body: QueueCreate) -> Response:
    """Create a queue with its bindings."""
    log, principal = context_of(request).log, principal_of(request)
    principal.need("create", "consumer", body.name)
    for binding in body.bindings:
        _need_binding(request, binding)
    if (body.after is not None) + (body.since is not None) + body.from_end > 1:
        raise InvalidRequest("give only one of after, since and from_end")
    start = body.after
    if body.since is not None:
        start = await log.run(reading_calls.position_before(None, body.since))
    elif body.from_end:
        start = (await log.run(log_calls.log_state())).stable
    settings = settings_of(body, definitions(QueueSettings))
    async with log.audited(
        principal.account, "queue.create", body.name, body.model_dump(exclude_unset=True)
    ) as connection:
        exists = body.if_missing and await log.run(overview.queue_exists(body.name), connection=connection)
        if not exists:
            await log.run(queue_calls.create_queue(body.name, start_position=start, **settings), connection=connection)
            for one in body.bindings:
                await log.run(_bind(body.name, one), connection=connection)
    return await _queue_response(request, body.name, status=201)


def _bind(queue: str, one: BindingCreate) -> Call[Binding]:
    return queue_calls.bind(
        queue,
        topic=one.topic,
        pattern=one.pattern,
        headers=one.headers,
        type=one.type,
        from_position=one.from_position,
    )


@routes.get(
    "/v1/queues/{queue}",
    dependencies=[requires("describe", "consumer", "queue")],
    response_model=responses.QueueDetail,
    responses=problems(404),
)
async def show_queue(request: Request, queue: QueueName) -> Response:
    """Show a queue with its settings, state and lag."""
    return await _queue_response(request, queue)


async def _queue_response(request: Request, name: str, *, status: int = 200) -> Response:
    found = await _overview(request, name)
    return json_response(_queue_json(found, await context_of(request).log.queue(name)), status=status)


@routes.patch(
    "/v1/queues/{queue}",
    dependencies=[requires("alter", "consumer", "queue")],
    response_model=responses.QueueDetail,
    responses=problems(404),
)
async def change_queue(request: Request, queue: QueueName, body: QueueUpdate) -> Response:
    """Change the settings of a queue."""
    log = context_of(request).log
    changes = settings_of(body, changeable(QueueSettings))
    async with log.audited(principal_of(request).account, "queue.alter", queue, changes) as connection:
        await log.run(queue_calls.alter_queue(queue, **changes), connection=connection)
    return await _queue_response(request, queue)


@routes.delete(
    "/v1/queues/{queue}",
    dependencies=[requires("delete", "consumer", "queue")],
    response_model=responses.QueueDeleteResult,
    responses=problems(404),
)
async def delete_queue(request: Request, queue: QueueName, dry_run: DryRun = False) -> Response:
    """Delete a queue with its leases, retries and dead letters. The events stay in the log."""
    log = context_of(request).log
    found = await _overview(request, queue)
    unfinished = overview.NOTHING
    if found.kind == "bindings":
        unfinished = await log.run(overview.unfinished_contents(queue))
    if not dry_run:
        async with log.audited(
            principal_of(request).account, "queue.delete", queue, {"claimed_position": found.claimed_position}
        ) as connection:
            if not await log.run(queue_calls.delete_queue(queue), connection=connection):
                raise QueueNotFound(f'queue "{queue}" does not exist', detail={"queue": queue})
    return json_response(
        {
            "deleted": not dry_run,
            **event_range(unfinished),
            "ready": found.ready,
            "ready_is_more": found.ready_is_more,
            "processing": found.processing,
            "dead": found.dead,
        }
    )


@routes.post(
    "/v1/queues/{queue}/claim",
    dependencies=[requires("read", "consumer", "queue")],
    response_model=responses.Lease,
    responses=problems(404),
)
async def claim(request: Request, queue: QueueName, body: ClaimRequest) -> Response:
    """Lease events to a worker. If none are ready, wait for up to `wait_seconds`."""
    log = context_of(request).log
    deadline = time.monotonic() + body.wait_seconds
    waiter = log.watcher.waiter(queue=queue)
    # Return the events of expired leases to the queue. The watcher does it from now on.
    await log.run(queue_calls.reap(queue))
    call = queue_calls.claim(
        queue, worker=body.worker, batch_size=body.batch_size, lease_seconds=body.lease_seconds, relaxed=True
    )
    lease = await log.run(call)
    while lease is None and (remaining := deadline - time.monotonic()) > 0:
        await waiter.wait(min(remaining, MAX_CLAIM_WAIT_SECONDS))
        if await request.is_disconnected():
            # The client is gone: events claimed now would be blocked until the lease expires.
            break
        lease = await log.run(call)
    if lease is None:
        return list_response("events", (), token=None, expires_at=None, isolated=False)
    return list_response(
        "events",
        (event_json(one.event, {"attempt": one.attempt}) for one in lease.events),
        token=str(lease.token),
        expires_at=lease.expires_at,
        isolated=lease.isolated,
    )


@routes.post(
    "/v1/queues/{queue}/settle",
    dependencies=[requires("read", "consumer", "queue")],
    response_model=responses.SettleResult,
    responses=problems(404, 409),
)
async def settle(request: Request, queue: QueueName, body: SettleRequest) -> Response:
    """Settle the events of a lease: done, failed, or released."""
    outcomes: dict[int, Outcome] = {}
    if body.done != "all":
        outcomes |= dict.fromkeys(body.done)
    for one in body.failed:
        delay = None if one.retry_in_seconds is None else timedelta(seconds=one.retry_in_seconds)
        outcomes[one.position] = Dead(one.error) if one.dead else Retry(delay, one.error)
    for released in body.released:
        outcomes[released.position] = Snooze(timedelta(seconds=released.after_seconds))
    if not outcomes and body.done != "all":
        raise InvalidRequest(
            "give at least one of done, failed and released", hint='To settle the whole lease: {"done": "all"}.'
        )
    call = queue_calls.settle(_lease(queue, body.token), outcomes, rest_done=body.done == "all")
    await context_of(request).log.run(call)
    return json_response({"settled": True})


@routes.post(
    "/v1/queues/{queue}/extend",
    dependencies=[requires("read", "consumer", "queue")],
    response_model=responses.ExtendResult,
    responses=problems(404, 409),
)
async def extend(request: Request, queue: QueueName, body: ExtendRequest) -> Response:
    """Extend a lease."""
    call = queue_calls.extend_lease(_lease(queue, body.token), lease_seconds=body.lease_seconds)
    return json_response({"expires_at": await context_of(request).log.run(call)})


@routes.post(
    "/v1/queues/{queue}/pause",
    dependencies=[requires("alter", "consumer", "queue")],
    response_model=responses.PauseState,
    responses=problems(404),
)
async def pause(request: Request, queue: QueueName) -> Response:
    """Pause a queue: no events are leased until it is resumed."""
    log = context_of(request).log
    async with log.audited(principal_of(request).account, "queue.pause", queue, {}) as connection:
        await log.run(queue_calls.pause_queue(queue), connection=connection)
    return json_response({"paused": True})


@routes.post(
    "/v1/queues/{queue}/resume",
    dependencies=[requires("alter", "consumer", "queue")],
    response_model=responses.PauseState,
    responses=problems(404),
)
async def resume(request: Request, queue: QueueName) -> Response:
    """Resume a paused queue."""
    log = context_of(request).log
    async with log.audited(principal_of(request).account, "queue.resume", queue, {}) as connection:
        await log.run(queue_calls.resume_queue(queue), connection=connection)
    return json_response({"paused": False})


@routes.post(
    "/v1/queues/{queue}/rewind",
    dependencies=[requires("alter", "consumer", "queue")],
    response_model=responses.RewindResult,
    responses=problems(404),
)
async def rewind(request: Request, queue: QueueName, body: RewindRequest) -> Response:
    """Move a queue to a position or a time, back or forward. Its leases are revoked; events after the position are
    delivered (again)."""
    log = context_of(request).log
    if (body.to is None) == (body.since is None):
        raise InvalidRequest("give exactly one of to and since")
    to = body.to
    if body.since is not None:
        to = await log.run(reading_calls.position_before(None, body.since))
    assert to is not None
    claimed = await log.run(overview.claimed_position(queue))
    bound = await log.run(overview.bound_contents(queue, after=to))
    between = overview.bound_contents(queue, after=min(to, claimed), up_to=max(to, claimed))
    passed = await log.run(between)
    if not body.dry_run:
        async with log.audited(principal_of(request).account, "queue.rewind", queue, {"to": to}) as connection:
            await log.run(queue_calls.rewind_queue(queue, to), connection=connection)
    return json_response(
        {
            "to": to,
            "events": bound.events,
            "events_is_more": bound.events_is_more,
            "again": event_range(passed if to < claimed else overview.NOTHING),
            "skipped": event_range(passed if to > claimed else overview.NOTHING),
            "dry_run": body.dry_run,
        }
    )


@routes.get(
    "/v1/queues/{queue}/bindings",
    dependencies=[requires("describe", "consumer", "queue")],
    response_model=responses.Bindings,
    responses=problems(404),
)
async def list_bindings(request: Request, queue: QueueName) -> Response:
    """List the current and former bindings of a queue."""
    log = context_of(request).log
    await log.queue(queue)
    return json_response({"bindings": [asdict(one) for one in await log.bindings(queue)]})


@routes.post(
    "/v1/queues/{queue}/bindings",
    status_code=201,
    dependencies=[
        checked_in_route("alter consumer {queue}, and read topic {topic} (read topic * if no topic is given)")
    ],
    response_model=responses.Binding,
    responses=problems(404),
)
async def bind(request: Request, queue: QueueName, body: BindingCreate) -> Response:
    """Bind a queue to the events that match every given field."""
    log, principal = context_of(request).log, principal_of(request)
    principal.need("alter", "consumer", queue)
    _need_binding(request, body)
    detail = body.model_dump(exclude_unset=True)
    async with log.audited(principal.account, "queue.bind", queue, detail) as connection:
        binding = await log.run(_bind(queue, body), connection=connection)
        detail["id"] = binding.id
    return json_response(asdict(binding), status=201)


@routes.delete(
    "/v1/queues/{queue}/bindings/{id}",
    dependencies=[requires("alter", "consumer", "queue")],
    response_model=responses.UnbindResult,
    responses=problems(404),
)
async def unbind(
    request: Request, queue: QueueName, id: Annotated[int, Path(ge=1, le=2_147_483_647)], dry_run: DryRun = False
) -> Response:
    """End a binding after the claimed position. Later events that no other binding selects are not delivered."""
    log = context_of(request).log
    claimed = await log.run(overview.claimed_position(queue))
    bindings = await log.run(queue_calls.bindings(queue))
    from_position = next((one.from_position for one in bindings if one.id == id and one.to_position is None), None)
    if from_position is None:
        raise QueueNotFound(f'queue "{queue}" has no binding {id}', hint="See GET /v1/queues/{queue}/bindings.")
    to_position = max(claimed, from_position)
    missed = await log.run(overview.bound_contents(queue, after=to_position, only_binding=id))
    if not dry_run:
        async with log.audited(principal_of(request).account, "queue.unbind", queue, {"id": id}) as connection:
            to_position = await log.run(queue_calls.unbind(queue, id), connection=connection)
    return json_response({"to_position": to_position, **event_range(missed), "dry_run": dry_run})


@routes.get(
    "/v1/queues/{queue}/leases",
    dependencies=[requires("describe", "consumer", "queue")],
    response_model=responses.Leases,
    responses=problems(404),
)
async def list_leases(request: Request, queue: QueueName) -> Response:
    """List the active leases."""
    found = await context_of(request).log.run(overview.leases(queue))
    return json_response({"leases": [{**asdict(one), "token": str(one.token)} for one in found]})


@routes.get(
    "/v1/queues/{queue}/dead",
    dependencies=[requires("read", "consumer", "queue")],
    response_model=responses.DeadLetters,
    responses=problems(404),
)
async def list_dead_letters(
    request: Request,
    queue: QueueName,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    handler: Annotated[
        str | None, Query(max_length=200, description="only dead letters of this subscriber's handler")
    ] = None,
    subscription: Annotated[
        int | None, Query(ge=1, le=MAX_POSITION, description="only dead letters of this subscription")
    ] = None,
) -> Response:
    """List the dead letters of a queue with the history of their attempts. A queue with subscriptions may have several
    for one event: these are returned together, beyond the limit if necessary."""
    log = context_of(request).log
    letters = await log.dead_letters(
        queue, handler=handler, subscription_id=subscription, after=after or 0, batch_size=limit
    )
    events: dict[int, Event] = {}
    if letters:
        topics = sorted({letter.topic for letter in letters if letter.topic is not None})
        known = {topic.name for topic in await log.topics()}
        call = overview.events_at([one.position for one in letters], topics=[name for name in topics if name in known])
        events = {event.position: event for event in await log.run(call)}
    rows = []
    for letter in letters:
        fields = {
            "position": letter.position,
            "topic": letter.topic,
            "attempts": letter.attempts,
            "error": letter.last_error,
            "history": letter.history,
            "died_at": letter.died_at,
            "subscription": letter.subscription_id,
            "handler": letter.handler,
        }
        event = events.get(letter.position)
        body = json_response(fields).body.decode()  # type: ignore[union-attr]
        rows.append(f'{body[:-1]},"event":{"null" if event is None else event_json(event)}}}')
    next_page = None
    if len(letters) >= limit:
        chosen = {"handler": handler, "subscription": subscription}
        parts = {name: value for name, value in chosen.items() if value is not None}
        next_page = "?" + urlencode({"after": letters[-1].position, "limit": limit, **parts})
    return list_response("dead", rows, next=next_page)


@routes.post(
    "/v1/queues/{queue}/dead/redrive",
    dependencies=[requires("alter", "consumer", "queue")],
    response_model=responses.DeadLetterCount,
    responses=problems(404),
)
async def redrive(request: Request, queue: QueueName, body: DeadLetterSelection) -> Response:
    """Redrive dead letters: return them to the queue with a new set of attempts."""
    call = queue_calls.redrive(
        queue, positions=body.selected(), handler=body.handler, subscription_id=body.subscription
    )
    return await _apply(request, queue, body, "queue.redrive", call)


@routes.post(
    "/v1/queues/{queue}/dead/discard",
    dependencies=[requires("alter", "consumer", "queue")],
    response_model=responses.DeadLetterCount,
    responses=problems(404),
)
async def discard(request: Request, queue: QueueName, body: DeadLetterSelection) -> Response:
    """Delete dead letters. The events stay in the log."""
    call = queue_calls.discard(
        queue, positions=body.selected(), handler=body.handler, subscription_id=body.subscription
    )
    return await _apply(request, queue, body, "queue.discard", call)


async def _apply(
    request: Request, queue: QueueName, body: DeadLetterSelection, action: str, call: Call[int]
) -> Response:
    log = context_of(request).log
    counted = overview.dead_letter_count(
        queue, positions=body.selected(), handler=body.handler, subscription_id=body.subscription
    )
    selected = await log.run(counted)
    count = selected.events
    if not body.dry_run:
        detail: dict[str, Any] = {"positions": "all" if body.all else (body.positions or [])[:1000]}
        async with log.audited(principal_of(request).account, action, queue, detail) as connection:
            detail["count"] = count = await log.run(call, connection=connection)
    return json_response(
        {"count": count, "first": selected.first_position, "last": selected.last_position, "dry_run": body.dry_run}
    )
