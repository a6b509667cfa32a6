"""Captured rows as typed columns: the type of each Postgres column, and its values parsed from JSON. No I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import InvalidRequest

_TYPES: Final[Mapping[str, Any]] = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "oid": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
}
_MAX_PRECISION: Final = 38
# The value of these types is the JSON text itself, whether object, number or quoted string.
_JSON: Final = frozenset({"json", "jsonb"})
_TYPE, _MODIFIER, _KEY = "headwater.type", "headwater.modifier", "headwater.key"
# Numbers stay text, so that no digit is lost.
_DECODER: Final = json.JSONDecoder(parse_float=str, parse_int=str)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CapturedColumn:
    """A column of a captured table. With `as_text` it is stored as text, whatever its type."""

    name: str
    type_name: str
    modifier: int
    in_key: bool
    as_text: bool = False

    @property
    def type(self) -> Any:
        """The type in Arrow and in the lake. Postgres types without an equivalent are text."""
        if self.as_text:
            return pa.string()
        if self.type_name == "numeric":
            return _decimal(self.modifier)
        return _TYPES.get(self.type_name, pa.string())

    @property
    def field(self) -> Any:
        """The Arrow field, with the Postgres type in its metadata, so that the lake's table describes itself."""
        about = {_TYPE: self.type_name, _MODIFIER: str(self.modifier), _KEY: "true" if self.in_key else "false"}
        return pa.field(self.name, self.type, metadata=about)


def parse_columns(description: str, *, as_text: Iterable[str] = ()) -> tuple[CapturedColumn, ...]:
    """Parse the description of columns in a change or a snapshot."""
    texts = frozenset(as_text)
    return tuple(
        CapturedColumn(column["name"], column["type"], column["modifier"], column["key"], column["name"] in texts)
        for column in json.loads(description)
    )


def schema_of(columns: Sequence[CapturedColumn]) -> Any:
    """The Arrow schema of a captured table in the lake."""
    return pa.schema([column.field for column in columns])


def columns_of(schema: Any) -> tuple[CapturedColumn, ...]:
    """The captured columns, from the metadata of a lake table."""
    columns = []
    for field in schema:
        about = {name.decode(): value.decode() for name, value in (field.metadata or {}).items()}
        plain = CapturedColumn(
            field.name, about.get(_TYPE, "text"), int(about.get(_MODIFIER, -1)), about.get(_KEY) == "true"
        )
        as_text = plain.type != field.type and field.type == pa.string()
        columns.append(CapturedColumn(plain.name, plain.type_name, plain.modifier, plain.in_key, as_text))
    return tuple(columns)


def widens(old: Any, new: Any) -> bool:
    """Whether the new type can hold every value of the old one, so that a table can be rewritten with it."""
    if pa.types.is_integer(old) and pa.types.is_integer(new):
        return bool(new.bit_width >= old.bit_width)
    if pa.types.is_floating(old) and pa.types.is_floating(new):
        return bool(new.bit_width >= old.bit_width)
    if pa.types.is_decimal(new):
        digits = {16: 5, 32: 10, 64: 19}.get(old.bit_width) if pa.types.is_integer(old) else None
        if pa.types.is_decimal(old):
            return bool(new.scale >= old.scale and new.precision - new.scale >= old.precision - old.scale)
        return digits is not None and new.precision - new.scale >= digits
    return False


def reader_of(columns: Sequence[CapturedColumn]) -> Callable[[str], Row]:
    """A parser for the JSON of rows with these columns: values as Postgres text, booleans as bool, null as None."""
    raw = frozenset(column.name for column in columns if column.type_name in _JSON)
    if raw:
        return partial(members, raw=raw)
    return _read


def _read(text: str) -> Row:
    values: Row = _DECODER.raw_decode(text)[0]
    return values


def to_arrow(rows: Sequence[Row], columns: Sequence[CapturedColumn]) -> Any:
    """Rows as an Arrow table with these columns; values missing in a row are null."""
    return pa.Table.from_arrays(
        [_typed_column([row.get(column.name) for row in rows], column) for column in columns],
        schema=schema_of(columns),
    )


def _decimal(modifier: int) -> Any:
    if modifier < 4:
        return pa.string()
    precision, scale = (modifier - 4) >> 16 & 0xFFFF, (modifier - 4) & 0x7FF
    if scale >= 1024:
        scale -= 2048
    fits = 0 <= scale <= precision <= _MAX_PRECISION
    return pa.decimal128(precision, scale) if fits else pa.string()


def members(text: str, *, raw: frozenset[str]) -> Row:
    """The members of a JSON object without whitespace; those named in `raw` stay JSON text, but null is None."""
    found: Row = {}
    offset = 1
    while text[offset] != "}":
        if text[offset] == ",":
            offset += 1
        name, start = _DECODER.raw_decode(text, offset)
        start += 1  # the colon
        value, offset = _DECODER.raw_decode(text, start)
        found[name] = text[start:offset] if name in raw and value is not None else value
    return found


def _typed_column(values: list[Any], column: CapturedColumn) -> Any:
    kind = column.type
    if kind == pa.bool_():
        return pa.array(values, kind)
    if kind == pa.binary():
        return pa.array([None if value is None else bytes.fromhex(value[2:]) for value in values], kind)
    texts = pa.array([str(value).lower() if isinstance(value, bool) else value for value in values], pa.string())
    if kind == pa.string():
        return texts
    try:
        return pc.cast(texts, kind)
    except pa.ArrowInvalid:
        wrong = next(value for value in values if value is not None and not _fits(value, kind))
        raise InvalidRequest(
            f"column {column.name!r} has the value {wrong!r}, which its lake type {kind} cannot hold",
            hint=f"Set as_text: [{column.name}] in the sink, and reload the table: `headwater pipeline reset`.",
        ) from None


def _fits(text: str, kind: Any) -> bool:
    try:
        pc.cast(pa.array([text]), kind)
    except pa.ArrowInvalid:
        return False
    return True
