"""Errors as HTTP responses: a table from error class to status, and the problem format of RFC 9457."""

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


class NotFound(HeadwaterError):
    """The resource does not exist."""


class TooManyConnections(HeadwaterError):
    """The server has reached its connection limit: retry in a moment, or use another server."""


class WrongMethod(InvalidRequest):
    """The path does not support this method."""


class BodyTooLarge(InvalidRequest):
    """The request body exceeds the server's limit: send less at once."""


class NotJson(InvalidRequest):
    """The request body must be JSON, with a JSON content type."""


class Unprocessable(InvalidRequest):
    """The request does not match its schema in /openapi.json."""


class ForeignOrigin(HeadwaterError):
    """A page of another site sent the request with the session of this one."""


class Misdirected(HeadwaterError):
    """The Host header names another server."""


class RequestTimeout(HeadwaterError):
    """The request timed out; whether it took effect is unknown."""


class KeyReused(InvalidRequest):
    """The idempotency key was used for another request: use a new key for each request."""


# The nearest base class of an error counts, so a new subclass of InvalidRequest needs no entry.
STATUS: Final[Mapping[type[HeadwaterError], int]] = {
    InvalidRequest: 400,
    NotAuthenticated: 401,
    errors.NotAllowed: 403,
    ForeignOrigin: 403,
    NotFound: 404,
    errors.TopicNotFound: 404,
    errors.QueueNotFound: 404,
    errors.PipelineNotFound: 404,
    WrongMethod: 405,
    errors.TopicExists: 409,
    errors.QueueExists: 409,
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
    RequestTimeout: 504,
}
# The Retry-After header by status, in seconds.
_RETRY_AFTER: Final = {429: "1", 503: "1", 507: "5"}


class Problem(BaseModel):
    """An error: what is wrong and what to do next. Further fields contain details for programs."""

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

    type: str = Field(description="urn:headwater:error: followed by the name of the error class")
    title: str = Field(description="the meaning of this class of error")
    status: int
    detail: str = Field(description="what went wrong in this request")
    hint: str | None = Field(default=None, description="what to do next")


def status_of(kind: type[HeadwaterError]) -> int:
    for ancestor in kind.__mro__:
        if ancestor in STATUS:
            return STATUS[ancestor]
    return 500


def as_problem(error: HeadwaterError) -> dict[str, Any]:
    """The problem fields of an error."""
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
    """Map a Postgres error that the log did not translate: an invalid value, a timeout, a lost connection, or a bug."""
    state = error.sqlstate or ""
    if state.startswith(("22", "54")):
        return InvalidRequest("the database cannot store a value of this request", detail={"sqlstate": state})
    if state == "57014":
        return RequestTimeout("the database did not finish in time")
    if error.sqlstate is None and isinstance(error, psycopg.OperationalError):
        return LogUnavailable("lost the connection to Postgres")
    return unexpected(error)


def unexpected(error: BaseException) -> HeadwaterError:
    """For an unexpected error: log it, and reveal nothing to the client."""
    logger.error("request failed with an unexpected error", exc_info=error, extra={ERROR: str(error)})
    return HeadwaterError("internal error; see the server's log")


def invalid(problems: Sequence[Any]) -> HeadwaterError:
    """For a request that does not match its schema."""
    first = [
        {"at": [str(step) for step in problem["loc"]], "problem": problem["msg"]} for problem in list(problems)[:20]
    ]
    if any(problem["type"] == "json_invalid" for problem in problems):
        text = next(str(p.get("ctx", {}).get("error", "")) for p in problems if p["type"] == "json_invalid")
        return InvalidRequest(f"the body is not valid JSON: {text}")
    where = ".".join(first[0]["at"]) if first else "the request"
    return Unprocessable(
        f"{where}: {first[0]['problem']}" if first else "the request does not match its schema",
        hint="The schema is at /openapi.json.",
        detail={"problems": first},
    )


def problem_response(error: HeadwaterError) -> Response:
    """Respond with an error."""
    fields = as_problem(error)
    if type(error) is HeadwaterError:
        fields["title"] = "Internal server error."
    status = int(fields["status"])
    headers = {"cache-control": "no-store"}
    if status in _RETRY_AFTER:
        headers["retry-after"] = _RETRY_AFTER[status]
    if status == 401:
        # Not Basic: browsers would show their own password dialog over the console's sign-in page.
        headers["www-authenticate"] = 'Bearer realm="headwater"'
    body = json.dumps(fields, default=str).encode()
    return Response(body, status_code=status, media_type=PROBLEM, headers=headers)
