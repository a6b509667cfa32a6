"""Events, queries and append conditions of an event store, and whether an event matches a query.

No I/O. A query means the same in Postgres (`database/schema/functions/event_store.sql`), in SQLite and here.
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
# The digits before and after the decimal point that Postgres can store.
MAX_INTEGER_DIGITS = 131_072
MAX_FRACTION_DIGITS = 16_383
MAX_EXPONENT = (1 << 30) - 1
MAX_PLAIN_INTEGER = 10**100
LAST_POSITION = (1 << 63) - 1
# Nesting limit of appended JSON: Postgres can parse some thousand levels, Python's parser less than a thousand.
MAX_JSON_DEPTH = 200

_encode = json.JSONEncoder(ensure_ascii=False).encode

FieldValue = str | int | float | bool | Decimal
"""A value that a field is compared with. The comparison is of text: `5` and `"5"` are equal, `1` and `1.0` are not."""


class NewStoreEvent(NamedTuple):
    """An event to append. Without an id, it gets a new one."""

    type: str
    data: Any = None
    tags: Sequence[str] = ()
    metadata: Mapping[str, Any] | None = None
    event_id: str | None = None
    content_type: str | None = None


class StoreEvent(NamedTuple):
    """An event of an event store. `topic_offset` counts the events without gaps; positions may have gaps."""

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
        """The payload decoded as JSON. Decodes on every access."""
        return None if self.payload is None else json.loads(self.payload)


def size_of(event: StoreEvent) -> int:
    """The size of an event in bytes, in all of its parts. (The same as in `headwater.read_matching`.)"""
    return (
        len(event.payload or b"")
        + (0 if event.metadata is None else len(_encode(event.metadata).encode()))
        + sum(len(tag.encode()) for tag in event.tags)
        + len((event.type or "").encode())
        + len((event.event_id or "").encode())
        + len((event.content_type or "").encode())
    )


class Appended(NamedTuple):
    """The positions of the appended events. `repeated`: an earlier attempt had already appended them."""

    positions: tuple[int, ...]
    repeated: bool

    @property
    def position(self) -> int:
        """The position of the last event."""
        return self.positions[-1]


class AppendResult(NamedTuple):
    """The result of one append of a group: its positions, or why it was rejected.

    `conflict_position`: the condition does not hold. `duplicate_id`: an id belongs to another append. `epoch` and
    `common_position`: the position of the condition belongs to another epoch; these are the current epoch and the last
    position that both share.
    """

    positions: tuple[int, ...] | None
    repeated: bool
    conflict_position: int | None
    duplicate_id: str | None
    epoch: int | None = None
    common_position: int | None = None


class StorePage(NamedTuple):
    """A batch of events and the epoch of their positions. Pass the epoch together with a position: see `epoch`."""

    events: Sequence[StoreEvent]
    epoch: int


class StoreLease(NamedTuple):
    """A competing consumer's right to events of a store until the lease expires, identified by the token."""

    queue: str
    token: int
    events: Sequence[StoreEvent]


