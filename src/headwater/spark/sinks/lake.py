"""The sink `lake`: writes rows to Delta tables, each batch exactly once. Crash-safe.

Executors write Parquet files; the driver adds them to the table in one commit, which also records the offset of the
pipeline. Spark does not need Delta support.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal, NamedTuple, cast

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import DateType, StructType, TimestampNTZType, TimestampType

import headwater
from headwater.calls import log as log_calls
from headwater.capture import pgoutput
from headwater.errors import InvalidRequest
from headwater.lake import Location, commit_files, open_or_create, open_table, version_of, written_files
from headwater.lake.columns import CapturedColumn, parse_columns, reader_of, to_arrow
from headwater.lake.current import CurrentTables
from headwater.lake.files import (
    app_directory,
    attempt_directory,
    filesystem,
    filesystem_at,
    remove_leftovers,
    remove_tree,
)
from headwater.lake.maintenance import COMMITS_BETWEEN_COMPACTIONS, Maintenance
from headwater.lake.table import add_missing_columns, epoch_of, remove_after
from headwater.spark.epochs import Offset, common_position, history_lost_error
from headwater.spark.options import refuse_unknown_keys
from headwater.spark.pipelines import transform
from headwater.spark.pipelines.batch import Batch, SinkContext, Source
from headwater.spark.sinks.archive import on_committed, refuse_unfit, register, topics_of

Keep = Literal["history", "current"]
KEEPS: Final = ("history", "current")
OPTIONS: Final = ("path", "keep", "archive", "date_from", "storage", "compact_every", "as_text")

_NOT_SELECTING: Final = frozenset({"slot", "max_events", "max_bytes"})
DATE: Final = "date"
# Next to the tables; the underscore hides it from readers.
STAGED: Final = "_staged"
STAGED_ROWS: Final = 20_000
# The default time columns from which the partition date is derived.
_TIMES: Final = ("published_at", "committed_at")
# The offset column of each source. A sink records the last position, or the first LSN that was not read.
_OFFSET_COLUMNS: Final[Mapping[Source, str]] = {"log": "position", "changes": "commit_lsn"}


@dataclass(frozen=True, slots=True)
class LakeOptions:
    """The parsed options of the sink."""

    location: Location
    keep: Keep
    archive: bool
    date_from: str | None
    compact_every: int
    as_text: tuple[str, ...]

    @classmethod
    def parse(cls, options: Mapping[str, Any], context: SinkContext) -> LakeOptions:
        refuse_unknown_keys(options, OPTIONS, "the sink lake")
        if "path" not in options:
            raise InvalidRequest("the sink lake requires a path", hint="Write lake: {path: ./lake/orders}.")
        storage = options.get("storage", {})
        if not isinstance(storage, Mapping):
            raise InvalidRequest(f"storage is {storage!r}: expected a mapping of options")
        keep, every = options.get("keep", "history"), options.get("compact_every", COMMITS_BETWEEN_COMPACTIONS)
        if keep not in KEEPS:
            raise InvalidRequest(f"keep is {keep!r}: expected {' or '.join(KEEPS)}")
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise InvalidRequest(f"compact_every is {every!r}: expected a number of commits", hint="0 means never.")
        archive = options.get("archive", False)
        if not isinstance(archive, bool):
            raise InvalidRequest(f"archive is {archive!r}: expected true or false")
        if archive and keep != "history":
            raise InvalidRequest("an archive requires keep: history", hint="Remove keep, or archive: true.")
        if archive:
            refuse_unfit(context.source, _selecting_options(context.source_options))
        date_from, as_text = options.get("date_from"), options.get("as_text", [])
        if date_from is not None and not (isinstance(date_from, str) and date_from):
            raise InvalidRequest(f"date_from is {date_from!r}: expected the name of a column")
        if not isinstance(as_text, list) or not all(isinstance(name, str) for name in as_text):
            raise InvalidRequest(f"as_text is {as_text!r}: expected a list of columns")
        if keep == "current":
            if context.source != "changes":
                raise InvalidRequest(
                    "keep: current requires captured changes", hint="Write from: {changes: ...}, or keep: history."
                )
            if date_from is not None:
                raise InvalidRequest(
                    "date_from requires keep: history", hint="The current state is not partitioned by date."
                )
        elif as_text:
            raise InvalidRequest("as_text requires keep: current", hint="Cast columns in a transform instead.")
        location = Location.parse(
            options["path"],
            directory=context.directory,
            storage_options={str(name): str(value) for name, value in storage.items()},
        )
        return cls(location, cast(Keep, keep), archive, date_from, every, tuple(as_text))


def _selecting_options(source_options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that select events, without batch limits and the slot."""
    return {name: value for name, value in source_options.items() if name not in _NOT_SELECTING and value is not None}


