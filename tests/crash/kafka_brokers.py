"""Broker processes that are there to be killed, and started again where they were."""

from __future__ import annotations

import os
import signal
import subprocess

from patience import PATIENCE_SECONDS
from serve_process import start_serving


class Brokers:
    """Some brokers on one log, each a process of its own with an address that stays."""

    def __init__(self, dsn: str, count: int) -> None:
        self._dsn = dsn
        self._count = count
        self._processes: list[subprocess.Popen[str]] = []
        self._ports: list[int] = []

    def __enter__(self) -> Brokers:
        for _ in range(self._count):
            process, port = self._start(0)
            self._processes.append(process)
            self._ports.append(port)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait(PATIENCE_SECONDS)

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def kill(self, number: int) -> None:
        os.kill(self._processes[number].pid, signal.SIGKILL)
        self._processes[number].wait(PATIENCE_SECONDS)

    def restart(self, number: int) -> None:
        self._processes[number], _ = self._start(self._ports[number])

    def _start(self, port: int) -> tuple[subprocess.Popen[str], int]:
        started = start_serving("--kafka", f"127.0.0.1:{port}", "--dsn", self._dsn)
        (found,) = started.told["kafka"]
        return started.process, int(found.rpartition(":")[2])
