"""The verdict: compares the journals of producers and readers with the log at the end. Pure code.

Events are identified by producer and number, never by position: after a crash or a failover a position may belong to
another event. An event that was acknowledged while the standby was disconnected, and is missing after the failover, is
counted as lost with the old primary: asynchronous replication does not guarantee more.
Invariant: every event that is in the log at the end was delivered to every reader of its topic.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from headwater.trials.chaos.cluster import Divergence
from headwater.trials.chaos.journal import JournalEntry
from headwater.trials.chaos.participants import Order

MAX_EXAMPLES: Final = 3


class LoggedEvent(NamedTuple):
    """An event in the log: its producer and number, and its position, partition and offset."""

    position: int
    producer: str
    number: int
    partition: tuple[str, int]
    offset: int | None

    @property
    def id(self) -> str:
        return f"{self.producer}/{self.number}"


@dataclass(frozen=True, slots=True)
class ReaderDeliveries:
    """All deliveries of one reader in order, and the dead letters of its queue."""

    name: str
    topics: frozenset[str]
    delivered: Sequence[str]
    dead: frozenset[str] = frozenset()
    order: Order = "none"
    # It writes its effects in the transaction that acknowledges the events.
    exactly_once: bool = False


@dataclass(frozen=True, slots=True)
class ReaderVerdict:
    """The verdict on one reader, in events. `wanted` is the number of events of its topics in the log."""

    name: str
    wanted: int
    delivered: int
    repeated: int
    dead: int
    lost: int
    duplicates: int
    out_of_order: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a trial, in events."""

    produced: int
    acknowledged: int
    # Successful deliveries of all readers.
    processed: int
    dead: int
    # Acknowledged but not in the log, or in the log but for some reader neither delivered nor a dead letter.
    lost: int
    # Acknowledged by a primary but not replicated to the standby that took over.
    lost_with_old_primary: int
    # In the log twice, or with two effects of an exactly-once reader.
    duplicates: int
    # Transactions of which only a part is in the log.
    torn: int
    # In the log although the transaction was rolled back or no producer published them.
    invented: int
    # Missing or duplicate offsets in partitions with dense offsets.
    gaps: int
    # First delivered after an event with a higher position.
    out_of_order: int
    # Delivered more than once to an at-least-once reader, which is allowed.
    repeated: int
    readers: tuple[ReaderVerdict, ...]
    examples: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicates or self.torn or self.invented or self.gaps or self.out_of_order)


class _ProducerRecords(NamedTuple):
    """The journal entries of all producers."""

    transactions: dict[str, list[Sequence[int]]]
    tried_at: dict[tuple[str, int], float]
    acknowledged_at: dict[tuple[str, int], float]
    rolled_back: set[tuple[str, int]]


def judge(
    entries: Iterable[JournalEntry],
    found: Sequence[LoggedEvent],
    readers: Iterable[ReaderDeliveries],
    divergences: Sequence[Divergence] = (),
) -> Verdict:
    """Compare the journals of producers with the log, and the log with the deliveries of readers."""
    records = _group_entries(entries)
    present = Counter((event.producer, event.number) for event in found)
    examples: list[str] = []

    def count(what: str, which: Sequence[object]) -> int:
        examples.extend(f"{what}: {one}" for one in which[:MAX_EXAMPLES])
        return len(which)

    missing = [one for one in records.acknowledged_at if one not in present]
    lost_in_failover = [one for one in missing if _may_be_lost_in_failover(records, one, divergences)]
    gone = set(lost_in_failover)
    lost = count("acknowledged but not in the log", [one for one in missing if one not in gone])
    duplicates = count("in the log more than once", [one for one, times in present.items() if times > 1])
    torn = count("only a part of a transaction", list(_torn(records, present)))
    invented = count("in the log but never published", [one for one in present if one not in records.tried_at])
    invented += count("in the log although rolled back", [one for one in records.rolled_back if one in present])

    judged: list[ReaderVerdict] = []
    for reader in readers:
        verdict, more = _judge_reader(reader, found)
        judged.append(verdict)
        examples += more
    return Verdict(
        produced=len(found),
        acknowledged=len(records.acknowledged_at),
        processed=sum(one.delivered for one in judged),
        dead=sum(one.dead for one in judged),
        lost=lost + sum(one.lost for one in judged),
        lost_with_old_primary=len(lost_in_failover),
        duplicates=duplicates + sum(one.duplicates for one in judged),
        torn=torn,
        invented=invented,
        gaps=_gaps(found),
        out_of_order=sum(one.out_of_order for one in judged),
        repeated=sum(one.repeated for one in judged),
        readers=tuple(judged),
        examples=tuple(examples),
    )


