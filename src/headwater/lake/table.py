"""Delta tables: opened or made, appended to once per batch, asked which files may hold what."""

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

# A checkpoint of the table's own log, so that opening it reads a few files, however many commits there were.
CONFIGURATION: Final = {"delta.checkpointInterval": "20", "delta.logRetentionDuration": "interval 7 days"}
# Row groups that a reader can hold in memory, and can skip by their own bounds.
WRITTEN: Final = WriterProperties(compression="ZSTD", max_row_group_size=100_000)
CONFLICT_TRIES: Final = 20
_FIRST_WAIT_SECONDS: Final = 0.05
_LONGEST_WAIT_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Location:
    """Where a table lies: an absolute directory, or a URI with what its storage needs to be told."""

    uri: str
    storage_options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(
        cls, path: object, *, directory: Path | None = None, storage_options: Mapping[str, str] | None = None
    ) -> Location:
        """A path or URI as somebody wrote it. A relative path is meant from `directory`."""
        if not isinstance(path, str) or not path.strip():
            raise InvalidRequest(f"{path!r} is no place for a table", hint="Write path: ./lake/orders, or a URI.")
        if "%" in path:
            raise InvalidRequest(f"a table cannot lie in {path!r}", hint="Choose a path without the sign %.")
        if "://" in path:
            return cls(path.rstrip("/"), dict(storage_options or {}))
        return cls(str((directory or Path()).joinpath(path).expanduser().resolve()), dict(storage_options or {}))

    @property
    def local(self) -> Path | None:
        """The directory, if it is one of this machine."""
        if "://" not in self.uri:
            return Path(self.uri)
        return Path(self.uri.removeprefix("file://")) if self.uri.startswith("file://") else None

    def child(self, name: str) -> Location:
        """The place of another table below this one."""
        return Location(f"{self.uri}/{directory_name(name)}", self.storage_options)


def open_table(location: Location) -> DeltaTable | None:
    """The table as it is now; None if there is none."""
    if (local := location.local) is not None and not local.joinpath("_delta_log").is_dir():
        return None
    try:
        return DeltaTable(location.uri, storage_options=dict(location.storage_options) or None)
    except TableNotFoundError:
        return None


def open_or_create(location: Location, schema: Any, *, partition_by: Sequence[str] = ()) -> DeltaTable:
    """The table as it is now, made with this Arrow schema if there is none. Two who make it at once get the same."""
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
    """Let the table have all columns of an Arrow schema, each of its type; InvalidRequest where it has another."""

    def add() -> None:
        table.update_incremental()
        have = {field.name: field.type for field in table.schema().fields}
        wanted = Schema.from_arrow(pa.schema([field.with_nullable(True) for field in schema])).fields
        for column in wanted:
            if column.name in have and have[column.name] != column.type:
                raise InvalidRequest(
                    f"the table {table.table_uri} has the column {column.name!r} as {have[column.name]}, "
                    f"and what is to be written has it as {column.type}",
                    hint="Write to another path, or cast the column in the pipeline's transform.",
                )
        missing = [field for field in wanted if field.name not in have]
        if missing:
            table.alter.add_columns(missing)

    despite_others(add)


def version_of(table: DeltaTable, app: str) -> int | None:
    """What the writer named `app` noted with its last commit; None if it never wrote. Looks at the table anew."""
    table.update_incremental()
    return table.transaction_version(app)


def epoch_of(table: DeltaTable, app: str) -> int | None:
    """The epoch that `app` noted with its version; None if it never did. Ask version_of() first: that refreshes it."""
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
    """Make files that were written below the table part of it, in one commit that notes `version` for `app`.

    False, with nothing changed, if that version or a later one is noted already. Who deletes the files then must be
    sure that they are not those of the first time: give every try a directory of its own. Whoever chose the rows by
    what was noted says so in `expected`; LakeBusy if something else is noted by now. A version with an epoch is
    compared with those of the same epoch only: a caller that found another one has dealt with it, and says so by
    `expected`.
    """

    def commit() -> bool:
        noted = version_of(table, app)
        comparable = epoch is None or expected == "any" or epoch_of(table, app) in (None, epoch)
        if noted is not None and noted >= version and comparable:
            return False
        if expected != "any" and noted != expected:
            raise LakeBusy(
                f"another process writes to {table.table_uri} as {app!r}: it noted {noted} where {expected} was found",
                hint="Nothing was added. Stop one of both, then run this again.",
            )
        table.create_write_transaction(
            add_actions(files),
            "append",
            table.schema(),
            partition_by=list(table.metadata().partition_columns),
            commit_properties=noting(_with_epoch(app, version, epoch)),
        )
        table.update_incremental()
        return True

    return despite_others(commit)


def _with_epoch(app: str, version: int, epoch: int | None) -> dict[str, int]:
    return {app: version} if epoch is None else {app: version, _epoch_app(app): epoch}


def remove_after(table: DeltaTable, column: str, *, after: int, up_to: int, app: str, epoch: int) -> int:
    """Remove the rows with `after < column <= up_to` and note `after` for `app`, in one commit; says how many it were.

    What was removed can be read from the table's history until it is vacuumed.
    """
    name = '"' + column.replace('"', '""') + '"'

    def remove() -> int:
        table.update_incremental()
        noted = noting(_with_epoch(app, after, epoch))
        removed = table.delete(f"{name} > {int(after)} and {name} <= {int(up_to)}", commit_properties=noted)
        table.update_incremental()
        return int(removed["num_deleted_rows"] or 0)

    return despite_others(remove)


def add_actions(files: Sequence[DataFile]) -> list[Any]:
    """What a commit says of the files that it adds."""
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


def noting(versions: Mapping[str, int]) -> CommitProperties:
    """Properties of a commit that notes a version for each of these writers.

    Of two commits side by side that note something for the same writer, one fails and has to look again.
    """
    return CommitProperties(app_transactions=[Transaction(app, version) for app, version in versions.items()])


def despite_others(commit: Callable[[], T], *, tries: int = CONFLICT_TRIES) -> T:
    """Do it again when another writer's commit came between, from a fresh look at the table; LakeBusy in the end."""
    wait = _FIRST_WAIT_SECONDS
    for _ in range(tries - 1):
        try:
            return commit()
        except CommitFailedError:
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
    try:
        return commit()
    except CommitFailedError as error:
        raise LakeBusy(
            f"other writers changed the table each of the {tries} times that a commit was tried: {error}",
            hint="Nothing of it is in the table. Run it again; compact when fewer write.",
        ) from error


def files_between(table: DeltaTable, column: str, *, after: int, up_to: int) -> list[str]:
    """The data files that may hold rows with `after < column <= up_to`, as paths or URIs.

    Decided by the statistics of the files; a file that has none is always among them. Looks at the table anew.
    """
    table.update_incremental()
    if column not in {field.name for field in table.schema().fields}:
        raise InvalidRequest(f"the table {table.table_uri} has no column {column!r}")
    name = '"' + column.replace('"', '""') + '"'
    return _readable(table, table.file_uris(file_pruning_predicate=f"{name} > {int(after)} and {name} <= {int(up_to)}"))


def all_files(table: DeltaTable) -> list[str]:
    """Every data file of the table, as paths or URIs. Looks at the table anew."""
    table.update_incremental()
    return _readable(table, table.file_uris())


def _readable(table: DeltaTable, uris: Sequence[str]) -> list[str]:
    """As other programs take them: a path of this machine is told as it is, not as a URI would write it."""
    return sorted(unquote(uri) for uri in uris) if table.table_uri.startswith("file:") else sorted(uris)
