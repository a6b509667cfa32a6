"""What every request passes before anything is done with it: host, origin, caller, rate, size, time."""

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

from headwater.access.rate_limit import Buckets
from headwater.errors import HeadwaterError
from headwater.servers.authentication import SESSION, Caller, Callers, NotAuthenticated, TooManyRequests
from headwater.servers.http.authorization import CALLER
from headwater.servers.http.body_limits import has_more_elements, limit_for
from headwater.servers.http.errors import (
    BodyTooLarge,
    ForeignOrigin,
    Misdirected,
    NotJson,
    TookTooLong,
    TooManyConnections,
    from_postgres,
    problem_response,
)
from headwater.servers.http.uvicorn_protocol import CONNECTION
from headwater.servers.options import Limits, Opening

SESSION_COOKIE: Final = "headwater_session"
SESSION_KEY: Final = "headwater.session"
# A page of another site cannot send it, unless this server allowed that, which it never does.
OWN_HEADER: Final = b"x-headwater-console"
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
# Answered however many connections there are.
PROBES: Final = frozenset({"/health", "/ready"})
# However few a second: a page of the console alone asks for several things at once.
SMALLEST_BURST: Final = 10
REPEAT_HINT: Final = (
    "Look whether it took effect before you send it again. What takes an Idempotency-Key (publish, append, schedule) "
    "and had one is just sent again."
)
_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class Gate:
    """Stands before the application. `open_paths` are served to everybody."""

    def __init__(self, app: ASGIApp, callers: Callers, opening: Opening, open_paths: frozenset[str]) -> None:
        self._app = app
        self._callers = callers
        self._opening = opening
        self._limits: Limits = opening.limits
        self._open_paths = open_paths
        rate = self._limits.requests_per_second
        self._requests = Buckets(rate, max(rate * 2, SMALLEST_BURST)) if rate > 0 else None

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
                        # What follows is the client's pace, and live streams never end.
                        clock.reschedule(None)
                        message["headers"] = [*message.get("headers", ()), *_HEADERS]
                        if SESSION_KEY in scope:
                            # It lasts from its last use, and so must its cookie.
                            cookie = session_cookie(scope[SESSION_KEY], secure=scope["scheme"] == "https")
                            message["headers"].append((b"set-cookie", cookie.encode()))
                    await send(message)

                headers = dict(scope["headers"])
                await self._admit(scope, headers)
                await self._app(scope, await self._bounded(scope, headers, receive), sending)
                return
        except HeadwaterError as error:
            refusal = error
        except psycopg.Error as error:
            refusal = from_postgres(error)
        except TimeoutError:
            refusal = TookTooLong(f"not done within {self._limits.request_seconds:g} s", hint=REPEAT_HINT)
        except asyncio.CancelledError:
            # Only a server that stops does that, when the grace is over: nothing is under way any more, and it is told.
            refusal = TookTooLong("the server stops, and this was not done in time", hint=REPEAT_HINT)
        if not started:
            await problem_response(refusal)(scope, receive, send)

    async def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        # Whoever asks whether the server is well is told so at any time.
        if scope[CONNECTION].is_surplus and scope["path"] not in PROBES:
            raise TooManyConnections(
                f"there are {self._limits.connections} connections, and no more are taken",
                hint="Try again, or keep connections open for several requests; the server's limit is --connections.",
            )
        self._refuse_foreign(scope, headers)
        address = scope["client"][0] if scope.get("client") else "nobody"
        if scope["path"] in self._open_paths:
            caller = None
        else:
            caller = await self._caller(scope, headers, address)
            scope[CALLER] = caller
        if self._requests is not None:
            whose = f"account {caller.account}" if caller is not None and caller.account else f"address {address}"
            if not self._requests.take(whose, time.monotonic()):
                raise TooManyRequests(
                    f"more than {self._limits.requests_per_second:g} requests a second",
                    hint="Send several events in one request, or slow down.",
                )

    def _refuse_foreign(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """No page of another site may use this server through the browser of somebody who can reach it."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self._opening.loopback and not self._opening.authenticate and not _is_loopback(host):
            raise Misdirected(f"this server is not {host!r}", hint="Use the address that `headwater serve` told.")
        origin = headers.get(b"origin")
        if scope["method"] in SAFE or origin is None or OWN_HEADER in headers:
            return
        if urlsplit(origin.decode("latin-1")).netloc != host:
            raise ForeignOrigin("a page of another site sent this", hint="Use the console of this server.")

    async def _caller(self, scope: Scope, headers: dict[bytes, bytes], address: str) -> Caller:
        if not self._opening.authenticate:
            # Whatever they say of themselves, nobody looked: it must not get into the record of what was done.
            return self._callers.everybody()
        given = headers.get(b"authorization", b"").decode("latin-1")
        scheme, _, secret = given.partition(" ")
        if scheme.lower() == "basic":
            name, password = _basic(secret)
            return await self._callers.by_password(name, password, address=address)
        if scheme.lower() == "bearer":
            return await self._callers.by_key(secret.strip())
        if given:
            raise NotAuthenticated(f"{scheme} is not understood", hint="Basic, or Bearer with an API key.")
        key = session_of(headers)
        if key is None:
            return self._callers.everybody()
        if scope["method"] not in SAFE and b"origin" not in headers and OWN_HEADER not in headers:
            raise ForeignOrigin(
                "a session is for the console",
                hint="Send the header X-Headwater-Console, or use an API key instead of the session.",
            )
        caller = await self._callers.by_key(key)
        scope[SESSION_KEY] = key
        return caller

    async def _bounded(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """The body, read whole: nothing is done with a part of a request."""
        if scope["method"] in SAFE:
            return receive
        limit = limit_for(scope["path"])
        most = self._limits.max_body_bytes
        if limit.max_bytes is not None:
            most = min(most, limit.max_bytes)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > most:
            raise _too_large(most)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise TookTooLong("the client went away")
            size += len(message.get("body", b""))
            if size > most:
                raise _too_large(most)
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        if size and not _is_json(headers.get(b"content-type", b"")):
            raise NotJson("the content type of a body is application/json", hint="With curl: --json, or -H.")
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise NotJson("compressed bodies are not accepted", hint="Send the body without Content-Encoding.")
        body = b"".join(parts)
        if has_more_elements(body, limit.max_elements):
            raise BodyTooLarge(
                f"a request to this path has up to {limit.max_elements} elements of JSON",
                hint="Send fewer at once.",
                detail={"limit": limit.max_elements},
            )
        whole: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def again() -> Message:
            nonlocal whole
            if whole is None:
                return await receive()
            message, whole = whole, None
            return message

        return again


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"a request to this path has up to {most} bytes", hint="Send less at once.", detail={"limit": most}
    )


def session_cookie(key: str, *, secure: bool) -> str:
    """The cookie of a session, for as long as one lasts that is not used."""
    lasts = int(SESSION.total_seconds())
    cookie = f"{SESSION_COOKIE}={key}; HttpOnly; Max-Age={lasts}; Path=/; SameSite=strict"
    return f"{cookie}; Secure" if secure else cookie


def session_of(headers: dict[bytes, bytes]) -> str | None:
    """The key of the session that a browser sent along."""
    try:
        found = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(SESSION_COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value


def _basic(secret: str) -> tuple[str, str]:
    try:
        name, colon, password = base64.b64decode(secret, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        raise NotAuthenticated("the name and password are not readable") from None
    if not colon:
        raise NotAuthenticated("the name and password are not readable")
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
