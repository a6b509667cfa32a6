"""The webhook methods of the client: create, list, change and delete. `headwater serve` sends the requests."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import datetime
from typing import Any, Unpack

from headwater.calls import overview
from headwater.calls import queues as queue_calls
from headwater.calls import subscriptions as subscription_calls
from headwater.calls import webhooks as webhook_calls
from headwater.database.caller_connection import AsyncCallerConnection
from headwater.database.connection import CallRunner, Topics, as_names
from headwater.errors import InvalidRequest, QueueExists
from headwater.queue.settings import QueueSettings
from headwater.setting_definitions import checked, values
from headwater.webhooks.model import Webhook
from headwater.webhooks.settings import (
    NEW_WEBHOOK_SETTINGS,
    WEBHOOK_QUEUE,
    NewWebhookSettings,
    WebhookChanges,
    queue_part,
    webhook_part,
)


def new_secret() -> str:
    """A new signing secret in the format of Standard Webhooks."""
    return f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"


class WebhookApi(CallRunner):
    """Webhooks: queues whose events are sent to a URL."""

    async def create_webhook(
        self,
        name: str,
        url: str,
        topics: Topics = None,
        *,
        queue: str | None = None,
        filter: str | None = None,
        params: Mapping[str, Any] | None = None,
        after: int | None = None,
        since: datetime | None = None,
        from_end: bool = False,
        secret: str | None = None,
        connection: AsyncCallerConnection | None = None,
        **settings: Unpack[NewWebhookSettings],
    ) -> Webhook:
        """Send events to a URL. There are three sources:

        - topics: a queue with the webhook's name is created, at the beginning of the log, after a position, since a
          time, or at the end;
        - an existing queue;
        - a SQL filter with parameters (see subscribe): from now on, after a position, or since a time.

        `secret` (generated if not given) signs the requests. `body`: 'envelope' is JSON with everything about the
        event, 'raw' is only its payload, 'cloudevents-structured' and 'cloudevents-binary' are a CloudEvent.
        `client_errors`: whether a 4xx response means 'retry' or 'dead'. The other settings change the queue.
        """
        own_queue = queue is None
        ordered_keys = settings.get("ordered_keys")
        if not own_queue and (topics is not None or after is not None or since is not None or from_end or ordered_keys):
            raise InvalidRequest(
                "topics, start position and ordered_keys cannot be combined with an existing queue",
                hint="Leave out queue to create one, or change the bindings of the queue.",
            )
        if filter is not None and (not own_queue or ordered_keys):
            raise InvalidRequest(
                "filter cannot be combined with queue or ordered_keys",
                hint="Leave out queue and ordered_keys, or use a queue with bindings instead of a filter.",
            )
        if filter is None and params is not None:
            raise InvalidRequest("params require a filter")
        given = checked(NEW_WEBHOOK_SETTINGS, settings)
        of_webhook, of_queue = webhook_part(given), queue_part(given)
        new_queue = queue_part({**values(QueueSettings, WEBHOOK_QUEUE), **given})
        start_position, _ = await self._start(topics, after, since, from_end)
        async with self.transaction() if connection is None else nullcontext(connection) as inside:
            if filter is not None:
                await self._create_filter_queue(name, filter, params, as_names(topics), start_position, inside)
                prepare = queue_calls.alter_queue(name, **new_queue)
            elif own_queue:
                prepare = queue_calls.create_queue(
                    name, topics=as_names(topics), start_position=start_position, ordered_keys=ordered_keys, **new_queue
                )
            else:
                prepare = queue_calls.alter_queue(queue or name, **of_queue)
            await self._run(prepare, inside)
            call = webhook_calls.create_webhook(
                name,
                queue=queue or name,
                url=url,
                secret=new_secret() if secret is None else secret,
                **of_webhook,
            )
            return await self._run(call, inside)

    async def _create_filter_queue(
        self,
        name: str,
        filter: str,
        params: Mapping[str, Any] | None,
        topics: list[str] | None,
        start_position: int | None,
        connection: AsyncCallerConnection,
    ) -> None:
        """Create a queue with one subscription, from now on or after a position."""
        if await self._run(overview.queue_exists(name), connection):
            raise QueueExists(
                f'queue "{name}" already exists', hint="Choose another name: the webhook creates a queue with its name."
            )
        subscribed = subscription_calls.subscribe(name, filter, params, from_position=start_position, topics=topics)
        await self._run(subscribed, connection)
        if start_position is not None:
            move = subscription_calls.commit_reading(name, start_position, reader="headwater webhook", release=True)
            await self._run(move, connection)

    async def alter_webhook(
        self,
        name: str,
        *,
        url: str | None = None,
        connection: AsyncCallerConnection | None = None,
        **changes: Unpack[WebhookChanges],
    ) -> Webhook:
        """Change settings. None leaves a setting unchanged; 0 removes a limit. Changes take effect within seconds.
        Retries are settings of the queue: see alter_queue."""
        call = webhook_calls.alter_webhook(name, url=url, **changes)
        max_concurrency = changes.get("max_concurrency")
        async with self.transaction() if connection is None else nullcontext(connection) as inside:
            if max_concurrency is not None:
                found = await self._run(webhook_calls.find_webhook(name), inside)
                await self._run(queue_calls.alter_queue(found.queue, max_in_flight=max_concurrency), inside)
            return await self._run(call, inside)

    async def webhook(self, name: str) -> Webhook:
        """One webhook, including its secrets."""
        return await self._run(webhook_calls.find_webhook(name))

    async def webhooks(self) -> list[Webhook]:
        """All webhooks, including their secrets. Their progress is that of their queues."""
        return await self._run(webhook_calls.webhooks())

    async def pause_webhook(self, name: str, *, reason: str | None = None) -> Webhook:
        """Pause a webhook. Requests in progress are finished."""
        return await self._run(webhook_calls.set_webhook_state(name, "paused", reason=reason))

    async def resume_webhook(self, name: str) -> Webhook:
        """Resume a paused or disabled webhook where it stopped."""
        return await self._run(webhook_calls.set_webhook_state(name, "active"))

    async def rotate_webhook_secret(self, name: str, *, secret: str | None = None, keep: int = 1) -> Webhook:
        """Replace the signing secret (generated if not given). The `keep` newest previous secrets sign as well."""
        call = webhook_calls.rotate_webhook_secret(name, new_secret() if secret is None else secret, keep=keep)
        return await self._run(call)

    async def delete_webhook(self, name: str, *, with_queue: bool = False) -> bool:
        """Delete a webhook, and with `with_queue` also its queue and unsent events; False if it does not exist."""
        if with_queue:
            found = [one for one in await self.webhooks() if one.name == name]
            return bool(found) and await self._run(queue_calls.delete_queue(found[0].queue))
        return await self._run(webhook_calls.delete_webhook(name))