class LakeSink:
    """Appends rows to a Delta table (keep: history), or maintains captured tables (keep: current)."""

    def __init__(self, options: Mapping[str, Any], context: SinkContext) -> None:
        self._options: Final = LakeOptions.parse(options, context)
        self._context: Final = context
        maintenance = Maintenance(commits_between=self._options.compact_every)
        self._history: Final = HistoryWriter(self._options, context, maintenance)
        self._current: Final = CurrentWriter(self._options, context.pipeline, maintenance)

    def prepare(self) -> None:
        location = self._options.location
        if (local := location.local) is not None:
            try:
                local.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidRequest(
                    f"cannot create the lake in {local}: {error.strerror}", hint="Choose another path."
                ) from error
        if self._options.archive:
            table = open_table(location)
            recorded = None if table is None else self._history.recorded_offset(table)
            register(
                self._context.dsn,
                self._context.pipeline,
                location=location.uri,
                source=self._context.source,
                options=_selecting_options(self._context.source_options),
                written_to=None if recorded is None else recorded.kept,
            )

    def write(self, rows: DataFrame, batch: Batch) -> Mapping[str, int]:
        if self._options.keep == "current":
            return self._current.write(rows, batch)
        if self._options.archive:
            refuse_unfit(self._context.source, {}, rows.columns)
        counts = self._history.write(rows, batch)
        if self._options.archive:
            on_committed(self._context.dsn, batch.pipeline, batch.end, batch.epoch)
        return counts

    def write_snapshot(self, rows: DataFrame, table: str, batch: Batch) -> int:
        """Replace the lake's rows of a table by these rows of a snapshot, in one commit; return their number."""
        if self._options.keep != "current":
            raise InvalidRequest(
                "loading whole tables requires keep: current",
                hint="Write keep: current, or remove snapshot.",
            )
        return self._current.load(rows, table, batch)

    def close(self) -> None:
        """Nothing to close."""


class RecordedOffset(NamedTuple):
    """The offset that a table records for its pipeline."""

    version: int
    """The recorded version."""
    kept: int
    """The part of it that the log still has. The log has lost the events between `kept` and `version`."""
    epoch: int | None
    """The current epoch, if it was queried."""


