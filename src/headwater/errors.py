"""Every way in which Headwater can refuse or fail, as one tree; and which SQLSTATE means which."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import psycopg


class HeadwaterError(Exception):
    """Anything that Headwater refuses or fails at. `detail` carries what a program needs to go on."""

    def __init__(self, message: str, *, hint: str | None = None, detail: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{message}\n  {hint}" if hint else message)
        self.message = message
        self.hint = hint
        self.detail: Mapping[str, Any] = detail or {}


class InvalidRequest(HeadwaterError):
    """What was asked cannot be: fix the caller."""


class InvalidEvent(InvalidRequest):
    """What was sent cannot be an event: fix the publisher."""


class EventTooLarge(InvalidEvent):
    """Above the topic's limit: send less, or raise the limit."""


class TopicNotFound(HeadwaterError):
    """No topic has that name: create it first."""


class TopicExists(HeadwaterError):
    """A topic has that name already."""


class PositionExpired(HeadwaterError):
    """Retention took events that were asked for. Go on from `earliest_position`, or read with skip_expired."""

    @property
    def earliest_position(self) -> int:
        return int(self.detail["earliest_position"])


class EpochChanged(HeadwaterError):
    """Positions may have been issued again, after a crash, failover or restore. Go on from `common_position`."""

    @property
    def common_position(self) -> int:
        """The last position that is the same event in the epoch of the reader and in the present one."""
        return int(self.detail["common_position"])

    @property
    def epoch(self) -> int:
        """The present epoch."""
        return int(self.detail["epoch"])


def epoch_changed(epoch: int, position: int, present: int, common: int) -> EpochChanged:
    """The error for a position of another epoch than the present one."""
    return EpochChanged(
        f"position {position} is of epoch {epoch}, and the log is in epoch {present}: "
        f"positions after {common} may have been issued again",
        hint="Postgres crashed, failed over or was restored. Read again from the common position.",
        detail={"epoch": present, "requested_epoch": epoch, "common_position": common},
    )


def never_issued(position: int, epoch: int | None, present: int, head: int) -> EpochChanged:
    """The error for a position above the head of the log."""
    return EpochChanged(
        f"position {position} was never issued in epoch {present}: the head of the log is {head}",
        hint="It is of another log, or of a history that was lost. Read from a position of this log.",
        detail={"epoch": present, "requested_epoch": epoch, "common_position": head},
    )


class CursorMoved(HeadwaterError):
    """Somebody else moved the cursor. Open it again and read from there."""

    @property
    def actual_position(self) -> int | None:
        position: int | None = self.detail.get("actual_position")
        return position


class AppendConflict(HeadwaterError):
    """The context moved on, and nothing was appended. Read it again, decide again, append again."""

    @property
    def actual_position(self) -> int:
        """Where the latest match is; 0: there is none."""
        return int(self.detail["actual_position"])


class OrderBroken(HeadwaterError):
    """What was read cannot follow on what was read before: a bug of ours, or events changed by hand."""


class StoreBusy(HeadwaterError):
    """Another process has these event stores open: stop it, or keep them in Postgres."""


class GroupNotFound(HeadwaterError):
    """No group, binding, subscription or webhook is what was named: create it first."""


class GroupExists(HeadwaterError):
    """A group or a webhook has that name already, or the group has its webhook."""


class ReaderBusy(HeadwaterError):
    """Another reader reads for this group now: try again later."""


class PipelineNotFound(HeadwaterError):
    """No pipeline of that name was ever run on this database, or the file declares none."""


class PipelineBusy(HeadwaterError):
    """Another process runs the pipeline now: stop it, or wait."""


class LeaseLost(HeadwaterError):
    """The lease ended or ran out, and another worker may have its events. Drop the result; claim anew."""


class StagedEventsLost(HeadwaterError):
    """What a batch had staged is gone before it was published. Nothing of it is in the log: run the batch again."""


class ProjectionRebuilt(HeadwaterError):
    """A table was built anew meanwhile, or its rebuild was given up. Start the pipeline again: it goes on from that."""


class NotAllowed(HeadwaterError):
    """Whoever asks lacks the right: an account by a door, or a database role, which is granted one of ours."""


class WrongTransaction(HeadwaterError):
    """The transaction's isolation level, or the server's role, cannot give a correct answer."""


class TransactionAborted(HeadwaterError):
    """Postgres ended the transaction to untangle it from others. Run it again, as a whole."""


class Deadlocked(TransactionAborted):
    """Two transactions waited for each other, and Postgres ended this one. Calls by themselves are made again."""


class SchemaMismatch(HeadwaterError):
    """Program and database do not fit each other. The message names the command to run."""


class LogUnavailable(HeadwaterError):
    """The database cannot be reached now. Trying again may help."""


class StorageFull(LogUnavailable):
    """The disk of the database is full, and nothing was written. Give it room; trying again then helps."""


