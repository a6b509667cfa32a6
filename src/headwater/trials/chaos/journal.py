"""What processes have done, line by line in files that outlive their being killed.

A producer's journal (`NAME.journal`) has what it tried and what was acknowledged; a reader's (`READER.delivered`) has
what it got, with the place that it would take up again from. The kernel has each line as soon as it is written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["tried", "acknowledged", "rolled back"]


class Line(NamedTuple):
    """One thing that a producer noted, of numbers of its own. `at`: seconds of a clock that all processes share."""

    who: str
    kind: Kind
    numbers: Sequence[int]
    at: float = 0.0


class Journal:
    """Notes of one producer."""

    def __init__(self, directory: Path, who: str) -> None:
        self._who = who
        self._file = _opened(directory / f"{who}.journal")

    def note(self, kind: Kind, numbers: Iterable[int]) -> None:
        _write(self._file, [self._who, kind, list(numbers), time.monotonic()])

    def note_range(self, kind: Kind, first: int, count: int) -> None:
        """The same for many numbers in a row, in one short line."""
        _write(self._file, [self._who, kind, {"first": first, "count": count}, time.monotonic()])

    def close(self) -> None:
        os.close(self._file)


class Deliveries:
    """Notes of one reader. Its next process goes on in the same file, so that the order of deliveries is kept.

    `process`: which of several processes of one reader notes this.
    """

    def __init__(self, directory: Path, reader: str, *, process: str | None = None) -> None:
        self._process = process
        self._path = directory / f"{reader}.delivered"
        self._file = _opened(self._path)

    def note(self, events: Sequence[str], place: Any = None) -> None:
        """These came; `place` is what a reader that remembers its place by itself would remember now."""
        _write(self._file, [list(events), place, self._process])

    def place(self) -> Any:
        """What was remembered last; None at the beginning."""
        last = None
        with self._path.open("rb") as lines:
            # Only the end: the file of a long trial is large.
            lines.seek(max(0, self._path.stat().st_size - 10_000_000))
            for line in lines:
                last = line
        return None if last is None else json.loads(last)[1]


class DeliveriesTail:
    """What is added to a reader's notes, read as it comes."""

    def __init__(self, directory: Path, reader: str) -> None:
        self._path = directory / f"{reader}.delivered"
        self._read_to = 0

    def new(self) -> Iterator[str]:
        """The events that were noted since the last call."""
        for _, events in self.new_by_process():
            yield from events

    def new_by_process(self) -> Iterator[tuple[str | None, Sequence[str]]]:
        """The same, with the process that noted them."""
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


def read_all(directory: Path) -> Iterator[Line]:
    """Every line of every producer here; of each in the order of writing."""
    for path in sorted(directory.glob("*.journal")):
        with path.open() as lines:
            for line in lines:
                who, kind, numbers, at = json.loads(line)
                if isinstance(numbers, dict):
                    numbers = range(numbers["first"], numbers["first"] + numbers["count"])
                yield Line(who, kind, numbers, at)


def delivered(directory: Path, reader: str) -> list[str]:
    """Every event that a reader got, as often and in the order that it did."""
    return list(DeliveriesTail(directory, reader).new())


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _write(file: int, line: Any) -> None:
    os.write(file, json.dumps(line).encode() + b"\n")
