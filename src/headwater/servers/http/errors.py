"""How an error is told by HTTP: one table from class to status, one shape (RFC 9457)."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from headwater import errors
from headwater.errors import HeadwaterError, InvalidRequest, LogUnavailable
from headwater.observability.metrics import ERROR, logger
from headwater.servers.authentication import AccountExists, NotAuthenticated, TooManyRequests

PROBLEM: Final = "application/problem+json"


class NotThere(HeadwaterError):
    """What was named is not there."""


class TooManyConnections(HeadwaterError):
    """The server has as many connections as it takes: try again in a moment, or another one."""


class WrongMethod(InvalidRequest):
    """The method is not for that path."""


class BodyTooLarge(InvalidRequest):
    """The body of the request is above the server's limit: send less at once."""


class NotJson(InvalidRequest):
    """The body of a request is JSON, and its content type says so."""


class Unprocessable(InvalidRequest):
    """The request is not of the shape that is described at /openapi.json."""


class ForeignOrigin(HeadwaterError):
    """Another site asked in the name of whoever is signed in here."""


class Misdirected(HeadwaterError):
    """The request names a host that this server is not."""


class TookTooLong(HeadwaterError):
    """The request was not done in time, and whether it took effect is not known."""


class KeyReused(InvalidRequest):
    """The idempotency key belongs to another request: use a new one for each."""


# The nearest class in an error's ancestry decides, so a new kind of InvalidRequest needs no line here.
STATUS: Final[Mapping[type[HeadwaterError], int]] = {
    InvalidRequest: 400,
    NotAuthenticated: 401,
    errors.NotAllowed: 403,
    ForeignOrigin: 403,
    NotThere: 404,
    errors.TopicNotFound: 404,
    errors.GroupNotFound: 404,
    errors.PipelineNotFound: 404,
    WrongMethod: 405,
    errors.TopicExists: 409,
    errors.GroupExists: 409,
    AccountExists: 409,
    errors.CursorMoved: 409,
    errors.EpochChanged: 409,
    errors.AppendConflict: 409,
    errors.LeaseLost: 409,
    errors.ReaderBusy: 409,
    errors.PipelineBusy: 409,
    errors.PositionExpired: 410,
    errors.EventTooLarge: 413,
    BodyTooLarge: 413,
    NotJson: 415,
    Misdirected: 421,
    Unprocessable: 422,
    KeyReused: 422,
    TooManyRequests: 429,
    TooManyConnections: 503,
    errors.TransactionAborted: 503,
    errors.WrongTransaction: 503,
    errors.SchemaMismatch: 503,
    LogUnavailable: 503,
    errors.StorageFull: 507,
    TookTooLong: 504,
}
# Beside the shape of the answer: headers that some answers must have, or that help.
_RETRY: Final = {429: "1", 503: "1", 507: "5"}


class Problem(BaseModel):
    """What went wrong, and what to do next. More fields carry what a program needs to go on."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "examples": [
                {
                    "type": "urn:headwater:error:TopicNotFound",
                    "title": "No topic has that name: create it first.",
                    "status": 404,
                    "detail": 'there is no topic "orders"',
                    "hint": "Create it: headwater topic create, or headwater.create_topic().",
                    "topic": "orders",
                }
            ]
        },
    )

    type: str = Field(description="urn:headwater:error: and the name of the error")
    title: str = Field(description="what the kind of error means")
    status: int
    detail: str = Field(description="what happened this time")
    hint: str | None = Field(default=None, description="what to do next")


def status_of(kind: type[HeadwaterError]) -> int:
    for ancestor in kind.__mro__:
        if ancestor in STATUS:
            return STATUS[ancestor]
    return 500


def as_problem(error: HeadwaterError) -> dict[str, Any]:
    """The fields of an error of ours."""
    kind = type(error)
    fields: dict[str, Any] = {
        "type": f"urn:headwater:error:{kind.__name__}",
        "title": inspect.cleandoc(kind.__doc__ or "").partition("\n")[0],
        "status": status_of(kind),
        "detail": error.message,
    }
    if error.hint is not None:
        fields["hint"] = error.hint
    return {**error.detail, **fields}


def from_postgres(error: psycopg.Error) -> HeadwaterError:
    """An error of Postgres that nobody explains: what the caller sent, or something of ours."""
    state = error.sqlstate or ""
    if state.startswith(("22", "54")):
        return InvalidRequest("the database cannot hold a value of this request", detail={"sqlstate": state})
    if state == "57014":
        return TookTooLong("the database did not finish in time")
    if error.sqlstate is None and isinstance(error, psycopg.OperationalError):
        return LogUnavailable("the connection to Postgres is lost")
    return unexpected(error)


def unexpected(error: BaseException) -> HeadwaterError:
    """For what nobody foresaw: logged here, and no word of it to the caller."""
    logger.error("a request failed unexpectedly", exc_info=error, extra={ERROR: str(error)})
    return HeadwaterError("something unexpected happened; it is in the server's log")


def invalid(problems: Sequence[Any]) -> HeadwaterError:
    """For a request that does not fit its description."""
    first = [
        {"at": [str(step) for step in problem["loc"]], "problem": problem["msg"]} for problem in list(problems)[:20]
    ]
    if any(problem["type"] == "json_invalid" for problem in problems):
        text = next(str(p.get("ctx", {}).get("error", "")) for p in problems if p["type"] == "json_invalid")
        return InvalidRequest(f"the body is not JSON: {text}")
    where = ".".join(first[0]["at"]) if first else "the request"
    return Unprocessable(
        f"{where}: {first[0]['problem']}" if first else "the request does not fit",
        hint="What fits is described at /openapi.json.",
        detail={"problems": first},
    )


def problem_response(error: HeadwaterError) -> Response:
    """An error as an answer."""
    fields = as_problem(error)
    if type(error) is HeadwaterError:
        fields["title"] = "A bug of ours."
    status = int(fields["status"])
    headers = {"cache-control": "no-store"}
    if status in _RETRY:
        headers["retry-after"] = _RETRY[status]
    if status == 401:
        # Not Basic, which makes browsers ask by themselves, over the console's own page.
        headers["www-authenticate"] = 'Bearer realm="headwater"'
    body = json.dumps(fields, default=str).encode()
    return Response(body, status_code=status, media_type=PROBLEM, headers=headers)
