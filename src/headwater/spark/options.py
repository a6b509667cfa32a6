"""Refusing options that nobody knows, alike wherever some are taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from headwater.errors import InvalidRequest

ADDED_BY_SPARK: Final = ("checkpointlocation", "path")
"""What a write is told beside its own options."""


def refuse_unknown_options(
    given: Iterable[str], known: Sequence[str], *, purpose: str = "", also: Iterable[str] = ()
) -> None:
    """For a format of Spark, to whom the case of an option is nothing; `also` names those that Spark itself adds."""
    allowed = {name.lower() for name in (*known, *also)}
    unknown = sorted(name for name in given if name.lower() not in allowed)
    if unknown:
        raise InvalidRequest(f"unknown options{purpose}: {', '.join(unknown)}", hint=f"Known are {', '.join(known)}.")


def refuse_unknown_keys(given: Mapping[Any, Any], known: Sequence[str], what: str) -> None:
    """For a part of a file of pipelines."""
    unknown = sorted(str(name) for name in given if name not in known)
    if unknown:
        raise InvalidRequest(f"{what} takes no {', '.join(unknown)}", hint=f"Known are {', '.join(known)}.")
