"""Compatibility of JSON Schemas: whether one accepts everything that another accepted. Pure.

Conservative: what cannot be decided is reported as incompatible.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Final

from headwater.schema_registry.json_schema import Documents
from headwater.schema_registry.work_limit import WorkLimit

# Minimum keywords: a lower value of the reader accepts more. Maximum keywords: a higher value does.
_AT_LEAST: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains")
_AT_MOST: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains")
# Compared literally: it is undecidable here whether one pattern accepts everything that another does.
_AS_THEY_ARE: Final = (
    "pattern", "format", "uniqueItems", "contains", "propertyNames", "if", "then", "else", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "contentEncoding",
    "contentMediaType", "contentSchema",
)  # fmt: skip
_ALL_TYPES: Final = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
# In this order, since a boolean is an integer in Python.
_KINDS: Final = {
    "boolean": bool, "integer": int, "number": float, "string": str, "array": list, "object": dict,
}  # fmt: skip
_MISSING: Final = object()

LocatedSchema = tuple[Any, Any]
"""A document and a schema in it: the meaning of a reference depends on its document."""


def compare(reader: Documents, writer: Documents, work: WorkLimit) -> None:
    """Collect what the writer's schema accepts and the reader's does not."""
    _Comparison(reader, writer, work).compare((reader.root, reader.root), (writer.root, writer.root), "")


class _Comparison:
    """One comparison. Pairs that are being compared are assumed to fit, since schemas may contain themselves."""

    def __init__(self, reader: Documents, writer: Documents, work: WorkLimit) -> None:
        self._reader = reader
        self._writer = writer
        self._work = work
        self._open: set[tuple[int, int]] = set()

    def _fits(self, reader: LocatedSchema, writer: LocatedSchema) -> bool:
        kept, self._work.problems = self._work.problems, []
        self.compare(reader, writer, "")
        found, self._work.problems = self._work.problems, kept
        return not found

    def compare(self, reader: LocatedSchema, writer: LocatedSchema, where: str) -> None:
        self._work.step()
        reader, writer = self._followed(self._reader, reader), self._followed(self._writer, writer)
        to, of = reader[1], writer[1]
        if to is True or to == {} or of is False or (reader[0] is writer[0] and to is of):
            return
        if of is True:
            of = {}
        if to is False:
            self._work.found(where, "nothing is taken here any more")
            return
        if not isinstance(to, dict) or not isinstance(of, dict):
            self._work.found(where, "one of them is no schema")
            return
        pair = (id(to), id(of))
        if pair in self._open:
            return
        self._open.add(pair)
        try:
            # Each alternative of the writer must still be accepted. First, since each alternative has its own type.
            if not self._by_alternatives(reader, (writer[0], of), where):
                self._compare(to, of, reader[0], writer[0], where)
        finally:
            self._open.discard(pair)

    def _followed(self, documents: Documents, at: LocatedSchema) -> LocatedSchema:
        seen: set[int] = set()
        while isinstance(at[1], dict) and isinstance(at[1].get("$ref"), str) and id(at[1]) not in seen:
            if _beside(at[1]):
                break
            seen.add(id(at[1]))
            found = documents.resolve(at[0], at[1]["$ref"])
            if found is None:
                break
            at = found
        return at

    def _by_alternatives(self, reader: LocatedSchema, writer: LocatedSchema, where: str) -> bool:
        """Whether the writer is only a choice, and each of its alternatives was compared."""
        for name in ("anyOf", "oneOf"):
            choice = writer[1].get(name)
            if isinstance(choice, list) and not _beside(writer[1], name):
                for number, one in enumerate(choice):
                    self.compare(reader, (writer[0], one), f"{where}/{name}/{number}")
                return True
        return False

    def _compare(self, to: dict[str, Any], of: dict[str, Any], to_in: Any, of_in: Any, where: str) -> None:
        found = self._work.found
        taken, was = _types(to), _types(of)
        if not was <= taken | ({"integer"} if "number" in taken else set()):
            found(where, f"{', '.join(sorted(was - taken))} is not taken any more")
        self._compare_values(to, of, where)
        self._compare_limits(to, of, where)
        for name in _AS_THEY_ARE:
            if name in to and to[name] not in (True, {}, []) and to[name] != of.get(name, _MISSING):
                if name == "uniqueItems" and to[name] is False:
                    continue
                found(where, f"{name} is not what it was")
        self._compare_choices(to, of, to_in, of_in, where)
        if "$ref" in to and to["$ref"] != of.get("$ref"):
            followed = self._reader.resolve(to_in, to["$ref"])
            if followed is None:
                found(where, f"{to['$ref']} is not known")
            else:
                self.compare(followed, (of_in, of), where)
        if "object" in was:
            self._compare_objects(to, of, to_in, of_in, where)
        if "array" in was:
            self._compare_arrays(to, of, to_in, of_in, where)

    def _compare_values(self, to: dict[str, Any], of: dict[str, Any], where: str) -> None:
        taken, was = _values(to), _values(of)
        if taken is None:
            return
        if was is None:
            self._work.found(where, "only some values are taken now")
        elif gone := sorted(was - taken):
            self._work.found(where, f"values are not taken any more: {', '.join(gone[:10])}")

    def _compare_limits(self, to: dict[str, Any], of: dict[str, Any], where: str) -> None:
        wider: list[tuple[tuple[str, ...], Callable[[Any, Any], bool]]] = [
            (_AT_LEAST, lambda now, before: now <= before),
            (_AT_MOST, lambda now, before: now >= before),
            (("multipleOf",), lambda now, before: before % now == 0),
        ]
        for names, takes_all in wider:
            for name in names:
                now, before = to.get(name), of.get(name)
                # Up to draft 4, the exclusive keywords are booleans.
                if isinstance(now, bool) or isinstance(before, bool):
                    if now and now != before:
                        self._work.found(where, f"{name} was added")
                elif isinstance(now, int | float):
                    if not isinstance(before, int | float):
                        if not (name.startswith("min") and name != "minimum" and now <= 0):
                            self._work.found(where, f"{name} was added")
                    elif not takes_all(now, before):
                        self._work.found(where, f"{name} was {before} and is {now}")

    def _compare_choices(self, to: dict[str, Any], of: dict[str, Any], to_in: Any, of_in: Any, where: str) -> None:
        whole = (of_in, of)
        for one in _list(to.get("allOf")):
            if not any(self._fits((to_in, one), (of_in, other)) for other in _list(of.get("allOf"))):
                self.compare((to_in, one), (of_in, _without(of, "allOf")), f"{where}/allOf")
        for name in ("anyOf", "oneOf"):
            choice = _list(to.get(name))
            if not choice or to[name] == of.get(name):
                continue
            before = _list(of.get(name)) or [_MISSING]
            for number, other in enumerate(before):
                was = whole if other is _MISSING else (of_in, other)
                if not any(self._fits((to_in, one), was) for one in choice):
                    self._work.found(where, f"alternative {number} of {name} is not taken any more")
        if "not" in to and to["not"] != of.get("not"):
            if "not" not in of:
                self._work.found(where, "something was excluded that was not before")
            else:
                turned = _Comparison(self._writer, self._reader, self._work)
                turned.compare((of_in, of["not"]), (to_in, to["not"]), f"{where}/not")

    def _compare_objects(self, to: dict[str, Any], of: dict[str, Any], to_in: Any, of_in: Any, where: str) -> None:
        now, before = _dict(to.get("properties")), _dict(of.get("properties"))
        for name in dict.fromkeys((*now, *before)):
            inside = f"{where}/{name}"
            # An open schema accepted any value of a property that it does not name.
            self.compare((to_in, self._property(to, name)), (of_in, self._property(of, name)), inside)
        patterns, were = _dict(to.get("patternProperties")), _dict(of.get("patternProperties"))
        for pattern in dict.fromkeys((*patterns, *were)):
            self.compare(
                (to_in, patterns.get(pattern, to.get("additionalProperties", True))),
                (of_in, were.get(pattern, of.get("additionalProperties", True))),
                f"{where}/{pattern}",
            )
        self.compare(
            (to_in, to.get("additionalProperties", True)),
            (of_in, of.get("additionalProperties", True)),
            f"{where}/additionalProperties",
        )
        required = set(_list(of.get("required")))
        for name in _list(to.get("required")):
            if name not in required and "default" not in _dict(now.get(name)):
                self._work.found(f"{where}/{name}", "is required now, was not and has no default")

    def _compare_arrays(self, to: dict[str, Any], of: dict[str, Any], to_in: Any, of_in: Any, where: str) -> None:
        (now, now_rest), (before, before_rest) = _items(to), _items(of)
        for index in range(max(len(now), len(before))):
            self.compare(
                (to_in, now[index] if index < len(now) else now_rest),
                (of_in, before[index] if index < len(before) else before_rest),
                f"{where}/{index}",
            )
        self.compare((to_in, now_rest), (of_in, before_rest), f"{where}/items")

    def _property(self, schema: dict[str, Any], name: str) -> Any:
        """The schema of a property."""
        named = _dict(schema.get("properties"))
        if name in named:
            return named[name]
        matching = []
        for pattern, one in _dict(schema.get("patternProperties")).items():
            self._work.step()
            if _is_prefix(pattern, name):
                matching.append(one)
        return {"allOf": matching} if matching else schema.get("additionalProperties", True)


def _beside(schema: dict[str, Any], *names: str) -> set[str]:
    """The relevant keywords of a schema beside a reference or a choice."""
    annotations = {
        "$id",
        "$schema",
        "$defs",
        "definitions",
        "title",
        "description",
        "examples",
        "default",
        "$comment",
    }
    return set(schema) - annotations - {"$ref"} - set(names)


def _without(schema: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != name}


def _types(schema: dict[str, Any]) -> frozenset[str]:
    given = schema.get("type")
    if given is None:
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        return frozenset(map(_type_of, listed)) if isinstance(listed, list) else _ALL_TYPES
    return frozenset([given] if isinstance(given, str) else given)


def _type_of(value: Any) -> str:
    for name, kinds in _KINDS.items():
        if isinstance(value, kinds):
            return name
    return "null"


def _values(schema: dict[str, Any]) -> set[str] | None:
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    if isinstance(schema.get("enum"), list):
        return {json.dumps(one, sort_keys=True) for one in schema["enum"]}
    return None


def _is_prefix(pattern: str, name: str) -> bool:
    # A pattern is only evaluated if it is plain text, since it comes from users; any other is assumed to match.
    plain = re.fullmatch(r"\^?([\w.-]*)\$?", pattern)
    return plain is None or plain[1] in name


def _items(schema: dict[str, Any]) -> tuple[list[Any], Any]:
    """The schemas of the first items, and that of all others, in any draft."""
    if isinstance(schema.get("prefixItems"), list):
        return schema["prefixItems"], schema.get("items", True)
    if isinstance(schema.get("items"), list):
        return schema["items"], schema.get("additionalItems", True)
    return [], schema.get("items", True)


def _dict(given: Any) -> dict[str, Any]:
    return given if isinstance(given, dict) else {}


def _list(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []
