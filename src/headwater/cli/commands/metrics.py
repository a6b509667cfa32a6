"""`headwater metrics` and `headwater check`: metrics and readiness of the log, without a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from headwater import aio
from headwater.cli import output
from headwater.cli.connection import CONNECT_SECONDS, connect, session, translate_errors
from headwater.cli.exit_codes import ChecksFailed
from headwater.cli.options import Dsn, Json, examples
from headwater.errors import HeadwaterError, LogUnavailable
from headwater.servers.prometheus import POSITIONS, Check, is_ready, readiness, render

app = typer.Typer()
T = TypeVar("T")


@app.command(epilog=examples("headwater metrics", "headwater metrics --json", "headwater metrics | grep queue_lag"))
def metrics(context: typer.Context, dsn: Dsn = None, as_json: Json = False) -> None:
    """Print the metrics of the log in the Prometheus text format.

    `headwater docs reference/metrics` describes them.

    The output is that of a server's /metrics without the counters of the server process. For the textfile collector
    of node_exporter, write it to a file every minute.
    """
    with session(context).log(dsn) as log:
        if as_json:
            output.emit(log.metrics())
            return
    sys.stdout.buffer.write(_run_async(session(context).dsn(dsn), render))


@app.command(epilog=examples("headwater check", "headwater check --strict --json"))
def check(
    context: typer.Context,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as failures.", show_default=False)] = False,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Check whether the log is ready; exits with 0 if it is, otherwise with 1. Fast enough for a probe every second.

    `headwater doctor` checks more and takes longer.
    """
    found = _checks(session(context).dsn(dsn))
    failed = [one.name for one in found if not one.ok and (one.required or strict or one.name == POSITIONS)]
    if as_json:
        output.emit({"ready": is_ready(found), "checks": found})
    else:
        for one in found:
            outcome = "ok" if one.ok else "fail" if one.name in failed else "warn"
            output.print_line(f"{outcome:<4}  {one.name}: {output.escape_control(one.message)}")
            if not one.ok and one.action:
                output.print_line(f"      {output.escape_control(one.action)}")
    if failed:
        raise ChecksFailed(f"failed: {', '.join(failed)}")


def _checks(dsn: str) -> list[Check]:
    try:
        with translate_errors():
            connect(dsn).close()
        return _run_async(dsn, readiness)
    except LogUnavailable as error:
        return [Check("database", False, error.message, error.hint)]
    except HeadwaterError as error:
        # The database responds, but the log cannot be opened.
        return [Check("database", True, "the database answers"), Check("schema", False, error.message, error.hint)]


def _run_async(dsn: str, query: Callable[[aio.AsyncHeadwater], Awaitable[T]]) -> T:
    async def run() -> T:
        connecting = aio.connect(
            dsn, pool_size=1, connect_timeout_seconds=CONNECT_SECONDS, application_name="headwater cli"
        )
        async with await connecting as log:
            return await query(log)

    return asyncio.run(run())
