"""`headwater metrics` and `headwater check`: the log in figures, and whether it can be worked with, with no server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from headwater import aio
from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, examples
from headwater.cli.connection import CONNECT_SECONDS, connect, session, translated
from headwater.cli.exit_codes import ChecksFailed
from headwater.errors import HeadwaterError, LogUnavailable
from headwater.servers.prometheus import POSITIONS, Check, is_ready, readiness, render

app = typer.Typer()
T = TypeVar("T")


@app.command(epilog=examples("headwater metrics", "headwater metrics --json", "headwater metrics | grep group_lag"))
def metrics(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """Print the metrics of the log as Prometheus reads them; see docs/reference/metrics.md for what they mean.

    The same as a server gives at /metrics, less what processes count by themselves. For the textfile collector of
    node_exporter, write it to a file every minute.
    """
    with session(context).log(dsn) as log:
        if as_json:
            output.emit(log.metrics())
            return
    sys.stdout.buffer.write(_asked(session(context).dsn(dsn), render))


@app.command(epilog=examples("headwater check", "headwater check --strict --json"))
def check(
    context: typer.Context,
    strict: Annotated[bool, typer.Option("--strict", help="Let a warning fail, too.", show_default=False)] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Whether the log can be worked with, as an exit code: 0 if so, else 1. Fast enough for a probe every second.

    `headwater doctor` looks at more, and takes longer.
    """
    found = _checks(session(context).dsn(dsn))
    failed = [one.name for one in found if not one.ok and (one.required or strict or one.name == POSITIONS)]
    if as_json:
        output.emit({"ready": is_ready(found), "checks": found})
    else:
        for one in found:
            outcome = "ok" if one.ok else "fail" if one.name in failed else "warn"
            output.say(f"{outcome:<4}  {one.name}: {output.visible(one.message)}")
            if not one.ok and one.action:
                output.say(f"      {output.visible(one.action)}")
    if failed:
        raise ChecksFailed(f"failed: {', '.join(failed)}")


def _checks(dsn: str) -> list[Check]:
    try:
        with translated():
            connect(dsn).close()
        return _asked(dsn, readiness)
    except LogUnavailable as error:
        return [Check("database", False, error.message, error.hint)]
    except HeadwaterError as error:
        # What is found out before there is a log to ask.
        return [Check("database", True, "the database answers"), Check("schema", False, error.message, error.hint)]


def _asked(dsn: str, ask: Callable[[aio.AsyncHeadwater], Awaitable[T]]) -> T:
    async def run() -> T:
        opening = aio.connect(
            dsn, pool_size=1, connect_timeout_seconds=CONNECT_SECONDS, application_name="headwater cli"
        )
        async with await opening as log:
            return await ask(log)

    return asyncio.run(run())
