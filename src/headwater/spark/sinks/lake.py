"""The sink `lake`: rows to Delta tables, each batch once, whatever is killed when.

Executors write Parquet files; the driver makes them part of the table in one commit, which also notes how far the
pipeline is. Nothing here needs Spark to know Delta.
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
from headwater import calls
from headwater.capture import pgoutput
from headwater.errors import InvalidRequest
from headwater.lake import Location, commit_files, open_or_create, open_table, version_of, written_files
from headwater.lake.columns import CapturedColumn, described, reader_of, typed
from headwater.lake.current import CurrentTables
from headwater.lake.files import (
    app_directory,
    attempt_directory,
    filesystem,
    filesystem_at,
    remove_leftovers,
    remove_tree,
)
from headwater.lake.maintenance import COMMITS_BETWEEN, Upkeep
from headwater.lake.table import add_missing_columns, epoch_of, remove_after
from headwater.spark.epochs import Offset, common_position, history_lost
from headwater.spark.options import refuse_unknown_keys
from headwater.spark.pipelines import transform
from headwater.spark.pipelines.batch import Batch, Context, Source
from headwater.spark.sinks.archive import on_committed, refuse_unfit, register, topics_of

Keep = Literal["history", "current"]
KEEPS: Final = ("history", "current")
OPTIONS: Final = ("path", "keep", "archive", "date_from", "storage", "compact_every", "as_text")

_UNTOLD: Final = frozenset({"slot", "max_events", "max_bytes"})
DATE: Final = "date"
# Beside the tables, and hidden from those who look for data.
STAGED: Final = "_staged"
STAGED_ROWS: Final = 20_000
# Where a row has the time that its partition is made from, if nobody says.
_TIMES: Final = ("published_at", "committed_at")
# Where a row stands in its source; what a sink has noted of it is: the last position, or the first LSN not read.
_PLACES: Final[Mapping[Source, str]] = {"log": "position", "changes": "commit_lsn"}


@dataclass(frozen=True, slots=True)
class LakeOptions:
    """What the options of the sink say."""

    location: Location
    keep: Keep
    archive: bool
    date_from: str | None
    compact_every: int
    as_text: tuple[str, ...]

    @classmethod
    def parse(cls, options: Mapping[str, Any], context: Context) -> LakeOptions:
        refuse_unknown_keys(options, OPTIONS, "the sink lake")
        if "path" not in options:
            raise InvalidRequest("the sink lake needs a path", hint="Write lake: {path: ./lake/orders}.")
        storage = options.get("storage", {})
        if not isinstance(storage, Mapping):
            raise InvalidRequest(f"storage is {storage!r}, not names with values")
        keep, every = options.get("keep", "history"), options.get("compact_every", COMMITS_BETWEEN)
        if keep not in KEEPS:
            raise InvalidRequest(f"keep is {keep!r}", hint=f"It is one of {', '.join(KEEPS)}.")
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise InvalidRequest(f"compact_every is {every!r}, not a number of commits", hint="0 means never.")
        archive = options.get("archive", False)
        if not isinstance(archive, bool):
            raise InvalidRequest(f"archive is {archive!r}, neither true nor false")
        if archive and keep != "history":
            raise InvalidRequest("an archive keeps every event", hint="Leave out keep, or archive: true.")
        if archive:
            refuse_unfit(context.source, _told(context.source_options))
        date_from, as_text = options.get("date_from"), options.get("as_text", [])
        if date_from is not None and not (isinstance(date_from, str) and date_from):
            raise InvalidRequest(f"date_from is {date_from!r}, not the name of a column")
        if not isinstance(as_text, list) or not all(isinstance(name, str) for name in as_text):
            raise InvalidRequest(f"as_text is {as_text!r}, not a list of columns")
        if keep == "current":
            if context.source != "changes":
                raise InvalidRequest(
                    "keep: current needs captured changes", hint="Write from: {changes: ...}, or keep: history."
                )
            if date_from is not None:
                raise InvalidRequest("date_from is for keep: history", hint="The current state is not split by date.")
        elif as_text:
            raise InvalidRequest("as_text is for keep: current", hint="Cast columns in a transform instead.")
        location = Location.parse(
            options["path"],
            directory=context.directory,
            storage_options={str(name): str(value) for name, value in storage.items()},
        )
        return cls(location, cast(Keep, keep), archive, date_from, every, tuple(as_text))


def _told(source_options: Mapping[str, Any]) -> dict[str, Any]:
    """What the pipeline's file says of which events are read; not how many at once, nor what only captures have."""
    return {name: value for name, value in source_options.items() if name not in _UNTOLD and value is not None}


