"""Does the package bring what its commands and hints promise? The wheel is built and looked into."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headwater.cli import installation
from headwater.cli.commands import docs
from patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
PAGES = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert built.returncode == 0, built.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_contains_the_package_and_every_page_and_nothing_else_of_the_docs(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"headwater/{page}" for page in PAGES} == {name for name in names if name.startswith("headwater/docs/")}
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "headwater").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert source <= names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"headwater"}


def test_an_installed_wheel_prints_its_own_pages(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (tmp_path / "headwater" / "docs" / "tutorial.md").write_text("# A page of the wheel\n\n```sql run\nselect 1\n```\n")
    printed = subprocess.run(
        [sys.executable, "-c", "from headwater.cli import main; main()", "docs", "tutorial"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert (printed.returncode, printed.stdout) == (0, "# A page of the wheel\n\n```sql\nselect 1\n```\n")


def test_every_page_is_listed_and_printed(run: Any) -> None:
    listed = run("docs")
    assert listed.exit_code == 0
    names = {line.split()[0] for line in listed.stdout.splitlines()[1:]}
    assert names == {page.removeprefix("docs/").removesuffix(".md") for page in PAGES}
    for name in names:
        printed = run("docs", name)
        assert printed.exit_code == 0
        assert printed.stdout.startswith("# "), name


def test_a_page_is_found_by_its_last_word_and_a_wrong_one_is_answered_with_a_close_one(run: Any) -> None:
    assert run("docs", "kafka").stdout == run("docs", "how-to/kafka").stdout
    wrong = run("docs", "how-to/kafak")
    assert wrong.exit_code == 4
    assert "Did you mean how-to/kafka?" in wrong.stderr


def test_no_text_names_a_file_of_the_checkout_and_every_page_that_it_names_exists() -> None:
    names = [name for name, _ in docs._pages(installation.pages())]
    named = 0
    for path in sorted((ROOT / "src" / "headwater").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.partition("# ")[0]
            if "docs/decisions/" not in code:
                assert not re.search(r"\bdocs/[\w/-]+\.md\b|\bexamples/\w+\.py\b", code), f"{path}:{number}: {line}"
            for topic in re.findall(r"`headwater docs ([a-z/-]+)`", code):
                named += 1
                assert docs._find(topic, names)
    assert named >= 5, "the search found too little"


def test_the_extras_server_and_all_contain_those_that_they_stand_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def contained(name: str) -> set[str]:
        found = {name}
        for requirement in extras[name]:
            if match := re.fullmatch(r"headwater\[(.*)\]", requirement):
                found |= set().union(*(contained(one) for one in match.group(1).split(",")))
        return found

    assert contained("server") == {"server", "http", "grpc", "kafka", "webhooks", "schemas"}
    assert contained("all") == set(extras) - {"dev", "bench", "docs"}
