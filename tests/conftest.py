"""One real Postgres for the whole run, one fresh log for each test module."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import psycopg
import pytest
from psycopg import conninfo, sql

import headwater
from effort import effort
from headwater.database import schema
from patience import EXIT_SECONDS, PATIENCE_SECONDS, TEST_SECONDS

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("headwater", deadline=None, max_examples=effort(100))
hypothesis.settings.load_profile("headwater")

_numbers = itertools.count()
T = TypeVar("T")


SPARK_TESTS = Path(__file__).parent / "spark"
# An event loop may swallow what is raised in one of its callbacks, so it is raised again.
AGAIN_SECONDS = 30.0


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
    """Keep a file's tests in one process, and all that need Spark in one: a session takes a gigabyte."""
    from xdist.scheduler import LoadFileScheduling

    class OneSpark(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "spark" if Path(config.rootpath, file).is_relative_to(SPARK_TESTS) else file

    return OneSpark(config, log)


def _make_database(admin_dsn: str, name: str, template: str | None = None) -> str:
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
        connection.execute(
            sql.SQL("create database {} template {}").format(
                sql.Identifier(name), sql.Identifier(template or "template0")
            )
        )
    return conninfo.make_conninfo(admin_dsn, dbname=name)


@pytest.fixture(scope="session")
def admin_dsn() -> Iterator[str]:
    """A Postgres to make databases in: HEADWATER_DSN, or an embedded one of our own."""
    if dsn := os.environ.get("HEADWATER_DSN"):
        yield dsn
        return
    from headwater.embedded import Postgres

    # A directory of our own: pytest keeps its last ones, and clearing away thousands of files of
    # earlier runs takes longer than most tests.
    with tempfile.TemporaryDirectory(prefix="headwater-", ignore_cleanup_errors=True) as directory:
        # What tests write need not survive the machine; that it survives kill -9 has its own test.
        server = Postgres(Path(directory, "pg"), settings={"synchronous_commit": "off", "fsync": "off"})
        server.start()
        yield server.dsn("postgres")
        server.stop(mode="immediate")


@pytest.fixture(scope="session")
def template(admin_dsn: str) -> str:
    """A database with the schema in it, to copy from."""
    name = f"headwater_template_{os.getpid()}"
    with psycopg.connect(_make_database(admin_dsn, name), autocommit=True) as connection:
        schema.upgrade(connection)
    return name


@pytest.fixture(scope="module")
def dsn(admin_dsn: str, template: str) -> Iterator[str]:
    """A log of this module's own."""
    name = f"headwater_test_{os.getpid()}_{next(_numbers)}"
    yield _make_database(admin_dsn, name, template)
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


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
def until() -> Callable[[Callable[[], T]], T]:
    """Waits for a signal: asks until the answer is true, and fails at its deadline."""

    def ask(question: Callable[[], T]) -> T:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (answer := question()):
            assert time.monotonic() < deadline, f"the signal did not come within {PATIENCE_SECONDS:g} seconds"
            time.sleep(0.002)
        return answer

    return ask
