"""Tasks: functions that are called later by a worker, declared with a decorator as in Celery, taskiq and Procrastinate.

A deferred task is an event of one topic: its type is the name of the task, its routing key the queue, its payload the
arguments as a JSON object. Each queue is bound to its routing key; one worker of an App runs all tasks of a queue.
Invariant: an event that no attempt can run (unknown task, arguments that do not fit) becomes a dead letter at once.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import (
    Any,
    Final,
    Generic,
    Literal,
    ParamSpec,
    TypeAlias,
    TypedDict,
    TypeVar,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from headwater import client
from headwater.aio import AsyncHeadwater
from headwater.client import Headwater
from headwater.database.caller_connection import AsyncCallerConnection, CallerConnection
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.log.model import NewEvent
from headwater.queue.model import ClaimedEvent, Dead, Outcome, Retry, Snooze
from headwater.queue.worker import App, WorkerOptions

TasksLog: TypeAlias = Headwater | AsyncHeadwater | Callable[[], Headwater]
"""Where tasks are deferred to."""

P = ParamSpec("P")
R = TypeVar("R")

_JSON_TYPES: Final = (inspect.Parameter.empty, Any, object, str, int, float, bool, type(None), list, dict)
_JSON_ORIGINS: Final = (list, dict, Union, types.UnionType)
_OUTCOMES: Final = (Retry, Dead, Snooze)


class DeferOptions(TypedDict, total=False):
    """How a task is deferred, as in `publish`."""

    connection: CallerConnection | AsyncCallerConnection | None
    delay: timedelta | None
    deliver_at: datetime | None
    key: str | bytes | None
    event_id: str | None


class _PublishOptions(TypedDict):
    type: str
    routing_key: str
    key: str | bytes | None
    event_id: str | None
    delay: timedelta | None
    deliver_at: datetime | None


@dataclass(frozen=True)
class Task(Generic[P, R]):
    """A declared task. Calling it runs the function here and now; `defer` has a worker run it."""

    tasks: Tasks
    name: str
    queue: str
    function: Callable[P, R]
    options: DeferOptions = field(default_factory=DeferOptions)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def configure(self, **options: Unpack[DeferOptions]) -> Task[P, R]:
        """The task with other options of `defer`: `connection`, `delay` or `deliver_at`, `key`, `event_id`.

        With `connection`, the task is deferred when that transaction commits. With `event_id`, deferring is idempotent.
        """
        return replace(self, options=cast("DeferOptions", {**self.options, **options}))

    def defer(self, *args: P.args, **kwargs: P.kwargs) -> int | None:
        """Run the task in a worker; returns the position of its event, or None if it is scheduled for later.

        Raises InvalidRequest if the arguments do not fit the signature.
        """
        arguments = self._arguments(*args, **kwargs)
        connection = cast("CallerConnection | None", self.options.get("connection"))
        return self.tasks.blocking_log().publish(
            self.tasks.topic, arguments, connection=connection, **self._publish_options()
        )

    async def defer_async(self, *args: P.args, **kwargs: P.kwargs) -> int | None:
        """`defer` in asynchronous code."""
        log = self.tasks.asyncio_log
        if log is None:
            return await asyncio.to_thread(self.defer, *args, **kwargs)
        arguments = self._arguments(*args, **kwargs)
        connection = cast("AsyncCallerConnection | None", self.options.get("connection"))
        return await log.publish(self.tasks.topic, arguments, connection=connection, **self._publish_options())

    def event(self, *args: P.args, **kwargs: P.kwargs) -> NewEvent:
        """The event of the deferred task: for `publish_batch`, and for cron schedules."""
        return NewEvent(
            self._arguments(*args, **kwargs),
            key=self.options.get("key"),
            type=self.name,
            routing_key=self.queue,
            event_id=self.options.get("event_id"),
        )

    def _publish_options(self) -> _PublishOptions:
        return {
            "type": self.name,
            "routing_key": self.queue,
            "key": self.options.get("key"),
            "event_id": self.options.get("event_id"),
            "delay": self.options.get("delay"),
            "deliver_at": self.options.get("deliver_at"),
        }

    def _arguments(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        try:
            return _by_name(self._signature, self._signature.bind(*args, **kwargs))
        except TypeError as error:
            raise InvalidRequest(
                f"the arguments do not fit task {self.name}: {error}", hint=f"Expected {self.name}{self._signature}."
            ) from None

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.function)

    @cached_property
    def _validators(self) -> dict[str, Callable[[Any], Any]]:
        """For each parameter with a type that JSON does not have: what makes a value of it."""
        # Not when the task is declared: its annotations may name classes that are defined below it.
        hints = get_type_hints(self.function)
        found = {name: hints[name] for name in self._signature.parameters if not _is_json(hints.get(name, Any))}
        if not found:
            return {}
        try:
            from pydantic import TypeAdapter
        except ImportError:
            raise InvalidRequest(
                f"task {self.name} needs pydantic for its parameter {next(iter(found))}",
                hint="Run: pip install 'headwater[models]', or annotate it with a type of JSON.",
            ) from None
        return {name: TypeAdapter(hint).validate_python for name, hint in found.items()}

    async def run(self, event: ClaimedEvent) -> Outcome:
        """Run the function with the arguments of the event. A result that is not an outcome is ignored."""
        validators = self._validators
        try:
            arguments = event.data
            if not isinstance(arguments, dict):
                raise TypeError("the payload is not a JSON object")
            self._signature.bind(**arguments)
            values = {
                name: validators[name](value) if name in validators else value for name, value in arguments.items()
            }
        # pydantic's ValidationError is a ValueError.
        except (TypeError, ValueError, HeadwaterError) as error:
            return Dead(f"the arguments do not fit task {self.name}: {error}")
        function = cast("Callable[..., Any]", self.function)
        if inspect.iscoroutinefunction(function):
            result = await function(**values)
        else:
            result = await asyncio.to_thread(function, **values)
        return result if isinstance(result, _OUTCOMES) else None


class Tasks:
    """The tasks of an application, deferred to one topic.

    `app` runs them: `headwater work shop.jobs:tasks.app`, where `tasks` is this object. Without `app`, a new App.
    Tasks are deferred on `log`; without it, `defer` connects to the database that the command line uses.
    """

    def __init__(self, topic: str, *, app: App | None = None, log: TasksLog | None = None) -> None:
        self.topic = topic
        self.app = app or App()
        self.asyncio_log: AsyncHeadwater | None = None
        self.blocking_log: Callable[[], Headwater] = self._default_log
        self._connected: Headwater | None = None
        self._connecting = threading.Lock()
        self._tasks: dict[str, Task[..., Any]] = {}
        self._queue_options: dict[str, WorkerOptions] = {}
        if log is not None:
            self.use(log)

    def use(self, log: TasksLog) -> None:
        """Defer on this log: `defer` on one of `headwater.connect`, or on the one that a function returns at each call;
        `defer_async` on one of `headwater.aio`."""
        if isinstance(log, AsyncHeadwater):
            self.asyncio_log = log
        elif isinstance(log, Headwater):
            self.blocking_log = lambda: log
        else:
            self.blocking_log = log

    def _default_log(self) -> Headwater:
        with self._connecting:
            if self._connected is None:
                self._connected = client.connect(application_name="headwater tasks")
            return self._connected

    def task(
        self, *, queue: str, name: str | None = None, **options: Unpack[WorkerOptions]
    ) -> Callable[[Callable[P, R]], Task[P, R]]:
        """Declare a function, async or not, as a task of this queue.

        `name`: the type of its events, by default the name of the function. The options are those of `App.worker`; they
        apply to all tasks of the queue, so only one of them needs to give them.
        """

        def declare(function: Callable[P, R]) -> Task[P, R]:
            task = Task(self, name or function.__name__, queue, function)
            _refuse_positional_only(task.name, function)
            if task.name in self._tasks:
                raise InvalidRequest(f"task {task.name} is declared twice", hint="Give one of them another name=.")
            given = self._queue_options.get(queue, {})
            for option, value in options.items():
                if option in given and cast("dict[str, Any]", given)[option] != value:
                    raise InvalidRequest(
                        f'the tasks of queue "{queue}" have different values of {option}',
                        hint="Options apply to the whole queue: give each once, or use another queue.",
                    )
            self._queue_options[queue] = cast("WorkerOptions", {**given, **options})
            self._tasks[task.name] = task
            self._declare_worker(queue)
            return task

        return declare

    def _declare_worker(self, queue: str) -> None:
        """Declare the worker of a queue, or declare it again with the options of one more task."""
        names = [task.name for task in self._tasks.values() if task.queue == queue]

        async def run_task(event: ClaimedEvent) -> Outcome:
            task = self._tasks.get(event.type or "")
            if task is None:
                given = "an event without a type" if event.type is None else f'unknown task "{event.type}"'
                return Dead(f'{given}: queue "{queue}" has the tasks {", ".join(names)}')
            return await task.run(event)

        run_task.__name__ = ", ".join(names)
        self.app.workers[:] = [
            one for one in self.app.workers if (one.queue, one.topics, one.pattern) != (queue, (self.topic,), queue)
        ]
        self.app.worker(self.topic, queue=queue, pattern=queue, **self._queue_options[queue])(run_task)


def _refuse_positional_only(name: str, function: Callable[..., Any]) -> None:
    """Arguments travel by name."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise InvalidRequest(
                f"task {name} has the parameter {parameter}, which cannot be given by name",
                hint="The arguments of tasks are a JSON object: use named parameters.",
            )


def _by_name(signature: inspect.Signature, bound: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments that were given; defaults are left to the worker."""
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind == inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found


def _is_json(hint: Any) -> bool:
    """Whether JSON has the values of this type."""
    if hint in _JSON_TYPES:
        return True
    origin = get_origin(hint)
    return origin is Literal or (origin in _JSON_ORIGINS and all(_is_json(part) for part in get_args(hint)))
