"""`headwater replica`: keep a copy of a table in a file of SQLite, from NATS."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from headwater.cli import output
from headwater.cli.arguments import Json, examples
from headwater.cli.connection import session
from headwater.cli.optional_packages import needs
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
    source: Annotated[str, typer.Option("--from", metavar="URL", help="The NATS server, as nats://[token@]host:port.")],
    table: Annotated[str, typer.Option(metavar="TABLE", help="The table, as schema.table.")],
    to: Annotated[str, typer.Option(metavar="URL", help="The file, as sqlite:///path; made if it is missing.")],
    once: Annotated[bool, typer.Option("--once", help="End when everything in the stream is applied.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ask for a new snapshot and start from it.")] = False,
    snapshot_seconds: Annotated[float, typer.Option(min=1, help="How long a snapshot may take.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Keep a copy of a table in sync: a snapshot first, then each change, exactly once.

    It can be stopped or killed at any time, and goes on where it was. Ctrl-C or SIGTERM stops.
    """
    _ = session(context).settings
    if not to.startswith(_SCHEME) or not to.removeprefix(_SCHEME):
        raise typer.BadParameter(f"{to!r} is no file of SQLite: write sqlite:///path", param_hint="--to")
    with needs("nats"):
        from headwater.nats.replica import Progress, Replica
        from headwater.nats.replica_store import ReplicaStore
        from headwater.nats.subjects import Table

    told = Progress()

    def tell(progress: Progress) -> None:
        nonlocal told
        if as_json:
            output.emit(progress)
        elif progress.snapshots > told.snapshots:
            output.note(f"snapshot loaded: {progress.rows_loaded} rows")
        elif progress.caught_up and not told.caught_up:
            output.note(
                f"in sync at {progress.stream_sequence}: {progress.changes_applied} changes applied, "
                f"{progress.changes_skipped} known already"
            )
        told = progress

    async def run(store: ReplicaStore) -> None:
        stop = stop_on_signals()
        await Replica(source, store, fresh_snapshot=fresh, snapshot_seconds=snapshot_seconds, on_progress=tell).run(
            stop=stop, once=once
        )

    with ReplicaStore(Path(to.removeprefix(_SCHEME)), Table.parse(table)) as store:
        asyncio.run(run(store))
