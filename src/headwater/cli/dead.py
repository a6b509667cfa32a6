"""`headwater dead`: look at dead letters, give them another life, or drop them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, Yes, examples
from headwater.cli.audited import acting
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotThere

app = typer.Typer(help="Dead letters: events that a group has given up on.", no_args_is_help=True)

Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group.", show_default=False)]
Positions = Annotated[list[int] | None, typer.Argument(metavar="[POSITION]...", help="Only these; none: all.")]
Topic = Annotated[str | None, typer.Option(metavar="TOPIC", help="Only of this topic.")]
Handler = Annotated[str | None, typer.Option(metavar="NAME", help="Only of this subscriber's handler.")]
SubscriptionId = Annotated[int | None, typer.Option("--subscription", metavar="ID", help="Only of this subscription.")]
ErrorLike = Annotated[str | None, typer.Option("--error", metavar="PATTERN", help="Only errors like this, as in SQL.")]

COUNTED = 100_000


@app.command(
    "list", epilog=examples("headwater dead list mailer", "headwater dead list mailer --error '%timeout%' --json")
)
def list_dead(
    context: typer.Context,
    group: Group,
    positions: Positions = None,
    topic: Topic = None,
    error: ErrorLike = None,
    handler: Handler = None,
    subscription: SubscriptionId = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="At most so many.")] = 100,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List a group's dead letters; --json shows every try that each one had."""
    with session(context).log(dsn) as log:
        letters = log.dead_letters(
            group,
            positions=positions or None,
            topic=topic,
            error_like=error,
            handler=handler,
            subscription_id=subscription,
            batch_size=limit,
        )
    if as_json:
        output.emit(letters)
        return
    # Only groups that read for subscriptions have handlers.
    named = any(letter.handler is not None for letter in letters)
    output.table(
        (
            "position",
            "died",
            "topic",
            "key",
            "type",
            *(("subscription", "handler") if named else ()),
            "attempts",
            "last error",
        ),
        (
            (
                d.position,
                d.died_at,
                d.topic,
                d.key,
                d.type,
                *((d.subscription_id, d.handler) if named else ()),
                d.attempts,
                d.last_error,
            )
            for d in letters
        ),
        empty="no dead letters",
    )


@app.command(
    epilog=examples("headwater dead redrive mailer 4711", "headwater dead redrive mailer --error '%timeout%' --yes")
)
def redrive(
    context: typer.Context,
    group: Group,
    positions: Positions = None,
    topic: Topic = None,
    error: ErrorLike = None,
    handler: Handler = None,
    subscription: SubscriptionId = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Give dead letters a fresh set of tries. Says how many, and asks, unless they are named."""
    with session(context).log(dsn) as log:
        if not positions:
            chosen = log.dead_letters(
                group,
                topic=topic,
                error_like=error,
                handler=handler,
                subscription_id=subscription,
                batch_size=COUNTED,
            )
            if chosen:
                output.confirm(f"redrive {_letters(len(chosen))} of group {group}?", yes=yes)
        detail = _detail(positions, topic, error, handler, subscription)
        with acting(log, "group.redrive", group, detail) as log:
            redriven = log.redrive(
                group,
                positions=positions or None,
                topic=topic,
                error_like=error,
                handler=handler,
                subscription_id=subscription,
            )
            detail["count"] = redriven
    if positions and not redriven:
        raise _missing(group)
    if as_json:
        output.emit({"redriven": redriven})
    else:
        output.say(f"redrove {_letters(redriven)}")


@app.command(
    epilog=examples("headwater dead discard mailer 4711", "headwater dead discard mailer --topic old-orders --yes")
)
def discard(
    context: typer.Context,
    group: Group,
    positions: Positions = None,
    topic: Topic = None,
    error: ErrorLike = None,
    handler: Handler = None,
    subscription: SubscriptionId = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Drop dead letters for good. Says how many, and asks."""
    with session(context).log(dsn) as log:
        chosen = log.dead_letters(
            group,
            positions=positions or None,
            topic=topic,
            error_like=error,
            handler=handler,
            subscription_id=subscription,
            batch_size=COUNTED,
        )
        if positions and not chosen:
            raise _missing(group)
        if chosen:
            output.confirm(f"drop {_letters(len(chosen))} of group {group} for good?", yes=yes)
        detail = _detail(positions, topic, error, handler, subscription)
        with acting(log, "group.discard", group, detail) as log:
            discarded = log.discard(
                group,
                positions=positions or None,
                topic=topic,
                error_like=error,
                handler=handler,
                subscription_id=subscription,
            )
            detail["count"] = discarded
    if as_json:
        output.emit({"discarded": discarded})
    else:
        output.say(f"dropped {_letters(discarded)}")


def _detail(
    positions: list[int] | None, topic: str | None, error: str | None, handler: str | None, subscription: int | None
) -> dict[str, Any]:
    """What the audit topic keeps of a choice."""
    detail: dict[str, Any] = {"positions": (positions or [])[:1000] or "all", "topic": topic, "error_like": error}
    if handler is not None or subscription is not None:
        detail |= {"handler": handler, "subscription": subscription}
    return detail


def _letters(count: int) -> str:
    """So many dead letters, in words; they are counted up to a limit."""
    if count == 1:
        return "1 dead letter"
    return f"{count}{' or more' if count == COUNTED else ''} dead letters"


def _missing(group: str) -> NotThere:
    return NotThere(
        f'none of these is a dead letter of group "{group}" whose event is still there',
        hint=f"See headwater dead list {group}.",
    )
