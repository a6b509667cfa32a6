"""One server process on one data directory: what the embedded Postgres and the embedded NATS have in common.

`start` locks the directory, attaches to a running server or launches one, and returns when it accepts connections.
Invariant: a process id read from a file counts only if the arguments of that process name this data directory.
"""

import fcntl
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final, Self

from headwater.embedded import processes
from headwater.embedded.errors import EmbeddedError

HOST: Final = "127.0.0.1"
POLL_SECONDS: Final = 0.005
RESPONSE_SECONDS: Final = 5.0
MAX_PORT_ATTEMPTS: Final = 5
_MAX_LOG_BYTES: Final = 10_000_000


class EmbeddedServer(ABC):
    """A server on `data_dir`, which is created if it is missing."""

    _name: ClassVar[str]
    """What errors call it."""

    def __init__(self, data_dir: Path, log_name: str, *, start_seconds: float, stop_seconds: float) -> None:
        self.data_dir: Final = Path(data_dir).expanduser().resolve()
        self.log_file: Final = self.data_dir / log_name
        self._start_seconds: Final = start_seconds
        self._stop_seconds: Final = stop_seconds
        self._process: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The process id of the server that runs on the data directory, if any."""

    @property
    def running(self) -> bool:
        """Whether a server runs on the data directory, also if another program started it."""
        return self.pid is not None

    @property
    def started_here(self) -> bool:
        """Whether this object started the server; False if it attached to a running one."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Attach to a running server, or start one; returns when it accepts connections.

        The server keeps running when this program ends; Ctrl-C in the terminal does not stop it.
        """
        deadline = time.monotonic() + self._start_seconds
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise EmbeddedError(
                f"cannot create {self.data_dir}: {error.strerror}. Choose another directory."
            ) from error
        with self._lock_start(deadline):
            while (pid := self.pid) is not None:
                if self._attach(pid):
                    return
                if time.monotonic() > deadline:
                    raise EmbeddedError(f"the running {self._name} (process {pid}) is not ready. See {self.log_file}.")
                time.sleep(POLL_SECONDS)
            self._launch(deadline)

    @abstractmethod
    def stop(self) -> None:
        """Stop the server, also if another program started it."""

    def kill(self) -> None:
        """Kill the server with SIGKILL, and wait until it has ended."""
        if not self._end(signal.SIGKILL):
            raise EmbeddedError(f"process {self.pid} survived SIGKILL: it hangs in the kernel.")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.started_here:
            self.stop()

    # -- what a server defines

    @abstractmethod
    def _attach(self, pid: int) -> bool:
        """Whether the running server accepts connections; EmbeddedError if it runs on another port than wanted."""

    @abstractmethod
    def _launch(self, deadline: float) -> None:
        """Start the server."""

    @abstractmethod
    def _is_server(self, arguments: Sequence[str]) -> bool:
        """Whether a process with these arguments is the server of this data directory."""

    # -- what a server uses

    def _verified_pid(self, pid_file: Path) -> int | None:
        """The process id in the first line of the file, if that process is the server."""
        if self._process is not None:
            self._process.poll()  # reaps it if it has ended
        try:
            first_line = pid_file.read_text().partition("\n")[0].strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise wrong_owner(self.data_dir) from error
        if not first_line.isdecimal():
            return None
        arguments = processes.command_line(int(first_line))
        return int(first_line) if arguments is not None and self._is_server(arguments) else None

    def _run(
        self, command: Sequence[str], ready: Callable[[], bool], deadline: float, env: Mapping[str, str] | None
    ) -> str | None:
        """Start the server and wait until it is ready. Returns its output if it exited or took too long."""
        if self.log_file.exists() and self.log_file.stat().st_size > _MAX_LOG_BYTES:
            self.log_file.replace(self.log_file.with_suffix(".log.1"))
        with self.log_file.open("ab") as log:
            log_start = log.tell()
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                return f"{command[0]}: {error.strerror}"
        self._process = process
        late = ""
        while process.poll() is None:
            if self.pid == process.pid and ready():
                return None
            if time.monotonic() > deadline:
                self.kill()
                process.kill()  # also if it has not written its pid file yet
                process.wait(self._stop_seconds)
                late = f"not ready after {self._start_seconds:.0f} seconds"
                break
            time.sleep(POLL_SECONDS)
        self._process = None
        with self.log_file.open("rb") as log:
            log.seek(log_start)
            return log.read(1_000_000).decode(errors="replace") + late

    def _end(self, signal_number: int) -> bool:
        """Send a signal to the running server, if any. False if it has not ended after a timeout."""
        pid = self.pid
        if pid is not None:
            processes.send(pid, signal_number)
            deadline = time.monotonic() + self._stop_seconds
            while not self._has_ended(pid):
                if time.monotonic() > deadline:
                    return False
                time.sleep(POLL_SECONDS)
        self._process = None
        return True

    def _has_ended(self, pid: int) -> bool:
        if self._process is not None:
            self._process.poll()  # reaps it if it has ended
        return processes.has_ended(pid, self._is_server)

    @contextmanager
    def _lock_start(self, deadline: float) -> Iterator[None]:
        """Hold a lock, so that one program at a time starts a server on the data directory."""
        try:
            descriptor = os.open(self.data_dir, os.O_RDONLY)
        except PermissionError as error:
            raise wrong_owner(self.data_dir) from error
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise EmbeddedError(
                            f"another program has been starting the {self._name} on {self.data_dir} for "
                            f"{self._start_seconds:.0f} seconds. See {self.log_file}."
                        ) from error
                    time.sleep(POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)


def free_port(wanted: int) -> int | None:
    """`wanted`, or any free loopback port for 0; None if `wanted` is in use."""
    with socket.socket() as probe:
        # As the servers do; otherwise a port in TIME_WAIT would appear to be in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted))
        except OSError:
            return None
        return int(probe.getsockname()[1])


def port_in_use(port: int | None) -> EmbeddedError:
    return EmbeddedError(
        f"port {port} on {HOST} is in use by another program. Choose another port, or 0 for any free port."
    )


def other_port(name: str, data_dir: Path, pid: int, port: int | None) -> EmbeddedError:
    """The error for a server that already runs on another port than the wanted one."""
    return EmbeddedError(
        f"a {name} already runs on {data_dir} {'without a port' if port is None else f'on port {port}'} "
        f"(process {pid}). Stop it first, or use it without changing the port."
    )


def not_started(name: str, data_dir: Path, log_file: Path, output: str) -> EmbeddedError:
    return EmbeddedError(
        f"{name} did not start on {data_dir}:\n{last_lines(output)}\n"
        f"See {log_file}. To start with an empty database, move the directory away."
    )


def last_lines(text: str, *, lines: int = 15) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


def wrong_owner(data_dir: Path) -> EmbeddedError:
    """The error for a data directory that belongs to another user."""
    return EmbeddedError(
        f"{data_dir} belongs to user {data_dir.stat().st_uid}, but the current user is {os.geteuid()}. "
        "Choose another directory, or run this as its owner."
    )
