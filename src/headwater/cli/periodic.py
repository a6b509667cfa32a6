"""`headwater periodic`: events that are published at the times of a cron expression."""

from __future__ import annotations

from typing import Annotated

import typer

from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, Yes, examples
from headwater.cli.audited import acting
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotThere

app = typer.Typer(help="Periodic events: published by cron, once each.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The periodic event's name.", show_default=False)]


@app.command(
    "set",
    epilog=examples(
        "headwater periodic set nightly '0 3 * * *' reports '{\"kind\": \"nightly\"}' --zone Europe/Berlin"
    ),
)
def set_periodic(
    context: typer.Context,
    name: Name,
    cron: Annotated[str, typer.Argument(help="minute hour day-of-month month day-of-week", show_default=False)],
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Where to publish.", show_default=False)],
    payload: Annotated[str, typer.Argument(metavar="JSON", help="The payload.")] = "null",
    type: Annotated[str | None, typer.Option(help="The event's type.")] = None,
    key: Annotated[str | None, typer.Option(help="The event's key.")] = None,
    routing_key: Annotated[str | None, typer.Option(help="The event's routing key.")] = None,
    zone: Annotated[str, typer.Option(help="The time zone of the expression.")] = "UTC",
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Declare a periodic event, or change it. Any process that follows or works publishes it when it is time."""
    try:
        parsed = output.parse_json(payload)
    except ValueError as error:
        raise typer.BadParameter(f"the payload is not JSON: {error}") from None
    detail = {"cron": cron, "topic": topic, "time_zone": zone}
    with session(context).log(dsn) as log, acting(log, "periodic.set", name, detail) as log:
        log.set_periodic(name, cron, topic, parsed, time_zone=zone, type=type, key=key, routing_key=routing_key)
        (declared,) = [one for one in log.periodics() if one.name == name]
    if as_json:
        output.emit(declared)
    else:
        output.say(f"{name} is published to {topic}, next {output.shown(declared.next_at)}")


@app.command("list", epilog=examples("headwater periodic list"))
def list_periodics(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List periodic events with their next time."""
    with session(context).log(dsn) as log:
        found = log.periodics()
    if as_json:
        output.emit(found)
        return
    output.table(
        ("name", "cron", "zone", "topic", "next", "last", "paused"),
        ((p.name, p.cron, p.time_zone, p.topic, p.next_at, p.last_at, p.paused) for p in found),
        empty="no periodic events: headwater periodic set",
    )


@app.command(epilog=examples("headwater periodic pause nightly"))
def pause(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Publish it no more, until resumed."""
    _pause(context, name, dsn, as_json=as_json, paused=True)


@app.command(epilog=examples("headwater periodic resume nightly"))
def resume(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Publish it again. Times that it missed meanwhile come as one."""
    _pause(context, name, dsn, as_json=as_json, paused=False)


def _pause(context: typer.Context, name: str, dsn: str | None, *, as_json: bool, paused: bool) -> None:
    with session(context).log(dsn) as log, acting(log, "periodic.pause" if paused else "periodic.resume", name) as log:
        if not log.pause_periodic(name, paused=paused):
            raise _missing(name)
    if as_json:
        output.emit({"name": name, "paused": paused})
    else:
        output.say(f"{name} is {'paused' if paused else 'published again'}")


@app.command(epilog=examples("headwater periodic delete nightly --yes"))
def delete(context: typer.Context, name: Name, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Forget a periodic event. Asks first."""
    with session(context).log(dsn) as log:
        output.confirm(f"forget periodic event {name}?", yes=yes)
        with acting(log, "periodic.delete", name) as log:
            if not log.delete_periodic(name):
                raise _missing(name)
    if as_json:
        output.emit({"deleted": name})
    else:
        output.say(f"{name} is forgotten")


def _missing(name: str) -> NotThere:
    return NotThere(f'there is no periodic event "{name}"', hint="See headwater periodic list.")
