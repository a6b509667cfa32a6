"""Who takes part in a trial: readers with what each promises, the processes that they need, and what is left out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from headwater.trials.chaos.stage import (
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

# What a reader promises of the order in which events first come: that of the log, that of each partition, none.
Order = Literal["log", "partition", "none"]
# What removes a reader's name from the log again.
Keeper = Literal["queue", "cursor", "webhook", "subscription", "none"]


@dataclass(frozen=True, slots=True)
class ReaderKind:
    """One reader and what it promises. `role`: the process that it runs in."""

    name: str
    role: str
    keeper: Keeper
    order: Order = "log"
    # Its effects are rows, written in the transaction that acknowledges: once means once.
    exactly_once: bool = False


READERS: Final[tuple[ReaderKind, ...]] = (
    ReaderKind(PLAIN, "worker", "queue", "none"),
    ReaderKind(EXACT, "worker", "queue", "none", exactly_once=True),
    ReaderKind(ORDERED, "worker", "queue", "none"),
    *(ReaderKind(name, "follow", "cursor") for name in quiet_and_busy(FOLLOW)),
    *(ReaderKind(name, "follow-bare", "none") for name in quiet_and_busy(FOLLOW_BARE)),
    *(ReaderKind(name, "process", "cursor", exactly_once=True) for name in quiet_and_busy(PROCESS)),
    ReaderKind(SQL, "sql", "subscription"),
    ReaderKind(STORE, "store", "cursor"),
    ReaderKind(STORE_BARE, "store", "none"),
    *(ReaderKind(name, "sse", "none") for name in quiet_and_busy(SSE)),
    *(ReaderKind(name, "grpc", "none") for name in quiet_and_busy(GRPC)),
    ReaderKind(KAFKA, "kafka", "none", "partition"),
    ReaderKind(WEBHOOK, "webhook", "webhook", "none"),
)

# The modules that a reader's role, and the server that it reads from, need beyond the package itself.
NEEDED_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "sse": ("fastapi", "uvicorn", "httptools"),
    "grpc": ("grpc", "grpc_health", "grpc_reflection"),
    "kafka": ("kio", "cramjam", "google_crc32c", "confluent_kafka"),
    "webhook": ("h11",),
}
PRODUCERS: Final[Mapping[str, int]] = {"producer": 2, "rollback": 1, "appender": 1}
PRODUCING_ROLES: Final = (*PRODUCERS, "kafka-producer")
SERVED_ROLES: Final = ("sse", "grpc", "kafka", "webhook")
PROCESSES_OF: Final[Mapping[str, int]] = {"worker": 2}


@dataclass(frozen=True, slots=True)
class Cast:
    """The readers of one trial. `left_out`: each role that cannot take part, and why."""

    readers: tuple[ReaderKind, ...]
    left_out: Mapping[str, str]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(reader.role for reader in self.readers))

    @property
    def served(self) -> tuple[str, ...]:
        """The roles that need `headwater serve`."""
        return tuple(role for role in SERVED_ROLES if role in self.roles)

    def processes(self) -> dict[str, int]:
        """How many of each role there are."""
        wanted = dict(PRODUCERS)
        if self.served:
            wanted["server"] = 1
        wanted |= {role: PROCESSES_OF.get(role, 1) for role in self.roles}
        if "kafka" in self.roles:
            wanted["kafka-producer"] = 1
        return wanted


def choose(roles: Iterable[str] | None = None) -> Cast:
    """Everything that can take part; or only the readers of these roles."""
    wanted = {reader.role for reader in READERS} if roles is None else set(roles)
    missing = {
        role: f"{module} is not installed"
        for role, modules in NEEDED_MODULES.items()
        if role in wanted
        for module in modules
        if importlib.util.find_spec(module) is None
    }
    return Cast(tuple(one for one in READERS if one.role in wanted and one.role not in missing), missing)
