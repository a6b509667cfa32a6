"""Does retention wait for archives, topic by topic, and is it known what they have?"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import conninfo

import headwater
from databases import database
from headwater.calls import archives as archive_calls
from headwater.calls.archives import TopicCoverage
from headwater.errors import CursorMoved, InvalidRequest
from headwater.log.model import MaintenanceResult
from patience import PATIENCE_SECONDS

DAY = timedelta(days=1)
_numbers = itertools.count()


@pytest.fixture
def dsn(admin_dsn: str, template: str) -> Iterator[str]:
    """A log for each test: retention is about the log as a whole."""
    with database(admin_dsn, template) as dsn:
        yield dsn


def pass_days(log: headwater.Headwater, connection: psycopg.Connection[Any], days: int) -> MaintenanceResult:  # type: ignore[name-defined]
    connection.execute(
        "update headwater_internal.segment set opened_at = opened_at - %s, closed_at = closed_at - %s",
        (days * DAY, days * DAY),
    )
    return log.maintain()


def register(log: headwater.Headwater, name: str = "archive", topics: list[str] | None = None, after: int = 0) -> int:
    return log.run(archive_calls.register_archive(name, f"/lake/{name}", topics=topics, start_after=after))


def note(log: headwater.Headwater, to_position: int, name: str = "archive") -> None:
    log.run(archive_calls.note_archived(name, to_position=to_position))


def kept(log: headwater.Headwater, topic: str) -> TopicCoverage:
    (found,) = log.run(archive_calls.kept_topics([topic]))
    return found


def numbers(log: headwater.Headwater, topic: str) -> list[Any]:
    return [event.data for event in log.read(topic)]


def test_retention_waits_for_an_archive_and_only_for_its_topics(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    archived, other = (log.create_topic(name, retention=DAY).name for name in ("archived", "other"))
    register(log, topics=[archived])
    days = []
    for day in range(3):
        log.publish(other, day)
        days.append(log.publish(archived, day))
        pass_days(log, connection, 1)
    pass_days(log, connection, 5)
    assert numbers(log, archived) == [0, 1, 2]
    assert numbers(log, other) == []
    # A segment goes when all that the archive wants of it is there, not before.
    note(log, days[1] - 1)
    log.maintain()
    assert numbers(log, archived) == [1, 2]
    note(log, days[1])
    log.maintain()
    assert numbers(log, archived) == [2]
    # It never goes back, and a later look at an earlier batch is harmless.
    note(log, days[0])
    assert [archive.archived_to for archive in log.run(archive_calls.archives())] == [days[1]]


def test_every_archive_of_a_topic_is_waited_for(log: headwater.Headwater, connection: psycopg.Connection) -> None:
    topic = log.create_topic("news", retention=DAY).name
    register(log, "whole")
    register(log, "some", [topic])
    last = log.publish(topic, 0)
    pass_days(log, connection, 1)
    note(log, last, "some")
    pass_days(log, connection, 5)
    assert numbers(log, topic) == [0]
    note(log, last, "whole")
    log.maintain()
    assert numbers(log, topic) == []
    assert kept(log, topic).location in ("/lake/whole", "/lake/some")


def test_an_archive_that_is_given_up_is_not_waited_for(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    topic = log.create_topic("news", retention=DAY).name
    register(log)
    last = log.publish(topic, 0)
    pass_days(log, connection, 1)
    pass_days(log, connection, 5)
    assert numbers(log, topic) == [0]
    assert log.run(archive_calls.forget_archive("archive"))
    assert not log.run(archive_calls.forget_archive("archive"))
    log.maintain()
    assert kept(log, topic) == TopicCoverage(topic, 0, last, last, None)
    with pytest.raises(InvalidRequest, match="to register it again"):
        note(log, last)


def test_it_is_known_what_an_archive_began_too_late_for(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    topic, quiet = log.create_topic("news", retention=DAY).name, log.create_topic("quiet", retention=DAY).name
    lost = log.publish(topic, "lost")
    pass_days(log, connection, 1)
    pass_days(log, connection, 5)
    assert kept(log, topic) == TopicCoverage(topic, 0, lost, lost, None)
    register(log)
    middle = log.publish(topic, "in one archive")
    log.publish(topic, "in two")
    register(log, "late", after=middle)
    assert kept(log, topic) == TopicCoverage(topic, 0, lost, lost, None)
    last = log.publish(topic, "in two")
    for name in ("archive", "late"):
        note(log, last, name)
    pass_days(log, connection, 1)
    pass_days(log, connection, 5)
    # The one that has more is the one to read.
    assert kept(log, topic) == TopicCoverage(topic, 0, last, lost, "/lake/archive")
    log.run(archive_calls.forget_archive("archive"))
    assert kept(log, topic) == TopicCoverage(topic, 0, last, middle, "/lake/late")
    # Of a topic that had no event before, nothing is missing.
    assert kept(log, quiet).lost_to == 0


def test_a_new_topic_is_not_taken_for_a_deleted_one_of_its_name(log: headwater.Headwater) -> None:
    topic = log.create_topic("news").name
    old = log.publish(topic, "old")
    log.delete_topic(topic)
    log.create_topic(topic)
    assert old is not None
    assert kept(log, topic).created_after >= old
    new = log.publish(topic, "new")
    assert new is not None
    assert kept(log, topic).created_after < new


def test_a_deleted_topic_waits_for_no_archive(log: headwater.Headwater, connection: psycopg.Connection) -> None:
    topic = log.create_topic("doomed").name
    register(log)
    log.publish(topic, 0)
    log.delete_topic(topic)
    pass_days(log, connection, 1)
    pass_days(log, connection, 1)
    assert connection.execute("select count(*) from headwater_internal.event").fetchone() == (0,)


def test_registering_again_changes_nothing_but_may_add_topics(
    log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    first, second = (log.create_topic(name, retention=DAY).name for name in ("first", "second"))
    before = log.publish(second, "before")
    assert register(log, topics=[first]) == 0
    assert before is not None
    note(log, before)
    assert register(log, topics=[first]) == before
    assert register(log, topics=[first, second]) == before
    last = log.publish(second, "after")
    note(log, last)
    pass_days(log, connection, 1)
    pass_days(log, connection, 5)
    assert kept(log, second) == TopicCoverage(second, 0, last, before, "/lake/archive")
    with pytest.raises(InvalidRequest, match="not in the new list"):
        register(log, topics=[first])
    with pytest.raises(InvalidRequest, match="forget"):
        log.run(archive_calls.register_archive("archive", "/elsewhere", topics=[first, second], start_after=0))
    with pytest.raises(headwater.TopicNotFound):
        register(log, "other", ["no-such-topic"])


def test_retention_does_not_come_between_a_look_and_its_note(
    log: headwater.Headwater, connection: psycopg.Connection, dsn: str
) -> None:
    topic = log.create_topic("news", retention=DAY).name
    last = log.publish(topic, 0)
    pass_days(log, connection, 1)
    with psycopg.connect(dsn) as registering:
        registering.execute("select headwater_internal.register_archive('archive', '/lake/archive')")
        assert pass_days(log, connection, 5).busy
        registering.commit()
    log.maintain()
    assert numbers(log, topic) == [0]
    note(log, last)
    log.maintain()
    assert kept(log, topic).lost_to == 0


def test_a_consumer_may_keep_an_archive_and_look_into_it(dsn: str, log: headwater.Headwater) -> None:
    topic = log.create_topic("news").name
    name = f"reader_{os.getpid()}"
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"create role {name} login password 'x' in role headwater_consumer")
    try:
        with headwater.connect(conninfo.make_conninfo(dsn, user=name, password="x"), pool_size=1) as consumer:
            register(consumer, topics=[topic])
            note(consumer, 5)
            assert kept(consumer, topic).expired_to == 0
            assert [archive.archived_to for archive in consumer.run(archive_calls.archives())] == [5]
            assert consumer.run(archive_calls.average_bytes([topic], after=0, up_to=10)) == 0
            assert consumer.run(archive_calls.forget_archive("archive"))
    finally:
        with psycopg.connect(dsn, autocommit=True) as admin:
            admin.execute(f"drop role {name}")


def cli(dsn: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from headwater.cli import main; main()", *arguments],
        env={**os.environ, "HEADWATER_DSN": dsn},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_the_doctor_says_which_archive_holds_retention_back(
    log: headwater.Headwater, dsn: str, connection: psycopg.Connection
) -> None:
    topic = log.create_topic("news", retention=DAY).name
    register(log)
    last = log.publish(topic, 0)
    connection.execute("update headwater_internal.event set published_at = published_at - interval '3 days'")
    told = json.loads(cli(dsn, "doctor", "--json").stdout)
    (finding,) = [finding for finding in told["findings"] if finding["check"] == "archives"]
    assert finding["outcome"] == "warn"
    assert "retention of news" in finding["message"]
    assert "headwater archive forget archive" in finding["action"]
    assert json.loads(cli(dsn, "archive", "list", "--json").stdout)[0]["held_topics"] == ["news"]
    note(log, last)
    told = json.loads(cli(dsn, "doctor", "--json").stdout)
    assert [f["outcome"] for f in told["findings"] if f["check"] == "archives"] == ["ok"]
    assert cli(dsn, "archive", "forget", "archive", "--yes").returncode == 0
    assert cli(dsn, "archive", "forget", "archive", "--yes").returncode == 4


def test_a_replay_has_one_request_and_one_place(log: headwater.Headwater) -> None:
    request = {"to_topic": "copy"}
    begun = log.run(archive_calls.start_replay("again", request, start_after=5, up_to=20, plan={"n": 1}))
    assert (begun.done_to, begun.up_to, begun.finished_at) == (5, 20, None)
    log.run(archive_calls.advance_replay("again", from_position=5, to_position=9, more_events=3))
    with pytest.raises(CursorMoved, match="Another process"):
        log.run(archive_calls.advance_replay("again", from_position=5, to_position=9, more_events=3))
    # What was found out at the start stays.
    found = log.run(archive_calls.start_replay("again", request, start_after=7, up_to=30, plan={"n": 2}))
    assert (found.done_to, found.up_to, found.plan, found.events) == (9, 20, {"n": 1}, 3)
    with pytest.raises(InvalidRequest, match="another name"):
        log.run(archive_calls.start_replay("again", {"to_topic": "other"}, start_after=5, up_to=20, plan={}))
    log.run(archive_calls.advance_replay("again", from_position=9, to_position=20, more_events=0))
    done = log.run(archive_calls.find_replay("again"))
    assert done is not None
    assert done.finished_at is not None
    assert [replay.name for replay in log.run(archive_calls.replays())] == ["again"]
    assert log.run(archive_calls.forget_replay("again"))
    assert log.run(archive_calls.find_replay("again")) is None
