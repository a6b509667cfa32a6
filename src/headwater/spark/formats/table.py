"""The format "headwater.table": a consistent snapshot of tables as a Spark batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from headwater.capture import snapshot
from headwater.capture.snapshot import Chunk, Plan
from headwater.errors import InvalidRequest
from headwater.spark.options import refuse_unknown_options

OPTIONS = ("dsn", "tables", "snapshot", "snapshotLsn", "snapshotVisible", "chunkBlocks", "needsKey")


@dataclass(frozen=True, slots=True)
class TableReadOptions:
    """The parsed options of a read."""

    dsn: str
    tables: tuple[str, ...]
    snapshot: snapshot.Snapshot | None
    chunk_blocks: int
    needs_key: bool

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> TableReadOptions:
        refuse_unknown_options(options, OPTIONS)
        missing = [name for name in ("dsn", "tables") if name not in options]
        if missing:
            raise InvalidRequest(f'the format "headwater.table" requires the options {" and ".join(missing)}')
        blocks = options.get("chunkBlocks", str(snapshot.CHUNK_BLOCKS))
        if not blocks.isdecimal() or int(blocks) < 1:
            raise InvalidRequest(f"invalid option chunkBlocks {blocks!r}: expected a whole number from 1")
        taken = None
        if "snapshot" in options:
            taken = snapshot.Snapshot(
                name=options["snapshot"], lsn=int(options["snapshotLsn"]), visible=options["snapshotVisible"]
            )
        return cls(
            dsn=options["dsn"],
            tables=tuple(name.strip() for name in options["tables"].split(",") if name.strip()),
            snapshot=taken,
            chunk_blocks=int(blocks),
            needs_key=options.get("needsKey", "false").lower() == "true",
        )


@contextmanager
def shared_snapshot(dsn: str, tables: Sequence[str]) -> Iterator[dict[str, str]]:
    """A snapshot that several tasks can read in parallel, as options of this format. Open until the block ends."""
    with snapshot.open_snapshot(dsn, tables) as (taken, _):
        yield {
            "dsn": dsn,
            "tables": ",".join(tables),
            "snapshot": taken.name,
            "snapshotLsn": str(taken.lsn),
            "snapshotVisible": taken.visible,
        }


@dataclass(frozen=True)
class TableChunk(InputPartition):
    """The input of one task: a chunk at a snapshot that the caller holds open, or all tables at its own snapshot."""

    plan: Plan | None
    chunk: Chunk | None


class TableReader(DataSourceReader):
    """A batch read of tables at one point in time."""

    def __init__(self, options: TableReadOptions, schema: StructType) -> None:
        self.options = options
        self.schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        options = self.options
        if options.snapshot is None:
            # No process exists that could hold a snapshot open from planning until the tasks are done.
            return [TableChunk(None, None)]
        plans = [
            snapshot.plan_at(
                options.dsn, options.snapshot, table, chunk_blocks=options.chunk_blocks, needs_key=options.needs_key
            )
            for table in options.tables
        ]
        return [TableChunk(replace(plan, chunks=()), chunk) for plan in plans for chunk in plan.chunks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, TableChunk)
        wanted = to_arrow_schema(self.schema, timezone="UTC")
        for batch in self._batches(partition):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=wanted)

    def _batches(self, partition: TableChunk) -> Iterator[Any]:
        options = self.options
        if partition.plan is not None and partition.chunk is not None:
            yield from snapshot.read(options.dsn, partition.plan, partition.chunk)
            return
        with snapshot.open_snapshot(options.dsn, options.tables) as (taken, connection):
            for table in options.tables:
                plan = snapshot.plan(
                    connection, taken, table, chunk_blocks=options.chunk_blocks, needs_key=options.needs_key
                )
                for chunk in plan.chunks:
                    yield from snapshot.read(options.dsn, plan, chunk)


class TableSource(DataSource):
    """Rows of tables as JSON, with the snapshot at which they were read. See `shared_snapshot` for parallel reads."""

    @classmethod
    def name(cls) -> str:
        return "headwater.table"

    def schema(self) -> StructType:
        return from_arrow_schema(snapshot.SCHEMA)

    def reader(self, schema: StructType) -> TableReader:
        return TableReader(TableReadOptions.parse(self.options), schema)
