"""Shared code of the benchmarks: a server, client processes, interleaved rounds, a table and a line of JSON.

Rates on a shared machine wander by tens of percents within a minute, so nothing here compares two runs: the
variants of a comparison take turns, a fraction of a second each, and a ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from psycopg import conninfo, sql
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headwater.database import schema
from headwater.embedded import Postgres
from headwater.embedded.temporary import temporary_directory

stderr = Console(stderr=True, highlight=False)

Act = Callable[[], int]
"""One unit of work of a client; returns the number of events."""

START_SECONDS = 0.02
ANSWER_SECONDS = 120.0
TICKS = os.sysconf("SC_CLK_TCK")


# --- the command line ----------------------------------------------------------------------------------------


T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """The options of all benchmarks."""

    size: str
    """full, quick, or smallest: it shows that the benchmark works, and measures nothing."""
    dsn: str | None
    only: Sequence[str] | None

    def sized(self, full: T, quick: T, smallest: T) -> T:
        """The value for the size of this run."""
        return {"full": full, "quick": quick, "smallest": smallest}[self.size]


def arguments(description: str) -> Options:
    parser = argparse.ArgumentParser(description=description)
    size = parser.add_mutually_exclusive_group()
    for name, text in (
        ("quick", "run for less than 50 seconds, with less precise results"),
        ("smallest", "only show that the benchmark works: its figures mean nothing"),
    ):
        size.add_argument(f"--{name}", dest="size", action="store_const", const=name, default="full", help=text)
    parser.add_argument(
        "--dsn", default=os.environ.get("HEADWATER_DSN"), help="Postgres to use (default: a temporary embedded one)"
    )
    parser.add_argument("--only", action="append", metavar="KEY", help="run only this workload (may be repeated)")
    given = parser.parse_args()
    return Options(given.size, given.dsn, given.only)


# --- the server ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """The Postgres that is measured, and a temporary database in it."""

    dsn: str
    postmaster: int | None
    """Its process id if it runs on this machine; otherwise its CPU time is unknown."""

    @cached_property
    def _connection(self) -> psycopg.Connection:
        return psycopg.connect(self.dsn, autocommit=True)

    def execute(self, query: Any, params: Sequence[Any] | None = None) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(query, params)
        return cursor.fetchall() if cursor.description else []

    def wal_bytes(self) -> int:
        """The amount of WAL written so far."""
        return int(self.execute("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn")[0][0])

    def cpu_seconds(self) -> float | None:
        """The CPU time of all its processes, including those that ended."""
        return None if self.postmaster is None else _family_cpu_seconds(self.postmaster)

    def about(self) -> dict[str, Any]:
        names = ("server_version", "fsync", "synchronous_commit", "wal_level", "shared_buffers")
        return {name: self.execute("select current_setting(%s)", (name,))[0][0] for name in names}


@contextmanager
def measured_server(dsn: str | None) -> Iterator[Server]:
    """A server with durable settings and a new database with the log; removed afterwards."""
    if dsn is not None:
        with _database(dsn) as own:
            yield Server(own, _postmaster(own))
        return
    with temporary_directory("headwater-bench-") as directory:
        server = Postgres(directory)
        try:
            say("starting Postgres")
            server.start()
            with _database(server.dsn("postgres")) as own:
                yield Server(own, server.pid)
        finally:
            server.stop(mode="immediate")


@contextmanager
def twin(server: Server) -> Iterator[Server]:
    """Another new database with the log on the same server."""
    with _database(conninfo.make_conninfo(server.dsn, dbname="postgres"), "_twin") as own:
        yield Server(own, server.postmaster)


@contextmanager
def _database(admin_dsn: str, suffix: str = "") -> Iterator[str]:
    name = sql.Identifier(f"headwater_bench_{os.getpid()}{suffix}")
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {} template template0").format(name))
        try:
            own = conninfo.make_conninfo(admin_dsn, dbname=f"headwater_bench_{os.getpid()}{suffix}")
            with psycopg.connect(own, autocommit=True) as connection:
                schema.upgrade(connection)
            yield own
        finally:
            admin.execute(sql.SQL("drop database {} with (force)").format(name))


def _postmaster(dsn: str) -> int | None:
    with psycopg.connect(dsn) as connection:
        backend = connection.info.backend_pid
        try:
            if not Path(f"/proc/{backend}/comm").read_text().startswith("postgres"):
                return None
            return _stat(backend)[1]
        except (OSError, ValueError):
            return None


def _stat(pid: int) -> list[int]:
    """The numbers of /proc/PID/stat after the name: [1] parent, [11:13] own ticks, [13:15] ticks of reaped children."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return [0, *map(int, text[text.rindex(")") + 4 :].split())]


