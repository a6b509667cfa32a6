"""Does the format "headwater.nats" publish each row once? A real NATS server."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from patience import PATIENCE_SECONDS

pytest.importorskip("pyspark")
pytest.importorskip("nats")

from nats.js.api import AckPolicy, ConsumerConfig

from headwater.embedded.nats import Nats
from headwater.errors import InvalidRequest
from headwater.nats import codec, streams, subjects

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark

CHANGE = (
    "id string, xid long, commit_lsn long, committed_at timestamp, sequence long, schema string, `table` string, "
    "operation string, key string, before string, after string, unchanged array<string>"
)


@pytest.fixture
def server() -> Iterator[Nats]:
    with (
        tempfile.TemporaryDirectory(prefix="headwater-", ignore_cleanup_errors=True) as directory,
        Nats(Path(directory, "nats")) as server,
    ):

        async def make() -> None:
            async with streams.connect(server.url) as client:
                await streams.ensure_streams(client.jetstream())

        asyncio.run(make())
        yield server


def stored(url: str) -> list[tuple[str, str, Any]]:
    """Subject, message id and payload of everything in the stream CDC."""

    async def read() -> list[tuple[str, str, Any]]:
        async with streams.connect(url) as client:
            js = client.jetstream()
            count = (await js.stream_info("CDC")).state.messages
            found: list[tuple[str, str, Any]] = []
            config = ConsumerConfig(ack_policy=AckPolicy.NONE)
            subscription = await js.pull_subscribe("cdc.>", stream="CDC", config=config)
            while len(found) < count:
                some = await subscription.fetch(1000, timeout=PATIENCE_SECONDS)
                found += [(m.subject, (m.headers or {})["Nats-Msg-Id"], m.data) for m in some]
            return found

    return asyncio.run(read())


def changes(spark: SparkSession, count: int) -> DataFrame:
    rows = [
        (
            subjects.change_id(5000 + n // 10, n % 10),
            700 + n // 10,
            5000 + n // 10,
            datetime(2026, 3, 1, tzinfo=UTC),
            n % 10,
            "public",
            "orders",
            "insert",
            json.dumps({"id": n}),
            None,
            json.dumps({"id": n, "name": f"n{n}"}),
            [],
        )
        for n in range(count)
    ]
    return spark.createDataFrame(rows, CHANGE).coalesce(1)


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
def test_changes_are_published_once_however_often_they_are_written(
    spark: SparkSession, server: Nats, encoding: str
) -> None:
    for _ in range(2):
        writer = changes(spark, 95).write.format("headwater.nats").mode("append")
        writer.option("url", server.url).option("encoding", encoding).save()
    found = stored(server.url)
    assert [codec.decode(payload)["data"]["id"] for _, _, payload in found] == list(range(95))
    assert found[12][:2] == ("cdc.orders.insert", "0000000000001389-00000002-public.orders-insert")


def test_packed_changes_are_one_message_for_each_transaction(spark: SparkSession, server: Nats) -> None:
    writer = changes(spark, 95).write.format("headwater.nats").mode("append")
    writer.option("url", server.url).option("shape", "packed").save()
    found = stored(server.url)
    assert len(found) == 10
    assert {subject for subject, _, _ in found} == {"cdc.orders.insert.batch"}
    events = [event for _, _, payload in found for event in codec.decode(payload)]
    assert [event["data"]["id"] for event in events] == list(range(95))


def test_a_stream_of_ready_messages_is_published_once_also_without_its_checkpoint(
    spark: SparkSession, server: Nats, tmp_path: Path
) -> None:
    columns = "subject string, msg_id string, payload string, headers map<string, string>"
    rows = [("cdc.a.insert", f"id-{n}", f"payload {n}", {"Kind": "test"}) for n in range(50)]
    spark.createDataFrame(rows, columns).coalesce(1).write.json(str(tmp_path / "in"))
    for run in range(2):
        query = (
            spark.readStream.schema(columns)
            .json(str(tmp_path / "in"))
            .writeStream.format("headwater.nats")
            .option("url", server.url)
            .option("checkpointLocation", str(tmp_path / f"checkpoint{run}"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)
    assert [(i, p) for _, i, p in stored(server.url)] == [(f"id-{n}", f"payload {n}".encode()) for n in range(50)]


def test_without_rows_not_even_a_connection_is_made(spark: SparkSession) -> None:
    nobody = "nats://127.0.0.1:1"
    writer = changes(spark, 1).limit(0).write.format("headwater.nats").mode("append")
    writer.option("url", nobody).option("retry_seconds", "0.1").save()


def test_rows_that_are_neither_messages_nor_changes_are_refused() -> None:
    from pyspark.sql.types import LongType, StructField, StructType

    from headwater.spark.formats.nats import SinkOptions

    with pytest.raises(InvalidRequest, match="neither messages"):
        SinkOptions.parse({"url": "nats://x"}, StructType([StructField("id", LongType())]))
