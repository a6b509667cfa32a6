"""Schemas of payloads: what one is, whether a payload fits it, whether one may follow another. Pure.

Parsing is strict and bounded: a text is refused by its size, its depth or the work it would make, and never by a crash.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from headwater.errors import InvalidRequest, InvalidSchema
from headwater.schema_registry.work_limit import Work

AVRO, JSON, PROTOBUF = "AVRO", "JSON", "PROTOBUF"
TYPES: Final = (AVRO, JSON, PROTOBUF)
MAX_TEXT_BYTES: Final = 524_288
MAX_DEPTH: Final = 100
"""How deeply a schema may nest, and a payload of JSON or Avro."""

# A text that does not end goes on to the end, so that this is tried once for each.
_TEXTS: Final = re.compile(r'"(?:[^"\\]+|\\.)*"?', re.DOTALL)
_OTHERS: Final = re.compile(r"[^\[\]{}]+")


class Reference(NamedTuple):
    """A version of another subject, and the name under which a schema uses it."""

    name: str
    subject: str
    version: int


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema as it was written."""

    type: str
    text: str
    references: tuple[Reference, ...] = ()


class Unfit(Exception):
    """A payload does not fit its schema. The message says where."""


class Parsed(Protocol):
    """A schema that was understood."""

    @property
    def canonical(self) -> bytes:
        """Its one form: the same for texts between which there is no difference."""

    def check(self, payload: bytes, *, framed: bool) -> str | None:
        """The name of what the payload is, or Unfit. Framed: it followed an id, as serializers write it."""

    def compare(self, written: Any, work: Work) -> None:
        """Find why a reader with this schema cannot read what was written with that one, of the same type."""


def parse(schema: Schema, dependencies: Sequence[tuple[str, str]] = ()) -> Parsed:
    """Understand a schema, or raise InvalidSchema. Dependencies: name and text of all it refers to, theirs first."""
    if schema.type not in TYPES:
        raise InvalidSchema(f"{schema.type!r} is no type of schema", hint=f"There are {', '.join(TYPES)}.")
    if len(schema.text.encode(errors="replace")) > MAX_TEXT_BYTES:
        raise InvalidSchema(f"a schema is up to {MAX_TEXT_BYTES} bytes")
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
        raise InvalidSchema("the types of the schema hold each other too deeply") from None
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"{error.name} is not installed", hint="Run: pip install 'headwater[schemas]'") from error


def problems(reader: Parsed, writer: Parsed, work: Work | None = None) -> list[str]:
    """Why what was written with one schema cannot be read with the other; nothing: it can."""
    work = work or Work()
    if type(reader) is not type(writer):
        return ["the root: a schema of another type cannot follow"]
    try:
        reader.compare(writer, work)
    except RecursionError:
        raise InvalidSchema("the types of the schemas hold each other too deeply to be compared") from None
    return work.told()


def hash_of(schema: Schema, parsed: Parsed) -> bytes:
    """What tells a schema from all others."""
    known = json.dumps([schema.type, schema.references]).encode()
    return hashlib.sha256(len(known).to_bytes(4, "big") + known + parsed.canonical).digest()


def read_json(text: str, what: str = "the schema") -> Any:
    """JSON that nests no deeper than it may, or InvalidSchema."""
    if too_deep(text):
        raise InvalidSchema(f"{what} nests deeper than {MAX_DEPTH} levels")
    try:
        return json.loads(text, object_pairs_hook=_without_twins, parse_constant=_no_constant)
    except ValueError as error:
        raise InvalidSchema(f"{what} is not JSON: {error}") from None


def too_deep(text: str) -> bool:
    """Whether the brackets of a JSON text nest deeper than they may; found without recursion."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    left = _OTHERS.sub("", _TEXTS.sub("", text))
    for _ in range(MAX_DEPTH):
        # Each round takes the innermost away.
        left = left.replace("[]", "").replace("{}", "")
    # What does not close is no JSON, and may be as deep as it is long.
    return len(left) > MAX_DEPTH or "[]" in left or "{}" in left


def shortened(text: str, limit: int = 200) -> str:
    """A text that fits into an error."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
