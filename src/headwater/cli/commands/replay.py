"""`headwater replay`: replay events from the log and from archives to a topic, a queue or a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from headwater.calls import archives as archive_calls
from headwater.calls.archives import Replay
from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import session
from headwater.cli.exit_codes import NotFound
from headwater.cli.optional_packages import require_extras
from headwater.cli.options import After, Dsn, Json, Since, Yes, examples, parse_past_time

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.spark.replay.run import Preview, ReplayProgress, Target

app = typer.Typer()


@app.command(
    epilog=examples(
        "headwater replay --to-topic orders-again --topic orders --dry-run",
        "headwater replay --to-topic orders-again --topic orders --since 7d --rate 500 --name again",
        "headwater replay --to-queue mailer --since 2026-01-01T00:00:00Z",
        "headwater replay --to-table public.old_orders --topic orders --type OrderPlaced",
        "headwater replay --list",
    )
)
def replay(
    context: typer.Context,
    to_topic: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Publish to this topic; created if missing.")
    ] = None,
    to_queue: Annotated[str | None, typer.Option(metavar="QUEUE", help="Deliver events to this queue again.")] = None,
    to_table: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Write rows to this schema.table; created if missing.")
    ] = None,
    topic: Annotated[
        list[str] | None, typer.Option(metavar="TOPIC", help="Only events of this topic. Repeat for several.")
    ] = None,
    after: After = None,
    up_to: Annotated[int | None, typer.Option(metavar="POSITION", min=0, help="Stop at this position.")] = None,
    since: Since = None,
    until: Annotated[
        datetime | None, typer.Option(parser=parse_past_time, metavar="TIME", help="Stop before this time.")
    ] = None,
    type: Annotated[list[str] | None, typer.Option(help="Only events of this type. Repeat for several.")] = None,
    key: Annotated[list[str] | None, typer.Option(help="Only events with this key. Repeat for several.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the replay; the same name continues an interrupted replay.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show which events would be replayed, and from where. Writes nothing.")
    ] = False,
    rate: Annotated[
        float | None, typer.Option(metavar="N", min=0.1, help="Maximum number of events per second.")
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="URL of a Spark cluster, such as spark://host:7077. Default: run Spark in this process."
        ),
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List replays and their progress.")] = False,
    forget: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Delete the record of a replay, so that its name can be used again."),
    ] = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Replay events in order and exactly once, from the log and, if removed by retention, from archives.

    Runs on Spark, by default in this process. After an interruption, the same --name continues the replay. A queue is
    rewound for events that are still in the log; events that are only in an archive are published to a separate topic.
    Asks for confirmation before it rewinds a queue.
    """
    actions = (to_topic is not None, to_queue is not None, to_table is not None, list_all, forget is not None)
    if sum(actions) != 1:
        raise typer.BadParameter("give exactly one of --to-topic, --to-queue, --to-table, --list and --forget")
    run = session(context)
    address = run.dsn(dsn)
    # Connect before Spark starts, so that an unreachable database is reported at once.
    with run.log(dsn) as log:
        if list_all:
            _print_replays(log.run(archive_calls.replays()), as_json=as_json)
            return
        if forget is not None:
            with audit(log, "replay.forget", forget) as log:
                if not log.run(archive_calls.forget_replay(forget)):
                    raise NotFound(f'replay "{forget}" does not exist', hint="See headwater replay --list.")
            output.emit({"forgotten": forget}) if as_json else output.print_line(f"forgot replay {forget}")
            return
    with require_extras("spark"):
        from headwater.spark.replay.run import ReplaySelection, ToQueue, ToTable, ToTopic
        from headwater.spark.replay.run import preview as look
        from headwater.spark.replay.run import replay as carry_out

    target: Target
    if to_topic is not None:
        target = ToTopic(to_topic)
    elif to_queue is not None:
        target = ToQueue(to_queue)
    else:
        target = ToTable.parse(to_table or "")
    selection = ReplaySelection(
        topics=tuple(topic) if topic else None,
        after=after,
        up_to=up_to,
        since=since,
        until=until,
        types=tuple(type) if type else None,
        keys=tuple(one.encode() for one in key) if key else None,
    )
    selection.check()
    replay_name = name or f"replay-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    with _spark(master) as spark:
        if dry_run:
            _print_preview(look(spark, address, selection, target), as_json=as_json)
            return
        if to_queue is not None:
            output.confirm(f"deliver past events to queue {to_queue} again? use --dry-run to list them", yes=yes)
        with _progress_bar(replay_name, shown=not as_json) as advance:
            done = carry_out(
                spark, address, selection, target, name=replay_name, events_per_second=rate, on_progress=advance
            )
    if as_json:
        output.emit(done)
    else:
        rewound = "" if done.rewind_to is None else f", queue {to_queue} rewound to position {done.rewind_to}"
        output.print_line(
            f"replayed {done.events} events up to position {done.done_to} (replay {replay_name}{rewound})"
        )


@contextmanager
def _spark(master: str | None) -> Iterator[SparkSession]:
    from pyspark.sql import SparkSession

    from headwater.spark import local_session

    found = SparkSession.getActiveSession()
    spark = local_session("headwater replay", master=master, fast_start=True)
    # Headwater reports errors once, without Java stack traces.
    spark.sparkContext.setLogLevel("OFF")
    try:
        yield spark
    finally:
        if found is None:
            spark.stop()


@contextmanager
def _progress_bar(name: str, *, shown: bool) -> Iterator[Callable[[ReplayProgress], None]]:
    """Show a progress bar on a terminal."""
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

        def advance(progress: ReplayProgress) -> None:
            bar.update(task, completed=progress.share, events=progress.events, position=progress.done_to)

        yield advance


def _print_replays(replays: list[Replay], *, as_json: bool) -> None:
    output.print_list(
        replays,
        {
            "replay": "name",
            "to": lambda one: " ".join(f"{kind} {name}" for kind, name in one.request["to"].items()),
            "events": "events",
            "position": "done_to",
            "up to": "up_to",
            "started": "started_at",
            "finished": lambda one: one.finished_at or "no",
        },
        as_json=as_json,
        empty="no replays",
    )


def _print_preview(found: Preview, *, as_json: bool) -> None:
    output.print_list(
        found.found,
        {
            "topic": "topic",
            "from": "source",
            "events": "events",
            "first position": "first_position",
            "last position": "last_position",
            "first published": "first_published_at",
            "last published": "last_published_at",
        },
        as_json=as_json,
        document={**output.to_json_value(found), "published": found.published},
        empty="no events",
    )
    if as_json:
        return
    if found.rewind_to is None:
        output.print_line(f"would write {found.published} events")
    else:
        output.print_line(
            f"would rewind the queue to position {found.rewind_to} and publish {found.published} events "
            "that are only in an archive"
        )
    if found.also_reached and found.published:
        output.print_status(
            "these queues are bound to every topic and would also receive the published events: "
            f"{', '.join(found.also_reached)}"
        )
