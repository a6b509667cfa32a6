"""`headwater migrate`: install or upgrade the database schema, or print the SQL."""

from __future__ import annotations

from typing import Annotated

import typer

from headwater.cli import output
from headwater.cli.connection import session
from headwater.cli.options import Dsn, Json, examples
from headwater.database import schema
from headwater.version import VERSION

app = typer.Typer()


@app.command(
    epilog=examples(
        "headwater migrate", "headwater migrate --print > headwater.sql", "headwater migrate --print --after 1"
    )
)
def migrate(
    context: typer.Context,
    print_: Annotated[
        bool, typer.Option("--print", help="Print the SQL for `psql -f` instead of running it. Needs no database.")
    ] = False,
    after: Annotated[
        int, typer.Option(metavar="N", min=0, help="With --print: print only the migrations after N.")
    ] = 0,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Install or upgrade the schema in one transaction. Safe to repeat and to run concurrently."""
    latest = schema.migrations()[-1].number
    if after and not print_:
        raise typer.BadParameter("--after requires --print")
    if after > latest:
        raise typer.BadParameter(f"invalid --after {after}: the latest migration is {latest}")
    if print_:
        script = schema.script(after=after)
        if as_json:
            output.emit({"sql": script})
        else:
            print(script, end="")
        return
    with session(context).connection(dsn) as connection:
        applied = schema.upgrade(connection)
    if as_json:
        output.emit(
            {
                "applied": [{"number": step.number, "name": step.name} for step in applied],
                "schema": latest,
                "version": VERSION,
            }
        )
        return
    for step in applied:
        output.print_line(f"applied migration {step.number:04} {step.name}")
    output.print_line(f"the database is at migration {latest} (Headwater {VERSION})")
