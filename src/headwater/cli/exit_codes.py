"""What each exit code of the command line means: one table, and which error ends with which code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headwater import errors
from headwater.embedded import EmbeddedError
from headwater.errors import HeadwaterError
from headwater.nats.errors import NatsRefused, NatsUnavailable, ReplicaRefused

OK: Final = 0
UNEXPECTED: Final = 1
USAGE: Final = 2
REFUSED: Final = 3
NOT_FOUND: Final = 4
CONFLICT: Final = 5
EXPIRED: Final = 6
NOT_ALLOWED: Final = 7
SCHEMA_MISMATCH: Final = 8
UNAVAILABLE: Final = 9
INTERRUPTED: Final = 130
OUTPUT_CLOSED: Final = 141

MEANINGS: Final[Mapping[int, str]] = {
    OK: "done",
    UNEXPECTED: "something unexpected: a bug of ours, or what `headwater doctor`, `check` or `chaos` found wrong",
    USAGE: "the command line or a setting makes no sense",
    REFUSED: "the request or the event was refused: fix it, then try again",
    NOT_FOUND: "what was named is not there",
    CONFLICT: "it exists already, or somebody else moved it meanwhile",
    EXPIRED: "what was asked for is gone: retention, or the server's own log, did not keep it",
    NOT_ALLOWED: "the database role lacks the right",
    SCHEMA_MISMATCH: "program and database do not fit each other: run `headwater migrate`",
    UNAVAILABLE: "no database could be reached; trying again may help",
    INTERRUPTED: "ended by Ctrl-C",
    OUTPUT_CLOSED: "whoever read the output went away, as `| head` does",
}


class NotThere(HeadwaterError):
    """What the command named is not there."""


class NotConfirmed(HeadwaterError):
    """A destructive command was not confirmed."""


class ChecksFailed(HeadwaterError):
    """`headwater doctor`, `check` or `chaos` found something that does not work."""


# The nearest class in an error's ancestry decides, so a new kind of InvalidRequest needs no line here.
BY_ERROR: Final[Mapping[type[HeadwaterError], int]] = {
    errors.InvalidSettings: USAGE,
    NotConfirmed: USAGE,
    errors.InvalidRequest: REFUSED,
    errors.WrongTransaction: REFUSED,
    errors.TopicNotFound: NOT_FOUND,
    errors.GroupNotFound: NOT_FOUND,
    errors.PipelineNotFound: NOT_FOUND,
    errors.SchemaNotFound: NOT_FOUND,
    NotThere: NOT_FOUND,
    errors.TopicExists: CONFLICT,
    errors.GroupExists: CONFLICT,
    errors.IncompatibleSchema: CONFLICT,
    errors.SchemaInUse: CONFLICT,
    errors.SchemaNotDeleted: CONFLICT,
    errors.CursorMoved: CONFLICT,
    errors.EpochChanged: CONFLICT,
    errors.AppendConflict: CONFLICT,
    errors.StoreBusy: CONFLICT,
    errors.OrderBroken: CONFLICT,
    errors.LeaseLost: CONFLICT,
    errors.ReaderBusy: CONFLICT,
    errors.SlotBusy: CONFLICT,
    errors.PipelineBusy: CONFLICT,
    errors.LakeBusy: CONFLICT,
    errors.StagedEventsLost: CONFLICT,
    errors.ProjectionRebuilt: CONFLICT,
    errors.TransactionAborted: CONFLICT,
    errors.PositionExpired: EXPIRED,
    errors.SlotLost: EXPIRED,
    errors.NotAllowed: NOT_ALLOWED,
    errors.SchemaMismatch: SCHEMA_MISMATCH,
    errors.LogUnavailable: UNAVAILABLE,
    EmbeddedError: UNAVAILABLE,
    NatsUnavailable: UNAVAILABLE,
    NatsRefused: REFUSED,
    ReplicaRefused: REFUSED,
    ChecksFailed: UNEXPECTED,
}


def code_for(error: type[HeadwaterError]) -> int:
    """The exit code of a kind of error."""
    for kind in error.__mro__:
        if kind in BY_ERROR:
            return BY_ERROR[kind]
    return UNEXPECTED
