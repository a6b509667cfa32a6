"""Consistent snapshots of tables, read in parallel ranges of blocks and consistent with the captured changes.

Steps: `open_snapshot` exports a Postgres snapshot and keeps it open; `plan` splits a table into chunks; `read` returns
the rows of one chunk, in any process that can connect. A change is in the snapshot if its transaction is visible in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
import pyarrow as pa
from psycopg import sql

from headwater.capture.connection import connect, stream
from headwater.capture.json_text import TYPE_NAMES, cells_of, objects, render
from headwater.capture.queries import query
from headwater.capture.relation import Column, Relation
from headwater.database.pg_snapshot import parse as parse_snapshot
from headwater.errors import CaptureRefused, InvalidRequest

SCHEMA: Final = pa.schema(
    [
        ("schema", pa.string()),
        ("table", pa.string()),
        ("chunk", pa.int32()),
        ("lsn", pa.int64()),  # end of the WAL just before the snapshot; informational, not for comparisons
        ("snapshot", pa.string()),  # xmin:xmax:xip, for `headwater.database.pg_snapshot`
        ("key", pa.string()),  # JSON; null for a table without a key
        ("row", pa.string()),  # JSON, the same text as in a change
        ("columns_hash", pa.string()),
        ("columns", pa.string()),  # JSON: description of the columns; on the first row of a chunk
    ]
)

CHUNK_BLOCKS: Final = 2048
_OUTPUT_ROWS: Final = 20_000
_POLL_SECONDS: Final = 0.01
# Types below this oid are built in.
_FIRST_NAMED_OID: Final = 10_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An exported snapshot. Other processes can read at it by its name while its creator keeps it open."""

    name: str
    lsn: int
    visible: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of blocks of one table or partition. Without an end it also covers blocks that were added later."""

    number: int
    leaf_schema: str
    leaf_table: str
    first_block: int
    end_block: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """How to read one table at one snapshot. Holds no connection, so it can be pickled."""

    snapshot: Snapshot
    relation: Relation
    texts: tuple[str, ...]  # for each column, the SQL expression for the text that pgoutput sends
    chunks: tuple[Chunk, ...]
    about_rows: int = 0
    fingerprint: str = ""  # differs if rows may have moved or changed without a captured change


class TableBusy(Exception):
    """Another process is taking a snapshot of this table; its result serves everyone."""


@contextmanager
def open_snapshot(
    dsn: str, tables: Sequence[str], *, claimed: bool = False, commit_seconds: float = 0.0
) -> Iterator[tuple[Snapshot, psycopg.Connection[Any]]]:
    """A snapshot that stays open for the block. The columns of the tables cannot change meanwhile.

    With `claimed`, take an exclusive claim on each table; TableBusy if another process holds it. Wait up to
    `commit_seconds` for transactions that are committing: a commit can be read from a slot, and published, before it
    is visible to a snapshot.
    """
    with connect(dsn) as connection:
        names = [_find(connection, table) for table in tables]
        for oid, _, table, _ in names if claimed else ():
            claim = connection.execute(query("claim_table"), {"oid": oid}).fetchone()
            if claim is None or not claim[0]:
                raise TableBusy(table)
        if commit_seconds > 0:
            _await_commits(connection, commit_seconds)
        lsn = current_lsn(connection)
        connection.execute("begin isolation level repeatable read, read only")
        # Lock before the snapshot: a table that is rewritten after the snapshot would look empty.
        for _, schema, table, _ in names:
            connection.execute(sql.SQL("lock table {} in access share mode").format(sql.Identifier(schema, table)))
        exported = connection.execute(query("snapshot")).fetchone()
        assert exported is not None
        try:
            yield Snapshot(name=exported[0], lsn=lsn, visible=exported[1]), connection
        finally:
            if not connection.closed:
                connection.rollback()


def plan(
    connection: psycopg.Connection[Any],
    snapshot: Snapshot,
    table: str,
    *,
    chunk_blocks: int = CHUNK_BLOCKS,
    max_chunks: int | None = None,
    needs_key: bool = False,
) -> Plan:
    """Plan the read of a table at a snapshot that this connection holds open.

    Chunks are larger than `chunk_blocks` if there would otherwise be more than about `max_chunks` of them.
    """
    oid, schema, name, identity = _find(connection, table)
    quoted = sql.Identifier(schema, name).as_string(None)
    rows = connection.execute(query("table_columns"), {"table": quoted}).fetchall()
    columns, key, texts = [], [], []
    for number, (column, type_oid, type_name, modifier, is_key, has_other_text) in enumerate(rows):
        known = type_name if type_oid >= _FIRST_NAMED_OID else TYPE_NAMES.get(type_oid) or f"oid {type_oid}"
        in_identity = identity == "f" or (is_key and identity != "n")
        columns.append(Column(column, type_oid, known, modifier, in_identity))
        if is_key:
            key.append(number)
        shape = "case when {} is distinct from null then concat({}) end" if has_other_text else "{}::text"
        identifier = sql.Identifier(column)
        texts.append(sql.SQL(shape).format(*[identifier] * shape.count("{}")).as_string(None))
    if needs_key and not key:
        raise CaptureRefused(
            f"the table {quoted} has no key, which this snapshot requires",
            hint="Give it a primary key, or a replica identity that uses a unique index.",
        )
    storage = connection.execute(query("table_storage"), {"table": quoted}).fetchall()
    if max_chunks is not None:
        chunk_blocks = max(chunk_blocks, -(-sum(blocks for _, _, blocks, _ in storage) // max_chunks))
    fingerprint = connection.execute(query("table_fingerprint"), {"table": quoted}).fetchone()
    assert fingerprint is not None
    return Plan(
        snapshot,
        Relation(oid, schema, name, identity, tuple(columns), tuple(key)),
        tuple(texts),
        tuple(_chunks(storage, chunk_blocks)),
        sum(about_rows for _, _, _, about_rows in storage),
        fingerprint[0],
    )


def plan_at(
    dsn: str, snapshot: Snapshot, table: str, *, chunk_blocks: int = CHUNK_BLOCKS, needs_key: bool = False
) -> Plan:
    """Plan the read of a table at a snapshot that another process holds open."""
    with connect(dsn) as connection, connection.transaction():
        for statement in _at(snapshot):
            connection.execute(statement.encode())
        return plan(connection, snapshot, table, chunk_blocks=chunk_blocks, needs_key=needs_key)


def read(dsn: str, plan: Plan, chunk: Chunk) -> Iterator[Any]:
    """Yield the rows of one chunk, as RecordBatches of SCHEMA."""
    described = False
    for batch in stream(dsn, _query(plan, chunk), before=_at(plan.snapshot)):
        for first in range(0, batch.num_rows, _OUTPUT_ROWS):
            piece = batch.slice(first, _OUTPUT_ROWS)
            if piece.num_rows:
                yield _to_record_batch(plan, chunk, piece, describe=not described)
                described = True


def current_lsn(connection: psycopg.Connection[Any]) -> int:
    """The current end of the WAL, also inside an older snapshot."""
    row = connection.execute(query("current_lsn")).fetchone()
    assert row is not None
    return int(row[0])


def _await_commits(connection: psycopg.Connection[Any], seconds: float) -> None:
    """Wait until every transaction that is running now has ended, at most this many seconds."""

    def running() -> frozenset[int]:
        row = connection.execute(query("visible_now")).fetchone()
        assert row is not None
        return parse_snapshot(row[0]).running

    # Assign a transaction id first: otherwise a transaction newer than all that have ended would not be listed.
    connection.execute(query("draw_transaction"))
    before = running()
    deadline = time.monotonic() + seconds
    while before & running() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _find(connection: psycopg.Connection[Any], table: str) -> tuple[int, str, str, str]:
    found = connection.execute(query("table_name"), {"table": table}).fetchone()
    if found is None:
        raise InvalidRequest(f"table {table!r} does not exist")
    if not found[4]:
        raise InvalidRequest(f"{table!r} is not a table", hint="Name a table, partitioned or not.")
    return found[0], found[1], found[2], found[3]


def _chunks(storage: Sequence[tuple[str, str, int, int]], chunk_blocks: int) -> Iterator[Chunk]:
    number = 0
    for schema, table, blocks, _ in storage:
        bounds = range(0, max(blocks, 1), chunk_blocks)
        for first in bounds:
            # The table may have grown since its size was read, so the last range has no end.
            end = None if first == bounds[-1] else first + chunk_blocks
            yield Chunk(number, schema, table, first, end)
            number += 1


def _at(snapshot: Snapshot) -> tuple[str, str]:
    """The statements with which a transaction adopts this snapshot."""
    adopt = sql.SQL("set transaction snapshot {}").format(sql.Literal(snapshot.name)).as_string(None)
    return "set transaction isolation level repeatable read, read only", adopt


def _query(plan: Plan, chunk: Chunk) -> str:
    # A table without columns still has rows.
    texts = plan.texts or ("null::text",)
    condition = sql.SQL("ctid >= {}::tid").format(sql.Literal(f"({chunk.first_block},0)"))
    if chunk.end_block is not None:
        condition += sql.SQL(" and ctid < {}::tid").format(sql.Literal(f"({chunk.end_block},0)"))
    leaf = sql.Identifier(chunk.leaf_schema, chunk.leaf_table)
    select = sql.SQL("select {} from only {} where {}")
    return select.format(sql.SQL(", ").join([sql.SQL(text) for text in texts]), leaf, condition).as_string(None)


def _to_record_batch(plan: Plan, chunk: Chunk, rows: Any, *, describe: bool) -> Any:
    count, relation = rows.num_rows, plan.relation
    columns = [render(cells_of(rows.column(number)), column.form) for number, column in enumerate(relation.columns)]
    names = [column.name for column in relation.columns]

    def same(value: Any, kind: Any) -> Any:
        return pa.repeat(pa.scalar(value, kind), count)

    key = relation.key
    return pa.RecordBatch.from_arrays(
        [
            same(relation.schema, pa.string()),
            same(relation.table, pa.string()),
            same(chunk.number, pa.int32()),
            same(plan.snapshot.lsn, pa.int64()),
            same(plan.snapshot.visible, pa.string()),
            objects([names[number] for number in key], [columns[number] for number in key], count)
            if key
            else pa.nulls(count, pa.string()),
            objects(names, columns, count),
            same(relation.columns_hash, pa.string()),
            pa.array([relation.description if describe else None, *[None] * (count - 1)], pa.string()),
        ],
        schema=SCHEMA,
    )
