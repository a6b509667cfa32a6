"""Status codes of errors in gRPC. The error itself is sent as JSON in the trailing metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import grpc

from headwater import errors
from headwater.errors import HeadwaterError
from headwater.servers.authentication import AccountExists, NotAuthenticated, TooManyRequests

# Trailing metadata: the error as JSON in UTF-8. Binary, since text metadata is limited to ASCII.
DETAIL_KEY: Final = "headwater-error-bin"
# Most implementations reject more than 8 KiB of headers or trailers.
MAX_DETAIL_BYTES: Final = 4096
MAX_MESSAGE_CHARACTERS: Final = 1000


class NotSupported(HeadwaterError):
    """The protocol has this operation, but this server does not support it."""


class ResourceNotFound(HeadwaterError):
    """An index or an account does not exist."""


class SubscriberNameInUse(HeadwaterError):
    """Another subscriber is connected under this name."""


class PreconditionFailed(HeadwaterError):
    """The request is valid but not possible in the current state."""


class ResponseTooLarge(HeadwaterError):
    """The response would exceed the maximum message size."""


# The nearest class in an error's ancestry decides.
BY_ERROR: Final[Mapping[type[HeadwaterError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.EventTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ResponseTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TooManyRequests: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TopicNotFound: grpc.StatusCode.NOT_FOUND,
    errors.QueueNotFound: grpc.StatusCode.NOT_FOUND,
    ResourceNotFound: grpc.StatusCode.NOT_FOUND,
    errors.TopicExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.QueueExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.AppendConflict: grpc.StatusCode.ALREADY_EXISTS,
    AccountExists: grpc.StatusCode.ALREADY_EXISTS,
    SubscriberNameInUse: grpc.StatusCode.ALREADY_EXISTS,
    errors.CursorMoved: grpc.StatusCode.ABORTED,
    errors.TransactionAborted: grpc.StatusCode.ABORTED,
    errors.PositionExpired: grpc.StatusCode.OUT_OF_RANGE,
    errors.EpochChanged: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LeaseLost: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SchemaMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WrongTransaction: grpc.StatusCode.FAILED_PRECONDITION,
    PreconditionFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    NotAuthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.StorageFull: grpc.StatusCode.UNAVAILABLE,
    errors.LogUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.ReaderBusy: grpc.StatusCode.UNAVAILABLE,
    errors.StoreBusy: grpc.StatusCode.UNAVAILABLE,
    NotSupported: grpc.StatusCode.UNIMPLEMENTED,
}


def code_for(error: type[HeadwaterError]) -> grpc.StatusCode:
    """The status code of an error class."""
    for kind in error.__mro__:
        if kind in BY_ERROR:
            return BY_ERROR[kind]
    return grpc.StatusCode.INTERNAL


def error_json(error: HeadwaterError) -> dict[str, Any]:
    """An error as a JSON object."""
    return {
        "error": type(error).__name__,
        "message": error.message,
        **({"hint": error.hint} if error.hint else {}),
        **({"detail": dict(error.detail)} if error.detail else {}),
    }


def detail_bytes(error: HeadwaterError) -> bytes:
    """Encode an error for the trailing metadata; large parts are dropped if it exceeds the limit."""
    whole = error_json(error)
    for left_out in ((), ("detail",), ("detail", "hint", "message")):
        fields = {name: value for name, value in whole.items() if name not in left_out}
        encoded = json.dumps(fields, ensure_ascii=False, default=str).encode()
        if len(encoded) <= MAX_DETAIL_BYTES:
            break
    return encoded


async def abort_with(context: Any, error: HeadwaterError) -> NoReturn:
    """Abort a call with the status of an error."""
    message = error.message if error.hint is None else f"{error.message} ({error.hint})"
    await context.abort(
        code_for(type(error)), message[:MAX_MESSAGE_CHARACTERS], trailing_metadata=((DETAIL_KEY, detail_bytes(error)),)
    )
    raise AssertionError("unreachable: context.abort raises")
