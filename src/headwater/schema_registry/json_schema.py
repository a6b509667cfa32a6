"""JSON Schema: a schema that is one, with nothing fetched from anywhere; and whether a payload fits it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urljoin

import jsonschema_rs

from headwater.errors import InvalidSchema
from headwater.schema_registry.schemas import MAX_DEPTH, Unfit, read_json, shortened, too_deep
from headwater.schema_registry.work_limit import Work

# A pattern that would try for ever does not match; one that would take much memory is none.
_PATTERNS: Final = jsonschema_rs.FancyRegexOptions(
    backtrack_limit=10_000, size_limit=1_000_000, dfa_size_limit=1_000_000
)
MAX_CHECKS: Final = 100_000
"""How often one value may be looked at, when references multiply."""
# What looks at the same value again.
_ONE: Final = ("not", "if", "then", "else")
_MANY: Final = ("allOf", "anyOf", "oneOf")


@dataclass(frozen=True, slots=True)
class Documents:
    """A schema and those it may refer to, by address."""

    root: Any
    others: Mapping[str, Any]
    # Document -> anchor -> schema; found once, or many references would each look through all.
    _anchors: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False)

    def resolve(self, document: Any, reference: str) -> tuple[Any, Any] | None:
        """The document that a reference leads to, and the schema in it; None: it leads nowhere that is known here."""
        address, _, fragment = reference.partition("#")
        if address and address != _address(document):
            target = self.others.get(address)
            if target is None:
                target = self.others.get(urljoin(_address(document), address))
            if target is None and urljoin(_address(self.root), address) == _address(self.root):
                target = self.root
            if target is None:
                return None
            document = target
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if id(document) not in self._anchors:
                self._anchors[id(document)] = {}
                _note_anchors(document, self._anchors[id(document)])
            found = self._anchors[id(document)].get(fragment)
        else:
            found = _at(document, fragment)
        return None if found is None else (document, found)


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A JSON Schema that was understood."""

    documents: Documents
    canonical: bytes
    _validator: Any = field(repr=False)

    def check(self, payload: bytes, *, framed: bool) -> str | None:
        value = read_payload(payload)
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            where = "".join(f"/{step}" for step in error.instance_path)
            raise Unfit(shortened(f"{where or 'the value'}: {error.message}")) from None
        except ValueError as error:
            raise Unfit(shortened(str(error))) from None
        root = self.documents.root
        title = root.get("title") if isinstance(root, dict) else None
        return title if isinstance(title, str) else None

    def compare(self, written: JsonSchema, work: Work) -> None:
        from headwater.schema_registry.json_schema_compatibility import compare

        compare(self.documents, written.documents, work)


def parse(text: str, dependencies: Sequence[tuple[str, str]] = ()) -> JsonSchema:
    """Understand a schema. References lead within it, or to what it was registered with, and nowhere else."""
    root = read_json(text)
    if not isinstance(root, dict | bool):
        raise InvalidSchema("a JSON Schema is an object, or true or false")
    others: dict[str, Any] = {}
    for name, other in dependencies:
        document = read_json(other, f"the schema {name}")
        for address in (name, urljoin(_address(root), name), _address(document)):
            if address:
                others.setdefault(address, document)
    documents = Documents(root, others)
    _refuse_multiplied(documents)
    try:
        registry = jsonschema_rs.Registry(list(others.items()), retriever=_fetch_nothing) if others else None
        validator = jsonschema_rs.validator_for(root, registry=registry, offline=True, pattern_options=_PATTERNS)
    except jsonschema_rs.ValidationError as error:
        where = "".join(f"/{step}" for step in error.instance_path)
        raise InvalidSchema(shortened(f"no JSON Schema, at {where or 'the root'}: {error.message}", 400)) from None
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise InvalidSchema(shortened(f"no JSON Schema: {error}", 400)) from None
    canonical = json.dumps(root, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return JsonSchema(documents, canonical, validator)


def read_payload(payload: bytes) -> Any:
    """A payload as the JSON that it must be."""
    try:
        text = payload.decode()
        if too_deep(text):
            raise Unfit(f"the value nests deeper than {MAX_DEPTH} levels")
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise Unfit(shortened(f"the value is not JSON: {error}")) from None


def _fetch_nothing(address: str) -> Any:
    raise ValueError(f"{address} is not known: register it, and refer to it by that name")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _address(document: Any) -> str:
    found = document.get("$id", "") if isinstance(document, dict) else ""
    return found.partition("#")[0] if isinstance(found, str) else ""


def _at(document: Any, pointer: str) -> Any:
    """What a pointer leads to."""
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(document, dict) and name in document:
            document = document[name]
        elif isinstance(document, list) and name.isdecimal() and int(name[:9]) < len(document):
            document = document[int(name[:9])]
        else:
            return None
    return document


def _note_anchors(document: Any, found: dict[str, Any]) -> None:
    if isinstance(document, dict):
        # Before draft 2019-09 an anchor was written as the address of a part.
        for anchor in (document.get("$anchor"), document.get("$dynamicAnchor"), document.get("$id")):
            if isinstance(anchor, str):
                found.setdefault(anchor.removeprefix("#"), document)
    for inside in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        _note_anchors(inside, found)


def _refuse_multiplied(documents: Documents) -> None:
    """Refuse a schema whose references multiply until one value would be looked at without an end."""
    counted: dict[int, int] = {}

    def checks(document: Any, schema: Any) -> int:
        if not isinstance(schema, dict):
            return 1
        if id(schema) in counted:
            return counted[id(schema)]
        # One that leads back to itself is stopped by the validator.
        counted[id(schema)] = 1
        again = [schema[name] for name in _ONE if name in schema]
        for name in _MANY:
            if isinstance(schema.get(name), list):
                again += schema[name]
        total = 1 + sum(checks(document, one) for one in again)
        for name in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(schema.get(name), str) and (found := documents.resolve(document, schema[name])) is not None:
                total += checks(*found)
        if total > MAX_CHECKS:
            raise InvalidSchema(f"references multiply: one value would be looked at more than {MAX_CHECKS} times")
        counted[id(schema)] = total
        return total

    def everywhere(document: Any, schema: Any) -> None:
        if isinstance(schema, dict):
            checks(document, schema)
            for one in schema.values():
                everywhere(document, one)
        elif isinstance(schema, list):
            for one in schema:
                everywhere(document, one)

    for document in (documents.root, *documents.others.values()):
        everywhere(document, document)
