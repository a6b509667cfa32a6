"""The command line `headwater`.

`PANELS` maps each command to its module in `headwater.cli.commands`, which is imported when called.
The root command turns every HeadwaterError into a message on standard error and an exit code (`exit_codes`).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

import headwater
from headwater.cli import exit_codes, output
from headwater.errors import HeadwaterError, QueueNotFound, TopicNotFound

# Not all versions of Typer export the base class of usage errors.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# The top-level commands in the order of the help text, by the panel that lists them there, each with its module.
PANELS: Final[Mapping[str, Mapping[str, str]]] = {
    "Start": {"up": "up", "down": "up", "status": "status", "demo": "demo", "docs": "docs", "migrate": "migrate"},
    "Publish and read": {
        "publish": "publish",
        "read": "read",
        "tail": "read",
        "topic": "topic",
        "cursor": "cursor",
        "schema": "schema",
        "archive": "archive",
        "replay": "replay",
    },
    "Queues": {"queue": "queue", "work": "work", "dead": "dead", "sub": "sub", "webhook": "webhook"},
    "Tables and schedules": {"table": "table", "scheduled": "scheduled", "cron": "cron"},
    "Pipelines": {"pipeline": "pipeline", "lake": "lake", "replica": "replica"},
    "Servers": {"serve": "serve", "account": "account"},
    "Operate": {
        "doctor": "doctor",
        "maintain": "maintain",
        "metrics": "metrics",
        "check": "metrics",
        "settings": "settings",
        "bench": "bench",
        "chaos": "chaos",
    },
}
COMMANDS: Final = {name: module for commands in PANELS.values() for name, module in commands.items()}
_PANEL_OF: Final = {name: panel for panel, commands in PANELS.items() for name in commands}
# A verb is one command of its module. All others are nouns: the module is a group of subcommands.
VERBS: Final = frozenset(
    {
        "up",
        "down",
        "status",
        "demo",
        "docs",
        "publish",
        "read",
        "tail",
        "work",
        "replay",
        "replica",
        "serve",
        "migrate",
        "doctor",
    }
    | {"maintain", "metrics", "check", "bench", "chaos"}
)


class _LazyCommands(Mapping[str, Any]):
    """The commands by name, imported lazily: importing all modules takes longer than most commands run."""

    def __getitem__(self, name: str) -> Any:
        module = COMMANDS[name]
        # If the name is None, Typer adds the module's commands to the parent itself.
        parent = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        app = importlib.import_module(f"headwater.cli.commands.{module}").app
        parent.add_typer(app, name=None if name in VERBS else name)
        command: Any = typer.main.get_group(parent).commands[name]
        command.rich_help_panel = _PANEL_OF[name]
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _RootCommand(TyperGroup):
    """The root command: reports every HeadwaterError and exits with its code."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _LazyCommands()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Found without parsing, since the error may be in the options themselves.
        ctx.meta["headwater.json"] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        as_json = ctx.meta["headwater.json"]
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except (TopicNotFound, QueueNotFound) as error:
            from headwater.cli.suggestions import with_suggestion

            raise typer.Exit(output.report_error(with_suggestion(error, ctx.obj), as_json=as_json)) from None
        except HeadwaterError as error:
            raise typer.Exit(output.report_error(error, as_json=as_json)) from None
        except KeyboardInterrupt:
            raise typer.Exit(exit_codes.INTERRUPTED) from None
        except BrokenPipeError:
            # Otherwise Python reports a second error when it flushes standard output at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(exit_codes.OUTPUT_CLOSED) from None
        except _UsageError as error:
            if not as_json:
                raise
            # With the names that may have been meant.
            message = error.format_message() if hasattr(error, "format_message") else str(error)
            output.print_status(output.to_json({"error": "Usage", "message": message, "exit_code": exit_codes.USAGE}))
            raise typer.Exit(exit_codes.USAGE) from None


app = typer.Typer(
    cls=_RootCommand,
    name="headwater",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


class LogFormat(StrEnum):
    """The format of log lines."""

    TEXT = "text"
    JSON = "json"


def _print_version(requested: bool) -> None:
    if requested:
        output.print_line(headwater.__version__)
        raise typer.Exit


@app.callback(
    epilog="Run `headwater COMMAND --help` for options and examples. Exit codes: `headwater docs reference/cli`."
)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(help="Format of log lines on standard error. Overrides HEADWATER_LOG_FORMAT."),
    ] = None,
) -> None:
    """Headwater: an event log in Postgres. Publish an event once, consume it in many ways."""
    from headwater.cli.connection import Session

    context.obj = Session(log_format=log_format.value if log_format is not None else None)


def main() -> None:
    """Run the command line; the entry point of the program `headwater`."""
    app(prog_name="headwater")
