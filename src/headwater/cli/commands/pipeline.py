"""`headwater pipeline`: run, rebuild, validate, stop and reset pipelines, and show their status."""

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

from headwater.calls import pipeline_runs
from headwater.cli import output
from headwater.cli.audit import audit
from headwater.cli.connection import connect, session, translate_errors
from headwater.cli.exit_codes import NotFound
from headwater.cli.optional_packages import require_extras
from headwater.cli.options import Dsn, Json, Yes, examples
from headwater.errors import InvalidRequest, PipelineNotFound

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.calls.pipeline_runs import PipelineBatch, PipelineStatus
    from headwater.spark.pipelines.file import PipelineFile
    from headwater.spark.pipelines.runner import Report

app = typer.Typer(help="Run and manage pipelines on Spark, declared in a YAML file.", no_args_is_help=True)

FileOption = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="File that declares the pipelines.")]
Names = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Names of pipelines. Default: all.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the pipeline.", show_default=False)]
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
    once: Annotated[bool, typer.Option("--once", help="Stop when all existing data is processed.")] = False,
    master: Annotated[
        str | None, typer.Option(metavar="URL", help="URL of a Spark cluster. Default: run Spark in this process.")
    ] = None,
    cores: Annotated[int, typer.Option(min=1, help="Number of cores to use without a cluster.")] = 2,
    heap_mb: Annotated[int, typer.Option(min=512, help="Java heap of the Spark driver in MB.")] = 1024,
    lease_seconds: Annotated[
        float, typer.Option(min=1, help="Seconds after which another process takes over if this one dies.")
    ] = 15.0,
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that a running batch has to finish after Ctrl-C or SIGTERM.")
    ] = 60.0,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Run pipelines until Ctrl-C, SIGTERM or `headwater pipeline stop`. A second Ctrl-C stops immediately.

    If another process runs a pipeline, this one is a standby and takes over when the other stops. Failed batches are
    retried; a permanent error, such as an invalid table, ends the command.
    """
    declared = _read(file)
    chosen = declared.chosen(names or [])
    database = session(context).dsn(dsn or declared.postgres)
    with translate_errors():
        connect(database).close()
    spark = _spark(declared, master=master, cores=cores, heap_mb=heap_mb, fast_start=once, as_json=as_json)
    from headwater.spark.pipelines.runner import Runner, RunnerSettings

    runner = Runner(
        spark,
        chosen,
        RunnerSettings(
            dsn=database,
            nats_url=declared.nats,
            directory=file.resolve().parent,
            checkpoints=declared.checkpoints,
            lease_seconds=lease_seconds,
            grace_seconds=grace_seconds,
            once=once,
        ),
        report=_ReportPrinter(as_json=as_json),
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
        str | None, typer.Option(metavar="URL", help="URL of a Spark cluster. Default: run Spark in this process.")
    ] = None,
    cores: Annotated[int, typer.Option(min=1, help="Number of cores to use without a cluster.")] = 2,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Build a pipeline's tables again from the beginning of the log, then replace the old tables.

    Until the new tables have caught up, the old ones stay in use and are updated by the running pipeline. If the
    rebuild is stopped or killed, nothing changes.
    """
    declared = _read(file)
    (spec,) = declared.chosen([name])
    database = session(context).dsn(dsn or declared.postgres)
    with translate_errors():
        connect(database).close()
    spark = _spark(declared, master=master, cores=cores, heap_mb=1024, fast_start=False, as_json=as_json)
    from headwater.spark.pipelines import rebuild as pipeline_rebuild
    from headwater.spark.pipelines.runner import RunnerSettings

    settings = RunnerSettings(
        dsn=database, nats_url=declared.nats, directory=file.resolve().parent, checkpoints=declared.checkpoints
    )
    try:
        changed = pipeline_rebuild.rebuild(spark, spec, settings, report=_ReportPrinter(as_json=as_json))
    finally:
        spark.stop()
    output.print_result(
        {"rebuilt": name} | dict(changed),
        f"rebuilt pipeline {name} ({changed['written']:,} rows written, {changed['removed']:,} removed)",
        as_json=as_json,
    )


@app.command("list", epilog=examples("headwater pipeline list", "headwater pipeline list -f shop.yaml --json"))
def list_pipelines(file: FileOption = DEFAULT_FILE, as_json: Json = False) -> None:
    """List the pipelines that a file declares. Does not connect to the database."""
    declared = _read(file)
    if as_json:
        output.emit([{"name": spec.name} | spec.definition for spec in declared.pipelines])
        return
    output.print_table(
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
        empty="the file declares no pipelines",
    )


