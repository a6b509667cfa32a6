"""Do Confluent's serializers work end to end, and is a record that does not fit its topic's schema kept out?"""

from __future__ import annotations

import itertools
import json
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from brokers import BrokerProcess
from raw_client import Raw, batch_of

import headwater
from headwater.calls import registry as calls
from headwater.schema_registry import registry
from headwater.schema_registry.registry import run_steps
from headwater.schema_registry.schemas import Reference, Schema
from headwater.servers.kafka.records import Columns, build_batch
from headwater.servers.kafka.wire import ErrorCode
from http_server import http_server
from patience import PATIENCE_SECONDS

pytest.importorskip("jsonschema_rs")
pytest.importorskip("confluent_kafka.schema_registry.avro")
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic
from confluent_kafka.schema_registry import SchemaRegistryClient, record_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto

_numbers = itertools.count(1)

AVRO = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "namespace": "shop",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "note", "type": ["null", "string"], "default": None},
            {"name": "lines", "type": {"type": "array", "items": {"type": "map", "values": "double"}}, "default": []},
        ],
    }
)
JSON = json.dumps(
    {
        "title": "Order",
        "type": "object",
        "properties": {"id": {"type": "integer"}, "note": {"type": "string", "pattern": "^(a+)+$"}},
        "required": ["id"],
    }
)
PROTO = 'syntax = "proto3"; package shop; message Order { int64 id = 1; string note = 2; message Line { bool x = 1; } }'


@pytest.fixture(scope="module")
def schema_client(dsn: str) -> Iterator[SchemaRegistryClient]:
    with http_server(dsn) as address, SchemaRegistryClient({"url": f"{address}/registry"}) as client:
        yield client


@pytest.fixture
def raw(broker: BrokerProcess) -> Iterator[Raw]:
    connection = Raw(broker)
    yield connection
    connection.socket.close()


@pytest.fixture
def partition(log: headwater.Headwater) -> str:
    return log.create_topic(f"checked-{next(_numbers)}", kind="sequenced").name


def register(log: headwater.Headwater, subject: str, kind: str, text: str, *references: Reference) -> int:
    return run_steps(registry.register(subject, Schema(kind, text, references)), log.run).id


def bind(log: headwater.Headwater, topic: str, **parts: Any) -> None:
    log.run(calls.set_topic_schemas(topic, parts))


def frame(schema_id: int, payload: bytes) -> bytes:
    return struct.pack(">bI", 0, schema_id) + payload


def protobuf_classes() -> tuple[Any, Any]:
    """An order and, in a file of its own that it imports, money: as a compiler would make them."""
    pool = descriptor_pool.DescriptorPool()
    money = FileDescriptorProto(name="shop/money.proto", package="shop", syntax="proto3")
    message = money.message_type.add(name="Money")
    message.field.add(name="cents", number=1, type=3, label=1, json_name="cents")
    order = FileDescriptorProto(name="order.proto", package="shop", syntax="proto3", dependency=["shop/money.proto"])
    message = order.message_type.add(name="Order")
    message.field.add(name="id", number=1, type=3, label=1, json_name="id")
    message.field.add(name="price", number=2, type=11, type_name=".shop.Money", label=1, json_name="price")
    for file in (money, order):
        pool.AddSerializedFile(file.SerializeToString())
    classes = [message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shop.{one}")) for one in ("Order", "Money")]
    return classes[0], classes[1]


def avro_pair(client: SchemaRegistryClient) -> tuple[Any, Any, Any]:
    return AvroSerializer(client, AVRO), AvroDeserializer(client), {"id": 7, "note": "n", "lines": [{"a": 1.5}]}


def json_pair(client: SchemaRegistryClient) -> tuple[Any, Any, Any]:
    return JSONSerializer(JSON, client), JSONDeserializer(JSON, schema_registry_client=client), {"id": 7, "note": "aa"}


def protobuf_pair(client: SchemaRegistryClient) -> tuple[Any, Any, Any]:
    order, money = protobuf_classes()
    serializer = ProtobufSerializer(order, client)
    return serializer, ProtobufDeserializer(order, {}, client), order(id=7, price=money(cents=250))


@pytest.mark.parametrize("pair", [avro_pair, json_pair, protobuf_pair])
def test_what_a_serializer_writes_its_deserializer_reads_and_the_topic_takes(
    broker: BrokerProcess, schema_client: SchemaRegistryClient, pair: Callable[[Any], tuple[Any, Any, Any]]
) -> None:
    topic = f"serialized-{next(_numbers)}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    config = {"confluent.value.schema.validation": "true"}
    admin.create_topics([NewTopic(topic, 1, config=config)])[topic].result(PATIENCE_SECONDS)
    serializer, deserializer, value = pair(schema_client)
    context = SerializationContext(topic, MessageField.VALUE)
    packed = serializer(value, context)
    assert packed[0] == 0
    assert schema_client.get_latest_version(f"{topic}-value").schema_id == int.from_bytes(packed[1:5], "big")

    failed: list[Any] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0, "enable.idempotence": True})

    def send(payload: bytes | None) -> Any:
        failed.clear()
        producer.produce(topic, payload, key=b"k", on_delivery=lambda error, message: failed.append(error))
        assert producer.flush(PATIENCE_SECONDS) == 0
        return failed[0]

    assert send(packed) is None
    assert send(packed[:5] + b"\xff").code() == KafkaError.INVALID_RECORD
    assert send(b"\x00\x7f\xff\xff\xff" + packed[5:]).code() == KafkaError.INVALID_RECORD
    assert send(b"plain").code() == KafkaError.INVALID_RECORD
    # Deletes the key.
    assert send(None) is None
    # A producer goes on after what was refused.
    assert send(packed) is None

    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "any", "log_level": 0})
    consumer.assign([TopicPartition(topic, 0, 0)])
    got: list[Any] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(got) < 3:
        assert time.monotonic() < deadline
        got += [one.value() for one in consumer.consume(3, timeout=0.5)]
    consumer.close()
    assert got == [packed, None, packed]
    assert deserializer(got[0], context) == value


