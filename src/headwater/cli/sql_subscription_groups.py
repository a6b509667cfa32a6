"""Groups that read for subscriptions: what the command line can say of them, and what it must not do to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import headwater
from headwater.cli.queries import ask
from headwater.errors import InvalidRequest
from headwater.model import GroupOverview


@dataclass(frozen=True, slots=True)
class ReadingGroup:
    """A group that keeps a position for its subscriptions, and no life for each event."""

    name: str
    position: int
    state: str
    lag_events: int
    lag_is_more: bool
    lag_seconds: float | None
    topics: tuple[str, ...] | None
    reader: str | None
    subscriptions: int
    retrying: int
    given_up: int


def reading_groups(log: headwater.Headwater, groups: Sequence[GroupOverview]) -> dict[str, ReadingGroup]:
    """What is to be said of these, by name."""
    known = {group.name: group for group in groups}
    if not known:
        return {}
    return {
        name: ReadingGroup(
            name,
            position,
            known[name].state,
            known[name].lag_events,
            known[name].lag_is_more,
            known[name].lag_seconds,
            None if topics is None else tuple(topics),
            *rest,
        )
        for name, position, topics, *rest in ask(log, "reading_groups", list(known))
    }


def reading_group(log: headwater.Headwater, name: str) -> ReadingGroup | None:
    """The one of that name; None if the group is a queue. GroupNotFound if there is no such group."""
    log.group(name)
    return reading_groups(log, [group for group in log.groups([name]) if group.kind == "cursor"]).get(name)


def refuse_reading_group(log: headwater.Headwater, name: str, *, cannot: str) -> None:
    """Only a queue can be worked, paused, bound; one that reads for subscriptions has nothing of the kind."""
    if reading_group(log, name) is not None:
        raise InvalidRequest(
            f'group "{name}" reads for subscriptions: {cannot}',
            hint=f"See headwater sub list {name}, or headwater group describe {name}.",
        )
