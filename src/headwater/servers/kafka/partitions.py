"""The APIs about partitions: ListOffsets, OffsetForLeaderEpoch, DeleteRecords and DescribeLogDirs."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import psycopg

from headwater.calls import kafka as calls
from headwater.calls import kafka_admin
from headwater.calls import log as log_calls
from headwater.calls.kafka import KafkaTopic, TopicPartition
from headwater.errors import HeadwaterError, InvalidRequest, TopicNotFound
from headwater.observability.metrics import ERROR, logger
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.leader_epochs import epoch_error
from headwater.servers.kafka.wire import ErrorCode, Request

LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED = -1, -2, -3, -4, -5
SCANS_AT_A_TIME: Final = 2
"""Maximum partitions that are scanned for a timestamp at once, so that connections remain for other requests."""
LOG_DIRECTORY: Final = "postgres"
"""The only log directory: all records are in Postgres, none on a broker."""


class PartitionApis:
    """The APIs about the offsets and the sizes of partitions."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._scans = asyncio.Semaphore(SCANS_AT_A_TIME)

    async def list_offsets(self, request: Request) -> dict[str, Any]:
        topics = []
        # Read the epoch before the offsets: a stale epoch with a newer offset only causes a retry.
        epoch = await self._broker.log.run(log_calls.current_epoch())
        for requested in request.fields.topics or ():
            topic = await self._broker.topic_named(requested.name)
            denied = not request.allowed("describe", "topic", requested.name)
            offsets = [
                await self._offset(None if denied else topic, part, epoch) for part in requested.partitions or ()
            ]
            if denied:
                offsets = [{**one, "error_code": ErrorCode.topic_authorization_failed} for one in offsets]
            topics.append({"name": requested.name, "partitions": offsets})
        return {"topics": topics}

    async def _offset(self, topic: KafkaTopic | None, part: Any, epoch: int) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "partition_index": part.partition_index,
            "error_code": ErrorCode.none,
            "timestamp": -1,
            "offset": -1,
            "leader_epoch": -1,
        }
        topic_partition = TopicPartition(topic.id if topic is not None else 0, part.partition_index)
        bounds = (await self._broker.log.run(calls.kafka_bounds([topic_partition]))).get(topic_partition)
        if bounds is None:
            answer["error_code"] = ErrorCode.unknown_topic_or_partition
        elif (error_code := epoch_error(getattr(part, "current_leader_epoch", -1), epoch)) is not None:
            answer["error_code"] = error_code
        elif part.timestamp == LATEST:
            answer.update(offset=bounds.end, leader_epoch=epoch)
        elif part.timestamp in (EARLIEST, EARLIEST_LOCAL):
            answer.update(
                offset=bounds.start, leader_epoch=min(await self._epoch_at(topic_partition, bounds.start), epoch)
            )
        elif part.timestamp == MAX_TIMESTAMP or part.timestamp >= 0:
            at_ms = None if part.timestamp == MAX_TIMESTAMP else part.timestamp
            call = calls.kafka_offset_at(topic_partition, at_ms, before_offset=bounds.end)
            async with self._scans:
                found = await self._broker.log.run(call)
            if found is not None:
                found_epoch = min(await self._epoch_at(topic_partition, found[0]), epoch)
                answer.update(offset=found[0], timestamp=found[1], leader_epoch=found_epoch)
        elif part.timestamp < LATEST_TIERED:
            answer["error_code"] = ErrorCode.unsupported_version
        return answer

    async def _epoch_at(self, topic_partition: TopicPartition, offset: int) -> int:
        return await self._broker.log.run(calls.kafka_epoch_at(topic_partition, offset))

    async def offset_for_leader_epoch(self, request: Request) -> dict[str, Any]:
        """Where epochs end, from which clients see whether their offsets still refer to the same events."""
        topics = []
        for requested in request.fields.topics or ():
            topic = await self._broker.topic_named(requested.topic)
            if not request.allowed("describe", "topic", requested.topic):
                topic = None
            partitions = [await self._epoch_end(topic, part) for part in requested.partitions or ()]
            topics.append({"topic": requested.topic, "partitions": partitions})
        return {"topics": topics}

    async def _epoch_end(self, topic: KafkaTopic | None, part: Any) -> dict[str, Any]:
        answer = {"error_code": ErrorCode.none, "partition": part.partition, "leader_epoch": -1, "end_offset": -1}
        topic_partition = TopicPartition(topic.id if topic is not None else 0, part.partition)
        end = await self._broker.log.run(calls.kafka_epoch_end(topic_partition, part.leader_epoch))
        if end.present is None:
            return answer | {"error_code": ErrorCode.unknown_topic_or_partition}
        error_code = epoch_error(getattr(part, "current_leader_epoch", -1), end.present)
        if error_code is not None:
            return answer | {"error_code": error_code}
        return answer | {"leader_epoch": end.epoch, "end_offset": end.end_offset}

    # Deleting records, sizes

    async def delete_records(self, request: Request) -> dict[str, Any]:
        topics = []
        for requested in request.fields.topics or ():
            topic = await self._broker.topic_named(requested.name)
            denied = not request.allowed("delete", "topic", requested.name)
            partitions = []
            for part in requested.partitions or ():
                code, start = ErrorCode.topic_authorization_failed, -1
                if not denied:
                    code, start = await self._delete_before(topic, part.partition_index, part.offset, request.account)
                partitions.append({"partition_index": part.partition_index, "low_watermark": start, "error_code": code})
            topics.append({"name": requested.name, "partitions": partitions})
        return {"topics": topics}

    async def _delete_before(
        self, topic: KafkaTopic | None, partition: int, offset: int, account: str | None
    ) -> tuple[ErrorCode, int]:
        topic_partition = TopicPartition(topic.id if topic is not None else 0, partition)
        bounds = (await self._broker.log.run(calls.kafka_bounds([topic_partition]))).get(topic_partition)
        if topic is None or bounds is None:
            return ErrorCode.unknown_topic_or_partition, -1
        if not -1 <= offset <= bounds.end:
            return ErrorCode.offset_out_of_range, -1
        try:
            call = kafka_admin.delete_before(topic.name, partition, offset)
            details = {"partition": partition, "before_offset": offset}
            start = await self._broker.log.run_audited(call, account, "topic.delete_records", topic.name, details)
            return ErrorCode.none, start
        except InvalidRequest as error:
            # An event store, a compacted topic or a consumer that holds retention: the message says which.
            logger.info("records not deleted", extra={ERROR: error.message})
            return ErrorCode.policy_violation, -1
        except TopicNotFound:
            return ErrorCode.unknown_topic_or_partition, -1
        except (HeadwaterError, psycopg.errors.LockNotAvailable):
            return ErrorCode.request_timed_out, -1

    async def describe_log_dirs(self, request: Request) -> dict[str, Any]:
        """The sizes of the partitions that this broker leads, so that the sum over all brokers is correct."""
        if not request.allowed("describe", "log", "*"):
            return {"error_code": ErrorCode.cluster_authorization_failed, "results": ()}
        requested = request.fields.topics
        if requested is None:
            wanted = [(topic, list(range(topic.partitions))) for topic in await self._broker.topics(as_of_now=True)]
        else:
            named = [(await self._broker.topic_named(one.topic), one.partitions or ()) for one in requested]
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
                    TopicPartition(topic.id, index)
                    for index in partitions
                    if self._broker.leader_of(TopicPartition(topic.id, index)) == self._broker.node_id
                ],
            )
            for topic, partitions in wanted
        ]
        ids = [topic_partitions[0].topic_id for _, topic_partitions in led if topic_partitions]
        sizes = await self._broker.log.run(kafka_admin.kafka_sizes(ids))
        topics = [
            {
                "name": name,
                "partitions": [
                    {
                        "partition_index": topic_partition.partition,
                        "partition_size": sizes.get(topic_partition, 0),
                        "offset_lag": 0,
                    }
                    for topic_partition in topic_partitions
                ],
            }
            for name, topic_partitions in led
            if topic_partitions
        ]
        return {"results": [{"error_code": ErrorCode.none, "log_dir": LOG_DIRECTORY, "topics": topics}]}
