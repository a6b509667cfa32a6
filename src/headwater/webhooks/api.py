"""The webhook methods of the client: create, list, change and delete. `headwater serve` sends the requests."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import datetime
from typing import Any

from headwater.calls import overview
from headwater.calls import queues as queue_calls
from headwater.calls import subscriptions as subscription_calls
from headwater.calls import webhooks as webhook_calls
from headwater.database.caller_connection import AsyncCallerConnection
from headwater.database.connection import CallRunner, Topics, as_names
from headwater.errors import InvalidRequest, QueueExists
from headwater.webhooks.model import Webhook

# A receiver may be down for a day: retries after 5 s, 20 s, 80 s, ..., finally every 10 hours, 27 hours in all.
MAX_ATTEMPTS = 10
BACKOFF_SECONDS = 5.0
BACKOFF_FACTOR = 4.0
BACKOFF_MAX_SECONDS = 36_000.0
MAX_CONCURRENCY = 10


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
        headers: Mapping[str, str] | None = None,
        body: str | None = None,
        timeout_seconds: float | None = None,
        max_concurrency: int | None = None,
        rate_per_second: float | None = None,
        gzip_above_bytes: int | None = None,
        client_errors: str | None = None,
        max_attempts: int | None = None,
        backoff_seconds: float | None = None,
        backoff_max_seconds: float | None = None,
        ordered_keys: bool | None = None,
        connection: AsyncCallerConnection | None = None,
    ) -> Webhook:
        """Send events to a URL. There are three sources:

        - topics: a queue with the webhook's name is created, at the beginning of the log, after a position, since a
          time, or at the end;
        - an existing queue;
        - a SQL filter with parameters (see subscribe): from now on, after a position, or since a time.

        `secret` (generated if not given) signs the requests. `body`: 'envelope' is JSON with everything about the
        event, 'raw' is only its payload, 'cloudevents-structured' and 'cloudevents-binary' are a CloudEvent.
        `client_errors`: whether a 4xx response means 'retry' or 'dead'.
        """
        own_queue = queue is None
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
        start_position, _ = await self._start(topics, after, since, from_end)
        async with self.transaction() if connection is None else nullcontext(connection) as inside:
            if filter is not None:
                await self._create_filter_queue(name, filter, params, as_names(topics), start_position, inside)
                prepare = queue_calls.alter_queue(
                    name,
                    max_attempts=MAX_ATTEMPTS if max_attempts is None else max_attempts,
                    backoff_seconds=BACKOFF_SECONDS if backoff_seconds is None else backoff_seconds,
                    backoff_factor=BACKOFF_FACTOR,
                    backoff_max_seconds=BACKOFF_MAX_SECONDS if backoff_max_seconds is None else backoff_max_seconds,
                    max_in_flight=MAX_CONCURRENCY if max_concurrency is None else max_concurrency,
                    holds_retention=True,
                )
            elif own_queue:
                prepare = queue_calls.create_queue(
                    name,
                    topics=as_names(topics),
                    start_position=start_position,
                    max_attempts=MAX_ATTEMPTS if max_attempts is None else max_attempts,
                    backoff_seconds=BACKOFF_SECONDS if backoff_seconds is None else backoff_seconds,
                    backoff_factor=BACKOFF_FACTOR,
                    backoff_max_seconds=BACKOFF_MAX_SECONDS if backoff_max_seconds is None else backoff_max_seconds,
                    ordered_keys=ordered_keys,
                    max_in_flight=MAX_CONCURRENCY if max_concurrency is None else max_concurrency,
                )
            else:
                prepare = queue_calls.alter_queue(
                    queue or name,
                    max_attempts=max_attempts,
                    backoff_seconds=backoff_seconds,
                    backoff_max_seconds=backoff_max_seconds,
                    max_in_flight=max_concurrency,
                )
            await self._run(prepare, inside)
            call = webhook_calls.create_webhook(
                name,
                queue=queue or name,
                url=url,
                secret=new_secret() if secret is None else secret,
                headers=headers,
                body=body,
                timeout_seconds=timeout_seconds,
                rate_per_second=rate_per_second,
                gzip_above_bytes=gzip_above_bytes,
                client_errors=client_errors,
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
        headers: Mapping[str, str] | None = None,
        body: str | None = None,
        timeout_seconds: float | None = None,
        max_concurrency: int | None = None,
        rate_per_second: float | None = None,
        gzip_above_bytes: int | None = None,
        client_errors: str | None = None,
        connection: AsyncCallerConnection | None = None,
    ) -> Webhook:
        """Change settings. None leaves a setting unchanged; 0 removes the rate limit or turns compression off. Changes
        take effect within seconds. Retries are settings of the queue: see alter_queue."""
        async with self.transaction() if connection is None else nullcontext(connection) as inside:
            if max_concurrency is not None:
                found = await self._run(webhook_calls.find_webhook(name), inside)
                await self._run(queue_calls.alter_queue(found.queue, max_in_flight=max_concurrency), inside)
            call = webhook_calls.alter_webhook(
                name,
                url=url,
                headers=headers,
                body=body,
                timeout_seconds=timeout_seconds,
                rate_per_second=rate_per_second,
                gzip_above_bytes=gzip_above_bytes,
                client_errors=client_errors,
            )
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
