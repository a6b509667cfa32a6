"""Is the log read as if retention had taken nothing, where an archive has what it took?"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from archiving import DAY, ArchivedLog, table_of
from psycopg import conninfo, sql
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, In, LessThanOrEqual
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from headwater.calls import archives as archive_calls
from headwater.errors import InvalidRequest, PositionExpired
from headwater.spark.arrow import EVENT
from headwater.spark.formats import log as formats_log
from headwater.spark.formats.log import LogReader, LogSource, LogStreamReader
from headwater.spark.pipelines.batch import Batch, SinkContext
from headwater.spark.sinks import archive
from headwater.spark.sinks.lake import LakeSink

_numbers = itertools.count()


@pytest.fixture
def archived(admin_dsn: str, template: str, tmp_path: Path) -> Iterator[ArchivedLog]:
    """A log for each test: retention is about the log as a whole."""
    name = f"headwater_seam_{next(_numbers)}_{template}"
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template)))
        log = ArchivedLog(conninfo.make_conninfo(admin_dsn, dbname=name), tmp_path / "lake")
        yield log
        log.close()
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def seam(archived: ArchivedLog) -> ArchivedLog:
    """Days of events of three topics, of which retention took one to the last day, one in part, and one not at all."""
    # Said when a test fails, to try the same again.
    print(f"random.seed({(seed := random.randrange(10**9))})")
    random.seed(seed)
    for topic, days in (("short", 1), ("longer", 4), ("forever", None)):
        archived.log.create_topic(topic, retention=None if days is None else days * DAY)
    archived.register()
    for _ in range(6):
        for topic in random.sample(("short", "longer", "forever") * 2, k=6):
            archived.publish(topic, random.randint(1, 9))
        archived.archive()
        archived.pass_days(1)
    for topic in ("short", "longer", "forever"):
        archived.publish(topic, 3)
    expired = {kept.topic: kept.expired_to for kept in archived.log.run(archive_calls.kept_topics(None))}
    assert expired["short"] > expired["longer"] > expired["forever"] == 0
    return archived


def reader(log: ArchivedLog, **options: str) -> LogReader:
    return LogSource({"dsn": log.dsn} | options).reader(EVENT)


def stream(log: ArchivedLog, **options: str) -> LogStreamReader:
    return LogSource({"dsn": log.dsn, "waitSeconds": "0"} | options).streamReader(EVENT)


def positions(one: LogReader) -> list[int]:
    return table_of(one)["position"].to_pylist()  # type: ignore[no-any-return]


def batches_of(one: LogStreamReader, limit: Any) -> list[list[int]]:
    """What the batches of a stream bring until there is nothing more."""
    start, found = one.initialOffset(), []
    while (end := one.latestOffset(start, limit)) != start:
        parts = one.partitions(start, end)
        found.append([p for part in parts for batch in one.read(part) for p in batch.column("position").to_pylist()])
        start = end
    one.stop()
    return found


TOPICS = [("short",), ("longer",), ("forever", "short"), ("longer", "short", "forever"), ()]


@pytest.mark.parametrize("topics", TOPICS, ids=",".join)
def test_a_batch_read_has_no_seam(seam: ArchivedLog, topics: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats_log, "WINDOW", 1_000_003)
    wanted = seam.positions(*topics)
    named = {"topics": ",".join(topics)} if topics else {}
    for partitions in ("1", "2", "7"):
        assert positions(reader(seam, partitions=partitions, **named)) == wanted
    after, up_to = sorted(random.sample(wanted, 2))
    some = [position for position in wanted if after < position <= up_to]
    assert positions(reader(seam, after=str(after), upTo=str(up_to), partitions="3", **named)) == some
    # Compaction mixes the files; the events come as before.
    seam.compact()
    assert positions(reader(seam, partitions="2", **named)) == wanted


@pytest.mark.parametrize("topics", [("short",), ("forever", "short"), ()], ids=",".join)
def test_a_stream_has_no_seam_and_keeps_its_limits(seam: ArchivedLog, topics: tuple[str, ...]) -> None:
    seam.compact()
    wanted = seam.positions(*topics)
    named = {"topics": ",".join(topics)} if topics else {}
    assert batches_of(stream(seam, **named), ReadAllAvailable()) == [wanted]
    found = batches_of(stream(seam, **named), ReadMaxRows(20))
    assert list(itertools.chain.from_iterable(found)) == wanted
    # From the archive and from the log each no more than that.
    assert max(map(len, found)) <= 40
    assert len(found) >= len(wanted) / 40
    small = batches_of(stream(seam, maxBytesPerTrigger="300", **named), ReadAllAvailable())
    assert list(itertools.chain.from_iterable(small)) == wanted
    assert len(small) > 2


def test_an_event_from_the_archive_is_what_it_was_in_the_log(archived: ArchivedLog) -> None:
    log = archived.log
    topic = log.create_topic("partitions", kind="sequenced", partitions=2, retention=DAY).name
    archived.register()
    log.publish(topic, b"\x00\xff", key=b"\xfe", type="ünï", routing_key="a.b", headers={"a": [1, {"b": None}]})
    log.publish(topic, None, event_id="one")
    log.publish(topic, {"a": 1}, key="k")
    before = table_of(reader(archived)).to_pylist()
    archived.archive()
    archived.pass_days(1)
    archived.pass_days(5)
    assert archived.kept_in_log(topic) == []
    assert table_of(reader(archived)).to_pylist() == before
    assert len(before) == 3


def test_conditions_and_times_mean_the_same_on_both_sides(archived: ArchivedLog) -> None:
    for topic, retention in (("short", DAY), ("forever", None)):
        archived.log.create_topic(topic, retention=retention)
    archived.register()
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    for day in range(4):
        for topic in ("short", "forever"):
            for minute, position in enumerate(archived.publish(topic, 4)):
                archived.connection.execute(
                    "update headwater_internal.event set published_at = %s where position = %s",
                    (noon + day * DAY + timedelta(minutes=5 * minute), position),
                )
        if day < 3:
            archived.archive()
            archived.pass_days(1)
    assert len(archived.kept_in_log("short")) < len(archived.kept_in_log("forever")) == 16
    everything = table_of(reader(archived)).to_pylist()
    assert len(everything) == 32

    def meet(holds: Any) -> list[int]:
        return [event["position"] for event in everything if holds(event)]

    middle = everything[13]["position"]
    for filters, holds in (
        ([EqualTo(("type",), "t1")], lambda e: e["type"] == "t1"),
        ([In(("key",), (b"k0", b"k2"))], lambda e: e["key"] in (b"k0", b"k2")),
        (
            [EqualTo(("topic",), "short"), GreaterThan(("position",), middle)],
            lambda e: e["topic"] == "short" and e["position"] > middle,
        ),
        ([LessThanOrEqual(("position",), middle)], lambda e: e["position"] <= middle),
        ([GreaterThanOrEqual(("published_at",), noon + DAY)], lambda e: e["published_at"] >= noon + DAY),
    ):
        one = reader(archived)
        assert one.pushFilters(filters) == []
        assert positions(one) == meet(holds)
    for start in (noon, noon + DAY, noon + DAY + timedelta(minutes=10), noon + 3 * DAY):
        since, until = start.isoformat(), (start + DAY).isoformat()
        for topics in ({}, {"topics": "short"}):
            asked = ("short",) if topics else ("short", "forever")
            wanted = meet(lambda e, s=start, a=asked: e["published_at"] >= s and e["topic"] in a)
            assert positions(reader(archived, since=since, **topics)) == wanted
            assert list(itertools.chain(*batches_of(stream(archived, since=since, **topics), ReadMaxRows(5)))) == wanted
            day = meet(lambda e, s=start, a=asked: s <= e["published_at"] < s + DAY and e["topic"] in a)
            assert positions(reader(archived, since=since, until=until, **topics)) == day


def test_what_is_before_the_archive_is_gone_or_skipped(archived: ArchivedLog) -> None:
    archived.log.create_topic("short", retention=DAY)
    lost = archived.publish("short", 3)
    archived.pass_days(1)
    archived.pass_days(5)
    archived.register()
    there = archived.publish("short", 3)
    archived.archive()
    archived.pass_days(1)
    archived.pass_days(5)
    assert archived.kept_in_log("short") == []
    new = archived.publish("short", 2)
    assert positions(reader(archived)) == there + new
    assert positions(reader(archived, after=str(lost[-1]))) == there + new
    assert positions(reader(archived, after=str(lost[0]), skipExpired="true")) == there + new
    for options in ({}, {"topics": "short"}):
        with pytest.raises(PositionExpired) as gone:
            reader(archived, after=str(lost[0]), **options).partitions()
        assert gone.value.earliest_position == lost[-1] + 1
        late = stream(archived, after=str(lost[0]), **options)
        start = late.initialOffset()
        with pytest.raises(PositionExpired):
            late.partitions(start, late.latestOffset(start, ReadAllAvailable()))
        late.stop()
    # Who does not want the archive is told as if there were none.
    assert positions(reader(archived, archive="false")) == new
    with pytest.raises(PositionExpired):
        reader(archived, after=str(lost[-1]), archive="false").partitions()


@pytest.mark.parametrize("topics", ["short", "short,forever"])
def test_retention_between_planning_and_reading_is_made_up_for(archived: ArchivedLog, topics: str) -> None:
    archived.log.create_topic("short", retention=DAY)
    archived.log.create_topic("forever")
    archived.register()
    for _ in range(3):
        archived.publish("short", 5)
        archived.publish("forever", 5)
        archived.archive()
        archived.pass_days(0)
    one = reader(archived, topics=topics, partitions="2")
    planned = one.partitions()
    archived.pass_days(1)
    archived.pass_days(5)
    assert archived.kept_in_log("short") == []
    found = [p for part in planned for batch in one.read(part) for p in batch.column("position").to_pylist()]
    assert found == archived.positions(*topics.split(","))


@pytest.mark.parametrize("topics", ["short", "short,forever"])
def test_retention_during_a_read_is_noticed_and_the_next_try_finds_all(
    archived: ArchivedLog, topics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived.log.create_topic("short", retention=DAY)
    archived.log.create_topic("forever")
    archived.register()
    archived.publish("short", 5)
    archived.publish("forever", 5)
    archived.archive()
    archived.pass_days(1)
    one = reader(archived, topics=topics, partitions="1")
    (part,) = one.partitions()
    scan = formats_log._scan

    def overtaken(*arguments: Any) -> Iterator[pa.RecordBatch]:
        archived.pass_days(5)
        return scan(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(formats_log, "_scan", overtaken)
        with pytest.raises(PositionExpired, match="repeat the read"):
            list(one.read(part))
    found = [p for batch in one.read(part) for p in batch.column("position").to_pylist()]
    assert found == archived.positions(*topics.split(","))


def test_events_of_a_deleted_topic_are_not_read_as_those_of_a_new_one(archived: ArchivedLog) -> None:
    for _ in range(2):
        archived.log.create_topic("again", retention=DAY)
        archived.register()
        found = archived.publish("again", 3)
        archived.archive()
        archived.pass_days(1)
        archived.pass_days(5)
        assert positions(reader(archived)) == found
        assert archived.kept_in_log("again") == []
        archived.log.delete_topic("again")
        archived.log.maintain()
        assert positions(reader(archived)) == []


def test_topics_in_different_archives_are_read_as_one_log(archived: ArchivedLog) -> None:
    for topic in ("a", "b"):
        archived.log.create_topic(topic, retention=DAY)
        archived.register(f"of-{topic}", topics=(topic,))
    for _ in range(4):
        for topic in random.choices("ab", k=5):
            archived.publish(topic, 2)
        for topic in ("a", "b"):
            archived.archive(f"of-{topic}", topics=(topic,))
        archived.pass_days(1)
    assert len(archived.kept_in_log("a")) < len(archived.positions("a"))
    assert positions(reader(archived, partitions="3")) == archived.positions()


def test_an_archive_that_is_not_there_is_an_error_that_names_it(seam: ArchivedLog) -> None:
    shutil.rmtree(seam.directory)
    with pytest.raises(InvalidRequest, match=str(seam.directory)):
        reader(seam).partitions()
    assert positions(reader(seam, archive="false", skipExpired="true")) != []


@pytest.mark.parametrize(
    ("source", "options", "columns", "message"),
    [
        ("changes", {}, None, "reads changes"),
        ("log", {"since": "2026-01-01T00:00:00Z"}, None, "since would exclude some"),
        ("log", {"skipExpired": "true"}, None, "skipExpired"),
        ("log", {}, ["position", "payload"], "lack topic"),
    ],
)
def test_what_cannot_stand_in_for_the_log_is_no_archive(
    source: str, options: dict[str, str], columns: list[str] | None, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        archive.refuse_unfit(source, options, columns)


def test_spark_reads_across_the_seam(seam: ArchivedLog, spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.read.format("headwater").option("dsn", seam.dsn).load()
    assert [row.position for row in frame.select("position").sort("position").collect()] == seam.positions()
    odd = frame.filter((F.col("type") == "t1") & (F.col("topic") == "short"))
    assert odd.count() == sum(1 for row in frame.collect() if row.type == "t1" and row.topic == "short")
    found: list[int] = []
    query = (
        spark.readStream.format("headwater")
        .option("dsn", seam.dsn)
        .option("maxEventsPerTrigger", "60")
        .load()
        .writeStream.foreachBatch(lambda rows, _: found.extend(row.position for row in rows.collect()))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    assert found == seam.positions()


def test_what_the_sink_archives_is_taken_by_retention_and_read_back(
    archived: ArchivedLog, spark: SparkSession, tmp_path: Path
) -> None:
    archived.log.create_topic("short", retention=DAY)
    context = SinkContext(spark, "to-lake", "log", {}, archived.dsn, None, tmp_path)
    sink = LakeSink({"path": "lake/log", "archive": True}, context)
    sink.prepare()
    done = 0
    for number in range(2):
        archived.publish("short", 20)
        archived.pass_days(1)
        archived.pass_days(5)
        # Nothing goes before it is archived.
        assert archived.kept_in_log("short") == archived.positions()[done:]
        end = archived.log.state().stable
        rows = spark.read.format("headwater").option("dsn", archived.dsn).option("upTo", str(end)).load()
        sink.write(rows, Batch("to-lake", number, end))
        archived.log.maintain()
        assert archived.kept_in_log("short") == []
        done = len(archived.positions())
    sink.close()
    assert positions(reader(archived)) == archived.positions()
    assert [a.location for a in archived.log.run(archive_calls.archives())] == [str(tmp_path / "lake/log")]


def test_a_consumer_reads_across_the_seam(seam: ArchivedLog) -> None:
    name = f"seam_reader_{next(_numbers)}"
    seam.connection.execute(f"create role {name} login password 'x' in role headwater_consumer")
    try:
        dsn = conninfo.make_conninfo(seam.dsn, user=name, password="x")
        assert positions(LogSource({"dsn": dsn}).reader(EVENT)) == seam.positions()
        options = {"dsn": dsn, "waitSeconds": "0", "maxBytesPerTrigger": "2000"}
        found = batches_of(LogSource(options).streamReader(EVENT), ReadMaxRows(50))
        assert list(itertools.chain.from_iterable(found)) == seam.positions()
    finally:
        seam.connection.execute(f"drop role {name}")
