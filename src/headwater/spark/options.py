"""Rejects unknown options, with the same error for all formats and sinks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from headwater.errors import InvalidRequest

ADDED_BY_SPARK: Final = ("checkpointlocation", "path")
"""Options that Spark adds to a write."""


def refuse_unknown_options(
    given: Iterable[str], known: Sequence[str], *, purpose: str = "", also: Iterable[str] = ()
) -> None:
    """Check the options of a Spark format, ignoring case; `also` lists options that Spark itself adds."""
    allowed = {name.lower() for name in (*known, *also)}
    unknown = sorted(name for name in given if name.lower() not in allowed)
    if unknown:
        raise InvalidRequest(
            f"unknown options{purpose}: {', '.join(unknown)}", hint=f"Known options: {', '.join(known)}."
        )


def refuse_unknown_keys(given: Mapping[Any, Any], known: Sequence[str], what: str) -> None:
    """Check the keys of a part of a pipeline file."""
    unknown = sorted(str(name) for name in given if name not in known)
    if unknown:
        raise InvalidRequest(f"{what} has unknown keys: {', '.join(unknown)}", hint=f"Known keys: {', '.join(known)}.")
