"""Consumer groups of the server-side protocol (KIP-848): heartbeats go to the coordinator's decisions."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import OrderedDict
from typing import Any, Final

import psycopg

from headwater.calls import kafka as calls
from headwater.calls import kafka_admin
from headwater.calls.kafka import Lane
from headwater.errors import HeadwaterError
from headwater.observability.metrics import ERROR, GROUP, logger
from headwater.servers.kafka.assignment import ASSIGNORS, AssignedGroup, Beaten, Heartbeat
from headwater.servers.kafka.broker import TOPICS_AGE_SECONDS, Broker
from headwater.servers.kafka.wire import ErrorCode, Request
from headwater.supervisor import Contained

INTERVAL_MS: Final = 1_000
TICK_SECONDS: Final = 0.5
LONGEST_PATTERN: Final = 1_000
KEPT_PATTERNS: Final = 1_000


# What Kafka's own engine does not know, since it could take for ever.
_BEYOND_RE2: Final = re.compile(r"\\[1-9]|\(\?(?![:i])")


class Heartbeats:
    """The APIs of groups whose partitions the coordinator assigns."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._groups: dict[str, AssignedGroup] = {}
        self._noted: dict[str, int] = {}
        # One decision at a time, since the next epoch is noted in Postgres before anybody hears of it.
        self._deciding = asyncio.Lock()
        self._incarnation = 0
        self._matched: OrderedDict[str, tuple[float, frozenset[str]]] = OrderedDict()

    async def run(self) -> None:
        """Let time pass for the groups, for ever."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            async with self._deciding:
                self._forget_if_fenced()
                for name, group in list(self._groups.items()):
                    with Contained("kafka group", **{GROUP: name}) as decision:
                        group.tick(time.monotonic())
                    if decision.failed:
                        self._drop_failed(name)
                        continue
                    if not group.members:
                        # What matters of it is in Postgres, but for the epoch that its end was.
                        await self._note(group)
                        self._groups.pop(name, None)

    def _drop_failed(self, name: str) -> None:
        """Drop what is in memory of a group whose state makes its coordinator fail. Its row stays, and the other
        groups go on; its members are unknown at their next heartbeat, and join again."""
        self._groups.pop(name, None)
        self._noted.pop(name, None)

    def _forget_if_fenced(self) -> None:
        if not self._broker.holds_lease or self._incarnation != self._broker.incarnation:
            self._groups.clear()
            self._noted.clear()
            self._incarnation = self._broker.incarnation

    def names(self) -> list[str]:
        """The groups that have members here."""
        return [name for name, group in self._groups.items() if group.members]

    def group_named(self, name: str) -> AssignedGroup | None:
        """The group, if it has members here."""
        group = self._groups.get(name)
        return group if group is not None and group.members else None

    async def heartbeat(self, request: Request, client_host: str, *, classic: bool) -> dict[str, Any]:
        """`classic`: the group has members of the other protocol."""
        fields = request.fields
        refused = _refused(request)
        if refused is None and classic:
            refused = (ErrorCode.group_id_not_found, "the group has members of the classic protocol")
        if refused is not None:
            return {"error_code": refused[0], "error_message": refused[1], "heartbeat_interval": INTERVAL_MS}
        # All there are: what this member may not see, another of the group may.
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
            None if owned is None else frozenset([lane for one in owned for lane in await self._lanes(one)]),
            getattr(fields, "subscribed_topic_regex", None),
        )
        async with self._deciding:
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
            with Contained("kafka group", **{GROUP: group.name}) as decision:
                answer = group.heartbeat(time.monotonic(), beat, topics)
            if decision.failed:
                self._drop_failed(group.name)
                return {"error_code": ErrorCode.coordinator_not_available, "heartbeat_interval": INTERVAL_MS}
            if not await self._note(group):
                return {"error_code": ErrorCode.not_coordinator, "heartbeat_interval": INTERVAL_MS}
        return await self._told(answer)

    async def _matching(self, pattern: str) -> frozenset[str]:
        """The topics whose names a regular expression fits, as of a moment ago."""
        if not pattern:
            return frozenset()
        now = time.monotonic()
        known = self._matched.get(pattern)
        if known is None or now - known[0] > TOPICS_AGE_SECONDS:
            names = await self._broker.log.run(kafka_admin.kafka_matching_topics(pattern), patience_seconds=2)
            known = self._matched[pattern] = (now, names)
            while len(self._matched) > KEPT_PATTERNS:
                self._matched.popitem(last=False)
        return known[1]

    async def _group(self, name: str) -> AssignedGroup | None:
        self._forget_if_fenced()
        if not self._broker.holds_lease:
            return None
        if name not in self._groups:
            epoch = await self._broker.log.run(calls.kafka_take_up(name, self._broker.incarnation), patience_seconds=2)
            if epoch is None:
                return None
            self._groups[name] = AssignedGroup(name, epoch, self._broker.settings.session_seconds)
            self._noted[name] = epoch
        return self._groups[name]

    async def _note(self, group: AssignedGroup) -> bool:
        if self._noted.get(group.name) == group.epoch:
            return True
        call = calls.kafka_note_generation(
            group.name, self._broker.incarnation, generation=group.epoch, protocol_type="consumer"
        )
        try:
            noted = await self._broker.log.run(call, patience_seconds=2)
        except (HeadwaterError, psycopg.Error) as error:
            logger.warning("generation not noted", extra={GROUP: group.name, ERROR: str(error)})
            noted = False
        if noted:
            self._noted[group.name] = group.epoch
        else:
            self._groups.pop(group.name, None)
            self._noted.pop(group.name, None)
        return noted

    async def _lanes(self, asked: Any) -> list[Lane]:
        topic = await self._broker.topic_with_uuid(asked.topic_id)
        return [] if topic is None else [Lane(topic.id, partition) for partition in asked.partitions or ()]

    async def _told(self, answer: Beaten) -> dict[str, Any]:
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

    def _by_topic(self, lanes: frozenset[Lane], names: dict[int, str] | None = None) -> list[dict[str, Any]]:
        found: dict[int, list[int]] = {}
        for lane in sorted(lanes):
            found.setdefault(lane.topic_id, []).append(lane.partition)
        return [
            {
                "topic_id": self._broker.uuid_of_id(topic_id),
                "topic_name": (names or {}).get(topic_id, ""),
                "partitions": partitions,
            }
            for topic_id, partitions in found.items()
        ]

    async def describe(self, request: Request) -> dict[str, Any]:
        names = {topic.id: topic.name for topic in await self._broker.topics(as_of_now=True)}
        groups = []
        for name in request.fields.group_ids or ():
            group = self.group_named(name)
            if not request.allowed("describe", "group", name):
                groups.append({"error_code": ErrorCode.group_authorization_failed, "group_id": name})
                continue
            if group is None:
                message = f"there is no group {name} with members of the consumer protocol"
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
                            "assignment": {"topic_partitions": self._by_topic(member.lanes, names)},
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


def _refused(request: Request) -> tuple[ErrorCode, str] | None:
    fields = request.fields
    if not fields.group_id or "\x00" in fields.group_id:
        return ErrorCode.invalid_group_id, "a group has a name"
    if not request.allowed("read", "group", fields.group_id):
        return ErrorCode.group_authorization_failed, "the group may not be read for"
    hidden = [one for one in fields.subscribed_topic_names or () if not request.allowed("describe", "topic", one)]
    if hidden:
        return ErrorCode.topic_authorization_failed, f"these topics may not be read: {', '.join(sorted(hidden)[:10])}"
    pattern = getattr(fields, "subscribed_topic_regex", None) or ""
    if len(pattern) > LONGEST_PATTERN or "\x00" in pattern:
        message = f"a pattern is up to {LONGEST_PATTERN} characters"
        return ErrorCode.invalid_regular_expression, message
    if _BEYOND_RE2.search(pattern):
        return ErrorCode.invalid_regular_expression, "a pattern has neither references back nor looks around"
    if request.version >= 1 and not fields.member_id:
        return ErrorCode.invalid_request, "a member chooses its id"
    return None
