"""What routes stand on: the log and who else is there for one server; how they answer."""

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
from headwater.calls.overview import Contents
from headwater.servers.authentication import Callers
from headwater.servers.http.errors import PROBLEM, Problem
from headwater.servers.http.requests import NotReadable, read_json
from headwater.servers.http.sse_hub import Live
from headwater.servers.multiprocess_counters import Counts
from headwater.servers.options import Opening


@dataclass(frozen=True, slots=True)
class Served:
    """One server."""

    log: AsyncHeadwater
    callers: Callers
    live: Live
    opening: Opening
    counts: Counts


def served(request: Request) -> Served:
    """The server that a request came to."""
    found: Served = request.app.state.served
    return found


class _StrictRequest(Request):
    """Its JSON is what the log could keep."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            try:
                self._json = read_json(await self.body())
            except (NotReadable, UnicodeDecodeError) as error:
                raise json.JSONDecodeError(str(error), "", 0) from None
            except json.JSONDecodeError:
                raise
            except ValueError as error:
                # A number of more digits than Python reads.
                raise json.JSONDecodeError(str(error).partition(";")[0], "", 0) from None
        return self._json


class StrictRoute(APIRoute):
    """A route whose body is read strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strictly


MEANS: Final = {
    400: "What was asked cannot be: fix the caller.",
    401: "Say who you are: Basic, or Bearer with an API key.",
    403: "The account lacks the right.",
    404: "What was named is not there.",
    409: "It is there already, it was moved meanwhile, or a position is of another epoch (EpochChanged).",
    410: "Retention took it.",
    413: "Too much at once.",
    415: "The body is not said to be JSON.",
    422: "The request is not of the shape that is described here.",
    429: "Slow down.",
    503: "The database cannot be reached now, or does not fit. Trying again may help.",
    504: "Not done in time.",
    507: "The disk of the database is full. Trying again helps once it has room.",
}


def problems(*more: int) -> dict[int | str, dict[str, Any]]:
    """The answers of a route that are problems: those of all, and more."""
    return {
        status: {"description": MEANS[status], "model": Problem, "content": {PROBLEM: {}}}
        for status in sorted({400, 401, 403, 422, 429, 503, 504, 507, *more})
    }


def router(tag: str) -> APIRouter:
    """A place for routes of one subject."""
    return APIRouter(route_class=StrictRoute, tags=[tag])


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} is not written as JSON")


def answer(value: Any, *, status: int = 200) -> Response:
    """A value as JSON: times in UTC, time spans in seconds."""
    return raw_answer(as_json(value), status=status)


def as_json(value: Any) -> str:
    """A value as answers write it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_plain)


def some(contents: Contents) -> dict[str, Any]:
    """Some events, as answers tell of them."""
    return {
        "events": contents.events,
        "events_is_more": contents.events_is_more,
        "first": contents.first_position,
        "last": contents.last_position,
    }


def raw_answer(body: str, *, status: int = 200) -> Response:
    """JSON that is written already."""
    return Response(
        body.encode(), status_code=status, media_type="application/json", headers={"cache-control": "no-store"}
    )


def listed(name: str, rows: Iterable[str], **more: Any) -> Response:
    """A list of what is written already, with what is said beside it."""
    rest = as_json(more)[1:]
    return raw_answer(f'{{"{name}":[{",".join(rows)}]{"," if more else ""}{rest}')
