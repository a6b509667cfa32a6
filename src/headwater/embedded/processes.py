"""Finds the processes of a server, also after its postmaster has exited."""

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_PROC = Path("/proc")


def command_line(pid: int) -> list[str] | None:
    """The arguments of a running process; None if it has exited or is a zombie."""
    if _has_proc():
        try:
            state = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            raw = (_PROC / str(pid) / "cmdline").read_bytes()
        except (OSError, IndexError):
            return None
        if state in "ZX":
            return None
        return raw.rstrip(b"\0").decode(errors="replace").split("\0")
    try:
        answer = subprocess.run(
            ["ps", "-o", "stat=,command=", "-p", str(pid)],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return None if not answer or answer[0].startswith("Z") else answer[1:]


def has_ended(pid: int, is_server: Callable[[Sequence[str]], bool]) -> bool:
    """Whether a server process has released its resources. Its main thread may end before the others, and an exiting
    process loses its arguments before it closes its files. A later process may have the same process id."""
    arguments = command_line(pid)
    if arguments is None:
        try:
            return len(os.listdir(_PROC / str(pid) / "task")) <= 1
        except OSError:
            return True
    return arguments != [""] and not is_server(arguments)


def children(cluster_name: str, *, owner: int) -> Iterator[int]:
    """The server's processes other than the postmaster, found by the cluster name in their titles."""
    if not _has_proc():
        return
    title = f"postgres: {cluster_name}: ".encode()
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            matches = entry.stat().st_uid == owner and (entry / "cmdline").read_bytes().startswith(title)
        except OSError:
            continue
        if matches and command_line(int(entry.name)) is not None:
            yield int(entry.name)


def send(pid: int, signal_number: int) -> None:
    """Send a signal to a process; ignored if the process has exited."""
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return


def _has_proc() -> bool:
    return (_PROC / "self" / "stat").exists()
