"""The sink `table`: writes rows to a Postgres table exactly once, and rebuilds such tables.

Tasks COPY rows into a staging table; one transaction merges them into the table and records the batch. Readers see only
complete batches.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import numpy as np
import psycopg
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql import types as t

import headwater
from headwater import Headwater, errors
from headwater.calls import Call, projections
from headwater.calls import projections as projections_calls
from headwater.calls.projections import Projection
from headwater.errors import InvalidRequest, LogUnavailable, NotAllowed, TransactionAborted
from headwater.spark import arrow
from headwater.spark.options import refuse_unknown_keys
from headwater.spark.pipelines import transform
from headwater.spark.pipelines.batch import Batch, SinkContext

T = TypeVar("T")
TableMode = Literal["upsert", "append", "replace"]

OPTIONS: Final = ("name", "key", "mode", "deletes")
MODES: Final[tuple[TableMode, ...]] = ("upsert", "append", "replace")
OUR_PREFIX: Final = "headwater_"
MAX_NAME_BYTES: Final = 63
MAX_MERGE_ATTEMPTS: Final = 5
MAX_SWITCH_ATTEMPTS: Final = 30
SWITCH_PAUSE_SECONDS: Final = 0.5

_PLAIN_TYPES: Final[Mapping[type[t.DataType], str]] = {
    t.BooleanType: "boolean",
    t.ByteType: "smallint",
    t.ShortType: "smallint",
    t.IntegerType: "integer",
    t.LongType: "bigint",
    t.FloatType: "real",
    t.DoubleType: "double precision",
    t.StringType: "text",
    t.BinaryType: "bytea",
    t.DateType: "date",
    t.TimestampType: "timestamptz",
    t.TimestampNTZType: "timestamp",
    t.DayTimeIntervalType: "interval",
}
_JSON_TYPES: Final = (t.ArrayType, t.MapType, t.StructType, t.VariantType)


@dataclass(frozen=True, slots=True)
class TableOptions:
    """The parsed options of the sink."""

    schema: str
    table: str
    key: tuple[str, ...]
    mode: TableMode
    deletes: str | None

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> TableOptions:
        refuse_unknown_keys(options, OPTIONS, "the sink table")
        schema, table = _table_name(options.get("name"))
        key = options.get("key", ())
        key = (key,) if isinstance(key, str) else key
        if not isinstance(key, Sequence) or not all(isinstance(name, str) and name for name in key):
            raise InvalidRequest(f"invalid key {key!r}: expected names of columns", hint="Write key: [customer].")
        if len(set(key)) < len(key):
            raise InvalidRequest(f"invalid key: a column occurs twice in {', '.join(key)}")
        mode = options.get("mode", "upsert")
        if mode not in MODES:
            raise InvalidRequest(f"invalid mode {mode!r}: expected {', '.join(MODES)}")
        if mode == "upsert" and not key:
            raise InvalidRequest(
                "mode upsert requires a key",
                hint="Write key: [column], or mode: append to only add rows.",
            )
        deletes = options.get("deletes")
        if deletes is not None:
            if not (isinstance(deletes, str) and deletes):
                raise InvalidRequest(f"invalid deletes {deletes!r}: expected the name of a boolean column")
            if mode != "upsert":
                raise InvalidRequest(f"deletes cannot be combined with mode {mode}", hint="Use mode: upsert.")
            if deletes in key:
                raise InvalidRequest(f"the column {deletes} of deletes cannot be part of the key")
        return cls(schema, table, tuple(key), mode, deletes)


def _table_name(name: object) -> tuple[str, str]:
    parts = name.split(".") if isinstance(name, str) else name
    if isinstance(parts, Sequence) and not isinstance(parts, str):
        words = [part for part in parts if isinstance(part, str) and part and "\0" not in part]
        if len(words) == len(parts) and len(words) in (1, 2):
            schema, table = words if len(words) == 2 else ("public", words[0])
            if schema in ("headwater", "headwater_internal"):
                raise InvalidRequest(f"the schema {schema} is reserved", hint="Name a table of another schema.")
            if max(len(word.encode()) for word in words) > MAX_NAME_BYTES:
                raise InvalidRequest(f"the name {name} is longer than {MAX_NAME_BYTES} bytes, the limit of Postgres")
            return schema, table
    raise InvalidRequest(
        f"invalid table name {name!r}: expected schema.table",
        hint="Write name: schema.table; if a name contains a dot, write a list: [schema, table].",
    )


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns of the rows in Postgres: in the table and in the staging table."""

    columns: tuple[tuple[str, str], ...]
    staged: tuple[tuple[str, str], ...]
    as_json: frozenset[str]

    @classmethod
    def of(cls, schema: t.StructType, options: TableOptions) -> TableColumns:
        """Derive the columns from a DataFrame's schema; InvalidRequest if one is not supported."""
        names = schema.fieldNames()
        if len({name.lower() for name in names}) < len(names):
            raise InvalidRequest(
                f"two columns have the same name: {', '.join(names)}", hint="Rename one of them: ... as name."
            )
        for name in names:
            if not name or len(name.encode()) > MAX_NAME_BYTES or "\0" in name or name.startswith(OUR_PREFIX):
                raise InvalidRequest(
                    f"invalid column name {name!r}: "
                    f"expected up to {MAX_NAME_BYTES} bytes, not starting with {OUR_PREFIX}",
                    hint="Rename it in the transform.",
                )
        wanted = [*options.key, *([options.deletes] if options.deletes else [])]
        missing = [name for name in wanted if name not in names]
        if missing:
            raise InvalidRequest(f"the rows have no column {', '.join(missing)}", hint=f"They have {', '.join(names)}.")
        columns, staged, as_json = [], [], set()
        for field in schema.fields:
            kind = postgres_type(field)
            if kind == "jsonb":
                as_json.add(field.name)
            # jsonb is staged as text and parsed by Postgres.
            staged.append((field.name, "text" if kind == "jsonb" else kind))
            if field.name == options.deletes:
                if kind != "boolean":
                    raise InvalidRequest(f"the column {field.name} of deletes is {kind}: expected boolean")
            else:
                columns.append((field.name, kind))
        for name in as_json & set(options.key):
            raise InvalidRequest(f"the key column {name} is JSON, which is not allowed", hint="Cast it: ::string.")
        return cls(tuple(columns), tuple(staged), frozenset(as_json))


