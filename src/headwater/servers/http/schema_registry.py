"""The schema registry over HTTP, compatible with the clients and serializers of Confluent's Schema Registry."""

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
from headwater.schema_registry.run import run_steps
from headwater.schema_registry.schemas import AVRO, PROTOBUF, TYPES, Reference, Schema
from headwater.servers.authentication import NotAuthenticated
from headwater.servers.http.authorization import principal_of
from headwater.servers.http.dependencies import context_of
from headwater.servers.http.errors import RequestTimeout, from_postgres

CONTENT_TYPE: Final = "application/vnd.schemaregistry.v1+json"
# The largest schema, escaped as a JSON string, plus references.
MAX_BODY_BYTES: Final = 2 * 1024 * 1024
MAX_REFERENCES: Final = 100
MAX_LISTED: Final = 10_000
# Python does not parse integers of several thousand digits.
_NUMBER: Final = re.compile(r"[0-9]{1,20}")


class RegistryError(Exception):
    """An error response: the HTTP status, and the error code that clients evaluate."""

    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


# The nearest base class of an error counts.
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
    RequestTimeout: (504, 50401),
    HeadwaterError: (500, 50001),
}


def _json_response(content: Any, status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type=CONTENT_TYPE)


def _error_response(error: HeadwaterError | psycopg.Error | RegistryError) -> Response:
    if isinstance(error, RegistryError):
        return _json_response({"error_code": error.code, "message": str(error)}, error.status)
    if isinstance(error, psycopg.Error):
        error = from_postgres(error)
    status, code = next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
    if status == 500:
        logger.error("schema registry request failed", extra={ERROR: str(error)})
    message = str(error)
    if isinstance(error, IncompatibleSchema):
        message = f"{error.message}; details: {json.dumps(error.detail.get('problems', []))}"
    return _json_response({"error_code": code, "message": message}, status)


class _RegistryRoute(APIRoute):
    """Returns errors in the registry's format."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except (RegistryError, HeadwaterError, psycopg.Error) as error:
                return _error_response(error)

        return handle_errors


router = APIRouter(route_class=_RegistryRoute, include_in_schema=False)


class _RegistryRequest:
    """One request with its principal and the log."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.log = context_of(request).log
        self.principal = principal_of(request)

    async def run(self, call: Call[Any]) -> Any:
        return await self.log.run(call)

    async def act(self, call: Call[Any], action: str, subject: str, detail: Mapping[str, Any]) -> Any:
        """Run a change together with its audit event."""
        return await self.log.run_audited(call, self.principal.account, action, subject, detail)

    async def configure(self, subject: str | None, level: str | None) -> None:
        call = calls.set_compatibility(subject, level)
        await self.act(call, "schema.config", subject or "*", {"compatibility": level or "reset"})

    def flag(self, name: str) -> bool:
        return self._request.query_params.get(name, "").lower() == "true"

    def text(self, name: str) -> str:
        return self._request.query_params.get(name, "")

    def page(self, found: list[Any]) -> Response:
        """A page of a list by `offset` and `limit`. Without a limit, or with a negative one: all."""
        try:
            offset, limit = int(self.text("offset") or 0), int(self.text("limit") or -1)
        except ValueError:
            raise RegistryError(422, 422, "offset and limit must be integers") from None
        offset = max(offset, 0)
        return _json_response(found[offset : offset + (limit if limit >= 0 else MAX_LISTED)])

    async def body(self) -> dict[str, Any]:
        parts: list[bytes] = []
        size = 0
        async for part in self._request.stream():
            size += len(part)
            if size > MAX_BODY_BYTES:
                raise RegistryError(413, 413, f"the body is larger than {MAX_BODY_BYTES} bytes")
            parts.append(part)
        try:
            found = json.loads(b"".join(parts))
        except (ValueError, RecursionError):
            raise RegistryError(400, 400, "the body is not valid JSON") from None
        if not isinstance(found, dict):
            raise RegistryError(422, 422, "the body must be a JSON object")
        return found

    async def schema(self) -> Schema:
        return _schema_of(await self.body())

    # Permissions: a subject counts as a topic of its name; TOPIC-key and TOPIC-value also count as TOPIC.

    def may(self, action: str, subject: str) -> bool:
        return any(self.principal.may(action, "topic", name) for name in _names(subject))

    def need(self, action: str, subject: str) -> None:
        if not self.may(action, subject):
            self.principal.need(action, "topic", subject)


def _names(subject: str) -> list[str]:
    topics = [subject.removesuffix(end) for end in ("-key", "-value") if subject.endswith(end)]
    return [subject, *topics]


