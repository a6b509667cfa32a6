"""Is a schema understood or refused, the same one recognised, and a payload known that does not fit?"""

from __future__ import annotations

import base64
import io
import json
import signal
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidSchema
from headwater.schema_registry import schemas
from headwater.schema_registry.schemas import AVRO, JSON, PROTOBUF, PayloadMismatch, Schema

pytest.importorskip("jsonschema_rs")
fastavro = pytest.importorskip("fastavro")

ORDER = """
syntax = "proto3"; // so that numbers need no label
package shop.v1;
import "google/protobuf/timestamp.proto";
import public "google/protobuf/empty.proto";
option java_package = "org.shop";
/* An order. */
message Order {
  string id = 1;
  repeated sint32 amounts = 2 [packed = true, deprecated = true];
  map<string, Line> lines = 3;
  optional int64 weight = 0x4;
  oneof paid { bool cash = 5; bytes card = 6; }
  reserved 10 to 12, 20, 100 to max;
  reserved "gone", "away";
  google.protobuf.Timestamp at = 7;
  State state = 8 [(shop.note) = { text: "}" nested { a: 1 } }];
  message Line { option deprecated = true; int32 quantity = 1; .shop.v1.Order of = 2; }
  Line line = 9;
  enum Kind { option allow_alias = true; NONE = 0; NOTHING = 0; LESS = -1; reserved 5 to max; }
}
enum State { UNKNOWN = 0; SENT = 1 [deprecated = true]; }
service Orders {
  rpc Get(Order) returns (stream shop.v1.Order) { option idempotency_level = NO_SIDE_EFFECTS; }
  rpc Put(stream Order) returns (google.protobuf.Empty);
}
"""
OLD = """
message Old {
  required string name = 1 [default = "a\\tb\\x41"];
  optional group Part = 2 { optional bytes data = 1 [default = '\\001']; }
  optional double rate = 3 [default = -1.5e3];
  optional E e = 4 [default = B];
  extensions 100 to 199;
  enum E { A = 0; B = 1; }
}
extend Old { optional int32 more = 100; }
"""


def parse(kind: str, text: Any) -> schemas.ParsedSchema:
    return schemas.parse(Schema(kind, text if isinstance(text, str) else json.dumps(text)))


