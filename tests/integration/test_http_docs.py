"""Is what the pages about HTTP show true? Their curl lines are run, in order, against a server of this test."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from http_server import http_server
from patience import PATIENCE_SECONDS

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
SHOWN = "http://127.0.0.1:8080"
LINES = re.compile(r"^\$ (curl [^\n]*)\n((?:(?!\$ |```)[^\n]*\n)*)", re.MULTILINE)


def matches(expected: str, printed: str) -> bool:
    """Whether this was printed; ... stands for anything, and so does what follows the last line."""

    def words(text: str) -> str:
        return re.sub(r"[ \n]+", " ", text).strip()

    pattern = ".*".join(re.escape(part.strip()) for part in words(expected).split("..."))
    return re.match(pattern, words(printed), re.DOTALL) is not None


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(("page", "at_least"), [("http.md", 11), ("cloud-events.md", 8)])
def test_the_examples_of_the_page_do_what_they_show(dsn: str, page: str, at_least: int) -> None:
    examples = LINES.findall((PAGES / page).read_text())
    assert len(examples) >= at_least
    with http_server(dsn) as address:
        for command, expected in examples:
            script = command.replace(SHOWN, address)
            result = subprocess.run(
                ["bash", "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
            )
            assert result.returncode == 0, f"{command}: {result.stderr}"
            assert expected, command
            assert matches(expected, result.stdout), f"{command} printed:\n{result.stdout}\nnot:\n{expected}"
