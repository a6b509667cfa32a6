"""`headwater publish`: publish one event, or the lines of standard input."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final, NamedTuple

import psycopg
import typer

import headwater
from headwater.calls.encoding import JSON_TYPE
from headwater.cli import output
from headwater.cli.connection import session
from headwater.cli.exit_codes import Interrupted
from headwater.cli.options import Dsn, Json, examples, parse_duration, parse_header, parse_time
from headwater.errors import HeadwaterError, InvalidEvent, InvalidRequest, LogUnavailable
from headwater.log.cloud_events import new_event, parse_batch, parse_structured
from headwater.log.event_json import parse_event
from headwater.log.model import NewEvent

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

app = typer.Typer()

# Larger than the largest payload with JSON escapes; bounds memory.
MAX_LINE_BYTES: Final = 512 * 1024 * 1024
READ_BYTES: Final = 1 << 20
# After the input pauses for this long, the lines read so far are published.
PAUSE_SECONDS: Final = 0.05


class InputLine(NamedTuple):
    """An event and the number of its input line."""

    number: int
    event: NewEvent


@dataclass(frozen=True, slots=True)
class EventTemplate:
    """The options that apply to every event of the input."""

    envelope: bool
    cloudevents: bool
    raw: bool
    key: str | None
    type: str | None
    routing_key: str | None
    headers: Mapping[str, str] | None
    content_type: str | None

    def event(self, line: bytes) -> NewEvent:
        """Convert a line to an event; raises ValueError or InvalidEvent if it is not valid."""
        if self.cloudevents:
            return new_event(parse_structured(line.decode()))
        if self.envelope:
            return self._from_envelope(parse_event(line.decode(), content_type=self.content_type))
        if not self.raw:
            output.parse_json(line)
        return NewEvent(
            line, self.key, self.type, self.routing_key, self.headers, None, _content_type(self.raw, self.content_type)
        )

    def _from_envelope(self, given: NewEvent) -> NewEvent:
        """An event with what only the options give; headers are merged."""
        return given._replace(
            key=self.key if given.key is None else given.key,
            type=given.type or self.type,
            routing_key=given.routing_key or self.routing_key,
            headers={**(self.headers or {}), **(given.headers or {})} or None,
        )


@app.command(
    epilog=examples(
        """headwater publish orders '{"id": 42}' --key order-42 --type OrderPlaced""",
        "headwater publish orders --file invoice.pdf --raw --content-type application/pdf",
        """headwater publish reminders '{"id": 42}' --delay 2h""",
        "headwater publish orders < orders.jsonl",
        "headwater publish orders --skip 163000 < orders.jsonl",
        "headwater read orders --json | headwater publish copy-of-orders --envelope",
        "headwater publish orders --file order.json --cloudevents",
    )
)
def publish(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Topic to publish to.", show_default=False)],
    payload: Annotated[
        str | None,
        typer.Argument(metavar="[PAYLOAD]", help="Payload as JSON. Default: read JSON lines from standard input."),
    ] = None,
    file: Annotated[Path | None, typer.Option(metavar="PATH", help="Read the payload from this file.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Publish the payload as bytes; do not require JSON.")] = False,
    envelope: Annotated[
        bool,
        typer.Option(
            "--envelope",
            help="Lines are events as `read --json` prints them: objects with data (or text, base64), key, type, "
            "routing_key, headers, content_type and event_id.",
        ),
    ] = False,
    cloudevents: Annotated[
        bool,
        typer.Option(
            "--cloudevents",
            help="The payload is a CloudEvent in the JSON format, or an array of them; lines are one CloudEvent each.",
        ),
    ] = False,
    key: Annotated[str | None, typer.Option(help="Key; events with the same key stay in order.")] = None,
    type: Annotated[str | None, typer.Option(help="Type of the event.")] = None,
    routing_key: Annotated[str | None, typer.Option(help="Routing key for bindings, such as orders.eu.")] = None,
    headers: Annotated[
        list[str] | None, typer.Option("--header", metavar="NAME=VALUE", help="A header. Repeat for several.")
    ] = None,
    content_type: Annotated[str | None, typer.Option(metavar="TYPE", help="Content type of the payload.")] = None,
    event_id: Annotated[
        str | None, typer.Option(help="Id of the event; publishing the same id again has no effect.")
    ] = None,
    delay: Annotated[
        timedelta | None, typer.Option(parser=parse_duration, metavar="DURATION", help="Publish after this delay.")
    ] = None,
    deliver_at: Annotated[
        datetime | None, typer.Option(parser=parse_time, metavar="TIME", help="Publish at this time (ISO 8601).")
    ] = None,
    skip: Annotated[
        int, typer.Option(metavar="N", min=0, help="Skip the first N lines, such as those of an interrupted command.")
    ] = 0,
    commit_every: Annotated[int, typer.Option(min=1, max=100_000, help="Number of lines per transaction.")] = 1000,
    atomic: Annotated[bool, typer.Option("--atomic", help="Publish all lines in one transaction.")] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Publish one event, or each line of standard input as an event.

    An invalid line stops the command: the lines before it are published, the line itself and those after it are not.
    Ctrl-C stops it between two transactions, and prints with which --skip to continue.
    """
    given_headers = dict(parse_header(text) for text in headers or ()) or None
    single = payload is not None or file is not None
    if payload is not None and file is not None:
        raise typer.BadParameter("give the payload either as an argument or with --file")
    if single and (envelope or atomic or skip):
        raise typer.BadParameter("--envelope, --atomic and --skip apply only to lines from standard input")
    if not single and (event_id is not None or delay is not None or deliver_at is not None):
        raise typer.BadParameter("--event-id, --delay and --deliver-at apply only to one event: give PAYLOAD or --file")
    if delay is not None and deliver_at is not None:
        raise typer.BadParameter("give only one of --delay and --deliver-at")
    if cloudevents:
        others = (envelope, raw, key, type, routing_key, headers, content_type, event_id, delay, deliver_at)
        if any(one not in (None, False) for one in others):
            raise typer.BadParameter("--cloudevents cannot be combined with options that describe an event")
    if envelope and raw:
        raise typer.BadParameter("--envelope cannot be combined with --raw")
    if not single and sys.stdin.isatty():
        raise typer.BadParameter("no payload: give PAYLOAD or --file, or pipe JSON lines to standard input")

    if not single:
        template = EventTemplate(envelope, cloudevents, raw, key, type, routing_key, given_headers, content_type)
        with session(context).log(dsn) as log:
            _publish_lines(
                log, topic, template, skip=skip, commit_every=None if atomic else commit_every, as_json=as_json
            )
        return

    body = _body(payload, file)
    if cloudevents:
        with session(context).log(dsn) as log:
            _publish_cloud_events(log, topic, body, as_json=as_json)
        return
    if not raw:
        try:
            output.parse_json(body)
        except (ValueError, RecursionError) as error:
            raise InvalidEvent(
                f"the payload is not valid JSON: {error}", hint="Use --raw to publish it as bytes."
            ) from None
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
        output.print_line(f"an event with this id is already scheduled for topic {topic}")
    else:
        output.print_line(f"published to {topic} at position {position}")


