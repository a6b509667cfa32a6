"""Carrying out what the registry asks for from an event loop: calls on it, thinking beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar, cast

from headwater.aio import AsyncHeadwater
from headwater.calls import Call
from headwater.schema_registry.registry import Act, Steps

PATIENCE_SECONDS: Final = 5.0
# Comparing large schemas takes a while. A few threads: however many ask, the others of this process have their share.
THINKING: Final = ThreadPoolExecutor(2, thread_name_prefix="headwater schemas")
_DONE: Final = object()
T = TypeVar("T")


async def carry_out(
    log: AsyncHeadwater, steps: Steps[T], act: Callable[[Call[Any]], Awaitable[Any]] | None = None
) -> T:
    """Do what the steps ask for; what changes anything by `act`, where there is one."""
    loop = asyncio.get_running_loop()
    outcome: Any = None
    while True:
        asked, result = await loop.run_in_executor(THINKING, partial(_next, steps, outcome))
        if asked is _DONE:
            return cast(T, result)
        if isinstance(asked, Act):
            outcome = await (log.run(asked.call, patience_seconds=PATIENCE_SECONDS) if act is None else act(asked.call))
        else:
            outcome = await log.run(cast("Call[Any]", asked), patience_seconds=PATIENCE_SECONDS)


def _next(steps: Steps[T], outcome: Any) -> tuple[Any, T | None]:
    # What ends a generator cannot be raised out of a future.
    try:
        return steps.send(outcome), None
    except StopIteration as done:
        return _DONE, done.value
