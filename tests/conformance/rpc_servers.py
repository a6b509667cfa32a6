"""Servers of the gRPC server as processes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from serve_process import serve_process


@dataclass(frozen=True)
class RpcServer:
    """One `headwater serve`, and its address."""

    process: subprocess.Popen[str]
    address: str


@contextmanager
def rpc_server(*options: str, dsn: str | None = None) -> Iterator[RpcServer]:
    """Serve a log, or what the options say."""
    with serve_process("--grpc", "127.0.0.1:0", *options, dsn=dsn) as started:
        yield RpcServer(started.process, started.told["grpc"])
