"""Build the documentation site with MkDocs: run as a program by `./dev docs`, and loaded by mkdocs.yml as its hooks.

The pages are those that GitHub shows, so the hooks translate what is different on a site:

1. README.md becomes the first page; the other pages at the root and the files that pages link to are copied.
2. Links that lead out of docs/ are rewritten to these copies, and a link to a folder to a list of its pages.
3. The mark `run` of code blocks that are tested is removed.

The layout is that of mike: build/site/VERSION/, versions.json, and an index.html that leads to the newest version.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import posixpath
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = ROOT / "build" / "site"
# The pages outside of docs/, and their names on the site.
ROOT_PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE.txt",
}
# Folders whose files are copied as they are, because pages link to them.
COPIED = ("examples", "proto")
FOLDER_TITLES = {
    "decisions": "Decisions",
    "compare": "Compare",
    "explanation": "Explanation",
    "how-to": "How-to guides",
    "migrate": "Migrate",
    "reference": "Reference",
}
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
RUN = re.compile(r"^(```(?:python|sql|console)) run$", re.MULTILINE)


# --- hooks of MkDocs -----------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    config.nav = [expand(entry) for entry in config.nav]
    return config


def expand(entry: Any) -> Any:
    """Replace each name of a folder in the navigation by all pages of the folder."""
    if not isinstance(entry, dict):
        return entry
    ((title, below),) = entry.items()
    if not isinstance(below, list):
        return entry
    pages: list[Any] = []
    for item in below:
        if isinstance(item, str) and item.endswith("/"):
            pages += [f"{item}index.md", *(f"{item}{path.name}" for path in sorted((DOCS / item).glob("*.md")))]
        else:
            pages.append(expand(item))
    return {title: pages}


def on_files(files: Any, *, config: Any) -> Any:
    from mkdocs.structure.files import File

    for source, target in ROOT_PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    for folder in COPIED:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                name = path.relative_to(ROOT).as_posix()
                files.append(File.generated(config, name, abs_src_path=str(path)))
    for folder, title in FOLDER_TITLES.items():
        lines = [f"- [{title_of(path)}]({path.name})" for path in sorted((DOCS / folder).glob("*.md"))]
        content = f"# {title}\n\n" + "\n".join(lines) + "\n"
        files.append(File.generated(config, f"{folder}/index.md", content=content))
    files.append(File.generated(config, "examples/index.md", content=list_of_examples()))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    return RUN.sub(r"\1", rewrite_links(markdown, page.file.src_uri))


# --- what the hooks decide -----------------------------------------------------------------------------------


def list_of_examples() -> str:
    lines = [
        f"- [{path.name}]({path.name}): {ast.get_docstring(ast.parse(path.read_text()), clean=True).splitlines()[0]}"
        for path in sorted((ROOT / "examples").glob("*.py"))
    ]
    return "# Example programs\n\n" + "\n".join(lines) + "\n"


def title_of(page: Path) -> str:
    found = re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)
    assert found is not None, page
    return found[1]


def source_of(page: str) -> str:
    """The path in the repository of a page of the site."""
    return next((source for source, target in ROOT_PAGES.items() if target == page), f"docs/{page}")


def rewrite_links(markdown: str, page: str) -> str:
    """Let relative links lead to the same file on the site as in the repository."""
    folder = posixpath.dirname(source_of(page))

    def rewritten(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if "://" in link[2] or not (ROOT / path).exists():
            return link[0]
        return link[1] + posixpath.relpath(site_path(path), posixpath.dirname(page) or ".") + link[3]

    return LINK.sub(rewritten, markdown)


def site_path(path: str) -> str:
    """Where a file or folder of the repository is on the site."""
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    if (ROOT / path).is_dir():
        path = f"{path}/index.md"
    return path.removeprefix("docs/")


# --- the program ---------------------------------------------------------------------------------------------


def version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return ".".join(project["version"].split(".")[:2])


def build(site: Path) -> int:
    name = version()
    code = mkdocs("build", "--site-dir", str(site / name))
    if code == 0:
        (site / "versions.json").write_text(json.dumps([{"version": name, "title": name, "aliases": ["latest"]}]))
        (site / "index.html").write_text(
            f'<!doctype html><meta charset="utf-8"><title>Headwater</title>'
            f'<meta http-equiv="refresh" content="0; url={name}/"><a href="{name}/">Headwater {name}</a>\n'
        )
        print(f"built {site / name}/index.html")
    return code


def mkdocs(*arguments: str) -> int:
    command = [sys.executable, "-m", "mkdocs", arguments[0], "--strict", *arguments[1:]]
    # Material announces its opinion of the next MkDocs at each build; the lock file has the version that fits.
    return subprocess.call(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev docs", description="Build the documentation site in build/site.")
    parser.add_argument("--serve", action="store_true", help="serve it on loopback, and rebuild at every change")
    parser.add_argument("--port", type=int, default=8000, help="the port of --serve (8000)")
    parser.add_argument("--output", type=Path, default=SITE, help="the folder for the site (build/site)")
    options = parser.parse_args()
    if options.serve:
        return mkdocs("serve", "--dev-addr", f"127.0.0.1:{options.port}")
    return build(options.output)


if __name__ == "__main__":
    sys.exit(main())
