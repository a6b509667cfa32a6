"""The processes of a trial as its director sees them: started, killed, replaced when they fall, told to stop."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from headwater.chaos.parts import STAGE_VARIABLE, Stage

STOP_SECONDS: Final = 15.0
# A process that fails at its very start is not tried without end.
MOST_FAILURES: Final = 50


@dataclass(slots=True)
class Crew:
    """How many processes there are of each role, and what became of them."""

    stage: Stage
    directory: Path
    seed: int
    wanted: dict[str, int]
    running: dict[str, list[subprocess.Popen[bytes]]] = field(default_factory=dict)
    started: int = 0
    killed: int = 0
    # What those said last that ended by themselves, in another way than of poison.
    failures: list[str] = field(default_factory=list)

    def choose(self, chance: random.Random) -> subprocess.Popen[bytes]:
        return chance.choice([process for processes in self.running.values() for process in processes])

    def kill(self, chance: random.Random) -> None:
        victim = self.choose(chance)
        victim.kill()
        victim.wait(STOP_SECONDS)

    def keep_up(self) -> None:
        """Replace whoever has fallen."""
        for role, count in self.wanted.items():
            processes = self.running.setdefault(role, [])
            for process in list(processes):
                if process.poll() is not None:
                    processes.remove(process)
                    self._note_end(role, process)
            while len(processes) < count and len(self.failures) < MOST_FAILURES:
                processes.append(self._start(role))

    def dismiss(self, *roles: str) -> None:
        """These end by themselves now; nobody replaces them."""
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
        """Ask all of them to end; who does not is killed. Followers have nothing to finish."""
        for processes in self.running.values():
            for process in processes:
                process.send_signal(signal.SIGTERM)
        self.wait_for(*self.running, seconds=STOP_SECONDS)

    def _start(self, role: str) -> subprocess.Popen[bytes]:
        self.started += 1
        name = f"{role}-{self.started}"
        # Their environment is that of the trial, less what would lead them elsewhere.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
        with (self.directory / f"{name}.stderr").open("wb") as stderr:
            return subprocess.Popen(
                [sys.executable, "-m", "headwater.chaos.parts", role, name, str(self.seed)],
                env={**kept, STAGE_VARIABLE: self.stage.as_json()},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    def _note_end(self, role: str, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            process.stdin.close()
        self.killed += process.returncode == -signal.SIGKILL
        if process.returncode not in (0, -signal.SIGKILL, -signal.SIGTERM):
            name = process.args[4] if isinstance(process.args, list) else role
            said = (self.directory / f"{name}.stderr").read_bytes()[-2000:].decode(errors="replace").strip()
            # The error itself: what follows it, and its traceback, is indented.
            plain = [line for line in said.splitlines() if line and not line[0].isspace()] or [said]
            self.failures.append(f"{name} ended with {process.returncode}: {plain[-1]}")