def _family_cpu_seconds(parent: int) -> float:
    ticks = 0
    for _ in range(10):
        try:
            own = _stat(parent)
            ticks = own[11] + own[12] + own[13] + own[14]
            for entry in os.listdir("/proc"):
                if entry.isdigit():
                    try:
                        stat = _stat(int(entry))
                    except (OSError, ValueError):
                        continue
                    if stat[1] == parent:
                        ticks += stat[11] + stat[12]
            # A child that was reaped in between moved its ticks to the parent: count again.
            after = _stat(parent)
            if after[13:15] == own[13:15]:
                break
        except OSError:
            return 0.0
    return ticks / TICKS


# --- the clients ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """One variant to measure: `connections` processes that repeat the work that `make` returns."""

    name: str
    make: Callable[..., Act]
    """Called once in each process with the DSN and `options`; must be importable. Connects and warms up."""

    options: Mapping[str, Any] = field(default_factory=dict)
    connections: int = 1

    before: Callable[[], None] | None = None
    """Called before each turn, outside the measured time, to create the data that the turn uses."""


@dataclass(frozen=True)
class Sample:
    """One turn of one variant."""

    events: int
    seconds: float
    client_cpu_seconds: float
    server_cpu_seconds: float | None
    wal_bytes: int

    @property
    def rate(self) -> float:
        return self.events / self.seconds


