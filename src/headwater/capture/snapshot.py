"""Consistent snapshots of tables: one point in time, read in ranges side by side, that fits to the changes."""

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
        ("lsn", pa.int64()),  # where the server's log was just before the snapshot; for people, not for deciding
        ("snapshot", pa.string()),  # xmin:xmax:xip, for `headwater.database.pg_snapshot`
        ("key", pa.string()),  # JSON; null for a table without a key
        ("row", pa.string()),  # JSON, the same text as in a change
        ("columns_hash", pa.string()),
        ("columns", pa.string()),  # JSON: what the columns are; on the first row of a chunk
    ]
)

CHUNK_BLOCKS: Final = 2048
_OUTPUT_ROWS: Final = 20_000
_LOOK_SECONDS: Final = 0.01
# The oids that a type of the server's own may have.
_FIRST_NAMED_OID: Final = 10_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One point in time. Others can read at it by its name, as long as whoever made it keeps it open."""

    name: str
    lsn: int
    visible: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of the blocks of one table, or of one partition of it. Without an end it also takes what was added."""

    number: int
    leaf_schema: str
    leaf_table: str
    first_block: int
    end_block: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """How to read one table at one snapshot. Holds no connection, so it can be sent anywhere."""

    snapshot: Snapshot
    relation: Relation
    texts: tuple[str, ...]  # for each column, the SQL that gives the text pgoutput would send
    chunks: tuple[Chunk, ...]
    about_rows: int = 0
    fingerprint: str = ""  # another one if rows may have moved or changed without a change of theirs


class TableClaimed(Exception):
    """Somebody else takes a snapshot of this table for all who want one."""


@contextmanager
def open_snapshot(
    dsn: str, tables: Sequence[str], *, claimed: bool = False, commit_seconds: float = 0.0
) -> Iterator[tuple[Snapshot, psycopg.Connection[Any]]]:
    """A snapshot that stays open for the block. The tables keep their columns meanwhile.

    With `claimed`, nobody else may have claimed one of the tables, or TableClaimed is raised. Transactions that are
    just committing are waited for as long as `commit_seconds`: what is logged may be read from a slot, and sent
    on, before a snapshot sees it.
    """
    with connect(dsn) as connection:
        names = [_find(connection, table) for table in tables]
        for oid, _, table, _ in names if claimed else ():
            claim = connection.execute(query("claim_table"), {"oid": oid}).fetchone()
            if claim is None or not claim[0]:
                raise TableClaimed(table)
        if commit_seconds > 0:
            _await_commits(connection, commit_seconds)
        lsn = current_lsn(connection)
        connection.execute("begin isolation level repeatable read, read only")
        # The lock before the snapshot: a table that was rewritten after it would look empty.
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
    most_chunks: int | None = None,
    needs_key: bool = False,
) -> Plan:
    """How to read a table at a snapshot that this connection has open.

    Chunks are larger than `chunk_blocks` if there were more than about `most_chunks` of them otherwise.
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
            f"the table {quoted} has no key, and whoever reads this snapshot needs one",
            hint="Give it a primary key, or a replica identity that uses a unique index.",
        )
    storage = connection.execute(query("table_storage"), {"table": quoted}).fetchall()
    if most_chunks is not None:
        chunk_blocks = max(chunk_blocks, -(-sum(blocks for _, _, blocks, _ in storage) // most_chunks))
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
    """How to read a table at a snapshot that another process has open."""
    with connect(dsn) as connection, connection.transaction():
        for statement in _at(snapshot):
            connection.execute(statement.encode())
        return plan(connection, snapshot, table, chunk_blocks=chunk_blocks, needs_key=needs_key)


def read(dsn: str, plan: Plan, chunk: Chunk) -> Iterator[Any]:
    """The rows of one chunk, as RecordBatches of SCHEMA."""
    described = False
    for batch in stream(dsn, _query(plan, chunk), before=_at(plan.snapshot)):
        for first in range(0, batch.num_rows, _OUTPUT_ROWS):
            piece = batch.slice(first, _OUTPUT_ROWS)
            if piece.num_rows:
                yield _written(plan, chunk, piece, describe=not described)
                described = True


def current_lsn(connection: psycopg.Connection[Any]) -> int:
    """Where the server's log is now, also within a snapshot of the past."""
    row = connection.execute(query("current_lsn")).fetchone()
    assert row is not None
    return int(row[0])


def _await_commits(connection: psycopg.Connection[Any], seconds: float) -> None:
    """Wait until every transaction that runs now has ended, or for so long."""

    def running() -> frozenset[int]:
        row = connection.execute(query("visible_now")).fetchone()
        assert row is not None
        return parse_snapshot(row[0]).running

    # Without it, a transaction that is newer than all that ended would not be listed.
    connection.execute(query("draw_transaction"))
    before = running()
    deadline = time.monotonic() + seconds
    while before & running() and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def _find(connection: psycopg.Connection[Any], table: str) -> tuple[int, str, str, str]:
    found = connection.execute(query("table_name"), {"table": table}).fetchone()
    if found is None:
        raise InvalidRequest(f"there is no table {table!r}")
    if not found[4]:
        raise InvalidRequest(f"{table!r} is not a table", hint="A snapshot is of tables, partitioned or not.")
    return found[0], found[1], found[2], found[3]


def _chunks(storage: Sequence[tuple[str, str, int, int]], chunk_blocks: int) -> Iterator[Chunk]:
    number = 0
    for schema, table, blocks, _ in storage:
        bounds = range(0, max(blocks, 1), chunk_blocks)
        for first in bounds:
            # What is visible may lie beyond the size that was seen: the last range has no end.
            end = None if first == bounds[-1] else first + chunk_blocks
            yield Chunk(number, schema, table, first, end)
            number += 1


def _at(snapshot: Snapshot) -> tuple[str, str]:
    """What a transaction starts with to read at this snapshot."""
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


def _written(plan: Plan, chunk: Chunk, rows: Any, *, describe: bool) -> Any:
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
