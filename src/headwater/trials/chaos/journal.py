"""Journals of producers and readers: files of JSON lines that survive the kill of a process.

The journal of a producer (`NAME.journal`) records attempts and acknowledgements. The delivery log of a reader
(`READER.delivered`) records the received events and the checkpoint to resume from. Each line is one write, so it is
in the kernel's page cache before the process continues.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["tried", "acknowledged", "rolled back"]


class JournalEntry(NamedTuple):
    """One entry of a producer about events with these numbers. `at` is a monotonic time that all processes share."""

    producer: str
    kind: Kind
    numbers: Sequence[int]
    at: float = 0.0


class Journal:
    """The journal of one producer."""

    def __init__(self, directory: Path, producer: str) -> None:
        self._producer = producer
        self._file = _open(directory / f"{producer}.journal")

    def record(self, kind: Kind, numbers: Iterable[int]) -> None:
        _write(self._file, [self._producer, kind, list(numbers), time.monotonic()])

    def record_range(self, kind: Kind, first: int, count: int) -> None:
        """Record consecutive numbers in one short line."""
        _write(self._file, [self._producer, kind, {"first": first, "count": count}, time.monotonic()])

    def close(self) -> None:
        os.close(self._file)


class DeliveryLog:
    """The delivery log of one reader. All processes of the reader append to one file, which keeps the order.

    `process` identifies one of several concurrent processes of a reader.
    """

    def __init__(self, directory: Path, reader: str, *, process: str | None = None) -> None:
        self._process = process
        self._path = directory / f"{reader}.delivered"
        self._file = _open(self._path)

    def record(self, events: Sequence[str], checkpoint: Any = None) -> None:
        """Record received events, and the checkpoint of a reader that stores its own position."""
        _write(self._file, [list(events), checkpoint, self._process])

    def checkpoint(self) -> Any:
        """The last recorded checkpoint; None at the beginning."""
        last = None
        with self._path.open("rb") as lines:
            # Read only the end, since the file of a long trial is large.
            lines.seek(max(0, self._path.stat().st_size - 10_000_000))
            for line in lines:
                last = line
        return None if last is None else json.loads(last)[1]


class DeliveryLogReader:
    """Reads new entries of a delivery log."""

    def __init__(self, directory: Path, reader: str) -> None:
        self._path = directory / f"{reader}.delivered"
        self._read_to = 0

    def new(self) -> Iterator[str]:
        """The events recorded since the last call."""
        for _, events in self.new_by_process():
            yield from events

    def new_by_process(self) -> Iterator[tuple[str | None, Sequence[str]]]:
        """The events recorded since the last call, with the process that received them."""
        if not self._path.exists():
            return
        with self._path.open("rb") as lines:
            lines.seek(self._read_to)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                self._read_to += len(line)
                events, _, process = json.loads(line)
                yield process, events


def read_all(directory: Path) -> Iterator[JournalEntry]:
    """Read the journals of all producers."""
    for path in sorted(directory.glob("*.journal")):
        with path.open() as lines:
            for line in lines:
                producer, kind, numbers, at = json.loads(line)
                if isinstance(numbers, dict):
                    numbers = range(numbers["first"], numbers["first"] + numbers["count"])
                yield JournalEntry(producer, kind, numbers, at)


def read_delivered(directory: Path, reader: str) -> list[str]:
    """Read all deliveries of a reader, in order and with repetitions."""
    return list(DeliveryLogReader(directory, reader).new())


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _write(file: int, line: Any) -> None:
    os.write(file, json.dumps(line).encode() + b"\n")
