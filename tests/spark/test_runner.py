"""Does a pipeline deliver everything once, whoever runs it, and however often it ends in between?"""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession

import headwater
from headwater import NewEvent
from headwater.calls import pipeline_runs
from headwater.calls.pipeline_runs import PipelineSnapshot
from headwater.capture.slot import Slot
from headwater.database.pg_snapshot import is_visible
from headwater.errors import InvalidRequest, PipelineBusy, PipelineNotFound, SlotLost
from headwater.spark.pipelines import batch_query
from headwater.spark.pipelines import runner as running
from headwater.spark.pipelines.batch import Batch, SinkContext
from headwater.spark.pipelines.file import PipelineSpec, parse
from headwater.spark.pipelines.rebuild import rebuild
from headwater.spark.pipelines.runner import Report, Runner, RunnerSettings
from headwater.spark.pipelines.snapshot_load import is_in_snapshot
from patience import PATIENCE_SECONDS

_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    return f"pipe_{next(_numbers)}"


def declared(text: str) -> tuple[PipelineSpec, ...]:
    return parse(text, {}).pipelines


def capture(name: str, **options: Any) -> PipelineSpec:
    source = json.dumps({"tables": [name], **options})
    (spec,) = declared(f"pipelines: {{{name}: {{from: {{changes: {source}}}, to: {{topic: {{name: {name}}}}}}}}}")
    return spec


def copying(name: str, pipeline: str | None = None, sql: str | None = None) -> PipelineSpec:
    body: dict[str, Any] = {"from": {"log": {"topics": [name]}}, "to": {"topic": {"name": f"{name}_copy"}}}
    if sql is not None:
        body["transform"] = {"sql": sql}
    (spec,) = declared(json.dumps({"pipelines": {pipeline or name: body}}))
    return spec


def run_once(spark: SparkSession, spec: PipelineSpec, dsn: str, directory: Path) -> list[Report]:
    said: list[Report] = []
    settings = RunnerSettings(dsn=dsn, nats_url=None, directory=directory, checkpoints="checkpoints", once=True)
    Runner(spark, [spec], settings, report=said.append).run()
    return said


def payloads(log: headwater.Headwater, topic: str) -> list[Any]:
    return [json.loads(event.payload or b"") for event in log.read(topic, batch_size=10_000)]


