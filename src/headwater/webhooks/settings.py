"""The settings of a webhook. To add one: here, the column in `0012_webhook.sql`, `create_webhook` and `alter_webhook`
in `webhook.sql`, and what it does. Everything else follows: see `setting_definitions.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal, TypedDict, cast

from headwater.queue.settings import QueueChanges, QueueSettings
from headwater.setting_definitions import MAX_INTEGER, Setting, changeable, definitions

WebhookBody = Literal["envelope", "raw", "cloudevents-structured", "cloudevents-binary"]
ClientErrors = Literal["retry", "dead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """What a webhook sends, and how fast. Retries are settings of its queue."""

    headers: Annotated[
        Mapping[str, str],
        Setting(
            help="Additional headers of requests.",
            rule="invalid webhook headers: expected a JSON object of at most 16 kB",
        ),
    ] = field(default_factory=dict)
    body: Annotated[
        WebhookBody,
        Setting(
            help="Body of a request: the event as a JSON envelope, only its payload, or a CloudEvent.",
            rule="a body is envelope, raw, cloudevents-structured or -binary",
        ),
    ] = "envelope"
    timeout_seconds: Annotated[
        float,
        Setting(
            label="Timeout in seconds",
            help="Timeout of a request.",
            rule="a timeout is 0.1 to 300 seconds",
            minimum=0.1,
            maximum=300,
            unit="seconds",
        ),
    ] = 15.0
    max_concurrency: Annotated[
        int | None,
        Setting(
            label="Maximum concurrent requests",
            help="Maximum number of concurrent requests, over all processes.",
            rule="events in flight are limited to 1 or more",
            minimum=1,
            maximum=MAX_INTEGER,
        ),
    ] = 10
    rate_per_second: Annotated[
        float | None,
        Setting(
            label="Requests per second",
            help="Maximum number of requests per second, over all processes.",
            rule="a rate is 0.01 to 10000 a second",
            minimum=0.01,
            maximum=10_000,
            none="no limit",
        ),
    ] = None
    gzip_above_bytes: Annotated[
        int | None,
        Setting(
            label="Compress above bytes",
            help="Compress bodies larger than this.",
            rule="bodies are compressed above 1 byte or more",
            minimum=1,
            maximum=MAX_INTEGER,
            unit="bytes",
            none="never",
        ),
    ] = None
    client_errors: Annotated[
        ClientErrors,
        Setting(
            label="4xx responses",
            help="How to handle 4xx responses. Always: 408, 425 and 429 retry, 422 is dead, 410 disables the webhook.",
            rule="client errors mean retry or dead",
        ),
    ] = "retry"


# The queue that a webhook creates. A receiver may be down for a day: retries after 5 s, 20 s, 80 s, ..., finally every
# 10 hours, 27 hours in all.
WEBHOOK_QUEUE: Final = QueueSettings(
    max_attempts=10, backoff_seconds=5.0, backoff_factor=4.0, backoff_max_seconds=36_000.0, max_in_flight=10
)


class WebhookChanges(TypedDict, total=False):
    """The settings of `alter_webhook`. None: unchanged; 0 removes a limit."""

    headers: Mapping[str, str] | None
    body: WebhookBody | None
    timeout_seconds: float | None
    max_concurrency: int | None
    rate_per_second: float | None
    gzip_above_bytes: int | None
    client_errors: ClientErrors | None


class NewWebhookSettings(WebhookChanges, total=False):
    """The settings of `create_webhook`: those of the webhook, and how its queue retries. None: the default."""

    max_attempts: int | None
    backoff_seconds: float | None
    backoff_factor: float | None
    backoff_max_seconds: float | None
    ordered_keys: bool | None


# The settings of the webhook, and those of its queue with the defaults of webhooks.
NEW_WEBHOOK_SETTINGS: Final = (
    *definitions(WebhookSettings),
    *(
        replace(one, default=getattr(WEBHOOK_QUEUE, one.name))
        for one in definitions(QueueSettings)
        if one.name in NewWebhookSettings.__optional_keys__
    ),
)


def webhook_part(given: Mapping[str, Any]) -> WebhookChanges:
    """Of these settings, those of the webhook."""
    names = {one.name for one in definitions(WebhookSettings)}
    return cast("WebhookChanges", {name: value for name, value in given.items() if name in names})


def queue_part(given: Mapping[str, Any]) -> QueueChanges:
    """Of these settings, those of the queue that can be changed. The queue's limit of leased events is the webhook's
    limit of requests."""
    names = {one.name for one in changeable(QueueSettings)}
    found = {name: value for name, value in given.items() if name in names}
    if given.get("max_concurrency") is not None:
        found["max_in_flight"] = given["max_concurrency"]
    return cast("QueueChanges", found)
