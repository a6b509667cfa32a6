"""The registry of schemas over HTTP, in the shape that Confluent's clients and serializers expect."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import psycopg
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from headwater.calls import Call
from headwater.calls import registry as calls
from headwater.calls.registry import SchemaVersion
from headwater.errors import (
    HeadwaterError,
    IncompatibleSchema,
    InvalidRequest,
    InvalidSchema,
    LogUnavailable,
    NotAllowed,
    SchemaInUse,
    SchemaMismatch,
    SchemaNotDeleted,
    SchemaNotFound,
    TransactionAborted,
)
from headwater.observability.metrics import ERROR, logger
from headwater.schema_registry import registry
from headwater.schema_registry.registry import LEVELS
from headwater.schema_registry.run import PATIENCE_SECONDS, carry_out
from headwater.schema_registry.schemas import AVRO, PROTOBUF, TYPES, Reference, Schema
from headwater.servers.authentication import NotAuthenticated
from headwater.servers.http.authorization import caller_of
from headwater.servers.http.dependencies import served
from headwater.servers.http.errors import TookTooLong, from_postgres

CONTENT_TYPE: Final = "application/vnd.schemaregistry.v1+json"
# A schema of the largest size, in JSON within JSON, and room for references.
MAX_BODY_BYTES: Final = 2 * 1024 * 1024
MAX_REFERENCES: Final = 100
MAX_LISTED: Final = 10_000
# Python reads no number of some thousand digits.
_NUMBER: Final = re.compile(r"[0-9]{1,20}")


class Refusal(Exception):
    """An answer that is an error: the status, and the code that clients go by."""

    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


# The nearest class in an error's ancestry decides.
_CODES: Final[Mapping[type[BaseException], tuple[int, int]]] = {
    InvalidSchema: (422, 42201),
    IncompatibleSchema: (409, 409),
    SchemaInUse: (422, 42206),
    SchemaNotFound: (404, 40402),
    InvalidRequest: (422, 422),
    NotAuthenticated: (401, 40101),
    NotAllowed: (403, 40301),
    LogUnavailable: (503, 50301),
    TransactionAborted: (503, 50301),
    SchemaMismatch: (503, 50301),
    TookTooLong: (504, 50401),
    HeadwaterError: (500, 50001),
}


def _answered(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type=CONTENT_TYPE)


def _refused(error: HeadwaterError | psycopg.Error | Refusal) -> Response:
    if isinstance(error, Refusal):
        return _answered({"error_code": error.code, "message": str(error)}, error.status)
    if isinstance(error, psycopg.Error):
        error = from_postgres(error)
    status, code = next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
    if status == 500:
        logger.error("registry failed", extra={ERROR: str(error)})
    message = str(error)
    if isinstance(error, IncompatibleSchema):
        message = f"{error.message}; details: {json.dumps(error.detail.get('problems', []))}"
    return _answered({"error_code": code, "message": message}, status)


class _Route(APIRoute):
    """Tells every error of ours in the registry's own shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except (Refusal, HeadwaterError, psycopg.Error) as error:
                return _refused(error)

        return answer


router = APIRouter(route_class=_Route, include_in_schema=False)


