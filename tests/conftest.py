"""One real Postgres for the whole run, one fresh log for each test module."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import psycopg
import pytest
from psycopg import conninfo
from typer.testing import CliRunner, Result

import headwater
from databases import database
from effort import effort
from headwater.cli import app
from headwater.database import schema
from headwater.embedded.temporary import end_children_with_this_process, temporary_directory
from patience import EXIT_SECONDS, PATIENCE_SECONDS, TEST_SECONDS

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("headwater", deadline=None, max_examples=effort(100))
hypothesis.settings.load_profile("headwater")

_numbers = itertools.count()
T = TypeVar("T")


SPARK_TESTS = Path(__file__).parent / "spark"
PROGRAMS_ON_SPARK = ("test_cluster.py", "test_demo.py")
# An event loop may swallow what is raised in one of its callbacks, so it is raised again.
AGAIN_SECONDS = 30.0


def pytest_configure() -> None:
    """An interrupted or killed run leaves no server behind. Programs that tests start find the modules beside this."""
    end_children_with_this_process()
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.is_relative_to(SPARK_TESTS):
        item.add_marker(pytest.mark.spark)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that does not end."""

    def fail(*_: object) -> None:
        faulthandler.dump_traceback(file=sys.__stderr__ or 2)
        pytest.fail(f"{item.nodeid} did not end within {TEST_SECONDS:g} seconds")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, TEST_SECONDS, AGAIN_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def pytest_unconfigure() -> None:
    """A thread that a failed test left behind must not keep the process: Python waits for it at its exit."""
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=sys.__stderr__ or 2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first: two processes then end at about the same time."""
    folders = ["spark", "crash", "tests", "browser", "conformance", "integration", "unit"]
    items.sort(key=lambda item: folders.index(item.path.parent.name))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests in one process, and all that share a Spark session in one: it takes a gigabyte, and half a
    minute of CPU time until it is warm.
    """
    from xdist.scheduler import LoadFileScheduling

    class OneSpark(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            page = Path(config.rootpath, test.partition("[")[2].removesuffix("]"))
            if Path(config.rootpath, file).is_relative_to(SPARK_TESTS):
                # These run a program, which has a session of its own.
                return file if Path(file).name in PROGRAMS_ON_SPARK else "spark"
            return "spark" if page.suffix == ".md" and "headwater.spark" in page.read_text() else file

    return OneSpark(config, log)


@pytest.fixture(scope="session")
def admin_dsn() -> Iterator[str]:
    """A Postgres to make databases in: HEADWATER_DSN, or an embedded one of our own."""
    if dsn := os.environ.get("HEADWATER_DSN"):
        yield dsn
        return
    from headwater.embedded import Postgres

    # A directory of our own: pytest keeps its last ones, and clearing away thousands of files of
    # earlier runs takes longer than most tests.
    with temporary_directory() as directory:
        # What tests write need not survive the machine; that it survives kill -9 has its own test.
        server = Postgres(directory / "pg", settings={"synchronous_commit": "off", "fsync": "off"})
        server.start()
        yield server.dsn("postgres")
        server.stop(mode="immediate")


@pytest.fixture(scope="session")
def template(admin_dsn: str) -> Iterator[str]:
    """The name of a database with the schema in it, to copy from."""
    with database(admin_dsn) as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            schema.upgrade(connection)
        yield str(conninfo.conninfo_to_dict(dsn)["dbname"])


@pytest.fixture(scope="module")
def dsn(admin_dsn: str, template: str) -> Iterator[str]:
    """A log of this module's own."""
    with database(admin_dsn, template) as dsn:
        yield dsn


@pytest.fixture
def log(dsn: str) -> Iterator[headwater.Headwater]:
    with headwater.connect(dsn) as log:
        yield log


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def topic(log: headwater.Headwater) -> str:
    """A fresh open topic."""
    return log.create_topic(f"topic-{next(_numbers)}").name


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of Headwater from the environment of the tests."""
    for name in list(os.environ):
        if name.startswith("HEADWATER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def environment(dsn: str, tmp_path: Path, clean_environment: None) -> dict[str, str]:
    """What a command finds in its environment: this module's log, and no embedded server."""
    return {**os.environ, "HEADWATER_DSN": dsn, "HEADWATER_HOME": str(tmp_path / "home"), "COLUMNS": "200"}


@pytest.fixture
def run(environment: dict[str, str]) -> Callable[..., Result]:
    """Runs a command in this process."""

    def run_it(*arguments: str, input: str | bytes | None = None) -> Result:
        return CliRunner(env=environment).invoke(app, list(arguments), input=input)

    return run_it


@pytest.fixture
def until() -> Callable[[Callable[[], T]], T]:
    """Waits for a signal: asks until the answer is true, and fails at its deadline."""

    def ask(question: Callable[[], T]) -> T:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (answer := question()):
            assert time.monotonic() < deadline, f"the signal did not come within {PATIENCE_SECONDS:g} seconds"
            time.sleep(0.002)
        return answer

    return ask
