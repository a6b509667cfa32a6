"""Calls for webhooks: queues whose events are sent to a URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.calls.call import Call, Rows, only_value
from headwater.calls.encoding import checked_text, encode_headers, optional_text
from headwater.webhooks.model import Webhook, WebhookRoute

_WEBHOOK = (
    "w.id, w.name, g.name, w.url, w.headers, w.body, w.timeout_seconds, g.max_in_flight, w.rate_per_second, "
    "w.gzip_above_bytes, w.client_errors, w.state, w.state_reason, w.created_at, w.updated_at, w.uid, w.version, "
    "w.secrets"
)
_JOIN_QUEUE = "join headwater_internal.queue g on g.id = w.queue_id"


def _webhook(row: tuple[Any, ...]) -> Webhook:
    uid, version, secrets = row[-3:]
    return Webhook(*row[:-3], uid.hex, version, tuple(secrets))  # type: ignore[call-arg]


def _first(rows: Rows) -> Webhook:
    return _webhook(rows[0])


def create_webhook(
    name: str,
    *,
    queue: str,
    url: str,
    secret: str,
    headers: Mapping[str, str] | None = None,
    body: str | None = None,
    timeout_seconds: float | None = None,
    rate_per_second: float | None = None,
    gzip_above_bytes: int | None = None,
    client_errors: str | None = None,
) -> Call[Webhook]:
    return Call(
        f"select {_WEBHOOK} "
        f"from headwater_internal.create_webhook(%s, %s, %s, %s, %s::jsonb, %s, %s, %s, %s, %s) w {_JOIN_QUEUE}",
        (
            checked_text(name, "webhook name"),
            checked_text(queue, "queue name"),
            checked_text(url, "url"),
            checked_text(secret, "secret"),
            encode_headers(headers),
            body,
            timeout_seconds,
            rate_per_second,
            gzip_above_bytes,
            client_errors,
        ),
        _first,
    )


def alter_webhook(
    name: str,
    *,
    url: str | None = None,
    headers: Mapping[str, str] | None = None,
    body: str | None = None,
    timeout_seconds: float | None = None,
    rate_per_second: float | None = None,
    gzip_above_bytes: int | None = None,
    client_errors: str | None = None,
) -> Call[Webhook]:
    """Change settings. None leaves a setting unchanged; 0 removes the rate limit or turns compression off."""
    return Call(
        f"select {_WEBHOOK} from headwater_internal.alter_webhook(%s, %s, %s::jsonb, %s, %s, %s, %s, %s) w "
        f"{_JOIN_QUEUE}",
        (
            checked_text(name, "webhook name"),
            optional_text(url, "url"),
            encode_headers(headers),
            body,
            timeout_seconds,
            rate_per_second,
            gzip_above_bytes,
            client_errors,
        ),
        _first,
    )


def find_webhook(name: str) -> Call[Webhook]:
    return Call(
        f"select {_WEBHOOK} from headwater_internal.find_webhook(%s) w {_JOIN_QUEUE}",
        (checked_text(name, "webhook name"),),
        _first,
    )


def webhooks() -> Call[list[Webhook]]:
    return Call(
        f"select {_WEBHOOK} from headwater_internal.webhook w {_JOIN_QUEUE} order by w.name",
        (),
        lambda rows: [_webhook(row) for row in rows],
    )


def webhook_routes() -> Call[list[WebhookRoute]]:
    """The active webhooks, with the settings of their queues that a worker needs."""
    return Call(
        f"select g.lease_seconds, g.ordered_keys, g.kind, {_WEBHOOK} from headwater_internal.webhook w {_JOIN_QUEUE} "
        "where w.state = 'active' and g.paused_at is null order by w.id",
        (),
        lambda rows: [WebhookRoute(_webhook(row[3:]), row[0], row[1], row[2]) for row in rows],
    )


def set_webhook_state(
    name: str, state: str, *, reason: str | None = None, seen_version: int | None = None
) -> Call[Webhook]:
    """Set the state: active, paused or disabled. With `seen_version`, only if the webhook has not changed since."""
    return Call(
        f"select {_WEBHOOK} from headwater_internal.set_webhook_state(%s, %s, %s, %s) w {_JOIN_QUEUE}",
        (checked_text(name, "webhook name"), state, optional_text(reason, "reason"), seen_version),
        _first,
    )


def rotate_webhook_secret(name: str, secret: str, *, keep: int) -> Call[Webhook]:
    return Call(
        f"select {_WEBHOOK} from headwater_internal.rotate_webhook_secret(%s, %s, %s) w {_JOIN_QUEUE}",
        (checked_text(name, "webhook name"), checked_text(secret, "secret"), keep),
        _first,
    )


def delete_webhook(name: str) -> Call[bool]:
    return Call("select headwater_internal.delete_webhook(%s)", (checked_text(name, "webhook name"),), only_value)


def next_webhook_turn(webhook: Webhook) -> Call[float | None]:
    """Reserve the next slot of the rate limit: the seconds until it; None if the webhook was deleted."""
    return Call(
        "select headwater_internal.next_webhook_turn(%s, %s)", (webhook.id, webhook.rate_per_second), only_value
    )