def _schema_of(body: dict[str, Any]) -> Schema:
    text, kind, given = body.get("schema"), body.get("schemaType") or AVRO, body.get("references") or []
    if not isinstance(text, str) or not text.strip():
        raise RegistryError(422, 42201, 'missing schema: send it as a string in the field "schema"')
    if not isinstance(kind, str) or kind.upper() not in TYPES:
        raise RegistryError(422, 42201, f"invalid schemaType: expected one of {', '.join(TYPES)}")
    for name in ("ruleSet", "metadata"):
        if body.get(name):
            raise RegistryError(422, 42201, f"{name} is not supported: send the schema without it")
    if not isinstance(given, list) or len(given) > MAX_REFERENCES:
        raise RegistryError(422, 42201, f"references must be a list of up to {MAX_REFERENCES}")
    references = []
    for one in given:
        fields: list[Any] = [one.get(name) for name in Reference._fields] if isinstance(one, dict) else []
        if [type(field) for field in fields] != [str, str, int]:
            raise RegistryError(422, 42201, "a reference must have a name, a subject and a version")
        references.append(Reference(*fields))
    return Schema(kind.upper(), text, tuple(references))


async def _schema_json(req: _RegistryRequest, schema: Schema) -> dict[str, Any]:
    """A schema in the registry's format. schemaType is omitted for Avro, as clients expect."""
    text = schema.text
    if schema.type == PROTOBUF and req.text("format") == "serialized":
        parsed: Any = await run_steps(req.log, registry.understand(schema))
        text = parsed.serialized
    fields: dict[str, Any] = {"schema": text}
    if schema.type != AVRO:
        fields["schemaType"] = schema.type
    if schema.references:
        fields["references"] = [one._asdict() for one in schema.references]
    return fields


def _no_subject(subject: str) -> RegistryError:
    return RegistryError(404, 40401, f"Subject '{subject}' not found.")


def _no_version(version: str) -> RegistryError:
    return RegistryError(404, 40402, f"Version {version} not found.")


def _no_schema(schema_id: str = "") -> RegistryError:
    return RegistryError(404, 40403, f"Schema {schema_id} not found." if schema_id else "Schema not found")


def _version_of(text: str) -> int | None:
    """The version number; None for the latest."""
    if text in ("latest", "-1"):
        return None
    if _NUMBER.fullmatch(text) is None or not 1 <= int(text) < 2**31:
        raise RegistryError(
            422, 42202, f"The specified version '{text}' is not a valid version id: a number, or latest."
        )
    return int(text)


def _id_of(text: str) -> int:
    if _NUMBER.fullmatch(text) is None or int(text) >= 2**31:
        raise _no_schema(text[:20])
    return int(text)


async def _find_version(req: _RegistryRequest, subject: str, version: str, *, deleted: bool) -> SchemaVersion:
    number = _version_of(version)
    found: SchemaVersion | None = await req.run(calls.find_version(subject, number, deleted=deleted))
    if found is None:
        if not await req.run(calls.versions(subject, deleted=deleted)):
            raise _no_subject(subject)
        raise _no_version(version)
    return found


# Subjects


@router.get("/subjects")
async def list_subjects(request: Request) -> Response:
    req = _RegistryRequest(request)
    hidden = req.flag("deleted") or req.flag("deleted_only")
    found = await req.run(calls.subjects(prefix=req.text("subjectPrefix"), deleted=hidden))
    if req.flag("deleted_only"):
        active = set(await req.run(calls.subjects()))
        found = [name for name in found if name not in active]
    return req.page([name for name in found if req.may("describe", name)])


@router.get("/subjects/{subject:path}/versions/{version}/schema")
async def show_text(request: Request, subject: str, version: str) -> Response:
    req = _RegistryRequest(request)
    req.need("describe", subject)
    found = await _find_version(req, subject, version, deleted=req.flag("deleted"))
    return Response((await _schema_json(req, found.schema))["schema"], media_type=CONTENT_TYPE)


@router.get("/subjects/{subject:path}/versions/{version}/referencedby")
async def list_referring(request: Request, subject: str, version: str) -> Response:
    req = _RegistryRequest(request)
    req.need("describe", subject)
    found = await _find_version(req, subject, version, deleted=False)
    return req.page(await req.run(calls.schemas_referring_to(subject, found.version)))


@router.get("/subjects/{subject:path}/versions/{version}")
async def show_version(request: Request, subject: str, version: str) -> Response:
    req = _RegistryRequest(request)
    req.need("describe", subject)
    found = await _find_version(req, subject, version, deleted=req.flag("deleted"))
    fields = await _schema_json(req, found.schema)
    return _json_response({"subject": found.subject, "version": found.version, "id": found.id, **fields})


