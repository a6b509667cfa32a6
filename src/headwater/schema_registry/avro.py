"""Avro: strict parsing of schemas, and validation of payloads. Pure.

Payloads are validated without decoding: nothing is built, so that neither a count of a trillion empty values nor a list
that nests a million levels deep can exhaust memory or stack.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headwater.errors import InvalidSchema
from headwater.schema_registry.schemas import MAX_DEPTH, PayloadMismatch, read_json
from headwater.schema_registry.work_limit import WorkLimit

PRIMITIVES: Final = frozenset(("null", "boolean", "int", "long", "float", "double", "bytes", "string"))
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FULL_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
MAX_SYMBOLS: Final = 10_000


@dataclass(slots=True, eq=False)
class Node:
    """A type. Compared by identity, since a record may contain itself."""

    kind: str
    # For a record, an enum or a fixed.
    name: str = ""
    aliases: frozenset[str] = frozenset()
    fields: tuple[Field, ...] = ()
    symbols: tuple[str, ...] = ()
    default_symbol: str | None = None
    size: int = 0
    # Items of an array, values of a map, branches of a union.
    inner: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record."""

    name: str
    type: Node
    aliases: frozenset[str]
    has_default: bool


@dataclass(frozen=True, slots=True)
class AvroSchema:
    """A parsed Avro schema."""

    root: Node
    canonical: bytes
    _walk: Callable[[bytes, int, int], int] = field(repr=False)

    def check(self, payload: bytes, *, framed: bool) -> str | None:
        try:
            end = self._walk(payload, 0, MAX_DEPTH)
        except (IndexError, struct.error):
            raise PayloadMismatch("the payload ends too early") from None
        if end != len(payload):
            raise PayloadMismatch(f"{len(payload) - end} bytes follow the payload")
        return self.root.name or self.root.kind

    def compare(self, written: AvroSchema, work: WorkLimit) -> None:
        from headwater.schema_registry.avro_compatibility import compare

        compare(self.root, written.root, work)


def parse(text: str, dependencies: Sequence[tuple[str, str]] = ()) -> AvroSchema:
    """Parse a schema; the schemas it refers to may define names for it."""
    names: dict[str, Node] = {}
    for name, other in dependencies:
        _TypeParser(names).type_of(read_json(other, f"the schema {name}"), "", 0)
    document = _bare_or_json(text)
    root = _TypeParser(names).type_of(document, "", 0)
    canonical = json.dumps(_plain(document), sort_keys=True, separators=(",", ":")).encode()
    return AvroSchema(root, canonical, _walker(root, {}))


def _bare_or_json(text: str) -> Any:
    # Some clients send a primitive type without quotes.
    return text.strip() if text.strip() in PRIMITIVES else read_json(text)


def _plain(document: Any) -> Any:
    """Normalize equivalent notations: {"type": "string"} is "string"."""
    if isinstance(document, dict):
        if set(document) == {"type"}:
            return _plain(document["type"])
        return {name: value if name == "default" else _plain(value) for name, value in document.items()}
    if isinstance(document, list):
        return [_plain(one) for one in document]
    return document