def test_of_a_batch_with_a_record_that_does_not_fit_nothing_is_written_and_each_such_record_is_told(
    raw: Raw, partition: str, log: headwater.Headwater
) -> None:
    register(log, f"{partition}-s", "JSON", JSON)
    bind(log, partition, value={"subject": f"{partition}-s"})
    refused = raw.produce(partition, batch_of(b'{"id": 1}', b'{"id": "x"}', b"{}", b'{"id": 2}'))
    assert refused.error_code == ErrorCode.invalid_record
    assert "2 of 4 records" in refused.error_message
    assert [(one.batch_index, one.batch_index_error_message) for one in refused.record_errors] == [
        (1, 'value: /id: "x" is not of type "integer"'),
        (2, 'value: the value: "id" is a required property'),
    ]
    # Neither do those of old versions, which cannot be told which.
    assert raw.produce(partition, batch_of(b"{}"), version=7).error_code == ErrorCode.invalid_record
    assert raw.values(partition) == []
    taken = raw.produce(partition, batch_of(b'{"id": 1}', b'{"id": 2}'))
    assert (taken.error_code, taken.base_offset) == (ErrorCode.none, 0)


AVRO_ZERO = b"\x00\x02\x06abc\x00"
"""An order of Avro with the number 0 and a note: without an id it begins as if it had one."""


@pytest.mark.parametrize(
    ("kind", "text", "fitting", "unfitting"),
    [
        (
            "JSON",
            JSON,
            [b'{"id": 1}', b' {"id": 1, "note": "aaa"}'],
            [b"", b"[]", b'{"id": 1', b'{"id": 1.5}', b"\xff"],
        ),
        (
            "AVRO",
            AVRO,
            [b"\x02\x00\x00", AVRO_ZERO, b"\x02\x02\x02a\x00"],
            [b"", b"\x02", b"\x02\x06\x00", b"\x02\x02\x02\xff\x00", b"\x02\x00\x00\x00", b"\x02\x00\x7f"],
        ),
        ("PROTOBUF", PROTO, [b"\x08\x01", b"", b"\x12\x01a"], [b"\x08", b"\x12\x05a", b"\x12\x01\xff", b"\xff"]),
    ],
)
def test_payloads_without_an_id_must_fit_the_latest_version(
    raw: Raw,
    partition: str,
    log: headwater.Headwater,
    kind: str,
    text: str,
    fitting: list[bytes],
    unfitting: list[bytes],
) -> None:
    schema_id = register(log, f"{partition}-any", kind, text)
    bind(log, partition, value={"subject": f"{partition}-any"})
    indexes = b"\x00" if kind == "PROTOBUF" else b""
    for payload in fitting:
        assert raw.produce(partition, batch_of(payload)).error_code == ErrorCode.none, payload
        # With an id it is the same to this topic.
        assert raw.produce(partition, batch_of(frame(schema_id, indexes + payload))).error_code == ErrorCode.none, (
            payload
        )
    for payload in unfitting:
        assert raw.produce(partition, batch_of(payload)).error_code == ErrorCode.invalid_record, payload
        framed = raw.produce(partition, batch_of(frame(schema_id, indexes + payload)))
        assert framed.error_code == ErrorCode.invalid_record, payload
    assert len(raw.values(partition)) == 2 * len(fitting)


