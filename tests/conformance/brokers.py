"""Brokers of the Kafka server as processes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from serve_process import serve_process


class BrokerProcess:
    """One `headwater serve`, and the addresses of its brokers."""

    def __init__(self, process: subprocess.Popen[str], addresses: list[str]) -> None:
        self.process = process
        self.addresses = addresses

    @property
    def bootstrap(self) -> str:
        return ",".join(self.addresses)


@contextmanager
def broker_process(dsn: str, *options: str) -> Iterator[BrokerProcess]:
    with serve_process("--kafka", "127.0.0.1:0", *options, dsn=dsn) as started:
        yield BrokerProcess(started.process, started.told["kafka"])
