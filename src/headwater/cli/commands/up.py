"""`headwater up` and `headwater down`: start and stop the embedded Postgres."""

from __future__ import annotations

from typing import Annotated

import typer

from headwater.cli import output
from headwater.cli.connection import prepare_database, session
from headwater.cli.maintenance import maintain_repeatedly
from headwater.cli.options import Json, examples
from headwater.cli.signals import interrupt_on_sigterm
from headwater.embedded import Postgres

app = typer.Typer()

# Upper bound of the delay of scheduled events while no follower or worker runs.
MAINTENANCE_SECONDS = 1.0


@app.command(epilog=examples("headwater up", "headwater up --detach --port 0"))
def up(
    context: typer.Context,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Also listen on this loopback port. 0: any free port.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Run the server in the background and return.")] = False,
    as_json: Json = False,
) -> None:
    """Start the embedded Postgres with the log, and run maintenance until Ctrl-C.

    The data is kept in HEADWATER_HOME. Other commands use this server by default.
    """
    server = session(context).embedded(port=port)
    with interrupt_on_sigterm():
        server.start()
        started_here = server.started_here
        keep_running = False
        try:
            dsn = prepare_database(server)
            keep_running = detach
            _print(server, dsn, detach=detach, as_json=as_json)
            if detach:
                return
            with session(context).log(dsn) as log:
                maintain_repeatedly(log, every_seconds=MAINTENANCE_SECONDS)
        except KeyboardInterrupt:
            keep_running = False
        finally:
            # A server that was already running is not stopped.
            if started_here and not keep_running:
                server.stop()
    if not as_json:
        output.print_line(
            "stopped; the data is kept" if started_here else "stopped maintenance; the server keeps running"
        )


@app.command(epilog=examples("headwater down"))
def down(context: typer.Context, as_json: Json = False) -> None:
    """Stop the embedded Postgres. The data is kept."""
    server = session(context).embedded()
    was_running = server.running
    server.stop()
    output.print_result(
        {"stopped": was_running},
        "stopped; the data is kept" if was_running else "the embedded Postgres is not running",
        as_json=as_json,
    )


def _print(server: Postgres, dsn: str, *, detach: bool, as_json: bool) -> None:
    if as_json:
        output.emit({"dsn": dsn, "data_dir": str(server.data_dir), "pid": server.pid, "port": server.port})
        return
    output.print_line(f"Postgres is running: {server.data_dir}")
    output.print_line(f"  export HEADWATER_DSN='{dsn}'")
    output.print_line("Next:")
    output.print_line("  headwater topic create orders")
    output.print_line("""  headwater publish orders '{"id": 1}'""")
    output.print_line("  headwater tail -f orders")
    output.print_line("  headwater doctor")
    output.print_line("Stop it with headwater down." if detach else "Press Ctrl-C to stop.")
