"""`headwater replica`: replicate a table from NATS to a SQLite file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from headwater.cli import output
from headwater.cli.connection import session
from headwater.cli.optional_packages import require_extras
from headwater.cli.options import Json, examples
from headwater.cli.signals import stop_on_signals

app = typer.Typer()

_SCHEME = "sqlite:///"


@app.command(
    epilog=examples(
        "headwater replica --from nats://127.0.0.1:4222 --table public.orders --to sqlite:///orders.db",
        "headwater replica --from nats://127.0.0.1:4222 --table public.orders --to sqlite:///orders.db --once",
    )
)
def replica(
    context: typer.Context,
    source: Annotated[
        str, typer.Option("--from", metavar="URL", help="URL of the NATS server: nats://[token@]host:port.")
    ],
    table: Annotated[str, typer.Option(metavar="TABLE", help="Table to replicate: schema.table.")],
    to: Annotated[str, typer.Option(metavar="URL", help="SQLite file: sqlite:///path; created if missing.")],
    once: Annotated[bool, typer.Option("--once", help="Stop when all changes in the stream are applied.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start again from a new snapshot.")] = False,
    snapshot_seconds: Annotated[float, typer.Option(min=1, help="Timeout of a snapshot in seconds.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Replicate a table to SQLite: a snapshot first, then each change exactly once.

    Runs until Ctrl-C or SIGTERM. It may be killed at any time; the next run continues from its last change.
    """
    _ = session(context).settings
    if not to.startswith(_SCHEME) or not to.removeprefix(_SCHEME):
        raise typer.BadParameter(f"invalid URL {to!r}: expected sqlite:///path", param_hint="--to")
    with require_extras("nats"):
        from headwater.nats.replica import Replica, ReplicaProgress
        from headwater.nats.replica_store import ReplicaStore
        from headwater.nats.subjects import Table

    previous = ReplicaProgress()

    def report(progress: ReplicaProgress) -> None:
        nonlocal previous
        if as_json:
            output.emit(progress)
        elif progress.snapshots > previous.snapshots:
            output.print_status(f"snapshot loaded: {progress.rows_loaded} rows")
        elif progress.caught_up and not previous.caught_up:
            output.print_status(
                f"in sync at stream sequence {progress.stream_sequence}: {progress.changes_applied} changes applied, "
                f"{progress.changes_skipped} duplicates skipped"
            )
        previous = progress

    async def run(store: ReplicaStore) -> None:
        stop = stop_on_signals()
        await Replica(source, store, fresh_snapshot=fresh, snapshot_seconds=snapshot_seconds, on_progress=report).run(
            stop=stop, once=once
        )

    with ReplicaStore(Path(to.removeprefix(_SCHEME)), Table.parse(table)) as store:
        asyncio.run(run(store))
