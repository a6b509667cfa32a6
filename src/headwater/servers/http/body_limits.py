"""Limits on request bodies by route, checked before the body is parsed. Pure.

A parsed body takes many times its size in memory, and a validator lists every problem that it finds. So each route
limits the bytes and the JSON elements of its body to what it needs. The parser limits the nesting depth.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

KIB: Final = 1024
MIB: Final = 1024 * KIB


class BodyLimit(NamedTuple):
    """The limit of a request body. `max_bytes` None: only the server-wide limit applies."""

    max_bytes: int | None
    max_elements: int


# Signing in needs no authentication. The longest name and password fit, even if every character is escaped.
SIGN_IN: Final = BodyLimit(16 * KIB, 100)
OTHER: Final = BodyLimit(1 * MIB, 25_000)
# The schema registry has its own lower limit, with the error format that its clients expect.
SCHEMAS: Final = BodyLimit(4 * MIB, 500_000)
EVENTS: Final = BodyLimit(None, 500_000)

_BY_PATH: Final = (
    (re.compile(r"/v1/sessions|/v1/accounts(/.*)?"), SIGN_IN),
    (re.compile(r"/registry/.*"), SCHEMAS),
    (
        re.compile(
            r"/v1/topics/[^/]+/events|/v1/stores/[^/]+/append|/dcb/[^/]+/append|/v1/(schedules|cron-schedules)(/.*)?"
        ),
        EVENTS,
    ),
    # Contains an error text for each failed event.
    (re.compile(r"/v1/queues/[^/]+/settle"), EVENTS),
)
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def limit_for(path: str) -> BodyLimit:
    """The limit of a body sent to this path."""
    return next((limit for pattern, limit in _BY_PATH if pattern.fullmatch(path)), OTHER)


def has_more_elements(body: bytes, max_elements: int) -> bool:
    """Whether JSON text has more elements than this: objects, arrays and their members."""
    # The count never underestimates. Strings are removed only if the cheap count is above the limit.
    return _elements(body) > max_elements and _elements(_STRING.sub(b"", body)) > max_elements


def _elements(text: bytes) -> int:
    return text.count(b",") + text.count(b"{") + text.count(b"[")
