"""Counters summed over the processes of one server, so that any process can answer a scrape for all of them.

Each process writes its counters to a file once a second and before every scrape that it answers. A sum therefore never
decreases, not even when a process dies: its file stays for as long as the server runs.
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

from headwater.calls.metrics import Sample
from headwater.observability.counters import COUNTERS, Counters
from headwater.observability.metrics import ERROR, logger
from headwater.supervisor import supervise

WRITE_SECONDS: Final = 1.0


class MultiprocessCounters:
    """The counters of this process and of those that share `directory` with it. None: a single process."""

    def __init__(self, directory: str | None, *, counters: Counters = COUNTERS, name: str | None = None) -> None:
        self._counters = counters
        self._directory = None if directory is None else Path(directory)
        # Not the pid: it may be reused, and the file of the earlier process must stay.
        self._name = name or secrets.token_hex(8)
        self._written: list[Any] = []
        # Files are written in threads; an earlier write must not replace a later one.
        self._lock = threading.Lock()

    @asynccontextmanager
    async def keep_current(self) -> AsyncIterator[None]:
        """Write the counters regularly until the block is left, and once more at its end."""
        if self._directory is None:
            yield
            return
        task = supervise("counters", self._write_forever)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(self._write)

    async def samples(self) -> list[Sample]:
        """The summed counters: current for this process, at most about a second old for the others."""
        if self._directory is None:
            return [Sample(metric.name, labels, n) for metric, labels, n in self._counters.samples()]
        return await asyncio.to_thread(self._sums)

    async def _write_forever(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await asyncio.to_thread(self._write)

    def _write(self) -> None:
        assert self._directory is not None
        with self._lock:
            counted = [[metric.name, list(labels), n] for metric, labels, n in self._counters.samples()]
            if counted == self._written:
                return
            # Atomic: other processes may read the file at any time.
            new = self._directory / f"{self._name}.new"
            try:
                new.write_text(json.dumps(counted))
                new.replace(self._directory / f"{self._name}.json")
            except OSError as error:
                logger.warning("counters not written", extra={ERROR: str(error)})
                return
            self._written = counted

    def _sums(self) -> list[Sample]:
        assert self._directory is not None
        self._write()
        sums: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for file in self._directory.glob("*.json"):
            for name, labels, n in json.loads(file.read_text()):
                sums[name, tuple(labels)] += n
        return [Sample(name, labels, n) for (name, labels), n in sums.items()]
