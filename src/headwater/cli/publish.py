"""`headwater publish`: one event from the command line, or a stream of them from standard input."""

from __future__ import annotations

import base64
import binascii
import os
import select
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, NamedTuple

import psycopg
import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import headwater
from headwater.calls import JSON_TYPE
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, duration, examples, header, instant
from headwater.cli.connection import session
from headwater.errors import HeadwaterError, InvalidEvent, InvalidRequest, LogUnavailable
from headwater.model import NewEvent

app = typer.Typer()

# Above the largest payload a topic can take, escaped as JSON may have to.
LINE_BYTES: Final = 512 * 1024 * 1024
READ_BYTES: Final = 1 << 20
# How long the input may pause before what has come is published.
PAUSE_SECONDS: Final = 0.05

ENVELOPE_FIELDS: Final = frozenset(
    {"payload", "payload_encoding", "key", "key_encoding", "type", "routing_key", "headers", "content_type", "event_id"}
)
# What `read --json` says beside them; the log decides these anew.
IGNORED_FIELDS: Final = frozenset({"position", "topic", "partition", "topic_offset", "published_at"})


class Line(NamedTuple):
    """One line of the input as an event."""

    number: int
    event: NewEvent


@dataclass(frozen=True, slots=True)
class Template:
    """What the options say of every event of the input."""

    envelope: bool
    raw: bool
    key: str | None
    type: str | None
    routing_key: str | None
    headers: Mapping[str, str] | None
    content_type: str | None

    def event(self, line: bytes) -> NewEvent:
        """The event that a line stands for; ValueError or InvalidEvent if it stands for none."""
        if self.envelope:
            return self._opened(output.parse_json(line))
        if not self.raw:
            output.parse_json(line)
        return NewEvent(
            line, self.key, self.type, self.routing_key, self.headers, None, _content_type(self.raw, self.content_type)
        )

    def _opened(self, envelope: Any) -> NewEvent:
        if not isinstance(envelope, dict) or "payload" not in envelope:
            raise InvalidEvent('an envelope is a JSON object with a "payload"')
        if unknown := sorted(envelope.keys() - ENVELOPE_FIELDS - IGNORED_FIELDS):
            raise InvalidEvent(f"an envelope has no field {', '.join(unknown)}")
        for name in ("key", "type", "routing_key", "content_type", "event_id"):
            if not isinstance(envelope.get(name), str | None):
                raise InvalidEvent(f"the {name} of an envelope is text")
        headers = envelope.get("headers")
        if not isinstance(headers, dict | None):
            raise InvalidEvent("the headers of an envelope are a JSON object")
        merged = {**(self.headers or {}), **(headers or {})}
        return NewEvent(
            payload=_decoded(envelope["payload"], envelope.get("payload_encoding")),
            key=self.key
            if envelope.get("key") is None
            else _decoded_key(envelope["key"], envelope.get("key_encoding")),
            type=envelope.get("type") or self.type,
            routing_key=envelope.get("routing_key") or self.routing_key,
            headers=merged or headers,
            event_id=envelope.get("event_id"),
            content_type=envelope.get("content_type") or self.content_type,
        )


