"""The format "headwater.changes": logical replication as a Spark stream.

Offsets are WAL positions (LSN, timeline, system identifier) in Spark's checkpoint. Spark calls `latestOffset` for the
end of the next micro-batch, a task reads the changes up to it, and `commit` advances the slot after the sink has stored
the batch. Every use of an offset is verified against the server's timeline; see headwater.capture.timeline.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from headwater.capture import pgoutput
from headwater.capture.connection import connect
from headwater.capture.slot import Slot, SlotState, watch
from headwater.capture.timeline import WalPosition
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.observability import metrics
from headwater.spark.options import refuse_unknown_options

OPTIONS = ("dsn", "slot", "publication", "tables", "maxBytesPerTrigger", "waitSeconds")

# After this much WAL, a batch is due even without changes of captured tables, so that the slot can advance.
QUIET_BYTES = 16 << 20
# If the slot lags this much, looking for changes costs more than an empty batch, whose commit advances the slot.
BEHIND_BYTES = 1 << 20
WATCH_SECONDS = 30.0
MAX_PAUSE_SECONDS = 0.25
# The maximum share of time to spend on looking for changes.
MAX_POLLING_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class ChangesOptions:
    """The parsed options of a read."""

    slot: Slot
    tables: tuple[str, ...]
    max_bytes: int
    wait_seconds: float

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ChangesOptions:
        refuse_unknown_options(options, OPTIONS)
        missing = [name for name in ("dsn", "slot") if name not in options]
        if missing:
            raise InvalidRequest(f'the format "headwater.changes" requires the options {" and ".join(missing)}')
        numbers = {}
        for name, default in (("maxBytesPerTrigger", 64 << 20), ("waitSeconds", 5)):
            text = options.get(name, str(default))
            if not text.isdecimal() or (name == "maxBytesPerTrigger" and int(text) < 1):
                raise InvalidRequest(f"invalid option {name} {text!r}: expected a whole number")
            numbers[name] = int(text)
        return cls(
            slot=Slot(options["dsn"], options["slot"], options.get("publication", options["slot"])),
            tables=tuple(name.strip() for name in options.get("tables", "").split(",") if name.strip()),
            max_bytes=numbers["maxBytesPerTrigger"],
            wait_seconds=float(numbers["waitSeconds"]),
        )


@dataclass(frozen=True)
class LsnRange(InputPartition):
    """The input of one task: transactions with `start <= commit LSN < end`."""

    start: WalPosition
    end: WalPosition


def is_batch_due(state: SlotState, *, start: int, end: int, max_bytes: int | None) -> bool:
    """Whether a batch is due without checking that it has changes."""
    full = max_bytes is not None and end - start >= max_bytes
    return full or end - start >= QUIET_BYTES or start - state.confirmed_lsn >= BEHIND_BYTES


class ChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads one slot. Offsets are WAL positions; a batch may end at any of them."""

    def __init__(self, options: ChangesOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema
        self.target: int | None = None
        self._until_now = False
        self._connection: psycopg.Connection[Any] | None = None
        self._watched = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_connection": None}

    def _connected(self) -> psycopg.Connection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self.options.slot.dsn)
        return self._connection

    def initialOffset(self) -> dict[str, int]:
        # Spark calls this only without a checkpoint: only then may a slot be created.
        state = self.options.slot.prepare(self.options.tables)
        return WalPosition(state.confirmed_lsn, state.history).offset

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxBytes(self.options.max_bytes)

    def prepareForTriggerAvailableNow(self) -> None:
        # Spark calls this before the first offset, when a missing slot may or may not be an error. So the target is
        # set with the first batch.
        self._until_now = True

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """The end of the next batch. Waits up to `wait_seconds` for a change: Spark would call again at once."""
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        position = WalPosition.parse(start)
        if self._until_now and self.target is None:
            self.target = self._watched_state(position).readable_lsn
        deadline = time.monotonic() + (0 if self.target is not None else self.options.wait_seconds)
        looked_to, pause = start["lsn"], 0.01
        while True:
            took = 0.0
            try:
                state = self._watched_state(position)
                end = state.readable_lsn if self.target is None else min(state.readable_lsn, self.target)
                end = end if max_bytes is None else min(end, start["lsn"] + max_bytes)
                if end > looked_to:
                    # Any write advances the WAL, including this query's own commits. Following it with empty batches
                    # would never end.
                    if self.target is not None or is_batch_due(state, start=start["lsn"], end=end, max_bytes=max_bytes):
                        return WalPosition(end, state.history).offset
                    before = time.monotonic()
                    if self.options.slot.has_changes(self._connected(), start=start["lsn"], end=end):
                        return WalPosition(end, state.history).offset
                    took = time.monotonic() - before
                    looked_to = end
            except psycopg.OperationalError as error:
                # The query survives a server restart.
                metrics.logger.warning("capture lost its connection", extra={metrics.ERROR: str(error)})
            left = deadline - time.monotonic()
            if left <= 0:
                return start
            time.sleep(min(max(pause, took / MAX_POLLING_SHARE), left))
            pause = min(pause * 1.5, MAX_PAUSE_SECONDS)

    def _watched_state(self, start: WalPosition) -> SlotState:
        """The state of the slot. SlotLost if a query cannot continue from `start` without a gap."""
        slot = self.options.slot
        state = slot.verify(start, connection=self._connected())
        slot.reject_advanced(state, start.lsn)
        if time.monotonic() - self._watched >= WATCH_SECONDS:
            self._watched = time.monotonic()
            watch(state, slot=slot.name)
        return state

    def reportLatestOffset(self) -> dict[str, int] | None:
        try:
            return {"lsn": self.options.slot.state(self._connected()).flushed_lsn}
        except (HeadwaterError, psycopg.Error):
            return None  # for display only; the next batch raises the error

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [LsnRange(WalPosition.parse(start), WalPosition.parse(end))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, LsnRange)
        wanted = to_arrow_schema(self.schema, timezone="UTC")
        slot, start, end = self.options.slot, partition.start, partition.end
        slot.verify(start, end)
        for batch in slot.read(start=start.lsn, end=end.lsn):
            columns = [
                column if column.type == field.type else column.cast(field.type)
                for column, field in zip(batch.columns, wanted, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=wanted)
        # A read opens its own connections: a failover may have happened between two of them.
        slot.verify(start, end)

    def commit(self, end: dict[str, int]) -> None:
        """Advance the slot: the batch up to `end` is durable in the sink. If this fails, a later commit covers it."""
        try:
            # After a failover, this LSN may denote changes that were not read.
            self.options.slot.verify(WalPosition.parse(end), connection=self._connected())
            self.options.slot.advance(end["lsn"], self._connected())
        except psycopg.OperationalError as error:
            metrics.logger.warning("capture lost its connection", extra={metrics.ERROR: str(error)})

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class ChangesSource(DataSource):
    """The changes of the tables of a publication, from a replication slot. Both are created if they are missing."""

    @classmethod
    def name(cls) -> str:
        return "headwater.changes"

    def schema(self) -> StructType:
        return from_arrow_schema(pgoutput.SCHEMA)

    def streamReader(self, schema: StructType) -> ChangesReader:
        return ChangesReader(ChangesOptions.parse(self.options), schema)
