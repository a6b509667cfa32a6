"""The application: every router in one list, how errors are told, the description of it all."""

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

from headwater.database.schema import VERSION
from headwater.errors import HeadwaterError, InvalidRequest
from headwater.servers.http import (
    accounts,
    cursors_and_subscriptions,
    events,
    groups,
    overview,
    schedules,
    schema_registry,
    sse,
    static_and_health,
    stores,
    topics,
    webhooks,
)
from headwater.servers.http.authorization import right_of
from headwater.servers.http.dependencies import MEANS, Served
from headwater.servers.http.errors import NotThere, WrongMethod, from_postgres, invalid, problem_response, unexpected
from headwater.servers.http.middleware import Gate

# A router of another module is one line here. Its routes state their rights as all others do.
ROUTERS: Final[tuple[APIRouter, ...]] = (
    events.routes,
    sse.routes,
    topics.routes,
    groups.routes,
    cursors_and_subscriptions.routes,
    schedules.routes,
    stores.routes,
    webhooks.routes,
    accounts.routes,
    overview.routes,
    static_and_health.routes,
)
# Served to everybody, beside the console's files.
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/openapi.json", "/docs", "/v1/sessions"})

_ABOUT: Final = (
    "One event log in your Postgres, over HTTP. Errors are application/problem+json. "
    "Callers say who they are by Basic, or by Bearer with an API key, where the server asks."
)


def described() -> FastAPI:
    """The application without a log: enough to describe it."""
    app = FastAPI(
        title="Headwater", version=VERSION, description=_ABOUT, openapi_url=None, docs_url=None, redoc_url=None
    )
    for one in ROUTERS:
        app.include_router(one)
    return app


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the right that each route needs."""
    found = app.openapi()
    for router in ROUTERS:
        for route in router.routes:
            if not isinstance(route, APIRoute):
                continue
            right = str(right_of(route))
            for method in route.methods or ():
                described_route = found["paths"][route.path][method.lower()]
                described_route["x-headwater-right"] = right
                if "requestBody" in described_route:
                    # The gate reads every body, and bounds it.
                    described_route["responses"] |= {
                        str(status): {**described_route["responses"]["400"], "description": MEANS[status]}
                        for status in (413, 415)
                    }
                described_route["operationId"] = route.name
    found["components"]["securitySchemes"] = {
        "password": {"type": "http", "scheme": "basic"},
        "key": {"type": "http", "scheme": "bearer"},
    }
    found["security"] = [{}, {"password": []}, {"key": []}]
    return found


def application(served: Served) -> ASGIApp:
    """All that one server offers, behind its gate."""
    app = described()
    app.state.served = served
    app.state.pace = overview.Pace()
    # The registry has a shape of its own, which others describe. It asks for rights by itself.
    app.include_router(schema_registry.router, prefix="/registry")
    _tell_errors(app)
    described_as = document(app)
    body = json.dumps(described_as, indent=1).encode()
    console = static_and_health.console_pages()
    about = static_and_health.description_page(described_as)

    async def openapi(request: Request) -> Response:
        return Response(body, media_type="application/json", headers={"cache-control": "no-cache"})

    async def docs(request: Request) -> Response:
        return about.sent(request)

    async def page(request: Request) -> Response:
        found = console.get(request.url.path)
        if found is None:
            raise NotThere(f"there is nothing at {request.url.path}", hint="See /docs.")
        return found.sent(request)

    app.add_route("/openapi.json", openapi, methods=["GET"])
    app.add_route("/docs", docs, methods=["GET"])
    for path in console:
        app.add_route(path, page, methods=["GET"])
    return Gate(app, served.callers, served.opening, OPEN_PATHS | console.keys())


def _tell_errors(app: FastAPI) -> None:
    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, HeadwaterError)
        return problem_response(error)

    async def of_postgres(request: Request, error: Exception) -> Response:
        assert isinstance(error, psycopg.Error)
        return problem_response(from_postgres(error))

    async def of_shape(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return problem_response(invalid(error.errors()))

    async def of_routing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return problem_response(NotThere(f"there is nothing at {request.url.path}", hint="See /docs."))
        if error.status_code == 405:
            response = problem_response(WrongMethod(f"{request.method} is not for {request.url.path}"))
            response.headers.update(error.headers or {})
            return response
        return problem_response(InvalidRequest(str(error.detail)))

    async def of_text(request: Request, error: Exception) -> Response:
        return problem_response(InvalidRequest("a text of the request is not text that UTF-8 can hold"))

    async def unforeseen(request: Request, error: Exception) -> Response:
        return problem_response(unexpected(error))

    app.add_exception_handler(HeadwaterError, ours)
    app.add_exception_handler(psycopg.Error, of_postgres)
    app.add_exception_handler(RequestValidationError, of_shape)
    app.add_exception_handler(HTTPException, of_routing)
    app.add_exception_handler(UnicodeEncodeError, of_text)
    app.add_exception_handler(Exception, unforeseen)
