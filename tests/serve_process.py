"""`headwater serve` as a process, started as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from psycopg import conninfo

from patience import PATIENCE_SECONDS


@dataclass(frozen=True)
class ServeProcess:
    """One `headwater serve`, and what it told when it was ready: the address of each server."""

    process: subprocess.Popen[str]
    told: dict[str, Any]


def start_serving(*options: str, settings: Mapping[str, str] | None = None, log: IO[str] | None = None) -> ServeProcess:
    """A server that is ready, of these settings in its environment; whoever starts it ends it."""
    command = [sys.executable, "-c", "from headwater.cli import main; main()", "serve", "--json", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    environment.update(settings or {})
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    return ServeProcess(process, json.loads(first_line(process)))


def first_line(process: subprocess.Popen[str]) -> str:
    """What a process prints first. One that prints nothing in time is killed."""
    assert process.stdout is not None
    killing = threading.Timer(PATIENCE_SECONDS, process.kill)
    killing.start()
    try:
        line = process.stdout.readline()
    finally:
        killing.cancel()
    assert line, f"the process printed nothing, and ended with {process.wait(PATIENCE_SECONDS)}"
    return line


@contextmanager
def serve_process(
    *options: str, dsn: str | None = None, settings: Mapping[str, str] | None = None, log: IO[str] | None = None
) -> Iterator[ServeProcess]:
    """A server of a log, or of what the options say, until the block is left."""
    if dsn is not None:
        # With no more rights than the documents say that it needs.
        options = ("--dsn", conninfo.make_conninfo(dsn, options="-c role=headwater_admin"), *options)
    started = start_serving(*options, settings=settings, log=log)
    try:
        yield started
    finally:
        started.process.terminate()
        try:
            started.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            started.process.kill()
            started.process.wait(PATIENCE_SECONDS)
