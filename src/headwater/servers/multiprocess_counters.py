"""What the processes of one server have counted, added up: whichever of them is asked tells of all.

Each notes its own counts in a file, once a second and before it tells any. What one has told the others therefore know,
and a sum never falls, not even when a process dies: its file stays for as long as the server runs.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from headwater.model import Sample
from headwater.observability.counters import COUNTERS, Counters
from headwater.observability.metrics import ERROR, logger
from headwater.supervisor import supervise

NOTE_SECONDS: Final = 1.0


class Counts:
    """The counts of this process and of those that share `directory` with it. None: it is the only one."""

    def __init__(self, directory: str | None, *, counters: Counters = COUNTERS, name: str | None = None) -> None:
        self._counters = counters
        self._directory = None if directory is None else Path(directory)
        # The number of a process may come again; what it had counted must not be written over.
        self._name = name or secrets.token_hex(8)
        self._noted: list[Any] = []
        # Notes are written in threads, and an earlier one must not follow a later.
        self._lock = threading.Lock()

    @asynccontextmanager
    async def kept_current(self) -> AsyncIterator[None]:
        """Note what is counted again and again, until the block is left, and once more then."""
        if self._directory is None:
            yield
            return
        task = supervise("counts", self._keep)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(self._note)

    async def samples(self) -> list[Sample]:
        """As of now of this process, and as of a second ago of the others."""
        if self._directory is None:
            return [Sample(metric.name, labels, n) for metric, labels, n in self._counters.samples()]
        return await asyncio.to_thread(self._sums)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(NOTE_SECONDS)
            await asyncio.to_thread(self._note)

    def _note(self) -> None:
        assert self._directory is not None
        with self._lock:
            counted = [[metric.name, list(labels), n] for metric, labels, n in self._counters.samples()]
            if counted == self._noted:
                return
            # Whole or not at all: others read it at any time.
            written = self._directory / f"{self._name}.new"
            try:
                written.write_text(json.dumps(counted))
                written.replace(self._directory / f"{self._name}.json")
            except OSError as error:
                logger.warning("counts not noted", extra={ERROR: str(error)})
                return
            self._noted = counted

    def _sums(self) -> list[Sample]:
        assert self._directory is not None
        self._note()
        sums: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for file in self._directory.glob("*.json"):
            for name, labels, n in json.loads(file.read_text()):
                sums[name, tuple(labels)] += n
        return [Sample(name, labels, n) for (name, labels), n in sums.items()]