@router.get("/subjects/{subject:path}/versions")
async def list_versions(request: Request, subject: str) -> Response:
    req = _RegistryRequest(request)
    req.need("describe", subject)
    found = await req.run(calls.versions(subject, deleted=req.flag("deleted") or req.flag("deleted_only")))
    if req.flag("deleted_only"):
        active = await req.run(calls.versions(subject))
        found = [one for one in found if one not in active]
    if not found:
        raise _no_subject(subject)
    return req.page([version for version, _ in found])


@router.post("/subjects/{subject:path}/versions")
async def register(request: Request, subject: str) -> Response:
    req = _RegistryRequest(request)
    req.need("write", subject)
    schema = await req.schema()

    async def act(call: Call[Any]) -> Any:
        async with req.log.audited(
            req.principal.account, "schema.register", subject, {"type": schema.type}
        ) as connection:
            outcome = await req.log.run(call, connection=connection)
            if outcome is None:
                # The subject changed meanwhile: nothing was done, so nothing is audited.
                raise psycopg.Rollback
        return outcome

    registered = await run_steps(req.log, registry.register(subject, schema), act)
    return _json_response({"id": registered.id, "version": registered.version, **(await _schema_json(req, schema))})


@router.post("/subjects/{subject:path}")
async def look_up(request: Request, subject: str) -> Response:
    req = _RegistryRequest(request)
    req.need("describe", subject)
    schema = await req.schema()
    found = await run_steps(req.log, registry.lookup(subject, schema, deleted=req.flag("deleted")))
    if found is None:
        if not await req.run(calls.versions(subject, deleted=req.flag("deleted"))):
            raise _no_subject(subject)
        raise _no_schema()
    fields = await _schema_json(req, found.schema)
    return _json_response({"subject": found.subject, "version": found.version, "id": found.id, **fields})


@router.delete("/subjects/{subject:path}/versions/{version}")
async def delete_version(request: Request, subject: str, version: str) -> Response:
    req = _RegistryRequest(request)
    req.need("delete", subject)
    permanent = req.flag("permanent")
    found = await _find_version(req, subject, version, deleted=True)
    if found.deleted and not permanent:
        message = f"Subject '{subject}' Version {version} was soft deleted. Set permanent=true to delete permanently"
        raise RegistryError(404, 40406, message)
    try:
        detail = {"version": found.version, "for_good": permanent}
        await req.act(calls.delete_schema(subject, found.version, for_good=permanent), "schema.delete", subject, detail)
    except SchemaNotDeleted:
        message = f"Subject '{subject}' Version {version} was not deleted first before being permanently deleted"
        raise RegistryError(404, 40407, message) from None
    return _json_response(found.version)


@router.delete("/subjects/{subject:path}")
async def delete_subject(request: Request, subject: str) -> Response:
    req = _RegistryRequest(request)
    req.need("delete", subject)
    permanent = req.flag("permanent")
    every = await req.run(calls.versions(subject, deleted=True))
    if not every:
        raise _no_subject(subject)
    if not permanent and not await req.run(calls.versions(subject)):
        message = f"Subject '{subject}' was soft deleted. Set permanent=true to delete permanently"
        raise RegistryError(404, 40404, message)
    try:
        call = calls.delete_schema(subject, for_good=permanent)
        return _json_response(await req.act(call, "schema.delete", subject, {"for_good": permanent}))
    except SchemaNotDeleted:
        message = f"Subject '{subject}' was not deleted first before being permanently deleted"
        raise RegistryError(404, 40405, message) from None


# Schemas by id. A schema is visible to principals that may describe one of its subjects.


@router.get("/schemas/types")
async def list_types(request: Request) -> Response:
    return _json_response(list(TYPES))


async def _visible(req: _RegistryRequest, text: str) -> tuple[int, Schema, list[tuple[str, int]]]:
    schema_id = _id_of(text)
    schema: Schema | None = await req.run(calls.find_schema(schema_id))
    uses: list[tuple[str, int]] = await req.run(calls.uses_of_schema(schema_id, deleted=True))
    if schema is None or not any(req.may("describe", subject) for subject, _ in uses):
        raise _no_schema(text)
    return schema_id, schema, uses


@router.get("/schemas/ids/{schema_id}/schema")
async def show_text_of(request: Request, schema_id: str) -> Response:
    req = _RegistryRequest(request)
    _, schema, _ = await _visible(req, schema_id)
    return Response((await _schema_json(req, schema))["schema"], media_type=CONTENT_TYPE)


async def _uses(req: _RegistryRequest, schema_id: str) -> list[tuple[str, int]]:
    number, _, _ = await _visible(req, schema_id)
    uses: list[tuple[str, int]] = await req.run(calls.uses_of_schema(number, deleted=req.flag("deleted")))
    wanted = req.text("subject")
    return [one for one in uses if req.may("describe", one[0]) and wanted in ("", one[0])]


