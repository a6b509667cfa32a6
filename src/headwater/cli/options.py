"""Options that many commands share, and parsers for their values: durations, times, headers, JSON."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import typer

from headwater.cli import output

_UNITS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")


def parse_duration(text: str) -> timedelta:
    """Parse a duration such as 30s, 5m, 1h30m, 7d or 2w."""
    if not re.fullmatch(rf"(?:{_PART.pattern})+", text):
        raise typer.BadParameter(f"invalid duration {text!r}: expected a value such as 30s, 5m, 1h30m, 7d or 2w")
    try:
        return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)))
    except OverflowError:
        raise typer.BadParameter(f"duration {text!r} is too long") from None


def parse_time(text: str) -> datetime:
    """Parse a time in ISO 8601 format; without a time zone it is local time."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"invalid time {text!r}: expected ISO 8601 format, such as 2026-03-01T12:00:00Z"
        ) from None


def parse_past_time(text: str) -> datetime:
    """Parse a time in ISO 8601 format, or a duration before now."""
    if not re.fullmatch(rf"(?:{_PART.pattern})+", text):
        try:
            return parse_time(text)
        except typer.BadParameter:
            raise typer.BadParameter(
                f"invalid time {text!r}: expected ISO 8601 format, such as 2026-03-01T12:00:00Z, "
                "or a duration such as 5m for five minutes ago"
            ) from None
    try:
        return datetime.now(UTC) - parse_duration(text)
    except OverflowError:
        raise typer.BadParameter(f"invalid time {text!r}: before the year 1") from None


def parse_header(text: str) -> tuple[str, str]:
    """Parse one header given as NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"invalid header {text!r}: expected NAME=VALUE")
    return name, value


def parse_json_object(text: str) -> Any:
    """Parse a JSON object, such as the parameters of a filter."""
    try:
        parsed = output.parse_json(text)
    except ValueError as error:
        raise typer.BadParameter(f"invalid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise typer.BadParameter("expected a JSON object")
    return parsed


def examples(*lines: str) -> str:
    """Format the examples at the end of a command's help."""
    return "\n\n".join(("Examples:" if len(lines) > 1 else "Example:", *(line.replace("[", r"\[") for line in lines)))


Dsn = Annotated[
    str | None,
    typer.Option("--dsn", metavar="DSN", help="Postgres to connect to. Overrides HEADWATER_DSN and `headwater up`."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.", show_default=False)]
Topics = Annotated[list[str] | None, typer.Argument(metavar="[TOPIC]...", help="Topics to read. Default: all topics.")]
After = Annotated[int | None, typer.Option(metavar="POSITION", min=0, help="Start after this position.")]
Since = Annotated[
    datetime | None,
    typer.Option(
        parser=parse_past_time, metavar="TIME", help="Start at this time: ISO 8601, or 5m for five minutes ago."
    ),
]
SkipExpired = Annotated[
    bool,
    typer.Option("--skip-expired", help="Skip events removed by retention instead of failing.", show_default=False),
]
AllowNetwork = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NETWORK",
        help="Allow webhook receivers in this private network, such as 10.0.0.0/8. Repeat for several.",
    ),
]
