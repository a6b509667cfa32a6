"""The exit codes of the command line: their meanings, and the code of each error class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headwater import errors
from headwater.embedded.errors import EmbeddedError
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
    OK: "success",
    UNEXPECTED: "an unexpected error (a bug), or `headwater doctor`, `check` or `chaos` found a problem",
    USAGE: "invalid command line or setting, or not confirmed",
    REFUSED: "the request or the event is invalid: correct it and try again",
    NOT_FOUND: "the named object does not exist",
    CONFLICT: "the object already exists, is in use, or was changed concurrently",
    EXPIRED: "the requested events were removed by retention, or the WAL of a replication slot is lost",
    NOT_ALLOWED: "the database role lacks the permission",
    SCHEMA_MISMATCH: "the schema of the database does not match this version: run `headwater migrate`",
    UNAVAILABLE: "cannot connect to the database or server; a retry may succeed",
    INTERRUPTED: "interrupted by Ctrl-C",
    OUTPUT_CLOSED: "the reader of the output closed the pipe, as in `| head`",
}


class NotFound(HeadwaterError):
    """The object that the command names does not exist."""


class NotConfirmed(HeadwaterError):
    """A destructive command was not confirmed."""


class ChecksFailed(HeadwaterError):
    """`headwater doctor`, `check` or `chaos` found a problem."""


class Interrupted(HeadwaterError):
    """The command was interrupted by Ctrl-C or SIGTERM, and reports what it has done."""


# The first class in an error's MRO decides, so a new subclass of InvalidRequest needs no line here.
BY_ERROR: Final[Mapping[type[HeadwaterError], int]] = {
    errors.InvalidSettings: USAGE,
    NotConfirmed: USAGE,
    Interrupted: INTERRUPTED,
    errors.InvalidRequest: REFUSED,
    errors.WrongTransaction: REFUSED,
    errors.TopicNotFound: NOT_FOUND,
    errors.QueueNotFound: NOT_FOUND,
    errors.PipelineNotFound: NOT_FOUND,
    errors.SchemaNotFound: NOT_FOUND,
    NotFound: NOT_FOUND,
    errors.TopicExists: CONFLICT,
    errors.QueueExists: CONFLICT,
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
    """Return the exit code of an error class."""
    for kind in error.__mro__:
        if kind in BY_ERROR:
            return BY_ERROR[kind]
    return UNEXPECTED
