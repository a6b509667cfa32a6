"""`headwater queue`: create, describe, alter, pause, rewind, bind and delete queues."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Unpack

import typer

import headwater
from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotFound
from headwater.cli.options import After, Dsn, Json, Since, Yes, examples, parse_header, parse_past_time
from headwater.cli.setting_options import audited, setting_options
from headwater.cli.subscription_queues import (
    print_subscriptions,
    reject_subscription_queue,
    subscription_queue,
    subscription_queues,
)
from headwater.queue.model import Binding, QueueOverview
from headwater.queue.settings import NewQueueSettings, QueueChanges, QueueSettings
from headwater.setting_definitions import changeable, definitions

app = typer.Typer(help="Manage queues, named consumers with leases, retries and dead letters.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False)]


class Status(StrEnum):
    """The state of an event in a queue."""

    ready = "ready"
    processing = "processing"
    done = "done"
    dead = "dead"


@app.command(
    epilog=examples(
        "headwater queue create mailer --topic orders",
        "headwater queue create billing --topic orders --ordered-keys --from-end",
    )
)
@setting_options(definitions(QueueSettings), before="if_missing")
def create(
    context: typer.Context,
    name: Name,
    topic: Annotated[
        list[str] | None, typer.Option(metavar="TOPIC", help="Bind the queue to this topic. Repeat for several.")
    ] = None,
    after: After = None,
    since: Since = None,
    from_end: Annotated[bool, typer.Option("--from-end", help="Start with new events.")] = False,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Do nothing if the queue already exists.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
    **settings: Unpack[NewQueueSettings],
) -> None:
    """Create a queue. By default it starts at the beginning of the log."""
    detail: dict[str, Any] = {
        "topics": topic or None,
        "after": after,
        "since": since,
        "from_end": from_end or None,
        **audited(settings),
    }
    with session(context).log(dsn) as log, audit(log, "queue.create", name, detail) as log:
        created = log.create_queue(
            name,
            topic or None,
            after=after,
            since=since,
            from_end=from_end,
            if_missing=if_missing,
            **settings,
        )
    if as_json:
        output.emit(created)
    else:
        output.print_line(f"created queue {created.name} (starts after position {created.start_position})")


@app.command("list", epilog=examples("headwater queue list", "headwater queue list --json"))
def list_queues(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List queues and their progress: queues with bindings, then queues of SQL subscriptions."""
    with session(context).log(dsn) as log:
        queues = log.queues()
        bound = [queue for queue in queues if queue.kind == "bindings"]
        reading = subscription_queues(log, [queue for queue in queues if queue.kind == "subscriptions"])
    if as_json:
        output.emit(
            [output.to_json_value(queue) for queue in bound]
            + [{"kind": "subscriptions", **output.to_json_value(queue)} for queue in reading.values()]
        )
        return
    if bound or not reading:
        output.print_table(
            ("queue", "ready", "processing", "retrying", "dead", "done", "behind", "oldest", "state"),
            (
                (
                    g.name,
                    output.format_count(g.ready, g.ready_is_more),
                    g.processing,
                    g.retrying,
                    g.dead,
                    g.done,
                    output.format_count(g.lag_events, g.lag_is_more),
                    None if g.lag_seconds is None else timedelta(seconds=round(g.lag_seconds)),
                    _state(g.state),
                )
                for g in bound
            ),
            empty="no queues; create one with headwater queue create NAME --topic TOPIC",
        )
    if reading:
        if bound:
            output.print_line("")
        output.print_table(
            ("queue", "position", "behind", "reader", "subscriptions", "retrying", "given up"),
            (
                (
                    g.name,
                    g.position,
                    output.format_count(g.lag_events, g.lag_is_more),
                    g.reader,
                    g.subscriptions,
                    g.retrying,
                    g.given_up,
                )
                for g in reading.values()
            ),
        )


