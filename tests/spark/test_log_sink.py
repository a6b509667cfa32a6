"""Does what Spark writes enter the log exactly once, whole and in order, whatever fails on the way?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import conninfo, sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.datasource import ReadMaxRows

import headwater
from headwater import NewEvent
from headwater.calls import pipelines
from headwater.errors import NotAllowed, StagedEventsLost, TopicNotFound
from headwater.spark.arrow import EVENT
from headwater.spark.formats.log import LogSource
from headwater.spark.formats.log_writer import StagedAttempt, discard, publish, stage


def staged_by(
    dsn: str, payloads: Sequence[str], *, topic: str, epoch: int = 0, part: int = 0, writer: str = "w", **columns: Any
) -> StagedAttempt:
    batch = pa.RecordBatch.from_pydict({"payload": list(payloads)} | columns)
    return stage(dsn, [batch], topic=topic, writer=f"{writer}-{topic}", epoch=epoch, part=part)


def payloads(log: headwater.Headwater, topic: str) -> list[str]:
    return [bytes(event.payload or b"").decode() for event in log.read(topic, batch_size=1000)]


def left_behind(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("select count(*) from headwater_internal.staged").fetchone()
    assert row is not None
    return int(row[0])


# Without a session: staging and publishing themselves.


def test_an_epoch_is_published_once_in_the_order_of_its_parts(
    log: headwater.Headwater, topic: str, dsn: str, connection: psycopg.Connection[Any]
) -> None:
    # Parts end in any order, and one has been tried twice.
    late = staged_by(dsn, ["c", "d"], topic=topic, part=1)
    staged_by(dsn, ["a", "b"], topic=topic, part=0)
    early = staged_by(dsn, ["a", "b"], topic=topic, part=0)
    assert payloads(log, topic) == []
    assert publish(dsn, [late, early], replayable=True) == 4
    assert payloads(log, topic) == ["a", "b", "c", "d"]
    assert left_behind(connection) == 0


def test_a_replayed_epoch_adds_nothing_and_leaves_nothing(
    log: headwater.Headwater, topic: str, dsn: str, connection: psycopg.Connection[Any]
) -> None:
    for epoch in (0, 1):
        assert publish(dsn, [staged_by(dsn, [f"{epoch}"], topic=topic, epoch=epoch)], replayable=True) == 1
    for epoch in (1, 0):
        assert publish(dsn, [staged_by(dsn, [f"{epoch}"], topic=topic, epoch=epoch)], replayable=True) is None
    assert payloads(log, topic) == ["0", "1"]
    assert left_behind(connection) == 0
    # Another writer counts its own epochs.
    assert publish(dsn, [staged_by(dsn, ["other"], topic=topic, writer="v")], replayable=True) == 1


def test_every_part_of_an_event_arrives(log: headwater.Headwater, topic: str, dsn: str) -> None:
    whole = staged_by(
        dsn,
        ["{}", "ü"],
        topic=topic,
        key=["k", None],
        type=["t", None],
        routing_key=["a.b", None],
        headers=['{"h": 1}', None],
        content_type=["application/json", None],
        event_id=["e-1", None],
    )
    again = staged_by(dsn, ["{}"], topic=topic, epoch=1, event_id=["e-1"])
    publish(dsn, [whole], replayable=True)
    publish(dsn, [again], replayable=True)
    first, second = log.read(topic)
    assert (first.payload, first.key, first.type, first.routing_key) == (b"{}", b"k", "t", "a.b")
    assert (first.headers, first.content_type, first.event_id) == ({"h": 1}, "application/json", "e-1")
    assert second[4:11] == (None, None, None, None, None, "ü".encode(), None)


def test_sequenced_topics_get_dense_offsets_in_order(log: headwater.Headwater, topic: str, dsn: str) -> None:
    partitions = log.create_topic(f"{topic}-partitions", kind="sequenced", partitions=3).name
    log.publish(partitions, "before", key="k1")
    keys = [f"k{n % 5}" for n in range(50)]
    parts = [
        staged_by(dsn, [f"{part}-{n}" for n in range(50)], topic=partitions, part=part, key=keys) for part in range(2)
    ]
    publish(dsn, parts, replayable=True)
    events = log.read(partitions, batch_size=1000)
    assert len(events) == 101
    for partition in range(3):
        offsets = [event.topic_offset for event in events if event.partition == partition]
        assert offsets == list(range(len(offsets)))
    for key in set(keys):
        got = [bytes(event.payload or b"").decode() for event in events if event.key == key.encode()]
        wanted = [f"{part}-{n}" for part in range(2) for n in range(50) if keys[n] == key]
        assert [payload for payload in got if payload != '"before"'] == wanted


def test_events_that_the_server_lost_are_not_taken_for_an_empty_batch(
    log: headwater.Headwater, topic: str, dsn: str, connection: psycopg.Connection[Any]
) -> None:
    message = staged_by(dsn, ["a", "b"], topic=topic)
    # What a crash does to an unlogged table.
    connection.execute("truncate headwater_internal.staged")
    with pytest.raises(StagedEventsLost):
        publish(dsn, [message], replayable=True)
    assert publish(dsn, [staged_by(dsn, ["a", "b"], topic=topic)], replayable=True) == 2
    assert payloads(log, topic) == ["a", "b"]


def test_a_failed_publish_leaves_the_epoch_open(log: headwater.Headwater, topic: str, dsn: str) -> None:
    fine = staged_by(dsn, ["a"], topic=topic)
    nowhere = stage(
        dsn, [pa.RecordBatch.from_pydict({"payload": ["b"]})], topic="gone", writer=fine.writer, epoch=0, part=1
    )
    with pytest.raises(TopicNotFound):
        publish(dsn, [fine, nowhere], replayable=True)
    assert payloads(log, topic) == []
    assert publish(dsn, [fine], replayable=True) == 1


def test_an_abort_takes_back_what_was_staged_and_never_what_was_published(
    log: headwater.Headwater, topic: str, dsn: str, connection: psycopg.Connection[Any]
) -> None:
    message = staged_by(dsn, ["a"], topic=topic)
    discard(dsn, [message])
    assert left_behind(connection) == 0
    published = staged_by(dsn, ["b"], topic=topic, epoch=1)
    publish(dsn, [published], replayable=True)
    # Spark aborts also when the publishing itself was heard to fail.
    discard(dsn, [published])
    assert payloads(log, topic) == ["b"]


def test_maintenance_clears_what_dead_tasks_left(
    log: headwater.Headwater, topic: str, dsn: str, connection: psycopg.Connection[Any]
) -> None:
    publish(dsn, [staged_by(dsn, ["a"], topic=topic, writer="once")], replayable=False)
    publish(dsn, [staged_by(dsn, ["a"], topic=topic, writer="often")], replayable=True)
    staged_by(dsn, ["old"], topic=topic, epoch=8)
    connection.execute("update headwater_internal.staged set staged_at = staged_at - interval '2 days'")
    connection.execute("update headwater_internal.writer_epoch set published_at = published_at - interval '2 days'")
    staged_by(dsn, ["young"], topic=topic, epoch=9)
    log.maintain()
    assert left_behind(connection) == 1
    connection.execute("delete from headwater_internal.staged")
    notes = connection.execute(
        "select writer from headwater_internal.writer_epoch where writer like %s", (f"%{topic}",)
    )
    assert notes.fetchall() == [(f"often-{topic}",)]


def test_two_runners_of_one_epoch_publish_it_once(
    log: headwater.Headwater, topic: str, dsn: str, connection: psycopg.Connection[Any]
) -> None:
    one, other = (staged_by(dsn, ["a"], topic=topic) for _ in range(2))
    with psycopg.connect(dsn) as first:
        call = pipelines.publish_epoch(one.writer, 0, attempts=[one.attempt], expected_events=1, replayable=True)
        assert first.execute(call.sql, call.params).fetchone() == (1,)
        connection.execute("set lock_timeout = '50ms'")
        late = pipelines.publish_epoch(one.writer, 0, attempts=[other.attempt], expected_events=1, replayable=True)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            connection.execute(late.sql, late.params)
    assert publish(dsn, [other], replayable=True) is None
    assert payloads(log, topic) == ["a"]


def test_a_publisher_may_write_and_a_consumer_may_read(
    log: headwater.Headwater, topic: str, dsn: str, admin_dsn: str
) -> None:
    users = {role: f"{role}_{os.getpid()}" for role in ("headwater_publisher", "headwater_consumer")}
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        try:
            for role, user in users.items():
                admin.execute(
                    sql.SQL("create role {} login password 'secret' in role {}").format(
                        sql.Identifier(user), sql.Identifier(role)
                    )
                )
            publisher, consumer = (conninfo.make_conninfo(dsn, user=user, password="secret") for user in users.values())
            message = staged_by(publisher, ["a"], topic=topic)
            with pytest.raises(NotAllowed):
                staged_by(consumer, ["a"], topic=topic)
            assert publish(publisher, [message], replayable=True) == 1
            discard(publisher, [staged_by(publisher, ["b"], topic=topic, epoch=1)])
            reader = LogSource({"dsn": consumer, "topics": topic}).streamReader(EVENT)
            start = reader.initialOffset()
            (part,) = reader.partitions(start, reader.latestOffset(start, ReadMaxRows(10)))
            assert [batch.column("payload").to_pylist() for batch in reader.read(part)] == [[b"a"]]
            reader.stop()
        finally:
            for user in users.values():
                admin.execute(sql.SQL("drop role if exists {}").format(sql.Identifier(user)))


# With a session: that it is wired right.


def test_spark_writes_a_frame_in_order(
    spark: SparkSession, log: headwater.Headwater, topic: str, dsn: str, connection: psycopg.Connection[Any]
) -> None:
    partitions = log.create_topic(f"{topic}-partitions", kind="sequenced").name
    frame = (
        spark.range(0, 40, numPartitions=3)
        .withColumn("data", F.to_json(F.struct("id")))
        .withColumn("topic", F.when(F.col("id") % 2 == 0, topic).otherwise(partitions))
        .select("topic", "data", F.col("id").cast("string").alias("key"))
    )
    for _ in range(2):
        # Named, so that the second time is a repetition.
        frame.write.format("headwater").mode("append").options(dsn=dsn, writer=f"load-{topic}").save()
    assert payloads(log, topic) == [f'{{"id":{n}}}' for n in range(0, 40, 2)]
    assert payloads(log, partitions) == [f'{{"id":{n}}}' for n in range(1, 40, 2)]
    assert [event.topic_offset for event in log.read(partitions)] == list(range(20))
    assert left_behind(connection) == 0


def test_a_task_that_fails_leaves_nothing(
    spark: SparkSession, log: headwater.Headwater, topic: str, dsn: str, connection: psycopg.Connection[Any]
) -> None:
    frame = spark.range(0, 10, numPartitions=2).select(F.when(F.col("id") == 9, "{").otherwise("1").alias("data"))
    with pytest.raises(Exception, match="InvalidEvent"):
        frame.write.format("headwater").mode("append").options(dsn=dsn, topic=topic).save()
    assert payloads(log, topic) == []
    assert left_behind(connection) == 0


def copy_stream(spark: SparkSession, dsn: str, source: str, target: str, checkpoint: Path) -> None:
    frame: DataFrame = (
        spark.readStream.format("headwater").options(dsn=dsn, topics=source, maxEventsPerTrigger="6").load()
    )
    query = (
        frame.select("payload", "key")
        .writeStream.format("headwater")
        .options(dsn=dsn, topic=target, checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)


def test_a_crash_between_publishing_and_sparks_own_commit_repeats_nothing(
    spark: SparkSession, log: headwater.Headwater, topic: str, dsn: str, tmp_path: Path
) -> None:
    target = log.create_topic(f"{topic}-copy").name
    log.publish_batch(topic, [NewEvent(n) for n in range(10)])
    copy_stream(spark, dsn, topic, target, tmp_path)
    wanted = [str(n) for n in range(10)]
    assert payloads(log, target) == wanted
    # As if the driver had died after the events were in the log and before Spark noted it: that batch runs again.
    commits = tmp_path / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    for path in (commits / str(last), commits / f".{last}.crc"):
        path.unlink(missing_ok=True)
    log.publish(topic, 10)
    copy_stream(spark, dsn, topic, target, tmp_path)
    assert payloads(log, target) == [*wanted, "10"]
    shutil.rmtree(tmp_path)
