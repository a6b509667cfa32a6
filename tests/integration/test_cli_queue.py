"""Does the command line steer queues, dead letters, subscriptions, cron schedules and workers as its help says?"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from typer.testing import Result

import headwater
from headwater import NewEvent
from headwater.cli.commands import doctor
from patience import PATIENCE_SECONDS

WORKERS = """
import asyncio
import headwater

app = headwater.App()
not_an_app = 1


@app.worker("{topic}", queue="{topic}", max_attempts=2, backoff_seconds=0.01)
async def handle(event):
    print(event.data, flush=True)
    if event.data == "bad":
        raise ValueError("no good")
    if event.data == "slow":
        await asyncio.Event().wait()
"""


@pytest.fixture
def program(environment: dict[str, str], tmp_path: Path) -> Iterator[Any]:
    """Start the program itself, in a directory of its own. What a failed test leaves running is ended."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", "from headwater.cli import main; main()", *arguments],
            env=environment,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Tests that run in the background ignore Ctrl-C, and what they start would too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def next_line(process: subprocess.Popen[str]) -> str:
    """The next line that the program prints; fails if none comes in time."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], PATIENCE_SECONDS)
    assert ready, "the program printed nothing"
    return process.stdout.readline().strip()


def ok(result: Result) -> Any:
    """The JSON document that a command printed."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def failed(result: Result, code: int) -> Any:
    """The JSON error that a command ended with."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    error = json.loads(result.stderr)
    assert error["exit_code"] == code
    return error


def queue(run: Any, name: str) -> Any:
    """One queue as `queue list` shows it."""
    (found,) = [queue for queue in ok(run("queue", "list", "--json")) if queue["name"] == name]
    return found


def bury(log: headwater.Headwater, queue: str, *payloads: Any) -> list[int]:
    """Publish events to a topic and queue of the same name, and let them die; returns their positions."""
    positions = [one for one in log.publish_batch(queue, [NewEvent(payload) for payload in payloads]) if one]
    alive = set(positions)
    # A claim may hand out fewer than there are.
    while alive:
        lease = log.claim(queue, worker="w", batch_size=100)
        assert lease is not None
        for event in lease.events:
            log.nack(lease, event, error=f"cannot: {event.data}", dead=True)
            alive.discard(event.position)
    return positions


# --- queues --------------------------------------------------------------------------------------------------


def test_a_queue_is_created_shown_altered_and_deleted(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.publish(topic, 1)
    created = ok(
        run("queue", "create", topic, "--topic", topic, "--max-attempts", "3", "--lease-seconds", "7", "--json")
    )
    assert (created["name"], created["max_attempts"], created["lease_seconds"]) == (topic, 3, 7.0)
    assert (created["start_position"], created["holds_retention"], created["ordered_keys"]) == (0, True, False)
    assert failed(run("queue", "create", topic, "--json"), 5)["error"] == "QueueExists"
    assert ok(run("queue", "create", topic, "--if-missing", "--json"))["max_attempts"] == 3
    assert ok(run("queue", "alter", topic, "--max-in-flight", "9", "--json"))["max_in_flight"] == 9
    assert (
        ok(run("queue", "alter", topic, "--max-in-flight", "0", "--no-holds-retention", "--json"))["max_in_flight"]
        is None
    )
    described = ok(run("queue", "describe", topic, "--json"))
    assert described["kind"] == "bindings"
    assert (described["settings"]["holds_retention"], described["overview"]["ready"]) == (False, 1)
    assert [binding["topic"] for binding in described["bindings"]] == [topic]
    ages = dict.fromkeys(("lag_seconds", "unfinished_seconds"))
    assert queue(run, topic) | ages == described["overview"] | ages
    assert (described["overview"]["state"], described["overview"]["lag_events"]) == ("no_workers", 1)
    assert topic in run("queue", "list").stdout
    assert "max attempts" in run("queue", "describe", topic).stdout
    assert ok(run("queue", "delete", topic, "--yes", "--json")) == {"deleted": topic}
    assert failed(run("queue", "describe", topic, "--json"), 4)["error"] == "QueueNotFound"


def test_a_queue_starts_where_it_is_told_to(run: Any, topic: str, log: headwater.Headwater) -> None:
    position = log.publish(topic, 1)
    assert position is not None
    starts = {"--from-end": (), "--after": (str(position),), "--since": ("0s",)}
    for number, (option, value) in enumerate(starts.items()):
        name = f"{topic}-{number}"
        run("queue", "create", name, "--topic", topic, option, *value)
        assert queue(run, name)["ready"] == 0, option
    run("queue", "create", f"{topic}-since", "--topic", topic, "--since", "1h", "--ordered-keys")
    assert queue(run, f"{topic}-since")["ready"] == 1
    assert run("queue", "create", "x", "--from-end", "--after", "1").exit_code == 3


def test_what_a_queue_cannot_be_is_refused(run: Any, topic: str) -> None:
    assert failed(run("queue", "create", "x", "--topic", "nope", "--json"), 4)["error"] == "TopicNotFound"
    error = failed(run("queue", "create", "x", "--max-attempts", "0", "--json"), 3)
    assert error["message"] == "max attempts are 1 to 1000"
    assert run("queue", "create", "x", "--lease-seconds", "long").exit_code == 2
    assert run("queue", "describe", "x").exit_code == 4


def test_a_paused_queue_hands_out_nothing_until_resumed(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.create_queue(topic, topic)
    log.publish(topic, 1)
    assert ok(run("queue", "pause", topic, "--json")) == {"queue": topic, "paused": True}
    assert queue(run, topic)["paused"]
    assert "paused" in run("queue", "list").stdout
    assert log.claim(topic, worker="w") is None
    assert ok(run("queue", "resume", topic, "--json")) == {"queue": topic, "paused": False}
    assert log.claim(topic, worker="w") is not None


def test_a_rewound_queue_does_it_all_again(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.create_queue(topic, topic)
    first, _ = log.publish_batch(topic, [NewEvent(1), NewEvent(2)])
    assert first is not None
    lease = log.claim(topic, worker="w", batch_size=10)
    assert lease is not None
    log.ack(lease)
    assert run("queue", "rewind", topic).exit_code == 2
    assert run("queue", "rewind", topic, "--after", "0", "--since", "1h", "--yes").exit_code == 2
    rewound = ok(run("queue", "rewind", topic, "--after", str(first), "--yes", "--json"))
    assert rewound == {"queue": topic, "position": first}
    assert queue(run, topic)["ready"] == 1
    assert ok(run("queue", "rewind", topic, "--since", "1h", "--yes", "--json"))["position"] < first
    assert queue(run, topic)["ready"] == 2


def test_bindings_are_made_shown_and_ended(run: Any, topic: str, log: headwater.Headwater) -> None:
    run("queue", "create", topic)
    assert "no bindings" in run("queue", "describe", topic).stderr
    bound = ok(run("queue", "bind", topic, "--topic", topic, "--pattern", "orders.*.eu", "--header", "a=1", "--json"))
    assert (bound["topic"], bound["pattern"], bound["headers"]) == (topic, "orders.*.eu", {"a": "1"})
    assert "orders.*.eu" in run("queue", "describe", topic).stdout
    log.publish(topic, 1, routing_key="orders.1.eu", headers={"a": "1", "b": "2"})
    log.publish(topic, 2, routing_key="orders.1.us", headers={"a": "1"})
    log.publish(topic, 3, routing_key="orders.1.eu")
    assert queue(run, topic)["ready"] == 1
    assert ok(run("queue", "unbind", topic, str(bound["id"]), "--json"))["binding"] == bound["id"]
    assert queue(run, topic)["ready"] == 0
    assert run("queue", "unbind", topic, str(bound["id"])).exit_code == 4
    assert failed(run("queue", "bind", topic, "--pattern", "a*b", "--json"), 3)["message"]
    assert run("queue", "bind", topic, "--header", "nonsense").exit_code == 2


def test_deliveries_show_the_state_of_each_event(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.create_queue(topic, topic)
    dead, retried, done, leased, ready = log.publish_batch(topic, [NewEvent(n) for n in range(5)])
    lease = log.claim(topic, worker="w1", batch_size=3)
    assert lease is not None
    log.settle(
        lease, {lease.events[0].position: headwater.Dead("hopeless"), lease.events[1].position: headwater.Retry()}
    )
    log.claim(topic, worker="w2")
    found = ok(run("queue", "deliveries", topic, "--json"))
    assert {one["position"]: one["status"] for one in found} == {
        dead: "dead",
        retried: "ready",
        done: "done",
        leased: "processing",
        ready: "ready",
    }
    assert [one["worker"] for one in found if one["status"] == "processing"] == ["w2"]
    assert [one["position"] for one in ok(run("queue", "deliveries", topic, "--status", "dead", "--json"))] == [dead]
    assert len(ok(run("queue", "deliveries", topic, "--after", str(retried), "--limit", "2", "--json"))) == 2
    assert "hopeless" in run("queue", "deliveries", topic).stdout
    assert run("queue", "deliveries", topic, "--status", "lost").exit_code == 2
    assert run("queue", "deliveries", "nope").exit_code == 4


@pytest.mark.parametrize(
    "command",
    [
        ("queue", "delete", "{}"),
        ("queue", "rewind", "{}", "--after", "0"),
        ("dead", "redrive", "{}"),
        ("dead", "discard", "{}"),
        ("sub", "delete", "1"),
        ("cron", "delete", "{}"),
    ],
    ids=" ".join,
)
def test_nothing_is_lost_where_nobody_can_be_asked(
    run: Any, topic: str, log: headwater.Headwater, command: tuple[str, ...]
) -> None:
    log.create_queue(topic, topic)
    bury(log, topic, "a")
    log.set_cron_schedule(topic, "0 3 * * *", topic, 1)
    result = run(*(word.format(topic) for word in command))
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert topic in [queue.name for queue in log.queues()]
    assert len(log.dead_letters(topic)) == 1
    assert topic in [cron.name for cron in log.cron_schedules()]


# --- dead letters --------------------------------------------------------------------------------------------


def test_dead_letters_are_listed_with_their_history(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.create_queue(topic, topic)
    assert ok(run("dead", "list", topic, "--json")) == []
    assert "no dead letters" in run("dead", "list", topic).stderr
    first, second = bury(log, topic, "a", "b")
    found = ok(run("dead", "list", topic, "--json"))
    assert [(one["position"], one["last_error"]) for one in found] == [(first, "cannot: a"), (second, "cannot: b")]
    assert [(one["attempt"], one["worker"]) for one in found[0]["history"]] == [(1, "w")]
    assert [one["position"] for one in ok(run("dead", "list", topic, "--error", "%b", "--json"))] == [second]
    assert [one["position"] for one in ok(run("dead", "list", topic, str(first), "--json"))] == [first]
    assert ok(run("dead", "list", topic, "--topic", "other", "--json")) == []
    assert len(ok(run("dead", "list", topic, "--limit", "1", "--json"))) == 1
    assert "cannot: a" in run("dead", "list", topic).stdout
    assert run("dead", "list", "nope").exit_code == 4


def test_dead_letters_are_redriven_by_name_by_error_or_all(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.create_queue(topic, topic)
    first, *_ = bury(log, topic, "a", "b", "c", "d")
    assert ok(run("dead", "redrive", topic, str(first), "--json")) == {"redriven": 1}
    assert failed(run("dead", "redrive", topic, str(first), "--json"), 4)["error"] == "NotFound"
    assert run("dead", "redrive", topic, "--error", "%b", "--yes").stdout == f"redrove 1 dead letter of queue {topic}\n"
    assert run("dead", "redrive", topic, "--yes").stdout == f"redrove 2 dead letters of queue {topic}\n"
    # Nothing is asked where there is nothing to do.
    assert run("dead", "redrive", topic).stdout == f"redrove 0 dead letters of queue {topic}\n"
    assert (queue(run, topic)["ready"], queue(run, topic)["dead"]) == (4, 0)


def test_dead_letters_are_dropped_for_good(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.create_queue(topic, topic)
    first, *_ = bury(log, topic, "a", "b", "c")
    assert ok(run("dead", "discard", topic, str(first), "--yes", "--json")) == {"discarded": 1}
    assert failed(run("dead", "discard", topic, str(first), "--yes", "--json"), 4)["error"] == "NotFound"
    assert (
        run("dead", "discard", topic, "--topic", topic, "--yes").stdout
        == f"discarded 2 dead letters of queue {topic}\n"
    )
    assert run("dead", "discard", topic).stdout == f"discarded 0 dead letters of queue {topic}\n"
    assert (queue(run, topic)["done"], queue(run, topic)["dead"]) == (3, 0)


# --- subscriptions -------------------------------------------------------------------------------------------


def test_a_subscription_is_made_listed_peeked_at_and_ended(run: Any, topic: str, log: headwater.Headwater) -> None:
    big = "(e.data ->> 'cents')::int > (s.params ->> 'min')::int"
    create = ("sub", "create", topic, big, "--params", '{"min": 500}')
    made = ok(run(*create, "--topic", topic, "--expires-after", "1d", "--json"))["subscription"]
    (listed,) = ok(run("sub", "list", topic, "--json"))
    assert (listed["id"], listed["filter"], listed["params"]) == (made, big, {"min": 500})
    assert listed["expires_after_seconds"] == 86400.0
    # Equal subscriptions are one, with the longest life that anybody asked for.
    assert f"subscription {made}" in run(*create).stdout
    assert [one["expires_after_seconds"] for one in ok(run("sub", "list", topic, "--json"))] == [None]
    _, large = log.publish_batch(topic, [NewEvent({"cents": 1}), NewEvent({"cents": 900})])
    peeked = ok(run("sub", "peek", topic, "--json"))
    assert peeked["next_position"] == large
    assert [(e["position"], e["subscription_ids"], e["data"]) for e in peeked["events"]] == [
        (large, [made], {"cents": 900})
    ]
    assert ok(run("sub", "peek", topic, "--after", str(large), "--json"))["events"] == []
    assert "matches" in run("sub", "peek", topic, "--after", str(large)).stderr
    assert str(large) in run("sub", "peek", topic).stdout
    assert '{"min": 500}' in run("sub", "list", topic).stdout
    assert made in [one["id"] for one in ok(run("sub", "list", "--json"))]
    assert ok(run("sub", "delete", str(made), "--yes", "--json")) == {"deleted": made}
    assert run("sub", "delete", str(made), "--yes").exit_code == 4
    assert "no subscriptions" in run("sub", "list", topic).stderr
    assert run("sub", "list", "nope").exit_code == 4


def test_a_bad_filter_or_params_are_refused_with_the_reason(run: Any, topic: str) -> None:
    error = failed(run("sub", "create", topic, "e.nothing = 1", "--json"), 3)
    assert "nothing" in error["message"]
    assert run("sub", "create", topic, "(select true)").exit_code == 3
    assert run("sub", "create", topic, "true", "--params", "{").exit_code == 2
    assert run("sub", "create", topic, "true", "--params", "[]").exit_code == 2
    assert run("sub", "create", topic, "true", "--expires-after", "soon").exit_code == 2
    assert run("sub", "peek", topic).exit_code == 4


def test_a_queue_that_reads_for_subscriptions_says_what_it_is(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.subscribe(topic, "true")
    described = ok(run("queue", "describe", topic, "--json"))
    assert (described["kind"], described["reading"]["subscriptions"]) == ("subscriptions", 1)
    assert [one["filter"] for one in described["subscriptions"]] == ["true"]
    assert "queue of SQL subscriptions" in run("queue", "describe", topic).stdout
    assert (queue(run, topic)["kind"], queue(run, topic)["given_up"]) == ("subscriptions", 0)
    assert topic in run("queue", "list").stdout
    for command in (("pause", topic), ("resume", topic), ("bind", topic, "--topic", topic), ("deliveries", topic)):
        assert "queue of SQL subscriptions" in failed(run("queue", *command, "--json"), 3)["message"], command
    assert "max attempts" in run("queue", "alter", topic, "--max-attempts", "2").stdout
    assert ok(run("queue", "delete", topic, "--yes", "--json")) == {"deleted": topic}


def test_a_queue_has_no_subscriptions(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.create_queue(topic, topic)
    assert "queue" in failed(run("sub", "create", topic, "true", "--json"), 3)["message"]
    assert "queue" in failed(run("sub", "peek", topic, "--json"), 3)["message"]


def test_a_queue_that_reads_is_rewound_while_nobody_reads(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.subscribe(topic, "true", topics=topic)
    log.publish_batch(topic, [NewEvent(1), NewEvent(2)])
    first = log.read_next(topic, reader="me")
    log.commit_reading(topic, first.next_position, reader="me")
    before = first.events[0].event.position - 1
    assert failed(run("queue", "rewind", topic, "--after", "1", "--yes", "--json"), 5)["error"] == "ReaderBusy"
    log.commit_reading(topic, first.next_position, reader="me", release=True)
    assert ok(run("queue", "rewind", topic, "--after", str(before), "--yes", "--json"))["position"] == before
    assert len(log.read_next(topic, reader="you").events) == 2


# --- cron schedules and tables ------------------------------------------------------------------------------


def test_a_cron_schedule_is_set_listed_paused_and_forgotten(run: Any, topic: str, log: headwater.Headwater) -> None:
    berlin = ("0 3 * * *", topic, '{"a": 1}', "--zone", "Europe/Berlin")
    declared = ok(run("cron", "set", topic, *berlin, "--json"))
    assert (declared["cron"], declared["time_zone"], declared["paused"]) == ("0 3 * * *", "Europe/Berlin", False)
    assert declared["next_at"].endswith("+00:00")
    assert "next" in run("cron", "set", topic, "0 4 * * *", topic).stdout
    (listed,) = [one for one in ok(run("cron", "list", "--json")) if one["name"] == topic]
    assert (listed["cron"], listed["topic"]) == ("0 4 * * *", topic)
    assert ok(run("cron", "pause", topic, "--json")) == {"name": topic, "paused": True}
    assert [one.paused for one in log.cron_schedules() if one.name == topic] == [True]
    assert ok(run("cron", "resume", topic, "--json")) == {"name": topic, "paused": False}
    assert [one.paused for one in log.cron_schedules() if one.name == topic] == [False]
    assert topic in run("cron", "list").stdout
    assert ok(run("cron", "delete", topic, "--yes", "--json")) == {"deleted": topic}
    for verb in ("pause", "resume"):
        assert run("cron", verb, topic).exit_code == 4
    assert run("cron", "delete", topic, "--yes").exit_code == 4


def test_an_invalid_cron_schedule_is_refused(run: Any, topic: str) -> None:
    assert "cron" in failed(run("cron", "set", "p", "daily", topic, "--json"), 3)["message"]
    assert "no future time" in failed(run("cron", "set", "p", "0 0 */31 * 1#2", topic, "--json"), 3)["message"]
    assert "zone" in failed(run("cron", "set", "p", "* * * * *", topic, "--zone", "Mars", "--json"), 3)["message"]
    assert run("cron", "set", "p", "* * * * *", "nope").exit_code == 4
    assert run("cron", "set", "p", "* * * * *", topic, "{").exit_code == 2


def test_maintain_publishes_what_is_scheduled_by_cron_and_due_once(
    run: Any, topic: str, log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    log.set_cron_schedule(topic, "0 3 * * *", topic, {"a": 1})
    assert ok(run("maintain", "--json"))["cron_schedules"] == 0
    connection.execute(
        "update headwater_internal.cron_schedule set next_at = now() - interval '3 days' where name = %s", (topic,)
    )
    assert ok(run("maintain", "--json"))["cron_schedules"] == 1
    assert "0 cron schedules" in run("maintain").stdout
    assert [event.data for event in log.read(topic)] == [{"a": 1}]


def test_a_table_is_watched_listed_and_no_longer(
    run: Any, topic: str, log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    table = f'public."{topic}"'
    connection.execute(f"create table {table} (id integer primary key, total integer, secret text)")
    watched = ok(
        run(
            *("table", "watch", table, "--topic", topic, "--column", "id", "--column", "total"),
            *("--when-changed", "total", "--no-deletes", "--json"),
        )
    )
    assert watched == {"table": table, "topic": topic}
    connection.execute(f"insert into {table} values (1, 10, 's')")
    connection.execute(f"update {table} set secret = 't'")
    connection.execute(f"update {table} set total = 11")
    connection.execute(f"delete from {table}")
    assert [(event.type, event.data["after"]) for event in log.read(topic)] == [
        ("insert", {"id": 1, "total": 10}),
        ("update", {"id": 1, "total": 11}),
    ]
    (listed,) = [one for one in ok(run("table", "list", "--json")) if one["topic"] == topic]
    assert listed == {
        "table": table,
        "topic": topic,
        "inserts": True,
        "updates": True,
        "deletes": False,
        "truncates": True,
    }
    assert topic in run("table", "list").stdout
    assert ok(run("table", "unwatch", table, "--json")) == {"table": table, "watched": False}
    assert run("table", "unwatch", table).exit_code == 4


@pytest.mark.parametrize("name", ["public.nope", "a.b.c", "no.such.thing.at.all", '"unfinished', ""])
def test_a_table_that_is_not_there_is_said_to_be_missing(run: Any, name: str) -> None:
    for verb in ("watch", "unwatch"):
        assert "does not exist" in failed(run("table", verb, name, "--json"), 4)["message"]


def test_what_cannot_be_watched_is_refused(run: Any, connection: psycopg.Connection, topic: str) -> None:
    connection.execute(f'create table "{topic}" (id integer)')
    assert "no column" in failed(run("table", "watch", f'"{topic}"', "--column", "nope", "--json"), 3)["message"]
    assert run("table", "watch", "headwater_internal.topic").exit_code == 3


# --- work ----------------------------------------------------------------------------------------------------


@pytest.fixture
def workers(tmp_path: Path, topic: str) -> str:
    """A module with an app on this test's topic, in the directory that the program is started in."""
    (tmp_path / "shop_workers.py").write_text(WORKERS.format(topic=topic))
    return "shop_workers:app"