def postgres_type(field: t.StructField) -> str:
    """The Postgres type of a Spark column; InvalidRequest if there is none."""
    kind = field.dataType
    if isinstance(kind, t.DecimalType):
        return f"numeric({kind.precision},{kind.scale})"
    if isinstance(kind, _JSON_TYPES):
        return "jsonb"
    for spark_type, name in _PLAIN_TYPES.items():
        if isinstance(kind, spark_type):
            return name
    raise InvalidRequest(
        f"the column {field.name} has the type {kind.simpleString()}, which has no equivalent in Postgres",
        hint=f"Cast it in the transform: cast({field.name} as string).",
    )


def staged_columns(rows: DataFrame, shape: TableColumns) -> DataFrame:
    """Convert rows for staging: jsonb columns become text."""

    def staged(field: t.StructField) -> Column:
        column = f.col("`{}`".format(field.name.replace("`", "``")))
        if field.name not in shape.as_json:
            return column
        if isinstance(field.dataType, t.VariantType):
            return f.to_json(column).alias(field.name)
        return f.to_json(column, {"ignoreNullFields": "false"}).alias(field.name)

    return rows.select(*(staged(field) for field in rows.schema.fields))


STAGED: Final = "part int, attempt string, rows bigint, kind string, message string, hint string"
_STAGED_ARROW: Final = pa.schema(
    [
        ("part", pa.int32()),
        ("attempt", pa.string()),
        ("rows", pa.int64()),
        ("kind", pa.string()),
        ("message", pa.string()),
        ("hint", pa.string()),
    ]
)