@app.command(epilog=examples("headwater queue describe mailer"))
def describe(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Show the settings, progress, and bindings or SQL subscriptions of a queue."""
    with session(context).log(dsn) as log:
        settings = log.queue(name)
        reading = subscription_queue(log, name)
        if reading is not None:
            subscriptions = log.subscriptions(name)
        else:
            overview = _overview(log, name)
            bindings = log.bindings(name)
    if reading is not None:
        if as_json:
            output.emit(
                {"kind": "subscriptions", "settings": settings, "reading": reading, "subscriptions": subscriptions}
            )
            return
        output.print_line(f"{name} is a queue of SQL subscriptions: it has one position, no state for each event\n")
        output.print_fields(reading)
        output.print_line("")
        print_subscriptions(subscriptions)
        return
    if as_json:
        output.emit({"kind": "bindings", "settings": settings, "overview": overview, "bindings": bindings})
        return
    output.print_fields(settings)
    output.print_line("")
    output.print_fields(overview)
    output.print_line("")
    _print_bindings(bindings)


@app.command(epilog=examples("headwater queue alter mailer --max-attempts 10 --lease-seconds 120"))
@setting_options(changeable(QueueSettings), change=True)
def alter(
    context: typer.Context,
    name: Name,
    dsn: Dsn = None,
    as_json: Json = False,
    **changes: Unpack[QueueChanges],
) -> None:
    """Change a queue's settings. Options that are not given stay unchanged."""
    with session(context).log(dsn) as log, audit(log, "queue.alter", name, audited(changes)) as log:
        altered = log.alter_queue(name, **changes)
    if as_json:
        output.emit(altered)
    else:
        output.print_fields(altered)


@app.command(epilog=examples("headwater queue pause mailer"))
def pause(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Stop delivering events until the queue is resumed."""
    with session(context).log(dsn) as log:
        reject_subscription_queue(log, name, reason="it cannot be paused; stop its readers instead")
        with audit(log, "queue.pause", name) as log:
            log.pause_queue(name)
    output.print_result({"queue": name, "paused": True}, f"paused queue {name}", as_json=as_json)


@app.command(epilog=examples("headwater queue resume mailer"))
def resume(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Deliver events again."""
    with session(context).log(dsn) as log:
        reject_subscription_queue(log, name, reason="it cannot be paused or resumed")
        with audit(log, "queue.resume", name) as log:
            log.resume_queue(name)
    output.print_result({"queue": name, "paused": False}, f"resumed queue {name}", as_json=as_json)


@app.command(
    epilog=examples("headwater queue rewind mailer --since 2h", "headwater queue rewind mailer --after 0 --yes")
)
def rewind(
    context: typer.Context,
    name: Name,
    position: Annotated[
        int | None, typer.Option("--after", metavar="POSITION", min=0, help="Continue after this position.")
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            parser=parse_past_time, metavar="TIME", help="Continue at this time: ISO 8601, or 2h for two hours ago."
        ),
    ] = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Move a queue to another position. Asks for confirmation.

    Events after the position are delivered again; current leases are revoked. A queue of SQL subscriptions can be
    moved only while it has no reader.
    """
    if (position is None) == (since is None):
        raise typer.BadParameter("give exactly one of --after and --since")
    with session(context).log(dsn) as log:
        reading = subscription_queue(log, name)
        current = _overview(log, name).claimed_position if reading is None else reading.position
        if since is not None:
            position = log.position_before(since)
        assert position is not None
        output.confirm(f"rewind queue {name} from position {current} to {position}?", yes=yes)
        with audit(log, "queue.rewind", name, {"to": position}) as log:
            if reading is None:
                log.rewind_queue(name, position=position)
            else:
                log.commit_reading(name, position, reader="headwater queue rewind", release=True)
    output.print_result(
        {"queue": name, "position": position}, f"rewound queue {name} to position {position}", as_json=as_json
    )


@app.command(epilog=examples("headwater queue delete mailer --yes"))
def delete(context: typer.Context, name: Name, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Delete a queue with its leases, retries and dead letters. Asks for confirmation."""
    with session(context).log(dsn) as log:
        log.queue(name)
        output.confirm(f"delete queue {name} with its leases, retries and dead letters?", yes=yes)
        with audit(log, "queue.delete", name) as log:
            log.delete_queue(name)
    output.print_result({"deleted": name}, f"deleted queue {name}", as_json=as_json)


@app.command(
    epilog=examples(
        "headwater queue bind mailer --topic orders --type OrderPlaced",
        "headwater queue bind mailer --pattern 'orders.*.created' --header region=eu",
    )
)
def bind(
    context: typer.Context,
    name: Name,
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="Only events of this topic.")] = None,
    pattern: Annotated[
        str | None, typer.Option(help="Only routing keys that match: * is one word, # any number of words.")
    ] = None,
    headers: Annotated[
        list[Any] | None,
        typer.Option(
            "--header",
            parser=parse_header,
            metavar="NAME=VALUE",
            help="Only events with this header. Repeat for several.",
        ),
    ] = None,
    type: Annotated[str | None, typer.Option(help="Only events of this type.")] = None,
    from_position: Annotated[
        int | None, typer.Option("--after", metavar="POSITION", min=0, help="Bind from after this position.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Add a binding to a queue: it receives the events that match all given options."""
    with session(context).log(dsn) as log:
        reject_subscription_queue(log, name, reason="it has no bindings; use headwater sub create")
        wanted: dict[str, Any] = {
            "topic": topic,
            "pattern": pattern,
            "headers": dict(headers) if headers else None,
            "type": type,
            "from_position": from_position,
        }
        detail = dict(wanted)
        with audit(log, "queue.bind", name, detail) as log:
            bound = log.bind(name, **wanted)
            detail["id"] = bound.id
    output.print_result(
        bound,
        f"created binding {bound.id} of queue {name} (events after position {bound.from_position})",
        as_json=as_json,
    )


@app.command(epilog=examples("headwater queue unbind mailer 3"))
def unbind(
    context: typer.Context,
    name: Name,
    binding: Annotated[int, typer.Argument(metavar="ID", help="Id of the binding, from `queue describe`.")],
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Remove a binding. Events that the queue has already claimed are not affected."""
    with session(context).log(dsn) as log, audit(log, "queue.unbind", name, {"id": binding}) as log:
        ended = log.unbind(name, binding)
    output.print_result(
        {"binding": binding, "to_position": ended},
        f"removed binding {binding} of queue {name} (ends after position {ended})",
        as_json=as_json,
    )


@app.command(epilog=examples("headwater queue deliveries mailer --status ready"))
def deliveries(
    context: typer.Context,
    name: Name,
    status: Annotated[Status | None, typer.Option(help="Only events in this state.")] = None,
    after: After = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Maximum number of events.")] = 100,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List the events of a queue with their state."""
    with session(context).log(dsn) as log:
        reject_subscription_queue(log, name, reason="it has one position, no state for each event")
        found = log.deliveries(name, status=status and status.value, after=after or 0, batch_size=limit)
    if as_json:
        output.emit(found)
        return
    output.print_table(
        ("position", "topic", "status", "attempts", "run at", "leased until", "worker", "last error"),
        ((d.position, d.topic, d.status, d.attempts, d.run_at, d.leased_until, d.worker, d.last_error) for d in found),
        empty="no events",
    )


def _overview(log: headwater.Headwater, name: str) -> QueueOverview:
    found = log.queues([name])
    if not found:
        raise NotFound(f'queue "{name}" was deleted concurrently')
    return found[0]


def _state(state: str) -> str:
    """Format a state: no_workers becomes "no workers"."""
    return state.replace("_", " ")


def _print_bindings(bindings: list[Binding]) -> None:
    output.print_table(
        ("binding", "topic", "type", "pattern", "headers", "after", "up to"),
        ((b.id, b.topic, b.type, b.pattern, b.headers, b.from_position, b.to_position) for b in bindings),
        empty="no bindings; create one with headwater queue bind",
    )
