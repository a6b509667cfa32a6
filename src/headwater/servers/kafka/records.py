"""Record batches: from bytes to columns and back, with every length checked. Pure.

A batch that a client sent is read into columns, since that is how Postgres takes it; a batch that is sent to a client
is built from columns. Records never become objects on the way.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import google_crc32c

from headwater.servers.kafka.compression import Undecodable, compress, decompress

CODEC_BITS: Final = 0x07
LOG_APPEND_TIME: Final = 0x08
TRANSACTIONAL: Final = 0x10
CONTROL: Final = 0x20
NO_HEADERS: Final = b"\x00"
NO_ATTRIBUTES: Final = b"\x00"
MAX_DELTA: Final = 2**31 - 1

# base offset, length, leader epoch, magic, CRC, attributes, last offset delta, first and last time, producer's id and
# epoch, first sequence, count
_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_PLACE: Final = struct.Struct(">qii")
_CRC: Final = struct.Struct(">I")
_ATTRIBUTES: Final = struct.Struct(">h")
_TIME: Final = struct.Struct(">q")
_MAX_TIME_AT: Final = 35
_UNDER_CRC: Final = 21
_AFTER_LENGTH: Final = 12


class BadBatch(ValueError):
    """What a client sent as records is none. `corrupt`: its CRC or its form is wrong; sending again may help."""

    def __init__(self, message: str, *, corrupt: bool = False) -> None:
        super().__init__(message)
        self.corrupt = corrupt


class BatchHeader(NamedTuple):
    """What a batch says of itself."""

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
    """The records of a batch side by side. Headers are as they came, with their count; None: there are none."""

    times_ms: Sequence[int]
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[bytes | None]


def read_header(batch: memoryview) -> BatchHeader:
    """The header of the one batch that the bytes are; its CRC is checked."""
    if len(batch) < _HEADER.size:
        raise BadBatch("the records are shorter than the header of a batch", corrupt=True)
    (_, length, _, magic, crc, attributes, last_delta, first_ms, max_ms, producer, epoch, sequence, count) = (
        _HEADER.unpack_from(batch)
    )
    if magic != 2:
        raise BadBatch(f"records of format {magic} are not taken, only those of format 2 (Kafka 0.11 and newer)")
    if length != len(batch) - _AFTER_LENGTH:
        raise BadBatch("there must be exactly one batch for each partition, as long as it says")
    if google_crc32c.value(bytes(batch[_UNDER_CRC:])) != crc:
        raise BadBatch("the CRC of the batch is wrong", corrupt=True)
    if count < 1 or last_delta != count - 1:
        raise BadBatch(f"a batch of {count} records cannot end at its record {last_delta}")
    if attributes & CONTROL:
        raise BadBatch("only a broker writes control records")
    return BatchHeader(attributes, first_ms, max_ms, producer, epoch, sequence, count)


def read_records(batch: memoryview, header: BatchHeader, *, limit_bytes: int) -> Columns:
    """The records of a batch whose header was read, decompressed to at most `limit_bytes`."""
    body = batch[_HEADER.size :]
    if header.codec:
        try:
            body = decompress(header.codec, body, limit_bytes=limit_bytes)
        except Undecodable as error:
            raise BadBatch(str(error), corrupt=True) from None
    try:
        return _split(bytes(body), header.record_count, header.first_time_ms)
    except IndexError:
        raise BadBatch("the records end in the middle of one", corrupt=True) from None


def _split(body: bytes, count: int, first_ms: int) -> Columns:
    times: list[int] = []
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    headers: list[bytes | None] = []
    place = 0
    end = len(body)
    for number in range(count):
        # Nearly every number has one or two bytes: asking for those first makes the loop twice as fast.
        byte = body[place]
        place += 1
        if byte > 127:
            if (more := body[place]) < 128:
                byte += (more << 7) - 128
                place += 1
            else:
                byte, place = _unsigned(body, place - 1)
        stop = place + ((byte >> 1) ^ -(byte & 1))
        # The attributes of a record mean nothing yet.
        place += 1
        byte = body[place]
        place += 1
        if byte > 127:
            if (more := body[place]) < 128:
                byte += (more << 7) - 128
                place += 1
            else:
                byte, place = _unsigned(body, place - 1)
        times.append(first_ms + ((byte >> 1) ^ -(byte & 1)))
        byte = body[place]
        place += 1
        if byte > 127:
            if (more := body[place]) < 128:
                byte += (more << 7) - 128
                place += 1
            else:
                byte, place = _unsigned(body, place - 1)
        if byte != number << 1:
            raise BadBatch("the records of a batch are not numbered one by one")
        byte = body[place]
        place += 1
        if byte > 127:
            if (more := body[place]) < 128:
                byte += (more << 7) - 128
                place += 1
            else:
                byte, place = _unsigned(body, place - 1)
        if byte & 1:
            keys.append(None)
        else:
            begin, place = place, place + (byte >> 1)
            keys.append(body[begin:place])
        byte = body[place]
        place += 1
        if byte > 127:
            if (more := body[place]) < 128:
                byte += (more << 7) - 128
                place += 1
            else:
                byte, place = _unsigned(body, place - 1)
        if byte & 1:
            values.append(None)
        else:
            begin, place = place, place + (byte >> 1)
            values.append(body[begin:place])
        # Slices beyond the end are silently short, so the end is looked at before it matters.
        if stop > end or place >= stop:
            raise BadBatch("a record is longer than it says", corrupt=True)
        if body[place] == 0 and place + 1 == stop:
            headers.append(None)
        else:
            headers.append(body[place:stop])
        place = stop
    if place != end:
        raise BadBatch(f"{end - place} bytes follow the last record", corrupt=True)
    return Columns(times, keys, values, headers)


def read_headers(section: bytes) -> list[tuple[bytes, bytes | None]]:
    """The headers of a record, in order, from the section that holds them."""
    found: list[tuple[bytes, bytes | None]] = []
    try:
        count, place = _signed(section, 0)
        if not 0 <= count <= len(section):
            raise BadBatch("a record has an impossible number of headers", corrupt=True)
        for _ in range(count):
            name, place = _sized(section, place)
            value, place = _sized(section, place)
            if name is None:
                raise BadBatch("a header has no name")
            found.append((name, value))
    except IndexError:
        raise BadBatch("the headers end in the middle of one", corrupt=True) from None
    if place != len(section):
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
    """A batch of these records, in this order. Offsets may have gaps."""
    base = offsets[0]
    first_ms = columns.times_ms[0]
    try:
        body = _written_plain(offsets, columns)
    except LookupError:
        body = _written(offsets, columns)
    records = compress(codec, body)
    header = _HEADER.pack(
        base,
        len(records) + _HEADER.size - _AFTER_LENGTH,
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
    crc = google_crc32c.extend(google_crc32c.value(header[_UNDER_CRC:]), records)
    return b"".join((header[:17], _CRC.pack(crc), header[_UNDER_CRC:], records))


def _written_plain(offsets: Sequence[int], columns: Columns) -> bytes:
    """Records as nearly all are: without headers, all numbers small. LookupError: they are not."""
    times, keys, values, headers = columns
    count = len(offsets)
    first_ms = times[0]
    if any(headers) or offsets[-1] - offsets[0] != count - 1 or count > len(_SMALL):
        raise LookupError
    small = _SMALL
    deltas = _DELTAS
    starts = _STARTS
    parts: list[bytes] = []
    # Put together only once, at the end: a record of its own would be copied twice. The number of headers, none, is
    # written with the next record.
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


def _written(offsets: Sequence[int], columns: Columns) -> bytes:
    """Records, whatever they are."""
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


def as_appended(
    batch: bytes | memoryview, base_offset: int, *, log_append_ms: int | None, leader_epoch: int = 0
) -> bytes:
    """A batch as it came, with the offset and the leader epoch that it got and, where the topic is by the log's time,
    with that."""
    appended = bytearray(batch)
    # None of these is under the CRC.
    _PLACE.pack_into(appended, 0, base_offset, len(batch) - _AFTER_LENGTH, leader_epoch)
    if log_append_ms is not None:
        (attributes,) = _ATTRIBUTES.unpack_from(appended, _UNDER_CRC)
        _ATTRIBUTES.pack_into(appended, _UNDER_CRC, attributes | LOG_APPEND_TIME)
        _TIME.pack_into(appended, _MAX_TIME_AT, log_append_ms)
        _CRC.pack_into(appended, 17, google_crc32c.value(bytes(appended[_UNDER_CRC:])))
    return bytes(appended)


def varint(value: int) -> bytes:
    """A signed number as Kafka packs it."""
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
# Times go back and forth.
_DELTAS: Final = {value: varint(value) for value in range(-2048, 8192)}
# What stands before the rest of a record: no headers of the one before, its own length, its attributes.
_STARTS: Final = [NO_HEADERS + varint(value + 2) + NO_ATTRIBUTES for value in range(10_240)]
_NONE: Final = varint(-1)


def _unsigned(body: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
        if shift > 63:
            raise BadBatch("a number is longer than ten bytes", corrupt=True)


def _signed(body: bytes, place: int) -> tuple[int, int]:
    value, place = _unsigned(body, place)
    return (value >> 1) ^ -(value & 1), place


def _sized(body: bytes, place: int) -> tuple[bytes | None, int]:
    size, place = _signed(body, place)
    if size < 0:
        return None, place
    if place + size > len(body):
        raise BadBatch("a header is longer than its record", corrupt=True)
    return body[place : place + size], place + size
