"""Committed offsets of consumer groups: OffsetCommit, OffsetFetch and OffsetDelete. They are rows in Postgres."""

from __future__ import annotations

from typing import Any, Final

from headwater.calls import kafka as calls
from headwater.calls.kafka import KafkaTopic, OffsetToCommit, TopicPartition
from headwater.errors import InvalidRequest
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.classic_protocol import ClassicGroupApis, GroupError
from headwater.servers.kafka.wire import ErrorCode, Request

MAX_METADATA_CHARACTERS: Final = 4096


class OffsetApis:
    """The APIs about the committed offsets of consumer groups."""

    def __init__(self, broker: Broker, groups: ClassicGroupApis) -> None:
        self._broker = broker
        self._groups = groups

    async def commit(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        error: ErrorCode | None = ErrorCode.group_authorization_failed
        if request.allowed("read", "consumer", fields.group_id):
            error = await self._groups.commit_error(
                fields.group_id,
                fields.member_id,
                getattr(fields, "group_instance_id", None),
                fields.generation_id_or_member_epoch,
            )
        topics, offsets = await self.offsets_of(request, error, by_id=request.version >= 10)
        if offsets:
            call = calls.kafka_commit_offsets(fields.group_id, self._broker.incarnation, offsets)
            try:
                code = ErrorCode.none if await self._broker.log.run(call) else ErrorCode.not_coordinator
            except InvalidRequest:
                code = ErrorCode.invalid_request
            if code is not ErrorCode.none:
                topics = [
                    {**topic, "partitions": [{**part, "error_code": code} for part in topic["partitions"]]}
                    for topic in topics
                ]
        return {"topics": topics}

    async def offsets_of(
        self, request: Request, error: ErrorCode | None, *, by_id: bool
    ) -> tuple[list[dict[str, Any]], list[OffsetToCommit]]:
        """The response to a commit, and the offsets that passed all checks and are to be committed."""
        topics = []
        offsets = []
        for one in request.fields.topics or ():
            topic = await (self._broker.topic_with_uuid(one.topic_id) if by_id else self._broker.topic_named(one.name))
            name = one.name if not by_id else topic.name if topic is not None else None
            denied = name is not None and not request.allowed("read", "topic", name)
            missing = ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
            partitions = []
            for part in one.partitions or ():
                code = error or _commit_code(topic, part, missing)
                if denied:
                    code = ErrorCode.topic_authorization_failed
                if code is None:
                    assert topic is not None
                    offsets.append(
                        OffsetToCommit(
                            TopicPartition(topic.id, part.partition_index),
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

    async def _committed(self, request: Request, requested: Any, *, by_id: bool, stable: bool) -> dict[str, Any]:
        if not request.allowed("describe", "consumer", requested.group_id):
            return {"group_id": requested.group_id, "topics": (), "error_code": ErrorCode.group_authorization_failed}
        if "\x00" in requested.group_id:
            return {"group_id": requested.group_id, "topics": (), "error_code": ErrorCode.invalid_group_id}
        epoch = getattr(requested, "member_epoch", -1)
        if getattr(requested, "member_id", None) and epoch >= 0:
            # A member that was removed from the group must not continue from the offsets of others.
            stale = await self._groups.commit_error(requested.group_id, requested.member_id, None, epoch)
            if stale is not None:
                return {"group_id": requested.group_id, "topics": (), "error_code": stale}
        unstable: set[TopicPartition] = set()
        if stable:
            # Read before the offsets: a commit in between then causes at worst one retry.
            unstable = await self._broker.log.run(calls.kafka_staged_offsets(requested.group_id))
        # Offsets are in Postgres, so any broker can read them. An unknown group has none.
        committed = await self._broker.log.run(calls.kafka_committed(requested.group_id))
        known = {(one.topic, one.partition): one for one in committed}
        topics = []
        if requested.topics is None:
            for name in dict.fromkeys(one.topic for one in committed):
                topic = await self._broker.topic_named(name)
                if topic is not None and request.allowed("describe", "topic", name):
                    named = {"topic_id": self._broker.uuid_of(topic)} if by_id else {"name": name}
                    parts = [one.partition for one in committed if one.topic == name]
                    partitions = [
                        _offset(known.get((name, part)), TopicPartition(topic.id, part), unstable) for part in parts
                    ]
                    topics.append({**named, "partitions": partitions})
        for one in requested.topics or ():
            topic = await (self._broker.topic_with_uuid(one.topic_id) if by_id else self._broker.topic_named(one.name))
            named = {"topic_id": one.topic_id} if by_id else {"name": one.name}
            code = ErrorCode.unknown_topic_id if by_id and topic is None else ErrorCode.none
            name = topic.name if topic is not None else "" if by_id else one.name
            if name and not request.allowed("describe", "topic", name):
                # Also if the topic does not exist, so as not to reveal that.
                code = ErrorCode.topic_authorization_failed
            topic_partitions = [
                TopicPartition(topic.id if topic is not None else 0, part) for part in one.partition_indexes or ()
            ]
            partitions = [
                _offset(known.get((name, topic_partition.partition)), topic_partition, unstable, code)
                for topic_partition in topic_partitions
            ]
            topics.append({**named, "partitions": partitions})
        return {"group_id": requested.group_id, "topics": topics, "error_code": ErrorCode.none}

    async def delete_offsets(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        if not request.allowed("delete", "consumer", fields.group_id):
            return {"error_code": ErrorCode.group_authorization_failed, "topics": ()}
        try:
            empty = await self._groups.is_empty(fields.group_id)
        except GroupError as error:
            return {"error_code": error.code, "topics": ()}
        topics = []
        to_delete = []
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
                    # Only the members know which topics they read, so every topic counts as subscribed.
                    code = ErrorCode.group_subscribed_to_topic
                else:
                    to_delete.append(TopicPartition(topic.id, part.partition_index))
                partitions.append({"partition_index": part.partition_index, "error_code": code})
            topics.append({"name": one.name, "partitions": partitions})
        call = calls.kafka_forget_offsets(fields.group_id, self._broker.incarnation, to_delete)
        if to_delete and not await self._broker.log.run(call):
            return {"error_code": ErrorCode.not_coordinator, "topics": ()}
        return {"error_code": ErrorCode.none, "topics": topics}


def _commit_code(topic: KafkaTopic | None, part: Any, missing: ErrorCode) -> ErrorCode | None:
    if topic is None or not 0 <= part.partition_index < topic.partitions:
        return missing
    if len(part.committed_metadata or "") > MAX_METADATA_CHARACTERS or "\x00" in (part.committed_metadata or ""):
        return ErrorCode.offset_metadata_too_large
    return ErrorCode.invalid_commit_offset_size if part.committed_offset < 0 else None


def _offset(
    known: Any, topic_partition: TopicPartition, unstable: set[TopicPartition], code: ErrorCode = ErrorCode.none
) -> dict[str, Any]:
    if code is ErrorCode.none and topic_partition in unstable:
        code = ErrorCode.unstable_offset_commit
    if code is not ErrorCode.none:
        known = None
    return {
        "partition_index": topic_partition.partition,
        "committed_offset": -1 if known is None else known.offset,
        "committed_leader_epoch": -1 if known is None else known.leader_epoch,
        "metadata": "" if known is None else known.metadata,
        "error_code": code,
    }
