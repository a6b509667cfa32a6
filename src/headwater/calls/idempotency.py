"""Calls for idempotency keys: whether a request was done before, and its stored response."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.calls.call import Call, nothing


@dataclass(frozen=True, slots=True)
class IdempotencyRecord:
    """The state of an idempotency key: new, or used; then whether the request is the same, and its response."""

    is_new: bool
    is_same: bool | None
    response: str | None


def begin_request(key_hash: bytes, request_hash: bytes) -> Call[IdempotencyRecord]:
    """Register a key in the transaction that runs the request."""
    return Call(
        "select is_new, is_same, answer from headwater_internal.begin_request(%s, %s)",
        (key_hash, request_hash),
        lambda rows: IdempotencyRecord(*rows[0]),
    )


def store_response(key_hash: bytes, response: str) -> Call[None]:
    """Store the response in the same transaction."""
    return Call("select headwater_internal.keep_answer(%s, %s)", (key_hash, response), nothing)
