"""What is done to a log on trial: one function for each disaster. Each says in a word or two what it did."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import psycopg

import headwater
from headwater.chaos.crew import Crew
from headwater.chaos.journal import Journal
from headwater.chaos.parts import Stage, event_of
from headwater.chaos.proxy import Proxy
from headwater.embedded import Postgres
from headwater.errors import LogUnavailable

CONNECT_SECONDS: Final = 10
MOST_AT_ONCE: Final = 4

TERMINATE: Final = (
    "select count(pg_terminate_backend(pid)) from pg_stat_activity "
    "where datname = current_database() and application_name = %s and random() < %s"
)


@dataclass(slots=True)
class Scene:
    """What a disaster can get at."""

    stage: Stage
    # Past the proxy, which is for those that are to suffer from it.
    direct_dsn: str
    crew: Crew
    proxy: Proxy
    # None: a database that was given, which is not ours to kill.
    server: Postgres | None
    copy_events: int
    chance: random.Random
    over: threading.Event = field(default_factory=threading.Event)
    # Disasters that go on beside the others.
    going_on: list[threading.Thread] = field(default_factory=list)
    copies: int = 0
    held: int = 0

    def beside(self, act: Callable[[], None]) -> None:
        self.going_on = [thread for thread in self.going_on if thread.is_alive()]
        if len(self.going_on) >= MOST_AT_ONCE:
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
    """SIGKILL for a producer, worker, follower or broker."""
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
    """SIGKILL for every process of the server; it recovers from its own log."""
    assert scene.server is not None
    scene.server.kill()
    scene.server.start()


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
    """Somebody else's transaction stays open, and with it every row that it could still see."""
    seconds = scene.chance.uniform(2, 8)

    def hold() -> None:
        with suppress(psycopg.OperationalError), _direct(scene) as connection, connection.transaction():
            connection.execute("set transaction isolation level repeatable read")
            connection.execute("select pg_current_xact_id(), count(*) from pg_class")
            scene.over.wait(seconds)

    scene.beside(hold)


def hold_a_publisher(scene: Scene) -> None:
    """A transaction publishes and stays open while others publish and commit; then it commits, or not."""
    scene.held += 1
    name = f"held-{scene.held}"
    journal = Journal(_directory(scene), name)
    seconds = scene.chance.uniform(0.5, 2.5)
    commits = scene.chance.random() < 0.8

    def hold() -> None:
        numbers = [1, 2, 3]
        journal.note("tried", numbers)
        try:
            with _log(scene) as log, log.transaction() as connection:
                for number in numbers:
                    event = event_of(name, number)
                    log.publish(scene.stage.open_topic, event.payload, key=event.key, connection=connection)
                    scene.over.wait(seconds / 3)
                if not commits:
                    raise _RolledBack
            journal.note("acknowledged", numbers)
        except _RolledBack:
            journal.note("rolled back", numbers)
        except (LogUnavailable, psycopg.OperationalError):
            return
        finally:
            journal.close()

    scene.beside(hold)


def copy_very_many(scene: Scene) -> None:
    """One transaction with thousands of events."""
    scene.copies += 1
    name = f"copy-{scene.copies}"
    journal = Journal(_directory(scene), name)

    def copy() -> None:
        journal.note_range("tried", 1, scene.copy_events)
        events = (event_of(name, number) for number in range(1, scene.copy_events + 1))
        try:
            with _log(scene) as log:
                log.publish_many(scene.stage.open_topic, events)
            journal.note_range("acknowledged", 1, scene.copy_events)
        except (LogUnavailable, psycopg.OperationalError):
            return
        finally:
            journal.close()

    scene.beside(copy)


DISASTERS: Final[Mapping[str, Callable[[Scene], None]]] = {
    "processes killed": kill_a_process,
    "processes frozen": freeze_a_process,
    "Postgres killed": kill_postgres,
    "sessions ended": end_sessions,
    "connections cut": cut_connections,
    "connections stalled": stall_connections,
    "snapshots held": hold_a_snapshot,
    "publishers held open": hold_a_publisher,
    "huge transactions": copy_very_many,
}


class _RolledBack(Exception):
    """Rolls back."""


def _directory(scene: Scene) -> Any:
    return scene.crew.directory


def _direct(scene: Scene) -> psycopg.Connection[Any]:
    return psycopg.connect(
        scene.direct_dsn,
        autocommit=True,
        connect_timeout=CONNECT_SECONDS,
        application_name=f"{scene.stage.name} director",
    )


def _log(scene: Scene) -> headwater.Headwater:
    return headwater.connect(
        scene.stage.dsn, pool_size=1, connect_timeout_seconds=CONNECT_SECONDS, application_name=scene.stage.name
    )
