"""Do pipelines run unchanged on a Spark cluster? A real one: a master and a worker of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psycopg
import pytest

import headwater
from headwater.capture.slot import Slot
from headwater.spark.java import prepare
from patience import PATIENCE_SECONDS, TEST_SECONDS

PIPELINES = """
pipelines:
  cluster_changes:
    from: {changes: {tables: [public.on_cluster]}}
    to: [{topic: {name: on-cluster}}, {lake: {path: lake}}]
"""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster with one worker."""
    home = prepare(os.environ)
    variables = {**os.environ, **home.environment(fast_start=False)}
    variables |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    program = str(home.spark_home / "bin" / "spark-class")
    port = free_port()
    address = f"spark://127.0.0.1:{port}"
    place = tmp_path_factory.mktemp("cluster")
    commands = {
        "master.Master": ["--port", str(port)],
        "worker.Worker": ["--cores", "2", "--memory", "1g", "--work-dir", str(place / "work"), address],
    }
    with ExitStack() as stack:
        for name, arguments in commands.items():
            said = stack.enter_context((place / name).open("wb"))
            process = subprocess.Popen(
                [program, f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1", "--webui-port", "0", *arguments],
                env=variables,
                stdout=said,
                stderr=said,
            )
            stack.callback(end, process)
        wait_for_port(port)
        yield address


@pytest.mark.long
def test_a_pipeline_runs_on_a_cluster(dsn: str, master: str, tmp_path: Path) -> None:
    (tmp_path / "pipelines.yaml").write_text(PIPELINES)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table on_cluster (id integer primary key, v text)")
        Slot(dsn, "cluster_changes", "cluster_changes").prepare(["on_cluster"])
        connection.execute("insert into on_cluster select n, n::text from generate_series(1, 1000) n")
    command = [sys.executable, "-c", "from headwater.cli import main; main()", "pipeline", "run", "--once", "--json"]
    ended = subprocess.run(
        [*command, "--dsn", dsn, "--master", master], cwd=tmp_path, capture_output=True, text=True, timeout=TEST_SECONDS
    )
    assert ended.returncode == 0, ended.stderr
    said = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [one["rows"] for one in said if one["what"] == "batch"] == [1000]
    with headwater.connect(dsn) as log:
        assert len(log.read("on-cluster", batch_size=2000)) == 1000
    from deltalake import DeltaTable

    assert DeltaTable(tmp_path / "lake").to_pyarrow_table(columns=["id"]).num_rows == 1000
    Slot(dsn, "cluster_changes", "cluster_changes").drop()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def wait_for_port(port: int) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert time.monotonic() < until, "the master does not listen"
        time.sleep(0.1)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(PATIENCE_SECONDS)