class _TypeParser:
    """Converts JSON to nodes, with the names that are defined so far."""

    def __init__(self, names: dict[str, Node]) -> None:
        self._names = names

    def type_of(self, document: Any, namespace: str, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise InvalidSchema(f"the schema nests deeper than {MAX_DEPTH} levels")
        if isinstance(document, str):
            return self._named(document, namespace)
        if isinstance(document, list):
            return self._union(document, namespace, depth)
        if not isinstance(document, dict):
            raise InvalidSchema(
                f"invalid type {json.dumps(document)[:200]}: expected a name, an object or a list of types"
            )
        kind = document.get("type")
        if kind in ("record", "error", "enum", "fixed"):
            return self._definition(document, str(kind), namespace, depth)
        if kind == "array" or kind == "map":
            inside = "items" if kind == "array" else "values"
            if inside not in document:
                raise InvalidSchema(f'type "{kind}" needs "{inside}"')
            return Node(kind, inner=(self.type_of(document[inside], namespace, depth + 1),))
        if kind is None:
            raise InvalidSchema('an object that is a type needs "type"')
        return self.type_of(kind, namespace, depth + 1)

    def _named(self, name: str, namespace: str) -> Node:
        if name in PRIMITIVES:
            return Node(name)
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        found = self._names.get(full) or self._names.get(name)
        if found is None:
            raise InvalidSchema(f'unknown type "{full}"', hint="Define it before it is used, or add a reference.")
        return found

    def _union(self, branches: list[Any], namespace: str, depth: int) -> Node:
        if not branches:
            raise InvalidSchema("a union needs at least one type")
        inner = tuple(self.type_of(branch, namespace, depth + 1) for branch in branches)
        if any(branch.kind == "union" for branch in inner):
            raise InvalidSchema("a union cannot directly contain another union")
        names = [branch.name or branch.kind for branch in inner]
        if len(set(names)) != len(names):
            raise InvalidSchema(f"a union contains a type twice: {', '.join(names[:10])}")
        return Node("union", inner=inner)

    def _definition(self, document: Mapping[str, Any], kind: str, namespace: str, depth: int) -> Node:
        name = document.get("name")
        if not isinstance(name, str) or not _FULL_NAME.fullmatch(name):
            raise InvalidSchema(f"invalid type name {json.dumps(name)}")
        given = document.get("namespace", namespace)
        if not isinstance(given, str) or (given and not _FULL_NAME.fullmatch(given)):
            raise InvalidSchema(f"invalid namespace {json.dumps(given)}")
        full = name if "." in name or not given else f"{given}.{name}"
        inside = full.rpartition(".")[0]
        if full in self._names or full in PRIMITIVES:
            raise InvalidSchema(f'type "{full}" is defined twice')
        node = Node("record" if kind == "error" else kind, name=full)
        node.aliases = frozenset(
            one if "." in one or not inside else f"{inside}.{one}" for one in _names(document.get("aliases", []))
        )
        self._names[full] = node
        if kind == "fixed":
            node.size = document.get("size", -1)
            if type(node.size) is not int or not 0 <= node.size < 2**31:
                raise InvalidSchema(f'fixed "{full}" needs a "size" of 0 or more')
        elif kind == "enum":
            node.symbols = _names(document.get("symbols"), _NAME)
            if not 1 <= len(node.symbols) <= MAX_SYMBOLS or len(set(node.symbols)) != len(node.symbols):
                raise InvalidSchema(f'enum "{full}" needs "symbols", each once, up to {MAX_SYMBOLS}')
            node.default_symbol = document.get("default")
            if node.default_symbol is not None and node.default_symbol not in node.symbols:
                raise InvalidSchema(f'the default of enum "{full}" is not one of its symbols')
        else:
            fields = document.get("fields")
            if not isinstance(fields, list):
                raise InvalidSchema(f'record "{full}" needs a list "fields"')
            node.fields = tuple(self._field(one, full, inside, depth) for one in fields)
            if len({one.name for one in node.fields}) != len(node.fields):
                raise InvalidSchema(f'record "{full}" has a field twice')
        return node

    def _field(self, document: Any, record: str, namespace: str, depth: int) -> Field:
        if not isinstance(document, dict) or "type" not in document or "name" not in document:
            raise InvalidSchema(f'a field of record "{record}" must be an object with "name" and "type"')
        (name,) = _names([document["name"]], _NAME)
        kind = self.type_of(document["type"], namespace, depth + 1)
        if "default" in document and not _Defaults().fit(document["default"], kind):
            raise InvalidSchema(f'the default of field "{name}" of record "{record}" does not match its type')
        return Field(name, kind, frozenset(_names(document.get("aliases", []), _NAME)), "default" in document)


def _names(given: Any, form: re.Pattern[str] = _FULL_NAME) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(one, str) and form.fullmatch(one) for one in given):
        raise InvalidSchema(f"invalid names {json.dumps(given)[:100]}: expected letters, digits and _")
    return tuple(given)


