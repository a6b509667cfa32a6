"""Crashes and failovers that issue positions again: what readers outside of the database must live through."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psycopg

from headwater.database import schema
from headwater.embedded import Binaries, Postgres
from headwater.trials.chaos.cluster import Cluster, connected

TRIES = 20


def make_cluster(directory: Path, *, binaries: Binaries | None = None) -> Cluster:
    """A server of our own, as durable as the defaults make it, with the schema in it. `close` it at the end."""
    server = Postgres(directory / "server", binaries=binaries, settings={"wal_writer_delay": "10s"})
    server.start()
    server.ensure_database("headwater")
    with connected(server.dsn()) as connection:
        schema.upgrade(connection)
    return Cluster(server, server.dsn(), directory)


def head(cluster: Cluster) -> int:
    with connected(cluster.dsn) as connection:
        row = connection.execute("select headwater.head()").fetchone()
    assert row is not None
    return int(row[0])


def take_positions_back(cluster: Cluster, busy_topic: str, *, pause_seconds: float = 0.15) -> tuple[int, int]:
    """Crash Postgres so that positions that readers have seen are issued again; the head before and after.

    Publishes to the busy topic and rolls back, with the walwriter stopped, so that nothing of it is on disk. A flush in
    between (a checkpoint, a reader that commits) saves the positions; then it is tried again.
    """
    for _ in range(TRIES):
        walwriter = cluster.stop_walwriter()
        assert walwriter is not None
        with connected(cluster.dsn) as connection:
            for _ in range(60):
                with connection.transaction(force_rollback=True):
                    connection.execute("select headwater.publish(%s, '{}') from generate_series(1, 10)", (busy_topic,))
            before = _value(connection, "select headwater.head()")
            # Readers look at the head every few milliseconds and go on to it.
            time.sleep(pause_seconds)
        cluster.stop_at_once(walwriter)
        cluster.start()
        after = head(cluster)
        if after < before:
            return before, after
    raise AssertionError(f"the head did not go back in {TRIES} crashes")


def fail_over(cluster: Cluster, busy_topic: str, events: int = 500) -> tuple[int, int]:
    """Fail over to a standby that lacks the last `events` events; the head before and after."""
    standby = cluster.make_standby()
    cut_off_at = cluster.cut_off(standby)
    with connected(cluster.dsn) as connection:
        for _ in range(events // 50):
            connection.execute("select headwater.publish(%s, '{}') from generate_series(1, 50)", (busy_topic,))
        before = _value(connection, "select headwater.head()")
    # As above: readers are to see it.
    time.sleep(0.3)
    cluster.promote(standby, cut_off_at=cut_off_at)
    return before, head(cluster)


def _value(connection: psycopg.Connection[Any], sql: str) -> int:
    row = connection.execute(sql.encode()).fetchone()
    assert row is not None
    return int(row[0])
