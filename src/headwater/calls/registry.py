"""Calls for the schema registry: subjects, versions, compatibility, and the schemas of topics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg.types.json import Jsonb

from headwater.calls.call import Call, Rows, nothing, only_value
from headwater.calls.encoding import checked_text
from headwater.schema_registry.schemas import Reference, Schema

_COLUMNS = "subject, version, id, type, text, refers_to, deleted"


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A version of a subject, with its schema."""

    subject: str
    version: int
    id: int
    schema: Schema
    deleted: bool


@dataclass(frozen=True, slots=True)
class Subject:
    """The state of a subject that a registration needs. `versions`: newest first, without deleted ones."""

    revision: int
    compatibility: str
    versions: tuple[SchemaVersion, ...]


@dataclass(frozen=True, slots=True)
class SubjectOverview:
    """An overview of a subject. `topics`: those whose keys or values must match its schema."""

    name: str
    type: str
    versions: int
    latest: int
    compatibility: str
    topics: list[str]


def find_schema(schema_id: int) -> Call[Schema | None]:
    """The schema with an id, even if its versions are deleted."""
    return Call(
        "select type, text, refers_to from headwater_internal.schema_overview where id = %s limit 1",
        (schema_id,),
        lambda rows: _schema(*rows[0]) if rows else None,
    )


def find_version(subject: str, version: int | None, *, deleted: bool = False) -> Call[SchemaVersion | None]:
    """A version of a subject; version=None: the latest."""
    return Call(
        f"select {_COLUMNS} from headwater_internal.schema_overview where subject = %s and version = coalesce(%s, "
        f"version) "
        "and (%s or not deleted) order by version desc limit 1",
        (_subject(subject), version, deleted),
        _first,
    )


def find_registered(subject: str, hash: bytes, *, deleted: bool = False) -> Call[SchemaVersion | None]:
    """The newest version of a subject with exactly this schema."""
    return Call(
        f"select {_COLUMNS} from headwater_internal.schema_overview where subject = %s and hash = %s and (%s or not "
        f"deleted) "
        "order by version desc limit 1",
        (_subject(subject), hash, deleted),
        _first,
    )


def find_subject(subject: str, *, latest: int) -> Call[Subject]:
    """A subject with its latest versions; a missing subject is returned without versions."""
    return Call(
        "select coalesce(s.revision, 0), coalesce(s.compatibility, r.compatibility), v.* "
        "from headwater_internal.schema_registry r "
        "left join headwater_internal.schema_subject s on s.name = %s "
        f"left join lateral (select {_COLUMNS} from headwater_internal.schema_overview o "
        "where o.subject = s.name and not o.deleted order by o.version desc limit %s) as v on true",
        (_subject(subject), latest),
        lambda rows: Subject(rows[0][0], rows[0][1], tuple(_version(row[2:]) for row in rows if row[3] is not None)),
    )


def register_schema(subject: str, schema: Schema, hash: bytes, *, revision: int) -> Call[tuple[int, int] | None]:
    """Register a schema; returns its id and version. None: the subject changed after its revision was read, and nothing
    was registered."""
    return Call(
        "select id, version from headwater_internal.register_schema(%s, %s, %s, %s, %s, %s)",
        (
            _subject(subject),
            schema.type,
            checked_text(schema.text, "schema"),
            hash,
            Jsonb([list(one) for one in schema.references]),
            revision,
        ),
        lambda rows: (rows[0][0], rows[0][1]) if rows else None,
    )


def delete_schema(subject: str, version: int | None = None, *, for_good: bool = False) -> Call[list[int]]:
    """Delete a version, or all versions: softly or, with `for_good`, permanently after a soft delete. Returns the
    deleted versions."""
    return Call(
        "select headwater_internal.delete_schema(%s, %s, %s)", (_subject(subject), version, for_good), only_value
    )


def subjects(*, prefix: str = "", deleted: bool = False) -> Call[list[str]]:
    """The names of subjects with versions."""
    return Call(
        "select distinct subject from headwater_internal.schema_version "
        "where starts_with(subject, %s) and (%s or deleted_at is null) order by subject",
        (checked_text(prefix, "prefix"), deleted),
        lambda rows: [name for (name,) in rows],
    )


def versions(subject: str, *, deleted: bool = False) -> Call[list[tuple[int, int]]]:
    """The versions of a subject with the ids of their schemas, in order."""
    return Call(
        "select version, schema_id from headwater_internal.schema_version "
        "where subject = %s and (%s or deleted_at is null) order by version",
        (_subject(subject), deleted),
        lambda rows: [(version, schema_id) for version, schema_id in rows],
    )


def subject_overview() -> Call[list[SubjectOverview]]:
    """All subjects with versions."""
    return Call(
        "select name, type, versions, latest, compatibility, topics "
        "from headwater_internal.schema_subject_overview order by name",
        (),
        lambda rows: [SubjectOverview(*row) for row in rows],
    )


def uses_of_schema(schema_id: int, *, deleted: bool = False) -> Call[list[tuple[str, int]]]:
    """The subjects and versions under which a schema is registered."""
    return Call(
        "select subject, version from headwater_internal.schema_version "
        "where schema_id = %s and (%s or deleted_at is null) order by subject, version",
        (schema_id, deleted),
        lambda rows: [(subject, version) for subject, version in rows],
    )


def schemas_referring_to(subject: str, version: int) -> Call[list[int]]:
    """The ids of schemas that refer to a version."""
    return Call(
        "select distinct r.schema_id from headwater_internal.schema_reference r join "
        "headwater_internal.schema_version v "
        "on v.schema_id = r.schema_id and v.deleted_at is null where r.subject = %s and r.version = %s order by 1",
        (_subject(subject), version),
        lambda rows: [schema_id for (schema_id,) in rows],
    )


def compatibility(subject: str | None = None) -> Call[str | None]:
    """The global compatibility level, or that of a subject; None: the subject has none of its own."""
    if subject is None:
        return Call("select compatibility from headwater_internal.schema_registry", (), only_value)
    return Call(
        "select compatibility from headwater_internal.schema_subject where name = %s",
        (_subject(subject),),
        lambda rows: rows[0][0] if rows else None,
    )


def set_compatibility(subject: str | None, level: str | None) -> Call[None]:
    return Call(
        "select headwater_internal.set_schema_compatibility(%s, %s)",
        (None if subject is None else _subject(subject), None if level is None else checked_text(level, "level")),
        nothing,
    )


def set_topic_schemas(topic: str, parts: Mapping[str, Mapping[str, Any]]) -> Call[None]:
    """Set the schemas of a topic's keys and values: key or value -> subject, framed, strategy. An empty subject removes
    the binding."""
    return Call("select headwater_internal.set_topic_schemas(%s, %s)", (topic, Jsonb(parts)), nothing)


def _subject(name: str) -> str:
    return checked_text(name, "subject")


def _schema(type: str, text: str, refers_to: Sequence[Sequence[Any]]) -> Schema:
    return Schema(type, text, tuple(Reference(*one) for one in refers_to))


def _version(row: Sequence[Any]) -> SchemaVersion:
    return SchemaVersion(row[0], row[1], row[2], _schema(row[3], row[4], row[5]), row[6])


def _first(rows: Rows) -> SchemaVersion | None:
    return _version(rows[0]) if rows else None
