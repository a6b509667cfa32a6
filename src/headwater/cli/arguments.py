"""How what is typed becomes a value: times, durations, headers; and the options that every command has."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import typer

from headwater.cli import output

_UNITS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")


def duration(text: str) -> timedelta:
    """A length of time, such as 30s, 5m, 1h30m, 7d or 2w."""
    if not re.fullmatch(rf"(?:{_PART.pattern})+", text):
        raise typer.BadParameter(f"{text!r} is no duration: write 30s, 5m, 1h30m, 7d or 2w")
    try:
        return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)))
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is longer than can be counted") from None


def instant(text: str) -> datetime:
    """A point in time in ISO form; without a zone it is local time."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is no time: write 2026-03-01T12:00:00Z") from None


def past_instant(text: str) -> datetime:
    """A point in time in ISO form, or how long ago it was."""
    if not re.fullmatch(rf"(?:{_PART.pattern})+", text):
        try:
            return instant(text)
        except typer.BadParameter:
            raise typer.BadParameter(
                f"{text!r} is no time: write 2026-03-01T12:00:00Z, or 5m for five minutes ago"
            ) from None
    try:
        return datetime.now(UTC) - duration(text)
    except OverflowError:
        raise typer.BadParameter(f"{text!r} ago is before the calendar begins") from None


def header(text: str) -> tuple[str, str]:
    """One header as NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise typer.BadParameter(f"{text!r} is no header: write name=value")
    return name, value


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(("Examples:" if len(lines) > 1 else "Example:", *(line.replace("[", r"\[") for line in lines)))


Dsn = Annotated[
    str | None,
    typer.Option("--dsn", metavar="DSN", help="The Postgres to use. Goes before HEADWATER_DSN and `headwater up`."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.", show_default=False)]
Topics = Annotated[list[str] | None, typer.Argument(metavar="[TOPIC]...", help="Topics; none: the whole log.")]
After = Annotated[int | None, typer.Option(metavar="POSITION", min=0, help="Start after this position.")]
Since = Annotated[
    datetime | None,
    typer.Option(parser=past_instant, metavar="TIME", help="Start at this time: ISO, or 5m for five minutes ago."),
]
SkipExpired = Annotated[bool, typer.Option("--skip-expired", help="Pass over what retention took.", show_default=False)]


def json_object(text: str) -> Any:
    """A JSON object, as parameters of a filter are."""
    try:
        parsed = output.parse_json(text)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise typer.BadParameter("params are a JSON object")
    return parsed
