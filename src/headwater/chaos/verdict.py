"""Whether anything was lost: what the witnesses noted, held against what the log has. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from headwater.chaos.journal import Line

SHOWN: Final = 10


class Found(NamedTuple):
    """An event that is in the log: who made it, as which of its own, and where it is."""

    position: int
    producer: str
    number: int
    lane: tuple[str, int]
    offset: int | None


@dataclass(frozen=True, slots=True)
class Consumer:
    """What one consumer made of the events. `times`: how often it was done with each position."""

    name: str
    times: Mapping[int, int]
    dead: frozenset[int]
    # Which topics it reads, by the lanes' first part.
    topics: frozenset[str]
    # Its effects are in the transaction that acknowledges, so once means once.
    exactly_once: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a trial, in events."""

    produced: int
    acknowledged: int
    # Deliveries that ended well, over all consumers.
    processed: int
    dead: int
    # Acknowledged and not in the log, or in the log and for some consumer neither done nor dead.
    lost: int
    # In the log twice, or with two effects where there must be one.
    duplicates: int
    # Of transactions of which a part is in the log.
    torn: int
    # In the log though their transaction was rolled back, or nobody made them.
    invented: int
    # Missing or doubled offsets in lanes that count without a gap.
    gaps: int
    # Delivered again to a consumer that may see an event twice: allowed, and worth knowing.
    repeated: int
    examples: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not (self.lost or self.duplicates or self.torn or self.invented or self.gaps)


def judge(lines: Iterable[Line], found: Sequence[Found], consumers: Sequence[Consumer]) -> Verdict:
    """Hold what was noted by producers against the log, and the log against what consumers did."""
    tried: defaultdict[str, list[Sequence[int]]] = defaultdict(list)
    acknowledged: defaultdict[str, set[int]] = defaultdict(set)
    rolled_back: defaultdict[str, set[int]] = defaultdict(set)
    for line in lines:
        match line.kind:
            case "tried":
                tried[line.who].append(line.numbers)
            case "acknowledged":
                acknowledged[line.who].update(line.numbers)
            case "rolled back":
                rolled_back[line.who].update(line.numbers)
    there = Counter((event.producer, event.number) for event in found)
    examples: list[str] = []

    def tell(what: str, which: Sequence[object]) -> int:
        examples.extend(f"{what}: {one}" for one in which[:SHOWN])
        return len(which)

    missing = [(who, n) for who, numbers in acknowledged.items() for n in sorted(numbers) if (who, n) not in there]
    lost = tell("acknowledged and not in the log", missing)
    duplicates = tell("in the log more than once", [one for one, times in there.items() if times > 1])
    parts: list[tuple[str, int, str]] = []
    known: set[tuple[str, int]] = set()
    for who, transactions in tried.items():
        for numbers in transactions:
            known.update((who, n) for n in numbers)
            present = sum((who, n) in there for n in numbers)
            if 0 < present < len(numbers):
                parts.append((who, numbers[0], f"{present} of {len(numbers)}"))
    torn = tell("a part of a transaction", parts)
    invented = tell("in the log and never made", [one for one in there if one not in known])
    invented += tell(
        "in the log though rolled back",
        [(w, n) for w, numbers in rolled_back.items() for n in numbers if (w, n) in there],
    )

    repeated = processed = dead = 0
    for consumer in consumers:
        wanted = [event.position for event in found if event.lane[0] in consumer.topics]
        done = [position for position in wanted if position in consumer.times]
        processed += len(done)
        dead += len(consumer.dead)
        never = [p for p in wanted if p not in consumer.times and p not in consumer.dead]
        lost += tell(f"never came to {consumer.name}", never)
        again = [position for position in done if consumer.times[position] > 1]
        if consumer.exactly_once:
            duplicates += tell(f"had its effect more than once in {consumer.name}", again)
            both = [position for position in done if position in consumer.dead]
            duplicates += tell(f"is dead and had its effect in {consumer.name}", both)
        else:
            repeated += len(again)

    return Verdict(
        produced=len(found),
        acknowledged=sum(len(numbers) for numbers in acknowledged.values()),
        processed=processed,
        dead=dead,
        lost=lost,
        duplicates=duplicates,
        torn=torn,
        invented=invented,
        gaps=_gaps(found),
        repeated=repeated,
        examples=tuple(examples),
    )


def _gaps(found: Sequence[Found]) -> int:
    """How many offsets are not where the next one belongs, in the lanes that have offsets."""
    lanes: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for event in found:
        if event.offset is not None:
            lanes[event.lane].append(event.offset)
    return sum(offset != place for offsets in lanes.values() for place, offset in enumerate(offsets))
