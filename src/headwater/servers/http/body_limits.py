"""Bounds on the bodies of requests, by route, checked before anything parses them. Pure.

A parsed body takes many times its bytes, and a validator lists every problem that it finds: so what a body may hold is
bounded by what its route needs, in bytes and in elements. How deep it nests is bounded by the parser.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

KIB: Final = 1024
MIB: Final = 1024 * KIB


class BodyLimit(NamedTuple):
    """What the body of a route may hold. `max_bytes` None: as much as the server takes at all."""

    max_bytes: int | None
    max_elements: int


# Signing in is open to everybody. A name and a password of the largest size fit, whatever is escaped.
SIGN_IN: Final = BodyLimit(16 * KIB, 100)
OTHER: Final = BodyLimit(1 * MIB, 25_000)
# The registry bounds its bodies itself, and refuses them in the shape that its clients know.
SCHEMAS: Final = BodyLimit(4 * MIB, 500_000)
EVENTS: Final = BodyLimit(None, 500_000)

_BY_PATH: Final = (
    (re.compile(r"/v1/sessions|/v1/accounts(/.*)?"), SIGN_IN),
    (re.compile(r"/registry/.*"), SCHEMAS),
    (
        re.compile(
            r"/v1/topics/[^/]+/events|/v1/stores/[^/]+/append|/dcb/[^/]+/append|/v1/(schedules|periodics)(/.*)?"
        ),
        EVENTS,
    ),
    # With the reason of each event that failed.
    (re.compile(r"/v1/groups/[^/]+/settle"), EVENTS),
)
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def limit_for(path: str) -> BodyLimit:
    """What a body that is sent to this path may hold."""
    return next((limit for pattern, limit in _BY_PATH if pattern.fullmatch(path)), OTHER)


def has_more_elements(body: bytes, max_elements: int) -> bool:
    """Whether JSON has more elements (members of objects and of arrays, and these themselves) than this."""
    # Never fewer than there are; texts are looked at only where they decide.
    return _elements(body) > max_elements and _elements(_STRING.sub(b"", body)) > max_elements


def _elements(text: bytes) -> int:
    return text.count(b",") + text.count(b"{") + text.count(b"[")
