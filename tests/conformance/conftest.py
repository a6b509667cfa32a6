"""A broker of the Kafka door on the log of the test module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from brokers import BrokerProcess, broker_process


@pytest.fixture(scope="module")
def broker(dsn: str) -> Iterator[BrokerProcess]:
    with broker_process(dsn) as started:
        yield started
