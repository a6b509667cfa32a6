"""`headwater maintain`: the upkeep of the log, once or for good."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated

import typer

import headwater
from headwater import calls
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, examples
from headwater.cli.connection import session
from headwater.errors import LogUnavailable
from headwater.log.steps import FULL_SWEEP, UpkeepTimes
from headwater.model import Upkeep
from headwater.observability.metrics import ERROR, WAIT_SECONDS, logger

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
    """Let due and periodic events enter, give back what dead workers held, make segments ahead, drop what is expired.

    Every follower and worker does this too, so it is needed only where nothing else runs. Any number of them
    may run at once.
    """
    with session(context).log(dsn) as log:
        if every is None:
            _tell(log.maintain(), publish_periodics(log), as_json=as_json)
            return
        try:
            keep_up(log, every_seconds=every, tell=lambda upkeep, periodics: _tell(upkeep, periodics, as_json=as_json))
        except KeyboardInterrupt:
            return


def publish_periodics(log: headwater.Headwater) -> int:
    """Publish the periodic events whose time has come, unless another process does; returns how many."""
    fire = UpkeepTimes().heard(log.run(calls.due_periodics()), 0.0, datetime.now(UTC))
    return sum(log.run(call) for call in fire)


def keep_up(
    log: headwater.Headwater,
    *,
    every_seconds: float,
    tell: Callable[[Upkeep, int], None] = lambda upkeep, periodics: None,
) -> None:
    """Maintain the log again and again, through restarts of its database, until interrupted."""
    while True:
        try:
            upkeep, periodics = log.maintain(), publish_periodics(log)
        except LogUnavailable as error:
            logger.warning("log unavailable", extra={ERROR: error.message, WAIT_SECONDS: every_seconds})
        else:
            tell(upkeep, periodics)
            if upkeep.events_swept >= FULL_SWEEP:
                # There is more to take than goes at a time.
                continue
        time.sleep(every_seconds)


def _tell(upkeep: Upkeep, periodics: int, *, as_json: bool) -> None:
    if as_json:
        output.emit({**output.plain(upkeep), "periodics": periodics})
    elif upkeep.busy:
        output.say("somebody else is at it")
    else:
        output.say(
            f"released {upkeep.released} due and {periodics} periodic events, made {upkeep.segments_made} segments, "
            f"dropped {upkeep.segments_dropped}, swept {upkeep.events_swept} events"
        )
