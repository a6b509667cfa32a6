"""What a command says: tables for people, JSON for programs, errors for both."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, NoReturn, get_type_hints

import typer
from rich.console import Console

from headwater.cli import exit_codes
from headwater.cli.exit_codes import NotConfirmed
from headwater.errors import HeadwaterError
from headwater.model import Event


def progress_console() -> Console:
    """Standard error, for what only a terminal should show."""
    return Console(stderr=True, highlight=False, emoji=False)


def say(text: str) -> None:
    """One line for people."""
    print(text, flush=True)


def note(text: str) -> None:
    """One line for people beside the output proper."""
    print(text, file=sys.stderr, flush=True)


# --- JSON ----------------------------------------------------------------------------------------------------


@cache
def _field_names(kind: type) -> tuple[tuple[str, str], ...]:
    """A value's fields with their names in JSON, where a duration says its unit."""
    hints = get_type_hints(kind)
    return tuple(
        (field.name, f"{field.name}_seconds" if "timedelta" in str(hints[field.name]) else field.name)
        for field in fields(kind)
    )


def plain(value: Any) -> Any:
    """A value as JSON can hold it: times in ISO form and UTC, durations in seconds, bytes as text or base64."""
    if is_dataclass(value) and not isinstance(value, type):
        return {shown: plain(getattr(value, name)) for name, shown in _field_names(type(value))}
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return _readable(value)[0]
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def dumped(value: Any) -> str:
    return json.dumps(plain(value), ensure_ascii=False)


def emit(value: Any) -> None:
    """One JSON document."""
    print(dumped(value), flush=True)


def _readable(value: bytes | None) -> tuple[str | None, str | None]:
    """Bytes as text if they are text, else as base64; and which of both."""
    if value is None:
        return None, None
    try:
        return value.decode(), "text"
    except UnicodeDecodeError:
        return base64.b64encode(value).decode(), "base64"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def parse_json(text: str | bytes) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""
    return json.loads(text, parse_constant=_refuse_constant)


def _json_payload(event: Event) -> str | None:
    """A payload that is JSON, on one line and otherwise to the letter; None if it is something else."""
    if event.payload is None or event.content_type is None or not event.content_type.startswith("application/json"):
        return None
    try:
        text = event.payload.decode()
        parse_json(text)
    except (ValueError, RecursionError):
        return None
    # Inside a JSON string a line break is written as \n, so a bare one is only white space.
    return text.replace("\n", " ").replace("\r", " ")


def event_json(event: Event) -> str:
    """An event as one line of JSON; `publish --envelope` takes it as it is."""
    key, key_encoding = _readable(event.key)
    rest: dict[str, Any] = {
        "position": event.position,
        "topic": event.topic,
        "partition": event.partition,
        "topic_offset": event.topic_offset,
        "key": key,
        "key_encoding": key_encoding,
        "type": event.type,
        "routing_key": event.routing_key,
        "headers": event.headers,
        "content_type": event.content_type,
        "event_id": event.event_id,
        "published_at": event.published_at,
    }
    body = _json_payload(event)
    if body is None:
        payload, encoding = _readable(event.payload)
        return dumped({**rest, "payload_encoding": encoding, "payload": payload})
    return f'{dumped({**rest, "payload_encoding": "json"})[:-1]}, "payload": {body}}}'


# --- tables --------------------------------------------------------------------------------------------------


def visible(text: str) -> str:
    """Text that cannot steer the terminal it is shown on."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: Any) -> str:
    """A value as a person reads it in a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, datetime):
        return value.astimezone().isoformat(" ", "milliseconds")
    if isinstance(value, timedelta):
        return shown_duration(value)
    if isinstance(value, bytes):
        text, encoding = _readable(value)
        return f"base64:{text}" if encoding == "base64" else visible(text or "")
    if isinstance(value, list | tuple):
        return ", ".join(shown(item) for item in value)
    return visible(str(value))


def shown_duration(value: timedelta) -> str:
    """A duration in its two largest units."""
    seconds = value.total_seconds()
    if seconds < 0:
        return f"-{shown_duration(-value)}"
    if seconds < 60:
        return f"{seconds:.3g}s"
    parts = []
    rest = int(seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2])


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str = "nothing") -> None:
    """A table for people; `empty` is said instead of one without rows. Only a terminal cuts a line to its width."""
    cells = [[shown(value) for value in row] for row in rows]
    if not cells:
        note(empty)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for number, row in enumerate([columns, *cells]):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if limit is not None and len(line) > limit:
            line = f"{line[: limit - 1]}…"
        typer.secho(line, bold=number == 0)


def at_least(count: int, is_more: bool) -> str:
    """A count that may be a lower bound: 1000+ says that there are more."""
    return f"{count}+" if is_more else str(count)


def facts(value: Any) -> None:
    """One value, a line for each of its fields. A count and what says that it is a lower bound are one line."""
    found = {field.name: getattr(value, field.name) for field in fields(value)}
    for name in [name for name in found if name.endswith("_is_more")]:
        is_more, counted = found.pop(name), name.removesuffix("_is_more")
        counted = counted if counted in found else f"{counted}_events"
        found[counted] = at_least(found[counted], is_more)
    pairs = list(found.items())
    width = max(len(name) for name, _ in pairs)
    for name, item in pairs:
        print(f"{name.replace('_', ' '):<{width}}  {shown(item)}")


def payload_text(event: Event) -> str:
    """A payload as a person reads it."""
    return "-" if event.payload is None else shown(event.payload)


def event_line(event: Event) -> str:
    """An event as one line, for people who watch."""
    parts = [f"{event.position:>8}", shown(event.published_at), event.topic, shown(event.key), shown(event.type)]
    return "  ".join([*parts, payload_text(event)])


# --- errors and questions ------------------------------------------------------------------------------------


def error_document(error: HeadwaterError) -> dict[str, Any]:
    """An error for programs."""
    return {
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "detail": error.detail,
        "exit_code": exit_codes.code_for(type(error)),
    }


def report(error: HeadwaterError, *, as_json: bool) -> int:
    """Say on standard error what went wrong; returns the exit code."""
    if as_json:
        note(dumped(error_document(error)))
    else:
        note(f"error: {visible_lines(error.message)}")
        if error.hint:
            note(f"  {visible_lines(error.hint)}")
    return exit_codes.code_for(type(error))


def visible_lines(text: str) -> str:
    return "\n".join(visible(line.replace("\t", "    ")) for line in text.splitlines())


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is lost. Where nobody can answer, only --yes will do."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise NotConfirmed(f"not confirmed: {question}", hint="Say --yes where nobody can be asked.")
    if not typer.confirm(question, err=True):
        raise NotConfirmed("nothing was done")
