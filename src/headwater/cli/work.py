"""`headwater work`: run the workers of an app until told to stop."""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from typing import Annotated

import typer

from headwater.cli import output
from headwater.cli.arguments import Dsn, Json, examples
from headwater.cli.connection import connect, session, translated
from headwater.cli.exit_codes import NotThere
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.queue.worker import App

app = typer.Typer()


@app.command(epilog=examples("headwater work shop.workers:app", "headwater work shop.workers:app --grace-seconds 60"))
def work(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="MODULE:APP", help="Where the App is, as in `import MODULE`.", show_default=False)
    ],
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="How long running handlers may take to finish after Ctrl-C or SIGTERM.")
    ] = 30.0,
    name: Annotated[str | None, typer.Option(help="This worker's name; default host:pid.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Run handlers on the events of their groups.

    Ctrl-C or SIGTERM stops: what runs finishes, the rest is given back. A second one does not wait.
    """
    found = _load(target)
    database = session(context).dsn(dsn)
    with translated():
        connect(database).close()
    try:
        asyncio.run(_run(found, database, grace_seconds, name, as_json=as_json))
    except ExceptionGroup as several:
        # Handlers run side by side, so what ends one of them comes in a group.
        raise _first_of_ours(several) from several
    if as_json:
        output.emit({"stopped": True})
    else:
        output.note("stopped; what was not finished was given back")


async def _run(found: App, dsn: str, grace_seconds: float, name: str | None, *, as_json: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop_once() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)
        if not as_json:
            output.note(f"stopping: handlers have {grace_seconds:g} s to finish; Ctrl-C again does not wait")

    for number in signals:
        loop.add_signal_handler(number, stop_once)
    _tell(found, as_json=as_json)
    await found.run(dsn, stop=stop, grace_seconds=grace_seconds, worker_name=name)


def _tell(found: App, *, as_json: bool) -> None:
    handlers = [(one.group, one.name) for one in found.workers]
    handlers += [(one.group, one.name) for one in found.subscribers]
    if as_json:
        output.emit({"working": [{"group": group, "handler": handler} for group, handler in handlers]})
    else:
        listed = ", ".join(f"{group}: {handler}" for group, handler in handlers) or "periodic events only"
        output.note(f"working, Ctrl-C stops  ({listed})")


def _first_of_ours(several: ExceptionGroup) -> Exception:
    """The error of ours that ended the workers; everything, if something else is among it."""
    ours, others = several.split(HeadwaterError)
    if ours is None or others is not None:
        return several
    found: Exception = ours
    while isinstance(found, ExceptionGroup):
        found = found.exceptions[0]
    return found


def _load(target: str) -> App:
    module_name, _, attribute = target.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise typer.BadParameter(f"{target!r} is not MODULE:APP, such as shop.workers:app", param_hint="MODULE:APP")
    # As `python -m` does: the directory one is in comes first.
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that it imports in turn may be what is missing; then its traceback says so.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise NotThere(
            f"there is no module {module_name} here",
            hint="Name it as `import` does, from the directory that it is imported from: shop.workers, not a file.",
        ) from error
    if not hasattr(module, attribute):
        raise NotThere(f"module {module_name} has no {attribute}", hint="Say where the App is: MODULE:APP.")
    found = getattr(module, attribute)
    if not isinstance(found, App):
        raise InvalidRequest(
            f"{attribute} of module {module_name} is not a headwater.App but {type(found).__name__}",
            hint="Say where the App is: MODULE:APP.",
        )
    return found
