"""What a webhook sends, and what an answer means for the event. Pure: no I/O, no clock.

Signed as the Standard Webhooks scheme has it: HMAC-SHA256 over `id.timestamp.body`, by every secret of the webhook.
"""

from __future__ import annotations

import base64
import gzip
import hmac
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import quote

from headwater.calls import JSON_TYPE
from headwater.model import Dead, Event, Outcome, Retry, Webhook
from headwater.observability import tracing

LONGEST_RETRY_AFTER: Final = timedelta(days=1)
# Of an answer that was not accepted, so much is kept with the event.
EXCERPT_CHARACTERS: Final = 500


class Request(NamedTuple):
    """What is sent: headers and body, as they go over the wire."""

    headers: tuple[tuple[str, str], ...]
    body: bytes


class Answer(NamedTuple):
    """What a receiver answered, as far as it matters. Without a status there was no answer: `failure` says why."""

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
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:EXCERPT_CHARACTERS]


class Gone(NamedTuple):
    """The receiver wants nothing more: the webhook is to be disabled, for this reason."""

    reason: str


def message_id(webhook: Webhook, position: int) -> str:
    """The same for every try of an event, and for no other event of any log."""
    return f"{webhook.uid}-{position}"


def signatures(secrets: Sequence[str], message_id: str, timestamp: int, body: bytes) -> str:
    """The header webhook-signature: one signature for each secret."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return " ".join(
        "v1," + base64.b64encode(hmac.digest(_key(secret), signed, "sha256")).decode() for secret in secrets
    )


def _key(secret: str) -> bytes:
    return base64.b64decode(secret.removeprefix("whsec_"))


def request_for(webhook: Webhook, event: Event, message_id: str, *, now: datetime) -> Request:
    """The request that tells a webhook's receiver of an event."""
    if webhook.body == "raw":
        body = event.payload or b""
        content_type = (event.content_type or "").strip()
        if not content_type or not content_type.isascii() or not content_type.isprintable():
            content_type = "application/octet-stream"
        about = [
            ("headwater-topic", event.topic),
            ("headwater-position", str(event.position)),
            ("headwater-time", _iso(event.published_at)),
            ("headwater-type", event.type),
            ("headwater-key", event.key),
            ("headwater-event-id", event.event_id),
        ]
    else:
        body = envelope(event, message_id)
        content_type = JSON_TYPE
        about = []
    timestamp = int(now.timestamp())
    headers = [
        *webhook.headers.items(),
        ("content-type", content_type),
        ("webhook-id", message_id),
        ("webhook-timestamp", str(timestamp)),
        ("webhook-signature", signatures(webhook.secrets, message_id, timestamp, body)),
        # What no header can hold is escaped as in a URL.
        *((name, quote(value, safe=_PLAIN)) for name, value in about if value is not None),
    ]
    own = {name.lower() for name in webhook.headers}
    if "user-agent" not in own:
        headers.append(("user-agent", "headwater-webhooks"))
    if tracing.PARENT not in own:
        headers += tracing.named_by(event.headers).items()
    if webhook.gzip_above_bytes is not None and len(body) > webhook.gzip_above_bytes:
        headers.append(("content-encoding", "gzip"))
        # Without a time in it, so that each try sends the same bytes.
        body = gzip.compress(body, 6, mtime=0)
    return Request(tuple(headers), body)


_PLAIN: Final = "!\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"


def envelope(event: Event, message_id: str) -> bytes:
    """Everything about an event as JSON. A payload that is JSON is in it to the letter, as `data`; any other as
    `data_base64`, with its `content_type`."""
    key, key_base64 = _text_or_base64(event.key)
    about: dict[str, Any] = {
        "id": message_id,
        "topic": event.topic,
        "type": event.type,
        "key": key,
        "position": event.position,
        "time": _iso(event.published_at),
        "headers": event.headers or {},
        "event_id": event.event_id,
        "routing_key": event.routing_key,
        "content_type": event.content_type,
    }
    if key_base64 is not None:
        about["key_base64"] = key_base64
    data = _json_text(event)
    if data is None and event.payload is not None:
        about["data_base64"] = base64.b64encode(event.payload).decode()
        return _dumped(about)
    # Spliced in rather than read and written again, which would change numbers and drop repeated names.
    return _dumped(about)[:-1] + b',"data":' + (b"null" if data is None else data) + b"}"


def _dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _iso(time: datetime) -> str:
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _text_or_base64(value: bytes | None) -> tuple[str | None, str | None]:
    if value is None:
        return None, None
    try:
        return value.decode(), None
    except UnicodeDecodeError:
        return None, base64.b64encode(value).decode()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _ignored(text: str) -> None:
    return None


def _json_text(event: Event) -> bytes | None:
    """The payload, if it is JSON and says nothing else."""
    if event.payload is None or event.content_type not in (None, JSON_TYPE):
        return None
    try:
        text = event.payload.decode()
        # Numbers are not looked at: one may be longer than Python likes to read.
        json.loads(text, parse_constant=_refuse_constant, parse_int=_ignored, parse_float=_ignored)
    except (ValueError, RecursionError):
        return None
    return event.payload


def judged(webhook: Webhook, answer: Answer, *, now: datetime) -> Outcome | Gone:
    """What an answer means for the event: done, another try, a dead letter, or that the webhook is to be disabled."""
    if answer.accepted:
        return None
    if answer.status is None:
        return Retry(reason=answer.failure or "no answer")
    reason = f"{answer.status}: {answer.excerpt}" if answer.excerpt else str(answer.status)
    if 300 <= answer.status < 400:
        return Retry(reason=f"{reason} (redirects are not followed: give the webhook the new url)"[:2000])
    if answer.status == 410:
        return Gone(f"its receiver answered {reason}")
    if answer.status == 422:
        return Dead(reason)
    if 400 <= answer.status < 500 and answer.status not in (408, 425, 429) and webhook.client_errors == "dead":
        return Dead(reason)
    after = wait_asked_for(answer.retry_after, now=now) if answer.status in (429, 503) else None
    return Retry(after=after, reason=reason)


def wait_asked_for(retry_after: str | None, *, now: datetime) -> timedelta | None:
    """What a header Retry-After asks for, in seconds or as a date; None where it is neither."""
    if retry_after is None:
        return None
    text = retry_after.strip()
    if text.isascii() and text.isdecimal():
        # More digits than a day has seconds are a day.
        return timedelta(seconds=int(text)) if len(text) <= 5 else LONGEST_RETRY_AFTER
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return min(max(until - now, timedelta(0)), LONGEST_RETRY_AFTER)