def test_a_message_within_a_message_is_found_by_its_indexes(raw: Raw, partition: str, log: headwater.Headwater) -> None:
    schema_id = register(log, f"{partition}-value", "PROTOBUF", PROTO)
    bind(log, partition, value={"framed": True})

    def send(payload: bytes) -> ErrorCode:
        return raw.produce(partition, batch_of(frame(schema_id, payload))).error_code

    assert send(b"\x04\x00\x00" + b"\x08\x01") == ErrorCode.none
    assert send(b"\x02\x02" + b"\x08\x01") == ErrorCode.invalid_record
    assert send(b"\x04\x00\x02" + b"\x08\x01") == ErrorCode.invalid_record
    assert send(b"\xfe\xff\xff\xff\x0f") == ErrorCode.invalid_record
    assert send(b"") == ErrorCode.invalid_record


def test_an_id_counts_only_under_its_subject(
    raw: Raw, partition: str, log: headwater.Headwater, until: Callable[[Callable[[], Any]], Any]
) -> None:
    own = register(log, f"{partition}-value", "AVRO", '"long"')
    other = register(log, f"{partition}-other", "AVRO", '"string"')
    bind(log, partition, value={"framed": True})
    assert raw.produce(partition, batch_of(frame(own, b"\x02"))).error_code == ErrorCode.none
    refused = raw.produce(partition, batch_of(frame(other, b"\x02a")))
    assert refused.error_code == ErrorCode.invalid_record
    assert f"schema {other} is not registered under {partition}-value" in refused.error_message
    assert raw.produce(partition, batch_of(b"\x02")).error_code == ErrorCode.invalid_record
    log.run(calls.set_compatibility(f"{partition}-value", "NONE"))
    assert register(log, f"{partition}-value", "AVRO", '"string"') == other
    # Brokers hear of it after a moment.
    until(lambda: raw.produce(partition, batch_of(frame(other, b"\x02a"))).error_code == ErrorCode.none)
    log.run(calls.delete_schema(f"{partition}-value", 2))
    until(lambda: raw.produce(partition, batch_of(frame(other, b"\x02a"))).error_code == ErrorCode.invalid_record)


def test_keys_are_validated_as_values_are(raw: Raw, partition: str, log: headwater.Headwater) -> None:
    register(log, f"{partition}-key", "JSON", '{"type": "integer"}')
    bind(log, partition, key={"subject": f"{partition}-key"})

    def send(key: bytes | None) -> Any:
        batch = build_batch([0], Columns([1], [key], [b"anything"], [None]))
        return raw.produce(partition, batch)

    assert send(b"7").error_code == ErrorCode.none
    assert send(None).error_code == ErrorCode.none
    refused = send(b"seven")
    assert refused.error_code == ErrorCode.invalid_record
    assert refused.record_errors[0].batch_index_error_message.startswith("key: ")


def test_the_name_of_a_record_can_say_its_subject(
    broker: BrokerProcess, schema_client: SchemaRegistryClient, raw: Raw, partition: str, log: headwater.Headwater
) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    strategy = "confluent.value.subject.name.strategy"

    def settings() -> dict[str, str]:
        resource = ConfigResource(ConfigResource.Type.TOPIC, partition)
        found = admin.describe_configs([resource])[resource].result(PATIENCE_SECONDS)
        return {name: entry.value for name, entry in found.items()}

    def alter(values: dict[str, str]) -> None:
        resource = ConfigResource(ConfigResource.Type.TOPIC, partition, set_config=values)
        admin.alter_configs([resource])[resource].result(PATIENCE_SECONDS)

    assert settings()[strategy].endswith(".TopicNameStrategy")
    alter(
        {
            "confluent.value.schema.validation": "true",
            strategy: "io.confluent.kafka.serializers.subject.RecordNameStrategy",
        }
    )
    assert settings()["confluent.value.schema.validation"] == "true"
    assert settings()[strategy] == "io.confluent.kafka.serializers.subject.RecordNameStrategy"
    serializer = AvroSerializer(schema_client, AVRO, conf={"subject.name.strategy": record_subject_name_strategy})
    packed = serializer({"id": 1}, SerializationContext(partition, MessageField.VALUE))
    assert schema_client.get_latest_version("shop.Order").schema_id == int.from_bytes(packed[1:5], "big")
    assert raw.produce(partition, batch_of(packed)).error_code == ErrorCode.none
    elsewhere = register(log, "elsewhere", "AVRO", json.dumps({"type": "record", "name": "Elsewhere", "fields": []}))
    refused = raw.produce(partition, batch_of(packed, frame(elsewhere, b"")))
    assert [one.batch_index for one in refused.record_errors] == [1]
    assert "not registered under Elsewhere" in refused.error_message
    # The classic form of this request gives what it does not name its default.
    alter({})
    assert settings()["confluent.value.schema.validation"] == "false"
    assert raw.produce(partition, batch_of(b"anything")).error_code == ErrorCode.none