def _group_entries(entries: Iterable[JournalEntry]) -> _ProducerRecords:
    records = _ProducerRecords({}, {}, {}, set())
    for entry in entries:
        events = [(entry.producer, number) for number in entry.numbers]
        match entry.kind:
            case "tried":
                records.transactions.setdefault(entry.producer, []).append(entry.numbers)
                records.tried_at.update(dict.fromkeys(events, entry.at))
            case "acknowledged":
                records.acknowledged_at.update(dict.fromkeys(events, entry.at))
            case "rolled back":
                records.rolled_back.update(events)
    return records


def _may_be_lost_in_failover(
    records: _ProducerRecords, event: tuple[str, int], divergences: Sequence[Divergence]
) -> bool:
    """Whether an old primary may have acknowledged the event while its standby was disconnected: it was tried before
    that primary ended, and its acknowledgement was recorded after the standby was disconnected."""
    acknowledged_at = records.acknowledged_at[event]
    tried_at = records.tried_at.get(event, acknowledged_at)
    return any(tried_at < one.ended and acknowledged_at >= one.began for one in divergences)


def _torn(records: _ProducerRecords, present: Counter[tuple[str, int]]) -> Iterable[tuple[str, int, str]]:
    for producer, transactions in records.transactions.items():
        for numbers in transactions:
            logged = sum((producer, number) in present for number in numbers)
            if 0 < logged < len(numbers):
                yield (producer, numbers[0], f"{logged} of {len(numbers)}")


def _judge_reader(reader: ReaderDeliveries, found: Sequence[LoggedEvent]) -> tuple[ReaderVerdict, list[str]]:
    examples: list[str] = []

    def count(what: str, which: Sequence[object]) -> int:
        examples.extend(f"{what} {reader.name}: {one}" for one in which[:MAX_EXAMPLES])
        return len(which)

    # Reversed, so that the first position counts if an event is in the log more than once.
    wanted = {event.id: event for event in reversed(found) if event.partition[0] in reader.topics}
    times = Counter(one for one in reader.delivered if one in wanted)
    repeated = [one for one, often in times.items() if often > 1]
    duplicates = 0
    if reader.exactly_once:
        duplicates = count("had its effect more than once in", repeated)
        duplicates += count("is a dead letter but had its effect in", [one for one in times if one in reader.dead])
    undelivered = [event for one, event in wanted.items() if one not in times and one not in reader.dead]
    return (
        ReaderVerdict(
            name=reader.name,
            wanted=len(wanted),
            delivered=len(times),
            repeated=0 if reader.exactly_once else len(repeated),
            dead=len(reader.dead),
            lost=count("never delivered to", [f"{event.id} at {event.position}" for event in undelivered]),
            duplicates=duplicates,
            out_of_order=count("delivered out of order to", _out_of_order(reader, wanted)),
        ),
        examples,
    )


def _out_of_order(reader: ReaderDeliveries, wanted: dict[str, LoggedEvent]) -> list[str]:
    """Events whose first delivery came after an event with a higher position. Repeated deliveries do not count."""
    if reader.order == "none":
        return []
    late: list[str] = []
    reached: dict[object, int] = {}
    seen: set[str] = set()
    for one in reader.delivered:
        event = wanted.get(one)
        if event is None or one in seen:
            continue
        seen.add(one)
        partition = event.partition if reader.order == "partition" else None
        if event.position < reached.get(partition, 0):
            late.append(f"{one} at {event.position}")
        reached[partition] = max(event.position, reached.get(partition, 0))
    return late


def _gaps(found: Sequence[LoggedEvent]) -> int:
    """Count the offsets that are not dense, in partitions with offsets."""
    partitions: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for event in found:
        if event.offset is not None:
            partitions[event.partition].append(event.offset)
    return sum(offset != expected for offsets in partitions.values() for expected, offset in enumerate(offsets))