class ClientProcesses:
    """Client processes, so that no interpreter lock is shared. They stay connected and warm for the whole run."""

    def __init__(self, dsn: str, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_client, args=(dsn, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        # Starting them takes all available CPU, so nothing is measured until they are ready.
        for pipe in self._pipes:
            pipe.send((_call, "start", _nothing, {}, None))
        for pipe in self._pipes:
            _answer(pipe, "start")

    def __enter__(self) -> ClientProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()

    def ready(self, variant: Variant) -> None:
        """Prepare the work of a variant in all clients, and run it once."""
        self._ask(variant, None)

    def run(self, variant: Variant, seconds: float) -> tuple[int, float, float]:
        """Run one turn; returns events, elapsed seconds and client CPU seconds."""
        start = time.monotonic() + START_SECONDS
        answers = self._ask(variant, (start, start + seconds))
        return (
            sum(events for events, _, _ in answers),
            max(end for _, end, _ in answers) - start,
            sum(cpu for _, _, cpu in answers),
        )

    def begin(self, function: Callable[..., Any], *, client: int = 0, **options: Any) -> Callable[[], Any]:
        """Call `function` with the DSN and the options in one client; returns a function that waits for the result."""
        pipe = self._pipes[client]
        pipe.send((_call, function.__name__, function, options, None))
        return lambda: _answer(pipe, function.__name__)

    def _ask(self, variant: Variant, times: tuple[float, float] | None) -> list[tuple[int, float, float]]:
        pipes = self._pipes[: variant.connections]
        for pipe in pipes:
            pipe.send((_work, variant.name, variant.make, variant.options, times))
        return [_answer(pipe, variant.name) for pipe in pipes]


def _answer(pipe: Pipe, name: str) -> Any:
    if not pipe.poll(ANSWER_SECONDS):
        raise TimeoutError(f"a client of {name} does not answer")
    answer = pipe.recv()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _client(dsn: str, pipe: Pipe) -> None:
    """The main function of a client process: runs requests until the pipe is closed."""
    acts: dict[str, Act] = {}
    while True:
        try:
            do, name, function, options, times = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(do(acts, dsn, name, function, options, times))
        except Exception as error:  # noqa: BLE001 - whatever it is, the measuring process shows it
            pipe.send(RuntimeError(f"{name}: {error!r}"))


def _nothing(dsn: str) -> None:
    """The first request to a client, to check that it runs."""


def _call(
    acts: dict[str, Act], dsn: str, name: str, function: Callable[..., Any], options: Mapping[str, Any], times: None
) -> Any:
    return function(dsn, **options)


def _work(
    acts: dict[str, Act],
    dsn: str,
    name: str,
    make: Callable[..., Act],
    options: Mapping[str, Any],
    times: tuple[float, float] | None,
) -> tuple[int, float, float]:
    """Prepare the work of a variant when first requested, then repeat it until the time is over."""
    if name not in acts:
        acts[name] = make(dsn, **options)
    act = acts[name]
    if times is None:
        act()
        return 0, 0.0, 0.0
    start, until = times
    time.sleep(max(0.0, start - time.monotonic()))
    cpu = time.process_time()
    events = act()
    while (now := time.monotonic()) < until:
        events += act()
    return events, now, time.process_time() - cpu


# --- rounds --------------------------------------------------------------------------------------------------

Samples = dict[str, list[Sample]]


def interleaved(
    server: Server, clients: ClientProcesses, variants: Sequence[Variant], *, rounds: int, seconds: float
) -> Samples:
    """Run every variant once per round; the order rotates, so that no variant always follows the same one."""
    samples: Samples = {variant.name: [] for variant in variants}
    with _progress(len(variants) * (rounds + 1)) as step:
        for variant in variants:
            step(f"warming {variant.name}")
            clients.ready(variant)
        for number in range(rounds):
            shift = number % len(variants)
            for variant in [*variants[shift:], *variants[:shift]]:
                step(f"round {number + 1} of {rounds}: {variant.name}")
                samples[variant.name].append(_turn(server, clients, variant, seconds))
    return samples


def _turn(server: Server, clients: ClientProcesses, variant: Variant, seconds: float) -> Sample:
    if variant.before is not None:
        variant.before()
    cpu, wal = server.cpu_seconds(), server.wal_bytes()
    events, elapsed, client_cpu = clients.run(variant, seconds)
    wal = server.wal_bytes() - wal
    after = server.cpu_seconds()
    server_cpu = None if cpu is None or after is None else after - cpu
    return Sample(events, elapsed, client_cpu, server_cpu, wal)


def ratio(samples: Samples, ours: str, floor: str) -> float:
    """The speed of Headwater relative to the baseline: the median over the rounds."""
    pairs = zip(samples[ours], samples[floor], strict=True)
    return statistics.median(a.rate / b.rate for a, b in pairs)


@dataclass(frozen=True)
class Figures:
    """The results of a variant over all rounds."""

    rate: float
    server_cpu_us: float | None
    client_cpu_us: float
    wal_bytes: float


def figures(samples: Sequence[Sample]) -> Figures:
    events = sum(sample.events for sample in samples)
    server = [sample.server_cpu_seconds for sample in samples if sample.server_cpu_seconds is not None]
    return Figures(
        rate=statistics.median(sample.rate for sample in samples),
        # Sums, since the clock ticks of one short turn are too coarse; at least one tick.
        server_cpu_us=max(sum(server), 1 / TICKS) / events * 1e6 if len(server) == len(samples) else None,
        client_cpu_us=sum(sample.client_cpu_seconds for sample in samples) / events * 1e6,
        wal_bytes=sum(sample.wal_bytes for sample in samples) / events,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


# --- output --------------------------------------------------------------------------------------------------


STARTED = time.monotonic()


def say(text: str) -> None:
    """Print one line of progress."""
    stderr.print(f"[dim]{time.monotonic() - STARTED:4.0f} s  {text}[/dim]")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    if not stderr.is_terminal:
        yield lambda text: None
        return
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn only between turns: a drawing thread would take CPU from the measurement.
    with Progress(*columns, console=stderr, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=total)
        yield lambda text: progress.update(task, advance=1, description=text, refresh=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str] | None]) -> None:
    """Print a table: the first column is text, the others are numbers; None draws a line."""
    shown = Table(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        shown.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        if row is None:
            shown.add_section()
        else:
            shown.add_row(*row)
    # The width of a pipe is unknown, and a truncated table is useless.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(shown)


def finish(server: Server, options: Options, name: str, result: Mapping[str, Any]) -> None:
    """Print the last line: a JSON object with the results, the size of the run and a description of the machine."""
    about = server.about()
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "postgres": about["server_version"].split()[0],
        "durable": about["fsync"] == "on" and about["synchronous_commit"] == "on",
    }
    run = {"size": options.size, "seconds": round(time.monotonic() - STARTED, 1)}
    print(json.dumps({"bench": name, **result, **run, **machine}), flush=True)


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