@router.get("/schemas/ids/{schema_id}/versions")
async def list_uses(request: Request, schema_id: str) -> Response:
    req = _RegistryRequest(request)
    return req.page([{"subject": name, "version": version} for name, version in await _uses(req, schema_id)])


@router.get("/schemas/ids/{schema_id}/subjects")
async def list_subjects_of(request: Request, schema_id: str) -> Response:
    req = _RegistryRequest(request)
    return req.page(list(dict.fromkeys(name for name, _ in await _uses(req, schema_id))))


@router.get("/schemas/ids/{schema_id}")
async def show_schema(request: Request, schema_id: str) -> Response:
    req = _RegistryRequest(request)
    _, schema, _ = await _visible(req, schema_id)
    return _json_response(await _schema_json(req, schema))


# Compatibility


@router.post("/compatibility/subjects/{subject:path}/versions/{version}")
async def check_version(request: Request, subject: str, version: str) -> Response:
    number = _version_of(version)
    return await _check(_RegistryRequest(request), subject, "latest" if number is None else number)


@router.post("/compatibility/subjects/{subject:path}/versions")
async def check_all(request: Request, subject: str) -> Response:
    return await _check(_RegistryRequest(request), subject, None)


async def _check(req: _RegistryRequest, subject: str, version: int | str | None) -> Response:
    req.need("describe", subject)
    schema = await req.schema()
    if isinstance(version, int):
        await _find_version(req, subject, str(version), deleted=False)
    if version == "latest" and not await req.run(calls.versions(subject)):
        # There is no earlier version to be compatible with.
        version = None
    problems = await run_steps(req.log, registry.check(subject, version, schema))
    result: dict[str, Any] = {"is_compatible": not problems}
    if req.flag("verbose"):
        result["messages"] = problems
    return _json_response(result)


@router.get("/config/{subject:path}")
async def show_subject_config(request: Request, subject: str) -> Response:
    req = _RegistryRequest(request)
    req.need("describe", subject)
    level = await req.run(calls.compatibility(subject))
    if level is None:
        if not req.flag("defaultToGlobal"):
            message = f"Subject '{subject}' does not have subject-level compatibility configured"
            raise RegistryError(404, 40408, message)
        level = await req.run(calls.compatibility())
    return _json_response({"compatibilityLevel": level})


@router.get("/config")
async def show_config(request: Request) -> Response:
    return _json_response({"compatibilityLevel": await _RegistryRequest(request).run(calls.compatibility())})


async def _level(req: _RegistryRequest) -> str:
    level = (await req.body()).get("compatibility")
    if not isinstance(level, str) or level.upper() not in LEVELS:
        raise RegistryError(422, 42203, f"Invalid compatibility level. Valid values are {', '.join(LEVELS)}")
    return level.upper()


@router.put("/config/{subject:path}")
async def set_subject_config(request: Request, subject: str) -> Response:
    req = _RegistryRequest(request)
    req.need("alter", subject)
    level = await _level(req)
    await req.configure(subject, level)
    return _json_response({"compatibility": level})


@router.put("/config")
async def set_config(request: Request) -> Response:
    req = _RegistryRequest(request)
    req.principal.need("alter", "log", "*")
    level = await _level(req)
    await req.configure(None, level)
    return _json_response({"compatibility": level})


@router.delete("/config/{subject:path}")
async def reset_subject_config(request: Request, subject: str) -> Response:
    req = _RegistryRequest(request)
    req.need("alter", subject)
    before = await req.run(calls.compatibility(subject))
    if before is None:
        raise _no_subject(subject)
    await req.configure(subject, None)
    return _json_response({"compatibilityLevel": before})


@router.delete("/config")
async def reset_config(request: Request) -> Response:
    req = _RegistryRequest(request)
    req.principal.need("alter", "log", "*")
    before = await req.run(calls.compatibility())
    await req.configure(None, None)
    return _json_response({"compatibilityLevel": before})


# READWRITE is the only mode.


@router.get("/mode")
@router.get("/mode/{subject:path}")
async def show_mode(request: Request) -> Response:
    return _json_response({"mode": "READWRITE"})


@router.put("/mode")
@router.put("/mode/{subject:path}")
async def set_mode(request: Request) -> Response:
    if (await _RegistryRequest(request).body()).get("mode") != "READWRITE":
        raise RegistryError(422, 42204, "Invalid mode: only READWRITE is supported. Revoke permissions instead.")
    return _json_response({"mode": "READWRITE"})


@router.get("/contexts")
async def list_contexts(request: Request) -> Response:
    return _json_response(["."])
