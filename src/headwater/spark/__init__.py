"""Spark: the log and its neighbours as formats of PySpark, and a session to use them in.

Needs `pip install 'headwater[spark]'`. Importing this starts nothing.
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
    """Make Headwater's formats known to a session, and say which: those whose packages are installed."""
    # A source that takes conditions is refused by a session that does not push them down.
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    names = []
    for module, name in SOURCES:
        try:
            source = getattr(import_module(module), name)
        except ModuleNotFoundError as missing:
            # A package of an extra that is not installed. One of our own would be a mistake.
            if missing.name != module and (missing.name or "").partition(".")[0] == "headwater":
                raise
            continue
        spark.dataSource.register(source)
        names.append(source.name())
    return names
