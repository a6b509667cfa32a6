"""The ASGI application: all routers, the error handlers and the OpenAPI document."""

from __future__ import annotations

import json
from typing import Any, Final

import psycopg
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from headwater.errors import HeadwaterError, InvalidRequest
from headwater.servers.http import (
    accounts,
    cursors,
    events,
    health,
    overview,
    queues,
    schedules,
    schema_registry,
    sql_subscriptions,
    sse,
    static,
    stores,
    topics,
    webhooks,
)
from headwater.servers.http.authorization import permission_of
from headwater.servers.http.dependencies import STATUS_MEANINGS, ServerContext
from headwater.servers.http.errors import NotFound, WrongMethod, from_postgres, invalid, problem_response, unexpected
from headwater.servers.http.middleware import RequestGuard
from headwater.version import VERSION

# Every route of these routers declares the permission that it requires.
ROUTERS: Final[tuple[APIRouter, ...]] = (
    events.routes,
    sse.routes,
    topics.routes,
    queues.routes,
    cursors.routes,
    sql_subscriptions.routes,
    schedules.routes,
    stores.routes,
    webhooks.routes,
    accounts.routes,
    overview.routes,
    health.routes,
)
# Need no authentication, like the files of the console.
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/openapi.json", "/docs", "/v1/sessions"})

_ABOUT: Final = (
    "The HTTP API of Headwater, an event log in Postgres. Errors are application/problem+json (RFC 9457). "
    "If authentication is on, send Basic credentials, or Bearer with an API key."
)


def create_api() -> FastAPI:
    """The API without a log, for its OpenAPI document."""
    app = FastAPI(
        title="Headwater", version=VERSION, description=_ABOUT, openapi_url=None, docs_url=None, redoc_url=None
    )
    for one in ROUTERS:
        app.include_router(one)
    return app


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the permission that each route requires."""
    document = app.openapi()
    for router in ROUTERS:
        for route in router.routes:
            if not isinstance(route, APIRoute) or not route.include_in_schema:
                continue
            permission = str(permission_of(route))
            for method in route.methods or ():
                operation = document["paths"][route.path][method.lower()]
                operation["x-headwater-permission"] = permission
                if "requestBody" in operation:
                    # The middleware checks the size and type of every body.
                    operation["responses"] |= {
                        str(status): {**operation["responses"]["400"], "description": STATUS_MEANINGS[status]}
                        for status in (413, 415)
                    }
                operation["operationId"] = route.name
    document["components"]["securitySchemes"] = {
        "password": {"type": "http", "scheme": "basic"},
        "key": {"type": "http", "scheme": "bearer"},
    }
    document["security"] = [{}, {"password": []}, {"key": []}]
    return document


def create_application(context: ServerContext) -> ASGIApp:
    """The whole application of one server: API, schema registry, console and documentation."""
    app = create_api()
    app.state.context = context
    app.state.publish_rate = overview.PublishRate()
    # The schema registry has its own request and error format, documented by Confluent. It checks permissions itself.
    app.include_router(schema_registry.router, prefix="/registry")
    _add_error_handlers(app)
    document = openapi_document(app)
    body = json.dumps(document, indent=1).encode()
    console = static.console_files()
    description = static.description_page(document)

    async def openapi(request: Request) -> Response:
        return Response(body, media_type="application/json", headers={"cache-control": "no-cache"})

    async def docs(request: Request) -> Response:
        return description.respond(request)

    async def page(request: Request) -> Response:
        file = console.get(request.url.path)
        if file is None:
            raise NotFound(f"no such path: {request.url.path}", hint="See /docs.")
        return file.respond(request)

    app.add_route("/openapi.json", openapi, methods=["GET"])
    app.add_route("/docs", docs, methods=["GET"])
    for path in console:
        app.add_route(path, page, methods=["GET"])
    return RequestGuard(app, context.authenticator, context.options, OPEN_PATHS | console.keys())


def _add_error_handlers(app: FastAPI) -> None:
    async def headwater_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HeadwaterError)
        return problem_response(error)

    async def postgres_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, psycopg.Error)
        return problem_response(from_postgres(error))

    async def validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem_response(invalid(error.errors()))

    async def routing_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return problem_response(NotFound(f"no such path: {request.url.path}", hint="See /docs."))
        if error.status_code == 405:
            response = problem_response(WrongMethod(f"method {request.method} is not allowed for {request.url.path}"))
            response.headers.update(error.headers or {})
            return response
        return problem_response(InvalidRequest(str(error.detail)))

    async def encoding_error(request: Request, error: Exception) -> Response:
        return problem_response(InvalidRequest("the request contains text that cannot be encoded as UTF-8"))

    async def unexpected_error(request: Request, error: Exception) -> Response:
        return problem_response(unexpected(error))

    app.add_exception_handler(HeadwaterError, headwater_error)
    app.add_exception_handler(psycopg.Error, postgres_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, routing_error)
    app.add_exception_handler(UnicodeEncodeError, encoding_error)
    app.add_exception_handler(Exception, unexpected_error)
