"""`headwater work`: run the workers of an app until told to stop."""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from typing import Annotated

import typer

from headwater.cli import output
from headwater.cli.arguments import Dsn, examples
from headwater.cli.connection import connect, session, translated
from headwater.errors import InvalidRequest
from headwater.worker import App

app = typer.Typer()


@app.command(epilog=examples("headwater work shop.workers:app", "headwater work shop.workers:app --grace-seconds 60"))
def work(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="Where the App is.", show_default=False)],
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="How long running handlers may take to finish after Ctrl-C or SIGTERM.")
    ] = 30.0,
    name: Annotated[str | None, typer.Option(help="This worker's name; default host:pid.")] = None,
    dsn: Dsn = None,
) -> None:
    """Run handlers on the events of their groups.

    Ctrl-C or SIGTERM stops: what runs finishes, the rest is given back.
    """
    found = _load(target)
    database = session(context).dsn(dsn)
    with translated():
        connect(database).close()
    handlers = [f"{one.group}: {one.name}" for one in found.workers]
    handlers += [f"{one.group}: {one.name}" for one in found.subscribers]
    output.note(f"working, Ctrl-C stops  ({', '.join(handlers)})")
    asyncio.run(_run(found, database, grace_seconds, name))
    output.note("stopped; what was not finished was given back")


async def _run(found: App, dsn: str, grace_seconds: float, name: str | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await found.run(dsn, stop=stop, grace_seconds=grace_seconds, worker_name=name)


def _load(target: str) -> App:
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise typer.BadParameter(f"{target!r} is not MODULE:APP", param_hint="MODULE:APP")
    # As `python -m` does: the directory one is in comes first.
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise InvalidRequest(f"there is no module {module_name!r} here") from error
    found = getattr(module, attribute, None)
    if not isinstance(found, App):
        raise InvalidRequest(f"{attribute!r} of {module_name} is not a headwater.App")
    return found
