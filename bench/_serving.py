"""Runs `headwater serve` as a user does, for benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def serving(dsn: str, *options: str) -> Iterator[tuple[dict[str, Any], int]]:
    """Run a server; yields its ready message (JSON) and its process id."""
    program = "from headwater.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", "--dsn", dsn, "--json", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline()), process.pid
    finally:
        process.terminate()
        process.wait(30)
