"""The Postgres servers of a trial: a primary that is crashed and restarted, and standbys that replace it.

After a failover the primary is another server in another directory; the proxy of the trial then connects to it. The
cluster removes the standbys that it created.
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
    """The standby did not reach the required state in time."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A period in which a primary may have acknowledged events that its standby did not receive.

    Times are those of the journals. Everything acknowledged before `began` had reached the standby.
    """

    began: float
    ended: float


@dataclass(slots=True)
class Cluster:
    """The current primary and its standbys."""

    server: Postgres
    # The address of the database without the proxy.
    dsn: str
    directory: Path
    divergences: list[Divergence] = field(default_factory=list)
    _created: list[Postgres] = field(default_factory=list)
    # Counts all standbys ever created, so that no directory is reused.
    _standbys: int = 0

    def kill(self) -> None:
        """Kill every process of the server with SIGKILL and restart it; it recovers from its WAL."""
        self.server.kill()
        self.server.start()

    def stop_walwriter(self) -> int | None:
        """Suspend the walwriter while it is idle; returns its process id, or None if that failed.

        If it were suspended during a write or flush, it would hold a lock that every commit needs.
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
                    # Check again, since it may have started to work before the signal.
                    if connection.execute(WALWRITER).fetchone() == (pid, "WalWriterMain"):
                        return pid
                except BaseException:
                    os.kill(pid, signal.SIGCONT)
                    raise
                os.kill(pid, signal.SIGCONT)
                time.sleep(POLL_SECONDS)
        return None

    def inserted_lsn(self) -> str:
        """The insert position of the WAL, flushed or not."""
        with connected(self.dsn) as connection:
            row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
        return str(row[0]) if row else "0/0"

    def is_flushed(self, lsn: str) -> bool:
        """Whether any WAL after this LSN is flushed and would survive a crash."""
        with connected(self.dsn) as connection:
            row = connection.execute("select pg_current_wal_flush_lsn() > %s::pg_lsn", (lsn,)).fetchone()
        return bool(row and row[0])

    def stop_at_once(self, walwriter: int | None) -> None:
        """Stop the server with SIGQUIT, without flushing WAL. The suspended `walwriter` is killed."""
        pid = self.server.pid
        if pid is not None:
            os.kill(pid, signal.SIGQUIT)
        if walwriter is not None:
            # The postmaster waits for it to exit, but it must not flush.
            with suppress(ProcessLookupError):
                os.kill(walwriter, signal.SIGKILL)
        self.server.stop(mode="immediate")

    def start(self) -> None:
        self.server.start()

    def make_standby(self) -> Postgres:
        """Create and start a standby of the current primary."""
        self._standbys += 1
        standby = self.server.make_standby(self.directory / f"standby-{self._standbys}")
        self._created.append(standby)
        standby.start()
        return standby

    def cut_off(self, standby: Postgres) -> float:
        """Disconnect the standby after it has received everything acknowledged so far; returns that time."""
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
        """Kill the primary and promote the standby."""
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
        """Stop and remove the standbys. The first server belongs to the caller."""
        for server in list(self._created):
            self._remove(server)

    def _remove(self, server: Postgres) -> None:
        if server in self._created:
            self._created.remove(server)
            with suppress(EmbeddedError):
                server.stop(mode="immediate")
            shutil.rmtree(server.data_dir, ignore_errors=True)


def connected(dsn: str) -> psycopg.Connection[Any]:
    return psycopg.connect(dsn, autocommit=True, connect_timeout=CONNECT_SECONDS)


def host_and_port(dsn: str) -> tuple[str, int]:
    """The host and port of a DSN, as libpq resolves it."""
    with connected(dsn) as connection:
        return connection.info.host, connection.info.port


def _wait(connection: psycopg.Connection[Any], query: str, *parameters: object) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        row = connection.execute(query, parameters or None).fetchone()
        if row and row[0]:
            return
        if time.monotonic() > deadline:
            raise StandbyFailed(f"the standby did not meet the condition within {DEADLINE_SECONDS:g} seconds: {query}")
        time.sleep(POLL_SECONDS)
