"""What is known of a trial while it runs and at its end: the events in the log, and what each reader got of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import headwater
from headwater.calls import overview
from headwater.trials.chaos.cast import Cast, ReaderKind
from headwater.trials.chaos.journal import DeliveriesTail, delivered
from headwater.trials.chaos.stage import Stage
from headwater.trials.chaos.verdict import Found, Reader

EFFECTS: Final = "select event from headwater_chaos.effect where consumer = %s order by id"
# Two workers may commit in another order than they wrote: a little more than was not seen yet.
NEW_EFFECTS: Final = "select id, event from headwater_chaos.effect where consumer = %s and id > %s"
OVERLAP: Final = 5000
EFFECT_COUNT: Final = "select count(*) from headwater_chaos.effect where consumer = %s"
PAGE: Final = 1000


def found(log: headwater.Headwater, stage: Stage) -> Iterator[Found]:
    """Every event of the trial that the log has, read from the beginning."""
    dense = (stage.lane_topic, stage.store_topic)
    for event in log.follow(stage.log_topics, stop_when_caught_up=True):
        made: Any = json.loads(event.payload or b"{}")
        offset = event.topic_offset if event.topic in dense else None
        yield Found(event.position, made["by"], made["n"], (event.topic, event.partition), offset)


def dead_events(log: headwater.Headwater, stage: Stage, reader: ReaderKind, ids: Mapping[int, str]) -> Iterable[str]:
    """What a queue has given up on. `ids`: the events of the log by position; dead letters are rows of the same log."""
    if reader.keeper not in ("queue", "webhook"):
        return
    after = 0
    group = stage.consumer(reader.name)
    while letters := log.dead_letters(group, after=after, batch_size=PAGE):
        yield from (ids[letter.position] for letter in letters if letter.position in ids)
        after = letters[-1].position


def reader_of(log: headwater.Headwater, stage: Stage, kind: ReaderKind, ids: Mapping[int, str]) -> Reader:
    """What one reader got in all."""
    if kind.exactly_once:
        with log.connection() as connection:
            events = [event for (event,) in connection.execute(EFFECTS, (kind.name,)).fetchall()]
    else:
        events = delivered(Path(stage.directory), kind.name)
    return Reader(
        name=kind.name,
        topics=frozenset(stage.topics_of(kind.name)),
        delivered=events,
        dead=frozenset(dead_events(log, stage, kind, ids)),
        order=kind.order,
        exactly_once=kind.exactly_once,
    )


@dataclass(slots=True)
class Outstanding:
    """What each reader has yet to get, as far as its notes say; asked again and again, it reads only what is new."""

    cast: Cast
    stage: Stage
    events: list[Found]
    _tails: dict[str, DeliveriesTail] = field(default_factory=dict)
    _missing: dict[str, set[str]] = field(default_factory=dict)
    _ids: dict[int, str] = field(default_factory=dict)
    _effects_to: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ids = {event.position: event.id for event in self.events}
        for reader in self.cast.readers:
            topics = self.stage.topics_of(reader.name)
            self._missing[reader.name] = {event.id for event in self.events if event.lane[0] in topics}
            self._tails[reader.name] = DeliveriesTail(Path(self.stage.directory), reader.name)

    def counts(self, log: headwater.Headwater) -> dict[str, int]:
        for reader in self.cast.readers:
            missing = self._missing[reader.name]
            if reader.exactly_once:
                self._strike_effects(log, reader, missing)
            else:
                missing.difference_update(self._tails[reader.name].new())
            if missing:
                missing.difference_update(dead_events(log, self.stage, reader, self._ids))
        return {name: len(missing) for name, missing in self._missing.items()}

    def _strike_effects(self, log: headwater.Headwater, reader: ReaderKind, missing: set[str]) -> None:
        after = self._effects_to.get(reader.name, 0)
        with log.connection() as connection:
            rows = connection.execute(NEW_EFFECTS, (reader.name, after - OVERLAP)).fetchall()
        missing.difference_update(event for _, event in rows)
        self._effects_to[reader.name] = max((number for number, _ in rows), default=after)


def attempts(log: headwater.Headwater) -> int:
    """How often the events that wait for another try were tried: an event that kills its workers advances only this."""
    return log.run(overview.redelivery_attempts())


def has_begun(log: headwater.Headwater, stage: Stage, reader: ReaderKind) -> bool:
    """Whether a reader got anything yet."""
    if reader.exactly_once:
        with log.connection() as connection:
            row = connection.execute(EFFECT_COUNT, (reader.name,)).fetchone()
            return bool(row and row[0])
    path = Path(stage.directory, f"{reader.name}.delivered")
    return path.exists() and path.stat().st_size > 0
