"""Starts a local Spark session from installed wheels, with tuned settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pyspark.sql import SparkSession

from headwater.spark.java import prepare

CHECKPOINT_FILES = (
    "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"  # its whole name
)
FAST_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def settings(
    *, master: str | None, cores: int, task_attempts: int, heap_mb: int, fast_start: bool, java_options: str
) -> Mapping[str, str]:
    """The Spark settings of a session. Callers can override each of them."""
    chosen = {
        # Several attempts per task, so that one lost worker does not end a query.
        "spark.master": master or f"local[{cores},{task_attempts}]",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": f"{heap_mb}m",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.shuffle.partitions": str(cores),
        "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
        # Headwater's sources accept filters; Spark pushes them down only with this setting.
        "spark.sql.python.filterPushdown.enabled": "true",
        # The default class starts fifteen processes for each micro-batch.
        "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINT_FILES,
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
    }
    if master is None or master.startswith("local"):
        # Loopback only: the machine's host name may not resolve, and nothing should listen on the network.
        chosen |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    chosen["spark.driver.extraJavaOptions"] = f"{java_options} {FAST_JAVA}" if fast_start else java_options
    return chosen


def local_session(
    app_name: str = "headwater",
    *,
    master: str | None = None,
    cores: int = 2,
    task_attempts: int = 4,
    heap_mb: int = 1024,
    fast_start: bool = False,
    extra_settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Start a session in local mode with Headwater's formats registered. Java does not need to be installed.

    With a `master`, such as spark://host:7077, the driver runs here and the tasks run there. `headwater[spark]` must be
    installed there for the Python of `PYSPARK_PYTHON`, by default the path of this interpreter.

    `fast_start` halves the start time but slows down long jobs: use it for tests and short commands. As in Spark, an
    existing session is returned unchanged.
    """
    from headwater.spark import register

    home = prepare(os.environ, fast_start=fast_start)
    chosen = dict(
        settings(
            master=master,
            cores=cores,
            task_attempts=task_attempts,
            heap_mb=heap_mb,
            fast_start=fast_start,
            java_options=home.java_options,
        )
    )
    # Tables without a path go here instead of the current directory.
    chosen["spark.sql.warehouse.dir"] = str(home.spark_home.parent / "warehouse")
    chosen |= dict(extra_settings or {})
    variables = dict(home.environment(fast_start=fast_start)) | {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    if "spark.driver.host" in chosen:
        variables["SPARK_LOCAL_IP"] = chosen["spark.driver.host"]
    elif "PYSPARK_PYTHON" in os.environ:
        variables["PYSPARK_PYTHON"] = os.environ["PYSPARK_PYTHON"]
    builder = SparkSession.builder.appName(app_name)
    for name, value in chosen.items():
        builder = builder.config(name, value)
    # Spark reads these variables only while it starts. Processes that are started later must not inherit them.
    with _environment(variables):
        spark = builder.getOrCreate()
    register(spark)
    return spark


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
