"""A logical replication slot: created if missing, read in whole transactions, advanced on request.

Callers are the Spark source `changes`, the NATS bridge and pipelines. `prepare` creates the publication and the slot;
`read` peeks at the changes between two LSNs without consuming them, so a retry returns the same changes; `advance`
confirms an LSN when everything before it is durable elsewhere. Invariants: a slot has one reader; a reader never
continues on a slot, cluster or timeline that no longer has the changes after its checkpoint (`SlotLost`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from headwater.capture import publication
from headwater.capture.connection import connect, stream
from headwater.capture.pgoutput import Decoder
from headwater.capture.publication import quoted
from headwater.capture.queries import fill_query, query
from headwater.capture.timeline import WalHistory, WalPosition, switch_points
from headwater.errors import CaptureRefused, SlotBusy, SlotLost
from headwater.observability import metrics

T = TypeVar("T")

WARNING_BYTES: Final = 512 << 20
CRITICAL_BYTES: Final = 1 << 30
# Below this, reading the WAL again costs less than writing one more record to it.
_REREAD_BYTES: Final = 1 << 20
_OUTPUT_ROWS: Final = 20_000
_FIRST_WAIT_SECONDS: Final = 0.02
_MAX_WAIT_SECONDS: Final = 1.0
_LOG_RUNNING_SINCE: Final = 160_000
_FAILOVER_SINCE: Final = 170_000
_START_OVER: Final = (
    "Start over with a new slot, a new checkpoint and a new snapshot of the tables: see 'After a failover' in "
    "`headwater docs capture-changes`; for a pipeline, run: headwater pipeline reset NAME --drop-slot"
)


class SlotLevel(Enum):
    """How urgently a slot needs attention."""

    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class SlotState:
    """The state of a slot and of the server's WAL."""

    plugin: str
    database: str
    active: bool
    wal_status: str
    confirmed_lsn: int
    restart_lsn: int
    flushed_lsn: int
    this_database: str
    system_identifier: int
    timeline: int
    on_standbys_lsn: int

    @property
    def history(self) -> WalHistory:
        """The cluster and timeline of the server's WAL."""
        return WalHistory(self.system_identifier, self.timeline)

    @property
    def readable_lsn(self) -> int:
        """Where a read may end: everything before it is durable here and on the standbys that the slot waits for."""
        return min(self.flushed_lsn, self.on_standbys_lsn)

    @property
    def lag_bytes(self) -> int:
        """Bytes of WAL that are not confirmed yet."""
        return max(0, self.flushed_lsn - self.confirmed_lsn)

    @property
    def retained_bytes(self) -> int:
        """Bytes of WAL that the slot retains on the server's disk."""
        return max(0, self.flushed_lsn - self.restart_lsn)

    @property
    def reread_bytes(self) -> int:
        """Bytes of WAL that each read decodes again before it reaches new changes. Long transactions increase it."""
        return max(0, self.confirmed_lsn - self.restart_lsn)

    def level(self, *, warning_bytes: int = WARNING_BYTES, critical_bytes: int = CRITICAL_BYTES) -> SlotLevel:
        held = self.retained_bytes
        if held >= critical_bytes or self.wal_status in ("unreserved", "lost"):
            return SlotLevel.CRITICAL
        return SlotLevel.WARNING if held >= warning_bytes else SlotLevel.OK


