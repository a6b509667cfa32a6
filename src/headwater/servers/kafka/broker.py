"""One broker process: its identity and lease, the other live brokers, the topics, and periodic maintenance.

All of it is read from Postgres. A broker registers with a lease and renews it; when the lease expires, other brokers
may take over its consumer groups, and `holds_lease` is false before that can happen. A restarted or fenced broker
registers again with a new incarnation, which invalidates its old one.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

import psycopg
from psycopg import AsyncConnection

from headwater.access.password_checks import PasswordChecks
from headwater.access.permissions import AccessPolicy
from headwater.aio import AsyncHeadwater
from headwater.calls import Call
from headwater.calls import access as access_calls
from headwater.calls import kafka as calls
from headwater.calls.kafka import KafkaBroker, KafkaTopic, TopicPartition
from headwater.errors import HeadwaterError
from headwater.observability.metrics import ERROR, logger
from headwater.servers.kafka.batch_cache import BatchCache
from headwater.servers.kafka.end_offsets import EndOffsetWatcher
from headwater.servers.options import REQUEST_PATIENCE_SECONDS
from headwater.supervisor import supervise

LEASE_SECONDS: Final = 6.0
RENEW_SECONDS: Final = 1.5
TOPICS_AGE_SECONDS: Final = 1.0
"""Maximum age of the cached list of topics; changes by other brokers are seen after this time."""
REAP_SECONDS: Final = 1.5
MAINTENANCE_SECONDS: Final = 600.0
COMPACT_SECONDS: Final = 15.0
CANCEL_SECONDS: Final = 1.0


class BrokerSettings(NamedTuple):
    """Settings of a broker, fixed when it starts."""

    host: str
    port: int
    default_partitions: int = 1
    max_frame_bytes: int = 104_857_600
    max_connections: int = 2_000
    # A client has this long to authenticate, or without authentication to send a first valid request.
    admission_seconds: float = 15.0
    rebalance_delay_seconds: float = 0.2
    # Session timeout of members with the server-side group protocol (KIP-848).
    session_seconds: float = 45.0
    # Size of the in-memory cache of recent record batches.
    cache_bytes: int = 64 * 1024 * 1024
    # Whether clients must authenticate, and whether the server listens on loopback only.
    authenticate: bool = False
    loopback: bool = True


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended."""
    left = set(tasks)
    while left:
        # Cancel repeatedly: a task that is just receiving a connection from the pool can miss a cancellation.
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_SECONDS)


