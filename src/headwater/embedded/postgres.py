"""One Postgres server on one data directory: start or attach, connect, stop, kill."""

import hashlib
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from headwater.embedded import processes
from headwater.embedded.binaries import Binaries, find_binaries
from headwater.embedded.errors import EmbeddedError
from headwater.embedded.identity import Identity, identity_for
from headwater.embedded.server import (
    HOST,
    MAX_PORT_ATTEMPTS,
    POLL_SECONDS,
    RESPONSE_SECONDS,
    EmbeddedServer,
    free_port,
    last_lines,
    not_started,
    other_port,
    port_in_use,
)

SUPERUSER: Final = "postgres"

DEFAULTS: Final[Mapping[str, str]] = {
    "wal_level": "logical",
    "fsync": "on",
    "synchronous_commit": "on",
    "max_connections": "100",
    "max_prepared_transactions": "20",
    "max_wal_senders": "10",
    "max_replication_slots": "10",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_RESERVED: Final = frozenset({"listen_addresses", "port", "unix_socket_directories", "cluster_name", "data_directory"})

# The port number in the file name of the socket if the server has no TCP port.
_SOCKET_PORT: Final = 5432
# The kernel limits the path of a socket to 107 bytes, some kernels to 103.
_MAX_SOCKET_PATH_BYTES: Final = 100
_SSL_REQUEST: Final = bytes.fromhex("00000008 04d2162f")

StopMode = Literal["smart", "fast", "immediate"]
_STOP_SIGNALS: Final[Mapping[str, signal.Signals]] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}


@dataclass(frozen=True, slots=True)
class _Postmaster:
    """The contents of the pid file of a running postmaster."""

    pid: int
    port: int
    socket_dir: str
    listens: bool
    ready: bool