def _publish_cloud_events(log: headwater.Headwater, topic: str, body: bytes, *, as_json: bool) -> None:
    """Publish one CloudEvent, or a batch in one transaction."""
    try:
        text = body.decode()
        given = parse_batch(text) if text.lstrip().startswith("[") else [parse_structured(text)]
    except (ValueError, RecursionError) as error:
        raise InvalidEvent(f"the payload is not a CloudEvent in the JSON format: {error}") from None
    if len(given) == 1:
        _publish_one(log, topic, new_event(given[0]), as_json=as_json)
        return
    log.publish_batch(topic, [new_event(one) for one in given])
    if as_json:
        output.emit({"topic": topic, "published": len(given)})
    else:
        output.print_line(f"published {len(given)} events to {topic}")


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
        output.print_line(f"topic {topic} already has an event with this id")
    else:
        output.print_line(f"scheduled event {schedule_id} for topic {topic}, due {output.format_value(due_at)}")


def _body(payload: str | None, file: Path | None) -> bytes:
    if payload is not None:
        # The exact bytes that the shell passed.
        return os.fsencode(payload)
    assert file is not None
    try:
        return file.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {file}: {error.strerror}") from None


def _content_type(raw: bool, given: str | None) -> str | None:
    return given if raw or given is not None else JSON_TYPE


# --- lines ---------------------------------------------------------------------------------------------------


