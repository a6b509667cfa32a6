"""Consumer groups with the server-side protocol (KIP-848): the API ConsumerGroupHeartbeat.

The decisions are made by `assignment.ConsumerGroup`. This module takes up the groups that this broker coordinates,
validates requests, and stores each new epoch in Postgres before a member sees it. All groups share one lock.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from typing import Any, Final

import psycopg

from headwater.bounded_dict import BoundedDict
from headwater.calls import kafka as calls
from headwater.calls import kafka_admin
from headwater.calls.kafka import TopicPartition
from headwater.errors import HeadwaterError
from headwater.observability.metrics import ERROR, GROUP, logger
from headwater.servers.kafka.assignment import ASSIGNORS, ConsumerGroup, Heartbeat, HeartbeatResult
from headwater.servers.kafka.broker import TOPICS_AGE_SECONDS, Broker
from headwater.servers.kafka.wire import ErrorCode, Request
from headwater.supervisor import FailureGuard

INTERVAL_MS: Final = 1_000
TICK_SECONDS: Final = 0.5
MAX_PATTERN_CHARACTERS: Final = 1_000
MAX_CACHED_PATTERNS: Final = 1_000


# Backreferences and lookarounds: RE2, which Kafka uses, does not support them.
_UNSUPPORTED_BY_RE2: Final = re.compile(r"\\[1-9]|\(\?(?![:i])")


class ConsumerGroupApis:
    """The APIs of groups whose partitions the coordinator assigns."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._groups: dict[str, ConsumerGroup] = {}
        self._stored_epochs: dict[str, int] = {}
        # One operation at a time: an epoch is stored in Postgres before a member sees it.
        self._lock = asyncio.Lock()
        self._incarnation = 0
        self._matched: BoundedDict[str, tuple[float, frozenset[str]]] = BoundedDict(MAX_CACHED_PATTERNS)

    async def run(self) -> None:
        """Expire the sessions of all groups. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            async with self._lock:
                self._forget_if_fenced()
                for name, group in list(self._groups.items()):
                    with FailureGuard("kafka group", **{GROUP: name}) as scope:
                        group.tick(time.monotonic())
                    if scope.failed:
                        self._drop_failed(name)
                        continue
                    if not group.members:
                        # Its state is in Postgres, except for the epoch of the last change.
                        await self._store_epoch(group)
                        self._groups.pop(name, None)

    def _drop_failed(self, name: str) -> None:
        """Drop a group from memory after a bug in its state machine. Its row in Postgres stays; its members are unknown
        at their next heartbeat and rejoin; other groups are not affected."""
        self._groups.pop(name, None)
        self._stored_epochs.pop(name, None)

    def _forget_if_fenced(self) -> None:
        if not self._broker.holds_lease or self._incarnation != self._broker.incarnation:
            self._groups.clear()
            self._stored_epochs.clear()
            self._incarnation = self._broker.incarnation

    def names(self) -> list[str]:
        """The groups that have members on this broker."""
        return [name for name, group in self._groups.items() if group.members]

    def group_named(self, name: str) -> ConsumerGroup | None:
        """The group, if it has members on this broker."""
        group = self._groups.get(name)
        return group if group is not None and group.members else None

    async def heartbeat(self, request: Request, client_host: str, *, classic: bool) -> dict[str, Any]:
        """`classic`: the group has members with the classic protocol."""
        fields = request.fields
        invalid = _request_error(request)
        if invalid is None and classic:
            invalid = (ErrorCode.group_id_not_found, "the group has members with the classic protocol")
        if invalid is not None:
            return {"error_code": invalid[0], "error_message": invalid[1], "heartbeat_interval": INTERVAL_MS}
        # All topics: other members of the group may see topics that this one may not.
        topics = {topic.name: (topic.id, topic.partitions) for topic in await self._broker.topics()}
        owned = fields.topic_partitions
        beat = Heartbeat(
            fields.member_id or str(uuid.uuid4()),
            fields.member_epoch,
            fields.instance_id,
            request.client_id or "",
            client_host,
            fields.rebalance_timeout / 1000,
            None if fields.subscribed_topic_names is None else frozenset(fields.subscribed_topic_names),
            fields.server_assignor,
            None
            if owned is None
            else frozenset([topic_partition for one in owned for topic_partition in await self._partitions(one)]),
            getattr(fields, "subscribed_topic_regex", None),
        )
        async with self._lock:
            group = await self._group(fields.group_id)
            if group is None:
                return {"error_code": ErrorCode.not_coordinator, "heartbeat_interval": INTERVAL_MS}
            known = group.members.get(beat.member_id)
            pattern = beat.pattern if beat.pattern is not None else known.pattern if known is not None else ""
            try:
                matching = await self._matching(pattern)
                allowed = frozenset(name for name in matching if request.allowed("describe", "topic", name))
                beat = beat._replace(matched=allowed)
            except psycopg.errors.InvalidRegularExpression as error:
                code, message = ErrorCode.invalid_regular_expression, error.diag.message_primary
                return {"error_code": code, "error_message": message, "heartbeat_interval": INTERVAL_MS}
            with FailureGuard("kafka group", **{GROUP: group.name}) as scope:
                answer = group.heartbeat(time.monotonic(), beat, topics)
            if scope.failed:
                self._drop_failed(group.name)
                return {"error_code": ErrorCode.coordinator_not_available, "heartbeat_interval": INTERVAL_MS}
            if not await self._store_epoch(group):
                return {"error_code": ErrorCode.not_coordinator, "heartbeat_interval": INTERVAL_MS}
        return await self._response(answer)

    async def _matching(self, pattern: str) -> frozenset[str]:
        """The topics whose names match a regular expression, from a recent copy."""
        if not pattern:
            return frozenset()
        now = time.monotonic()
        known = self._matched.get(pattern)
        if known is None or now - known[0] > TOPICS_AGE_SECONDS:
            names = await self._broker.log.run(kafka_admin.kafka_matching_topics(pattern))
            known = self._matched[pattern] = (now, names)
        return known[1]

    async def _group(self, name: str) -> ConsumerGroup | None:
        self._forget_if_fenced()
        if not self._broker.holds_lease:
            return None
        if name not in self._groups:
            epoch = await self._broker.log.run(calls.kafka_take_up(name, self._broker.incarnation))
            if epoch is None:
                return None
            self._groups[name] = ConsumerGroup(name, epoch, self._broker.settings.session_seconds)
            self._stored_epochs[name] = epoch
        return self._groups[name]

    async def _store_epoch(self, group: ConsumerGroup) -> bool:
        if self._stored_epochs.get(group.name) == group.epoch:
            return True
        call = calls.kafka_note_generation(
            group.name, self._broker.incarnation, generation=group.epoch, protocol_type="consumer"
        )
        try:
            stored = await self._broker.log.run(call)
        except (HeadwaterError, psycopg.Error) as error:
            logger.warning("epoch not stored", extra={GROUP: group.name, ERROR: str(error)})
            stored = False
        if stored:
            self._stored_epochs[group.name] = group.epoch
        else:
            self._groups.pop(group.name, None)
            self._stored_epochs.pop(group.name, None)
        return stored

    async def _partitions(self, owned: Any) -> list[TopicPartition]:
        topic = await self._broker.topic_with_uuid(owned.topic_id)
        return [] if topic is None else [TopicPartition(topic.id, partition) for partition in owned.partitions or ()]

    async def _response(self, answer: HeartbeatResult) -> dict[str, Any]:
        assignment = None
        if answer.assignment is not None:
            assignment = {"topic_partitions": self._by_topic(answer.assignment)}
        return {
            "error_code": answer.code,
            "error_message": None if answer.code is ErrorCode.none else answer.code.name.replace("_", " "),
            "member_id": answer.member_id,
            "member_epoch": answer.epoch,
            "heartbeat_interval": INTERVAL_MS,
            "assignment": assignment,
        }

    def _by_topic(
        self, topic_partitions: frozenset[TopicPartition], names: dict[int, str] | None = None
    ) -> list[dict[str, Any]]:
        by_topic: dict[int, list[int]] = {}
        for topic_partition in sorted(topic_partitions):
            by_topic.setdefault(topic_partition.topic_id, []).append(topic_partition.partition)
        return [
            {
                "topic_id": self._broker.uuid_of_id(topic_id),
                "topic_name": (names or {}).get(topic_id, ""),
                "partitions": partitions,
            }
            for topic_id, partitions in by_topic.items()
        ]

    async def describe(self, request: Request) -> dict[str, Any]:
        names = {topic.id: topic.name for topic in await self._broker.topics(as_of_now=True)}
        groups = []
        for name in request.fields.group_ids or ():
            group = self.group_named(name)
            if not request.allowed("describe", "consumer", name):
                groups.append({"error_code": ErrorCode.group_authorization_failed, "group_id": name})
                continue
            if group is None:
                message = f"group {name} has no members with the consumer protocol"
                code = ErrorCode.group_id_not_found
                groups.append({"error_code": code, "error_message": message, "group_id": name, "group_state": "Dead"})
                continue
            groups.append(
                {
                    "error_code": ErrorCode.none,
                    "group_id": name,
                    "group_state": group.state,
                    "group_epoch": group.epoch,
                    "assignment_epoch": group.epoch,
                    "assignor_name": ASSIGNORS[0],
                    "members": [
                        {
                            "member_id": member.id,
                            "instance_id": member.instance_id,
                            "member_epoch": member.epoch,
                            "client_id": member.client_id,
                            "client_host": member.client_host,
                            "subscribed_topic_names": sorted(member.topics),
                            "subscribed_topic_regex": member.pattern or None,
                            "assignment": {"topic_partitions": self._by_topic(member.topic_partitions, names)},
                            "target_assignment": {
                                "topic_partitions": self._by_topic(group.target.get(member.id, frozenset()), names)
                            },
                            "member_type": 1,
                        }
                        for member in group.members.values()
                    ],
                    "authorized_operations": -(2**31),
                }
            )
        return {"groups": groups}


def _request_error(request: Request) -> tuple[ErrorCode, str] | None:
    fields = request.fields
    if not fields.group_id or "\x00" in fields.group_id:
        return ErrorCode.invalid_group_id, "the group id is empty or contains a NUL character"
    if not request.allowed("read", "consumer", fields.group_id):
        return ErrorCode.group_authorization_failed, "not authorized to read the group"
    hidden = [one for one in fields.subscribed_topic_names or () if not request.allowed("describe", "topic", one)]
    if hidden:
        return (
            ErrorCode.topic_authorization_failed,
            f"not authorized to describe topics: {', '.join(sorted(hidden)[:10])}",
        )
    pattern = getattr(fields, "subscribed_topic_regex", None) or ""
    if len(pattern) > MAX_PATTERN_CHARACTERS or "\x00" in pattern:
        message = f"invalid pattern: expected up to {MAX_PATTERN_CHARACTERS} characters without NUL"
        return ErrorCode.invalid_regular_expression, message
    if _UNSUPPORTED_BY_RE2.search(pattern):
        return ErrorCode.invalid_regular_expression, "invalid pattern: backreferences and lookarounds are not supported"
    if request.version >= 1 and not fields.member_id:
        return ErrorCode.invalid_request, "member id required: since version 1 the member generates its own id"
    return None
