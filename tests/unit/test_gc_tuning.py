"""Is what only holds itself given back while a process serves?"""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

from headwater.cli.gc_tuning import tune_garbage_collection
from patience import PATIENCE_SECONDS


class Circle:
    """Held by itself."""

    def __init__(self) -> None:
        self.itself: Any = self


def test_what_only_holds_itself_goes_though_hardly_anything_is_allocated() -> None:
    thresholds = gc.get_threshold()

    async def run() -> None:
        async with tune_garbage_collection(every_seconds=0.01), asyncio.timeout(PATIENCE_SECONDS):
            gone = asyncio.Event()
            weakref.finalize(Circle(), gone.set)
            await gone.wait()

    try:
        asyncio.run(run())
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
