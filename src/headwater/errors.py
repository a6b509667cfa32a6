"""All errors of Headwater, and the mapping from SQLSTATE to error. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class HeadwaterError(Exception):
    """Base class of all errors. `detail` holds machine-readable values for handling the error."""

    def __init__(self, message: str, *, hint: str | None = None, detail: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{message}\n  {hint}" if hint else message)
        self.message = message
        self.hint = hint
        self.detail: Mapping[str, Any] = detail or {}


class InvalidRequest(HeadwaterError):
    """The request is invalid."""


class InvalidEvent(InvalidRequest):
    """The event is invalid."""


class EventTooLarge(InvalidEvent):
    """The event exceeds the topic's size limit: send less, or raise the limit."""


class TopicNotFound(HeadwaterError):
    """The topic does not exist: create it first."""


class TopicExists(HeadwaterError):
    """A topic with this name already exists."""


class PositionExpired(HeadwaterError):
    """Retention has removed requested events. Continue from `earliest_position`, or read with skip_expired."""

    @property
    def earliest_position(self) -> int:
        return int(self.detail["earliest_position"])


class EpochChanged(HeadwaterError):
    """Positions may have been reassigned after a crash, failover or restore. Continue from `common_position`."""

    @property
    def common_position(self) -> int:
        """The last position that identifies the same event in the reader's epoch and in the current epoch."""
        return int(self.detail["common_position"])

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return int(self.detail["epoch"])


def epoch_changed_error(epoch: int, position: int, present: int, common: int) -> EpochChanged:
    """The error for a position of another epoch than the current one."""
    return EpochChanged(
        f"position {position} belongs to epoch {epoch}, but the log is in epoch {present}: "
        f"positions after {common} may have been reassigned",
        hint="Postgres crashed, failed over or was restored. Read again from the common position.",
        detail={"epoch": present, "requested_epoch": epoch, "common_position": common},
    )


def never_issued_error(position: int, epoch: int | None, present: int, head: int) -> EpochChanged:
    """The error for a position above the head of the log."""
    return EpochChanged(
        f"position {position} was never assigned in epoch {present}: the head of the log is {head}",
        hint="The position belongs to another log, or to events that were lost. Read from a position of this log.",
        detail={"epoch": present, "requested_epoch": epoch, "common_position": head},
    )


class CursorMoved(HeadwaterError):
    """Another process moved the cursor. Open it again and read from there."""

    @property
    def actual_position(self) -> int | None:
        position: int | None = self.detail.get("actual_position")
        return position


class AppendConflict(HeadwaterError):
    """The append condition no longer holds, and nothing was appended. Read, decide and append again."""

    @property
    def actual_position(self) -> int:
        """The position of the latest match; 0 if nothing matches."""
        return int(self.detail["actual_position"])


class OrderBroken(HeadwaterError):
    """Events were read out of order: a bug in Headwater, or events were changed by hand."""


class StoreBusy(HeadwaterError):
    """Another process has this SQLite file open: stop it, or use event stores in Postgres."""


class QueueNotFound(HeadwaterError):
    """The queue, binding, subscription or webhook does not exist: create it first."""


class QueueExists(HeadwaterError):
    """A queue or webhook with this name already exists, or the queue already has a webhook."""


class ReaderBusy(HeadwaterError):
    """Another process is the reader of this queue: try again later."""


class PipelineNotFound(HeadwaterError):
    """No pipeline with this name has run on this database, or the file does not declare it."""


class PipelineBusy(HeadwaterError):
    """Another process is running the pipeline: stop it, or wait."""


class LeaseLost(HeadwaterError):
    """The lease was ended or has expired, and another worker may have its events. Discard the result and claim
    again."""


class StagedEventsLost(HeadwaterError):
    """The staged events of a batch were lost before they were published. None is in the log: run the batch again."""


class ProjectionRebuilt(HeadwaterError):
    """The table was rebuilt, or its rebuild was abandoned. Restart the pipeline: it continues with the current
    table."""


class NotAllowed(HeadwaterError):
    """The account lacks a permission, or the database role is not granted the required Headwater role."""


class WrongTransaction(HeadwaterError):
    """The call needs isolation level READ COMMITTED, or a primary server instead of a standby."""


class TransactionAborted(HeadwaterError):
    """Postgres aborted the transaction because of concurrent transactions. Retry the whole transaction."""


class Deadlocked(TransactionAborted):
    """Postgres aborted the transaction to resolve a deadlock. Calls outside a transaction are retried automatically."""


class SchemaMismatch(HeadwaterError):
    """The program and the database schema have incompatible versions. The message names the command to run."""


class LogUnavailable(HeadwaterError):
    """The database cannot be reached. Retry later."""


class StorageFull(LogUnavailable):
    """The database's disk is full, and nothing was written. Free disk space, then retry."""


class CaptureRefused(InvalidRequest):
    """The server, the role or a table is not set up for change capture. The message states what to change."""


class SlotBusy(HeadwaterError):
    """Another process is reading from the replication slot: stop it, or try again later."""


class SlotLost(HeadwaterError):
    """The server has removed WAL with changes that were not read yet. Create a new slot and a new snapshot."""


class LakeBusy(HeadwaterError):
    """Other writers changed the lake table during every attempt. Nothing was committed: run it again later."""


class InvalidSchema(InvalidRequest):
    """The schema is invalid or exceeds a limit: fix it, then register it again."""


class IncompatibleSchema(HeadwaterError):
    """The schema is incompatible with earlier versions. `detail` lists the differences: change the schema, or the
    compatibility level."""


class SchemaNotFound(HeadwaterError):
    """The subject, version or schema does not exist: register it first."""


class SchemaInUse(HeadwaterError):
    """Another schema or a topic refers to the schema: remove that reference first."""


class SchemaNotDeleted(HeadwaterError):
    """A schema must be soft-deleted before it can be deleted permanently."""


class InvalidSettings(HeadwaterError):
    """The settings are invalid: the message lists every problem."""


BY_SQLSTATE: Mapping[str, type[HeadwaterError]] = {
    "HW001": AppendConflict,
    "HW002": InvalidRequest,
    "HW003": EventTooLarge,
    "HW004": TopicNotFound,
    "HW005": TopicExists,
    "HW006": LeaseLost,
    "HW007": PositionExpired,
    "HW010": CursorMoved,
    "HW011": QueueNotFound,
    "HW012": WrongTransaction,
    "HW013": QueueExists,
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
    "22P02": InvalidEvent,  # invalid_text_representation: invalid JSON
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
    """The error for a SQLSTATE; None if it is not in the mapping. Class 08 is a lost connection."""
    kind = LogUnavailable if sqlstate.startswith("08") else BY_SQLSTATE.get(sqlstate)
    if kind is None:
        return None
    if kind is StorageFull:
        hint = hint or "Free space on the database's disk. No event is lost, and publishing resumes by itself."
    if kind is SchemaMismatch:
        hint = "Run `headwater migrate` on this database."
    if constraint is not None:
        if table is not None and table.startswith(("event", "scheduled")):
            kind = InvalidEvent
        return kind(constraint)
    return kind(message, hint=hint, detail=_parsed(detail))


def _parsed(detail: str | None) -> Mapping[str, Any]:
    try:
        parsed = json.loads(detail or "{}")
    except ValueError:
        return {"detail": detail}
    return parsed if isinstance(parsed, dict) else {"detail": parsed}
