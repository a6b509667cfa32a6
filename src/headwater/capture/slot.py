"""A replication slot: made when missing, read by whole transactions, advanced when told to."""

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
from headwater.capture.queries import filled, query
from headwater.capture.timeline import History, WalPlace, switch_points
from headwater.errors import CaptureRefused, SlotBusy, SlotLost
from headwater.observability import metrics

T = TypeVar("T")

WARNING_BYTES: Final = 512 << 20
CRITICAL_BYTES: Final = 1 << 30
# Below this, reading the server's log again costs less than one more record in it.
_REREAD_BYTES: Final = 1 << 20
_OUTPUT_ROWS: Final = 20_000
_FIRST_WAIT_SECONDS: Final = 0.02
_LONGEST_WAIT_SECONDS: Final = 1.0
_LOG_RUNNING_SINCE: Final = 160_000
_FAILOVER_SINCE: Final = 170_000
_BEGIN_AGAIN: Final = (
    "Begin again with a new slot, a new checkpoint and a new snapshot of the tables, as docs/how-to/capture-changes.md "
    "says under 'After a failover'; of a pipeline: headwater pipeline reset NAME --drop-slot"
)


class Level(Enum):
    """How urgent it is that somebody looks at a slot."""

    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class SlotState:
    """Where a slot stands in the server's log."""

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
    def history(self) -> History:
        """Which history the server's log is."""
        return History(self.system_identifier, self.timeline)

    @property
    def readable_lsn(self) -> int:
        """Where a read may end: what is before it is durable here, and on the standbys that the slot waits for."""
        return min(self.flushed_lsn, self.on_standbys_lsn)

    @property
    def lag_bytes(self) -> int:
        """How much of the server's log was not yet confirmed."""
        return max(0, self.flushed_lsn - self.confirmed_lsn)

    @property
    def retained_bytes(self) -> int:
        """How much of the server's log the slot keeps on its disk."""
        return max(0, self.flushed_lsn - self.restart_lsn)

    @property
    def reread_bytes(self) -> int:
        """What each read goes through again before it comes to something new. Grows with long transactions."""
        return max(0, self.confirmed_lsn - self.restart_lsn)

    def level(self, *, warning_bytes: int = WARNING_BYTES, critical_bytes: int = CRITICAL_BYTES) -> Level:
        held = self.retained_bytes
        if held >= critical_bytes or self.wal_status in ("unreserved", "lost"):
            return Level.CRITICAL
        return Level.WARNING if held >= warning_bytes else Level.OK


