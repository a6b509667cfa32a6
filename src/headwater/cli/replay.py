"""`headwater replay`: let the past come again, from the log and from archives, to a topic, a group or a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from headwater import calls
from headwater.calls import Replay
from headwater.cli import output
from headwater.cli.arguments import After, Dsn, Json, Since, Yes, examples, past_instant
from headwater.cli.audited import acting
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotThere
from headwater.cli.optional_packages import needs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.spark.replay.run import Preview, Progress, Target

app = typer.Typer()


@app.command(
    epilog=examples(
        "headwater replay --to-topic orders-again --topic orders --dry-run",
        "headwater replay --to-topic orders-again --topic orders --since 7d --rate 500 --name again",
        "headwater replay --to-group mailer --since 2026-01-01T00:00:00Z",
        "headwater replay --to-table public.old_orders --topic orders --type OrderPlaced",
        "headwater replay --list",
    )
)
def replay(
    context: typer.Context,
    to_topic: Annotated[str | None, typer.Option(metavar="TOPIC", help="To this topic; made if missing.")] = None,
    to_group: Annotated[str | None, typer.Option(metavar="GROUP", help="This queue gets its past again.")] = None,
    to_table: Annotated[
        str | None, typer.Option(metavar="TABLE", help="To rows of schema.table; made if missing.")
    ] = None,
    topic: Annotated[list[str] | None, typer.Option(metavar="TOPIC", help="Of this topic; again for more.")] = None,
    after: After = None,
    up_to: Annotated[int | None, typer.Option(metavar="POSITION", min=0, help="End with this position.")] = None,
    since: Since = None,
    until: Annotated[
        datetime | None, typer.Option(parser=past_instant, metavar="TIME", help="End before this time.")
    ] = None,
    type: Annotated[list[str] | None, typer.Option(help="Of this type; again for more.")] = None,
    key: Annotated[list[str] | None, typer.Option(help="Of this key; again for more.")] = None,
    name: Annotated[str | None, typer.Option(help="Its name: repeated with it, a replay goes on where it was.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would come, and from where. Writes nothing.")
    ] = False,
    rate: Annotated[float | None, typer.Option(metavar="N", min=0.1, help="At most so many events a second.")] = None,
    master: Annotated[str | None, typer.Option(metavar="URL", help="A Spark to run on, as spark://host:7077.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Say which replays there are, and how far.")] = False,
    forget: Annotated[str | None, typer.Option(metavar="NAME", help="Forget a replay: its name is free again.")] = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Let events come again, each once and in order: from the log, and from archives what retention took.

    Runs on Spark, which it brings along. Killed and repeated with the same --name, it goes on where it was.
    A group is rewound for what the log still has; what only an archive has comes by a topic of its own. Asks first.
    """
    asked = (to_topic is not None, to_group is not None, to_table is not None, list_all, forget is not None)
    if sum(asked) != 1:
        raise typer.BadParameter("say where to once: --to-topic, --to-group or --to-table")
    run = session(context)
    address = run.dsn(dsn)
    # Also before Spark starts: a database that cannot be reached is said at once.
    with run.log(dsn) as log:
        if list_all:
            _tell_replays(log.run(calls.replays()), as_json=as_json)
            return
        if forget is not None:
            with acting(log, "replay.forget", forget) as log:
                if not log.run(calls.forget_replay(forget)):
                    raise NotThere(f'there is no replay "{forget}"', hint="See headwater replay --list.")
            output.emit({"forgotten": forget}) if as_json else output.say(f"replay {forget} is forgotten")
            return
    with needs("spark"):
        from headwater.spark.replay.run import Selection, ToGroup, ToTable, ToTopic
        from headwater.spark.replay.run import preview as look
        from headwater.spark.replay.run import replay as carry_out

    target: Target
    if to_topic is not None:
        target = ToTopic(to_topic)
    elif to_group is not None:
        target = ToGroup(to_group)
    else:
        target = ToTable.parse(to_table or "")
    selection = Selection(
        topics=tuple(topic) if topic else None,
        after=after,
        up_to=up_to,
        since=since,
        until=until,
        types=tuple(type) if type else None,
        keys=tuple(one.encode() for one in key) if key else None,
    )
    selection.refuse_nonsense()
    called = name or f"replay-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    with _spark(master) as spark:
        if dry_run:
            _tell_preview(look(spark, address, selection, target), as_json=as_json)
            return
        if to_group is not None:
            output.confirm(f"let group {to_group} do its past again? --dry-run shows what that is", yes=yes)
        with _bar(called, shown=not as_json) as advance:
            done = carry_out(
                spark, address, selection, target, name=called, events_per_second=rate, on_progress=advance
            )
    if as_json:
        output.emit(done)
    else:
        rewound = "" if done.rewind_to is None else f"; group {to_group} begins anew after {done.rewind_to}"
        output.say(f"replay {called}: {done.events} events, up to position {done.done_to}{rewound}")


@contextmanager
def _spark(master: str | None) -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    from headwater.spark import local_session

    found = SparkSession.getActiveSession()
    spark = local_session("headwater replay", master=master, fast_start=True)
    # What goes wrong is told by us, once, and without Java's tracebacks.
    spark.sparkContext.setLogLevel("OFF")
    try:
        yield spark
    finally:
        if found is None:
            spark.stop()


@contextmanager
def _bar(name: str, *, shown: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar where a person can see it; elsewhere nothing."""
    console = output.progress_console()
    columns = (
        TextColumn("replay {task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[events]} events, at {task.fields[position]}"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(name, total=1.0, events=0, position=0)

        def advance(progress: Progress) -> None:
            bar.update(task, completed=progress.share, events=progress.events, position=progress.done_to)

        yield advance


def _tell_replays(replays: list[Replay], *, as_json: bool) -> None:
    if as_json:
        output.emit(replays)
        return
    output.table(
        ("replay", "to", "events", "position", "up to", "started", "finished"),
        (
            (
                one.name,
                " ".join(f"{kind} {name}" for kind, name in one.request["to"].items()),
                one.events,
                one.done_to,
                one.up_to,
                one.started_at,
                one.finished_at or "no",
            )
            for one in replays
        ),
        empty="no replays",
    )


def _tell_preview(found: Preview, *, as_json: bool) -> None:
    if as_json:
        output.emit({**output.plain(found), "published": found.published})
        return
    output.table(
        ("topic", "from", "events", "first position", "last position", "first published", "last published"),
        (
            (
                one.topic,
                one.place,
                one.events,
                one.first_position,
                one.last_position,
                one.first_published_at,
                one.last_published_at,
            )
            for one in found.found
        ),
        empty="no events",
    )
    if found.rewind_to is None:
        output.say(f"would write {found.published} events")
    else:
        output.say(
            f"would rewind the group to {found.rewind_to}, for what the log has, and publish {found.published} events "
            "that only an archive has"
        )
    if found.also_reached and found.published:
        output.note(
            "these groups are bound to every topic, and would get what is published as well: "
            f"{', '.join(found.also_reached)}"
        )