class Broker:
    """This process as one of the brokers of the log."""

    def __init__(
        self, log: AsyncHeadwater, settings: BrokerSettings, *, passwords: PasswordChecks | None = None
    ) -> None:
        self.log = log.with_patience(REQUEST_PATIENCE_SECONDS)
        # For calls that must not be repeated here, and for loops that repeat them by themselves.
        self.impatient = log.with_patience(0)
        self.passwords = passwords or PasswordChecks()
        self.settings = settings
        self.cluster_id = UUID(int=0)
        self.node_id = 0
        self.incarnation = 0
        self.brokers: list[KafkaBroker] = []
        self.leader_epoch = -1
        self.end_offsets = EndOffsetWatcher(self.impatient)
        self.batch_cache = BatchCache(settings.cache_bytes)
        self.access = AccessPolicy((), ())
        # Bytes of responses that are being read or not sent yet, of all clients.
        self.unsent_bytes = 0
        self._lease_ends = 0.0
        self._by_name: dict[str, KafkaTopic] = {}
        self._by_id: dict[int, KafkaTopic] = {}
        self._topics_read_at = -TOPICS_AGE_SECONDS
        self._refreshing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Register this broker and renew its lease until `stop`."""
        self.cluster_id = await self.log.run(calls.kafka_cluster_id())
        await self._register()
        await self.refresh_topics()
        await self.refresh_access()
        self._tasks = [
            supervise("kafka lease", self._keep_lease),
            supervise("kafka end offsets", self.end_offsets.watch),
            # Separate tasks: each of them may take longer than the lease lasts.
            self._repeat("compaction", COMPACT_SECONDS, self._compact),
            self._repeat("timeouts", REAP_SECONDS, partial(self._call, calls.kafka_reap_transactions())),
            self._repeat("maintenance", MAINTENANCE_SECONDS, partial(self._call, calls.kafka_maintenance())),
            self._repeat("maintenance of the log", REAP_SECONDS, self.log.run_maintenance),
        ]

    async def stop(self) -> None:
        """Release the lease, so that other brokers take over at once."""
        await end_tasks(self._tasks)
        self._lease_ends = 0.0
        with suppress(HeadwaterError, psycopg.Error):
            await self.impatient.run(calls.kafka_renew(self.incarnation, lease_seconds=0))

    # The lease

    @property
    def holds_lease(self) -> bool:
        """Whether the lease is valid, so that no other broker can have taken over."""
        return time.monotonic() < self._lease_ends

    async def _register(self, connection: AsyncConnection[Any] | None = None) -> None:
        asked_at = time.monotonic()
        self.node_id, self.incarnation = await self.log.run(
            calls.kafka_register(self.settings.host, self.settings.port, lease_seconds=LEASE_SECONDS),
            connection=connection,
        )
        self._lease_ends = asked_at + LEASE_SECONDS
        await self.refresh_brokers(connection)

    async def refresh_brokers(self, connection: AsyncConnection[Any] | None = None) -> None:
        """Read the live brokers and the epoch of the log, which is the leader epoch of every partition.

        Never cached: a client that sees fewer brokers in one response than in another drops the missing ones together
        with its requests to them, and may then wait for those responses forever."""
        epoch, self.brokers = await self.log.run(calls.kafka_cluster(), connection=connection)
        # Query results can arrive out of order; epochs only grow.
        self.leader_epoch = max(self.leader_epoch, epoch)

    async def _keep_lease(self) -> None:
        while True:
            try:
                # A dedicated connection, so that the lease is renewed even if the pool is exhausted.
                async with self.log.connection() as connection:
                    while True:
                        await self._renew(connection)
                        await asyncio.sleep(RENEW_SECONDS)
            except (HeadwaterError, psycopg.Error) as error:
                # Harmless until the lease expires; after that `holds_lease` is false.
                logger.warning("broker lease not renewed", extra={ERROR: str(error)})
            await asyncio.sleep(RENEW_SECONDS)

    async def _renew(self, connection: AsyncConnection[Any]) -> None:
        asked_at = time.monotonic()
        call = calls.kafka_renew(self.incarnation, lease_seconds=LEASE_SECONDS)
        if await self.log.run(call, connection=connection):
            self._lease_ends = asked_at + LEASE_SECONDS
            await self.refresh_brokers(connection)
        else:
            await self._register(connection)
        await self.refresh_access(connection)

    # Periodic maintenance

    def _repeat(self, name: str, seconds: float, act: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        return supervise(f"kafka {name}", partial(self._repeated, name, seconds, act))

    async def _repeated(self, name: str, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await act()
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("broker maintenance failed", extra={ERROR: f"{name}: {error}"})

    async def _compact(self) -> None:
        done = False
        while not done:
            # In steps: each is a transaction that other transactions may wait for.
            _, done = await self.impatient.run(calls.kafka_compact())

    async def _call(self, call: Call[Any]) -> None:
        await self.impatient.run(call)

    async def refresh_access(self, connection: AsyncConnection[Any] | None = None) -> None:
        """Read accounts and permissions. Changes by others take effect when the lease is next renewed."""
        if self.settings.authenticate:
            accounts = await self.log.run(access_calls.accounts(), connection=connection)
            permissions = await self.log.run(access_calls.permissions(), connection=connection)
            self.access = AccessPolicy((name for name, administrator in accounts if administrator), permissions)

    # Topics

    async def refresh_topics(self) -> None:
        asked_at = time.monotonic()
        topics = await self.log.run(calls.kafka_topics())
        self._by_name = {topic.name: topic for topic in topics}
        self._by_id = {topic.id: topic for topic in topics}
        self._topics_read_at = asked_at

    async def topics(self, *, as_of_now: bool = False) -> list[KafkaTopic]:
        """All topics, from a recent copy; `as_of_now` reads them, so that changes by other brokers are included."""
        oldest = time.monotonic() - (0.0 if as_of_now else TOPICS_AGE_SECONDS)
        async with self._refreshing:
            if self._topics_read_at < oldest:
                await self.refresh_topics()
        return list(self._by_name.values())

    async def topic_named(self, name: str) -> KafkaTopic | None:
        return await self._find(lambda: self._by_name.get(name))

    async def topic_with_uuid(self, uuid: UUID | None) -> KafkaTopic | None:
        if uuid is None or uuid.bytes[:12] != self.cluster_id.bytes[:12]:
            return None
        topic_id = int.from_bytes(uuid.bytes[12:], "big")
        return await self._find(lambda: self._by_id.get(topic_id))

    async def _find(self, look_up: Callable[[], KafkaTopic | None]) -> KafkaTopic | None:
        asked_at = time.monotonic()
        topic = look_up()
        if topic is None or asked_at - self._topics_read_at > TOPICS_AGE_SECONDS:
            # An unknown topic may be new. One refresh serves all callers that arrived before it began.
            async with self._refreshing:
                if self._topics_read_at < asked_at:
                    await self.refresh_topics()
            topic = look_up()
        return topic

    def uuid_of(self, topic: KafkaTopic) -> UUID:
        """A topic's UUID for Kafka: 12 bytes of the cluster id followed by the topic id, which is never reused."""
        return self.uuid_of_id(topic.id)

    def uuid_of_id(self, topic_id: int) -> UUID:
        return UUID(bytes=self.cluster_id.bytes[:12] + topic_id.to_bytes(4, "big"))

    def leader_of(self, topic_partition: TopicPartition) -> int:
        """The leader of a partition according to metadata. Any broker can serve it; this spreads the load."""
        live = self.brokers or [KafkaBroker(self.node_id, self.incarnation, self.settings.host, self.settings.port)]
        return live[(topic_partition.topic_id + topic_partition.partition) % len(live)].node_id

    def speaks_for(self, name: str) -> bool:
        """Whether this is the one live broker that lists a transaction, so that a client sees each only once."""
        live = [one.node_id for one in self.brokers] or [self.node_id]
        return live[zlib.crc32(name.encode()) % len(live)] == self.node_id
