"""What registering, checking and loading a schema asks of the log, and what it decides. No I/O here.

Each is a generator of calls that is sent their outcomes: the doors carry them out, and so does the command line.
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
from headwater.schema_registry.schemas import Parsed, Schema
from headwater.schema_registry.work_limit import Work

LEVELS: Final = (
    "NONE", "BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE"
)  # fmt: skip
MAX_REFERENCES: Final = 100
MAX_REFERENCED_BYTES: Final = 2 * 1024 * 1024
MAX_COMPARED: Final = 100
"""With how many earlier versions a new one is compared where all count."""
ATTEMPTS: Final = 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Act:
    """A call that changes the registry, on which whoever carries it out tells of it in the log."""

    call: Call[Any]


Steps = Generator[Call[Any] | Act, Any, T]


@dataclass(frozen=True, slots=True)
class Registered:
    """Where a schema is in the registry."""

    id: int
    version: int


def carry_out(steps: Steps[T], run: Callable[[Call[Any]], Any], act: Callable[[Call[Any]], Any] | None = None) -> T:
    """Do what the steps ask for, with something that runs calls, and something that runs those that change anything."""
    try:
        asked = next(steps)
        while True:
            asked = steps.send((act or run)(asked.call) if isinstance(asked, Act) else run(asked))
    except StopIteration as done:
        result: T = done.value
        return result


def register(subject: str, schema: Schema) -> Steps[Registered]:
    """Register a schema under a subject, unless it may not follow what is there. One that is there is found again."""
    parsed, hashed = yield from _understood(schema)
    for reference in schema.references:
        # What was deleted softly is there for those that refer to it already.
        if (yield calls.find_version(reference.subject, reference.version)) is None:
            raise _unknown(reference)
    for _ in range(ATTEMPTS):
        found: Subject = yield calls.find_subject(subject, latest=MAX_COMPARED)
        same: SchemaVersion | None = yield calls.find_registered(subject, hashed)
        if same is not None:
            return Registered(same.id, same.version)
        problems = yield from _conflicts(parsed, found)
        if problems:
            raise IncompatibleSchema(
                f'the schema is not {found.compatibility.lower()} compatible under subject "{subject}": {problems[0]}',
                hint="See all with headwater schema check, or change what may follow with headwater schema config.",
                detail={"subject": subject, "compatibility": found.compatibility, "problems": problems},
            )
        registered = yield Act(calls.register_schema(subject, schema, hashed, revision=found.revision))
        if registered is not None:
            return Registered(*registered)
    raise TransactionAborted(f'subject "{subject}" changes faster than a schema can be compared with it')


def check(subject: str, version: int | str | None, schema: Schema) -> Steps[list[str]]:
    """Why a schema may not follow: a version, the latest, or without one all that the compatibility asks for."""
    parsed, _ = yield from _understood(schema)
    found: Subject = yield calls.find_subject(subject, latest=MAX_COMPARED)
    if version is None:
        return (yield from _conflicts(parsed, found))
    one: SchemaVersion | None = yield calls.find_version(subject, None if version == "latest" else int(version))
    if one is None:
        raise _missing(subject, version)
    return (yield from _compared(parsed, found.compatibility, (one,)))


def lookup(subject: str, schema: Schema, *, deleted: bool = False) -> Steps[SchemaVersion | None]:
    """The version of a subject that has this very schema."""
    _, hashed = yield from _understood(schema)
    found: SchemaVersion | None = yield calls.find_registered(subject, hashed, deleted=deleted)
    return found


def load(schema_id: int) -> Steps[Parsed | None]:
    """The schema with an id, understood; None: there is none."""
    schema: Schema | None = yield calls.find_schema(schema_id)
    return None if schema is None else (yield from understand(schema))


def understand(schema: Schema) -> Steps[Parsed]:
    """A schema with all that it refers to."""
    return schemas.parse(schema, (yield from _dependencies(schema)))


def _understood(schema: Schema) -> Steps[tuple[Parsed, bytes]]:
    parsed = yield from understand(schema)
    return parsed, schemas.hash_of(schema, parsed)


def _dependencies(schema: Schema) -> Steps[list[tuple[str, str]]]:
    """Name and text of all that a schema refers to, and that refers to in turn: what others need comes first."""
    found: dict[str, tuple[str, str]] = {}
    seen: set[tuple[str, int]] = set()
    size = 0
    # Left to do: a reference whose own are not looked at yet, or, second time, one whose own are all there.
    waiting: list[tuple[schemas.Reference, Schema | None]] = [(one, None) for one in reversed(schema.references)]
    while waiting:
        reference, resolved = waiting.pop()
        if resolved is not None:
            kept = found.setdefault(reference.name, (reference.name, resolved.text))
            if kept[1] != resolved.text:
                raise InvalidSchema(f'two schemas are referred to by one name, "{reference.name}"')
            continue
        if (reference.subject, reference.version) in seen and reference.name in found:
            continue
        seen.add((reference.subject, reference.version))
        # One that was deleted softly still means what it did to those that refer to it.
        version: SchemaVersion | None = yield calls.find_version(reference.subject, reference.version, deleted=True)
        if version is None:
            raise _unknown(reference)
        if version.schema.type != schema.type:
            raise InvalidSchema(f'"{reference.name}" is of type {version.schema.type} and not of {schema.type}')
        size += len(version.schema.text)
        if len(seen) > MAX_REFERENCES or len(waiting) > MAX_REFERENCES or size > MAX_REFERENCED_BYTES:
            raise InvalidSchema(f"a schema refers to up to {MAX_REFERENCES} others, of {MAX_REFERENCED_BYTES} bytes")
        waiting.append((reference, version.schema))
        waiting += [(one, None) for one in reversed(version.schema.references)]
    return list(found.values())


def _conflicts(parsed: Parsed, found: Subject) -> Steps[list[str]]:
    every = found.compatibility.endswith("_TRANSITIVE")
    return (yield from _compared(parsed, found.compatibility, found.versions if every else found.versions[:1]))


def _compared(parsed: Parsed, level: str, versions: tuple[SchemaVersion, ...]) -> Steps[list[str]]:
    """What does not fit between a new schema and earlier ones."""
    found: list[str] = []
    if level == "NONE":
        return found
    work = Work()
    for version in versions:
        earlier = yield from understand(version.schema)
        if not level.startswith("FORWARD"):
            found += [f"version {version.version}, {one}" for one in schemas.problems(parsed, earlier, work)]
        if not level.startswith("BACKWARD"):
            found += [f"by version {version.version}, {one}" for one in schemas.problems(earlier, parsed, work)]
    return list(dict.fromkeys(found))


def _unknown(reference: schemas.Reference) -> InvalidSchema:
    return InvalidSchema(
        f'"{reference.name}" is version {reference.version} of subject "{reference.subject}", which is not there',
        hint="Register that one first.",
    )


def _missing(subject: str, version: int | str) -> SchemaNotFound:
    return SchemaNotFound(
        f'subject "{subject}" has no version {version}',
        hint="See headwater schema list.",
        detail={"subject": subject, "version": version},
    )
