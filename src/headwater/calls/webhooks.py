"""Calls for webhooks: queues whose events are sent to a URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack
from uuid import UUID

from headwater.calls.call import Call, Selected, named_arguments, only_value, setting_columns
from headwater.calls.encoding import checked_text, encode_headers, optional_text
from headwater.setting_definitions import SettingDefinition, changeable, checked, definitions
from headwater.webhooks.model import Webhook, WebhookRoute
from headwater.webhooks.settings import WebhookChanges, WebhookSettings


def _webhook(*, uid: UUID, secrets: list[str], **fields: Any) -> Webhook:
    return Webhook(uid=uid.hex, secrets=tuple(secrets), **fields)


_WEBHOOK = Selected(
    _webhook,
    {
        "id": "w.id",
        "name": "w.name",
        "queue": "g.name",
        "url": "w.url",
        "state": "w.state",
        "state_reason": "w.state_reason",
        "created_at": "w.created_at",
        "updated_at": "w.updated_at",
        "uid": "w.uid",
        "version": "w.version",
        "secrets": "w.secrets",
        **setting_columns(WebhookSettings, "w."),
        # The limit of the queue, over all of its workers.
        "max_concurrency": "g.max_in_flight",
    },
)
_JOIN_QUEUE = "join headwater_internal.queue g on g.id = w.queue_id"


def create_webhook(
    name: str, *, queue: str, url: str, secret: str, **settings: Unpack[WebhookChanges]
) -> Call[Webhook]:
    """Create a webhook on a queue. `max_concurrency` is not stored with it: it is the queue's `max_in_flight`."""
    arguments, params = named_arguments(
        {
            "webhook_name": checked_text(name, "webhook name"),
            "queue_name": checked_text(queue, "queue name"),
            "url": checked_text(url, "url"),
            "secret": checked_text(secret, "secret"),
            **_stored(definitions(WebhookSettings), settings),
        }
    )
    return Call(
        f"select {_WEBHOOK.sql} from headwater_internal.create_webhook({arguments}) w {_JOIN_QUEUE}",
        params,
        _WEBHOOK.first,
    )


def alter_webhook(name: str, *, url: str | None = None, **changes: Unpack[WebhookChanges]) -> Call[Webhook]:
    """Change settings. None leaves a setting unchanged; 0 removes a limit. `max_concurrency` is a setting of the
    queue."""
    arguments, params = named_arguments(
        {
            "webhook_name": checked_text(name, "webhook name"),
            "url": optional_text(url, "url"),
            **_stored(changeable(WebhookSettings), changes),
        }
    )
    return Call(
        f"select {_WEBHOOK.sql} from headwater_internal.alter_webhook({arguments}) w {_JOIN_QUEUE}",
        params,
        _WEBHOOK.first,
    )


def _stored(allowed: tuple[SettingDefinition, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are stored with the webhook."""
    stored = checked(allowed, given)
    stored.pop("max_concurrency", None)
    return {**stored, "headers": encode_headers(stored.get("headers"))}


def find_webhook(name: str) -> Call[Webhook]:
    return Call(
        f"select {_WEBHOOK.sql} from headwater_internal.find_webhook(%s) w {_JOIN_QUEUE}",
        (checked_text(name, "webhook name"),),
        _WEBHOOK.first,
    )


def webhooks() -> Call[list[Webhook]]:
    return Call(
        f"select {_WEBHOOK.sql} from headwater_internal.webhook w {_JOIN_QUEUE} order by w.name",
        (),
        _WEBHOOK.all,
    )


def webhook_routes() -> Call[list[WebhookRoute]]:
    """The active webhooks, with the settings of their queues that a worker needs."""
    return Call(
        f"select g.lease_seconds, g.ordered_keys, g.kind, {_WEBHOOK.sql} from headwater_internal.webhook w "
        f"{_JOIN_QUEUE} where w.state = 'active' and g.paused_at is null order by w.id",
        (),
        lambda rows: [WebhookRoute(_WEBHOOK.value(row[3:]), row[0], row[1], row[2]) for row in rows],
    )


def set_webhook_state(
    name: str, state: str, *, reason: str | None = None, seen_version: int | None = None
) -> Call[Webhook]:
    """Set the state: active, paused or disabled. With `seen_version`, only if the webhook has not changed since."""
    return Call(
        f"select {_WEBHOOK.sql} from headwater_internal.set_webhook_state(%s, %s, %s, %s) w {_JOIN_QUEUE}",
        (checked_text(name, "webhook name"), state, optional_text(reason, "reason"), seen_version),
        _WEBHOOK.first,
    )


def rotate_webhook_secret(name: str, secret: str, *, keep: int) -> Call[Webhook]:
    return Call(
        f"select {_WEBHOOK.sql} from headwater_internal.rotate_webhook_secret(%s, %s, %s) w {_JOIN_QUEUE}",
        (checked_text(name, "webhook name"), checked_text(secret, "secret"), keep),
        _WEBHOOK.first,
    )


def delete_webhook(name: str) -> Call[bool]:
    return Call("select headwater_internal.delete_webhook(%s)", (checked_text(name, "webhook name"),), only_value)


def next_webhook_turn(webhook: Webhook) -> Call[float | None]:
    """Reserve the next slot of the rate limit: the seconds until it; None if the webhook was deleted."""
    return Call(
        "select headwater_internal.next_webhook_turn(%s, %s)", (webhook.id, webhook.rate_per_second), only_value
    )
