"""`headwater scheduled`: list, move and cancel events that wait for their time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, Yes, duration, examples, instant
from headwater.cli.audited import acting
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotThere

app = typer.Typer(help="Scheduled events: they enter the log when they are due.", no_args_is_help=True)

Id = Annotated[int, typer.Argument(metavar="ID", help="The schedule id, as `scheduled list` shows it.")]


@app.command("list", epilog=examples("headwater scheduled list --topic orders"))
def list_scheduled(
    context: typer.Context,
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="Of this topic only.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many.")] = 100,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List the events that wait, the next one first."""
    with session(context).log(dsn) as log:
        if topic is not None:
            log.topic(topic)
        waiting = log.scheduled(topic, batch_size=limit)
    if as_json:
        output.emit(waiting)
        return
    output.table(
        ("id", "due", "topic", "key", "type", "event id"),
        ((s.id, s.due_at, s.topic, s.key, s.type, s.event_id) for s in waiting),
        empty="nothing is scheduled",
    )


@app.command(
    epilog=examples("headwater scheduled move 12 --to 2026-03-01T12:00:00Z", "headwater scheduled move 12 --delay 1h")
)
def move(
    context: typer.Context,
    id: Id,
    to: Annotated[datetime | None, typer.Option(parser=instant, metavar="TIME", help="When, in ISO form.")] = None,
    delay: Annotated[
        timedelta | None, typer.Option(parser=duration, metavar="DURATION", help="How long from now.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Give a scheduled event another time."""
    if (to is None) == (delay is None):
        raise typer.BadParameter("say when once: --to or --delay")
    due_at = to if delay is None else datetime.now(UTC) + delay
    assert due_at is not None
    with session(context).log(dsn) as log, acting(log, "scheduled.move", str(id), {"due_at": due_at}) as log:
        if not log.move_scheduled(id, due_at):
            raise _gone(id)
    if as_json:
        output.emit({"id": id, "due_at": due_at})
    else:
        output.say(f"scheduled event {id} is due {output.shown(due_at)}")


@app.command(epilog=examples("headwater scheduled cancel 12 --yes"))
def cancel(context: typer.Context, id: Id, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Take a scheduled event back. Asks first."""
    with session(context).log(dsn) as log:
        output.confirm(f"cancel scheduled event {id}?", yes=yes)
        with acting(log, "scheduled.cancel", str(id)) as log:
            if not log.cancel_scheduled(id):
                raise _gone(id)
    if as_json:
        output.emit({"cancelled": id})
    else:
        output.say(f"scheduled event {id} is cancelled")


def _gone(id: int) -> NotThere:
    return NotThere(f"no event waits under id {id}", hint="It may be in the log already. See headwater scheduled list.")
