"""`headwater read` and `headwater tail`: look at events, once or as they come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Final

import typer

import headwater
from headwater.cli import output
from headwater.cli.arguments import After, Dsn, Json, Since, SkipExpired, Topics, examples
from headwater.cli.connection import session
from headwater.model import Event

app = typer.Typer()

PAGE_SIZE: Final = 1000
_Show = Callable[[Sequence[Event]], None]


@app.command(
    epilog=examples(
        "headwater read orders --limit 20",
        "headwater read orders payments --since 1h --json",
        "headwater read orders --backwards --limit 1",
    )
)
def read(
    context: typer.Context,
    topics: Topics = None,
    after: After = None,
    since: Since = None,
    backwards: Annotated[bool, typer.Option("--backwards", help="The newest first.")] = False,
    before: Annotated[
        int | None, typer.Option(metavar="POSITION", help="With --backwards: only below this position.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many events.")] = 100,
    skip_expired: SkipExpired = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Print settled events in order. With --json, one event a line."""
    if backwards and (after is not None or since is not None):
        raise typer.BadParameter("--backwards goes with --before, not with --after or --since")
    if before is not None and not backwards:
        raise typer.BadParameter("--before goes with --backwards")
    if after is not None and since is not None:
        raise typer.BadParameter("say where to start once: --after or --since")
    with session(context).log(dsn) as log:
        if since is not None:
            after, skip_expired = log.position_before(since, topics or None), True
        if backwards:
            pages = _pages_backwards(log, topics, before=before, limit=limit)
        else:
            pages = _pages(log, topics, after=after, limit=limit, skip_expired=skip_expired)
        if as_json:
            for page in pages:
                _print_json(page)
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
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay, and print events as they come.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=PAGE_SIZE, help="Begin with the last so many.")
    ] = 10,
    after: After = None,
    since: Since = None,
    cursor: Annotated[
        str | None, typer.Option(metavar="CURSOR", help="Begin where this cursor stands, and move it along.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many events.")] = None,
    skip_expired: SkipExpired = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Print the last events, and with -f those that come, until Ctrl-C."""
    if after is not None and since is not None:
        raise typer.BadParameter("say where to start once: --after or --since")
    with session(context).log(dsn) as log:
        show = _print_json if as_json else _print_lines
        if since is not None:
            after, skip_expired = log.position_before(since, topics or None), True
        epoch: int | None = None
        if cursor is None and after is None:
            # The end of the log is looked up first: what settles meanwhile is then printed once, not never.
            state = log.state(topics or None)
            end, epoch = state.settled, state.epoch
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
    show: _Show,
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
                    # The follower would save this only when asked for the next batch.
                    log.advance_cursor(
                        cursor, from_position=saved, to_position=events[-1].position, epoch=delivery.epoch
                    )
                return
        saved = events[-1].position


def _pages(
    log: headwater.Headwater, topics: list[str] | None, *, after: int | None, limit: int, skip_expired: bool
) -> Iterator[list[Event]]:
    # Only what is settled now: a reader that prints more slowly than others publish would never end.
    state = log.state(topics or None)
    # Who starts at the first event that is kept has lost nothing, whatever is gone between topics.
    skip_expired = skip_expired or after is None
    while limit > 0:
        page = log.read(
            topics or None,
            after=after,
            up_to=state.settled,
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


def _print_json(events: Sequence[Event]) -> None:
    sys.stdout.writelines(f"{output.event_json(event)}\n" for event in events)
    sys.stdout.flush()


def _print_lines(events: Sequence[Event]) -> None:
    sys.stdout.writelines(f"{output.event_line(event)}\n" for event in events)
    sys.stdout.flush()


def _print_table(events: Sequence[Event]) -> None:
    output.table(
        ("position", "published", "topic", "key", "type", "payload"),
        ((e.position, e.published_at, e.topic, e.key, e.type, output.payload_text(e)) for e in events),
        empty="no events",
    )
