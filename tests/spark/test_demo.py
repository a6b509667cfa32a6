"""Does the demo of pipelines show what it says?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import TEST_SECONDS


@pytest.mark.long
def test_a_change_is_seen_in_five_places(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    ended = subprocess.run(
        [sys.executable, "-c", "from headwater.cli import main; main()", "demo", "--pipeline", "--json"],
        env={**kept, "HEADWATER_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TEST_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    found = {step["destination"]: step["found"] for step in json.loads(ended.stdout)["steps"]}
    changed = {"id": 2, "customer": "bob", "cents": 9900}
    assert found["nats"] == found["log"] == found["kafka"] == changed
    assert found["lake"] == [
        {"id": 1, "customer": "ada", "cents": 1200},
        changed,
        {"id": 3, "customer": "cleo", "cents": 100},
    ]
    assert found["projection"] == [["bob", 1, 9900], ["cleo", 1, 100]]
    # It cleans up after itself and says nothing beside.
    assert ended.stderr == ""
