"""Fetch: events become batches of records, now or when there are enough of them."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any, Final, NamedTuple

from headwater.calls import kafka as calls
from headwater.calls.kafka import Bounds, FetchedEvent, KafkaTopic, Lane
from headwater.kafka.broker import Broker
from headwater.kafka.compression import CODECS
from headwater.kafka.events import section_of
from headwater.kafka.records import MAX_DELTA, Columns, build_batch
from headwater.kafka.wire import ErrorCode, Request

MAX_EVENTS: Final = 5_000
MAX_RESPONSE_BYTES: Final = 32 * 1024 * 1024
LONGEST_WAIT_SECONDS: Final = 300.0
KEPT_PLACES: Final = 10_000
ZSTD: Final = 4


class _Asked(NamedTuple):
    """One partition of a fetch: what was found under its name, and from where on it is read."""

    partition: int
    topic: KafkaTopic | None
    missing: ErrorCode
    offset: int
    max_bytes: int

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
        # The position before an offset that was read up to: a lane that is read on is found without older segments.
        self._places: OrderedDict[tuple[Lane, int], int] = OrderedDict()
        # Up to where an open topic has nothing for a lane after an offset.
        self._barren: OrderedDict[tuple[Lane, int], int] = OrderedDict()

    async def fetch(self, request: Request) -> dict[str, Any]:
        fields = request.fields
        # Every answer is a whole one, of session 0, so no client can have another.
        if getattr(fields, "session_id", 0):
            return {"error_code": ErrorCode.fetch_session_id_not_found, "session_id": 0, "responses": ()}
        asked = await self._asked(request)
        deadline = time.monotonic() + min(max(fields.max_wait / 1000, 0), LONGEST_WAIT_SECONDS)
        max_bytes = min(max(getattr(fields, "max_bytes", MAX_RESPONSE_BYTES), 1), MAX_RESPONSE_BYTES)
        while True:
            found = await self._read([one for _, parts in asked for one in parts], max_bytes, request.version)
            size = sum(len(one.records) for one in found)
            left = deadline - time.monotonic()
            failed = any(one.code is not ErrorCode.none for one in found)
            if failed or size >= max(fields.min_bytes, 0) or left <= 0:
                break
            seen = {
                one.lane: answer.bounds.end
                for one, answer in zip((o for _, parts in asked for o in parts), found, strict=True)
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
                        _Asked(part.partition, known, code, part.fetch_offset, part.partition_max_bytes)
                        for part in topic.partitions or ()
                    ],
                )
            )
        return found

    async def _read(self, asked: list[_Asked], max_bytes: int, version: int) -> list[_Found]:
        lanes = list({one.lane for one in asked if one.topic is not None})
        bounds = await self._broker.log.run(calls.kafka_bounds(lanes), patience_seconds=5) if lanes else {}
        found = []
        left = max_bytes
        for one in asked:
            limits = bounds.get(one.lane) if one.topic is not None else None
            if one.topic is None or limits is None:
                found.append(_Found(one.missing))
            elif not limits.start <= one.offset <= limits.end:
                found.append(_Found(ErrorCode.offset_out_of_range, limits))
            elif one.offset == limits.end or left <= 0:
                found.append(_Found(ErrorCode.none, limits))
            else:
                # The first batch comes whatever its size, or a reader would never get past a large record.
                events = await self._events(one.topic, one, limits, min(left, max(one.max_bytes, 1)))
                records = as_batches(one.topic, events, version)
                left -= len(records)
                found.append(_Found(ErrorCode.none, limits, records))
        return found

    async def _events(self, topic: KafkaTopic, asked: _Asked, bounds: Bounds, max_bytes: int) -> list[FetchedEvent]:
        lane = asked.lane
        place = (lane, asked.offset)
        if topic.kind == "open":
            if self._barren.get(place, 0) >= bounds.end:
                return []
            events = await self._broker.log.run(
                calls.kafka_fetch_open(
                    lane,
                    from_offset=max(asked.offset, self._barren.get(place, 0)),
                    end_offset=bounds.end,
                    max_events=MAX_EVENTS,
                    max_bytes=max_bytes,
                ),
                patience_seconds=5,
            )
            if not events:
                _keep(self._barren, place, bounds.end)
        else:
            events = await self._broker.log.run(
                calls.kafka_fetch_sequenced(
                    lane,
                    from_offset=asked.offset,
                    after_position=self._places.get(place, 0),
                    max_events=MAX_EVENTS,
                    max_bytes=max_bytes,
                ),
                patience_seconds=5,
            )
            if events:
                _keep(self._places, (lane, events[-1].offset + 1), events[-1].position)
        return events


def _keep(memory: OrderedDict[tuple[Lane, int], int], place: tuple[Lane, int], value: int) -> None:
    memory[place] = value
    memory.move_to_end(place)
    if len(memory) > KEPT_PLACES:
        memory.popitem(last=False)


def as_batches(topic: KafkaTopic, events: list[FetchedEvent], version: int) -> bytes:
    """Events as record batches: one, unless offsets are too far apart or, by the log's time, times differ."""
    by_log_time = topic.timestamp_type == "LogAppendTime"
    codec = CODECS.index(topic.compression_type) if topic.compression_type in CODECS else 0
    if codec == ZSTD and version < 10:
        # Clients that old cannot read it.
        codec = 0
    batches = []
    start = 0
    for place in range(1, len(events) + 1):
        if (
            place == len(events)
            or events[place].offset - events[start].offset > MAX_DELTA
            or (by_log_time and events[place].time_ms != events[start].time_ms)
        ):
            part = events[start:place]
            columns = Columns(
                [event.time_ms for event in part],
                [event.key for event in part],
                [event.payload for event in part],
                [_headers(event) for event in part],
            )
            batches.append(
                build_batch([event.offset for event in part], columns, codec=codec, log_append_time=by_log_time)
            )
            start = place
    return b"".join(batches)


def _headers(event: FetchedEvent) -> bytes | None:
    if event.record_headers is not None:
        return event.record_headers
    if not (event.headers or event.type or event.routing_key or event.content_type or event.event_id):
        return None
    return section_of(event.headers, event.type, event.routing_key, event.content_type, event.event_id)


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