class LakeSink:
    """Rows to a Delta table as they come, or captured tables as they are now."""

    def __init__(self, options: Mapping[str, Any], context: Context) -> None:
        self._options: Final = LakeOptions.parse(options, context)
        self._context: Final = context
        upkeep = Upkeep(commits_between=self._options.compact_every)
        self._history: Final = History(self._options, context, upkeep)
        self._current: Final = Current(self._options, context.pipeline, upkeep)

    def prepare(self) -> None:
        location = self._options.location
        if (local := location.local) is not None:
            try:
                local.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidRequest(f"the lake cannot be in {local}: {error.strerror}", hint="Change path.") from error
        if self._options.archive:
            table = open_table(location)
            noted = None if table is None else self._history.noted(table)
            register(
                self._context.dsn,
                self._context.pipeline,
                location=location.uri,
                source=self._context.source,
                options=_told(self._context.source_options),
                written_to=None if noted is None else noted.kept,
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
        """Replace what the lake has of a table by these rows of a snapshot, in one commit; says how many there were."""
        if self._options.keep != "current":
            raise InvalidRequest(
                "whole tables go to a lake that keeps the current state",
                hint="Write keep: current, or leave out snapshot.",
            )
        return self._current.load(rows, table, batch)

    def close(self) -> None:
        """Nothing stays open."""


class Noted(NamedTuple):
    """Up to where a table has what its pipeline read."""

    version: int
    """As the table says it."""
    kept: int
    """As it holds for the log as it is now: what is between both was lost by the log, and is of no use."""
    epoch: int | None
    """The present epoch, where that had to be asked for."""


class History:
    """Every row, appended to one table that is split by date."""

    def __init__(self, options: LakeOptions, context: Context, upkeep: Upkeep) -> None:
        self._options = options
        self._context = context
        self._upkeep = upkeep
        self._table: DeltaTable | None = None
        self._schema: StructType | None = None
        # What was killed in the middle of a batch left its files.
        self._tidy = False

    def write(self, rows: DataFrame, batch: Batch) -> Mapping[str, int]:
        rows = self._dated(rows)
        table = self._fitting(rows.schema)
        found = self.noted(table, batch.epoch)
        if found is not None and found.kept >= batch.end:
            return {"rows": 0, "files": 0}
        noted = None if found is None else self._without_lost(table, rows, found)
        kept = None if found is None else found.kept
        rows = self._not_yet_written(rows, kept)
        directory = attempt_directory(batch.pipeline, batch.end, epoch=batch.epoch)
        tidy, self._tidy = self._tidy, False
        write_parquet(rows, self._options.location, directory, partition_by=table.metadata().partition_columns)
        files = written_files(table, directory)
        if not files or not commit_files(
            table, files, app=batch.pipeline, version=batch.end, epoch=batch.epoch, expected=noted
        ):
            # Nothing to add; or another runner was first, and this directory is ours alone.
            remove_tree(filesystem(table), directory)
            self._tidy = tidy
            return {"rows": 0, "files": 0}
        if not tidy:
            remove_leftovers(table, batch.pipeline, after=kept or 0, up_to=batch.end, keep=directory, epoch=batch.epoch)
        self._tidy = True
        self._upkeep.after_commit(table, today=datetime.now(UTC).date())
        return {"rows": sum(file.rows for file in files), "files": len(files)}

    def noted(self, table: DeltaTable, epoch: int | None = None) -> Noted | None:
        """Up to where the table has what was read; HistoryLost if the log has not, and the pipeline is to stop then.

        `epoch`: one of which it is known that nothing was lost since.
        """
        app = self._context.pipeline
        version = version_of(table, app)
        if version is None:
            return None
        offset = Offset(version, epoch_of(table, app))
        if offset.epoch is None or offset.epoch == epoch:
            return Noted(version, version, None)
        with headwater.connect(self._context.dsn, pool_size=1) as log:
            present = log.run(calls.current_epoch())
            kept = common_position(log, offset, topics_of(self._context.source_options))
        if kept < version and self._context.on_epoch_change == "stop":
            raise history_lost(app, f"the lake {self._options.location.uri}", offset, present=present, common=kept)
        return Noted(version, kept, present)

    def _without_lost(self, table: DeltaTable, rows: DataFrame, found: Noted) -> int:
        """Remove the rows of events that the log has lost, if rows say which they are; what the table notes then."""
        app = self._context.pipeline
        if found.kept < found.version and found.epoch is not None and transform.place_column(rows) == "position":
            remove_after(table, "position", after=found.kept, up_to=found.version, app=app, epoch=found.epoch)
            return version_of(table, app) or 0
        return found.version

    def _dated(self, rows: DataFrame) -> DataFrame:
        source = self._options.date_from or next((name for name in _TIMES if name in rows.columns), None)
        if source is None:
            return rows
        if source not in rows.columns:
            raise InvalidRequest(
                f"date_from names {source!r}, which the rows do not have",
                hint=f"They have {', '.join(rows.columns)}.",
            )
        if not isinstance(rows.schema[source].dataType, DateType | TimestampType | TimestampNTZType):
            raise InvalidRequest(f"date_from names {source!r}, which is neither a date nor a time")
        if DATE in rows.columns and source != DATE:
            raise InvalidRequest(
                f"the rows have a column {DATE!r} already, which the lake makes from {source!r}",
                hint=f"Rename it in the transform, or write date_from: {DATE}.",
            )
        return rows.withColumn(DATE, f.to_date(source))

    def _fitting(self, schema: StructType) -> DeltaTable:
        """The table, with all the columns that the rows have."""
        if self._table is not None and self._schema == schema:
            return self._table
        arrow = to_arrow_schema(schema, timezone="UTC")
        table = open_or_create(self._options.location, arrow, partition_by=[DATE] if DATE in schema.names else [])
        add_missing_columns(table, arrow)
        partitions = table.metadata().partition_columns
        if not set(partitions) <= set(schema.names):
            raise InvalidRequest(
                f"the table {table.table_uri} is split by {', '.join(partitions)}, which the rows do not have",
                hint="Name the column to make it from with date_from, or write to another path.",
            )
        self._table, self._schema = table, schema
        return table

    def _not_yet_written(self, rows: DataFrame, noted: int | None) -> DataFrame:
        """Without what the table has: after a lost checkpoint, batches are cut in other places."""
        place = _PLACES[self._context.source]
        if noted is None or place not in rows.columns:
            return rows
        return rows.where(f.col(place) > noted if place == "position" else f.col(place) >= noted)


class Current:
    """Captured tables as they are now, one Delta table each."""

    def __init__(self, options: LakeOptions, pipeline: str, upkeep: Upkeep) -> None:
        self._options = options
        self._pipeline = pipeline
        self._upkeep = upkeep
        self._tables = CurrentTables(options.location, app=pipeline, as_text=options.as_text)
        self._files = filesystem_at(options.location.uri, options.location.storage_options)
        # What was killed in the middle of a batch left its files.
        self._tidy = False

    def write(self, rows: DataFrame, batch: Batch) -> Mapping[str, int]:
        missing = [name for name in pgoutput.SCHEMA.names if name not in rows.columns]
        if missing:
            raise InvalidRequest(
                f"keep: current needs captured changes as they are, and these rows lack {', '.join(missing)}",
                hint="Leave out the transform, or use keep: history.",
            )
        # The driver merges, in the order of the changes. Through a file, since a transaction may be larger than memory.
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
        for table in self._tables.touched():
            self._upkeep.after_commit(table, today=today)
        return {"rows": sum(applied.values()), "tables": len(applied)}

    def load(self, rows: DataFrame, table: str, batch: Batch) -> int:
        described_in = rows.where(f.col("columns").isNotNull()).select("schema", "table", "columns").head()
        if described_in is None:
            return self._load_nothing(table)
        columns = described(described_in["columns"], as_text=self._options.as_text)
        kept = self._tables.table(described_in["schema"], described_in["table"])
        delta = kept.created(columns)
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
        """A table without rows does not say what its columns are; the first change will."""
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
        # Without what the fields say of Postgres, which Spark does not expect.
        yield from typed(rows, columns).replace_schema_metadata(None).to_batches()


def staged_batches(files: Any, directory: str) -> Iterator[Any]:
    """The rows of Parquet files, in the order in which they were written."""
    found = files.get_file_info(pafs.FileSelector(directory))
    for path in sorted(info.path for info in found if info.path.endswith(".parquet")):
        with files.open_input_file(path) as opened:
            yield from pq.ParquetFile(opened).iter_batches(batch_size=STAGED_ROWS)


def write_parquet(rows: DataFrame, location: Location, directory: str, *, partition_by: Sequence[str] = ()) -> None:
    """Let the executors write the rows into a new directory below the table, as Parquet that every program reads."""
    # The default is a type of twelve bytes that is long out of use.
    rows.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    writer = rows.write.mode("errorifexists").option("compression", "zstd")
    if partition_by:
        writer = writer.partitionBy(*partition_by)
    writer.parquet(f"{spark_uri(location)}/{directory}")


def spark_uri(location: Location) -> str:
    """The place as Spark's file systems name it."""
    local = location.local
    if local is not None:
        # As it is: Hadoop's paths are not escaped.
        return f"file://{local}"
    return "s3a://" + location.uri.removeprefix("s3://") if location.uri.startswith("s3://") else location.uri
