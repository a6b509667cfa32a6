"""Checks before every request: connection limit, host and origin, authentication, rate, body size, timeout."""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import time
from functools import lru_cache
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import urlsplit

import psycopg
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwater.access.rate_limit import TokenBuckets
from headwater.errors import HeadwaterError
from headwater.servers.authentication import SESSION, Authenticator, NotAuthenticated, Principal, TooManyRequests
from headwater.servers.http.authorization import PRINCIPAL
from headwater.servers.http.body_limits import has_more_elements, limit_for
from headwater.servers.http.cloud_events import Mode, mode_of
from headwater.servers.http.errors import (
    BodyTooLarge,
    ForeignOrigin,
    Misdirected,
    NotJson,
    RequestTimeout,
    TooManyConnections,
    from_postgres,
    problem_response,
)
from headwater.servers.http.uvicorn_protocol import CONNECTION
from headwater.servers.options import ServerLimits, ServerOptions

SESSION_COOKIE: Final = "headwater_session"
SESSION_KEY: Final = "headwater.session"
# Pages of other sites cannot send this header without CORS, which this server never allows.
CONSOLE_HEADER: Final = b"x-headwater-console"
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
# Answered even above the connection limit.
PROBES: Final = frozenset({"/health", "/ready"})
# A page of the console sends several requests at once.
MIN_BURST: Final = 10
REPEAT_HINT: Final = (
    "Check whether it took effect before you repeat it. A request with an Idempotency-Key (publish, append, schedule) "
    "can be repeated safely."
)
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class RequestGuard:
    """Middleware around the application. `open_paths` need no authentication."""

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, options: ServerOptions, open_paths: frozenset[str]
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._options = options
        self._limits: ServerLimits = options.limits
        self._open_paths = open_paths
        rate = self._limits.requests_per_second
        self._requests = TokenBuckets(rate, max(rate * 2, MIN_BURST)) if rate > 0 else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = False
        try:
            async with asyncio.timeout(self._limits.request_seconds) as clock:

                async def sending(message: Message) -> None:
                    nonlocal started
                    if message["type"] == "http.response.start":
                        started = True
                        # The rest depends on the client, and SSE streams never end.
                        clock.reschedule(None)
                        message["headers"] = [*message.get("headers", ()), *_HEADERS]
                        if SESSION_KEY in scope:
                            # A session expires after its last use, so the cookie is renewed too.
                            cookie = session_cookie(scope[SESSION_KEY], secure=scope["scheme"] == "https")
                            message["headers"].append((b"set-cookie", cookie.encode()))
                    await send(message)

                headers = dict(scope["headers"])
                await self._admit(scope, headers)
                await self._app(scope, await self._read_body(scope, headers, receive), sending)
                return
        except HeadwaterError as error:
            problem = error
        except psycopg.Error as error:
            problem = from_postgres(error)
        except TimeoutError:
            problem = RequestTimeout(
                f"the request timed out after {self._limits.request_seconds:g} s", hint=REPEAT_HINT
            )
        except asyncio.CancelledError:
            # Only the shutdown cancels requests, when the grace period is over.
            problem = RequestTimeout(
                "the server is shutting down, and the request did not finish in time", hint=REPEAT_HINT
            )
        if not started:
            await problem_response(problem)(scope, receive, send)

    async def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        # Health probes are answered even above the limit.
        if scope[CONNECTION].is_surplus and scope["path"] not in PROBES:
            raise TooManyConnections(
                f"the server has reached its limit of {self._limits.connections} connections",
                hint="Retry, or reuse connections for several requests. The limit is set by --connections.",
            )
        self._reject_cross_origin(scope, headers)
        address = scope["client"][0] if scope.get("client") else "unknown"
        if scope["path"] in self._open_paths:
            principal = None
        else:
            principal = await self._principal(scope, headers, address)
            scope[PRINCIPAL] = principal
        if self._requests is not None:
            key = (
                f"account {principal.account}" if principal is not None and principal.account else f"address {address}"
            )
            if not self._requests.take(key, time.monotonic()):
                raise TooManyRequests(
                    f"rate limit exceeded: {self._limits.requests_per_second:g} requests per second",
                    hint="Send several events in one request, or slow down.",
                )

    def _reject_cross_origin(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Protect against CSRF and DNS rebinding: pages of other sites must not use this server through a browser."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self._options.loopback and not self._options.authenticate and not _is_loopback(host):
            raise Misdirected(f"unexpected Host header {host!r}", hint="Use the address printed by `headwater serve`.")
        origin = headers.get(b"origin")
        if scope["method"] in SAFE_METHODS or origin is None or CONSOLE_HEADER in headers:
            return
        if urlsplit(origin.decode("latin-1")).netloc != host:
            raise ForeignOrigin("the Origin header names another site", hint="Use the console of this server.")

    async def _principal(self, scope: Scope, headers: dict[bytes, bytes], address: str) -> Principal:
        if not self._options.authenticate:
            # Unverified names must not get into the audit log.
            return self._authenticator.anonymous()
        given = headers.get(b"authorization", b"").decode("latin-1")
        scheme, _, secret = given.partition(" ")
        if scheme.lower() == "basic":
            name, password = _decode_basic(secret)
            return await self._authenticator.by_password(name, password, address=address)
        if scheme.lower() == "bearer":
            return await self._authenticator.by_key(secret.strip())
        if given:
            raise NotAuthenticated(
                f"unsupported authentication scheme {scheme}", hint="Use Basic, or Bearer with an API key."
            )
        key = session_of(headers)
        if key is None:
            return self._authenticator.anonymous()
        if scope["method"] not in SAFE_METHODS and b"origin" not in headers and CONSOLE_HEADER not in headers:
            raise ForeignOrigin(
                "the session cookie can only be used by the console",
                hint="Use an API key instead, or send the header X-Headwater-Console.",
            )
        principal = await self._authenticator.by_key(key)
        scope[SESSION_KEY] = key
        return principal

    async def _read_body(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Read and check the whole body before the route runs."""
        if scope["method"] in SAFE_METHODS:
            return receive
        limit = limit_for(scope["path"])
        limit_bytes = self._limits.max_body_bytes
        if limit.max_bytes is not None:
            limit_bytes = min(limit_bytes, limit.max_bytes)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > limit_bytes:
            raise _too_large(limit_bytes)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestTimeout("the client disconnected")
            size += len(message.get("body", b""))
            if size > limit_bytes:
                raise _too_large(limit_bytes)
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        # In binary mode the body is the data of one event, of any type.
        is_binary = mode_of(scope) is Mode.binary
        if size and not is_binary and not _is_json(headers.get(b"content-type", b"")):
            raise NotJson("the content type must be application/json", hint="With curl, use --json.")
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise NotJson("compressed bodies are not accepted", hint="Send the body without Content-Encoding.")
        body = b"".join(parts)
        if not is_binary and has_more_elements(body, limit.max_elements):
            raise BodyTooLarge(
                f"the body has more than {limit.max_elements} JSON elements, the limit of this path",
                hint="Send fewer elements at once.",
                detail={"limit": limit.max_elements},
            )
        pending: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def replay() -> Message:
            nonlocal pending
            if pending is None:
                return await receive()
            message, pending = pending, None
            return message

        return replay


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body is larger than {limit_bytes} bytes, the limit of this path",
        hint="Send less at once.",
        detail={"limit": limit_bytes},
    )


def session_cookie(key: str, *, secure: bool) -> str:
    """The cookie of a session. It expires with the session if it is not used."""
    max_age = int(SESSION.total_seconds())
    cookie = f"{SESSION_COOKIE}={key}; HttpOnly; Max-Age={max_age}; Path=/; SameSite=strict"
    return f"{cookie}; Secure" if secure else cookie


def session_of(headers: dict[bytes, bytes]) -> str | None:
    """The session key in the cookies of a request."""
    try:
        found = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(SESSION_COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value


def _decode_basic(secret: str) -> tuple[str, str]:
    try:
        name, colon, password = base64.b64decode(secret, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        raise NotAuthenticated("invalid Basic credentials: expected base64 of name:password") from None
    if not colon:
        raise NotAuthenticated("invalid Basic credentials: expected base64 of name:password")
    return name, password


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


@lru_cache(maxsize=256)
def _is_loopback(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
