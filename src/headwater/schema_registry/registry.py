"""Registering, checking and loading schemas, as generators of calls. No I/O.

Each generator yields calls and is sent their results. The servers and the command line run them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from headwater.calls import registry as calls
from headwater.calls.call import Call
from headwater.calls.registry import SchemaVersion, Subject
from headwater.errors import IncompatibleSchema, InvalidSchema, SchemaNotFound, TransactionAborted
from headwater.schema_registry import schemas
from headwater.schema_registry.schemas import ParsedSchema, Schema
from headwater.schema_registry.work_limit import WorkLimit

LEVELS: Final = (
    "NONE", "BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE"
)  # fmt: skip
MAX_REFERENCES: Final = 100
MAX_REFERENCED_BYTES: Final = 2 * 1024 * 1024
MAX_COMPARED: Final = 100
"""The number of earlier versions that a new one is compared with at a transitive level."""
ATTEMPTS: Final = 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Change:
    """A call that changes the registry, so that the caller records it in the audit log."""

    call: Call[Any]


Steps = Generator[Call[Any] | Change, Any, T]


@dataclass(frozen=True, slots=True)
class Registration:
    """The id and version of a registered schema."""

    id: int
    version: int


def run_steps(steps: Steps[T], run: Callable[[Call[Any]], Any], act: Callable[[Call[Any]], Any] | None = None) -> T:
    """Run the steps: calls with `run`, and calls that change the registry with `act`."""
    try:
        step = next(steps)
        while True:
            step = steps.send((act or run)(step.call) if isinstance(step, Change) else run(step))
    except StopIteration as done:
        result: T = done.value
        return result


def register(subject: str, schema: Schema) -> Steps[Registration]:
    """Register a schema under a subject if it is compatible. An already registered schema returns its existing
    version."""
    parsed, hashed = yield from _understood(schema)
    for reference in schema.references:
        # Soft-deleted versions are only available to schemas that already refer to them.
        if (yield calls.find_version(reference.subject, reference.version)) is None:
            raise _unknown(reference)
    for _ in range(ATTEMPTS):
        found: Subject = yield calls.find_subject(subject, latest=MAX_COMPARED)
        same: SchemaVersion | None = yield calls.find_registered(subject, hashed)
        if same is not None:
            return Registration(same.id, same.version)
        problems = yield from _conflicts(parsed, found)
        if problems:
            raise IncompatibleSchema(
                f'the schema is not {found.compatibility.lower()} compatible under subject "{subject}": {problems[0]}',
                hint="See all problems with `headwater schema check`, or set the level with `headwater schema config`.",
                detail={"subject": subject, "compatibility": found.compatibility, "problems": problems},
            )
        registered = yield Change(calls.register_schema(subject, schema, hashed, revision=found.revision))
        if registered is not None:
            return Registration(*registered)
    raise TransactionAborted(f'subject "{subject}" was changed concurrently too often; retry')


def check(subject: str, version: int | str | None, schema: Schema) -> Steps[list[str]]:
    """The reasons why a schema is incompatible with a version or, without one, with all versions that the level
    requires."""
    parsed, _ = yield from _understood(schema)
    found: Subject = yield calls.find_subject(subject, latest=MAX_COMPARED)
    if version is None:
        return (yield from _conflicts(parsed, found))
    one: SchemaVersion | None = yield calls.find_version(subject, None if version == "latest" else int(version))
    if one is None:
        raise _missing(subject, version)
    return (yield from _compared(parsed, found.compatibility, (one,)))


def lookup(subject: str, schema: Schema, *, deleted: bool = False) -> Steps[SchemaVersion | None]:
    """The version of a subject with exactly this schema."""
    _, hashed = yield from _understood(schema)
    found: SchemaVersion | None = yield calls.find_registered(subject, hashed, deleted=deleted)
    return found


def load(schema_id: int) -> Steps[ParsedSchema | None]:
    """The parsed schema with an id; None if it does not exist."""
    schema: Schema | None = yield calls.find_schema(schema_id)
    return None if schema is None else (yield from understand(schema))


def understand(schema: Schema) -> Steps[ParsedSchema]:
    """Parse a schema with all schemas that it refers to."""
    return schemas.parse(schema, (yield from _dependencies(schema)))


def _understood(schema: Schema) -> Steps[tuple[ParsedSchema, bytes]]:
    parsed = yield from understand(schema)
    return parsed, schemas.hash_of(schema, parsed)


def _dependencies(schema: Schema) -> Steps[list[tuple[str, str]]]:
    """Name and text of all schemas that a schema refers to, directly or not, in order of dependency."""
    found: dict[str, tuple[str, str]] = {}
    seen: set[tuple[str, int]] = set()
    size = 0
    # The stack: a reference to resolve or, the second time, a reference whose own references are resolved.
    waiting: list[tuple[schemas.Reference, Schema | None]] = [(one, None) for one in reversed(schema.references)]
    while waiting:
        reference, resolved = waiting.pop()
        if resolved is not None:
            kept = found.setdefault(reference.name, (reference.name, resolved.text))
            if kept[1] != resolved.text:
                raise InvalidSchema(f'two references have the same name "{reference.name}"')
            continue
        if (reference.subject, reference.version) in seen and reference.name in found:
            continue
        seen.add((reference.subject, reference.version))
        # Soft-deleted versions remain valid for schemas that refer to them.
        version: SchemaVersion | None = yield calls.find_version(reference.subject, reference.version, deleted=True)
        if version is None:
            raise _unknown(reference)
        if version.schema.type != schema.type:
            raise InvalidSchema(f'"{reference.name}" has type {version.schema.type}, expected {schema.type}')
        size += len(version.schema.text)
        if len(seen) > MAX_REFERENCES or len(waiting) > MAX_REFERENCES or size > MAX_REFERENCED_BYTES:
            raise InvalidSchema(
                f"too many references: the limit is {MAX_REFERENCES} schemas of {MAX_REFERENCED_BYTES} bytes in all"
            )
        waiting.append((reference, version.schema))
        waiting += [(one, None) for one in reversed(version.schema.references)]
    return list(found.values())


def _conflicts(parsed: ParsedSchema, found: Subject) -> Steps[list[str]]:
    every = found.compatibility.endswith("_TRANSITIVE")
    return (yield from _compared(parsed, found.compatibility, found.versions if every else found.versions[:1]))


def _compared(parsed: ParsedSchema, level: str, versions: tuple[SchemaVersion, ...]) -> Steps[list[str]]:
    """The incompatibilities between a new schema and earlier ones."""
    found: list[str] = []
    if level == "NONE":
        return found
    work = WorkLimit()
    for version in versions:
        earlier = yield from understand(version.schema)
        if not level.startswith("FORWARD"):
            found += [f"version {version.version}, {one}" for one in schemas.problems(parsed, earlier, work)]
        if not level.startswith("BACKWARD"):
            found += [f"by version {version.version}, {one}" for one in schemas.problems(earlier, parsed, work)]
    return list(dict.fromkeys(found))


def _unknown(reference: schemas.Reference) -> InvalidSchema:
    return InvalidSchema(
        f'"{reference.name}" is version {reference.version} of subject "{reference.subject}", which does not exist',
        hint="Register that version first.",
    )


def _missing(subject: str, version: int | str) -> SchemaNotFound:
    return SchemaNotFound(
        f'subject "{subject}" has no version {version}',
        hint="List the versions with `headwater schema list`.",
        detail={"subject": subject, "version": version},
    )
