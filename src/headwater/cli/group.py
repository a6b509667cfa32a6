"""`headwater group`: create, look at, steer and delete groups, and what they are bound to."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any

import typer

import headwater
from headwater.cli import output
from headwater.cli.arguments import After, Dsn, Json, Since, Yes, examples, header, past_instant
from headwater.cli.audited import acting
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotThere
from headwater.cli.sql_subscription_groups import reading_group, reading_groups, refuse_reading_group
from headwater.cli.sub import print_subscriptions
from headwater.model import Binding, GroupOverview

app = typer.Typer(help="Groups: named consumers that keep a lifecycle for each event.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.", show_default=False)]
LeaseSeconds = Annotated[float | None, typer.Option(metavar="SECONDS", help="How long a worker has for a batch.")]
MaxAttempts = Annotated[int | None, typer.Option(help="Tries until an event is dead.")]
Backoff = Annotated[float | None, typer.Option(metavar="SECONDS", help="The wait after the first failed try.")]
BackoffFactor = Annotated[float | None, typer.Option(help="By how much each further wait is longer.")]
BackoffMax = Annotated[float | None, typer.Option(metavar="SECONDS", help="The longest wait.")]
Jitter = Annotated[float | None, typer.Option(help="How much waits differ at random: 0 to 1.")]
MaxInFlight = Annotated[int | None, typer.Option(help="How many events may be leased at once.")]
MustNotLose = Annotated[bool | None, typer.Option("--must-not-lose/--may-lose", help="Whether retention waits for it.")]


class Status(StrEnum):
    """What an event can be for a group."""

    ready = "ready"
    processing = "processing"
    done = "done"
    dead = "dead"


@app.command(
    epilog=examples(
        "headwater group create mailer --topic orders",
        "headwater group create billing --topic orders --ordered-keys --from-end",
    )
)
def create(
    context: typer.Context,
    name: Name,
    topic: Annotated[list[str] | None, typer.Option(metavar="TOPIC", help="Bind it to this; again for more.")] = None,
    after: After = None,
    since: Since = None,
    from_end: Annotated[bool, typer.Option("--from-end", help="Only events from now on.")] = False,
    lease_seconds: LeaseSeconds = None,
    max_attempts: MaxAttempts = None,
    backoff_seconds: Backoff = None,
    backoff_factor: BackoffFactor = None,
    backoff_max_seconds: BackoffMax = None,
    backoff_jitter: Jitter = None,
    ordered_keys: Annotated[bool, typer.Option("--ordered-keys", help="One event of a key at a time.")] = False,
    max_in_flight: MaxInFlight = None,
    must_not_lose: MustNotLose = None,
    if_missing: Annotated[bool, typer.Option("--if-missing", help="One that is there is fine as it is.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Create a group, at the beginning of the log unless told otherwise."""
    detail: dict[str, Any] = {
        "topics": topic or None,
        "after": after,
        "since": since,
        "from_end": from_end or None,
        "lease_seconds": lease_seconds,
        "max_attempts": max_attempts,
        "backoff_seconds": backoff_seconds,
        "backoff_factor": backoff_factor,
        "backoff_max_seconds": backoff_max_seconds,
        "backoff_jitter": backoff_jitter,
        "ordered_keys": ordered_keys or None,
        "max_in_flight": max_in_flight,
        "must_not_lose": must_not_lose,
    }
    with session(context).log(dsn) as log, acting(log, "group.create", name, detail) as log:
        created = log.create_group(
            name,
            topic or None,
            after=after,
            since=since,
            from_end=from_end,
            lease_seconds=lease_seconds,
            max_attempts=max_attempts,
            backoff_seconds=backoff_seconds,
            backoff_factor=backoff_factor,
            backoff_max_seconds=backoff_max_seconds,
            backoff_jitter=backoff_jitter,
            ordered_keys=ordered_keys,
            max_in_flight=max_in_flight,
            must_not_lose=must_not_lose,
            if_missing=if_missing,
        )
    if as_json:
        output.emit(created)
    else:
        output.say(f"group {created.name} is there, after position {created.start_position}")


