"""Calls about requests that come with a key: whether one was done before, and what it was answered."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.calls.call import Call, nothing


@dataclass(frozen=True, slots=True)
class Begun:
    """How a request with a key stands: new, or known; then whether it is the same one, and what it was answered."""

    is_new: bool
    is_same: bool | None
    answer: str | None


def begin_request(key_hash: bytes, request_hash: bytes) -> Call[Begun]:
    """Begin a request, in the transaction that does it."""
    return Call(
        "select is_new, is_same, answer from headwater.begin_request(%s, %s)",
        (key_hash, request_hash),
        lambda rows: Begun(*rows[0]),
    )


def keep_answer(key_hash: bytes, answer: str) -> Call[None]:
    """Keep what it is answered, in the same transaction."""
    return Call("select headwater.keep_answer(%s, %s)", (key_hash, answer), nothing)
