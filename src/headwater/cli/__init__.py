"""The command line `headwater`: which nouns and verbs there are, and how every run of it ends."""

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
from headwater.cli.connection import Session
from headwater.errors import HeadwaterError

# Typer does not name the class of wrong usage in all of its versions; it is what a bad parameter is.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# Every noun, and every verb without a noun, and the module of its commands; in the order of the help.
COMMANDS: Final = {
    "up": "up",
    "down": "up",
    "demo": "demo",
    "publish": "publish",
    "read": "read",
    "tail": "read",
    "topic": "topic",
    "cursor": "cursor",
    "archive": "archive",
    "group": "group",
    "dead": "dead",
    "webhook": "webhook",
    "work": "work",
    "sub": "sub",
    "table": "table",
    "scheduled": "scheduled",
    "periodic": "periodic",
    "pipeline": "pipeline",
    "lake": "lake",
    "replay": "replay",
    "replica": "replica",
    "serve": "serve",
    "account": "account",
    "schema": "schema",
    "migrate": "migrate",
    "doctor": "doctor",
    "maintain": "maintain",
    "metrics": "metrics",
    "check": "metrics",
    "settings": "log_settings",
    "bench": "bench",
    "chaos": "chaos",
}
# A verb is a command of its module; a noun is the module, whose commands are its verbs.
VERBS: Final = frozenset(
    {"up", "down", "demo", "publish", "read", "tail", "work", "replay", "replica", "serve", "migrate", "doctor"}
    | {"maintain", "metrics", "check", "bench", "chaos"}
)


class _Commands(Mapping[str, Any]):
    """The commands by name. A module is imported, and the options of its commands are built, when one of them is used:
    all modules together take longer than most commands do.
    """

    def __getitem__(self, name: str) -> Any:
        module = COMMANDS[name]
        # Without a name, Typer adds the module's commands to the holder itself.
        holder = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        holder.add_typer(importlib.import_module(f"headwater.cli.{module}").app, name=None if name in VERBS else name)
        return typer.main.get_group(holder).commands[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Root(TyperGroup):
    """The root of the command line: turns every error of ours into words and an exit code, in one place."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()

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


def main() -> None:
    """The entry point of the program `headwater`."""
    app(prog_name="headwater")
