"""Are rows of a snapshot cut the same way each time, and is a snapshot of several moments still the table?"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from effort import effort

pytest.importorskip("pyarrow")
pytest.importorskip("nats")
pytest.importorskip("pyspark")

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headwater.capture.relation import Column, Relation
from headwater.capture.snapshot import Chunk, Plan, Snapshot
from headwater.nats import codec, messages
from headwater.nats.bridge_metrics import BridgeMetrics, log_line, prometheus
from headwater.nats.errors import InvalidMessage
from headwater.nats.replica_store import Diverged, ReplicaState, ReplicaStore
from headwater.nats.snapshot_chunks import CHUNKS_PER_RANGE, ChunkWriter, merge_runs
from headwater.nats.subjects import Table
from headwater.spark.nats_bridge.snapshot_record import RangeResult, SnapshotRecord, can_resume, missing_ranges

NO_CLOCK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TABLE = Table("public", "orders")
SNAPSHOT = messages.SnapshotInfo(TABLE, "snap-1", "0/1", "1:1:", 0)


# --- chunks --------------------------------------------------------------------------------------------------


def written(rows: list[str], pieces: list[int], **options: Any) -> list[tuple[str, str, Any]]:
    writer = ChunkWriter(SNAPSHOT, **{"first_chunk": 1, "max_payload_bytes": 20_000, "chunk_rows": 50, **options})
    found = []
    start = 0
    for size in [*pieces, len(rows)]:
        found += list(writer.add(rows[start : start + size]))
        start += size
    found += list(writer.finish())
    assert (writer.chunks, writer.rows) == (len(found), len(rows))
    return [tuple(batch.to_pylist()[0].values()) for batch in found]


@NO_CLOCK
@given(
    sizes=st.lists(st.integers(0, 3000), max_size=120),
    pieces=st.lists(st.integers(0, 40), max_size=10),
    compressed=st.booleans(),
    encoding=st.sampled_from(codec.ENCODINGS),
)
def test_chunks_hold_every_row_once_fit_the_server_and_do_not_depend_on_how_rows_come(
    sizes: list[int], pieces: list[int], compressed: bool, encoding: Any
) -> None:
    # Floats take more bytes in MessagePack than as text.
    rows = [json.dumps({"id": n, "f": [0.5] * (size // 4), "t": "é" * (size % 7)}) for n, size in enumerate(sizes)]
    found = written(rows, pieces, compressed=compressed, encoding=encoding)
    assert found == written(rows, [], compressed=compressed, encoding=encoding)
    seen = []
    for number, (subject, msg_id, _, payload) in enumerate(found, 1):
        assert len(payload) < 20_000
        assert subject == f"init.snap.orders.snap-1.{number}"
        assert msg_id == f"snap-public.orders-snap-1-{number}"
        document = codec.decode(codec.decompress(payload) if compressed else payload)
        assert 0 < len(document["data"]) <= 50
        seen += [row["id"] for row in document["data"]]
    assert seen == list(range(len(rows)))


def test_a_row_that_no_message_can_hold_is_refused_by_name() -> None:
    with pytest.raises(InvalidMessage, match=r"public\.orders takes \d+ bytes"):
        written([json.dumps({"t": "x" * 20_000})], [])


def test_runs_of_chunks() -> None:
    assert merge_runs([(11, 2), (1, 3), (4, 0), (4, 2)]) == [[1, 5], [11, 12]]
    assert merge_runs([]) == []


# --- what is kept --------------------------------------------------------------------------------------------


def record() -> SnapshotRecord:
    relation = Relation(1, "public", "orders", "d", (Column("id", 23, "int4", -1, True),), (0,))
    parts = (Chunk(0, "public", "orders", 0, 8), Chunk(1, "public", "orders", 8, None))
    plan = Plan(Snapshot("x", 5, "10:20:12"), relation, ("id::text",), parts, 100, "f")
    return SnapshotRecord.create(
        "snap-1", plan, after_lsn=9, stream_created="t", stream_sequence=7, started_at=3, dictionary=None
    )


def test_what_is_kept_comes_back() -> None:
    kept = record().resumed(after_lsn=12)
    assert SnapshotRecord.of_document(json.loads(json.dumps(kept.document()))) == kept
    assert SnapshotRecord.of_document(None) is None
    assert SnapshotRecord.of_document({"snapshot_id": "x"}) is None
    assert kept.visible == "10:20:12"
    assert kept.after_lsn == 12


def test_chunks_of_two_moments_never_share_a_number() -> None:
    first, second = record(), record().resumed(after_lsn=12)
    assert [first.first_chunk(0), first.first_chunk(1)] == [1, CHUNKS_PER_RANGE + 1]
    assert second.first_chunk(0) == 2 * CHUNKS_PER_RANGE + 1
    done = [RangeResult(0, first.first_chunk(0), 3, 30)]
    assert missing_ranges(second, done) == [second.ranges[1]]
    assert not second.is_mixed(done)
    assert second.is_mixed([*done, RangeResult(1, second.first_chunk(1), 1, 1)])


def test_only_what_the_stream_can_make_up_for_is_resumed() -> None:
    fits: dict[str, Any] = {"fingerprint": "f", "has_key": True, "stream_created": "t", "first_sequence": 8}
    assert can_resume(record(), **fits)
    assert not can_resume(None, **fits)
    assert not can_resume(replace(record(), state="done"), **fits)
    assert not can_resume(record(), **{**fits, "fingerprint": "rewritten"})
    assert not can_resume(record(), **{**fits, "has_key": False})
    assert not can_resume(record(), **{**fits, "stream_created": "another stream"})
    assert not can_resume(record(), **{**fits, "first_sequence": 9})


# --- a snapshot of several moments ---------------------------------------------------------------------------

RANGES = 3
KEYS = st.integers(1, 4)
OPERATION = st.one_of(
    st.tuples(st.just("insert"), KEYS, st.integers(0, RANGES - 1), st.booleans()),
    st.tuples(st.just("update"), KEYS, st.integers(0, RANGES - 1), st.booleans()),
    st.tuples(st.just("rekey"), KEYS, st.integers(0, RANGES - 1), KEYS),
    st.tuples(st.just("delete"), KEYS, st.just(0), st.just(False)),
)
Rows = dict[int, tuple[int, dict[str, Any]]]  # by key: the range that a row lies in, and the row


def step(rows: Rows, operation: tuple[Any, ...], number: int) -> tuple[Rows, dict[str, Any] | None]:
    """The table after an operation, and the change that the stream has of it. A large value that is not touched is
    not in a change."""
    kind, key, place, extra = operation
    after = dict(rows)
    lsn = {"lsn": number * 10}
    if kind == "insert" and key not in rows:
        row = {"id": key, "v": number, "large": f"large {number}" if extra else None}
        after[key] = (place, row)
        return after, {"operation": "INSERT", "data": row, **lsn}
    if key not in rows or kind == "insert":
        return rows, None
    row = rows[key][1]
    if kind == "delete":
        del after[key]
        return after, {"operation": "DELETE", "data": {"id": key}, **lsn}
    new_key = extra if kind == "rekey" else key
    if new_key != key and new_key in rows:
        return rows, None
    touched = kind == "update" and extra
    new = {**row, "id": new_key, "v": number, **({"large": f"large {number}"} if touched else {})}
    del after[key]
    after[new_key] = (place, new)
    unchanged = row["large"] is not None and not touched
    event = {
        "operation": "UPDATE",
        "data": {name: value for name, value in new.items() if name != "large" or not unchanged},
        **({"unchanged": ["large"]} if unchanged else {}),
        **({"old": {"id": key}} if new_key != key else {}),
        **lsn,
    }
    return after, event


# A large value of a row whose key somebody else has by now.
@example(
    operations=[("insert", 1, 0, True), ("rekey", 1, 1, 2), ("insert", 1, 0, True)],
    moments=[1.0, 0.34, 1.0],
    order=[0, 1, 2],
)
@settings(NO_CLOCK, max_examples=effort(300))
@given(
    operations=st.lists(OPERATION, min_size=3, max_size=30),
    moments=st.lists(st.floats(0, 1), min_size=RANGES, max_size=RANGES),
    order=st.permutations(range(RANGES)),
)
def test_ranges_of_several_moments_and_all_changes_since_the_first_are_the_table(
    operations: list[tuple[Any, ...]], moments: list[float], order: list[int]
) -> None:
    states: list[Rows] = [{}]
    changes: list[tuple[int, dict[str, Any]]] = []
    for number, operation in enumerate(operations, 1):
        rows, change = step(states[-1], operation, number)
        states.append(rows)
        if change is not None:
            changes.append((number, change))
    read_after = [round(moment * len(operations)) for moment in moments]
    consistent_lsn = max(read_after) * 10 + 1
    replayed = [change for number, change in changes if number > min(read_after)]
    columns = [
        messages.SchemaColumn("id", "int4", primary_key=True),
        *map(messages.SchemaColumn, ("v", "large"), ("int4", "text")),
    ]
    with ReplicaStore(":memory:", TABLE) as store:
        store.rebuild(messages.schema_document(TABLE, columns, timestamp=0)["columns"])
        store.save(ReplicaState("snap-1", "1:1:", 0, "", 0, -1, -1, consistent_lsn))
        for part in order:
            at = states[read_after[part]]
            store.load([row for place, row in at.values() if place == part], leniently=True)
        try:
            for change in replayed:
                store.apply(change, leniently=change["lsn"] < consistent_lsn)
        except Diverged:
            # It cannot know a large value that was in none of its chunks, and must not guess.
            early = [change for change in replayed if change["lsn"] < consistent_lsn]
            assert any(change.get("unchanged") for change in early)
            return
        assert store.rows() == [row for _, (_, row) in sorted(states[-1].items())]


def test_a_replica_of_an_earlier_version_is_taken_over(tmp_path: Any) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "r.db") as old:
        old.execute(
            "create table _headwater_replica (name text not null primary key, snapshot_id text not null, "
            "visible text not null, after_lsn integer not null, stream_created text not null, stream_sequence integer "
            "not null, last_lsn integer not null, last_sequence integer not null, columns text not null) strict"
        )
        old.execute("insert into _headwater_replica values ('orders', 's', '1:1:', 1, 't', 2, 3, 4, '[]')")
    with ReplicaStore(tmp_path / "r.db", TABLE) as store:
        assert store.state() == ReplicaState("s", "1:1:", 1, "t", 2, 3, 4, 0)


# --- figures -------------------------------------------------------------------------------------------------


def test_figures_are_text_for_prometheus_and_a_line_for_the_log() -> None:
    figures = BridgeMetrics(uptime_seconds=331, last_ack_lsn=25_509_096, wal_lag_bytes=51_344)
    lines = prometheus(figures).splitlines()
    assert "bridge_uptime_seconds 331" in lines
    assert "# TYPE bridge_cdc_events_published_total counter" in lines
    assert len(lines) % 3 == 0
    assert log_line(figures).startswith(
        "uptime=331 wal_messages=0 cdc_events=0 lsn=0/1853ce8 connected=0 reconnects=0 nats_reconnects=0 "
        "lag_bytes=51344 slot_active=0"
    )