def stage(
    batches: Iterable[pa.RecordBatch], *, dsn: str, schema: str, table: str, part: int
) -> Iterator[pa.RecordBatch]:
    """Insert all rows of one task into the staging table, in one transaction; return the name of the attempt.

    Errors that a retry would not fix are returned, too, because a raised error would become a Spark error.
    """
    attempt = uuid.uuid4().hex
    rows = 0
    failure: dict[str, Any] = {}
    full = (batch for batch in batches if batch.num_rows)
    if (first := next(full, None)) is not None:
        try:
            with arrow.connect(dsn, autocommit=False) as connection:
                batch: pa.RecordBatch | None = first
                while batch is not None:
                    staged = _with_staging_columns(batch, attempt, part, rows)
                    arrow.add(connection, staged, schema=schema, table=table)
                    rows += batch.num_rows
                    batch = next(full, None)
                connection.commit()
        except (InvalidRequest, NotAllowed) as error:
            failure = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    answer = {"part": part, "attempt": attempt, "rows": rows, **failure}
    yield pa.RecordBatch.from_pylist([answer], schema=_STAGED_ARROW)


def _with_staging_columns(batch: pa.RecordBatch, attempt: str, part: int, first_row: int) -> pa.RecordBatch:
    count = batch.num_rows
    ours = [
        pa.repeat(attempt, count),
        pa.repeat(pa.scalar(part, pa.int32()), count),
        pa.array(np.arange(first_row, first_row + count)),
    ]
    return pa.RecordBatch.from_arrays(
        [*ours, *batch.columns], names=[*projections.STAGING_COLUMNS, *batch.schema.names]
    )


class TableSink:
    """Writes rows to a Postgres table, each batch exactly once. Readers see only complete batches.

    With `rebuild`, the checkpoint epoch from `begin_rebuild`, it fills the new table that will replace the existing
    one. Otherwise `checkpoint_epoch`, known after `prepare`, identifies the checkpoint that belongs to the table.
    """

    def __init__(self, options: Mapping[str, Any], context: SinkContext, *, rebuild: int | None = None) -> None:
        self._options: Final = TableOptions.parse(options)
        self._context: Final = context
        self._rebuild: Final = rebuild
        self._log: Headwater | None = None
        self._projection: Projection | None = None
        self._shape: TableColumns | None = None
        self._standing = projections_calls.ProjectionState(None, "")

    @property
    def checkpoint_epoch(self) -> int:
        """The checkpoint epoch that this sink writes. Each has its own checkpoint."""
        assert self._projection is not None, "call prepare() first"
        return self._projection.checkpoint_epoch

    def prepare(self) -> None:
        log = self._connected()
        checkpoint_epoch = self._rebuild
        if checkpoint_epoch is None:
            checkpoint_epoch = log.run(projections.projection_epoch(self._context.pipeline))
        self._projection = Projection(
            self._context.pipeline,
            self._options.schema,
            self._options.table,
            checkpoint_epoch=checkpoint_epoch,
            rebuild=self._rebuild is not None,
        )

    def write(self, rows: DataFrame, batch: Batch) -> Mapping[str, int]:
        stateful = transform.is_stateful(rows)
        projection, shape = self._ready_for(rows)
        done_to = self._standing.done_to
        # A query with state must run in any case, to update its state for the next batch.
        if done_to is not None and batch.end <= done_to and not stateful:
            return {"rows": 0, "written": 0, "removed": 0}
        staged = self._stage(staged_columns(rows, shape))
        count = sum(row.rows for row in staged)
        if count == 0 and not stateful and self._options.mode != "replace":
            # Do not record the empty batch: the record would be another change for readers that capture changes.
            return {"rows": 0, "written": 0, "removed": 0}
        call = projections.merge_projection(
            projection,
            attempts=[row.attempt for row in staged if row.rows],
            expected_rows=count,
            end=batch.end,
            number=batch.number,
            mode=self._options.mode,
            gone=self._options.deletes,
            offset_column=None if self._options.mode == "replace" else transform.offset_column(rows),
            # A position was read; an LSN is where reading continues.
            offset_inclusive=self._context.source == "changes",
            stateful=stateful,
            epoch=batch.epoch,
        )
        done = _run(self._connected(), call, tries=MAX_MERGE_ATTEMPTS)
        self._standing = projections_calls.ProjectionState(max(batch.end, done_to or 0), self._standing.staging)
        written, removed = done or (0, 0)
        return {"rows": count, "written": written, "removed": removed}

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _connected(self) -> Headwater:
        if self._log is None:
            self._log = headwater.connect(self._context.dsn, pool_size=1)
        return self._log

    def _ready_for(self, rows: DataFrame) -> tuple[Projection, TableColumns]:
        assert self._projection is not None, "call prepare() first"
        shape = TableColumns.of(rows.schema, self._options)
        if shape != self._shape:
            call = projections.prepare_projection(
                self._projection, columns=shape.columns, staged=shape.staged, key=self._options.key
            )
            self._standing = _run(self._connected(), call, tries=MAX_MERGE_ATTEMPTS)
            self._shape = shape
        return self._projection, shape

    def _stage(self, rows: DataFrame) -> Sequence[Any]:
        dsn, schema, table = self._context.dsn, self._options.schema, self._standing.staging

        def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            running = TaskContext.get()
            assert running is not None
            return stage(batches, dsn=dsn, schema=schema, table=table, part=running.partitionId())

        answers = rows.mapInArrow(task, STAGED).collect()
        for answer in answers:
            if answer.kind is not None:
                raise getattr(errors, answer.kind)(answer.message, hint=answer.hint)
        return answers


