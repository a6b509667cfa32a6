"""What is done to a log on trial: one function for each disaster."""

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
from headwater.trials.chaos.journal import Journal
from headwater.trials.chaos.producers import RolledBack, publish_and_roll_back
from headwater.trials.chaos.proxy import Proxy
from headwater.trials.chaos.stage import Stage, event_of
from headwater.trials.chaos.supervisor import Crew

CONNECT_SECONDS: Final = 10
MAX_AT_ONCE: Final = 4
# How long producers may take to pause, and transactions that were held open to end.
PAUSE_SECONDS: Final = 5.0
# Rolled-back transactions of ten events each: more than the 32 values that one WAL record of a sequence covers, and
# fast, since servers commit every second or so.
ROLLBACKS: Final = 10
MAX_TRIES: Final = 12
# These commit also while there is nothing to do, to keep their leases.
COMMITTING_ROLES: Final = ("sql", "worker")
# How long readers have to see the positions of rolled-back events.
SEEN_SECONDS: Final = 0.3
QUIET_EVENTS: Final = 20
# How far the clock of Postgres may be from the real one, and how much it changes at the least in one step.
MAX_CLOCK_OFFSET_SECONDS: Final = 3600.0
MIN_CLOCK_STEP_SECONDS: Final = 60.0

TERMINATE: Final = (
    "select count(pg_terminate_backend(pid)) from pg_stat_activity "
    "where datname = current_database() and application_name = %s and random() < %s"
)


@dataclass(slots=True)
class Scene:
    """What a disaster can get at."""

    stage: Stage
    crew: Crew
    proxy: Proxy
    # None: a database that was given, which is not ours to kill.
    cluster: Cluster | None
    given_dsn: str
    copy_events: int
    chance: random.Random
    # None: the clock of this Postgres cannot be stepped.
    clock: SteppedClock | None = None
    clock_offset_seconds: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)
    # Disasters that go on beside the others.
    going_on: list[threading.Thread] = field(default_factory=list)
    # How many there were of each kind that publishes under a name of its own.
    numbers: dict[str, int] = field(default_factory=dict)
    # How often the head of the log went back: positions that were seen were assigned again.
    head_went_back: int = 0

    @property
    def direct_dsn(self) -> str:
        """Past the proxy, which is for those that are to suffer from it."""
        return self.given_dsn if self.cluster is None else self.cluster.dsn

    @property
    def directory(self) -> Path:
        return self.crew.directory

    def next_name(self, kind: str) -> str:
        self.numbers[kind] = self.numbers.get(kind, 0) + 1
        return f"{kind}-{self.numbers[kind]}"

    def beside(self, act: Callable[[], None]) -> None:
        self.going_on = [thread for thread in self.going_on if thread.is_alive()]
        if len(self.going_on) >= MAX_AT_ONCE:
            return
        thread = threading.Thread(target=act, daemon=True)
        thread.start()
        self.going_on.append(thread)

    def end(self, seconds: float) -> None:
        """Let what goes on come to its end."""
        self.over.set()
        deadline = time.monotonic() + seconds
        for thread in self.going_on:
            thread.join(max(0.0, deadline - time.monotonic()))


def kill_a_process(scene: Scene) -> None:
    """SIGKILL for a producer, worker, reader or server."""
    scene.crew.kill(scene.chance)


def freeze_a_process(scene: Scene) -> None:
    """A process stands still until its leases are long gone, and then goes on as if nothing had been."""
    victim = scene.crew.choose(scene.chance)
    seconds = scene.stage.lease_seconds * scene.chance.uniform(1.2, 2.5)

    def freeze() -> None:
        with suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGSTOP)
            scene.over.wait(seconds)
            os.kill(victim.pid, signal.SIGCONT)

    scene.beside(freeze)


def kill_postgres(scene: Scene) -> None:
    """SIGKILL for every process of the server; it recovers from its WAL. Then a few events for the quiet topic."""
    assert scene.cluster is not None
    with _noting_head(scene):
        scene.cluster.kill()
    publish_quiet(scene, "killed")


