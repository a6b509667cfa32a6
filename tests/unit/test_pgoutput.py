"""The vectorised decoder of pgoutput against a plain one, message by message."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import effort

pa = pytest.importorskip("pyarrow")

from headwater.capture import pgoutput  # noqa: E402

INT4, TEXT, FLOAT8, BOOL, JSONB, STAMP, STAMPTZ, NUMERIC = 23, 25, 701, 16, 3802, 1114, 1184, 1700
UNCHANGED = object()


# -- what Postgres would send


def begin(lsn: int, xid: int, microseconds: int = 0) -> bytes:
    return b"B" + struct.pack(">qqI", lsn, microseconds, xid)


def commit(lsn: int) -> bytes:
    return b"C" + struct.pack(">bqqq", 0, lsn, lsn + 8, 0)


def relation(oid: int, table: str, columns: Sequence[tuple[str, int, bool]], identity: str = "d") -> bytes:
    described = b"".join(
        struct.pack(">b", key) + name.encode() + b"\0" + struct.pack(">Ii", kind, -1) for name, kind, key in columns
    )
    head = b"R" + struct.pack(">I", oid) + b"public\0" + table.encode() + b"\0" + identity.encode()
    return head + struct.pack(">h", len(columns)) + described


def row(values: Sequence[Any]) -> bytes:
    out = struct.pack(">h", len(values))
    for value in values:
        if value is None:
            out += b"n"
        elif value is UNCHANGED:
            out += b"u"
        else:
            out += b"t" + struct.pack(">i", len(value.encode())) + value.encode()
    return out


def insert(oid: int, values: Sequence[Any]) -> bytes:
    return b"I" + struct.pack(">I", oid) + b"N" + row(values)


def update(oid: int, values: Sequence[Any], old: tuple[str, Sequence[Any]] | None = None) -> bytes:
    before = old[0].encode() + row(old[1]) if old else b""
    return b"U" + struct.pack(">I", oid) + before + b"N" + row(values)


def delete(oid: int, old: tuple[str, Sequence[Any]]) -> bytes:
    return b"D" + struct.pack(">I", oid) + old[0].encode() + row(old[1])


def truncate(*oids: int) -> bytes:
    return b"T" + struct.pack(">ib", len(oids), 0) + struct.pack(f">{len(oids)}I", *oids)


# -- the plain decoder


def json_value(text: str | None, kind: int) -> Any:
    if text is None:
        return None
    if kind == INT4:
        return int(text)
    if kind == FLOAT8:
        return text if text in ("NaN", "Infinity", "-Infinity") else float(text)
    if kind == BOOL:
        return text == "t"
    if kind == JSONB:
        return json.loads(text)
    if kind in (STAMP, STAMPTZ):
        text = text.replace(" ", "T", 1)
        return text[:-3] + "Z" if kind == STAMPTZ and text.endswith("+00") else text
    return text


def plain_row(message: bytes, place: int) -> tuple[list[Any], int]:
    (count,) = struct.unpack_from(">h", message, place)
    place += 2
    values: list[Any] = []
    for _ in range(count):
        kind = message[place : place + 1]
        place += 1
        if kind == b"t":
            (size,) = struct.unpack_from(">i", message, place)
            values.append(message[place + 4 : place + 4 + size].decode())
            place += 4 + size
        else:
            values.append(None if kind == b"n" else UNCHANGED)
    return values, place


def plain_decode(messages: Sequence[bytes], start: int = 0, end: int = 1 << 63) -> Iterator[dict[str, Any]]:
    relations: dict[int, tuple[str, str, list[tuple[str, int, bool]]]] = {}
    lsn = xid = at = 0
    counter = itertools.count()
    for message in messages:
        kind = message[:1]
        if kind == b"B":
            lsn, at, xid = struct.unpack_from(">qqI", message, 1)
            counter = itertools.count()
        elif kind == b"R":
            (oid,) = struct.unpack_from(">I", message, 1)
            _, table, rest = message[5:].split(b"\0", 2)
            columns, place = [], 3
            while place < len(rest):
                stop = rest.index(b"\0", place + 1)
                type_oid, _ = struct.unpack_from(">Ii", rest, stop + 1)
                columns.append((rest[place + 1 : stop].decode(), type_oid, bool(rest[place] & 1)))
                place = stop + 9
            relations[oid] = (table.decode(), chr(rest[0]), columns)
        elif kind in b"IUDT" and start <= lsn < end:
            if kind == b"T":
                (count,) = struct.unpack_from(">i", message, 1)
                oids = struct.unpack_from(f">{count}I", message, 6)
            else:
                oids = struct.unpack_from(">I", message, 1)
            for oid in oids:
                sequence = next(counter)
                table, identity, columns = relations[oid]
                old = new = None
                marker, place = message[5:6], 6
                if kind in b"UD" and marker in b"KO":
                    old, place = plain_row(message, place)
                    place += 1
                if kind in b"IU":
                    new, _ = plain_row(message, place)
                if old and new:
                    new = [o if n is UNCHANGED and o is not None else n for o, n in zip(old, new, strict=True)]
                yield {
                    "xid": xid,
                    "commit_lsn": lsn,
                    "committed_at": datetime(2000, 1, 1, tzinfo=UTC) + timedelta(microseconds=at),
                    "sequence": sequence,
                    "id": f"{lsn:016x}-{sequence:08x}",
                    "schema": "public",
                    "table": table,
                    "operation": {b"I": "insert", b"U": "update", b"D": "delete", b"T": "truncate"}[kind],
                    "key": None
                    if kind == b"T" or identity == "f" or not any(key for *_, key in columns)
                    else image(columns, new if new is not None else old or [], only_key=True),
                    "before": image(columns, old, only_key=marker == b"K") if old is not None else None,
                    "after": image(columns, new) if new is not None else None,
                    "unchanged": [
                        name for (name, *_), value in zip(columns, new or [], strict=False) if value is UNCHANGED
                    ],
                }


def image(columns: Sequence[tuple[str, int, bool]], values: Sequence[Any], only_key: bool = False) -> dict[str, Any]:
    return {
        name: json_value(value, kind)
        for (name, kind, key), value in zip(columns, values, strict=True)
        if value is not UNCHANGED and (key or not only_key)
    }


def decoded(messages: Sequence[bytes], cuts: Sequence[int] = (), **bounds: int) -> list[dict[str, Any]]:
    decoder = pgoutput.Decoder(**bounds)
    changes: list[dict[str, Any]] = []
    places = [0, *sorted(cut for cut in cuts if cut <= len(messages)), len(messages)]
    for here, there in itertools.pairwise(places):
        # A slice of a longer array, as readers hand them over.
        changes += decoder.decode(pa.array(messages, pa.binary())[here:there]).to_pylist()
    decoder.finish()
    return changes


def parsed(change: Mapping[str, Any]) -> dict[str, Any]:
    read = {name: value and json.loads(value) for name, value in change.items() if name in ("key", "before", "after")}
    return {**{name: change[name] for name in change if name not in ("columns", "columns_hash")}, **read}


# -- Hypothesis

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
stamps = st.sampled_from(
    [
        "2024-02-29 12:00:00",
        "2024-02-29 12:00:00.123456",
        "infinity",
        "-infinity",
        "10000-01-01 00:00:00",
        "0044-03-15 10:00:00 BC",
    ]
)
TYPES: dict[int, st.SearchStrategy[str]] = {
    INT4: st.integers(-(2**31), 2**31 - 1).map(str),
    TEXT: texts,
    FLOAT8: st.one_of(
        st.floats(allow_nan=False, allow_infinity=False).map(repr), st.sampled_from(["NaN", "Infinity", "-Infinity"])
    ),
    BOOL: st.sampled_from("tf"),
    JSONB: st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), texts),
        lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
        max_leaves=5,
    ).map(json.dumps),
    STAMP: stamps,
    STAMPTZ: stamps.map(lambda stamp: stamp if "BC" in stamp or "inf" in stamp else stamp + "+00"),
    NUMERIC: st.decimals(allow_nan=False, allow_infinity=False).map(str),
}


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Transactions over a few tables, whose columns change in the middle."""
    messages: list[bytes] = []
    tables: dict[int, list[tuple[str, int, bool]]] = {}
    identities: dict[int, str] = {}
    lsn = 100
    for _ in range(draw(st.integers(0, 4))):
        lsn += draw(st.integers(1, 2**40))
        messages.append(begin(lsn, draw(st.integers(1, 2**32 - 1)), draw(st.integers(0, 10**15))))
        if draw(st.booleans()):
            messages.append(b"O" + struct.pack(">q", lsn) + b"elsewhere\0")
        for _ in range(draw(st.integers(0, 8))):
            oid = draw(st.sampled_from([16384, 16390, 2**32 - 5]))
            if oid not in tables or draw(st.integers(0, 5)) == 0:
                kinds = draw(st.lists(st.sampled_from(sorted(TYPES)), max_size=5))
                identities[oid] = draw(st.sampled_from("dfni"))
                tables[oid] = [
                    (f'c{number}"é', kind, identities[oid] == "f" or (identities[oid] != "n" and draw(st.booleans())))
                    for number, kind in enumerate(kinds)
                ]
                messages.append(relation(oid, f"table{oid}", tables[oid], identities[oid]))
            columns = tables[oid]

            def full(unchanged: bool = False, columns: list[tuple[str, int, bool]] = columns) -> list[Any]:
                return [
                    draw(st.one_of(st.none(), *([st.just(UNCHANGED)] if unchanged else []), TYPES[kind]))
                    for _, kind, _ in columns
                ]

            def old(columns: list[tuple[str, int, bool]] = columns, oid: int = oid) -> tuple[str, list[Any]]:
                if identities[oid] == "f":
                    return "O", full()
                values = [value if key else None for value, (*_, key) in zip(full(), columns, strict=True)]
                return "K", values

            match draw(st.integers(0, 5)):
                case 0 | 1:
                    messages.append(insert(oid, full()))
                case 2:
                    messages.append(update(oid, full(unchanged=True)))
                case 3:
                    messages.append(update(oid, full(unchanged=True), old()))
                case 4:
                    messages.append(delete(oid, old()))
                case _:
                    messages.append(truncate(*draw(st.permutations(sorted(tables)))))
        messages.append(commit(lsn))
    return messages


