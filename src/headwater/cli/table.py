"""`headwater table`: publish what happens to a table."""

from __future__ import annotations

from typing import Annotated

import typer

from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, examples
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotThere

app = typer.Typer(help="Tables: their inserts, updates and deletes as events.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="TABLE", help="The table, with its schema.", show_default=False)]


@app.command(
    epilog=examples(
        "headwater table watch public.orders",
        "headwater table watch public.orders --column id --column total --when-changed total",
    )
)
def watch(
    context: typer.Context,
    table: Name,
    topic: Annotated[str | None, typer.Option(help="Where to publish; else table.<schema>.<table>.")] = None,
    column: Annotated[list[str] | None, typer.Option(help="Show only this column; again for more.")] = None,
    when_changed: Annotated[
        list[str] | None, typer.Option(help="An update counts only if this changed; again for more.")
    ] = None,
    inserts: Annotated[bool, typer.Option(help="Publish inserts.")] = True,
    updates: Annotated[bool, typer.Option(help="Publish updates.")] = True,
    deletes: Annotated[bool, typer.Option(help="Publish deletes.")] = True,
    truncates: Annotated[bool, typer.Option(help="Publish truncates.")] = True,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Publish what happens to a table, in the writer's own transaction, with images before and after."""
    with session(context).log(dsn) as log:
        destination = log.watch_table(
            table,
            topic=topic,
            inserts=inserts,
            updates=updates,
            deletes=deletes,
            truncates=truncates,
            columns=column or None,
            when_changed=when_changed or None,
        )
    if as_json:
        output.emit({"table": table, "topic": destination})
    else:
        output.say(f"what happens to {table} is published to {destination}")


@app.command(epilog=examples("headwater table unwatch public.orders"))
def unwatch(context: typer.Context, table: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Publish no more of what happens to a table."""
    with session(context).log(dsn) as log:
        if not log.unwatch_table(table):
            raise NotThere(f"{table} is not watched")
    if as_json:
        output.emit({"table": table, "watched": False})
    else:
        output.say(f"{table} is no longer watched")