class _Defaults:
    """Checks whether values match types. Results are cached, since nested unions would repeat the same checks."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], bool] = {}

    def fit(self, value: Any, node: Node) -> bool:
        asked = (id(value), id(node))
        if asked not in self._known:
            # A type that contains itself directly does not match by that.
            self._known[asked] = False
            self._known[asked] = self._fit(value, node)
        return self._known[asked]

    def _fit(self, value: Any, node: Node) -> bool:
        kind = node.kind
        if kind == "union":
            # The specification allows only the first type; but clients have long written others, and accept them.
            return any(self.fit(value, branch) for branch in node.inner)
        if kind == "null":
            return value is None
        if kind == "boolean":
            return isinstance(value, bool)
        if kind in ("int", "long"):
            limit = 2**31 if kind == "int" else 2**63
            return type(value) is int and -limit <= value < limit
        if kind in ("float", "double"):
            return type(value) in (int, float) or value in ("NaN", "Infinity", "-Infinity")
        if kind in ("string", "bytes"):
            return isinstance(value, str)
        if kind == "fixed":
            return isinstance(value, str) and len(value) == node.size
        if kind == "enum":
            return value in node.symbols
        if kind == "array":
            return isinstance(value, list) and all(self.fit(one, node.inner[0]) for one in value)
        if kind == "map":
            return isinstance(value, dict) and all(self.fit(one, node.inner[0]) for one in value.values())
        if not isinstance(value, dict):
            return False
        return all(self.fit(value[one.name], one.type) if one.name in value else one.has_default for one in node.fields)


# Validation: each type becomes a function of the payload, an offset in it and the remaining depth. It returns the
# offset after the value.

Walk = Callable[[bytes, int, int], int]


def _long(payload: bytes, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = payload[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), offset
        shift += 7
        if shift > 63:
            raise PayloadMismatch("a number is longer than ten bytes")


def _walk_null(payload: bytes, offset: int, depth: int) -> int:
    return offset


def _walk_boolean(payload: bytes, offset: int, depth: int) -> int:
    if payload[offset] > 1:
        raise PayloadMismatch(f"invalid boolean byte {payload[offset]}")
    return offset + 1


def _walk_int(payload: bytes, offset: int, depth: int) -> int:
    value, offset = _long(payload, offset)
    if not -(2**31) <= value < 2**31:
        raise PayloadMismatch(f"{value} exceeds 32 bits")
    return offset


def _walk_long(payload: bytes, offset: int, depth: int) -> int:
    return _long(payload, offset)[1]


def _sized(payload: bytes, offset: int) -> tuple[int, int]:
    size, offset = _long(payload, offset)
    if size < 0 or size > len(payload) - offset:
        raise PayloadMismatch(f"a length of {size} bytes exceeds the remaining {len(payload) - offset}")
    return offset, offset + size


def _walk_bytes(payload: bytes, offset: int, depth: int) -> int:
    return _sized(payload, offset)[1]


def _walk_string(payload: bytes, offset: int, depth: int) -> int:
    begin, end = _sized(payload, offset)
    try:
        payload[begin:end].decode()
    except UnicodeDecodeError:
        raise PayloadMismatch("a string is not valid UTF-8") from None
    return end


def _fixed(size: int) -> Walk:
    def walk(payload: bytes, offset: int, depth: int) -> int:
        if size > len(payload) - offset:
            raise PayloadMismatch("the payload ends too early")
        return offset + size

    return walk


_WALKS: Final[Mapping[str, Walk]] = {
    "null": _walk_null,
    "boolean": _walk_boolean,
    "int": _walk_int,
    "long": _walk_long,
    "float": _fixed(4),
    "double": _fixed(8),
    "bytes": _walk_bytes,
    "string": _walk_string,
}


def _walker(node: Node, known: dict[int, Walk]) -> Walk:
    """The function that validates one value of a type."""
    if node.kind in _WALKS:
        return _WALKS[node.kind]
    if id(node) in known:
        return known[id(node)]
    if node.kind == "fixed":
        return _fixed(node.size)
    if node.kind == "enum":
        return _enum(node)
    if node.kind == "record":
        walks: list[Walk] = []

        def walk_record(payload: bytes, offset: int, depth: int) -> int:
            if depth == 0:
                raise PayloadMismatch(f"the payload nests deeper than {MAX_DEPTH} levels")
            number = 0
            try:
                for walk in walks:
                    offset = walk(payload, offset, depth - 1)
                    number += 1
            except PayloadMismatch as unfit:
                reason = str(unfit)
                raise PayloadMismatch(f"{node.fields[number].name}{'.' if ': ' in reason else ': '}{reason}") from None
            except IndexError:
                raise PayloadMismatch(f"{node.fields[number].name}: the payload ends too early") from None
            return offset

        # Registered before its fields are created, one of which may be the type itself.
        known[id(node)] = walk_record
        walks.extend(_walker(one.type, known) for one in node.fields)
        return walk_record
    if node.kind == "union":
        return _union([_walker(branch, known) for branch in node.inner])
    return _blocks(_walker(node.inner[0], known), keyed=node.kind == "map", empty=_takes_no_byte(node.inner[0], set()))


def _enum(node: Node) -> Walk:
    count = len(node.symbols)

    def walk(payload: bytes, offset: int, depth: int) -> int:
        number, offset = _long(payload, offset)
        if not 0 <= number < count:
            raise PayloadMismatch(f"enum {node.name} has no symbol {number}")
        return offset

    return walk


def _union(branches: list[Walk]) -> Walk:
    def walk(payload: bytes, offset: int, depth: int) -> int:
        number, offset = _long(payload, offset)
        if not 0 <= number < len(branches):
            raise PayloadMismatch(f"a union of {len(branches)} types has no type {number}")
        return branches[number](payload, offset, depth)

    return walk


def _blocks(item: Walk, *, keyed: bool, empty: bool) -> Walk:
    def walk(payload: bytes, offset: int, depth: int) -> int:
        if depth == 0:
            raise PayloadMismatch(f"the payload nests deeper than {MAX_DEPTH} levels")
        while True:
            count, offset = _long(payload, offset)
            if count == 0:
                return offset
            if count < 0:
                count = -count
                _, offset = _long(payload, offset)
            # Values without bytes are not counted: there can be a trillion of them. All others end with the payload.
            for _ in range(1 if empty and not keyed else count):
                if keyed:
                    offset = _walk_string(payload, offset, depth)
                offset = item(payload, offset, depth - 1)

    return walk


def _takes_no_byte(node: Node, seen: set[int]) -> bool:
    """Whether every value of the type is encoded in zero bytes."""
    if node.kind == "null":
        return True
    if node.kind == "fixed":
        return node.size == 0
    if node.kind == "record":
        if id(node) in seen:
            return False
        seen.add(id(node))
        return all(_takes_no_byte(one.type, seen) for one in node.fields)
    return False
