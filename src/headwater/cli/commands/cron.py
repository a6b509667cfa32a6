"""`headwater cron`: create, list, pause, resume and delete cron schedules."""

from __future__ import annotations

from typing import Annotated

import typer

from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotFound
from headwater.cli.options import Dsn, Json, Yes, examples

app = typer.Typer(help="Manage cron schedules, which publish events repeatedly.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the cron schedule.", show_default=False)]


@app.command(
    "set",
    epilog=examples("headwater cron set nightly '0 3 * * *' reports '{\"kind\": \"nightly\"}' --zone Europe/Berlin"),
)
def set_cron_schedule(
    context: typer.Context,
    name: Name,
    cron: Annotated[
        str, typer.Argument(help="Cron expression: minute hour day-of-month month day-of-week.", show_default=False)
    ],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to publish to.", show_default=False)],
    payload: Annotated[str, typer.Argument(metavar="JSON", help="Payload of the events.")] = "null",
    type: Annotated[str | None, typer.Option(help="Type of the events.")] = None,
    key: Annotated[str | None, typer.Option(help="Key of the events.")] = None,
    routing_key: Annotated[str | None, typer.Option(help="Routing key of the events.")] = None,
    zone: Annotated[str, typer.Option(help="Time zone of the expression.")] = "UTC",
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Create or change a cron schedule. Any running follower, worker or server publishes its events when due."""
    try:
        parsed = output.parse_json(payload)
    except ValueError as error:
        raise typer.BadParameter(f"the payload is not valid JSON: {error}") from None
    detail = {"cron": cron, "topic": topic, "time_zone": zone}
    with session(context).log(dsn) as log, audit(log, "cron.set", name, detail) as log:
        log.set_cron_schedule(name, cron, topic, parsed, time_zone=zone, type=type, key=key, routing_key=routing_key)
        (declared,) = [one for one in log.cron_schedules() if one.name == name]
    output.print_result(
        declared,
        f"set cron schedule {name} (topic {topic}, next at {output.format_value(declared.next_at)})",
        as_json=as_json,
    )


@app.command("list", epilog=examples("headwater cron list"))
def list_cron_schedules(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List cron schedules and when each is due next."""
    with session(context).log(dsn) as log:
        found = log.cron_schedules()
    columns = {"name": "name", "cron": "cron", "zone": "time_zone", "topic": "topic"}
    columns |= {"next": "next_at", "last": "last_at", "paused": "paused"}
    output.print_list(found, columns, as_json=as_json, empty="no cron schedules; create one with headwater cron set")


@app.command(epilog=examples("headwater cron pause nightly"))
def pause(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Stop publishing until the schedule is resumed."""
    _pause(context, name, dsn, as_json=as_json, paused=True)


@app.command(epilog=examples("headwater cron resume nightly"))
def resume(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Publish again. Times missed during the pause are published as one event."""
    _pause(context, name, dsn, as_json=as_json, paused=False)


def _pause(context: typer.Context, name: str, dsn: str | None, *, as_json: bool, paused: bool) -> None:
    with session(context).log(dsn) as log, audit(log, "cron.pause" if paused else "cron.resume", name) as log:
        if not log.pause_cron_schedule(name, paused=paused):
            raise _missing(name)
    output.print_result(
        {"name": name, "paused": paused}, f"{'paused' if paused else 'resumed'} cron schedule {name}", as_json=as_json
    )


@app.command(epilog=examples("headwater cron delete nightly --yes"))
def delete(context: typer.Context, name: Name, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Delete a cron schedule. Asks for confirmation."""
    with session(context).log(dsn) as log:
        output.confirm(f"delete cron schedule {name}?", yes=yes)
        with audit(log, "cron.delete", name) as log:
            if not log.delete_cron_schedule(name):
                raise _missing(name)
    output.print_result({"deleted": name}, f"deleted cron schedule {name}", as_json=as_json)


def _missing(name: str) -> NotFound:
    return NotFound(f'cron schedule "{name}" does not exist', hint="See headwater cron list.")