def test_a_topic_cannot_be_bound_to_what_is_not_there(broker: BrokerProcess, partition: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    for name, value in (
        ("headwater.value.schema", "nobody-knows-it"),
        ("confluent.value.schema.validation", "perhaps"),
        ("confluent.value.subject.name.strategy", "MyOwnStrategy"),
    ):
        (answer,) = admin.incremental_alter_configs([_incremental(partition, name, value)]).values()
        with pytest.raises(KafkaException) as refused:
            answer.result(PATIENCE_SECONDS)
        assert refused.value.args[0].code() == KafkaError.INVALID_CONFIG, name


def _incremental(topic: str, name: str, value: str) -> ConfigResource:
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry

    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    return ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])


@pytest.mark.parametrize(
    ("text", "payload"),
    [
        # A list that nests as deep as it is long, a count of a trillion nothings, and one that is negative.
        ('{"type": "record", "name": "L", "fields": [{"name": "n", "type": ["null", "L"]}]}', b"\x02" * 100_000),
        ('{"type": "array", "items": "long"}', b"\x80\x80\x80\x80\x80\x80\x80\x80\x40"),
        ('{"type": "map", "values": "null"}', b"\x81\x80\x80\x80\x80\x80\x80\x80\x40"),
    ],
)
def test_a_hostile_payload_costs_little(
    raw: Raw, partition: str, log: headwater.Headwater, text: str, payload: bytes
) -> None:
    register(log, f"{partition}-h", "AVRO", text)
    bind(log, partition, value={"subject": f"{partition}-h"})
    assert raw.produce(partition, batch_of(payload)).error_code == ErrorCode.invalid_record
    # The broker is still there.
    assert raw.values(partition) == []


def test_a_pattern_that_would_try_for_ever_and_a_value_that_nests_for_ever_are_refused(
    raw: Raw, partition: str, log: headwater.Headwater
) -> None:
    text = json.dumps({"properties": {"note": {"pattern": "^(?=(a+)+$)(a|aa)+$"}, "in": {"$ref": "#"}}})
    register(log, f"{partition}-p", "JSON", text)
    bind(log, partition, value={"subject": f"{partition}-p"})
    note = json.dumps({"note": "a" * 5_000 + "!"}).encode()
    deep = b'{"in":' * 50_000 + b"1" + b"}" * 50_000
    for payload in (note, deep):
        assert raw.produce(partition, batch_of(payload)).error_code == ErrorCode.invalid_record
    assert raw.produce(partition, batch_of(b'{"in": {"in": {"note": "aa"}}}')).error_code == ErrorCode.none


def test_records_of_a_transaction_are_validated_when_they_come(
    broker: BrokerProcess, partition: str, log: headwater.Headwater, raw: Raw
) -> None:
    register(log, f"{partition}-t", "JSON", '{"type": "integer"}')
    bind(log, partition, value={"subject": f"{partition}-t"})
    failed: list[Any] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": partition, "log_level": 0})
    producer.init_transactions(PATIENCE_SECONDS)
    for value, outcome in ((b"1", None), (b"x", KafkaError.INVALID_RECORD)):
        producer.begin_transaction()
        failed.clear()
        producer.produce(partition, value, on_delivery=lambda error, message: failed.append(error))
        producer.flush(PATIENCE_SECONDS)
        assert (failed[0] and failed[0].code()) == outcome
        if outcome is None:
            producer.commit_transaction(PATIENCE_SECONDS)
        else:
            producer.abort_transaction(PATIENCE_SECONDS)
    assert raw.values(partition) == [b"1"]