class HistoryWriter:
    """Appends all rows to one table, partitioned by date."""

    def __init__(self, options: LakeOptions, context: SinkContext, maintenance: Maintenance) -> None:
        self._options = options
        self._context = context
        self._maintenance = maintenance
        self._table: DeltaTable | None = None
        self._schema: StructType | None = None
        # Whether files of killed attempts are already removed.
        self._tidy = False

    def write(self, rows: DataFrame, batch: Batch) -> Mapping[str, int]:
        rows = self._with_date(rows)
        table = self._open_table(rows.schema)
        found = self.recorded_offset(table, batch.epoch)
        if found is not None and found.kept >= batch.end:
            return {"rows": 0, "files": 0}
        recorded = None if found is None else self._remove_lost(table, rows, found)
        kept = None if found is None else found.kept
        rows = self._not_yet_written(rows, kept)
        directory = attempt_directory(batch.pipeline, batch.end, epoch=batch.epoch)
        tidy, self._tidy = self._tidy, False
        write_parquet(rows, self._options.location, directory, partition_by=table.metadata().partition_columns)
        files = written_files(table, directory)
        if not files or not commit_files(
            table, files, app=batch.pipeline, version=batch.end, epoch=batch.epoch, expected=recorded
        ):
            # No rows, or another runner has committed the batch. The directory belongs to this attempt only.
            remove_tree(filesystem(table), directory)
            self._tidy = tidy
            return {"rows": 0, "files": 0}
        if not tidy:
            remove_leftovers(table, batch.pipeline, after=kept or 0, up_to=batch.end, keep=directory, epoch=batch.epoch)
        self._tidy = True
        self._maintenance.after_commit(table, today=datetime.now(UTC).date())
        return {"rows": sum(file.rows for file in files), "files": len(files)}

    def recorded_offset(self, table: DeltaTable, epoch: int | None = None) -> RecordedOffset | None:
        """The recorded offset; HistoryLost if the log has lost events up to it and the pipeline is set to stop.

        `epoch`: an epoch since which nothing was lost.
        """
        app = self._context.pipeline
        version = version_of(table, app)
        if version is None:
            return None
        offset = Offset(version, epoch_of(table, app))
        if offset.epoch is None or offset.epoch == epoch:
            return RecordedOffset(version, version, None)
        with headwater.connect(self._context.dsn, pool_size=1) as log:
            present = log.run(log_calls.current_epoch())
            kept = common_position(log, offset, topics_of(self._context.source_options))
        if kept < version and self._context.on_epoch_change == "stop":
            raise history_lost_error(
                app, f"the lake {self._options.location.uri}", offset, present=present, common=kept
            )
        return RecordedOffset(version, kept, present)

    def _remove_lost(self, table: DeltaTable, rows: DataFrame, found: RecordedOffset) -> int:
        """Remove rows of lost events, if the rows have positions; return the version that the table then records."""
        app = self._context.pipeline
        if found.kept < found.version and found.epoch is not None and transform.offset_column(rows) == "position":
            remove_after(table, "position", after=found.kept, up_to=found.version, app=app, epoch=found.epoch)
            return version_of(table, app) or 0
        return found.version

    def _with_date(self, rows: DataFrame) -> DataFrame:
        source = self._options.date_from or next((name for name in _TIMES if name in rows.columns), None)
        if source is None:
            return rows
        if source not in rows.columns:
            raise InvalidRequest(
                f"the rows have no column {source!r}, which date_from names",
                hint=f"They have {', '.join(rows.columns)}.",
            )
        if not isinstance(rows.schema[source].dataType, DateType | TimestampType | TimestampNTZType):
            raise InvalidRequest(f"the column {source!r} of date_from is neither a date nor a timestamp")
        if DATE in rows.columns and source != DATE:
            raise InvalidRequest(
                f"the rows already have a column {DATE!r}, which the lake derives from {source!r}",
                hint=f"Rename it in the transform, or write date_from: {DATE}.",
            )
        return rows.withColumn(DATE, f.to_date(source))

    def _open_table(self, schema: StructType) -> DeltaTable:
        """The table, with all columns of the rows."""
        if self._table is not None and self._schema == schema:
            return self._table
        arrow = to_arrow_schema(schema, timezone="UTC")
        table = open_or_create(self._options.location, arrow, partition_by=[DATE] if DATE in schema.names else [])
        add_missing_columns(table, arrow)
        partitions = table.metadata().partition_columns
        if not set(partitions) <= set(schema.names):
            raise InvalidRequest(
                f"the table {table.table_uri} is partitioned by {', '.join(partitions)}, which the rows do not have",
                hint="Set date_from to the column from which to derive it, or write to another path.",
            )
        self._table, self._schema = table, schema
        return table

    def _not_yet_written(self, rows: DataFrame, recorded: int | None) -> DataFrame:
        """Filter out rows that the table already has: after a lost checkpoint, batches have other boundaries."""
        column = _OFFSET_COLUMNS[self._context.source]
        if recorded is None or column not in rows.columns:
            return rows
        return rows.where(f.col(column) > recorded if column == "position" else f.col(column) >= recorded)


