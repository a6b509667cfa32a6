"""`headwater sub`: subscriptions by SQL condition."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Annotated, Any

import typer

from headwater.cli import output
from headwater.cli.arguments import After, Dsn, Json, Yes, duration, examples, json_object
from headwater.cli.audited import acting
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotThere
from headwater.cli.sql_subscription_groups import reading_group
from headwater.errors import InvalidRequest
from headwater.model import Subscription

app = typer.Typer(help="Subscriptions: SQL conditions over events, owned by a group.", no_args_is_help=True)

Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group.", show_default=False)]


@app.command(
    epilog=examples(
        "headwater sub create alerts \"e.type = 'Failed'\"",
        "headwater sub create big \"(e.data ->> 'cents')::int > (s.params ->> 'min')::int\" --params '{\"min\": 500}'",
    )
)
def create(
    context: typer.Context,
    group: Group,
    condition: Annotated[str, typer.Argument(help="A boolean SQL expression over e and s.", show_default=False)],
    params: Annotated[
        Any, typer.Option(parser=json_object, metavar="JSON", help="What the condition sees as s.params.")
    ] = None,
    expires_after: Annotated[
        timedelta | None, typer.Option(parser=duration, metavar="DURATION", help="End it when not in use for so long.")
    ] = None,
    from_position: Annotated[int | None, typer.Option(min=0, help="Only events after this position.")] = None,
    topic: Annotated[
        list[str] | None, typer.Option(metavar="TOPIC", help="A new group reads only this; again for more.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Subscribe a group to the events that fulfil a condition. The group is made if it is missing."""
    detail: dict[str, Any] = {"condition": condition, "params": params, "topics": topic or None}
    with session(context).log(dsn) as log, acting(log, "subscription.create", group, detail) as log:
        made = log.subscribe(
            group, condition, params, expires_after=expires_after, from_position=from_position, topics=topic or None
        )
        detail["id"] = made
    if as_json:
        output.emit({"subscription": made})
    else:
        output.say(f"subscription {made} of group {group}")


@app.command("list", epilog=examples("headwater sub list", "headwater sub list inbox --json"))
def list_subscriptions(
    context: typer.Context,
    group: Annotated[str | None, typer.Argument(metavar="[GROUP]", help="Of this group only.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List subscriptions, with what went wrong in their conditions."""
    with session(context).log(dsn) as log:
        if group is not None:
            log.group(group)
        found = log.subscriptions(group)
    if as_json:
        output.emit(found)
    else:
        print_subscriptions(found)


@app.command(epilog=examples("headwater sub peek inbox --limit 20"))
def peek(
    context: typer.Context,
    group: Group,
    after: After = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Look at so many events.")] = 100,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show which of the next events match which subscriptions, without reading them for the group."""
    with session(context).log(dsn) as log:
        if reading_group(log, group) is None:
            raise InvalidRequest(
                f'group "{group}" is a queue, without subscriptions',
                hint=f"See headwater group deliveries {group}.",
            )
        reading = log.read_next(group, reader="headwater sub peek", after=after, batch_size=limit, peek=True)
    if as_json:
        output.emit(
            {
                "next_position": reading.next_position,
                "events": [
                    {"subscription_ids": m.subscription_ids, **json.loads(output.event_json(m.event))}
                    for m in reading.events
                ],
            }
        )
        return
    output.table(
        ("position", "topic", "type", "subscriptions", "payload"),
        (
            (m.event.position, m.event.topic, m.event.type, m.subscription_ids, output.payload_text(m.event))
            for m in reading.events
        ),
        empty=f"nothing up to {reading.next_position} matches",
    )


@app.command(epilog=examples("headwater sub delete 12 --yes"))
def delete(
    context: typer.Context,
    id: Annotated[int, typer.Argument(metavar="ID", help="The subscription, as `sub list` shows it.")],
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """End a subscription. Asks first."""
    with session(context).log(dsn) as log:
        output.confirm(f"end subscription {id}?", yes=yes)
        found = [one for one in log.subscriptions() if one.id == id]
        with acting(log, "subscription.delete", found[0].group if found else "", {"id": id}) as log:
            if not log.unsubscribe(id):
                raise NotThere(f"there is no subscription {id}", hint="See headwater sub list.")
    if as_json:
        output.emit({"deleted": id})
    else:
        output.say(f"subscription {id} is ended")


def print_subscriptions(found: list[Subscription]) -> None:
    output.table(
        ("id", "group", "condition", "params", "last active", "stopped after", "last error"),
        (
            (s.id, s.group, s.condition, json.dumps(s.params), s.last_active_at, s.stopped_position, s.last_error)
            for s in found
        ),
        empty="no subscriptions: headwater sub create",
    )