@app.command("list", epilog=examples("headwater group list", "headwater group list --json"))
def list_groups(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """List every group with how far it has come: queues, then groups that read for subscriptions."""
    with session(context).log(dsn) as log:
        groups = log.groups()
        queues = [group for group in groups if group.kind == "queue"]
        reading = reading_groups(log, [group for group in groups if group.kind == "cursor"])
    if as_json:
        output.emit(
            [output.plain(group) for group in queues]
            + [{"kind": "cursor", **output.plain(group)} for group in reading.values()]
        )
        return
    if queues or not reading:
        output.table(
            ("group", "ready", "processing", "retrying", "dead", "done", "behind", "oldest", "state"),
            (
                (
                    g.name,
                    output.at_least(g.ready, g.ready_is_more),
                    g.processing,
                    g.retrying,
                    g.dead,
                    g.done,
                    output.at_least(g.lag_events, g.lag_is_more),
                    None if g.lag_seconds is None else timedelta(seconds=round(g.lag_seconds)),
                    _state(g.state),
                )
                for g in queues
            ),
            empty="no groups: headwater group create NAME --topic TOPIC",
        )
    if reading:
        if queues:
            output.say("")
        output.table(
            ("group", "position", "behind", "reader", "subscriptions", "retrying", "given up"),
            (
                (
                    g.name,
                    g.position,
                    output.at_least(g.lag_events, g.lag_is_more),
                    g.reader,
                    g.subscriptions,
                    g.retrying,
                    g.given_up,
                )
                for g in reading.values()
            ),
        )


@app.command(epilog=examples("headwater group describe mailer"))
def describe(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Show a group's settings, how far it has come, and what it is bound or subscribed to."""
    with session(context).log(dsn) as log:
        settings = log.group(name)
        reading = reading_group(log, name)
        if reading is not None:
            subscriptions = log.subscriptions(name)
        else:
            overview = _overview(log, name)
            bindings = log.bindings(name)
    if reading is not None:
        if as_json:
            output.emit({"kind": "cursor", "settings": settings, "reading": reading, "subscriptions": subscriptions})
            return
        output.say(f"{name} reads for subscriptions: it keeps a position, not a life for each event\n")
        output.facts(reading)
        output.say("")
        print_subscriptions(subscriptions)
        return
    if as_json:
        output.emit({"kind": "queue", "settings": settings, "overview": overview, "bindings": bindings})
        return
    output.facts(settings)
    output.say("")
    output.facts(overview)
    output.say("")
    _print_bindings(bindings)


@app.command(epilog=examples("headwater group alter mailer --max-attempts 10 --lease-seconds 120"))
def alter(
    context: typer.Context,
    name: Name,
    lease_seconds: LeaseSeconds = None,
    max_attempts: MaxAttempts = None,
    backoff_seconds: Backoff = None,
    backoff_factor: BackoffFactor = None,
    backoff_max_seconds: BackoffMax = None,
    backoff_jitter: Jitter = None,
    max_in_flight: MaxInFlight = None,
    must_not_lose: MustNotLose = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Change a group's settings; --max-in-flight 0 removes the limit."""
    changes: dict[str, Any] = {
        "lease_seconds": lease_seconds,
        "max_attempts": max_attempts,
        "backoff_seconds": backoff_seconds,
        "backoff_factor": backoff_factor,
        "backoff_max_seconds": backoff_max_seconds,
        "backoff_jitter": backoff_jitter,
        "max_in_flight": max_in_flight,
        "must_not_lose": must_not_lose,
    }
    with session(context).log(dsn) as log, acting(log, "group.alter", name, dict(changes)) as log:
        altered = log.alter_group(name, **changes)
    if as_json:
        output.emit(altered)
    else:
        output.facts(altered)


@app.command(epilog=examples("headwater group pause mailer"))
def pause(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Hand out no more events until resumed."""
    with session(context).log(dsn) as log:
        refuse_reading_group(log, name, cannot="stop its readers instead of pausing it")
        with acting(log, "group.pause", name) as log:
            log.pause_group(name)
    _tell({"group": name, "paused": True}, f"group {name} is paused", as_json=as_json)


@app.command(epilog=examples("headwater group resume mailer"))
def resume(context: typer.Context, name: Name, dsn: Dsn = None, as_json: Json = False) -> None:
    """Hand out events again."""
    with session(context).log(dsn) as log:
        refuse_reading_group(log, name, cannot="it is never paused")
        with acting(log, "group.resume", name) as log:
            log.resume_group(name)
    _tell({"group": name, "paused": False}, f"group {name} goes on", as_json=as_json)


@app.command(
    epilog=examples("headwater group rewind mailer --since 2h", "headwater group rewind mailer --position 0 --yes")
)
def rewind(
    context: typer.Context,
    name: Name,
    position: Annotated[int | None, typer.Option(min=0, help="Begin anew after this position.")] = None,
    since: Annotated[
        datetime | None, typer.Option(parser=past_instant, metavar="TIME", help="Begin anew at this time.")
    ] = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Let a group begin anew, back or forth. What it did before it does again; leases of now are void. Asks first.

    A group that reads for subscriptions is set to the position; while somebody reads for it, that is refused.
    """
    if (position is None) == (since is None):
        raise typer.BadParameter("say where to once: --position or --since")
    with session(context).log(dsn) as log:
        reading = reading_group(log, name)
        stands_at = _overview(log, name).frontier if reading is None else reading.position
        if since is not None:
            position = log.position_before(since)
        assert position is not None
        output.confirm(f"let group {name} begin anew after {position}? it stands at {stands_at}", yes=yes)
        with acting(log, "group.rewind", name, {"to": position}) as log:
            if reading is None:
                log.rewind_group(name, position=position)
            else:
                log.set_reading(name, position, reader="headwater group rewind", release=True)
    _tell({"group": name, "position": position}, f"group {name} begins after {position}", as_json=as_json)


@app.command(epilog=examples("headwater group delete mailer --yes"))
def delete(context: typer.Context, name: Name, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Forget a group with its leases, retries and dead letters. Asks first."""
    with session(context).log(dsn) as log:
        log.group(name)
        output.confirm(f"forget group {name} and everything about it?", yes=yes)
        with acting(log, "group.delete", name) as log:
            log.delete_group(name)
    _tell({"deleted": name}, f"group {name} is deleted", as_json=as_json)


@app.command(
    epilog=examples(
        "headwater group bind mailer --topic orders --type OrderPlaced",
        "headwater group bind mailer --pattern 'orders.*.created' --header region=eu",
    )
)
def bind(
    context: typer.Context,
    name: Name,
    topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="Of this topic only.")] = None,
    pattern: Annotated[
        str | None, typer.Option(help="Routing keys like this: * is one word, # any number of them.")
    ] = None,
    headers: Annotated[
        list[Any] | None, typer.Option("--header", parser=header, metavar="NAME=VALUE", help="With this header.")
    ] = None,
    type: Annotated[str | None, typer.Option(help="Of this type only.")] = None,
    from_position: Annotated[int | None, typer.Option(min=0, help="Takes effect after this position.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Bind a group to more events: those that fit every part given."""
    with session(context).log(dsn) as log:
        refuse_reading_group(log, name, cannot="it has no bindings; use headwater sub create")
        wanted: dict[str, Any] = {
            "topic": topic,
            "pattern": pattern,
            "headers": dict(headers) if headers else None,
            "type": type,
            "from_position": from_position,
        }
        detail = dict(wanted)
        with acting(log, "group.bind", name, detail) as log:
            bound = log.bind(name, **wanted)
            detail["id"] = bound.id
    _tell(bound, f"binding {bound.id} takes events after {bound.from_position}", as_json=as_json)


@app.command(epilog=examples("headwater group unbind mailer 3"))
def unbind(
    context: typer.Context,
    name: Name,
    binding: Annotated[int, typer.Argument(metavar="ID", help="The binding, as `group describe` shows it.")],
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """End a binding after what the group has claimed."""
    with session(context).log(dsn) as log, acting(log, "group.unbind", name, {"id": binding}) as log:
        ended = log.unbind(name, binding)
    _tell({"binding": binding, "to_position": ended}, f"binding {binding} ends after {ended}", as_json=as_json)


@app.command(epilog=examples("headwater group deliveries mailer --status ready"))
def deliveries(
    context: typer.Context,
    name: Name,
    status: Annotated[Status | None, typer.Option(help="Only events in this state.")] = None,
    after: After = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many.")] = 100,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show the state of each event for a group."""
    with session(context).log(dsn) as log:
        refuse_reading_group(log, name, cannot="it keeps a position, and no life for each event")
        found = log.deliveries(name, status=status and status.value, after=after or 0, batch_size=limit)
    if as_json:
        output.emit(found)
        return
    output.table(
        ("position", "topic", "status", "attempts", "run at", "leased until", "worker", "last error"),
        ((d.position, d.topic, d.status, d.attempts, d.run_at, d.leased_until, d.worker, d.last_error) for d in found),
        empty="no events",
    )


def _overview(log: headwater.Headwater, name: str) -> GroupOverview:
    found = log.groups([name])
    if not found:
        raise NotThere(f'group "{name}" was deleted just now')
    return found[0]


def _state(state: str) -> str:
    """As people read it: no_workers is "no workers"."""
    return state.replace("_", " ")


def _print_bindings(bindings: list[Binding]) -> None:
    output.table(
        ("binding", "topic", "type", "pattern", "headers", "after", "up to"),
        ((b.id, b.topic, b.type, b.pattern, b.headers, b.from_position, b.to_position) for b in bindings),
        empty="bound to nothing: headwater group bind",
    )


def _tell(document: Any, sentence: str, *, as_json: bool) -> None:
    if as_json:
        output.emit(document)
    else:
        output.say(sentence)
