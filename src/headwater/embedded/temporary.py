"""Temporary directories and processes that end with the process that uses them, also if it is killed.

`temporary_directory` starts a guardian: a small process (guardian.py) that reads from a pipe and checks which process
is its parent. When the owner ends, whatever ends it, the guardian stops the processes that the owner has
started and deletes its directories. A process belongs to the owner if its environment has the owner's mark, which child
processes inherit, Java and Postgres included.
Invariant: a guardian never acts while its owner runs.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# Not HEADWATER_...: the settings reject unknown variables of that prefix.
MARK: Final = "_HEADWATER_OWNER"
_PROGRAM: Final = Path(__file__).with_name("guardian.py")


class _Guardian:
    """The guardian process of this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        mark = f"{self.owner}-{secrets.token_hex(8)}"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM), str(self.owner), f"{MARK}={mark}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )
        os.environ[MARK] = mark

    def tell(self, verb: str, directory: Path) -> None:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(os.fsencode(f"{verb} {directory}") + b"\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                # Something killed the guardian. The owner still cleans up after itself when it ends normally.
                return


_guardian: _Guardian | None = None
_starting = threading.Lock()


def end_children_with_this_process() -> None:
    """From now on, processes that this process starts are stopped when it ends, whatever ends it."""
    _start_guardian()


@contextmanager
def temporary_directory(prefix: str = "headwater-") -> Iterator[Path]:
    """A new directory, deleted at the end of the block. If this process is killed before, the directory is deleted and
    the processes that it started are stopped."""
    guardian = _start_guardian()
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    guardian.tell("watch", directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        guardian.tell("forget", directory)


def _start_guardian() -> _Guardian:
    global _guardian
    with _starting:
        # A fork has a copy of its parent's guardian, which waits for the end of both; it gets its own.
        if _guardian is None or _guardian.owner != os.getpid():
            _guardian = _Guardian()
        return _guardian
