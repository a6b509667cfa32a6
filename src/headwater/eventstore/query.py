"""What is asked of an event store and what it answers: events, queries, conditions, and whether an event matches.

No I/O here. A query means the same in Postgres (`database/schema/functions/event_store.sql`), in SQLite and here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, NamedTuple

from headwater.errors import AppendConflict, EpochChanged, InvalidEvent, InvalidRequest

JSON_TYPE = "application/json"
MAX_TAGS = 100
MAX_TAG_CHARACTERS = 255
MAX_TYPE_CHARACTERS = 200
MAX_ITEMS = 100
# What Postgres can hold of a number, in digits before and behind its point.
MAX_INTEGER_DIGITS = 131_072
MAX_FRACTION_DIGITS = 16_383
MAX_EXPONENT = (1 << 30) - 1
MAX_PLAIN_INTEGER = 10**100
LAST_POSITION = (1 << 63) - 1
# How deep JSON may be that is appended: Postgres reads some thousand levels, Python's own reader not even a thousand.
MAX_JSON_DEPTH = 200

_encode = json.JSONEncoder(ensure_ascii=False).encode

FieldValue = str | int | float | bool | Decimal
"""What a field may be compared with. The comparison is of text: `5` and `"5"` are equal, `1` and `1.0` are not."""


class NewStoreEvent(NamedTuple):
    """An event as it is handed to an event store. Without an id it gets one."""

    type: str
    data: Any = None
    tags: Sequence[str] = ()
    metadata: Mapping[str, Any] | None = None
    event_id: str | None = None
    content_type: str | None = None


class StoreEvent(NamedTuple):
    """One event of an event store. `topic_offset` counts them without a gap; positions may have gaps."""

    position: int
    topic_offset: int
    event_id: str | None
    type: str | None
    tags: tuple[str, ...]
    metadata: Mapping[str, Any] | None
    content_type: str | None
    payload: bytes | None
    published_at: datetime

    @property
    def data(self) -> Any:
        """The payload read as JSON, each time anew."""
        return None if self.payload is None else json.loads(self.payload)


def size_of(event: StoreEvent) -> int:
    """How many bytes an event has, in all of its parts. (The same in `headwater.read_matching`.)"""
    return (
        len(event.payload or b"")
        + (0 if event.metadata is None else len(_encode(event.metadata).encode()))
        + sum(len(tag.encode()) for tag in event.tags)
        + len((event.type or "").encode())
        + len((event.event_id or "").encode())
        + len((event.content_type or "").encode())
    )


class Appended(NamedTuple):
    """Where the events of an append are. `repeated`: they were there already, from an earlier try."""

    positions: tuple[int, ...]
    repeated: bool

    @property
    def position(self) -> int:
        """Of the last event."""
        return self.positions[-1]


class Verdict(NamedTuple):
    """What became of one append of a group: its positions, or what stood in its way.

    `epoch` and `common_position`: the position of its condition is of another history; these are of the present one.
    """

    positions: tuple[int, ...] | None
    repeated: bool
    moved_to: int | None
    taken_id: str | None
    epoch: int | None = None
    common_position: int | None = None


class StorePage(NamedTuple):
    """A batch of events, and the epoch that their positions are of. Hand it back with a position: see `epoch`."""

    events: Sequence[StoreEvent]
    epoch: int


class StoreLease(NamedTuple):
    """One competitor's right to events of a store until a time, proven by the token."""

    group: str
    token: int
    events: Sequence[StoreEvent]


