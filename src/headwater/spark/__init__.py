"""Spark integration: PySpark data sources for the log, captured changes, tables and NATS, and a local session.

Requires `pip install 'headwater[spark]'`. Importing this module starts nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from headwater.spark.session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["local_session", "register"]

SOURCES = (
    ("headwater.spark.formats.log", "LogSource"),
    ("headwater.spark.formats.changes", "ChangesSource"),
    ("headwater.spark.formats.table", "TableSource"),
    ("headwater.spark.formats.nats", "NatsSink"),
)


def register(spark: SparkSession) -> list[str]:
    """Register the formats whose packages are installed with a session; return their names."""
    # Without this setting, Spark rejects a Python source that accepts filters.
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    names = []
    for module, name in SOURCES:
        try:
            source = getattr(import_module(module), name)
        except ModuleNotFoundError as missing:
            # Skip a format whose optional package is not installed. A missing module of Headwater itself is a bug.
            if missing.name != module and (missing.name or "").partition(".")[0] == "headwater":
                raise
            continue
        spark.dataSource.register(source)
        names.append(source.name())
    return names