@app.command(
    epilog=examples(
        """headwater publish orders '{"id": 42}' --key order-42 --type OrderPlaced""",
        "headwater publish orders --file invoice.pdf --raw --content-type application/pdf",
        """headwater publish reminders '{"id": 42}' --delay 2h""",
        "headwater publish orders < orders.jsonl",
        "headwater read orders --json | headwater publish copy-of-orders --envelope",
    )
)
def publish(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Where to.", show_default=False)],
    payload: Annotated[
        str | None, typer.Argument(metavar="[PAYLOAD]", help="JSON; without it, JSON lines come from standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option(metavar="PATH", help="The payload is what this file holds.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The payload is what it is, not JSON.")] = False,
    envelope: Annotated[
        bool, typer.Option("--envelope", help="Lines are objects: payload, key, type, routing_key, headers, event_id.")
    ] = False,
    key: Annotated[str | None, typer.Option(help="Events of one key keep their order.")] = None,
    type: Annotated[str | None, typer.Option(help="What kind of event it is.")] = None,
    routing_key: Annotated[str | None, typer.Option(help="What bindings look at, such as orders.eu.")] = None,
    headers: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="A header; again for more.")
    ] = None,
    content_type: Annotated[str | None, typer.Option(metavar="TYPE", help="What the bytes are.")] = None,
    event_id: Annotated[str | None, typer.Option(help="Publishing the same id again changes nothing.")] = None,
    delay: Annotated[
        timedelta | None, typer.Option(parser=duration, metavar="DURATION", help="Enter the log so much later.")
    ] = None,
    deliver_at: Annotated[
        datetime | None, typer.Option(parser=instant, metavar="TIME", help="Enter the log at this time (ISO).")
    ] = None,
    commit_every: Annotated[int, typer.Option(min=1, max=100_000, help="How many lines make one transaction.")] = 1000,
    atomic: Annotated[bool, typer.Option("--atomic", help="All lines or none, in one transaction.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Publish one event, or every line of standard input.

    A line that is refused stops the stream: the lines before it are published, those from it on are not.
    """
    given_headers = dict(header(text) for text in headers or ()) or None
    single = payload is not None or file is not None
    if payload is not None and file is not None:
        raise typer.BadParameter("say the payload once: as an argument or with --file")
    if single and (envelope or atomic):
        raise typer.BadParameter("--envelope and --atomic are for lines from standard input")
    if not single and (event_id is not None or delay is not None or deliver_at is not None):
        raise typer.BadParameter("--event-id, --delay and --deliver-at are for one event; give it a PAYLOAD")
    if delay is not None and deliver_at is not None:
        raise typer.BadParameter("say when once: --delay or --deliver-at")
    if envelope and raw:
        raise typer.BadParameter("an envelope is JSON: leave out --raw")
    if not single and sys.stdin.isatty():
        raise typer.BadParameter("no payload: give one, or pipe JSON lines to standard input")

    if not single:
        template = Template(envelope, raw, key, type, routing_key, given_headers, content_type)
        with session(context).log(dsn) as log:
            _publish_lines(log, topic, template, commit_every=None if atomic else commit_every, as_json=as_json)
        return

    body = _body(payload, file)
    if not raw:
        try:
            output.parse_json(body)
        except (ValueError, RecursionError) as error:
            raise InvalidEvent(f"the payload is not JSON: {error}", hint="Say --raw to send it as it is.") from None
    due_at = deliver_at if delay is None else datetime.now(UTC) + delay
    with session(context).log(dsn) as log:
        event = NewEvent(body, key, type, routing_key, given_headers, event_id, _content_type(raw, content_type))
        if due_at is not None and due_at > datetime.now(UTC):
            _schedule_one(log, topic, event, due_at, as_json=as_json)
        else:
            _publish_one(log, topic, event, as_json=as_json)


def _publish_one(log: headwater.Headwater, topic: str, event: NewEvent, *, as_json: bool) -> None:
    (position,) = log.publish_batch(topic, [event])
    if as_json:
        output.emit({"topic": topic, "position": position, "published": 1})
    elif position is None:
        output.say(f"an event with this id is scheduled for {topic} already")
    else:
        output.say(f"published to {topic} at position {position}")


def _schedule_one(log: headwater.Headwater, topic: str, event: NewEvent, due_at: datetime, *, as_json: bool) -> None:
    schedule_id = log.schedule(
        topic,
        event.payload,
        deliver_at=due_at,
        key=event.key,
        type=event.type,
        routing_key=event.routing_key,
        headers=event.headers,
        event_id=event.event_id,
        content_type=event.content_type,
    )
    if as_json:
        output.emit({"topic": topic, "schedule_id": schedule_id, "due_at": due_at})
    elif schedule_id is None:
        output.say(f"an event with this id is in {topic} already")
    else:
        output.say(f"scheduled for {topic}, due {output.shown(due_at)}, under id {schedule_id}")


def _body(payload: str | None, file: Path | None) -> bytes:
    if payload is not None:
        # What the shell handed over, to the bit.
        return os.fsencode(payload)
    assert file is not None
    try:
        return file.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from None


def _content_type(raw: bool, given: str | None) -> str | None:
    return given if raw or given is not None else JSON_TYPE


def _decoded(payload: Any, encoding: object) -> Any:
    if payload is None or encoding in (None, "json"):
        return payload
    if isinstance(payload, str) and encoding == "text":
        return payload.encode()
    if isinstance(payload, str) and encoding == "base64":
        return _from_base64(payload)
    raise InvalidEvent('a payload_encoding is "json", or "text" or "base64" of a text')


def _decoded_key(key: str, encoding: object) -> str | bytes:
    if encoding in (None, "text"):
        return key
    if encoding == "base64":
        return _from_base64(key)
    raise InvalidEvent('a key_encoding is "text" or "base64"')


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise InvalidEvent(f"not base64: {error}") from None


# --- lines ---------------------------------------------------------------------------------------------------


def _publish_lines(
    log: headwater.Headwater, topic: str, template: Template, *, commit_every: int | None, as_json: bool
) -> None:
    source: BinaryIO = sys.stdin.buffer
    source = getattr(source, "raw", source)
    # An unknown topic is said before any line is waited for; one that is made on demand is made now.
    log.publish_batch(topic, [])
    published = 0
    with _progress(source) as advance:
        lines = _events(source, template, advance)
        if commit_every is None:
            published = _publish_all(log, topic, lines)
        else:
            for batch in _batches(lines, commit_every):
                published += _publish_some(log, topic, batch, published)
    if as_json:
        output.emit({"topic": topic, "published": published})
    else:
        output.say(f"published {published} event{'' if published == 1 else 's'} to {topic}")


def _publish_all(log: headwater.Headwater, topic: str, lines: Iterator[Line | HeadwaterError | None]) -> int:
    """All lines or none."""

    def events() -> Iterator[NewEvent]:
        for line in lines:
            if isinstance(line, HeadwaterError):
                raise line
            if line is not None:
                yield line.event

    try:
        return log.publish_many(topic, events())
    except HeadwaterError as error:
        if isinstance(error, LogUnavailable):
            raise _with_outcome(
                error, "it is not known whether the lines are published: all are, or none", {}
            ) from error
        raise _with_outcome(error, "nothing is published", {"published": 0}) from error


def _publish_some(
    log: headwater.Headwater, topic: str, batch: list[Line | HeadwaterError], published_before: int
) -> int:
    """One transaction of lines. If one is refused, those before it are published and the error says so."""
    refusal = next((line for line in batch if isinstance(line, HeadwaterError)), None)
    good = [line for line in batch if isinstance(line, Line)]
    try:
        if good:
            log.publish_many(topic, (line.event for line in good))
    except LogUnavailable as error:
        raise _with_outcome(
            error,
            f"{published_before} events are published for certain; whether those of the lines "
            f"{good[0].number} to {good[-1].number} are is not known",
            {
                "published": published_before,
                "uncertain_from_line": good[0].number,
                "uncertain_to_line": good[-1].number,
            },
        ) from error
    except InvalidRequest as error:
        culprit, reason = _first_refused(log, topic, good, error)
        if culprit > 0:
            log.publish_many(topic, (line.event for line in good[:culprit]))
        raise _stopped(good[culprit].number, reason, published_before + culprit) from error
    except HeadwaterError as error:
        raise _with_outcome(
            error, f"{published_before} events are published, no more", {"published": published_before}
        ) from error
    if refusal is not None:
        raise _stopped(refusal.detail["line"], refusal, published_before + len(good))
    return len(good)


def _first_refused(
    log: headwater.Headwater, topic: str, lines: list[Line], refusal: HeadwaterError
) -> tuple[int, HeadwaterError]:
    """Which of these lines, one of which was refused, is the first to be, found by halving; and why."""
    low, high = 0, len(lines)
    while high - low > 1:
        middle = (low + high) // 2
        found = _refusal(log, topic, lines[low:middle])
        if found is None:
            low = middle
        else:
            high = middle
    return low, _refusal(log, topic, lines[low:high]) or refusal


def _refusal(log: headwater.Headwater, topic: str, lines: list[Line]) -> InvalidRequest | None:
    """What the log says to these lines, if it refuses them. Nothing is published."""
    try:
        with suppress(psycopg.Rollback), log.transaction() as connection:
            log.publish_batch(topic, [line.event for line in lines], connection=connection)
            raise psycopg.Rollback
    except InvalidRequest as error:
        return error
    return None


def _stopped(number: int, reason: HeadwaterError, published: int) -> HeadwaterError:
    outcome = f"the {published} events before it are published; nothing from line {number} on is"
    if published == 0:
        outcome = "nothing is published"
    elif published == 1:
        outcome = f"the event before it is published; nothing from line {number} on is"
    detail = {**reason.detail, "line": number, "published": published}
    return type(reason)(f"line {number}: {reason.message}; {outcome}", hint=reason.hint, detail=detail)


def _with_outcome(error: HeadwaterError, outcome: str, detail: Mapping[str, Any]) -> HeadwaterError:
    line = f"line {error.detail['line']}: " if "line" in error.detail else ""
    return type(error)(f"{line}{error.message}; {outcome}", hint=error.hint, detail={**error.detail, **detail})


class _Advance:
    """How far the input is read, for the progress bar."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task
        self.lines = 0

    def by(self, byte_count: int, line_count: int) -> None:
        self.lines += line_count
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=byte_count, lines=self.lines)


@contextmanager
def _progress(source: BinaryIO) -> Iterator[_Advance]:
    """A bar while lines are read, if somebody looks at it. Only of a file is it known how much is to come."""
    if not sys.stderr.isatty():
        yield _Advance(None, None)
        return
    columns = (BarColumn(), TextColumn("{task.fields[lines]:,} lines"), TimeElapsedColumn())
    with Progress(*columns, console=output.progress_console(), transient=True) as progress:
        yield _Advance(progress, progress.add_task("publish", total=_size(source), lines=0))


def _size(source: BinaryIO) -> int | None:
    try:
        status = os.fstat(source.fileno())
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _events(source: BinaryIO, template: Template, advance: _Advance) -> Iterator[Line | HeadwaterError | None]:
    """Every line as an event; None when the input pauses; an error, as the last, for a line that is no event."""
    number = 0
    for lines in _arriving(source):
        if lines is None:
            yield None
            continue
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                yield Line(number, template.event(line))
            except (ValueError, RecursionError) as error:
                yield InvalidEvent(f"not JSON: {error}", detail={"line": number})
                return
            except InvalidEvent as error:
                yield InvalidEvent(error.message, hint=error.hint, detail={**error.detail, "line": number})
                return
        advance.by(sum(map(len, lines)) + len(lines), len(lines))


def _arriving(source: BinaryIO) -> Iterator[list[bytes] | None]:
    """The lines of the input as they come; None before it would have to be waited for."""
    rest: list[bytes] = []
    rest_bytes = 0
    while True:
        if not _ready(source):
            yield None
        data = source.read(READ_BYTES)
        if not data:
            break
        *complete, last = data.split(b"\n")
        if complete:
            complete[0] = b"".join([*rest, complete[0]])
            rest, rest_bytes = [], 0
            yield complete
        rest.append(last)
        rest_bytes += len(last)
        if rest_bytes > LINE_BYTES:
            raise InvalidEvent(f"a line of more than {LINE_BYTES} bytes")
    if rest_bytes:
        yield [b"".join(rest)]


def _ready(source: BinaryIO) -> bool:
    try:
        return bool(select.select([source], [], [], PAUSE_SECONDS)[0])
    except (OSError, ValueError, TypeError):
        # Nothing that can be waited for: it holds all there is.
        return True


def _batches(lines: Iterator[Line | HeadwaterError | None], size: int) -> Iterator[list[Line | HeadwaterError]]:
    """Lines by the transaction: full ones while the input flows, what there is when it pauses."""
    batch: list[Line | HeadwaterError] = []
    for line in lines:
        if line is not None:
            batch.append(line)
        if batch and (line is None or len(batch) >= size):
            yield batch
            batch = []
    if batch:
        yield batch
