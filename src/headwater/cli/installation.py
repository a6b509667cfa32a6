"""How this program was installed: by which name to call it, and where its pages are."""

from __future__ import annotations

import os
import shutil
import sys
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import headwater


def checkout() -> Path | None:
    """The root of the checkout that the package runs from; None if it was installed from a wheel."""
    root = Path(headwater.__file__).parents[2]
    return root if (root / "docs").is_dir() and (root / "pyproject.toml").is_file() else None


def program() -> str:
    """The command that starts this program in the user's shell: its path if PATH finds none, or another one."""
    running = Path(sys.argv[0])
    if running.name != "headwater" or not running.is_file():
        return "headwater"
    found = shutil.which("headwater")
    if found is not None and Path(found).samefile(running):
        return "headwater"
    relative = os.path.relpath(running)
    return str(running.absolute()) if relative.startswith(os.pardir) else relative


def pages() -> Traversable:
    """The folder with the documentation: in the package if it was installed from a wheel."""
    packaged = resources.files("headwater") / "docs"
    root = checkout()
    return packaged if packaged.is_dir() or root is None else root / "docs"
