"""Are record batches read and built to the bit, whatever is in them, and is what is no batch refused?"""

from __future__ import annotations

import struct

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import effort
from headwater.servers.kafka.compression import CODECS, DecodeError, compress, decompress
from headwater.servers.kafka.record_mapping import event_parts, header_section
from headwater.servers.kafka.records import (
    LOG_APPEND_TIME,
    BadBatch,
    Columns,
    _encode,
    _encode_plain,
    build_batch,
    read_header,
    read_headers,
    read_records,
    stamp_batch,
    varint,
    write_headers,
)

LIMIT = 1_000_000
optional_bytes = st.none() | st.binary(max_size=300)
header_lists = st.lists(st.tuples(st.binary(max_size=20), st.none() | st.binary(max_size=40)), max_size=5)
record = st.tuples(
    st.integers(-(2**40), 2**60),
    optional_bytes,
    optional_bytes,
    header_lists.map(lambda headers: write_headers(headers) if headers else None),
)


def columns_of(records: list[tuple[int, bytes | None, bytes | None, bytes | None]]) -> Columns:
    return Columns(*(list(column) for column in zip(*records, strict=True)))


def with_crc(batch: bytes) -> bytes:
    return batch[:17] + struct.pack(">I", google_crc32c.value(batch[21:])) + batch[21:]


@given(st.lists(record, min_size=1, max_size=30), st.sampled_from(range(5)), st.integers(0, 2**40))
def test_what_is_built_is_read_back_with_every_codec(
    records: list[tuple[int, bytes | None, bytes | None, bytes | None]], codec: int, base: int
) -> None:
    columns = columns_of(records)
    batch = build_batch([base + place for place in range(len(records))], columns, codec=codec)
    header = read_header(memoryview(batch))
    assert (header.codec, header.record_count) == (codec, len(records))
    assert (header.first_time_ms, header.max_time_ms) == (records[0][0], max(r[0] for r in records))
    assert read_records(memoryview(batch), header, limit_bytes=LIMIT) == columns


@given(
    st.lists(st.tuples(st.integers(-3000, 9000), optional_bytes, optional_bytes), min_size=1, max_size=150),
    st.integers(0, 2**40),
)
def test_plain_records_are_written_as_any_others(
    records: list[tuple[int, bytes | None, bytes | None]], base: int
) -> None:
    times, keys, values = (list(column) for column in zip(*records, strict=True))
    columns = Columns(times, keys, values, [None] * len(records))
    offsets = range(base, base + len(records))
    try:
        plain = _encode_plain(offsets, columns)
    except LookupError:
        assert max(times) - times[0] >= 8192 or min(times) - times[0] < -2048
        return
    assert plain == _encode(offsets, columns)


@pytest.mark.parametrize("columns", [
    Columns([1, 2], [None, None], [b"v", b"w"], [None, write_headers([(b"h", b"1")])]),
    Columns([1, 2], [None, b"k"], [b"v" * 20_000, b"w"], [None, None]),
    Columns([1, 2**50], [None, b"k"], [b"v", b"w"], [None, None]),
], ids=["headers", "large", "late"])  # fmt: skip
def test_what_is_not_plain_is_written_all_the_same(columns: Columns) -> None:
    with pytest.raises(LookupError):
        _encode_plain([7, 8], columns)
    batch = memoryview(build_batch([7, 8], columns))
    assert read_records(batch, read_header(batch), limit_bytes=LIMIT) == columns


@pytest.mark.parametrize("size", [0, 1, 55, 63, 64, 127, 128, 8180, 8191, 8192, 20_000, 200_000])
def test_records_of_any_size_are_read_back(size: int) -> None:
    count = 70
    columns = Columns([1000 + place * size for place in range(count)], [b"k" * min(size, 9000)] * count,
                      [b"v" * size] * count, [None] * count)  # fmt: skip
    batch = memoryview(build_batch(list(range(count)), columns))
    assert read_records(batch, read_header(batch), limit_bytes=10 * LIMIT) == columns