@dataclass(frozen=True, slots=True)
class Item:
    """One of these types, all of these tags, and all of these top-level fields of the data. Unsaid is unasked."""

    types: Sequence[str] = ()
    tags: Sequence[str] = ()
    fields: Mapping[str, FieldValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        types, tags = distinct(self.types, "types"), distinct(self.tags, "tags")
        if len(types) > MAX_TAGS or len(tags) > MAX_TAGS:
            raise InvalidRequest(f"an item of a query has up to {MAX_TAGS} types and as many tags")
        object.__setattr__(self, "types", types)
        object.__setattr__(self, "tags", tags)
        if self.fields:
            object.__setattr__(self, "fields", {checked_field_name(k): field_text(v) for k, v in self.fields.items()})

    def matches(self, event: StoreEvent) -> bool:
        """Whether the event has all that the item asks for."""
        return (
            (not self.types or event.type in self.types)
            and all(tag in event.tags for tag in self.tags)
            and (not self.fields or self._fields_match(event.payload, event.content_type))
        )

    def _fields_match(self, payload: bytes | None, content_type: str | None) -> bool:
        data = json_of(payload, content_type)
        return isinstance(data, dict) and all(scalar_text(data.get(k)) == v for k, v in self.fields.items())

    def as_json(self) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        if self.types:
            parts["types"] = list(self.types)
        if self.tags:
            parts["tags"] = list(self.tags)
        if self.fields:
            parts["fields"] = dict(self.fields)
        return parts


@dataclass(frozen=True, slots=True)
class Query:
    """Matches what any of its items matches; without items, every event."""

    items: Sequence[Item] = ()

    def __post_init__(self) -> None:
        items = tuple(self.items)
        if not all(isinstance(item, Item) for item in items):
            raise InvalidRequest("a query is made of items", hint="Query.of(tags=[...]) makes one of a single item.")
        if len(items) > MAX_ITEMS:
            raise InvalidRequest(f"a query has up to {MAX_ITEMS} items, this one has {len(items)}")
        object.__setattr__(self, "items", items)

    @classmethod
    def of(
        cls,
        *,
        types: Sequence[str] = (),
        tags: Sequence[str] = (),
        fields: Mapping[str, FieldValue] | None = None,
    ) -> Query:
        """A query of one item."""
        return cls((Item(types, tags, fields or {}),))

    def __or__(self, other: Query) -> Query:
        if not self.items or not other.items:
            return Query()
        return Query((*self.items, *other.items))

    def matches(self, event: StoreEvent) -> bool:
        return not self.items or any(item.matches(event) for item in self.items)

    def as_json(self) -> str:
        return json.dumps([item.as_json() for item in self.items], ensure_ascii=False)


EVERYTHING = Query()


@dataclass(frozen=True, slots=True)
class NoMatchAfter:
    """The condition that nothing after a position matches the query (dcb.events): nothing came since I looked.

    With `epoch`, the one in which the position was read, the append is refused with EpochChanged if the log is in
    another by now: what was read may be gone, and other events may have its positions.
    """

    query: Query
    position: int = 0
    epoch: int | None = None

    def __post_init__(self) -> None:
        _refuse_negative(self.position)


@dataclass(frozen=True, slots=True)
class LatestMatchIs:
    """The condition that the latest match is at exactly this position; None: that nothing matches at all.

    `epoch` as in NoMatchAfter.
    """

    query: Query
    position: int | None
    epoch: int | None = None

    def __post_init__(self) -> None:
        _refuse_negative(self.position or 0)


Condition = NoMatchAfter | LatestMatchIs


@dataclass(frozen=True, slots=True)
class Latest:
    """The latest event of each item of a query, None where there is none, and the position of the latest of all.

    `epoch` is the one that the positions are of. A store on SQLite has one epoch, 0.
    """

    events: tuple[StoreEvent | None, ...]
    position: int
    epoch: int = 0


def outcome(verdict: Verdict, condition: Condition | None) -> Appended:
    """What a verdict means to whoever appended."""
    if verdict.positions is not None:
        return Appended(verdict.positions, verdict.repeated)
    if verdict.moved_to is not None:
        expected = (condition.position or 0) if condition is not None else 0
        raise AppendConflict(
            f"the context of this append moved: its latest match is at {verdict.moved_to}, not at {expected}"
            if isinstance(condition, LatestMatchIs)
            else f"the context of this append moved: there is a match at {verdict.moved_to}, after {expected}",
            hint="Read the context again, decide again, append again.",
            detail={"actual_position": verdict.moved_to, "expected_position": expected},
        )
    if verdict.epoch is not None:
        expected = (condition.position or 0) if condition is not None else 0
        raise EpochChanged(
            f"position {expected} of the condition is not of the present history, epoch {verdict.epoch}: "
            f"positions after {verdict.common_position} may have been issued again",
            hint="Postgres crashed, failed over or was restored. Read the context again, decide again, append again.",
            detail={
                "epoch": verdict.epoch,
                "requested_epoch": None if condition is None else condition.epoch,
                "common_position": verdict.common_position,
            },
        )
    raise InvalidRequest(
        f'the event id "{verdict.taken_id}" belongs to another append',
        hint="To repeat an append, send all of its events with the same ids; a new event needs a new id.",
        detail={"event_id": verdict.taken_id},
    )


def distinct(values: Iterable[str], what: str) -> tuple[str, ...]:
    """Types or tags without repeats, in the order given; refuses what cannot be one."""
    if values == ():
        return ()
    if isinstance(values, str):
        raise InvalidRequest(f"{what} are a list of texts, not one text", hint=f'Write {what}=["{values}"].')
    longest = MAX_TYPE_CHARACTERS if what == "types" else MAX_TAG_CHARACTERS
    found = tuple(values)
    for value in found:
        if not isinstance(value, str) or not 1 <= len(value) <= longest:
            raise InvalidEvent(f"each of the {what} is a text of 1 to {longest} characters, not {value!r}")
        if not value.isascii() or "\x00" in value:
            _refuse_strange_text(value, what)
    return found if len(found) < 2 else tuple(dict.fromkeys(found))


def _refuse_strange_text(value: str, what: str) -> None:
    if "\x00" in value:
        raise InvalidEvent(f"{what} cannot hold the character NUL")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidEvent(f"{what} are text that UTF-8 can hold: {error}") from None


def _refuse_negative(position: int) -> None:
    if not isinstance(position, int) or isinstance(position, bool) or not 0 <= position < 1 << 62:
        raise InvalidRequest(f"a position is not negative, this one is {position!r}")


def refuse_beyond(*positions: int | None) -> None:
    """Refuse what no place of a log can be. None is not said."""
    for position in positions:
        if position is not None and (
            not isinstance(position, int)
            or isinstance(position, bool)
            or not -LAST_POSITION <= position <= LAST_POSITION
        ):
            raise InvalidRequest(f"a position is a whole number of 64 bits, not {position!r}")


def checked_field_name(name: str) -> str:
    """The name of a field; refuses what cannot be one."""
    if not isinstance(name, str):
        raise InvalidRequest(f"a field is named by a text, not by {name!r}")
    _refuse_strange_text(name, "fields")
    return name


def field_text(value: FieldValue) -> str:
    """What a field is compared with, as text."""
    # A float is what JSON would make of it.
    rendered = scalar_text(Decimal(json.dumps(value)) if type(value) is float else value)
    if rendered is None:
        raise InvalidRequest(f"a field is compared with a text, a number or a boolean, not with {value!r}")
    _refuse_strange_text(rendered, "fields")
    return rendered


def scalar_text(value: Any) -> str | None:
    """A scalar of JSON as Postgres shows it; None for what is none."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # Python makes no text of more than some thousand digits, unless it comes from a Decimal.
        return str(value) if -MAX_PLAIN_INTEGER < value < MAX_PLAIN_INTEGER else f"{Decimal(value):f}"
    if isinstance(value, Decimal):
        # Postgres knows no negative zero.
        return f"{abs(value) if value.is_zero() else value:f}"
    return None


class _NotStorable(ValueError):
    """A number that Postgres cannot hold, so that the JSON around it is none."""


def _number(text: str) -> Decimal:
    if abs(int(text.lower().partition("e")[2] or 0)) > MAX_EXPONENT:
        raise _NotStorable(text)
    number = Decimal(text)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    # Nothing, however often, has no digits before the point.
    if (number and number.adjusted() >= MAX_INTEGER_DIGITS) or -exponent > MAX_FRACTION_DIGITS:
        raise _NotStorable(text)
    return number


def _refuse_constant(text: str) -> Any:
    raise _NotStorable(text)


_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_decode = json.JSONDecoder(parse_float=_number, parse_int=_number, parse_constant=_refuse_constant).decode


def refuse_too_deep(payload: bytes, content_type: str | None) -> None:
    """Refuse JSON that not everybody could read, or one matcher would find what another does not."""
    if content_type not in (None, JSON_TYPE) or payload.count(b"[") + payload.count(b"{") <= MAX_JSON_DEPTH:
        return
    depth = deepest = 0
    for bracket in _BRACKET.findall(_TEXT.sub(b"", payload)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_JSON_DEPTH and (content_type is not None or _may_be_json(payload)):
        raise InvalidEvent(
            f"JSON is up to {MAX_JSON_DEPTH} levels deep, this is {deepest}",
            hint="Send bytes with a content type of their own.",
        )


def _may_be_json(payload: bytes) -> bool:
    try:
        json.loads(payload)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def json_of(payload: bytes | None, content_type: str | None) -> Any:
    """The payload as Postgres would read it as jsonb; None where it would not."""
    return None if payload is None or content_type not in (None, JSON_TYPE) else _parsed(payload)


@lru_cache(maxsize=64)
def _parsed(payload: bytes) -> Any:
    # Cached: many ask about one event.
    try:
        text = payload.decode()
        data = _decode(text)
        if "\\u" in text:
            _refuse_strange_texts(data)
    except (ValueError, RecursionError):
        return None
    return data


def _refuse_strange_texts(data: Any) -> None:
    """jsonb holds neither NUL nor half of a surrogate pair, wherever in the document they are."""
    if isinstance(data, str):
        if "\x00" in data:
            raise _NotStorable(data)
        data.encode()
    elif isinstance(data, dict):
        for key, value in data.items():
            _refuse_strange_texts(key)
            _refuse_strange_texts(value)
    elif isinstance(data, list):
        for value in data:
            _refuse_strange_texts(value)
