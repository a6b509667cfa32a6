"""`headwater lake`: list the tables of a lake and their files, compact and vacuum them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli import output
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotFound
from headwater.cli.optional_packages import require_extras
from headwater.cli.options import Json, examples, parse_duration

if TYPE_CHECKING:
    from deltalake import DeltaTable

app = typer.Typer(no_args_is_help=True, help="Manage the Delta tables of a lake.")

Path = Annotated[
    str, typer.Argument(metavar="PATH", help="A table, a directory that contains tables, or the URI of a table.")
]
Storage = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="Option of the object storage. Repeat for several.")
]
_MAX_DEPTH = 3


@app.command("list", epilog=examples("headwater lake list ./lake"))
def list_(context: typer.Context, path: Path, storage: Storage = None, as_json: Json = False) -> None:
    """List the tables at a path with their files, rows and sizes."""
    _ = session(context).settings
    with _tables(path, storage) as tables:
        from headwater.lake.maintenance import state_of

        states = [(name, state_of(table)) for name, table in tables]
    if as_json:
        output.emit([{"table": name, **output.to_json_value(state)} for name, state in states])
        return
    output.print_table(
        ("table", "version", "files", "small files", "rows", "MB"),
        ((name, s.version, s.files, s.small_files, s.rows, f"{s.bytes / 1e6:.1f}") for name, s in states),
    )


@app.command(epilog=examples("headwater lake files ./lake/log", "headwater lake files ./lake/log --after 1000"))
def files(
    context: typer.Context,
    path: Path,
    after: Annotated[
        int | None, typer.Option(metavar="POSITION", help="Only files with events after this position.")
    ] = None,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Print the current Parquet files of a table, one per line."""
    _ = session(context).settings
    with _tables(path, storage) as tables:
        from headwater.lake import all_files, files_between

        found = [
            file
            for _, table in tables
            for file in (
                all_files(table) if after is None else files_between(table, "position", after=after, up_to=2**63 - 1)
            )
        ]
    if as_json:
        output.emit(found)
        return
    for file in found:
        output.print_line(file)


@app.command(epilog=examples("headwater lake compact ./lake", "headwater lake compact ./lake/log --target-mb 256"))
def compact(
    context: typer.Context,
    path: Path,
    target_mb: Annotated[int, typer.Option(min=1, help="Target size of files in MB.")] = 128,
    today_files: Annotated[
        int, typer.Option(min=2, help="Number of small files from which the partition of today is compacted.")
    ] = 32,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Rewrite small files as large ones and write a checkpoint of the Delta log. Safe while others read and write."""
    _ = session(context).settings
    with _tables(path, storage) as tables:
        from headwater.lake import maintenance

        today = datetime.now(UTC).date()
        for name, table in tables:
            done = maintenance.compact(table, today=today, target_bytes=target_mb << 20, files_of_today=today_files)
            maintenance.checkpoint(table)
            output.print_result(
                {"table": name, **output.to_json_value(done)},
                f"compacted {name}: {done.files_removed} files into {done.files_added}",
                as_json=as_json,
            )


@app.command(epilog=examples("headwater lake vacuum ./lake --dry-run", "headwater lake vacuum ./lake --keep 2d"))
def vacuum(
    context: typer.Context,
    path: Path,
    keep: Annotated[
        timedelta,
        typer.Option(parser=parse_duration, metavar="DURATION", help="Keep files that were in use within this time."),
    ] = "7d",  # type: ignore[assignment]
    leftovers: Annotated[
        bool, typer.Option(help="Also delete files that were never part of a table, left by killed writers.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files without deleting them.", show_default=False)
    ] = False,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Delete files that the tables no longer use. Versions older than --keep can no longer be read."""
    _ = session(context).settings
    with _tables(path, storage) as tables:
        from headwater.lake import maintenance

        for name, table in tables:
            gone = maintenance.vacuum(table, keep=keep, leftovers=leftovers, dry_run=dry_run)
            if as_json:
                output.emit({"table": name, "deleted": [] if dry_run else gone, "found": gone})
                continue
            if dry_run:
                for file in gone:
                    output.print_line(f"{name}/{file}")
            output.print_line(f"{'would delete' if dry_run else 'deleted'} {len(gone)} files of {name}")


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"invalid storage option {text!r}: expected NAME=VALUE", param_hint="--storage")
    return name, value


@contextmanager
def _tables(path: str, storage: list[str] | None) -> Iterator[list[tuple[str, DeltaTable]]]:
    """Open the tables at or below a path; yields their paths and the tables."""
    with require_extras("spark"):
        from deltalake.exceptions import DeltaError

        from headwater.lake import Location, open_table
    location = Location.parse(path, storage_options=dict(_setting(text) for text in storage or ()))
    found: list[tuple[str, Any]] = []
    try:
        table = open_table(location)
        if table is not None:
            found = [(path, table)]
        elif (local := location.local) is not None:
            # The depth is limited, since a table may contain thousands of directories.
            below = [log.parent for depth in range(1, _MAX_DEPTH) for log in local.glob("*/" * depth + "_delta_log")]
            found = [(str(below_), open_table(Location.parse(str(below_)))) for below_ in sorted(below)]
        if not found:
            raise NotFound(f"no table at {path}", hint="A table is a directory that contains _delta_log.")
        yield found
    except DeltaError as error:
        raise NotFound(f"cannot read a table at {path}: {error}", hint="Check its _delta_log directory.") from error
