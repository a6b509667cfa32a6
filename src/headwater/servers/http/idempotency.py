"""Requests that come with an idempotency key: each is done once, and a repeat is answered as the first time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Header, Request
from psycopg import AsyncConnection
from starlette.responses import Response

from headwater.calls import answers as calls
from headwater.servers.http.authorization import caller_of
from headwater.servers.http.dependencies import as_json, raw_answer, served
from headwater.servers.http.errors import KeyReused

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=200,
        description="for a day, a repeat with this key answers the same and does nothing; another request is refused",
    ),
]
Act = Callable[[AsyncConnection[Any] | None], Awaitable[Any]]


async def once(request: Request, key: str | None, act: Act, *, status: int = 200) -> Response:
    """Do what is asked, and answer with what comes of it; with a key, in one transaction with the note that it is done.

    What fails leaves no note: it may be tried again under its key.
    """
    if key is None:
        return raw_answer(as_json(await act(None)), status=status)
    log = served(request).log
    account = caller_of(request).account
    hashed = _hash([account, request.url.path, key])
    async with log.transaction() as connection:
        begun = await log.run(calls.begin_request(hashed, _hash(await request.json())), connection=connection)
        if begun.is_new:
            text = as_json(await act(connection))
            await log.run(calls.keep_answer(hashed, text), connection=connection)
        elif begun.is_same and begun.answer is not None:
            text = begun.answer
        else:
            raise KeyReused(
                "the idempotency key was used for another request",
                hint="Use a new key for each request, and the same one only to repeat it.",
            )
    return raw_answer(text, status=status)


def _hash(value: Any) -> bytes:
    """Of what JSON says, however it is written."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).digest()