def test_work_handles_events_and_a_stop_gives_back_what_is_not_finished(
    program: Any, workers: str, topic: str, log: headwater.Headwater, run: Any, until: Any
) -> None:
    log.publish_batch(topic, [NewEvent("a"), NewEvent("bad")])
    process = program("work", workers, "--grace-seconds", "0", "--name", "w1")
    assert [next_line(process) for _ in range(3)] == ["a", "bad", "bad"]
    until(lambda: queue(run, topic)["dead"] == 1)
    log.publish_batch(topic, [NewEvent("slow"), NewEvent("waits")])
    assert next_line(process) == "slow"
    assert all((one.worker or "").startswith("w1/handle/") for one in log.deliveries(topic, status="processing"))
    process.send_signal(signal.SIGTERM)
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, stdout) == (0, "")
    assert f"working; press Ctrl-C to stop ({topic}: handle)" in stderr
    assert "unfinished events were returned" in stderr
    (overview,) = [queue for queue in log.queues() if queue.name == topic]
    assert (overview.done, overview.dead, overview.ready, overview.processing) == (1, 1, 2, 0)
    # Given back, not counted as a try.
    assert {one.attempts for one in log.deliveries(topic, status="ready")} == {0}


def test_work_says_in_json_what_it_works_on_and_that_it_stopped(program: Any, workers: str, topic: str) -> None:
    process = program("work", workers, "--json")
    assert json.loads(next_line(process)) == {"working": [{"queue": topic, "handler": "handle"}]}
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, json.loads(stdout), stderr) == (0, {"stopped": True}, "")


