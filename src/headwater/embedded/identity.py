"""As whom the server runs. Postgres refuses root, so root lends it another name."""

import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path

from headwater.embedded.failure import EmbeddedError

_PROBE_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Identity:
    """What to put before a server command, and which user owns its files and processes."""

    prefix: tuple[str, ...]
    uid: int
    gid: int

    def own(self, path: Path) -> None:
        """Give a file or directory to the server's user. Only root ever has to."""
        if path.lstat().st_uid != self.uid:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def own_all(self, directory: Path) -> None:
        """The same for a whole tree, its root last: a walk cut short is walked again."""
        for folder, folders, files in os.walk(directory):
            for name in folders + files:
                self.own(Path(folder, name))
        self.own(directory)


def identity_for(data_dir: Path, binaries: Path) -> Identity:
    """Who may run the programs in `binaries` on `data_dir`, an existing directory."""
    me, owner = os.geteuid(), data_dir.stat()
    if me != 0:
        if owner.st_uid != me:
            raise stranger(data_dir)
        return Identity((), me, os.getegid())
    if owner.st_uid != 0:
        return _as_user(owner.st_uid, owner.st_gid, data_dir, binaries)
    # A user namespace in which root goes by another number: files stay root's, nothing is created.
    unshare = ("unshare", "--user", "--map-user=65534")
    if _works((*unshare, "true")):
        return Identity(unshare, 0, 0)
    for name in ("postgres", "nobody"):
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            continue
        return _as_user(account.pw_uid, account.pw_gid, data_dir, binaries)
    raise _root_is_refused()


def stranger(data_dir: Path) -> EmbeddedError:
    """The error for a data directory of somebody else."""
    return EmbeddedError(
        f"{data_dir} belongs to user {data_dir.stat().st_uid}, this is user {os.geteuid()}. "
        "Choose a directory of your own, or run this as its owner."
    )


def _as_user(uid: int, gid: int, data_dir: Path, binaries: Path) -> Identity:
    become = ("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups")
    # Either path may lie below a directory that only root can enter, such as root's home. Then the
    # server keeps the one right to pass; access() honours it only with that bit set.
    passing = (
        *become,
        "--inh-caps=+dac_override",
        "--ambient-caps=+dac_override",
        "--securebits=+no_setuid_fixup",
    )
    for prefix in (become, passing):
        if _works((*prefix, "test", "-x", str(binaries / "postgres"), "-a", "-x", str(data_dir.parent))):
            return Identity(prefix, uid, gid)
    raise _root_is_refused()


def _root_is_refused() -> EmbeddedError:
    return EmbeddedError(
        "Postgres does not run as root, and there is no way here to run it as another user. "
        "Run this as an ordinary user."
    )


def _works(command: tuple[str, ...]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=_PROBE_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
