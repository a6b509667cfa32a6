"""`headwater settings`: show and change the settings of the log."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer

from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import session
from headwater.cli.options import Dsn, Json, examples, parse_duration
from headwater.log.model import LogSettings

app = typer.Typer(help="Show and change the settings of the log.", no_args_is_help=True)


@app.command(epilog=examples("headwater settings show"))
def show(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """Show the settings."""
    with session(context).log(dsn) as log:
        _print(log.settings(), as_json=as_json)


@app.command("set", epilog=examples("headwater settings set --segment-interval 6h --auto-create-topics"))
def set_settings(
    context: typer.Context,
    segment_interval: Annotated[
        timedelta | None,
        typer.Option(
            parser=parse_duration, metavar="DURATION", help="Maximum time that events are written to one segment."
        ),
    ] = None,
    segments_ahead: Annotated[int | None, typer.Option(help="Number of segments to create ahead.")] = None,
    auto_create_topics: Annotated[
        bool | None,
        typer.Option(
            "--auto-create-topics/--no-auto-create-topics", help="Whether publishing creates a missing topic."
        ),
    ] = None,
    kafka_offsets_kept: Annotated[
        timedelta | None,
        typer.Option(
            parser=parse_duration,
            metavar="DURATION",
            help="How long to keep the offsets of a Kafka consumer group without members.",
        ),
    ] = None,
    max_publisher_seconds: Annotated[
        float | None,
        typer.Option(help="Terminate publishing transactions that stay open longer. 0: never."),
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Change settings. Options that are not given stay unchanged."""
    changes: dict[str, Any] = {
        "segment_interval": segment_interval,
        "segments_ahead": segments_ahead,
        "auto_create_topics": auto_create_topics,
        "kafka_offsets_kept": kafka_offsets_kept,
        "max_publisher_seconds": max_publisher_seconds,
    }
    with session(context).log(dsn) as log, audit(log, "settings.set", "log", changes) as log:
        changed = log.change_settings(
            segment_interval=segment_interval,
            segments_ahead=segments_ahead,
            auto_create_topics=auto_create_topics,
            kafka_offsets_kept=kafka_offsets_kept,
            max_publisher_seconds=max_publisher_seconds,
        )
        _print(changed, as_json=as_json)


def _print(settings: LogSettings, *, as_json: bool) -> None:
    if as_json:
        output.emit(settings)
    else:
        output.print_fields(settings)
