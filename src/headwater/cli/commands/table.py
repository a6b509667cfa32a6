"""`headwater table`: publish the changes of tables as events."""

from __future__ import annotations

from typing import Annotated, Any

import psycopg
import typer

import headwater
from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotFound
from headwater.cli.options import Dsn, Json, examples
from headwater.cli.queries import run_query

app = typer.Typer(help="Manage watched tables, whose changes are published as events.", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(metavar="TABLE", help="Table with its schema, such as public.orders.", show_default=False)
]


@app.command(
    epilog=examples(
        "headwater table watch public.orders",
        "headwater table watch public.orders --column id --column total --when-changed total",
    )
)
def watch(
    context: typer.Context,
    table: Name,
    topic: Annotated[str | None, typer.Option(help="Topic to publish to. Default: table.<schema>.<table>.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="Publish only this column. Repeat for several. Default: all columns.")
    ] = None,
    when_changed: Annotated[
        list[str] | None, typer.Option(help="Publish an update only if this column changed. Repeat for several.")
    ] = None,
    inserts: Annotated[bool, typer.Option(help="Publish inserts.")] = True,
    updates: Annotated[bool, typer.Option(help="Publish updates.")] = True,
    deletes: Annotated[bool, typer.Option(help="Publish deletes.")] = True,
    truncates: Annotated[bool, typer.Option(help="Publish truncates.")] = True,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Publish the changes of a table, in the writer's transaction, with the row before and after the change."""
    with session(context).log(dsn) as log:
        _require_table(log, table)
        detail: dict[str, Any] = {"columns": column or None, "when_changed": when_changed or None}
        with audit(log, "table.watch", table, detail) as log:
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
    output.print_result(
        {"table": table, "topic": destination}, f"watching table {table} (topic {destination})", as_json=as_json
    )


@app.command("list", epilog=examples("headwater table list"))
def list_tables(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List watched tables with their topics and published operations."""
    columns = ("table", "topic", "inserts", "updates", "deletes", "truncates")
    with session(context).log(dsn) as log:
        found = run_query(log, "commands/watched_tables")
    if as_json:
        output.emit([dict(zip(columns, row, strict=True)) for row in found])
    else:
        output.print_table(columns, found, empty="no watched tables; watch one with headwater table watch")


@app.command(epilog=examples("headwater table unwatch public.orders"))
def unwatch(context: typer.Context, table: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Stop publishing the changes of a table."""
    with session(context).log(dsn) as log:
        _require_table(log, table)
        with audit(log, "table.unwatch", table) as log:
            if not log.unwatch_table(table):
                raise NotFound(f"table {table} is not watched", hint="See headwater table list.")
    output.print_result({"table": table, "watched": False}, f"stopped watching table {table}", as_json=as_json)


def _require_table(log: headwater.Headwater, table: str) -> None:
    try:
        ((exists,),) = run_query(log, "commands/find_table", table)
    except (psycopg.errors.InvalidName, psycopg.errors.SyntaxError, psycopg.errors.FeatureNotSupported):
        exists = False
    if not exists:
        raise NotFound(f"table {table} does not exist", hint='Write it as in SQL, with its schema: shop."Orders".')
