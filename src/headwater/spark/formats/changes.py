"""The format "headwater.changes": logical replication as a stream of Spark."""

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
from headwater.capture.timeline import WalPlace
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.observability import metrics
from headwater.spark.options import refuse_unknown_options

OPTIONS = ("dsn", "slot", "publication", "tables", "maxBytesPerTrigger", "waitSeconds")

# So much of the server's log makes a batch even if nothing in it is ours: the slot has to let go of it some time.
QUIET_BYTES = 16 << 20
# So far behind, a look for changes costs more than an empty batch, whose commit brings the slot up.
BEHIND_BYTES = 1 << 20
WATCH_SECONDS = 30.0
LONGEST_PAUSE_SECONDS = 0.25
# Looking for changes may take this part of the time.
SHARE_OF_LOOKING = 0.1


@dataclass(frozen=True, slots=True)
class ChangesOptions:
    """What the options of a read say."""

    slot: Slot
    tables: tuple[str, ...]
    max_bytes: int
    wait_seconds: float

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ChangesOptions:
        refuse_unknown_options(options, OPTIONS)
        missing = [name for name in ("dsn", "slot") if name not in options]
        if missing:
            raise InvalidRequest(f'the format "headwater.changes" needs the options {" and ".join(missing)}')
        numbers = {}
        for name, default in (("maxBytesPerTrigger", 64 << 20), ("waitSeconds", 5)):
            text = options.get(name, str(default))
            if not text.isdecimal() or (name == "maxBytesPerTrigger" and int(text) < 1):
                raise InvalidRequest(f"the option {name} is {text!r}, not a whole number")
            numbers[name] = int(text)
        return cls(
            slot=Slot(options["dsn"], options["slot"], options.get("publication", options["slot"])),
            tables=tuple(name.strip() for name in options.get("tables", "").split(",") if name.strip()),
            max_bytes=numbers["maxBytesPerTrigger"],
            wait_seconds=float(numbers["waitSeconds"]),
        )


@dataclass(frozen=True)
class LsnRange(InputPartition):
    """What one task reads: transactions that committed at `start` or after, and before `end`."""

    start: WalPlace
    end: WalPlace


def must_read(state: SlotState, *, start: int, end: int, max_bytes: int | None) -> bool:
    """Whether a batch is due without looking whether there are changes in it."""
    full = max_bytes is not None and end - start >= max_bytes
    return full or end - start >= QUIET_BYTES or start - state.confirmed_lsn >= BEHIND_BYTES


class ChangesReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One slot. Its offsets are places in the server's log, any of which is a good place to cut."""

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
        # Spark asks this only if there is no checkpoint: only then is it right to make a slot.
        state = self.options.slot.prepare(self.options.tables)
        return WalPlace(state.confirmed_lsn, state.history).offset

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxBytes(self.options.max_bytes)

    def prepareForTriggerAvailableNow(self) -> None:
        # Spark asks this before the first offset, when the slot may be missing and it is not yet known whether that is
        # a loss. So the target is set with the first batch.
        self._until_now = True

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """The end of the next batch; waits a while for a change, since Spark would ask again at once."""
        max_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        place = WalPlace.parse(start)
        if self._until_now and self.target is None:
            self.target = self._watched_state(place).readable_lsn
        deadline = time.monotonic() + (0 if self.target is not None else self.options.wait_seconds)
        looked_to, pause = start["lsn"], 0.01
        while True:
            took = 0.0
            try:
                state = self._watched_state(place)
                end = state.readable_lsn if self.target is None else min(state.readable_lsn, self.target)
                end = end if max_bytes is None else min(end, start["lsn"] + max_bytes)
                if end > looked_to:
                    # Any program's writes move the log, this query's own commits too. To follow them with empty
                    # batches would never end.
                    if self.target is not None or must_read(state, start=start["lsn"], end=end, max_bytes=max_bytes):
                        return WalPlace(end, state.history).offset
                    before = time.monotonic()
                    if self.options.slot.has_changes(self._connected(), start=start["lsn"], end=end):
                        return WalPlace(end, state.history).offset
                    took = time.monotonic() - before
                    looked_to = end
            except psycopg.OperationalError as error:
                # A server that restarts is no reason to end the query.
                metrics.logger.warning("capture has no connection", extra={metrics.ERROR: str(error)})
            left = deadline - time.monotonic()
            if left <= 0:
                return start
            time.sleep(min(max(pause, took / SHARE_OF_LOOKING), left))
            pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)

    def _watched_state(self, start: WalPlace) -> SlotState:
        """Where the slot stands. SlotLost if a query cannot go on from `start` without a gap."""
        slot = self.options.slot
        state = slot.verify(start, connection=self._connected())
        slot.refuse_advanced(state, start.lsn)
        if time.monotonic() - self._watched >= WATCH_SECONDS:
            self._watched = time.monotonic()
            watch(state, slot=slot.name)
        return state

    def reportLatestOffset(self) -> dict[str, int] | None:
        try:
            return {"lsn": self.options.slot.state(self._connected()).flushed_lsn}
        except (HeadwaterError, psycopg.Error):
            return None  # it is for display only; the next batch says what is wrong

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [LsnRange(WalPlace.parse(start), WalPlace.parse(end))]

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
        # A read has connections of its own: another server may have taken over between two of them.
        slot.verify(start, end)

    def commit(self, end: dict[str, int]) -> None:
        """The batch up to `end` is durable in the sink: let the slot go. A later commit makes up for a failed one."""
        try:
            # The server may be another one by now, on which this LSN stands for changes that were not read.
            self.options.slot.verify(WalPlace.parse(end), connection=self._connected())
            self.options.slot.advance(end["lsn"], self._connected())
        except psycopg.OperationalError as error:
            metrics.logger.warning("capture has no connection", extra={metrics.ERROR: str(error)})

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class ChangesSource(DataSource):
    """The changes of the tables of a publication, from a replication slot. Both are made when they are missing."""

    @classmethod
    def name(cls) -> str:
        return "headwater.changes"

    def schema(self) -> StructType:
        return from_arrow_schema(pgoutput.SCHEMA)

    def streamReader(self, schema: StructType) -> ChangesReader:
        return ChangesReader(ChangesOptions.parse(self.options), schema)
