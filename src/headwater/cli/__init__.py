"""The command line `headwater`: which nouns and verbs there are, and how every run of it ends."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import headwater
from headwater.cli import (
    account,
    archive,
    bench,
    chaos,
    cursor,
    dead,
    demo,
    doctor,
    exit_codes,
    group,
    lake,
    log_settings,
    maintain,
    metrics,
    migrate,
    output,
    periodic,
    pipeline,
    publish,
    read,
    replay,
    replica,
    scheduled,
    schema,
    serve,
    sub,
    table,
    topic,
    up,
    webhook,
    work,
)
from headwater.cli.connection import Session
from headwater.errors import HeadwaterError

# Typer does not name the class of wrong usage in all of its versions; it is what a bad parameter is.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class _Root(TyperGroup):
    """The root of the command line: turns every error of ours into words and an exit code, in one place."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Looked up here, since what is wrong may be the very parsing of the options.
        ctx.meta["headwater.json"] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        as_json = ctx.meta["headwater.json"]
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except HeadwaterError as error:
            raise typer.Exit(output.report(error, as_json=as_json)) from None
        except KeyboardInterrupt:
            raise typer.Exit(exit_codes.INTERRUPTED) from None
        except BrokenPipeError:
            # Python would try to flush what is left, and complain; there is nobody to hear it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(exit_codes.OUTPUT_CLOSED) from None
        except _UsageError as error:
            if not as_json:
                raise
            message = str(getattr(error, "message", error))
            output.note(output.dumped({"error": "Usage", "message": message, "exit_code": exit_codes.USAGE}))
            raise typer.Exit(exit_codes.USAGE) from None


app = typer.Typer(
    cls=_Root,
    name="headwater",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


class LogFormat(StrEnum):
    """How log lines look."""

    TEXT = "text"
    JSON = "json"


def _print_version(wanted: bool) -> None:
    if wanted:
        output.say(headwater.__version__)
        raise typer.Exit


@app.callback(epilog="See `headwater COMMAND --help` for examples, and docs/reference/cli.md for exit codes.")
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(help="How log lines are written to standard error. Goes before HEADWATER_LOG_FORMAT."),
    ] = None,
) -> None:
    """One event log in your Postgres. Write an event once; consume it every way."""
    context.obj = Session(log_format=log_format.value if log_format is not None else None)


# A noun is one line here; a verb without a noun is one line without a name.
app.add_typer(up.app)
app.add_typer(demo.app)
app.add_typer(publish.app)
app.add_typer(read.app)
app.add_typer(topic.app, name="topic")
app.add_typer(cursor.app, name="cursor")
app.add_typer(archive.app, name="archive")
app.add_typer(group.app, name="group")
app.add_typer(dead.app, name="dead")
app.add_typer(webhook.app, name="webhook")
app.add_typer(work.app)
app.add_typer(sub.app, name="sub")
app.add_typer(table.app, name="table")
app.add_typer(scheduled.app, name="scheduled")
app.add_typer(periodic.app, name="periodic")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(lake.app, name="lake")
app.add_typer(replay.app)
app.add_typer(replica.app)
app.add_typer(serve.app)
app.add_typer(account.app, name="account")
app.add_typer(schema.app, name="schema")
app.add_typer(migrate.app)
app.add_typer(doctor.app)
app.add_typer(maintain.app)
app.add_typer(metrics.app)
app.add_typer(log_settings.app, name="settings")
app.add_typer(bench.app)
app.add_typer(chaos.app)


def main() -> None:
    """The entry point of the program `headwater`."""
    app(prog_name="headwater")