@app.command(epilog=examples("headwater pipeline validate", "headwater pipeline validate -f shop.yaml"))
def validate(
    context: typer.Context,
    file: FileOption = DEFAULT_FILE,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Check a file and its requirements in Postgres. Changes nothing and does not start Spark."""
    declared = _read(file)
    with require_extras("spark,nats"):
        from headwater.spark.pipelines.validation import problems
    database = session(context).dsn(dsn or declared.postgres)
    with translate_errors():
        connect(database).close()
    found = problems(declared, dsn=database, directory=file.resolve().parent)
    if found:
        raise InvalidRequest("; ".join(found), detail={"problems": found})
    output.print_result(
        {"valid": True, "pipelines": [spec.name for spec in declared.pipelines]},
        f"{file} is valid: {', '.join(spec.name for spec in declared.pipelines)}",
        as_json=as_json,
    )


@app.command(
    epilog=examples(
        "headwater pipeline status", "headwater pipeline status totals --json", "headwater pipeline status --batches"
    )
)
def status(
    context: typer.Context,
    names: Names = None,
    batches: Annotated[
        bool, typer.Option("--batches", help="Show the last 20 batches of each, including failed attempts.")
    ] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Show the state, checkpoint, runner and last error of each pipeline."""
    with session(context).log(dsn) as log:
        found = log.run(pipeline_runs.pipeline_statuses())
        if names:
            missing = set(names) - {one.name for one in found}
            if missing:
                raise PipelineNotFound(f"never run on this database: {', '.join(sorted(missing))}")
            found = [one for one in found if one.name in names]
        if batches:
            batches_by_name = [
                (one.name, batch) for one in found for batch in log.run(pipeline_runs.pipeline_batches(one.name))
            ]
            _print_batches(batches_by_name, as_json=as_json)
            return
    if as_json:
        output.emit(found)
        return
    output.print_table(
        ("name", "state", "checkpoint", "behind", "rows", "batches", "last batch", "runner", "last error"),
        (_row(one) for one in found),
        empty="no pipeline was run on this database; start one with headwater pipeline run",
    )


def _print_batches(batches: Sequence[tuple[str, PipelineBatch]], *, as_json: bool) -> None:
    if as_json:
        output.emit([{"pipeline": name} | asdict(one) for name, one in batches])
        return
    output.print_table(
        ("name", "ended", "rows", "seconds", "error"),
        (
            (
                name,
                one.ended_at,
                f"{one.rows:,}",
                (one.details or {}).get("seconds", "-"),
                "-" if one.error is None else _first_line(one.error),
            )
            for name, one in batches
        ),
        empty="no batches",
    )


def _first_line(error: str) -> str:
    return (error.splitlines() or [""])[0][:80]


def _row(one: PipelineStatus) -> tuple[Any, ...]:
    return (
        one.name,
        one.state,
        format_checkpoint(one.source, one.checkpoint),
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
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until it has stopped.")] = 30.0,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Stop a pipeline after its current batch, on whichever machine it runs. No standby takes over."""
    waited = threading.Event()
    with session(context).log(dsn) as log:
        with audit(log, "pipeline.stop", name) as acted:
            running = acted.run(pipeline_runs.stop_pipeline(name))
        left = wait
        while running and left > 0:
            waited.wait(0.25)
            left -= 0.25
            running = log.run(pipeline_runs.stop_pipeline(name))
    output.print_result(
        {"name": name, "stopped": not running},
        f"stopped pipeline {name}" if not running else f"requested stop of pipeline {name}; it is still running",
        as_json=as_json,
    )


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
        int | None,
        typer.Option(metavar="POSITION", help="Restart after this position. Default: the start of a new pipeline."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Publish again to topics the events that were already published.")
    ] = False,
    drop_slot: Annotated[
        bool, typer.Option("--drop-slot", help="Drop its replication slot; only changes from then on are captured.")
    ] = False,
    yes: Yes = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Reset the checkpoint of a pipeline. Asks for confirmation. Sinks keep their data and skip duplicates."""
    declared = _read(file)
    (spec,) = declared.chosen([name])
    if to is not None and spec.source == "changes":
        raise InvalidRequest(
            "--to is not supported for a pipeline that captures changes: a replication slot cannot go back"
        )
    output.confirm(f"reset pipeline {name}?", yes=yes)
    database = session(context).dsn(dsn or declared.postgres)
    detail = {"checkpoint": to, "forget_written": forget, "drop_slot": drop_slot}
    with session(context).log(database) as log, audit(log, "pipeline.reset", name, detail) as log:
        log.run(pipeline_runs.reset_pipeline(name, checkpoint=to, forget_written=forget))
    if drop_slot and spec.source == "changes":
        from headwater.capture.slot import Slot

        Slot(database, spec.slot, spec.slot).drop()
    output.print_result(
        {"reset": name, "checkpoint": to},
        f"reset pipeline {name} (starts {'from the beginning' if to is None else f'after position {to}'})",
        as_json=as_json,
    )


@app.command(epilog=examples("headwater pipeline delete totals --yes"))
def delete(context: typer.Context, name: Name, yes: Yes = False, dsn: Dsn = None, as_json: Json = False) -> None:
    """Delete a pipeline's state from the database. Asks for confirmation.

    The data that it wrote, its checkpoint directory and its replication slot are not deleted.
    """
    with session(context).log(dsn) as log:
        output.confirm(f"delete pipeline {name}?", yes=yes)
        with audit(log, "pipeline.delete", name) as log:
            log.run(pipeline_runs.delete_pipeline(name))
    output.print_result({"deleted": name}, f"deleted pipeline {name}", as_json=as_json)


def _read(file: Path) -> PipelineFile:
    with require_extras("spark,nats"):
        from headwater.spark.pipelines.file import parse
    try:
        text = file.read_text()
    except OSError as error:
        raise NotFound(
            f"cannot read {file}: {error.strerror}",
            hint="Give the file with --file; `headwater docs pipelines` shows an example.",
        ) from error
    return parse(text, os.environ)


def _spark(
    declared: PipelineFile, *, master: str | None, cores: int, heap_mb: int, fast_start: bool, as_json: bool
) -> SparkSession:
    """Start a Spark session for the pipelines of a file, without log output of Spark."""
    with require_extras("spark,nats"):
        from headwater.spark import local_session
    if not as_json:
        output.print_status("starting Spark")
    spark = local_session(
        "headwater pipelines",
        master=master,
        cores=cores,
        heap_mb=heap_mb,
        fast_start=fast_start,
        extra_settings=declared.spark,
    )
    # Headwater reports errors once, without Java stack traces.
    spark.sparkContext.setLogLevel("OFF")
    return spark


def format_checkpoint(source: str, checkpoint: int | None) -> str:
    """Format a checkpoint: a position, or the LSN of a pipeline that captures changes."""
    if checkpoint is None:
        return "-"
    return f"{checkpoint >> 32:X}/{checkpoint & 0xFFFFFFFF:X}" if source == "changes" else f"{checkpoint:,}"


class _ReportPrinter:
    """Prints the reports of a runner: one line each, or one JSON document each."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._lock = threading.Lock()

    def __call__(self, report: Report) -> None:
        with self._lock:
            if self._as_json:
                output.emit({"pipeline": report.pipeline, "what": report.what} | dict(report.details))
            else:
                output.print_status(f"{report.pipeline:<20} {self._line(report)}")

    def _line(self, report: Report) -> str:
        details = report.details
        match report.what:
            case "batch":
                rate = details["rows"] / details["seconds"] if details["seconds"] else 0
                return (
                    f"batch {details['batch']}: {details['rows']:,} rows in {details['seconds']:.1f} s "
                    f"({rate:,.0f}/s), at {format_checkpoint(report.source, details['checkpoint'])}"
                )
            case "started":
                if details["checkpoint"] is None:
                    return "running"
                return f"running, from {format_checkpoint(report.source, details['checkpoint'])}"
            case "standing by":
                return f"standby: {details['runner']} runs it"
            case "snapshot" if details["state"] == "loading":
                return f"loading {details['table']}"
            case "snapshot":
                return f"loaded {details['table']}: {details['rows']:,} rows"
            case "failed":
                return f"failed, retrying in {details['again_in_seconds']:g} s: {details['error']}"
            case "ended":
                return f"stopped by a permanent error: {details['error']}"
        return report.what


def _stop_on_signals(stop: Any, *, as_json: bool) -> None:
    """Stop gracefully on the first SIGINT or SIGTERM, and immediately on the second."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not as_json:
            output.print_status("stopping after the current batch; press Ctrl-C again to stop immediately")
        stop()
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.default_int_handler)

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, on_signal)
