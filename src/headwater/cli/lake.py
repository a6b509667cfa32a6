"""`headwater lake`: the tables of the lake, their files, and their upkeep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli import output
from headwater.cli.arguments import Json, duration, examples
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotThere
from headwater.cli.optional_packages import needs

if TYPE_CHECKING:
    from deltalake import DeltaTable

app = typer.Typer(no_args_is_help=True, help="Tables of the lake: list, files, compact, vacuum.")

Path = Annotated[str, typer.Argument(metavar="PATH", help="A table, or a directory with tables; or a table's URI.")]
Storage = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="What the storage of a URI needs to be told. Repeatable.")
]
_DEPTH = 3


@app.command("list", epilog=examples("headwater lake list ./lake"))
def list_(context: typer.Context, path: Path, storage: Storage = None, as_json: Json = False) -> None:
    """Show the tables at a path, with their files, rows and sizes."""
    _ = session(context).settings
    with _tables(path, storage) as tables:
        from headwater.lake.maintenance import state_of

        states = [(name, state_of(table)) for name, table in tables]
    if as_json:
        output.emit([{"table": name, **output.plain(state)} for name, state in states])
        return
    output.table(
        ("table", "version", "files", "small files", "rows", "MB"),
        ((name, s.version, s.files, s.small_files, s.rows, f"{s.bytes / 1e6:.1f}") for name, s in states),
    )


@app.command(epilog=examples("headwater lake files ./lake/log", "headwater lake files ./lake/log --after 1000"))
def files(
    context: typer.Context,
    path: Path,
    after: Annotated[int | None, typer.Option(metavar="POSITION", help="Only with positions after this one.")] = None,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Print the Parquet files that a table consists of now, one a line, for programs that read Parquet."""
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
        output.say(file)


@app.command(epilog=examples("headwater lake compact ./lake", "headwater lake compact ./lake/log --target-mb 256"))
def compact(
    context: typer.Context,
    path: Path,
    target_mb: Annotated[int, typer.Option(min=1, help="About how large files are to be.")] = 128,
    today_files: Annotated[
        int, typer.Option(min=2, help="How many small files make it worth while where more come every moment.")
    ] = 32,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Rewrite small files as large ones, and shorten the table's log. Writers and readers go on meanwhile."""
    _ = session(context).settings
    with _tables(path, storage) as tables:
        from headwater.lake import maintenance

        today = datetime.now(UTC).date()
        for name, table in tables:
            done = maintenance.compact(table, today=today, target_bytes=target_mb << 20, files_of_today=today_files)
            maintenance.checkpoint(table)
            if as_json:
                output.emit({"table": name, **output.plain(done)})
            else:
                output.say(f"{name}: {done.files_removed} files became {done.files_added}")


@app.command(epilog=examples("headwater lake vacuum ./lake --dry-run", "headwater lake vacuum ./lake --keep 2d"))
def vacuum(
    context: typer.Context,
    path: Path,
    keep: Annotated[
        timedelta, typer.Option(parser=duration, metavar="DURATION", help="Keep files that were in use so long ago.")
    ] = "7d",  # type: ignore[assignment]
    leftovers: Annotated[
        bool, typer.Option(help="Also files that never were part of the table: what killed writers left.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which.", show_default=False)] = False,
    storage: Storage = None,
    as_json: Json = False,
) -> None:
    """Delete files that the tables no longer use. Readers of older versions than are kept stop working."""
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
                    output.say(f"{name}/{file}")
            output.say(f"{name}: {len(gone)} files {'would be ' if dry_run else ''}deleted")


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{text!r} is no setting: write NAME=VALUE", param_hint="--storage")
    return name, value


@contextmanager
def _tables(path: str, storage: list[str] | None) -> Iterator[list[tuple[str, DeltaTable]]]:
    """The tables at or below a path, by their names as the caller would write them."""
    with needs("spark"):
        from deltalake.exceptions import DeltaError

        from headwater.lake import Location, open_table
    location = Location.parse(path, storage_options=dict(_setting(text) for text in storage or ()))
    found: list[tuple[str, Any]] = []
    try:
        table = open_table(location)
        if table is not None:
            found = [(path, table)]
        elif (local := location.local) is not None:
            # Only so deep: a table has thousands of directories of its own.
            below = [log.parent for depth in range(1, _DEPTH) for log in local.glob("*/" * depth + "_delta_log")]
            found = [(str(below_), open_table(Location.parse(str(below_)))) for below_ in sorted(below)]
        if not found:
            raise NotThere(f"there is no table at {path}", hint="A table is a directory with _delta_log in it.")
        yield found
    except DeltaError as error:
        raise NotThere(f"a table at {path} cannot be used: {error}", hint="Is it whole? See its _delta_log.") from error
