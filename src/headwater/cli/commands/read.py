"""`headwater read` and `headwater tail`: print events, once or as they arrive."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Final

import typer

import headwater
from headwater.cli import output
from headwater.cli.connection import Session, session
from headwater.cli.options import After, Dsn, Json, Since, SkipExpired, Topics, examples
from headwater.log.cloud_events import cloud_event, structured
from headwater.log.event_json import event_json
from headwater.log.model import Event

app = typer.Typer()

PAGE_SIZE: Final = 1000
CloudEvents = Annotated[
    bool, typer.Option("--cloudevents", help="Print events as CloudEvents in the JSON format, one per line.")
]
_ShowEvents = Callable[[Sequence[Event]], None]


@app.command(
    epilog=examples(
        "headwater read orders --limit 20",
        "headwater read orders payments --since 1h --json",
        "headwater read orders --backwards --limit 1",
        "headwater read orders --cloudevents",
    )
)
def read(
    context: typer.Context,
    topics: Topics = None,
    after: After = None,
    since: Since = None,
    backwards: Annotated[bool, typer.Option("--backwards", help="Print the newest events first.")] = False,
    before: Annotated[
        int | None, typer.Option(metavar="POSITION", help="With --backwards: only events before this position.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of events.")] = 100,
    skip_expired: SkipExpired = False,
    cloudevents: CloudEvents = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Print events up to the stable position, in order. With --json, one event per line."""
    if backwards and (after is not None or since is not None):
        raise typer.BadParameter("--backwards cannot be combined with --after or --since; use --before")
    if before is not None and not backwards:
        raise typer.BadParameter("--before requires --backwards")
    if after is not None and since is not None:
        raise typer.BadParameter("give only one of --after and --since")
    with session(context).log(dsn) as log:
        if since is not None:
            after, skip_expired = log.position_before(since, topics or None), True
        if backwards:
            pages = _pages_backwards(log, topics, before=before, limit=limit)
        else:
            pages = _pages(log, topics, after=after, limit=limit, skip_expired=skip_expired)
        if as_json or cloudevents:
            show = _json_printer(session(context), cloudevents)
            for page in pages:
                show(page)
            return
        found = [event for page in pages for event in page]
    _print_table(found)


@app.command(
    epilog=examples(
        "headwater tail -f orders",
        "headwater tail -f orders --since 5m --json",
        "headwater tail -f orders --cursor my-terminal",
    )
)
def tail(
    context: typer.Context,
    topics: Topics = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep running and print new events.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=PAGE_SIZE, help="Number of existing events to print first.")
    ] = 10,
    after: After = None,
    since: Since = None,
    cursor: Annotated[str | None, typer.Option(metavar="CURSOR", help="Start at this cursor and advance it.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this number of events.")] = None,
    skip_expired: SkipExpired = False,
    cloudevents: CloudEvents = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Print the last events; with -f, also new events until Ctrl-C."""
    if after is not None and since is not None:
        raise typer.BadParameter("give only one of --after and --since")
    with session(context).log(dsn) as log:
        show = _json_printer(session(context), cloudevents) if as_json or cloudevents else _print_lines
        if since is not None:
            after, skip_expired = log.position_before(since, topics or None), True
        epoch: int | None = None
        if cursor is None and after is None:
            # The stable position is read first, so that events that become stable in between are printed exactly once.
            state = log.state(topics or None)
            end, epoch = state.stable, state.epoch
            last = log.read_backwards(topics or None, batch_size=lines)[::-1] if lines else []
            last = last[: limit or None]
            show(last)
            if not follow or (limit is not None and len(last) == limit):
                return
            limit = None if limit is None else limit - len(last)
            after = max([end, *(event.position for event in last)])
        _follow(
            log,
            topics,
            show,
            after=after,
            epoch=epoch,
            cursor=cursor,
            limit=limit,
            skip_expired=skip_expired,
            stay=follow,
        )


def _follow(
    log: headwater.Headwater,
    topics: list[str] | None,
    show: _ShowEvents,
    *,
    after: int | None,
    epoch: int | None,
    cursor: str | None,
    limit: int | None,
    skip_expired: bool,
    stay: bool,
) -> None:
    saved = 0
    if cursor is not None:
        saved = log.open_cursor(cursor, topics=topics or None, start_after=after)
    batches = log.follow_deliveries(
        topics or None,
        after=after,
        epoch=epoch,
        cursor=cursor,
        batch_size=min(limit or PAGE_SIZE, PAGE_SIZE),
        skip_expired=skip_expired,
        stop_when_caught_up=not stay,
    )
    remaining = limit
    for delivery in batches:
        events = delivery.events if remaining is None else delivery.events[:remaining]
        show(events)
        if remaining is not None:
            remaining -= len(events)
            if remaining == 0:
                if cursor is not None:
                    # The follower saves the cursor only when the next batch is requested.
                    log.advance_cursor(
                        cursor, from_position=saved, to_position=events[-1].position, epoch=delivery.epoch
                    )
                return
        saved = events[-1].position


def _pages(
    log: headwater.Headwater, topics: list[str] | None, *, after: int | None, limit: int, skip_expired: bool
) -> Iterator[list[Event]]:
    # Read only up to the current stable position; otherwise a slow reader of a busy log would never end.
    state = log.state(topics or None)
    # Without a start position, reading starts at the first retained event, so no event is missed.
    skip_expired = skip_expired or after is None
    while limit > 0:
        page = log.read(
            topics or None,
            after=after,
            up_to=state.stable,
            epoch=state.epoch,
            batch_size=min(limit, PAGE_SIZE),
            skip_expired=skip_expired,
        )
        if not page:
            return
        yield page
        limit -= len(page)
        after = page[-1].position


def _pages_backwards(
    log: headwater.Headwater, topics: list[str] | None, *, before: int | None, limit: int
) -> Iterator[list[Event]]:
    while limit > 0:
        page = log.read_backwards(topics or None, before=before, batch_size=min(limit, PAGE_SIZE))
        if not page:
            return
        yield page
        limit -= len(page)
        before = page[-1].position


def json_line(event: Event, source: str | None = None) -> str:
    """An event as a line of JSON; as a CloudEvent if the beginning of its source is given."""
    return f"{event_json(event) if source is None else structured(cloud_event(event, source))}\n"


def _json_printer(found: Session, cloudevents: bool) -> _ShowEvents:
    """Print events as lines of JSON: in Headwater's own format, or as CloudEvents."""
    source = found.settings.cloud_events_source if cloudevents else None

    def show(events: Sequence[Event]) -> None:
        sys.stdout.writelines(json_line(event, source) for event in events)
        sys.stdout.flush()

    return show


def _print_lines(events: Sequence[Event]) -> None:
    sys.stdout.writelines(f"{output.format_event(event)}\n" for event in events)
    sys.stdout.flush()


def _print_table(events: Sequence[Event]) -> None:
    output.print_table(
        ("position", "published", "topic", "key", "type", "payload"),
        ((e.position, e.published_at, e.topic, e.key, e.type, output.format_payload(e)) for e in events),
        empty="no events",
    )
