"""Does a test that waits for ever fail, and does a thread that it leaves behind not keep the run from ending?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS

TESTS = Path(__file__).parent
ONE_SECOND_A_TEST = str(1 / 1200)
ONE_SECOND_AT_THE_END = str(1 / 120)

WAITS = """
import asyncio, threading

def test_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_loop():
    asyncio.run(asyncio.Event().wait())

def test_after_them():
    pass
"""
LEAVES_A_THREAD = """
import threading

def test_thread():
    threading.Thread(target=threading.Event().wait).start()
"""


def run(directory: Path, source: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (directory / "unit").mkdir()
    (directory / "unit" / "test_it.py").write_text(source)
    path = os.pathsep.join([str(TESTS), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", ".", "unit"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_a_test_that_waits_for_ever_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    ended = run(tmp_path, WAITS, HEADWATER_TEST_PATIENCE=ONE_SECOND_A_TEST)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout + ended.stderr
    assert "test_lock did not end within 1 seconds" in ended.stdout
    assert "test_loop did not end within 1 seconds" in ended.stdout
    assert "2 failed, 1 passed" in ended.stdout


def test_a_thread_that_is_left_behind_does_not_keep_the_process(tmp_path: Path) -> None:
    ended = run(tmp_path, LEAVES_A_THREAD, HEADWATER_TEST_PATIENCE=ONE_SECOND_AT_THE_END)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "1 passed" in ended.stdout
    assert "Timeout (0:00:01)" in ended.stderr
