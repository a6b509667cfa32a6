"""Does every sink have every event once, after a crash or a failover that issued positions again?"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pyspark.sql import DataFrame, SparkSession
from tests.crash import postgres_crashes

import headwater
from headwater import NewEvent
from headwater.calls import archives as archive_calls
from headwater.calls import pipeline_runs
from headwater.errors import EpochChanged
from headwater.lake import Location, open_table, version_of
from headwater.lake.table import epoch_of
from headwater.spark.arrow import EVENT
from headwater.spark.formats.log import LogSource
from headwater.spark.pipelines.file import PipelineSpec, parse
from headwater.spark.pipelines.runner import Runner, RunnerSettings
from headwater.trials.chaos.cluster import Cluster, connected
from patience import PATIENCE_SECONDS

T = TypeVar("T")
EVENT_COUNT = 20


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="headwater-epochs-", ignore_cleanup_errors=True) as name:
        cluster = postgres_crashes.make_cluster(Path(name))
        try:
            with headwater.connect(cluster.dsn) as log:
                for topic in ("quiet", "calm", "busy"):
                    log.create_topic(topic)
            yield cluster
        finally:
            cluster.close()
            cluster.server.kill()


def publish(cluster: Cluster, topic: str, names: Sequence[str]) -> list[int]:
    with headwater.connect(cluster.dsn, pool_size=1) as log:
        positions = log.publish_batch(topic, [NewEvent({"n": name}) for name in names])
    return [position for position in positions if position is not None]


def numbered(what: str, count: int) -> list[str]:
    return [f"{what} {number}" for number in range(count)]


def crash_beyond(cluster: Cluster, look: Callable[[], T]) -> tuple[T, int]:
    """Crash Postgres after `look` has read by a stable position that is not on disk; its answer, the head then."""
    for _ in range(postgres_crashes.TRIES):
        # Its commit also writes the epoch down, so that nothing is left to be flushed by a reader.
        publish(cluster, "quiet", ["first"])
        walwriter = cluster.stop_walwriter()
        assert walwriter is not None
        with connected(cluster.dsn) as connection:
            for _ in range(60):
                with connection.transaction(force_rollback=True):
                    connection.execute("select headwater.publish('busy', '{}') from generate_series(1, 10)")
        before = postgres_crashes.head(cluster)
        seen = look()
        cluster.stop_at_once(walwriter)
        cluster.start()
        if postgres_crashes.head(cluster) < before:
            return seen, before
    raise AssertionError("the head did not go back")


def next_batch(dsn: str, start: dict[str, int] | None) -> tuple[dict[str, int], list[str]]:
    """A batch of the source, planned and read as Spark does it, without the seconds that Spark takes for it."""
    reader = LogSource({"dsn": dsn, "topics": "quiet", "waitSeconds": "0"}).streamReader(EVENT)
    try:
        begin = reader.initialOffset() if start is None else start
        end = reader.latestOffset(begin, reader.getDefaultReadLimit())
        parts = reader.partitions(begin, end) if end != begin else []
        rows = [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]
        return end, [json.loads(row["payload"])["n"] for row in rows]
    finally:
        reader.stop()


class Stream:
    """A query of Spark's own, without a runner: what it has got, batch by batch."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        self.spark, self.directory = spark, directory
        self.got: list[tuple[int, str]] = []

    def run(self, dsn: str, **options: str) -> None:
        def write(rows: DataFrame, number: int) -> None:
            found = rows.select("position", rows.payload.cast("string").alias("payload")).collect()
            self.got += [(row.position, json.loads(row.payload)["n"]) for row in found]

        query = (
            self.spark.readStream.format("headwater")
            .options(dsn=dsn, topics="quiet", **options)
            .load()
            .writeStream.foreachBatch(write)
            .option("checkpointLocation", str(self.directory / "stream"))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(PATIENCE_SECONDS), "the stream did not come to its end"
        finally:
            query.stop()

    @property
    def names(self) -> list[str]:
        return [name for _, name in self.got]


def test_the_source_skips_no_event_whose_position_a_crash_took_back(cluster: Cluster) -> None:
    (offset, read), before = crash_beyond(cluster, lambda: next_batch(cluster.dsn, None))
    assert set(read) == {"first"}
    names = numbered("later", EVENT_COUNT)
    positions = publish(cluster, "quiet", names)
    assert positions[0] <= before, "these positions were issued again"
    # As Spark keeps it: a checkpoint is JSON.
    end, later = next_batch(cluster.dsn, json.loads(json.dumps(offset)))
    assert later == names
    assert end["position"] == positions[-1]
    assert end["epoch"] > offset["epoch"]


def test_a_task_that_was_planned_in_another_epoch_reads_nothing(cluster: Cluster) -> None:
    publish(cluster, "quiet", ["first"])
    reader = LogSource({"dsn": cluster.dsn, "topics": "quiet"}).reader(EVENT)
    parts = reader.partitions()
    cluster.kill()
    publish(cluster, "quiet", ["second"])
    with pytest.raises(EpochChanged, match="planned in epoch"):
        [batch for part in parts for batch in reader.read(part)]


def test_a_stream_stops_when_events_that_it_read_are_lost_or_goes_on_after_the_last_that_is_left(
    spark: SparkSession, cluster: Cluster, tmp_path: Path
) -> None:
    stream = Stream(spark, tmp_path)
    kept = publish(cluster, "quiet", ["kept"])
    standby = cluster.make_standby()
    cut_off_at = cluster.cut_off(standby)
    publish(cluster, "quiet", numbered("lost", 10))
    stream.run(cluster.dsn)
    assert len(stream.got) == 11
    cluster.promote(standby, cut_off_at=cut_off_at)
    names = numbered("new", 10)
    publish(cluster, "quiet", names)
    with pytest.raises(Exception, match="the log has lost events that were read") as error:
        stream.run(cluster.dsn)
    assert f"positions after {kept[0]} may have been assigned again" in str(error.value)
    assert len(stream.got) == 11
    stream.run(cluster.dsn, onEpochChange="rewind")
    assert stream.names[11:] == names
    stream.run(cluster.dsn)
    assert len(stream.got) == 21


def declared(name: str, topic: str, to: Any, **more: Any) -> PipelineSpec:
    body = {"from": {"log": {"topics": [topic]}}, "to": to, **more}
    (spec,) = parse(json.dumps({"pipelines": {name: body}}), {}).pipelines
    return spec


SQL = {"sql": "select position, data:n::string as n from events"}


def settings(cluster: Cluster, directory: Path) -> RunnerSettings:
    return RunnerSettings(dsn=cluster.dsn, nats_url=None, directory=directory, checkpoints="checkpoints", once=True)


def run(spark: SparkSession, cluster: Cluster, directory: Path, *specs: PipelineSpec) -> None:
    for spec in specs:
        Runner(spark, [spec], settings(cluster, directory)).run()


def in_table(cluster: Cluster, table: str) -> list[str]:
    with connected(cluster.dsn) as connection:
        return [n for (n,) in connection.execute(f"select n from {table} order by position").fetchall()]


def in_topic(cluster: Cluster, topic: str) -> list[str]:
    with headwater.connect(cluster.dsn, pool_size=1) as log:
        return [json.loads(event.payload or b"")["n"] for event in log.read(topic, batch_size=1000)]


def in_lake(directory: Path) -> list[str]:
    table = open_table(Location(str(directory)))
    assert table is not None
    rows = table.to_pyarrow_table().sort_by("position").to_pylist()
    return [json.loads(row["payload"])["n"] for row in rows]


def test_every_sink_has_every_event_once_after_a_crash_that_took_positions_back(
    spark: SparkSession, cluster: Cluster, tmp_path: Path
) -> None:
    table = declared("to_table", "quiet", {"table": {"name": "kept", "key": ["position"]}}, transform=SQL)
    others = declared(
        "to_others", "quiet", {"topic": {"name": "copy"}, "lake": {"path": str(tmp_path / "lake"), "archive": True}}
    )
    publish(cluster, "quiet", ["first"])
    run(spark, cluster, tmp_path, table, others)
    before, after = postgres_crashes.take_positions_back(cluster, "busy", pause_seconds=0)
    assert after < before
    names = numbered("later", EVENT_COUNT)
    positions = publish(cluster, "quiet", names)
    assert positions[0] <= before
    run(spark, cluster, tmp_path, table, others)
    expected = ["first", *names]
    assert in_table(cluster, "kept") == expected
    assert in_topic(cluster, "copy") == expected
    assert in_lake(tmp_path / "lake") == expected
    with headwater.connect(cluster.dsn) as log:
        (archive,) = log.run(archive_calls.archives())
        lake = open_table(Location(str(tmp_path / "lake")))
        assert lake is not None
        assert (version_of(lake, "to_others"), epoch_of(lake, "to_others")) == (positions[-1], log.state().epoch)
    assert archive.archived_to == positions[-1]


@pytest.mark.long
def test_after_a_failover_sinks_of_the_database_catch_up_and_others_stop_until_they_are_set_back(
    spark: SparkSession, cluster: Cluster, tmp_path: Path
) -> None:
    table = declared("to_table", "quiet", {"table": {"name": "kept", "mode": "append"}}, transform=SQL)
    to_lake = {"lake": {"path": str(tmp_path / "lake"), "archive": True}}
    lake = declared("to_lake", "quiet", to_lake)
    # Of this one, the events stay and what was made of them is lost.
    calm = declared("to_calm", "calm", {"table": {"name": "calm", "mode": "append"}}, transform=SQL)
    publish(cluster, "quiet", ["kept 0"])
    publish(cluster, "calm", ["calm 0"])
    run(spark, cluster, tmp_path, table, lake, calm)
    standby = cluster.make_standby()
    publish(cluster, "calm", ["calm 1", "calm 2"])
    kept = publish(cluster, "quiet", ["kept 1"])
    cut_off_at = cluster.cut_off(standby)
    publish(cluster, "quiet", numbered("lost", 10))
    run(spark, cluster, tmp_path, table, lake, calm)
    assert len(in_table(cluster, "kept")) == len(in_lake(tmp_path / "lake")) == 12
    cluster.promote(standby, cut_off_at=cut_off_at)
    names = numbered("new", 10)
    publish(cluster, "quiet", names)

    run(spark, cluster, tmp_path, table, calm)
    expected = ["kept 0", "kept 1", *names]
    assert in_table(cluster, "kept") == expected
    assert in_table(cluster, "calm") == ["calm 0", "calm 1", "calm 2"]

    with pytest.raises(EpochChanged, match="on_epoch_change: rewind") as error:
        run(spark, cluster, tmp_path, lake)
    assert error.value.common_position >= kept[0]
    assert len(in_lake(tmp_path / "lake")) == 12, "nothing is removed without being asked for"
    with headwater.connect(cluster.dsn) as log:
        (archive,) = log.run(archive_calls.archives())
        (status,) = [one for one in log.run(pipeline_runs.pipeline_statuses()) if one.name == "to_lake"]
    assert archive.archived_to < kept[0]
    assert "lost events" in str(status.last_error)
    run(spark, cluster, tmp_path, declared("to_lake", "quiet", to_lake, on_epoch_change="rewind"))
    assert in_lake(tmp_path / "lake") == expected
