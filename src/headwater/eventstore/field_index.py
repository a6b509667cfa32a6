"""Field indexes of an event store: their definition, and which events they contain. No I/O.

An index finds events in the same way as a tag: each event of the index has an index term that is made of its values.
The index term only finds candidates; their values are always compared. So an event can be appended whatever its values
are.
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
"""The form of the values of an index. Events whose value has another form are not in the index."""
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
    """A condition of a partial index: which events it contains.

    `=` and `!=` compare text, as queries do; the others compare numbers if both are numbers, and text otherwise.
    """

    field: str
    operator: Operator
    value: FieldValue

    def __post_init__(self) -> None:
        if self.operator not in get_args(Operator):
            raise InvalidRequest(
                f'invalid operator "{self.operator}"',
                hint=f"Expected one of {', '.join(get_args(Operator))}.",
            )
        checked_field_name(self.field)
        object.__setattr__(self, "value", field_text(self.value))

    def holds(self, data: Mapping[str, Any]) -> bool:
        found, other = scalar_text(data.get(self.field)), str(self.value)
        if found is None:
            return False
        if self.operator in ("=", "!="):
            return (found == other) is (self.operator == "=")
        # Text is compared by its bytes, as Postgres does with the collation "C".
        left: Any = found.encode()
        right: Any = other.encode()
        if NUMERIC.fullmatch(found) and NUMERIC.fullmatch(other):
            left, right = Decimal(found), Decimal(other)
        if self.operator in ("<", "<="):
            return bool(left < right or (left == right and self.operator == "<="))
        return bool(left > right or (left == right and self.operator == ">="))


@dataclass(frozen=True, slots=True)
class FieldIndex:
    """An index on fields of the data. Queries do not use it until it is `ready`.

    An index on several fields is used by queries on all of them; one with conditions by queries that imply the
    conditions.
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

    def index_term(self, number: int, data: Any) -> str | None:
        """The index term of an event with this data, or of an item that asks for it; None: it is not in the index.

        It contains the number of the index, not its name, since one name can be a prefix of another.
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

    def index_term_of_item(self, number: int, item: Item) -> str | None:
        """The index term of the events that an item matches; None: the index does not contain all of them."""
        return self.index_term(number, item.fields) if item.fields else None


def define_index(
    name: str,
    fields: Sequence[str] | Mapping[str, Kind],
    conditions: Sequence[IndexCondition] = (),
    combine: Combine = "and",
) -> FieldIndex:
    """Create a definition of an index. Raises InvalidRequest if it is invalid."""
    if isinstance(fields, str):
        raise InvalidRequest("fields must be a list of strings, not a string", hint=f'Write fields=["{fields}"].')
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARACTERS or "\x00" in name:
        raise InvalidRequest(f"invalid index name: expected 1 to {MAX_NAME_CHARACTERS} characters without NUL")
    names = tuple(checked_field_name(field) for field in fields)
    if not 1 <= len(names) <= MAX_FIELDS:
        raise InvalidRequest(f"invalid number of fields {len(names)}: expected 1 to {MAX_FIELDS}")
    if len(set(names)) < len(names):
        raise InvalidRequest("an index cannot contain a field twice")
    kinds = tuple(fields.values()) if isinstance(fields, Mapping) else tuple(TEXT for _ in names)
    for kind in kinds:
        if kind not in get_args(Kind):
            raise InvalidRequest(
                f'invalid kind of field "{kind}"', hint=f"Expected one of {', '.join(get_args(Kind))}."
            )
    if combine not in get_args(Combine):
        raise InvalidRequest(f'invalid combine "{combine}": expected "and" or "or"')
    if len(conditions) > MAX_CONDITIONS:
        raise InvalidRequest(f"invalid number of conditions {len(conditions)}: expected at most {MAX_CONDITIONS}")
    return FieldIndex(name, names, False, kinds, tuple(conditions), combine)


def check_same_definition(known: FieldIndex, wanted: FieldIndex) -> None:
    """Raise InvalidRequest if an index with this name exists with another definition."""
    if (known.fields, known.kinds, known.conditions, known.combine) != (
        wanted.fields, wanted.kinds, wanted.conditions, wanted.combine,
    ):  # fmt: skip
        raise InvalidRequest(
            f'index "{known.name}" has other fields: {", ".join(known.fields)}',
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
