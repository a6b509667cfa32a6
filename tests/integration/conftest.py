"""A client of the HTTP server that a module starts as its fixture `address`."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from patience import PATIENCE_SECONDS


@pytest.fixture
def http(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client:
        yield client