def test_a_second_stop_does_not_wait_for_handlers(
    program: Any, workers: str, topic: str, log: headwater.Headwater
) -> None:
    log.publish(topic, "slow")
    process = program("work", workers)
    assert next_line(process) == "slow"
    process.send_signal(signal.SIGINT)
    assert "working" in process.stderr.readline()
    assert "press Ctrl-C again to stop immediately" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) == 130


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("shop_workers", 2, "expected MODULE:APP"),
        ("shop_workers:", 2, "expected MODULE:APP"),
        (":app", 2, "expected MODULE:APP"),
        ("./shop_workers.py:app", 2, "expected MODULE:APP"),
        ("shop_workers.py:app", 4, "module shop_workers.py not found"),
        ("nowhere.at_all:app", 4, "module nowhere.at_all not found"),
        ("shop_workers:nothing", 4, "module shop_workers has no attribute nothing"),
        ("shop_workers:not_an_app", 3, "has type int, expected headwater.App"),
    ],
)
def test_a_target_that_is_no_app_is_a_clear_error(
    program: Any, workers: str, target: str, code: int, message: str
) -> None:
    process = program("work", target)
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, stdout) == (code, "")
    assert message in " ".join(stderr.replace("│", " ").split())
    assert "Traceback" not in stderr


def test_an_error_inside_the_app_keeps_its_traceback(program: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_library\n")
    process = program("work", "broken:app")
    _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "No module named 'no_such_library'" in stderr
    assert "broken.py" in stderr


def test_work_goes_on_when_a_queue_is_deleted_and_says_so(
    program: Any, workers: str, topic: str, log: headwater.Headwater
) -> None:
    log.publish(topic, "a")
    process = program("work", workers)
    assert next_line(process) == "a"
    log.delete_queue(topic)
    with ThreadPoolExecutor(1) as pool:

        def complaint() -> str:
            return next(line for line in process.stderr if "does not exist" in line)

        assert "Traceback" not in pool.submit(complaint).result(timeout=PATIENCE_SECONDS)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0


def test_work_without_a_topic_or_a_database_says_so(program: Any, tmp_path: Path, workers: str) -> None:
    (tmp_path / "lost.py").write_text(WORKERS.format(topic="no-such-topic"))
    for arguments, code in ((("lost:app",), 4), ((workers, "--dsn", "postgresql://127.0.0.1:1/none"), 9)):
        process = program("work", *arguments, "--json")
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == code
        assert json.loads(stderr)["exit_code"] == code


# --- demo ----------------------------------------------------------------------------------------------------


def test_the_demo_shows_queues_routing_filters_and_tables_and_leaves_nothing(
    run: Any, log: headwater.Headwater
) -> None:
    before = {queue.name for queue in log.queues()}
    steps = {step["step"]: step for step in ok(run("demo", "--json"))["steps"]}
    queue_step = steps["share_work_in_a_queue"]
    assert queue_step["shared"] == [[1, 2, 3], [4, 5, 6]]
    assert (queue_step["tries"], queue_step["dead"], queue_step["done"]) == (2, "no such address", 6)
    assert steps["route_to_queues"]["europe"] == ["orders.eu.placed", "orders.eu.paid"]
    assert len(steps["route_to_queues"]["everything"]) == 3
    assert steps["subscribe_by_sql"]["matched"] == {"5000": [1000], "500000": [1000, 100000]}
    assert steps["watch_a_table"]["changes"] == ["update", "delete"]
    assert {queue.name for queue in log.queues()} == before
    assert "docs tutorial" in run("demo").stdout


# --- doctor --------------------------------------------------------------------------------------------------


def findings(result: Result, check: str) -> list[Any]:
    """What one check of `headwater doctor` found, where it is not well."""
    found = [one for one in json.loads(result.stdout)["findings"] if one["check"] == check]
    assert found, check
    return [one for one in found if one["outcome"] != "ok"]


def test_doctor_warns_of_paused_queues_dead_letters_and_leases_overdue(
    run: Any, topic: str, log: headwater.Headwater, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    def told() -> dict[str, str]:
        result = run("doctor", "--json")
        assert result.exit_code == 0
        return {
            one["message"]: one["action"]
            for one in findings(result, "queues")
            if topic in one["message"] and "has no workers" not in one["message"]
        }

    paused, dead, overdue = (f"{topic}-{kind}" for kind in ("paused", "dead", "overdue"))
    for name in (paused, dead, overdue):
        log.create_topic(name)
        log.create_queue(name, name)
        log.publish(name, 1)
    log.claim(overdue, worker="gone", lease_seconds=0.5)
    assert told() == {}
    log.pause_queue(paused)
    bury(log, dead, "b", "c")
    monkeypatch.setattr(doctor, "MANY_DEAD_LETTERS", 3)
    monkeypatch.setattr(doctor, "OVERDUE", timedelta(0))
    until(lambda: len(told()) == 3)
    found = told()
    assert any("is paused" in message and f"queue resume {paused}" in action for message, action in found.items())
    assert any("3 dead letters" in message and f"dead list {dead}" in action for message, action in found.items())
    assert any(f"{overdue} has 1 events in leases that expired" in message for message in found)


def test_doctor_warns_of_a_queue_that_holds_retention_back(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.create_queue(topic, topic)
    log.publish(topic, 1)

    def told() -> list[Any]:
        return [
            one
            for one in findings(run("doctor", "--json"), "queues")
            if f"queue {topic} " in one["message"] and "has no workers" not in one["message"]
        ]

    assert told() == []
    log.alter_topic(topic, retention=timedelta(microseconds=1))
    try:
        assert "blocks retention" in told()[0]["message"]
        log.alter_queue(topic, holds_retention=False)
        assert told() == []
    finally:
        log.alter_topic(topic, keep_forever=True)


def test_doctor_warns_of_filters_that_are_stopped_or_fail(
    run: Any, topic: str, log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    log.subscribe(topic, "e.type = 'slow'")
    assert findings(run("doctor", "--json"), "filters") == []
    # At the head: reading goes on from there, whatever other tests have published.
    head = log.state().head
    connection.execute(
        "insert into headwater_internal.filter_stop (queue_id, filter_id, position, stopped_at, error) "
        "select s.queue_id, s.filter_id, %s, now(), 'ran out of time' from headwater_internal.subscription s "
        "join headwater_internal.filter c on c.id = s.filter_id where c.expression = %s",
        (head, "e.type = 'slow'"),
    )
    (told,) = findings(run("doctor", "--json"), "filters")
    assert "e.type = 'slow'" in told["message"]
    assert f"a filter of queue {topic} (1 subscriptions) was stopped after position {head}" in told["message"]
    assert "ran out of time" in run("sub", "list", topic).stdout
    log.subscribe(topic, "e.type = 'slow'")
    assert findings(run("doctor", "--json"), "filters") == []
    log.subscribe(topic, "(e.data ->> 'n')::int > 0", topics=[topic])
    log.publish(topic, {"n": "many"})
    log.read_next(topic, reader="me")
    (told,) = findings(run("doctor", "--json"), "filters")
    assert "raised an error on 1 events" in told["message"]
    connection.execute("update headwater_internal.filter set last_error_at = null")


@pytest.mark.parametrize("membership", ["none", "of its maker"])
def test_doctor_says_what_to_run_where_the_owner_may_not_act_as_the_filter_role(
    run: Any, admin_dsn: str, membership: str
) -> None:
    role, name = f"test_owner_{os.getpid()}", f"headwater_owner_{os.getpid()}"
    owner, database = sql.Identifier(role), sql.Identifier(name)
    owned = psycopg.conninfo.make_conninfo(admin_dsn, dbname=name, user=role)
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        if membership != "none" and admin.info.server_version < 160_000:
            pytest.skip("who makes a role may act as it, before Postgres 16")
        admin.execute(sql.SQL("create role {} login").format(owner))
        try:
            admin.execute(sql.SQL("create database {} owner {}").format(database, owner))
            if membership != "none":
                # What a role that may make roles has of those that it made.
                admin.execute(
                    sql.SQL(
                        "grant headwater_filter, headwater_filter_owner to {} with admin true, inherit false, set false"
                    ).format(owner)
                )
            assert run("migrate", "--dsn", owned).exit_code == 0
            told = findings(run("doctor", "--dsn", owned, "--json"), "filters")
            if membership == "none":
                assert "SQL filters are not available" in told[0]["message"]
                assert failed(run("sub", "create", "g", "true", "--dsn", owned, "--json"), 7)["hint"]
            for one in told:
                admin.execute(one["action"].split("run: ")[1].split(" Then ")[0].encode())
                assert run("migrate", "--dsn", owned).exit_code == 0
            assert findings(run("doctor", "--dsn", owned, "--json"), "filters") == []
            assert run("sub", "create", "g", "true", "--dsn", owned).exit_code == 0
        finally:
            admin.execute(sql.SQL("drop database if exists {} with (force)").format(database))
            admin.execute(sql.SQL("drop role {}").format(owner))
