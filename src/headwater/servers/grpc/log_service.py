"""The service Log: publish, read, follow, cursors, topics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from datetime import UTC
from typing import Any

from headwater.aio import AsyncHeadwater
from headwater.calls import log as log_calls
from headwater.calls import reading as reading_calls
from headwater.errors import InvalidRequest
from headwater.log.model import Topic, TopicOverview
from headwater.log.settings import TopicSettings
from headwater.servers.grpc import convert
from headwater.servers.grpc.generated import headwater_pb2 as pb
from headwater.servers.grpc.interceptor import GrpcCall
from headwater.setting_definitions import definitions


class LogService:
    """The methods of the service; the proto file documents each."""

    def __init__(self, log: AsyncHeadwater) -> None:
        self._log = log

    async def publish(self, request: pb.PublishRequest, call: GrpcCall) -> pb.PublishResponse:
        call.require("write", "topic", request.topic)
        event = convert.new_event(request.event)
        if not request.HasField("deliver_at"):
            (position,) = await self._log.publish_batch(request.topic, [event])
            return pb.PublishResponse(position=position)
        if event.partition is not None:
            raise InvalidRequest("partition cannot be combined with deliver_at")
        waiting = await self._log.publish(
            request.topic, **_event_fields(event), deliver_at=request.deliver_at.ToDatetime(tzinfo=UTC)
        )
        return pb.PublishResponse(position=waiting)

    async def publish_batch(self, request: pb.PublishBatchRequest, call: GrpcCall) -> pb.PublishBatchResponse:
        call.require("write", "topic", request.topic)
        events = [convert.new_event(event) for event in request.events]
        positions = await self._log.publish_batch(request.topic, events)
        # None of them is scheduled, so each has a position.
        return pb.PublishBatchResponse(positions=[position for position in positions if position is not None])

    async def read(self, request: pb.ReadRequest, call: GrpcCall) -> pb.ReadResponse:
        for topic in request.topics or ("*",):
            call.require("read", "topic", topic)
        epoch = request.epoch or await self._log.run(log_calls.current_epoch())
        events = await self._log.read(
            list(request.topics) or None,
            after=request.after,
            batch_size=convert.check_range(request.batch_size, 100, convert.MAX_READ, "batch_size"),
            max_bytes=convert.check_range(
                request.max_bytes, convert.MAX_READ_BYTES, convert.MAX_READ_BYTES, "max_bytes"
            ),
            skip_expired=request.skip_expired,
            epoch=epoch,
        )
        return pb.ReadResponse(events=map(convert.event_message, events), epoch=epoch)

    async def follow(self, request: pb.FollowRequest, call: GrpcCall) -> AsyncIterator[pb.FollowResponse]:
        topics = tuple(request.topics) or ("*",)
        for topic in topics:
            call.require("read", "topic", topic)
        batches = self._log.follow_deliveries(
            list(request.topics) or None,
            after=None if request.from_end else request.after,
            epoch=request.epoch or None,
            from_end=request.from_end,
            batch_size=convert.check_range(
                request.batch_size, convert.MAX_STREAM_BATCH, convert.MAX_STREAM_BATCH, "batch_size"
            ),
            max_bytes=convert.MAX_FOLLOW_BYTES,
            skip_expired=request.skip_expired,
            stop_when_caught_up=request.stop_when_caught_up,
        )
        async with aclosing(batches):  # type: ignore[type-var]
            async for delivery in batches:
                for topic in topics:
                    call.require_now("read", "topic", topic)
                for chunk in convert.split_into_chunks(map(convert.event_message, delivery.events)):
                    yield pb.FollowResponse(events=chunk, epoch=delivery.epoch)

    async def open_cursor(self, request: pb.OpenCursorRequest, call: GrpcCall) -> pb.OpenCursorResponse:
        call.require("read", "consumer", request.cursor)
        start_after, epoch = await self._log.run(log_calls.resume(request.epoch or None, request.start_after))
        opened = await self._log.run(
            reading_calls.open_cursor(request.cursor, topics=list(request.topics) or None, start_after=start_after)
        )
        return pb.OpenCursorResponse(position=opened.position, epoch=epoch)

    async def advance_cursor(self, request: pb.AdvanceCursorRequest, call: GrpcCall) -> pb.AdvanceCursorResponse:
        call.require("read", "consumer", request.cursor)
        await self._log.run(
            reading_calls.advance_cursor(
                request.cursor,
                from_position=request.from_position,
                to_position=request.to_position,
                epoch=request.epoch or None,
            )
        )
        return pb.AdvanceCursorResponse()

    async def create_topic(self, request: pb.CreateTopicRequest, call: GrpcCall) -> pb.Topic:
        call.require("create", "topic", request.name)
        settings = convert.settings_of(request, definitions(TopicSettings))
        details = {"partitions": request.partitions or 1}
        async with self._log.audited(call.principal.account, "topic.create", request.name, details) as connection:
            topic = await self._log.create_topic(
                request.name, if_missing=request.if_missing, connection=connection, **settings
            )
        return _topic(topic)

    async def get_topic(self, request: pb.GetTopicRequest, call: GrpcCall) -> pb.Topic:
        call.require("describe", "topic", request.name)
        return _topic(await self._log.topic(request.name))

    async def list_topics(self, request: pb.ListTopicsRequest, call: GrpcCall) -> pb.ListTopicsResponse:
        topics: Sequence[TopicOverview] = await self._log.topics()
        return pb.ListTopicsResponse(
            topics=[_topic(topic) for topic in topics if call.principal.may("describe", "topic", topic.name)]
        )

    async def delete_topic(self, request: pb.DeleteTopicRequest, call: GrpcCall) -> pb.DeleteTopicResponse:
        call.require("delete", "topic", request.name)
        async with self._log.audited(call.principal.account, "topic.delete", request.name, {}) as connection:
            await self._log.delete_topic(request.name, connection=connection)
        return pb.DeleteTopicResponse()


def _event_fields(event: Any) -> dict[str, Any]:
    parts: dict[str, Any] = event._asdict()
    del parts["partition"]
    return parts


def _topic(topic: Topic | TopicOverview) -> pb.Topic:
    return pb.Topic(
        name=topic.name,
        kind=topic.kind,
        partitions=topic.partitions,
        retention_seconds=None if topic.retention is None else topic.retention.total_seconds(),
        max_payload_bytes=topic.max_payload_bytes,
        max_header_bytes=topic.max_header_bytes,
        created_at=topic.created_at,
    )
