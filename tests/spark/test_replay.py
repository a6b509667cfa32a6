"""Does the past come again whole, once and in order, from the log and the archive, wherever it goes?"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from archiving import DAY, ArchivedLog
from psycopg import conninfo, sql
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

import headwater
from headwater.calls import archives as archive_calls
from headwater.cli import app
from headwater.errors import CursorMoved, InvalidRequest, PositionExpired
from headwater.spark.replay import targets
from headwater.spark.replay.run import ReplayProgress, ReplaySelection, ToQueue, ToTable, ToTopic, preview, replay
from headwater.spark.replay.targets import Part
from patience import PATIENCE_SECONDS

_numbers = itertools.count()


@pytest.fixture
def archived(admin_dsn: str, template: str, tmp_path: Path) -> Iterator[ArchivedLog]:
    """A log for each test: retention is about the log as a whole."""
    name = f"headwater_replay_{next(_numbers)}_{template}"
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        admin.execute(sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template)))
        log = ArchivedLog(conninfo.make_conninfo(admin_dsn, dbname=name), tmp_path / "lake")
        yield log
        log.close()
        admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def past(archived: ArchivedLog) -> ArchivedLog:
    """A log of two topics, of one of which only the archive has the first days."""
    archived.log.create_topic("short", retention=DAY)
    archived.log.create_topic("forever")
    archived.register()
    for _ in range(3):
        for topic in random.sample(("short", "forever"), k=2):
            archived.publish(topic, 6)
        archived.archive()
        archived.pass_days(1)
    for _ in range(3):
        archived.log.maintain()
    archived.publish("short", 4)
    assert 0 < len(archived.kept_in_log("short")) < len(archived.positions("short"))
    return archived


def originals(log: headwater.Headwater, topic: str) -> list[int]:
    """Which events of the past those of a topic were, in its order."""
    return [event.headers["replayed-position"] for event in log.read(topic, batch_size=10_000)]


def test_a_topic_gets_the_past_in_order_with_headers_that_say_what_it_was(
    past: ArchivedLog, spark: SparkSession
) -> None:
    odd = past.log.publish(
        "short", b"\x00\xff", key=b"\xfe", type="ü", routing_key="a.b", headers={"h": '"{', "n": [1]}, event_id='i"d'
    )
    bare = past.log.publish("short", None)
    told: list[ReplayProgress] = []
    done = replay(
        spark, past.dsn, ReplaySelection(), ToTopic("copy"), name="again", events_per_part=9, on_progress=told.append
    )
    wanted = [*past.positions(), odd, bare]
    copies = past.log.read("copy", batch_size=1000)
    assert [event.headers["replayed-position"] for event in copies] == wanted
    assert done.finished
    assert done.events == len(wanted)
    assert [progress.share for progress in told] == sorted(progress.share for progress in told)
    assert (told[0].share, told[-1].share) == (0.0, 1.0)
    assert len(told) > 3
    source = past.log.read("short", after=odd - 1, skip_expired=True)[0]
    copy = copies[-2]
    assert (copy.payload, copy.key, copy.type, copy.routing_key) == (b"\x00\xff", b"\xfe", "ü", "a.b")
    assert copy.headers == {
        "h": '"{',
        "n": [1],
        "replayed-position": odd,
        "replayed-topic": "short",
        "replayed-published-at": source.published_at.astimezone(UTC)
        .isoformat(timespec="microseconds")
        .replace("+00:00", "Z"),
        "replayed-event-id": 'i"d',
    }
    assert copies[0].data == {"n": 0}
    assert set(copies[-1].headers) == {"replayed-position", "replayed-topic", "replayed-published-at"}
    # Done is done; another request needs another name.
    assert replay(spark, past.dsn, ReplaySelection(), ToTopic("copy"), name="again") == done
    assert len(past.log.read("copy", batch_size=1000)) == len(wanted)
    with pytest.raises(InvalidRequest, match="another request"):
        replay(spark, past.dsn, ReplaySelection(types=("t1",)), ToTopic("copy"), name="again")


def test_a_dry_run_says_what_is_then_done(past: ArchivedLog, spark: SparkSession) -> None:
    middle = past.positions()[4]
    selection = ReplaySelection(after=middle, up_to=past.positions()[-2], types=("t1",), keys=(b"k1", b"k2"))
    told = preview(spark, past.dsn, selection, ToTopic("copy"))
    assert {(one.topic, one.source) for one in told.found} >= {
        ("forever", "log"),
        ("short", "archive"),
        ("short", "log"),
    }
    assert "copy" not in {topic.name for topic in past.log.topics()}
    done = replay(spark, past.dsn, selection, ToTopic("copy"), name="again")
    copies = past.log.read("copy", batch_size=1000)
    assert told.published == done.events == len(copies) > 0
    kept = set(past.kept_in_log("short")) | set(past.kept_in_log("forever"))
    for one in told.found:
        of_it = [
            event
            for event in copies
            if event.headers["replayed-topic"] == one.topic
            and (event.headers["replayed-position"] in kept) == (one.source == "log")
        ]
        positions = [event.headers["replayed-position"] for event in of_it]
        assert (one.events, one.first_position, one.last_position) == (len(of_it), positions[0], positions[-1])
        times = [datetime.fromisoformat(event.headers["replayed-published-at"]) for event in of_it]
        stamps = [at.replace(tzinfo=at.tzinfo or UTC) for at in (one.first_published_at, one.last_published_at)]
        assert stamps == [min(times), max(times)]
    assert all(event.type == "t1" and event.key in (b"k1", b"k2") for event in copies)


def test_times_choose_and_a_repetition_keeps_the_times_of_the_start(past: ArchivedLog, spark: SparkSession) -> None:
    before = datetime.now(UTC)
    late = past.publish("short", 3)
    done = replay(spark, past.dsn, ReplaySelection(since=before), ToTopic("copy"), name="again")
    assert originals(past.log, "copy") == late
    later = ReplaySelection(since=before + timedelta(hours=1))
    assert replay(spark, past.dsn, later, ToTopic("copy"), name="again") == done
    assert replay(spark, past.dsn, ReplaySelection(until=before), ToTopic("old"), name="old").events > 0
    assert originals(past.log, "old") == [p for p in past.positions() if p not in late]


def test_a_replay_that_fails_at_any_moment_goes_on_and_brings_each_event_once(
    past: ArchivedLog, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    publish, moments = targets.publish, itertools.cycle((0, 1, 2))

    def killed(rows: DataFrame, part: Part, *, topic: str) -> int:
        moment = next(moments)
        if moment == 0:
            raise Killed
        if moment == 1:
            # All is staged and nothing published.
            part = Part(part.dsn, part.replay, part.after, part.up_to, _raise(Killed))
        publish(rows, part, topic=topic)
        raise Killed

    wanted = past.positions("short")
    selection = ReplaySelection(topics=("short",))
    with monkeypatch.context() as patch:
        patch.setattr(targets, "publish", killed)
        for parts in (5, 3, 7, 4, 5, 6):
            with pytest.raises(Killed):
                replay(spark, past.dsn, selection, ToTopic("copy"), name="again", events_per_part=parts)
    half = originals(past.log, "copy")
    assert half == wanted[: len(half)]
    assert 0 < len(half) < len(wanted)
    # Retention may go on meanwhile.
    past.archive()
    past.pass_days(1)
    past.pass_days(5)
    replay(spark, past.dsn, selection, ToTopic("copy"), name="again", events_per_part=4)
    assert originals(past.log, "copy") == wanted


def _raise(error: type[Exception]) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def test_of_two_that_run_the_same_replay_one_goes_on(past: ArchivedLog, spark: SparkSession) -> None:
    replay(spark, past.dsn, ReplaySelection(topics=("short",)), ToTopic("copy"), name="again", events_per_part=5)
    rows = spark.read.format("headwater").option("dsn", past.dsn).option("topics", "forever").load()
    part = Part(past.dsn, "again", 0, past.log.state().stable, lambda: None)
    with pytest.raises(CursorMoved, match="Another process"):
        ToTopic("copy").write(rows, part)
    assert originals(past.log, "copy") == past.positions("short")


def test_what_retention_takes_without_an_archive_ends_a_replay(archived: ArchivedLog, spark: SparkSession) -> None:
    archived.log.create_topic("short", retention=DAY)
    first = archived.publish("short", 5)
    archived.pass_days(1)

    def take(progress: ReplayProgress) -> None:
        archived.pass_days(5)

    with pytest.raises(PositionExpired):
        replay(spark, archived.dsn, ReplaySelection(), ToTopic("copy"), name="again", on_progress=take)
    assert archived.log.read("copy") == []
    # From what is kept now on, another may begin; from before, it is refused at once.
    with pytest.raises(PositionExpired):
        replay(spark, archived.dsn, ReplaySelection(after=first[0]), ToTopic("copy"), name="other")
    archived.publish("short", 2)
    assert replay(spark, archived.dsn, ReplaySelection(), ToTopic("copy"), name="kept").events == 2


def test_a_table_gets_each_event_as_a_row_once(past: ArchivedLog, spark: SparkSession) -> None:
    past.log.publish("short", b"\xff", key=b"\x00", headers={"a": 1}, content_type="application/octet-stream")
    table = ToTable.parse("public.old")
    done = replay(spark, past.dsn, ReplaySelection(), table, name="again", events_per_part=10)
    rows = past.connection.execute("select position, topic, key, headers, data, payload from old order by 1").fetchall()
    assert [row[0] for row in rows][:-1] == past.positions()
    assert done.events == len(rows)
    assert rows[0][4] == {"n": 0}
    assert rows[-1][2:] == (b"\x00", {"a": 1}, None, b"\xff")
    # Another replay into the same table adds what is missing.
    past.connection.execute("delete from old where position = %s", (rows[3][0],))
    replay(spark, past.dsn, ReplaySelection(), table, name="once more")
    again = past.connection.execute("select position from old order by 1").fetchall()
    assert [row[0] for row in again] == [row[0] for row in rows]
    past.connection.execute("create table public.unfit (position bigint, topic text)")
    with pytest.raises(InvalidRequest, match="primary key"):
        replay(spark, past.dsn, ReplaySelection(), ToTable.parse("unfit"), name="unfit")
    past.connection.execute("create table public.few (topic text, position bigint unique, more text)")
    replay(spark, past.dsn, ReplaySelection(topics=("forever",)), ToTable.parse("few"), name="few")
    assert past.connection.execute("select count(*), count(more) from few").fetchone() == (18, 0)


def drained(log: headwater.Headwater, queue: str) -> list[Any]:
    """All that a queue is given now."""
    found = []
    while (lease := log.claim(queue, worker="test", batch_size=100)) is not None:
        found += [claimed.event for claimed in lease.events]
        log.settle(lease, {})
    return found


def test_a_queue_gets_its_past_again_from_the_log_and_the_archive(past: ArchivedLog, spark: SparkSession) -> None:
    log = past.log
    log.create_queue("mailer", holds_retention=False)
    log.bind("mailer", topic="short", type="t1", from_position=0)
    log.bind("mailer", topic="forever", headers={"h": 2}, from_position=0)
    log.create_queue("other", ["short"], holds_retention=False)
    kept = {event.position for event in drained(log, "mailer")}
    drained(log, "other")
    told = preview(spark, past.dsn, ReplaySelection(), ToQueue("mailer"))
    assert told.rewind_to == 0
    done = replay(spark, past.dsn, ReplaySelection(), ToQueue("mailer"), name="again")
    only_archived = [p for p in past.positions("short") if p not in past.kept_in_log("short")]
    assert told.published == done.events == len(only_archived)
    got = drained(log, "mailer")
    by_rewind = {event.position for event in got if event.topic != "headwater.replay.again"}
    assert by_rewind == kept
    private = [event.headers["replayed-position"] for event in got if event.topic == "headwater.replay.again"]
    of_type = [
        e.headers["replayed-position"] for e in log.read("headwater.replay.again", batch_size=1000) if e.type == "t1"
    ]
    assert private == of_type
    assert set(private) <= set(only_archived)
    assert len(private) + len([p for p in by_rewind if p in past.positions("short")]) == 11
    assert drained(log, "other") == []
    # Repeated, it is done: nothing is rewound again.
    assert replay(spark, past.dsn, ReplaySelection(), ToQueue("mailer"), name="again") == done
    assert drained(log, "mailer") == []


def test_a_part_of_a_queues_past_comes_by_a_topic_of_its_own(past: ArchivedLog, spark: SparkSession) -> None:
    log = past.log
    log.create_queue("mailer", ["short", "forever"], holds_retention=False)
    drained(log, "mailer")
    wanted = [p for p in past.positions("short") if p <= past.positions("short")[-3]]
    done = replay(spark, past.dsn, ReplaySelection(topics=("short",), up_to=wanted[-1]), ToQueue("mailer"), name="some")
    assert done.rewind_to is None
    got = drained(log, "mailer")
    assert [event.headers["replayed-position"] for event in got] == wanted
    # From a time on, the queue begins with the first event of then, not with the file that the archive has it in.
    since = next(event.published_at for event in log.read("forever") if event.position > wanted[0])
    first = next(event.position for event in log.read("forever") if event.published_at >= since)
    assert preview(spark, past.dsn, ReplaySelection(since=since), ToQueue("mailer")).rewind_to == first - 1
    log.create_queue("everything")
    log.bind("everything")
    assert preview(spark, past.dsn, ReplaySelection(), ToQueue("mailer")).also_reached == ("everything",)


def test_the_rate_is_kept(past: ArchivedLog, spark: SparkSession) -> None:
    sizes: list[int] = []
    began = time.monotonic()
    done = replay(
        spark,
        past.dsn,
        ReplaySelection(topics=("short",), up_to=past.positions("short")[11]),
        ToTopic("copy"),
        name="slowly",
        events_per_second=8,
        on_progress=lambda progress: sizes.append(progress.events),
    )
    assert done.events == 12
    assert max(b - a for a, b in itertools.pairwise(sizes)) <= 8
    assert time.monotonic() - began >= 4 / 8


PROGRAM = [sys.executable, "-c", "from headwater.cli import main; main()"]


@pytest.mark.long
@pytest.mark.crash
def test_the_command_that_is_killed_goes_on_when_repeated(past: ArchivedLog, spark: SparkSession) -> None:
    environment = {**os.environ, "HEADWATER_DSN": past.dsn}
    arguments = ["--to-topic", "copy", "--topic", "short", "--name", "again", "--json"]
    command = [*PROGRAM, "replay", *arguments, "--rate", "2"]
    first = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (state := past.log.run(archive_calls.find_replay("again"))) is None or not state.events:
            # Spark takes its time to start.
            assert first.poll() is None
            assert time.monotonic() < deadline, f"no event came within {PATIENCE_SECONDS} seconds"
            time.sleep(0.01)
    finally:
        # Java and its workers too, which a terminal would end as well.
        os.killpg(first.pid, signal.SIGKILL)
        first.wait(timeout=PATIENCE_SECONDS)
    half = originals(past.log, "copy")
    assert half == past.positions("short")[: len(half)]
    assert 0 < len(half) < len(past.positions("short"))
    code, told = headwater_replay(past.dsn, *arguments)
    assert code == 0
    assert (told["finished"], told["events"]) == (True, len(past.positions("short")))
    assert originals(past.log, "copy") == past.positions("short")


def test_the_command_says_what_would_come_and_what_came(past: ArchivedLog, spark: SparkSession) -> None:
    chosen = ["--to-topic", "copy", "--topic", "short", "--type", "t1", "--key", "k1", "--json"]
    code, told = headwater_replay(past.dsn, *chosen, "--dry-run")
    assert (code, {one["source"] for one in told["found"]}) == (0, {"archive", "log"})
    code, done = headwater_replay(past.dsn, *chosen)
    assert (code, done["events"]) == (0, told["published"])
    assert originals(past.log, "copy")[-1] == max(one["last_position"] for one in told["found"])
    assert [one["finished_at"] is not None for one in headwater_replay(past.dsn, "--list", "--json")[1]] == [True]
    assert headwater_replay(past.dsn, "--forget", done["name"], "--json") == (0, {"forgotten": done["name"]})
    assert headwater_replay(past.dsn, "--forget", done["name"], "--json")[0] == 4
    assert headwater_replay(past.dsn, "--to-topic", "a", "--to-table", "b", "--json")[0] == 2
    assert headwater_replay(past.dsn, "--to-topic", "a", "--topic", "no-such-topic", "--json")[0] == 4
    assert headwater_replay(past.dsn, "--to-queue", "no-such-queue", "--yes", "--json")[0] == 4
    past.log.create_topic("small", max_payload_bytes=1)
    code, refused = headwater_replay(past.dsn, "--to-topic", "small", "--topic", "short", "--json")
    assert (code, refused["error"]) == (3, "EventTooLarge")


def headwater_replay(dsn: str, *arguments: str) -> tuple[int, Any]:
    """The command, in this process and so in the session that is there."""
    result = CliRunner().invoke(app, ["replay", *arguments, "--dsn", dsn])
    return result.exit_code, json.loads((result.stdout if result.exit_code == 0 else result.stderr).splitlines()[-1])
