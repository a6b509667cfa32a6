"""What a command needs of the package's extras, told when it is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headwater.cli.exit_codes import NotThere


@contextmanager
def needs(extras: str) -> Iterator[None]:
    """Around imports that only `pip install 'headwater[extras]'` makes possible."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise NotThere(f"{error.name} is not installed", hint=f"Run: pip install 'headwater[{extras}]'") from error
