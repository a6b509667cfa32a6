"""A broker of the Kafka door as a process, started as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from psycopg import conninfo


class BrokerProcess:
    """One `headwater serve`, and its address."""

    def __init__(self, process: subprocess.Popen[str], addresses: list[str]) -> None:
        self.process = process
        self.addresses = addresses

    @property
    def bootstrap(self) -> str:
        return ",".join(self.addresses)


@contextmanager
def broker_process(dsn: str, *options: str) -> Iterator[BrokerProcess]:
    # With no more rights than the documents say that it needs.
    dsn = conninfo.make_conninfo(dsn, options="-c role=headwater_admin")
    program = "from headwater.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", "--kafka", "127.0.0.1:0", "--dsn", dsn, "--json", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the broker did not start"
        yield BrokerProcess(process, json.loads(line)["kafka"])
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