@pytest.mark.parametrize("text", [ORDER, OLD])
def test_a_proto_file_is_read_as_its_compiler_reads_it(text: str, tmp_path: Any) -> None:
    """All but options, which are not resolved here and mean nothing for payloads."""
    compiler = pytest.importorskip("grpc_tools.protoc")
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    plain = text.replace(' [(shop.note) = { text: "}" nested { a: 1 } }]', "")
    for option in (
        'option java_package = "org.shop";',
        "option deprecated = true;",
        "{ option idempotency_level = NO_SIDE_EFFECTS; }",
        " [deprecated = true]",
    ):
        plain = plain.replace(option, ";" if option.startswith("{") else "")
    (tmp_path / "order.proto").write_text(plain)
    included = str(compiler.__file__).rpartition("/")[0] + "/_proto"
    out = tmp_path / "out"
    arguments = ["", f"-I{tmp_path}", f"-I{included}", f"--descriptor_set_out={out}", str(tmp_path / "order.proto")]
    assert compiler.main(arguments) == 0
    (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    compiled = parse(PROTOBUF, base64.b64encode(file.SerializeToString()).decode())
    assert parse(PROTOBUF, plain).canonical == compiled.canonical
    # With its options it is another text, and still the same to payloads.
    assert not schemas.problems(parse(PROTOBUF, text), compiled)
    assert not schemas.problems(compiled, parse(PROTOBUF, text))


SAME = [
    (AVRO, '{"type": "string"}', '"string"'),
    (AVRO, '{"name": "F", "type": "fixed", "size": 4}', '{"type":"fixed","size":4,"name":"F"}'),
    (JSON, '{"type": "object", "title": "ü"}', '{ "title":"\\u00fc",\n "type":"object" }'),
    (PROTOBUF, "message M { optional int32 a = 1; }", "message M{optional int32 a=0x1;/**/}// end"),
]
DIFFERENT = [
    (AVRO, '{"name": "F", "type": "fixed", "size": 4}', '{"name": "F", "type": "fixed", "size": 5}'),
    (AVRO, '["int", "long"]', '["long", "int"]'),
    (JSON, '{"type": "object"}', '{"type": "object", "title": "t"}'),
    (PROTOBUF, "message M { optional int32 a = 1; }", "message M { optional int32 b = 1; }"),
    (PROTOBUF, 'option a = "1"; message M {}', 'option a = "2"; message M {}'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "one", "other"), SAME)
def test_texts_that_say_the_same_are_the_same_schema(kind: str, one: str, other: str) -> None:
    assert parse(kind, one).canonical == parse(kind, other).canonical


@pytest.mark.parametrize(("kind", "one", "other"), DIFFERENT)
def test_texts_that_say_something_else_are_another(kind: str, one: str, other: str) -> None:
    assert parse(kind, one).canonical != parse(kind, other).canonical


NO_SCHEMAS = [
    (AVRO, "", "not JSON"),
    (AVRO, "3", "invalid type"),
    (AVRO, '"strin"', "unknown type"),
    (AVRO, '{"type": "record", "name": "R"}', "fields"),
    (AVRO, '{"type": "record", "name": "1R", "fields": []}', "invalid type name"),
    (AVRO, {"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}] * 2}, "twice"),
    (AVRO, '{"type": "record", "name": "R", "fields": [{"name": "a", "type": "int", "default": "x"}]}', "default"),
    (AVRO, '{"type": "record", "name": "R", "fields": [{"name": "a.b", "type": "int"}]}', "names"),
    (AVRO, '{"type": "enum", "name": "E", "symbols": ["a", "a"]}', "each once"),
    (AVRO, '{"type": "enum", "name": "E", "symbols": ["a"], "default": "b"}', "not one of its symbols"),
    (AVRO, '{"type": "fixed", "name": "F", "size": -1}', "size"),
    (AVRO, '{"type": "array"}', "items"),
    (AVRO, '["null", "null"]', "twice"),
    (AVRO, '["null", ["int"]]', "directly contain"),
    (AVRO, "[]", "at least one"),
    (JSON, "[]", "an object"),
    (JSON, '{"type": "strin"}', "/type"),
    (JSON, '{"pattern": "("}', "/pattern"),
    (JSON, '{"$ref": "#/nowhere"}', "nowhere"),
    (JSON, '{"$ref": "other.json"}', "other.json"),
    (PROTOBUF, "", "at least one message"),
    (PROTOBUF, "message M { int32 a = 1; }}", "line 1"),
    (PROTOBUF, "\n\nmessage M { int32 a 1; }", "line 3"),
    (PROTOBUF, 'syntax = "proto3"; message M { int32 a = 1; int32 b = 1; }', "duplicate"),
    (PROTOBUF, 'syntax = "proto3"; message M { reserved 2 to 4; int32 a = 3; }', "a = 3 of message M is reserved"),
    (PROTOBUF, 'syntax = "proto3"; message M { reserved "a"; int32 a = 3; }', "is reserved"),
    (PROTOBUF, 'syntax = "proto3"; message M { required int32 a = 3; }', "required"),
    (PROTOBUF, 'syntax = "proto3"; message M { Nothing a = 1; }', "Nothing"),
    (PROTOBUF, 'syntax = "proto3"; import "shop/money.proto"; message M {}', "unknown import shop/money.proto"),
    (PROTOBUF, 'edition = "2023"; message M {}', "editions"),
    (PROTOBUF, 'syntax = "proto3"; message M { int32 a = 19000; }', "19000"),
    (PROTOBUF, 'syntax = "proto3"; message M { int32 a = 0; }', "invalid field number"),
    (PROTOBUF, "message M {", "ends too early"),
    (PROTOBUF, "message M { optional group", "the end"),
    (PROTOBUF, "message M { oneof", "the end"),
    (PROTOBUF, "message M { oneof o { option", "the end"),
    (PROTOBUF, "AAAA", "neither"),
    (PROTOBUF, "AAA²", "unexpected character"),
    (PROTOBUF, "option a = " + "9" * 5000 + "; message M {}", "5000 digits"),
    (PROTOBUF, "option a = 0x" + "f" * 5000 + "; message M {}", "5002 digits"),
    (PROTOBUF, "message M { optional int32 a = " + "9" * 5000 + "; }", "a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "told"), NO_SCHEMAS)
def test_what_is_no_schema_is_refused_with_a_reason(kind: str, text: Any, told: str) -> None:
    with pytest.raises(InvalidSchema) as refused:
        parse(kind, text)
    assert told in str(refused.value)


@given(st.text(max_size=200), st.sampled_from((AVRO, JSON, PROTOBUF)))
def test_no_text_breaks_a_parser(text: str, kind: str) -> None:
    with suppress(InvalidSchema):
        parse(kind, text)


WORDS = "message M int32 a 1 oneof enum map option reserved to optional group extend service rpc returns package import"
TOKENS = [*";{}=[]().,<>-{}", *WORDS.split(" "), '"x"', "0x"]


@given(st.lists(st.sampled_from(TOKENS), max_size=40))
def test_no_order_of_words_breaks_the_parser_of_proto_files(tokens: list[str]) -> None:
    with suppress(InvalidSchema):
        parse(PROTOBUF, "message A { } " + " ".join(tokens))


EVERYTHING = {
    "type": "record",
    "name": "All",
    "fields": [
        {"name": "n", "type": "null"},
        {"name": "b", "type": "boolean"},
        {"name": "i", "type": "int"},
        {"name": "l", "type": "long"},
        {"name": "f", "type": "float"},
        {"name": "d", "type": "double"},
        {"name": "y", "type": "bytes"},
        {"name": "s", "type": "string"},
        {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A", "B"]}},
        {"name": "x", "type": {"type": "fixed", "name": "F", "size": 3}},
        {"name": "a", "type": {"type": "array", "items": ["null", "string"]}},
        {"name": "m", "type": {"type": "map", "values": {"type": "array", "items": "null"}}},
        {"name": "next", "type": ["null", "All"]},
    ],
}
LONGS = st.integers(-(2**63), 2**63 - 1)
ALL = st.deferred(
    lambda: st.fixed_dictionaries(
        {
            "n": st.none(),
            "b": st.booleans(),
            "i": st.integers(-(2**31), 2**31 - 1),
            "l": LONGS,
            "f": st.floats(width=32),
            "d": st.floats(),
            "y": st.binary(max_size=9),
            "s": st.text(max_size=9),
            "e": st.sampled_from(("A", "B")),
            "x": st.binary(min_size=3, max_size=3),
            "a": st.lists(st.none() | st.text(max_size=3), max_size=3),
            "m": st.dictionaries(st.text(max_size=3), st.lists(st.none(), max_size=3), max_size=3),
            "next": st.none() | ALL,
        }
    )
)
_EVERYTHING = parse(AVRO, EVERYTHING)
_WRITER = fastavro.parse_schema(EVERYTHING)


def written(value: Any) -> bytes:
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, _WRITER, value)
    return buffer.getvalue()


@given(ALL)
def test_whatever_another_implementation_of_avro_writes_fits(value: Any) -> None:
    payload = written(value)
    assert _EVERYTHING.check(payload, framed=False) == "All"
    # One byte less, or more, does not.
    for other in (payload[:-1], payload + b"\x00"):
        with pytest.raises(PayloadMismatch):
            _EVERYTHING.check(other, framed=False)


@given(st.binary(max_size=60))
def test_what_fits_another_implementation_of_avro_can_read(payload: bytes) -> None:
    for prefix in (b"", b"\x01\x02\x02" + bytes(12) + b"\x00\x00\x00abc"):
        try:
            _EVERYTHING.check(prefix + payload, framed=False)
        except PayloadMismatch:
            continue
        fastavro.schemaless_reader(io.BytesIO(prefix + payload), _WRITER)


def test_where_a_payload_does_not_fit_is_told() -> None:
    flagged = [{"name": "a", "type": "int"}, {"name": "flag", "type": "boolean"}]
    inner = {"type": "record", "name": "S", "fields": flagged}
    nested = parse(AVRO, {"type": "record", "name": "R", "fields": [{"name": "in", "type": inner}]})
    with pytest.raises(PayloadMismatch, match=r"^in\.flag: invalid boolean byte 7$"):
        nested.check(b"\x02\x07", framed=False)
    with pytest.raises(PayloadMismatch, match=r"^/a/0: "):
        parse(JSON, {"properties": {"a": {"items": {"type": "string"}}}}).check(b'{"a": [1]}', framed=False)
    with pytest.raises(PayloadMismatch, match="Old lacks the required name"):
        parse(PROTOBUF, OLD).check(b"", framed=False)


def test_counts_of_nothing_are_not_counted() -> None:
    empty = parse(AVRO, {"type": "array", "items": {"type": "record", "name": "Nothing", "fields": []}})
    assert empty.check(b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f\x00", framed=False) == "array"


def nested_default() -> dict[str, Any]:
    """Six records that each may hold all others, and a value that fits none of them, forty levels deep."""
    held = [["null", *(f"R{other}" for other in range(number + 1))] for number in range(6)]
    records = [
        {"type": "record", "name": f"R{number}", "fields": [{"name": "x", "type": kind}]}
        for number, kind in enumerate(held)
    ]
    value: Any = "none of them"
    for _ in range(40):
        value = {"x": value}
    every = [f"R{number}" for number in range(6)]
    fields = [{"name": "d", "type": records}, {"name": "e", "type": every, "default": value}]
    return {"type": "record", "name": "T", "fields": fields}


LARGE: dict[str, tuple[str, Any]] = {
    "defaults": (AVRO, nested_default()),
    "anchors": (JSON, {"allOf": [{"$ref": f"#a{n}"} for n in range(15_000)]}),
    "reserved": (
        PROTOBUF,
        f"message M {{ {''.join(f'optional int32 a{n} = {n + 30_000};' for n in range(9_000))} "
        f"reserved {','.join(str(n + 1) for n in range(15_000))}; }}",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_schema_is_understood_or_refused_before_long(name: str) -> None:
    # A wide bound: only what multiplies without end takes longer.
    previous = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it does not come to an end"))
    signal.alarm(60)
    try:
        with suppress(InvalidSchema):
            parse(*LARGE[name])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def test_a_schema_uses_the_names_of_those_it_refers_to() -> None:
    money = '{"type": "record", "name": "shop.Money", "fields": [{"name": "cents", "type": "long"}]}'
    using = Schema(AVRO, '{"type": "record", "name": "R", "fields": [{"name": "price", "type": "shop.Money"}]}')
    assert schemas.parse(using, [("money", money)]).check(b"\x02", framed=False) == "R"
    text = Schema(JSON, '{"properties": {"a": {"$ref": "text.json#/$defs/t"}}}')
    parsed = schemas.parse(text, [("text.json", '{"$defs": {"t": {"type": "string"}}}')])
    with pytest.raises(PayloadMismatch):
        parsed.check(b'{"a": 1}', framed=False)
    file = Schema(PROTOBUF, 'syntax = "proto3"; import "m.proto"; message R { shop.Money price = 1; }')
    parsed = schemas.parse(file, [("m.proto", 'syntax = "proto3"; package shop; message Money { int64 cents = 1; }')])
    assert parsed.check(b"\x0a\x02\x08\x01", framed=False) == "R"
    with pytest.raises(PayloadMismatch):
        parsed.check(b"\x0a\x02\x08", framed=False)
