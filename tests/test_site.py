"""Is the documentation site complete, built without a warning, and independent of other hosts?

What needs MkDocs is skipped where only the packages of tests are installed; `./dev docs` installs it.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from patience import PATIENCE_SECONDS

ROOT = Path(__file__).parents[1]
# What makes a browser load something, and from where. A link that the reader may follow is not in it.
LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "video": "src", "link": "href"}
# Links in the head that a browser does not load.
RELATIONS = {"canonical", "next", "prev", "alternate"}


def pages_of(entries: list[Any]) -> Iterator[str]:
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, list):
            yield from pages_of(value)
        else:
            yield value


def test_every_page_is_in_the_navigation_once() -> None:
    yaml = pytest.importorskip("yaml")

    class Loader(yaml.SafeLoader):  # type: ignore[misc,name-defined]
        """Reads past the function in mkdocs.yml."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    listed = list(pages_of(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))
    folders = [name for name in listed if name.endswith("/")]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if not page.startswith(tuple(folders))}
    copied = {"index.md", "architecture.md", "changelog.md", "contributing.md"}
    assert sorted(set(listed) - set(folders)) == sorted(pages | copied), "add each page to the navigation in mkdocs.yml"
    assert len(listed) == len(set(listed))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: run ./dev docs")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "tools/docs_site.py", "--output", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    return folder


def newest(site: Path) -> Path:
    (version,) = json.loads((site / "versions.json").read_text())
    return site / str(version["version"])


class Loaded(HTMLParser):
    """Collects what a page loads, and the text of its paragraphs."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.paragraphs: list[str] = []
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag in LOADING and given.get(LOADING[tag]) and given.get("rel") not in RELATIONS:
            self.addresses.append(str(given[LOADING[tag]]))
        if tag in ("p", "code"):
            self._inside.append(tag)
            if tag == "p":
                self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._inside == ["p"]:
            self.paragraphs[-1] += data


def test_the_layout_is_that_of_versions(site: Path) -> None:
    folder = newest(site)
    assert f"url={folder.name}/" in (site / "index.html").read_text()
    for page in ("index.html", "tutorial/index.html", "decisions/index.html", "reference/python/index.html"):
        assert (folder / page).exists(), page


def test_no_page_names_an_address_to_load_from(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 70
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text())
        assert [address for address in loaded.addresses if "//" in address] == [], page
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", style.read_text()) == [], style


def test_no_markdown_is_left_in_the_text_of_a_page(site: Path) -> None:
    """A list without an empty line above it, for instance, is a list on GitHub and a paragraph on the site."""
    left = re.compile(r"```|^- |^\d\. |^\| |\]\(", re.MULTILINE)
    for page in sorted(site.rglob("*.html")):
        loaded = Loaded()
        loaded.feed(page.read_text())
        assert [text for text in loaded.paragraphs if left.search(text)] == [], page


def test_search_finds_a_page_in_a_browser_that_reaches_no_other_host(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        origin = f"http://127.0.0.1:{server.server_port}/"
        asked: list[str] = []
        with playwright.sync_playwright() as started:
            browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page()
            page.set_default_timeout(60_000)
            page.on("request", lambda request: asked.append(request.url))
            page.goto(origin)
            page.wait_for_url(f"{origin}{newest(site).name}/")
            page.locator("input[name=query]").fill("isolated")
            page.locator(".md-search-result__link").first.wait_for()
            found = page.locator(".md-search-result__link").evaluate_all("links => links.map(link => link.href)")
            page.locator(".md-version").wait_for()
            browser.close()
        server.shutdown()
    assert any("/explanation/queues/" in address or "/glossary/" in address for address in found), found
    assert [address for address in asked if not address.startswith((origin, "data:", "blob:"))] == []


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Write nothing to the terminal of the tests."""


def test_the_pictures_are_small_and_load_nothing() -> None:
    pictures = sorted((ROOT / "docs" / "images").iterdir())
    assert {picture.suffix for picture in pictures} == {".png", ".svg"}
    for picture in pictures:
        assert picture.stat().st_size < 300_000, picture
        if picture.suffix == ".svg":
            text = picture.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
            assert "//" not in text
            assert "prefers-color-scheme: dark" in text
