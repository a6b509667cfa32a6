"""`headwater maintain`: run maintenance of the log, once or at an interval."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Final

import typer

from headwater.cli import output
from headwater.cli.connection import session
from headwater.cli.maintenance import maintain_repeatedly, publish_cron_schedules
from headwater.cli.options import Dsn, Json, examples, parse_duration
from headwater.log.model import MaintenanceResult

app = typer.Typer()

MIN_INTERVAL: Final = timedelta(milliseconds=100)


@app.command(epilog=examples("headwater maintain", "headwater maintain --every 60s"))
def maintain(
    context: typer.Context,
    every: Annotated[
        timedelta | None,
        typer.Option(
            parser=parse_duration, metavar="DURATION", help="Repeat at this interval until Ctrl-C. At least 100ms."
        ),
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Run maintenance of the log, once or at an interval.

    Maintenance publishes due scheduled events and cron schedules, returns the events of expired leases to their
    queues, creates segments, and removes events according to retention.

    Followers, workers and servers run maintenance too, so this is needed only if none of them runs. Several may run
    at once.
    """
    if every is not None and every < MIN_INTERVAL:
        raise typer.BadParameter("--every must be at least 100ms")
    with session(context).log(dsn) as log:
        if every is None:
            _print(log.maintain(), publish_cron_schedules(log), as_json=as_json)
            return
        try:
            maintain_repeatedly(
                log,
                every_seconds=every.total_seconds(),
                report=lambda maintenance, cron_schedules: _print(maintenance, cron_schedules, as_json=as_json),
            )
        except KeyboardInterrupt:
            return


def _print(maintenance: MaintenanceResult, cron_schedules: int, *, as_json: bool) -> None:
    if as_json:
        output.emit({**output.to_json_value(maintenance), "cron_schedules": cron_schedules})
    elif maintenance.busy:
        output.print_line("another process is running maintenance")
    else:
        output.print_line(
            f"published {maintenance.released} scheduled events and {cron_schedules} cron schedules, "
            f"created {maintenance.segments_made} segments, "
            f"dropped {maintenance.segments_dropped}, removed {maintenance.events_swept} events"
        )
