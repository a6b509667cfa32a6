"""Is what the documents show true? Runnable blocks are run, links followed, generated pages compared."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from databases import database
from patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CLI_PAGE = ROOT / "docs" / "reference" / "cli.md"
RUN = re.compile(r"^```(?:python|sql|console) run$", re.MULTILINE)
RUNNABLE = [str(page.relative_to(ROOT)) for page in PAGES if RUN.search(page.read_text())]

BLOCK = re.compile(r"^```(python|sql|console) run\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def fresh_dsn(admin_dsn: str, template: str) -> Iterator[str]:
    """A log for this test alone, so that positions start at 1."""
    with database(admin_dsn, template) as dsn:
        with psycopg.connect(dsn, autocommit=True) as connection:
            # As `headwater migrate` leaves a log; the template may be of half an hour ago.
            connection.execute("select headwater.maintain()")
        yield dsn


def test_the_tour_and_the_tutorial_are_run_in_all_three_languages() -> None:
    for page in ("README.md", "docs/tour.md", "docs/tutorial.md"):
        assert {language for language, _ in BLOCK.findall((ROOT / page).read_text())} == {"python", "sql", "console"}


@pytest.mark.parametrize("page", RUNNABLE)
def test_the_runnable_blocks_of_the_page_run(page: str, fresh_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / page).read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == len(RUN.findall(text)), "a block has no end"
    monkeypatch.setenv("HEADWATER_DSN", fresh_dsn)
    names: dict[str, Any] = {"__name__": "a page"}
    try:
        for language, source in blocks:
            if language == "python":
                exec(compile(source, page, "exec", dont_inherit=True), names)
            elif language == "sql":
                with psycopg.connect(fresh_dsn, autocommit=True) as connection:
                    connection.execute(source.encode())
            else:
                _run_console(source)
    finally:
        if "log" in names:
            names["log"].close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_the_page_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []


def test_every_command_that_a_page_shows_exists() -> None:
    known = {tuple(path.split()) for path in re.findall(r"^## headwater (.*)$", CLI_PAGE.read_text(), re.MULTILINE)}
    for page in PAGES:
        for words in re.findall(
            r"^\$ (?:[^\n]*\| )?headwater ([a-z]+(?: [a-z][a-z-]*){0,2})", page.read_text(), re.MULTILINE
        ):
            path = tuple(words.split())
            found = any(path[:length] in known for length in (1, 2, 3))
            assert found, f"{page.relative_to(ROOT)}: headwater {words}"


def test_the_reference_is_what_the_code_says() -> None:
    result = subprocess.run(
        [sys.executable, "tools/reference.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def _run_console(source: str) -> None:
    """Run each line that starts with $, and see that it prints what the lines after it say; ... stands for anything."""
    for command, expected in re.findall(r"^\$ ([^\n]*)\n((?:(?!\$ )[^\n]*\n)*)", source, re.MULTILINE):
        program = shlex.join([sys.executable, "-c", "from headwater.cli import main; main()"])
        script = f'headwater() {{ {program} "$@"; }}; set -o pipefail; {command}'
        result = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
        )
        assert result.returncode == 0, f"{command}: {result.stderr}"
        if expected:
            assert _matches(expected, result.stdout), f"{command} printed:\n{result.stdout}\nnot:\n{expected}"


def _matches(expected: str, printed: str) -> bool:
    def words(text: str) -> str:
        return re.sub(r"[ \n]+", " ", text).strip()

    pattern = ".*".join(re.escape(part.strip()) for part in words(expected).split("..."))
    return re.match(pattern, words(printed), re.DOTALL) is not None
