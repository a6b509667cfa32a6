"""`headwater work`: run the workers of an App until stopped."""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from operator import attrgetter
from typing import Annotated

import typer

from headwater.cli import output
from headwater.cli.connection import connect, session, translate_errors
from headwater.cli.exit_codes import NotFound
from headwater.cli.options import Dsn, Json, examples
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.queue.worker import App

app = typer.Typer()


@app.command(epilog=examples("headwater work shop.workers:app", "headwater work shop.workers:app --grace-seconds 60"))
def work(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:APP",
            help="The App: module as in `import MODULE`, and its attribute (app, tasks.app).",
            show_default=False,
        ),
    ],
    grace_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that running handlers have to finish after Ctrl-C or SIGTERM.")
    ] = 30.0,
    name: Annotated[str | None, typer.Option(help="Name of this worker. Default: host:pid.")] = None,
    dsn: Dsn = None,
    as_json: Json = False,
) -> None:
    """Run the handlers of an App on the events of their queues.

    On Ctrl-C or SIGTERM, running handlers finish and all other events return to their queues. A second signal stops
    immediately.
    """
    loaded = _load(target)
    database = session(context).dsn(dsn)
    with translate_errors():
        connect(database).close()
    try:
        asyncio.run(_run(loaded, database, grace_seconds, name, as_json=as_json))
    except ExceptionGroup as group:
        # Handlers run concurrently, so the error of one of them is wrapped in a group.
        raise _unwrap(group) from group
    if as_json:
        output.emit({"stopped": True})
    else:
        output.print_status("stopped; unfinished events were returned to their queues")


async def _run(found: App, dsn: str, grace_seconds: float, name: str | None, *, as_json: bool) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop_once() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)
        if not as_json:
            output.print_status(
                f"stopping: handlers have {grace_seconds:g} s to finish; press Ctrl-C again to stop immediately"
            )

    for number in signals:
        loop.add_signal_handler(number, stop_once)
    _print_handlers(found, as_json=as_json)
    await found.run(dsn, stop=stop, grace_seconds=grace_seconds, worker_name=name)


def _print_handlers(found: App, *, as_json: bool) -> None:
    handlers = [(one.queue, one.name) for one in found.workers]
    handlers += [(one.queue, one.name) for one in found.subscribers]
    if as_json:
        output.emit({"working": [{"queue": queue, "handler": handler} for queue, handler in handlers]})
    else:
        listed = ", ".join(f"{queue}: {handler}" for queue, handler in handlers) or "cron schedules only"
        output.print_status(f"working; press Ctrl-C to stop ({listed})")


def _unwrap(group: ExceptionGroup) -> Exception:
    """Return the first HeadwaterError of a group; the whole group if it contains another kind of error."""
    known, others = group.split(HeadwaterError)
    if known is None or others is not None:
        return group
    found: Exception = known
    while isinstance(found, ExceptionGroup):
        found = found.exceptions[0]
    return found


def _load(target: str) -> App:
    module_name, _, attribute = target.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *attribute.split("."))):
        raise typer.BadParameter(
            f"invalid value {target!r}: expected MODULE:APP, such as shop.workers:app", param_hint="MODULE:APP"
        )
    # As `python -m` does: search the current directory first.
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # If a module that it imports is missing, show the traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise NotFound(
            f"module {module_name} not found",
            hint="Give a module name such as shop.workers, not a file, and run in the directory that contains it.",
        ) from error
    try:
        found = attrgetter(attribute)(module)
    except AttributeError as error:
        raise NotFound(f"module {module_name} has no attribute {attribute}", hint="Expected MODULE:APP.") from error
    if not isinstance(found, App):
        raise InvalidRequest(
            f"{attribute} in module {module_name} has type {type(found).__name__}, expected headwater.App",
            hint="Expected MODULE:APP.",
        )
    return found
