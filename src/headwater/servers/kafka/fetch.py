"""The API Fetch: reads events as record batches, and waits until there are enough of them (long polling).

Sessions are not supported: every request and every response is a full one.
"""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

from headwater.calls.kafka import Bounds, KafkaTopic, TopicPartition
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.leader_epochs import epoch_error
from headwater.servers.kafka.partition_reader import PartitionFetch, PartitionReader
from headwater.servers.kafka.wire import ErrorCode, Request

MAX_RESPONSE_BYTES: Final = 32 * 1024 * 1024
MAX_UNSENT_BYTES: Final = 256 * 1024 * 1024
"""Maximum bytes of unsent responses to all clients. Above it, each fetch gets at most MIN_SHARE_BYTES, or one batch."""
MIN_SHARE_BYTES: Final = 256 * 1024
MAX_WAIT_SECONDS: Final = 300.0
ZSTD_VERSION: Final = 10
"""Clients support zstd from this version of Fetch on."""


class _PartitionRequest(NamedTuple):
    """One partition of a fetch request. No topic: the response is the error `missing`."""

    partition: int
    topic: KafkaTopic | None
    missing: ErrorCode
    offset: int
    max_bytes: int
    leader_epoch: int

    @property
    def topic_partition(self) -> TopicPartition:
        assert self.topic is not None
        return TopicPartition(self.topic.id, self.partition)


class _PartitionResult(NamedTuple):
    code: ErrorCode
    bounds: Bounds | None = None
    records: bytes = b""


class FetchApi:
    """The API Fetch."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._reader = PartitionReader(broker)

    async def fetch(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        # Sessions are never created, so a request with a session id is invalid.
        if getattr(fields, "session_id", 0):
            return {"error_code": ErrorCode.fetch_session_id_not_found, "session_id": 0, "responses": ()}
        topics = await self._partitions(request)
        deadline = time.monotonic() + min(max(fields.max_wait / 1000, 0), MAX_WAIT_SECONDS)
        max_bytes = min(max(getattr(fields, "max_bytes", MAX_RESPONSE_BYTES), 1), MAX_RESPONSE_BYTES)
        requests = [one for _, parts in topics for one in parts]
        max_bytes = min(max_bytes, sum(max(one.max_bytes, 1) for one in requests) or 1)
        while True:
            share = min(max_bytes, max(MAX_UNSENT_BYTES - self._broker.unsent_bytes, MIN_SHARE_BYTES))
            self._broker.unsent_bytes += share
            try:
                results = await self._read(requests, share, request.version)
            finally:
                # From here on the connection counts the actual size.
                self._broker.unsent_bytes -= share
            size = sum(len(one.records) for one in results)
            left = deadline - time.monotonic()
            failed = any(one.code is not ErrorCode.none for one in results)
            if failed or size >= max(fields.min_bytes, 0) or (size and share < max_bytes) or left <= 0:
                break
            seen = {
                one.topic_partition: result.bounds.end
                for one, result in zip(requests, results, strict=True)
                if result.bounds is not None
            }
            if not await self._broker.end_offsets.wait(seen, seconds=left):
                break
        remaining = iter(results)
        committed = getattr(fields, "isolation_level", 0) == 1
        return {
            "session_id": 0,
            "responses": [
                {**named, "partitions": [_partition(one, next(remaining), committed) for one in parts]}
                for named, parts in topics
            ],
        }

    async def _partitions(self, request: Request) -> list[tuple[dict[str, Any], list[_PartitionRequest]]]:
        by_id = request.version >= 13
        missing = ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
        topics = []
        for topic in request.fields.topics or ():
            known = await (
                self._broker.topic_with_uuid(topic.topic_id) if by_id else self._broker.topic_named(topic.topic)
            )
            named = {"topic_id": topic.topic_id} if by_id else {"topic": topic.topic}
            code = missing
            if known is not None and not request.allowed("read", "topic", known.name):
                known, code = None, ErrorCode.topic_authorization_failed
            topics.append(
                (
                    named,
                    [
                        _PartitionRequest(
                            part.partition,
                            known,
                            code,
                            part.fetch_offset,
                            part.partition_max_bytes,
                            getattr(part, "current_leader_epoch", -1),
                        )
                        for part in topic.partitions or ()
                    ],
                )
            )
        return topics

    async def _read(self, requests: list[_PartitionRequest], max_bytes: int, version: int) -> list[_PartitionResult]:
        known = [
            PartitionFetch(
                one.topic,
                one.topic_partition,
                one.offset,
                min(max(one.max_bytes, 1), max_bytes),
                version >= ZSTD_VERSION,
            )
            for one in requests
            if one.topic is not None
        ]
        reads = iter(await self._reader.read(known, max_bytes=max_bytes))
        results = []
        for one in requests:
            read = None if one.topic is None else next(reads)
            if read is None:
                results.append(_PartitionResult(one.missing))
            elif (error := epoch_error(one.leader_epoch, read.present_epoch)) is not None:
                results.append(_PartitionResult(error))
            elif not read.bounds.start <= one.offset <= read.max_offset:
                results.append(_PartitionResult(ErrorCode.offset_out_of_range, read.bounds))
            else:
                results.append(_PartitionResult(ErrorCode.none, read.bounds, read.records))
        return results


def _partition(request: _PartitionRequest, result: _PartitionResult, committed: bool) -> dict[str, Any]:
    end = -1 if result.bounds is None else result.bounds.end
    return {
        "partition_index": request.partition,
        "error_code": result.code,
        "high_watermark": end,
        # Records of open transactions are not in the log, so every readable record is stable.
        "last_stable_offset": end,
        "log_start_offset": -1 if result.bounds is None else result.bounds.start,
        "aborted_transactions": () if committed else None,
        "preferred_read_replica": -1,
        "records": result.records,
    }
