"""Delta tables: open or create, append exactly once per batch, and find files by a column's bounds.

Each commit records a version (a log position or an LSN) for its writer as a Delta app transaction. A writer reads the
recorded version before it writes, so a repeated batch is detected and not committed twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, WriterProperties
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction

from headwater.errors import InvalidRequest, LakeBusy
from headwater.lake.files import DataFile, directory_name

T = TypeVar("T")

# Checkpoints of the Delta log, so that opening a table reads a few files, however many commits it has.
CONFIGURATION: Final = {"delta.checkpointInterval": "20", "delta.logRetentionDuration": "interval 7 days"}
# Row groups small enough to hold in memory and to skip by their bounds.
WRITER_PROPERTIES: Final = WriterProperties(compression="ZSTD", max_row_group_size=100_000)
MAX_CONFLICT_ATTEMPTS: Final = 20
_FIRST_WAIT_SECONDS: Final = 0.05
_MAX_WAIT_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a table: an absolute directory, or a URI with storage options."""

    uri: str
    storage_options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(
        cls, path: object, *, directory: Path | None = None, storage_options: Mapping[str, str] | None = None
    ) -> Location:
        """Parse a path or URI. A relative path is resolved against `directory`."""
        if not isinstance(path, str) or not path.strip():
            raise InvalidRequest(
                f"invalid table path {path!r}: expected a path or URI",
                hint="Write path: ./lake/orders, or a URI.",
            )
        if "%" in path:
            raise InvalidRequest(f"invalid table path {path!r}: % is not allowed", hint="Choose a path without %.")
        if "://" in path:
            return cls(path.rstrip("/"), dict(storage_options or {}))
        return cls(str((directory or Path()).joinpath(path).expanduser().resolve()), dict(storage_options or {}))

    @property
    def local(self) -> Path | None:
        """The directory, if it is local."""
        if "://" not in self.uri:
            return Path(self.uri)
        return Path(self.uri.removeprefix("file://")) if self.uri.startswith("file://") else None

    def child(self, name: str) -> Location:
        """The location of another table below this one."""
        return Location(f"{self.uri}/{directory_name(name)}", self.storage_options)


def open_table(location: Location) -> DeltaTable | None:
    """Open the table at its latest version; None if it does not exist."""
    if (local := location.local) is not None and not local.joinpath("_delta_log").is_dir():
        return None
    try:
        return DeltaTable(location.uri, storage_options=dict(location.storage_options) or None)
    except TableNotFoundError:
        return None


def open_or_create(location: Location, schema: Any, *, partition_by: Sequence[str] = ()) -> DeltaTable:
    """Open the table, or create it with this Arrow schema. Concurrent calls get the same table."""
    found = open_table(location)
    if found is not None:
        return found
    if (local := location.local) is not None:
        local.mkdir(parents=True, exist_ok=True)
    return DeltaTable.create(
        location.uri,
        pa.schema([field.with_nullable(True) for field in schema]),
        mode="ignore",
        partition_by=list(partition_by),
        configuration=CONFIGURATION,
        storage_options=dict(location.storage_options) or None,
    )


def add_missing_columns(table: DeltaTable, schema: Any) -> None:
    """Add the columns of an Arrow schema that the table lacks; InvalidRequest if a column has another type."""

    def add() -> None:
        table.update_incremental()
        have = {field.name: field.type for field in table.schema().fields}
        wanted = Schema.from_arrow(pa.schema([field.with_nullable(True) for field in schema])).fields
        for column in wanted:
            if column.name in have and have[column.name] != column.type:
                raise InvalidRequest(
                    f"column {column.name!r} of the table {table.table_uri} has the type {have[column.name]}, "
                    f"but the rows to be written have {column.type}",
                    hint="Write to another path, or cast the column in the pipeline's transform.",
                )
        missing = [field for field in wanted if field.name not in have]
        if missing:
            table.alter.add_columns(missing)

    retry_on_conflict(add)


def version_of(table: DeltaTable, app: str) -> int | None:
    """Reload the table and return the version that the writer `app` recorded last; None if it never wrote."""
    table.update_incremental()
    return table.transaction_version(app)


def epoch_of(table: DeltaTable, app: str) -> int | None:
    """The epoch that `app` recorded with its version; None if there is none. Call version_of() first: it reloads."""
    return table.transaction_version(_epoch_app(app))


def _epoch_app(app: str) -> str:
    return f"{app}/epoch"


