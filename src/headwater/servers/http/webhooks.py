"""Webhook routes. They require `alter log`, because webhooks send events to other systems."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request
from starlette.responses import Response

from headwater.calls import Call, overview
from headwater.calls import queues as queue_calls
from headwater.calls import webhooks as webhook_calls
from headwater.errors import InvalidRequest, QueueNotFound
from headwater.servers.http import responses
from headwater.servers.http.authorization import principal_of, requires
from headwater.servers.http.dependencies import context_of, event_range, json_response, problems, router
from headwater.servers.http.requests import BindingCreate, DryRun
from headwater.servers.http.setting_fields import settings_of
from headwater.servers.http.sql_subscriptions import count_unread
from headwater.servers.http.webhook_models import (
    PauseReason,
    WebhookCreate,
    WebhookInfo,
    WebhookList,
    WebhookName,
    WebhookTestResult,
    WebhookUpdate,
    WebhookWithSecret,
)
from headwater.setting_definitions import changeable
from headwater.webhooks.api import new_secret
from headwater.webhooks.deliver import send_test
from headwater.webhooks.model import Webhook
from headwater.webhooks.settings import NEW_WEBHOOK_SETTINGS, WebhookSettings

routes = router("webhooks")


def _audited_url(url: str) -> str:
    """A URL for the audit log: its query and fragment, which may contain secrets, are removed."""
    return re.split("[?#]", url, maxsplit=1)[0]


def _webhook_json(webhook: Webhook) -> dict[str, Any]:
    return {name: getattr(webhook, name) for name in WebhookInfo.model_fields}


@routes.get("/v1/webhooks", dependencies=[requires("alter", "log")], response_model=WebhookList, responses=problems())
async def list_webhooks(request: Request) -> Response:
    """List the webhooks."""
    return json_response({"webhooks": [_webhook_json(one) for one in await context_of(request).log.webhooks()]})


@routes.post(
    "/v1/webhooks",
    status_code=201,
    dependencies=[requires("alter", "log")],
    response_model=WebhookWithSecret,
    responses=problems(404, 409),
)
async def create_webhook(request: Request, body: WebhookCreate) -> Response:
    """Create a webhook, with a queue of the same name. Without bindings, all events are sent."""
    log = context_of(request).log
    settings = settings_of(body, NEW_WEBHOOK_SETTINGS)
    detail: dict[str, Any] = {
        "url": _audited_url(body.url),
        "bindings": [one.model_dump(exclude_unset=True) for one in body.bindings],
    }
    if body.filter is not None:
        detail |= {"filter": body.filter, "params": body.params}
        if body.bindings or not body.from_end:
            raise InvalidRequest("filter cannot be combined with bindings or with from_end false")
    async with log.audited(principal_of(request).account, "webhook.create", body.name, detail) as connection:
        webhook = await log.create_webhook(
            body.name,
            body.url,
            filter=body.filter,
            params=body.params,
            from_end=body.from_end,
            connection=connection,
            **settings,
        )
        for one in body.bindings or ([BindingCreate()] if body.filter is None else []):
            bind = queue_calls.bind(
                webhook.queue,
                topic=one.topic,
                pattern=one.pattern,
                headers=one.headers,
                type=one.type,
                from_position=one.from_position,
            )
            await log.run(bind, connection=connection)
    return json_response({**_webhook_json(webhook), "secret": webhook.secrets[0]}, status=201)


@routes.get(
    "/v1/webhooks/{webhook}",
    dependencies=[requires("alter", "log")],
    response_model=WebhookInfo,
    responses=problems(404),
)
async def show_webhook(request: Request, webhook: WebhookName) -> Response:
    """Show a webhook."""
    return json_response(_webhook_json(await context_of(request).log.webhook(webhook)))


@routes.patch(
    "/v1/webhooks/{webhook}",
    dependencies=[requires("alter", "log")],
    response_model=WebhookInfo,
    responses=problems(404),
)
async def change_webhook(request: Request, webhook: WebhookName, body: WebhookUpdate) -> Response:
    """Change the settings of a webhook. They take effect within seconds."""
    log = context_of(request).log
    changes = settings_of(body, changeable(WebhookSettings))
    # Header values may be secrets.
    detail = {name: value for name, value in changes.items() if name != "headers"}
    if body.url is not None:
        detail["url"] = _audited_url(body.url)
    async with log.audited(principal_of(request).account, "webhook.alter", webhook, detail) as connection:
        altered = await log.alter_webhook(webhook, url=body.url, connection=connection, **changes)
        return json_response(_webhook_json(altered))


@routes.delete(
    "/v1/webhooks/{webhook}",
    dependencies=[requires("alter", "log")],
    response_model=responses.DeleteResult,
    responses=problems(404),
)
async def delete_webhook(request: Request, webhook: WebhookName, dry_run: DryRun = False) -> Response:
    """Delete a webhook. Its queue stays, with its dead letters and unsent events."""
    log = context_of(request).log
    queue = (await log.webhook(webhook)).queue
    reads = await log.run(overview.reading_topics(queue))
    if reads.missing:
        unsent = await log.run(overview.unfinished_contents(queue))
    else:
        unsent = await count_unread(log, queue)
    if not dry_run:
        async with log.audited(principal_of(request).account, "webhook.delete", webhook, {}) as connection:
            if not await log.run(webhook_calls.delete_webhook(webhook), connection=connection):
                raise QueueNotFound(f'webhook "{webhook}" does not exist', detail={"webhook": webhook})
    return json_response({"deleted": not dry_run, **event_range(unsent)})


@routes.post(
    "/v1/webhooks/{webhook}/pause",
    dependencies=[requires("alter", "log")],
    response_model=WebhookInfo,
    responses=problems(404),
)
async def pause_webhook(request: Request, webhook: WebhookName, body: PauseReason | None = None) -> Response:
    """Pause a webhook. Requests in progress are finished."""
    reason = None if body is None else body.reason
    return await _set(
        request, "webhook.pause", webhook, webhook_calls.set_webhook_state(webhook, "paused", reason=reason)
    )


@routes.post(
    "/v1/webhooks/{webhook}/resume",
    dependencies=[requires("alter", "log")],
    response_model=WebhookInfo,
    responses=problems(404),
)
async def resume_webhook(request: Request, webhook: WebhookName) -> Response:
    """Resume a paused or disabled webhook where it stopped."""
    return await _set(request, "webhook.resume", webhook, webhook_calls.set_webhook_state(webhook, "active"))


@routes.post(
    "/v1/webhooks/{webhook}/secret",
    dependencies=[requires("alter", "log")],
    response_model=WebhookWithSecret,
    responses=problems(404),
)
async def rotate_secret(request: Request, webhook: WebhookName) -> Response:
    """Create a new signing secret. The previous one stays valid until the next rotation."""
    log = context_of(request).log
    call = webhook_calls.rotate_webhook_secret(webhook, new_secret(), keep=1)
    async with log.audited(principal_of(request).account, "webhook.rotate_secret", webhook, {}) as connection:
        changed = await log.run(call, connection=connection)
    return json_response({**_webhook_json(changed), "secret": changed.secrets[0]})


@routes.post(
    "/v1/webhooks/{webhook}/test",
    dependencies=[requires("alter", "log")],
    response_model=WebhookTestResult,
    responses=problems(404),
)
async def test_webhook(request: Request, webhook: WebhookName) -> Response:
    """Send a signed test event once, whatever the webhook's state, and report the response."""
    context = context_of(request)
    options = context.options
    tested = await send_test(
        context.log, webhook, allowed=options.webhook_networks, cloud_events_source=options.cloud_events_source
    )
    return json_response(tested)


async def _set(request: Request, action: str, name: str, call: Call[Webhook]) -> Response:
    log = context_of(request).log
    async with log.audited(principal_of(request).account, action, name, {}) as connection:
        return json_response(_webhook_json(await log.run(call, connection=connection)))
