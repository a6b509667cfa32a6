"""The codecs of record batches, with a bound on what may come out. Pure."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Container
from typing import Final

import cramjam

CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
"""By their number in a batch's attributes."""

ZSTD: Final = 4

# What the Java clients put before snappy data: blocks with their lengths follow.
_XERIAL: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK: Final = 32 * 1024


class Undecodable(ValueError):
    """The bytes are not what the codec makes, or they would become more than is allowed."""


def codec_for(compression_type: str, *, zstd: bool) -> int:
    """With what a topic packs records for a reader. `zstd`: whether the reader can unpack that; old ones cannot."""
    codec = CODECS.index(compression_type) if compression_type in CODECS else 0
    return 0 if codec == ZSTD and not zstd else codec


def codecs_for(compression_type: str, *, zstd: bool) -> Container[int]:
    """With what records may be packed that a reader gets as they came: as the topic or else their producer says."""
    if compression_type == "producer":
        return range(len(CODECS) if zstd else ZSTD)
    return (codec_for(compression_type, zstd=zstd),)


def decompress(codec: int, data: memoryview, *, limit_bytes: int) -> memoryview:
    """What was compressed, never more than `limit_bytes`."""
    try:
        if codec == 1:
            return memoryview(_gunzip(data, limit_bytes))
        if codec == 2:
            return memoryview(_unsnap(data, limit_bytes))
        if codec in (3, 4):
            return _into(cramjam.lz4 if codec == 3 else cramjam.zstd, data, limit_bytes)
    except (cramjam.DecompressionError, zlib.error, struct.error) as error:
        raise Undecodable(f"{CODECS[codec]} data cannot be read: {error}") from None
    raise Undecodable(f"there is no codec {codec}")


def compress(codec: int, data: bytes) -> bytes:
    if codec == 1:
        packer = zlib.compressobj(level=6, wbits=31)
        return packer.compress(data) + packer.flush()
    if codec == 2:
        blocks = [_XERIAL_HEADER]
        for start in range(0, len(data), _XERIAL_BLOCK):
            block = bytes(cramjam.snappy.compress_raw(data[start : start + _XERIAL_BLOCK]))
            blocks += (struct.pack(">i", len(block)), block)
        return b"".join(blocks)
    if codec == 3:
        return bytes(cramjam.lz4.compress(data))
    if codec == 4:
        return bytes(cramjam.zstd.compress(data))
    return data


def _gunzip(data: memoryview, limit_bytes: int) -> bytes:
    unpacker = zlib.decompressobj(wbits=47)
    found = unpacker.decompress(data, limit_bytes + 1)
    if len(found) > limit_bytes or not unpacker.eof:
        raise Undecodable(f"gzip data ends too early or becomes more than {limit_bytes} bytes")
    return found


def _unsnap(data: memoryview, limit_bytes: int) -> bytes:
    if bytes(data[:8]) != _XERIAL:
        return _unsnap_block(data, limit_bytes)
    blocks = []
    place = 16
    while place < len(data):
        (size,) = struct.unpack_from(">i", data, place)
        place += 4
        if size < 0 or place + size > len(data):
            raise Undecodable("a snappy block is longer than the data")
        blocks.append(_unsnap_block(data[place : place + size], limit_bytes))
        limit_bytes -= len(blocks[-1])
        place += size
    return b"".join(blocks)


def _unsnap_block(block: memoryview, limit_bytes: int) -> bytes:
    raw = bytes(block)
    if cramjam.snappy.decompress_raw_len(raw) > limit_bytes:
        raise Undecodable("snappy data becomes more than is allowed")
    return bytes(cramjam.snappy.decompress_raw(raw))


def _into(codec: object, data: memoryview, limit_bytes: int) -> memoryview:
    """Into a buffer that grows while it is too small, since neither format must say how much comes out."""
    raw = bytes(data)
    size = min(max(4 * len(raw), 65536), limit_bytes)
    while True:
        room = bytearray(size)
        try:
            return memoryview(room)[: codec.decompress_into(raw, room)]  # type: ignore[attr-defined]
        except cramjam.DecompressionError as error:
            if "whole buffer" not in str(error):
                raise
            if size >= limit_bytes:
                raise Undecodable(f"the data becomes more than {limit_bytes} bytes") from None
            size = min(size * 8, limit_bytes)
