"""Transfers events between Postgres and Spark as Arrow, without a Python object per row.

Rows come as binary COPY through ADBC, which does not support parameters: values are written into the SQL text.
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

# The plain driver, because importing `dbapi` takes a second, for which a worker's first task would wait.
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
"""The Spark schema of an event. `headers` is JSON; `topic_offset` is null in an open topic."""


def text_of(call: Call[Any]) -> str:
    """A call as SQL text with its values as quoted literals."""
    texts = call.sql.split("%s")
    assert len(texts) == len(call.params) + 1
    parts: list[sql.Composable] = [sql.SQL(texts[0])]
    for value, text in zip(call.params, texts[1:], strict=True):
        parts += [sql.Literal(value), sql.SQL(text)]
    return sql.Composed(parts).as_string()


@contextmanager
def connect(dsn: str, *, autocommit: bool = True) -> Iterator[AdbcConnection]:
    """An ADBC connection that raises Headwater's errors. Uncommitted changes are rolled back at the end."""
    # ADBC accepts conninfo strings and URLs; `pg_stat_activity` shows the application name.
    given = psycopg.conninfo.conninfo_to_dict(dsn).get("options") or ""
    options = f"{given} -c default_transaction_isolation=read\\ committed".strip()
    conninfo = psycopg.conninfo.make_conninfo(dsn, application_name="headwater spark", options=options)
    try:
        with AdbcConnection(arrow_database(conninfo, os.getpid())) as connection:
            connection.set_autocommit(autocommit)
            yield connection
    except adbc_driver_manager.Error as error:
        raise translate_error(error) from error


def batches(
    connection: AdbcConnection, call: Call[Any], schema: StructType, *, constants: Mapping[str, Any] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the result of a call, as batches with the Arrow types that Spark expects for this schema.

    Columns in `constants` have the same value in every row and are not queried.
    """
    # Imported here because it imports pandas, which planning does not need.
    from pyspark.sql.pandas.types import to_arrow_schema

    wanted = to_arrow_schema(schema, timezone="UTC")
    same = constants or {}
    with AdbcStatement(connection) as statement:
        statement.set_options(**{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(BATCH_BYTES)})
        statement.set_sql_query(text_of(call))
        stream, _ = statement.execute_query()
        for batch in AdbcRecordBatchReader._import_from_c(stream.address):
            queried = iter(batch.columns)
            columns = [
                pa.repeat(pa.scalar(same[field.name], field.type), batch.num_rows)
                if field.name in same
                else cast_column(next(queried), field.type)
                for field in wanted
            ]
            converted = pa.RecordBatch.from_arrays(columns, schema=wanted)
            for start in range(0, converted.num_rows, BATCH_ROWS):
                yield converted.slice(start, BATCH_ROWS)


def cast_column(column: Any, kind: Any) -> Any:
    return column if column.type == kind else column.cast(kind)


def fetch(connection: AdbcConnection, call: Call[T]) -> T:
    """Run a call with a small result, on the same connection as the batches."""
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


def translate_error(error: adbc_driver_manager.Error) -> BaseException:
    """Headwater's error for an ADBC error; other errors are returned unchanged."""
    if error.sqlstate is None:
        return LogUnavailable(f"cannot connect to Postgres: {error}") if _is_about_connection(error) else error
    return errors.from_sqlstate(error.sqlstate, _first_line(str(error))) or error


def _is_about_connection(error: adbc_driver_manager.Error) -> bool:
    return error.status_code == adbc_driver_manager.AdbcStatusCode.IO


def _first_line(text: str) -> str:
    """Postgres' message without the text that the driver adds."""
    line = next((line for line in text.splitlines() if "ERROR:" in line), text)
    return line.partition("ERROR:")[2].strip() or line
