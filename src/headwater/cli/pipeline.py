"""`headwater pipeline`: run what a file of pipelines declares, and see how it goes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater import calls
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, Yes, examples
from headwater.cli.audited import acting
from headwater.cli.connection import connect, session, translated
from headwater.cli.exit_codes import NotThere
from headwater.cli.optional_packages import needs
from headwater.errors import InvalidRequest, PipelineNotFound

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.model import PipelineBatch, PipelineStatus
    from headwater.spark.pipelines.file import PipelineFile
    from headwater.spark.pipelines.runner import Report

app = typer.Typer(help="Pipelines on Spark, declared in a file.", no_args_is_help=True)

FileOption = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The file that declares the pipelines.")]
Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Which ones; default all.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The pipeline's name.", show_default=False)]
DEFAULT_FILE = Path("pipelines.yaml")


@app.command(
    epilog=examples(
        "headwater pipeline run",
        "headwater pipeline run -f shop.yaml orders-to-nats archive",
        "headwater pipeline run --once",
        "headwater pipeline run --master spark://spark.example:7077",
    )
)
def run(
    context: typer.Context,
    names: Names = None,
    file: FileOption = DEFAULT_FILE,
    once: Annotated[bool, typer.Option("--once", help="End when everything that is there now is through.")] = False,
    master: Annotated[
        str | None, typer.Option(metavar="URL", help="A Spark cluster; default: in this process.")
    ] = None,
    cores: Annotated[int, typer.Option(min=1, help="How many cores to use without a cluster.")] = 2,
    heap_mb: Annotated[int, typer.Option(min=512, help="How much memory the driver's Java may use, in MB.")] = 1024,
    lease_seconds: Annotated[
        float, typer.Option(min=1, help="How long after this process dies another may take over.")
    ] = 15.0,
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="How long a batch may take to finish after Ctrl-C or SIGTERM.")
    ] = 60.0,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Run pipelines until Ctrl-C, SIGTERM or `headwater pipeline stop`. A second Ctrl-C does not wait.

    A pipeline that another process runs is stood by for: this one takes over when the other is gone. What fails is
    tried again; what cannot work ends the command.
    """
    declared = _read(file)
    chosen = declared.chosen(names or [])
    database = session(context).dsn(dsn or declared.postgres)
    with translated():
        connect(database).close()
    spark = _spark(declared, master=master, cores=cores, heap_mb=heap_mb, fast_start=once, as_json=as_json)
    from headwater.spark.pipelines.runner import Runner, Settings

    runner = Runner(
        spark,
        chosen,
        Settings(
            dsn=database,
            nats_url=declared.nats,
            directory=file.resolve().parent,
            checkpoints=declared.checkpoints,
            lease_seconds=lease_seconds,
            grace_seconds=grace_seconds,
            once=once,
        ),
        report=_Teller(as_json=as_json),
    )
    _stop_on_signals(runner.stop, as_json=as_json)
    try:
        runner.run()
    finally:
        spark.stop()


