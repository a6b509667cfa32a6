"""`headwater cursor`: list, set and delete cursors."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer

from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotFound
from headwater.cli.options import Dsn, Json, Yes, examples, parse_past_time

app = typer.Typer(help="Manage cursors, the saved positions of readers.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="CURSOR", help="Name of the cursor.", show_default=False)]


@app.command("list", epilog=examples("headwater cursor list"))
def list_cursors(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List cursors and how far behind they are."""
    with session(context).log(dsn) as log:
        cursors = log.cursors()
    output.print_list(
        cursors,
        {
            "cursor": "name",
            "position": "position",
            "behind": lambda c: output.format_count(c.lag_events, c.lag_is_more),
            "oldest unread": "oldest_unread_age",
            "holds retention": "holds_retention",
            "updated": "updated_at",
            "topics": lambda c: c.topics or "all",
        },
        as_json=as_json,
        empty="no cursors; followers create them, or headwater cursor set",
    )


@app.command(
    "set",
    epilog=examples(
        "headwater cursor set billing --since 2h --topic orders",
        "headwater cursor set billing --to-start",
        "headwater cursor set billing --after 4711 --holds-retention",
    ),
)
def set_cursor(
    context: typer.Context,
    name: Name,
    position: Annotated[
        int | None,
        typer.Option("--after", metavar="POSITION", min=0, help="Set it to this position; reading continues after it."),
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            parser=parse_past_time, metavar="TIME", help="Read from this time on: ISO 8601, or 5m for five minutes ago."
        ),
    ] = None,
    to_start: Annotated[bool, typer.Option("--to-start", help="Read from the first event that is retained.")] = False,
    to_end: Annotated[bool, typer.Option("--to-end", help="Read only new events.")] = False,
    topic: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOPIC",
            help="Topic that the cursor reads. Repeat for several. Default: unchanged, or all topics for a new cursor.",
        ),
    ] = None,
    holds_retention: Annotated[
        bool | None,
        typer.Option(
            "--holds-retention/--no-holds-retention",
            help="Whether retention keeps events until this cursor has read them.",
        ),
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Move a cursor back or forward, creating it if it does not exist. A running reader continues from there."""
    if (position is not None) + (since is not None) + to_start + to_end != 1:
        raise typer.BadParameter("give exactly one of --after, --since, --to-start and --to-end")
    with session(context).log(dsn) as log:
        if to_start:
            position = 0
        elif to_end:
            position = log.state().stable
        detail: dict[str, Any] = {"since": since, "topics": topic or None, "holds_retention": holds_retention}
        with audit(log, "cursor.set", name, detail) as log:
            reached = detail["position"] = log.set_cursor(
                name, position=position, since=since, topics=topic or None, holds_retention=holds_retention
            )
    output.print_result(
        {"cursor": name, "position": reached}, f"set cursor {name} to position {reached}", as_json=as_json
    )


@app.command(epilog=examples("headwater cursor delete billing --yes"))
def delete(context: typer.Context, name: Name, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Delete a cursor. Asks for confirmation."""
    with session(context).log(dsn) as log:
        if name not in {cursor.name for cursor in log.cursors()}:
            raise NotFound(f'cursor "{name}" does not exist', hint="See headwater cursor list.")
        output.confirm(f"delete cursor {name} and its position?", yes=yes)
        with audit(log, "cursor.delete", name) as log:
            log.delete_cursor(name)
    output.print_result({"deleted": name}, f"deleted cursor {name}", as_json=as_json)
