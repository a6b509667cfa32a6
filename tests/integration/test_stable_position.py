"""Does a reader ever miss an event, or see one out of order? The proof, and a control that fails it."""

from __future__ import annotations

import contextlib
import json
import queue
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

import headwater
from headwater import NewEvent
from headwater.database import schema
from patience import PATIENCE_SECONDS

Until = Callable[[Callable[[], Any]], Any]
# What ends a writer's transaction: its own deadlock, its killed backend.
BROKEN_OFF = (psycopg.Error, headwater.HeadwaterError)


# --- the stress test -------------------------------------------------------------------------------------------


@dataclass
class Witness:
    """What the writers know and what each reader saw."""

    committed: set[str] = field(default_factory=set)
    rolled_back: set[str] = field(default_factory=set)
    ids: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    seen: dict[str, list[int]] = field(default_factory=dict)
    partitions: dict[int, list[int]] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, tags: list[str], ids: list[tuple[str, str, int]], *, committed: bool, kind: str) -> None:
        with self.lock:
            (self.committed if committed else self.rolled_back).update(tags)
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
            for topic, event_id, position in ids if committed else ():
                self.ids.setdefault((topic, event_id), set()).add(position)


class Stress:
    """Many writers of every kind and some readers on one log, for some seconds."""

    topics = ("open-a", "open-b", "sequenced")

    def __init__(self, dsn: str, *, writers: int, seconds: float, seed: int) -> None:
        self.dsn = conninfo.make_conninfo(dsn, options="-c deadlock_timeout=20ms")
        self.writers, self.seconds, self.seed = writers, seconds, seed
        self.witness = Witness()
        self.prepared: queue.SimpleQueue[tuple[str, list[str], list[tuple[str, str, int]]] | None] = queue.SimpleQueue()
        self.pids: dict[int, int] = {}
        self.over = threading.Event()
        self.done_writing = threading.Event()

    def run(self) -> Witness:
        with headwater.connect(self.dsn, pool_size=20) as log:
            self.log = log
            log.create_topic("open-a")
            log.create_topic("open-b", partitions=3)
            log.create_topic("sequenced", kind="sequenced", partitions=4)
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                (two_phase,) = connection.execute(
                    "select current_setting('max_prepared_transactions')::int > 0"
                ).fetchone()  # type: ignore[misc]
            self.two_phase: bool = two_phase
            with ThreadPoolExecutor(self.writers + 10) as pool:
                readers = [
                    pool.submit(self.follow, "open-a", "open-a"),
                    pool.submit(self.follow, "whole log", None),
                    pool.submit(self.follow, "two topics", ["open-b", "sequenced"]),
                    pool.submit(self.read_partitions),
                    pool.submit(self.read_naively),
                ]
                finisher = pool.submit(self.finish_prepared)
                nuisances = [pool.submit(self.kill_backends), pool.submit(self.rotate)]
                writers = [pool.submit(self.write, number) for number in range(self.writers)]
                # The length of the run, not a wait for something.
                self.over.wait(self.seconds)
                self.over.set()
                for future in [*writers, *nuisances]:
                    future.result(timeout=PATIENCE_SECONDS)
                self.prepared.put(None)
                finisher.result(timeout=PATIENCE_SECONDS)
                for topic in self.topics:
                    log.publish(topic, "end")
                self.done_writing.set()
                for future in readers:
                    future.result(timeout=PATIENCE_SECONDS)
        return self.witness

    # -- writers

    def write(self, number: int) -> None:
        rng = random.Random(f"{self.seed}/{number}")
        counter = 0
        connection: psycopg.Connection[Any] | None = None
        while not self.over.is_set():
            if connection is None or connection.broken:
                connection = psycopg.connect(self.dsn, autocommit=True)
                self.pids[number] = connection.info.backend_pid
            counter += 1
            tags: list[str] = []
            ids: list[tuple[str, str, int]] = []
            ending = rng.choices(["commit", "rollback", "prepare" if self.two_phase else "commit"], [70, 20, 10])[0]
            asked_to_commit = False
            try:
                connection.execute("begin")
                for part in range(rng.randint(1, 3)):
                    self.publish_something(connection, rng, f"{number}-{counter}-{part}", tags, ids)
                    if rng.random() < 0.5:
                        connection.execute("select pg_sleep(%s)", (rng.random() * 0.006,))
                if ending == "prepare":
                    gid = f"gid-{number}-{counter}"
                    connection.execute(f"prepare transaction '{gid}'".encode())
                    self.prepared.put((gid, tags, ids))
                    continue
                asked_to_commit = ending == "commit"
                connection.execute(ending.encode())
            except BROKEN_OFF:
                with contextlib.suppress(psycopg.Error):
                    connection.execute("rollback")
                if not asked_to_commit and ending != "prepare":
                    # Otherwise nobody knows: the answer to the commit may have been lost.
                    self.witness.note(tags, ids, committed=False, kind="broken off")
                continue
            self.witness.note(tags, ids, committed=ending == "commit", kind=ending)
        if connection is not None:
            connection.close()

    def publish_something(
        self,
        connection: psycopg.Connection[Any],
        rng: random.Random,
        tag: str,
        tags: list[str],
        ids: list[tuple[str, str, int]],
    ) -> None:
        topic = rng.choice(self.topics)
        match rng.choice(["one", "one", "sql", "batch", "copy", "id", "undone savepoint", "kept savepoint"]):
            case "one":
                self.log.publish(topic, tag, key=tag, connection=connection)
                tags.append(tag)
            case "sql":
                connection.execute("select headwater.publish(%s, to_jsonb(%s::text))", (topic, tag))
                tags.append(tag)
            case "batch":
                batch = [f"{tag}-b{n}" for n in range(rng.randint(1, 20))]
                self.log.publish_batch(topic, [NewEvent(b, key=b) for b in batch], connection=connection)
                tags.extend(batch)
            case "copy":
                many = [f"{tag}-c{n}" for n in range(rng.randint(1, 30))]
                self.log.publish_many("open-a", (NewEvent(m) for m in many), connection=connection)
                tags.extend(many)
            case "id":
                event_id = f"id-{rng.randrange(200)}"
                position = self.log.publish(topic, f"{tag}-repeat", event_id=event_id, connection=connection)
                assert position is not None
                ids.append((topic, event_id, position))
            case "undone savepoint":
                connection.execute("savepoint s")
                self.log.publish(topic, f"{tag}-undone", connection=connection)
                connection.execute("rollback to savepoint s")
                self.witness.rolled_back.add(f"{tag}-undone")
                self.log.publish(topic, tag, connection=connection)
                tags.append(tag)
            case "kept savepoint":
                connection.execute("savepoint s")
                self.log.publish(topic, tag, connection=connection)
                connection.execute("release savepoint s")
                tags.append(tag)

    def finish_prepared(self) -> None:
        rng = random.Random(f"{self.seed}/finish")
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while (waiting := self.prepared.get(timeout=PATIENCE_SECONDS)) is not None:
                gid, tags, ids = waiting
                connection.execute("select pg_sleep(%s)", (rng.random() * 0.01,))
                commit = rng.random() < 0.6
                connection.execute(f"{'commit' if commit else 'rollback'} prepared '{gid}'".encode())
                self.witness.note(tags, ids, committed=commit, kind="prepared " + ("commit" if commit else "rollback"))

    def kill_backends(self) -> None:
        rng = random.Random(f"{self.seed}/kill")
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while not self.over.wait(0.1):
                if self.pids:
                    victim = rng.choice(list(self.pids.values()))
                    connection.execute("select pg_terminate_backend(%s)", (victim,))
                    self.witness.kinds["killed"] = self.witness.kinds.get("killed", 0) + 1

    def rotate(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while not self.over.wait(0.7):
                connection.execute("update headwater_internal.segment set opened_at = opened_at - interval '2 days'")
                connection.execute("select headwater.maintain()")

    # -- readers

    def follow(self, name: str, topics: str | list[str] | None) -> None:
        ends = 0
        expected = len(self.topics) if topics is None else 1 if isinstance(topics, str) else len(topics)
        seen = self.witness.seen.setdefault(name, [])
        for event in self.log.follow(topics, cursor=name, batch_size=200):
            seen.append(event.position)
            ends += event.payload == b'"end"'
            if ends == expected:
                return

    def read_partitions(self) -> None:
        """Offsets of each partition straight from the table: commit order is offset order, so no barrier is needed."""
        partitions = self.witness.partitions
        partitions.update({partition: [] for partition in range(4)})
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            last_round = False
            while True:
                for partition, offsets in partitions.items():
                    rows = connection.execute(
                        "select topic_offset from headwater_internal.event where topic_id = %s and partition = %s "
                        "and topic_offset > %s order by topic_offset",
                        (self.log.topic("sequenced").id, partition, offsets[-1] if offsets else -1),
                    ).fetchall()
                    offsets.extend(offset for (offset,) in rows)
                if last_round:
                    return
                last_round = self.done_writing.wait(0.002)

    def read_naively(self) -> None:
        """As if order of positions were order of commits."""
        seen = self.witness.seen.setdefault("naive", [])
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            last_round = False
            while True:
                rows = connection.execute(
                    "select position from headwater_internal.event where position > %s order by position",
                    (seen[-1] if seen else 0,),
                ).fetchall()
                seen.extend(position for (position,) in rows)
                if last_round:
                    return
                last_round = self.done_writing.wait(0.002)


def stored(dsn: str, topics: list[str] | None = None) -> list[tuple[int, str, str | None, Any]]:
    with psycopg.connect(dsn) as connection:
        rows = connection.execute(
            "select e.position, t.name, e.event_id, e.payload from headwater_internal.event e "
            "join headwater_internal.topic t on t.id = e.topic_id "
            "where %s::text[] is null or t.name = any (%s) order by e.position",
            (topics, topics),
        ).fetchall()
    return [(position, topic, event_id, json.loads(payload)) for position, topic, event_id, payload in rows]


def test_no_reader_misses_an_event_while_many_writers_do_their_worst(dsn: str) -> None:
    witness = Stress(dsn, writers=14, seconds=6.0, seed=1).run()

    everything = stored(dsn)
    tags = [tag for _, _, event_id, tag in everything if event_id is None and tag != "end"]
    assert len(tags) == len(set(tags))
    assert witness.committed <= set(tags)
    assert not witness.rolled_back & set(tags)

    # Each reader saw exactly what was committed, in order.
    assert witness.seen["whole log"] == [position for position, *_ in everything]
    assert witness.seen["open-a"] == [position for position, *_ in stored(dsn, ["open-a"])]
    assert witness.seen["two topics"] == [position for position, *_ in stored(dsn, ["open-b", "sequenced"])]

    # Offsets are dense, and nobody ever saw one before the one below it.
    assert sum(map(len, witness.partitions.values())) == len(stored(dsn, ["sequenced"]))
    for offsets in witness.partitions.values():
        assert offsets == list(range(len(offsets)))

    # An id is one event, and every publisher of it was told the same position.
    by_id = {(topic, event_id): position for position, topic, event_id, _ in everything if event_id is not None}
    assert len(by_id) == sum(event_id is not None for _, _, event_id, _ in everything)
    for identity, positions in witness.ids.items():
        assert positions == {by_id[identity]}

    # The control: under the same load a reader without the barrier loses events, so the load is one.
    missed = len(everything) - len(witness.seen["naive"])
    print(f"\n{len(everything)} events, {witness.kinds}, the naive reader missed {missed}")
    assert missed > 0
    assert min(witness.kinds[kind] for kind in ("commit", "rollback", "killed")) > 10


# --- one interleaving at a time --------------------------------------------------------------------------------


@pytest.fixture
def other(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A second client."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


def test_a_reader_that_goes_by_the_highest_position_loses_an_event(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    def naive(after: int) -> list[int]:
        query = "select position from headwater_internal.event where position > %s order by position"
        with psycopg.connect(log_dsn) as reader:
            return [position for (position,) in reader.execute(query, (after,))]

    log_dsn = connection.info.dsn
    before = log.state().head
    with connection.transaction():
        early = log.publish(topic, "early", connection=connection)
        late = log.publish(topic, "late")
        naive_seen = naive(before)
        stable_seen = [event.position for event in log.read(topic, after=before)]
    naive_seen += naive(naive_seen[-1])
    stable_seen += [event.position for event in log.read(topic, after=before)]
    assert naive_seen == [late]
    assert stable_seen == [early, late]


@pytest.mark.parametrize("publishing", ["call", "batch", "sql", "insert", "segment", "copy"])
def test_an_open_publisher_holds_readers_back_and_is_shown(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection, publishing: str
) -> None:
    topic_id = log.topic(topic).id
    log.publish(log.create_topic(f"{topic}-other").name, 0)
    with connection.transaction():
        match publishing:
            case "call":
                log.publish(topic, 0, connection=connection)
            case "batch":
                log.publish_batch(topic, [NewEvent(0)], connection=connection)
            case "sql":
                connection.execute("select headwater.publish(%s, '0')", (topic,))
            case "insert":
                connection.execute(
                    "insert into headwater_internal.event (topic_id, payload) values (%s, '0')", (topic_id,)
                )
            case "segment":
                (segment,) = connection.execute(
                    "select tableoid::regclass::text from headwater_internal.event order by position desc limit 1"
                ).fetchone()  # type: ignore[misc]
                connection.execute(f"insert into {segment} (topic_id, payload) values ({topic_id}, '0')".encode())
            case "copy":
                log.publish_many(topic, [NewEvent(0)], connection=connection)
        late = log.publish(topic, 1)
        assert late is not None
        assert log.read(topic) == []
        assert log.state().stable < late
        (publisher,) = log.publishers_in_flight()
        assert publisher.pid == connection.info.backend_pid
        assert not publisher.prepared
        assert publisher.position_bound < late
        assert publisher.age is not None
    assert [event.payload for event in log.read(topic)] == [b"0", b"1"]
    assert log.publishers_in_flight() == []


def test_an_open_publisher_hides_nothing_that_was_stable_before(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    log.publish(topic, 0)
    with connection.transaction():
        log.publish(topic, 1, connection=connection)
        assert [event.payload for event in log.read(topic)] == [b"0"]


@pytest.mark.parametrize("database", ["the log's", "another"])
@pytest.mark.parametrize("writes", [False, True])
def test_a_long_transaction_that_published_nothing_delays_nobody(
    log: headwater.Headwater, topic: str, dsn: str, admin_dsn: str, database: str, writes: bool
) -> None:
    with psycopg.connect(dsn if database == "the log's" else admin_dsn) as long:
        if writes:
            long.execute("create table elsewhere (n integer)")
            long.execute("insert into elsewhere values (1)")
        else:
            long.execute("select pg_current_xact_id()")
        assert long.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        log.publish(topic, 0)
        assert [event.payload for event in log.read(topic)] == [b"0"]
        state = log.state()
        assert state.stable == state.head
        long.rollback()


def test_a_publisher_in_another_database_delays_nobody(log: headwater.Headwater, topic: str, admin_dsn: str) -> None:
    with psycopg.connect(admin_dsn) as long:
        long.execute("select pg_advisory_xact_lock_shared(29300::bigint << 48)")
        log.publish(topic, 0)
        assert [event.payload for event in log.read(topic)] == [b"0"]
        long.rollback()


def test_rolling_back_the_first_insert_keeps_the_next_one_advertised(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    with connection.transaction():
        with connection.transaction(force_rollback=True):
            log.publish(topic, "undone", connection=connection)
        assert log.publishers_in_flight() == []
        log.publish(topic, "kept", connection=connection)
        assert len(log.publishers_in_flight()) == 1
        log.publish(topic, "late")
        assert log.read(topic) == []
    assert [event.data for event in log.read(topic)] == ["kept", "late"]


def test_rolling_back_a_later_insert_keeps_the_first_one_advertised(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    with connection.transaction():
        log.publish(topic, "kept", connection=connection)
        with connection.transaction(force_rollback=True):
            log.publish(topic, "undone", connection=connection)
        log.publish(topic, "late")
        assert log.read(topic) == []
    assert [event.data for event in log.read(topic)] == ["kept", "late"]


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_every_transaction_of_a_session_is_advertised(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection, ending: str
) -> None:
    for _ in range(3):
        connection.execute("begin")
        for n in range(3):
            log.publish(topic, n, connection=connection)
            assert {publisher.pid for publisher in log.publishers_in_flight()} == {connection.info.backend_pid}
        connection.execute(ending.encode())
        assert log.publishers_in_flight() == []


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_prepared_publisher_is_waited_for(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection, other: psycopg.Connection, ending: str
) -> None:
    if connection.execute("show max_prepared_transactions").fetchone() == ("0",):
        pytest.skip("this server has no prepared transactions")
    connection.execute("begin")
    log.publish(topic, "prepared", connection=connection)
    connection.execute(f"prepare transaction 'settle-{ending}'".encode())
    log.publish(topic, "late")
    assert log.read(topic) == []
    (publisher,) = log.publishers_in_flight()
    assert publisher.prepared
    other.execute(f"{ending} prepared 'settle-{ending}'".encode())
    assert [event.data for event in log.read(topic)] == (["prepared"] if ending == "commit" else []) + ["late"]


def test_a_killed_publisher_leaves_nothing_and_holds_nobody(
    log: headwater.Headwater, topic: str, dsn: str, until: Until
) -> None:
    victim = psycopg.connect(dsn)
    log.publish(topic, "never", connection=victim)
    log.publish(topic, "late")
    with psycopg.connect(dsn, autocommit=True) as killer:
        killer.execute("select pg_terminate_backend(%s)", (victim.info.backend_pid,))
    until(lambda: log.publishers_in_flight() == [])
    assert [event.data for event in log.read(topic)] == ["late"]
    with pytest.raises(psycopg.OperationalError):
        victim.execute("select 1")
    victim.close()


@pytest.mark.parametrize("level", ["REPEATABLE_READ", "SERIALIZABLE"])
def test_an_old_snapshot_neither_reads_nor_writes_a_sequence(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection, level: str
) -> None:
    partitions = log.create_topic(f"partitions-{level}", kind="sequenced").name
    connection.isolation_level = psycopg.IsolationLevel[level]
    with pytest.raises(headwater.WrongTransaction, match="READ COMMITTED"), connection.transaction():
        log.read(topic, connection=connection)
    with pytest.raises(headwater.WrongTransaction, match="READ COMMITTED"), connection.transaction():
        log.publish(partitions, 0, connection=connection)
    with connection.transaction():
        log.publish(topic, 0, connection=connection)
    assert [event.payload for event in log.read(topic)] == [b"0"]


def test_one_writer_at_a_time_has_a_partition_and_others_are_free(
    log: headwater.Headwater, connection: psycopg.Connection, other: psycopg.Connection, until: Until
) -> None:
    partitions = log.create_topic("two-partitions", kind="sequenced", partitions=2).name
    with ThreadPoolExecutor(1) as pool:
        with connection.transaction():
            log.publish_batch(partitions, [NewEvent("first", partition=0)], connection=connection)
            waiting = pool.submit(log.publish_batch, partitions, [NewEvent("second", partition=0)])
            until(
                lambda: other.execute(
                    "select 1 from pg_locks l where l.locktype = 'advisory' and not l.granted "
                    "and l.classid::bigint >> 16 = 29287"
                ).fetchone()
            )
            log.publish_batch(partitions, [NewEvent("elsewhere", partition=1)])
            assert not waiting.done()
        waiting.result(timeout=PATIENCE_SECONDS)
    found = {(event.partition, event.topic_offset): event.data for event in log.read(partitions)}
    assert found == {(0, 0): "first", (0, 1): "second", (1, 0): "elsewhere"}


def test_a_partition_that_was_rolled_back_leaves_no_hole(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    partitions = log.create_topic("no-hole", kind="sequenced").name
    log.publish(partitions, 0)
    with connection.transaction(force_rollback=True):
        log.publish(partitions, "never", connection=connection)
    log.publish(partitions, 1)
    assert [(event.topic_offset, event.data) for event in log.read(partitions)] == [(0, 0), (1, 1)]


# --- each rule, broken on purpose ------------------------------------------------------------------------------

GATE = "perform pg_advisory_lock(4711); perform pg_advisory_unlock(4711);"
HEAD = "    head := coalesce(pg_sequence_last_value('headwater_internal.position'), 0);\n"
LAST = "    log_stable := least(head, lowest_bound);\n    stable := least(head, lowest_of_topics);\n"


def settle_sql() -> str:
    return (resources.files(schema) / "functions" / "stable_position.sql").read_text()


def replaced(sql: str, old: str, new: str) -> str:
    assert sql.count(old) == 1, f"stable_position.sql no longer has {old!r}"
    return sql.replace(old, new)


@pytest.fixture
def altered(connection: psycopg.Connection) -> Iterator[Callable[[str], None]]:
    """Installs another stable_position.sql, and puts the right one back."""
    yield lambda sql: connection.execute(sql.encode())  # type: ignore[func-returns-value]
    connection.execute(settle_sql().encode())


def read_through_gate(
    read: Callable[[], Any], meanwhile: Callable[[], None], gate: psycopg.Connection[Any], until: Until
) -> Any:
    """What a reader gets for whom something happens just where it waits at the gate."""
    gate.execute("select pg_advisory_lock(4711)")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            until(
                lambda: gate.execute(
                    "select 1 from pg_locks where locktype = 'advisory' and objid = 4711 and not granted"
                ).fetchone()
            )
            meanwhile()
        finally:
            gate.execute("select pg_advisory_unlock(4711)")
        return reading.result(timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_the_head_must_be_taken_before_the_locks_are_looked_at(
    log: headwater.Headwater,
    topic: str,
    connection: psycopg.Connection,
    other: psycopg.Connection,
    altered: Callable[[str], None],
    until: Until,
    rule: str,
) -> None:
    sql = settle_sql()
    if rule == "kept":
        altered(replaced(sql, HEAD, HEAD + GATE))
    else:
        sql = replaced(sql, HEAD, "")
        altered(
            replaced(
                sql,
                LAST,
                GATE
                + HEAD
                + "    log_stable := least(head, lowest_bound);\n    stable := least(head, lowest_of_topics);\n",
            )
        )

    def one_open_and_one_done() -> None:
        connection.execute("begin")
        log.publish(topic, "early", connection=connection)
        log.publish(topic, "late")

    state = read_through_gate(log.state, one_open_and_one_done, other, until)
    connection.execute("commit")
    early = log.topics()[[t.name for t in log.topics()].index(topic)].first_position
    assert early is not None
    # At or below the stable position nothing may still appear.
    assert (state.stable < early) == (rule == "kept")


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_the_lock_must_come_before_the_first_position_is_assigned(
    log: headwater.Headwater,
    topic: str,
    connection: psycopg.Connection,
    rule: str,
) -> None:
    topic_id = log.topic(topic).id
    connection.execute("begin")
    if rule == "kept":
        early = log.publish(topic, "early", connection=connection)
    else:
        (early,) = connection.execute("select nextval('headwater_internal.position')").fetchone()  # type: ignore[misc]
        connection.execute(
            "insert into headwater_internal.event (position, topic_id) values (%s, %s)", (early, topic_id)
        )
    log.publish(topic, "late")
    stable = log.state().stable
    connection.execute("commit")
    assert early is not None
    assert (stable < early) == (rule == "kept")


@pytest.mark.parametrize("rule", ["kept", "broken"])
def test_the_events_must_be_read_in_a_later_snapshot(
    log: headwater.Headwater,
    topic: str,
    dsn: str,
    other: psycopg.Connection,
    altered: Callable[[str], None],
    until: Until,
    rule: str,
) -> None:
    topic_id = log.topic(topic).id
    after = log.state().stable
    altered(replaced(settle_sql(), HEAD, GATE + HEAD))

    def read() -> list[int]:
        if rule == "kept":
            return [event.position for event in log.read(topic, after=after)]
        with psycopg.connect(dsn) as reader:
            # One statement: its snapshot is older than the answer of stable_position().
            rows = reader.execute(
                "with barrier as materialized (select headwater.stable_position() as stable) "
                "select e.position, b.stable from barrier b "
                "left join headwater_internal.event e on e.topic_id = %s and e.position > %s and e.position <= "
                "b.stable",
                (topic_id, after),
            ).fetchall()
        assert rows[0][1] > after
        return [position for position, _ in rows if position is not None]

    published: list[int | None] = []
    seen = read_through_gate(read, lambda: published.append(log.publish(topic, 0)), other, until)
    assert seen == (published if rule == "kept" else [])


def test_waiting_ends_soon_after_the_publisher_does(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    """A follower that waits for a publisher notices its end by looking, without a new event to wake it."""
    arrived = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        connection.execute("begin")
        log.publish(topic, 0, connection=connection)

        def first() -> None:
            next(iter(log.follow(topic)))
            arrived.set()

        following = pool.submit(first)
        assert not arrived.wait(0.1)
        connection.execute("commit")
        following.result(timeout=PATIENCE_SECONDS)


# --- an open publisher holds back its own topics only ------------------------------------------------------------


@pytest.fixture
def open_publisher(log: headwater.Headwater, topic: str, other: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """A transaction that has published to `topic` and stays open."""
    other.execute("begin")
    log.publish(topic, "held", connection=other)
    yield other
    other.execute("rollback")


def test_readers_and_queues_of_other_topics_go_on_beside_an_open_publisher(
    log: headwater.Headwater, topic: str, open_publisher: psycopg.Connection
) -> None:
    elsewhere = log.create_topic(f"{topic}-elsewhere").name
    third = log.create_topic(f"{topic}-third").name
    log.create_queue(f"{topic}-one", elsewhere)
    log.create_queue(f"{topic}-two", [elsewhere, third])
    log.subscribe(f"{topic}-sub", "true", topics=[elsewhere])
    log.publish(elsewhere, 1)
    log.publish(third, 2)
    assert [event.data for event in log.read(elsewhere)] == [1]
    assert [event.data for event in log.read([elsewhere, third])] == [1, 2]
    assert [event.data for event in log.read_backwards(elsewhere)] == [1]
    assert [event.data for event in log.follow(elsewhere, stop_when_caught_up=True)] == [1]
    for name, wanted in ((f"{topic}-one", [1]), (f"{topic}-two", [1, 2])):
        lease = log.claim(name, worker="w", batch_size=10)
        assert lease is not None
        assert [event.data for event in lease.events] == wanted
    # What is bound to its topic, or to the whole log, waits for it.
    assert log.read(topic) == []
    assert elsewhere not in {event.topic for event in log.read(after=log.state().stable)}
    publisher = log.publishers_in_flight()[0]
    assert (publisher.pid, publisher.topics) == (open_publisher.info.backend_pid, [topic])


def test_a_queue_of_the_whole_log_waits_for_a_topic_that_is_being_made(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    queue = f"{topic}-all"
    log.create_queue(queue, from_end=True)
    log.bind(queue, pattern="#")
    with connection.transaction():
        connection.execute("select headwater.create_topic(%s)", (f"{topic}-new",))
        log.publish(f"{topic}-new", "first", routing_key="a", connection=connection)
        log.publish(topic, "second", routing_key="a")
        assert log.claim(queue, worker="w", batch_size=10) is None
    lease = log.claim(queue, worker="w", batch_size=10)
    assert lease is not None
    assert [event.data for event in lease.events] == ["first", "second"]


def test_one_transaction_holds_back_each_topic_that_it_has_published_to(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    topics = [log.create_topic(f"{topic}-{n}").name for n in range(3)]
    with connection.transaction():
        log.publish(topics[0], 0, connection=connection)
        with connection.transaction(force_rollback=True):
            log.publish(topics[1], "never", connection=connection)
        log.publish(topics[2], 2, connection=connection)
        for name in topics:
            log.publish(name, "later")
        assert log.read(topics[0]) == []
        # Its lock went with the savepoint.
        assert [event.data for event in log.read(topics[1])] == ["later"]
        assert log.read(topics[2]) == []
        log.publish(topics[1], 1, connection=connection)
        log.publish(topics[1], "last")
        assert [event.data for event in log.read(topics[1])] == ["later"]
    assert [event.data for event in log.read(topics[0])] == [0, "later"]
    assert [event.data for event in log.read(topics[1])] == ["later", 1, "last"]
    assert [event.data for event in log.read(topics[2])] == [2, "later"]


def test_a_transaction_that_advertises_several_topics_before_it_writes_holds_back_each(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    """As one that writes batches of several Kafka topics does."""
    topics = [log.create_topic(f"{topic}-{n}").name for n in range(4)]
    with connection.transaction():
        connection.execute(
            "select headwater_internal.advertise_publisher(t) from unnest(%s::text[]) as t", (topics[:3],)
        )
        for name in topics:
            log.publish(name, 1)
        assert [log.read(name) == [] for name in topics] == [True, True, True, False]
        (publisher,) = log.publishers_in_flight()
        assert publisher.topics == topics[:3]
    assert all(len(log.read(name)) == 1 for name in topics)


@pytest.mark.parametrize("how", ["insert", "copy"])
def test_a_plain_insert_holds_back_all_topics(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection, how: str
) -> None:
    elsewhere = log.create_topic(f"{topic}-elsewhere").name
    topic_id = log.topic(topic).id
    with connection.transaction():
        if how == "insert":
            connection.execute("insert into headwater_internal.event (topic_id, payload) values (%s, '0')", (topic_id,))
        else:
            with (
                connection.cursor() as cursor,
                cursor.copy("copy headwater_internal.event (topic_id, payload) from stdin") as copy,
            ):
                copy.write(f"{topic_id}\t0\n{topic_id}\t1\n{topic_id}\t2\n")
        log.publish(elsewhere, 1)
        assert log.read(elsewhere) == []
        assert log.publishers_in_flight()[0].topics is None
    assert [event.data for event in log.read(elsewhere)] == [1]


def test_publishing_many_holds_back_its_topic_only(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    elsewhere = log.create_topic(f"{topic}-elsewhere").name
    with connection.transaction():
        log.publish_many(topic, (NewEvent(n) for n in range(10)), connection=connection)
        log.publish(elsewhere, 1)
        assert [event.data for event in log.read(elsewhere)] == [1]
        # What is inserted by hand after it, in the same transaction, is advertised for all topics again.
        connection.execute(
            "insert into headwater_internal.event (topic_id, payload) values (%s, '0')", (log.topic(elsewhere).id,)
        )
        log.publish(elsewhere, 2)
        assert [event.data for event in log.read(elsewhere)] == [1]
    assert [event.data for event in log.read(elsewhere)] == [1, 0, 2]


def test_a_transaction_that_publishes_to_very_many_topics_takes_few_locks(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection
) -> None:
    topics = [log.create_topic(f"{topic}-many-{n}").name for n in range(250)]
    with connection.transaction():
        for _ in range(2):
            for name in topics:
                connection.execute("select headwater.publish(%s, '0')", (name,))
        locks = connection.execute(
            "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
        ).fetchone()
        assert locks is not None
        assert locks[0] <= 2 * 17
        log.publish(topics[-1], "later")
        assert log.read(topics[-1]) == []
    assert [event.data for event in log.read(topics[-1])] == [0, 0, "later"]


def test_a_topic_that_is_bound_later_brings_what_was_in_flight_when_it_was(
    log: headwater.Headwater, topic: str, connection: psycopg.Connection, other: psycopg.Connection
) -> None:
    """The queue has claimed beyond a position that a publisher of the other topic has assigned: binding waits for "
    "it."""
    elsewhere = log.create_topic(f"{topic}-elsewhere").name
    queue = f"{topic}-queue"
    log.create_queue(queue, elsewhere, from_end=True)
    connection.execute("begin")
    log.publish(topic, "in flight", connection=connection)
    log.publish(elsewhere, 1)
    lease = log.claim(queue, worker="w", batch_size=10)
    assert lease is not None
    log.ack(lease)
    with ThreadPoolExecutor(1) as pool:
        binding = pool.submit(other.execute, "select headwater.bind(%s, %s, from_position => 0)", (queue, topic))
        connection.execute("commit")
        binding.result(timeout=PATIENCE_SECONDS)
    log.publish(topic, "after")
    seen: list[Any] = []
    while (lease := log.claim(queue, worker="w", batch_size=10)) is not None:
        seen += [event.data for event in lease.events]
        log.ack(lease)
    assert seen[-1] == "after"


def test_a_publisher_that_stays_open_too_long_is_ended(
    log: headwater.Headwater, topic: str, dsn: str, until: Until
) -> None:
    log.change_settings(max_publisher_seconds=1)
    try:
        with psycopg.connect(dsn) as forgotten:
            log.publish(topic, "never", connection=forgotten)
            log.publish(topic, 1)

            def ended() -> bool:
                log.maintain()
                return log.publishers_in_flight() == []

            until(ended)
            with pytest.raises(psycopg.OperationalError):
                forgotten.execute("select 1")
        assert [event.data for event in log.read(topic)] == [1]
    finally:
        log.change_settings(max_publisher_seconds=0)
    assert log.settings().max_publisher_seconds is None
