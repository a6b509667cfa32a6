"""`headwater table`: publish what happens to a table."""

from __future__ import annotations

from typing import Annotated, Any

import psycopg
import typer

import headwater
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, examples
from headwater.cli.audited import acting
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotThere
from headwater.cli.queries import ask

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
        _refuse_missing(log, table)
        detail: dict[str, Any] = {"columns": column or None, "when_changed": when_changed or None}
        with acting(log, "table.watch", table, detail) as log:
            destination = detail["topic"] = log.watch_table(
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


@app.command("list", epilog=examples("headwater table list"))
def list_tables(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List the tables that are watched, with where and what is published of them."""
    columns = ("table", "topic", "inserts", "updates", "deletes", "truncates")
    with session(context).log(dsn) as log:
        found = ask(log, "watched_tables")
    if as_json:
        output.emit([dict(zip(columns, row, strict=True)) for row in found])
    else:
        output.table(columns, found, empty="no table is watched: headwater table watch")


@app.command(epilog=examples("headwater table unwatch public.orders"))
def unwatch(context: typer.Context, table: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Publish no more of what happens to a table."""
    with session(context).log(dsn) as log:
        _refuse_missing(log, table)
        with acting(log, "table.unwatch", table) as log:
            if not log.unwatch_table(table):
                raise NotThere(f"{table} is not watched", hint="See headwater table list.")
    if as_json:
        output.emit({"table": table, "watched": False})
    else:
        output.say(f"{table} is no longer watched")


def _refuse_missing(log: headwater.Headwater, table: str) -> None:
    try:
        ((there,),) = ask(log, "find_table", table)
    except (psycopg.errors.InvalidName, psycopg.errors.SyntaxError, psycopg.errors.FeatureNotSupported):
        there = False
    if not there:
        raise NotThere(f"there is no table {table}", hint='Write it as in SQL, with its schema: shop."Orders".')
