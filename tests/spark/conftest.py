"""One Spark session for all tests in this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from headwater.spark import local_session

    session = local_session(
        "headwater tests",
        fast_start=True,
        heap_mb=512,
        extra_settings={"spark.sql.shuffle.partitions": "1", "spark.sql.adaptive.enabled": "false"},
    )
    yield session
    session.stop()
