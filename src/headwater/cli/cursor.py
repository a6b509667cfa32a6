"""`headwater cursor`: list, set and delete cursors."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import typer

from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, Yes, examples, past_instant
from headwater.cli.audited import acting
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotThere

app = typer.Typer(help="Cursors: the saved positions of readers.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="CURSOR", help="The cursor's name.", show_default=False)]


@app.command("list", epilog=examples("headwater cursor list"))
def list_cursors(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List every cursor with what it has yet to read."""
    with session(context).log(dsn) as log:
        cursors = log.cursors()
    if as_json:
        output.emit(cursors)
        return
    output.table(
        ("cursor", "position", "behind", "oldest unread", "must not lose", "moved", "topics"),
        (
            (
                c.name,
                c.position,
                output.at_least(c.lag_events, c.lag_is_more),
                c.oldest_unread_age,
                c.must_not_lose,
                c.updated_at,
                c.topics or "all",
            )
            for c in cursors
        ),
        empty="no cursors: a follower makes one, or headwater cursor set",
    )


@app.command(
    "set",
    epilog=examples(
        "headwater cursor set billing --since 2h --topic orders",
        "headwater cursor set billing --to-start",
        "headwater cursor set billing --position 4711 --must-not-lose",
    ),
)
def set_cursor(
    context: typer.Context,
    name: Name,
    position: Annotated[int | None, typer.Option(min=0, help="The last position that counts as read.")] = None,
    since: Annotated[
        datetime | None,
        typer.Option(parser=past_instant, metavar="TIME", help="Read from this time on: ISO, or 5m ago."),
    ] = None,
    to_start: Annotated[bool, typer.Option("--to-start", help="Read everything that is kept.")] = False,
    to_end: Annotated[bool, typer.Option("--to-end", help="Read only what comes from now on.")] = False,
    topic: Annotated[
        list[str] | None, typer.Option(metavar="TOPIC", help="What it reads; again for more; none: leave, or all.")
    ] = None,
    must_not_lose: Annotated[
        bool | None, typer.Option("--must-not-lose/--may-lose", help="Whether retention waits for it.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Set a cursor back or forth, making it if need be. A reader that uses it notices and goes on from there."""
    if (position is not None) + (since is not None) + to_start + to_end != 1:
        raise typer.BadParameter("say where to once: --position, --since, --to-start or --to-end")
    with session(context).log(dsn) as log:
        if to_start:
            position = 0
        elif to_end:
            position = log.state().settled
        detail: dict[str, Any] = {"since": since, "topics": topic or None, "must_not_lose": must_not_lose}
        with acting(log, "cursor.set", name, detail) as log:
            reached = detail["position"] = log.set_cursor(
                name, position=position, since=since, topics=topic or None, must_not_lose=must_not_lose
            )
    if as_json:
        output.emit({"cursor": name, "position": reached})
    else:
        output.say(f"cursor {name} is at {reached}")


@app.command(epilog=examples("headwater cursor delete billing --yes"))
def delete(context: typer.Context, name: Name, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Forget a cursor. Asks first."""
    with session(context).log(dsn) as log:
        if name not in {cursor.name for cursor in log.cursors()}:
            raise NotThere(f'there is no cursor "{name}"', hint="See headwater cursor list.")
        output.confirm(f"forget where cursor {name} stands?", yes=yes)
        with acting(log, "cursor.delete", name) as log:
            log.delete_cursor(name)
    if as_json:
        output.emit({"deleted": name})
    else:
        output.say(f"cursor {name} is deleted")
