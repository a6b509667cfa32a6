"""One broker process: who it is, which others live, which topics there are. All of it is read from Postgres."""

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
from headwater.access.permissions import Access
from headwater.aio import AsyncHeadwater
from headwater.calls import Call
from headwater.calls import access as access_calls
from headwater.calls import kafka as calls
from headwater.calls.kafka import KafkaBroker, KafkaTopic, Lane
from headwater.errors import HeadwaterError
from headwater.observability.metrics import ERROR, logger
from headwater.servers.kafka.batch_cache import Kept
from headwater.servers.kafka.end_offsets import Tails
from headwater.supervisor import supervise

LEASE_SECONDS: Final = 6.0
RENEW_SECONDS: Final = 1.5
TOPICS_AGE_SECONDS: Final = 1.0
"""How long after a change elsewhere this broker may still go by what it knew."""
REAP_SECONDS: Final = 1.5
UPKEEP_SECONDS: Final = 600.0
COMPACT_SECONDS: Final = 15.0
CANCEL_SECONDS: Final = 1.0


class Settings(NamedTuple):
    """What a broker is told at its start."""

    host: str
    port: int
    default_partitions: int = 1
    max_frame_bytes: int = 104_857_600
    max_connections: int = 2_000
    # A client has this long to authenticate, or without authentication to send a first valid request.
    admission_seconds: float = 15.0
    rebalance_delay_seconds: float = 0.2
    # After how long without a heartbeat a member of a group of the server-side protocol is put out.
    session_seconds: float = 45.0
    # How much of what was just written or read is kept in memory, for those who read it next.
    kept_bytes: int = 64 * 1024 * 1024
    # Whether clients must say who they are, and whether only those of this machine come at all.
    authenticate: bool = False
    loopback: bool = True


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel these and wait until they have ended."""
    left = set(tasks)
    while left:
        # Once is not always enough: a task that is just handed a connection by the pool does not hear it.
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=CANCEL_SECONDS)


class Broker:
    """This process among the brokers of the log."""

    def __init__(self, log: AsyncHeadwater, settings: Settings, *, passwords: PasswordChecks | None = None) -> None:
        self.log = log
        self.passwords = passwords or PasswordChecks()
        self.settings = settings
        self.cluster_id = UUID(int=0)
        self.node_id = 0
        self.incarnation = 0
        self.brokers: list[KafkaBroker] = []
        self.leader_epoch = -1
        self.tails = Tails(log)
        self.kept = Kept(settings.kept_bytes)
        self.access = Access((), ())
        # What is read for clients, or was and is not sent yet.
        self.unsent_bytes = 0
        self._lease_ends = 0.0
        self._by_name: dict[str, KafkaTopic] = {}
        self._by_id: dict[int, KafkaTopic] = {}
        self._topics_read_at = -TOPICS_AGE_SECONDS
        self._refreshing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Register with the others and keep the lease until `stop`."""
        self.cluster_id = await self.log.run(calls.kafka_cluster_id())
        await self._register()
        await self.refresh_topics()
        await self.refresh_access()
        self._tasks = [
            supervise("kafka lease", self._keep_lease),
            supervise("kafka tails", self.tails.watch),
            # Apart from the lease and from each other: any of them may take longer than the lease lasts.
            self._repeat("compaction", COMPACT_SECONDS, self._compact),
            self._repeat("timeouts", REAP_SECONDS, partial(self._call, calls.kafka_reap_transactions())),
            self._repeat("upkeep", UPKEEP_SECONDS, partial(self._call, calls.kafka_upkeep())),
            self._repeat("upkeep of the log", REAP_SECONDS, self.log.do_upkeep),
        ]

    async def stop(self) -> None:
        """Give up the lease, so that others take over at once."""
        await end_tasks(self._tasks)
        self._lease_ends = 0.0
        with suppress(HeadwaterError, psycopg.Error):
            await self.log.run(calls.kafka_renew(self.incarnation, lease_seconds=0), patience_seconds=0)

    # The lease

    @property
    def holds_lease(self) -> bool:
        """Whether no other broker can have taken this one for dead."""
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
        """Learn who lives, and the epoch of the log, which is the leader epoch of every partition. Never from memory: a
        client that hears of fewer brokers from one than from another lets go of the others, whatever it has just asked
        them, and may wait for that answer for ever."""
        epoch, self.brokers = await self.log.run(calls.kafka_cluster(), patience_seconds=5, connection=connection)
        # Answers can overtake each other; epochs only grow.
        self.leader_epoch = max(self.leader_epoch, epoch)

    async def _keep_lease(self) -> None:
        while True:
            try:
                # One that nobody else uses: however busy the others are, the lease does not wait.
                async with self.log.connection() as connection:
                    while True:
                        await self._renew(connection)
                        await asyncio.sleep(RENEW_SECONDS)
            except (HeadwaterError, psycopg.Error) as error:
                # Until the lease ends nothing is lost; after it, `holds_lease` says so.
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

    # What is done now and then

    def _repeat(self, name: str, seconds: float, act: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        return supervise(f"kafka {name}", partial(self._repeated, name, seconds, act))

    async def _repeated(self, name: str, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await act()
            except (HeadwaterError, psycopg.Error) as error:
                logger.warning("upkeep of a broker failed", extra={ERROR: f"{name}: {error}"})

    async def _compact(self) -> None:
        done = False
        while not done:
            # A part at a time: each is a transaction, which others may have to wait for.
            _, done = await self.log.run(calls.kafka_compact(), patience_seconds=0)

    async def _call(self, call: Call[Any]) -> None:
        await self.log.run(call, patience_seconds=0)

    async def refresh_access(self, connection: AsyncConnection[Any] | None = None) -> None:
        """Learn what accounts may do. A change elsewhere counts here when the lease is next renewed."""
        if self.settings.authenticate:
            accounts = await self.log.run(access_calls.accounts(), patience_seconds=5, connection=connection)
            permissions = await self.log.run(access_calls.permissions(), patience_seconds=5, connection=connection)
            self.access = Access((name for name, administrator in accounts if administrator), permissions)

    # Topics

    async def refresh_topics(self) -> None:
        asked_at = time.monotonic()
        topics = await self.log.run(calls.kafka_topics(), patience_seconds=5)
        self._by_name = {topic.name: topic for topic in topics}
        self._by_id = {topic.id: topic for topic in topics}
        self._topics_read_at = asked_at

    async def topics(self, *, as_of_now: bool = False) -> list[KafkaTopic]:
        """All topics, as of a moment ago; or as of now, for whoever may just have made one by another broker."""
        oldest = time.monotonic() - (0.0 if as_of_now else TOPICS_AGE_SECONDS)
        async with self._refreshing:
            if self._topics_read_at < oldest:
                await self.refresh_topics()
        return list(self._by_name.values())

    async def topic_named(self, name: str) -> KafkaTopic | None:
        return await self._found(lambda: self._by_name.get(name))

    async def topic_with_uuid(self, uuid: UUID | None) -> KafkaTopic | None:
        if uuid is None or uuid.bytes[:12] != self.cluster_id.bytes[:12]:
            return None
        topic_id = int.from_bytes(uuid.bytes[12:], "big")
        return await self._found(lambda: self._by_id.get(topic_id))

    async def _found(self, look: Callable[[], KafkaTopic | None]) -> KafkaTopic | None:
        asked_at = time.monotonic()
        topic = look()
        if topic is None or asked_at - self._topics_read_at > TOPICS_AGE_SECONDS:
            # A topic that is not known may be new. One look serves all who asked before it began.
            async with self._refreshing:
                if self._topics_read_at < asked_at:
                    await self.refresh_topics()
            topic = look()
        return topic

    def uuid_of(self, topic: KafkaTopic) -> UUID:
        """A topic's id for Kafka: that of the cluster with the topic's own, which never comes again, at its end."""
        return self.uuid_of_id(topic.id)

    def uuid_of_id(self, topic_id: int) -> UUID:
        return UUID(bytes=self.cluster_id.bytes[:12] + topic_id.to_bytes(4, "big"))

    def leader_of(self, lane: Lane) -> int:
        """The broker that clients should ask for a lane. Any could serve it: this only spreads the work."""
        living = self.brokers or [KafkaBroker(self.node_id, self.incarnation, self.settings.host, self.settings.port)]
        return living[(lane.topic_id + lane.partition) % len(living)].node_id

    def speaks_for(self, name: str) -> bool:
        """Whether this is the one of the living brokers that tells of what any of them could."""
        living = [one.node_id for one in self.brokers] or [self.node_id]
        return living[zlib.crc32(name.encode()) % len(living)] == self.node_id
