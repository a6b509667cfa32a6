"""The configuration of a trial that every process receives: names, addresses and rates; and the ids of its events.

An event is identified by its payload, which contains the producer and a number: after a failover its position may
belong to another event.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from headwater import NewEvent

CONFIG_VARIABLE: Final = "HEADWATER_CHAOS_CONFIG"
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
class TrialConfig:
    """The names of a trial are unique, so that it affects no other objects and can be removed."""

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
    def partition_topic(self) -> str:
        return f"{self.name}-partitions"

    @property
    def quiet_topic(self) -> str:
        """Receives a few events right after each crash and hardly any otherwise."""
        return f"{self.name}-quiet"

    @property
    def rollback_topic(self) -> str:
        """All transactions that publish here are rolled back."""
        return f"{self.name}-rollbacks"

    @property
    def store_topic(self) -> str:
        return f"{self.name}-store"

    @property
    def log_topics(self) -> tuple[str, ...]:
        """The topics that contain events of the trial."""
        return (self.open_topic, self.partition_topic, self.quiet_topic, self.store_topic)

    @property
    def stop_file(self) -> Path:
        """Producers stop when it exists."""
        return Path(self.directory, "stop")

    @property
    def pause_file(self) -> Path:
        """Producers pause while it exists, except those that roll back."""
        return Path(self.directory, "pause")

    @property
    def quiet_filter(self) -> str:
        """The filter of the SQL subscription."""
        return f"e.topic = '{self.quiet_topic}'"

    def consumer(self, reader: str) -> str:
        """The name of a queue, a cursor or a consumer group."""
        return f"{self.name}-{reader.replace(' ', '-')}"

    def topics_of(self, reader: str) -> tuple[str, ...]:
        """The topics of a reader. The open topic has large transactions, for which ordered keys are too slow."""
        if reader == ORDERED:
            return (self.partition_topic,)
        if reader in (PLAIN, EXACT):
            return (self.open_topic, self.partition_topic, self.quiet_topic)
        if reader in (STORE, STORE_BARE):
            return (self.store_topic,)
        if reader == KAFKA:
            return (self.quiet_topic, self.partition_topic)
        if reader in (SQL, WEBHOOK) or reader.endswith(QUIET):
            return (self.quiet_topic,)
        return (self.partition_topic,) if reader.startswith(SSE) else (self.open_topic, self.partition_topic)

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def make_event(producer: str, number: int, *, poison: bool = False) -> NewEvent:
    """Create the event with this number of a producer."""
    payload = {"by": producer, "n": number, **({"poison": True} if poison else {})}
    return NewEvent(payload, key=f"k{number % KEYS}", type="Poison" if poison else "Chaos")


def id_of(data: Any) -> str:
    """The id of an event, from its payload."""
    return f"{data['by']}/{data['n']}"


def id_of_payload(payload: bytes | None) -> str:
    return id_of(json.loads(payload or b"{}"))


def quiet_and_busy(kind: str) -> tuple[str, str]:
    """The two readers of a kind: one of the quiet topic, one of the busy topics."""
    return (f"{kind} {QUIET}", f"{kind} {BUSY}")
