"""Splits the rows of a snapshot into messages of limited rows and bytes. No I/O.

Chunk boundaries depend on the rows alone, not on how they arrive, so that a repeated read of a range gives the same
messages with the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from headwater.nats import frames, messages
from headwater.nats.codec import Encoding
from headwater.nats.errors import InvalidMessage
from headwater.nats.messages import CHUNK_ROWS, SnapshotInfo

# Chunk numbers reserved for each range of a table: more than a range needs, few enough for many ranges.
CHUNKS_PER_RANGE: Final = 100_000_000
# An upper bound for the bytes of a chunk other than its rows.
_FRAME_BYTES: Final = 4_096
# Assumed compression ratio: rows compress to a quarter of their size or less.
_COMPRESSION: Final = 4


class ChunkWriter:
    """Splits the rows of one range into chunks. Use one writer per range, from its first row to its last."""

    def __init__(
        self,
        snapshot: SnapshotInfo,
        *,
        first_chunk: int,
        max_payload_bytes: int,
        chunk_rows: int = CHUNK_ROWS,
        encoding: Encoding = "msgpack",
        compressed: bool = False,
        dictionary: bytes | None = None,
    ) -> None:
        self._snapshot: Final = snapshot
        self._first_chunk: Final = first_chunk
        self._max_payload_bytes: Final = max_payload_bytes
        self._chunk_rows: Final = chunk_rows
        self._text_bytes: Final = max(1, max_payload_bytes - _FRAME_BYTES) * (_COMPRESSION if compressed else 1)
        self._encoding: Final[Encoding] = encoding
        self._compressed: Final = compressed
        self._dictionary: Final = dictionary
        self._held: list[str] = []
        self._held_bytes = 0
        self.chunks = 0
        self.rows = 0

    def add(self, rows: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the messages that these rows (JSON objects) complete."""
        for row in rows:
            if self._held and (
                len(self._held) >= self._chunk_rows or self._held_bytes + len(row) + 1 > self._text_bytes
            ):
                yield from self.finish()
            self._held.append(row)
            self._held_bytes += len(row) + 1

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Yield the messages of the buffered rows."""
        held, self._held, self._held_bytes = self._held, [], 0
        if held:
            yield from self._fitting(held)

    def _fitting(self, rows: list[str]) -> Iterator[pa.RecordBatch]:
        if self.chunks >= CHUNKS_PER_RANGE:
            raise InvalidMessage(f"a range of the table has more than {CHUNKS_PER_RANGE} chunks")
        message = messages.chunk_messages(
            self._snapshot,
            [rows],
            first_chunk=self._first_chunk + self.chunks,
            encoding=self._encoding,
            compressed=self._compressed,
            dictionary=self._dictionary,
        )
        size = pc.add(frames.payload_sizes(message), frames.header_sizes(message))[0].as_py()
        if size <= self._max_payload_bytes:
            self.chunks += 1
            self.rows += len(rows)
            yield message
        elif len(rows) > 1:
            middle = len(rows) // 2
            yield from self._fitting(rows[:middle])
            yield from self._fitting(rows[middle:])
        else:
            raise InvalidMessage(
                f"a row of {self._snapshot.table.full_name} takes {size} bytes; the NATS server accepts at most "
                f"{self._max_payload_bytes}",
                hint="Raise the server's max_payload, or remove the table from the publication.",
            )


def merge_runs(ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Convert (first, count) pairs to sorted [first, last] runs; drop empty ones and merge adjacent ones."""
    found: list[list[int]] = []
    for first, count in sorted(ranges):
        if count == 0:
            continue
        if found and found[-1][1] + 1 == first:
            found[-1][1] = first + count - 1
        else:
            found.append([first, first + count - 1])
    return found