@pytest.mark.parametrize("log_append_ms", [None, 123_456])
def test_an_appended_batch_is_what_came_with_its_offset_and_the_logs_time(log_append_ms: int | None) -> None:
    columns = Columns([1000, 900], [b"k", None], [b"v", b"w"], [None, None])
    appended = memoryview(stamp_batch(build_batch([0, 1], columns, codec=4), 77, log_append_ms=log_append_ms))
    header = read_header(appended)
    assert struct.unpack_from(">q", appended) == (77,)
    assert bool(header.attributes & LOG_APPEND_TIME) == (log_append_ms is not None)
    assert header.max_time_ms == (1000 if log_append_ms is None else log_append_ms)
    assert read_records(appended, header, limit_bytes=LIMIT) == columns


def test_another_implementation_reads_what_is_built_and_writes_what_is_read() -> None:
    # aiokafka's own reader and writer, which know nothing of ours.
    default_records = pytest.importorskip("aiokafka.record.default_records")
    columns = Columns(
        [1000, 900, 5000], [b"k", None, b""], [b"v" * 5000, b"", None], [None, write_headers([(b"h", b"1")]), None]
    )
    theirs = list(default_records.DefaultRecordBatch(build_batch([7, 9, 2_000_000], columns)))
    assert [(r.offset, r.timestamp, r.key, r.value) for r in theirs] == [
        (7, 1000, b"k", b"v" * 5000),
        (9, 900, None, b""),
        (2_000_000, 5000, b"", None),
    ]
    assert theirs[1].headers == [("h", b"1")]
    builder = default_records.DefaultRecordBatchBuilder(
        magic=2, compression_type=1, is_transactional=0, producer_id=5, producer_epoch=1, base_sequence=3,
        batch_size=100_000,
    )  # fmt: skip
    builder.append(0, 1000, b"k", b"v", [("a", b"b")])
    builder.append(1, 1001, None, None, [])
    batch = memoryview(bytes(builder.build()))
    header = read_header(batch)
    assert (header.producer_id, header.producer_epoch, header.first_sequence) == (5, 1, 3)
    assert read_records(batch, header, limit_bytes=LIMIT) == Columns(
        [1000, 1001], [b"k", None], [b"v", None], [write_headers([(b"a", b"b")]), None]
    )


@settings(max_examples=effort(400))
@given(
    st.lists(record, min_size=1, max_size=5),
    st.sampled_from(range(5)),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 40),
)
def test_a_damaged_batch_is_refused_or_read_and_nothing_else(
    records: list[tuple[int, bytes | None, bytes | None, bytes | None]],
    codec: int,
    damages: list[tuple[int, int]],
    cut: int,
) -> None:
    """The CRC is made right again, so that the damage gets behind it, as a hostile client would have it."""
    batch = bytearray(build_batch(list(range(len(records))), columns_of(records), codec=codec))
    for place, byte in damages:
        batch[place % len(batch)] = byte
    damaged = with_crc(bytes(batch[: len(batch) - cut])) if cut < len(batch) - 61 else bytes(batch)
    fitted = damaged[:8] + struct.pack(">i", len(damaged) - 12) + damaged[12:]
    try:
        header = read_header(memoryview(fitted))
        columns = read_records(memoryview(fitted), header, limit_bytes=LIMIT)
        for section in columns.headers:
            if section is not None:
                event_parts(section)
    except BadBatch:
        return
    assert {len(column) for column in columns} == {header.record_count}


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_as_a_batch(data: bytes) -> None:
    with pytest.raises(BadBatch):
        read_header(memoryview(data))


def test_a_wrong_crc_an_old_format_and_a_second_batch_are_refused() -> None:
    batch = build_batch([0], Columns([0], [None], [b"v"], [None]))
    for damaged, corrupt in (
        (batch[:-1] + b"\x01", True),
        (batch[:16] + b"\x01" + batch[17:], False),
        (batch + batch, False),
        (batch[:40], True),
    ):
        with pytest.raises(BadBatch) as refused:
            read_header(memoryview(damaged))
        assert refused.value.corrupt is corrupt


