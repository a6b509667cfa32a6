"""The processes of a trial as its director sees them: started, killed, replaced when they end, stopped."""

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

from headwater.trials.chaos.stage import STAGE_VARIABLE, Stage

STOP_SECONDS: Final = 15.0
# A process that fails at its very start is not tried without end.
MAX_FAILURES: Final = 50
# How `headwater serve` ends when no database can be reached: as a supervisor would, it is started again.
UNAVAILABLE: Final = 9

PART: Final = "from headwater.trials.chaos.actors import main; main()"
SERVER: Final = "from headwater.trials.chaos.lifeline import watch; watch(); from headwater.cli import main; main()"


@dataclass(slots=True)
class Crew:
    """How many processes there are of each role, and what became of them."""

    stage: Stage
    directory: Path
    seed: int
    wanted: dict[str, int]
    # Python that every process runs first, to break something on purpose.
    prelude: str = ""
    running: dict[str, list[subprocess.Popen[bytes]]] = field(default_factory=dict)
    started: int = 0
    killed: int = 0
    # The last words of those that ended by themselves, in another way than of poison.
    failures: list[str] = field(default_factory=list)
    _names: dict[int, str] = field(default_factory=dict)

    def choose(self, chance: random.Random) -> subprocess.Popen[bytes]:
        return chance.choice([process for processes in self.running.values() for process in processes])

    def kill(self, chance: random.Random) -> None:
        victim = self.choose(chance)
        victim.kill()
        victim.wait(STOP_SECONDS)

    @contextmanager
    def frozen(self, *roles: str) -> Iterator[None]:
        """These stand still for a while."""
        victims = [process for role in roles for process in self.running.get(role, ())]
        try:
            for process in victims:
                process.send_signal(signal.SIGSTOP)
            yield
        finally:
            for process in victims:
                process.send_signal(signal.SIGCONT)

    def keep_up(self) -> None:
        """Replace the processes that have ended."""
        for role, count in self.wanted.items():
            processes = self.running.setdefault(role, [])
            for process in list(processes):
                if process.poll() is not None:
                    processes.remove(process)
                    self._note_end(role, process)
            while len(processes) < count and len(self.failures) < MAX_FAILURES:
                processes.append(self._start(role))

    def dismiss(self, *roles: str) -> None:
        """These end by themselves now and are not replaced."""
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
        """Ask all of them to end; one that does not is killed. Readers have nothing to finish."""
        for role, processes in self.running.items():
            for process in processes:
                # A server would give its clients time to leave.
                process.send_signal(signal.SIGKILL if role == "server" else signal.SIGTERM)
                # A stopped process would not see it.
                process.send_signal(signal.SIGCONT)
        self.wait_for(*list(self.running), seconds=STOP_SECONDS)

    def _start(self, role: str) -> subprocess.Popen[bytes]:
        self.started += 1
        name = f"{role}-{self.started}"
        # Their environment is that of the trial, less what would lead them elsewhere.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
        if role == "server":
            # A program of ours as a user runs it: a variable of the trial would be no setting of it.
            command = [sys.executable, "-c", f"{self.prelude}\n{SERVER}", *self._server_arguments()]
        else:
            kept[STAGE_VARIABLE] = self.stage.as_json()
            command = [sys.executable, "-c", f"{self.prelude}\n{PART}", role, name, str(self.seed)]
        with (self.directory / f"{name}.stderr").open("wb") as stderr:
            process = subprocess.Popen(
                command,
                env=kept,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        self._names[process.pid] = name
        return process

    def _server_arguments(self) -> list[str]:
        stage = self.stage
        arguments = ["serve", "--dsn", stage.dsn, "--json"]
        for protocol, port in (("http", stage.http_port), ("grpc", stage.grpc_port), ("kafka", stage.kafka_port)):
            if port:
                arguments += [f"--{protocol}", f"127.0.0.1:{port}"]
        if stage.webhook_port:
            arguments += ["--webhooks", "--allow-network", "127.0.0.1"]
        return arguments

    def _note_end(self, role: str, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            process.stdin.close()
        self.killed += process.returncode == -signal.SIGKILL
        expected = {0, -signal.SIGKILL, -signal.SIGTERM, *((UNAVAILABLE,) if role == "server" else ())}
        name = self._names.pop(process.pid)
        if process.returncode not in expected:
            said = (self.directory / f"{name}.stderr").read_bytes()[-2000:].decode(errors="replace").strip()
            # The error itself: what follows it, and its traceback, is indented.
            plain = [line for line in said.splitlines() if line and not line[0].isspace()] or [said]
            self.failures.append(f"{name} ended with {process.returncode}: {plain[-1]}")
