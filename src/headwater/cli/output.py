"""Output of commands: text and tables for people, JSON for programs, errors in both formats."""

from __future__ import annotations

import base64
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

import typer

from headwater.cli import exit_codes
from headwater.cli.exit_codes import NotConfirmed
from headwater.errors import HeadwaterError
from headwater.log.model import Event

if TYPE_CHECKING:
    from rich.console import Console


def progress_console() -> Console:
    """A console on standard error, for progress bars."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, emoji=False)


def print_line(text: str) -> None:
    """Print one line to standard output."""
    print(text, flush=True)


def print_status(text: str) -> None:
    """Print one line to standard error."""
    print(text, file=sys.stderr, flush=True)


# --- JSON ----------------------------------------------------------------------------------------------------


@cache
def _field_names(kind: type) -> tuple[tuple[str, str], ...]:
    """The fields of a dataclass and their names in JSON; a duration gets the suffix `_seconds`."""
    hints = get_type_hints(kind)
    return tuple(
        (name, f"{name}_seconds" if "timedelta" in str(hints[name]) else name) for name in _ordered_fields(kind)
    )


def _ordered_fields(kind: type) -> list[str]:
    """The fields of a dataclass: its own, then those that it inherits, such as its settings."""
    own = inspect.get_annotations(kind)
    return sorted((field.name for field in fields(kind)), key=lambda name: name not in own)


def to_json_value(value: Any) -> Any:
    """Convert a value for JSON: times in ISO 8601 and UTC, durations in seconds, bytes as text or base64."""
    if is_dataclass(value) and not isinstance(value, type):
        return {json_name: to_json_value(getattr(value, name)) for name, json_name in _field_names(type(value))}
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return _bytes_to_text(value)[0]
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: to_json_value(item) for name, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): to_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return value


def to_json(value: Any) -> str:
    return json.dumps(to_json_value(value), ensure_ascii=False)


def emit(value: Any) -> None:
    """Print one JSON document on one line."""
    print(to_json(value), flush=True)


def print_result(document: Any, text: str, *, as_json: bool) -> None:
    """Print the result of a command: the document as JSON, or the text."""
    if as_json:
        emit(document)
    else:
        print_line(text)


def _bytes_to_text(value: bytes | None) -> tuple[str | None, str | None]:
    """Return bytes as text if they are UTF-8, otherwise as base64; and the name of the encoding."""
    if value is None:
        return None, None
    try:
        return value.decode(), "text"
    except UnicodeDecodeError:
        return base64.b64encode(value).decode(), "base64"


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly: NaN and Infinity are rejected."""
    return json.loads(text, parse_constant=_reject_constant)


# --- tables --------------------------------------------------------------------------------------------------


def escape_control(text: str) -> str:
    """Escape control characters, so that text cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_value(value: Any) -> str:
    """Format a value for people."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.astimezone().isoformat(" ", "milliseconds")
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, bytes):
        text, encoding = _bytes_to_text(value)
        return f"base64:{text}" if encoding == "base64" else escape_control(text or "")
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item) for item in value)
    return escape_control(str(value))


def format_duration(value: timedelta) -> str:
    """Format a duration in its two largest units."""
    seconds = value.total_seconds()
    if seconds < 0:
        return f"-{format_duration(-value)}"
    if seconds < 60:
        return f"{seconds:.3g}s"
    parts = []
    rest = int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2])


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str = "none") -> None:
    """Print a table, or `empty` if there are no rows. On a terminal, lines are cut to its width."""
    cells = [[format_value(value) for value in row] for row in rows]
    if not cells:
        print_status(empty)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for number, row in enumerate([columns, *cells]):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if limit is not None and len(line) > limit:
            line = f"{line[: limit - 1]}…"
        typer.secho(line, bold=number == 0)


def print_list(
    items: Sequence[Any],
    columns: Mapping[str, str | Callable[[Any], Any]],
    *,
    as_json: bool,
    document: Any = None,
    empty: str = "none",
) -> None:
    """Print items as a table, or as JSON; `document` is the JSON if it is not the items. A column is an attribute of an
    item, or a function of it."""
    if as_json:
        emit(items if document is None else document)
        return
    values = [attrgetter(column) if isinstance(column, str) else column for column in columns.values()]
    print_table(tuple(columns), ([value(item) for value in values] for item in items), empty=empty)


def format_count(count: int, is_more: bool) -> str:
    """Format a count; a lower bound gets a plus sign, such as 1000+."""
    return f"{count}+" if is_more else str(count)


def print_fields(value: Any) -> None:
    """Print the fields of a dataclass, one per line. A count and its `_is_more` flag are one line."""
    found = {name: getattr(value, name) for name in _ordered_fields(type(value))}
    for name in [name for name in found if name.endswith("_is_more")]:
        is_more, counted = found.pop(name), name.removesuffix("_is_more")
        counted = counted if counted in found else f"{counted}_events"
        found[counted] = format_count(found[counted], is_more)
    pairs = list(found.items())
    width = max(len(name) for name, _ in pairs)
    for name, item in pairs:
        print(f"{name.replace('_', ' '):<{width}}  {format_value(item)}")


def format_payload(event: Event) -> str:
    """Format a payload for people."""
    return "-" if event.payload is None else format_value(event.payload)


def format_event(event: Event) -> str:
    """Format an event as one line."""
    parts = [
        f"{event.position:>8}",
        format_value(event.published_at),
        event.topic,
        format_value(event.key),
        format_value(event.type),
    ]
    return "  ".join([*parts, format_payload(event)])


# --- errors and confirmation ------------------------------------------------------------------------------------


def error_document(error: HeadwaterError) -> dict[str, Any]:
    """An error as a JSON object."""
    return {
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "detail": error.detail,
        "exit_code": exit_codes.code_for(type(error)),
    }


def report_error(error: HeadwaterError, *, as_json: bool) -> int:
    """Print an error to standard error; returns the exit code."""
    if as_json:
        print_status(to_json(error_document(error)))
    else:
        print_status(f"error: {escape_lines(error.message)}")
        if error.hint:
            print_status(f"  {escape_lines(error.hint)}")
    return exit_codes.code_for(type(error))


def escape_lines(text: str) -> str:
    return "\n".join(escape_control(line.replace("\t", "    ")) for line in text.splitlines())


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation. Without a terminal, --yes is required."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise NotConfirmed(f"not confirmed: {question}", hint="Standard input is not a terminal: use --yes to confirm.")
    if not typer.confirm(question, err=True):
        raise NotConfirmed("cancelled")
