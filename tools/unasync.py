"""Make the package client, the blocking shell, from aio: the same code with the asynchronous words taken out.

python tools/unasync.py           write src/headwater/client/
python tools/unasync.py --check   fail if it is not what would be written
"""

from __future__ import annotations

import re
import subprocess
import sys
import tokenize
from io import StringIO
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "src" / "headwater"
# The first line stays what it is; this comes below it.
NOTE = "# Generated from {} by tools/unasync.py: write there.\n"

# A word of aio and what stands for it; an empty one goes with the space behind it.
WORDS = {
    "async": "",
    "await": "",
    "asyncio": "time",
    "aio": "client",
    "AsyncHeadwater": "Headwater",
    "AsyncConnection": "Connection",
    "AsyncCursor": "Cursor",
    "AsyncConnectionPool": "ConnectionPool",
    "AsyncTurn": "Turn",
    "AsyncWire": "Wire",
    "AsyncIterator": "Iterator",
    "asynccontextmanager": "contextmanager",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
}


def blocking(source: str) -> str:
    """The source with every word of the table replaced."""
    lines = source.splitlines(keepends=True)
    edits: list[tuple[int, int, int, str]] = []
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.NAME and token.string in WORDS:
            (row, start), (_, end) = token.start, token.end
            word = WORDS[token.string]
            if not word and lines[row - 1][end : end + 1] == " ":
                end += 1
            edits.append((row - 1, start, end, word))
    for row, start, end, word in reversed(edits):
        lines[row] = lines[row][:start] + word + lines[row][end:]
    body = "".join(lines)
    # Awaiting is the only thing that an Awaitable was for.
    body = re.sub(r"Awaitable\[(\w+)\]", r"\1", body).replace("Awaitable, ", "")
    return body.replace("asyncio", "blocking")


def with_note(source: str, origin: str) -> str:
    """The source with a line below its docstring that says where it comes from."""
    end = source.index('"""', 3) + 4
    return source[:end] + NOTE.format(origin) + source[end:]


def formatted(source: str, path: Path) -> str:
    for command in (["check", "--select", "I,F401,F811", "--fix", "-q"], ["format", "-q"]):
        source = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(path), "-"],
            input=source,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    return source


def main() -> int:
    wanted = {
        FOLDER / "client" / path.name: formatted(
            with_note(blocking(path.read_text()), f"aio/{path.name}"), FOLDER / "client" / path.name
        )
        for path in sorted((FOLDER / "aio").glob("*.py"))
    }
    found = {path: path.read_text() for path in (FOLDER / "client").glob("*.py")}
    if "--check" in sys.argv:
        if found != wanted:
            print("client/ is not what aio/ makes of it; run: python tools/unasync.py")
            return 1
        return 0
    (FOLDER / "client").mkdir(exist_ok=True)
    for path in found.keys() - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
