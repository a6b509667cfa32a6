"""`headwater chaos`: is anything lost when everything around the log is killed, cut off, replaced and held up?"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, Yes, examples
from headwater.cli.connection import session
from headwater.cli.exit_codes import ChecksFailed
from headwater.cli.up import orderly_end, prepare
from headwater.embedded import Postgres
from headwater.embedded.stepped_clock import SteppedClock, find_libfaketime
from headwater.errors import InvalidRequest
from headwater.trials import chaos as trial

app = typer.Typer()

# How often a line is written where no bar can be shown.
LINE_SECONDS: Final = 15.0
KINDS: Final = ", ".join(trial.KINDS)
READERS: Final = ", ".join(trial.ROLES)


@app.command(
    epilog=examples(
        "headwater chaos --minutes 10",
        "headwater chaos --seconds 20 --seed 7 --json",
        "headwater chaos --kinds 'failovers,Postgres stopped at once' --readers follow,sse",
    )
)
def chaos(
    context: typer.Context,
    minutes: Annotated[float, typer.Option(min=0, max=1440, help="How long disasters go on.")] = 1.0,
    seconds: Annotated[float | None, typer.Option(min=1, help="The same in seconds; goes before --minutes.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Which disasters come when; default: any.")] = None,
    rate: Annotated[float, typer.Option(min=1, max=100_000, help="Events a second that are published.")] = 200.0,
    copy_events: Annotated[int, typer.Option(min=1, max=1_000_000, help="Events of a huge transaction.")] = 5000,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kinds", help=f"Only these disasters, with commas between them: {', '.join(trial.KINDS)}. Default: all."
        ),
    ] = None,
    reader: Annotated[
        list[str] | None,
        typer.Option(
            "--readers",
            help=f"Only these readers, with commas between them: {', '.join(trial.ROLES)}. Default: all installed.",
        ),
    ] = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Publish and read in every way there is while everything is killed, and count what is lost: it must be 0.

    Readers: queues, follow with and without a cursor, process, SQL subscription, event store, SSE, gRPC, Kafka,
    webhooks. Disasters: processes are killed and frozen; Postgres is killed, stopped before its WAL is flushed, and
    replaced by a standby that lags; sessions end, connections are cut and stall; transactions stay open, and huge ones
    are copied in; the clock of Postgres is set back and forth (where libfaketime is installed).

    Runs on a Postgres of its own, which is removed afterwards. With --dsn or HEADWATER_DSN it runs on that database: it
    publishes there, ends sessions of its own, holds transactions open and slows others down; the server itself is not
    killed. Ends with 1 if anything is lost, doubled, torn, invented or out of order.
    """
    given = dsn or session(context).settings.dsn
    plan = trial.Plan(
        seconds=seconds if seconds is not None else minutes * 60,
        seed=secrets.randbelow(1_000_000) if seed is None else seed,
        events_per_second=rate,
        copy_events=copy_events,
        kinds=_chosen(kind, trial.KINDS, "--kinds"),
        roles=_chosen(reader, trial.ROLES, "--readers") if reader else None,
    )
    if given is not None:
        output.note("warning: this burdens a database that others may use; it is made for one that nobody needs")
        output.confirm(f"put the log in this database on trial for {plan.seconds:g} seconds?", yes=yes)
    with orderly_end(), _database(context, given) as (database, server, clock), _telling(as_json=as_json) as tell:
        outcome = trial.run(plan, database, server=server, clock=clock, tell=tell)
    _print(outcome, as_json=as_json)
    if not outcome.verdict.ok:
        raise ChecksFailed(
            f"lost {outcome.verdict.lost}, doubled {outcome.verdict.duplicates}, torn {outcome.verdict.torn}, "
            f"invented {outcome.verdict.invented}, gaps {outcome.verdict.gaps}, "
            f"out of order {outcome.verdict.out_of_order}",
            hint=f"Report it with --seed {plan.seed} and the lines above.",
        )


def _chosen(names: list[str] | None, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """These of the known names, or all; several may be in one, with commas between them."""
    chosen = tuple(part.strip() for name in names or () for part in name.split(","))
    if unknown := [name for name in chosen if name not in known]:
        raise InvalidRequest(f"{option}: unknown {unknown[0]!r}", hint=f"Known are: {', '.join(known)}.")
    return chosen or known


@contextmanager
def _database(context: typer.Context, dsn: str | None) -> Iterator[tuple[str, Postgres | None, SteppedClock | None]]:
    if dsn is not None:
        with session(context).log(dsn):
            pass
        yield dsn, None, None
        return
    with tempfile.TemporaryDirectory(prefix="headwater-", ignore_cleanup_errors=True) as directory:
        # The server may run as another user, and reads the file of its clock.
        Path(directory).chmod(0o711)
        clock = SteppedClock(Path(directory, "clock")) if find_libfaketime() is not None else None
        server = Postgres(Path(directory, "postgres"), environment=clock.environment if clock is not None else None)
        try:
            server.start()
            yield prepare(server), server, clock
        finally:
            server.stop(mode="immediate")


@contextmanager
def _telling(*, as_json: bool) -> Iterator[Callable[[trial.Progress], None]]:
    """A bar on a terminal, a line now and then elsewhere, nothing for programs."""
    if as_json:
        yield lambda progress: None
        return
    console = output.progress_console()
    if not console.is_terminal:
        told_at = time.monotonic()

        def line(progress: trial.Progress) -> None:
            nonlocal told_at
            if time.monotonic() - told_at >= LINE_SECONDS:
                told_at = time.monotonic()
                output.note(f"{progress.share:4.0%}  {_said(progress)}")

        yield line
        return
    with Bar(
        BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda progress: bar.update(task, completed=progress.share, description=_said(progress))


def _said(progress: trial.Progress) -> str:
    drawn = f", the log is at {progress.drawn}" if progress.drawn else ""
    return f"{progress.act}: {progress.disasters} so far{drawn}" if progress.share < 1 else progress.act


def _print(outcome: trial.Outcome, *, as_json: bool) -> None:
    verdict = outcome.verdict
    if as_json:
        output.emit(outcome)
        return
    for name, count in outcome.disasters.items():
        output.say(f"{count:>9}  {name}")
    output.say(f"{outcome.head_went_back:>9}  times the head of the log went back")
    output.say(f"{outcome.processes_killed:>9}  of {outcome.processes_started} processes died")
    for failure in outcome.failures:
        output.say(f"           ended by itself: {output.visible(failure)}")
    for name, reason in outcome.left_out.items():
        output.say(f"           left out: {name} ({reason})")
    output.say("")
    output.say(f"{'lost':>9}{'repeated':>10}{'dead':>7}{'delivered':>11}  reader")
    for one in verdict.readers:
        output.say(f"{one.lost:>9}{one.repeated:>10}{one.dead:>7}{one.delivered:>11}  {one.name}")
    output.say("")
    for name in (
        "produced",
        "acknowledged",
        "processed",
        "repeated",
        "dead",
        "lost_with_old_primary",
        "lost",
        "duplicates",
        "torn",
        "invented",
        "gaps",
        "out_of_order",
    ):
        output.say(f"{getattr(verdict, name):>9}  {name.replace('_', ' ')}")
    for example in verdict.examples:
        output.say(f"           {output.visible(example)}")
    output.say("")
    output.say(f"seed {outcome.seed}, {outcome.seconds:g} seconds: {'nothing is lost' if verdict.ok else 'FAILED'}")
