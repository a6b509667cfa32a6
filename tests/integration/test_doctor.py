"""Does `headwater doctor` tell of what stops the log, with what to do about it, and does `headwater check` fail?"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import conninfo, sql
from typer.testing import CliRunner

import headwater
from headwater import NewEvent
from headwater.calls import pipeline_runs
from headwater.capture.slot import Slot
from headwater.cli import app
from headwater.cli.commands import doctor

Run = Callable[..., Any]


@pytest.fixture
def run(dsn: str) -> Run:
    """A command; what it printed as JSON."""

    def invoke(*arguments: str) -> Any:
        result = CliRunner().invoke(app, [*arguments, "--json", "--dsn", dsn])
        return json.loads(result.stdout.splitlines()[0])

    return invoke


def told(run: Run, check: str, about: str) -> list[dict[str, Any]]:
    """What `doctor` found that is not well, of one check, about one thing."""
    found = run("doctor")["findings"]
    return [one for one in found if one["check"] == check and one["outcome"] != "ok" and about in one["message"]]


def failed(run: Run) -> list[str]:
    """The checks that are not well to a monitor."""
    return [one["name"] for one in run("check")["checks"] if not one["ok"] and one["name"] != "maintenance"]


def exit_code(dsn: str, command: str) -> int:
    return CliRunner().invoke(app, [command, "--dsn", dsn]).exit_code


@pytest.fixture
def broken_segment(connection: psycopg.Connection) -> Iterator[Callable[[int], str]]:
    """Take a segment's table away, as a careless administrator does; it is put back afterwards."""
    taken: list[tuple[str, int, int]] = []

    def take(number: int) -> str:
        name = f"event_{number:07}"
        size = 100_000_000
        connection.execute(
            sql.SQL("alter table headwater_internal.event detach partition headwater_internal.{}").format(
                sql.Identifier(name)
            )
        )
        taken.append((name, number * size, (number + 1) * size))
        return name

    yield take
    for name, low, high in taken:
        connection.execute(
            sql.SQL(
                "alter table headwater_internal.event attach partition headwater_internal.{} for values from ({}) "
                "to ({})"
            ).format(sql.Identifier(name), sql.Literal(low), sql.Literal(high))
        )


@pytest.mark.parametrize(
    ("number", "what"),
    [(0, "no event can be published"), (1, "publishing stops when"), (3, "publishing stops when")],
)
def test_a_segment_without_its_table_fails(
    run: Run,
    dsn: str,
    log: headwater.Headwater,
    topic: str,
    broken_segment: Callable[[int], str],
    number: int,
    what: str,
) -> None:
    log.publish(topic, None)
    assert failed(run) == []
    name = broken_segment(number)
    (found,) = told(run, "segments", name)
    assert found["outcome"] == "fail"
    assert what in found["message"]
    assert "Restore" in found["action"]
    assert failed(run) == ["segments"]
    assert exit_code(dsn, "check") == 1


def test_a_cursor_or_a_queue_beyond_the_head_fails(run: Run, dsn: str, log: headwater.Headwater, topic: str) -> None:
    log.set_cursor(f"{topic}-c", position=log.state().head + 1000, topics=topic)
    log.create_queue(f"{topic}-g", topic, after=log.state().head + 1000)
    (cursor,) = told(run, "positions", f"cursor {topic}-c ")
    (queue,) = told(run, "positions", f"queue {topic}-g ")
    assert cursor["outcome"] == queue["outcome"] == "fail"
    assert f"headwater cursor set {topic}-c --after" in cursor["action"]
    assert f"headwater queue rewind {topic}-g --after" in queue["action"]
    assert failed(run) == ["positions"]
    assert exit_code(dsn, "check") == 1
    # A server stays ready: another would serve the same log.
    assert run("check")["ready"] is True
    log.set_cursor(f"{topic}-c", position=0)
    log.rewind_queue(f"{topic}-g", position=0)
    assert exit_code(dsn, "check") == 0


def test_a_stable_position_beyond_the_head_fails(
    run: Run, log: headwater.Headwater, connection: psycopg.Connection, topic: str
) -> None:
    log.publish(topic, None)
    connection.execute("select setval('headwater_internal.stable_register', headwater.head() + 50)")
    (found,) = told(run, "positions", "the recorded stable position")
    assert found["outcome"] == "fail"
    assert "headwater migrate" in found["action"]
    assert failed(run) == ["register"]
    connection.execute("select headwater_internal.refresh_stable()")
    assert failed(run) == []


