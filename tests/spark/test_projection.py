"""Are projections of the log exactly what plain SQL over it says, across crashes, restarts and rebuilds?"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import headwater
from headwater import NewEvent
from headwater.capture.slot import Slot
from headwater.errors import InvalidEvent, InvalidRequest, ProjectionRebuilt
from headwater.spark.pipelines.batch import Batch, SinkContext
from headwater.spark.pipelines.checkpoint import Checkpoint
from headwater.spark.pipelines.transform import Transform, is_stateful, offset_column
from headwater.spark.sinks import table
from headwater.spark.sinks.table import TableSink
from patience import PATIENCE_SECONDS

TOTALS = (
    "select data:customer::string as customer, count(*) as orders, sum(data:amount::decimal(20,2)) as total "
    "from events group by 1"
)
PLAIN = (
    "select data->>'customer', count(*), sum((data->>'amount')::numeric(20,2)) from "
    "(select convert_from(e.payload, 'utf8')::jsonb as data from headwater_internal.event e "
    " join headwater_internal.topic t on t.id = e.topic_id where t.name = %s) as e group by 1 order by 1"
)


class Died(Exception):
    """What a driver says that dies."""


class Pipeline:
    """One pipeline from a topic to a table, run until it has caught up."""

    def __init__(self, spark: SparkSession, dsn: str, topic: str, checkpoint: Path, **transform: Any) -> None:
        self.spark, self.dsn, self.topic, self.checkpoint = spark, dsn, topic, checkpoint
        self.transform = Transform.parse(transform or None, directory=Path(__file__).parent)
        self.table = f"of {topic}"
        self.sink: dict[str, Any] = {"name": ["public", self.table], "key": ["customer"]}
        self.name = f"projection of {topic}"
        self.after: int | None = None

    def context(self) -> SinkContext:
        return SinkContext(
            spark=self.spark,
            pipeline=self.name,
            source="log",
            source_options={},
            dsn=self.dsn,
            nats_url=None,
            directory=self.checkpoint,
        )

    def run(self, *, rebuild: int | None = None, max_events: int = 4, die_in_batch: int | None = None) -> list[Any]:
        """Everything that is there. What each batch counted; `die_in_batch`: dies when the table has it."""
        directory = self.checkpoint / str(rebuild or 0)
        options = {"dsn": self.dsn, "topics": self.topic, "maxEventsPerTrigger": str(max_events)}
        if self.after is not None:
            options["after"] = str(self.after)
        rows = self.spark.readStream.format("headwater").options(**options).load()
        result = self.transform.apply(rows, "log")
        sink = TableSink(self.sink, self.context(), rebuild=rebuild)
        sink.prepare()
        checkpoint = Checkpoint(self.spark, str(directory))
        counts: list[Mapping[str, int]] = []
        failed: list[BaseException] = []

        def on_batch(batch: DataFrame, number: int) -> None:
            try:
                counts.append(sink.write(batch, Batch(self.name, number, *checkpoint.end_of(number))))
                if number == die_in_batch:
                    raise Died
            except BaseException as error:
                failed.append(error)
                raise

        query = (
            result.rows.writeStream.outputMode(result.mode)
            .option("checkpointLocation", str(directory))
            .foreachBatch(on_batch)
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(60)
        except StreamingQueryException:
            if not failed:
                raise
            if not isinstance(failed[0], Died):
                raise failed[0] from None
        finally:
            sink.close()
        return counts

    def kept(self, columns: str = "customer, orders, total") -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn) as connection:
            text = sql.SQL("select {} from {} order by 1, 2").format(
                sql.SQL(columns),  # type: ignore[arg-type]
                sql.Identifier(self.table),
            )
            return connection.execute(text).fetchall()

    def wanted(self) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn) as connection:
            return connection.execute(PLAIN, (self.topic,)).fetchall()


@pytest.fixture
def pipeline(spark: SparkSession, dsn: str, topic: str, tmp_path: Path) -> Iterator[Callable[..., Pipeline]]:
    yield lambda **transform: Pipeline(spark, dsn, topic, tmp_path / "checkpoint", **transform)
    shutil.rmtree(tmp_path)


def order_some(log: headwater.Headwater, topic: str, numbers: range) -> None:
    log.publish_batch(
        topic, [NewEvent({"customer": f"c{n % 3}", "amount": f"{n}.{n % 10}5"}, key=f"c{n % 3}") for n in numbers]
    )


# Transforms.


@pytest.mark.parametrize(
    ("query", "mode", "stateful", "offset"),
    [
        ("select position as at, data:amount::double as amount from events where type = 'x'", "append", False, "at"),
        ("select position + 1 as position from events", "append", False, None),
        (TOTALS, "update", True, None),
        ("select distinct topic from events", "update", True, None),
        ("select min(position) as position, topic from events group by topic", "update", True, None),
        ("select window(published_at, '1 hour').start as hour, count(*) from events group by 1", "update", True, None),
        ("select topic, count(*) as n from events group by topic order by n", "complete", True, None),
        ("select e.position, n.x from events e join values (1), (2) as n(x) on e.partition = n.x", "append", False,
         "position"),
    ],
)  # fmt: skip
def test_a_transform_knows_how_it_has_to_be_run(
    spark: SparkSession, dsn: str, query: str, mode: str, stateful: bool, offset: str | None
) -> None:
    rows = spark.readStream.format("headwater").option("dsn", dsn).load()
    result = Transform.parse({"sql": query}).apply(rows, "log")
    assert (result.mode, result.stateful, is_stateful(result.rows)) == (mode, stateful, stateful)
    assert offset_column(result.rows) == offset


def test_with_select_star_rows_go_on_as_they_came(spark: SparkSession, dsn: str) -> None:
    rows = spark.readStream.format("headwater").option("dsn", dsn).load()
    result = Transform.parse({"sql": "select * from events where data:amount::int > 3"}).apply(rows, "log")
    assert result.rows.columns == rows.columns
    assert offset_column(result.rows) == "position"


@pytest.mark.parametrize(
    ("query", "message", "shown"),
    [
        ("select customer from events", "`customer` cannot be resolved", "line 1: select customer from events\n"),
        ("select 1\nform events e f", "Syntax error", "line 2: form events e f\n"),
        ("select * from orders", "`orders` cannot be found", "line 1: select * from orders\n"),
        ("select 1 as one", "does not read events", "Select from events: select 1 as one"),
        ("select position from events order by position", "not supported", "order by"),
    ],
)
def test_a_transform_that_spark_refuses_shows_the_line(
    spark: SparkSession, dsn: str, query: str, message: str, shown: str
) -> None:
    rows = spark.readStream.format("headwater").option("dsn", dsn).load()
    with pytest.raises(InvalidRequest) as refusal:
        Transform.parse({"sql": query}).apply(rows, "log")
    assert message.lower() in refusal.value.message.lower()
    assert shown in str(refusal.value.hint)
    assert not spark.catalog.tableExists("events")


def test_json_is_there_to_look_into_and_what_is_none_is_null(spark: SparkSession) -> None:
    events = spark.createDataFrame(
        [
            (1, "application/json", bytearray(b'{"a": 1}')),
            (2, None, bytearray(b'{"a": 2}')),
            (3, None, bytearray(b"\xff{")),
            (4, "text/plain", bytearray(b"4")),
            (5, "application/json", None),
        ],
        "position long, content_type string, payload binary",
    )
    result = Transform.parse({"sql": "select position, data:a::int as a, to_json(data) as d from events"})
    assert [tuple(row) for row in result.apply(events, "log").rows.collect()] == [
        (1, 1, '{"a":1}'),
        (2, 2, '{"a":2}'),
        (3, None, None),
        (4, None, None),
        (5, None, None),
    ]
    changes = spark.createDataFrame(
        [(7, "update", '{"id": 1}', '{"id": 1, "n": 2}'), (8, "delete", '{"id": 1}', None)],
        "commit_lsn long, operation string, before string, after string",
    )
    query = "select coalesce(new:id, old:id)::int as id, new:n::int as n, operation = 'delete' as gone from changes"
    result = Transform.parse({"sql": query})
    assert [tuple(row) for row in result.apply(changes, "changes").rows.collect()] == [(1, 2, False), (1, None, True)]


def test_a_function_gets_the_rows_and_the_session_if_it_wants_it(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_transforms.py").write_text(
        "from pyspark.sql import functions as F\n"
        "def double(rows):\n    return rows.select(F.udf(lambda n: n * 2, 'int')('data:n').alias('n'))\n"
        "def with_session(rows, spark):\n    return rows.crossJoin(spark.range(2)).select('position', 'id')\n"
        "def wrong(rows):\n    return rows.count()\n"
        "def refused(rows):\n    return rows.select('nope')\n".replace("'data:n'", "F.expr('data:n::int')")
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    events = spark.createDataFrame(
        [(1, None, bytearray(b'{"n": 4}'))], "position long, content_type string, payload binary"
    )

    def apply(name: str) -> DataFrame:
        return Transform.parse({"python": f"two_transforms:{name}"}, directory=tmp_path).apply(events, "log").rows

    assert apply("double").collect() == [(8,)]
    assert apply("with_session").count() == 2
    with pytest.raises(InvalidRequest, match="returned int: expected a DataFrame"):
        apply("wrong")
    with pytest.raises(InvalidRequest, match="rejects the transform two_transforms:refused"):
        apply("refused")


# Rows of every type.


def test_values_arrive_as_they_were(spark: SparkSession, dsn: str, topic: str, tmp_path: Path) -> None:
    at = datetime(2024, 2, 29, 12, 30, 1, 123456, tzinfo=UTC)
    frame = spark.sql(
        """select id, cast(id as byte) as tiny, cast(id / 3 as decimal(20, 4)) as price, cast('NaN' as double) as ratio,
               timestamp '2024-02-29 12:30:01.123456 UTC' as at, timestamp_ntz '2024-02-29 12:30:01' as local,
               date '0001-01-01' as day, interval '3 04:05:06.5' day to second as took, cast('ü' as binary) as raw,
               array(1, null, 3) as numbers, map('a', 1.5) as sizes,
               named_struct('x', null, 'y', array('z')) as nested, parse_json('{"n": [1, null]}') as data,
               true as yes, cast(null as string) as nothing
           from range(2)"""
    )
    nulls = frame.select(
        "id", *(F.lit(None).cast(field.dataType).alias(field.name) for field in frame.schema.fields[1:])
    )
    pipeline = Pipeline(spark, dsn, topic, tmp_path)
    sink = TableSink({"name": ["public", pipeline.table], "key": ["id"], "mode": "upsert"}, pipeline.context())
    sink.prepare()
    assert sink.write(frame.where("id = 1"), Batch(pipeline.name, 0, 1)) == {"rows": 1, "written": 1, "removed": 0}
    sink.write(nulls.where("id = 0"), Batch(pipeline.name, 1, 2))
    # The same again is no change, of whatever type.
    assert sink.write(frame.where("id = 1"), Batch(pipeline.name, 2, 3))["written"] == 0
    sink.close()
    empty, full = pipeline.kept("*")
    assert empty == (0, *[None] * 14)
    ratio = full[3]
    assert ratio != ratio
    assert full[:3] == (1, 1, Decimal("0.3333"))
    assert full[4:9] == (
        at,
        datetime(2024, 2, 29, 12, 30, 1),  # noqa: DTZ001 - it has no zone
        date(1, 1, 1),
        timedelta(days=3, hours=4, minutes=5, seconds=6.5),
        "ü".encode(),
    )
    assert full[9:] == ([1, None, 3], {"a": 1.5}, {"x": None, "y": ["z"]}, {"n": [1, None]}, True, None)


def test_what_postgres_refuses_of_a_row_is_told_as_what_it_is(
    spark: SparkSession, dsn: str, topic: str, tmp_path: Path
) -> None:
    pipeline = Pipeline(spark, dsn, topic, tmp_path)
    sink = TableSink({"name": ["public", pipeline.table], "key": ["id"]}, pipeline.context())
    sink.prepare()
    with pytest.raises(InvalidEvent, match="0x00"):
        sink.write(spark.sql("select 1 as id, concat('a', char(0)) as name"), Batch(pipeline.name, 0, 1))
    with pytest.raises(InvalidRequest, match="has a null in the key"):
        sink.write(spark.sql("select cast(null as int) as id, 'a' as name"), Batch(pipeline.name, 0, 1))
    sink.close()
    assert pipeline.kept("*") == []


# Streams.


def test_totals_are_those_of_plain_sql_across_a_crash(
    pipeline: Callable[..., Pipeline], log: headwater.Headwater, topic: str
) -> None:
    totals = pipeline(sql=TOTALS)
    order_some(log, topic, range(10))
    # The driver dies after the table has the batch and before Spark notes it: that batch runs again.
    assert [count["rows"] for count in totals.run(max_events=100, die_in_batch=0)] == [3]
    assert totals.kept() == totals.wanted()
    order_some(log, topic, range(10, 13))
    repeated, _ = totals.run(max_events=100)
    # It was run for the sake of its state, and wrote nothing.
    assert repeated == {"rows": 3, "written": 0, "removed": 0}
    assert totals.kept() == totals.wanted()
    assert len(totals.kept()) == 3
    # Without its state it cannot go on, and says so rather than count from 0.
    shutil.rmtree(totals.checkpoint)
    totals.after = log.read(topic, batch_size=100)[-1].position
    order_some(log, topic, range(2))
    with pytest.raises(InvalidRequest, match="the state of pipeline"):
        totals.run()


def test_a_function_with_state_of_its_own_goes_on_after_a_crash(
    pipeline: Callable[..., Pipeline], log: headwater.Headwater, topic: str
) -> None:
    examples = Path(__file__).parents[2] / "examples" / "pipelines"
    totals = pipeline()
    totals.transform = Transform(python="totals:running_totals", directory=examples)
    order_some(log, topic, range(6))
    totals.run(max_events=100, die_in_batch=0)
    assert totals.kept() == totals.wanted()
    order_some(log, topic, range(6, 11))
    totals.run(max_events=100)
    assert totals.kept() == totals.wanted()


def test_rows_that_are_only_added_are_there_once_after_a_lost_checkpoint(
    pipeline: Callable[..., Pipeline], log: headwater.Headwater, topic: str
) -> None:
    orders = pipeline(sql="select position, data:amount::string as amount from events")
    orders.sink |= {"mode": "append", "key": []}
    order_some(log, topic, range(10))
    orders.run()
    positions = [event.position for event in log.read(topic, batch_size=100)]
    shutil.rmtree(orders.checkpoint)
    # The runner knew of less than the table has.
    orders.after = positions[5]
    order_some(log, topic, range(10, 12))
    assert [count["written"] for count in orders.run(max_events=5)] == [1, 1]
    assert orders.kept("position, amount") == [
        (event.position, event.data["amount"]) for event in log.read(topic, batch_size=100)
    ]


def test_a_rebuild_with_other_sql_is_seen_by_readers_at_once_and_whole(
    pipeline: Callable[..., Pipeline], log: headwater.Headwater, topic: str, dsn: str
) -> None:
    totals = pipeline(sql=TOTALS)
    order_some(log, topic, range(9))
    totals.run(max_events=100)
    before = totals.kept()
    seen: set[tuple[Any, ...]] = set()
    done = threading.Event()

    def read() -> None:
        text = sql.SQL("select count(*), sum(orders), sum(total) from {}").format(sql.Identifier(totals.table))
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not done.is_set():
                seen.add(connection.execute(text).fetchone() or ())

    reader = threading.Thread(target=read)
    reader.start()
    try:
        checkpoint_epoch = table.begin_rebuild(log, totals.name)
        changed = pipeline(sql=TOTALS.replace("events", "events where data:amount::double > 2"))
        changed.run(rebuild=checkpoint_epoch, max_events=100)
        assert totals.kept() == before
        stable = log.read(topic, batch_size=100)[-1].position
        table.switch(log, totals.name, checkpoint_epoch=checkpoint_epoch, caught_up_to=stable)
    finally:
        done.set()
        reader.join(PATIENCE_SECONDS)
    after = changed.kept()
    assert [orders for _, orders, _ in after] == [2, 2, 3]

    def summed(rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        return (len(rows), sum(row[1] for row in rows), sum(row[2] for row in rows))

    assert seen <= {summed(before), summed(after)}
    assert summed(before) in seen
    # The former runner is told; the new one goes on with the rebuild's checkpoint.
    order_some(log, topic, range(9, 12))
    changed.checkpoint.joinpath("0").rename(changed.checkpoint / "old")
    changed.checkpoint.joinpath(str(checkpoint_epoch)).rename(changed.checkpoint / "0")
    changed.run()
    assert sum(row[1] for row in changed.kept()) == sum(row[1] for row in after) + 3
    late = TableSink(totals.sink, totals.context(), rebuild=checkpoint_epoch)
    late.prepare()
    with pytest.raises(ProjectionRebuilt):
        late.write(
            totals.spark.sql("select 'c' as customer, 1L as orders, 1.0bd as total"), Batch(totals.name, 9, 10**9)
        )
    late.close()


def test_a_captured_table_and_its_copy_are_the_same_at_the_end(
    spark: SparkSession, dsn: str, topic: str, tmp_path: Path
) -> None:
    copy = Pipeline(spark, dsn, topic, tmp_path)
    query = "select coalesce(new:id, old:id)::int id, new:name::string name, operation = 'delete' gone from changes"
    context = replace(copy.context(), source="changes")
    options = {"name": ["public", copy.table], "key": ["id"], "deletes": "gone"}
    slot = f"copy_{os.getpid()}"
    checkpoint = Checkpoint(spark, str(tmp_path / "checkpoint"))
    rows = spark.readStream.format("headwater.changes").options(dsn=dsn, slot=slot, tables="public.copied").load()
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("set synchronous_commit = on")
        connection.execute("create table copied (id integer primary key, name text)")
        Slot(dsn, slot, slot).prepare(("public.copied",))
        try:
            for change in (
                "insert into copied select n, 'first' from generate_series(1, 5) as n",
                "update copied set name = 'second' where id < 3; delete from copied where id in (1, 4)",
                "delete from copied where id = 5; insert into copied values (5, 'back'), (1, null)",
            ):
                connection.execute(change.encode())
            sink = TableSink(options, context)
            sink.prepare()
            query_run = (
                Transform.parse({"sql": query})
                .apply(rows, "changes")
                .rows.writeStream.option("checkpointLocation", checkpoint.directory)
                .foreachBatch(
                    lambda batch, number: sink.write(batch, Batch(copy.name, number, *checkpoint.end_of(number)))
                )
                .trigger(availableNow=True)
                .start()
            )
            assert query_run.awaitTermination(60)
            sink.close()
            wanted = connection.execute("select id, name from copied order by 1").fetchall()
            assert copy.kept("id, name") == wanted == [(1, None), (2, "second"), (3, "first"), (5, "back")]
        finally:
            Slot(dsn, slot, slot).drop()
