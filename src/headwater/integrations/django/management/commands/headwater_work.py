"""`manage.py headwater_work MODULE:APP`: run the workers of an App in the Django project.

Blocking handlers run in threads, where Django's connections are closed as they are around a request: before and after
each handler, if they are too old or broken.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import close_old_connections

from headwater.errors import HeadwaterError
from headwater.integrations.django import database_dsn
from headwater.queue.worker import App

P = ParamSpec("P")
T = TypeVar("T")


class Command(BaseCommand):  # type: ignore[misc] # Django has no types.
    """The command."""

    help = "Run the handlers of a headwater App on the events of their queues, until Ctrl-C or SIGTERM."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("app", metavar="MODULE:APP", help="The App, such as shop.workers:app.")
        parser.add_argument("--database", metavar="ALIAS", help="Default: HEADWATER['DATABASE'] of the settings.")
        parser.add_argument("--grace-seconds", type=float, default=30.0, help="Time for running handlers to finish.")

    def handle(self, **options: Any) -> None:
        app = _load(options["app"])
        dsn = database_dsn(options["database"])
        queues = ", ".join(f"{one.queue}: {one.name}" for one in app.workers)
        self.stdout.write(f"working; press Ctrl-C to stop ({queues or 'no queues'})")
        try:
            asyncio.run(_run(app, dsn, options["grace_seconds"]))
        except HeadwaterError as error:
            raise CommandError(str(error)) from error
        self.stdout.write("stopped; unfinished events were returned to their queues")


async def _run(app: App, dsn: str, grace_seconds: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(_HandlerThreads())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await app.run(dsn, stop=stop, grace_seconds=grace_seconds, application_name="headwater_work")


class _HandlerThreads(ThreadPoolExecutor):
    """Threads that close Django's old connections around each call."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        def call() -> T:
            close_old_connections()
            try:
                return fn(*args, **kwargs)
            finally:
                close_old_connections()

        return super().submit(call)


def _load(target: str) -> App:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise CommandError(f"invalid value {target!r}: expected MODULE:APP, such as shop.workers:app")
    try:
        found = attrgetter(attribute)(import_module(module_name))
    except ModuleNotFoundError as error:
        # If a module that it imports is missing, show the traceback.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise CommandError(f"module {module_name} not found") from error
    except AttributeError as error:
        raise CommandError(f"module {module_name} has no attribute {attribute}") from error
    if not isinstance(found, App):
        raise CommandError(f"{target} has type {type(found).__name__}, expected headwater.App")
    return found
