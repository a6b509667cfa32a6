"""What a process has done, line by line in a file of its own, which outlives its being killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["tried", "acknowledged", "rolled back", "done"]


class Line(NamedTuple):
    """One thing that was noted: of a producer, numbers of its own; of a consumer, positions."""

    who: str
    kind: Kind
    numbers: Sequence[int]


class Journal:
    """Notes of one process. The kernel has each as soon as it is written, whatever then becomes of the process."""

    def __init__(self, directory: Path, who: str) -> None:
        self._who = who
        self._file = os.open(directory / f"{who}.journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, kind: Kind, numbers: Iterable[int]) -> None:
        os.write(self._file, f"{json.dumps([self._who, kind, list(numbers)])}\n".encode())

    def note_range(self, kind: Kind, first: int, count: int) -> None:
        """The same for many numbers in a row, in one short line."""
        os.write(self._file, f"{json.dumps([self._who, kind, {'first': first, 'count': count}])}\n".encode())

    def close(self) -> None:
        os.close(self._file)


def read_all(directory: Path) -> Iterator[Line]:
    """Every line of every journal here; in each journal in the order of writing."""
    for path in sorted(directory.glob("*.journal")):
        with path.open() as lines:
            for line in lines:
                who, kind, numbers = json.loads(line)
                if isinstance(numbers, dict):
                    numbers = range(numbers["first"], numbers["first"] + numbers["count"])
                yield Line(who, kind, numbers)
