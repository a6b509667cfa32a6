"""May one schema follow another? The rules of Avro, JSON Schema and Protobuf, one by one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.errors import InvalidSchema
from headwater.schema_registry import schemas
from headwater.schema_registry.schemas import AVRO, JSON, PROTOBUF, Schema
from headwater.schema_registry.work_limit import WorkLimit

pytest.importorskip("jsonschema_rs")


def reads(kind: str, reader: Any, writer: Any) -> bool:
    def parsed(text: Any) -> schemas.ParsedSchema:
        return schemas.parse(Schema(kind, text if isinstance(text, str) else json.dumps(text)))

    problems = schemas.problems(parsed(reader), parsed(writer))
    assert all(": " in one for one in problems)
    return not problems


def record(*fields: tuple[Any, ...], name: str = "R", **more: Any) -> dict[str, Any]:
    """A record; each field is its name, its type and perhaps its default."""
    return {
        "type": "record",
        "name": name,
        "fields": [
            {"name": field[0], "type": field[1], **({"default": field[2]} if len(field) > 2 else {})}
            for field in fields
        ],
        **more,
    }


def enum(*symbols: str, **more: Any) -> dict[str, Any]:
    return {"type": "enum", "name": "E", "symbols": list(symbols), **more}


ID = ("id", "long")
NODE = record(("next", ["null", "R"]), ("v", "int"))

# What is read with, what was written with, whether that works; and whether the other way round does.
AVRO_RULES: dict[str, tuple[Any, Any, bool, bool]] = {
    "the same": (record(ID), record(ID), True, True),
    "a field more, with default": (record(ID, ("a", "int", 0)), record(ID), True, True),
    "a field more, without": (record(ID, ("a", "int")), record(ID), False, True),
    "int is read as long": ("long", "int", True, False),
    "int is read as float": ("float", "int", True, False),
    "long is read as float": ("float", "long", True, False),
    "long is read as double": ("double", "long", True, False),
    "float is read as double": ("double", "float", True, False),
    "bytes and string are read as each other": ("string", "bytes", True, True),
    "int is no string": ("string", "int", False, False),
    "boolean is no int": ("int", "boolean", False, False),
    "promotion within a field": (record(("id", "double")), record(("id", "int")), True, False),
    "a union takes what it holds": (["null", "string"], "string", True, False),
    "a union takes what can be promoted": (["null", "long"], "int", True, False),
    "a union takes a smaller one": (["null", "string", "int"], ["null", "string"], True, False),
    "the order of a union does not matter": (["null", "int"], ["int", "null"], True, True),
    "a union all of which is taken": ("double", ["int", "float"], True, False),
    "unions of nothing in common": (["null", "int"], ["string", "boolean"], False, False),
    "a symbol more": (enum("a", "b"), enum("a"), True, False),
    "a symbol less, with default": (enum("a", default="a"), enum("a", "b"), True, True),
    "another name": (record(ID, name="S"), record(ID, name="R"), False, False),
    "another name, as an alias": (record(ID, name="S", aliases=["R"]), record(ID, name="R"), True, False),
    "another namespace": (record(ID, name="a.R"), record(ID, name="b.R"), True, True),
    "a field of another name, as an alias": (
        {"type": "record", "name": "R", "fields": [{"name": "number", "type": "long", "aliases": ["id"]}]},
        record(ID),
        True,
        False,
    ),
    "fixed of another size": (
        {"type": "fixed", "name": "F", "size": 4},
        {"type": "fixed", "name": "F", "size": 8},
        False,
        False,
    ),
    "items that can be promoted": (
        {"type": "array", "items": "long"},
        {"type": "array", "items": "int"},
        True,
        False,
    ),
    "values that cannot": ({"type": "map", "values": "int"}, {"type": "map", "values": "string"}, False, False),
    "an array is no map": ({"type": "array", "items": "int"}, {"type": "map", "values": "int"}, False, False),
    "a record that holds itself": (NODE, NODE, True, True),
    "a record that holds itself, with another field": (
        record(("next", ["null", "R"]), ("v", "long")),
        NODE,
        True,
        False,
    ),
    "what is logical does not matter": ({"type": "long", "logicalType": "timestamp-millis"}, "long", True, True),
}

OPEN = {"type": "object", "properties": {"id": {"type": "integer"}}}
CLOSED = {**OPEN, "additionalProperties": False}


def with_property(schema: dict[str, Any], name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {**schema, "properties": {**schema["properties"], name: kind}, **more}


STRING = {"type": "string"}
JSON_RULES: dict[str, tuple[Any, Any, bool, bool]] = {
    "the same": (OPEN, OPEN, True, True),
    # An open schema took the property before, whatever it was.
    "a property more, where all were taken": (with_property(OPEN, "a", STRING), OPEN, False, True),
    "a property more that takes anything": (with_property(OPEN, "a", {}), OPEN, True, True),
    "a property more, where no other was taken": (with_property(CLOSED, "a", STRING), CLOSED, True, False),
    "a closed one is opened": (OPEN, CLOSED, True, False),
    "a property more, where such were taken": (
        with_property({**OPEN, "additionalProperties": STRING}, "a", STRING),
        {**OPEN, "additionalProperties": STRING},
        True,
        True,
    ),
    "one is required": ({**OPEN, "required": ["id"]}, OPEN, False, True),
    "one more is required, with default": (
        with_property(CLOSED, "a", {"type": "string", "default": ""}, required=["a"]),
        CLOSED,
        True,
        False,
    ),
    "one more is required, without": (with_property(CLOSED, "a", STRING, required=["a"]), CLOSED, False, False),
    "another type more": ({"type": ["string", "null"]}, STRING, True, False),
    "a number takes whole ones": ({"type": "number"}, {"type": "integer"}, True, False),
    "another type": ({"type": "integer"}, STRING, False, False),
    "all types": ({}, STRING, True, False),
    "nothing": (False, STRING, False, True),
    "a value more": ({"enum": ["a", "b"]}, {"enum": ["a"]}, True, False),
    "some values only": ({"type": "string", "enum": ["a"]}, STRING, False, True),
    "one value of several": ({"enum": ["a", "b"]}, {"const": "a"}, True, False),
    "a wider limit": ({"type": "string", "maxLength": 10}, {"type": "string", "maxLength": 5}, True, False),
    "a limit": ({"type": "integer", "minimum": 0}, {"type": "integer"}, False, True),
    "a limit of nothing": ({"type": "string", "minLength": 0}, STRING, True, True),
    "a divisor": ({"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 4}, True, False),
    "a pattern": ({"type": "string", "pattern": "^a"}, STRING, False, True),
    "another pattern": ({"pattern": "^a"}, {"pattern": "^b"}, False, False),
    "what only explains": ({**OPEN, "title": "T", "description": "d", "examples": [1]}, OPEN, True, True),
    "items": ({"type": "array", "items": STRING}, {"type": "array"}, False, True),
    "items of a wider type": (
        {"type": "array", "items": {"type": ["string", "null"]}},
        {"type": "array", "items": STRING},
        True,
        False,
    ),
    "first items": (
        {"type": "array", "prefixItems": [STRING, {}]},
        {"type": "array", "prefixItems": [STRING, STRING]},
        True,
        False,
    ),
    "an alternative more": ({"anyOf": [STRING, {"type": "null"}]}, {"anyOf": [STRING]}, True, False),
    "one of several more": ({"oneOf": [STRING, {"type": "null"}]}, {"oneOf": [STRING]}, True, False),
    "an alternative to what it was": ({"anyOf": [STRING, {"type": "null"}]}, STRING, True, False),
    "a demand more": ({"allOf": [STRING, {"maxLength": 3}]}, {"allOf": [STRING]}, False, True),
    "an exclusion": ({"not": STRING}, {}, False, True),
    "a smaller exclusion": ({"not": {"type": "string", "maxLength": 2}}, {"not": STRING}, True, False),
    "a condition": ({"if": STRING, "then": {"maxLength": 2}}, {}, False, True),
    "by reference": (
        {"$defs": {"n": {"type": ["string", "null"]}}, "properties": {"a": {"$ref": "#/$defs/n"}}},
        {"properties": {"a": STRING}},
        True,
        False,
    ),
    "a tree": (
        {"type": "object", "properties": {"in": {"$ref": "#"}, "v": {"type": "number"}}},
        {"type": "object", "properties": {"in": {"$ref": "#"}, "v": {"type": "integer"}}},
        True,
        False,
    ),
    "names by pattern": (
        {"patternProperties": {"^x-": {"type": ["string", "null"]}}, "additionalProperties": False},
        {"patternProperties": {"^x-": STRING}, "additionalProperties": False},
        True,
        False,
    ),
}


def proto(body: str, *, head: str = 'syntax = "proto3";') -> str:
    return f"{head} {body}"


M = "message M {{ {} }}"
PROTO_RULES: dict[str, tuple[str, str, bool, bool]] = {
    "the same": (proto(M.format("int32 a = 1;")), proto(M.format("int32 a = 1;")), True, True),
    "a field more": (proto(M.format("int32 a = 1; string b = 2;")), proto(M.format("int32 a = 1;")), True, True),
    "a field of another number": (proto(M.format("int32 a = 2;")), proto(M.format("int32 a = 1;")), False, False),
    "a field of another name": (proto(M.format("int32 b = 1;")), proto(M.format("int32 a = 1;")), True, True),
    "a type of the same bytes": (proto(M.format("int64 a = 1;")), proto(M.format("int32 a = 1;")), True, True),
    "a type of other bytes": (proto(M.format("sint32 a = 1;")), proto(M.format("int32 a = 1;")), False, False),
    "string and bytes": (proto(M.format("bytes a = 1;")), proto(M.format("string a = 1;")), True, True),
    "a number for a string": (proto(M.format("int32 a = 1;")), proto(M.format("string a = 1;")), False, False),
    "a list of numbers": (proto(M.format("repeated int32 a = 1;")), proto(M.format("int32 a = 1;")), False, False),
    "a list of strings": (proto(M.format("repeated string a = 1;")), proto(M.format("string a = 1;")), True, True),
    "a number for an enum": (
        proto(M.format("int32 a = 1;")),
        proto(M.format("E a = 1;") + " enum E { X = 0; }"),
        True,
        True,
    ),
    "another message": (
        proto(M.format("A a = 1;") + " message A {} message B {}"),
        proto(M.format("B a = 1;") + " message A {} message B {}"),
        False,
        False,
    ),
    "a message more": (proto(M.format("") + " message N {}"), proto(M.format("")), True, False),
    "another package": (
        proto(M.format("N a = 1;") + " message N {}", head='syntax = "proto3"; package a.b;'),
        proto(M.format("N a = 1;") + " message N {}", head='syntax = "proto3"; package c;'),
        True,
        True,
    ),
    "one that is required": (
        proto(M.format("optional int32 a = 1; required int32 b = 2;"), head=""),
        proto(M.format("optional int32 a = 1;"), head=""),
        False,
        True,
    ),
    "one that is required now": (
        proto(M.format("required int32 a = 1;"), head=""),
        proto(M.format("optional int32 a = 1;"), head=""),
        False,
        True,
    ),
    "one into a new oneof": (
        proto(M.format("oneof o { int32 a = 1; } int32 b = 2;")),
        proto(M.format("int32 a = 1; int32 b = 2;")),
        True,
        True,
    ),
    "two into a oneof": (
        proto(M.format("oneof o { int32 a = 1; int32 b = 2; }")),
        proto(M.format("int32 a = 1; int32 b = 2;")),
        False,
        True,
    ),
    "one less of a oneof": (
        proto(M.format("oneof o { int32 a = 1; }")),
        proto(M.format("oneof o { int32 a = 1; int32 b = 2; }")),
        False,
        True,
    ),
    "an optional one": (proto(M.format("optional int32 a = 1;")), proto(M.format("int32 a = 1;")), True, True),
    "values of a map": (
        proto(M.format("map<string, int32> a = 1;")),
        proto(M.format("map<string, string> a = 1;")),
        False,
        False,
    ),
    "within a message": (
        proto(M.format("message N { int32 a = 1; } N n = 1;")),
        proto(M.format("message N { string a = 1; } N n = 1;")),
        False,
        False,
    ),
    "syntax": (
        proto(M.format("optional int32 a = 1;"), head='syntax = "proto2";'),
        proto(M.format("int32 a = 1;")),
        True,
        True,
    ),
}

RULES = [
    pytest.param(kind, *rule, id=f"{kind.lower()}: {name}")
    for kind, rules in ((AVRO, AVRO_RULES), (JSON, JSON_RULES), (PROTOBUF, PROTO_RULES))
    for name, rule in rules.items()
]


@pytest.mark.parametrize(("kind", "reader", "writer", "forth", "back"), RULES)
def test_a_schema_reads_what_another_wrote(kind: str, reader: Any, writer: Any, forth: bool, back: bool) -> None:
    assert reads(kind, reader, writer) is forth
    assert reads(kind, writer, reader) is back


def test_a_schema_of_another_type_never_follows() -> None:
    assert schemas.problems(schemas.parse(Schema(AVRO, '"string"')), schemas.parse(Schema(JSON, "{}")))


def test_schemas_too_large_to_compare_are_said_to_be() -> None:
    def wide(kind: str) -> schemas.ParsedSchema:
        records = [record((f"f{n}", kind), name=f"R{n}") for n in range(700)]
        return schemas.parse(Schema(AVRO, json.dumps({"type": "array", "items": records})))

    with pytest.raises(InvalidSchema, match="too large to be compared"):
        schemas.problems(wide("int"), wide("string"))


def test_the_work_of_several_comparisons_is_counted_together() -> None:
    def wide(kind: str) -> schemas.ParsedSchema:
        return schemas.parse(Schema(AVRO, json.dumps(record(*((f"f{n}", kind) for n in range(2_000))))))

    work = WorkLimit()
    reader, writer = wide("long"), wide("int")
    for _ in range(40):
        assert schemas.problems(reader, writer, work) == []
    assert schemas.problems(writer, reader, work) != []
    assert schemas.problems(reader, writer, work) == []
    with pytest.raises(InvalidSchema, match="too large to be compared"):
        for _ in range(20):
            schemas.problems(reader, writer, work)
