"""Whether anything was lost: what producers and readers noted, compared with what the log has at the end. Pure.

Events are known by producer and number, never by position: after a crash or a failover a position may be another
event's. What was acknowledged while a standby was cut off, and is not in the log of the standby that took over, is
counted as lost with the old primary: asynchronous replication promises no more. Everything that is in the log at the
end must have come to every reader of its topic.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from headwater.trials.chaos.cast import Order
from headwater.trials.chaos.cluster import Divergence
from headwater.trials.chaos.journal import Line

MAX_EXAMPLES: Final = 3


class Found(NamedTuple):
    """An event that is in the log: which producer made it, as which of its own, and where it is."""

    position: int
    producer: str
    number: int
    lane: tuple[str, int]
    offset: int | None

    @property
    def id(self) -> str:
        return f"{self.producer}/{self.number}"


@dataclass(frozen=True, slots=True)
class Reader:
    """What one reader got: every delivery in its order, and what its queue has given up on."""

    name: str
    topics: frozenset[str]
    delivered: Sequence[str]
    dead: frozenset[str] = frozenset()
    order: Order = "none"
    # Its effects are in the transaction that acknowledges, so once means once.
    exactly_once: bool = False


@dataclass(frozen=True, slots=True)
class ReaderVerdict:
    """What came of one reader, in events. `wanted`: those of its topics that are in the log."""

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
    """What came of a trial, in events."""

    produced: int
    acknowledged: int
    # Deliveries that ended well, over all readers.
    processed: int
    dead: int
    # Acknowledged and not in the log, or in the log and for some reader neither delivered nor dead.
    lost: int
    # Acknowledged by a primary whose standby did not have them when it took over.
    lost_with_old_primary: int
    # In the log twice, or with two effects where there must be one.
    duplicates: int
    # Of transactions of which a part is in the log.
    torn: int
    # In the log though their transaction was rolled back, or though no producer made them.
    invented: int
    # Missing or doubled offsets in lanes that count without a gap.
    gaps: int
    # Came to a reader for the first time after an event that is behind them in the log.
    out_of_order: int
    # Delivered again to a reader that may see an event twice: allowed, and worth knowing.
    repeated: int
    readers: tuple[ReaderVerdict, ...]
    examples: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicates or self.torn or self.invented or self.gaps or self.out_of_order)


class _Notes(NamedTuple):
    """What producers noted."""

    transactions: dict[str, list[Sequence[int]]]
    tried_at: dict[tuple[str, int], float]
    acknowledged_at: dict[tuple[str, int], float]
    rolled_back: set[tuple[str, int]]


def judge(
    lines: Iterable[Line],
    found: Sequence[Found],
    readers: Iterable[Reader],
    divergences: Sequence[Divergence] = (),
) -> Verdict:
    """Compare the producers' notes with the log, and the log with what readers got."""
    notes = _sort(lines)
    present = Counter((event.producer, event.number) for event in found)
    examples: list[str] = []

    def count(what: str, which: Sequence[object]) -> int:
        examples.extend(f"{what}: {one}" for one in which[:MAX_EXAMPLES])
        return len(which)

    missing = [one for one in notes.acknowledged_at if one not in present]
    excused = [one for one in missing if _is_excused(notes, one, divergences)]
    gone = set(excused)
    lost = count("acknowledged and not in the log", [one for one in missing if one not in gone])
    duplicates = count("in the log more than once", [one for one, times in present.items() if times > 1])
    torn = count("a part of a transaction", list(_torn(notes, present)))
    invented = count("in the log and never made", [one for one in present if one not in notes.tried_at])
    invented += count("in the log though rolled back", [one for one in notes.rolled_back if one in present])

    judged: list[ReaderVerdict] = []
    for reader in readers:
        verdict, more = _judge_reader(reader, found)
        judged.append(verdict)
        examples += more
    return Verdict(
        produced=len(found),
        acknowledged=len(notes.acknowledged_at),
        processed=sum(one.delivered for one in judged),
        dead=sum(one.dead for one in judged),
        lost=lost + sum(one.lost for one in judged),
        lost_with_old_primary=len(excused),
        duplicates=duplicates + sum(one.duplicates for one in judged),
        torn=torn,
        invented=invented,
        gaps=_gaps(found),
        out_of_order=sum(one.out_of_order for one in judged),
        repeated=sum(one.repeated for one in judged),
        readers=tuple(judged),
        examples=tuple(examples),
    )


