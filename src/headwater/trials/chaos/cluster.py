"""The Postgres on trial: one server that is crashed and started again, and standbys that take over from it.

After a failover another server of another directory is the primary; everything reaches it through the trial's proxy,
which is switched over. The servers that were made here are removed here.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from headwater.embedded import EmbeddedError, Postgres

CONNECT_SECONDS: Final = 10
DEADLINE_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.01

WALWRITER: Final = "select pid, wait_event from pg_stat_activity where backend_type = 'walwriter'"


class StandbyFailed(Exception):
    """The standby did not do within its time what a failover needs."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """What was acknowledged between these moments may be gone with an old primary: its standby did not get it.

    Seconds of the clock that the journals use. `began`: everything acknowledged before had reached the standby.
    """

    began: float
    ended: float


@dataclass(slots=True)
class Cluster:
    """The current primary and what became of the others."""

    server: Postgres
    # How to connect to its database, past the proxy.
    dsn: str
    directory: Path
    divergences: list[Divergence] = field(default_factory=list)
    _made: list[Postgres] = field(default_factory=list)
    # Counts every standby ever made: the directory of one that is the primary now must not be taken again.
    _standbys: int = 0

    def kill(self) -> None:
        """SIGKILL for every process of the server; it recovers from its WAL."""
        self.server.kill()
        self.server.start()

    def stop_walwriter(self) -> int | None:
        """SIGSTOP for the walwriter while it waits for work; its process id. None: there is none, or it never waits.

        Stopped while it writes or flushes, it would keep a lock that every commit needs, and all would wait for ever.
        """
        deadline = time.monotonic() + DEADLINE_SECONDS
        with connected(self.dsn) as connection:
            while time.monotonic() < deadline:
                row = connection.execute(WALWRITER).fetchone()
                if row is None:
                    return None
                pid = int(row[0])
                os.kill(pid, signal.SIGSTOP)
                try:
                    # It is asked again now that the answer stays true.
                    if connection.execute(WALWRITER).fetchone() == (pid, "WalWriterMain"):
                        return pid
                except BaseException:
                    os.kill(pid, signal.SIGCONT)
                    raise
                os.kill(pid, signal.SIGCONT)
                time.sleep(POLL_SECONDS)
        return None

    def inserted_lsn(self) -> str:
        """How far the WAL is written, flushed or not."""
        with connected(self.dsn) as connection:
            row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
        return str(row[0]) if row else "0/0"

    def is_flushed(self, lsn: str) -> bool:
        """Whether anything behind this place of the WAL would survive a crash."""
        with connected(self.dsn) as connection:
            row = connection.execute("select pg_current_wal_flush_lsn() > %s::pg_lsn", (lsn,)).fetchone()
        return bool(row and row[0])

    def stop_at_once(self, walwriter: int | None) -> None:
        """SIGQUIT for the postmaster, which ends without flushing; `walwriter`, stopped before, never runs again."""
        pid = self.server.pid
        if pid is not None:
            os.kill(pid, signal.SIGQUIT)
        if walwriter is not None:
            # The postmaster would wait for it, and it must not run again.
            with suppress(ProcessLookupError):
                os.kill(walwriter, signal.SIGKILL)
        self.server.stop(mode="immediate")

    def start(self) -> None:
        self.server.start()

    def make_standby(self) -> Postgres:
        """A standby that has everything that was acknowledged so far, and gets nothing more."""
        self._standbys += 1
        standby = self.server.make_standby(self.directory / f"standby-{self._standbys}")
        self._made.append(standby)
        standby.start()
        return standby

    def cut_off(self, standby: Postgres) -> float:
        """Let the standby get everything acknowledged until now, then nothing more; returns that moment."""
        now = time.monotonic()
        with connected(self.dsn) as primary:
            row = primary.execute("select pg_current_wal_flush_lsn()::text").fetchone()
        flushed = row[0] if row else "0/0"
        with connected(standby.dsn("postgres")) as connection:
            _wait(connection, "select coalesce(pg_last_wal_receive_lsn() >= %s::pg_lsn, false)", flushed)
            connection.execute("alter system set primary_conninfo = ''")
            connection.execute("select pg_reload_conf()")
            _wait(connection, "select not exists (select from pg_stat_wal_receiver)")
        return now

    def promote(self, standby: Postgres, *, cut_off_at: float) -> None:
        """The primary is killed; the standby takes over with what it has."""
        old = self.server
        old.kill()
        self.divergences.append(Divergence(cut_off_at, time.monotonic()))
        with connected(standby.dsn("postgres")) as connection:
            row = connection.execute("select pg_promote(true, %s)", (int(DEADLINE_SECONDS),)).fetchone()
            if row is None or not row[0]:
                raise StandbyFailed(f"the standby was not promoted within {DEADLINE_SECONDS:g} seconds")
        self.server = standby
        self.dsn = standby.dsn(str(conninfo_to_dict(self.dsn)["dbname"]))
        self._remove(old)

    def close(self) -> None:
        """Stop and remove the servers that were made here. The first one belongs to the caller."""
        for server in list(self._made):
            self._remove(server)

    def _remove(self, server: Postgres) -> None:
        if server in self._made:
            self._made.remove(server)
            with suppress(EmbeddedError):
                server.stop(mode="immediate")
            shutil.rmtree(server.data_dir, ignore_errors=True)


def connected(dsn: str) -> psycopg.Connection[Any]:
    return psycopg.connect(dsn, autocommit=True, connect_timeout=CONNECT_SECONDS)


def host_and_port(dsn: str) -> tuple[str, int]:
    """What libpq makes of an address, whichever way it was given."""
    with connected(dsn) as connection:
        return connection.info.host, connection.info.port


def _wait(connection: psycopg.Connection[Any], question: str, *parameters: object) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        row = connection.execute(question, parameters or None).fetchone()
        if row and row[0]:
            return
        if time.monotonic() > deadline:
            raise StandbyFailed(f"the standby did not answer yes within {DEADLINE_SECONDS:g} seconds: {question}")
        time.sleep(POLL_SECONDS)