def stop_postgres_at_once(scene: Scene) -> None:
    """An immediate stop that takes back positions which readers have seen.

    Producers pause, so that no commit flushes the WAL; the walwriter is stopped, so that nothing else does; then
    positions are assigned by transactions that roll back. A reader that remembers such a position passes over the
    events that get it after the restart.
    """
    cluster = scene.cluster
    assert cluster is not None
    with _producers_paused(scene), ExitStack() as frozen:
        with _log(scene.direct_dsn, scene) as log:
            _wait_until_quiet(scene, log)
            walwriter = cluster.stop_walwriter()
            try:
                for attempt in range(MAX_TRIES):
                    begun_at = cluster.inserted_lsn()
                    for _ in range(ROLLBACKS):
                        publish_and_roll_back(log, scene.stage)
                    scene.over.wait(SEEN_SECONDS)
                    before = log.state().drawn
                    # A commit in between has flushed these positions as well.
                    if not cluster.is_flushed(begun_at):
                        break
                    if attempt == 1:
                        frozen.enter_context(scene.crew.frozen(*COMMITTING_ROLES))
            except BaseException:
                _signal(walwriter, signal.SIGCONT)
                raise
        cluster.stop_at_once(walwriter)
        cluster.start()
        _note_head(scene, before)
        publish_quiet(scene, "stopped")


def fail_over(scene: Scene) -> None:
    """A standby that lags takes over: events that only the old primary had are gone, and their positions come again."""
    cluster = scene.cluster
    assert cluster is not None
    standby = cluster.make_standby()
    cut_off_at = cluster.cut_off(standby)
    # Only the old primary gets these, and readers may see them.
    publish_quiet(scene, "old-primary")
    scene.over.wait(scene.chance.uniform(0.5, 1.5))
    with _noting_head(scene):
        cluster.promote(standby, cut_off_at=cut_off_at)
        scene.proxy.switch(cluster.dsn)
    publish_quiet(scene, "promoted")


def end_sessions(scene: Scene) -> None:
    """Postgres is told to end some of its sessions."""
    with suppress(psycopg.OperationalError), _direct(scene) as connection:
        connection.execute(TERMINATE, (scene.stage.name, scene.chance.uniform(0.3, 1.0)))


def cut_connections(scene: Scene) -> None:
    """Connections break in the middle of whatever goes through them."""
    scene.proxy.cut(scene.chance.uniform(0.3, 1.0), scene.chance.randrange(1 << 30))


def stall_connections(scene: Scene) -> None:
    """Nothing goes through for a while, as if the network were gone."""
    scene.proxy.stall(scene.stage.lease_seconds * scene.chance.uniform(0.2, 1.5))


def hold_a_snapshot(scene: Scene) -> None:
    """Another program's transaction stays open, and with it every row that it could still see."""
    seconds = scene.chance.uniform(2, 8)

    def hold() -> None:
        with suppress(psycopg.OperationalError), _direct(scene) as connection, connection.transaction():
            connection.execute("set transaction isolation level repeatable read")
            connection.execute("select pg_current_xact_id(), count(*) from pg_class")
            scene.over.wait(seconds)

    scene.beside(hold)


def hold_a_publisher(scene: Scene) -> None:
    """A transaction publishes and stays open while others publish and commit; then it commits, or not."""
    name = scene.next_name("held")
    journal = Journal(scene.directory, name)
    seconds = scene.chance.uniform(0.5, 2.5)
    commits = scene.chance.random() < 0.8

    def hold() -> None:
        numbers = [1, 2, 3]
        journal.note("tried", numbers)
        try:
            with _log(scene.stage.dsn, scene) as log, log.transaction() as connection:
                for number in numbers:
                    event = event_of(name, number)
                    log.publish(scene.stage.open_topic, event.payload, key=event.key, connection=connection)
                    scene.over.wait(seconds / 3)
                if not commits:
                    raise RolledBack
            journal.note("acknowledged", numbers)
        except RolledBack:
            journal.note("rolled back", numbers)
        except (LogUnavailable, psycopg.OperationalError):
            return
        finally:
            journal.close()

    scene.beside(hold)


