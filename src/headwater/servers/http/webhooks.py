"""Routes of webhooks: where events go by HTTP, and a test of each. Who sends events out of the house administers."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request
from starlette.responses import Response

from headwater import calls
from headwater.calls import overview
from headwater.calls import webhooks as webhook_calls
from headwater.errors import GroupNotFound, InvalidRequest
from headwater.model import Webhook
from headwater.servers.http import responses
from headwater.servers.http.authorization import caller_of, needs
from headwater.servers.http.cursors_and_subscriptions import unread
from headwater.servers.http.dependencies import answer, problems, router, served, some
from headwater.servers.http.requests import BindingToMake, DryRun
from headwater.servers.http.webhook_models import (
    Reason,
    Tested,
    WebhookAnswer,
    WebhookChanges,
    WebhookList,
    WebhookName,
    WebhookToMake,
    WebhookWithSecret,
)
from headwater.webhooks.api import new_secret
from headwater.webhooks.deliver import send_test

routes = router("webhooks")


def _told(url: str) -> str:
    """A URL as the record of what was done has it: what comes after its path may be a secret."""
    return re.split("[?#]", url, maxsplit=1)[0]


def _shown(webhook: Webhook) -> dict[str, Any]:
    return {name: getattr(webhook, name) for name in WebhookAnswer.model_fields}


@routes.get("/v1/webhooks", dependencies=[needs("alter", "log")], response_model=WebhookList, responses=problems())
async def list_webhooks(request: Request) -> Response:
    """Every webhook."""
    return answer({"webhooks": [_shown(one) for one in await served(request).log.webhooks()]})


@routes.post(
    "/v1/webhooks",
    status_code=201,
    dependencies=[needs("alter", "log")],
    response_model=WebhookWithSecret,
    responses=problems(404, 409),
)
async def create_webhook(request: Request, body: WebhookToMake) -> Response:
    """Send events to a URL, by a queue group of the webhook's name. Without bindings, everything goes there."""
    log = served(request).log
    settings = body.model_dump(exclude={"name", "url", "bindings", "from_end"})
    told: dict[str, Any] = {
        "url": _told(body.url),
        "bindings": [one.model_dump(exclude_unset=True) for one in body.bindings],
    }
    if body.filter is not None:
        told |= {"filter": body.filter, "params": body.params}
        if body.bindings or not body.from_end:
            raise InvalidRequest("a webhook by filter has no bindings, and sends what is published from now on")
    async with log.audited(caller_of(request).account, "webhook.create", body.name, told) as connection:
        made = await log.create_webhook(body.name, body.url, from_end=body.from_end, connection=connection, **settings)
        for one in body.bindings or ([BindingToMake()] if body.filter is None else []):
            bind = calls.bind(
                made.group,
                topic=one.topic,
                pattern=one.pattern,
                headers=one.headers,
                type=one.type,
                from_position=one.from_position,
            )
            await log.run(bind, connection=connection)
    return answer({**_shown(made), "secret": made.secrets[0]}, status=201)


@routes.get(
    "/v1/webhooks/{webhook}",
    dependencies=[needs("alter", "log")],
    response_model=WebhookAnswer,
    responses=problems(404),
)
async def show_webhook(request: Request, webhook: WebhookName) -> Response:
    """One webhook."""
    return answer(_shown(await served(request).log.webhook(webhook)))


@routes.patch(
    "/v1/webhooks/{webhook}",
    dependencies=[needs("alter", "log")],
    response_model=WebhookAnswer,
    responses=problems(404),
)
async def change_webhook(request: Request, webhook: WebhookName, body: WebhookChanges) -> Response:
    """Change settings of a webhook. Whoever delivers it notices within seconds."""
    log = served(request).log
    changes = body.model_dump(exclude_unset=True)
    # What is sent along may be a secret.
    told = {name: value for name, value in changes.items() if name != "headers"}
    if body.url is not None:
        told["url"] = _told(body.url)
    async with log.audited(caller_of(request).account, "webhook.alter", webhook, told) as connection:
        return answer(_shown(await log.alter_webhook(webhook, connection=connection, **changes)))


@routes.delete(
    "/v1/webhooks/{webhook}",
    dependencies=[needs("alter", "log")],
    response_model=responses.Deleted,
    responses=problems(404),
)
async def delete_webhook(request: Request, webhook: WebhookName, dry_run: DryRun = False) -> Response:
    """Forget a webhook. Its group stays, with its dead letters and with what was not sent yet."""
    log = served(request).log
    group = (await log.webhook(webhook)).group
    reads = await log.run(overview.reading_topics(group), patience_seconds=5)
    if reads.missing:
        unsent = await log.run(overview.undone_contents(group), patience_seconds=5)
    else:
        unsent = await unread(log, group)
    if not dry_run:
        async with log.audited(caller_of(request).account, "webhook.delete", webhook, {}) as connection:
            if not await log.run(webhook_calls.delete_webhook(webhook), connection=connection):
                raise GroupNotFound(f'there is no webhook "{webhook}"', detail={"webhook": webhook})
    return answer({"deleted": not dry_run, **some(unsent)})


@routes.post(
    "/v1/webhooks/{webhook}/pause",
    dependencies=[needs("alter", "log")],
    response_model=WebhookAnswer,
    responses=problems(404),
)
async def pause_webhook(request: Request, webhook: WebhookName, body: Reason | None = None) -> Response:
    """Send nothing until resumed. What is under way is finished."""
    reason = None if body is None else body.reason
    return await _set(
        request, "webhook.pause", webhook, webhook_calls.set_webhook_state(webhook, "paused", reason=reason)
    )


@routes.post(
    "/v1/webhooks/{webhook}/resume",
    dependencies=[needs("alter", "log")],
    response_model=WebhookAnswer,
    responses=problems(404),
)
async def resume_webhook(request: Request, webhook: WebhookName) -> Response:
    """Send again, from where it was; also after its receiver had it disabled."""
    return await _set(request, "webhook.resume", webhook, webhook_calls.set_webhook_state(webhook, "active"))


@routes.post(
    "/v1/webhooks/{webhook}/secret",
    dependencies=[needs("alter", "log")],
    response_model=WebhookWithSecret,
    responses=problems(404),
)
async def rotate_secret(request: Request, webhook: WebhookName) -> Response:
    """Sign with a new secret, and with the one before it too, until the next rotation."""
    log = served(request).log
    call = webhook_calls.rotate_webhook_secret(webhook, new_secret(), keep=1)
    async with log.audited(caller_of(request).account, "webhook.rotate_secret", webhook, {}) as connection:
        changed = await log.run(call, connection=connection)
    return answer({**_shown(changed), "secret": changed.secrets[0]})


@routes.post(
    "/v1/webhooks/{webhook}/test",
    dependencies=[needs("alter", "log")],
    response_model=Tested,
    responses=problems(404),
)
async def test_webhook(request: Request, webhook: WebhookName) -> Response:
    """Send a signed event that is in no topic, now and once, whatever the webhook's state; says what came of it."""
    here = served(request)
    return answer(await send_test(here.log, webhook, allowed=here.opening.webhook_networks))


async def _set(request: Request, action: str, name: str, call: calls.Call[Webhook]) -> Response:
    log = served(request).log
    async with log.audited(caller_of(request).account, action, name, {}) as connection:
        return answer(_shown(await log.run(call, connection=connection)))
