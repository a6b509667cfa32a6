"""The requests that webhooks send, and what a response means for the event. Pure: no I/O, no clock.

Signed as specified by Standard Webhooks: HMAC-SHA256 over `id.timestamp.body`, with every secret of the webhook.
"""

from __future__ import annotations

import base64
import gzip
import hmac
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple
from urllib.parse import quote

from headwater.log import cloud_events
from headwater.log.event_json import JSON_TYPE, event_json
from headwater.log.model import Event
from headwater.observability import tracing
from headwater.queue.model import Dead, Outcome, Retry
from headwater.webhooks.model import Webhook

MAX_RETRY_AFTER: Final = timedelta(days=1)
# How much of an error response is stored with the event.
MAX_EXCERPT_CHARACTERS: Final = 500


class WebhookRequest(NamedTuple):
    """The headers and body of a request, as sent."""

    headers: tuple[tuple[str, str], ...]
    body: bytes


class WebhookResponse(NamedTuple):
    """The response of a receiver. Without a status there was none, and `failure` is the reason."""

    status: int | None = None
    retry_after: str | None = None
    body: bytes = b""
    failure: str | None = None

    @property
    def accepted(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def excerpt(self) -> str:
        """The beginning of the body as text, on one line."""
        text = self.body.decode("utf-8", "replace")
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:MAX_EXCERPT_CHARACTERS]


class ReceiverGone(NamedTuple):
    """The receiver wants no more events: disable the webhook, for this reason."""

    reason: str


def message_id(webhook: Webhook, position: int) -> str:
    """The message id: the same for every attempt of an event, and unique across logs."""
    return f"{webhook.uid}-{position}"


def signatures(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> str:
    """The webhook-signature header: one signature for each secret."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return " ".join(
        "v1," + base64.b64encode(hmac.digest(_key(secret), signed, "sha256")).decode() for secret in secrets
    )


def _key(secret: str) -> bytes:
    return base64.b64decode(secret.removeprefix("whsec_"))


def request_for(
    webhook: Webhook, event: Event, message_id: str, *, now: datetime, cloud_events_source: str = ""
) -> WebhookRequest:
    """The request for an event."""
    about: list[tuple[str, str | bytes | None]] = []
    content: list[tuple[str, str]] = []
    if webhook.body == "cloudevents-binary":
        sent = cloud_events.cloud_event(event, cloud_events_source)
        body = sent.payload or b""
        content = cloud_events.binary_headers(sent)
    elif webhook.body == "cloudevents-structured":
        body = cloud_events.structured(cloud_events.cloud_event(event, cloud_events_source)).encode()
        content = [("content-type", cloud_events.EVENT_TYPE)]
    elif webhook.body == "raw":
        body = event.payload or b""
        content_type = (event.content_type or "").strip()
        if not content_type or not content_type.isascii() or not content_type.isprintable():
            content_type = "application/octet-stream"
        content = [("content-type", content_type)]
        about = [
            ("headwater-topic", event.topic),
            ("headwater-position", str(event.position)),
            ("headwater-time", event.published_at.astimezone(UTC).isoformat()),
            ("headwater-type", event.type),
            ("headwater-key", event.key),
            ("headwater-event-id", event.event_id),
        ]
    else:
        body = event_json(event).encode()
        content = [("content-type", JSON_TYPE)]
    timestamp = int(now.timestamp())
    headers = [
        *webhook.headers.items(),
        *content,
        ("webhook-id", message_id),
        ("webhook-timestamp", str(timestamp)),
        ("webhook-signature", signatures(webhook.secrets, message_id, timestamp, body)),
        # Characters that are not allowed in headers are percent-encoded.
        *((name, quote(value, safe=_PLAIN)) for name, value in about if value is not None),
    ]
    own = {name.lower() for name in webhook.headers}
    if "user-agent" not in own:
        headers.append(("user-agent", "headwater-webhooks"))
    if tracing.PARENT not in own:
        headers += tracing.named_by(event.headers).items()
    if webhook.gzip_above_bytes is not None and len(body) > webhook.gzip_above_bytes:
        headers.append(("content-encoding", "gzip"))
        # Without a timestamp, so that each attempt sends the same bytes.
        body = gzip.compress(body, 6, mtime=0)
    return WebhookRequest(tuple(headers), body)


_PLAIN: Final = "!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"


def judge(webhook: Webhook, response: WebhookResponse, *, now: datetime) -> Outcome | ReceiverGone:
    """What a response means for the event: done, retry, dead letter, or disable the webhook."""
    if response.accepted:
        return None
    if response.status is None:
        return Retry(reason=response.failure or "no response")
    reason = f"{response.status}: {response.excerpt}" if response.excerpt else str(response.status)
    if 300 <= response.status < 400:
        return Retry(reason=f"{reason} (redirects are not followed: change the url of the webhook)"[:2000])
    if response.status == 410:
        return ReceiverGone(f"the receiver responded with {reason}")
    if response.status == 422:
        return Dead(reason)
    if 400 <= response.status < 500 and response.status not in (408, 425, 429) and webhook.client_errors == "dead":
        return Dead(reason)
    after = parse_retry_after(response.retry_after, now=now) if response.status in (429, 503) else None
    return Retry(after=after, reason=reason)


def parse_retry_after(retry_after: str | None, *, now: datetime) -> timedelta | None:
    """The delay in a Retry-After header, in seconds or as a date; None if it is neither."""
    if retry_after is None:
        return None
    text = retry_after.strip()
    if text.isascii() and text.isdecimal():
        # With more digits it is more than a day.
        return timedelta(seconds=int(text)) if len(text) <= 5 else MAX_RETRY_AFTER
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return min(max(until - now, timedelta(0)), MAX_RETRY_AFTER)
