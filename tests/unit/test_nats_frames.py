"""Do batches become the frames of NATS and back? Do changes become ZeBridge's messages? Pure code."""

from __future__ import annotations

import contextlib
import itertools
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from effort import effort

pytest.importorskip("pyarrow")
pytest.importorskip("msgpack")

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headwater.database.pg_snapshot import is_visible, lsn_number
from headwater.errors import InvalidRequest
from headwater.nats import codec, frames, messages, subjects
from headwater.nats.errors import InvalidMessage
from headwater.nats.subjects import Table

NO_CLOCK = settings(deadline=None, max_examples=effort(60))

TOKEN = st.text("abcdefgXYZ0129_-=/é$", min_size=1, max_size=12)
SUBJECT = st.lists(TOKEN, min_size=1, max_size=5).map(".".join)
HEADERS = st.none() | st.dictionaries(
    st.text("abcXYZ-", min_size=1, max_size=8), st.text("abc é:;", max_size=20), max_size=3
).map(frames.header_lines)
MESSAGE = st.tuples(SUBJECT, TOKEN, HEADERS, st.binary(max_size=300))


def batch_of(rows: list[tuple[str, str, bytes | None, bytes]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [[], [], [], []]
    return pa.RecordBatch.from_arrays(
        [pa.array(values, field.type) for values, field in zip(columns, frames.SCHEMA, strict=True)],
        schema=frames.SCHEMA,
    )


def published(data: bytes) -> list[tuple[str, str, bytes, bytes]]:
    """What a server would read: subject, reply, headers, payload. Written apart from the code under test."""
    found = []
    while data:
        line, _, data = data.partition(b"\r\n")
        verb, subject, reply, header_size, size = line.split(b" ")
        assert verb == b"HPUB"
        head, body = data[: int(header_size)], data[int(header_size) : int(size)]
        assert data[int(size) : int(size) + 2] == b"\r\n"
        found.append((subject.decode(), reply.decode(), head, body))
        data = data[int(size) + 2 :]
    return found


# --- frames --------------------------------------------------------------------------------------------------


@NO_CLOCK
@given(rows=st.lists(MESSAGE, max_size=20), first=st.integers(0, 10**12), skip=st.integers(0, 3))
def test_a_server_reads_from_the_frames_what_was_put_in(rows: list[Any], first: int, skip: int) -> None:
    batch = batch_of(rows).slice(skip)
    frames.check(batch, max_payload_bytes=100_000)
    read = published(bytes(frames.publish_frames(batch, inbox="_INBOX.x", first_number=first)))
    assert [(subject, payload) for subject, _, _, payload in read] == [(row[0], row[3]) for row in rows[skip:]]
    assert [reply for _, reply, _, _ in read] == [f"_INBOX.x.{first + n}" for n in range(len(read))]
    for (_, _, head, _), (_, msg_id, headers, _) in zip(read, rows[skip:], strict=True):
        assert head == b"NATS/1.0\r\nNats-Msg-Id: " + msg_id.encode() + b"\r\n" + (headers or b"") + b"\r\n"


@pytest.mark.parametrize(
    "row",
    [
        ("", "1", None, b""),
        ("a..b", "1", None, b""),
        ("a.*", "1", None, b""),
        ("a.>", "1", None, b""),
        ("a b", "1", None, b""),
        ("a\r\nPUB x 0", "1", None, b""),
        ("a" * 1001, "1", None, b""),
        ("a", "", None, b""),
        ("a", "1\r\nX: y", None, b""),
        ("a", "1 2", None, b""),
        ("a", "1", b"X: y", b""),
        ("a", "1", b"X: y\r\n\r\nPUB", b""),
        ("a", "1", None, b"x" * 1000),
    ],
)
def test_what_would_be_read_as_other_frames_is_refused(row: Any) -> None:
    with pytest.raises(InvalidMessage):
        frames.check(batch_of([("fine", "0", None, b""), row]), max_payload_bytes=1000)


def test_header_lines_cannot_hold_a_line_break() -> None:
    with pytest.raises(InvalidMessage):
        frames.header_lines({"a": "b\r\nc: d"})


SAID = st.one_of(
    st.just((b"PING\r\n", frames.Ping())),
    st.just((b"PONG\r\n", frames.Pong())),
    st.just((b"+OK\r\n", None)),
    st.just((b"-ERR 'Stale Connection'\r\n", frames.Failure("Stale Connection"))),
    st.integers().map(lambda n: (f'INFO {{"a":{n}}}\r\n'.encode(), frames.Info({"a": n}))),
    st.tuples(TOKEN, st.integers(1, 99), st.none() | TOKEN, st.binary(max_size=50), st.binary(max_size=50)).map(
        lambda t: (
            f"HMSG {t[0]} {t[1]} {t[2] + ' ' if t[2] else ''}{len(t[3])} {len(t[3]) + len(t[4])}\r\n".encode()
            + (t[3] + t[4] + b"\r\n"),
            frames.Message(t[0], t[1], t[2], t[3], t[4]),
        )
    ),
    st.tuples(TOKEN, st.integers(1, 99), st.binary(max_size=50)).map(
        lambda t: (
            f"MSG {t[0]} {t[1]} {len(t[2])}\r\n".encode() + t[2] + b"\r\n",
            frames.Message(t[0], t[1], None, b"", t[2]),
        )
    ),
)


@NO_CLOCK
@given(said=st.lists(SAID, max_size=10), cuts=st.lists(st.integers(0, 500), max_size=10))
def test_what_a_server_says_is_understood_in_whatever_pieces_it_comes(said: list[Any], cuts: list[int]) -> None:
    data = b"".join(raw for raw, _ in said)
    parser = frames.Parser(inbox="_INBOX.x")
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    heard = [word for start, end in itertools.pairwise(bounds) for word in parser.feed(data[start:end])]
    assert heard == [meaning for _, meaning in said if meaning is not None]


@NO_CLOCK
@given(data=st.binary(max_size=200) | st.text('MSGHINFO+-ERPQ 0123456789.\r\n{}":x', max_size=80).map(str.encode))
def test_garbage_is_refused_and_never_crashes_the_parser(data: bytes) -> None:
    with contextlib.suppress(InvalidMessage):
        list(frames.Parser(inbox="x").feed(data))


@NO_CLOCK
@given(
    numbers=st.lists(st.integers(0, 10**9), min_size=1, max_size=30),
    again=st.lists(st.booleans(), min_size=30, max_size=30),
    cut=st.integers(0, 2000),
)
def test_a_run_of_acknowledgements_means_what_each_of_them_means(
    numbers: list[int], again: list[bool], cut: int
) -> None:
    parts = []
    for number, duplicate in zip(numbers, again, strict=False):
        body = b'{"stream":"CDC", "seq":7' + (b',"duplicate": true}' if duplicate else b"}")
        parts.append(f"MSG _INBOX.x.{number} 1 {len(body)}\r\n".encode() + body + b"\r\n")
    data = b"".join(parts)
    parser, plain = frames.Parser(inbox="_INBOX.x"), frames.Parser()
    fast = [*parser.feed(data[:cut]), *parser.feed(data[cut:])]
    slow = list(plain.feed(data))
    got = [
        (n, d) for run in fast if isinstance(run, frames.Acks) for n, d in zip(run.numbers, run.duplicates, strict=True)
    ]
    assert len(got) == len(numbers), "each of them is taken by the fast way"
    expected = []
    for message in slow:
        assert isinstance(message, frames.Message)
        stored = frames.parse_acknowledgement(message)
        assert isinstance(stored, frames.PubAck)
        expected.append((int(message.subject.rpartition(".")[2]), stored.duplicate))
    assert got == expected


def test_a_refusal_and_a_missing_stream_are_told_from_an_acknowledgement() -> None:
    refusal = b'{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"},"stream":"CDC","seq":0}'
    assert frames.parse_acknowledgement(frames.Message("x", 1, None, b"", refusal)) == frames.PubError(
        503, "maximum bytes exceeded"
    )
    assert (
        frames.parse_acknowledgement(frames.Message("x", 1, None, b"NATS/1.0 503\r\n\r\n", b""))
        == frames.NoStreamReply()
    )
    with pytest.raises(InvalidMessage):
        frames.parse_acknowledgement(frames.Message("x", 1, None, b"", b"[]"))


# --- names ---------------------------------------------------------------------------------------------------


@NO_CLOCK
@given(schema=st.text(min_size=1, max_size=20), name=st.text(min_size=1, max_size=20))
def test_each_table_has_a_token_of_its_own_that_is_a_legal_key(schema: str, name: str) -> None:
    try:
        table = Table(schema, name)
        token = table.token
    except UnicodeEncodeError:
        return
    assert Table.of_token(token) == table
    assert set(token) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-=/")


def test_public_tables_have_the_subjects_of_zebridge() -> None:
    assert subjects.change_subject(Table("public", "users"), "insert") == "cdc.users.insert"
    assert subjects.change_subject(Table("sales", "users"), "insert") == "cdc.sales/users.insert"
    assert subjects.chunk_subject(Table("public", "users"), "snap-1", 3) == "init.snap.users.snap-1.3"
    assert subjects.requested_table("snapshot.request.sales/users") == Table("sales", "users")


# --- messages ------------------------------------------------------------------------------------------------


CHANGE = pa.schema(
    [
        ("id", pa.string()),
        ("xid", pa.int64()),
        ("commit_lsn", pa.int64()),
        ("committed_at", pa.timestamp("us", "UTC")),
        ("sequence", pa.int64()),
        ("schema", pa.string()),
        ("table", pa.string()),
        ("operation", pa.string()),
        ("before", pa.string()),
        ("after", pa.string()),
        ("unchanged", pa.list_(pa.string())),
    ]
)
VALUE = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8) | st.lists(st.integers(0, 9))
ROW = st.dictionaries(st.sampled_from(["id", "name", "qty", "ü"]), VALUE, min_size=1)


@st.composite
def changes(draw: st.DrawFn) -> list[dict[str, Any]]:
    rows = []
    for number in range(draw(st.integers(1, 4))):
        lsn = 5_000_000_000 + number * 100
        for sequence in range(draw(st.integers(1, 12))):
            operation = draw(st.sampled_from(messages.OPERATIONS))
            image, old = json.dumps(draw(ROW)), draw(st.none() | ROW.map(json.dumps))
            rows.append(
                {
                    "id": subjects.change_id(lsn, sequence),
                    "xid": 700 + number,
                    "commit_lsn": lsn,
                    "committed_at": datetime(2026, 3, 1, 12, tzinfo=UTC),
                    "sequence": sequence,
                    "schema": draw(st.sampled_from(["public", "sales"])),
                    "table": draw(st.sampled_from(["orders", "größe 1"])),
                    "operation": operation,
                    "before": {"insert": None, "truncate": None, "update": old, "delete": image}[operation],
                    "after": image if operation in ("insert", "update") else None,
                    "unchanged": draw(st.sampled_from([[], ["body"]])) if operation == "update" else [],
                }
            )
    return rows


def expected_event(row: dict[str, Any]) -> dict[str, Any]:
    table = Table(row["schema"], row["table"])
    image = row["before"] if row["operation"] == "delete" else row["after"]
    event = {
        "table": row["table"],
        "schema": row["schema"],
        "operation": row["operation"].upper(),
        "subject": f"cdc.{table.token}.{row['operation']}",
        "msg_id": f"{row['id']}-{table.full_name}-{row['operation']}",
        "lsn": row["commit_lsn"],
        "xid": row["xid"],
        "sequence": row["sequence"],
        "committed_at": "2026-03-01T12:00:00.000000Z",
        "data": {} if image is None else json.loads(image),
    }
    if row["operation"] == "update" and row["before"] is not None:
        event["old"] = json.loads(row["before"])
    if row["unchanged"]:
        event["unchanged"] = row["unchanged"]
    return event


def in_msgpack(value: Any) -> Any:
    """As MessagePack can hold it."""
    if isinstance(value, dict):
        return {name: in_msgpack(item) for name, item in value.items()}
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**64:
        return str(value)
    return value


@NO_CLOCK
@given(rows=changes(), encoding=st.sampled_from(["msgpack", "json"]))
def test_each_change_becomes_its_event(rows: list[dict[str, Any]], encoding: Any) -> None:
    batch = messages.change_messages(pa.RecordBatch.from_pylist(rows, CHANGE), encoding=encoding)
    frames.check(batch, max_payload_bytes=1_000_000)
    expected = [expected_event(row) for row in rows]
    if encoding == "msgpack":
        expected = [in_msgpack(event) for event in expected]
    assert [codec.decode(payload) for payload in batch.column("payload").to_pylist()] == expected
    assert batch.column("subject").to_pylist() == [event["subject"] for event in expected]
    assert batch.column("msg_id").to_pylist() == [event["msg_id"] for event in expected]
    assert len(set(batch.column("msg_id").to_pylist())) == len(rows)


@NO_CLOCK
@given(rows=changes(), encoding=st.sampled_from(["msgpack", "json"]))
def test_the_same_lsn_on_another_timeline_is_another_message(rows: list[dict[str, Any]], encoding: Any) -> None:
    """After a failover that lost changes, JetStream would drop a change as one of the lost ones."""
    given = pa.RecordBatch.from_pylist(rows, CHANGE)

    def of(timeline: int | None) -> tuple[pa.RecordBatch, list[str]]:
        packer = messages.Packer(encoding=encoding, timeline=timeline)
        packed = [batch.column("msg_id").to_pylist() for batch in (packer.add(given), packer.finish())]
        return messages.change_messages(given, encoding=encoding, timeline=timeline), packed[0] + packed[1]

    (each, packed), (each_later, packed_later) = of(1), of(2)
    ids = each.column("msg_id").to_pylist()
    assert (ids, packed) == (of(None)[0].column("msg_id").to_pylist(), of(None)[1])
    later_ids = each_later.column("msg_id").to_pylist()
    assert later_ids == [f"{one}@2" for one in ids]
    assert packed_later == [f"{one}@2" for one in packed]
    assert each_later.column("subject") == each.column("subject")
    assert [codec.decode(one)["msg_id"] for one in each_later.column("payload").to_pylist()] == later_ids


@NO_CLOCK
@given(
    rows=changes(),
    encoding=st.sampled_from(["msgpack", "json"]),
    cuts=st.lists(st.integers(0, 48), max_size=5),
    packed_changes=st.integers(1, 6),
    packed_bytes=st.sampled_from([1, 700, 10**6]),
)
def test_packed_changes_are_the_same_messages_however_they_are_cut_into_batches(
    rows: list[dict[str, Any]], encoding: Any, cuts: list[int], packed_changes: int, packed_bytes: int
) -> None:
    def pack(pieces: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        packer = messages.Packer(encoding=encoding, packed_changes=packed_changes, packed_bytes=packed_bytes)
        made = [packer.add(pa.RecordBatch.from_pylist(piece, CHANGE)) for piece in pieces]
        return [row for batch in [*made, packer.finish()] for row in batch.to_pylist()]

    bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    packed = pack([rows])
    assert pack([rows[start:end] for start, end in itertools.pairwise(bounds)]) == packed
    assert len({message["msg_id"] for message in packed}) == len(packed)

    events = []
    for message in packed:
        body = codec.decode(message["payload"])
        assert 1 <= len(body) <= packed_changes
        assert len({(event["lsn"], event["schema"], event["table"]) for event in body}) == 1
        kinds = {event["operation"].lower() for event in body}
        assert message["subject"].endswith(f".{kinds.pop() if len(kinds) == 1 else 'mixed'}.batch")
        events += body
    for table in {(row["schema"], row["table"]) for row in rows}:
        kept = [event["msg_id"] for event in events if (event["schema"], event["table"]) == table]
        assert kept == [expected_event(row)["msg_id"] for row in rows if (row["schema"], row["table"]) == table]
    assert len(events) == len(rows)


@pytest.mark.parametrize("cut", range(31))
def test_a_batch_that_ends_inside_of_a_packed_message_does_not_cut_it(cut: int) -> None:
    rows = [
        {
            "id": subjects.change_id(5000, n),
            "xid": 1,
            "commit_lsn": 5000,
            "committed_at": datetime(2026, 3, 1, tzinfo=UTC),
            "sequence": n,
            "schema": "public",
            "table": "orders",
            "operation": "insert",
            "before": None,
            "after": "{}",
            "unchanged": [],
        }
        for n in range(30)
    ]
    packer = messages.Packer(packed_changes=8)
    made = [packer.add(pa.RecordBatch.from_pylist(piece, CHANGE)) for piece in (rows[:cut], rows[cut:])]
    ids = [msg_id for batch in [*made, packer.finish()] for msg_id in batch.column("msg_id").to_pylist()]
    assert ids == [
        f"{subjects.change_id(5000, first)}-to-{last:08x}-public.orders-batch"
        for first, last in ((0, 7), (8, 15), (16, 23), (24, 29))
    ]


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
@pytest.mark.parametrize("with_dictionary", [False, True])
def test_compressed_chunks_say_how_to_read_them(encoding: Any, with_dictionary: bool) -> None:
    table = Table("public", "orders")
    rows = [json.dumps({"id": n, "state": "delivered" if n % 3 else "open", "note": f"row {n}"}) for n in range(2000)]
    dictionary = codec.train(messages.samples(rows, encoding)) if with_dictionary else None
    assert (dictionary is not None) == with_dictionary
    snapshot = messages.SnapshotInfo(table, "snap-1", "0/191BFD0", "10:12:11", 5)
    plain = messages.chunk_messages(snapshot, [rows[:20], rows[20:]], encoding=encoding)
    batch = messages.chunk_messages(
        snapshot, [rows[:20], rows[20:]], encoding=encoding, compressed=True, dictionary=dictionary
    )
    frames.check(batch, max_payload_bytes=10**6)
    dictionaries = (
        {} if dictionary is None else {subjects.dictionary_key(table, codec.dictionary_id(dictionary)): dictionary}
    )
    got = []
    for message, whole in zip(batch.to_pylist(), plain.to_pylist(), strict=True):
        headers = dict(line.split(": ") for line in message["headers"].decode().splitlines())
        document = codec.decode_message(message["payload"], headers, dictionaries)
        assert document == codec.decode(whole["payload"])
        assert len(message["payload"]) < len(whole["payload"]) / (3 if with_dictionary else 1.2)
        got += document["data"]
    assert got == [json.loads(row) for row in rows]
    if with_dictionary:
        with pytest.raises(InvalidMessage, match="is missing"):
            codec.decode_message(message["payload"], headers, {})


@NO_CLOCK
@given(data=st.binary(max_size=100))
@example(data=b"\x81\x80\x00")  # a map whose key is a map
def test_payloads_that_are_garbage_are_refused(data: bytes) -> None:
    for read in (codec.decode, codec.decompress):
        with contextlib.suppress(InvalidMessage):
            read(data)


# --- snapshots -----------------------------------------------------------------------------------------------


@NO_CLOCK
@given(
    xmin=st.integers(2**31, 2**40),
    width=st.integers(0, 50),
    opened=st.sets(st.integers(0, 49)),
    distance=st.integers(-(2**31) + 100, 2**31 - 100),
)
@example(xmin=2**32 + 5, width=0, opened=set(), distance=-10)
@example(xmin=2**33 - 5, width=0, opened=set(), distance=10)
def test_a_snapshot_sees_by_32_bits_what_it_sees_by_64(xmin: int, width: int, opened: set[int], distance: int) -> None:
    xmax = xmin + width
    still_open = sorted(xmin + n for n in opened if n < width)
    snapshot = f"{xmin}:{xmax}:{','.join(map(str, still_open))}"
    xid = xmax + distance
    assert is_visible(xid & 0xFFFFFFFF, snapshot) == (xid < xmax and xid not in still_open)


def test_an_lsn_is_a_number() -> None:
    assert lsn_number("1/191BFD0") == 0x1_0191BFD0
    with pytest.raises(InvalidRequest):
        lsn_number("x")
