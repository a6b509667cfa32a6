"""The participants of a trial: readers with their guarantees, the processes that they need, and those skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from headwater.trials.chaos.config import (
    EXACT,
    FOLLOW,
    FOLLOW_BARE,
    GRPC,
    KAFKA,
    ORDERED,
    PLAIN,
    PROCESS,
    SQL,
    SSE,
    STORE,
    STORE_BARE,
    WEBHOOK,
    quiet_and_busy,
)

# The guaranteed order of first deliveries: that of the log, that of each partition, or none.
Order = Literal["log", "partition", "none"]
# The object of the log that belongs to a reader and is deleted after the trial.
ConsumerKind = Literal["queue", "cursor", "webhook", "subscription", "none"]


@dataclass(frozen=True, slots=True)
class ReaderSpec:
    """One reader and its guarantees. `role` is the process that it runs in."""

    name: str
    role: str
    consumer_kind: ConsumerKind
    order: Order = "log"
    # It writes its effects in the transaction that acknowledges the events.
    exactly_once: bool = False


READERS: Final[tuple[ReaderSpec, ...]] = (
    ReaderSpec(PLAIN, "worker", "queue", "none"),
    ReaderSpec(EXACT, "worker", "queue", "none", exactly_once=True),
    ReaderSpec(ORDERED, "worker", "queue", "none"),
    *(ReaderSpec(name, "follow", "cursor") for name in quiet_and_busy(FOLLOW)),
    *(ReaderSpec(name, "follow-bare", "none") for name in quiet_and_busy(FOLLOW_BARE)),
    *(ReaderSpec(name, "process", "cursor", exactly_once=True) for name in quiet_and_busy(PROCESS)),
    ReaderSpec(SQL, "sql", "subscription"),
    ReaderSpec(STORE, "store", "cursor"),
    ReaderSpec(STORE_BARE, "store", "none"),
    *(ReaderSpec(name, "sse", "none") for name in quiet_and_busy(SSE)),
    *(ReaderSpec(name, "grpc", "none") for name in quiet_and_busy(GRPC)),
    ReaderSpec(KAFKA, "kafka", "none", "partition"),
    ReaderSpec(WEBHOOK, "webhook", "webhook", "none"),
)

# The optional modules that a role and its server need.
NEEDED_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "sse": ("fastapi", "uvicorn", "httptools"),
    "grpc": ("grpc", "grpc_health", "grpc_reflection"),
    "kafka": ("kio", "cramjam", "google_crc32c", "confluent_kafka"),
    "webhook": ("h11",),
}
PRODUCERS: Final[Mapping[str, int]] = {"producer": 2, "rollback": 1, "appender": 1}
PRODUCING_ROLES: Final = (*PRODUCERS, "kafka-producer")
SERVED_ROLES: Final = ("sse", "grpc", "kafka", "webhook")
PROCESS_COUNTS: Final[Mapping[str, int]] = {"worker": 2}


@dataclass(frozen=True, slots=True)
class Participants:
    """The readers of one trial. `skipped` maps each role that is not available to the reason."""

    readers: tuple[ReaderSpec, ...]
    skipped: Mapping[str, str]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(reader.role for reader in self.readers))

    @property
    def served(self) -> tuple[str, ...]:
        """The roles that need `headwater serve`."""
        return tuple(role for role in SERVED_ROLES if role in self.roles)

    def processes(self) -> dict[str, int]:
        """The number of processes of each role."""
        wanted = dict(PRODUCERS)
        if self.served:
            wanted["server"] = 1
        wanted |= {role: PROCESS_COUNTS.get(role, 1) for role in self.roles}
        if "kafka" in self.roles:
            wanted["kafka-producer"] = 1
        return wanted


def choose(roles: Iterable[str] | None = None) -> Participants:
    """Choose all available readers, or those of the given roles."""
    wanted = {reader.role for reader in READERS} if roles is None else set(roles)
    missing = {
        role: f"{module} is not installed"
        for role, modules in NEEDED_MODULES.items()
        if role in wanted
        for module in modules
        if importlib.util.find_spec(module) is None
    }
    return Participants(tuple(one for one in READERS if one.role in wanted and one.role not in missing), missing)
