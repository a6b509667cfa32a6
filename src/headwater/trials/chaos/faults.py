"""The faults that a trial injects: one function for each kind."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg

import headwater
from headwater import NewEvent
from headwater.embedded.stepped_clock import SteppedClock
from headwater.errors import LogUnavailable
from headwater.trials.chaos.cluster import Cluster
from headwater.trials.chaos.config import TrialConfig, make_event
from headwater.trials.chaos.journal import Journal
from headwater.trials.chaos.processes import ProcessSupervisor
from headwater.trials.chaos.producers import RollbackRequest, publish_and_roll_back
from headwater.trials.chaos.proxy import Proxy

CONNECT_SECONDS: Final = 10
MAX_BACKGROUND_FAULTS: Final = 4
# Timeout for producers to pause and for open transactions to end.
PAUSE_SECONDS: Final = 5.0
# Number of rolled-back transactions of ten events each: more than the 32 values that one WAL record of a sequence
# covers. They must be fast, since servers commit about every second.
ROLLBACKS: Final = 10
MAX_ATTEMPTS: Final = 12
# These roles commit even if idle, to extend their leases.
COMMITTING_ROLES: Final = ("sql", "worker")
# Time for readers to see the positions of rolled-back events.
SEEN_SECONDS: Final = 0.3
QUIET_EVENTS: Final = 20
# Maximum offset of the Postgres clock from real time, and the minimum size of one step.
MAX_CLOCK_OFFSET_SECONDS: Final = 3600.0
MIN_CLOCK_STEP_SECONDS: Final = 60.0

TERMINATE: Final = (
    "select count(pg_terminate_backend(pid)) from pg_stat_activity "
    "where datname = current_database() and application_name = %s and random() < %s"
)


@dataclass(slots=True)
class FaultContext:
    """What a fault acts on: the processes, connections and servers of a trial."""

    config: TrialConfig
    processes: ProcessSupervisor
    proxy: Proxy
    # None: a given database, whose server must not be killed.
    cluster: Cluster | None
    given_dsn: str
    copy_events: int
    rng: random.Random
    # None: the clock of this Postgres cannot be changed.
    clock: SteppedClock | None = None
    clock_offset_seconds: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)
    # Faults that run concurrently with others.
    background: list[threading.Thread] = field(default_factory=list)
    # Number of producers by kind, to choose unique names.
    numbers: dict[str, int] = field(default_factory=dict)
    # How often the head moved back, so that positions were assigned again.
    head_went_back: int = 0

    @property
    def direct_dsn(self) -> str:
        """The address of the database without the proxy."""
        return self.given_dsn if self.cluster is None else self.cluster.dsn

    @property
    def directory(self) -> Path:
        return self.processes.directory

    def next_name(self, kind: str) -> str:
        self.numbers[kind] = self.numbers.get(kind, 0) + 1
        return f"{kind}-{self.numbers[kind]}"

    def run_in_background(self, act: Callable[[], None]) -> None:
        self.background = [thread for thread in self.background if thread.is_alive()]
        if len(self.background) >= MAX_BACKGROUND_FAULTS:
            return
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        self.background.append(thread)

    def end(self, seconds: float) -> None:
        """Wait until background faults have ended."""
        self.over.set()
        deadline = time.monotonic() + seconds
        for thread in self.background:
            thread.join(max(0.0, deadline - time.monotonic()))


def kill_a_process(context: FaultContext) -> None:
    """Kill a producer, worker, reader or server with SIGKILL."""
    context.processes.kill(context.rng)


def freeze_a_process(context: FaultContext) -> None:
    """Suspend a process until its leases have expired, then resume it."""
    process = context.processes.choose(context.rng)
    seconds = context.config.lease_seconds * context.rng.uniform(1.2, 2.5)

    def freeze() -> None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)
            context.over.wait(seconds)
            os.kill(process.pid, signal.SIGCONT)

    context.run_in_background(freeze)


def kill_postgres(context: FaultContext) -> None:
    """Kill every process of the server, which then recovers from its WAL; publish to the quiet topic afterwards."""
    assert context.cluster is not None
    with _detect_head_moved_back(context):
        context.cluster.kill()
    publish_quiet(context, "killed")


def stop_postgres_at_once(context: FaultContext) -> None:
    """Stop Postgres immediately, so that positions which readers have seen are assigned again.

    Producers pause and the walwriter is suspended, so that the WAL is not flushed; then transactions that roll back
    assign positions. A reader that keeps such a position would skip the events that get it after the restart.
    """
    cluster = context.cluster
    assert cluster is not None
    with _producers_paused(context), ExitStack() as frozen:
        with _log(context.direct_dsn, context) as log:
            _wait_until_quiet(context, log)
            walwriter = cluster.stop_walwriter()
            try:
                for attempt in range(MAX_ATTEMPTS):
                    start_lsn = cluster.inserted_lsn()
                    for _ in range(ROLLBACKS):
                        publish_and_roll_back(log, context.config)
                    context.over.wait(SEEN_SECONDS)
                    before = log.state().head
                    # A commit in between has flushed these positions too.
                    if not cluster.is_flushed(start_lsn):
                        break
                    if attempt == 1:
                        frozen.enter_context(context.processes.frozen(*COMMITTING_ROLES))
            except BaseException:
                _signal(walwriter, signal.SIGCONT)
                raise
        cluster.stop_at_once(walwriter)
        cluster.start()
        _compare_head(context, before)
        publish_quiet(context, "stopped")


def fail_over(context: FaultContext) -> None:
    """Promote a lagging standby: events that only the old primary had are lost, and their positions are reused."""
    cluster = context.cluster
    assert cluster is not None
    standby = cluster.make_standby()
    cut_off_at = cluster.cut_off(standby)
    # Only the old primary has these events; readers may see them.
    publish_quiet(context, "old-primary")
    context.over.wait(context.rng.uniform(0.5, 1.5))
    with _detect_head_moved_back(context):
        cluster.promote(standby, cut_off_at=cut_off_at)
        context.proxy.switch(cluster.dsn)
    publish_quiet(context, "promoted")


def end_sessions(context: FaultContext) -> None:
    """Terminate some database sessions."""
    with suppress(psycopg.OperationalError), _direct(context) as connection:
        connection.execute(TERMINATE, (context.config.name, context.rng.uniform(0.3, 1.0)))


def cut_connections(context: FaultContext) -> None:
    """Cut some connections in the middle of a message."""
    context.proxy.cut(context.rng.uniform(0.3, 1.0), context.rng.randrange(1 << 30))


def stall_connections(context: FaultContext) -> None:
    """Stall all connections for a while, as in a network outage."""
    context.proxy.stall(context.config.lease_seconds * context.rng.uniform(0.2, 1.5))


def hold_a_snapshot(context: FaultContext) -> None:
    """Hold a snapshot open, so that vacuum cannot remove dead rows."""
    seconds = context.rng.uniform(2, 8)

    def hold() -> None:
        with suppress(psycopg.OperationalError), _direct(context) as connection, connection.transaction():
            connection.execute("set transaction isolation level repeatable read")
            connection.execute("select pg_current_xact_id(), count(*) from pg_class")
            context.over.wait(seconds)

    context.run_in_background(hold)


def hold_a_publisher(context: FaultContext) -> None:
    """Publish in a transaction that stays open while others commit; then commit or roll back."""
    name = context.next_name("held")
    journal = Journal(context.directory, name)
    seconds = context.rng.uniform(0.5, 2.5)
    commits = context.rng.random() < 0.8

    def hold() -> None:
        numbers = [1, 2, 3]
        journal.record("tried", numbers)
        try:
            with _log(context.config.dsn, context) as log, log.transaction() as connection:
                for number in numbers:
                    event = make_event(name, number)
                    log.publish(context.config.open_topic, event.payload, key=event.key, connection=connection)
                    context.over.wait(seconds / 3)
                if not commits:
                    raise RollbackRequest
            journal.record("acknowledged", numbers)
        except RollbackRequest:
            journal.record("rolled back", numbers)
        except (LogUnavailable, psycopg.OperationalError):
            return
        finally:
            journal.close()

    context.run_in_background(hold)


def copy_many(context: FaultContext) -> None:
    """Publish thousands of events in one transaction."""
    name = context.next_name("copy")
    journal = Journal(context.directory, name)

    def copy() -> None:
        journal.record_range("tried", 1, context.copy_events)
        events = (make_event(name, number) for number in range(1, context.copy_events + 1))
        try:
            with _log(context.config.dsn, context) as log:
                log.publish_many(context.config.open_topic, events)
            journal.record_range("acknowledged", 1, context.copy_events)
        except (LogUnavailable, psycopg.OperationalError):
            return
        finally:
            journal.close()

    context.run_in_background(copy)


def step_the_clock(context: FaultContext) -> None:
    """Set the clock of Postgres back or forward by up to two hours."""
    assert context.clock is not None
    before = context.clock_offset_seconds
    while abs(context.clock_offset_seconds - before) < MIN_CLOCK_STEP_SECONDS:
        context.clock_offset_seconds = context.rng.uniform(-MAX_CLOCK_OFFSET_SECONDS, MAX_CLOCK_OFFSET_SECONDS)
    context.clock.set_offset(context.clock_offset_seconds)
    publish_quiet(context, "clock")


FAULTS: Final[Mapping[str, Callable[[FaultContext], None]]] = {
    "processes killed": kill_a_process,
    "processes frozen": freeze_a_process,
    "Postgres killed": kill_postgres,
    "Postgres stopped at once": stop_postgres_at_once,
    "failovers": fail_over,
    "sessions ended": end_sessions,
    "connections cut": cut_connections,
    "connections stalled": stall_connections,
    "snapshots held": hold_a_snapshot,
    "publishers held open": hold_a_publisher,
    "huge transactions": copy_many,
    "clock steps": step_the_clock,
}
# These require a server that may be killed.
SERVER_FAULTS: Final = frozenset({"Postgres killed", "Postgres stopped at once", "failovers"})
CLOCK_FAULTS: Final = frozenset({"clock steps"})


def publish_quiet(context: FaultContext, kind: str, count: int = QUIET_EVENTS) -> None:
    """Publish a few events to the quiet topic."""
    name = context.next_name(kind)
    journal = Journal(context.directory, name)
    numbers = list(range(1, count + 1))
    journal.record("tried", numbers)
    try:
        with _log(context.direct_dsn, context) as log:
            events = [make_event(name, number) for number in numbers]
            log.publish_batch(context.config.quiet_topic, [NewEvent(one.payload, key=one.key) for one in events])
        journal.record("acknowledged", numbers)
    except (LogUnavailable, psycopg.OperationalError):
        return
    finally:
        journal.close()


@contextmanager
def _producers_paused(context: FaultContext) -> Iterator[None]:
    context.config.pause_file.touch()
    try:
        yield
    finally:
        context.config.pause_file.unlink(missing_ok=True)


def _wait_until_quiet(context: FaultContext, log: headwater.Headwater) -> None:
    """Wait until no transaction that publishes is open; at most PAUSE_SECONDS."""
    deadline = time.monotonic() + PAUSE_SECONDS
    while time.monotonic() < deadline and not context.over.is_set():
        before = log.state()
        context.over.wait(SEEN_SECONDS)
        now = log.state()
        # The producer that rolls back keeps running, so the head still advances by up to ten positions.
        if now.stable >= before.head and now.stable >= now.head - 10:
            return


@contextmanager
def _detect_head_moved_back(context: FaultContext) -> Iterator[None]:
    try:
        with _log(context.direct_dsn, context) as log:
            before = log.state().head
    except (LogUnavailable, psycopg.OperationalError):
        before = 0
    yield
    _compare_head(context, before)


def _compare_head(context: FaultContext, before: int) -> None:
    with suppress(LogUnavailable, psycopg.OperationalError), _log(context.direct_dsn, context) as log:
        context.head_went_back += log.state().head < before


def _signal(pid: int | None, number: int) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _direct(context: FaultContext) -> psycopg.Connection[Any]:
    return psycopg.connect(
        context.direct_dsn,
        autocommit=True,
        connect_timeout=CONNECT_SECONDS,
        application_name=f"{context.config.name} faults",
    )


def _log(dsn: str, context: FaultContext) -> headwater.Headwater:
    return headwater.connect(
        dsn, pool_size=1, connect_timeout_seconds=CONNECT_SECONDS, application_name=context.config.name
    )
