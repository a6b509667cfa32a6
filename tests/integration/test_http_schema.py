"""Does the server keep to its own OpenAPI document, whatever is sent? Asked by schemathesis, with a fixed seed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headwater
from effort import EFFORT, effort
from headwater.servers.options import ServerLimits
from http_server import http_server
from patience import PATIENCE_SECONDS, TEST_SECONDS

pytest.importorskip("schemathesis")

# `coverage` alone takes minutes: for a soak test.
PHASES = "examples,fuzzing,coverage" if EFFORT > 1 else "examples,fuzzing"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
)
# What is there is asked for, so that more than 404 comes back.
KNOWN = """
[parameters]
"path.topic" = "orders"
"path.queue" = "mailer"
[[operations]]
include-path-regex = "/(stores|dcb)/"
parameters = { "path.topic" = "store" }
"""


@pytest.fixture(scope="module")
def address(dsn: str) -> Iterator[str]:
    with headwater.connect(dsn) as log:
        log.create_topic("orders")
        log.publish("orders", {"id": 1})
        log.create_store("store")
        log.create_queue("mailer", topics="orders")
    with http_server(dsn, limits=ServerLimits(requests_per_second=0, request_seconds=PATIENCE_SECONDS)) as found:
        yield found


@pytest.mark.parametrize("known", [False, True], ids=["strange-names", "known-names"])
def test_every_answer_is_as_described_and_none_is_a_bug(address: str, tmp_path: Path, known: bool) -> None:
    config = tmp_path / "schemathesis.toml"
    # With names that are known, nothing may be deleted.
    config.write_text(KNOWN if known else "")
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", f"{address}/openapi.json"]
    command += [
        "--seed",
        "1",
        "--max-examples",
        str(effort(2 if known else 1)),
        "--phases",
        PHASES,
        "--checks",
        ",".join(CHECKS),
    ]
    # SSE streams never end, claims may wait, and whether metrics are there is not this test's question.
    command += ["--exclude-path-regex", "/(follow|claim|metrics|ready)$", "--request-timeout", str(PATIENCE_SECONDS)]
    command += ["--continue-on-failure", "--no-color", "--suppress-health-check", "all", "--warnings", "off"]
    if known:
        command += ["--exclude-method", "DELETE", "--include-path-regex", r"\{(topic|queue)\}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TEST_SECONDS, check=False
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert "No failures" in result.stdout or "passed" in result.stdout