class _Asked:
    """One request: what it says, who sent it, and the log."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.log = served(request).log
        self.caller = caller_of(request)

    async def run(self, call: Call[Any]) -> Any:
        return await self.log.run(call, patience_seconds=PATIENCE_SECONDS)

    async def act(self, call: Call[Any], action: str, subject: str, detail: Mapping[str, Any]) -> Any:
        """Carry out what changes the registry, with the event that tells of it."""
        return await self.log.run_audited(call, self.caller.account, action, subject, detail)

    async def configure(self, subject: str | None, level: str | None) -> None:
        call = calls.set_compatibility(subject, level)
        await self.act(call, "schema.config", subject or "*", {"compatibility": level or "reset"})

    def flag(self, name: str) -> bool:
        return self._request.query_params.get(name, "").lower() == "true"

    def text(self, name: str) -> str:
        return self._request.query_params.get(name, "")

    def page(self, found: list[Any]) -> Response:
        """Some of what was found, as `offset` and `limit` say; no limit, or one below 0: all."""
        try:
            offset, limit = int(self.text("offset") or 0), int(self.text("limit") or -1)
        except ValueError:
            raise Refusal(422, 422, "offset and limit are numbers") from None
        offset = max(offset, 0)
        return _answered(found[offset : offset + (limit if limit >= 0 else MAX_LISTED)])

    async def body(self) -> dict[str, Any]:
        parts: list[bytes] = []
        size = 0
        async for part in self._request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise Refusal(413, 413, f"a request is up to {MAX_BODY_BYTES} bytes")
            parts.append(part)
        try:
            found = json.loads(b"".join(parts))
        except (ValueError, RecursionError):
            raise Refusal(400, 400, "the body is not JSON") from None
        if not isinstance(found, dict):
            raise Refusal(422, 422, "the body is an object of JSON")
        return found

    async def schema(self) -> Schema:
        return _schema_of(await self.body())

    # Rights. A subject counts as a topic of its name; one for the keys or values of a topic as that topic, too.

    def may(self, action: str, subject: str) -> bool:
        return any(self.caller.may(action, "topic", name) for name in _names(subject))

    def need(self, action: str, subject: str) -> None:
        if not self.may(action, subject):
            self.caller.need(action, "topic", subject)


def _names(subject: str) -> list[str]:
    topics = [subject.removesuffix(end) for end in ("-key", "-value") if subject.endswith(end)]
    return [subject, *topics]


def _schema_of(body: dict[str, Any]) -> Schema:
    text, kind, given = body.get("schema"), body.get("schemaType") or AVRO, body.get("references") or []
    if not isinstance(text, str) or not text.strip():
        raise Refusal(422, 42201, 'there is no schema: send it as the text "schema"')
    if not isinstance(kind, str) or kind.upper() not in TYPES:
        raise Refusal(422, 42201, f"schemaType is one of {', '.join(TYPES)}")
    for name in ("ruleSet", "metadata"):
        if body.get(name):
            raise Refusal(422, 42201, f"{name} is not offered: send the schema without it")
    if not isinstance(given, list) or len(given) > MAX_REFERENCES:
        raise Refusal(422, 42201, f"references are a list, of up to {MAX_REFERENCES}")
    references = []
    for one in given:
        fields: list[Any] = [one.get(name) for name in Reference._fields] if isinstance(one, dict) else []
        if [type(field) for field in fields] != [str, str, int]:
            raise Refusal(422, 42201, "a reference has a name, a subject and a version")
        references.append(Reference(*fields))
    return Schema(kind.upper(), text, tuple(references))


async def _told(asked: _Asked, schema: Schema) -> dict[str, Any]:
    """A schema as clients read it. That it is Avro is never said."""
    text = schema.text
    if schema.type == PROTOBUF and asked.text("format") == "serialized":
        parsed: Any = await carry_out(asked.log, registry.understand(schema))
        text = parsed.serialized
    told: dict[str, Any] = {"schema": text}
    if schema.type != AVRO:
        told["schemaType"] = schema.type
    if schema.references:
        told["references"] = [one._asdict() for one in schema.references]
    return told


def _no_subject(subject: str) -> Refusal:
    return Refusal(404, 40401, f"Subject '{subject}' not found.")


def _no_version(version: str) -> Refusal:
    return Refusal(404, 40402, f"Version {version} not found.")


def _no_schema(schema_id: str = "") -> Refusal:
    return Refusal(404, 40403, f"Schema {schema_id} not found." if schema_id else "Schema not found")


def _version_of(text: str) -> int | None:
    """The number of a version; None: the latest."""
    if text in ("latest", "-1"):
        return None
    if _NUMBER.fullmatch(text) is None or not 1 <= int(text) < 2**31:
        raise Refusal(422, 42202, f"The specified version '{text}' is not a valid version id: a number, or latest.")
    return int(text)


def _id_of(text: str) -> int:
    if _NUMBER.fullmatch(text) is None or int(text) >= 2**31:
        raise _no_schema(text[:20])
    return int(text)


async def _found(asked: _Asked, subject: str, version: str, *, deleted: bool) -> SchemaVersion:
    number = _version_of(version)
    found: SchemaVersion | None = await asked.run(calls.find_version(subject, number, deleted=deleted))
    if found is None:
        if not await asked.run(calls.versions(subject, deleted=deleted)):
            raise _no_subject(subject)
        raise _no_version(version)
    return found


# Subjects


@router.get("/subjects")
async def list_subjects(request: Request) -> Response:
    asked = _Asked(request)
    hidden = asked.flag("deleted") or asked.flag("deleted_only")
    found = await asked.run(calls.subjects(prefix=asked.text("subjectPrefix"), deleted=hidden))
    if asked.flag("deleted_only"):
        living = set(await asked.run(calls.subjects()))
        found = [name for name in found if name not in living]
    return asked.page([name for name in found if asked.may("describe", name)])


@router.get("/subjects/{subject:path}/versions/{version}/schema")
async def show_text(request: Request, subject: str, version: str) -> Response:
    asked = _Asked(request)
    asked.need("describe", subject)
    found = await _found(asked, subject, version, deleted=asked.flag("deleted"))
    return Response((await _told(asked, found.schema))["schema"], media_type=CONTENT_TYPE)


@router.get("/subjects/{subject:path}/versions/{version}/referencedby")
async def list_referring(request: Request, subject: str, version: str) -> Response:
    asked = _Asked(request)
    asked.need("describe", subject)
    found = await _found(asked, subject, version, deleted=False)
    return asked.page(await asked.run(calls.schemas_referring_to(subject, found.version)))


@router.get("/subjects/{subject:path}/versions/{version}")
async def show_version(request: Request, subject: str, version: str) -> Response:
    asked = _Asked(request)
    asked.need("describe", subject)
    found = await _found(asked, subject, version, deleted=asked.flag("deleted"))
    told = await _told(asked, found.schema)
    return _answered({"subject": found.subject, "version": found.version, "id": found.id, **told})


@router.get("/subjects/{subject:path}/versions")
async def list_versions(request: Request, subject: str) -> Response:
    asked = _Asked(request)
    asked.need("describe", subject)
    found = await asked.run(calls.versions(subject, deleted=asked.flag("deleted") or asked.flag("deleted_only")))
    if asked.flag("deleted_only"):
        living = await asked.run(calls.versions(subject))
        found = [one for one in found if one not in living]
    if not found:
        raise _no_subject(subject)
    return asked.page([version for version, _ in found])


@router.post("/subjects/{subject:path}/versions")
async def register(request: Request, subject: str) -> Response:
    asked = _Asked(request)
    asked.need("write", subject)
    schema = await asked.schema()

    async def act(call: Call[Any]) -> Any:
        async with asked.log.audited(
            asked.caller.account, "schema.register", subject, {"type": schema.type}
        ) as connection:
            outcome = await asked.log.run(call, connection=connection)
            if outcome is None:
                # The subject changed meanwhile: nothing was done that could be told of.
                raise psycopg.Rollback
        return outcome

    registered = await carry_out(asked.log, registry.register(subject, schema), act)
    return _answered({"id": registered.id, "version": registered.version, **(await _told(asked, schema))})


@router.post("/subjects/{subject:path}")
async def look_up(request: Request, subject: str) -> Response:
    asked = _Asked(request)
    asked.need("describe", subject)
    schema = await asked.schema()
    found = await carry_out(asked.log, registry.lookup(subject, schema, deleted=asked.flag("deleted")))
    if found is None:
        if not await asked.run(calls.versions(subject, deleted=asked.flag("deleted"))):
            raise _no_subject(subject)
        raise _no_schema()
    told = await _told(asked, found.schema)
    return _answered({"subject": found.subject, "version": found.version, "id": found.id, **told})


@router.delete("/subjects/{subject:path}/versions/{version}")
async def delete_version(request: Request, subject: str, version: str) -> Response:
    asked = _Asked(request)
    asked.need("delete", subject)
    for_good = asked.flag("permanent")
    found = await _found(asked, subject, version, deleted=True)
    if found.deleted and not for_good:
        message = f"Subject '{subject}' Version {version} was soft deleted. Set permanent=true to delete permanently"
        raise Refusal(404, 40406, message)
    try:
        detail = {"version": found.version, "for_good": for_good}
        await asked.act(
            calls.delete_schema(subject, found.version, for_good=for_good), "schema.delete", subject, detail
        )
    except SchemaNotDeleted:
        message = f"Subject '{subject}' Version {version} was not deleted first before being permanently deleted"
        raise Refusal(404, 40407, message) from None
    return _answered(found.version)


@router.delete("/subjects/{subject:path}")
async def delete_subject(request: Request, subject: str) -> Response:
    asked = _Asked(request)
    asked.need("delete", subject)
    for_good = asked.flag("permanent")
    every = await asked.run(calls.versions(subject, deleted=True))
    if not every:
        raise _no_subject(subject)
    if not for_good and not await asked.run(calls.versions(subject)):
        message = f"Subject '{subject}' was soft deleted. Set permanent=true to delete permanently"
        raise Refusal(404, 40404, message)
    try:
        call = calls.delete_schema(subject, for_good=for_good)
        return _answered(await asked.act(call, "schema.delete", subject, {"for_good": for_good}))
    except SchemaNotDeleted:
        message = f"Subject '{subject}' was not deleted first before being permanently deleted"
        raise Refusal(404, 40405, message) from None


# Schemas by id. Whoever may see one of its subjects may see a schema.


@router.get("/schemas/types")
async def list_types(request: Request) -> Response:
    return _answered(list(TYPES))


async def _visible(asked: _Asked, text: str) -> tuple[int, Schema, list[tuple[str, int]]]:
    schema_id = _id_of(text)
    schema: Schema | None = await asked.run(calls.find_schema(schema_id))
    uses: list[tuple[str, int]] = await asked.run(calls.uses_of_schema(schema_id, deleted=True))
    if schema is None or not any(asked.may("describe", subject) for subject, _ in uses):
        raise _no_schema(text)
    return schema_id, schema, uses


@router.get("/schemas/ids/{schema_id}/schema")
async def show_text_of(request: Request, schema_id: str) -> Response:
    asked = _Asked(request)
    _, schema, _ = await _visible(asked, schema_id)
    return Response((await _told(asked, schema))["schema"], media_type=CONTENT_TYPE)


async def _uses(asked: _Asked, schema_id: str) -> list[tuple[str, int]]:
    number, _, _ = await _visible(asked, schema_id)
    uses: list[tuple[str, int]] = await asked.run(calls.uses_of_schema(number, deleted=asked.flag("deleted")))
    wanted = asked.text("subject")
    return [one for one in uses if asked.may("describe", one[0]) and wanted in ("", one[0])]


@router.get("/schemas/ids/{schema_id}/versions")
async def list_uses(request: Request, schema_id: str) -> Response:
    asked = _Asked(request)
    return asked.page([{"subject": name, "version": version} for name, version in await _uses(asked, schema_id)])


@router.get("/schemas/ids/{schema_id}/subjects")
async def list_subjects_of(request: Request, schema_id: str) -> Response:
    asked = _Asked(request)
    return asked.page(list(dict.fromkeys(name for name, _ in await _uses(asked, schema_id))))


@router.get("/schemas/ids/{schema_id}")
async def show_schema(request: Request, schema_id: str) -> Response:
    asked = _Asked(request)
    _, schema, _ = await _visible(asked, schema_id)
    return _answered(await _told(asked, schema))


# Compatibility


@router.post("/compatibility/subjects/{subject:path}/versions/{version}")
async def check_version(request: Request, subject: str, version: str) -> Response:
    number = _version_of(version)
    return await _checked(_Asked(request), subject, "latest" if number is None else number)


@router.post("/compatibility/subjects/{subject:path}/versions")
async def check_all(request: Request, subject: str) -> Response:
    return await _checked(_Asked(request), subject, None)


async def _checked(asked: _Asked, subject: str, version: int | str | None) -> Response:
    asked.need("describe", subject)
    schema = await asked.schema()
    if isinstance(version, int):
        await _found(asked, subject, str(version), deleted=False)
    if version == "latest" and not await asked.run(calls.versions(subject)):
        # Nothing is there that it could break.
        version = None
    problems = await carry_out(asked.log, registry.check(subject, version, schema))
    told: dict[str, Any] = {"is_compatible": not problems}
    if asked.flag("verbose"):
        told["messages"] = problems
    return _answered(told)


@router.get("/config/{subject:path}")
async def show_subject_config(request: Request, subject: str) -> Response:
    asked = _Asked(request)
    asked.need("describe", subject)
    level = await asked.run(calls.compatibility(subject))
    if level is None:
        if not asked.flag("defaultToGlobal"):
            message = f"Subject '{subject}' does not have subject-level compatibility configured"
            raise Refusal(404, 40408, message)
        level = await asked.run(calls.compatibility())
    return _answered({"compatibilityLevel": level})


@router.get("/config")
async def show_config(request: Request) -> Response:
    return _answered({"compatibilityLevel": await _Asked(request).run(calls.compatibility())})


async def _level(asked: _Asked) -> str:
    level = (await asked.body()).get("compatibility")
    if not isinstance(level, str) or level.upper() not in LEVELS:
        raise Refusal(422, 42203, f"Invalid compatibility level. Valid values are {', '.join(LEVELS)}")
    return level.upper()


@router.put("/config/{subject:path}")
async def set_subject_config(request: Request, subject: str) -> Response:
    asked = _Asked(request)
    asked.need("alter", subject)
    level = await _level(asked)
    await asked.configure(subject, level)
    return _answered({"compatibility": level})


@router.put("/config")
async def set_config(request: Request) -> Response:
    asked = _Asked(request)
    asked.caller.need("alter", "log", "*")
    level = await _level(asked)
    await asked.configure(None, level)
    return _answered({"compatibility": level})


@router.delete("/config/{subject:path}")
async def reset_subject_config(request: Request, subject: str) -> Response:
    asked = _Asked(request)
    asked.need("alter", subject)
    before = await asked.run(calls.compatibility(subject))
    if before is None:
        raise _no_subject(subject)
    await asked.configure(subject, None)
    return _answered({"compatibilityLevel": before})


@router.delete("/config")
async def reset_config(request: Request) -> Response:
    asked = _Asked(request)
    asked.caller.need("alter", "log", "*")
    before = await asked.run(calls.compatibility())
    await asked.configure(None, None)
    return _answered({"compatibilityLevel": before})


# Everybody who may, reads and writes: there is no other mode.


@router.get("/mode")
@router.get("/mode/{subject:path}")
async def show_mode(request: Request) -> Response:
    return _answered({"mode": "READWRITE"})


@router.put("/mode")
@router.put("/mode/{subject:path}")
async def set_mode(request: Request) -> Response:
    if (await _Asked(request).body()).get("mode") != "READWRITE":
        raise Refusal(422, 42204, "Invalid mode: only READWRITE is offered; take rights away instead.")
    return _answered({"mode": "READWRITE"})


@router.get("/contexts")
async def list_contexts(request: Request) -> Response:
    return _answered(["."])