@pytest.fixture
def table(dsn: str, name: str) -> Iterator[psycopg.Connection]:
    """A connection to a database with a table of the pipeline's name."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"create table {name} (id integer primary key, v text)")
        yield connection
    Slot(dsn, name, name).drop()


@pytest.fixture
def log(dsn: str) -> Iterator[headwater.Headwater]:
    with headwater.connect(dsn) as log:
        yield log


def test_changes_become_events_and_keep_their_transactions_together(
    spark: SparkSession, dsn: str, tmp_path: Path, name: str, table: psycopg.Connection, log: headwater.Headwater
) -> None:
    spec = capture(name)
    run_once(spark, spec, dsn, tmp_path)
    table.execute(f"insert into {name} values (1, 'a'), (2, 'b\"')")
    table.execute(f"update {name} set v = 'c' where id = 1")
    said = run_once(spark, spec, dsn, tmp_path)
    events = log.read(name)
    assert [event.type for event in events] == [f"public.{name}.{kind}" for kind in ("insert", "insert", "update")]
    assert [event.key for event in events] == [b'{"id":1}', b'{"id":2}', b'{"id":1}']
    assert [json.loads(event.payload or b"")["after"] for event in events] == [
        {"id": 1, "v": "a"},
        {"id": 2, "v": 'b"'},
        {"id": 1, "v": "c"},
    ]
    assert len({event.headers["xid"] for event in events[:2]}) == 1
    assert {(report.what, report.details["rows"]) for report in said if report.what == "batch"} == {("batch", 3)}
    # One more run has nothing to add.
    run_once(spark, spec, dsn, tmp_path)
    assert len(log.read(name)) == 3
    (status,) = [one for one in log.run(pipeline_runs.pipeline_statuses()) if one.name == name]
    assert (status.state, status.rows, status.failures) == ("idle", 3, 0)
    # Everything is in its sinks, so the server need not keep it.
    assert Slot(dsn, name, name).state().confirmed_lsn == status.checkpoint


def test_a_batch_that_fails_after_writing_is_repeated_without_writing_twice(
    spark: SparkSession, dsn: str, tmp_path: Path, name: str, log: headwater.Headwater, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create_topic(name)
    log.publish_batch(name, [NewEvent({"n": n}) for n in range(100)])
    write = batch_query.write_to_all
    failures = iter([True, False])

    def fail_after(sinks: Any, rows: DataFrame, batch: Batch) -> None:
        write(sinks, rows, batch)
        if next(failures, False):
            raise OSError("the power went off")

    monkeypatch.setattr(batch_query, "write_to_all", fail_after)
    # Without a position no event gets an id, by which the log would know it.
    said = run_once(spark, copying(name, sql="select data:n::int + 1 as n from events"), dsn, tmp_path)
    assert [report.details["error"] for report in said if report.what == "failed"] == ["the power went off"]
    assert payloads(log, f"{name}_copy") == [{"n": n + 1} for n in range(100)]


def test_without_its_checkpoint_a_pipeline_goes_on_from_the_recorded_offset(
    spark: SparkSession, dsn: str, tmp_path: Path, name: str, table: psycopg.Connection, log: headwater.Headwater
) -> None:
    changes, copy = capture(name), copying(name, f"{name}_copying")
    run_once(spark, changes, dsn, tmp_path)
    for number in range(3):
        table.execute(f"insert into {name} values (%s, 'x')", (number,))
        run_once(spark, changes, dsn, tmp_path)
        said = run_once(spark, copy, dsn, tmp_path)
        assert [report.details["rows"] for report in said if report.what == "batch"] == [1]
        shutil.rmtree(tmp_path / "checkpoints")
    wanted = [{"id": number, "v": "x"} for number in range(3)]
    assert [payload["after"] for payload in payloads(log, name)] == wanted
    assert [payload["after"] for payload in payloads(log, f"{name}_copy")] == wanted


def test_an_old_checkpoint_of_a_standby_is_not_gone_on_from(
    spark: SparkSession, dsn: str, tmp_path: Path, name: str, table: psycopg.Connection, log: headwater.Headwater
) -> None:
    spec = capture(name)
    run_once(spark, spec, dsn, tmp_path)
    table.execute(f"insert into {name} values (1, 'x')")
    run_once(spark, spec, dsn, tmp_path)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "other" / "checkpoints")
    table.execute(f"insert into {name} values (2, 'x')")
    run_once(spark, spec, dsn, tmp_path)
    table.execute(f"insert into {name} values (3, 'x')")
    run_once(spark, spec, dsn, tmp_path / "other")
    assert [payload["after"]["id"] for payload in payloads(log, name)] == [1, 2, 3]


def test_one_runner_at_a_time_and_a_standby_takes_over(
    spark: SparkSession, dsn: str, tmp_path: Path, name: str, log: headwater.Headwater
) -> None:
    log.create_topic(name)
    spec = copying(name)
    said: list[tuple[str, Report]] = []

    def runner(who: str) -> Runner:
        settings = RunnerSettings(
            dsn=dsn, nats_url=None, directory=tmp_path, checkpoints="checkpoints", runner=who, lease_seconds=1.0
        )
        return Runner(spark, [spec], settings, report=lambda report: said.append((who, report)))

    first, second = runner("first"), runner("second")
    threads = [threading.Thread(target=one.run, daemon=True) for one in (first, second)]
    threads[0].start()
    wait_until(lambda: ("first", "started") in [(who, report.what) for who, report in said])
    threads[1].start()
    wait_until(lambda: ("second", "standing by") in [(who, report.what) for who, report in said])
    with pytest.raises(PipelineBusy, match="first holds its lease"):
        run_once(spark, spec, dsn, tmp_path)
    log.publish(name, {"n": 1})
    wait_until(lambda: len(log.read(f"{name}_copy")) == 1)
    first.stop()
    threads[0].join(PATIENCE_SECONDS)
    wait_until(lambda: ("second", "started") in [(who, report.what) for who, report in said])
    log.publish(name, {"n": 2})
    wait_until(lambda: len(log.read(f"{name}_copy")) == 2)
    # Stopped from elsewhere, and nobody takes over.
    assert log.run(pipeline_runs.stop_pipeline(name))
    threads[1].join(PATIENCE_SECONDS)
    assert not threads[1].is_alive()
    assert payloads(log, f"{name}_copy") == [{"n": 1}, {"n": 2}]


def test_a_runner_whose_lease_was_taken_away_stops_and_stands_by(
    spark: SparkSession, dsn: str, tmp_path: Path, name: str, log: headwater.Headwater
) -> None:
    log.create_topic(name)
    said: list[str] = []
    settings = RunnerSettings(
        dsn=dsn, nats_url=None, directory=tmp_path, checkpoints="checkpoints", runner="slow", lease_seconds=1.0
    )
    run = Runner(spark, [copying(name)], settings, report=lambda report: said.append(report.what))
    thread = threading.Thread(target=run.run, daemon=True)
    thread.start()
    wait_until(lambda: "started" in said)
    with psycopg.connect(dsn, autocommit=True) as connection:
        # As if it had slept past the end of its lease and another had been quicker.
        connection.execute(
            "update headwater_internal.pipeline set token = token + 1, runner = 'quick', "
            "leased_until = clock_timestamp() + interval '1 minute' where name = %s",
            (name,),
        )
    wait_until(lambda: "standing by" in said)
    run.stop()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def test_what_cannot_work_ends_the_run_and_is_recorded(
    spark: SparkSession, dsn: str, tmp_path: Path, name: str, table: psycopg.Connection, log: headwater.Headwater
) -> None:
    spec = capture(name)
    run_once(spark, spec, dsn, tmp_path)
    Slot(dsn, name, name).drop()
    with pytest.raises(SlotLost):
        run_once(spark, spec, dsn, tmp_path)
    (status,) = [one for one in log.run(pipeline_runs.pipeline_statuses()) if one.name == name]
    assert status.failures == 1
    assert "replication slot" in str(status.last_error)
    # Nor is it made again where the checkpoint is gone, too: the database knows that the pipeline has read.
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(SlotLost):
        run_once(spark, spec, dsn, tmp_path)
    with pytest.raises(SlotLost):
        Slot(dsn, name, name).state()
    with pytest.raises(InvalidRequest, match="cannot load whole tables"):
        run_once(spark, capture(f"{name}_b", tables=[name], snapshot=True), dsn, tmp_path)


def test_a_pipeline_that_is_reset_begins_again(
    spark: SparkSession, dsn: str, tmp_path: Path, name: str, log: headwater.Headwater
) -> None:
    log.create_topic(name)
    log.publish_batch(name, [NewEvent({"n": n}) for n in range(3)])
    spec = copying(name)
    run_once(spark, spec, dsn, tmp_path)
    log.run(pipeline_runs.reset_pipeline(name))
    run_once(spark, spec, dsn, tmp_path)
    assert len(log.read(f"{name}_copy")) == 3
    log.run(pipeline_runs.reset_pipeline(name, forget_written=True))
    run_once(spark, spec, dsn, tmp_path)
    # Each copy has the id of what it is a copy of.
    assert len(log.read(f"{name}_copy")) == 3


@pytest.mark.parametrize("visible", ["100:110:", "100:110:103,107", f"{2**32 + 5}:{2**32 + 9}:{2**32 + 6}"])
def test_a_change_is_in_a_snapshot_or_after_it(spark: SparkSession, visible: str) -> None:
    xmin, xmax, _ = visible.split(":")
    xids = [*range(int(xmin) - 8, int(xmax) + 8)]
    first = xids[0] % 2**32
    rows = [(xid % 2**32, 10, "public", "t") for xid in xids]
    rows += [(first, 20, "public", "t"), (first, 10, "public", "u")]
    changes = spark.createDataFrame(rows, "xid long, commit_lsn long, schema string, table string")
    condition = is_in_snapshot(PipelineSnapshot("t", visible, 20, 0), schema="public", table="t")
    found = [row[0] for row in changes.select(condition).collect()]
    assert found[: len(xids)] == [is_visible(xid % 2**32, visible) for xid in xids]
    # One that committed later, and one of another table, are in no case in it.
    assert found[len(xids) :] == [False, False]


def test_the_sink_of_every_kind_says_what_it_does_not_know(spark: SparkSession, dsn: str, tmp_path: Path) -> None:
    context = SinkContext(spark, "p", "log", {"slot": "p"}, dsn, "nats://127.0.0.1:1", tmp_path)
    for kind in running.SINKS:
        with pytest.raises(InvalidRequest, match="nonsense"):
            running.make_sink(kind, {"nonsense": 1}, context)


def wait_until(true: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)


def totals(name: str, sql_amount: str = "sum(data:n::bigint)") -> PipelineSpec:
    (spec,) = declared(
        json.dumps(
            {
                "pipelines": {
                    name: {
                        "from": {"log": {"topics": [name]}},
                        "transform": {
                            "sql": f"select data:k::string as k, {sql_amount} as total from events group by 1"
                        },
                        "to": {"table": {"name": f"public.{name}", "key": ["k"]}},
                        "every_seconds": 0,
                    }
                }
            }
        )
    )
    return spec


def rows_of(dsn: str, name: str) -> dict[str, int]:
    with psycopg.connect(dsn) as connection:
        return dict(connection.execute(f"select k, total::bigint from {name}").fetchall())


def test_a_table_is_built_anew_while_its_pipeline_runs_and_goes_on_from_there(
    spark: SparkSession, dsn: str, tmp_path: Path, name: str, log: headwater.Headwater
) -> None:
    log.create_topic(name)
    log.publish_batch(name, [NewEvent({"k": "ab"[n % 2], "n": n}) for n in range(10)])
    run_once(spark, totals(name), dsn, tmp_path)
    assert rows_of(dsn, name) == {"a": 20, "b": 25}
    said: list[str] = []
    settings = RunnerSettings(
        dsn=dsn, nats_url=None, directory=tmp_path, checkpoints="checkpoints", runner="live", lease_seconds=3.0
    )
    # From now on it is to count otherwise, which what is in the table does not know.
    spec = totals(name, "sum(data:n::bigint) * 10")
    live = Runner(spark, [spec], settings, report=lambda report: said.append(report.what))
    thread = threading.Thread(target=live.run, daemon=True)
    thread.start()
    wait_until(lambda: "started" in said)
    changed = rebuild(spark, spec, settings)
    assert changed == {"written": 2, "removed": 0}
    assert rows_of(dsn, name) == {"a": 200, "b": 250}
    log.publish(name, {"k": "a", "n": 1})
    wait_until(lambda: rows_of(dsn, name) == {"a": 210, "b": 250})
    live.stop()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def test_what_cannot_be_rebuilt_says_so(spark: SparkSession, dsn: str, tmp_path: Path, name: str) -> None:
    settings = RunnerSettings(dsn=dsn, nats_url=None, directory=tmp_path, checkpoints="checkpoints")
    with pytest.raises(InvalidRequest, match="also writes to topic"):
        rebuild(spark, copying(name), settings)
    with pytest.raises(InvalidRequest, match="captures changes"):
        rebuild(spark, capture(name), settings)
    with pytest.raises(PipelineNotFound, match="never run"):
        rebuild(spark, totals(name), settings)


def test_a_pipeline_with_state_is_not_gone_on_with_without_its_checkpoint(
    spark: SparkSession, dsn: str, tmp_path: Path, name: str, log: headwater.Headwater
) -> None:
    log.create_topic(name)
    log.publish(name, {"k": "a", "n": 1})
    run_once(spark, totals(name), dsn, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(InvalidRequest, match="cannot continue: its checkpoint is missing"):
        run_once(spark, totals(name), dsn, tmp_path)
    settings = RunnerSettings(dsn=dsn, nats_url=None, directory=tmp_path, checkpoints="checkpoints")
    rebuild(spark, totals(name), settings)
    log.publish(name, {"k": "a", "n": 5})
    run_once(spark, totals(name), dsn, tmp_path)
    assert rows_of(dsn, name) == {"a": 6}
