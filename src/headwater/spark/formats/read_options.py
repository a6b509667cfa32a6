"""Options of a log read from Spark, and the filters that are pushed down to Postgres."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from headwater.calls.pipelines import Filters
from headwater.errors import InvalidRequest
from headwater.spark.options import refuse_unknown_options
from headwater.spark.pipelines.batch import ON_EPOCH_CHANGE, OnEpochChange

READ_OPTIONS = (
    "dsn",
    "topics",
    "after",
    "epoch",
    "since",
    "fromEnd",
    "upTo",
    "until",
    "skipExpired",
    "archive",
    "partitions",
    "maxEventsPerTrigger",
    "maxBytesPerTrigger",
    "waitSeconds",
    "onEpochChange",
    "inEpoch",
)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The parsed options of a read."""

    dsn: str
    topics: tuple[str, ...] | None
    after: int | None
    epoch: int | None
    """The epoch of the position `after`; None: the current epoch."""
    since: datetime | None
    from_end: bool
    up_to: int | None
    until: datetime | None
    skip_expired: bool
    archive: bool
    """Whether events removed by retention are read from archives."""
    partitions: int | None
    max_events: int
    max_bytes: int | None
    wait_seconds: float
    on_epoch_change: OnEpochChange
    """What to do if the log has lost events that were read: raise EpochChanged, or continue after the last one left."""
    in_epoch: int | None
    """Raise EpochChanged in any other epoch, whether events were lost or not."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        # This also rejects a path given to load(): the log has none.
        refuse_unknown_options(options, READ_OPTIONS, purpose=" for reading")
        given = {name: options[name] for name in READ_OPTIONS if name in options}
        parsed = cls(
            dsn=required_dsn(options),
            topics=_names(given.get("topics")),
            after=_whole_number("after", given.get("after"), least=0),
            epoch=_whole_number("epoch", given.get("epoch"), least=1),
            since=_time("since", given.get("since")),
            from_end=_boolean("fromEnd", given.get("fromEnd")),
            up_to=_whole_number("upTo", given.get("upTo"), least=0),
            until=_time("until", given.get("until")),
            skip_expired=_boolean("skipExpired", given.get("skipExpired")),
            archive=_boolean("archive", given.get("archive", "true")),
            partitions=_whole_number("partitions", given.get("partitions"), least=1),
            max_events=_whole_number("maxEventsPerTrigger", given.get("maxEventsPerTrigger"), least=1) or 1_000_000,
            max_bytes=_whole_number("maxBytesPerTrigger", given.get("maxBytesPerTrigger"), least=1),
            wait_seconds=float(_whole_number("waitSeconds", given.get("waitSeconds"), least=0, default=5) or 0),
            on_epoch_change=on_epoch_change(given.get("onEpochChange", "stop"), "the option onEpochChange"),
            in_epoch=_whole_number("inEpoch", given.get("inEpoch"), least=1),
        )
        if parsed.epoch is not None and parsed.after is None:
            raise InvalidRequest("the option epoch requires the option after", hint="Set both options.")
        if (parsed.after is not None) + (parsed.since is not None) + parsed.from_end > 1:
            raise InvalidRequest("give only one of the options after, since and fromEnd")
        return parsed


def on_epoch_change(given: object, where: str) -> OnEpochChange:
    """Parse the setting for what to do when the log has lost events."""
    for known in ON_EPOCH_CHANGE:
        if given == known:
            return known
    raise InvalidRequest(f"{where} is {given!r}: expected {' or '.join(ON_EPOCH_CHANGE)}")


def required_dsn(options: Mapping[str, str]) -> str:
    if "dsn" not in options:
        raise InvalidRequest(
            'the format "headwater" requires the option dsn', hint='Add .option("dsn", "postgresql://...").'
        )
    return options["dsn"]


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidRequest("the option topics is empty", hint="Omit it to read the whole log.")
    return names


def _whole_number(name: str, text: str | None, *, least: int, default: int | None = None) -> int | None:
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise InvalidRequest(f"invalid option {name} {text!r}: expected a whole number from {least}")
    return int(text)


def _boolean(name: str, text: str | None) -> bool:
    if text is None or text.lower() in ("true", "false"):
        return (text or "").lower() == "true"
    raise InvalidRequest(f"invalid option {name} {text!r}: expected true or false")


def _time(name: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"invalid option {name} {text!r}: expected a time like 2026-01-31T12:00:00Z") from None
    if at.tzinfo is None:
        raise InvalidRequest(f"the option {name} has no time zone: write {text}Z for UTC")
    return at


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """The filters of a query that Postgres evaluates."""

    topics: frozenset[str] | None = None
    after: int = 0
    up_to: int | None = None
    filters: Filters = field(default_factory=Filters)


def push(filters: Iterable[Filter]) -> tuple[PushedFilters, list[Filter]]:
    """Split filters, all of which must hold, into those that Postgres evaluates and those left to Spark."""
    pushed = PushedFilters()
    left: list[Filter] = []
    for filter in filters:
        taken = _take(pushed, filter)
        if taken is None:
            left.append(filter)
        else:
            pushed = taken
    return pushed, left


def _take(pushed: PushedFilters, filter: Filter) -> PushedFilters | None:
    attribute: tuple[str, ...] = getattr(filter, "attribute", ())
    if len(attribute) != 1:
        return None
    column = attribute[0]
    if column == "position":
        return _take_position(pushed, filter)
    if column == "published_at":
        return _take_time(pushed, filter)
    values: Sequence[Any]
    if isinstance(filter, EqualTo):
        values = (filter.value,)
    elif isinstance(filter, In):
        values = tuple(filter.value)
    else:
        return None
    current = pushed.filters
    if column == "key" and all(isinstance(value, (bytes, bytearray)) for value in values):
        keys = {bytes(value) for value in values}
        keys = keys if current.keys is None else keys & set(current.keys)
        return replace(pushed, filters=replace(current, keys=tuple(sorted(keys))))
    if not all(isinstance(value, str) for value in values):
        return None
    if column == "topic":
        names = frozenset(values)
        return replace(pushed, topics=names if pushed.topics is None else pushed.topics & names)
    if column == "type":
        types = set(values) if current.types is None else set(values) & set(current.types)
        return replace(pushed, filters=replace(current, types=tuple(sorted(types))))
    return None


def _take_position(pushed: PushedFilters, filter: Filter) -> PushedFilters | None:
    value = getattr(filter, "value", None)
    if not isinstance(value, int):
        return None
    after, up_to = pushed.after, pushed.up_to

    def not_above(limit: int) -> int:
        return limit if up_to is None else min(up_to, limit)

    match filter:
        case EqualTo():
            return replace(pushed, after=max(after, value - 1), up_to=not_above(value))
        case GreaterThan():
            return replace(pushed, after=max(after, value))
        case GreaterThanOrEqual():
            return replace(pushed, after=max(after, value - 1))
        case LessThan():
            return replace(pushed, up_to=not_above(value - 1))
        case LessThanOrEqual():
            return replace(pushed, up_to=not_above(value))
    return None


def _take_time(pushed: PushedFilters, filter: Filter) -> PushedFilters | None:
    value = getattr(filter, "value", None)
    if not isinstance(value, datetime):
        return None
    # Spark's times are UTC, also without a time zone.
    at = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    current = pushed.filters
    tick = timedelta(microseconds=1)
    match filter:
        case GreaterThan():
            current = replace(current, published_from=_later(current.published_from, at + tick))
        case GreaterThanOrEqual():
            current = replace(current, published_from=_later(current.published_from, at))
        case LessThan():
            current = replace(current, published_before=_earlier(current.published_before, at))
        case LessThanOrEqual():
            current = replace(current, published_before=_earlier(current.published_before, at + tick))
        case _:
            return None
    return replace(pushed, filters=current)


def _later(one: datetime | None, other: datetime) -> datetime:
    return other if one is None else max(one, other)


def _earlier(one: datetime | None, other: datetime) -> datetime:
    return other if one is None else min(one, other)


def add_time_range(filters: Filters, since: datetime | None, until: datetime | None) -> Filters:
    """Add the times of the options to the filters."""
    if since is not None:
        filters = replace(filters, published_from=_later(filters.published_from, since))
    if until is not None:
        filters = replace(filters, published_before=_earlier(filters.published_before, until))
    return filters
