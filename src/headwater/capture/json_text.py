"""Convert Postgres text values to JSON, a whole column at a time. No I/O.

Changes and snapshot rows use the same functions, so that equal rows give equal text.
This requires the session settings in `connection.SESSION`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Integers: TypeAlias = "npt.NDArray[np.int64]"
Flags: TypeAlias = "npt.NDArray[np.bool_]"


class Form(Enum):
    """How the text form of a type is converted to JSON."""

    AS_IS = "unchanged: the text is valid JSON"
    FLOAT = "a number; NaN and the infinities become strings"
    BOOLEAN = "t and f become true and false"
    TIMESTAMP = "a string with a T between date and time"
    TIMESTAMPTZ = "a string with a T between date and time, in UTC, with the suffix Z"
    TEXT = "a string"


# Built-in types by oid. Oids below 10,000 never change their meaning.
TYPE_NAMES: Final[Mapping[int, str]] = {
    16: "bool", 17: "bytea", 18: '"char"', 19: "name", 20: "int8", 21: "int2", 23: "int4", 24: "regproc", 25: "text",
    26: "oid", 27: "tid", 28: "xid", 29: "cid", 114: "json", 142: "xml", 199: "json[]", 600: "point", 601: "lseg",
    602: "path", 603: "box", 604: "polygon", 628: "line", 650: "cidr", 700: "float4", 701: "float8", 718: "circle",
    774: "macaddr8", 790: "money", 829: "macaddr", 869: "inet", 1000: "bool[]", 1001: "bytea[]", 1005: "int2[]",
    1007: "int4[]", 1009: "text[]", 1014: "bpchar[]", 1015: "varchar[]", 1016: "int8[]", 1021: "float4[]",
    1022: "float8[]", 1042: "bpchar", 1043: "varchar", 1082: "date", 1083: "time", 1114: "timestamp",
    1115: "timestamp[]", 1182: "date[]", 1184: "timestamptz", 1185: "timestamptz[]", 1186: "interval",
    1231: "numeric[]", 1266: "timetz", 1560: "bit", 1562: "varbit", 1700: "numeric", 2205: "regclass", 2206: "regtype",
    2249: "record", 2950: "uuid", 2951: "uuid[]", 3220: "pg_lsn", 3614: "tsvector", 3615: "tsquery", 3802: "jsonb",
    3807: "jsonb[]", 3904: "int4range", 3906: "numrange", 3908: "tsrange", 3910: "tstzrange", 3912: "daterange",
    3926: "int8range", 4072: "jsonpath", 4451: "int4multirange", 4532: "nummultirange", 4533: "tsmultirange",
    4534: "tstzmultirange", 4535: "datemultirange", 4536: "int8multirange", 5069: "xid8",
}  # fmt: skip

_FORMS: Final[Mapping[str, Form]] = {
    **dict.fromkeys(("int2", "int4", "int8", "oid", "xid", "xid8", "cid", "json", "jsonb"), Form.AS_IS),
    **dict.fromkeys(("float4", "float8"), Form.FLOAT),
    "bool": Form.BOOLEAN,
    "timestamp": Form.TIMESTAMP,
    "timestamptz": Form.TIMESTAMPTZ,
}


def form_of(type_name: str) -> Form:
    """The form of a type by its name; TEXT for types not listed here."""
    return _FORMS.get(type_name, Form.TEXT)


@dataclass(frozen=True, slots=True)
class Cells:
    """The values of one column: their offsets in `data`, in ascending order, and which are not null."""

    data: Bytes
    starts: Integers
    ends: Integers
    valid: Flags

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, slots=True)
class JsonColumn:
    """One column as JSON values. If `quoted`, each value still needs quotes around it."""

    values: Any  # a string array; null where the value is
    quoted: bool

    def take(self, rows: Integers) -> JsonColumn:
        return JsonColumn(self.values.take(pa.array(rows)), self.quoted)


def cells_of(values: Any) -> Cells:
    """The cells of an Arrow string or binary array."""
    validity, offsets, data = values.buffers()
    value_offsets = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1].astype(np.int64)
    valid = np.ones(len(values), np.bool_) if validity is None else values.is_valid().to_numpy(zero_copy_only=False)
    return Cells(
        np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8),
        value_offsets[:-1],
        value_offsets[1:],
        valid,
    )


def render(cells: Cells, form: Form) -> JsonColumn:
    """Convert each cell to its JSON value."""
    if form is Form.AS_IS:
        return JsonColumn(_gather(cells), quoted=False)
    if form is Form.BOOLEAN:
        return JsonColumn(_booleans(cells), quoted=False)
    if form is Form.FLOAT:
        return JsonColumn(_floats(cells), quoted=False)
    if form is Form.TEXT:
        return _quoted(_escaped(_gather(cells)))
    return _quoted(_timestamps(cells, in_utc=form is Form.TIMESTAMPTZ))


def objects(names: Sequence[str], columns: Sequence[JsonColumn], count: int) -> Any:
    """Build one JSON object for each row, with these names and values."""
    if not names:
        return pa.array(["{}"] * count, pa.string())
    parts: list[Any] = []
    close = "{"
    for name, column in zip(names, columns, strict=True):
        lead = close + json.dumps(name, ensure_ascii=False) + ":" + ('"' if column.quoted else "")
        parts += [pa.scalar(lead, pa.string()), column.values]
        close = '",' if column.quoted else ","
    parts.append(pa.scalar(close.replace(",", "}"), pa.string()))
    joined = pc.binary_join_element_wise(
        *parts, pa.scalar("", pa.string()), null_handling="replace", null_replacement="null"
    )
    try:
        joined.validate(full=True)
    except pa.ArrowInvalid:
        # Only a database with encoding SQL_ASCII can hold bytes that are not valid UTF-8.
        texts = [text.decode("utf-8", "replace") for text in joined.cast(pa.binary()).to_pylist()]
        return pa.array(texts, pa.string())
    return joined


def _gather(cells: Cells) -> Any:
    """Copy the cells into one contiguous array. Arrow does the copying: the gaps become values that are not taken."""
    count = len(cells)
    if not count:
        return pa.array([], pa.string())
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2] = cells.starts
    offsets[1::2] = cells.ends
    spans = pa.StringArray.from_buffers(2 * count - 1, pa.py_buffer(offsets), pa.py_buffer(cells.data))
    wanted = np.arange(0, 2 * count, 2, dtype=np.int32)
    if cells.valid.all():
        return spans.take(pa.array(wanted))
    return spans.take(pa.array(wanted, mask=~cells.valid))


def _bytes_of(values: Any) -> tuple[Bytes, Integers]:
    """The bytes and offsets of a string array whose offset is 0."""
    _, offsets, data = values.buffers()
    value_offsets = np.frombuffer(offsets, np.int32)[: len(values) + 1].astype(np.int64)
    held = np.frombuffer(data, np.uint8)[: value_offsets[-1]] if data is not None else np.zeros(0, np.uint8)
    return held, value_offsets


def _quoted(values: Any) -> JsonColumn:
    if not values.null_count:
        return JsonColumn(values, quoted=True)
    quote, nothing = pa.scalar('"', pa.string()), pa.scalar("", pa.string())
    return JsonColumn(pc.binary_join_element_wise(quote, values, quote, nothing), quoted=False)


_TO_ESCAPE: Final[Bytes] = np.zeros(256, np.uint8)
_TO_ESCAPE[:32] = 1
_TO_ESCAPE[[0x22, 0x5C]] = 1


def _escaped(values: Any) -> Any:
    data, _ = _bytes_of(values)
    found = data[_TO_ESCAPE[data].view(np.bool_)]
    if not len(found):
        return values
    # The backslash first, because the other escapes contain backslashes.
    for code in sorted(set(np.unique(found).tolist()), key=lambda code: code != 0x5C):
        values = pc.replace_substring(values, pattern=chr(code), replacement=json.dumps(chr(code))[1:-1])
    return values


def _booleans(cells: Cells) -> Any:
    at = np.minimum(cells.starts, max(len(cells.data) - 1, 0))
    words = np.where(cells.data[at] == ord("t"), 0, 1) if len(cells.data) else np.ones(len(cells), np.int64)
    return pa.array(["true", "false"]).take(pa.array(words, mask=~cells.valid))


def _floats(cells: Cells) -> Any:
    values = _gather(cells)
    if not len(cells.data):
        return values
    # NaN and Infinity are the only float values whose text ends in a letter.
    last = cells.data[np.maximum(cells.ends, 1) - 1]
    if not ((last >= ord("a")) & cells.valid & (cells.ends > cells.starts) | (last == ord("N")) & cells.valid).any():
        return values
    odd = pc.is_in(values, value_set=pa.array(["NaN", "Infinity", "-Infinity"]))
    quote, nothing = pa.scalar('"', pa.string()), pa.scalar("", pa.string())
    return pc.if_else(odd, pc.binary_join_element_wise(quote, values, quote, nothing), values)


def _timestamps(cells: Cells, *, in_utc: bool) -> Any:
    data, ends = cells.data, cells.ends
    zoned = np.zeros(len(cells), np.bool_)
    if in_utc and len(data):
        tail = np.maximum(ends, 3)
        zoned = (data[tail - 3] == ord("+")) & (data[tail - 2] == ord("0")) & (data[tail - 1] == ord("0"))
        zoned &= cells.valid & (ends - cells.starts > 3)
        ends = np.where(zoned, ends - 2, ends)
    values = _gather(Cells(data, cells.starts, ends, cells.valid))
    held, value_offsets = _bytes_of(values)
    if not len(held):
        return values
    held = held.copy()
    if zoned.any():
        held[value_offsets[1:][zoned] - 1] = ord("Z")
    long = value_offsets[1:] - value_offsets[:-1] > 10
    between = value_offsets[:-1][long] + 10
    spaces = held[between] == ord(" ")
    held[between[spaces]] = ord("T")
    nulls, offsets, _ = values.buffers()
    values = pa.StringArray.from_buffers(len(values), offsets, pa.py_buffer(held), nulls, values.null_count)
    if spaces.all():
        return values
    # Years with five or more digits have their space further right.
    return pc.replace_substring_regex(values, pattern=r"^(-?\d{5,}-\d\d-\d\d) ", replacement=r"\1T")
