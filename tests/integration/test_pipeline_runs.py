"""May one runner at a time run a pipeline, and does the command line say how it stands?"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

pytest.importorskip("pyspark")

import headwater
from headwater import errors
from headwater.calls import pipeline_runs
from headwater.calls import pipeline_runs as pipeline_runs_calls
from headwater.calls.pipeline_runs import PipelineClaim, PipelineSnapshot, PipelineStatus
from headwater.cli.commands.pipeline import format_checkpoint
from headwater.cli.exit_codes import CONFLICT, NOT_FOUND, REFUSED

_numbers = itertools.count()
LONG = timedelta(minutes=5)
NO_TIME = timedelta(0)


@pytest.fixture(scope="module")
def log(dsn: str) -> Iterator[headwater.Headwater]:
    with headwater.connect(dsn) as log:
        yield log


@pytest.fixture
def name() -> str:
    return f"pipeline-{next(_numbers)}"


def claim(
    log: headwater.Headwater,
    name: str,
    runner: str = "a",
    *,
    lease: timedelta = LONG,
    start: bool = True,
    source: str = "log",
) -> PipelineClaim:
    return log.run(pipeline_runs.claim_pipeline(name, runner, lease=lease, source=source, definition={}, start=start))


def status(log: headwater.Headwater, name: str) -> PipelineStatus:
    (found,) = [one for one in log.run(pipeline_runs.pipeline_statuses()) if one.name == name]
    return found


def test_one_runner_at_a_time(log: headwater.Headwater, name: str) -> None:
    first = claim(log, name)
    assert first.token is not None
    second = claim(log, name, "b")
    assert (second.token, second.held_by) == (None, "a")
    log.run(pipeline_runs.release_pipeline(name, first.token))
    third = claim(log, name, "b")
    assert third.token == first.token + 1
    assert third.checkpoint_epoch == first.checkpoint_epoch


def test_a_lease_that_ran_out_goes_to_another_and_the_first_can_record_nothing(
    log: headwater.Headwater, name: str
) -> None:
    late = claim(log, name, lease=NO_TIME).token
    assert late is not None
    assert status(log, name).state == "lost"
    assert claim(log, name, "b").token == late + 1
    for call in (
        pipeline_runs.renew_pipeline(name, late, lease=LONG),
        pipeline_runs.record_batch(name, late, checkpoint=5, rows=1, details={}),
        pipeline_runs.renew_checkpoint_epoch(name, late),
        pipeline_runs.record_snapshot(name, late, PipelineSnapshot("t", "1:1:", 1, 1)),
    ):
        with pytest.raises(errors.LeaseLost, match="has another runner"):
            log.run(call)
    # Too late to be heard, and no harm.
    log.run(pipeline_runs.release_pipeline(name, late))
    assert log.run(pipeline_runs.record_failure(name, late, "x")) is None
    assert (status(log, name).state, status(log, name).checkpoint) == ("running", None)


def test_a_checkpoint_never_goes_back(log: headwater.Headwater, name: str) -> None:
    token = claim(log, name).token
    assert token is not None
    for checkpoint in (5, 3):
        log.run(pipeline_runs.record_batch(name, token, checkpoint=checkpoint, rows=2, details={"batch": checkpoint}))
    found = status(log, name)
    assert (found.checkpoint, found.rows, found.batches, found.last_batch) == (5, 4, 2, {"batch": 3})
    log.run(pipeline_runs.release_pipeline(name, token))
    assert claim(log, name).checkpoint == 5


def test_failures_are_counted_until_a_batch_succeeds(log: headwater.Headwater, name: str) -> None:
    token = claim(log, name).token
    assert token is not None
    assert [log.run(pipeline_runs.record_failure(name, token, "no\0 luck")) for _ in range(2)] == [1, 2]
    assert (status(log, name).state, status(log, name).last_error) == ("failing", "no luck")
    log.run(pipeline_runs.record_batch(name, token, checkpoint=1, rows=0, details={}))
    assert (status(log, name).state, status(log, name).failures) == ("running", 0)


def test_the_last_twenty_batches_are_kept_with_the_tries_that_failed(log: headwater.Headwater, name: str) -> None:
    token, other = claim(log, name).token, claim(log, f"{name}-beside").token
    assert token is not None
    assert other is not None
    log.run(pipeline_runs.record_batch(f"{name}-beside", other, checkpoint=1, rows=1, details={"batch": 1}))
    for number in range(25):
        log.run(pipeline_runs.record_batch(name, token, checkpoint=number, rows=number, details={"batch": number}))
    log.run(pipeline_runs.record_failure(name, token, "no luck"))
    # Who lost the pipeline has nothing to tell of it.
    log.run(pipeline_runs.record_failure(name, token - 1, "too late"))
    found = log.run(pipeline_runs.pipeline_batches(name))
    assert [(one.rows, one.details, one.error) for one in found] == [
        (0, None, "no luck"),
        *((number, {"batch": number}, None) for number in range(24, 5, -1)),
    ]
    assert len(log.run(pipeline_runs.pipeline_batches(f"{name}-beside"))) == 1
    log.run(pipeline_runs.release_pipeline(name, token))
    log.run(pipeline_runs.reset_pipeline(name))
    assert log.run(pipeline_runs.pipeline_batches(name)) == []


def test_who_is_told_to_stop_stops_and_nobody_takes_over(log: headwater.Headwater, name: str) -> None:
    token = claim(log, name).token
    assert token is not None
    assert log.run(pipeline_runs.renew_pipeline(name, token, lease=LONG)) is False
    assert log.run(pipeline_runs.stop_pipeline(name)) is True
    assert log.run(pipeline_runs.renew_pipeline(name, token, lease=LONG)) is True
    assert status(log, name).state == "stopping"
    log.run(pipeline_runs.release_pipeline(name, token))
    assert log.run(pipeline_runs.stop_pipeline(name)) is False
    waiting = claim(log, name, start=False)
    assert (waiting.token, waiting.stopped) == (None, True)
    assert status(log, name).state == "stopped"
    assert claim(log, name, start=True).token is not None


def test_reset_begins_anew_and_only_while_nobody_runs_it(log: headwater.Headwater, name: str) -> None:
    first = claim(log, name)
    assert first.token is not None
    log.run(pipeline_runs_calls.record_batch(name, first.token, checkpoint=5, rows=2, details={}))
    log.run(pipeline_runs_calls.record_snapshot(name, first.token, PipelineSnapshot("t", "1:1:", 7, 3)))
    assert log.run(pipeline_runs_calls.pipeline_snapshots(name)) == [PipelineSnapshot("t", "1:1:", 7, 3)]
    with pytest.raises(errors.PipelineBusy, match="is running on a"):
        log.run(pipeline_runs_calls.reset_pipeline(name))
    log.run(pipeline_runs_calls.release_pipeline(name, first.token))
    log.run(pipeline_runs_calls.reset_pipeline(name, checkpoint=2))
    again = claim(log, name)
    assert again.checkpoint == 2
    assert again.checkpoint_epoch > first.checkpoint_epoch
    assert log.run(pipeline_runs.pipeline_snapshots(name)) == []


def test_a_checkpoint_in_the_log_is_none_in_the_servers(log: headwater.Headwater, name: str) -> None:
    token = claim(log, name).token
    assert token is not None
    log.run(pipeline_runs.record_batch(name, token, checkpoint=5, rows=2, details={}))
    log.run(pipeline_runs.release_pipeline(name, token))
    with pytest.raises(errors.InvalidRequest, match="read from log before"):
        claim(log, name, source="changes")
    log.run(pipeline_runs.reset_pipeline(name))
    assert claim(log, name, source="changes").token is not None


def test_a_consumer_may_run_pipelines(log: headwater.Headwater, dsn: str, name: str) -> None:
    role = f"runner_{os.getpid()}"
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"create role {role} in role headwater_consumer, headwater_publisher")
        try:
            connection.execute(f"set role {role}")
            connection.execute(
                "select headwater_internal.claim_pipeline(%s, 'r', interval '1 min', 'log', '{}')", (name,)
            )
            connection.execute("select headwater_internal.record_batch(%s, 1, 5, 1, '{}')", (name,))
            connection.execute("select headwater_internal.release_pipeline(%s, 1)", (name,))
            connection.execute("select headwater_internal.reset_pipeline(%s, null, true)", (name,))
            assert connection.execute("select count(*) > 0 from headwater.pipeline_status").fetchone() == (True,)
        finally:
            connection.execute("reset role")
            connection.execute(f"drop role {role}")


# --- the command line ----------------------------------------------------------------------------------------


@pytest.fixture
def run(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command about pipelines, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    return partial(run, "pipeline")


def test_a_file_is_listed_and_checked(run: Any, tmp_path: Path, log: headwater.Headwater, dsn: str) -> None:
    assert run("list").exit_code == NOT_FOUND
    file = tmp_path / "pipelines.yaml"
    file.write_text("pipelines: {a: {from: log, to: {topic: {name: b}}}}")
    assert json.loads(run("list", "--json").stdout)[0]["to"] == [{"topic": {"name": "b"}}]
    assert "log" in run("list").stdout
    assert run("validate").exit_code == 0

    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("create table no_key (v text)")
    wrong = {
        "one": {"from": {"log": {"topics": ["nope"]}}, "to": {"topic": {"colour": "red"}}},
        "two": {"from": {"changes": {"tables": ["no_key"]}}, "to": {"nats": {}}},
        "three": {"from": "log", "transform": {"python": "nowhere:f"}, "to": {"lake": {}}},
        "four": {"from": "log", "to": {"table": {}}},
    }
    file.write_text(json.dumps({"pipelines": wrong}))
    refused = run("validate", "--json")
    assert refused.exit_code == REFUSED
    for said in (
        'one: topic \\"nope\\" does not exist',
        "one: to topic: the sink topic has unknown keys: colour",
        "two: the table",
        "two: to nats: the sink nats requires an address",
        "three: transform: the transform nowhere:f cannot be imported",
        "three: to lake: the sink lake requires a path",
        "four: to table:",
    ):
        assert said in refused.stderr


def test_a_pipeline_is_shown_stopped_reset_and_forgotten(
    run: Any, tmp_path: Path, log: headwater.Headwater, name: str
) -> None:
    (tmp_path / "pipelines.yaml").write_text(f"pipelines: {{{name}: {{from: log, to: {{topic: {{name: b}}}}}}}}")
    assert run("status", name).exit_code == NOT_FOUND
    assert run("stop", name).exit_code == NOT_FOUND
    token = claim(log, name).token
    assert token is not None
    log.run(pipeline_runs.record_batch(name, token, checkpoint=1234, rows=2, details={}))
    assert "1,234" in run("status").stdout
    (shown,) = json.loads(run("status", name, "--json").stdout)
    assert (shown["state"], shown["checkpoint"], shown["runner"]) == ("running", 1234, "a")
    log.run(pipeline_runs.record_failure(name, token, "no luck\nat all"))
    failed, done = json.loads(run("status", name, "--batches", "--json").stdout)
    assert (failed["pipeline"], failed["error"], done["rows"]) == (name, "no luck\nat all", 2)
    assert "no luck" in run("status", name, "--batches").stdout
    busy = run("reset", name, "--yes")
    assert busy.exit_code == CONFLICT
    assert "still running" in run("stop", name, "--wait", "0").stdout
    log.run(pipeline_runs.release_pipeline(name, token))
    assert "stopped pipeline" in run("stop", name).stdout
    assert run("reset", name).exit_code != 0
    assert run("reset", name, "--to", "7", "--yes").exit_code == 0
    assert status(log, name).checkpoint == 7
    assert run("delete", name, "--yes").exit_code == 0
    assert run("status", name).exit_code == NOT_FOUND


def test_a_checkpoint_is_written_as_its_source_does() -> None:
    assert format_checkpoint("log", 1_234_567) == "1,234,567"
    assert format_checkpoint("changes", (2 << 32) + 0xABC) == "2/ABC"
    assert format_checkpoint("log", None) == "-"
