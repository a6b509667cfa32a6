"""The user that the server runs as. Postgres refuses to run as root, so root runs it as another user."""

import os
import pwd
import subprocess
from dataclasses import dataclass
from pathlib import Path

from headwater.embedded.errors import EmbeddedError
from headwater.embedded.server import wrong_owner

_PROBE_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Identity:
    """The prefix of server commands, and the user who owns the files and processes of the server."""

    prefix: tuple[str, ...]
    uid: int
    gid: int

    def own(self, path: Path) -> None:
        """Change the owner of a file or directory to the server's user. Only necessary for root."""
        if path.lstat().st_uid != self.uid:
            os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def own_all(self, directory: Path) -> None:
        """Change the owner of a directory tree, its root last, so that an interrupted walk is repeated."""
        for folder, folders, files in os.walk(directory):
            for name in folders + files:
                self.own(Path(folder, name))
        self.own(directory)


def identity_for(data_dir: Path, binaries: Path) -> Identity:
    """Choose the user that runs the programs in `binaries` on `data_dir`, an existing directory."""
    me, owner = os.geteuid(), data_dir.stat()
    if me != 0:
        if owner.st_uid != me:
            raise wrong_owner(data_dir)
        return Identity((), me, os.getegid())
    if owner.st_uid != 0:
        return _as_user(owner.st_uid, owner.st_gid, data_dir, binaries)
    # A user namespace that maps root to another user id: files stay owned by root, no user is needed.
    unshare = ("unshare", "--user", "--map-user=65534")
    if _works((*unshare, "true")):
        return Identity(unshare, 0, 0)
    for name in ("postgres", "nobody"):
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            continue
        return _as_user(account.pw_uid, account.pw_gid, data_dir, binaries)
    raise _root_not_supported()


def _as_user(uid: int, gid: int, data_dir: Path, binaries: Path) -> Identity:
    become = ("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups")
    # Either path may be below a directory that only root can enter, such as root's home. Then the server keeps the
    # capability dac_override; access() honours it only with the securebit.
    with_capability = (
        *become,
        "--inh-caps=+dac_override",
        "--ambient-caps=+dac_override",
        "--securebits=+no_setuid_fixup",
    )
    for prefix in (become, with_capability):
        if _works((*prefix, "test", "-x", str(binaries / "postgres"), "-a", "-x", str(data_dir.parent))):
            return Identity(prefix, uid, gid)
    raise _root_not_supported()


def _root_not_supported() -> EmbeddedError:
    return EmbeddedError(
        "Postgres refuses to run as root, and it cannot be started as another user here. Run this as an ordinary user."
    )


def _works(command: tuple[str, ...]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=_PROBE_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