@settings(max_examples=effort(150), deadline=None)
@given(streams(), st.lists(st.integers(0, 40), max_size=4))
def test_it_decodes_as_the_plain_decoder_does_however_the_messages_are_cut(
    messages: list[bytes], cuts: list[int]
) -> None:
    assert [parsed(change) for change in decoded(messages, cuts)] == list(plain_decode(messages))


@settings(max_examples=effort(50), deadline=None)
@given(streams(), st.data())
def test_reads_that_meet_at_any_lsn_tile_into_one(messages: list[bytes], data: st.DataObject) -> None:
    commits = [change["commit_lsn"] for change in plain_decode(messages)]
    cut = data.draw(st.sampled_from([0, *commits]).flatmap(lambda lsn: st.integers(max(0, lsn - 1), lsn + 1)))
    below, above = decoded(messages, end=cut), decoded(messages, start=cut)
    assert [parsed(change) for change in below + above] == list(plain_decode(messages))


# -- by example


def test_unchanged_is_not_null() -> None:
    columns = [("id", INT4, True), ("large", TEXT, False), ("small", TEXT, False)]
    messages = [begin(1, 2), relation(9, "t", columns), update(9, ["1", UNCHANGED, None]), commit(1)]
    (change,) = decoded(messages)
    assert json.loads(change["after"]) == {"id": 1, "small": None}
    assert change["unchanged"] == ["large"]


