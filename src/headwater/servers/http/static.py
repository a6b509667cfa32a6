"""Static files: the console, and an HTML page that describes the API."""

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

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
MAX_FILE_BYTES: Final = 4 * 1024 * 1024
_TYPES: Final = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file in memory, with its content type and entity tag."""

    body: bytes
    content_type: str
    etag: str

    def respond(self, request: Request) -> Response:
        headers = {
            "etag": self.etag,
            # Browsers revalidate each time by the entity tag.
            "cache-control": "no-cache",
            "content-security-policy": CONTENT_SECURITY_POLICY,
        }
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers={**headers, "content-type": self.content_type})


def console_files() -> dict[str, StaticFile]:
    """Every file of the console by its path. Read once at start; no other file is ever served."""
    folder = resources.files("headwater.servers.http") / "console"
    found = {path: _static_file(path, file.read_bytes()) for path, file in _files(folder, "/")}
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


def _static_file(path: str, body: bytes) -> StaticFile:
    assert len(body) <= MAX_FILE_BYTES, path
    suffix = path[path.rfind(".") :]
    kind = _TYPES.get(suffix) or mimetypes.guess_type(path)[0] or "application/octet-stream"
    if kind == "text/html":
        kind = "text/html; charset=utf-8"
    return StaticFile(body, kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def description_page(document: dict[str, Any]) -> StaticFile:
    """The API description as one HTML page that loads nothing from other sites."""
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
                f"<p>Permission: {html.escape(route.get('x-headwater-permission', ''))}."
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
    parts.append("<h1>Schemas</h1>")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts.append(f"<h2 id={name}>{name}</h2><pre>{html.escape(json.dumps(schema, indent=2))}</pre>")
    return _static_file("/docs.html", "\n".join(parts).encode())
