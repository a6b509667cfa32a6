"""`headwater maintain`: the upkeep of the log, once or for good."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer

import headwater
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, examples
from headwater.cli.connection import session
from headwater.errors import LogUnavailable
from headwater.model import Upkeep
from headwater.telemetry import ERROR, WAIT_SECONDS, logger

app = typer.Typer()


@app.command(epilog=examples("headwater maintain", "headwater maintain --every 60"))
def maintain(
    context: typer.Context,
    every: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.1, help="Go on, so often, until Ctrl-C.")
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Let due events enter, make segments ahead, drop what retention has done with.

    Every follower does this too, so it is needed only where nothing else runs. Any number of them
    may run at once.
    """
    with session(context).log(dsn) as log:
        if every is None:
            _tell(log.maintain(), as_json=as_json)
            return
        try:
            keep_up(log, every_seconds=every, tell=lambda upkeep: _tell(upkeep, as_json=as_json))
        except KeyboardInterrupt:
            return


def keep_up(
    log: headwater.Headwater, *, every_seconds: float, tell: Callable[[Upkeep], None] = lambda upkeep: None
) -> None:
    """Maintain the log again and again, through restarts of its database, until interrupted."""
    while True:
        try:
            upkeep = log.maintain()
        except LogUnavailable as error:
            logger.warning("log unavailable", extra={ERROR: error.message, WAIT_SECONDS: every_seconds})
        else:
            tell(upkeep)
        time.sleep(every_seconds)


def _tell(upkeep: Upkeep, *, as_json: bool) -> None:
    if as_json:
        output.emit(upkeep)
    elif upkeep.busy:
        output.say("somebody else is at it")
    else:
        output.say(
            f"released {upkeep.released} due events, made {upkeep.segments_made} segments, "
            f"dropped {upkeep.segments_dropped}, swept {upkeep.events_swept} events"
        )
