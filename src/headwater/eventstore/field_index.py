"""Indexes on fields of the data of an event store: what one is, and which events are in it. No I/O here.

An event is found by an index as by a tag: it has a mark that is made of its values. The mark only leads to events; what
they have is always compared. So no value, of whatever form, can keep an event from being appended.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, get_args

from headwater.errors import InvalidRequest
from headwater.eventstore.query import FieldValue, Item, checked_field_name, field_text, scalar_text

Kind = Literal["text", "numeric", "boolean", "timestamp"]
"""Of which form values are that an index has; those of another form are not in it."""
Operator = Literal["=", "!=", "<", "<=", ">", ">="]
Combine = Literal["and", "or"]
State = Literal["BUILDING", "READY"]

TEXT: Kind = "text"
MAX_FIELDS = 8
MAX_CONDITIONS = 16
MAX_NAME_CHARACTERS = 63

# The same in database/schema/functions/field_index.sql.
NUMERIC = re.compile(r"[+-]?([0-9]{1,100}(\.[0-9]{0,100})?|\.[0-9]{1,100})([eE][+-]?[0-9]{1,3})?")
TIMESTAMP = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]+)?)?(Z|[+-][0-9]{2}(:?[0-9]{2})?)?)?"
)


@dataclass(frozen=True, slots=True)
class IndexCondition:
    """Which events a partial index has: those with such a value in a field.

    `=` and `!=` compare text, as queries do; the others compare numbers where both are numbers, and text otherwise.
    """

    field: str
    operator: Operator
    value: FieldValue

    def __post_init__(self) -> None:
        if self.operator not in get_args(Operator):
            raise InvalidRequest(
                f'"{self.operator}" is no operator of a condition',
                hint=f"Write one of {', '.join(get_args(Operator))}.",
            )
        checked_field_name(self.field)
        object.__setattr__(self, "value", field_text(self.value))

    def holds(self, data: Mapping[str, Any]) -> bool:
        found, other = scalar_text(data.get(self.field)), str(self.value)
        if found is None:
            return False
        if self.operator in ("=", "!="):
            return (found == other) is (self.operator == "=")
        # In this order text is in the order of its bytes, as Postgres has it with the collation "C".
        left: Any = found.encode()
        right: Any = other.encode()
        if NUMERIC.fullmatch(found) and NUMERIC.fullmatch(other):
            left, right = Decimal(found), Decimal(other)
        if self.operator in ("<", "<="):
            return bool(left < right or (left == right and self.operator == "<="))
        return bool(left > right or (left == right and self.operator == ">="))


@dataclass(frozen=True, slots=True)
class FieldIndex:
    """Fields of the data by which events are found as by a tag. Until it is `ready`, queries do without it.

    An index on several fields is used by queries on all of them; one with conditions by queries that imply these.
    """

    name: str
    fields: tuple[str, ...]
    ready: bool = False
    kinds: tuple[Kind, ...] = ()
    conditions: tuple[IndexCondition, ...] = ()
    combine: Combine = "and"

    @property
    def state(self) -> State:
        return "READY" if self.ready else "BUILDING"

    def mark(self, number: int, data: Any) -> str | None:
        """What an event with this data, or an item that asks for it, is found by; None: it is not in the index.

        By the number of the index, not by its name: names can begin alike.
        """
        if not isinstance(data, Mapping):
            return None
        values = []
        for name, kind in zip(self.fields, self.kinds, strict=True):
            value = scalar_text(data.get(name))
            if value is None or not _is_of_kind(value, kind):
                return None
            values.append(value)
        if self.conditions:
            held = (condition.holds(data) for condition in self.conditions)
            if not (all(held) if self.combine == "and" else any(held)):
                return None
        joined = json.dumps(values, ensure_ascii=False)
        return f"={number}:{hashlib.md5(joined.encode(), usedforsecurity=False).hexdigest()}"

    def mark_of_item(self, number: int, item: Item) -> str | None:
        """What the events that an item matches are found by; None: the index does not have all of them."""
        return self.mark(number, item.fields) if item.fields else None


def defined(
    name: str,
    fields: Sequence[str] | Mapping[str, Kind],
    conditions: Sequence[IndexCondition] = (),
    combine: Combine = "and",
) -> FieldIndex:
    """An index as somebody asks for it; refuses what cannot be one."""
    if isinstance(fields, str):
        raise InvalidRequest("fields are a list of texts, not one text", hint=f'Write fields=["{fields}"].')
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARACTERS or "\x00" in name:
        raise InvalidRequest(f"an index name is 1 to {MAX_NAME_CHARACTERS} characters")
    names = tuple(checked_field_name(field) for field in fields)
    if not 1 <= len(names) <= MAX_FIELDS:
        raise InvalidRequest(f"an index has 1 to {MAX_FIELDS} fields, this one has {len(names)}")
    if len(set(names)) < len(names):
        raise InvalidRequest("an index names each field once")
    kinds = tuple(fields.values()) if isinstance(fields, Mapping) else tuple(TEXT for _ in names)
    for kind in kinds:
        if kind not in get_args(Kind):
            raise InvalidRequest(f'"{kind}" is no kind of field', hint=f"Write one of {', '.join(get_args(Kind))}.")
    if combine not in get_args(Combine):
        raise InvalidRequest(f'conditions are combined by "and" or "or", not by "{combine}"')
    if len(conditions) > MAX_CONDITIONS:
        raise InvalidRequest(f"an index has up to {MAX_CONDITIONS} conditions, this one has {len(conditions)}")
    return FieldIndex(name, names, False, kinds, tuple(conditions), combine)


def refuse_other(known: FieldIndex, wanted: FieldIndex) -> None:
    """Refuse an index of a name that is there with another meaning."""
    if (known.fields, known.kinds, known.conditions, known.combine) != (
        wanted.fields, wanted.kinds, wanted.conditions, wanted.combine,
    ):  # fmt: skip
        raise InvalidRequest(
            f'the index "{known.name}" has other fields: {", ".join(known.fields)}',
            hint="Drop it first, or choose another name.",
        )


def conditions_as_json(conditions: Sequence[IndexCondition]) -> str:
    parts = [{"field": c.field, "operator": c.operator, "value": c.value} for c in conditions]
    return json.dumps(parts, ensure_ascii=False)


def conditions_from_json(parts: Sequence[Mapping[str, Any]]) -> tuple[IndexCondition, ...]:
    return tuple(IndexCondition(part["field"], part["operator"], part["value"]) for part in parts)


def _is_of_kind(value: str, kind: Kind) -> bool:
    if kind == "numeric":
        return NUMERIC.fullmatch(value) is not None
    if kind == "boolean":
        return value in ("true", "false")
    return kind == "text" or TIMESTAMP.fullmatch(value) is not None
