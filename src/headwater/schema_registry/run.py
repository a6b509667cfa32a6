"""Runs the registry's generators from an event loop: calls in the loop, parsing and comparing in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar, cast

from headwater.aio import AsyncHeadwater
from headwater.calls import Call
from headwater.schema_registry.registry import Change, Steps

# Comparing large schemas takes a while. Two threads leave the rest of the process its share of the CPU.
THINKING: Final = ThreadPoolExecutor(2, thread_name_prefix="headwater schemas")
_DONE: Final = object()
T = TypeVar("T")


async def run_steps(
    log: AsyncHeadwater, steps: Steps[T], act: Callable[[Call[Any]], Awaitable[Any]] | None = None
) -> T:
    """Run the steps: calls with `log`, and calls that change the registry with `act`, if it is given."""
    loop = asyncio.get_running_loop()
    outcome: Any = None
    while True:
        step, result = await loop.run_in_executor(THINKING, partial(_next, steps, outcome))
        if step is _DONE:
            return cast(T, result)
        if isinstance(step, Change):
            outcome = await (log.run(step.call) if act is None else act(step.call))
        else:
            outcome = await log.run(cast("Call[Any]", step))


def _next(steps: Steps[T], outcome: Any) -> tuple[Any, T | None]:
    # StopIteration cannot be raised out of a future.
    try:
        return steps.send(outcome), None
    except StopIteration as done:
        return _DONE, done.value
