"""Where a trial plays: its names, addresses and pace, as every process of it gets them; and how its events are known.

An event is known by what it says, its producer and that producer's number: after a failover a position may be another
event's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from headwater import NewEvent

STAGE_VARIABLE: Final = "HEADWATER_CHAOS_STAGE"
KEYS: Final = 60

# Queues, each with its workers.
PLAIN, EXACT, ORDERED = "queue plain", "queue exact", "queue ordered"
# Readers of a library.
FOLLOW, FOLLOW_BARE, PROCESS = "follow cursor", "follow without cursor", "process"
SQL, STORE, STORE_BARE = "sql subscription", "store cursor", "store without cursor"
# Readers of a protocol.
SSE, GRPC, KAFKA, WEBHOOK = "sse", "grpc", "kafka", "webhook"

QUIET, BUSY = "quiet", "busy"


@dataclass(frozen=True, slots=True)
class Stage:
    """All names of a trial are its own, so that it disturbs nothing else and can be removed again."""

    dsn: str
    name: str
    directory: str
    events_per_second: float
    lease_seconds: float
    max_attempts: int
    # 0: not served.
    http_port: int = 0
    grpc_port: int = 0
    kafka_port: int = 0
    webhook_port: int = 0

    @property
    def open_topic(self) -> str:
        return f"{self.name}-open"

    @property
    def lane_topic(self) -> str:
        return f"{self.name}-lanes"

    @property
    def quiet_topic(self) -> str:
        """Gets a few events right after each crash, and hardly any otherwise."""
        return f"{self.name}-quiet"

    @property
    def rollback_topic(self) -> str:
        """Nothing that is published here is ever committed."""
        return f"{self.name}-rollbacks"

    @property
    def store_topic(self) -> str:
        return f"{self.name}-store"

    @property
    def log_topics(self) -> tuple[str, ...]:
        """Every topic that has events of the trial."""
        return (self.open_topic, self.lane_topic, self.quiet_topic, self.store_topic)

    @property
    def stop_file(self) -> Path:
        """Producers end when it exists."""
        return Path(self.directory, "stop")

    @property
    def pause_file(self) -> Path:
        """Producers wait while it exists; those that roll back go on."""
        return Path(self.directory, "pause")

    @property
    def quiet_condition(self) -> str:
        """The filter of the SQL subscription."""
        return f"e.topic = '{self.quiet_topic}'"

    def consumer(self, reader: str) -> str:
        """The name of a queue, a cursor or a consumer group."""
        return f"{self.name}-{reader.replace(' ', '-')}"

    def topics_of(self, reader: str) -> tuple[str, ...]:
        """What a reader reads. Huge transactions come to the open topic, and ordered keys take their time."""
        if reader == ORDERED:
            return (self.lane_topic,)
        if reader in (PLAIN, EXACT):
            return (self.open_topic, self.lane_topic, self.quiet_topic)
        if reader in (STORE, STORE_BARE):
            return (self.store_topic,)
        if reader == KAFKA:
            return (self.quiet_topic, self.lane_topic)
        if reader in (SQL, WEBHOOK) or reader.endswith(QUIET):
            return (self.quiet_topic,)
        return (self.lane_topic,) if reader.startswith(SSE) else (self.open_topic, self.lane_topic)

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def event_of(producer: str, number: int, *, poison: bool = False) -> NewEvent:
    """An event that says which producer made it, and as which of its own."""
    payload = {"by": producer, "n": number, **({"poison": True} if poison else {})}
    return NewEvent(payload, key=f"k{number % KEYS}", type="Poison" if poison else "Chaos")


def id_of(data: Any) -> str:
    """By what an event is known, from its payload."""
    return f"{data['by']}/{data['n']}"


def id_of_payload(payload: bytes | None) -> str:
    return id_of(json.loads(payload or b"{}"))


def quiet_and_busy(kind: str) -> tuple[str, str]:
    """The two readers of a kind: one bound to the quiet topic alone, one to busy ones."""
    return (f"{kind} {QUIET}", f"{kind} {BUSY}")
