"""Brokers of the Kafka server on the log of the test module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from brokers import BrokerProcess, broker_process


@pytest.fixture(scope="module")
def broker(dsn: str) -> Iterator[BrokerProcess]:
    with broker_process(dsn) as started:
        yield started


@pytest.fixture(scope="module", params=[1, 3], ids=["one-broker", "three-brokers"])
def cluster(request: pytest.FixtureRequest, dsn: str) -> Iterator[BrokerProcess]:
    """For modules whose every promise must hold however many brokers there are: they take it for their `broker`."""
    with broker_process(dsn, "--processes", str(request.param)) as started:
        yield started
