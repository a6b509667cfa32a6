"""Fixtures of pytest: a new database with an empty log for each test. pytest finds them once the package is installed.

    def test_an_order_is_published(headwater_log):
        place_order(headwater_log, 42)
        assert headwater_log.read("orders")[0].data == {"id": 42}

`--headwater-dsn` names a server to create databases on; the default is an embedded Postgres for the test run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from headwater.client import Headwater
    from headwater.testing import DatabasePool, PublishedEvents


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("headwater").addoption(
        "--headwater-dsn",
        metavar="DSN",
        help="Postgres to create test databases on. Default: an embedded one for this test run.",
    )


@pytest.fixture(scope="session")
def headwater_databases(request: pytest.FixtureRequest) -> Iterator[DatabasePool]:
    """Databases for tests."""
    from headwater.testing import DatabasePool

    with DatabasePool(request.config.getoption("--headwater-dsn")) as databases:
        yield databases


@pytest.fixture
def headwater_dsn(headwater_databases: DatabasePool) -> Iterator[str]:
    """The DSN of a new database with an empty log."""
    with headwater_databases.database() as dsn:
        yield dsn


@pytest.fixture
def headwater_log(headwater_dsn: str) -> Iterator[Headwater]:
    """An empty log of its own."""
    import headwater

    with headwater.connect(headwater_dsn) as log:
        yield log


@pytest.fixture
def headwater_published(headwater_log: Headwater) -> PublishedEvents:
    """The events that the test has published to headwater_log."""
    from headwater.testing import PublishedEvents

    return PublishedEvents(headwater_log)