@dataclass(frozen=True, slots=True)
class Slot:
    """One replication slot that reads one publication. Holds no connection, so it can be sent anywhere."""

    dsn: str
    name: str
    publication: str
    busy_seconds: float = 30.0

    def prepare(self, tables: Sequence[str] = (), *, create_slot: bool = True) -> SlotState:
        """Make the publication of `tables` and the slot where they are missing; refuse what could not work.

        A reader that has read before says not to create the slot: a new one begins at the present end of the log, and
        what was committed since the old one was there would be skipped. SlotLost then.
        """
        with connect(self.dsn) as connection:
            publication.check_server(connection)
            publication.ensure(connection, self.publication, tables)
            if create_slot and self._find(connection) is None:
                failover = connection.info.server_version >= _FAILOVER_SINCE
                # Waits for the transactions that run now.
                connection.execute(query("create_failover_slot" if failover else "create_slot"), {"slot": self.name})
            return self._checked(connection)

    def check(self, tables: Sequence[str] = ()) -> None:
        """Refuse what `prepare` would refuse, and make nothing."""
        with connect(self.dsn) as connection:
            publication.check_server(connection)
            publication.ensure(connection, self.publication, tables, create=False)
            if self._find(connection) is not None:
                self._checked(connection)

    def state(self, connection: psycopg.Connection[Any] | None = None) -> SlotState:
        """Where the slot stands. SlotLost if it is gone, or if what it needs is."""
        if connection is not None:
            return self._checked(connection)
        with connect(self.dsn) as own:
            return self._checked(own)

    def verify(self, *places: WalPlace, connection: psycopg.Connection[Any] | None = None) -> SlotState:
        """Where the slot stands. SlotLost if the server's log does not have all that a reader has read up to `places`.

        After a failover to a standby that lagged, or a restore, the same LSNs are other changes.
        """
        if connection is None:
            with connect(self.dsn) as own:
                return self.verify(*places, connection=own)
        state = self._checked(connection)
        for place in places:
            self._refuse_lost_history(place, state)
        return state

    def read(self, *, start: int, end: int) -> Iterator[Any]:
        """The changes of all transactions whose commit lies at `start` or after and before `end`, as RecordBatches.

        Moves nothing: the same bounds give the same changes until the slot is advanced past them. Holds one batch
        in memory, however large a transaction is.
        """
        state = self.verify(WalPlace(end))
        self.refuse_advanced(state, start)
        if end <= start:
            return
        with connect(self.dsn) as connection:
            keys = connection.execute(query("primary_keys"), {"publication": self.publication}).fetchall()
        decoder = Decoder(start=start, end=end, primary_keys={(row[0], row[1]): row[2] for row in keys})
        peek = filled(
            "peek",
            slot=sql.Literal(self.name),
            end=sql.Literal(end),
            publication=sql.Literal(quoted(self.publication)),
        )
        for batch in self._patiently_streamed(peek):
            changes = decoder.decode(batch.column(0))
            for first in range(0, changes.num_rows, _OUTPUT_ROWS):
                yield changes.slice(first, _OUTPUT_ROWS)
        decoder.finish()

    def refuse_advanced(self, state: SlotState, start: int) -> None:
        """SlotLost if the slot is beyond where a reader stands."""
        if start < state.confirmed_lsn:
            raise SlotLost(
                f"the slot {self.name!r} stands at {lsn_text(state.confirmed_lsn)}, past {lsn_text(start)} "
                "where this reader stands: it was advanced, or made again, and what lies between was not read",
                hint=f"{_BEGIN_AGAIN}. Never let two readers share a slot.",
                detail={"confirmed_lsn": state.confirmed_lsn, "start": start},
            )

    def end_of_log(self) -> int:
        """Where the server's log ends now: whatever can be seen of a table was logged before it."""
        with connect(self.dsn) as connection:
            row = connection.execute(query("current_lsn")).fetchone()
        assert row is not None
        return int(row[0])

    def has_changes(self, connection: psycopg.Connection[Any], *, start: int, end: int) -> bool:
        """Whether `read` would give anything. Costs as much of the server as reading."""
        parameters = {"slot": self.name, "start": start, "end": end, "publication": quoted(self.publication)}
        row = self._patiently(lambda: connection.execute(query("peek_begins"), parameters).fetchone())
        return bool(row and row[0])

    def advance(self, lsn: int, connection: psycopg.Connection[Any] | None = None) -> None:
        """Say that everything before `lsn` is durable elsewhere. Never moves back, so repeating it is harmless."""
        if connection is None:
            with connect(self.dsn) as own:
                return self.advance(lsn, own)
        state = self._checked(connection)
        if lsn <= state.confirmed_lsn:
            return None
        if lsn - state.restart_lsn > _REREAD_BYTES and connection.info.server_version >= _LOG_RUNNING_SINCE:
            # Without the right to ask for it, the server does it itself now and then.
            with suppress(psycopg.errors.InsufficientPrivilege):
                connection.execute(query("log_running"))
        self._patiently(lambda: connection.execute(query("advance_slot"), {"slot": self.name, "lsn": lsn}))
        return None

    def drop(self) -> None:
        """Drop the slot, if it is there. The publication stays."""
        with connect(self.dsn) as connection:
            if self._find(connection) is not None:
                self._patiently(lambda: connection.execute("select pg_drop_replication_slot(%s)", (self.name,)))

    # -- how

    def _find(self, connection: psycopg.Connection[Any]) -> SlotState | None:
        with connection.cursor(row_factory=class_row(SlotState)) as cursor:
            return cursor.execute(query("slot_state"), {"slot": self.name}).fetchone()

    def _checked(self, connection: psycopg.Connection[Any]) -> SlotState:
        state = self._find(connection)
        if state is None:
            # A standby that is not promoted yet may still get the slot: it refuses this question, which is no loss.
            connection.execute(query("current_lsn"))
            raise SlotLost(
                f"there is no replication slot {self.name!r}: it was dropped, or a standby without it was promoted. "
                "Changes since it was there are lost to this reader",
                hint=_BEGIN_AGAIN,
            )
        if state.plugin != "pgoutput" or state.database != state.this_database:
            raise CaptureRefused(
                f"the slot {self.name!r} is one of {state.plugin} on database {state.database!r}, "
                f"not one of pgoutput on {state.this_database!r}",
                hint="Choose another name for the slot.",
            )
        if state.wal_status == "lost":
            raise SlotLost(
                f"the server threw away changes that the slot {self.name!r} had not read: "
                "it fell back by more than max_slot_wal_keep_size",
                hint="Drop the slot, make a new one, and take a new snapshot of the tables.",
            )
        return state

    def _refuse_lost_history(self, place: WalPlace, state: SlotState) -> None:
        detail = {"lsn": place.lsn, "flushed_lsn": state.flushed_lsn, "timeline": state.timeline}
        if place.history is not None and place.history != state.history:
            if place.history.system_identifier != state.system_identifier:
                raise SlotLost(
                    f"the server of the slot {self.name!r} is another cluster than the one that was read up to "
                    f"{lsn_text(place.lsn)}: its LSNs say nothing of that",
                    hint=f"Connect to the cluster that was read. If that is gone: {_BEGIN_AGAIN}",
                    detail=detail,
                )
            left_at = switch_points(self.dsn, state.history).get(place.history.timeline)
            if left_at is None or place.lsn > left_at:
                kept = "nothing of it" if left_at is None else f"only what is before {lsn_text(left_at)} of it"
                raise SlotLost(
                    f"the server has lost changes that may have been read: the slot {self.name!r} was read up to "
                    f"{lsn_text(place.lsn)} on timeline {place.history.timeline}, and the server, on timeline "
                    f"{state.timeline}, has {kept}: a standby that lagged was promoted, or the server was restored",
                    hint=f"{_BEGIN_AGAIN}. Sinks outside of the server still hold what it lost.",
                    detail={**detail, "read_on_timeline": place.history.timeline, "left_at": left_at},
                )
        if place.lsn > state.flushed_lsn:
            raise SlotLost(
                f"the slot {self.name!r} was read up to {lsn_text(place.lsn)}, and the server's log ends at "
                f"{lsn_text(state.flushed_lsn)}: a standby that lagged was promoted, or the server was restored",
                hint=f"{_BEGIN_AGAIN}. Sinks outside of the server still hold what it lost.",
                detail=detail,
            )

    def _patiently(self, action: Callable[[], T]) -> T:
        """Do it, again and again while another process has the slot."""
        deadline = time.monotonic() + self.busy_seconds
        wait = _FIRST_WAIT_SECONDS
        while True:
            try:
                return action()
            except psycopg.errors.ObjectInUse as error:
                if time.monotonic() + wait > deadline:
                    raise SlotBusy(
                        f"another process has been reading the slot {self.name!r} for {self.busy_seconds:.0f} seconds",
                        hint="One slot has one reader. Stop the other one, or use a slot of its own.",
                    ) from error
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)

    def _patiently_streamed(self, peek: str) -> Iterator[Any]:
        """The result of `peek`. A slot that is busy says so before its first row."""

        def start() -> tuple[Generator[Any], Any]:
            rows = stream(self.dsn, peek)
            return rows, next(rows, None)

        rows, first = self._patiently(start)
        with closing(rows):
            if first is not None:
                yield first
                del first
                yield from rows


def lsn_text(lsn: int) -> str:
    """An LSN as Postgres writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def watch(state: SlotState, *, slot: str) -> Level:
    """Log where a slot stands if that needs somebody's attention."""
    level = state.level()
    if level is not Level.OK:
        metrics.logger.log(
            40 if level is Level.CRITICAL else 30,
            "replication slot holds much of the server's log",
            extra={metrics.SLOT: slot, metrics.RETAINED_BYTES: state.retained_bytes},
        )
    return level
