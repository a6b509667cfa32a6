"""Compression codecs of record batches, with a limit on the decompressed size. No I/O."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Container
from typing import Final

import cramjam

CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
"""Indexed by the codec number in the attributes of a batch."""

ZSTD: Final = 4

# The Java clients frame snappy data (xerial): this header, then blocks with their lengths.
_XERIAL: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK: Final = 32 * 1024


class DecodeError(ValueError):
    """Compressed data is corrupt, or larger than allowed when decompressed."""


def codec_for(compression_type: str, *, zstd: bool) -> int:
    """The codec for records of a topic that are sent to a reader. `zstd`: whether the reader supports zstd."""
    codec = CODECS.index(compression_type) if compression_type in CODECS else 0
    return 0 if codec == ZSTD and not zstd else codec


def codecs_for(compression_type: str, *, zstd: bool) -> Container[int]:
    """The codecs of batches that may be sent to a reader unchanged."""
    if compression_type == "producer":
        return range(len(CODECS) if zstd else ZSTD)
    return (codec_for(compression_type, zstd=zstd),)


def decompress(codec: int, data: memoryview, *, limit_bytes: int) -> memoryview:
    """Decompress data to at most `limit_bytes`."""
    try:
        if codec == 1:
            return memoryview(_decompress_gzip(data, limit_bytes))
        if codec == 2:
            return memoryview(_decompress_snappy(data, limit_bytes))
        if codec in (3, 4):
            return _decompress_into(cramjam.lz4 if codec == 3 else cramjam.zstd, data, limit_bytes)
    except (cramjam.DecompressionError, zlib.error, struct.error) as error:
        raise DecodeError(f"invalid {CODECS[codec]} data: {error}") from None
    raise DecodeError(f"unknown compression codec {codec}: expected 0 to {len(CODECS) - 1}")


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


def _decompress_gzip(data: memoryview, limit_bytes: int) -> bytes:
    unpacker = zlib.decompressobj(wbits=47)
    found = unpacker.decompress(data, limit_bytes + 1)
    if len(found) > limit_bytes or not unpacker.eof:
        raise DecodeError(f"gzip data is truncated or decompresses to more than {limit_bytes} bytes")
    return found


def _decompress_snappy(data: memoryview, limit_bytes: int) -> bytes:
    if bytes(data[:8]) != _XERIAL:
        return _decompress_snappy_block(data, limit_bytes)
    blocks = []
    index = 16
    while index < len(data):
        (size,) = struct.unpack_from(">i", data, index)
        index += 4
        if size < 0 or index + size > len(data):
            raise DecodeError("a snappy block exceeds the data")
        blocks.append(_decompress_snappy_block(data[index : index + size], limit_bytes))
        limit_bytes -= len(blocks[-1])
        index += size
    return b"".join(blocks)


def _decompress_snappy_block(block: memoryview, limit_bytes: int) -> bytes:
    raw = bytes(block)
    if cramjam.snappy.decompress_raw_len(raw) > limit_bytes:
        raise DecodeError("snappy data decompresses to more than allowed")
    return bytes(cramjam.snappy.decompress_raw(raw))


def _decompress_into(codec: object, data: memoryview, limit_bytes: int) -> memoryview:
    """Decompress into a buffer that grows: lz4 and zstd frames need not declare the decompressed size."""
    raw = bytes(data)
    size = min(max(4 * len(raw), 65536), limit_bytes)
    while True:
        buffer = bytearray(size)
        try:
            return memoryview(buffer)[: codec.decompress_into(raw, buffer)]  # type: ignore[attr-defined]
        except cramjam.DecompressionError as error:
            if "whole buffer" not in str(error):
                raise
            if size >= limit_bytes:
                raise DecodeError(f"the data decompresses to more than {limit_bytes} bytes") from None
            size = min(size * 8, limit_bytes)
