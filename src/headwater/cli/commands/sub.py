"""`headwater sub`: create, list, peek at and delete SQL subscriptions."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer

from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotFound
from headwater.cli.options import After, Dsn, Json, Yes, examples, parse_duration, parse_json_object
from headwater.cli.subscription_queues import print_subscriptions, subscription_queue
from headwater.errors import InvalidRequest
from headwater.log.event_json import event_json

app = typer.Typer(help="Manage SQL subscriptions, the filters of a queue over events.", no_args_is_help=True)

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False)]


@app.command(
    epilog=examples(
        "headwater sub create alerts \"e.type = 'Failed'\"",
        "headwater sub create big \"(e.data ->> 'cents')::int > (s.params ->> 'min')::int\" --params '{\"min\": 500}'",
    )
)
def create(
    context: typer.Context,
    queue: Queue,
    filter: Annotated[
        str, typer.Argument(help="Boolean SQL expression over the event e and the subscription s.", show_default=False)
    ],
    params: Annotated[
        Any,
        typer.Option(parser=parse_json_object, metavar="JSON", help="Parameters of the filter, available as s.params."),
    ] = None,
    expires_after: Annotated[
        timedelta | None,
        typer.Option(
            parser=parse_duration, metavar="DURATION", help="Delete the subscription when unused for this long."
        ),
    ] = None,
    from_position: Annotated[
        int | None, typer.Option("--after", metavar="POSITION", min=0, help="Only events after this position.")
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option(metavar="TOPIC", help="Topic that a new queue reads. Repeat for several. Default: all topics."),
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Subscribe a queue to the events that match a filter. A missing queue is created."""
    detail: dict[str, Any] = {"filter": filter, "params": params, "topics": topic or None}
    with session(context).log(dsn) as log, audit(log, "subscription.create", queue, detail) as log:
        subscription_id = log.subscribe(
            queue, filter, params, expires_after=expires_after, from_position=from_position, topics=topic or None
        )
        detail["id"] = subscription_id
    output.print_result(
        {"subscription": subscription_id}, f"created subscription {subscription_id} of queue {queue}", as_json=as_json
    )


@app.command("list", epilog=examples("headwater sub list", "headwater sub list inbox --json"))
def list_subscriptions(
    context: typer.Context,
    queue: Annotated[str | None, typer.Argument(metavar="[QUEUE]", help="Only subscriptions of this queue.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List SQL subscriptions and the last errors of their filters."""
    with session(context).log(dsn) as log:
        if queue is not None:
            log.queue(queue)
        found = log.subscriptions(queue)
    if as_json:
        output.emit(found)
    else:
        print_subscriptions(found)


@app.command(epilog=examples("headwater sub peek inbox --limit 20"))
def peek(
    context: typer.Context,
    queue: Queue,
    after: After = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Number of events to evaluate.")] = 100,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show which of the next events match which subscriptions, without advancing the queue."""
    with session(context).log(dsn) as log:
        if subscription_queue(log, queue) is None:
            raise InvalidRequest(
                f'queue "{queue}" has bindings, not SQL subscriptions',
                hint=f"See headwater queue deliveries {queue}.",
            )
        reading = log.read_next(queue, reader="headwater sub peek", after=after, batch_size=limit, peek=True)
    if as_json:
        # Not parsed and encoded again: that would change payloads.
        events = ",".join(event_json(m.event, {"subscription_ids": m.subscription_ids}) for m in reading.events)
        output.print_line(f'{{"next_position":{reading.next_position},"events":[{events}]}}')
        return
    output.print_table(
        ("position", "topic", "type", "subscriptions", "payload"),
        (
            (m.event.position, m.event.topic, m.event.type, m.subscription_ids, output.format_payload(m.event))
            for m in reading.events
        ),
        empty=f"no event up to position {reading.next_position} matches",
    )


@app.command(epilog=examples("headwater sub delete 12 --yes"))
def delete(
    context: typer.Context,
    id: Annotated[int, typer.Argument(metavar="ID", help="Id of the subscription, from `sub list`.")],
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Delete a subscription. Asks for confirmation."""
    with session(context).log(dsn) as log:
        output.confirm(f"delete subscription {id}?", yes=yes)
        found = [one for one in log.subscriptions() if one.id == id]
        with audit(log, "subscription.delete", found[0].queue if found else "", {"id": id}) as log:
            if not log.unsubscribe(id):
                raise NotFound(f"subscription {id} does not exist", hint="See headwater sub list.")
    output.print_result({"deleted": id}, f"deleted subscription {id}", as_json=as_json)