def test_a_queue_that_no_worker_works_on_while_events_wait_is_told(
    run: Run, log: headwater.Headwater, topic: str
) -> None:
    log.create_queue(topic, topic)
    assert told(run, "queues", f"queue {topic} ") == []
    log.publish_batch(topic, [NewEvent(None)] * 3)
    (found,) = told(run, "queues", f"queue {topic} ")
    assert "no workers and 3 waiting events" in found["message"]
    assert "headwater work" in found["action"]
    lease = log.claim(topic, worker="w", batch_size=10)
    assert lease is not None
    log.ack(lease)
    assert told(run, "queues", f"queue {topic} ") == []


def test_many_findings_of_one_kind_are_summed_up(run: Run, log: headwater.Headwater, topic: str) -> None:
    log.publish(topic, None)
    names = [f"{topic}-{number}" for number in range(25)]
    for name in names:
        log.create_queue(name, topic)
    found = [one for one in run("doctor")["findings"] if one["check"] == "queues"]
    assert len(found) == 21
    assert found[-1]["message"].startswith("and ")
    for name in names:
        log.delete_queue(name)


def test_a_pipeline_that_failed_is_told(run: Run, log: headwater.Headwater, topic: str) -> None:
    claim = pipeline_runs.claim_pipeline(
        topic, "runner", lease=timedelta(seconds=30), source="log", definition={"from": {"log": {}}}, start=True
    )
    token = log.run(claim).token
    assert token is not None
    log.run(pipeline_runs.record_failure(topic, token, "no such table\nin detail"))
    (found,) = told(run, "pipelines", f"pipeline {topic} ")
    assert "failed 1 times in a row: no such table" in found["message"]
    log.run(pipeline_runs.release_pipeline(topic, token))
    (found,) = told(run, "pipelines", f"pipeline {topic} ")
    assert "ended with an error: no such table" in found["message"]
    assert f"headwater pipeline run {topic}" in found["action"]
    log.run(pipeline_runs.delete_pipeline(topic))


def test_a_slot_that_nobody_reads_is_told_with_the_wal_that_it_holds(
    run: Run, connection: psycopg.Connection, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = topic.replace("-", "_")
    enough = doctor.MAX_IDLE_SLOT_BYTES
    connection.execute("select pg_create_physical_replication_slot(%s, true)", (name,))
    try:
        monkeypatch.setattr(doctor, "MAX_IDLE_SLOT_BYTES", 2**60)
        assert told(run, "slots", name) == []
        monkeypatch.setattr(doctor, "MAX_IDLE_SLOT_BYTES", enough)
        for _ in range(3):
            connection.execute("select pg_logical_emit_message(false, 'test', 'x')")
            connection.execute("select pg_switch_wal()")
        (found,) = told(run, "slots", name)
        assert "inactive and retains" in found["message"]
        assert f"pg_drop_replication_slot('{name}')" in found["action"]
    finally:
        connection.execute("select pg_drop_replication_slot(%s)", (name,))


def test_a_slot_that_a_promotion_would_lose_is_told_with_what_mends_it(
    run: Run, dsn: str, connection: psycopg.Connection, topic: str
) -> None:
    if connection.info.server_version < 170_000:
        pytest.skip("Postgres has failover slots since 17")
    name = topic.replace("-", "_")
    connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))
    try:
        (found,) = told(run, "slots", name)
        assert "not a failover slot" in found["message"]
        command = re.search(r"ALTER_REPLICATION_SLOT \w+ \(FAILOVER true\)", found["action"])
        assert command is not None
        replicating = conninfo.make_conninfo(dsn, replication="database")
        with psycopg.connect(replicating, autocommit=True) as replication:
            replication.execute(command[0].encode())
        assert told(run, "slots", name) == []
    finally:
        connection.execute("select pg_drop_replication_slot(%s)", (name,))
    slot = Slot(dsn, name, name)
    connection.execute(f"create table {name} (id integer primary key)")
    slot.prepare([name])
    try:
        assert told(run, "slots", name) == []
    finally:
        slot.drop()
        connection.execute(f"drop publication {name}")
        connection.execute(f"drop table {name}")