class CurrentWriter:
    """Maintains the current state of captured tables, one Delta table each."""

    def __init__(self, options: LakeOptions, pipeline: str, maintenance: Maintenance) -> None:
        self._options = options
        self._pipeline = pipeline
        self._maintenance = maintenance
        self._tables = CurrentTables(options.location, app=pipeline, as_text=options.as_text)
        self._files = filesystem_at(options.location.uri, options.location.storage_options)
        # Whether files of killed attempts are already removed.
        self._tidy = False

    def write(self, rows: DataFrame, batch: Batch) -> Mapping[str, int]:
        missing = [name for name in pgoutput.SCHEMA.names if name not in rows.columns]
        if missing:
            raise InvalidRequest(
                f"keep: current requires all columns of captured changes, but these rows lack {', '.join(missing)}",
                hint="Remove the transform, or use keep: history.",
            )
        # The driver merges the changes in order, from a file, because a transaction may be larger than memory.
        if not self._tidy:
            remove_tree(self._files, f"{STAGED}/{app_directory(batch.pipeline)}")
            self._tidy = True
        directory = f"{STAGED}/{attempt_directory(batch.pipeline, batch.end)}"
        write_parquet(
            rows.coalesce(1).sortWithinPartitions("commit_lsn", "sequence"), self._options.location, directory
        )
        try:
            applied = self._tables.apply(staged_batches(self._files, directory))
        finally:
            remove_tree(self._files, directory)
        today = datetime.now(UTC).date()
        for table in self._tables.opened():
            self._maintenance.after_commit(table, today=today)
        return {"rows": sum(applied.values()), "tables": len(applied)}

    def load(self, rows: DataFrame, table: str, batch: Batch) -> int:
        described_in = rows.where(f.col("columns").isNotNull()).select("schema", "table", "columns").head()
        if described_in is None:
            return self._load_nothing(table)
        columns = parse_columns(described_in["columns"], as_text=self._options.as_text)
        kept = self._tables.table(described_in["schema"], described_in["table"])
        delta = kept.ensure_created(columns)
        delta.update_incremental()
        found = kept.loads()
        loader = f"{batch.pipeline}.load"
        directory = attempt_directory(loader, found + 1)
        shape = from_arrow_schema(pa.schema([pa.field(column.name, column.type) for column in columns]))
        typed_rows = rows.select("row").mapInArrow(partial(_typed_batches, columns=columns), shape)
        write_parquet(typed_rows, kept.location, directory)
        files = written_files(delta, directory)
        kept.load(files, columns, found=found)
        remove_leftovers(delta, loader, after=found, up_to=found + 1, keep=directory)
        return sum(file.rows for file in files)

    def _load_nothing(self, table: str) -> int:
        """Load an empty table: its columns are unknown until the first change."""
        schema, _, name = table.rpartition(".")
        kept = self._tables.table(schema or "public", name)
        if kept.delta is not None:
            kept.delta.update_incremental()
            kept.load([], kept.columns(), found=kept.loads())
        return 0


def _typed_batches(batches: Iterator[Any], columns: Sequence[CapturedColumn]) -> Iterator[Any]:
    read = reader_of(columns)
    for batch in batches:
        rows = [read(text) for text in batch.column("row").to_pylist()]
        # Without the metadata of the fields, which Spark does not expect.
        yield from to_arrow(rows, columns).replace_schema_metadata(None).to_batches()


def staged_batches(files: Any, directory: str) -> Iterator[Any]:
    """Yield the rows of Parquet files in the order in which they were written."""
    found = files.get_file_info(pafs.FileSelector(directory))
    for path in sorted(info.path for info in found if info.path.endswith(".parquet")):
        with files.open_input_file(path) as opened:
            yield from pq.ParquetFile(opened).iter_batches(batch_size=STAGED_ROWS)


def write_parquet(rows: DataFrame, location: Location, directory: str, *, partition_by: Sequence[str] = ()) -> None:
    """Write the rows to a new directory below the table, with standard Parquet types."""
    # Spark's default is the obsolete INT96.
    rows.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    writer = rows.write.mode("errorifexists").option("compression", "zstd")
    if partition_by:
        writer = writer.partitionBy(*partition_by)
    writer.parquet(f"{spark_uri(location)}/{directory}")


def spark_uri(location: Location) -> str:
    """The location as a URI for Spark's file systems."""
    local = location.local
    if local is not None:
        # Not escaped: Hadoop paths are literal.
        return f"file://{local}"
    return "s3a://" + location.uri.removeprefix("s3://") if location.uri.startswith("s3://") else location.uri