@dataclass(frozen=True, slots=True)
class Slot:
    """One replication slot that reads one publication. Holds no connection, so it can be pickled."""

    dsn: str
    name: str
    publication: str
    busy_seconds: float = 30.0

    def prepare(self, tables: Sequence[str] = (), *, create_slot: bool = True) -> SlotState:
        """Create the publication of `tables` and the slot if missing; CaptureRefused if that cannot work.

        A reader that has a checkpoint passes `create_slot=False` and gets SlotLost if the slot is missing: a new slot
        starts at the current end of the WAL and would skip the changes since the old slot was dropped.
        """
        with connect(self.dsn) as connection:
            publication.check_server(connection)
            publication.ensure(connection, self.publication, tables)
            if create_slot and self._find(connection) is None:
                failover = connection.info.server_version >= _FAILOVER_SINCE
                # Waits until all running transactions have ended.
                connection.execute(query("create_failover_slot" if failover else "create_slot"), {"slot": self.name})
            return self._checked(connection)

    def check(self, tables: Sequence[str] = ()) -> None:
        """Run the checks of `prepare` without creating anything."""
        with connect(self.dsn) as connection:
            publication.check_server(connection)
            publication.ensure(connection, self.publication, tables, create=False)
            if self._find(connection) is not None:
                self._checked(connection)

    def state(self, connection: psycopg.Connection[Any] | None = None) -> SlotState:
        """The state of the slot. SlotLost if the slot or the WAL that it needs is gone."""
        if connection is not None:
            return self._checked(connection)
        with connect(self.dsn) as own:
            return self._checked(own)

    def verify(self, *positions: WalPosition, connection: psycopg.Connection[Any] | None = None) -> SlotState:
        """The state of the slot. SlotLost if the server's WAL does not contain everything read up to `positions`.

        After a failover to a lagging standby, or a restore, the same LSNs denote other changes.
        """
        if connection is None:
            with connect(self.dsn) as own:
                return self.verify(*positions, connection=own)
        state = self._checked(connection)
        for position in positions:
            self._reject_lost_history(position, state)
        return state

    def read(self, *, start: int, end: int) -> Iterator[Any]:
        """Yield the changes of all transactions with `start <= commit LSN < end`, as RecordBatches.

        Does not advance the slot: the same bounds give the same changes until the slot is advanced past them. Holds
        one batch in memory, however large a transaction is.
        """
        state = self.verify(WalPosition(end))
        self.reject_advanced(state, start)
        if end <= start:
            return
        with connect(self.dsn) as connection:
            keys = connection.execute(query("primary_keys"), {"publication": self.publication}).fetchall()
        decoder = Decoder(start=start, end=end, primary_keys={(row[0], row[1]): row[2] for row in keys})
        peek = fill_query(
            "peek",
            slot=sql.Literal(self.name),
            end=sql.Literal(end),
            publication=sql.Literal(quoted(self.publication)),
        )
        for batch in self._stream_when_free(peek):
            changes = decoder.decode(batch.column(0))
            for first in range(0, changes.num_rows, _OUTPUT_ROWS):
                yield changes.slice(first, _OUTPUT_ROWS)
        decoder.finish()

    def reject_advanced(self, state: SlotState, start: int) -> None:
        """Raise SlotLost if the slot was advanced past the reader's position."""
        if start < state.confirmed_lsn:
            raise SlotLost(
                f"the slot {self.name!r} is at {lsn_text(state.confirmed_lsn)}, past this reader's position "
                f"{lsn_text(start)}: it was advanced or recreated, and the changes in between were not read",
                hint=f"{_START_OVER}. Never let two readers share a slot.",
                detail={"confirmed_lsn": state.confirmed_lsn, "start": start},
            )

    def end_of_log(self) -> int:
        """The current end of the WAL: everything visible in a table was logged before it."""
        with connect(self.dsn) as connection:
            row = connection.execute(query("current_lsn")).fetchone()
        assert row is not None
        return int(row[0])

    def has_changes(self, connection: psycopg.Connection[Any], *, start: int, end: int) -> bool:
        """Whether `read` would return any change. Costs the server as much as reading."""
        parameters = {"slot": self.name, "start": start, "end": end, "publication": quoted(self.publication)}
        row = self._retry_while_busy(lambda: connection.execute(query("peek_begins"), parameters).fetchone())
        return bool(row and row[0])

    def advance(self, lsn: int, connection: psycopg.Connection[Any] | None = None) -> None:
        """Confirm that everything before `lsn` is durable elsewhere. Idempotent: the slot never moves back."""
        if connection is None:
            with connect(self.dsn) as own:
                return self.advance(lsn, own)
        state = self._checked(connection)
        if lsn <= state.confirmed_lsn:
            return None
        if lsn - state.restart_lsn > _REREAD_BYTES and connection.info.server_version >= _LOG_RUNNING_SINCE:
            # Optional: without the permission, the server logs running transactions by itself every few seconds.
            with suppress(psycopg.errors.InsufficientPrivilege):
                connection.execute(query("log_running"))
        self._retry_while_busy(lambda: connection.execute(query("advance_slot"), {"slot": self.name, "lsn": lsn}))
        return None

    def drop(self) -> None:
        """Drop the slot if it exists. The publication stays."""
        with connect(self.dsn) as connection:
            if self._find(connection) is not None:
                self._retry_while_busy(lambda: connection.execute("select pg_drop_replication_slot(%s)", (self.name,)))

    # -- internals

    def _find(self, connection: psycopg.Connection[Any]) -> SlotState | None:
        with connection.cursor(row_factory=class_row(SlotState)) as cursor:
            return cursor.execute(query("slot_state"), {"slot": self.name}).fetchone()

    def _checked(self, connection: psycopg.Connection[Any]) -> SlotState:
        state = self._find(connection)
        if state is None:
            # A standby that is not promoted yet may still receive the slot. This query fails on a standby, so that the
            # caller retries instead of seeing SlotLost.
            connection.execute(query("current_lsn"))
            raise SlotLost(
                f"replication slot {self.name!r} does not exist: it was dropped, or a standby without it was promoted. "
                "This reader has lost the changes since then",
                hint=_START_OVER,
            )
        if state.plugin != "pgoutput" or state.database != state.this_database:
            raise CaptureRefused(
                f"the slot {self.name!r} uses {state.plugin} on database {state.database!r}; "
                f"expected pgoutput on {state.this_database!r}",
                hint="Choose another name for the slot.",
            )
        if state.wal_status == "lost":
            raise SlotLost(
                f"the server removed changes that the slot {self.name!r} had not read: "
                "the slot lagged by more than max_slot_wal_keep_size",
                hint="Drop the slot, create a new one, and take a new snapshot of the tables.",
            )
        return state

    def _reject_lost_history(self, position: WalPosition, state: SlotState) -> None:
        detail = {"lsn": position.lsn, "flushed_lsn": state.flushed_lsn, "timeline": state.timeline}
        if position.history is not None and position.history != state.history:
            if position.history.system_identifier != state.system_identifier:
                raise SlotLost(
                    f"the slot {self.name!r} is on another cluster than the one that was read up to "
                    f"{lsn_text(position.lsn)}: LSNs of the two clusters cannot be compared",
                    hint=f"Connect to the cluster that was read. If it no longer exists: {_START_OVER}",
                    detail=detail,
                )
            left_at = switch_points(self.dsn, state.history).get(position.history.timeline)
            if left_at is None or position.lsn > left_at:
                kept = "nothing of it" if left_at is None else f"it only before {lsn_text(left_at)}"
                raise SlotLost(
                    f"the server has lost changes that may have been read: the slot {self.name!r} was read up to "
                    f"{lsn_text(position.lsn)} on timeline {position.history.timeline}, and the server, on timeline "
                    f"{state.timeline}, has {kept}: a lagging standby was promoted, or the server was restored",
                    hint=f"{_START_OVER}. Sinks outside of the server still hold the lost changes.",
                    detail={**detail, "read_on_timeline": position.history.timeline, "left_at": left_at},
                )
        if position.lsn > state.flushed_lsn:
            raise SlotLost(
                f"the slot {self.name!r} was read up to {lsn_text(position.lsn)}, and the server's WAL ends at "
                f"{lsn_text(state.flushed_lsn)}: a lagging standby was promoted, or the server was restored",
                hint=f"{_START_OVER}. Sinks outside of the server still hold the lost changes.",
                detail=detail,
            )

    def _retry_while_busy(self, action: Callable[[], T]) -> T:
        """Run `action`, retrying while another process uses the slot; SlotBusy after `busy_seconds`."""
        deadline = time.monotonic() + self.busy_seconds
        wait = _FIRST_WAIT_SECONDS
        while True:
            try:
                return action()
            except psycopg.errors.ObjectInUse as error:
                if time.monotonic() + wait > deadline:
                    raise SlotBusy(
                        f"another process has been reading the slot {self.name!r} for {self.busy_seconds:.0f} seconds",
                        hint="A slot has one reader. Stop the other reader, or use a separate slot.",
                    ) from error
            time.sleep(wait)
            wait = min(2 * wait, _MAX_WAIT_SECONDS)

    def _stream_when_free(self, peek: str) -> Iterator[Any]:
        """The result of `peek`. Retries cover only the first batch: a busy slot fails before its first row."""

        def start() -> tuple[Generator[Any], Any]:
            rows = stream(self.dsn, peek)
            return rows, next(rows, None)

        rows, first = self._retry_while_busy(start)
        with closing(rows):
            if first is not None:
                yield first
                del first
                yield from rows


def lsn_text(lsn: int) -> str:
    """Format an LSN as Postgres does, for example 16/B374D848."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def watch(state: SlotState, *, slot: str) -> SlotLevel:
    """Log a warning or an error if the slot retains much WAL; return the level."""
    level = state.level()
    if level is not SlotLevel.OK:
        metrics.logger.log(
            40 if level is SlotLevel.CRITICAL else 30,
            "replication slot retains much WAL",
            extra={metrics.SLOT: slot, metrics.RETAINED_BYTES: state.retained_bytes},
        )
    return level
