"""Is what administrators do by the command line told in the log, in the transaction of the act?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import Result
from psycopg import conninfo
from typer.testing import CliRunner

import headwater
from headwater.cli import app

Run = Callable[..., Result]
SECRET = "whsec_" + "c2VjcmV0" * 4
AVRO = '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}'

# One after the other, each with what is told of it. The first are what the others need.
ACTS = [
    ("topic create t --retention 7d", "topic.create", "t"),
    ("topic alter t --max-payload-bytes 1000", "topic.alter", "t"),
    ("account create shop --password very-secret", "account.create", "shop"),
    ("account allow shop write topic t", "account.allow", "shop"),
    ("account disallow shop write topic t", "account.disallow", "shop"),
    ("account key create shop --label ci", "key.create", "shop"),
    ("account delete shop", "account.delete", "shop"),
    ("queue create g --topic t", "queue.create", "g"),
    ("queue alter g --max-attempts 9", "queue.alter", "g"),
    ("queue pause g", "queue.pause", "g"),
    ("queue resume g", "queue.resume", "g"),
    ("queue bind g --type A", "queue.bind", "g"),
    ("queue unbind g 2", "queue.unbind", "g"),
    ("queue rewind g --after 0 --yes", "queue.rewind", "g"),
    ("dead redrive g --yes", "queue.redrive", "g"),
    ("dead discard g --yes", "queue.discard", "g"),
    ("queue delete g --yes", "queue.delete", "g"),
    ("cursor set c --to-end", "cursor.set", "c"),
    ("cursor delete c --yes", "cursor.delete", "c"),
    ("sub create s true", "subscription.create", "s"),
    ("sub delete 1 --yes", "subscription.delete", "s"),
    ("table watch public.watched", "table.watch", "public.watched"),
    ("table unwatch public.watched", "table.unwatch", "public.watched"),
    ("cron set p * * * * * t", "cron.set", "p"),
    ("cron pause p", "cron.pause", "p"),
    ("cron resume p", "cron.resume", "p"),
    ("cron delete p --yes", "cron.delete", "p"),
    ("settings set --segments-ahead 3", "settings.set", "log"),
    (
        f"webhook create w https://w.example/ --topic t --secret {SECRET} --header x-key=very-secret",
        "webhook.create",
        "w",
    ),
    ("webhook update w --timeout-seconds 9", "webhook.alter", "w"),
    ("webhook pause w", "webhook.pause", "w"),
    ("webhook resume w", "webhook.resume", "w"),
    (f"webhook rotate-secret w --secret {SECRET}", "webhook.rotate_secret", "w"),
    ("webhook delete w --with-queue --yes", "webhook.delete", "w"),
    ("schema register v FILE --type AVRO", "schema.register", "v"),
    ("schema config v --compatibility NONE", "schema.config", "v"),
    ("schema delete v", "schema.delete", "v"),
    ("topic delete t --yes", "topic.delete", "t"),
]


@pytest.fixture
def run(dsn: str, clean_environment: None) -> Run:
    return lambda *arguments, as_: CliRunner().invoke(
        app, [*arguments, "--dsn", conninfo.make_conninfo(dsn, options=f"-c role={as_}" if as_ else "")]
    )


def told(log: headwater.Headwater, after: int) -> list[Any]:
    return [event.data for event in log.read("headwater.audit", after=after, batch_size=1000)]


def words(command: str, schema: Path) -> list[str]:
    if command.startswith("cron set"):
        return ["cron", "set", "p", "* * * * *", "t"]
    return [str(schema) if word == "FILE" else word for word in command.split()]


def test_every_act_of_an_administrator_is_told_with_who_and_by_which_server_and_nothing_secret(
    run: Run, log: headwater.Headwater, connection: psycopg.Connection, tmp_path: Path
) -> None:
    schema = tmp_path / "order.avsc"
    schema.write_text(AVRO)
    connection.execute("create table watched (id integer primary key)")
    connection.execute("grant trigger on watched to headwater_admin")
    (role,) = connection.execute("select session_user").fetchone() or ("",)
    for command, action, subject in ACTS:
        before = log.state().head
        # Watching a table takes its owner; the rest an administrator may.
        result = run(*words(command, schema), as_="" if command.startswith("table") else "headwater_admin")
        assert result.exit_code == 0, (command, result.output)
        events = told(log, before)
        assert [(one["action"], one["subject"], one["actor"]) for one in events] == [(action, subject, role)], command
        assert events[0]["detail"]["server"] == "cli"
        assert events[0]["detail"]["system_user"]
        assert "very-secret" not in json.dumps(events)
        assert SECRET not in json.dumps(events)
    details = {one["action"]: one["detail"] for one in told(log, 0)}
    assert details["topic.alter"]["max_payload_bytes"] == 1000
    assert "retention" not in details["topic.alter"]
    assert details["webhook.create"]["headers"] == ["x-key"]


def test_an_act_that_fails_is_not_told_and_one_that_cannot_be_told_is_not_done(
    run: Run, log: headwater.Headwater, connection: psycopg.Connection
) -> None:
    assert run("topic", "create", "once", as_="headwater_admin").exit_code == 0
    before = log.state().head
    assert run("topic", "create", "once", as_="headwater_admin").exit_code != 0
    assert run("account", "delete", "nobody", as_="headwater_admin").exit_code == 4
    assert told(log, before) == []
    connection.execute(
        "alter table headwater_internal.event add constraint no_audit check (type <> 'topic.create') not valid"
    )
    try:
        assert run("topic", "create", "untold", as_="headwater_admin").exit_code != 0
    finally:
        connection.execute("alter table headwater_internal.event drop constraint no_audit")
    assert "untold" not in {topic.name for topic in log.topics()}


def test_what_a_consumer_does_with_what_is_its_own_needs_no_right_to_the_record(
    run: Run, log: headwater.Headwater
) -> None:
    log.create_topic("headwater.audit", if_missing=True)
    before = log.state().head
    assert run("cursor", "set", "own", "--to-start", as_="headwater_consumer").exit_code == 0
    assert told(log, before) == []


def test_a_schema_that_is_registered_again_is_told_once(run: Run, log: headwater.Headwater, tmp_path: Path) -> None:
    schema = tmp_path / "order.avsc"
    schema.write_text(AVRO)
    log.create_topic("headwater.audit", if_missing=True)
    before = log.state().head
    for _ in range(2):
        assert run("schema", "register", "again", str(schema), as_="headwater_admin").exit_code == 0
    assert [one["action"] for one in told(log, before)] == ["schema.register"]
