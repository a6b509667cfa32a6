"""A Kafka client that sends exactly what it is told, in the classes of kio."""

from __future__ import annotations

import io
import socket
import struct
import uuid
from datetime import timedelta
from typing import Any

import google_crc32c
from brokers import BrokerProcess
from kio.index import load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer

from headwater.servers.kafka.api_keys import ApiKey
from headwater.servers.kafka.records import TRANSACTIONAL, Columns, build_batch, read_header, read_records
from headwater.servers.kafka.wire import ErrorCode, _shapes
from patience import PATIENCE_SECONDS


class Raw:
    """A connection that sends exactly what it is told. Messages are in the classes of kio."""

    def __init__(self, broker: BrokerProcess) -> None:
        host, port = broker.addresses[0].split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)

    def send(self, api: int, version: int, fields: dict[str, Any], correlation: int = 1) -> None:
        schema: Any = load_request_schema(api, version)
        header = schema.__header_schema__
        values = {"request_api_key": api, "request_api_version": version, "correlation_id": correlation,
                  "client_id": "raw"}  # fmt: skip
        buffer = io.BytesIO()
        entity_writer(header)(buffer, header(**{shape.name: values[shape.name] for shape in _shapes(header)}))
        entity_writer(schema)(buffer, made(schema, fields))
        body = buffer.getvalue()
        self.socket.sendall(struct.pack(">i", len(body)) + body)

    def receive(self, api: int, version: int, correlation: int = 1) -> Any:
        (size,) = struct.unpack(">i", self.exactly(4))
        frame = self.exactly(size)
        assert struct.unpack_from(">i", frame) == (correlation,)
        schema: Any = load_response_schema(api, version)
        return entity_reader(schema)(frame, 4 + (schema.__flexible__ and api != 18))[0]

    def ask(self, api: int, version: int, fields: dict[str, Any]) -> Any:
        self.send(api, version, fields)
        return self.receive(api, version)

    def exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = self.socket.recv(count - len(found))
            if not part:
                raise ConnectionResetError
            found += part
        return found

    # The hot pair

    def produce(self, topic: str, batch: bytes, *, version: int = 9, acks: int = -1, partition: int = 0) -> Any:
        self.send_produce(topic, batch, version=version, acks=acks, partition=partition)
        return self.receive(ApiKey.PRODUCE, version).responses[0].partition_responses[0]

    def send_produce(
        self, topic: str, batch: bytes, *, version: int = 9, acks: int = -1, partition: int = 0, correlation: int = 1
    ) -> None:
        data = {"name": topic, "partition_data": [{"index": partition, "records": batch}]}
        self.send(ApiKey.PRODUCE, version, {"acks": acks, "timeout": 1000, "topic_data": [data]}, correlation)

    def fetch(
        self, topic: str, offset: int, *, version: int = 12, topic_id: uuid.UUID | None = None, **limits: int
    ) -> Any:
        partition = limits.get("partition", 0)
        part = {
            "partition": partition,
            "fetch_offset": offset,
            "partition_max_bytes": limits.get("partition_bytes", 1_000_000),
        }
        fields = {
            "max_wait": limits.get("wait", 0),
            "min_bytes": 1,
            "max_bytes": limits.get("max_bytes", 1_000_000),
            "session_id": limits.get("session", 0),
            "topics": [{"topic": topic, "topic_id": topic_id, "partitions": [part]}],
        }
        return self.ask(ApiKey.FETCH, version, fields)

    def values(self, topic: str, offset: int = 0) -> list[bytes | None]:
        part = self.fetch(topic, offset).responses[0].partitions[0]
        assert part.error_code == ErrorCode.none
        return [value for batch in batches(part.records or b"") for value in batch.values]


def made(schema: Any, fields: dict[str, Any]) -> Any:
    """A message with these fields; the others have something harmless."""
    values = {}
    for shape in _shapes(schema):
        given = fields.get(shape.name, shape.default)
        if given is None and shape.array and not shape.nullable:
            given = ()
        if shape.nested is not None:
            if shape.array:
                given = None if given is None else tuple(made(shape.nested, one) for one in given)
            else:
                given = None if given is None else made(shape.nested, given)
        elif shape.kind is not None and shape.kind.startswith("timedelta"):
            given = timedelta(milliseconds=given)
        elif shape.array and given is not None:
            given = tuple(given)
        values[shape.name] = given
    return schema(**{name: value for name, value in values.items() if value is not None or _optional(schema, name)})


def _optional(schema: Any, name: str) -> bool:
    return next(shape.nullable for shape in _shapes(schema) if shape.name == name)


def batches(records: bytes) -> list[Columns]:
    found = []
    while records:
        size = 12 + struct.unpack_from(">i", records, 8)[0]
        one = memoryview(records)[:size]
        found.append(read_records(one, read_header(one), limit_bytes=10_000_000))
        records = records[size:]
    return found


def batch_of(
    *values: bytes, producer: int = -1, epoch: int = -1, sequence: int = -1, transactional: bool = False
) -> bytes:
    columns = Columns([1] * len(values), [None] * len(values), list(values), [None] * len(values))
    batch = bytearray(build_batch(list(range(len(values))), columns))
    struct.pack_into(">qhi", batch, 43, producer, epoch, sequence)
    batch[22] |= TRANSACTIONAL if transactional else 0
    struct.pack_into(">I", batch, 17, google_crc32c.value(bytes(batch[21:])))
    return bytes(batch)
