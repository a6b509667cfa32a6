"""Reads the evidence for the verdict: the events in the log, and the deliveries of each reader."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import headwater
from headwater.calls import overview
from headwater.trials.chaos.config import TrialConfig
from headwater.trials.chaos.journal import DeliveryLogReader, read_delivered
from headwater.trials.chaos.participants import Participants, ReaderSpec
from headwater.trials.chaos.verdict import LoggedEvent, ReaderDeliveries

EFFECTS: Final = "select event from headwater_chaos.effect where consumer = %s order by id"
# Two workers may commit in another order than the ids of their rows: read some earlier rows again.
NEW_EFFECTS: Final = "select id, event from headwater_chaos.effect where consumer = %s and id > %s"
OVERLAP_ROWS: Final = 5000
EFFECT_COUNT: Final = "select count(*) from headwater_chaos.effect where consumer = %s"
PAGE: Final = 1000


def read_events(log: headwater.Headwater, config: TrialConfig) -> Iterator[LoggedEvent]:
    """Read all events of the trial from the log."""
    dense = (config.partition_topic, config.store_topic)
    for event in log.follow(config.log_topics, stop_when_caught_up=True):
        payload: Any = json.loads(event.payload or b"{}")
        offset = event.topic_offset if event.topic in dense else None
        yield LoggedEvent(event.position, payload["by"], payload["n"], (event.topic, event.partition), offset)


def dead_events(
    log: headwater.Headwater, config: TrialConfig, reader: ReaderSpec, ids: Mapping[int, str]
) -> Iterable[str]:
    """The ids of a queue's dead letters. `ids` maps positions to ids of events."""
    if reader.consumer_kind not in ("queue", "webhook"):
        return
    after = 0
    queue = config.consumer(reader.name)
    while letters := log.dead_letters(queue, after=after, batch_size=PAGE):
        yield from (ids[letter.position] for letter in letters if letter.position in ids)
        after = letters[-1].position


def read_deliveries(
    log: headwater.Headwater, config: TrialConfig, kind: ReaderSpec, ids: Mapping[int, str]
) -> ReaderDeliveries:
    """Read all deliveries of one reader."""
    if kind.exactly_once:
        with log.connection() as connection:
            events = [event for (event,) in connection.execute(EFFECTS, (kind.name,)).fetchall()]
    else:
        events = read_delivered(Path(config.directory), kind.name)
    return ReaderDeliveries(
        name=kind.name,
        topics=frozenset(config.topics_of(kind.name)),
        delivered=events,
        dead=frozenset(dead_events(log, config, kind, ids)),
        order=kind.order,
        exactly_once=kind.exactly_once,
    )


@dataclass(slots=True)
class PendingDeliveries:
    """Counts the events that each reader has not received yet. Each call reads only new deliveries."""

    participants: Participants
    config: TrialConfig
    events: list[LoggedEvent]
    _delivery_logs: dict[str, DeliveryLogReader] = field(default_factory=dict)
    _missing: dict[str, set[str]] = field(default_factory=dict)
    _ids: dict[int, str] = field(default_factory=dict)
    _effects_to: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ids = {event.position: event.id for event in self.events}
        for reader in self.participants.readers:
            topics = self.config.topics_of(reader.name)
            self._missing[reader.name] = {event.id for event in self.events if event.partition[0] in topics}
            self._delivery_logs[reader.name] = DeliveryLogReader(Path(self.config.directory), reader.name)

    def counts(self, log: headwater.Headwater) -> dict[str, int]:
        for reader in self.participants.readers:
            missing = self._missing[reader.name]
            if reader.exactly_once:
                self._discard_effects(log, reader, missing)
            else:
                missing.difference_update(self._delivery_logs[reader.name].new())
            if missing:
                missing.difference_update(dead_events(log, self.config, reader, self._ids))
        return {name: len(missing) for name, missing in self._missing.items()}

    def _discard_effects(self, log: headwater.Headwater, reader: ReaderSpec, missing: set[str]) -> None:
        after = self._effects_to.get(reader.name, 0)
        with log.connection() as connection:
            rows = connection.execute(NEW_EFFECTS, (reader.name, after - OVERLAP_ROWS)).fetchall()
        missing.difference_update(event for _, event in rows)
        self._effects_to[reader.name] = max((number for number, _ in rows), default=after)


def attempts(log: headwater.Headwater) -> int:
    """The attempts of all events that wait for a retry; the only progress of an event that kills its workers."""
    return log.run(overview.redelivery_attempts())


def has_received(log: headwater.Headwater, config: TrialConfig, reader: ReaderSpec) -> bool:
    """Whether a reader has received an event."""
    if reader.exactly_once:
        with log.connection() as connection:
            row = connection.execute(EFFECT_COUNT, (reader.name,)).fetchone()
            return bool(row and row[0])
    path = Path(config.directory, f"{reader.name}.delivered")
    return path.exists() and path.stat().st_size > 0
