"""What is kept of a snapshot while it is taken, so that another process can go on with it. No I/O here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headwater.capture.snapshot import Chunk, Plan
from headwater.nats.snapshot_chunks import CHUNKS_PER_RANGE


@dataclass(frozen=True, slots=True)
class RangeDone:
    """A range whose chunks are all in the stream."""

    number: int
    first_chunk: int
    chunks: int
    rows: int


@dataclass(frozen=True, slots=True)
class Record:
    """A snapshot of one table: from which moments its ranges are read, and where changes go on after it.

    `visible` and `lsn` are of the first moment, `stream_sequence` is from before it, `after_lsn` from after the
    latest. `tries` counts the moments; a chunk's number tells at which one it was read.
    """

    snapshot_id: str
    state: Literal["running", "done", "failed"]
    fingerprint: str
    visible: str
    lsn: int
    after_lsn: int
    stream_created: str
    stream_sequence: int
    tries: int
    ranges: tuple[Chunk, ...]
    started_at: int
    dictionary: str | None = None
    rows: int = 0
    error: str | None = None

    @classmethod
    def begun(
        cls,
        snapshot_id: str,
        plan: Plan,
        *,
        after_lsn: int,
        stream_created: str,
        stream_sequence: int,
        started_at: int,
        dictionary: str | None,
    ) -> Record:
        return cls(
            snapshot_id=snapshot_id,
            state="running",
            fingerprint=plan.fingerprint,
            visible=plan.snapshot.visible,
            lsn=plan.snapshot.lsn,
            after_lsn=after_lsn,
            stream_created=stream_created,
            stream_sequence=stream_sequence,
            tries=1,
            ranges=plan.chunks,
            started_at=started_at,
            dictionary=dictionary,
        )

    def resumed(self, *, after_lsn: int) -> Record:
        """The same snapshot, whose missing ranges are now read at a later moment."""
        return replace(self, tries=self.tries + 1, after_lsn=max(after_lsn, self.after_lsn))

    def first_chunk(self, number: int) -> int:
        """The number of the first chunk of a range, read at the latest moment. No two moments share numbers: what a
        process that was killed leaves behind must not be taken for what is read now."""
        return ((self.tries - 1) * len(self.ranges) + number) * CHUNKS_PER_RANGE + 1

    def is_mixed(self, done: Sequence[RangeDone]) -> bool:
        """Whether some ranges were read at a later moment than the first."""
        return any(part.first_chunk > len(self.ranges) * CHUNKS_PER_RANGE for part in done)

    def document(self) -> dict[str, Any]:
        return {
            "snapshot_id": self.snapshot_id,
            "state": self.state,
            "fingerprint": self.fingerprint,
            "snapshot": self.visible,
            "lsn": self.lsn,
            "after_lsn": self.after_lsn,
            "stream_created": self.stream_created,
            "stream_sequence": self.stream_sequence,
            "tries": self.tries,
            "ranges": [[r.leaf_schema, r.leaf_table, r.first_block, r.end_block] for r in self.ranges],
            "started_at": self.started_at,
            "dictionary": self.dictionary,
            "rows": self.rows,
            "error": self.error,
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any] | None) -> Record | None:
        """What was kept; nothing if it is none of ours."""
        try:
            return (
                None
                if document is None
                else cls(
                    snapshot_id=str(document["snapshot_id"]),
                    state=document["state"],
                    fingerprint=str(document["fingerprint"]),
                    visible=str(document["snapshot"]),
                    lsn=int(document["lsn"]),
                    after_lsn=int(document["after_lsn"]),
                    stream_created=str(document["stream_created"]),
                    stream_sequence=int(document["stream_sequence"]),
                    tries=int(document["tries"]),
                    ranges=tuple(Chunk(n, *found) for n, found in enumerate(document["ranges"])),
                    started_at=int(document["started_at"]),
                    dictionary=document["dictionary"],
                    rows=int(document["rows"]),
                    error=document["error"],
                )
            )
        except (KeyError, TypeError, ValueError):
            return None


def can_resume(
    record: Record | None, *, fingerprint: str, has_key: bool, stream_created: str, first_sequence: int
) -> bool:
    """Whether the ranges that are missing may be read at a later moment than the others.

    Only if every row that moved since then did so by a change that the stream still has, and if a reader can tell by
    its key which row that was.
    """
    return (
        record is not None
        and record.state == "running"
        and record.fingerprint == fingerprint
        and has_key
        and record.stream_created == stream_created
        and record.stream_sequence + 1 >= first_sequence
    )


def missing(record: Record, done: Sequence[RangeDone]) -> list[Chunk]:
    """The ranges that are still to be read."""
    known = {part.number for part in done}
    return [part for part in record.ranges if part.number not in known]