class CaptureRefused(InvalidRequest):
    """The server, the role or a table is not set up for change capture. The message says what to do."""


class SlotBusy(HeadwaterError):
    """Another process reads from the replication slot now: stop it, or try again later."""


class SlotLost(HeadwaterError):
    """Changes that were not read yet are gone from the server's log. Make a new slot, and a new snapshot."""


class LakeBusy(HeadwaterError):
    """Other writers changed a table of the lake at every try. Nothing was committed: run it again later."""


class InvalidSchema(InvalidRequest):
    """What was sent is no schema, or more than is taken: fix it, then register it again."""


class IncompatibleSchema(HeadwaterError):
    """The schema may not follow those before it. `detail` says what does not fit: change it, or the compatibility."""


class SchemaNotFound(HeadwaterError):
    """No subject, version or schema is what was named: register it first."""


class SchemaInUse(HeadwaterError):
    """Another schema refers to it, or a topic must fit it: let go of it there first."""


class SchemaNotDeleted(HeadwaterError):
    """Only what was deleted softly can be deleted for good."""


class InvalidSettings(HeadwaterError):
    """Settings that cannot be: every problem is in the message."""


BY_SQLSTATE: Mapping[str, type[HeadwaterError]] = {
    "HW001": AppendConflict,
    "HW002": InvalidRequest,
    "HW003": EventTooLarge,
    "HW004": TopicNotFound,
    "HW005": TopicExists,
    "HW006": LeaseLost,
    "HW007": PositionExpired,
    "HW010": CursorMoved,
    "HW011": GroupNotFound,
    "HW012": WrongTransaction,
    "HW013": GroupExists,
    "HW014": ReaderBusy,
    "HW015": NotAllowed,
    "HW016": StagedEventsLost,
    "HW017": PipelineNotFound,
    "HW018": PipelineBusy,
    "HW020": ProjectionRebuilt,
    "HW021": EpochChanged,
    "HW030": SchemaNotFound,
    "HW031": SchemaInUse,
    "HW032": SchemaNotDeleted,
    "22P02": InvalidEvent,  # invalid_text_representation: JSON that is none
    "22P05": InvalidEvent,  # untranslatable_character: \u0000 in JSON
    "22021": InvalidEvent,  # character_not_in_repertoire: a NUL byte in text
    "22001": InvalidRequest,
    "22003": InvalidRequest,
    "23514": InvalidRequest,  # check_violation: the tables' own limits, whose names are sentences
    "40001": TransactionAborted,  # serialization_failure
    "40P01": Deadlocked,
    "42501": NotAllowed,
    "3F000": SchemaMismatch,  # no schema headwater
    "42P01": SchemaMismatch,
    "42883": SchemaMismatch,
    "57P01": LogUnavailable,
    "57P02": LogUnavailable,
    "57P03": LogUnavailable,
    "53100": StorageFull,  # disk_full
    "53300": LogUnavailable,  # too_many_connections
}


def from_sqlstate(
    sqlstate: str,
    message: str,
    *,
    hint: str | None = None,
    detail: str | None = None,
    constraint: str | None = None,
    table: str | None = None,
) -> HeadwaterError | None:
    """The error for a SQLSTATE; None for one that is not ours to explain. Class 08 is a lost connection."""
    kind = LogUnavailable if sqlstate.startswith("08") else BY_SQLSTATE.get(sqlstate)
    if kind is None:
        return None
    if kind is StorageFull:
        hint = hint or "Give the database's disk room: no event is lost, and publishing goes on by itself."
    if kind is SchemaMismatch:
        hint = "Run `headwater migrate` on this database."
    if constraint is not None:
        if table is not None and table.startswith(("event", "scheduled")):
            kind = InvalidEvent
        return kind(constraint)
    return kind(message, hint=hint, detail=_parsed(detail))


def translated(error: psycopg.Error) -> BaseException:
    """Our error for one of Postgres; an error that is not ours to explain passes through."""
    if error.sqlstate is None:
        if isinstance(error, psycopg.OperationalError):
            return LogUnavailable(f"the connection to Postgres is lost: {error}".strip())
        if isinstance(error, psycopg.DataError):
            return InvalidEvent(str(error))
        return error
    diag = error.diag
    ours = from_sqlstate(
        error.sqlstate,
        diag.message_primary or str(error),
        hint=diag.message_hint,
        detail=diag.message_detail,
        constraint=diag.constraint_name if error.sqlstate == "23514" else None,
        table=diag.table_name or diag.datatype_name,
    )
    return error if ours is None else ours


def _parsed(detail: str | None) -> Mapping[str, Any]:
    try:
        parsed = json.loads(detail or "{}")
    except ValueError:
        return {"detail": detail}
    return parsed if isinstance(parsed, dict) else {"detail": parsed}
