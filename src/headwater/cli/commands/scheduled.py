"""`headwater scheduled`: list, move and cancel scheduled events."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotFound
from headwater.cli.options import Dsn, Json, Yes, examples, parse_duration, parse_time

app = typer.Typer(help="Manage scheduled events, which are published when they are due.", no_args_is_help=True)

Id = Annotated[int, typer.Argument(metavar="ID", help="Id of the scheduled event, from `scheduled list`.")]


@app.command("list", epilog=examples("headwater scheduled list --topic orders"))
def list_scheduled(
    context: typer.Context,
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="Only events of this topic.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Maximum number of events.")] = 100,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List scheduled events, the next one first."""
    with session(context).log(dsn) as log:
        if topic is not None:
            log.topic(topic)
        waiting = log.scheduled(topic, batch_size=limit)
    columns = {"id": "id", "due": "due_at", "topic": "topic", "key": "key", "type": "type", "event id": "event_id"}
    output.print_list(waiting, columns, as_json=as_json, empty="no scheduled events")


@app.command(
    epilog=examples(
        "headwater scheduled move 12 --deliver-at 2026-03-01T12:00:00Z", "headwater scheduled move 12 --delay 1h"
    )
)
def move(
    context: typer.Context,
    id: Id,
    deliver_at: Annotated[
        datetime | None, typer.Option(parser=parse_time, metavar="TIME", help="New time (ISO 8601).")
    ] = None,
    delay: Annotated[
        timedelta | None, typer.Option(parser=parse_duration, metavar="DURATION", help="New time as a delay from now.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Change the time of a scheduled event."""
    if (deliver_at is None) == (delay is None):
        raise typer.BadParameter("give exactly one of --deliver-at and --delay")
    due_at = deliver_at if delay is None else datetime.now(UTC) + delay
    assert due_at is not None
    with session(context).log(dsn) as log, audit(log, "scheduled.move", str(id), {"due_at": due_at}) as log:
        if not log.move_scheduled(id, due_at):
            raise _missing(id)
    output.print_result(
        {"id": id, "due_at": due_at}, f"moved scheduled event {id} to {output.format_value(due_at)}", as_json=as_json
    )


@app.command(epilog=examples("headwater scheduled cancel 12 --yes"))
def cancel(context: typer.Context, id: Id, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Cancel a scheduled event. Asks for confirmation."""
    with session(context).log(dsn) as log:
        output.confirm(f"cancel scheduled event {id}?", yes=yes)
        with audit(log, "scheduled.cancel", str(id)) as log:
            if not log.cancel_scheduled(id):
                raise _missing(id)
    output.print_result({"cancelled": id}, f"cancelled scheduled event {id}", as_json=as_json)


def _missing(id: int) -> NotFound:
    return NotFound(
        f"scheduled event {id} does not exist", hint="It may be published already. See headwater scheduled list."
    )
