"""JSON Schema: parsing without fetching anything, and validation of payloads. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urljoin

import jsonschema_rs

from headwater.errors import InvalidSchema
from headwater.schema_registry.schemas import MAX_DEPTH, PayloadMismatch, read_json, shortened, too_deep
from headwater.schema_registry.work_limit import WorkLimit

# A pattern that would backtrack without end does not match; one that needs too much memory is rejected.
_PATTERNS: Final = jsonschema_rs.FancyRegexOptions(
    backtrack_limit=10_000, size_limit=1_000_000, dfa_size_limit=1_000_000
)
MAX_CHECKS: Final = 100_000
"""The number of times that one value may be checked, when references multiply."""
# Keywords that check the same value again.
_ONE: Final = ("not", "if", "then", "else")
_MANY: Final = ("allOf", "anyOf", "oneOf")


@dataclass(frozen=True, slots=True)
class Documents:
    """A schema and the schemas it may refer to, by address."""

    root: Any
    others: Mapping[str, Any]
    # Document -> anchor -> schema; indexed once, or each reference would search all documents.
    _anchors: dict[int, dict[str, Any]] = field(default_factory=dict, repr=False)

    def resolve(self, document: Any, reference: str) -> tuple[Any, Any] | None:
        """The document that a reference leads to, and the schema in it; None if it is unknown."""
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
    """A parsed JSON Schema."""

    documents: Documents
    canonical: bytes
    _validator: Any = field(repr=False)

    def check(self, payload: bytes, *, framed: bool) -> str | None:
        value = read_payload(payload)
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            where = "".join(f"/{step}" for step in error.instance_path)
            raise PayloadMismatch(shortened(f"{where or 'the value'}: {error.message}")) from None
        except ValueError as error:
            raise PayloadMismatch(shortened(str(error))) from None
        root = self.documents.root
        title = root.get("title") if isinstance(root, dict) else None
        return title if isinstance(title, str) else None

    def compare(self, written: JsonSchema, work: WorkLimit) -> None:
        from headwater.schema_registry.json_schema_compatibility import compare

        compare(self.documents, written.documents, work)


def parse(text: str, dependencies: Sequence[tuple[str, str]] = ()) -> JsonSchema:
    """Parse a schema. References can only lead to the schema itself or to the schemas it was registered with."""
    root = read_json(text)
    if not isinstance(root, dict | bool):
        raise InvalidSchema("a JSON Schema must be an object, true or false")
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
        raise InvalidSchema(shortened(f"invalid JSON Schema, at {where or 'the root'}: {error.message}", 400)) from None
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        raise InvalidSchema(shortened(f"invalid JSON Schema: {error}", 400)) from None
    canonical = json.dumps(root, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return JsonSchema(documents, canonical, validator)


def read_payload(payload: bytes) -> Any:
    """Parse a payload as JSON. Raises PayloadMismatch."""
    try:
        text = payload.decode()
        if too_deep(text):
            raise PayloadMismatch(f"the value nests deeper than {MAX_DEPTH} levels")
        return json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise PayloadMismatch(shortened(f"the value is not JSON: {error}")) from None


def _fetch_nothing(address: str) -> Any:
    raise ValueError(f"unknown schema {address}: register it, and add a reference with this name")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _address(document: Any) -> str:
    found = document.get("$id", "") if isinstance(document, dict) else ""
    return found.partition("#")[0] if isinstance(found, str) else ""


def _at(document: Any, pointer: str) -> Any:
    """The value that a JSON pointer leads to."""
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
        # Before draft 2019-09, an anchor was written as the $id of a subschema.
        for anchor in (document.get("$anchor"), document.get("$dynamicAnchor"), document.get("$id")):
            if isinstance(anchor, str):
                found.setdefault(anchor.removeprefix("#"), document)
    for inside in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        _note_anchors(inside, found)


def _refuse_multiplied(documents: Documents) -> None:
    """Raise InvalidSchema if references multiply so that one value would be checked too often."""
    counted: dict[int, int] = {}

    def checks(document: Any, schema: Any) -> int:
        if not isinstance(schema, dict):
            return 1
        if id(schema) in counted:
            return counted[id(schema)]
        # The validator stops cycles.
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
            raise InvalidSchema(f"references multiply: one value would be checked more than {MAX_CHECKS} times")
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
