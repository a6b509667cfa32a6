"""Record batches (format v2): decodes bytes to columns and encodes columns to bytes. No I/O.

Every length of a received batch is checked. Records are kept as columns, the form in which they are sent to and read
from Postgres; no object is created per record.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import google_crc32c

from headwater.servers.kafka.compression import DecodeError, compress, decompress

CODEC_BITS: Final = 0x07
LOG_APPEND_TIME: Final = 0x08
TRANSACTIONAL: Final = 0x10
CONTROL: Final = 0x20
NO_HEADERS: Final = b"\x00"
NO_ATTRIBUTES: Final = b"\x00"
MAX_DELTA: Final = 2**31 - 1

# Base offset, length, leader epoch, magic, CRC, attributes, last offset delta, first and maximum timestamp, producer
# id, producer epoch, first sequence, record count.
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_PREFIX: Final = struct.Struct(">qii")
_CRC: Final = struct.Struct(">I")
_ATTRIBUTES: Final = struct.Struct(">h")
_TIME: Final = struct.Struct(">q")
_MAX_TIME_AT: Final = 35
_CRC_START: Final = 21
_LENGTH_END: Final = 12


class BadBatch(ValueError):
    """A client sent an invalid record batch. `corrupt`: its CRC or encoding is wrong, so a retry may help."""

    def __init__(self, message: str, *, corrupt: bool = False) -> None:
        super().__init__(message)
        self.corrupt = corrupt


class BatchHeader(NamedTuple):
    """The header of a batch."""

    attributes: int
    first_time_ms: int
    max_time_ms: int
    producer_id: int
    producer_epoch: int
    first_sequence: int
    record_count: int

    @property
    def codec(self) -> int:
        return self.attributes & CODEC_BITS


class Columns(NamedTuple):
    """The records of a batch as columns. Headers are the encoded section including its count; None: no headers."""

    times_ms: Sequence[int]
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[bytes | None]


def read_header(batch: memoryview) -> BatchHeader:
    """Read the header of a single batch, and check its CRC."""
    if len(batch) < _HEADER.size:
        raise BadBatch("the records are shorter than a batch header", corrupt=True)
    (_, length, _, magic, crc, attributes, last_delta, first_ms, max_ms, producer, epoch, sequence, count) = (
        _HEADER.unpack_from(batch)
    )
    if magic != 2:
        raise BadBatch(f"unsupported record format {magic}: expected 2 (Kafka 0.11 and newer)")
    if length != len(batch) - _LENGTH_END:
        raise BadBatch("invalid batch length: expected exactly one batch for each partition")
    if google_crc32c.value(bytes(batch[_CRC_START:])) != crc:
        raise BadBatch("the CRC of the batch is wrong", corrupt=True)
    if count < 1 or last_delta != count - 1:
        raise BadBatch(f"invalid last offset delta {last_delta} for a batch of {count} records")
    if attributes & CONTROL:
        raise BadBatch("control records can only be written by a broker")
    return BatchHeader(attributes, first_ms, max_ms, producer, epoch, sequence, count)


def read_records(batch: memoryview, header: BatchHeader, *, limit_bytes: int) -> Columns:
    """Read the records of a batch, decompressed to at most `limit_bytes`."""
    body = batch[_HEADER.size :]
    if header.codec:
        try:
            body = decompress(header.codec, body, limit_bytes=limit_bytes)
        except DecodeError as error:
            raise BadBatch(str(error), corrupt=True) from None
    try:
        return _split(bytes(body), header.record_count, header.first_time_ms)
    except IndexError:
        raise BadBatch("the last record is truncated", corrupt=True) from None


def _split(body: bytes, count: int, first_ms: int) -> Columns:
    times: list[int] = []
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    headers: list[bytes | None] = []
    index = 0
    end = len(body)
    for number in range(count):
        # Inlined varints: nearly all have one or two bytes, and handling those first makes the loop twice as fast.
        byte = body[index]
        index += 1
        if byte > 127:
            if (more := body[index]) < 128:
                byte += (more << 7) - 128
                index += 1
            else:
                byte, index = _unsigned(body, index - 1)
        stop = index + ((byte >> 1) ^ -(byte & 1))
        # The attributes of a record are unused.
        index += 1
        byte = body[index]
        index += 1
        if byte > 127:
            if (more := body[index]) < 128:
                byte += (more << 7) - 128
                index += 1
            else:
                byte, index = _unsigned(body, index - 1)
        times.append(first_ms + ((byte >> 1) ^ -(byte & 1)))
        byte = body[index]
        index += 1
        if byte > 127:
            if (more := body[index]) < 128:
                byte += (more << 7) - 128
                index += 1
            else:
                byte, index = _unsigned(body, index - 1)
        if byte != number << 1:
            raise BadBatch("the offset deltas of a batch are not consecutive")
        byte = body[index]
        index += 1
        if byte > 127:
            if (more := body[index]) < 128:
                byte += (more << 7) - 128
                index += 1
            else:
                byte, index = _unsigned(body, index - 1)
        if byte & 1:
            keys.append(None)
        else:
            start, index = index, index + (byte >> 1)
            keys.append(body[start:index])
        byte = body[index]
        index += 1
        if byte > 127:
            if (more := body[index]) < 128:
                byte += (more << 7) - 128
                index += 1
            else:
                byte, index = _unsigned(body, index - 1)
        if byte & 1:
            values.append(None)
        else:
            start, index = index, index + (byte >> 1)
            values.append(body[start:index])
        # Slices beyond the end are silently short, so check the end here.
        if stop > end or index >= stop:
            raise BadBatch("a record exceeds its declared length", corrupt=True)
        if body[index] == 0 and index + 1 == stop:
            headers.append(None)
        else:
            headers.append(body[index:stop])
        index = stop
    if index != end:
        raise BadBatch(f"{end - index} bytes follow the last record", corrupt=True)
    return Columns(times, keys, values, headers)


def read_headers(section: bytes) -> list[tuple[bytes, bytes | None]]:
    """Decode the header section of a record, in order."""
    found: list[tuple[bytes, bytes | None]] = []
    try:
        count, index = _signed(section, 0)
        if not 0 <= count <= len(section):
            raise BadBatch(f"invalid number of headers: {count}", corrupt=True)
        for _ in range(count):
            name, index = _sized(section, index)
            value, index = _sized(section, index)
            if name is None:
                raise BadBatch("a header has no name")
            found.append((name, value))
    except IndexError:
        raise BadBatch("the last header of a record is truncated", corrupt=True) from None
    if index != len(section):
        raise BadBatch("bytes follow the last header of a record", corrupt=True)
    return found


def write_headers(headers: list[tuple[bytes, bytes | None]]) -> bytes:
    parts = [varint(len(headers))]
    for name, value in headers:
        parts += (varint(len(name)), name)
        parts += (varint(-1),) if value is None else (varint(len(value)), value)
    return b"".join(parts)


def build_batch(
    offsets: Sequence[int],
    columns: Columns,
    *,
    codec: int = 0,
    log_append_time: bool = False,
    leader_epoch: int = 0,
) -> bytes:
    """Encode a batch of these records, in this order. Offsets may have gaps."""
    base = offsets[0]
    first_ms = columns.times_ms[0]
    try:
        body = _encode_plain(offsets, columns)
    except LookupError:
        body = _encode(offsets, columns)
    records = compress(codec, body)
    header = _HEADER.pack(
        base,
        len(records) + _HEADER.size - _LENGTH_END,
        leader_epoch,
        2,
        0,
        codec | (LOG_APPEND_TIME if log_append_time else 0),
        offsets[-1] - base,
        first_ms,
        max(columns.times_ms),
        -1,
        -1,
        -1,
        len(offsets),
    )
    crc = google_crc32c.extend(google_crc32c.value(header[_CRC_START:]), records)
    return b"".join((header[:17], _CRC.pack(crc), header[_CRC_START:], records))


def _encode_plain(offsets: Sequence[int], columns: Columns) -> bytes:
    """Fast path for records without headers, with small numbers and consecutive offsets. Raises LookupError if not."""
    times, keys, values, headers = columns
    count = len(offsets)
    first_ms = times[0]
    if any(headers) or offsets[-1] - offsets[0] != count - 1 or count > len(_SMALL):
        raise LookupError
    small = _SMALL
    deltas = _DELTAS
    starts = _STARTS
    parts: list[bytes] = []
    # Joined once at the end: joining each record first would copy it twice. The header count of each record (0) is
    # written together with the start of the next record.
    for ahead, time_ms, key, value in zip(small, times, keys, values, strict=False):
        delta = deltas[time_ms - first_ms]
        if key is None:
            key = b""
            key_size = _NONE
        else:
            key_size = small[len(key)]
        if value is None:
            value = b""
            value_size = _NONE
        else:
            value_size = small[len(value)]
        size = len(delta) + len(ahead) + len(key_size) + len(key) + len(value_size) + len(value)
        parts += (starts[size], delta, ahead, key_size, key, value_size, value)
    parts.append(NO_HEADERS)
    return b"".join(parts)[1:]


def _encode(offsets: Sequence[int], columns: Columns) -> bytes:
    """Encode any records."""
    base = offsets[0]
    first_ms = columns.times_ms[0]
    parts: list[bytes] = []
    for offset, time_ms, key, value, headers in zip(offsets, *columns, strict=True):
        body = b"".join(
            (
                NO_ATTRIBUTES,
                varint(time_ms - first_ms),
                varint(offset - base),
                _NONE if key is None else varint(len(key)) + key,
                _NONE if value is None else varint(len(value)) + value,
                headers or NO_HEADERS,
            )
        )
        parts += (varint(len(body)), body)
    return b"".join(parts)


def stamp_batch(
    batch: bytes | memoryview, base_offset: int, *, log_append_ms: int | None, leader_epoch: int = 0
) -> bytes:
    """Copy a received batch with its assigned offset, leader epoch and, for LogAppendTime, the time of the append."""
    appended = bytearray(batch)
    # These fields are not covered by the CRC.
    _PREFIX.pack_into(appended, 0, base_offset, len(batch) - _LENGTH_END, leader_epoch)
    if log_append_ms is not None:
        (attributes,) = _ATTRIBUTES.unpack_from(appended, _CRC_START)
        _ATTRIBUTES.pack_into(appended, _CRC_START, attributes | LOG_APPEND_TIME)
        _TIME.pack_into(appended, _MAX_TIME_AT, log_append_ms)
        _CRC.pack_into(appended, 17, google_crc32c.value(bytes(appended[_CRC_START:])))
    return bytes(appended)


def varint(value: int) -> bytes:
    """Encode a signed number as a zigzag varint."""
    value = (value << 1) ^ (value >> 63)
    if value < 0x80:
        return bytes((value,))
    packed = bytearray()
    while value >= 0x80:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)
    return bytes(packed)


_SMALL: Final = [varint(value) for value in range(10_240)]
# Timestamps may go backwards.
_DELTAS: Final = {value: varint(value) for value in range(-2048, 8192)}
# The start of a record: the header count (0) of the previous record, then length and attributes.
_STARTS: Final = [NO_HEADERS + varint(value + 2) + NO_ATTRIBUTES for value in range(10_240)]
_NONE: Final = varint(-1)


def _unsigned(body: bytes, index: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[index]
        index += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index
        shift += 7
        if shift > 63:
            raise BadBatch("a varint is longer than ten bytes", corrupt=True)


def _signed(body: bytes, index: int) -> tuple[int, int]:
    value, index = _unsigned(body, index)
    return (value >> 1) ^ -(value & 1), index


def _sized(body: bytes, index: int) -> tuple[bytes | None, int]:
    size, index = _signed(body, index)
    if size < 0:
        return None, index
    if index + size > len(body):
        raise BadBatch("a header exceeds its record", corrupt=True)
    return body[index : index + size], index + size
