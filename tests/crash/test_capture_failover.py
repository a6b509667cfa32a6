"""Does change capture skip or repeat a change after a failover? If it cannot go on without a gap, does it say so?"""

from __future__ import annotations

import json
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from headwater.capture.slot import Slot
from headwater.capture.timeline import WalHistory, WalPosition
from headwater.embedded import Binaries, EmbeddedError, Postgres, find_binaries
from headwater.errors import SlotLost
from headwater.spark.formats.changes import ChangesReader, ChangesSource
from headwater.trials.chaos.cluster import Cluster, connected
from patience import PATIENCE_SECONDS

FAILOVER_SLOTS_SINCE = 17
SYNCHRONIZING = {"hot_standby_feedback": "on", "sync_replication_slots": "on", "primary_slot_name": "standby"}

Offset = dict[str, int]
NewCluster = Callable[..., Cluster]


@pytest.fixture
def new_cluster() -> Iterator[NewCluster]:
    """A server with a captured table; standbys of it use the physical slot `standby`."""
    made: list[Cluster] = []
    with tempfile.TemporaryDirectory(prefix="headwater-capture-", ignore_cleanup_errors=True) as name:

        def make(settings: dict[str, str] | None = None, *, binaries: Binaries | None = None) -> Cluster:
            server = Postgres(Path(name) / "server", binaries=binaries, settings=settings or {})
            server.start()
            server.ensure_database("app")
            cluster = Cluster(server, server.dsn("app"), Path(name))
            made.append(cluster)
            with connected(cluster.dsn) as connection:
                connection.execute("select pg_create_physical_replication_slot('standby', true)")
                connection.execute("create table item (id integer primary key)")
            return cluster

        try:
            yield make
        finally:
            for cluster in made:
                cluster.close()
                cluster.server.kill()


def major_of(cluster: Cluster) -> int:
    with connected(cluster.dsn) as connection:
        return connection.info.server_version // 10_000


def synchronizing(new_cluster: NewCluster) -> Cluster:
    cluster = new_cluster(SYNCHRONIZING)
    if major_of(cluster) < FAILOVER_SLOTS_SINCE:
        pytest.skip(f"Postgres has failover slots since {FAILOVER_SLOTS_SINCE}")
    return cluster


def capture(cluster: Cluster) -> ChangesReader:
    """A reader as Spark makes it after each start of a query."""
    source = ChangesSource({"dsn": cluster.dsn, "slot": "items", "tables": "item", "waitSeconds": "0"})
    return source.streamReader(source.schema())


def slot_of(cluster: Cluster) -> Slot:
    return Slot(cluster.dsn, "items", "items")


def insert(cluster: Cluster, *ids: int) -> None:
    with connected(cluster.dsn) as connection:
        connection.cursor().executemany("insert into item values (%s)", [(one,) for one in ids])


def write_beyond(cluster: Cluster, lsn: int) -> None:
    """Let the server's log grow past a place."""
    with connected(cluster.dsn) as connection:
        while slot_of(cluster).end_of_log() <= lsn:
            connection.execute("select pg_logical_emit_message(true, 'filler', repeat('x', 100000))")


def rows_of(reader: ChangesReader, start: Offset, end: Offset) -> list[int]:
    sent = pickle.loads(pickle.dumps(reader))
    return [
        json.loads(row["key"])["id"]
        for part in reader.partitions(start, end)
        for batch in sent.read(part)
        for row in batch.to_pylist()
    ]


def next_batch(reader: ChangesReader, start: Offset) -> tuple[list[int], Offset]:
    end = reader.latestOffset(start, ReadAllAvailable())
    rows = rows_of(reader, start, end)
    reader.commit(end)
    return rows, end


