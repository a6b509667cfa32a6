"""What every door of a server is given, and what it gives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from headwater.webhooks.addresses import Network


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one process takes of its callers."""

    max_body_bytes: int = 16 * 1024 * 1024
    # Of one account, or of one address where nobody says who they are. 0: no limit.
    requests_per_second: float = 5000.0
    connections: int = 10_000
    # From the first byte of a request to the first of its answer.
    request_seconds: float = 60.0
    # How long a live stream waits for a client that takes nothing.
    slow_seconds: float = 30.0
    heartbeat_seconds: float = 15.0
    # How long what is under way may take to end when the door is closed.
    grace_seconds: float = 20.0


@dataclass(frozen=True, slots=True)
class Opening:
    """Where a door listens, and whom it lets in."""

    host: str
    # Several processes listen on one port (SO_REUSEPORT), so it is never 0 here: who starts them has reserved it.
    port: int
    # Files in PEM. None: not encrypted.
    certificate: str | None
    private_key: str | None
    # Callers say who they are, and may do what their account may; otherwise everybody may do everything.
    authenticate: bool
    # Nobody but this machine can reach it.
    loopback: bool
    limits: Limits = Limits()
    # Where webhooks may be tested, besides the public internet.
    webhook_networks: tuple[Network, ...] = ()
    # Addresses and networks of proxies that are believed when they say for whom they ask, and how that one came.
    trusted_proxies: tuple[str, ...] = ()
    # Where the processes that share the port note what they have counted. None: there is one.
    counts_directory: str | None = None


@dataclass(frozen=True, slots=True)
class Door:
    """A door that is open."""

    address: str
    # Set if something that it cannot do without came to an end.
    failed: asyncio.Event = field(default_factory=asyncio.Event)