def test_ids_of_one_transaction_differ_and_sort_as_the_changes_do() -> None:
    messages = [begin(7, 1), relation(9, "t", [("id", INT4, True)])]
    messages += [insert(9, [str(number)]) for number in range(5000)]
    ids = [change["id"] for change in decoded([*messages, commit(7)], cuts=[1000, 1001])]
    assert ids == sorted(set(ids))
    assert len(ids) == 5000
    assert ids[4999] == "0000000000000007-00001387"


def test_a_truncate_of_two_tables_is_a_change_of_each() -> None:
    messages = [begin(1, 1), relation(8, "a", [("x", INT4, True)]), relation(9, "b", [("y", INT4, True)])]
    changes = decoded([*messages, truncate(9, 8), commit(1)])
    assert [(change["table"], change["sequence"], change["operation"]) for change in changes] == [
        ("b", 0, "truncate"),
        ("a", 1, "truncate"),
    ]


def test_a_change_of_columns_is_noticed_and_described_once() -> None:
    one, two = [("id", INT4, True)], [("id", INT4, True), ("name", TEXT, False)]
    messages = [begin(1, 1), relation(9, "t", one), insert(9, ["1"]), insert(9, ["2"]), relation(9, "t", two)]
    changes = decoded([*messages, insert(9, ["3", "x"]), commit(1)], cuts=[3])
    first, second, third = changes
    assert first["columns_hash"] == second["columns_hash"] != third["columns_hash"]
    assert [bool(change["columns"]) for change in changes] == [True, False, True]
    assert [column["name"] for column in json.loads(third["columns"])] == ["id", "name"]


def test_a_domain_is_shown_as_the_type_below_it() -> None:
    domain = b"Y" + struct.pack(">I", 20_000) + b"\0int4\0"
    messages = [begin(1, 1), domain, relation(9, "t", [("n", 20_000, True)]), insert(9, ["5"]), commit(1)]
    assert decoded(messages)[0]["after"] == '{"n":5}'


def test_a_full_identity_has_a_key_only_if_it_was_told_one() -> None:
    columns = [("id", INT4, True), ("name", TEXT, True)]
    messages = pa.array([begin(1, 1), relation(9, "t", columns, "f"), insert(9, ["1", "x"]), commit(1)], pa.binary())
    assert pgoutput.Decoder().decode(messages).to_pylist()[0]["key"] is None
    told = pgoutput.Decoder(primary_keys={("public", "t"): ("id",)})
    assert told.decode(messages).to_pylist()[0]["key"] == '{"id":1}'


@pytest.mark.parametrize(
    "message",
    [
        insert(9, ["1", "2"]),  # more columns than the table
        insert(9, ["1"])[:-1],  # cut short
        insert(9, ["1"]) + b"x",
        insert(10, ["1"]),  # never described
        b"U" + struct.pack(">I", 9) + b"?" + row(["1"]),
        b"",
    ],
)
def test_what_is_not_pgoutput_is_refused(message: bytes) -> None:
    with pytest.raises(pgoutput.MalformedMessage):
        decoded([begin(1, 1), relation(9, "t", [("id", INT4, True)]), message, commit(1)])


def test_a_read_that_ends_within_a_transaction_is_refused() -> None:
    with pytest.raises(pgoutput.MalformedMessage):
        decoded([begin(1, 1)])
