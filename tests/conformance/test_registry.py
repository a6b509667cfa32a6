"""Do clients of Confluent's schema registry find what they expect, rule by rule and code by code?"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psycopg
import pytest

import headwater
import headwater.schema_registry.schemas
from headwater.access import scram
from headwater.access.permissions import Permission
from headwater.calls import access as access_calls
from headwater.calls import registry as registry_calls
from headwater.schema_registry import registry
from headwater.schema_registry.registry import LEVELS, run_steps
from http_server import http_server
from patience import PATIENCE_SECONDS

pytest.importorskip("jsonschema_rs")
schema_registry = pytest.importorskip("confluent_kafka.schema_registry")
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient  # noqa: E402
from confluent_kafka.schema_registry.error import SchemaRegistryError  # noqa: E402


@pytest.fixture(scope="module")
def address(dsn: str) -> Iterator[str]:
    with http_server(dsn) as address:
        yield f"{address}/registry"


@pytest.fixture
def client(address: str) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": address}) as client:
        yield client


@pytest.fixture
def http(address: str) -> Iterator[httpx.Client]:
    headers = {"content-type": "application/vnd.schemaregistry.v1+json"}
    with httpx.Client(base_url=address, timeout=PATIENCE_SECONDS, headers=headers) as client:
        yield client


def record(*fields: dict[str, Any], name: str = "Order") -> str:
    return json.dumps({"type": "record", "name": name, "fields": list(fields)})


ID = {"name": "id", "type": "long"}
NOTE = {"name": "note", "type": "string"}
NOTE_OR_NOT = {"name": "note", "type": ["null", "string"], "default": None}


def refusal(act: Any, *arguments: Any, **named: Any) -> tuple[int, int]:
    with pytest.raises(SchemaRegistryError) as refused:
        act(*arguments, **named)
    return refused.value.http_status_code, refused.value.error_code


def test_a_schema_is_registered_found_listed_and_deleted(client: SchemaRegistryClient, address: str) -> None:
    first, second = Schema(record(ID), "AVRO"), Schema(record(ID, NOTE_OR_NOT), "AVRO")
    first_id = client.register_schema("orders-value", first)
    second_id = client.register_schema("orders-value", second)
    assert (
        client.register_schema("orders-value", Schema(json.dumps(json.loads(first.schema_str), indent=3))) == first_id
    )
    assert client.register_schema("other-value", first) == first_id != second_id
    assert client.get_versions("orders-value") == [1, 2]
    latest = client.get_latest_version("orders-value")
    assert (latest.version, latest.schema_id, latest.schema.schema_str) == (2, second_id, second.schema_str)
    assert client.get_version("orders-value", 1).schema_id == first_id
    assert client.lookup_schema("orders-value", first).version == 1
    assert json.loads(client.get_schema(first_id).schema_str) == json.loads(first.schema_str)
    assert set(client.get_subjects()) >= {"orders-value", "other-value"}
    assert client.get_subjects_by_schema_id(first_id) == ["orders-value", "other-value"]
    assert [(one.subject, one.version) for one in client.get_schema_versions(first_id)] == [
        ("orders-value", 1),
        ("other-value", 1),
    ]

    assert refusal(client.delete_version, "orders-value", 2, permanent=True) == (404, 40407)
    assert client.delete_version("orders-value", 2) == 2
    assert refusal(client.delete_version, "orders-value", 2) == (404, 40406)
    assert refusal(client.get_version, "orders-value", 2) == (404, 40402)
    # Payloads that carry its id can still be read.
    assert SchemaRegistryClient({"url": address}).get_schema(second_id).schema_str == second.schema_str
    assert client.delete_version("orders-value", 2, permanent=True) == 2
    assert refusal(client.delete_subject, "orders-value", permanent=True) == (404, 40405)
    assert client.delete_subject("orders-value") == [1]
    assert refusal(client.delete_subject, "orders-value") == (404, 40404)
    assert "orders-value" not in client.get_subjects()
    assert "orders-value" in client.get_subjects(deleted=True)
    assert client.delete_subject("orders-value", permanent=True) == [1]
    assert refusal(client.delete_subject, "orders-value") == (404, 40401)
    # The other subject has it still.
    assert client.get_version("other-value", 1).schema_id == first_id


def test_what_changes_the_registry_is_told_in_the_log_and_what_does_not_is_not(
    http: httpx.Client, log: headwater.Headwater
) -> None:
    log.create_topic("headwater.audit", if_missing=True)
    before = log.state().head
    body = {"schema": record(ID)}
    for _ in range(2):
        assert http.post("/subjects/told-value/versions", json=body).status_code == 200
    assert http.put("/config/told-value", json={"compatibility": "NONE"}).status_code == 200
    assert http.delete("/config/told-value").status_code == 200
    assert http.delete("/subjects/told-value/versions/1").status_code == 200
    assert http.delete("/subjects/told-value?permanent=true").status_code == 200
    assert http.delete("/subjects/missing-value").status_code == 404
    told = [event.data for event in log.read("headwater.audit", after=before)]
    assert [one["action"] for one in told] == [
        "schema.register", "schema.config", "schema.config", "schema.delete", "schema.delete"
    ]  # fmt: skip
    assert {one["subject"] for one in told} == {"told-value"}
    assert told[-1]["detail"] == {"for_good": True}


def test_what_is_not_there_is_said_with_the_code_that_clients_know(
    client: SchemaRegistryClient, http: httpx.Client
) -> None:
    assert refusal(client.get_versions, "nobody") == (404, 40401)
    assert refusal(client.get_version, "nobody", 1) == (404, 40401)
    assert refusal(client.get_schema, 424242) == (404, 40403)
    assert refusal(client.lookup_schema, "nobody", Schema('"string"')) == (404, 40401)
    client.register_schema("codes", Schema('"string"'))
    assert refusal(client.get_version, "codes", 7) == (404, 40402)
    assert refusal(client.get_version, "codes", "seven") == (422, 42202)
    assert refusal(client.lookup_schema, "codes", Schema('"int"')) == (404, 40403)
    assert refusal(client.register_schema, "codes", Schema("{")) == (422, 42201)
    assert refusal(client.register_schema, "codes", Schema('{"type": "bogus"}')) == (422, 42201)
    assert refusal(client.register_schema, "codes", Schema('"int"')) == (409, 409)
    assert refusal(client.set_compatibility, "codes", "SIDEWAYS") == (422, 42203)
    assert refusal(client.get_compatibility, "codes") == (404, 40408)
    answer = http.get("/subjects/nobody/versions")
    assert answer.headers["content-type"] == "application/vnd.schemaregistry.v1+json"
    assert set(answer.json()) == {"error_code", "message"}
    for path, body in (
        ("/subjects/a/versions", b"{"),
        ("/subjects/a/versions", b"[]"),
        ("/subjects/a/versions", b"[" * 100_000),
        ("/subjects/a/versions", b'{"schema": 7}'),
        ("/subjects/a/versions", b'{"schema": "\\"int\\"", "schemaType": "XML"}'),
        ("/subjects/a/versions", b'{"schema": "\\"int\\"", "references": [{"name": "x"}]}'),
        (
            "/subjects/a/versions",
            b'{"schema": "\\"int\\"", "references": [{"name": "x", "subject": "y", "version": 1}]}',
        ),
        ("/subjects/a%00b/versions", b'{"schema": "\\"int\\""}'),
        ("/subjects/a/versions", b'{"schema": "\\"int\\"", "ruleSet": {"domainRules": []}}'),
        ("/subjects/" + "x" * 400 + "/versions", b'{"schema": "\\"int\\""}'),
        ("/subjects/a/versions", b"x" * (3 * 1024 * 1024)),
    ):
        answer = http.post(path, content=body)
        assert 400 <= answer.status_code < 500, (path, body[:60], answer.text)
        assert set(answer.json()) == {"error_code", "message"}
    assert http.get("/subjects", params={"limit": "x"}).status_code == 422
    assert http.get("/schemas/ids/x").json()["error_code"] == 40403
    assert http.get("/mode").json() == {"mode": "READWRITE"}
    assert http.put("/mode", json={"mode": "READONLY"}).json()["error_code"] == 42204
    assert http.get("/schemas/types").json() == ["AVRO", "JSON", "PROTOBUF"]


def test_compatibility_is_kept_as_it_is_set(client: SchemaRegistryClient) -> None:
    client.register_schema("kept", Schema(record(ID)))
    harsh = Schema(record(ID, NOTE))
    assert not client.test_compatibility("kept", harsh)
    assert client.test_compatibility("kept", Schema(record(ID, NOTE_OR_NOT)))
    assert client.test_compatibility("nobody-knows-it", harsh)
    assert refusal(client.register_schema, "kept", harsh) == (409, 409)
    client.set_compatibility("kept", "FORWARD")
    assert client.get_compatibility("kept") == "FORWARD"
    assert client.register_schema("kept", harsh)
    client.set_compatibility("kept", "FULL_TRANSITIVE")
    assert refusal(client.register_schema, "kept", Schema(record(ID, {**NOTE, "name": "other"}))) == (409, 409)
    client.set_compatibility("kept", "NONE")
    assert client.register_schema("kept", Schema('"string"'))
    # What holds everywhere is for subjects that say nothing.
    client.set_compatibility(None, "NONE")
    try:
        assert client.get_compatibility() == "NONE"
        client.register_schema("free", Schema('"string"'))
        assert client.register_schema("free", Schema('"int"'))
    finally:
        client.set_compatibility(None, "BACKWARD")


A_LONG = {"name": "a", "type": "long"}
A_STRING = {"name": "a", "type": "string", "default": ""}
# After versions with a long and with a string, under which compatibilities a schema with these fields may follow.
FOLLOWING: list[tuple[list[dict[str, Any]], set[str]]] = [
    ([ID], {"BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FULL"}),
    ([ID, A_STRING, {"name": "b", "type": "int", "default": 0}], {"BACKWARD", "FORWARD", "FULL"}),
    ([ID, {"name": "c", "type": "int"}], {"FORWARD"}),
    ([A_STRING], {"BACKWARD"}),
    ([], {"BACKWARD", "BACKWARD_TRANSITIVE"}),
    ([ID, {**A_STRING, "type": "boolean", "default": True}], set()),
]


def test_every_compatibility_means_what_it_says(client: SchemaRegistryClient, http: httpx.Client) -> None:
    client.set_compatibility("levels", "NONE")
    for field in (A_LONG, A_STRING):
        client.register_schema("levels", Schema(record(ID, field)))
    for level in LEVELS:
        client.set_compatibility("levels", level)
        for fields, may_follow in FOLLOWING:
            answer = http.post("/compatibility/subjects/levels/versions", json={"schema": record(*fields)})
            assert answer.json() == {"is_compatible": level == "NONE" or level in may_follow}, (level, fields)


def test_the_reasons_are_told(client: SchemaRegistryClient, http: httpx.Client) -> None:
    client.register_schema("reasons", Schema(record(ID)))
    answer = http.post(
        "/compatibility/subjects/reasons/versions/latest?verbose=true", json={"schema": record(ID, NOTE)}
    )
    assert answer.json() == {
        "is_compatible": False,
        "messages": ["version 1, note: is read, was not written and has no default"],
    }
    told = http.post("/subjects/reasons/versions", json={"schema": record(ID, NOTE)}).json()["message"]
    assert "note: is read, was not written and has no default" in told
    assert http.post("/compatibility/subjects/reasons/versions/9", json={"schema": record(ID)}).status_code == 404


def test_schemas_refer_to_others_which_then_stay(client: SchemaRegistryClient, address: str) -> None:
    client.register_schema("money", Schema(record({"name": "cents", "type": "long"}, name="shop.Money")))
    priced = Schema(
        record({"name": "price", "type": "shop.Money"}), "AVRO", [SchemaReference("shop.Money", "money", 1)]
    )
    priced_id = client.register_schema("priced", priced)
    assert client.get_schema(priced_id).references[0].subject == "money"
    assert client.get_referenced_by("money", 1) == [priced_id]
    assert refusal(client.delete_subject, "money") == (422, 42206)
    client.delete_subject("priced")
    assert client.delete_subject("money") == [1]
    # Who has the id reads on; nobody may begin to refer to it.
    assert SchemaRegistryClient({"url": address}).get_schema(priced_id).references[0].subject == "money"
    assert refusal(client.register_schema, "priced-anew", priced) == (422, 42201)
    client.register_schema("text.json", Schema('{"type": "string"}', "JSON"))
    named = Schema(
        '{"properties": {"name": {"$ref": "text.json"}}}', "JSON", [SchemaReference("text.json", "text.json", 1)]
    )
    assert client.register_schema("named", named)
    mixed = Schema('{"$ref": "x"}', "JSON", [SchemaReference("x", "kept", 1)])
    assert refusal(client.register_schema, "named", mixed) == (422, 42201)


def test_of_schemas_that_come_at_once_each_is_compared_with_those_before_it(
    address: str, log: headwater.Headwater
) -> None:
    """Each adds another field that must be there: whichever comes first, no other may follow."""
    outcomes: list[int] = []

    def register(number: int) -> None:
        fields = [ID, {"name": f"f{number}", "type": {"type": "record", "name": f"R{number}", "fields": [ID]}}]
        answer = httpx.post(
            f"{address}/subjects/raced/versions", json={"schema": record(*fields)}, timeout=PATIENCE_SECONDS
        )
        outcomes.append(answer.status_code)

    threads = [threading.Thread(target=register, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert sorted(outcomes) == [200, 409, 409, 409, 409, 409]


def test_a_schema_that_is_deleted_here_while_it_is_registered_there_stays(
    dsn: str, log: headwater.Headwater, connection: psycopg.Connection, until: Callable[[Callable[[], Any]], Any]
) -> None:
    schema = headwater.schema_registry.schemas.Schema("AVRO", '{"type": "fixed", "name": "Contested", "size": 3}')
    contested = run_steps(registry.register("here", schema), log.run).id
    log.run(registry_calls.delete_schema("here"))
    with psycopg.connect(dsn) as other:

        def run(call: Any) -> Any:
            return call.decode(other.execute(call.sql, call.params).fetchall())

        assert run_steps(registry.register("there", schema), run).id == contested
        thread = threading.Thread(target=lambda: log.run(registry_calls.delete_schema("here", for_good=True)))
        thread.start()
        # It waits for the one who registers.
        until(lambda: connection.execute("select count(*) from pg_locks where not granted").fetchone() != (0,))
        other.commit()
        thread.join(PATIENCE_SECONDS)
    assert log.run(registry_calls.versions("here", deleted=True)) == []
    assert log.run(registry_calls.find_schema(contested)) == schema


def test_rights_are_those_of_topics(dsn: str, log: headwater.Headwater) -> None:
    for name in ("shop", "reader"):
        log.run(access_calls.set_account(name, scram.verifiers("secret", b"0123456789abcdef")))
    for action in ("write", "describe"):
        log.run(access_calls.allow(Permission("shop", action, "topic", "sold", False)))
    log.run(access_calls.allow(Permission("reader", "describe", "topic", "sold", False)))
    with http_server(dsn, authenticate=True) as address:

        def client(name: str, password: str = "secret") -> SchemaRegistryClient:
            return SchemaRegistryClient({"url": f"{address}/registry", "basic.auth.user.info": f"{name}:{password}"})

        sold_id = client("shop").register_schema("sold-value", Schema('"string"'))
        assert client("reader").get_schema(sold_id).schema_str == '"string"'
        assert refusal(client("reader").register_schema, "sold-value", Schema('"bytes"')) == (403, 40301)
        assert refusal(client("shop").register_schema, "bought-value", Schema('"int"')) == (403, 40301)
        assert refusal(client("shop").delete_subject, "sold-value") == (403, 40301)
        assert refusal(client("shop").set_compatibility, None, "NONE") == (403, 40301)
        assert refusal(client("shop", "wrong").get_subjects)[0] == 401
        assert client("reader").get_subjects() == ["sold-value"]
        # A schema that is under no subject of theirs is none to them.
        hidden = run_steps(
            registry.register("hidden", headwater.schema_registry.schemas.Schema("AVRO", '"boolean"')), log.run
        )
        assert refusal(client("reader").get_schema, hidden.id) == (404, 40403)


def chained(length: int, first: str = "int") -> str:
    """Records that hold each other, one after the other, the last by a field that comes first."""
    chain: list[Any] = [
        {"type": "record", "name": f"T{n}", "fields": [{"name": "x", "type": f"T{n - 1}" if n else first}]}
        for n in range(length)
    ]
    return json.dumps({"type": "array", "items": chain})


HOSTILE: dict[str, tuple[str, str]] = {
    "deep": ("AVRO", '{"type": "array", "items": ' * 5_000 + '"int"' + "}" * 5_000),
    "deep lists": ("JSON", '{"allOf": [' * 5_000 + "{}" + "]}" * 5_000),
    "huge": ("AVRO", json.dumps({"type": "enum", "name": "E", "symbols": [f"s{n}" for n in range(60_000)]})),
    "multiplied": (
        "JSON",
        json.dumps(
            {
                "$defs": {
                    f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n - 1}"}] * 2} if n else {"type": "string"}
                    for n in range(60)
                },
                "$ref": "#/$defs/a59",
            }
        ),
    ),
    "a pattern of any size": ("JSON", json.dumps({"pattern": "((((a{100}){100}){100}){100}){100}"})),
    "fetched": ("JSON", json.dumps({"$ref": "http://127.0.0.1:1/schema"})),
    "from a file": ("JSON", json.dumps({"$ref": "file:///etc/passwd"})),
    "deep messages": ("PROTOBUF", 'syntax = "proto3"; ' + "message M { " * 5_000 + "}" * 5_000),
    "unending comment": ("PROTOBUF", "/*" + "*" * 200_000),
    "unending text": ("PROTOBUF", 'syntax = "' + "\\" * 200_000),
    "a number that is none": ("PROTOBUF", 'syntax = "proto3"; message M { int32 a = ' + "9" * 5_000 + "; }"),
    "not base64": ("PROTOBUF", "QUJD" * 1_000),
    "twice": ("AVRO", '{"type": "int", "type": "long"}'),
    "not a number": ("JSON", '{"minimum": NaN}'),
    "many digits": ("JSON", '{"minimum": ' + "9" * 10_000 + "}"),
    "half a letter": ("AVRO", '"\ud800"'),
    "nul": ("JSON", '{"title": "\x00"}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_and_costs_little(http: httpx.Client, name: str) -> None:
    kind, text = HOSTILE[name]
    before = time.process_time()
    answer = http.post("/subjects/hostile/versions", content=json.dumps({"schema": text, "schemaType": kind}))
    assert answer.status_code == 422, answer.text[:500]
    assert answer.json()["error_code"] in (42201, 422)
    # All in this process, so that what it cost is known; a wide bound, since only an explosion matters.
    assert time.process_time() - before < 20
    assert http.get("/schemas/types").status_code == 200


@pytest.mark.parametrize(
    ("kind", "text", "other"),
    [
        ("JSON", json.dumps({"$ref": "#"}), json.dumps({"$ref": "#", "type": "object"})),
        ("JSON", json.dumps({"allOf": [{"$ref": "#"}]}), json.dumps({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]})),
        (
            "JSON",
            json.dumps({"properties": {f"p{n}": {"$ref": "#"} for n in range(40)}}),
            json.dumps({"properties": {f"p{n}": {"$ref": "#"} for n in range(41)}, "description": "x"}),
        ),
        (
            "AVRO",
            record({"name": "next", "type": ["null", "Order"]}),
            record({"name": "next", "type": ["null", "Order"]}, {"name": "last", "type": "Order"}),
        ),
        ("AVRO", chained(2_000), chained(2_000, "long")),
        ("JSON", json.dumps({"pattern": "^(a+)+$"}), json.dumps({"pattern": "^(?=(a+)+$)b"})),
    ],
)
def test_schemas_that_hold_themselves_are_compared_to_an_end(
    http: httpx.Client, kind: str, text: str, other: str
) -> None:
    for schema in (text, other):
        path = "/subjects/endless/versions"
        answer = http.post(path, json={"schema": schema, "schemaType": kind})
        assert answer.status_code in (200, 409, 422), answer.text[:500]
    http.delete("/subjects/endless")
