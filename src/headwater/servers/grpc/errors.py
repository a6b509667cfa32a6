"""What gRPC is told of an error: one table, and the error itself beside the status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import grpc

from headwater import errors
from headwater.errors import HeadwaterError
from headwater.servers.authentication import AccountExists, NotAuthenticated, TooManyRequests

# Beside the status: the error as JSON in UTF-8, which any text fits into.
DETAIL_KEY: Final = "headwater-error-bin"
# Headers and trailers are small; most programs refuse more than eight thousand bytes of them.
MAX_DETAIL_BYTES: Final = 4096
MAX_MESSAGE_CHARACTERS: Final = 1000


class NotOffered(HeadwaterError):
    """The protocol knows it, and this server does not do it."""


class NotThere(HeadwaterError):
    """What was named is not there: an index, an account."""


class NameTaken(HeadwaterError):
    """Another subscriber has that name now: choose another, or wait until it has gone."""


class Refused(HeadwaterError):
    """Right as it is, and not possible as things are."""


class TooMuch(HeadwaterError):
    """The answer would be larger than a message: ask for less."""


# The nearest class in an error's ancestry decides.
BY_ERROR: Final[Mapping[type[HeadwaterError], grpc.StatusCode]] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.EventTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TooMuch: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TooManyRequests: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.TopicNotFound: grpc.StatusCode.NOT_FOUND,
    errors.GroupNotFound: grpc.StatusCode.NOT_FOUND,
    NotThere: grpc.StatusCode.NOT_FOUND,
    errors.TopicExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.GroupExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.AppendConflict: grpc.StatusCode.ALREADY_EXISTS,
    AccountExists: grpc.StatusCode.ALREADY_EXISTS,
    NameTaken: grpc.StatusCode.ALREADY_EXISTS,
    errors.CursorMoved: grpc.StatusCode.ABORTED,
    errors.TransactionAborted: grpc.StatusCode.ABORTED,
    errors.PositionExpired: grpc.StatusCode.OUT_OF_RANGE,
    errors.EpochChanged: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LeaseLost: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SchemaMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WrongTransaction: grpc.StatusCode.FAILED_PRECONDITION,
    Refused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    NotAuthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.StorageFull: grpc.StatusCode.UNAVAILABLE,
    errors.LogUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.ReaderBusy: grpc.StatusCode.UNAVAILABLE,
    errors.StoreBusy: grpc.StatusCode.UNAVAILABLE,
    NotOffered: grpc.StatusCode.UNIMPLEMENTED,
}


def code_for(error: type[HeadwaterError]) -> grpc.StatusCode:
    """The status of a kind of error."""
    for kind in error.__mro__:
        if kind in BY_ERROR:
            return BY_ERROR[kind]
    return grpc.StatusCode.INTERNAL


def described(error: HeadwaterError) -> dict[str, Any]:
    """An error as JSON has it."""
    return {
        "error": type(error).__name__,
        "message": error.message,
        **({"hint": error.hint} if error.hint else {}),
        **({"detail": dict(error.detail)} if error.detail else {}),
    }


def detail_bytes(error: HeadwaterError) -> bytes:
    """What comes beside the status; without its larger parts where they are too large."""
    whole = described(error)
    for left_out in ((), ("detail",), ("detail", "hint", "message")):
        told = {name: value for name, value in whole.items() if name not in left_out}
        encoded = json.dumps(told, ensure_ascii=False, default=str).encode()
        if len(encoded) <= MAX_DETAIL_BYTES:
            break
    return encoded


async def refuse(context: Any, error: HeadwaterError) -> NoReturn:
    """End a call with the status of an error."""
    told = error.message if error.hint is None else f"{error.message} ({error.hint})"
    await context.abort(
        code_for(type(error)), told[:MAX_MESSAGE_CHARACTERS], trailing_metadata=((DETAIL_KEY, detail_bytes(error)),)
    )
    raise AssertionError("an aborted call does not go on")
