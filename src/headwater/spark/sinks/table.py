"""The sink `table`: rows kept in a table of Postgres, exactly once; and building such a table anew.

Tasks COPY rows into a staging table; one transaction puts them into the table and notes the batch.
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
from headwater import Headwater, calls, errors
from headwater.calls import Call, Projection
from headwater.errors import InvalidRequest, LogUnavailable, NotAllowed, TransactionAborted
from headwater.spark import arrow
from headwater.spark.options import refuse_unknown_keys
from headwater.spark.pipelines import transform
from headwater.spark.pipelines.batch import Batch, Context

T = TypeVar("T")
TableMode = Literal["upsert", "append", "replace"]

OPTIONS: Final = ("name", "key", "mode", "deletes")
MODES: Final[tuple[TableMode, ...]] = ("upsert", "append", "replace")
OUR_PREFIX: Final = "headwater_"
LONGEST_NAME: Final = 63
MERGE_TRIES: Final = 5
SWITCH_TRIES: Final = 30
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
    """What the options of the sink say."""

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
            raise InvalidRequest(f"the key of a table is {key!r}", hint="Write the names of columns: key: [customer].")
        if len(set(key)) < len(key):
            raise InvalidRequest(f"the key of a table names a column twice: {', '.join(key)}")
        mode = options.get("mode", "upsert")
        if mode not in MODES:
            raise InvalidRequest(f"the mode of a table is {mode!r}", hint=f"Known are {', '.join(MODES)}.")
        if mode == "upsert" and not key:
            raise InvalidRequest(
                "a table that is kept up to date needs a key",
                hint="Write key: [column], or mode: append for rows that are only ever added.",
            )
        deletes = options.get("deletes")
        if deletes is not None:
            if not (isinstance(deletes, str) and deletes):
                raise InvalidRequest(f"deletes is {deletes!r}", hint="Write the name of a boolean column.")
            if mode != "upsert":
                raise InvalidRequest(f"deletes has no meaning with mode {mode}", hint="Use mode: upsert.")
            if deletes in key:
                raise InvalidRequest(f"the column {deletes} says which rows go, and cannot be of the key")
        return cls(schema, table, tuple(key), mode, deletes)


def _table_name(name: object) -> tuple[str, str]:
    parts = name.split(".") if isinstance(name, str) else name
    if isinstance(parts, Sequence) and not isinstance(parts, str):
        words = [part for part in parts if isinstance(part, str) and part and "\0" not in part]
        if len(words) == len(parts) and len(words) in (1, 2):
            schema, table = words if len(words) == 2 else ("public", words[0])
            if schema == "headwater":
                raise InvalidRequest("the schema headwater is the log's own", hint="Name a table of another schema.")
            if max(len(word.encode()) for word in words) > LONGEST_NAME:
                raise InvalidRequest(f"the name {name} is longer than the {LONGEST_NAME} bytes that Postgres allows")
            return schema, table
    raise InvalidRequest(
        f"the name of a table is {name!r}",
        hint="Write name: schema.table; names with a dot in them as a list: [schema, table].",
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """What rows look like in Postgres: in the table, and on their way to it."""

    columns: tuple[tuple[str, str], ...]
    staged: tuple[tuple[str, str], ...]
    as_json: frozenset[str]

    @classmethod
    def of(cls, schema: t.StructType, options: TableOptions) -> Shape:
        """The shape of a DataFrame's rows; InvalidRequest for what cannot be a column."""
        names = schema.fieldNames()
        if len({name.lower() for name in names}) < len(names):
            raise InvalidRequest(f"two columns have one name: {', '.join(names)}", hint="Rename one: ... as name.")
        for name in names:
            if not name or len(name.encode()) > LONGEST_NAME or "\0" in name or name.startswith(OUR_PREFIX):
                raise InvalidRequest(
                    f"{name!r} cannot be the name of a column",
                    hint=f"Rename it: at most {LONGEST_NAME} bytes, and not with {OUR_PREFIX} in front.",
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
            # What is not text or binary in Arrow as in Postgres goes as text, and is read by Postgres.
            staged.append((field.name, "text" if kind == "jsonb" else kind))
            if field.name == options.deletes:
                if kind != "boolean":
                    raise InvalidRequest(f"the column {field.name} says which rows go, and is no boolean but {kind}")
            else:
                columns.append((field.name, kind))
        for name in as_json & set(options.key):
            raise InvalidRequest(f"the column {name} is JSON and cannot be of the key", hint="Cast it: ::string.")
        return cls(tuple(columns), tuple(staged), frozenset(as_json))


def postgres_type(field: t.StructField) -> str:
    """The type that a column of Spark has in Postgres; InvalidRequest for one without."""
    kind = field.dataType
    if isinstance(kind, t.DecimalType):
        return f"numeric({kind.precision},{kind.scale})"
    if isinstance(kind, _JSON_TYPES):
        return "jsonb"
    for spark_type, name in _PLAIN_TYPES.items():
        if isinstance(kind, spark_type):
            return name
    raise InvalidRequest(
        f"the column {field.name} is {kind.simpleString()}, which Postgres has no type for",
        hint=f"Cast it in the transform: cast({field.name} as string).",
    )


def staged_columns(rows: DataFrame, shape: Shape) -> DataFrame:
    """The rows as they are staged: what becomes jsonb is text on the way."""

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
    """Put all rows of one task into the staging table, in one transaction, and say under which name.

    What no further try would mend is said in the answer too, since from here an error would arrive as Spark's.
    """
    attempt = uuid.uuid4().hex
    rows = 0
    said: dict[str, Any] = {}
    full = (batch for batch in batches if batch.num_rows)
    if (first := next(full, None)) is not None:
        try:
            with arrow.connect(dsn, autocommit=False) as connection:
                batch: pa.RecordBatch | None = first
                while batch is not None:
                    arrow.add(connection, _placed(batch, attempt, part, rows), schema=schema, table=table)
                    rows += batch.num_rows
                    batch = next(full, None)
                connection.commit()
        except (InvalidRequest, NotAllowed) as error:
            said = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    answer = {"part": part, "attempt": attempt, "rows": rows, **said}
    yield pa.RecordBatch.from_pylist([answer], schema=_STAGED_ARROW)


def _placed(batch: pa.RecordBatch, attempt: str, part: int, place: int) -> pa.RecordBatch:
    count = batch.num_rows
    ours = [
        pa.repeat(attempt, count),
        pa.repeat(pa.scalar(part, pa.int32()), count),
        pa.array(np.arange(place, place + count)),
    ]
    return pa.RecordBatch.from_arrays([*ours, *batch.columns], names=[*calls.STAGING_COLUMNS, *batch.schema.names])


class TableSink:
    """Rows to a table of Postgres. Readers see whole batches only, and each batch once.

    With `rebuild`, the generation that `begin_rebuild` gave, it fills the table that is to take the place of the
    one that is there. Else `generation`, known once it is prepared, says which checkpoint belongs to the table.
    """

    def __init__(self, options: Mapping[str, Any], context: Context, *, rebuild: int | None = None) -> None:
        self._options: Final = TableOptions.parse(options)
        self._context: Final = context
        self._rebuild: Final = rebuild
        self._log: Headwater | None = None
        self._projection: Projection | None = None
        self._shape: Shape | None = None
        self._standing = calls.Standing(None, "")

    @property
    def generation(self) -> int:
        """Which generation of the table this writes. Each has a checkpoint of its own."""
        assert self._projection is not None, "prepare() comes first"
        return self._projection.generation

    def prepare(self) -> None:
        log = self._connected()
        generation = self._rebuild
        if generation is None:
            generation = log.run(calls.projection_generation(self._context.pipeline))
        self._projection = Projection(
            self._context.pipeline,
            self._options.schema,
            self._options.table,
            generation=generation,
            rebuild=self._rebuild is not None,
        )

    def write(self, rows: DataFrame, batch: Batch) -> Mapping[str, int]:
        stateful = transform.is_stateful(rows)
        projection, shape = self._ready_for(rows)
        done_to = self._standing.done_to
        # A query with state is run again even so: what it keeps for the next batch comes of running it.
        if done_to is not None and batch.end <= done_to and not stateful:
            return {"rows": 0, "written": 0, "removed": 0}
        staged = self._stage(staged_columns(rows, shape))
        count = sum(row.rows for row in staged)
        if count == 0 and not stateful and self._options.mode != "replace":
            # Nothing to write down either: a note would be one more change for those who capture changes.
            return {"rows": 0, "written": 0, "removed": 0}
        call = calls.merge_projection(
            projection,
            attempts=[row.attempt for row in staged if row.rows],
            expected_rows=count,
            end=batch.end,
            number=batch.number,
            mode=self._options.mode,
            gone=self._options.deletes,
            place=None if self._options.mode == "replace" else transform.place_column(rows),
            # A position is read, an LSN is where reading goes on.
            place_reached=self._context.source == "changes",
            stateful=stateful,
            epoch=batch.epoch,
        )
        done = _run(self._connected(), call, tries=MERGE_TRIES)
        self._standing = calls.Standing(max(batch.end, done_to or 0), self._standing.staging)
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

    def _ready_for(self, rows: DataFrame) -> tuple[Projection, Shape]:
        assert self._projection is not None, "prepare() comes first"
        shape = Shape.of(rows.schema, self._options)
        if shape != self._shape:
            call = calls.prepare_projection(
                self._projection, columns=shape.columns, staged=shape.staged, key=self._options.key
            )
            self._standing = _run(self._connected(), call, tries=MERGE_TRIES)
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
    """Carry out a call, again where others were in its way."""
    for attempt in range(1, tries + 1):
        try:
            return log.run(call)
        except TransactionAborted:
            if attempt == tries:
                raise
        except psycopg.errors.LockNotAvailable as error:
            if attempt == tries:
                raise LogUnavailable(
                    f"others hold the table: {error.diag.message_primary}",
                    hint="Nothing was changed. End long transactions that use it, and try again.",
                ) from error
        time.sleep(SWITCH_PAUSE_SECONDS)
    raise AssertionError("the last try returns or raises")


def generation(log: Headwater, pipeline: str) -> int:
    """Which generation of its tables a pipeline writes; 0 before the first rebuild. Each has its own checkpoint."""
    return log.run(calls.projection_generation(pipeline))


def begin_rebuild(log: Headwater, pipeline: str, *, resume: bool = False) -> int:
    """Begin to build all tables of a pipeline anew, beside the ones that are there. Gives the generation to write.

    Run the pipeline from the start of its source, with a checkpoint of that generation and sinks made with
    `rebuild=generation`, until it has caught up; then `switch`. A rebuild that ended half way is given up by the next
    one, or, with `resume` and its checkpoint, gone on with. The tables that are there are not touched.
    """
    return _run(log, calls.begin_rebuild(pipeline, resume=resume), tries=MERGE_TRIES)


def abandon_rebuild(log: Headwater, pipeline: str) -> bool:
    """Give a rebuild up and drop what it built. False if there was none."""
    return _run(log, calls.abandon_rebuild(pipeline), tries=MERGE_TRIES)


def switch(
    log: Headwater,
    pipeline: str,
    *,
    generation: int,
    caught_up_to: int,
    read_to: int | None = None,
    epoch: int | None = None,
) -> Mapping[str, int]:
    """Make the tables of a pipeline equal to what was rebuilt, all in one transaction, and drop what was built.

    `caught_up_to` is where the rebuild's checkpoint ends, and where the pipeline goes on; `read_to`, how far the
    rebuild has looked without finding more; `epoch`, in which it began: EpochChanged in another. From here on the
    generation is the pipeline's; a runner of the former one is refused with ProjectionRebuilt.
    """
    call = calls.switch_rebuilt(
        pipeline, generation=generation, caught_up_to=caught_up_to, read_to=read_to, epoch=epoch
    )
    written, removed = _run(log, call, tries=SWITCH_TRIES)
    return {"written": written, "removed": removed}
