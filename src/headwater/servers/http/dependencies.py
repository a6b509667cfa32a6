"""Request dependencies and response helpers shared by all routes."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from headwater.aio import AsyncHeadwater
from headwater.calls.overview import EventRange
from headwater.servers.authentication import Authenticator
from headwater.servers.http.errors import PROBLEM, Problem
from headwater.servers.http.requests import UnreadableJson, read_json
from headwater.servers.http.sse_hub import SseHub
from headwater.servers.multiprocess_counters import MultiprocessCounters
from headwater.servers.options import ServerOptions


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What the routes of one server process share."""

    log: AsyncHeadwater
    authenticator: Authenticator
    sse: SseHub
    options: ServerOptions
    counters: MultiprocessCounters


def context_of(request: Request) -> ServerContext:
    """The context of the server that received a request."""
    context: ServerContext = request.app.state.context
    return context


class _StrictRequest(Request):
    """A request whose body must be strict JSON."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = read_json(await self.body())
            except (UnreadableJson, UnicodeDecodeError) as error:
                raise json.JSONDecodeError(str(error), "", 0) from None
            except json.JSONDecodeError:
                raise
            except ValueError as error:
                # An integer with more digits than Python parses.
                raise json.JSONDecodeError(str(error).partition(";")[0], "", 0) from None
        return self._json


class StrictRoute(APIRoute):
    """A route whose body must be strict JSON: no NaN or Infinity."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


STATUS_MEANINGS: Final = {
    400: "The request is invalid.",
    401: "Authentication is required: Basic, or Bearer with an API key.",
    403: "The account lacks the permission.",
    404: "The resource does not exist.",
    409: "The resource already exists, was changed meanwhile, or a position belongs to another epoch (EpochChanged).",
    410: "The events were removed by retention.",
    413: "The body or an event is too large.",
    415: "The content type of the body is not JSON.",
    422: "The request does not match its schema.",
    429: "The rate limit is exceeded: slow down and retry.",
    503: "The database cannot be reached, or its schema does not match. A retry may succeed.",
    504: "The request timed out.",
    507: "The disk of the database is full. Retry when it has space again.",
}


def problems(*more: int) -> dict[int | str, dict[str, Any]]:
    """The problem responses of a route: those common to all routes, and more."""
    return {
        status: {"description": STATUS_MEANINGS[status], "model": Problem, "content": {PROBLEM: {}}}
        for status in sorted({400, 401, 403, 422, 429, 503, 504, 507, *more})
    }


def router(tag: str) -> APIRouter:
    """A router for the routes of one subject."""
    return APIRouter(route_class=StrictRoute, tags=[tag])


def _to_plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} cannot be encoded as JSON")


def json_response(value: Any, *, status: int = 200) -> Response:
    """Respond with a value as JSON: times in UTC, durations in seconds."""
    return raw_json_response(to_json(value), status=status)


def to_json(value: Any) -> str:
    """Encode a value as responses do."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_to_plain)


def event_range(counted: EventRange) -> dict[str, Any]:
    """A counted range of events, as responses contain it."""
    return {
        "events": counted.events,
        "events_is_more": counted.events_is_more,
        "first": counted.first_position,
        "last": counted.last_position,
    }


def raw_json_response(body: str, *, status: int = 200) -> Response:
    """Respond with JSON text."""
    return Response(
        body.encode(), status_code=status, media_type="application/json", headers={"cache-control": "no-store"}
    )


def list_response(name: str, rows: Iterable[str], **more: Any) -> Response:
    """Respond with a list of JSON texts under `name`, and with more fields."""
    rest = to_json(more)[1:]
    return raw_json_response(f'{{"{name}":[{",".join(rows)}]{"," if more else ""}{rest}')
