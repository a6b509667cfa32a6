"""Many changes of one table as the last state of each of its rows. No I/O here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headwater.lake.columns import CapturedColumn, Row, members

_NOTHING: Final[frozenset[str]] = frozenset()


@dataclass(slots=True)
class State:
    """What a row became by one change. What the change left out is as in `previous`, or in the lake at `origin`."""

    after: str
    previous: State | None
    origin: str | None
    """The key of the row in the lake whose large values this one still has; None if it has none of them."""


@dataclass(slots=True)
class Folded:
    """What a run of changes comes to. A key that is gone has the state None."""

    truncated: bool = False
    states: dict[str, State | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The last state of a row: its values, and which are still those that the lake has at `origin`."""

    key: str
    values: Row
    kept: frozenset[str]
    origin: str | None


def fold(changes: Iterable[Mapping[str, Any]], columns: Sequence[CapturedColumn]) -> Folded:
    """The last state of each row, in the order of the changes, which are rows of the capture's schema."""
    folded = Folded()
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
        states[key] = State(change["after"], previous, origin)
    return folded


def resolve(key: str, state: State, names: frozenset[str], read: Callable[[str], Row]) -> Resolved:
    """The values of a row under these names, gathered from the changes that it came from."""
    values = read(state.after)
    if len(values) == len(names):
        return Resolved(key, values, _NOTHING, None)
    missing = names - values.keys()
    step = state.previous
    while missing and step is not None:
        earlier = read(step.after)
        found = missing & earlier.keys()
        values.update({name: earlier[name] for name in found})
        missing -= found
        step = step.previous
    return Resolved(key, values, missing, state.origin if missing else None)


def _key_in(row: str, names: Sequence[str]) -> str:
    """The key within the JSON of a row, as the same text that changes have as their key."""
    values = members(row, raw=frozenset(names))
    return "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{values[name]}" for name in names) + "}"