def wait_for(question: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not question():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def wait_until_synchronized(cluster: Cluster, standby: Postgres) -> None:
    """The standby has the slot, as it would be left by a promotion."""

    def is_synchronized() -> bool:
        with connected(cluster.dsn) as primary:
            # A slot is synchronized as soon as a place is logged from which it can be read on the standby as well.
            primary.execute("select pg_log_standby_snapshot()")
            primary.execute("select pg_logical_emit_message(true, 'flush', '')")
        slot = slot_of(cluster)
        slot.advance(slot.state().readable_lsn)
        with connected(standby.dsn("postgres")) as connection:
            row = connection.execute(
                "select synced and not temporary from pg_replication_slots where slot_name = 'items'"
            ).fetchone()
        return bool(row and row[0])

    wait_for(is_synchronized, "the slot never came to the standby")


def slots_of(cluster: Cluster) -> list[str]:
    with connected(cluster.dsn) as connection:
        rows = connection.execute("select slot_name from pg_replication_slots where slot_type = 'logical'").fetchall()
    return [row[0] for row in rows]


def test_a_failover_slot_survives_a_promotion_and_no_change_is_lost_or_repeated(new_cluster: NewCluster) -> None:
    cluster = synchronizing(new_cluster)
    reader = capture(cluster)
    standby = cluster.make_standby()
    with connected(cluster.dsn) as connection:
        connection.execute("alter system set synchronized_standby_slots = 'standby'")
        connection.execute("select pg_reload_conf()")
    reader.initialOffset()
    wait_until_synchronized(cluster, standby)
    start = reader.initialOffset()
    insert(cluster, *range(10))
    wait_for(lambda: reader.latestOffset(start, ReadAllAvailable()) != start, "no batch")
    seen, start = next_batch(reader, start)
    insert(cluster, *range(10, 20))
    cut_off_at = cluster.cut_off(standby)
    # The standby does not get these. The slot waits for it, so no batch has them either.
    insert(cluster, *range(900, 910))
    state = slot_of(cluster).state()
    assert state.readable_lsn < state.flushed_lsn
    planned = reader.latestOffset(start, ReadAllAvailable())
    reader.stop()
    cluster.promote(standby, cut_off_at=cut_off_at)

    reader = capture(cluster)
    if planned != start:
        # Spark repeats a batch that it has planned.
        seen, start = seen + rows_of(reader, start, planned), planned
    insert(cluster, *range(20, 30))
    more, end = next_batch(reader, start)
    assert sorted(seen + more) == list(range(30))
    assert (start["timeline"], end["timeline"]) == (1, 2)
    assert slot_of(cluster).state().confirmed_lsn == end["lsn"]
    reader.stop()


@pytest.mark.parametrize("grown", [False, True], ids=["log ends before", "log is past it"])
def test_changes_that_the_new_primary_lacks_end_the_capture(new_cluster: NewCluster, grown: bool) -> None:
    """The standby lagged behind what was read. Its LSNs from there on are other changes, which must not be skipped."""
    cluster = synchronizing(new_cluster)
    reader = capture(cluster)
    standby = cluster.make_standby()
    reader.initialOffset()
    wait_until_synchronized(cluster, standby)
    start = reader.initialOffset()
    cut_off_at = cluster.cut_off(standby)
    write_beyond(cluster, start["lsn"] + 1_000_000)
    insert(cluster, *range(10))
    planned = reader.latestOffset(start, ReadAllAvailable())
    assert rows_of(reader, start, planned) == list(range(10))
    reader.stop()
    cluster.promote(standby, cut_off_at=cut_off_at)

    insert(cluster, *range(100, 110))
    if grown:
        write_beyond(cluster, planned["lsn"])
    confirmed = slot_of(cluster).state().confirmed_lsn
    reader = capture(cluster)
    with pytest.raises(SlotLost, match="lagging standby was promoted") as refused:
        reader.latestOffset(planned, ReadAllAvailable())
    assert "pipeline reset" in str(refused.value.hint)
    reader.prepareForTriggerAvailableNow()
    with pytest.raises(SlotLost):
        reader.latestOffset(planned, ReadAllAvailable())
    # A batch that was planned, and perhaps written, before the failover.
    with pytest.raises(SlotLost):
        rows_of(reader, start, planned)
    with pytest.raises(SlotLost):
        reader.commit(planned)
    assert slot_of(cluster).state().confirmed_lsn == confirmed
    # Where the standby still had everything, reading goes on.
    rows, _ = next_batch(reader, start)
    assert rows == list(range(100, 110))
    reader.stop()


@pytest.mark.parametrize("which", ["newest", pytest.param("oldest", marks=pytest.mark.long)])
def test_a_slot_that_is_gone_after_a_promotion_is_not_made_again(new_cluster: NewCluster, which: str) -> None:
    try:
        binaries = find_binaries() if which == "newest" else find_binaries(major=15)
    except EmbeddedError as error:
        pytest.skip(str(error))
    cluster = new_cluster(binaries=binaries)
    reader = capture(cluster)
    start = reader.initialOffset()
    insert(cluster, 1)
    seen, start = next_batch(reader, start)
    assert seen == [1]
    reader.stop()
    standby = cluster.make_standby()
    cluster.promote(standby, cut_off_at=cluster.cut_off(standby))

    insert(cluster, 2)
    reader = capture(cluster)
    for _ in range(2):
        with pytest.raises(SlotLost, match=r"replication slot .* does not exist") as refused:
            reader.latestOffset(start, ReadAllAvailable())
        assert "After a failover" in str(refused.value.hint)
        reader.prepareForTriggerAvailableNow()
    with pytest.raises(SlotLost):
        slot_of(cluster).prepare(["item"], create_slot=False)
    assert slots_of(cluster) == []
    # One that was made by hand is ahead of the reader, with a change or without.
    slot_of(cluster).prepare(["item"])
    with pytest.raises(SlotLost, match="recreated"):
        reader.latestOffset(start, ReadAllAvailable())
    reader.stop()


def test_a_standby_that_is_not_promoted_yet_is_waited_for(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    slot_of(cluster).prepare(["item"])
    standby = cluster.make_standby()
    with pytest.raises(psycopg.OperationalError, match="recovery is in progress"):
        Slot(standby.dsn("app"), "items", "items").state()


def test_another_cluster_is_not_read_from_the_same_lsn(new_cluster: NewCluster) -> None:
    cluster = new_cluster()
    state = slot_of(cluster).prepare(["item"])
    other = WalHistory(state.system_identifier + 1, state.timeline)
    with pytest.raises(SlotLost, match="another cluster"):
        slot_of(cluster).verify(WalPosition(state.confirmed_lsn, other))
    # A checkpoint of a version that noted no history.
    slot_of(cluster).verify(WalPosition(state.confirmed_lsn))
    later = WalHistory(state.system_identifier, state.timeline + 1)
    with pytest.raises(SlotLost, match="was restored"):
        slot_of(cluster).verify(WalPosition(state.confirmed_lsn, later))
