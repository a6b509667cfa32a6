"""`headwater chaos`: a fault-injection test that checks that no event is lost."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from headwater.cli import output
from headwater.cli.connection import prepare_database, session
from headwater.cli.exit_codes import ChecksFailed
from headwater.cli.options import Dsn, Json, Yes, examples
from headwater.cli.signals import interrupt_on_sigterm
from headwater.embedded import Postgres
from headwater.embedded.stepped_clock import SteppedClock, find_libfaketime
from headwater.embedded.temporary import temporary_directory
from headwater.errors import InvalidRequest
from headwater.trials import chaos as trial

app = typer.Typer()

# Interval of progress lines where standard error is not a terminal.
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
    minutes: Annotated[float, typer.Option(min=0, max=1440, help="How long to inject faults.")] = 1.0,
    seconds: Annotated[float | None, typer.Option(min=1, help="The same in seconds. Overrides --minutes.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the random order of faults. Default: random.")
    ] = None,
    rate: Annotated[float, typer.Option(min=1, max=100_000, help="Events to publish per second.")] = 200.0,
    copy_events: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Number of events of a large transaction.")
    ] = 5000,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kinds", help=f"Only these faults, separated by commas: {', '.join(trial.KINDS)}. Default: all."
        ),
    ] = None,
    reader: Annotated[
        list[str] | None,
        typer.Option(
            "--readers",
            help=f"Only these readers, separated by commas: {', '.join(trial.ROLES)}. Default: all installed.",
        ),
    ] = None,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Publish and read events while injecting faults, and check that no event is lost.

    Readers: queues, follow with and without a cursor, process, SQL subscription, event store, SSE, gRPC, Kafka,
    webhooks. Faults: processes are killed and frozen; Postgres is killed, stopped before its WAL is flushed, and
    replaced by a standby that lags; sessions are terminated, connections are cut and stall; transactions stay open,
    and large ones are loaded with COPY; the clock of Postgres is set back and forth (if libfaketime is installed).

    Runs on a temporary embedded Postgres. With --dsn or HEADWATER_DSN it runs on that database: it publishes there,
    terminates its own sessions, holds transactions open and slows other clients down; the server itself is not killed.
    Exits with 1 if any event is lost, duplicated, torn, invented or out of order.
    """
    given = dsn or session(context).settings.dsn
    plan = trial.TrialPlan(
        seconds=seconds if seconds is not None else minutes * 60,
        seed=secrets.randbelow(1_000_000) if seed is None else seed,
        events_per_second=rate,
        copy_events=copy_events,
        kinds=_chosen(kind, trial.KINDS, "--kinds"),
        roles=_chosen(reader, trial.ROLES, "--readers") if reader else None,
    )
    if given is not None:
        output.print_status(
            "warning: this puts heavy load on the database; do not use a database that other applications need"
        )
        output.confirm(f"run the test in this database for {plan.seconds:g} seconds?", yes=yes)
    with interrupt_on_sigterm(), _database(context, given) as (database, server, clock), _progress(as_json) as report:
        outcome = trial.run(plan, database, server=server, clock=clock, report=report)
    _print(outcome, as_json=as_json)
    if not outcome.verdict.ok:
        raise ChecksFailed(
            f"lost {outcome.verdict.lost}, duplicated {outcome.verdict.duplicates}, torn {outcome.verdict.torn}, "
            f"invented {outcome.verdict.invented}, gaps {outcome.verdict.gaps}, "
            f"out of order {outcome.verdict.out_of_order}",
            hint=f"Report it with the output above and --seed {plan.seed}.",
        )


def _chosen(names: list[str] | None, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Return the chosen names, or all known names; one option value may hold several, separated by commas."""
    chosen = tuple(part.strip() for name in names or () for part in name.split(","))
    if unknown := [name for name in chosen if name not in known]:
        raise InvalidRequest(
            f"invalid value {unknown[0]!r} for {option}", hint=f"Expected one or more of: {', '.join(known)}."
        )
    return chosen or known


@contextmanager
def _database(context: typer.Context, dsn: str | None) -> Iterator[tuple[str, Postgres | None, SteppedClock | None]]:
    if dsn is not None:
        with session(context).log(dsn):
            pass
        yield dsn, None, None
        return
    with temporary_directory() as directory:
        # The server may run as another user, which must be able to read the file of its clock.
        directory.chmod(0o711)
        clock = SteppedClock(directory / "clock") if find_libfaketime() is not None else None
        server = Postgres(directory / "postgres", environment=clock.environment if clock is not None else None)
        try:
            server.start()
            yield prepare_database(server), server, clock
        finally:
            server.stop(mode="immediate")


@contextmanager
def _progress(as_json: bool) -> Iterator[Callable[[trial.TrialProgress], None]]:
    """Yield a progress callback: a bar on a terminal, otherwise a line at an interval; nothing with --json."""
    if as_json:
        yield lambda progress: None
        return
    console = output.progress_console()
    if not console.is_terminal:
        printed_at = time.monotonic()

        def line(progress: trial.TrialProgress) -> None:
            nonlocal printed_at
            if time.monotonic() - printed_at >= LINE_SECONDS:
                printed_at = time.monotonic()
                output.print_status(f"{progress.share:4.0%}  {_describe(progress)}")

        yield line
        return
    with Bar(
        BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda progress: bar.update(task, completed=progress.share, description=_describe(progress))


def _describe(progress: trial.TrialProgress) -> str:
    head = f", head at {progress.head}" if progress.head else ""
    return f"{progress.step}: {progress.faults} faults so far{head}" if progress.share < 1 else progress.step


def _print(outcome: trial.TrialResult, *, as_json: bool) -> None:
    verdict = outcome.verdict
    if as_json:
        output.emit(outcome)
        return
    for name, count in outcome.faults.items():
        output.print_line(f"{count:>9}  {name}")
    output.print_line(f"{outcome.head_went_back:>9}  times the head of the log went back")
    output.print_line(f"{outcome.processes_killed:>9}  of {outcome.processes_started} processes killed")
    for failure in outcome.failures:
        output.print_line(f"           failed: {output.escape_control(failure)}")
    for name, reason in outcome.skipped.items():
        output.print_line(f"           skipped: {name} ({reason})")
    output.print_line("")
    output.print_line(f"{'lost':>9}{'repeated':>10}{'dead':>7}{'delivered':>11}  reader")
    for one in verdict.readers:
        output.print_line(f"{one.lost:>9}{one.repeated:>10}{one.dead:>7}{one.delivered:>11}  {one.name}")
    output.print_line("")
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
        output.print_line(f"{getattr(verdict, name):>9}  {name.replace('_', ' ')}")
    for example in verdict.examples:
        output.print_line(f"           {output.escape_control(example)}")
    output.print_line("")
    output.print_line(
        f"seed {outcome.seed}, {outcome.seconds:g} seconds: {'no event lost' if verdict.ok else 'FAILED'}"
    )
