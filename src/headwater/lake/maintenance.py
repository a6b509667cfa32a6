"""Upkeep of the lake's tables: small files into large ones, files that nobody needs away, a short log."""

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
from headwater.lake.table import WRITTEN, despite_others
from headwater.observability import metrics

TARGET_BYTES: Final = 128 << 20
# Today's partition still grows: what is rewritten now is rewritten again, so it waits for some files more.
FILES_OF_TODAY: Final = 32
KEEP: Final = timedelta(days=7)
# A batch whose files are written and not yet committed must not be taken for a leftover.
SHORTEST_KEEP: Final = timedelta(hours=1)
COMMITS_BETWEEN: Final = 100


@dataclass(frozen=True, slots=True)
class Compacted:
    """What became of small files."""

    partitions: int
    files_removed: int
    files_added: int


@dataclass(frozen=True, slots=True)
class TableState:
    """A table as it is now."""

    uri: str
    version: int
    files: int
    bytes: int
    rows: int | None
    small_files: int


def state_of(table: DeltaTable, *, target_bytes: int = TARGET_BYTES) -> TableState:
    """A table as it is now, from its log alone."""
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
) -> Compacted:
    """Rewrite small files of each partition as files of about `target_bytes`, a commit for each partition.

    Rows stay as they are, and so does what writers noted. Appends meanwhile go on; who rewrites the same rows at the
    same time gets a conflict, and one of both looks again.
    """
    partitions = removed = added = 0
    for filters in _worth_compacting(table, today=today, target_bytes=target_bytes, files_of_today=files_of_today):

        def rewrite(filters: list[tuple[str, str, Any]] | None = filters) -> dict[str, Any]:
            table.update_incremental()
            return table.optimize.compact(
                partition_filters=filters, target_size=target_bytes, max_concurrent_tasks=2, writer_properties=WRITTEN
            )

        found = despite_others(rewrite)
        partitions += 1
        removed += found["numFilesRemoved"]
        added += found["numFilesAdded"]
    return Compacted(partitions, removed, added)


def vacuum(table: DeltaTable, *, keep: timedelta = KEEP, leftovers: bool = True, dry_run: bool = False) -> list[str]:
    """Delete data files that the table has not used for longer than `keep`; returns their paths below the table.

    With `leftovers`, also files that were never part of it. Readers of versions older than `keep` stop working.
    """
    if leftovers and keep < SHORTEST_KEEP:
        raise InvalidRequest(
            f"leftovers can be told from files of a running batch only after {SHORTEST_KEEP}, not {keep}",
            hint="Keep files for an hour or more, or do not take leftovers.",
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
    """Write the table's state as one file, so that opening it reads that; entries older than it keeps go."""
    table.update_incremental()
    table.create_checkpoint()
    table.cleanup_metadata()


class Upkeep:
    """Compacts a table after each so many commits. A failure is told and tried again the next time."""

    def __init__(self, *, commits_between: int = COMMITS_BETWEEN, target_bytes: int = TARGET_BYTES) -> None:
        self._between = commits_between
        self._target_bytes = target_bytes
        self._done: dict[str, int] = {}

    def after_commit(self, table: DeltaTable, *, today: date) -> Compacted | None:
        """None if it is not due, or failed."""
        round_of = table.version() // self._between if self._between else 0
        if round_of <= self._done.setdefault(table.table_uri, round_of):
            return None
        self._done[table.table_uri] = round_of
        try:
            compacted = compact(table, today=today, target_bytes=self._target_bytes)
            vacuum(table, leftovers=False)
        except (DeltaError, CommitFailedError, OSError) as error:
            metrics.logger.warning("upkeep of a lake table failed", extra={metrics.ERROR: str(error)})
            return None
        return compacted


def _files(table: DeltaTable) -> Any:
    return pa.table(table.get_add_actions(flatten=True))


def _worth_compacting(
    table: DeltaTable, *, today: date, target_bytes: int, files_of_today: int
) -> Sequence[list[tuple[str, str, Any]] | None]:
    """For each partition with enough small files, the filter that names it; None names a table without any."""
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
    """Remove the directories of batches whose files are all gone. Only file systems have such."""
    if not table.table_uri.startswith("file:"):
        return
    files = filesystem(table)
    found = files.get_file_info(pafs.FileSelector(BATCHES, recursive=True, allow_not_found=True))
    # One that is new may get its first file in a moment.
    young = datetime.now(UTC) - SHORTEST_KEEP
    used = {"/".join(info.path.split("/")[:3]) for info in found if info.path.endswith(".parquet")}
    batches = {info.path for info in found if info.path.count("/") == 2 and info.mtime < young}
    for path in sorted(batches - used):
        files.delete_dir(path)