@app.command(
    epilog=examples("headwater pipeline rebuild totals", "headwater pipeline rebuild totals -f shop.yaml --cores 4")
)
def rebuild(
    context: typer.Context,
    name: Name,
    file: FileOption = DEFAULT_FILE,
    master: Annotated[
        str | None, typer.Option(metavar="URL", help="A Spark cluster; default: in this process.")
    ] = None,
    cores: Annotated[int, typer.Option(min=1, help="How many cores to use without a cluster.")] = 2,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Build a pipeline's tables anew from the beginning of the log, and put them in the place of the old ones.

    The old ones are served, and kept up to date by whoever runs the pipeline, until the new ones have caught up. If
    this is stopped or killed, nothing has changed.
    """
    declared = _read(file)
    (spec,) = declared.chosen([name])
    database = session(context).dsn(dsn or declared.postgres)
    with translated():
        connect(database).close()
    spark = _spark(declared, master=master, cores=cores, heap_mb=1024, fast_start=False, as_json=as_json)
    from headwater.spark.pipelines import rebuild as rebuilding
    from headwater.spark.pipelines.runner import Settings

    settings = Settings(
        dsn=database, nats_url=declared.nats, directory=file.resolve().parent, checkpoints=declared.checkpoints
    )
    try:
        changed = rebuilding.rebuild(spark, spec, settings, report=_Teller(as_json=as_json))
    finally:
        spark.stop()
    if as_json:
        output.emit({"rebuilt": name} | dict(changed))
    else:
        output.say(f"{name} is rebuilt: {changed['written']:,} rows written, {changed['removed']:,} removed")


@app.command("list", epilog=examples("headwater pipeline list", "headwater pipeline list -f shop.yaml --json"))
def list_pipelines(file: FileOption = DEFAULT_FILE, as_json: Json = False) -> None:
    """List what a file declares. Touches nothing else."""
    declared = _read(file)
    if as_json:
        output.emit([{"name": spec.name} | spec.definition for spec in declared.pipelines])
        return
    output.table(
        ("name", "from", "transform", "to"),
        (
            (
                spec.name,
                spec.source,
                "-" if spec.transform is None else next(kind for kind in ("sql", "python") if kind in spec.transform),
                ", ".join(sink.kind for sink in spec.sinks),
            )
            for spec in declared.pipelines
        ),
        empty="none",
    )


@app.command(epilog=examples("headwater pipeline validate", "headwater pipeline validate -f shop.yaml"))
def validate(
    context: typer.Context,
    file: FileOption = DEFAULT_FILE,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Check a file, and whether what it needs of Postgres is there. Changes nothing and starts no Spark."""
    declared = _read(file)
    with needs("spark,nats"):
        from headwater.spark.pipelines.validation import problems
    database = session(context).dsn(dsn or declared.postgres)
    with translated():
        connect(database).close()
    found = problems(declared, dsn=database, directory=file.resolve().parent)
    if found:
        raise InvalidRequest("; ".join(found), detail={"problems": found})
    if as_json:
        output.emit({"valid": True, "pipelines": [spec.name for spec in declared.pipelines]})
    else:
        output.say(f"{file} is good: {', '.join(spec.name for spec in declared.pipelines)}")


@app.command(
    epilog=examples(
        "headwater pipeline status", "headwater pipeline status totals --json", "headwater pipeline status --batches"
    )
)
def status(
    context: typer.Context,
    names: Names = None,
    batches: Annotated[
        bool, typer.Option("--batches", help="The last 20 batches of each, and the tries that failed.")
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """How the pipelines of a database are doing: who runs them, how far they are, what went wrong."""
    with session(context).log(dsn) as log:
        found = log.run(calls.pipeline_statuses())
        if names:
            missing = set(names) - {one.name for one in found}
            if missing:
                raise PipelineNotFound(f"{', '.join(sorted(missing))} was never run on this database")
            found = [one for one in found if one.name in names]
        if batches:
            told = [(one.name, batch) for one in found for batch in log.run(calls.pipeline_batches(one.name))]
            _tell_batches(told, as_json=as_json)
            return
    if as_json:
        output.emit(found)
        return
    output.table(
        ("name", "state", "place", "behind", "rows", "batches", "last batch", "runner", "last error"),
        (_row(one) for one in found),
        empty="no pipeline was ever run on this database: headwater pipeline run",
    )


def _tell_batches(told: Sequence[tuple[str, PipelineBatch]], *, as_json: bool) -> None:
    if as_json:
        output.emit([{"pipeline": name} | asdict(one) for name, one in told])
        return
    output.table(
        ("name", "ended", "rows", "seconds", "error"),
        (
            (
                name,
                one.ended_at,
                f"{one.rows:,}",
                (one.details or {}).get("seconds", "-"),
                "-" if one.error is None else _first_line(one.error),
            )
            for name, one in told
        ),
        empty="no batch yet",
    )


def _first_line(error: str) -> str:
    return (error.splitlines() or [""])[0][:80]


def _row(one: PipelineStatus) -> tuple[Any, ...]:
    return (
        one.name,
        one.state,
        place_text(one.source, one.place),
        "-"
        if one.behind is None
        else f"{max(0, one.behind):,}{'+' * one.behind_is_more}{' B' if one.source == 'changes' else ''}",
        f"{one.rows:,}",
        one.batches,
        one.last_batch_at,
        one.runner or "-",
        _first_line(one.last_error or "-") if one.failures or one.state in ("lost", "failed") else "-",
    )


@app.command(epilog=examples("headwater pipeline stop orders-to-nats", "headwater pipeline stop archive --wait 60"))
def stop(
    context: typer.Context,
    name: Name,
    wait: Annotated[float, typer.Option(min=0, help="How many seconds to wait until it has stopped.")] = 30.0,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Ask whoever runs a pipeline to stop after its batch, wherever that is; nobody takes over."""
    waited = threading.Event()
    with session(context).log(dsn) as log:
        with acting(log, "pipeline.stop", name) as acted:
            running = acted.run(calls.stop_pipeline(name))
        left = wait
        while running and left > 0:
            waited.wait(0.25)
            left -= 0.25
            running = log.run(calls.stop_pipeline(name))
    if as_json:
        output.emit({"name": name, "stopped": not running})
    else:
        output.say(f"{name} has stopped" if not running else f"{name} was asked to stop and is still running")


@app.command(
    epilog=examples(
        "headwater pipeline reset totals --yes",
        "headwater pipeline reset archive --to 120000 --yes",
        "headwater pipeline reset orders-to-nats --forget --drop-slot --yes",
    )
)
def reset(
    context: typer.Context,
    name: Name,
    file: FileOption = DEFAULT_FILE,
    to: Annotated[
        int | None, typer.Option(metavar="PLACE", help="Begin after this position; default: where a new one would.")
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Write to topics again what was written to them before.")
    ] = False,
    drop_slot: Annotated[
        bool, typer.Option("--drop-slot", help="Drop its replication slot: changes from now on only.")
    ] = False,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Let a pipeline begin again. Asks first. What its sinks have stays, and they skip what they have."""
    declared = _read(file)
    (spec,) = declared.chosen([name])
    if to is not None and spec.source == "changes":
        raise InvalidRequest("captured changes cannot be read again from a place of one's choice")
    output.confirm(f"let {name} begin again?", yes=yes)
    database = session(context).dsn(dsn or declared.postgres)
    detail = {"place": to, "forget_written": forget, "drop_slot": drop_slot}
    with session(context).log(database) as log, acting(log, "pipeline.reset", name, detail) as log:
        log.run(calls.reset_pipeline(name, place=to, forget_written=forget))
    if drop_slot and spec.source == "changes":
        from headwater.capture.slot import Slot

        Slot(database, spec.slot, spec.slot).drop()
    if as_json:
        output.emit({"reset": name, "place": to})
    else:
        output.say(f"{name} begins again {'where a new one would' if to is None else f'after {to}'}")


@app.command(epilog=examples("headwater pipeline delete totals --yes"))
def delete(context: typer.Context, name: Name, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Forget a pipeline's place and errors. Asks first. What it wrote, its checkpoint and its slot stay."""
    with session(context).log(dsn) as log:
        output.confirm(f"forget pipeline {name}?", yes=yes)
        with acting(log, "pipeline.delete", name) as log:
            log.run(calls.delete_pipeline(name))
    if as_json:
        output.emit({"deleted": name})
    else:
        output.say(f"{name} is forgotten")


def _read(file: Path) -> PipelineFile:
    with needs("spark,nats"):
        from headwater.spark.pipelines.file import parse
    try:
        text = file.read_text()
    except OSError as error:
        raise NotThere(
            f"no file {file}: {error.strerror}",
            hint="Name it with --file; docs/how-to/pipelines.md has one to start from.",
        ) from error
    return parse(text, os.environ)


def _spark(
    declared: PipelineFile, *, master: str | None, cores: int, heap_mb: int, fast_start: bool, as_json: bool
) -> SparkSession:
    """A session for the pipelines of a file, which says nothing by itself."""
    with needs("spark,nats"):
        from headwater.spark import local_session
    if not as_json:
        output.note("starting Spark")
    spark = local_session(
        "headwater pipelines",
        master=master,
        cores=cores,
        heap_mb=heap_mb,
        fast_start=fast_start,
        extra_settings=declared.spark,
    )
    # What goes wrong is told by us, once, and without Java's tracebacks.
    spark.sparkContext.setLogLevel("OFF")
    return spark


def place_text(source: str, place: int | None) -> str:
    """A place as people write it: a position, or an LSN as Postgres shows it."""
    if place is None:
        return "-"
    return f"{place >> 32:X}/{place & 0xFFFFFFFF:X}" if source == "changes" else f"{place:,}"


class _Teller:
    """Tells what happens: a line each for people, a document each for programs."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._lock = threading.Lock()

    def __call__(self, report: Report) -> None:
        with self._lock:
            if self._as_json:
                output.emit({"pipeline": report.pipeline, "what": report.what} | dict(report.details))
            else:
                output.note(f"{report.pipeline:<20} {self._line(report)}")

    def _line(self, report: Report) -> str:
        about = report.details
        match report.what:
            case "batch":
                rate = about["rows"] / about["seconds"] if about["seconds"] else 0
                return (
                    f"batch {about['batch']}: {about['rows']:,} rows in {about['seconds']:.1f} s "
                    f"({rate:,.0f}/s), at {place_text(report.source, about['place'])}"
                )
            case "started":
                if about["place"] is None:
                    return "running"
                return f"running, from {place_text(report.source, about['place'])}"
            case "standing by":
                return f"standing by: {about['runner']} runs it"
            case "snapshot" if about["state"] == "loading":
                return f"loading {about['table']}"
            case "snapshot":
                return f"loaded {about['table']}: {about['rows']:,} rows"
            case "failed":
                return f"failed, again in {about['again_in_seconds']:g} s: {about['error']}"
            case "ended":
                return f"ended: {about['error']}"
        return report.what


def _stop_on_signals(stop: Any, *, as_json: bool) -> None:
    """Let the first signal stop in an orderly way, and the second at once."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not as_json:
            output.note("stopping after the batch; Ctrl-C again does not wait")
        stop()
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.default_int_handler)

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, on_signal)
