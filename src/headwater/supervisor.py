"""Supervision of background tasks: a task that fails is restarted after a pause and never ends the process.

A supervised function runs until its task is cancelled. If it raises or returns, the failure is logged with its
traceback and counted, and the function is called again after a pause. The pause doubles from MIN_PAUSE_SECONDS to
MAX_PAUSE_SECONDS; a run that lasted longer than MAX_PAUSE_SECONDS resets it.
Invariant: only cancellation from outside ends a supervised task. A CancelledError from inside is a failure.
`failure_of` is one such run: loops that decide by the error what to do next (readers, workers) build on it directly.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Final, Self

from headwater.observability.counters import COUNTERS
from headwater.observability.metrics import BACKGROUND_FAILURES, ERROR, WAIT_SECONDS, logger

MIN_PAUSE_SECONDS: Final = 0.1
MAX_PAUSE_SECONDS: Final = 30.0


class FailureGuard:
    """A context manager that reports an exception of its block and suppresses it; `failed` is then True."""

    __slots__ = ("_fields", "_name", "failed")

    def __init__(self, name: str, **fields: object) -> None:
        self._name = name
        self._fields = fields
        self.failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failed = True
        _report(self._name, error, self._fields)
        return True


def _report(name: str, error: BaseException | None, fields: Mapping[str, object]) -> None:
    COUNTERS.add(BACKGROUND_FAILURES, name)
    reason = "it returned" if error is None else f"{type(error).__name__}: {error}"
    logger.error("background task failed", exc_info=error, extra={ERROR: f"{name}: {reason}", **fields})


def supervise(name: str, run: Callable[[], Awaitable[object]]) -> asyncio.Task[None]:
    """Start a task that calls `run` again whenever it ends, until the task is cancelled."""
    return asyncio.create_task(_run_again(name, run), name=name)


async def failure_of(work: Coroutine[Any, Any, object]) -> Exception | None:
    """Run a coroutine to its end and return its error instead of raising it. Cancelling the caller cancels the
    coroutine and waits for it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise
    if task.cancelled():
        return RuntimeError("cancelled from within")
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error


async def _run_again(name: str, run: Callable[[], Awaitable[object]]) -> None:
    async def run_once() -> None:
        await run()

    pause = MIN_PAUSE_SECONDS
    while True:
        started = time.monotonic()
        error = await failure_of(run_once())
        _report(name, error, {WAIT_SECONDS: pause})
        if time.monotonic() - started > MAX_PAUSE_SECONDS:
            pause = MIN_PAUSE_SECONDS
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 2, MAX_PAUSE_SECONDS)
