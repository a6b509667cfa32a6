"""Temporary servers end with the process that started them, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.embedded import Postgres
from headwater.embedded.temporary import MARK, temporary_directory
from patience import PATIENCE_SECONDS

# Prints the directory and the process id of the server and of another child, then waits to be killed.
OWNER = """
import subprocess, sys, time
from headwater.embedded import Postgres
from headwater.embedded.nats import Nats
from headwater.embedded.temporary import temporary_directory

with temporary_directory() as directory:
    server, broker = Postgres(directory / "pg", settings={"fsync": "off"}), Nats(directory / "nats")
    server.start()
    broker.start()
    # Ignores the request to stop.
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(900)"
    child = subprocess.Popen([sys.executable, "-c", stubborn])
    print(directory, server.pid, broker.pid, child.pid, flush=True)
    sys.stdin.readline()
    server.stop(mode="immediate")
    broker.stop()
    child.kill()
"""
FORKING_OWNER = """
import os, sys, time
from headwater.embedded.temporary import temporary_directory

with temporary_directory() as directory:
    fork = os.fork()
    if fork == 0:
        time.sleep(900)
    print(directory, fork, flush=True)
    time.sleep(900)
"""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.fixture
def owner() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started = []

    def start(program: str) -> subprocess.Popen[str]:
        # Without the mark of this test run, whose guardian would end the processes as well.
        environment = {name: value for name, value in os.environ.items() if name != MARK}
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_servers_children_and_files_of_a_killed_process_are_removed(
    owner: Callable[[str], subprocess.Popen[str]], until: Callable[[Callable[[], bool]], bool], number: signal.Signals
) -> None:
    process = owner(OWNER)
    assert process.stdout is not None
    directory, *pids = process.stdout.readline().split()
    assert all(is_running(int(pid)) for pid in pids)
    os.kill(process.pid, number)
    process.wait(PATIENCE_SECONDS)
    until(lambda: not any(is_running(int(pid)) for pid in pids) and not Path(directory).exists())


def test_a_fork_of_the_owner_does_not_keep_the_directory(
    owner: Callable[[str], subprocess.Popen[str]], until: Callable[[Callable[[], bool]], bool]
) -> None:
    process = owner(FORKING_OWNER)
    assert process.stdout is not None
    directory, fork = process.stdout.readline().split()
    process.kill()
    process.wait(PATIENCE_SECONDS)
    try:
        until(lambda: not Path(directory).exists())
    finally:
        os.kill(int(fork), signal.SIGKILL)


def test_a_process_that_ends_normally_removes_everything_itself(owner: Callable[[str], subprocess.Popen[str]]) -> None:
    process = owner(OWNER)
    assert process.stdout is not None
    directory, *pids = process.stdout.readline().split()
    process.communicate("\n", timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert not Path(directory).exists()
    assert not any(is_running(int(pid)) for pid in pids)


def test_a_server_that_is_meant_to_stay_is_not_stopped(
    tmp_path: Path, until: Callable[[Callable[[], bool]], bool]
) -> None:
    """A server outside of temporary directories, started by a process without a guardian."""
    program = (
        "import sys, pathlib; from headwater.embedded import Postgres; Postgres(pathlib.Path(sys.argv[1])).start()"
    )
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "pg")], check=True, timeout=PATIENCE_SECONDS, env=environment
    )
    server = Postgres(tmp_path / "pg")
    with temporary_directory() as other:
        assert server.running
    assert not other.exists()
    assert server.running
    server.stop(mode="immediate")
