"""`headwater up` and `headwater down`: the embedded Postgres with the log in it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from headwater.cli import output
from headwater.cli.arguments import Json, examples
from headwater.cli.connection import DATABASE, connect, session, translated
from headwater.cli.maintain import keep_up
from headwater.database import schema
from headwater.embedded import Postgres

app = typer.Typer()

# Scheduled events come this much late at most while nobody follows the log.
UPKEEP_SECONDS = 1.0


@app.command(epilog=examples("headwater up", "headwater up --detach --port 0"))
def up(
    context: typer.Context,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Listen on this loopback port too; 0: any free one.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running and return.")] = False,
    as_json: Json = False,
) -> None:
    """Start a Postgres of your own with the log in it, and look after it until Ctrl-C.

    It lives under HEADWATER_HOME and keeps its data. Other commands find it by themselves.
    """
    server = session(context).embedded(port=port)
    with orderly_end():
        server.start()
        ours = server.started_here
        leave = False
        try:
            dsn = prepare(server)
            leave = detach
            _tell(server, dsn, detach=detach, as_json=as_json)
            if detach:
                return
            with session(context).log(dsn) as log:
                keep_up(log, every_seconds=UPKEEP_SECONDS)
        except KeyboardInterrupt:
            leave = False
        finally:
            # One that was running before goes on running.
            if ours and not leave:
                server.stop()
    if not as_json:
        output.say("stopped; the data is kept" if ours else "the server was running before and goes on")


@app.command(epilog=examples("headwater down"))
def down(context: typer.Context, as_json: Json = False) -> None:
    """Stop the embedded Postgres. Its data is kept."""
    server = session(context).embedded()
    was_running = server.running
    server.stop()
    if as_json:
        output.emit({"stopped": was_running})
    else:
        output.say("stopped; the data is kept" if was_running else "nothing is running")


def prepare(server: Postgres) -> str:
    """The log's database on a running server, made and upgraded; returns its DSN."""
    server.ensure_database(DATABASE)
    dsn = server.dsn(DATABASE)
    with translated(), connect(dsn) as connection:
        schema.upgrade(connection)
    return dsn


def _tell(server: Postgres, dsn: str, *, detach: bool, as_json: bool) -> None:
    if as_json:
        output.emit({"dsn": dsn, "data_dir": str(server.data_dir), "pid": server.pid, "port": server.port})
        return
    output.say(f"Postgres is up with the log in it: {server.data_dir}")
    output.say(f"  export HEADWATER_DSN='{dsn}'")
    output.say("Next:")
    output.say("  headwater topic create orders")
    output.say("""  headwater publish orders '{"id": 1}'""")
    output.say("  headwater tail -f orders")
    output.say("  headwater doctor")
    output.say("Stop it with headwater down." if detach else "Ctrl-C stops it.")


@contextmanager
def orderly_end() -> Iterator[None]:
    """Let a polite request to end be as good as Ctrl-C, so that the server is stopped as well."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
