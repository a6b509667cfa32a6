"""Health routes: liveness, readiness, metrics."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from headwater.servers import prometheus
from headwater.servers.http import responses
from headwater.servers.http.authorization import checked_in_route, requires
from headwater.servers.http.dependencies import context_of, json_response, problems, router

routes = router("server")


@routes.get("/health", dependencies=[checked_in_route("none")], response_model=responses.Health)
async def health() -> Response:
    """Liveness: the process answers. Does not check the database; see /ready."""
    return json_response({"status": "alive"})


@routes.get(
    "/ready",
    dependencies=[checked_in_route("none")],
    response_model=responses.Readiness,
    responses={503: {"description": "Not ready: send no requests to this server.", "model": responses.Readiness}},
)
async def ready(request: Request) -> Response:
    """Readiness: whether the server can handle requests now, with the result of each check."""
    found = await prometheus.readiness(context_of(request).log)
    checks = [
        {"name": one.name, "ok": one.ok, "detail": one.message, "action": one.action, "required": one.required}
        for one in found
    ]
    is_ready = prometheus.is_ready(found)
    return json_response({"ready": is_ready, "checks": checks}, status=200 if is_ready else 503)


@routes.get(
    "/metrics",
    dependencies=[requires("describe", "log")],
    response_class=Response,
    responses={
        200: {"description": "Prometheus text format", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **problems(),
    },
)
async def show_metrics(request: Request) -> Response:
    """Metrics in the Prometheus text format."""
    context = context_of(request)
    return Response(await prometheus.render(context.log, context.counters), media_type=prometheus.CONTENT_TYPE)
