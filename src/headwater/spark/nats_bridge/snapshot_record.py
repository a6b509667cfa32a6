"""The record of a running snapshot, from which another process can resume it. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headwater.capture.snapshot import Chunk, Plan
from headwater.nats.snapshot_chunks import CHUNKS_PER_RANGE


@dataclass(frozen=True, slots=True)
class RangeResult:
    """A completed range: all its chunks are in the stream."""

    number: int
    first_chunk: int
    chunks: int
    rows: int


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A snapshot of one table. Each attempt exports a new Postgres snapshot and reads the missing ranges at it.

    `visible` and `lsn` belong to the first attempt; `stream_sequence` was read before it, and `after_lsn` after the
    latest one. `tries` counts the attempts; the number of a chunk shows in which attempt it was read.
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
    def create(
        cls,
        snapshot_id: str,
        plan: Plan,
        *,
        after_lsn: int,
        stream_created: str,
        stream_sequence: int,
        started_at: int,
        dictionary: str | None,
    ) -> SnapshotRecord:
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

    def resumed(self, *, after_lsn: int) -> SnapshotRecord:
        """The record for the next attempt."""
        return replace(self, tries=self.tries + 1, after_lsn=max(after_lsn, self.after_lsn))

    def first_chunk(self, number: int) -> int:
        """The number of the first chunk of a range in the current attempt.

        Attempts do not share chunk numbers, so that chunks of a killed process are not mistaken for current ones.
        """
        return ((self.tries - 1) * len(self.ranges) + number) * CHUNKS_PER_RANGE + 1

    def is_mixed(self, done: Sequence[RangeResult]) -> bool:
        """Whether some ranges were read in a later attempt than the first."""
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
    def of_document(cls, document: Mapping[str, Any] | None) -> SnapshotRecord | None:
        """Parse a stored record; None if it is missing or has another format."""
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
    record: SnapshotRecord | None, *, fingerprint: str, has_key: bool, stream_created: str, first_sequence: int
) -> bool:
    """Whether the missing ranges may be read at a later snapshot than the others.

    This requires that the stream still has every change since then (a rewrite that moves rows without changes alters
    the fingerprint), and that readers can match changes to rows by key.
    """
    return (
        record is not None
        and record.state == "running"
        and record.fingerprint == fingerprint
        and has_key
        and record.stream_created == stream_created
        and record.stream_sequence + 1 >= first_sequence
    )


def missing_ranges(record: SnapshotRecord, done: Sequence[RangeResult]) -> list[Chunk]:
    """The ranges that are not read yet."""
    known = {part.number for part in done}
    return [part for part in record.ranges if part.number not in known]