def copy_very_many(scene: Scene) -> None:
    """One transaction with thousands of events."""
    name = scene.next_name("copy")
    journal = Journal(scene.directory, name)

    def copy() -> None:
        journal.note_range("tried", 1, scene.copy_events)
        events = (event_of(name, number) for number in range(1, scene.copy_events + 1))
        try:
            with _log(scene.stage.dsn, scene) as log:
                log.publish_many(scene.stage.open_topic, events)
            journal.note_range("acknowledged", 1, scene.copy_events)
        except (LogUnavailable, psycopg.OperationalError):
            return
        finally:
            journal.close()

    scene.beside(copy)


def step_the_clock(scene: Scene) -> None:
    """The clock of Postgres goes back or forth by up to two hours. Leases, retries and subscriptions have to go on."""
    assert scene.clock is not None
    before = scene.clock_offset_seconds
    while abs(scene.clock_offset_seconds - before) < MIN_CLOCK_STEP_SECONDS:
        scene.clock_offset_seconds = scene.chance.uniform(-MAX_CLOCK_OFFSET_SECONDS, MAX_CLOCK_OFFSET_SECONDS)
    scene.clock.set_offset(scene.clock_offset_seconds)
    publish_quiet(scene, "clock")


DISASTERS: Final[Mapping[str, Callable[[Scene], None]]] = {
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
    "huge transactions": copy_very_many,
    "clock steps": step_the_clock,
}
# These need a server that may be killed.
OF_THE_SERVER: Final = frozenset({"Postgres killed", "Postgres stopped at once", "failovers"})
OF_THE_CLOCK: Final = frozenset({"clock steps"})


def publish_quiet(scene: Scene, kind: str, count: int = QUIET_EVENTS) -> None:
    """A few events for the readers that are bound to the quiet topic alone."""
    name = scene.next_name(kind)
    journal = Journal(scene.directory, name)
    numbers = list(range(1, count + 1))
    journal.note("tried", numbers)
    try:
        with _log(scene.direct_dsn, scene) as log:
            events = [event_of(name, number) for number in numbers]
            log.publish_batch(scene.stage.quiet_topic, [NewEvent(one.payload, key=one.key) for one in events])
        journal.note("acknowledged", numbers)
    except (LogUnavailable, psycopg.OperationalError):
        return
    finally:
        journal.close()


@contextmanager
def _producers_paused(scene: Scene) -> Iterator[None]:
    scene.stage.pause_file.touch()
    try:
        yield
    finally:
        scene.stage.pause_file.unlink(missing_ok=True)


def _wait_until_quiet(scene: Scene, log: headwater.Headwater) -> None:
    """Until nothing more is published and committed; or not, if a transaction that is held open takes too long."""
    deadline = time.monotonic() + PAUSE_SECONDS
    while time.monotonic() < deadline and not scene.over.is_set():
        before = log.state()
        scene.over.wait(SEEN_SECONDS)
        now = log.state()
        # Those that roll back go on, so that the head moves by as much as they assign.
        if now.settled >= before.drawn and now.settled >= now.drawn - 10:
            return


@contextmanager
def _noting_head(scene: Scene) -> Iterator[None]:
    try:
        with _log(scene.direct_dsn, scene) as log:
            before = log.state().drawn
    except (LogUnavailable, psycopg.OperationalError):
        before = 0
    yield
    _note_head(scene, before)


def _note_head(scene: Scene, before: int) -> None:
    with suppress(LogUnavailable, psycopg.OperationalError), _log(scene.direct_dsn, scene) as log:
        scene.head_went_back += log.state().drawn < before


def _signal(pid: int | None, number: int) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _direct(scene: Scene) -> psycopg.Connection[Any]:
    return psycopg.connect(
        scene.direct_dsn,
        autocommit=True,
        connect_timeout=CONNECT_SECONDS,
        application_name=f"{scene.stage.name} director",
    )


def _log(dsn: str, scene: Scene) -> headwater.Headwater:
    return headwater.connect(
        dsn, pool_size=1, connect_timeout_seconds=CONNECT_SECONDS, application_name=scene.stage.name
    )
