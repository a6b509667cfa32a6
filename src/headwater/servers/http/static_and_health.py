"""What is no API: the console's files, the description for people, and whether the server is well."""

from __future__ import annotations

import hashlib
import html
import json
import mimetypes
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Final

from fastapi import Request
from starlette.responses import Response

from headwater.servers import prometheus
from headwater.servers.http import responses
from headwater.servers.http.authorization import decides, needs
from headwater.servers.http.dependencies import answer, problems, router, served

routes = router("server")

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
MAX_FILE_BYTES: Final = 4 * 1024 * 1024
_TYPES: Final = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Page:
    """A file of the console, as it is sent."""

    body: bytes
    content_type: str
    etag: str

    def sent(self, request: Request) -> Response:
        headers = {
            "etag": self.etag,
            # Looked up each time, and not sent again if it is the same.
            "cache-control": "no-cache",
            "content-security-policy": CONTENT_SECURITY_POLICY,
        }
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers={**headers, "content-type": self.content_type})


def console_pages() -> dict[str, Page]:
    """Every file of the console by its path. Read once: there are few, and nothing else is ever sent."""
    folder = resources.files("headwater.servers.http") / "console"
    found = {path: _page(path, file.read_bytes()) for path, file in _files(folder, "/")}
    if "/index.html" in found:
        found["/"] = found["/index.html"]
    return found


def _files(folder: Traversable, path: str) -> Iterator[tuple[str, Traversable]]:
    for one in folder.iterdir() if folder.is_dir() else ():
        if one.name.startswith((".", "__")) or one.name.endswith(".py"):
            continue
        if one.is_dir():
            yield from _files(one, f"{path}{one.name}/")
        else:
            yield path + one.name, one


def _page(path: str, body: bytes) -> Page:
    assert len(body) <= MAX_FILE_BYTES, path
    suffix = path[path.rfind(".") :]
    kind = _TYPES.get(suffix) or mimetypes.guess_type(path)[0] or "application/octet-stream"
    if kind == "text/html":
        kind = "text/html; charset=utf-8"
    return Page(body, kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


@routes.get("/health", dependencies=[decides("none")], response_model=responses.Health)
async def health() -> Response:
    """The process is alive and answers. Says nothing of the database: see /ready."""
    return answer({"status": "alive"})


@routes.get(
    "/ready",
    dependencies=[decides("none")],
    response_model=responses.Ready,
    responses={503: {"description": "Send nobody here now.", "model": responses.Ready}},
)
async def ready(request: Request) -> Response:
    """Whether requests can be served now, and what is in the way."""
    found = await prometheus.readiness(served(request).log)
    checks = [
        {"name": one.name, "ok": one.ok, "detail": one.message, "action": one.action, "required": one.required}
        for one in found
    ]
    well = prometheus.is_ready(found)
    return answer({"ready": well, "checks": checks}, status=200 if well else 503)


@routes.get(
    "/metrics",
    dependencies=[needs("describe", "log")],
    response_class=Response,
    responses={
        200: {"description": "Prometheus' text format", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **problems(),
    },
)
async def show_metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    here = served(request)
    return Response(await prometheus.render(here.log, here.counts), media_type=prometheus.CONTENT_TYPE)


def description_page(document: dict[str, Any]) -> Page:
    """The description of the API for people: one page, nothing from elsewhere."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        "<meta name=color-scheme content='light dark'><link rel=stylesheet href=style.css>",
        f"<title>{html.escape(document['info']['title'])}</title><main><h1>{html.escape(document['info']['title'])}</h1>",
        f"<p>{html.escape(document['info'].get('description', ''))} As JSON: <a href=openapi.json>openapi.json</a>.",
    ]
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            parts.append(
                f"<h2 id={html.escape(route['operationId'])}><code>{method.upper()} {html.escape(path)}</code></h2>"
                f"<p>{html.escape(route.get('description') or route.get('summary', ''))}"
                f"<p>Needs: {html.escape(route.get('x-headwater-right', ''))}."
            )
            rows = [
                f"<li><code>{html.escape(one['name'])}</code> ({one['in']}"
                f"{', required' if one.get('required') else ''}) {html.escape(one.get('description', ''))}"
                for one in route.get("parameters", ())
            ]
            if rows:
                parts.append(f"<ul>{''.join(rows)}</ul>")
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            if body is not None:
                parts.append(f"<pre>{html.escape(json.dumps(body, indent=2))}</pre>")
    parts.append("<h1>Shapes</h1>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts.append(f"<h2 id={name}>{name}</h2><pre>{html.escape(json.dumps(schema, indent=2))}</pre>")
    return _page("/docs.html", "\n".join(parts).encode())
