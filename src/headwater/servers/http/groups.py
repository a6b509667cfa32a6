"""Routes of queue groups: what they get, working on it, and what failed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Path, Query, Request
from starlette.responses import Response

from headwater import calls
from headwater.calls import overview
from headwater.errors import GroupNotFound, InvalidRequest
from headwater.model import Binding, Dead, Event, Group, GroupOverview, Lease, Outcome, Retry, Snooze
from headwater.servers.http import responses
from headwater.servers.http.authorization import caller_of, decides, needs
from headwater.servers.http.dependencies import answer, listed, problems, router, served, some
from headwater.servers.http.event_json import event_json
from headwater.servers.http.requests import (
    MAX_POSITION,
    AfterQuery,
    BindingToMake,
    Claim,
    DryRun,
    Extend,
    GroupChanges,
    GroupName,
    GroupToCreate,
    Letters,
    Rewind,
    Settle,
)

routes = router("groups")

LONGEST_WAIT_SECONDS: Final = 0.1
REAP_SECONDS: Final = 1.0


def _need_binding(request: Request, binding: BindingToMake) -> None:
    """Who may read a group may read what it is bound to: so who binds it must be allowed to."""
    caller_of(request).need("read", "topic", binding.topic or "*")


def _lease(group: str, token: int) -> Lease:
    """A lease as its holder proves it."""
    return Lease(group, token, datetime.now(UTC), ())


async def _overview(request: Request, name: str) -> GroupOverview:
    for group in await served(request).log.groups([name]):
        return group
    raise GroupNotFound(f'there is no group "{name}"', hint="See GET /v1/groups.", detail={"group": name})


def _shown(group: GroupOverview, settings: Group | None = None) -> dict[str, Any]:
    parts = asdict(group)
    if settings is not None:
        parts |= {
            "start_position": settings.start_position,
            "backoff_seconds": settings.backoff_seconds,
            "backoff_factor": settings.backoff_factor,
            "backoff_max_seconds": settings.backoff_max_seconds,
            "backoff_jitter": settings.backoff_jitter,
        }
    return parts


@routes.get(
    "/v1/groups",
    dependencies=[decides("describe group, of each that is shown")],
    response_model=responses.Groups,
    responses=problems(),
)
async def list_groups(request: Request) -> Response:
    """Every group with how far it has come."""
    log, caller = served(request).log, caller_of(request)
    found = [group for group in await log.groups() if caller.may("describe", "group", group.name)]
    return answer({"groups": [_shown(group) for group in found]})


@routes.post(
    "/v1/groups",
    status_code=201,
    dependencies=[decides("create group {name}, and read topic, of each that it is bound to")],
    response_model=responses.GroupDetail,
    responses=problems(404, 409),
)
async def create_group(request: Request, body: GroupToCreate) -> Response:
    """Create a queue group, with what it is bound to."""
    log, caller = served(request).log, caller_of(request)
    caller.need("create", "group", body.name)
    for binding in body.bindings:
        _need_binding(request, binding)
    if (body.after is not None) + (body.since is not None) + body.from_end > 1:
        raise InvalidRequest("say where to start once: after, since or from_end")
    start = body.after
    if body.since is not None:
        start = await log.run(calls.position_before(None, body.since), patience_seconds=5)
    elif body.from_end:
        start = (await log.run(calls.log_state(), patience_seconds=5)).settled
    settings = body.model_dump(
        include={
            "lease_seconds",
            "max_attempts",
            "backoff_seconds",
            "backoff_factor",
            "backoff_max_seconds",
            "backoff_jitter",
            "ordered_keys",
            "max_in_flight",
            "must_not_lose",
        }
    )
    async with log.audited(
        caller.account, "group.create", body.name, body.model_dump(exclude_unset=True)
    ) as connection:
        there = body.if_missing and await log.run(overview.group_exists(body.name), connection=connection)
        if not there:
            await log.run(calls.create_group(body.name, start_position=start, **settings), connection=connection)
            for one in body.bindings:
                await log.run(_bind(body.name, one), connection=connection)
    return await _one(request, body.name, status=201)


def _bind(group: str, one: BindingToMake) -> calls.Call[Binding]:
    return calls.bind(
        group,
        topic=one.topic,
        pattern=one.pattern,
        headers=one.headers,
        type=one.type,
        from_position=one.from_position,
    )


@routes.get(
    "/v1/groups/{group}",
    dependencies=[needs("describe", "group", "group")],
    response_model=responses.GroupDetail,
    responses=problems(404),
)
async def show_group(request: Request, group: GroupName) -> Response:
    """One group with its settings and how far it has come."""
    return await _one(request, group)


async def _one(request: Request, name: str, *, status: int = 200) -> Response:
    found = await _overview(request, name)
    return answer(_shown(found, await served(request).log.group(name)), status=status)


@routes.patch(
    "/v1/groups/{group}",
    dependencies=[needs("alter", "group", "group")],
    response_model=responses.GroupDetail,
    responses=problems(404),
)
async def change_group(request: Request, group: GroupName, body: GroupChanges) -> Response:
    """Change settings of a group."""
    log = served(request).log
    changes = body.model_dump(exclude_unset=True)
    async with log.audited(caller_of(request).account, "group.alter", group, changes) as connection:
        await log.run(calls.alter_group(group, **changes), connection=connection)
    return await _one(request, group)


@routes.delete(
    "/v1/groups/{group}",
    dependencies=[needs("delete", "group", "group")],
    response_model=responses.DeletedGroup,
    responses=problems(404),
)
async def delete_group(request: Request, group: GroupName, dry_run: DryRun = False) -> Response:
    """Forget a group with everything about it. The events stay in the log."""
    log = served(request).log
    found = await _overview(request, group)
    undone = overview.NOTHING
    if found.kind == "queue":
        undone = await log.run(overview.undone_contents(group), patience_seconds=5)
    if not dry_run:
        async with log.audited(
            caller_of(request).account, "group.delete", group, {"frontier": found.frontier}
        ) as connection:
            if not await log.run(calls.delete_group(group), connection=connection):
                raise GroupNotFound(f'there is no group "{group}"', detail={"group": group})
    return answer(
        {
            "deleted": not dry_run,
            **some(undone),
            "ready": found.ready,
            "ready_is_more": found.ready_is_more,
            "processing": found.processing,
            "dead": found.dead,
        }
    )


@routes.post(
    "/v1/groups/{group}/claim",
    dependencies=[needs("read", "group", "group")],
    response_model=responses.Lease,
    responses=problems(404),
)
async def claim(request: Request, group: GroupName, body: Claim) -> Response:
    """Claim events to work on, until the lease ends. Without any, wait for some as long as asked."""
    log = served(request).log
    deadline = time.monotonic() + body.wait_seconds
    reap_at = 0.0
    wait = 0.002
    while True:
        if time.monotonic() >= reap_at:
            # What the dead have left goes to the living.
            await log.run(calls.reap(group), patience_seconds=5)
            reap_at = time.monotonic() + REAP_SECONDS
        call = calls.claim(
            group, worker=body.worker, batch_size=body.batch_size, lease_seconds=body.lease_seconds, relaxed=True
        )
        lease = await log.run(call, patience_seconds=5)
        remaining = deadline - time.monotonic()
        if lease is not None or remaining <= 0:
            break
        if await request.is_disconnected():
            # Whoever asked is gone: what would be claimed now would wait for its lease to end.
            break
        await asyncio.sleep(min(wait, remaining))
        wait = min(wait * 2, LONGEST_WAIT_SECONDS)
    if lease is None:
        return listed("events", (), token=None, expires_at=None, alone=False)
    return listed(
        "events",
        (event_json(one.event, {"attempt": one.attempt}) for one in lease.events),
        token=str(lease.token),
        expires_at=lease.expires_at,
        alone=lease.alone,
    )


@routes.post(
    "/v1/groups/{group}/settle",
    dependencies=[needs("read", "group", "group")],
    response_model=responses.Settled,
    responses=problems(404, 409),
)
async def settle(request: Request, group: GroupName, body: Settle) -> Response:
    """Say how the events of a lease ended: done, failed, or given back."""
    outcomes: dict[int, Outcome] = {}
    if body.done != "all":
        outcomes |= dict.fromkeys(body.done)
    for one in body.failed:
        again = None if one.retry_in_seconds is None else timedelta(seconds=one.retry_in_seconds)
        outcomes[one.position] = Dead(one.error) if one.dead else Retry(again, one.error)
    for back in body.released:
        outcomes[back.position] = Snooze(timedelta(seconds=back.after_seconds))
    if not outcomes and body.done != "all":
        raise InvalidRequest("say what ended: done, failed or released", hint='For all of the lease: {"done": "all"}.')
    call = calls.settle(_lease(group, body.token), outcomes, rest_done=body.done == "all")
    await served(request).log.run(call, patience_seconds=5)
    return answer({"settled": True})


@routes.post(
    "/v1/groups/{group}/extend",
    dependencies=[needs("read", "group", "group")],
    response_model=responses.Extended,
    responses=problems(404, 409),
)
async def extend(request: Request, group: GroupName, body: Extend) -> Response:
    """Keep a lease for longer."""
    call = calls.extend_lease(_lease(group, body.token), lease_seconds=body.lease_seconds)
    return answer({"expires_at": await served(request).log.run(call, patience_seconds=5)})


@routes.post(
    "/v1/groups/{group}/pause",
    dependencies=[needs("alter", "group", "group")],
    response_model=responses.Paused,
    responses=problems(404),
)
async def pause(request: Request, group: GroupName) -> Response:
    """No more claims until resumed."""
    log = served(request).log
    async with log.audited(caller_of(request).account, "group.pause", group, {}) as connection:
        await log.run(calls.pause_group(group), connection=connection)
    return answer({"paused": True})


@routes.post(
    "/v1/groups/{group}/resume",
    dependencies=[needs("alter", "group", "group")],
    response_model=responses.Paused,
    responses=problems(404),
)
async def resume(request: Request, group: GroupName) -> Response:
    """Claims go on."""
    log = served(request).log
    async with log.audited(caller_of(request).account, "group.resume", group, {}) as connection:
        await log.run(calls.resume_group(group), connection=connection)
    return answer({"paused": False})


@routes.post(
    "/v1/groups/{group}/rewind",
    dependencies=[needs("alter", "group", "group")],
    response_model=responses.Rewound,
    responses=problems(404),
)
async def rewind(request: Request, group: GroupName, body: Rewind) -> Response:
    """Let a group begin anew after a position or since a time, back or forth."""
    log = served(request).log
    if (body.to is None) == (body.since is None):
        raise InvalidRequest("say where to once: to or since")
    to = body.to
    if body.since is not None:
        to = await log.run(calls.position_before(None, body.since), patience_seconds=5)
    assert to is not None
    claimed = await log.run(overview.frontier(group), patience_seconds=5)
    bound = await log.run(overview.bound_contents(group, after=to), patience_seconds=5)
    between = overview.bound_contents(group, after=min(to, claimed), up_to=max(to, claimed))
    passed = await log.run(between, patience_seconds=5)
    if not body.dry_run:
        async with log.audited(caller_of(request).account, "group.rewind", group, {"to": to}) as connection:
            await log.run(calls.rewind_group(group, to), connection=connection)
    return answer(
        {
            "to": to,
            "events": bound.events,
            "events_is_more": bound.events_is_more,
            "again": some(passed if to < claimed else overview.NOTHING),
            "skipped": some(passed if to > claimed else overview.NOTHING),
            "dry_run": body.dry_run,
        }
    )


@routes.get(
    "/v1/groups/{group}/bindings",
    dependencies=[needs("describe", "group", "group")],
    response_model=responses.Bindings,
    responses=problems(404),
)
async def list_bindings(request: Request, group: GroupName) -> Response:
    """What a group is and was bound to."""
    log = served(request).log
    await log.group(group)
    return answer({"bindings": [asdict(one) for one in await log.bindings(group)]})


@routes.post(
    "/v1/groups/{group}/bindings",
    status_code=201,
    dependencies=[decides("alter group {group}, and read topic {topic}; without a topic, read topic *")],
    response_model=responses.Binding,
    responses=problems(404),
)
async def bind(request: Request, group: GroupName, body: BindingToMake) -> Response:
    """Bind a group to events that fit every part given."""
    log, caller = served(request).log, caller_of(request)
    caller.need("alter", "group", group)
    _need_binding(request, body)
    detail = body.model_dump(exclude_unset=True)
    async with log.audited(caller.account, "group.bind", group, detail) as connection:
        made = await log.run(_bind(group, body), connection=connection)
        detail["id"] = made.id
    return answer(asdict(made), status=201)


@routes.delete(
    "/v1/groups/{group}/bindings/{id}",
    dependencies=[needs("alter", "group", "group")],
    response_model=responses.Unbound,
    responses=problems(404),
)
async def unbind(
    request: Request, group: GroupName, id: Annotated[int, Path(ge=1, le=2_147_483_647)], dry_run: DryRun = False
) -> Response:
    """End a binding after what the group has claimed. What comes later, and no other binding selects, it never gets."""
    log = served(request).log
    claimed = await log.run(overview.frontier(group), patience_seconds=5)
    bindings = await log.run(calls.bindings(group), patience_seconds=5)
    begins = next((one.from_position for one in bindings if one.id == id and one.to_position is None), None)
    if begins is None:
        raise GroupNotFound(f'group "{group}" has no binding {id}', hint="See GET /v1/groups/{group}/bindings.")
    to_position = max(claimed, begins)
    lost = await log.run(overview.bound_contents(group, after=to_position, only_binding=id), patience_seconds=5)
    if not dry_run:
        async with log.audited(caller_of(request).account, "group.unbind", group, {"id": id}) as connection:
            to_position = await log.run(calls.unbind(group, id), connection=connection)
    return answer({"to_position": to_position, **some(lost), "dry_run": dry_run})


@routes.get(
    "/v1/groups/{group}/leases",
    dependencies=[needs("describe", "group", "group")],
    response_model=responses.Leases,
    responses=problems(404),
)
async def list_leases(request: Request, group: GroupName) -> Response:
    """The leases that are out."""
    found = await served(request).log.run(overview.leases(group), patience_seconds=5)
    return answer({"leases": [{**asdict(one), "token": str(one.token)} for one in found]})


@routes.get(
    "/v1/groups/{group}/dead",
    dependencies=[needs("read", "group", "group")],
    response_model=responses.DeadLetters,
    responses=problems(404),
)
async def list_dead_letters(
    request: Request,
    group: GroupName,
    after: AfterQuery = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    handler: Annotated[str | None, Query(max_length=200, description="only of this subscriber's handler")] = None,
    subscription: Annotated[int | None, Query(ge=1, le=MAX_POSITION, description="only of this subscription")] = None,
) -> Response:
    """The events that a group has given up on, with every try that they had. A group that reads for subscriptions may
    have several of one event: they come together, beyond the limit if need be."""
    log = served(request).log
    letters = await log.dead_letters(
        group, handler=handler, subscription_id=subscription, after=after or 0, batch_size=limit
    )
    events: dict[int, Event] = {}
    if letters:
        topics = sorted({letter.topic for letter in letters if letter.topic is not None})
        known = {topic.name for topic in await log.topics()}
        call = overview.events_at([one.position for one in letters], topics=[name for name in topics if name in known])
        events = {event.position: event for event in await log.run(call, patience_seconds=5)}
    rows = []
    for letter in letters:
        told = {
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
        body = answer(told).body.decode()  # type: ignore[union-attr]
        rows.append(f'{body[:-1]},"event":{"null" if event is None else event_json(event)}}}')
    following = None
    if len(letters) >= limit:
        chosen = {"handler": handler, "subscription": subscription}
        parts = {name: value for name, value in chosen.items() if value is not None}
        following = "?" + urlencode({"after": letters[-1].position, "limit": limit, **parts})
    return listed("dead", rows, next=following)


@routes.post(
    "/v1/groups/{group}/dead/redrive",
    dependencies=[needs("alter", "group", "group")],
    response_model=responses.Counted,
    responses=problems(404),
)
async def redrive(request: Request, group: GroupName, body: Letters) -> Response:
    """Give dead letters a fresh set of tries."""
    call = calls.redrive(group, positions=body.meant(), handler=body.handler, subscription_id=body.subscription)
    return await _letters(request, group, body, "group.redrive", call)


@routes.post(
    "/v1/groups/{group}/dead/discard",
    dependencies=[needs("alter", "group", "group")],
    response_model=responses.Counted,
    responses=problems(404),
)
async def discard(request: Request, group: GroupName, body: Letters) -> Response:
    """Drop dead letters for good. The events stay in the log."""
    call = calls.discard(group, positions=body.meant(), handler=body.handler, subscription_id=body.subscription)
    return await _letters(request, group, body, "group.discard", call)


async def _letters(request: Request, group: GroupName, body: Letters, action: str, call: calls.Call[int]) -> Response:
    log = served(request).log
    counted = overview.dead_letter_count(
        group, positions=body.meant(), handler=body.handler, subscription_id=body.subscription
    )
    meant = await log.run(counted, patience_seconds=5)
    count = meant.events
    if not body.dry_run:
        detail: dict[str, Any] = {"positions": "all" if body.all else (body.positions or [])[:1000]}
        async with log.audited(caller_of(request).account, action, group, detail) as connection:
            detail["count"] = count = await log.run(call, connection=connection)
    return answer({"count": count, "first": meant.first_position, "last": meant.last_position, "dry_run": body.dry_run})
