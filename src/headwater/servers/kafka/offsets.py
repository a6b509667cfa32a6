"""Offsets of consumer groups: committed, asked for, forgotten. They are rows in Postgres."""

from __future__ import annotations

from typing import Any, Final

from headwater.calls import kafka as calls
from headwater.calls.kafka import KafkaTopic, Lane, OffsetToCommit
from headwater.errors import InvalidRequest
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.classic_protocol import Groups, Refused
from headwater.servers.kafka.wire import ErrorCode, Request

LONGEST_METADATA: Final = 4096


class Offsets:
    """The APIs about the offsets of groups."""

    def __init__(self, broker: Broker, groups: Groups) -> None:
        self._broker = broker
        self._groups = groups

    async def commit(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        refused: ErrorCode | None = ErrorCode.group_authorization_failed
        if request.allowed("read", "group", fields.group_id):
            refused = await self._groups.commit_refused(
                fields.group_id,
                fields.member_id,
                getattr(fields, "group_instance_id", None),
                fields.generation_id_or_member_epoch,
            )
        topics, offsets = await self.offsets_of(request, refused, by_id=request.version >= 10)
        if offsets:
            call = calls.kafka_commit_offsets(fields.group_id, self._broker.incarnation, offsets)
            try:
                code = (
                    ErrorCode.none
                    if await self._broker.log.run(call, patience_seconds=2)
                    else ErrorCode.not_coordinator
                )
            except InvalidRequest:
                code = ErrorCode.invalid_request
            if code is not ErrorCode.none:
                topics = [
                    {**topic, "partitions": [{**part, "error_code": code} for part in topic["partitions"]]}
                    for topic in topics
                ]
        return {"topics": topics}

    async def offsets_of(
        self, request: Request, refused: ErrorCode | None, *, by_id: bool
    ) -> tuple[list[dict[str, Any]], list[OffsetToCommit]]:
        """The answers to a commit, and what is left to be committed."""
        topics = []
        offsets = []
        for one in request.fields.topics or ():
            topic = await (self._broker.topic_with_uuid(one.topic_id) if by_id else self._broker.topic_named(one.name))
            name = one.name if not by_id else topic.name if topic is not None else None
            denied = name is not None and not request.allowed("read", "topic", name)
            missing = ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
            partitions = []
            for part in one.partitions or ():
                code = refused or _commit_code(topic, part, missing)
                if denied:
                    code = ErrorCode.topic_authorization_failed
                if code is None:
                    assert topic is not None
                    offsets.append(
                        OffsetToCommit(
                            Lane(topic.id, part.partition_index),
                            part.committed_offset,
                            getattr(part, "committed_leader_epoch", -1),
                            part.committed_metadata or "",
                        )
                    )
                partitions.append({"partition_index": part.partition_index, "error_code": code or ErrorCode.none})
            named = {"topic_id": one.topic_id} if by_id else {"name": one.name}
            topics.append({**named, "partitions": partitions})
        return topics, offsets

    async def fetch_offsets(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        by_id = request.version >= 10
        if request.version >= 8:
            stable = fields.require_stable
            groups = [await self._committed(request, one, by_id=by_id, stable=stable) for one in fields.groups or ()]
            return {"groups": groups}
        return await self._committed(request, fields, by_id=False, stable=getattr(fields, "require_stable", False))

    async def _committed(self, request: Request, asked: Any, *, by_id: bool, stable: bool) -> dict[str, Any]:
        if not request.allowed("describe", "group", asked.group_id):
            return {"group_id": asked.group_id, "topics": (), "error_code": ErrorCode.group_authorization_failed}
        if "\x00" in asked.group_id:
            return {"group_id": asked.group_id, "topics": (), "error_code": ErrorCode.invalid_group_id}
        epoch = getattr(asked, "member_epoch", -1)
        if getattr(asked, "member_id", None) and epoch >= 0:
            # One who was put out of the group must not go on from where others are now.
            stale = await self._groups.commit_refused(asked.group_id, asked.member_id, None, epoch)
            if stale is not None:
                return {"group_id": asked.group_id, "topics": (), "error_code": stale}
        unstable: set[Lane] = set()
        if stable:
            # Before the offsets: one that a transaction commits in between is then at worst asked for once more.
            unstable = await self._broker.log.run(calls.kafka_staged_offsets(asked.group_id), patience_seconds=5)
        # Offsets are in Postgres: any broker knows them. Of a group that nobody knows, none are.
        committed = await self._broker.log.run(calls.kafka_committed(asked.group_id), patience_seconds=5)
        known = {(one.topic, one.partition): one for one in committed}
        topics = []
        if asked.topics is None:
            for name in dict.fromkeys(one.topic for one in committed):
                topic = await self._broker.topic_named(name)
                if topic is not None and request.allowed("describe", "topic", name):
                    named = {"topic_id": self._broker.uuid_of(topic)} if by_id else {"name": name}
                    parts = [one.partition for one in committed if one.topic == name]
                    told = [_offset(known.get((name, part)), Lane(topic.id, part), unstable) for part in parts]
                    topics.append({**named, "partitions": told})
        for one in asked.topics or ():
            topic = await (self._broker.topic_with_uuid(one.topic_id) if by_id else self._broker.topic_named(one.name))
            named = {"topic_id": one.topic_id} if by_id else {"name": one.name}
            code = ErrorCode.unknown_topic_id if by_id and topic is None else ErrorCode.none
            name = topic.name if topic is not None else "" if by_id else one.name
            if name and not request.allowed("describe", "topic", name):
                # Also if there is none of that name, since that is not to be told either.
                code = ErrorCode.topic_authorization_failed
            lanes = [Lane(topic.id if topic is not None else 0, part) for part in one.partition_indexes or ()]
            told = [_offset(known.get((name, lane.partition)), lane, unstable, code) for lane in lanes]
            topics.append({**named, "partitions": told})
        return {"group_id": asked.group_id, "topics": topics, "error_code": ErrorCode.none}

    async def delete_offsets(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        if not request.allowed("delete", "group", fields.group_id):
            return {"error_code": ErrorCode.group_authorization_failed, "topics": ()}
        try:
            empty = await self._groups.is_empty(fields.group_id)
        except Refused as refused:
            return {"error_code": refused.code, "topics": ()}
        topics = []
        doomed = []
        for one in fields.topics or ():
            topic = await self._broker.topic_named(one.name)
            denied = not request.allowed("read", "topic", one.name)
            partitions = []
            for part in one.partitions or ():
                code = ErrorCode.none
                if denied:
                    code = ErrorCode.topic_authorization_failed
                elif topic is None or not 0 <= part.partition_index < topic.partitions:
                    code = ErrorCode.unknown_topic_or_partition
                elif not empty:
                    # Which topics its members read only they know, so all count as read.
                    code = ErrorCode.group_subscribed_to_topic
                else:
                    doomed.append(Lane(topic.id, part.partition_index))
                partitions.append({"partition_index": part.partition_index, "error_code": code})
            topics.append({"name": one.name, "partitions": partitions})
        call = calls.kafka_forget_offsets(fields.group_id, self._broker.incarnation, doomed)
        if doomed and not await self._broker.log.run(call, patience_seconds=2):
            return {"error_code": ErrorCode.not_coordinator, "topics": ()}
        return {"error_code": ErrorCode.none, "topics": topics}


def _commit_code(topic: KafkaTopic | None, part: Any, missing: ErrorCode) -> ErrorCode | None:
    if topic is None or not 0 <= part.partition_index < topic.partitions:
        return missing
    if len(part.committed_metadata or "") > LONGEST_METADATA or "\x00" in (part.committed_metadata or ""):
        return ErrorCode.offset_metadata_too_large
    return ErrorCode.invalid_commit_offset_size if part.committed_offset < 0 else None


def _offset(known: Any, lane: Lane, unstable: set[Lane], code: ErrorCode = ErrorCode.none) -> dict[str, Any]:
    if code is ErrorCode.none and lane in unstable:
        code = ErrorCode.unstable_offset_commit
    if code is not ErrorCode.none:
        known = None
    return {
        "partition_index": lane.partition,
        "committed_offset": -1 if known is None else known.offset,
        "committed_leader_epoch": -1 if known is None else known.leader_epoch,
        "metadata": "" if known is None else known.metadata,
        "error_code": code,
    }
