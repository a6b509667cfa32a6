"""Folds a sequence of changes of one table into the last state of each changed row. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headwater.lake.columns import CapturedColumn, Row, members

_NOTHING: Final[frozenset[str]] = frozenset()


@dataclass(slots=True)
class RowState:
    """A row after one change. Values that the change omits are in `previous`, or in the lake's row at `origin`."""

    after: str
    previous: RowState | None
    origin: str | None
    """The key of the lake's row that still holds omitted large values; None if there are none."""


@dataclass(slots=True)
class FoldResult:
    """The result of folding changes. A deleted key has the state None."""

    truncated: bool = False
    states: dict[str, RowState | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ResolvedRow:
    """The last state of a row: its values, and the columns in `kept` whose values are those of the lake at `origin`."""

    key: str
    values: Row
    kept: frozenset[str]
    origin: str | None


def fold(changes: Iterable[Mapping[str, Any]], columns: Sequence[CapturedColumn]) -> FoldResult:
    """Fold changes (rows of the capture's schema, in order) into the last state of each row."""
    folded = FoldResult()
    states = folded.states
    key_names = [column.name for column in columns if column.in_key]
    for change in changes:
        operation, key = change["operation"], change["key"]
        if operation == "truncate":
            folded.truncated = True
            states.clear()
            continue
        if operation == "delete":
            states[key] = None
            continue
        before = change["before"] if operation == "update" else None
        moved_from = None
        if before is not None and before != key:
            moved_from = _key_in(before, key_names)
            if moved_from == key:
                moved_from = None
        previous = origin = None
        if change["unchanged"]:
            known = moved_from or key
            previous = states.get(known)
            origin = previous.origin if previous is not None else known
        if moved_from is not None:
            states[moved_from] = None
        states[key] = RowState(change["after"], previous, origin)
    return folded


def resolve(key: str, state: RowState, names: frozenset[str], read: Callable[[str], Row]) -> ResolvedRow:
    """Collect the values of a row with these column names from the chain of its changes."""
    values = read(state.after)
    if len(values) == len(names):
        return ResolvedRow(key, values, _NOTHING, None)
    missing = names - values.keys()
    step = state.previous
    while missing and step is not None:
        earlier = read(step.after)
        found = missing & earlier.keys()
        values.update({name: earlier[name] for name in found})
        missing -= found
        step = step.previous
    return ResolvedRow(key, values, missing, state.origin if missing else None)


def _key_in(row: str, names: Sequence[str]) -> str:
    """The key in the JSON of a row, as the same text as the `key` of changes."""
    values = members(row, raw=frozenset(names))
    return "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{values[name]}" for name in names) + "}"