def test_a_record_that_says_it_is_shorter_than_its_parts_is_refused() -> None:
    batch = bytearray(build_batch([0, 1], Columns([0, 0], [None, None], [b"value", b"value"], [None, None])))
    # The length of the first record, after the header: two bytes less, and the second begins within the first.
    assert batch[61] == 2 * 11
    batch[61] = 2 * 9
    fitted = memoryview(with_crc(bytes(batch)))
    with pytest.raises(BadBatch, match="exceeds its declared length"):
        read_records(fitted, read_header(fitted), limit_bytes=LIMIT)


def test_a_count_that_lies_reserves_nothing() -> None:
    batch = bytearray(build_batch([0], Columns([0], [None], [b"v"], [None])))
    struct.pack_into(">i", batch, 57, 2**31 - 1)
    struct.pack_into(">i", batch, 23, 2**31 - 2)
    fitted = memoryview(with_crc(bytes(batch)))
    with pytest.raises(BadBatch):
        read_records(fitted, read_header(fitted), limit_bytes=LIMIT)


@pytest.mark.parametrize("codec", range(1, 5), ids=CODECS[1:])
def test_what_would_unpack_to_more_than_the_limit_is_refused(codec: int) -> None:
    packed = memoryview(compress(codec, bytes(3_000_000)))
    assert len(decompress(codec, packed, limit_bytes=3_000_000)) == 3_000_000
    with pytest.raises(DecodeError):
        decompress(codec, packed, limit_bytes=2_999_999)
    with pytest.raises(DecodeError):
        decompress(codec, packed[: len(packed) // 2], limit_bytes=3_000_000)


@given(st.sampled_from(range(1, 8)), st.binary(max_size=100))
def test_bytes_that_no_codec_made_are_refused(codec: int, data: bytes) -> None:
    try:
        decompress(codec, memoryview(data), limit_bytes=1000)
    except DecodeError:
        return


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_number_is_packed_as_in_protocol_buffers(number: int) -> None:
    value = shift = 0
    for byte in varint(number):
        value |= (byte & 0x7F) << shift
        shift += 7
    assert (value >> 1) ^ -(value & 1) == number


# Records as events


@given(header_lists)
def test_headers_survive_as_parts_of_an_event(headers: list[tuple[bytes, bytes | None]]) -> None:
    section = write_headers(headers)
    parts = event_parts(section)
    import json

    told = header_section(
        json.loads(parts.headers) if parts.headers else None, parts.type, parts.routing_key, parts.content_type, None
    )
    assert (parts.record_headers or told or b"\x00") == section


def test_headers_of_text_become_fields_and_are_not_kept_twice() -> None:
    parts = event_parts(write_headers([(b"a", b"1"), (b"bb", None), (b"headwater-type", b"paid")]))
    assert parts.headers == '{"a":"1","bb":null}'
    assert (parts.type, parts.record_headers) == ("paid", None)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"b", b"1"), (b"a", b"2")],
        [(b"a", b"1"), (b"a", b"2")],
        [(b"a", b"\xff")],
        [(b"a", b"\x00")],
        [(b"headwater-type", b"x" * 201)],
        [(b"headwater-type", b"t"), (b"a", b"1")],
        [(b"headwater-event-id", b"e"), (b"z" * 30, b"")],
    ],
    ids=["order", "twice", "bytes", "nul", "too long", "own first", "an id before"],
)
def test_headers_that_json_would_change_are_kept_as_they_came(headers: list[tuple[bytes, bytes | None]]) -> None:
    section = write_headers(headers)
    parts = event_parts(section)
    assert (parts.record_headers is None) == (headers[0][0] == b"headwater-event-id" or len(headers[0][1] or b"") > 200)
    assert read_headers(parts.record_headers or section) == headers