class Postgres(EmbeddedServer):
    """A server on `data_dir`, which is created if it is missing.

    Without `port`, clients connect through a Unix socket that only the owner can open; with `port`, on the loopback
    address with a generated password; `port=0` chooses a free one. `settings` are server settings that override
    `DEFAULTS`; `environment` are variables of the server process. Both apply only when this object starts the server,
    not when it attaches to a running one.
    """

    _name: ClassVar = "server"

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int | None = None,
        settings: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        binaries: Binaries | None = None,
        start_seconds: float = 120.0,
        stop_seconds: float = 60.0,
    ) -> None:
        reserved = _RESERVED.intersection(settings or {})
        if reserved:
            raise EmbeddedError(
                f"settings that cannot be changed: {', '.join(sorted(reserved))}. They follow from the arguments."
            )
        super().__init__(data_dir, "postgres.log", start_seconds=start_seconds, stop_seconds=stop_seconds)
        self._pgdata: Final = self.data_dir / "pgdata"
        self._password_file: Final = self.data_dir / "password"
        self._wanted_port: Final = port
        self._settings: Final = {**DEFAULTS, **(settings or {})}
        self._server_environment: Final = dict(environment or {})
        self._binaries = binaries

    # -- state

    @property
    def pid(self) -> int | None:
        """The process id of the postmaster, if one runs."""
        return self._verified_pid(self._pgdata / "postmaster.pid")

    @property
    def port(self) -> int | None:
        """The loopback port, if the server runs and listens on one."""
        postmaster = self._postmaster()
        return postmaster.port if postmaster and postmaster.listens else None

    def dsn(self, database: str = "headwater") -> str:
        """The DSN of `database`, which must exist."""
        postmaster = self._postmaster()
        if postmaster is None:
            raise EmbeddedError(f"no server runs on {self.data_dir}. Start it first.")
        if self._wanted_port is None:
            return self._socket_dsn(postmaster, database)
        return make_conninfo(
            host=HOST,
            port=postmaster.port,
            user=SUPERUSER,
            dbname=database,
            password=self._password_file.read_text().strip(),
        )

    # -- operations

    def ensure_database(self, name: str) -> None:
        """Create the database if it is missing."""
        postmaster = self._postmaster()
        if postmaster is None:
            raise EmbeddedError(f"no server runs on {self.data_dir}. Start it first.")
        target = self._socket_dsn(postmaster, "postgres")
        with psycopg.connect(target, autocommit=True, connect_timeout=30) as connection:
            if connection.execute("select 1 from pg_database where datname = %s", (name,)).fetchone():
                return
            try:
                connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
            except (psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
                return  # created concurrently by another program

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server, also if another program started it. After a timeout it is stopped immediately, which loses
        no data: the next start recovers from the WAL."""
        if not self._end(_STOP_SIGNALS[mode]) and not self._end(_STOP_SIGNALS["immediate"]):
            raise EmbeddedError(f"the server (process {self.pid}) does not stop. See {self.log_file}.")

    def kill(self) -> None:
        """Kill the postmaster and all its processes with SIGKILL, and wait until they have ended."""
        super().kill()
        self._end_children(time.monotonic() + self._stop_seconds)

    def make_standby(self, data_dir: Path) -> "Postgres":
        """Copy this running server to `data_dir`, as a standby that streams from it once it is started.

        Replication is asynchronous. Promote it with `select pg_promote()`.
        """
        postmaster = self._postmaster()
        if postmaster is None:
            raise EmbeddedError(f"no server runs on {self.data_dir}. Start it first.")
        binaries = self._binaries or find_binaries(major=self._major_of_data())
        standby = Postgres(
            data_dir,
            port=None if self._wanted_port is None else 0,
            settings=self._settings,
            environment=self._server_environment,
            binaries=binaries,
            start_seconds=self._start_seconds,
            stop_seconds=self._stop_seconds,
        )
        standby.data_dir.mkdir(parents=True, mode=0o700)
        shutil.copy2(self._password_file, standby._password_file)
        command = [
            binaries.program("pg_basebackup"),
            f"--dbname={self._socket_dsn(postmaster, 'postgres')}",
            f"--pgdata={standby._pgdata}",
            "--checkpoint=fast",
            "--wal-method=stream",
            "--write-recovery-conf",
        ]
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=_environment(),
                cwd="/",
                timeout=self._start_seconds,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            raise EmbeddedError(f"pg_basebackup took longer than {self._start_seconds:.0f} seconds.") from error
        except (OSError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stdout", None) or str(error)
            raise EmbeddedError(f"pg_basebackup failed on {self.data_dir}:\n{last_lines(output)}") from error
        return standby

    # -- internals

    @property
    def _cluster_name(self) -> str:
        # Part of the title of each server process, which identifies orphaned processes of this server.
        return "headwater-" + hashlib.sha256(os.fsencode(self.data_dir)).hexdigest()[:10]

    def _postmaster(self) -> _Postmaster | None:
        pid = self.pid
        if pid is None:
            return None
        try:
            lines = (self._pgdata / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return None
        if not lines or lines[0].strip() != str(pid):
            return None  # replaced since
        field = dict(enumerate(line.strip() for line in lines))
        return _Postmaster(
            pid=pid,
            port=int(field.get(3) or 0),
            socket_dir=field.get(4, ""),
            listens=bool(field.get(5)),
            # A standby that accepts connections reports "standby".
            ready=field.get(7) in ("ready", "standby"),
        )

    def _socket_dsn(self, postmaster: _Postmaster, database: str) -> str:
        return make_conninfo(host=postmaster.socket_dir, port=postmaster.port, user=SUPERUSER, dbname=database)

    def _is_server(self, arguments: Sequence[str]) -> bool:
        return "-D" in arguments and str(self._pgdata) in arguments

    def _attach(self, pid: int) -> bool:
        postmaster = self._postmaster()
        if postmaster is None or not postmaster.ready or not _responds(postmaster):
            return False
        if self._wanted_port is None or (postmaster.listens and self._wanted_port in (0, postmaster.port)):
            return True
        raise other_port(self._name, self.data_dir, pid, postmaster.port if postmaster.listens else None)

    def _major_of_data(self) -> int | None:
        try:
            return int((self._pgdata / "PG_VERSION").read_text())
        except FileNotFoundError:
            return None

    def _initialise(self, binaries: Binaries, identity: Identity, deadline: float) -> None:
        # Created in a temporary directory and renamed, so that an interrupted start leaves no partial cluster.
        temporary = self.data_dir / "pgdata.new"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700)
        self._password_file.unlink(missing_ok=True)
        self._password_file.touch(mode=0o600)
        self._password_file.write_text(secrets.token_urlsafe(24) + "\n")
        for path in (temporary, self._password_file):
            identity.own(path)
        command = [
            *identity.prefix,
            binaries.program("initdb"),
            f"--pgdata={temporary}",
            f"--username={SUPERUSER}",
            f"--pwfile={self._password_file}",
            "--auth-local=trust",
            "--auth-host=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--data-checksums",
            "--no-instructions",
        ]
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=_environment(),
                cwd="/",
                timeout=max(1.0, deadline - time.monotonic()),
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            raise EmbeddedError(
                f"initdb took longer than {self._start_seconds:.0f} seconds on {self.data_dir}."
            ) from error
        except (OSError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stdout", None) or str(error)
            raise EmbeddedError(
                f"initdb failed on {self.data_dir}:\n{last_lines(output)}\n"
                "Choose a data directory that this user can write to, on a disk with free space."
            ) from error
        temporary.rename(self._pgdata)

    def _launch(self, deadline: float) -> None:
        binaries = self._binaries or find_binaries(major=self._major_of_data())
        identity = identity_for(self.data_dir, binaries.directory)
        if not (self._pgdata / "PG_VERSION").exists():
            self._initialise(binaries, identity, deadline)
        if self._pgdata.stat().st_uid != identity.uid:
            identity.own_all(self._pgdata)
        identity.own(self.data_dir)
        socket_dir = self._socket_dir(identity)
        tries = 0
        while True:
            tries += 1
            self._clear_leftovers(socket_dir, deadline)
            port = self._choose_port()
            output = self._launch_once(binaries, identity, socket_dir, port, deadline)
            if output is None:
                return
            late = time.monotonic() > deadline
            if "Address already in use" in output or "could not bind" in output:
                if self._wanted_port == 0 and tries < MAX_PORT_ATTEMPTS and not late:
                    continue
                raise port_in_use(port)
            # Killed or orphaned processes of the last server need a moment to exit.
            leaving = "pre-existing shared memory block" in output or "lock file" in output
            if leaving and not late:
                time.sleep(POLL_SECONDS)
                continue
            raise not_started("Postgres", self.data_dir, self.log_file, output)

    def _launch_once(
        self, binaries: Binaries, identity: Identity, socket_dir: Path, port: int | None, deadline: float
    ) -> str | None:
        settings = {
            **self._settings,
            "listen_addresses": HOST if port is not None else "",
            "port": str(port if port is not None else _SOCKET_PORT),
            "unix_socket_directories": str(socket_dir),
            "unix_socket_permissions": "0700",
            "cluster_name": self._cluster_name,
        }
        command = [*identity.prefix, binaries.program("postgres"), "-D", str(self._pgdata)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        return self._run(command, self._is_ready, deadline, {**_environment(), **self._server_environment})

    def _is_ready(self) -> bool:
        postmaster = self._postmaster()
        return postmaster is not None and postmaster.ready

    def _socket_dir(self, identity: Identity) -> Path:
        directory = self.data_dir / "socket"
        if len(os.fsencode(directory / ".s.PGSQL.65535")) > _MAX_SOCKET_PATH_BYTES:
            # The path of the directory is too long for a socket: use a short one in the temporary directory.
            parent = Path(tempfile.gettempdir(), f"headwater-{identity.uid}")
            if len(os.fsencode(parent)) > _MAX_SOCKET_PATH_BYTES // 2:
                parent = Path("/tmp", parent.name)
            _private_directory(parent, identity)
            directory = parent / self._cluster_name.removeprefix("headwater-")
        _private_directory(directory, identity)
        return directory

    def _clear_leftovers(self, socket_dir: Path, deadline: float) -> None:
        """Remove the files and processes of a killed server. Its process id may belong to a zombie or to another
        process; Postgres would take either for a running server and refuse to start."""
        self._end_children(deadline)
        if self.running:
            raise EmbeddedError(f"another program started a server on {self.data_dir} concurrently. Attach to it.")
        (self._pgdata / "postmaster.pid").unlink(missing_ok=True)
        for leftover in socket_dir.glob(".s.PGSQL.*"):
            leftover.unlink(missing_ok=True)

    def _end_children(self, deadline: float) -> None:
        """Kill processes that outlived their postmaster: they could write concurrently with the next server."""
        owner = self._pgdata.stat().st_uid if self._pgdata.exists() else os.geteuid()
        while True:
            orphans = list(processes.children(self._cluster_name, owner=owner))
            if not orphans:
                return
            if time.monotonic() > deadline:
                raise EmbeddedError(f"processes of the last server do not exit: {orphans}. Kill them first.")
            for pid in orphans:
                processes.send(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def _choose_port(self) -> int | None:
        if self._wanted_port is None:
            return None
        port = free_port(self._wanted_port)
        if port is None:
            raise port_in_use(self._wanted_port)
        return port


def _responds(postmaster: _Postmaster) -> bool:
    """Whether the server responds to an SSL request, which needs no free connection slot. The pid file of a killed
    server may still say that it is ready."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(RESPONSE_SECONDS)
        try:
            probe.connect(f"{postmaster.socket_dir}/.s.PGSQL.{postmaster.port}")
            probe.sendall(_SSL_REQUEST)
            return probe.recv(1) in (b"N", b"S")
        except OSError:
            return False


def _environment() -> dict[str, str]:
    """The environment of this program without the variables that configure Postgres or locales."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return {**kept, "LC_ALL": "C"}


def _private_directory(path: Path, identity: Identity) -> None:
    """Create `path` as a directory that only the server's user can enter."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (identity.uid, os.geteuid()):
            raise EmbeddedError(
                f"{path} is not a directory of user {identity.uid}. Remove it, or choose a shorter data directory."
            ) from None
        path.chmod(0o700)
    identity.own(path)