class _Interruption:
    """Ctrl-C and SIGTERM end the command, but not within a commit: so what it reports to be published is exact.

    States: reading, where the signal raises KeyboardInterrupt; committing, where the first signal is noted and raises
    it after the commit, and a second one raises it at once.
    """

    def __init__(self) -> None:
        self._committing = False
        self._noted = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """In the block, the signals are handled. One that is ignored, as in a background job, stays ignored."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
        for number in before:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def after_commit(self) -> Iterator[None]:
        """In the block, the command commits and counts what it committed."""
        self.begin_commit()
        yield
        self._committing = False
        if self._noted:
            raise KeyboardInterrupt

    def begin_commit(self) -> None:
        self._committing = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._committing or self._noted:
            raise KeyboardInterrupt
        self._noted = True


@dataclass(slots=True)
class _Published:
    """What of the input is published."""

    published: int = 0
    # The last line that is published, or skipped.
    last_line: int = 0
    # The first and last line of the transaction that is being committed.
    committing: tuple[int, int] | None = None

    def interrupted(self) -> Interrupted:
        detail = {"published": self.published, "last_line": self.last_line}
        outcome = f"{self.published} event{' was' if self.published == 1 else 's were'} published"
        if self.published:
            outcome += f", up to line {self.last_line}"
        if self.committing is not None:
            first, last = self.committing
            return Interrupted(
                f"interrupted: {outcome}; unknown whether lines {first} to {last} were published",
                hint=f"Look at the last events of the topic; then continue with the same input and --skip {first - 1} "
                f"or --skip {last}.",
                detail={**detail, "uncertain_from_line": first, "uncertain_to_line": last},
            )
        hint = "Continue with the same input" + (f" and --skip {self.last_line}." if self.last_line else ".")
        return Interrupted(f"interrupted: {outcome}", hint=hint, detail=detail)


def _publish_lines(
    log: headwater.Headwater,
    topic: str,
    template: EventTemplate,
    *,
    skip: int,
    commit_every: int | None,
    as_json: bool,
) -> None:
    source: BinaryIO = sys.stdin.buffer
    source = getattr(source, "raw", source)
    interruption, progress = _Interruption(), _Published(last_line=skip)
    try:
        with interruption.handled(), _progress(source) as counter:
            # Fail for an unknown topic before reading input; with auto_create_topics, create the topic now.
            log.publish_batch(topic, [])
            lines = _events(source, template, counter, skip)
            if commit_every is None:
                progress.published = _publish_all(log, topic, lines, interruption)
            else:
                for batch in _batches(lines, commit_every):
                    with interruption.after_commit():
                        numbers = [line.number for line in batch if isinstance(line, InputLine)]
                        progress.committing = (numbers[0], numbers[-1]) if numbers else None
                        progress.published += _publish_some(log, topic, batch, progress.published)
                        progress.last_line = numbers[-1] if numbers else progress.last_line
                        progress.committing = None
    except KeyboardInterrupt:
        raise progress.interrupted() from None
    published = progress.published
    output.print_result(
        {"topic": topic, "published": published},
        f"published {published} event{'' if published == 1 else 's'} to {topic}",
        as_json=as_json,
    )


def _publish_all(
    log: headwater.Headwater,
    topic: str,
    lines: Iterator[InputLine | HeadwaterError | None],
    interruption: _Interruption,
) -> int:
    """Publish all lines in one transaction."""

    def events() -> Iterator[NewEvent]:
        for line in lines:
            if isinstance(line, HeadwaterError):
                raise line
            if line is not None:
                yield line.event
        # All lines were read; what follows is the commit.
        interruption.begin_commit()

    try:
        return log.publish_many(topic, events())
    except HeadwaterError as error:
        if isinstance(error, LogUnavailable):
            raise _with_outcome(error, "unknown whether the lines were published: either all or none", {}) from error
        raise _with_outcome(error, "no event was published", {"published": 0}) from error


def _publish_some(
    log: headwater.Headwater, topic: str, batch: list[InputLine | HeadwaterError], published_before: int
) -> int:
    """Publish lines in one transaction. If one is invalid, publish those before it and raise an error."""
    rejection = next((line for line in batch if isinstance(line, HeadwaterError)), None)
    good = [line for line in batch if isinstance(line, InputLine)]
    try:
        if good:
            log.publish_many(topic, (line.event for line in good))
    except LogUnavailable as error:
        raise _with_outcome(
            error,
            f"{published_before} events were published; unknown whether lines {good[0].number} to {good[-1].number} "
            "were published",
            {
                "published": published_before,
                "uncertain_from_line": good[0].number,
                "uncertain_to_line": good[-1].number,
            },
        ) from error
    except InvalidRequest as error:
        culprit, reason = _first_rejected(log, topic, good, error)
        if culprit > 0:
            log.publish_many(topic, (line.event for line in good[:culprit]))
        raise _rejected_line(good[culprit].number, reason, published_before + culprit) from error
    except HeadwaterError as error:
        raise _with_outcome(
            error, f"{published_before} events were published", {"published": published_before}
        ) from error
    if rejection is not None:
        raise _rejected_line(rejection.detail["line"], rejection, published_before + len(good))
    return len(good)


def _first_rejected(
    log: headwater.Headwater, topic: str, lines: list[InputLine], rejection: HeadwaterError
) -> tuple[int, HeadwaterError]:
    """Find the first invalid line by bisection; returns its index and the error."""
    low, high = 0, len(lines)
    while high - low > 1:
        middle = (low + high) // 2
        found = _rejection(log, topic, lines[low:middle])
        if found is None:
            low = middle
        else:
            high = middle
    return low, _rejection(log, topic, lines[low:high]) or rejection


def _rejection(log: headwater.Headwater, topic: str, lines: list[InputLine]) -> InvalidRequest | None:
    """Return the error if the log rejects these lines. Publishes nothing: the transaction is rolled back."""
    try:
        with suppress(psycopg.Rollback), log.transaction() as connection:
            log.publish_batch(topic, [line.event for line in lines], connection=connection)
            raise psycopg.Rollback
    except InvalidRequest as error:
        return error
    return None


def _rejected_line(number: int, reason: HeadwaterError, published: int) -> HeadwaterError:
    outcome = f"published the {published} events before it, none from line {number} on"
    if published == 0:
        outcome = "no event was published"
    elif published == 1:
        outcome = f"published the event before it, none from line {number} on"
    detail = {**reason.detail, "line": number, "published": published}
    return type(reason)(f"line {number}: {reason.message}; {outcome}", hint=reason.hint, detail=detail)


def _with_outcome(error: HeadwaterError, outcome: str, detail: Mapping[str, Any]) -> HeadwaterError:
    line = f"line {error.detail['line']}: " if "line" in error.detail else ""
    return type(error)(f"{line}{error.message}; {outcome}", hint=error.hint, detail={**error.detail, **detail})


class _LineCounter:
    """Counts the lines read, for the progress bar."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress = progress
        self._task = task
        self.lines = 0

    def add(self, byte_count: int, line_count: int) -> None:
        self.lines += line_count
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=byte_count, lines=self.lines)


