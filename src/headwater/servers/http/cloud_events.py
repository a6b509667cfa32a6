"""CloudEvents over HTTP: which requests carry them, which clients accept them, and responses of them.

A request is in structured or batch mode by its content type, in binary mode if it has a header `ce-...`. Such headers
are not allowed in requests of other sites without CORS, like the content type JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from fastapi import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from headwater.errors import InvalidRequest
from headwater.log import cloud_events
from headwater.log.cloud_events import ANY_TYPE, BATCH_TYPE, EVENT_TYPE, HTTP_PREFIX, CloudEvent
from headwater.log.event_json import JSON_TYPE
from headwater.log.model import Event, NewEvent
from headwater.servers.http.dependencies import StrictRoute
from headwater.servers.http.errors import NotJson
from headwater.servers.http.requests import MAX_EVENTS

_PATH: Final = re.compile(r"/v1/topics/[^/]+/events")


class Mode(StrEnum):
    """The content mode of a request with CloudEvents."""

    structured = "structured"
    batch = "batch"
    binary = "binary"


def mode_of(scope: Scope) -> Mode | None:
    """The content mode of a request that publishes CloudEvents; None: it does not."""
    if scope["method"] != "POST" or _PATH.fullmatch(scope["path"]) is None:
        return None
    names = {name for name, _ in scope["headers"]}
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"").decode("latin-1")
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith(ANY_TYPE):
        if kind not in (EVENT_TYPE, BATCH_TYPE):
            raise NotJson(f"unsupported format {kind[:100]} of CloudEvents", hint=f"Use {EVENT_TYPE} or {BATCH_TYPE}.")
        return Mode.structured if kind == EVENT_TYPE else Mode.batch
    return Mode.binary if any(name.startswith(HTTP_PREFIX.encode()) for name in names) else None


class CloudEventsRoute(StrictRoute):
    """A route for requests that publish CloudEvents; another route of the same path takes all others."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is not Match.FULL or mode_of(scope) is None:
            return Match.NONE, {}
        return match, child


async def published_events(request: Request) -> list[NewEvent]:
    """The CloudEvents of a request, as events to publish."""
    body = await request.body()
    mode = mode_of(request.scope)
    if mode is Mode.binary:
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in request.scope["headers"])
        return [cloud_events.new_event(cloud_events.parse_binary(headers, body))]
    try:
        text = body.decode()
        given = cloud_events.parse_batch(text) if mode is Mode.batch else [cloud_events.parse_structured(text)]
    except RecursionError:
        raise InvalidRequest("the body is not valid JSON: nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if len(given) > MAX_EVENTS:
        raise InvalidRequest(f"a batch of {len(given)} CloudEvents: expected at most {MAX_EVENTS}")
    return [cloud_events.new_event(one) for one in given]


async def content_of(request: Request) -> list[Any]:
    """What identifies the content of a request, for an idempotency key."""
    own = [
        [name.decode("latin-1"), value.decode("latin-1")]
        for name, value in request.scope["headers"]
        if name == b"content-type" or name.startswith(HTTP_PREFIX.encode())
    ]
    return [sorted(own), (await request.body()).decode("latin-1")]


def accepts(request: Request, media_type: str) -> bool:
    """Whether a client asks for this media type by name, and not for JSON rather than it."""
    quality = {JSON_TYPE: 0.0, media_type: 0.0}
    for one in request.headers.get("accept", "").split(","):
        kind, *parameters = (part.strip().lower() for part in one.split(";"))
        if kind in quality:
            quality[kind] = next((_quality(part[2:]) for part in parameters if part.startswith("q=")), 1.0)
    return quality[media_type] > 0 and quality[media_type] >= quality[JSON_TYPE]


def _quality(text: str) -> float:
    return float(text) if re.fullmatch(r"[01](?:\.\d{0,3})?", text, re.ASCII) else 0.0


def event_response(event: Event, source: str) -> Response:
    """Respond with one CloudEvent."""
    return _response(cloud_events.structured(cloud_events.cloud_event(event, source)), EVENT_TYPE, {})


def batch_response(events: Sequence[Event], source: str, *, next_page: str | None, stable: int, epoch: int) -> Response:
    """Respond with a page of CloudEvents. A batch has no room for more, so the rest of the page are headers."""
    headers = {"headwater-stable": str(stable), "headwater-epoch": str(epoch)}
    if events:
        headers["headwater-position"] = str(events[-1].position)
    if next_page is not None:
        headers["link"] = f'<{next_page}>; rel="next"'
    found: list[CloudEvent] = [cloud_events.cloud_event(event, source) for event in events]
    return _response(cloud_events.batch(found), BATCH_TYPE, headers)


def _response(body: str, media_type: str, headers: Mapping[str, str]) -> Response:
    return Response(
        body.encode(), headers={**headers, "content-type": media_type, "cache-control": "no-store", "vary": "accept"}
    )


_CLOUD_EVENT: Final[dict[str, Any]] = {
    "type": "object",
    "description": "A CloudEvent 1.0 in its JSON format. Further members are extension attributes.",
    "required": ["specversion", "id", "source", "type"],
    "properties": {
        "specversion": {"const": "1.0"},
        "id": {"type": "string", "minLength": 1},
        "source": {"type": "string", "format": "uri-reference", "minLength": 1},
        "type": {"type": "string", "minLength": 1, "maxLength": 200},
        "subject": {"type": ["string", "null"], "minLength": 1},
        "time": {"type": ["string", "null"], "format": "date-time"},
        "datacontenttype": {"type": ["string", "null"], "minLength": 1, "maxLength": 200},
        "dataschema": {"type": ["string", "null"], "format": "uri", "minLength": 1},
        "data": {},
        "data_base64": {"type": ["string", "null"], "contentEncoding": "base64"},
    },
}
_EXAMPLE: Final = {
    "specversion": "1.0",
    "id": "1",
    "source": "/shop",
    "type": "order.placed",
    "datacontenttype": JSON_TYPE,
    "data": {"order": 1},
}
# For the OpenAPI document: CloudEvents beside JSON, in requests and in responses.
REQUEST_CONTENT: Final[dict[str, Any]] = {
    EVENT_TYPE: {"schema": _CLOUD_EVENT, "example": _EXAMPLE},
    BATCH_TYPE: {"schema": {"type": "array", "items": _CLOUD_EVENT, "maxItems": MAX_EVENTS}, "example": [_EXAMPLE]},
}


def with_cloud_events(media_type: str) -> dict[int | str, dict[str, Any]]:
    """The successful response of a route that also answers with CloudEvents."""
    return {200: {"content": {media_type: {"schema": REQUEST_CONTENT[media_type]["schema"]}}}}
