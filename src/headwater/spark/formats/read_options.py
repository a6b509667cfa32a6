"""What is asked of a read of the log from Spark: its options, and the conditions that Postgres can take over."""

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

from headwater.calls import Conditions
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
    """What the options of a read say."""

    dsn: str
    topics: tuple[str, ...] | None
    after: int | None
    epoch: int | None
    """The epoch in which `after` was a position of the log; None: the present one."""
    since: datetime | None
    from_end: bool
    up_to: int | None
    until: datetime | None
    skip_expired: bool
    archive: bool
    """Whether what retention took is read from archives."""
    partitions: int | None
    max_events: int
    max_bytes: int | None
    wait_seconds: float
    on_epoch_change: OnEpochChange
    """What to do if the log has lost events that were read: raise EpochChanged, or go on after the last one left."""
    in_epoch: int | None
    """End with EpochChanged in any other epoch than this, whether events were lost or not."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        # A path that was given to load() is not known either: the log has none.
        refuse_unknown_options(options, READ_OPTIONS, purpose=" for reading")
        given = {name: options[name] for name in READ_OPTIONS if name in options}
        parsed = cls(
            dsn=required_dsn(options),
            topics=_names(given.get("topics")),
            after=_whole_number("after", given.get("after"), least=0),
            epoch=_whole_number("epoch", given.get("epoch"), least=1),
            since=_time("since", given.get("since")),
            from_end=_truth("fromEnd", given.get("fromEnd")),
            up_to=_whole_number("upTo", given.get("upTo"), least=0),
            until=_time("until", given.get("until")),
            skip_expired=_truth("skipExpired", given.get("skipExpired")),
            archive=_truth("archive", given.get("archive", "true")),
            partitions=_whole_number("partitions", given.get("partitions"), least=1),
            max_events=_whole_number("maxEventsPerTrigger", given.get("maxEventsPerTrigger"), least=1) or 1_000_000,
            max_bytes=_whole_number("maxBytesPerTrigger", given.get("maxBytesPerTrigger"), least=1),
            wait_seconds=float(_whole_number("waitSeconds", given.get("waitSeconds"), least=0, default=5) or 0),
            on_epoch_change=on_epoch_change(given.get("onEpochChange", "stop"), "the option onEpochChange"),
            in_epoch=_whole_number("inEpoch", given.get("inEpoch"), least=1),
        )
        if parsed.epoch is not None and parsed.after is None:
            raise InvalidRequest("the option epoch belongs to a position", hint="Give it with the option after.")
        if (parsed.after is not None) + (parsed.since is not None) + parsed.from_end > 1:
            raise InvalidRequest("say where to start once: after, since or fromEnd")
        return parsed


def on_epoch_change(given: object, where: str) -> OnEpochChange:
    """The value of a setting that says what to do when the log has lost events; InvalidRequest for another value."""
    for known in ON_EPOCH_CHANGE:
        if given == known:
            return known
    raise InvalidRequest(f"{where} is {given!r}", hint=f"It is one of {', '.join(ON_EPOCH_CHANGE)}.")


def required_dsn(options: Mapping[str, str]) -> str:
    if "dsn" not in options:
        raise InvalidRequest(
            'the format "headwater" needs the option dsn', hint='Add .option("dsn", "postgresql://...").'
        )
    return options["dsn"]


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidRequest("the option topics names none", hint="Leave it out to read the whole log.")
    return names


def _whole_number(name: str, text: str | None, *, least: int, default: int | None = None) -> int | None:
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise InvalidRequest(f"the option {name} is {text!r}, not a whole number from {least}")
    return int(text)


def _truth(name: str, text: str | None) -> bool:
    if text is None or text.lower() in ("true", "false"):
        return (text or "").lower() == "true"
    raise InvalidRequest(f"the option {name} is {text!r}, neither true nor false")


def _time(name: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"the option {name} is {text!r}, not a time like 2026-01-31T12:00:00Z") from None
    if at.tzinfo is None:
        raise InvalidRequest(f"the option {name} needs a time zone: {text}Z, if it is UTC")
    return at


@dataclass(frozen=True, slots=True)
class Pushed:
    """The part of a query's conditions that Postgres can answer."""

    topics: frozenset[str] | None = None
    after: int = 0
    up_to: int | None = None
    conditions: Conditions = field(default_factory=Conditions)


def push(filters: Iterable[Filter]) -> tuple[Pushed, list[Filter]]:
    """What of these conditions, all of which must hold, Postgres takes over; and which Spark has to see to."""
    pushed = Pushed()
    left: list[Filter] = []
    for condition in filters:
        taken = _take(pushed, condition)
        if taken is None:
            left.append(condition)
        else:
            pushed = taken
    return pushed, left


def _take(pushed: Pushed, condition: Filter) -> Pushed | None:
    attribute: tuple[str, ...] = getattr(condition, "attribute", ())
    if len(attribute) != 1:
        return None
    column = attribute[0]
    if column == "position":
        return _take_position(pushed, condition)
    if column == "published_at":
        return _take_time(pushed, condition)
    values: Sequence[Any]
    if isinstance(condition, EqualTo):
        values = (condition.value,)
    elif isinstance(condition, In):
        values = tuple(condition.value)
    else:
        return None
    asked = pushed.conditions
    if column == "key" and all(isinstance(value, (bytes, bytearray)) for value in values):
        keys = {bytes(value) for value in values}
        keys = keys if asked.keys is None else keys & set(asked.keys)
        return replace(pushed, conditions=replace(asked, keys=tuple(sorted(keys))))
    if not all(isinstance(value, str) for value in values):
        return None
    if column == "topic":
        names = frozenset(values)
        return replace(pushed, topics=names if pushed.topics is None else pushed.topics & names)
    if column == "type":
        types = set(values) if asked.types is None else set(values) & set(asked.types)
        return replace(pushed, conditions=replace(asked, types=tuple(sorted(types))))
    return None


def _take_position(pushed: Pushed, condition: Filter) -> Pushed | None:
    value = getattr(condition, "value", None)
    if not isinstance(value, int):
        return None
    after, up_to = pushed.after, pushed.up_to

    def not_above(limit: int) -> int:
        return limit if up_to is None else min(up_to, limit)

    match condition:
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


def _take_time(pushed: Pushed, condition: Filter) -> Pushed | None:
    value = getattr(condition, "value", None)
    if not isinstance(value, datetime):
        return None
    # Spark's own times are UTC, whether they say so or not.
    at = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    asked = pushed.conditions
    tick = timedelta(microseconds=1)
    match condition:
        case GreaterThan():
            asked = replace(asked, published_from=_later(asked.published_from, at + tick))
        case GreaterThanOrEqual():
            asked = replace(asked, published_from=_later(asked.published_from, at))
        case LessThan():
            asked = replace(asked, published_before=_earlier(asked.published_before, at))
        case LessThanOrEqual():
            asked = replace(asked, published_before=_earlier(asked.published_before, at + tick))
        case _:
            return None
    return replace(pushed, conditions=asked)


def _later(one: datetime | None, other: datetime) -> datetime:
    return other if one is None else max(one, other)


def _earlier(one: datetime | None, other: datetime) -> datetime:
    return other if one is None else min(one, other)


def within(conditions: Conditions, since: datetime | None, until: datetime | None) -> Conditions:
    """The conditions, and the times that the options name."""
    if since is not None:
        conditions = replace(conditions, published_from=_later(conditions.published_from, since))
    if until is not None:
        conditions = replace(conditions, published_before=_earlier(conditions.published_before, until))
    return conditions