@dataclass(frozen=True, slots=True)
class Item:
    """Matches events that have one of these types, all of these tags, and all of these top-level fields of the data. An
    empty part matches everything."""

    types: Sequence[str] = ()
    tags: Sequence[str] = ()
    fields: Mapping[str, FieldValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        types, tags = distinct(self.types, "types"), distinct(self.tags, "tags")
        if len(types) > MAX_TAGS or len(tags) > MAX_TAGS:
            raise InvalidRequest(f"a query item can have at most {MAX_TAGS} types and {MAX_TAGS} tags")
        object.__setattr__(self, "types", types)
        object.__setattr__(self, "tags", tags)
        if self.fields:
            object.__setattr__(self, "fields", {checked_field_name(k): field_text(v) for k, v in self.fields.items()})

    def matches(self, event: StoreEvent) -> bool:
        """Whether the event matches the item."""
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
    """Matches the events that any of its items matches; without items, every event."""

    items: Sequence[Item] = ()

    def __post_init__(self) -> None:
        items = tuple(self.items)
        if not all(isinstance(item, Item) for item in items):
            raise InvalidRequest(
                "a query must consist of Item values", hint="Query.of(tags=[...]) creates a query of one item."
            )
        if len(items) > MAX_ITEMS:
            raise InvalidRequest(f"a query can have at most {MAX_ITEMS} items, not {len(items)}")
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
    """The append condition that no event after a position matches the query (see dcb.events).

    With `epoch`, the epoch in which the position was read, the append is rejected with EpochChanged if the log is in
    another epoch now: events that were read may be lost, and other events may have their positions.
    """

    query: Query
    position: int = 0
    epoch: int | None = None

    def __post_init__(self) -> None:
        _check_position(self.position)


@dataclass(frozen=True, slots=True)
class LatestMatchIs:
    """The append condition that the latest match is at exactly this position; None: that nothing matches.

    `epoch` as in NoMatchAfter.
    """

    query: Query
    position: int | None
    epoch: int | None = None

    def __post_init__(self) -> None:
        _check_position(self.position or 0)


Condition = NoMatchAfter | LatestMatchIs


@dataclass(frozen=True, slots=True)
class Latest:
    """The latest event of each item of a query (None if nothing matches), and the position of the latest of all.

    `epoch` is the epoch of the positions. A store on SQLite has one epoch, 0.
    """

    events: tuple[StoreEvent | None, ...]
    position: int
    epoch: int = 0


def appended_or_raise(result: AppendResult, condition: Condition | None) -> Appended:
    """Convert the result of an append to an Appended, or raise its error."""
    if result.positions is not None:
        return Appended(result.positions, result.repeated)
    if result.conflict_position is not None:
        expected = (condition.position or 0) if condition is not None else 0
        raise AppendConflict(
            f"append condition failed: the latest match is at position {result.conflict_position}, not at {expected}"
            if isinstance(condition, LatestMatchIs)
            else f"append condition failed: event {result.conflict_position}, after position {expected}, matches",
            hint="Read again, decide again, and append again.",
            detail={"actual_position": result.conflict_position, "expected_position": expected},
        )
    if result.epoch is not None:
        expected = (condition.position or 0) if condition is not None else 0
        raise EpochChanged(
            f"position {expected} of the append condition does not belong to the current epoch {result.epoch}: "
            f"positions after {result.common_position} may have been reassigned",
            hint="Postgres crashed, failed over or was restored. Read again, decide again, and append again.",
            detail={
                "epoch": result.epoch,
                "requested_epoch": None if condition is None else condition.epoch,
                "common_position": result.common_position,
            },
        )
    raise InvalidRequest(
        f'event id "{result.duplicate_id}" belongs to another append',
        hint="To repeat an append, send all of its events with the same ids; a new event needs a new id.",
        detail={"event_id": result.duplicate_id},
    )


def distinct(values: Iterable[str], what: str) -> tuple[str, ...]:
    """Types or tags without duplicates, in the given order. Raises an error for an invalid one."""
    if values == ():
        return ()
    if isinstance(values, str):
        raise InvalidRequest(f"{what} must be a list of strings, not a string", hint=f'Write {what}=["{values}"].')
    longest = MAX_TYPE_CHARACTERS if what == "types" else MAX_TAG_CHARACTERS
    found = tuple(values)
    for value in found:
        if not isinstance(value, str) or not 1 <= len(value) <= longest:
            raise InvalidEvent(f"invalid value {value!r} in {what}: expected a string of 1 to {longest} characters")
        if not value.isascii() or "\x00" in value:
            _refuse_strange_text(value, what)
    return found if len(found) < 2 else tuple(dict.fromkeys(found))


def _refuse_strange_text(value: str, what: str) -> None:
    if "\x00" in value:
        raise InvalidEvent(f"{what} cannot contain the character NUL")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidEvent(f"{what} cannot be encoded as UTF-8: {error}") from None


def _check_position(position: int) -> None:
    if not isinstance(position, int) or isinstance(position, bool) or not 0 <= position < 1 << 62:
        raise InvalidRequest(f"invalid position {position!r}: expected an integer of at least 0")


def check_positions(*positions: int | None) -> None:
    """Raise InvalidRequest for a value that cannot be a position; None is allowed."""
    for position in positions:
        if position is not None and (
            not isinstance(position, int)
            or isinstance(position, bool)
            or not -LAST_POSITION <= position <= LAST_POSITION
        ):
            raise InvalidRequest(f"invalid position {position!r}: expected a 64-bit integer")


def checked_field_name(name: str) -> str:
    """The name of a field. Raises InvalidRequest if it is invalid."""
    if not isinstance(name, str):
        raise InvalidRequest(f"invalid field name {name!r}: expected a string")
    _refuse_strange_text(name, "fields")
    return name


def field_text(value: FieldValue) -> str:
    """The text that a field is compared with."""
    # A float is written as in JSON.
    rendered = scalar_text(Decimal(json.dumps(value)) if type(value) is float else value)
    if rendered is None:
        raise InvalidRequest(f"invalid field value {value!r}: expected a string, a number or a boolean")
    _refuse_strange_text(rendered, "fields")
    return rendered


def scalar_text(value: Any) -> str | None:
    """A JSON scalar as Postgres shows it; None for any other value."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        # Python does not convert integers of more than some thousand digits to text, unless they are Decimals.
        return str(value) if -MAX_PLAIN_INTEGER < value < MAX_PLAIN_INTEGER else f"{Decimal(value):f}"
    if isinstance(value, Decimal):
        # Postgres has no negative zero.
        return f"{abs(value) if value.is_zero() else value:f}"
    return None


class _NotStorable(ValueError):
    """A number that Postgres cannot store, which makes the JSON document invalid."""


def _number(text: str) -> Decimal:
    if abs(int(text.lower().partition("e")[2] or 0)) > MAX_EXPONENT:
        raise _NotStorable(text)
    number = Decimal(text)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    # A zero has no digits before the point, whatever its exponent.
    if (number and number.adjusted() >= MAX_INTEGER_DIGITS) or -exponent > MAX_FRACTION_DIGITS:
        raise _NotStorable(text)
    return number


def _refuse_constant(text: str) -> Any:
    raise _NotStorable(text)


_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(rb"[\[\]{}]")
_decode = json.JSONDecoder(parse_float=_number, parse_int=_number, parse_constant=_refuse_constant).decode


def check_json_depth(payload: bytes, content_type: str | None) -> None:
    """Raise InvalidEvent for JSON that some parsers cannot read, since implementations would then match differently."""
    if content_type not in (None, JSON_TYPE) or payload.count(b"[") + payload.count(b"{") <= MAX_JSON_DEPTH:
        return
    depth = deepest = 0
    for bracket in _BRACKET.findall(_TEXT.sub(b"", payload)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    if deepest > MAX_JSON_DEPTH and (content_type is not None or _may_be_json(payload)):
        raise InvalidEvent(
            f"the JSON payload has {deepest} levels, the limit is {MAX_JSON_DEPTH}",
            hint="Send bytes with another content type.",
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
    """The payload as Postgres parses it as jsonb; None if it is not valid jsonb."""
    return None if payload is None or content_type not in (None, JSON_TYPE) else _parsed(payload)


@lru_cache(maxsize=64)
def _parsed(payload: bytes) -> Any:
    # Cached, since many queries are matched against one event.
    try:
        text = payload.decode()
        data = _decode(text)
        if "\\u" in text:
            _refuse_strange_texts(data)
    except (ValueError, RecursionError):
        return None
    return data


def _refuse_strange_texts(data: Any) -> None:
    """jsonb can contain neither NUL nor half of a surrogate pair, anywhere in the document."""
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
