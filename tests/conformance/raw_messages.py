"""Messages of protocol buffers by their numbers alone: nothing here knows a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Value = int | str | bytes | Sequence[Any]


def message(*fields: tuple[int, Value]) -> bytes:
    """A message of numbered fields: numbers as varints, texts and bytes with their length."""
    parts = []
    for number, value in fields:
        if isinstance(value, int):
            parts.append(varint(number << 3) + varint(value & (1 << 64) - 1))
        else:
            encoded = value.encode() if isinstance(value, str) else bytes(value)
            parts.append(varint(number << 3 | 2) + varint(len(encoded)) + encoded)
    return b"".join(parts)


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def fields(encoded: bytes) -> dict[int, list[Any]]:
    """What a message has, by number: integers, signed as int64 is, and bytes."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(encoded):
        key, at = _varint(encoded, at)
        value, at = _varint(encoded, at)
        if key & 7 == 2:
            found.setdefault(key >> 3, []).append(encoded[at : at + value])
            at += value
        else:
            assert key & 7 == 0, f"wire type {key & 7}"
            found.setdefault(key >> 3, []).append(value - (1 << 64) if value >> 63 else value)
    return found


def _varint(encoded: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = encoded[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
