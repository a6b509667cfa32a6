"""Reads partitions for Fetch: from the batch cache if Postgres confirms that it is valid, else from Postgres.

Steps of `read`:
1. Look up cached batches, then query Postgres once for all partitions: bounds, validity of the cached batches, and how
   far the next page extends (`kafka_look`).
2. Drop cached batches that are no longer valid, and query those partitions again.
3. Read the pages that are not cached, a few partitions at a time. A *plain* page has a row for each offset, with key,
   payload and time only; it is read without examining the events first. If that turns out wrong, or the events are too
   large, the page is examined event by event, as are the next pages of that partition.
4. Read the next page of each partition ahead, into the cache.
Invariant: records are only read in the epoch in which the bounds were queried.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Container, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import psycopg

from headwater.bounded_dict import BoundedDict
from headwater.calls import kafka as calls
from headwater.calls.kafka import Bounds, FetchedRows, KafkaTopic, Page, PartitionQuery, PartitionState, TopicPartition
from headwater.errors import HeadwaterError
from headwater.observability.metrics import ERROR, logger
from headwater.servers.kafka.batch_cache import CachedBatch
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.compression import codec_for, codecs_for
from headwater.servers.kafka.leader_epochs import EpochHistory
from headwater.servers.kafka.record_mapping import header_section
from headwater.servers.kafka.records import MAX_DELTA, Columns, build_batch

MAX_EVENTS: Final = 10_000
MIN_EVENTS: Final = 100
MIN_PLAIN_EVENTS: Final = 10
"""Minimum events of a page, examined or plain, of a partition whose last events were large: the next may be small."""
INITIAL_RECORD_BYTES: Final = 500
"""Assumed record size before the first read of a partition."""
MAX_SIZE_FACTOR: Final = 8
MAX_UNCHECKED_BYTES: Final = 32 * 1024 * 1024
"""Limits of a plain page, which is read without examining it first: the size of a key or payload relative to the
average record of the partition, and the total bytes of keys and of payloads."""
CHECKED_PAGES: Final = 16
"""How many pages are examined after a page that was not plain."""
MAX_PARALLEL_READS: Final = 4
"""Maximum partitions of a fetch that are read at once, so that connections remain for other requests."""
MAX_READ_AHEAD_BYTES: Final = 1024 * 1024
MAX_CACHED_ENTRIES: Final = 10_000
PATIENCE_SECONDS: Final = 5.0


class PartitionFetch(NamedTuple):
    """A partition to read from an offset on. `zstd`: whether the client supports zstd."""

    topic: KafkaTopic
    topic_partition: TopicPartition
    offset: int
    max_bytes: int
    zstd: bool


class FetchResult(NamedTuple):
    """The state of a partition in Postgres, and records up to, not including, `end`."""

    state: PartitionState
    records: bytes = b""
    end: int = 0

    @property
    def bounds(self) -> Bounds:
        return self.state.bounds

    @property
    def max_offset(self) -> int:
        """The highest offset that a consumer may fetch from."""
        return self.state.max_offset

    @property
    def present_epoch(self) -> int:
        return self.state.present_epoch


class PageRecords(NamedTuple):
    """The records of a page, and their offsets."""

    offsets: Sequence[int]
    columns: Columns


class PartitionReader:
    """Reads partitions for the fetches of a broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._cache = broker.batch_cache
        # (partition, offset) -> a position before that offset, so that a continued read skips older segments.
        self._start_positions: BoundedDict[tuple[TopicPartition, int], int] = BoundedDict(MAX_CACHED_ENTRIES)
        # (partition, offset) -> the offset before which an open topic has no events for that partition.
        self._empty_until: BoundedDict[tuple[TopicPartition, int], int] = BoundedDict(MAX_CACHED_ENTRIES)
        # Average record size of a partition when it was last read.
        self._record_sizes: BoundedDict[TopicPartition, int] = BoundedDict(MAX_CACHED_ENTRIES)
        # How many more pages of a partition are examined before they are read.
        self._checked_pages_left: BoundedDict[TopicPartition, int] = BoundedDict(MAX_CACHED_ENTRIES)
        # The epochs of the log as of the latest known one.
        self._epochs = EpochHistory(-1)
        self._read_ahead_tasks: dict[tuple[TopicPartition, int], asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(MAX_PARALLEL_READS)

    async def read(self, fetches: Sequence[PartitionFetch], *, max_bytes: int) -> list[FetchResult | None]:
        """Read each partition, up to `max_bytes` in total but at least one batch. None: no such partition."""
        # Wait for a running read-ahead: a second read would cost as much and complete later.
        if running := [
            task
            for one in fetches
            if (task := self._read_ahead_tasks.get((one.topic_partition, one.offset))) is not None
        ]:
            await asyncio.wait(running, timeout=PATIENCE_SECONDS)
        if self._epochs.present < 0:
            self._enter_epoch(self._broker.leader_epoch)
        cached = [self._cached_batches(one) for one in fetches]
        # Query the bounds of all partitions, but pages only for as many as may fit.
        fitting = max(bisect_right(list(accumulate(one.max_bytes for one in fetches)), max_bytes), 1)
        states = await self._query(fetches, cached, pages=range(fitting))
        found: list[FetchResult | None] = [None] * len(fetches)
        left = max_bytes
        for start in range(0, len(fetches), MAX_PARALLEL_READS):
            indexes = [
                index for index in range(start, min(start + MAX_PARALLEL_READS, len(fetches))) if index in states
            ]
            if left > 0 and (not_queried := [index for index in indexes if index >= fitting and not cached[index]]):
                again = await self._query(
                    [fetches[index] for index in not_queried], [[]] * len(not_queried), pages=range(len(not_queried))
                )
                states |= {not_queried[number]: one for number, one in again.items()}
            answers = await asyncio.gather(
                *(self._read_partition(fetches[index], cached[index], states[index], left) for index in indexes)
            )
            for index, answer in zip(indexes, answers, strict=True):
                fits = len(answer.records) <= left or left == max_bytes
                found[index] = answer if fits else FetchResult(answer.state)
                left -= len(answer.records) if fits else 0
        self._read_ahead(fetches, found)
        return found

    def _cached_batches(self, fetch: PartitionFetch) -> list[CachedBatch]:
        """The cached batches of a partition. Compacted topics are not cached: they lose records in the middle."""
        if fetch.topic.kind != "sequenced" or fetch.topic.compacted:
            return []
        return self._cache.batches(
            fetch.topic_partition,
            fetch.offset,
            max_bytes=fetch.max_bytes,
            codecs=codecs_for(fetch.topic.compression_type, zstd=fetch.zstd),
            by_log_time=_by_log_time(fetch.topic),
        )

    async def _query(
        self, fetches: Sequence[PartitionFetch], cached: Sequence[list[CachedBatch]], *, pages: Container[int]
    ) -> dict[int, PartitionState]:
        """Query the state of partitions in Postgres, by index. Invalid cached batches are dropped."""
        if not fetches:
            return {}
        epoch = self._epochs.present
        queries = [
            self._partition_query(one, batches, page=index in pages)
            for index, (one, batches) in enumerate(zip(fetches, cached, strict=True))
        ]
        states = await self._broker.log.run(calls.kafka_look(queries))
        present = max((one.present_epoch for one in states.values()), default=epoch)
        if present > epoch:
            # The cached batches, and the query, are from an earlier epoch.
            self._enter_epoch(present)
            for batches in cached:
                batches.clear()
            return await self._query(fetches, cached, pages=pages)
        stale = [
            index
            for index, batches in enumerate(cached)
            if batches and index in states and not _is_valid(batches, states[index])
        ]
        if stale:
            for index in stale:
                self._cache.forget(fetches[index].topic_partition)
                cached[index].clear()
                del states[index]
            states |= await self._query_again(fetches, stale)
        return states

    def _enter_epoch(self, epoch: int) -> None:
        """Drop all cached state if this epoch is later: an offset may now belong to another event."""
        self._cache.enter_epoch(epoch)
        if epoch > self._epochs.present:
            self._epochs = EpochHistory(epoch)
            self._start_positions.clear()
            self._empty_until.clear()
            self._record_sizes.clear()
            self._checked_pages_left.clear()

    async def _epochs_in(self, epoch: int) -> EpochHistory:
        """The epochs of the log as of this one."""
        epochs = self._epochs
        if epochs.present != epoch or not epochs.complete:
            found = await self._broker.log.run(calls.kafka_epochs())
            epochs = EpochHistory(epoch, found)
            if self._epochs.present == epoch:
                self._epochs = epochs
        return epochs

    async def _query_again(
        self, fetches: Sequence[PartitionFetch], indexes: Sequence[int]
    ) -> dict[int, PartitionState]:
        """Query some of the partitions again, without cached batches."""
        again = await self._query([fetches[index] for index in indexes], [[]] * len(indexes), pages=range(len(indexes)))
        return {indexes[number]: one for number, one in again.items()}

    def _partition_query(self, fetch: PartitionFetch, batches: list[CachedBatch], *, page: bool) -> PartitionQuery:
        reads = page and fetch.topic.kind == "sequenced" and not batches
        # 5 % less than should fit: a page that turns out too large costs three times as much.
        fitting = fetch.max_bytes * 19 // (self._record_sizes.get(fetch.topic_partition, INITIAL_RECORD_BYTES) * 20)
        plain = not fetch.topic.compacted and not self._checked_pages_left.get(fetch.topic_partition)
        return PartitionQuery(
            fetch.topic_partition,
            fetch.offset if reads else None,
            self._start_positions.get((fetch.topic_partition, fetch.offset), 0),
            min(max(fitting, MIN_PLAIN_EVENTS if plain else MIN_EVENTS), MAX_EVENTS),
            None if plain else fetch.max_bytes,
            [(batch.end - 1, batch.after_position) for batch in batches],
        )

    async def _read_partition(
        self, fetch: PartitionFetch, cached: list[CachedBatch], state: PartitionState, left: int
    ) -> FetchResult:
        bounds = state.bounds
        if not bounds.start <= fetch.offset < bounds.end or left <= 0:
            return FetchResult(state)
        if cached:
            return FetchResult(state, b"".join([batch.records for batch in cached]), cached[-1].end)
        page: Page | None = None
        # Records are not read in a later epoch than the bounds: the client would get events of the new history at an
        # offset of the old one, and would miss those before until it has truncated its offset.
        if fetch.topic.kind == "open":
            epochs = await self._epochs_in(state.present_epoch)
            records = await self._open_records(fetch, state)
        else:
            records, page = await self._page_records(fetch, state)
            epochs = EpochHistory(state.present_epoch if page is None else page.epoch)
        if records is None:
            return FetchResult(state)
        packed = as_batches(fetch.topic, records, epochs, zstd=fetch.zstd)
        while page is not None and page.plain and len(packed) > fetch.max_bytes and len(records.offsets) > 1:
            # The records are larger than the average so far. The new average is stored below.
            records = _part(records, 0, max(len(records.offsets) * fetch.max_bytes // len(packed), 1))
            packed = as_batches(fetch.topic, records, epochs, zstd=fetch.zstd)
        self._record_sizes[fetch.topic_partition] = max(len(packed) // len(records.offsets), 1)
        last = records.offsets[-1]
        if page is not None and last == page.last_offset:
            if state.present_epoch == self._epochs.present:
                self._start_positions[fetch.topic_partition, last + 1] = page.last_position
            self._cache_page(fetch, records.offsets, packed, page, epoch=state.present_epoch)
        return FetchResult(state, packed, last + 1)

    def _cache_page(
        self, fetch: PartitionFetch, offsets: Sequence[int], packed: bytes, page: Page, *, epoch: int
    ) -> None:
        # A page with gaps may be from a topic that was once compacted. The cache holds contiguous offsets only.
        whole = offsets[-1] - offsets[0] == len(offsets) - 1 and not fetch.topic.compacted
        if whole and page.last_ms is not None:
            batch = CachedBatch(
                offsets[0],
                offsets[-1] + 1,
                page.last_ms,
                page.last_position - 1,
                codec_for(fetch.topic.compression_type, zstd=fetch.zstd),
                _by_log_time(fetch.topic),
                packed,
            )
            self._cache.add(fetch.topic_partition, batch, epoch=epoch)

    async def _page_records(
        self, fetch: PartitionFetch, state: PartitionState
    ) -> tuple[PageRecords | None, Page | None]:
        """Read a page as plain; if it is not plain, query an examined page and read that."""
        page = state.page
        if (page is None or page.plain) and not self._checked_pages_left.get(fetch.topic_partition):
            records = None if page is None else await self._plain_records(fetch, page, state.present_epoch)
            if records is not None:
                return records, page
            self._checked_pages_left[fetch.topic_partition] = CHECKED_PAGES
            examined = (await self._query([fetch], [[]], pages=(0,))).get(0)
            if examined is None or examined.present_epoch != state.present_epoch:
                # The epoch has changed: the client must first check whether its offset is still valid.
                return None, None
            page = examined.page
        if page is None or page.plain:
            return None, None
        if self._checked_pages_left.get(fetch.topic_partition):
            self._checked_pages_left[fetch.topic_partition] -= 1
        after_position = self._start_positions.get((fetch.topic_partition, fetch.offset), 0)
        call = calls.kafka_fetch_sequenced(
            fetch.topic_partition,
            page,
            from_offset=fetch.offset,
            after_position=after_position,
            epoch=state.present_epoch,
        )
        return _records(await self._broker.log.run(call)), page

    async def _plain_records(self, fetch: PartitionFetch, page: Page, epoch: int) -> PageRecords | None:
        offsets = range(fetch.offset, page.last_offset + 1)
        size = self._record_sizes.get(fetch.topic_partition, INITIAL_RECORD_BYTES)
        call = calls.kafka_fetch_plain(
            fetch.topic_partition,
            page,
            from_offset=fetch.offset,
            after_position=self._start_positions.get((fetch.topic_partition, fetch.offset), 0),
            max_part_bytes=min(MAX_SIZE_FACTOR * size, MAX_UNCHECKED_BYTES // len(offsets)),
            epoch=epoch,
        )
        rows = await self._broker.log.run(call)
        if len(rows) != len(offsets):
            return None
        times, keys, payloads = zip(*rows, strict=True)
        return PageRecords(offsets, Columns(times, keys, payloads, (None,) * len(rows)))

    async def _open_records(self, fetch: PartitionFetch, state: PartitionState) -> PageRecords | None:
        bounds = state.bounds
        key = (fetch.topic_partition, fetch.offset)
        if self._empty_until.get(key, 0) >= bounds.end:
            return None
        rows = await self._broker.log.run(
            calls.kafka_fetch_open(
                fetch.topic_partition,
                from_offset=max(fetch.offset, self._empty_until.get(key, 0)),
                end_offset=bounds.end,
                max_events=MAX_EVENTS,
                max_bytes=fetch.max_bytes,
                epoch=state.present_epoch,
            ),
        )
        if not rows and state.present_epoch == self._epochs.present:
            self._empty_until[key] = bounds.end
        return _records(rows)

    # Read-ahead

    def _read_ahead(self, fetches: Sequence[PartitionFetch], found: Sequence[FetchResult | None]) -> None:
        """Start reading the next page of each partition, while the clients process their responses."""
        for one, read in zip(fetches, found, strict=True):
            if (
                read is None
                or not read.records
                or read.end >= read.bounds.end
                or one.topic.kind != "sequenced"
                or one.topic.compacted
            ):
                continue
            further = one._replace(offset=read.end, max_bytes=min(one.max_bytes, MAX_READ_AHEAD_BYTES))
            if (len(fetches) + len(self._read_ahead_tasks)) * further.max_bytes > self._cache.max_bytes // 4:
                # Too many partitions: read-ahead pages would be evicted before they are fetched.
                continue
            key = (further.topic_partition, further.offset)
            if key not in self._read_ahead_tasks and not self._cached_batches(further):
                task = asyncio.create_task(self._read_page(further), name="kafka read-ahead")
                self._read_ahead_tasks[key] = task
                task.add_done_callback(lambda _, key=key: self._read_ahead_tasks.pop(key, None))  # type: ignore[misc]

    async def _read_page(self, fetch: PartitionFetch) -> None:
        async with self._slots:
            try:
                state = (await self._query([fetch], [[]], pages=(0,))).get(0)
                if state is not None:
                    await self._read_partition(fetch, [], state, fetch.max_bytes)
            except (HeadwaterError, psycopg.Error) as error:
                # No client waits for it. The next fetch reads the page itself and reports the error.
                logger.info("kafka read-ahead failed", extra={ERROR: str(error)})


def _is_valid(batches: list[CachedBatch], state: PartitionState) -> bool:
    """Whether the records of these batches still exist unchanged in Postgres."""
    inside = state.bounds.start <= batches[0].first and batches[-1].end <= state.bounds.end
    return inside and [batch.published_ms for batch in batches] == state.cached_ms


def _by_log_time(topic: KafkaTopic) -> bool:
    return topic.timestamp_type == "LogAppendTime"


def _records(rows: FetchedRows) -> PageRecords | None:
    if not rows:
        return None
    offsets, times, keys, payloads, sections, parts = zip(*rows, strict=True)
    if any(parts):
        sections = tuple(
            header_section(*part) if section is None and part else section
            for section, part in zip(sections, parts, strict=True)
        )
    return PageRecords(offsets, Columns(times, keys, payloads, sections))


def as_batches(topic: KafkaTopic, records: PageRecords, epochs: EpochHistory, *, zstd: bool) -> bytes:
    """Encode events as record batches. A new batch begins where offsets are too far apart, the epoch changes or, with
    LogAppendTime, the time changes."""
    codec = codec_for(topic.compression_type, zstd=zstd)
    by_log_time = _by_log_time(topic)
    offsets, columns = records
    cuts = [0, len(offsets)]
    if offsets[-1] - offsets[0] > MAX_DELTA:
        cuts = list(range(len(offsets) + 1))
    elif by_log_time:
        cuts = [0, *(index for index, (a, b) in enumerate(pairwise(columns.times_ms), 1) if a != b), len(offsets)]
    if between := epochs.cuts(offsets):
        cuts = sorted({*cuts, *between})
    parts = [records] if len(cuts) == 2 else [_part(records, start, stop) for start, stop in pairwise(cuts)]
    return b"".join(
        [
            build_batch(
                part.offsets,
                part.columns,
                codec=codec,
                log_append_time=by_log_time,
                leader_epoch=epochs.of(part.offsets[0]),
            )
            for part in parts
        ]
    )


def _part(records: PageRecords, start: int, stop: int) -> PageRecords:
    times, keys, values, headers = records.columns
    return PageRecords(
        records.offsets[start:stop],
        Columns(times[start:stop], keys[start:stop], values[start:stop], headers[start:stop]),
    )
