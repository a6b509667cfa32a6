"""Does Spark read the log whole, once, in order, and only what is stable?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import EqualTo, GreaterThan, In
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import headwater
from headwater import Event, NewEvent
from headwater.errors import PositionExpired, TopicNotFound
from headwater.spark.arrow import EVENT
from headwater.spark.formats.log import LogReader, LogSource, LogStreamReader, PositionRanges
from patience import PATIENCE_SECONDS


def reader(dsn: str, **options: str) -> LogReader:
    return LogSource({"dsn": dsn} | options).reader(EVENT)


def stream(dsn: str, **options: str) -> LogStreamReader:
    return LogSource({"dsn": dsn, "waitSeconds": "0"} | options).streamReader(EVENT)


def positions_of(one: LogReader | LogStreamReader, parts: Any) -> list[int]:
    """What the tasks of a read bring."""
    return [row for part in parts for batch in one.read(part) for row in batch.column("position").to_pylist()]


def publish(log: headwater.Headwater, topic: str, count: int) -> list[int]:
    made = log.publish_batch(topic, [NewEvent({"n": n}, key=f"k{n % 3}", type=f"t{n % 2}") for n in range(count)])
    return [position for position in made if position is not None]


# Without a session: what the source decides, and what it asks of Postgres.


def test_a_read_is_shared_out_and_gives_every_event_in_order(log: headwater.Headwater, topic: str, dsn: str) -> None:
    published = publish(log, topic, 100)
    one = reader(dsn, topics=topic, partitions="4", after=str(published[9]), upTo=str(published[89]))
    parts = one.partitions()
    assert len(parts) == 4
    assert positions_of(one, parts) == published[10:90]


def test_several_topics_come_in_the_order_of_the_log(
    log: headwater.Headwater, topic: str, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = log.create_topic(f"{topic}-other").name
    left_out = log.create_topic(f"{topic}-left-out").name
    published = [publish(log, name, 3) for name in (topic, left_out, other, topic)]
    monkeypatch.setattr("headwater.spark.formats.log.WINDOW", 4)
    one = reader(dsn, topics=f"{other},{topic}")
    assert positions_of(one, one.partitions()) == published[0] + published[2] + published[3]
    # The whole log has them all.
    whole = reader(dsn, after=str(published[0][0] - 1))
    assert positions_of(whole, whole.partitions()) == list(chain.from_iterable(published))


def test_conditions_are_answered_by_postgres(log: headwater.Headwater, topic: str, dsn: str) -> None:
    odd = 'it\'s \\ "odd", {so}'
    publish(log, topic, 4)
    wanted = log.publish(topic, 1, type=odd, key=b"\x00'\\\xff")
    log.publish(topic, 1, type=odd, key="other")
    log.publish(topic, 1, type="other", key=b"\x00'\\\xff")
    one = reader(dsn)
    left = one.pushFilters(
        [In(("type",), (odd, "none")), EqualTo(("key",), b"\x00'\\\xff"), EqualTo(("topic",), topic)]
    )
    assert left == []
    assert positions_of(one, one.partitions()) == [wanted]
    nowhere = reader(dsn)
    nowhere.pushFilters([EqualTo(("topic",), "no-such-topic")])
    assert positions_of(nowhere, nowhere.partitions()) == []
    late = reader(dsn, topics=topic)
    late.pushFilters([GreaterThan(("published_at",), datetime.now(UTC) + timedelta(hours=1))])
    assert positions_of(late, late.partitions()) == []


def test_times_bound_a_read(log: headwater.Headwater, topic: str, dsn: str, connection: psycopg.Connection) -> None:
    published = publish(log, topic, 3)
    for hours, position in enumerate(published):
        connection.execute(
            "update headwater_internal.event set published_at = %s where position = %s",
            (datetime(2026, 1, 1, hours, tzinfo=UTC), position),
        )
    one = reader(dsn, topics=topic, since="2026-01-01T01:00:00Z", until="2026-01-01T02:00:00Z")
    assert positions_of(one, one.partitions()) == [published[1]]


def test_a_topic_that_is_not_there_is_an_error_that_says_so(dsn: str) -> None:
    with pytest.raises(TopicNotFound):
        reader(dsn, topics="no-such-topic").partitions()


def test_an_event_in_flight_holds_the_stream_back_and_is_not_skipped(
    log: headwater.Headwater, topic: str, dsn: str
) -> None:
    one = stream(dsn, topics=topic)
    start = one.initialOffset()
    before = publish(log, topic, 1)
    with log.transaction() as open_one:
        in_flight = log.publish(topic, "late", connection=open_one)
        after = publish(log, topic, 1)
        end = one.latestOffset(start, ReadAllAvailable())
        assert positions_of(one, one.partitions(start, end)) == before
        assert one.latestOffset(end, ReadAllAvailable()) == end
    last = one.latestOffset(end, ReadAllAvailable())
    assert positions_of(one, one.partitions(end, last)) == [in_flight, *after]
    one.stop()


@pytest.mark.parametrize("whole_log", [False, True])
def test_a_batch_holds_no_more_events_than_allowed(
    log: headwater.Headwater, topic: str, dsn: str, whole_log: bool
) -> None:
    start_at = log.state().stable
    published = publish(log, topic, 10)
    one = stream(dsn, after=str(start_at), **({} if whole_log else {"topics": topic}))
    start = one.initialOffset()
    got = []
    while (end := one.latestOffset(start, ReadMaxRows(4))) != start:
        got.append(positions_of(one, one.partitions(start, end)))
        start = end
    assert list(chain.from_iterable(got)) == published
    assert [len(batch) for batch in got] == [4, 4, 2]
    one.stop()


def test_events_of_other_topics_make_no_batch(log: headwater.Headwater, topic: str, dsn: str) -> None:
    one = stream(dsn, topics=topic, fromEnd="true")
    start = one.initialOffset()
    publish(log, log.create_topic(f"{topic}-other").name, 5)
    assert one.latestOffset(start, ReadMaxRows(10)) == start
    one.stop()


def test_a_stream_without_news_waits_for_some(log: headwater.Headwater, topic: str, dsn: str) -> None:
    one = stream(dsn, topics=topic, fromEnd="true", waitSeconds="20")
    start = one.initialOffset()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(one.latestOffset, start, ReadMaxRows(10))
        other = log.publish(log.create_topic(f"{topic}-other").name, "no news")
        (news,) = publish(log, topic, 1)
        assert answer.result(timeout=PATIENCE_SECONDS) == {**start, "position": news}
    assert other is not None
    assert start["position"] < other < news
    one.stop()


def test_the_target_of_a_run_that_ends_is_what_was_stable_at_its_start(
    log: headwater.Headwater, topic: str, dsn: str
) -> None:
    one = stream(dsn, topics=topic, waitSeconds="60")
    start = one.initialOffset()
    published = publish(log, topic, 3)
    one.prepareForTriggerAvailableNow()
    publish(log, topic, 3)
    end = one.latestOffset(start, ReadMaxRows(100))
    assert positions_of(one, one.partitions(start, end)) == published
    # And it does not wait for more.
    assert one.latestOffset(end, ReadMaxRows(100)) == end
    one.stop()


@pytest.fixture
def short_lived(admin_dsn: str, template: str) -> Iterator[str]:
    """A log of which retention has taken the first events."""
    name = f"{template}_short_lived"
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template)))
        dsn = conninfo.make_conninfo(admin_dsn, dbname=name)
        with headwater.connect(dsn) as log, psycopg.connect(dsn, autocommit=True) as connection:
            log.create_topic("news", retention=timedelta(days=1))
            publish(log, "news", 5)
            # For the sake of which the segment stays.
            publish(log, log.create_topic("kept").name, 1)
            older = (
                "update headwater_internal.segment set opened_at = opened_at - interval '9 days', "
                "closed_at = closed_at - interval '9 days'"
            )
            for _ in range(3):
                log.maintain()
                connection.execute(older)
            log.maintain()
            publish(log, "news", 2)
        yield dsn
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def test_what_retention_took_is_an_error_unless_it_may_be_skipped(short_lived: str) -> None:
    with headwater.connect(short_lived) as log:
        kept = [event.position for event in log.read("news")]
    assert len(kept) == 2
    with pytest.raises(PositionExpired):
        reader(short_lived, topics="news", after="1").partitions()
    for options in ({}, {"after": "1", "skipExpired": "true"}):
        one = reader(short_lived, topics="news", **options)
        assert positions_of(one, one.partitions()) == kept
    lost = stream(short_lived, topics="news", after="1")
    start = lost.initialOffset()
    with pytest.raises(PositionExpired):
        lost.partitions(start, lost.latestOffset(start, ReadAllAvailable()))
    lost.stop()


def test_retention_that_comes_between_planning_and_reading_is_noticed(short_lived: str) -> None:
    one = stream(short_lived, topics="news", after="1")
    with pytest.raises(PositionExpired):
        positions_of(one, [PositionRanges(("news",), ((1, 10**9),), gone_to=0)])


# With a session: that it is wired right.


def frame(spark: SparkSession, dsn: str, **options: str) -> DataFrame:
    return spark.read.format("headwater").options(dsn=dsn, **options).load()


def as_row(event: Event) -> dict[str, Any]:
    return event._asdict()


def test_spark_reads_what_was_published(spark: SparkSession, log: headwater.Headwater, topic: str, dsn: str) -> None:
    partitions = log.create_topic(f"{topic}-partitions", kind="sequenced", partitions=3).name
    log.publish(topic, {"ü": [1, None]}, key="k", type="t", routing_key="a.b", headers={"h": 1}, event_id="e-1")
    log.publish(topic, None)
    log.publish(topic, b"\x00\xff", content_type="image/png")
    publish(log, log.create_topic(f"{topic}-other").name, 1)
    publish(log, partitions, 7)
    rows = frame(spark, dsn, topics=f"{topic},{partitions}", partitions="3").orderBy("position").collect()
    events = log.read([topic, partitions])
    assert len(rows) == 10
    for row, event in zip(rows, events, strict=True):
        got = row.asDict() | {"published_at": row.published_at.astimezone(UTC)}
        got["headers"] = None if row.headers is None else json.loads(row.headers)
        assert {name: bytes(v) if isinstance(v, bytearray) else v for name, v in got.items()} == as_row(event)


def test_spark_hands_conditions_down(spark: SparkSession, log: headwater.Headwater, topic: str, dsn: str) -> None:
    other = log.create_topic(f"{topic}-other").name
    published = publish(log, topic, 20)
    publish(log, other, 20)
    middle = log.read(topic, after=published[9], batch_size=1)[0]
    found = frame(spark, dsn).where(
        (F.col("topic") == topic)
        & F.col("type").isin("t1", "t7")
        & (F.col("key") == F.lit(b"k1"))
        & (F.col("position") > published[2])
        & (F.col("published_at") <= F.lit(middle.published_at))
    )
    events = [event for event in log.read(topic, after=published[2]) if event.published_at <= middle.published_at]
    wanted = [event.position for event in events if event.type == "t1" and event.key == b"k1"]
    assert wanted
    assert [row.position for row in found.select("position").collect()] == wanted
    plan = found._jdf.queryExecution().executedPlan().toString()
    assert "published_at#" not in plan.partition("Filter")[2].partition("\n")[0]


def test_a_stream_sees_every_event_once_in_order_also_across_a_restart(
    spark: SparkSession, log: headwater.Headwater, topic: str, dsn: str, tmp_path: Path
) -> None:
    batches: list[list[int]] = []

    def note(batch: DataFrame, number: int) -> None:
        batches.append([row.position for row in batch.select("position").collect()])

    def run() -> None:
        query = (
            spark.readStream.format("headwater")
            .options(dsn=dsn, topics=topic, maxEventsPerTrigger="8")
            .load()
            .writeStream.foreachBatch(note)
            .option("checkpointLocation", str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(60)

    published = publish(log, topic, 12)
    run()
    assert batches == [published[:8], published[8:]]
    with log.transaction() as open_one:
        in_flight = log.publish(topic, "late", connection=open_one)
        after = publish(log, topic, 1)
        run()
    assert batches[2:] == []
    run()
    assert batches[2:] == [[in_flight, *after]]


def test_the_page_about_spark_does_what_it_shows(
    spark: SparkSession, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "spark.md").read_text()
    (source,) = re.findall(r"^```python run\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.setenv("HEADWATER_DSN", dsn)
    names: dict[str, Any] = {"__name__": "a page"}
    try:
        exec(compile(source, "docs/how-to/spark.md", "exec"), names)
    finally:
        if "log" in names:
            names["log"].close()
