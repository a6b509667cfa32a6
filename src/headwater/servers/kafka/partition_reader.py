"""Reading lanes: from memory where Postgres says that it still holds, else from Postgres, and ahead of who reads on."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Container, Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple, TypeVar

import psycopg

from headwater.calls import kafka as calls
from headwater.calls.kafka import Bounds, FetchedRows, KafkaTopic, Lane, Page, Seen, Wanted
from headwater.errors import HeadwaterError
from headwater.observability.metrics import ERROR, logger
from headwater.servers.kafka.batch_cache import Batch
from headwater.servers.kafka.broker import Broker
from headwater.servers.kafka.compression import codec_for, codecs_for
from headwater.servers.kafka.leader_epochs import Epochs
from headwater.servers.kafka.record_mapping import section_of
from headwater.servers.kafka.records import MAX_DELTA, Columns, build_batch

MAX_EVENTS: Final = 10_000
FEWEST_EVENTS: Final = 100
FEWEST_PLAIN: Final = 10
"""Of a lane whose events were large, since the next may be small. How many of them fit is seen, of plain ones later."""
FIRST_SIZE_BYTES: Final = 500
"""How large a record is taken to be while none of the lane was read."""
TIMES_AS_LARGE: Final = 8
MAX_UNSEEN_BYTES: Final = 32 * 1024 * 1024
"""What is read without being looked at first: a part of a record up to so many times the size that records of the lane
have, and all keys together, and all payloads, up to so many bytes."""
PAGES_LOOKED_AT: Final = 16
"""How many pages are, after one that was not plain."""
AT_A_TIME: Final = 4
"""How many lanes are read at once: others need connections too."""
MAX_AHEAD_BYTES: Final = 1024 * 1024
KEPT_PLACES: Final = 10_000
PATIENCE_SECONDS: Final = 5.0

_Place = TypeVar("_Place", Lane, tuple[Lane, int])


class Asked(NamedTuple):
    """A lane that is to be read from an offset on. `zstd`: whether the reader can unpack it."""

    topic: KafkaTopic
    lane: Lane
    offset: int
    max_bytes: int
    zstd: bool


class Read(NamedTuple):
    """What there is of a lane, as Postgres told of it, and records that go up to, not including, `end`."""

    seen: Seen
    records: bytes = b""
    end: int = 0

    @property
    def bounds(self) -> Bounds:
        return self.seen.bounds

    @property
    def max_offset(self) -> int:
        """Up to where a consumer may be."""
        return self.seen.max_offset

    @property
    def present_epoch(self) -> int:
        return self.seen.present_epoch


class Records(NamedTuple):
    """Events as records."""

    offsets: Sequence[int]
    columns: Columns


class Reading:
    """How a broker reads lanes."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._kept = broker.kept
        # The position before an offset that was read up to: a lane that is read on is found without older segments.
        self._places: OrderedDict[tuple[Lane, int], int] = OrderedDict()
        # Up to where an open topic has nothing for a lane after an offset.
        self._barren: OrderedDict[tuple[Lane, int], int] = OrderedDict()
        # How large a record of the lane was, on average, when it was last read.
        self._sizes: OrderedDict[Lane, int] = OrderedDict()
        # How many more pages of a lane are looked at before they are read.
        self._varied: OrderedDict[Lane, int] = OrderedDict()
        # The epochs of the log as of the last one that was seen.
        self._epochs = Epochs(-1)
        self._ahead: dict[tuple[Lane, int], asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(AT_A_TIME)

    async def read(self, asked: Sequence[Asked], *, max_bytes: int) -> list[Read | None]:
        """What there is of each lane, together up to `max_bytes`, but one batch at least; None: it is not there."""
        # What is just being read ahead is waited for: a second reading would cost as much again, and come later.
        if under_way := [task for one in asked if (task := self._ahead.get((one.lane, one.offset))) is not None]:
            await asyncio.wait(under_way, timeout=PATIENCE_SECONDS)
        if self._epochs.present < 0:
            self._enter_epoch(self._broker.leader_epoch)
        remembered = [self._remembered(one) for one in asked]
        # The bounds of all; but where to read up to only for as many as may fit.
        fitting = max(bisect_right(list(accumulate(one.max_bytes for one in asked)), max_bytes), 1)
        seen = await self._look(asked, remembered, pages=range(fitting))
        found: list[Read | None] = [None] * len(asked)
        left = max_bytes
        for start in range(0, len(asked), AT_A_TIME):
            places = [place for place in range(start, min(start + AT_A_TIME, len(asked))) if place in seen]
            if left > 0 and (unseen := [place for place in places if place >= fitting and not remembered[place]]):
                again = await self._look(
                    [asked[place] for place in unseen], [[]] * len(unseen), pages=range(len(unseen))
                )
                seen |= {unseen[number]: one for number, one in again.items()}
            answers = await asyncio.gather(
                *(self._of_lane(asked[place], remembered[place], seen[place], left) for place in places)
            )
            for place, answer in zip(places, answers, strict=True):
                fits = len(answer.records) <= left or left == max_bytes
                found[place] = answer if fits else Read(answer.seen)
                left -= len(answer.records) if fits else 0
        self._read_ahead(asked, found)
        return found

    def _remembered(self, asked: Asked) -> list[Batch]:
        """What memory has of a lane. Of one that is compacted nothing, since it loses records from its middle."""
        if asked.topic.kind != "sequenced" or asked.topic.compacted:
            return []
        return self._kept.batches(
            asked.lane,
            asked.offset,
            max_bytes=asked.max_bytes,
            codecs=codecs_for(asked.topic.compression_type, zstd=asked.zstd),
            by_log_time=_by_log_time(asked.topic),
        )

    async def _look(
        self, asked: Sequence[Asked], remembered: Sequence[list[Batch]], *, pages: Container[int]
    ) -> dict[int, Seen]:
        """What Postgres says of lanes, by their place. What is remembered, and is not so, is forgotten."""
        if not asked:
            return {}
        epoch = self._epochs.present
        wanted = [
            self._wanted(one, kept, page=place in pages)
            for place, (one, kept) in enumerate(zip(asked, remembered, strict=True))
        ]
        seen = await self._broker.log.run(calls.kafka_look(wanted), patience_seconds=PATIENCE_SECONDS)
        present = max((one.present_epoch for one in seen.values()), default=epoch)
        if present > epoch:
            # What was remembered, and asked by, is of an earlier epoch.
            self._enter_epoch(present)
            for kept in remembered:
                kept.clear()
            return await self._look(asked, remembered, pages=pages)
        untrue = [
            place for place, kept in enumerate(remembered) if kept and place in seen and not _holds(kept, seen[place])
        ]
        if untrue:
            for place in untrue:
                self._kept.forget(asked[place].lane)
                remembered[place].clear()
                del seen[place]
            seen |= await self._look_again(asked, untrue)
        return seen

    def _enter_epoch(self, epoch: int) -> None:
        """Forget all that is remembered of lanes, if this is a later epoch: offsets may be those of other events."""
        self._kept.enter_epoch(epoch)
        if epoch > self._epochs.present:
            self._epochs = Epochs(epoch)
            self._places.clear()
            self._barren.clear()
            self._sizes.clear()
            self._varied.clear()

    async def _epochs_in(self, epoch: int) -> Epochs:
        """The epochs of the log as they were in this one."""
        epochs = self._epochs
        if epochs.present != epoch or not epochs.complete:
            found = await self._broker.log.run(calls.kafka_epochs(), patience_seconds=PATIENCE_SECONDS)
            epochs = Epochs(epoch, found)
            if self._epochs.present == epoch:
                self._epochs = epochs
        return epochs

    async def _look_again(self, asked: Sequence[Asked], places: Sequence[int]) -> dict[int, Seen]:
        """The same of some of the lanes, of which nothing is remembered."""
        again = await self._look([asked[place] for place in places], [[]] * len(places), pages=range(len(places)))
        return {places[number]: one for number, one in again.items()}

    def _wanted(self, asked: Asked, kept: list[Batch], *, page: bool) -> Wanted:
        reads = page and asked.topic.kind == "sequenced" and not kept
        # A little less than what should fit: that too much is there is found out at thrice the price.
        fitting = asked.max_bytes * 19 // (self._sizes.get(asked.lane, FIRST_SIZE_BYTES) * 20)
        plain = not asked.topic.compacted and not self._varied.get(asked.lane)
        return Wanted(
            asked.lane,
            asked.offset if reads else None,
            self._places.get((asked.lane, asked.offset), 0),
            min(max(fitting, FEWEST_PLAIN if plain else FEWEST_EVENTS), MAX_EVENTS),
            None if plain else asked.max_bytes,
            [(batch.end - 1, batch.after_position) for batch in kept],
        )

    async def _of_lane(self, asked: Asked, remembered: list[Batch], seen: Seen, left: int) -> Read:
        bounds = seen.bounds
        if not bounds.start <= asked.offset < bounds.end or left <= 0:
            return Read(seen)
        if remembered:
            return Read(seen, b"".join([batch.records for batch in remembered]), remembered[-1].end)
        page: Page | None = None
        # Nothing is read in a later epoch than it was looked for. The reader would get events of the new history from
        # an offset of the old one, and those before them only when it has gone back.
        if asked.topic.kind == "open":
            epochs = await self._epochs_in(seen.present_epoch)
            records = await self._open_records(asked, seen)
        else:
            records, page = await self._page_records(asked, seen)
            epochs = Epochs(seen.present_epoch if page is None else page.epoch)
        if records is None:
            return Read(seen)
        packed = as_batches(asked.topic, records, epochs, zstd=asked.zstd)
        while page is not None and page.plain and len(packed) > asked.max_bytes and len(records.offsets) > 1:
            # They are larger than those before. Not for long: their size is remembered.
            records = _part(records, 0, max(len(records.offsets) * asked.max_bytes // len(packed), 1))
            packed = as_batches(asked.topic, records, epochs, zstd=asked.zstd)
        _remember(self._sizes, asked.lane, max(len(packed) // len(records.offsets), 1))
        last = records.offsets[-1]
        if page is not None and last == page.last_offset:
            if seen.present_epoch == self._epochs.present:
                _remember(self._places, (asked.lane, last + 1), page.last_position)
            self._keep(asked, records.offsets, packed, page, epoch=seen.present_epoch)
        return Read(seen, packed, last + 1)

    def _keep(self, asked: Asked, offsets: Sequence[int], packed: bytes, page: Page, *, epoch: int) -> None:
        # What has gaps may be of a topic that was compacted once: memory has whole stretches only.
        whole = offsets[-1] - offsets[0] == len(offsets) - 1 and not asked.topic.compacted
        if whole and page.last_ms is not None:
            kept = Batch(
                offsets[0],
                offsets[-1] + 1,
                page.last_ms,
                page.last_position - 1,
                codec_for(asked.topic.compression_type, zstd=asked.zstd),
                _by_log_time(asked.topic),
                packed,
            )
            self._kept.keep(asked.lane, kept, epoch=epoch)

    async def _page_records(self, asked: Asked, first_seen: Seen) -> tuple[Records | None, Page | None]:
        """The records of a page, or of one that is looked at first, where this one is not as plain as was believed."""
        page = first_seen.page
        if (page is None or page.plain) and not self._varied.get(asked.lane):
            records = None if page is None else await self._plain_records(asked, page, first_seen.present_epoch)
            if records is not None:
                return records, page
            _remember(self._varied, asked.lane, PAGES_LOOKED_AT)
            seen = (await self._look([asked], [[]], pages=(0,))).get(0)
            if seen is None or seen.present_epoch != first_seen.present_epoch:
                # Whether the reader may go on from its offset is for it to find out first.
                return None, None
            page = seen.page
        if page is None or page.plain:
            return None, None
        if self._varied.get(asked.lane):
            self._varied[asked.lane] -= 1
        after_position = self._places.get((asked.lane, asked.offset), 0)
        call = calls.kafka_fetch_sequenced(
            asked.lane,
            page,
            from_offset=asked.offset,
            after_position=after_position,
            epoch=first_seen.present_epoch,
        )
        return _records(await self._broker.log.run(call, patience_seconds=PATIENCE_SECONDS)), page

    async def _plain_records(self, asked: Asked, page: Page, epoch: int) -> Records | None:
        offsets = range(asked.offset, page.last_offset + 1)
        size = self._sizes.get(asked.lane, FIRST_SIZE_BYTES)
        call = calls.kafka_fetch_plain(
            asked.lane,
            page,
            from_offset=asked.offset,
            after_position=self._places.get((asked.lane, asked.offset), 0),
            max_part_bytes=min(TIMES_AS_LARGE * size, MAX_UNSEEN_BYTES // len(offsets)),
            epoch=epoch,
        )
        rows = await self._broker.log.run(call, patience_seconds=PATIENCE_SECONDS)
        if len(rows) != len(offsets):
            return None
        times, keys, payloads = zip(*rows, strict=True)
        return Records(offsets, Columns(times, keys, payloads, (None,) * len(rows)))

    async def _open_records(self, asked: Asked, seen: Seen) -> Records | None:
        bounds = seen.bounds
        place = (asked.lane, asked.offset)
        if self._barren.get(place, 0) >= bounds.end:
            return None
        rows = await self._broker.log.run(
            calls.kafka_fetch_open(
                asked.lane,
                from_offset=max(asked.offset, self._barren.get(place, 0)),
                end_offset=bounds.end,
                max_events=MAX_EVENTS,
                max_bytes=asked.max_bytes,
                epoch=seen.present_epoch,
            ),
            patience_seconds=PATIENCE_SECONDS,
        )
        if not rows and seen.present_epoch == self._epochs.present:
            _remember(self._barren, place, bounds.end)
        return _records(rows)

    # Ahead of readers

    def _read_ahead(self, asked: Sequence[Asked], found: Sequence[Read | None]) -> None:
        """Read what comes next of lanes that are read on, while those who read look at what they have."""
        for one, read in zip(asked, found, strict=True):
            if (
                read is None
                or not read.records
                or read.end >= read.bounds.end
                or one.topic.kind != "sequenced"
                or one.topic.compacted
            ):
                continue
            further = one._replace(offset=read.end, max_bytes=min(one.max_bytes, MAX_AHEAD_BYTES))
            if (len(asked) + len(self._ahead)) * further.max_bytes > self._kept.max_bytes // 4:
                # With so many lanes what is read ahead would be pushed out before it is asked for.
                continue
            place = (further.lane, further.offset)
            if place not in self._ahead and not self._remembered(further):
                task = asyncio.create_task(self._read_page(further), name="kafka reading ahead")
                self._ahead[place] = task
                task.add_done_callback(lambda _, place=place: self._ahead.pop(place, None))  # type: ignore[misc]

    async def _read_page(self, asked: Asked) -> None:
        async with self._turns:
            try:
                seen = (await self._look([asked], [[]], pages=(0,))).get(0)
                if seen is not None:
                    await self._of_lane(asked, [], seen, asked.max_bytes)
            except (HeadwaterError, psycopg.Error) as error:
                # Nobody waits for it yet: whoever needs it reads it, and hears what is wrong.
                logger.info("not read ahead", extra={ERROR: str(error)})


def _holds(kept: list[Batch], seen: Seen) -> bool:
    """Whether all of these records are where they were, and none has been deleted."""
    inside = seen.bounds.start <= kept[0].first and kept[-1].end <= seen.bounds.end
    return inside and [batch.published_ms for batch in kept] == seen.kept_ms


def _remember(memory: OrderedDict[_Place, int], place: _Place, value: int) -> None:
    memory[place] = value
    memory.move_to_end(place)
    if len(memory) > KEPT_PLACES:
        memory.popitem(last=False)


def _by_log_time(topic: KafkaTopic) -> bool:
    return topic.timestamp_type == "LogAppendTime"


def _records(rows: FetchedRows) -> Records | None:
    if not rows:
        return None
    offsets, times, keys, payloads, sections, parts = zip(*rows, strict=True)
    if any(parts):
        sections = tuple(
            section_of(*part) if section is None and part else section
            for section, part in zip(sections, parts, strict=True)
        )
    return Records(offsets, Columns(times, keys, payloads, sections))


def as_batches(topic: KafkaTopic, records: Records, epochs: Epochs, *, zstd: bool) -> bytes:
    """Events as record batches: one, unless offsets are too far apart, they are of several epochs or, by the log's
    time, times differ."""
    codec = codec_for(topic.compression_type, zstd=zstd)
    by_log_time = _by_log_time(topic)
    offsets, columns = records
    cuts = [0, len(offsets)]
    if offsets[-1] - offsets[0] > MAX_DELTA:
        cuts = list(range(len(offsets) + 1))
    elif by_log_time:
        cuts = [0, *(place for place, (a, b) in enumerate(pairwise(columns.times_ms), 1) if a != b), len(offsets)]
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


def _part(records: Records, start: int, stop: int) -> Records:
    times, keys, values, headers = records.columns
    return Records(
        records.offsets[start:stop],
        Columns(times[start:stop], keys[start:stop], values[start:stop], headers[start:stop]),
    )
