"""Fetch: events become batches of records, now or when there are enough of them."""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

from headwater.calls.kafka import Bounds, KafkaTopic, Lane
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.leader_epochs import epoch_refused
from headwater.servers.kafka.partition_reader import Asked, Reading
from headwater.servers.kafka.wire import ErrorCode, Request

MAX_RESPONSE_BYTES: Final = 32 * 1024 * 1024
UNSENT_BYTES: Final = 256 * 1024 * 1024
"""Of answers to all clients. While there are more, each gets a little at a time: one batch, at the least."""
LITTLE_BYTES: Final = 256 * 1024
LONGEST_WAIT_SECONDS: Final = 300.0
ZSTD_VERSION: Final = 10
"""From this version of Fetch on, clients can unpack zstd."""


class _Asked(NamedTuple):
    """One partition of a fetch: what was found under its name, and from where on it is read."""

    partition: int
    topic: KafkaTopic | None
    missing: ErrorCode
    offset: int
    max_bytes: int
    leader_epoch: int

    @property
    def lane(self) -> Lane:
        assert self.topic is not None
        return Lane(self.topic.id, self.partition)


class _Found(NamedTuple):
    code: ErrorCode
    bounds: Bounds | None = None
    records: bytes = b""


class Fetching:
    """The API Fetch."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._reading = Reading(broker)

    async def fetch(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        # Every answer is a whole one, of session 0, so no client can have another.
        if getattr(fields, "session_id", 0):
            return {"error_code": ErrorCode.fetch_session_id_not_found, "session_id": 0, "responses": ()}
        asked = await self._asked(request)
        deadline = time.monotonic() + min(max(fields.max_wait / 1000, 0), LONGEST_WAIT_SECONDS)
        max_bytes = min(max(getattr(fields, "max_bytes", MAX_RESPONSE_BYTES), 1), MAX_RESPONSE_BYTES)
        all_asked = [one for _, parts in asked for one in parts]
        max_bytes = min(max_bytes, sum(max(one.max_bytes, 1) for one in all_asked) or 1)
        while True:
            share = min(max_bytes, max(UNSENT_BYTES - self._broker.unsent_bytes, LITTLE_BYTES))
            self._broker.unsent_bytes += share
            try:
                found = await self._read(all_asked, share, request.version)
            finally:
                # From here on its connection counts what there really is.
                self._broker.unsent_bytes -= share
            size = sum(len(one.records) for one in found)
            left = deadline - time.monotonic()
            failed = any(one.code is not ErrorCode.none for one in found)
            if failed or size >= max(fields.min_bytes, 0) or (size and share < max_bytes) or left <= 0:
                break
            seen = {
                one.lane: answer.bounds.end
                for one, answer in zip(all_asked, found, strict=True)
                if answer.bounds is not None
            }
            if not await self._broker.tails.wait(seen, seconds=left):
                break
        answers = iter(found)
        committed = getattr(fields, "isolation_level", 0) == 1
        return {
            "session_id": 0,
            "responses": [
                {**named, "partitions": [_partition(one, next(answers), committed) for one in parts]}
                for named, parts in asked
            ],
        }

    async def _asked(self, request: Request) -> list[tuple[dict[str, Any], list[_Asked]]]:
        by_id = request.version >= 13
        missing = ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
        found = []
        for topic in request.fields.topics or ():
            known = await (
                self._broker.topic_with_uuid(topic.topic_id) if by_id else self._broker.topic_named(topic.topic)
            )
            named = {"topic_id": topic.topic_id} if by_id else {"topic": topic.topic}
            code = missing
            if known is not None and not request.allowed("read", "topic", known.name):
                known, code = None, ErrorCode.topic_authorization_failed
            found.append(
                (
                    named,
                    [
                        _Asked(
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
        return found

    async def _read(self, asked: list[_Asked], max_bytes: int, version: int) -> list[_Found]:
        known = [
            Asked(one.topic, one.lane, one.offset, min(max(one.max_bytes, 1), max_bytes), version >= ZSTD_VERSION)
            for one in asked
            if one.topic is not None
        ]
        reads = iter(await self._reading.read(known, max_bytes=max_bytes))
        found = []
        for one in asked:
            read = None if one.topic is None else next(reads)
            if read is None:
                found.append(_Found(one.missing))
            elif (refused := epoch_refused(one.leader_epoch, read.present_epoch)) is not None:
                found.append(_Found(refused))
            elif not read.bounds.start <= one.offset <= read.max_offset:
                found.append(_Found(ErrorCode.offset_out_of_range, read.bounds))
            else:
                found.append(_Found(ErrorCode.none, read.bounds, read.records))
        return found


def _partition(asked: _Asked, found: _Found, committed: bool) -> dict[str, Any]:
    end = -1 if found.bounds is None else found.bounds.end
    return {
        "partition_index": asked.partition,
        "error_code": found.code,
        "high_watermark": end,
        # Records of open transactions are not in the log yet: all that can be read is stable.
        "last_stable_offset": end,
        "log_start_offset": -1 if found.bounds is None else found.bounds.start,
        "aborted_transactions": () if committed else None,
        "preferred_read_replica": -1,
        "records": found.records,
    }
