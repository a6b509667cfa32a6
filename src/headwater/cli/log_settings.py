"""`headwater settings`: the settings of the whole log."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import typer

from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, duration, examples
from headwater.cli.audited import acting
from headwater.cli.connection import session
from headwater.model import LogSettings

app = typer.Typer(help="Settings of the whole log, kept in the database.", no_args_is_help=True)


@app.command(epilog=examples("headwater settings show"))
def show(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """Show the settings."""
    with session(context).log(dsn) as log:
        _tell(log.settings(), as_json=as_json)


@app.command("set", epilog=examples("headwater settings set --segment-interval 6h --auto-create-topics"))
def set_settings(
    context: typer.Context,
    segment_interval: Annotated[
        timedelta | None,
        typer.Option(parser=duration, metavar="DURATION", help="How long the log writes to one segment at most."),
    ] = None,
    segments_ahead: Annotated[int | None, typer.Option(help="How many segments are kept ready.")] = None,
    auto_create_topics: Annotated[
        bool | None,
        typer.Option("--auto-create-topics/--no-auto-create-topics", help="Whether publishing makes a missing topic."),
    ] = None,
    kafka_offsets_kept: Annotated[
        timedelta | None,
        typer.Option(
            parser=duration, metavar="DURATION", help="How long offsets of a Kafka group without members are kept."
        ),
    ] = None,
    max_publisher_seconds: Annotated[
        float | None,
        typer.Option(help="End a publishing transaction that stays open longer; 0: never."),
    ] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Change settings; those not named stay as they are."""
    changes: dict[str, Any] = {
        "segment_interval": segment_interval,
        "segments_ahead": segments_ahead,
        "auto_create_topics": auto_create_topics,
        "kafka_offsets_kept": kafka_offsets_kept,
        "max_publisher_seconds": max_publisher_seconds,
    }
    with session(context).log(dsn) as log, acting(log, "settings.set", "log", changes) as log:
        changed = log.change_settings(
            segment_interval=segment_interval,
            segments_ahead=segments_ahead,
            auto_create_topics=auto_create_topics,
            kafka_offsets_kept=kafka_offsets_kept,
            max_publisher_seconds=max_publisher_seconds,
        )
        _tell(changed, as_json=as_json)


def _tell(settings: LogSettings, *, as_json: bool) -> None:
    if as_json:
        output.emit(settings)
    else:
        output.facts(settings)
