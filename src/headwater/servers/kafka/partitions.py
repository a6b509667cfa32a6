"""What clients ask of partitions: where they begin and end, how large they are; deleting their oldest records."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import psycopg

from headwater import calls as log_calls
from headwater.calls import kafka as calls
from headwater.calls import kafka_admin
from headwater.calls.kafka import KafkaTopic, Lane
from headwater.errors import HeadwaterError, InvalidRequest, TopicNotFound
from headwater.observability.metrics import ERROR, logger
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.leader_epochs import epoch_refused
from headwater.servers.kafka.wire import ErrorCode, Request

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED = -1, -2, -3, -4, -5
SCANS_AT_A_TIME: Final = 2
"""How many partitions are looked through for a time at once: others need connections, and Postgres, too."""
LOG_DIRECTORY: Final = "postgres"
"""There is one place where records are, and no broker has it."""


class Lanes:
    """The APIs about the offsets and the sizes of partitions."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._scans = asyncio.Semaphore(SCANS_AT_A_TIME)

    async def list_offsets(self, request: Request) -> dict[str, Any]:
        topics = []
        # The epoch before the offsets: an offset of a later epoch with an earlier one is only read again.
        epoch = await self._broker.log.run(log_calls.current_epoch(), patience_seconds=5)
        for asked in request.fields.topics or ():
            topic = await self._broker.topic_named(asked.name)
            denied = not request.allowed("describe", "topic", asked.name)
            offsets = [await self._offset(None if denied else topic, part, epoch) for part in asked.partitions or ()]
            if denied:
                offsets = [{**one, "error_code": ErrorCode.topic_authorization_failed} for one in offsets]
            topics.append({"name": asked.name, "partitions": offsets})
        return {"topics": topics}

    async def _offset(self, topic: KafkaTopic | None, part: Any, epoch: int) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "partition_index": part.partition_index,
            "error_code": ErrorCode.none,
            "timestamp": -1,
            "offset": -1,
            "leader_epoch": -1,
        }
        lane = Lane(topic.id if topic is not None else 0, part.partition_index)
        bounds = (await self._broker.log.run(calls.kafka_bounds([lane]), patience_seconds=5)).get(lane)
        if bounds is None:
            answer["error_code"] = ErrorCode.unknown_topic_or_partition
        elif (refused := epoch_refused(getattr(part, "current_leader_epoch", -1), epoch)) is not None:
            answer["error_code"] = refused
        elif part.timestamp == LATEST:
            answer.update(offset=bounds.end, leader_epoch=epoch)
        elif part.timestamp in (EARLIEST, EARLIEST_LOCAL):
            answer.update(offset=bounds.start, leader_epoch=min(await self._epoch_at(lane, bounds.start), epoch))
        elif part.timestamp == MAX_TIMESTAMP or part.timestamp >= 0:
            at_ms = None if part.timestamp == MAX_TIMESTAMP else part.timestamp
            call = calls.kafka_offset_at(lane, at_ms, before_offset=bounds.end)
            async with self._scans:
                found = await self._broker.log.run(call, patience_seconds=5)
            if found is not None:
                found_epoch = min(await self._epoch_at(lane, found[0]), epoch)
                answer.update(offset=found[0], timestamp=found[1], leader_epoch=found_epoch)
        elif part.timestamp < LATEST_TIERED:
            answer["error_code"] = ErrorCode.unsupported_version
        return answer

    async def _epoch_at(self, lane: Lane, offset: int) -> int:
        return await self._broker.log.run(calls.kafka_epoch_at(lane, offset), patience_seconds=5)

    async def offset_for_leader_epoch(self, request: Request) -> dict[str, Any]:
        """Where epochs end, by which clients see whether their offsets are still those of the same events."""
        topics = []
        for asked in request.fields.topics or ():
            topic = await self._broker.topic_named(asked.topic)
            if not request.allowed("describe", "topic", asked.topic):
                topic = None
            partitions = [await self._epoch_end(topic, part) for part in asked.partitions or ()]
            topics.append({"topic": asked.topic, "partitions": partitions})
        return {"topics": topics}

    async def _epoch_end(self, topic: KafkaTopic | None, part: Any) -> dict[str, Any]:
        answer = {"error_code": ErrorCode.none, "partition": part.partition, "leader_epoch": -1, "end_offset": -1}
        lane = Lane(topic.id if topic is not None else 0, part.partition)
        end = await self._broker.log.run(calls.kafka_epoch_end(lane, part.leader_epoch), patience_seconds=5)
        if end.present is None:
            return answer | {"error_code": ErrorCode.unknown_topic_or_partition}
        refused = epoch_refused(getattr(part, "current_leader_epoch", -1), end.present)
        if refused is not None:
            return answer | {"error_code": refused}
        return answer | {"leader_epoch": end.epoch, "end_offset": end.end_offset}

    # Deleting and measuring

    async def delete_records(self, request: Request) -> dict[str, Any]:
        topics = []
        for asked in request.fields.topics or ():
            topic = await self._broker.topic_named(asked.name)
            denied = not request.allowed("delete", "topic", asked.name)
            partitions = []
            for part in asked.partitions or ():
                code, start = ErrorCode.topic_authorization_failed, -1
                if not denied:
                    code, start = await self._delete_before(topic, part.partition_index, part.offset, request.account)
                partitions.append({"partition_index": part.partition_index, "low_watermark": start, "error_code": code})
            topics.append({"name": asked.name, "partitions": partitions})
        return {"topics": topics}

    async def _delete_before(
        self, topic: KafkaTopic | None, partition: int, offset: int, account: str | None
    ) -> tuple[ErrorCode, int]:
        lane = Lane(topic.id if topic is not None else 0, partition)
        bounds = (await self._broker.log.run(calls.kafka_bounds([lane]), patience_seconds=5)).get(lane)
        if topic is None or bounds is None:
            return ErrorCode.unknown_topic_or_partition, -1
        if not -1 <= offset <= bounds.end:
            return ErrorCode.offset_out_of_range, -1
        try:
            call = kafka_admin.delete_before(topic.name, partition, offset)
            told = {"partition": partition, "before_offset": offset}
            start = await self._broker.log.run_audited(call, account, "topic.delete_records", topic.name, told)
            return ErrorCode.none, start
        except InvalidRequest as error:
            # An event store, a compacted topic, a reader that must not lose an event: the log says which.
            logger.info("records not deleted", extra={ERROR: error.message})
            return ErrorCode.policy_violation, -1
        except TopicNotFound:
            return ErrorCode.unknown_topic_or_partition, -1
        except (HeadwaterError, psycopg.errors.LockNotAvailable):
            return ErrorCode.request_timed_out, -1

    async def describe_log_dirs(self, request: Request) -> dict[str, Any]:
        """The sizes of the partitions that this broker leads, so that those of all brokers add up."""
        if not request.allowed("describe", "log", "*"):
            return {"error_code": ErrorCode.cluster_authorization_failed, "results": ()}
        asked = request.fields.topics
        if asked is None:
            wanted = [(topic, list(range(topic.partitions))) for topic in await self._broker.topics(as_of_now=True)]
        else:
            named = [(await self._broker.topic_named(one.topic), one.partitions or ()) for one in asked]
            wanted = [
                (topic, [index for index in partitions if 0 <= index < topic.partitions])
                for topic, partitions in named
                if topic is not None
            ]
        await self._broker.refresh_brokers()
        led = [
            (
                topic.name,
                [
                    Lane(topic.id, index)
                    for index in partitions
                    if self._broker.leader_of(Lane(topic.id, index)) == self._broker.node_id
                ],
            )
            for topic, partitions in wanted
        ]
        ids = [lanes[0].topic_id for _, lanes in led if lanes]
        sizes = await self._broker.log.run(kafka_admin.kafka_sizes(ids), patience_seconds=5)
        topics = [
            {
                "name": name,
                "partitions": [
                    {"partition_index": lane.partition, "partition_size": sizes.get(lane, 0), "offset_lag": 0}
                    for lane in lanes
                ],
            }
            for name, lanes in led
            if lanes
        ]
        return {"results": [{"error_code": ErrorCode.none, "log_dir": LOG_DIRECTORY, "topics": topics}]}
