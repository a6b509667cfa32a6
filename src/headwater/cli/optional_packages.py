"""Errors for missing optional dependencies of a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headwater.cli.exit_codes import NotFound


@contextmanager
def require_extras(extras: str) -> Iterator[None]:
    """Wrap imports that need `pip install 'headwater[extras]'`; a missing package raises NotFound with that hint."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise NotFound(f"{error.name} is not installed", hint=f"Run: pip install 'headwater[{extras}]'") from error
