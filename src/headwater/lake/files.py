"""Finds the Parquet files that a batch wrote below a table, and describes them from their footers for a commit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from hashlib import sha256
from typing import Any, Final
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname
from uuid import uuid4

import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler

from headwater.errors import InvalidRequest

# Longer bounds rarely help, and every reader of the table's log has to load them.
MAX_TEXT_BOUND_CHARS: Final = 64
BATCHES: Final = "batches"
_JOB_DONE: Final = "_SUCCESS"
# Delta's directory name for a null partition value.
_NO_VALUE: Final = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class DataFile:
    """One Parquet file as a commit describes it. `path` is relative to the table and needs no escaping."""

    path: str
    size: int
    rows: int
    partition: Mapping[str, str | None]
    statistics: str


def filesystem(table: DeltaTable) -> Any:
    """The table's directory as an Arrow file system, with the table's storage options."""
    return filesystem_at(table.table_uri, table._storage_options or {})


def filesystem_at(uri: str, storage_options: Mapping[str, str]) -> Any:
    """A directory or URI as an Arrow file system."""
    if uri.startswith("file:"):
        uri = url2pathname(urlsplit(uri).path)
    if "://" not in uri:
        return pafs.SubTreeFileSystem(uri, pafs.LocalFileSystem())
    return pafs.PyFileSystem(DeltaStorageHandler(uri, dict(storage_options)))


def directory_name(app: str) -> str:
    """A writer's name as a path segment that needs no escaping; different writers have different ones."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", app).lstrip("._") or "writer"
    return plain if plain == app else f"{plain}-{sha256(app.encode()).hexdigest()[:8]}"


def app_directory(app: str) -> str:
    """The directory of a writer's batches, relative to the table."""
    return f"{BATCHES}/{directory_name(app)}"


def attempt_directory(app: str, version: int, *, epoch: int | None = None) -> str:
    """A new directory for one attempt to write one batch, relative to the table.

    Each attempt has its own: a process that continues after its lease expired can neither overwrite nor delete what
    another attempt has committed. The name includes the epoch, because versions of different epochs are unrelated.
    """
    return f"{app_directory(app)}/{_number(version, epoch)}-{uuid4().hex[:12]}"


def _number(version: int, epoch: int | None) -> str:
    return f"{version:020d}" if epoch is None else f"{epoch:010d}.{version:020d}"


def remove_leftovers(
    table: DeltaTable, app: str, *, after: int, up_to: int, keep: str, epoch: int | None = None
) -> int:
    """Remove the directories of attempts that were never committed: versions in (after, up_to], except `keep`.

    Only call this after committing `up_to` on top of `after`: then no version in between can be committed any more.
    Directories of other epochs stay, because theirs may be committed.
    """
    files = filesystem(table)
    removed = 0
    for info in files.get_file_info(pafs.FileSelector(app_directory(app), allow_not_found=True)):
        number, _, attempt = info.base_name.partition("-")
        version = number.rpartition(".")[2]
        if (
            attempt
            and version.isdecimal()
            and number == _number(int(version), epoch)
            and after < int(version) <= up_to
            and not keep.endswith(info.base_name)
        ):
            files.delete_dir(info.path)
            removed += 1
    return removed


def written_files(table: DeltaTable, directory: str) -> list[DataFile]:
    """The Parquet files that a Spark job has written to a directory below the table, in the order of their names."""
    files = filesystem(table)
    if files.get_file_info([f"{directory}/{_JOB_DONE}"])[0].type != pafs.FileType.File:
        # Without this check, a job that wrote to another storage would look like one that had no rows.
        raise InvalidRequest(
            f"no completed Spark job found in {directory} below {table.table_uri}",
            hint="Check that Spark's storage settings and the sink's `storage` refer to the same storage.",
        )
    found = files.get_file_info(pafs.FileSelector(directory, recursive=True, allow_not_found=True))
    described = (_describe_file(files, info) for info in sorted(found, key=lambda info: info.path) if _is_data(info))
    return [file for file in described if file.rows]


def remove_tree(files: Any, directory: str) -> None:
    """Remove a directory and its contents, if it exists."""
    if files.get_file_info([directory])[0].type == pafs.FileType.Directory:
        files.delete_dir(directory)


def _is_data(info: Any) -> bool:
    name = info.path.rsplit("/", 1)[-1]
    return info.type == pafs.FileType.File and name.endswith(".parquet") and not name.startswith(("_", "."))


def _describe_file(files: Any, info: Any) -> DataFile:
    with files.open_input_file(info.path) as opened:
        footer = pq.read_metadata(opened)
        # The actual size: a listing may be out of date.
        size = opened.size()
    pairs = [part.split("=", 1) for part in info.path.split("/")[:-1] if "=" in part]
    partition = {name: None if value == _NO_VALUE else unquote(value) for name, value in pairs}
    return DataFile(info.path, size, footer.num_rows, partition, statistics(footer))


def statistics(footer: Any) -> str:
    """The statistics of a file for a commit: bounds of integers, times and short texts, and null counts."""
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    unbounded: set[str] = set()
    uncounted: set[str] = set()
    for name, found in _columns(footer):
        if found is None or not found.has_null_count:
            uncounted.add(name)
        else:
            nulls[name] = nulls.get(name, 0) + found.null_count
        if found is not None and found.has_min_max:
            low, high = found.min, found.max
            if _is_bound(low) and _is_bound(high):
                lowest[name] = low if name not in lowest else min(lowest[name], low)
                highest[name] = high if name not in highest else max(highest[name], high)
                continue
        if found is None or not found.has_null_count or found.num_values:
            unbounded.add(name)
    return json.dumps(
        {
            "numRecords": footer.num_rows,
            "minValues": {name: _json_value(value) for name, value in lowest.items() if name not in unbounded},
            "maxValues": {name: _json_value(value) for name, value in highest.items() if name not in unbounded},
            "nullCount": {name: count for name, count in nulls.items() if name not in uncounted},
        }
    )


def _columns(footer: Any) -> Iterator[tuple[str, Any]]:
    """The statistics of each non-nested column in each row group; None if missing."""
    for group in range(footer.num_row_groups):
        row_group = footer.row_group(group)
        for number in range(row_group.num_columns):
            column = row_group.column(number)
            if footer.schema.column(number).max_repetition_level == 0 and "." not in column.path_in_schema:
                yield column.path_in_schema, column.statistics


def _is_bound(value: object) -> bool:
    # Not floats: footers ignore NaN in their bounds, but some readers sort it above all numbers.
    if isinstance(value, str):
        return len(value) <= MAX_TEXT_BOUND_CHARS
    return isinstance(value, int | date) and not isinstance(value, bool)


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            return value.isoformat(timespec="microseconds")
        return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    return value.isoformat() if isinstance(value, date) else value
