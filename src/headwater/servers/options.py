"""Options and limits that every protocol server takes, and the handle that it returns."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from headwater.webhooks.addresses import Network

# How long a request waits for a database that is unavailable.
REQUEST_PATIENCE_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one server process accepts from its clients."""

    max_body_bytes: int = 16 * 1024 * 1024
    # Per account, or per address for requests without authentication. 0: no limit.
    requests_per_second: float = 5000.0
    connections: int = 10_000
    # From the first byte of a request to the first byte of its response.
    request_seconds: float = 60.0
    # How long an SSE stream waits for a client that does not read.
    slow_seconds: float = 30.0
    heartbeat_seconds: float = 15.0
    # How long requests in progress may take to finish at shutdown.
    grace_seconds: float = 20.0


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where a server listens, and how it authenticates clients."""

    host: str
    # Several processes listen on one port (SO_REUSEPORT), so it is never 0 here: the parent process has reserved it.
    port: int
    # Paths of PEM files. None: no TLS.
    certificate: str | None
    private_key: str | None
    # If False, every client may do everything.
    authenticate: bool
    # The host is a loopback address: only this machine can connect.
    loopback: bool
    limits: ServerLimits = ServerLimits()
    # Networks that webhook tests may reach besides the public internet.
    webhook_networks: tuple[Network, ...] = ()
    # Addresses and networks of proxies whose X-Forwarded-* headers are trusted.
    trusted_proxies: tuple[str, ...] = ()
    # The directory through which the processes of one server share their counters. None: a single process.
    counts_directory: str | None = None
    # Begins the source of events that are read as CloudEvents.
    cloud_events_source: str = ""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server."""

    address: str
    # Set when the server has stopped by itself.
    failed: asyncio.Event = field(default_factory=asyncio.Event)
