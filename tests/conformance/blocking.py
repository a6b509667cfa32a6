"""Asynchronous event stores, asked as blocking ones are: so that one suite asks both."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from typing import Any

from patience import PATIENCE_SECONDS


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_SECONDS)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()


class Blocking:
    """An object whose coroutines are waited for, and whose asynchronous iterators are plain ones."""

    def __init__(self, loop: Loop, asked: Any) -> None:
        self._loop = loop
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._asked, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            async def made() -> Any:
                answer = found(*arguments, **options)
                return await answer if inspect.isawaitable(answer) else answer

            answer = self._loop.run(made())
            if inspect.isasyncgen(answer):
                return self._iterate(answer)
            return Blocking(self._loop, answer) if hasattr(answer, "append") and hasattr(answer, "topic") else answer

        return call

    def _iterate(self, answers: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._loop.run(anext(answers))
                except StopAsyncIteration:
                    return
        finally:
            self._loop.run(answers.aclose())