def commit_files(
    table: DeltaTable,
    files: Sequence[DataFile],
    *,
    app: str,
    version: int,
    epoch: int | None = None,
    expected: int | Literal["any"] | None = "any",
) -> bool:
    """Add files that were written below the table, in one commit that records `version` for `app`.

    Returns False, without a commit, if that version or a later one is already recorded. The caller may then delete the
    files only if every attempt has its own directory: otherwise they may be the committed ones. A caller that chose the
    rows by the recorded version passes it as `expected`; LakeBusy if another version is recorded by now. A version with
    an epoch is compared only with versions of the same epoch: a caller that found another epoch has handled it, and
    passes `expected`.
    """

    def commit() -> bool:
        recorded = version_of(table, app)
        comparable = epoch is None or expected == "any" or epoch_of(table, app) in (None, epoch)
        if recorded is not None and recorded >= version and comparable:
            return False
        if expected != "any" and recorded != expected:
            raise LakeBusy(
                f"another process writes to {table.table_uri} as {app!r}: "
                f"the recorded version is {recorded}, expected {expected}",
                hint="Nothing was added. Stop one of the two processes, then retry.",
            )
        table.create_write_transaction(
            add_actions(files),
            "append",
            table.schema(),
            partition_by=list(table.metadata().partition_columns),
            commit_properties=record_versions(_with_epoch(app, version, epoch)),
        )
        table.update_incremental()
        return True

    return retry_on_conflict(commit)


def _with_epoch(app: str, version: int, epoch: int | None) -> dict[str, int]:
    return {app: version} if epoch is None else {app: version, _epoch_app(app): epoch}


def remove_after(table: DeltaTable, column: str, *, after: int, up_to: int, app: str, epoch: int) -> int:
    """Delete the rows with `after < column <= up_to` and record `after` for `app`, in one commit; return their number.

    The deleted rows can be read from the table's history until it is vacuumed.
    """
    name = '"' + column.replace('"', '""') + '"'

    def remove() -> int:
        table.update_incremental()
        recorded = record_versions(_with_epoch(app, after, epoch))
        removed = table.delete(f"{name} > {int(after)} and {name} <= {int(up_to)}", commit_properties=recorded)
        table.update_incremental()
        return int(removed["num_deleted_rows"] or 0)

    return retry_on_conflict(remove)


def add_actions(files: Sequence[DataFile]) -> list[Any]:
    """The Delta actions that add these files."""
    now = int(time.time() * 1000)
    return [
        AddAction(
            path=file.path,
            size=file.size,
            partition_values=dict(file.partition),
            modification_time=now,
            data_change=True,
            stats=file.statistics,
        )
        for file in files
    ]


def record_versions(versions: Mapping[str, int]) -> CommitProperties:
    """Commit properties that record a version for each of these writers.

    Of two concurrent commits that record a version for the same writer, one fails and has to retry.
    """
    return CommitProperties(app_transactions=[Transaction(app, version) for app, version in versions.items()])


def retry_on_conflict(commit: Callable[[], T], *, tries: int = MAX_CONFLICT_ATTEMPTS) -> T:
    """Run `commit`, and retry it after conflicts with other writers; LakeBusy after `tries` attempts."""
    wait = _FIRST_WAIT_SECONDS
    for _ in range(tries - 1):
        try:
            return commit()
        except CommitFailedError:
            time.sleep(wait)
            wait = min(2 * wait, _MAX_WAIT_SECONDS)
    try:
        return commit()
    except CommitFailedError as error:
        raise LakeBusy(
            f"the commit conflicted with other writers {tries} times: {error}",
            hint="Nothing was committed. Retry; compact when there are fewer concurrent writers.",
        ) from error


def files_between(table: DeltaTable, column: str, *, after: int, up_to: int) -> list[str]:
    """Reload the table and return the data files that may hold rows with `after < column <= up_to`.

    Files are selected by their statistics; a file without statistics is always included. Paths or URIs.
    """
    table.update_incremental()
    if column not in {field.name for field in table.schema().fields}:
        raise InvalidRequest(f"the table {table.table_uri} has no column {column!r}")
    name = '"' + column.replace('"', '""') + '"'
    return _readable(table, table.file_uris(file_pruning_predicate=f"{name} > {int(after)} and {name} <= {int(up_to)}"))


def all_files(table: DeltaTable) -> list[str]:
    """Reload the table and return all its data files, as paths or URIs."""
    table.update_incremental()
    return _readable(table, table.file_uris())


def _readable(table: DeltaTable, uris: Sequence[str]) -> list[str]:
    """Local files as plain paths without URI escapes, as other programs expect them."""
    return sorted(unquote(uri) for uri in uris) if table.table_uri.startswith("file:") else sorted(uris)