@contextmanager
def _progress(source: BinaryIO) -> Iterator[_LineCounter]:
    """Show a progress bar on a terminal. Its total is known only if the input is a file."""
    if not sys.stderr.isatty():
        yield _LineCounter(None, None)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.fields[lines]:,} lines"), TimeElapsedColumn())
    with Progress(*columns, console=output.progress_console(), transient=True) as progress:
        yield _LineCounter(progress, progress.add_task("publish", total=_size(source), lines=0))


def _size(source: BinaryIO) -> int | None:
    try:
        status = os.fstat(source.fileno())
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _events(
    source: BinaryIO, template: EventTemplate, counter: _LineCounter, skip: int
) -> Iterator[InputLine | HeadwaterError | None]:
    """Yield every line after the first `skip` as an event, and None when the input pauses.

    An invalid line yields an error and ends it.
    """
    number = 0
    for lines in _read_lines(source):
        if lines is None:
            yield None
            continue
        for line in lines:
            number += 1
            if number <= skip or not line.strip():
                continue
            try:
                yield InputLine(number, template.event(line))
            except (ValueError, RecursionError) as error:
                yield InvalidEvent(f"invalid JSON: {error}", detail={"line": number})
                return
            except InvalidEvent as error:
                yield InvalidEvent(error.message, hint=error.hint, detail={**error.detail, "line": number})
                return
        counter.add(sum(map(len, lines)) + len(lines), len(lines))


def _read_lines(source: BinaryIO) -> Iterator[list[bytes] | None]:
    """Yield the lines of the input as they arrive, and None before a read that would block."""
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
        if rest_bytes > MAX_LINE_BYTES:
            raise InvalidEvent(f"a line is longer than {MAX_LINE_BYTES} bytes")
    if rest_bytes:
        yield [b"".join(rest)]


def _ready(source: BinaryIO) -> bool:
    try:
        return bool(select.select([source], [], [], PAUSE_SECONDS)[0])
    except (OSError, ValueError, TypeError):
        # The source does not support select, such as a regular file: it never blocks.
        return True


def _batches(
    lines: Iterator[InputLine | HeadwaterError | None], size: int
) -> Iterator[list[InputLine | HeadwaterError]]:
    """Group lines into transactions of `size`; a pause of the input ends a transaction early."""
    batch: list[InputLine | HeadwaterError] = []
    for line in lines:
        if line is not None:
            batch.append(line)
        if batch and (line is None or len(batch) >= size):
            yield batch
            batch = []
    if batch:
        yield batch
