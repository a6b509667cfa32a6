"""Encodes and decodes message payloads: MessagePack or JSON, plain or zstd-compressed. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgpack
import zstandard

from headwater.nats.errors import InvalidMessage

Encoding = Literal["msgpack", "json"]
ENCODINGS: Final = ("msgpack", "json")

CONTENT_ENCODING: Final = "Content-Encoding"
DICTIONARY: Final = "Headwater-Dictionary"
MAX_PLAIN_BYTES: Final = 268_435_456
DICTIONARY_BYTES: Final = 65_536
_LEVEL: Final = 3
_MIN_SAMPLES: Final = 100


def encode(value: Any, encoding: Encoding) -> bytes:
    """Encode a value. An integer that does not fit into MessagePack's 64 bits becomes text."""
    if encoding == "json":
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    try:
        return bytes(msgpack.packb(value))
    except OverflowError:
        return bytes(msgpack.packb(_big_integers_as_text(value)))


def encode_all(values: Iterable[Any]) -> list[bytes]:
    """Encode each value as MessagePack."""
    pack = msgpack.Packer().pack
    listed = list(values)
    try:
        return [pack(value) for value in listed]
    except OverflowError:
        return [encode(value, "msgpack") for value in listed]


def decode(payload: bytes) -> Any:
    """Decode a payload. The first byte identifies the encoding: in MessagePack, { and [ start neither map nor list."""
    try:
        if payload[:1] in (b"{", b"["):
            return json.loads(payload)
        return msgpack.unpackb(payload, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:  # TypeError: a map as a key
        raise InvalidMessage(f"the payload is neither MessagePack nor JSON: {payload[:60]!r}") from error


def compress(payload: bytes, dictionary: bytes | None = None) -> bytes:
    """Compress the bytes, with the trained dictionary of their table if there is one."""
    return zstandard.ZstdCompressor(level=_LEVEL, dict_data=_load_dictionary(dictionary)).compress(payload)


def decompress(payload: bytes, dictionary: bytes | None = None) -> bytes:
    """Decompress the bytes; InvalidMessage if the result is larger than MAX_PLAIN_BYTES."""
    try:
        size = zstandard.frame_content_size(payload)
        if not 0 <= size <= MAX_PLAIN_BYTES:
            raise InvalidMessage(
                f"invalid size {size} of a compressed payload: expected at most {MAX_PLAIN_BYTES} bytes"
            )
        return zstandard.ZstdDecompressor(dict_data=_load_dictionary(dictionary)).decompress(
            payload, max_output_size=MAX_PLAIN_BYTES
        )
    except zstandard.ZstdError as error:
        raise InvalidMessage(f"the payload cannot be decompressed: {error}") from error


def train(samples: Iterable[bytes]) -> bytes | None:
    """Train a dictionary on samples; None if they are too few or too similar."""
    chosen: list[bytes | bytearray | memoryview] = [sample for sample in samples if sample]
    if len(chosen) < _MIN_SAMPLES:
        return None
    try:
        return bytes(zstandard.train_dictionary(DICTIONARY_BYTES, list(chosen)).as_bytes())
    except zstandard.ZstdError:
        return None


def dictionary_id(dictionary: bytes) -> int:
    """The id of a dictionary, which is also in every frame compressed with it."""
    return int(zstandard.ZstdCompressionDict(dictionary).dict_id())


def decode_message(payload: bytes, headers: Mapping[str, str] | None, dictionaries: Mapping[str, bytes]) -> Any:
    """Decode a message according to its headers; `dictionaries` by their keys."""
    named = {name.lower(): value for name, value in (headers or {}).items()}
    how = named.get(CONTENT_ENCODING.lower(), "identity")
    if how == "zstd":
        key = named.get(DICTIONARY.lower())
        if key is not None and key not in dictionaries:
            raise InvalidMessage(f"the dictionary {key} is missing")
        payload = decompress(payload, None if key is None else dictionaries[key])
    elif how != "identity":
        raise InvalidMessage(f"unknown content encoding {how!r}: expected zstd or identity")
    return decode(payload)


def _load_dictionary(dictionary: bytes | None) -> zstandard.ZstdCompressionDict | None:
    return None if dictionary is None else zstandard.ZstdCompressionDict(dictionary)


def _big_integers_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _big_integers_as_text(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_big_integers_as_text(item) for item in value]
    if isinstance(value, int) and not -(1 << 63) <= value < (1 << 64):
        return str(value)
    return value
