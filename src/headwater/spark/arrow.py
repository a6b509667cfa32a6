"""Events between Postgres and Spark as Arrow: no Python object per row on the way.

Rows come as binary COPY through ADBC, which takes no parameters with it: a call is sent with its values written out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import adbc_driver_manager
import psycopg
import pyarrow as pa
from adbc_driver_manager import AdbcConnection, AdbcStatement

# Of the plain driver, not of its `dbapi`, whose import takes a second: a worker's first task would wait for it.
from adbc_driver_manager._reader import AdbcRecordBatchReader
from adbc_driver_postgresql import StatementOptions
from psycopg import sql
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from headwater import errors
from headwater.calls import Call
from headwater.capture.connection import arrow_database
from headwater.errors import LogUnavailable

T = TypeVar("T")

BATCH_BYTES = 4 * 1024 * 1024
BATCH_ROWS = 20_000

EVENT = StructType(
    [
        StructField("position", LongType(), nullable=False),
        StructField("topic", StringType(), nullable=False),
        StructField("partition", IntegerType(), nullable=False),
        StructField("topic_offset", LongType()),
        StructField("key", BinaryType()),
        StructField("type", StringType()),
        StructField("routing_key", StringType()),
        StructField("headers", StringType()),
        StructField("content_type", StringType()),
        StructField("payload", BinaryType()),
        StructField("event_id", StringType()),
        StructField("published_at", TimestampType(), nullable=False),
    ]
)
"""An event as a row of Spark. `headers` is JSON; `topic_offset` is null in an open topic."""


def text_of(call: Call[Any]) -> str:
    """A call as SQL text with its values in it, each quoted by Postgres' own rules."""
    places = call.sql.split("%s")
    assert len(places) == len(call.params) + 1
    parts: list[sql.Composable] = [sql.SQL(places[0])]
    for value, text in zip(call.params, places[1:], strict=True):
        parts += [sql.Literal(value), sql.SQL(text)]
    return sql.Composed(parts).as_string()


@contextmanager
def connect(dsn: str, *, autocommit: bool = True) -> Iterator[AdbcConnection]:
    """A connection for Arrow, with errors told as ours. What is not committed when it ends is undone."""
    # ADBC takes conninfo as well as URLs; the name is what `pg_stat_activity` shows.
    given = psycopg.conninfo.conninfo_to_dict(dsn).get("options") or ""
    options = f"{given} -c default_transaction_isolation=read\\ committed".strip()
    conninfo = psycopg.conninfo.make_conninfo(dsn, application_name="headwater spark", options=options)
    try:
        with AdbcConnection(arrow_database(conninfo, os.getpid())) as connection:
            connection.set_autocommit(autocommit)
            yield connection
    except adbc_driver_manager.Error as error:
        raise translated(error) from error


def batches(
    connection: AdbcConnection, call: Call[Any], schema: StructType, *, constants: Mapping[str, Any] | None = None
) -> Iterator[pa.RecordBatch]:
    """What a call answers, as batches of exactly the Arrow types that Spark makes of this schema.

    Columns that are the same in every row are named in `constants`, and not asked for.
    """
    # Here, since it imports pandas, which planning has no use for.
    from pyspark.sql.pandas.types import to_arrow_schema

    wanted = to_arrow_schema(schema, timezone="UTC")
    same = constants or {}
    with AdbcStatement(connection) as statement:
        statement.set_options(**{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES)})
        statement.set_sql_query(text_of(call))
        stream, _ = statement.execute_query()
        for batch in AdbcRecordBatchReader._import_from_c(stream.address):
            answered = iter(batch.columns)
            columns = [
                pa.repeat(pa.scalar(same[field.name], field.type), batch.num_rows)
                if field.name in same
                else fitted(next(answered), field.type)
                for field in wanted
            ]
            fitting = pa.RecordBatch.from_arrays(columns, schema=wanted)
            for start in range(0, fitting.num_rows, BATCH_ROWS):
                yield fitting.slice(start, BATCH_ROWS)


def fitted(column: Any, kind: Any) -> Any:
    return column if column.type == kind else column.cast(kind)


def answer(connection: AdbcConnection, call: Call[T]) -> T:
    """What a call with a short answer says, on the same connection as the batches."""
    with AdbcStatement(connection) as statement:
        statement.set_sql_query(text_of(call))
        stream, _ = statement.execute_query()
        rows = [
            tuple(row.values())
            for batch in AdbcRecordBatchReader._import_from_c(stream.address)
            for row in batch.to_pylist()
        ]
    return call.decode(rows)


def add(connection: AdbcConnection, rows: pa.RecordBatch, *, schema: str, table: str) -> None:
    """Add rows to a table by binary COPY."""
    with AdbcStatement(connection) as statement:
        statement.set_options(
            **{
                adbc_driver_manager.INGEST_OPTION_TARGET_TABLE: table,
                adbc_driver_manager.INGEST_OPTION_MODE: adbc_driver_manager.INGEST_OPTION_MODE_APPEND,
                adbc_driver_manager.StatementOptions.INGEST_TARGET_DB_SCHEMA.value: schema,
            }
        )
        statement.bind(rows)
        statement.execute_update()


def translated(error: adbc_driver_manager.Error) -> BaseException:
    """Our error for one of ADBC; one that is not ours to explain passes through."""
    if error.sqlstate is None:
        return LogUnavailable(f"no connection to Postgres: {error}") if _is_about_connection(error) else error
    return errors.from_sqlstate(error.sqlstate, _first_line(str(error))) or error


def _is_about_connection(error: adbc_driver_manager.Error) -> bool:
    return error.status_code == adbc_driver_manager.AdbcStatusCode.IO


def _first_line(text: str) -> str:
    """The message of Postgres without what the driver puts around it."""
    line = next((line for line in text.splitlines() if "ERROR:" in line), text)
    return line.partition("ERROR:")[2].strip() or line
