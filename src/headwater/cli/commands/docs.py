"""`headwater docs`: list the pages of the documentation, or print one. They are part of the package."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from typing import Annotated, Final

import typer

from headwater.cli import installation, output
from headwater.cli.exit_codes import NotFound
from headwater.cli.options import Json, examples

app = typer.Typer()

# A name without a folder means the first page of that name in this order, such as how-to/kafka before migrate/kafka.
_FOLDERS: Final = ("", "how-to", "explanation", "reference", "migrate", "compare", "decisions")
_TITLE: Final = re.compile(r"^# (.+)$", re.MULTILINE)
# Marks of the tests and of the generator, which are not for readers.
_RUN_MARK: Final = re.compile(r"^(```(?:python|sql|console)) run$", re.MULTILINE)
_GENERATED_MARK: Final = re.compile(r"\A<!--.*?-->\n", re.DOTALL)


@app.command(epilog=examples("headwater docs", "headwater docs tutorial", "headwater docs how-to/kafka | less"))
def docs(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="[TOPIC]", help="Page to print, such as tutorial or how-to/kafka. Default: list them."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the pages of the documentation, or print one."""
    pages = dict(_pages(installation.pages()))
    if topic is None:
        rows = [(name, _title(_read(page))) for name, page in pages.items()]
        if as_json:
            output.emit([{"topic": name, "title": title} for name, title in rows])
        else:
            output.print_table(("topic", "title"), rows, empty="no pages: this installation has none")
        return
    name = _find(topic, list(pages))
    text = _read(pages[name])
    if as_json:
        output.emit({"topic": name, "title": _title(text), "markdown": text})
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console(highlight=False, emoji=False).print(Markdown(text))
    else:
        print(text, end="")


def _pages(folder: Traversable) -> Iterator[tuple[str, Traversable]]:
    """The pages by name, such as how-to/kafka, in the order of the folders."""
    for name in _FOLDERS:
        below = folder / name if name else folder
        if not below.is_dir():
            continue
        for page in sorted(below.iterdir(), key=lambda page: page.name):
            if page.name.endswith(".md"):
                yield f"{name}/{page.name}".removeprefix("/").removesuffix(".md"), page


def _find(topic: str, names: list[str]) -> str:
    wanted = topic.removeprefix("docs/").removesuffix(".md").lower()
    if wanted in names:
        return wanted
    for name in names:
        if name.rpartition("/")[2] == wanted:
            return name
    by_last_word = {name.rpartition("/")[2]: name for name in reversed(names)}
    close = difflib.get_close_matches(wanted, [*by_last_word, *names], n=1)
    meant = f"Did you mean {by_last_word.get(close[0], close[0])}? " if close else ""
    raise NotFound(f'there is no page "{topic}"', hint=f"{meant}`headwater docs` lists the pages.")


def _read(page: Traversable) -> str:
    return _RUN_MARK.sub(r"\1", _GENERATED_MARK.sub("", page.read_text(encoding="utf-8")))


def _title(text: str) -> str:
    found = _TITLE.search(text)
    return found.group(1) if found else "-"
