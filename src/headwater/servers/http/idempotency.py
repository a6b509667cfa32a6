"""Idempotency keys: a request with a key runs once, and a repeat gets the same response."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Header, Request
from psycopg import AsyncConnection
from starlette.responses import Response

from headwater.calls import idempotency as calls
from headwater.servers.http.authorization import principal_of
from headwater.servers.http.dependencies import context_of, raw_json_response, to_json
from headwater.servers.http.errors import KeyReused

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        description="for one day, a repeat with this key returns the same response and does nothing; "
        "another request with this key is rejected",
    ),
]
Act = Callable[[AsyncConnection[Any] | None], Awaitable[Any]]


async def run_once(request: Request, key: str | None, act: Act, *, status: int = 200, content: Any = None) -> Response:
    """Run `act` and respond with its result. With a key, `act` and the stored response are one transaction.

    `content` identifies the request; by default the JSON of its body. A failed request stores nothing and can be
    retried with its key.
    """
    if key is None:
        return raw_json_response(to_json(await act(None)), status=status)
    log = context_of(request).log
    account = principal_of(request).account
    hashed = _hash([account, request.url.path, key])
    async with log.transaction() as connection:
        record = await log.run(
            calls.begin_request(hashed, _hash(content or await request.json())), connection=connection
        )
        if record.is_new:
            text = to_json(await act(connection))
            await log.run(calls.store_response(hashed, text), connection=connection)
        elif record.is_same and record.response is not None:
            text = record.response
        else:
            raise KeyReused(
                "the idempotency key was used for another request",
                hint="Use a new key for each request, and the same one only to repeat it.",
            )
    return raw_json_response(text, status=status)


def _hash(value: Any) -> bytes:
    """A hash of the value, independent of the formatting of its JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).digest()
