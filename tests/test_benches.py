"""Do the benchmarks work, and do they print what their page relies on?"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patience import TEST_SECONDS

ROOT = Path(__file__).parent.parent
MODULES = sorted(path.stem for path in (ROOT / "bench").glob("*.py") if path.stem != "__init__")
BENCHES = [name for name in MODULES if not name.startswith("_")]
# What Headwater is compared with; `./dev bench` and `./dev test --all` install them.
COMPARED = ("procrastinate", "pydbzengine", "eventsourcing", "umadb")


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


def bench(name: str) -> Any:
    return importlib.import_module(f"bench.{name}")


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_fits_the_code_it_measures(name: str) -> None:
    bench(name)


def test_every_ratio_on_the_page_is_one_that_a_benchmark_prints() -> None:
    page = (ROOT / "docs" / "benchmarks-method.md").read_text()
    rows = re.findall(r"^\| `(\w+_vs_\w+)`.*\|$", page, re.MULTILINE)
    printed = {key for name in BENCHES for key in bench(name).PROMISED}
    # Figures of the same run that no aim is set for.
    without_aim = {row for row in rows if re.search(rf"^\| `{row}`.*\| *\| *\|?$", page, re.MULTILINE)}
    assert len(rows) > 10
    assert set(rows) - without_aim - printed == set()


@pytest.mark.long
@pytest.mark.parametrize("name", BENCHES)
def test_a_benchmark_runs_in_its_smallest_form_and_prints_every_ratio(name: str) -> None:
    if missing := [package for package in COMPARED if importlib.util.find_spec(package) is None]:
        pytest.skip(f"{', '.join(missing)} missing: pip install 'headwater[bench]'")
    command = [sys.executable, "-m", f"bench.{name}", "--smallest"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TEST_SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["bench"] == name.replace("_", "-")
    assert result["size"] == "smallest"
    promised = bench(name).PROMISED
    assert promised
    numbers = {key: result.get(key) for key in promised}
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in numbers.values()), numbers