def _sort(lines: Iterable[Line]) -> _Notes:
    notes = _Notes({}, {}, {}, set())
    for line in lines:
        events = [(line.who, number) for number in line.numbers]
        match line.kind:
            case "tried":
                notes.transactions.setdefault(line.who, []).append(line.numbers)
                notes.tried_at.update(dict.fromkeys(events, line.at))
            case "acknowledged":
                notes.acknowledged_at.update(dict.fromkeys(events, line.at))
            case "rolled back":
                notes.rolled_back.update(events)
    return notes


def _is_excused(notes: _Notes, event: tuple[str, int], divergences: Sequence[Divergence]) -> bool:
    """Whether an old primary may have acknowledged it while its standby was cut off. A note may come late: what counts
    is that it was tried before that primary ended, and acknowledged after the standby was cut off."""
    acknowledged_at = notes.acknowledged_at[event]
    tried_at = notes.tried_at.get(event, acknowledged_at)
    return any(tried_at < one.ended and acknowledged_at >= one.began for one in divergences)


def _torn(notes: _Notes, present: Counter[tuple[str, int]]) -> Iterable[tuple[str, int, str]]:
    for producer, transactions in notes.transactions.items():
        for numbers in transactions:
            there = sum((producer, number) in present for number in numbers)
            if 0 < there < len(numbers):
                yield (producer, numbers[0], f"{there} of {len(numbers)}")


def _judge_reader(reader: Reader, found: Sequence[Found]) -> tuple[ReaderVerdict, list[str]]:
    examples: list[str] = []

    def count(what: str, which: Sequence[object]) -> int:
        examples.extend(f"{what} {reader.name}: {one}" for one in which[:MAX_EXAMPLES])
        return len(which)

    # By its first position: what a producer has sent again is in the log more than once.
    wanted = {event.id: event for event in reversed(found) if event.lane[0] in reader.topics}
    times = Counter(one for one in reader.delivered if one in wanted)
    again = [one for one, often in times.items() if often > 1]
    duplicates = 0
    if reader.exactly_once:
        duplicates = count("had its effect more than once in", again)
        duplicates += count("is dead and had its effect in", [one for one in times if one in reader.dead])
    never = [event for one, event in wanted.items() if one not in times and one not in reader.dead]
    return (
        ReaderVerdict(
            name=reader.name,
            wanted=len(wanted),
            delivered=len(times),
            repeated=0 if reader.exactly_once else len(again),
            dead=len(reader.dead),
            lost=count("never came to", [f"{event.id} at {event.position}" for event in never]),
            duplicates=duplicates,
            out_of_order=count("came too late to", _out_of_order(reader, wanted)),
        ),
        examples,
    )


def _out_of_order(reader: Reader, wanted: dict[str, Found]) -> list[str]:
    """Events that came for the first time after one that is behind them. A repetition may be anywhere."""
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
        lane = event.lane if reader.order == "partition" else None
        if event.position < reached.get(lane, 0):
            late.append(f"{one} at {event.position}")
        reached[lane] = max(event.position, reached.get(lane, 0))
    return late


def _gaps(found: Sequence[Found]) -> int:
    """How many offsets are not where the next one belongs, in the lanes that have offsets."""
    lanes: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for event in found:
        if event.offset is not None:
            lanes[event.lane].append(event.offset)
    return sum(offset != place for offsets in lanes.values() for place, offset in enumerate(offsets))
