"""Supervises the processes of a trial: starts, kills, restarts and stops them."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headwater.trials.chaos.config import CONFIG_VARIABLE, TrialConfig

STOP_SECONDS: Final = 15.0
# Bounds the restarts of a process that fails at startup.
MAX_FAILURES: Final = 50
# The exit code of `headwater serve` if the database is unavailable; the process is restarted.
UNAVAILABLE: Final = 9

PROCESS_MAIN: Final = "from headwater.trials.chaos.process_main import main; main()"
SERVER: Final = (
    "from headwater.trials.chaos.parent_watch import exit_with_parent; exit_with_parent(); "
    "from headwater.cli import main; main()"
)


@dataclass(slots=True)
class ProcessSupervisor:
    """The processes of each role and their exits."""

    config: TrialConfig
    directory: Path
    seed: int
    wanted: dict[str, int]
    # Python code that every process runs first, to inject bugs.
    prelude: str = ""
    running: dict[str, list[subprocess.Popen[bytes]]] = field(default_factory=dict)
    started: int = 0
    killed: int = 0
    # The last output line of each process that failed without being killed.
    failures: list[str] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)

    def choose(self, rng: random.Random) -> subprocess.Popen[bytes]:
        return rng.choice([process for processes in self.running.values() for process in processes])

    def kill(self, rng: random.Random) -> None:
        process = self.choose(rng)
        process.kill()
        process.wait(STOP_SECONDS)

    @contextmanager
    def frozen(self, *roles: str) -> Iterator[None]:
        """Suspend the processes of these roles during the block."""
        suspended = [process for role in roles for process in self.running.get(role, ())]
        try:
            for process in suspended:
                process.send_signal(signal.SIGSTOP)
            yield
        finally:
            for process in suspended:
                process.send_signal(signal.SIGCONT)

    def restart_ended(self) -> None:
        """Restart the processes that have ended."""
        for role, count in self.wanted.items():
            processes = self.running.setdefault(role, [])
            for process in list(processes):
                if process.poll() is not None:
                    processes.remove(process)
                    self._record_exit(role, process)
            while len(processes) < count and len(self.failures) < MAX_FAILURES:
                processes.append(self._start(role))

    def release(self, *roles: str) -> None:
        """Stop restarting the processes of these roles, which are about to end."""
        for role in roles:
            self.wanted.pop(role, None)

    def wait_for(self, *roles: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for role in roles:
            for process in self.running.pop(role, []):
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(STOP_SECONDS)

    def stop(self) -> None:
        """Terminate all processes, and kill those that do not end."""
        for role, processes in self.running.items():
            for process in processes:
                # On SIGTERM a server would wait for its clients.
                process.send_signal(signal.SIGKILL if role == "server" else signal.SIGTERM)
                # A suspended process would not receive it.
                process.send_signal(signal.SIGCONT)
        self.wait_for(*list(self.running), seconds=STOP_SECONDS)

    def _start(self, role: str) -> subprocess.Popen[bytes]:
        self.started += 1
        name = f"{role}-{self.started}"
        # Without HEADWATER_ variables, which could select another database.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
        if role == "server":
            # The command rejects unknown HEADWATER_ variables, so it does not get the configuration.
            command = [sys.executable, "-c", f"{self.prelude}\n{SERVER}", *self._server_arguments()]
        else:
            environment[CONFIG_VARIABLE] = self.config.as_json()
            command = [sys.executable, "-c", f"{self.prelude}\n{PROCESS_MAIN}", role, name, str(self.seed)]
        with (self.directory / f"{name}.stderr").open("wb") as stderr:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        self._names[process.pid] = name
        return process

    def _server_arguments(self) -> list[str]:
        config = self.config
        arguments = ["serve", "--dsn", config.dsn, "--json"]
        for protocol, port in (("http", config.http_port), ("grpc", config.grpc_port), ("kafka", config.kafka_port)):
            if port:
                arguments += [f"--{protocol}", f"127.0.0.1:{port}"]
        if config.webhook_port:
            arguments += ["--webhooks", "--allow-network", "127.0.0.1"]
        return arguments

    def _record_exit(self, role: str, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            process.stdin.close()
        self.killed += process.returncode == -signal.SIGKILL
        expected = {0, -signal.SIGKILL, -signal.SIGTERM, *((UNAVAILABLE,) if role == "server" else ())}
        name = self._names.pop(process.pid)
        if process.returncode not in expected:
            stderr = (self.directory / f"{name}.stderr").read_bytes()[-2000:].decode(errors="replace").strip()
            # The error message: traceback and hint lines are indented.
            messages = [line for line in stderr.splitlines() if line and not line[0].isspace()] or [stderr]
            self.failures.append(f"{name} exited with {process.returncode}: {messages[-1]}")
