"""`headwater dead`: list, redrive and discard dead letters."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotFound
from headwater.cli.options import Dsn, Json, Yes, examples

app = typer.Typer(help="Manage dead letters, the events that a queue failed to process.", no_args_is_help=True)

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.", show_default=False)]
Positions = Annotated[
    list[int] | None, typer.Argument(metavar="[POSITION]...", help="Positions of the dead letters. Default: all.")
]
Topic = Annotated[str | None, typer.Option(metavar="TOPIC", help="Only events of this topic.")]
Handler = Annotated[str | None, typer.Option(metavar="NAME", help="Only dead letters of this subscriber's handler.")]
SubscriptionId = Annotated[
    int | None, typer.Option("--subscription", metavar="ID", help="Only dead letters of this subscription.")
]
ErrorLike = Annotated[
    str | None, typer.Option("--error", metavar="PATTERN", help="Only errors that match this SQL LIKE pattern.")
]

MAX_COUNTED = 100_000


@app.command(
    "list", epilog=examples("headwater dead list mailer", "headwater dead list mailer --error '%timeout%' --json")
)
def list_dead(
    context: typer.Context,
    queue: Queue,
    positions: Positions = None,
    topic: Topic = None,
    error: ErrorLike = None,
    handler: Handler = None,
    subscription: SubscriptionId = None,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Maximum number of dead letters.")] = 100,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """List the dead letters of a queue; --json includes every attempt."""
    with session(context).log(dsn) as log:
        selected = _selected(positions, topic, error, handler, subscription)
        letters = log.dead_letters(queue, **selected, batch_size=limit)
    columns = {"position": "position", "died": "died_at", "topic": "topic", "key": "key", "type": "type"}
    # Only queues of SQL subscriptions have handlers.
    if any(letter.handler is not None for letter in letters):
        columns |= {"subscription": "subscription_id", "handler": "handler"}
    columns |= {"attempts": "attempts", "last error": "last_error"}
    output.print_list(letters, columns, as_json=as_json, empty="no dead letters")


@app.command(
    epilog=examples("headwater dead redrive mailer 4711", "headwater dead redrive mailer --error '%timeout%' --yes")
)
def redrive(
    context: typer.Context,
    queue: Queue,
    positions: Positions = None,
    topic: Topic = None,
    error: ErrorLike = None,
    handler: Handler = None,
    subscription: SubscriptionId = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Return dead letters to the queue with new attempts. Asks for confirmation unless positions are given."""
    with session(context).log(dsn) as log:
        selected = _selected(positions, topic, error, handler, subscription)
        if not positions:
            chosen = log.dead_letters(queue, **selected, batch_size=MAX_COUNTED)
            if chosen:
                output.confirm(f"redrive {_count(len(chosen))} of queue {queue}?", yes=yes)
        detail = _detail(selected)
        with audit(log, "queue.redrive", queue, detail) as log:
            redriven = log.redrive(queue, **selected)
            detail["count"] = redriven
    if positions and not redriven:
        raise _missing(queue)
    output.print_result({"redriven": redriven}, f"redrove {_count(redriven)} of queue {queue}", as_json=as_json)


@app.command(
    epilog=examples("headwater dead discard mailer 4711", "headwater dead discard mailer --topic old-orders --yes")
)
def discard(
    context: typer.Context,
    queue: Queue,
    positions: Positions = None,
    topic: Topic = None,
    error: ErrorLike = None,
    handler: Handler = None,
    subscription: SubscriptionId = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Delete dead letters permanently. Asks for confirmation."""
    with session(context).log(dsn) as log:
        selected = _selected(positions, topic, error, handler, subscription)
        chosen = log.dead_letters(queue, **selected, batch_size=MAX_COUNTED)
        if positions and not chosen:
            raise _missing(queue)
        if chosen:
            output.confirm(f"discard {_count(len(chosen))} of queue {queue} permanently?", yes=yes)
        detail = _detail(selected)
        with audit(log, "queue.discard", queue, detail) as log:
            discarded = log.discard(queue, **selected)
            detail["count"] = discarded
    output.print_result({"discarded": discarded}, f"discarded {_count(discarded)} of queue {queue}", as_json=as_json)


def _selected(
    positions: list[int] | None, topic: str | None, error: str | None, handler: str | None, subscription: int | None
) -> dict[str, Any]:
    """The arguments that select dead letters."""
    return {
        "positions": positions or None,
        "topic": topic,
        "error_like": error,
        "handler": handler,
        "subscription_id": subscription,
    }


def _detail(selected: dict[str, Any]) -> dict[str, Any]:
    """The audit record of a selection."""
    detail = {name: selected[name] for name in ("topic", "error_like")}
    detail["positions"] = (selected["positions"] or [])[:1000] or "all"
    if selected["handler"] is not None or selected["subscription_id"] is not None:
        detail |= {"handler": selected["handler"], "subscription": selected["subscription_id"]}
    return detail


def _count(count: int) -> str:
    """Format a number of dead letters, which are counted up to MAX_COUNTED."""
    if count == 1:
        return "1 dead letter"
    return f"{count}{' or more' if count == MAX_COUNTED else ''} dead letters"


def _missing(queue: str) -> NotFound:
    return NotFound(
        f'queue "{queue}" has no dead letters at these positions',
        hint=f"See headwater dead list {queue}.",
    )
