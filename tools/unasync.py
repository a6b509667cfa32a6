"""Make client.py, the blocking shell, from aio.py: the same code with the asynchronous words taken out.

python tools/unasync.py           write src/headwater/client.py
python tools/unasync.py --check   fail if it is not what would be written
"""

from __future__ import annotations

import subprocess
import sys
import tokenize
from io import StringIO
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "src" / "headwater"
HEADER = '"""The blocking shell. Generated from aio.py by tools/unasync.py: write there."""\n'

# A word of aio.py and what stands for it; an empty one goes with the space behind it.
WORDS = {
    "async": "",
    "await": "",
    "asyncio": "time",
    "AsyncHeadwater": "Headwater",
    "AsyncConnection": "Connection",
    "AsyncCursor": "Cursor",
    "AsyncConnectionPool": "ConnectionPool",
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
    body = body.replace("Awaitable[None]", "None").replace("Awaitable[T]", "T").replace(" Awaitable,", "")
    body = body.replace("import time\n", "", 1)
    body = body.replace("Callable, Generator, Iterable, Iterator,", "Callable, Generator, Iterable,")
    return HEADER + body[body.index('"""\n', 3) + 4 :]


def formatted(source: str) -> str:
    for command in (["check", "--select", "I,F401", "--fix", "-q"], ["format", "-q"]):
        source = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(FOLDER / "client.py"), "-"],
            input=source,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
    return source


def main() -> int:
    target = FOLDER / "client.py"
    wanted = formatted(blocking((FOLDER / "aio.py").read_text()))
    if "--check" in sys.argv:
        if not target.exists() or target.read_text() != wanted:
            print("client.py is not what aio.py makes of it; run: python tools/unasync.py")
            return 1
        return 0
    target.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
