"""A server of the gRPC door as a process, started as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from psycopg import conninfo


@dataclass(frozen=True)
class RpcServer:
    """One `headwater serve`, and its address."""

    process: subprocess.Popen[str]
    address: str


@contextmanager
def rpc_server(*options: str, dsn: str | None = None) -> Iterator[RpcServer]:
    """Serve a log, or what the options say."""
    if dsn is not None:
        # With no more rights than the documents say that it needs.
        options = ("--dsn", conninfo.make_conninfo(dsn, options="-c role=headwater_admin"), *options)
    program = "from headwater.cli import main; main()"
    command = [sys.executable, "-c", program, "serve", "--grpc", "127.0.0.1:0", "--json", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server did not start"
        yield RpcServer(process, json.loads(line)["grpc"])
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
