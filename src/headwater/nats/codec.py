"""Values as bytes of a message and back: MessagePack or JSON, plain or compressed. No I/O here."""

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
_FEWEST_SAMPLES: Final = 100


def encode(value: Any, encoding: Encoding) -> bytes:
    """A value as bytes. An integer that MessagePack cannot hold becomes text."""
    if encoding == "json":
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    try:
        return bytes(msgpack.packb(value))
    except OverflowError:
        return bytes(msgpack.packb(_shrunk(value)))


def encode_all(values: Iterable[Any]) -> list[bytes]:
    """Values as MessagePack, each for itself."""
    pack = msgpack.Packer().pack
    held = list(values)
    try:
        return [pack(value) for value in held]
    except OverflowError:
        return [encode(value, "msgpack") for value in held]


def decode(payload: bytes) -> Any:
    """The value of a message's bytes. Its first byte tells the encoding: what JSON starts with is no map and no
    list in MessagePack."""
    try:
        if payload[:1] in (b"{", b"["):
            return json.loads(payload)
        return msgpack.unpackb(payload, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:  # TypeError: a map as a key
        raise InvalidMessage(f"the payload is neither MessagePack nor JSON: {payload[:60]!r}") from error


def compress(payload: bytes, dictionary: bytes | None = None) -> bytes:
    """The bytes, compressed; with a dictionary that was trained for their table if there is one."""
    return zstandard.ZstdCompressor(level=_LEVEL, dict_data=_loaded(dictionary)).compress(payload)


def decompress(payload: bytes, dictionary: bytes | None = None) -> bytes:
    """The bytes as they were, at most MAX_PLAIN_BYTES of them."""
    try:
        size = zstandard.frame_content_size(payload)
        if not 0 <= size <= MAX_PLAIN_BYTES:
            raise InvalidMessage(f"compressed bytes that say they are {size} bytes long")
        return zstandard.ZstdDecompressor(dict_data=_loaded(dictionary)).decompress(
            payload, max_output_size=MAX_PLAIN_BYTES
        )
    except zstandard.ZstdError as error:
        raise InvalidMessage(f"the bytes cannot be decompressed: {error}") from error


def train(samples: Iterable[bytes]) -> bytes | None:
    """A dictionary for bytes like these; nothing if they are too few or too alike to learn from."""
    chosen: list[bytes | bytearray | memoryview] = [sample for sample in samples if sample]
    if len(chosen) < _FEWEST_SAMPLES:
        return None
    try:
        return bytes(zstandard.train_dictionary(DICTIONARY_BYTES, list(chosen)).as_bytes())
    except zstandard.ZstdError:
        return None


def dictionary_id(dictionary: bytes) -> int:
    """The number by which a dictionary is known; it also stands in what was compressed with it."""
    return int(zstandard.ZstdCompressionDict(dictionary).dict_id())


def plain(payload: bytes, headers: Mapping[str, str] | None, dictionaries: Mapping[str, bytes]) -> Any:
    """The value of a message by its headers; `dictionaries` by their keys."""
    named = {name.lower(): value for name, value in (headers or {}).items()}
    how = named.get(CONTENT_ENCODING.lower(), "identity")
    if how == "zstd":
        key = named.get(DICTIONARY.lower())
        if key is not None and key not in dictionaries:
            raise InvalidMessage(f"the dictionary {key} is missing")
        payload = decompress(payload, None if key is None else dictionaries[key])
    elif how != "identity":
        raise InvalidMessage(f"the content encoding {how!r} is not known")
    return decode(payload)


def _loaded(dictionary: bytes | None) -> zstandard.ZstdCompressionDict | None:
    return None if dictionary is None else zstandard.ZstdCompressionDict(dictionary)


def _shrunk(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shrunk(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shrunk(item) for item in value]
    if isinstance(value, int) and not -(1 << 63) <= value < (1 << 64):
        return str(value)
    return value
