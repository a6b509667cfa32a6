"""Schemas of payloads: parsing, validation of payloads, and compatibility. Pure.

Parsing is strict and bounded: a schema is rejected for its size, its depth or the work it would cause, never by a
crash.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from headwater.errors import InvalidRequest, InvalidSchema
from headwater.schema_registry.work_limit import WorkLimit

AVRO, JSON, PROTOBUF = "AVRO", "JSON", "PROTOBUF"
TYPES: Final = (AVRO, JSON, PROTOBUF)
MAX_TEXT_BYTES: Final = 524_288
MAX_DEPTH: Final = 100
"""The maximal nesting of a schema, and of a JSON or Avro payload."""

# An unterminated string extends to the end, so that the pattern is tried only once for it.
_TEXTS: Final = re.compile(r'"(?:[^"\\]+|\\.)*"?', re.DOTALL)
_OTHERS: Final = re.compile(r"[^\[\]{}]+")


class Reference(NamedTuple):
    """A version of another subject, and the name under which a schema uses it."""

    name: str
    subject: str
    version: int


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema as it was submitted."""

    type: str
    text: str
    references: tuple[Reference, ...] = ()


class PayloadMismatch(Exception):
    """A payload does not match its schema. The message names the location."""


class ParsedSchema(Protocol):
    """A parsed schema."""

    @property
    def canonical(self) -> bytes:
        """The canonical form: the same for texts without a relevant difference."""

    def check(self, payload: bytes, *, framed: bool) -> str | None:
        """Validate a payload; returns the name of its type. Raises PayloadMismatch. `framed`: a schema id precedes it,
        as serializers write it."""

    def compare(self, written: Any, work: WorkLimit) -> None:
        """Collect the reasons why a reader with this schema cannot read what was written with that one, of the same
        type."""


def parse(schema: Schema, dependencies: Sequence[tuple[str, str]] = ()) -> ParsedSchema:
    """Parse a schema. Raises InvalidSchema. `dependencies`: name and text of all schemas it refers to, in order of
    dependency."""
    if schema.type not in TYPES:
        raise InvalidSchema(f"invalid schema type {schema.type!r}", hint=f"Expected one of {', '.join(TYPES)}.")
    if len(schema.text.encode(errors="replace")) > MAX_TEXT_BYTES:
        raise InvalidSchema(f"the schema is larger than {MAX_TEXT_BYTES} bytes")
    try:
        if schema.type == AVRO:
            from headwater.schema_registry import avro

            return avro.parse(schema.text, dependencies)
        if schema.type == JSON:
            from headwater.schema_registry import json_schema

            return json_schema.parse(schema.text, dependencies)
        from headwater.schema_registry import protobuf

        return protobuf.parse(schema.text, dependencies)
    except RecursionError:
        raise InvalidSchema("the types of the schema are nested too deeply") from None
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"{error.name} is not installed", hint="Run: pip install 'headwater[schemas]'") from error


def problems(reader: ParsedSchema, writer: ParsedSchema, work: WorkLimit | None = None) -> list[str]:
    """The reasons why data written with one schema cannot be read with the other; empty if it can."""
    work = work or WorkLimit()
    if type(reader) is not type(writer):
        return ["the root: the schema type differs"]
    try:
        reader.compare(writer, work)
    except RecursionError:
        raise InvalidSchema("the types of the schemas are nested too deeply to be compared") from None
    return work.take_problems()


def hash_of(schema: Schema, parsed: ParsedSchema) -> bytes:
    """A hash that identifies a schema."""
    known = json.dumps([schema.type, schema.references]).encode()
    return hashlib.sha256(len(known).to_bytes(4, "big") + known + parsed.canonical).digest()


def read_json(text: str, what: str = "the schema") -> Any:
    """Parse JSON of limited depth. Raises InvalidSchema."""
    if too_deep(text):
        raise InvalidSchema(f"{what} nests deeper than {MAX_DEPTH} levels")
    try:
        return json.loads(text, object_pairs_hook=_without_twins, parse_constant=_no_constant)
    except ValueError as error:
        raise InvalidSchema(f"{what} is not JSON: {error}") from None


def too_deep(text: str) -> bool:
    """Whether the brackets of a JSON text nest deeper than MAX_DEPTH; without recursion."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    left = _OTHERS.sub("", _TEXTS.sub("", text))
    for _ in range(MAX_DEPTH):
        # Each round removes the innermost brackets.
        left = left.replace("[]", "").replace("{}", "")
    # Unbalanced text is not JSON, and may be as deep as it is long.
    return len(left) > MAX_DEPTH or "[]" in left or "{}" in left


def shortened(text: str, limit: int = 200) -> str:
    """Truncate a text for an error message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a duplicate name")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