def _run(log: Headwater, call: Call[T], *, tries: int) -> T:
    """Run a call, and retry it after conflicts with other transactions."""
    for attempt in range(1, tries + 1):
        try:
            return log.run(call)
        except TransactionAborted:
            if attempt == tries:
                raise
        except psycopg.errors.LockNotAvailable as error:
            if attempt == tries:
                raise LogUnavailable(
                    f"other transactions have locked the table: {error.diag.message_primary}",
                    hint="Nothing was changed. End long transactions that use the table, then retry.",
                ) from error
        time.sleep(SWITCH_PAUSE_SECONDS)
    raise AssertionError("the last attempt returns or raises")


def checkpoint_epoch(log: Headwater, pipeline: str) -> int:
    """The checkpoint epoch of a pipeline's tables; 0 before the first rebuild. Each has its own checkpoint."""
    return log.run(projections_calls.projection_epoch(pipeline))


def begin_rebuild(log: Headwater, pipeline: str, *, resume: bool = False) -> int:
    """Start a rebuild of all tables of a pipeline, next to the existing ones; return its checkpoint epoch.

    Run the pipeline from the start of its source, with the checkpoint of that epoch and sinks created with
    `rebuild=checkpoint_epoch`, until it has caught up; then call `switch`. An unfinished rebuild is discarded by the
    next one, or continued with `resume` and its checkpoint. The existing tables are not changed.
    """
    return _run(log, projections_calls.begin_rebuild(pipeline, resume=resume), tries=MAX_MERGE_ATTEMPTS)


def abandon_rebuild(log: Headwater, pipeline: str) -> bool:
    """Discard a rebuild and drop its tables. False if there was none."""
    return _run(log, projections_calls.abandon_rebuild(pipeline), tries=MAX_MERGE_ATTEMPTS)


def switch(
    log: Headwater,
    pipeline: str,
    *,
    checkpoint_epoch: int,
    caught_up_to: int,
    read_to: int | None = None,
    epoch: int | None = None,
) -> Mapping[str, int]:
    """Make the tables of a pipeline equal to the rebuilt ones in one transaction, and drop the latter.

    `caught_up_to` is the end of the rebuild's checkpoint, where the pipeline continues; `read_to` is how far the
    rebuild has read without finding more events; `epoch` is the epoch in which it started (EpochChanged in another).
    Afterwards the pipeline uses this checkpoint epoch; runners with the former one get ProjectionRebuilt.
    """
    call = projections.switch_rebuilt(
        pipeline, checkpoint_epoch=checkpoint_epoch, caught_up_to=caught_up_to, read_to=read_to, epoch=epoch
    )
    written, removed = _run(log, call, tries=MAX_SWITCH_ATTEMPTS)
    return {"written": written, "removed": removed}
