"""Maintenance of lake tables: compaction of small files, removal of unused files, checkpoints of the Delta log."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError, DeltaError

from headwater.errors import InvalidRequest
from headwater.lake.files import BATCHES, filesystem
from headwater.lake.table import WRITER_PROPERTIES, retry_on_conflict
from headwater.observability import metrics

TARGET_BYTES: Final = 128 << 20
# Today's partition still grows and would be rewritten again, so it is compacted only from this number of files.
FILES_OF_TODAY: Final = 32
KEEP: Final = timedelta(days=7)
# Files of a running batch that are not committed yet must not be removed as leftovers.
MIN_KEEP: Final = timedelta(hours=1)
COMMITS_BETWEEN_COMPACTIONS: Final = 100


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """The result of a compaction."""

    partitions: int
    files_removed: int
    files_added: int


@dataclass(frozen=True, slots=True)
class TableState:
    """The state of a table."""

    uri: str
    version: int
    files: int
    bytes: int
    rows: int | None
    small_files: int


def state_of(table: DeltaTable, *, target_bytes: int = TARGET_BYTES) -> TableState:
    """The current state of a table, from its Delta log alone."""
    table.update_incremental()
    files = _files(table)
    sizes = files["size_bytes"].to_pylist()
    rows = files["num_records"].to_pylist() if "num_records" in files.column_names else [None] * len(sizes)
    return TableState(
        uri=table.table_uri,
        version=table.version(),
        files=len(sizes),
        bytes=sum(sizes),
        rows=None if None in rows else sum(rows),
        small_files=sum(size < target_bytes for size in sizes),
    )


def compact(
    table: DeltaTable, *, today: date, target_bytes: int = TARGET_BYTES, files_of_today: int = FILES_OF_TODAY
) -> CompactionResult:
    """Rewrite the small files of each partition as files of about `target_bytes`, in one commit per partition.

    Rows and recorded versions do not change. Concurrent appends are not affected; two concurrent rewrites of the same
    rows conflict, and one of them retries.
    """
    partitions = removed = added = 0
    for filters in _worth_compacting(table, today=today, target_bytes=target_bytes, files_of_today=files_of_today):

        def rewrite(filters: list[tuple[str, str, Any]] | None = filters) -> dict[str, Any]:
            table.update_incremental()
            return table.optimize.compact(
                partition_filters=filters,
                target_size=target_bytes,
                max_concurrent_tasks=2,
                writer_properties=WRITER_PROPERTIES,
            )

        found = retry_on_conflict(rewrite)
        partitions += 1
        removed += found["numFilesRemoved"]
        added += found["numFilesAdded"]
    return CompactionResult(partitions, removed, added)


def vacuum(table: DeltaTable, *, keep: timedelta = KEEP, leftovers: bool = True, dry_run: bool = False) -> list[str]:
    """Delete data files that the table has not used for longer than `keep`; return their paths below the table.

    With `leftovers`, also delete files that were never committed. Versions older than `keep` become unreadable.
    """
    if leftovers and keep < MIN_KEEP:
        raise InvalidRequest(
            f"keep is {keep}; removing leftovers requires at least {MIN_KEEP}, because newer files may belong to a "
            "running batch",
            hint="Keep files for an hour or more, or do not remove leftovers.",
        )
    table.update_incremental()
    deleted = table.vacuum(
        retention_hours=math.ceil(keep / timedelta(hours=1)),
        dry_run=dry_run,
        enforce_retention_duration=False,
        full=leftovers,
    )
    if deleted and not dry_run:
        _remove_empty_batches(table)
    return deleted


def checkpoint(table: DeltaTable) -> None:
    """Write a checkpoint of the Delta log, so that opening the table is fast, and remove expired log entries."""
    table.update_incremental()
    table.create_checkpoint()
    table.cleanup_metadata()


class Maintenance:
    """Compacts a table every `commits_between` commits. A failure is logged and retried the next time."""

    def __init__(self, *, commits_between: int = COMMITS_BETWEEN_COMPACTIONS, target_bytes: int = TARGET_BYTES) -> None:
        self._between = commits_between
        self._target_bytes = target_bytes
        self._done: dict[str, int] = {}

    def after_commit(self, table: DeltaTable, *, today: date) -> CompactionResult | None:
        """Compact the table if it is due. None if it is not due, or failed."""
        round_of = table.version() // self._between if self._between else 0
        if round_of <= self._done.setdefault(table.table_uri, round_of):
            return None
        self._done[table.table_uri] = round_of
        try:
            compacted = compact(table, today=today, target_bytes=self._target_bytes)
            vacuum(table, leftovers=False)
        except (DeltaError, CommitFailedError, OSError) as error:
            metrics.logger.warning("maintenance of a lake table failed", extra={metrics.ERROR: str(error)})
            return None
        return compacted


def _files(table: DeltaTable) -> Any:
    return pa.table(table.get_add_actions(flatten=True))


def _worth_compacting(
    table: DeltaTable, *, today: date, target_bytes: int, files_of_today: int
) -> Sequence[list[tuple[str, str, Any]] | None]:
    """The filter of each partition with enough small files; None for a table without partitions."""
    table.update_incremental()
    files = _files(table)
    names = table.metadata().partition_columns
    small: defaultdict[tuple[str, ...], int] = defaultdict(int)
    columns = [files[f"partition.{name}"].to_pylist() for name in names]
    for number, size in enumerate(files["size_bytes"].to_pylist()):
        if size < target_bytes:
            small[tuple("" if column[number] is None else str(column[number]) for column in columns)] += 1
    chosen: list[list[tuple[str, str, Any]] | None] = []
    for values, count in sorted(small.items()):
        grows = not names or values[0] >= today.isoformat()
        if count >= (files_of_today if grows else 2):
            chosen.append([(name, "=", value) for name, value in zip(names, values, strict=True)] or None)
    return chosen


def _remove_empty_batches(table: DeltaTable) -> None:
    """Remove the empty directories of batches. Only local file systems have directories."""
    if not table.table_uri.startswith("file:"):
        return
    files = filesystem(table)
    found = files.get_file_info(pafs.FileSelector(BATCHES, recursive=True, allow_not_found=True))
    # A new directory may be about to get its first file.
    young = datetime.now(UTC) - MIN_KEEP
    used = {"/".join(info.path.split("/")[:3]) for info in found if info.path.endswith(".parquet")}
    batches = {info.path for info in found if info.path.count("/") == 2 and info.mtime < young}
    for path in sorted(batches - used):
        files.delete_dir(path)
