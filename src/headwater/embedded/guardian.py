"""The guardian process of `temporary.py`: waits for the end of its owner, then removes what the owner has left behind.

A program of its own with few imports, so that it starts in milliseconds: `python -I -S guardian.py OWNER NAME=VALUE`,
where OWNER is the process id of the owner. Standard input has a line `watch DIRECTORY` or `forget DIRECTORY` for each
temporary directory. The owner has ended when standard input ends, or when this process has another parent (a fork of
the owner may still hold the pipe). Then:
(1) find the processes whose environment contains NAME=VALUE, and the servers whose pid file is in a watched directory;
(2) ask them to stop; (3) kill those that still run after STOP_SECONDS; (4) delete the directories.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

OWNER_SECONDS = 1.0
STOP_SECONDS = 5.0
KILL_SECONDS = 10.0
POLL_SECONDS = 0.05
PID_FILES = ("postmaster.pid", "nats.pid")
# A server's pid file is at most this far below a watched directory.
MAX_DEPTH = 6


def main(owner: int, mark: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    directories = []
    for line in lines_until_end(owner):
        verb, _, name = line.partition(b" ")
        if verb == b"watch":
            directories.append(name)
        elif name in directories:
            directories.remove(name)
    end_processes(mark.encode(), directories)
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def lines_until_end(owner: int) -> Iterator[bytes]:
    rest = b""
    while True:
        # Asked before the pipe is read: what the owner wrote before it ended is still in there.
        ended = os.getppid() != owner
        if not select.select([0], [], [], 0 if ended else OWNER_SECONDS)[0]:
            if ended:
                return
            continue
        received = os.read(0, 65_536)
        if not received:
            return
        *lines, rest = (rest + received).split(b"\n")
        yield from lines


def end_processes(mark: bytes, directories: list[bytes]) -> None:
    """Ask the processes to stop, and kill those that do not. They may start others, so look again each time."""
    asked = set()
    started = time.monotonic()
    while time.monotonic() - started < STOP_SECONDS + KILL_SECONDS:
        servers = {pid for directory in directories for pid in servers_in(directory)}
        running = servers | marked(mark)
        if not running:
            return
        for pid in running:
            if time.monotonic() - started > STOP_SECONDS:
                send(pid, signal.SIGKILL)
            elif pid not in asked:
                asked.add(pid)
                # Postgres: stop at once, without a checkpoint. Killed by SIGKILL it would leave shared memory behind.
                send(pid, signal.SIGQUIT if b"postgres" in program(pid) else signal.SIGTERM)
        time.sleep(POLL_SECONDS)


def marked(mark: bytes) -> set[int]:
    """The processes with the mark in their environment. Only on systems with /proc."""
    found = set()
    for name in os.listdir("/proc") if os.path.exists("/proc/self/environ") else ():
        if name.isdecimal() and int(name) != os.getpid() and mark in read(f"/proc/{name}/environ").split(b"\0"):
            found.add(int(name))
    return found


def servers_in(directory: bytes) -> set[int]:
    """The running servers whose pid file is in the directory. Those that run as another user hide their environment."""
    found = set()
    depth = directory.count(b"/")
    for folder, folders, files in os.walk(directory):
        if folder.count(b"/") - depth >= MAX_DEPTH:
            folders.clear()
        for name in PID_FILES:
            if name.encode() in files:
                pid = read(os.path.join(folder, name.encode())).split(b"\n")[0].strip()
                # The process id may belong to another process by now.
                if pid.isdigit() and directory in program(int(pid)):
                    found.add(int(pid))
    return found


def program(pid: int) -> bytes:
    """The command line of a running process; empty if it has ended."""
    if os.path.exists("/proc/self/cmdline"):
        return read(f"/proc/{pid}/cmdline")
    shown = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, timeout=30, check=False)
    return shown.stdout


def read(path: str | bytes) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
