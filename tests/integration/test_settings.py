"""Is every setting that is defined known everywhere, with the same default, limits and error for a bad value?"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import psycopg
import pytest
import typer.main
from psycopg import sql
from typer.testing import CliRunner

import headwater
from headwater.cli import app
from headwater.cli.setting_options import option_name
from headwater.log.settings import NewTopicSettings, TopicChanges, TopicSettings
from headwater.queue.settings import NewQueueSettings, QueueChanges, QueueSettings
from headwater.queue.worker import WorkerOptions
from headwater.servers.grpc.generated import headwater_pb2 as pb
from headwater.servers.http.app import create_api, openapi_document
from headwater.setting_definitions import MAX_JSON_SECONDS, SettingDefinition, changeable, definitions, values
from headwater.webhooks.settings import (
    NEW_WEBHOOK_SETTINGS,
    WEBHOOK_QUEUE,
    NewWebhookSettings,
    WebhookChanges,
    WebhookSettings,
)
from http_server import http_server
from patience import PATIENCE_SECONDS

DOCUMENT = openapi_document(create_api())
REFERENCE = (Path(__file__).parents[2] / "docs" / "reference" / "settings.md").read_text()
_numbers = itertools.count()


@dataclass(frozen=True)
class Noun:
    """Something with settings, and how it is called where settings are given."""

    name: str
    settings: type
    new: type
    changes: type
    create: str
    alter: str
    table: str
    path: str
    schemas: tuple[str, str, str]
    commands: tuple[str, str]
    # Other arguments of creating one.
    sql_arguments: str = ""
    more: tuple[str, ...] = ()

    @property
    def body(self) -> dict[str, Any]:
        return {"url": "https://a.example/"} if self.name == "webhook" else {}


TOPIC = Noun(
    "topic", TopicSettings, NewTopicSettings, TopicChanges, "headwater.create_topic", "headwater.alter_topic", "topic",
    "/v1/topics", ("TopicCreate", "TopicUpdate", "Topic"), ("topic create", "topic alter"), "name => 'sql'",
)  # fmt: skip
QUEUE = Noun(
    "queue", QueueSettings, NewQueueSettings, QueueChanges, "headwater.create_queue", "headwater.alter_queue", "queue",
    "/v1/queues", ("QueueCreate", "QueueUpdate", "QueueDetail"), ("queue create", "queue alter"),
    "queue_name => 'sql'",
)  # fmt: skip
WEBHOOK = Noun(
    "webhook", WebhookSettings, NewWebhookSettings, WebhookChanges, "headwater_internal.create_webhook",
    "headwater_internal.alter_webhook", "webhook", "/v1/webhooks", ("WebhookCreate", "WebhookUpdate", "WebhookInfo"),
    ("webhook create", "webhook update"),
    "webhook_name => 'sql', queue_name => 'sql', url => 'https://a.example/', "
    "secret => 'whsec_' || encode(decode(repeat('00', 32), 'hex'), 'base64')",
    more=("https://a.example/",),
)  # fmt: skip
NOUNS = (TOPIC, QUEUE, WEBHOOK)

each_noun = pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.name)
each_setting = pytest.mark.parametrize(
    ("noun", "one"),
    [(noun, one) for noun in NOUNS for one in definitions(noun.settings)],
    ids=lambda part: part.name,
)


def is_stored(noun: Noun, one: SettingDefinition) -> bool:
    """Whether the noun stores the setting itself: a webhook's concurrency is a limit of its queue."""
    return (noun.name, one.name) != ("webhook", "max_concurrency")


def probes(one: SettingDefinition) -> list[Any]:
    """Values in and just beyond the limits of a setting, as JSON."""
    if one.choices:
        return [*one.choices, "neither"]
    if one.type is bool:
        return [True, False, "maybe"]
    if one.type is dict:
        return [{}, {"x-one": "1"}, "text"]
    step: float = 1 if one.type is int else 0.001
    found: list[float] = []
    if one.minimum is not None:
        found += [one.minimum, one.minimum - step, one.minimum - 2, one.minimum + step]
    if one.above is not None:
        found += [one.above, one.above + step, one.above - step]
    if one.maximum is not None and one.maximum < 2**31 - 1:
        found += [one.maximum, one.maximum + step, one.maximum - step]
    assert found, "a number has limits"
    return [int(number) if one.type is int else float(number) for number in found]


def bad_values(one: SettingDefinition) -> list[Any]:
    return [value for value in probes(one) if not is_valid(one, value)]


def is_valid(one: SettingDefinition, value: Any) -> bool:
    try:
        one.from_json(value)
    except headwater.InvalidRequest:
        return False
    return True


def python_value(one: SettingDefinition, value: Any) -> Any:
    return timedelta(seconds=value) if one.type is timedelta else value


# --- definitions ---------------------------------------------------------------------------------------------


@each_noun
def test_keyword_arguments_are_the_settings(noun: Noun) -> None:
    changes = {one.name for one in changeable(noun.settings)}
    assert changes == noun.changes.__optional_keys__  # type: ignore[attr-defined]
    added = {one.name for one in definitions(noun.settings)}
    if noun is WEBHOOK:
        added = {one.name for one in NEW_WEBHOOK_SETTINGS}
    assert added == noun.new.__optional_keys__  # type: ignore[attr-defined]
    given, held = get_type_hints(noun.new), get_type_hints(noun.settings)
    for one in definitions(noun.settings):
        assert given[one.name] == held[one.name] | None, one.name


def test_workers_take_every_setting_of_a_queue() -> None:
    assert set(get_type_hints(NewQueueSettings)) < set(get_type_hints(WorkerOptions))
    registered = headwater.App()
    given = {one.name: one.default for one in definitions(QueueSettings) if one.default is not None}
    registered.worker("orders", queue="mailer", **given)(print)
    (made,) = registered.workers
    assert {**made.queue_settings, "ordered_keys": made.ordered_keys} == given
    with pytest.raises(headwater.InvalidRequest, match="max attempts are 1 to 1000"):
        registered.worker("orders", queue="mailer", max_attempts=0)
    with pytest.raises(TypeError, match="max_atempts"):
        registered.worker("orders", queue="mailer", max_atempts=1)  # type: ignore[call-overload]


@each_setting
def test_a_setting_has_help_and_a_default_within_its_limits(noun: Noun, one: SettingDefinition) -> None:
    assert re.fullmatch(r".+\.", one.help), "help is a sentence"
    assert one.help[0].isupper() or one.choices
    assert one.label
    assert one.rule == one.rule.strip()
    assert len(one.rule.encode()) <= 63 or one.type is dict, "Postgres cuts longer names of constraints"
    if one.default is None:
        assert one.none
    else:
        assert one.check(one.default) == one.default
    # Or the tests of bad values would test nothing.
    assert bad_values(one)
    assert is_valid(one, 0) or one.type is not int or not one.removable


# --- SQL -----------------------------------------------------------------------------------------------------


@each_noun
def test_what_is_created_without_settings_has_the_defaults(noun: Noun, log: headwater.Headwater) -> None:
    name = f"plain-{next(_numbers)}"
    created: Any
    if noun is TOPIC:
        created = log.create_topic(name)
    elif noun is QUEUE:
        created = log.create_queue(name)
    else:
        created = log.create_webhook(name, "https://a.example/")
        assert values(QueueSettings, log.queue(name)) == values(QueueSettings, WEBHOOK_QUEUE)
    assert values(noun.settings, created) == values(noun.settings, noun.settings())


@each_setting
def test_the_database_has_the_setting_with_the_same_default(
    noun: Noun, one: SettingDefinition, connection: psycopg.Connection[Any]
) -> None:
    if not is_stored(noun, one):
        return
    row = connection.execute(
        "select pg_get_expr(d.adbin, d.adrelid), not a.attnotnull, format_type(a.atttypid, null) from pg_attribute a "
        "left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum "
        "where a.attrelid = format('headwater_internal.%%I', %s::text)::regclass and a.attname = %s",
        (noun.table, one.name),
    ).fetchone()
    assert row is not None, "no such column"
    expression, nullable, kind = row
    assert nullable == one.nullable
    default = None if expression is None else connection.execute(sql.SQL(f"select ({expression})::{kind}")).fetchone()
    assert (None if default is None else default[0]) == one.default
    for function, expected in ((noun.create, True), (noun.alter, not one.fixed)):
        row = connection.execute("select proargnames from pg_proc where oid = %s::regproc", (function,)).fetchone()
        assert row is not None
        assert (one.name in row[0]) == expected, function
    if one.type not in (bool, dict):
        rules = connection.execute(
            "select conname from pg_constraint where conrelid = format('headwater_internal.%%I', %s::text)::regclass",
            (noun.table,),
        ).fetchall()
        assert (one.rule,) in rules


@each_setting
def test_the_database_takes_what_the_definition_takes(
    noun: Noun, one: SettingDefinition, connection: psycopg.Connection[Any], log: headwater.Headwater
) -> None:
    """Called directly, as from psql, with values in and just beyond the limits."""
    if not is_stored(noun, one) or one.type in (bool, dict):
        return
    if noun is WEBHOOK and not log.queues(["sql"]):
        log.create_queue("sql")
    arguments = noun.sql_arguments if noun is WEBHOOK else noun.sql_arguments.replace("'sql'", "'sql-new'")
    call = sql.SQL("select {}({}, {} => %s)").format(sql.SQL(noun.create), sql.SQL(arguments), sql.Identifier(one.name))
    for value in probes(one):
        with connection.transaction(force_rollback=True):
            if is_valid(one, value):
                connection.execute(call, (python_value(one, value),))
                continue
            with pytest.raises(psycopg.errors.CheckViolation) as refused:
                connection.execute(call, (python_value(one, value),))
            assert refused.value.diag.constraint_name == one.rule


# --- Python, command line, HTTP --------------------------------------------------------------------------------


def create(log: headwater.Headwater, noun: Noun, settings: dict[str, Any]) -> Any:
    name = f"made-{next(_numbers)}"
    if noun is TOPIC:
        return log.create_topic(name, **settings)
    if noun is QUEUE:
        return log.create_queue(name, **settings)
    return log.create_webhook(name, "https://a.example/", **settings)


def alter(log: headwater.Headwater, noun: Noun, name: str, changes: dict[str, Any]) -> Any:
    change = {"topic": log.alter_topic, "queue": log.alter_queue, "webhook": log.alter_webhook}[noun.name]
    return change(name, **changes)


def other_value(one: SettingDefinition) -> Any:
    """A valid value that is not the default, as JSON."""
    default = one.default.total_seconds() if isinstance(one.default, timedelta) else one.default
    # Partitions can only grow, so the highest is not tried.
    found = [value for value in probes(one) if is_valid(one, value) and value != default]
    return next(value for value in reversed(found) if value != 0 or one.type is bool)


@each_setting
def test_python_sets_and_changes_it_and_refuses_bad_values(
    noun: Noun, one: SettingDefinition, log: headwater.Headwater
) -> None:
    wanted = python_value(one, other_value(one))
    created = create(log, noun, {one.name: wanted})
    assert getattr(created, one.name) == wanted
    for value in bad_values(one):
        with pytest.raises(headwater.InvalidRequest) as refused:
            create(log, noun, {one.name: python_value(one, value)})
        assert refused.value.message == one.rule
    plain = create(log, noun, {})
    if one.fixed:
        with pytest.raises(TypeError, match=one.name):
            alter(log, noun, plain.name, {one.name: wanted})
        return
    assert getattr(alter(log, noun, plain.name, {one.name: wanted}), one.name) == wanted
    for value in bad_values(one):
        with pytest.raises(headwater.InvalidRequest) as refused:
            alter(log, noun, plain.name, {one.name: python_value(one, value)})
        assert refused.value.message == one.rule
    if one.removable and one.type is not timedelta:
        assert getattr(alter(log, noun, plain.name, {one.name: 0}), one.name) is None


Run = Callable[..., Any]


@pytest.fixture
def run(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process."""
    for name in [name for name in os.environ if name.startswith("HEADWATER_")]:
        monkeypatch.delenv(name)
    environment = {"HEADWATER_DSN": dsn, "HEADWATER_HOME": str(tmp_path), "COLUMNS": "200"}
    return lambda *arguments: CliRunner(env=environment).invoke(app, list(arguments))


def command_options(path: str) -> dict[str, Any]:
    command: Any = typer.main.get_command(app)
    for part in path.split():
        command = command.commands[part]
    return {parameter.name: parameter for parameter in command.params}


def as_option(one: SettingDefinition, value: Any) -> list[str]:
    option = option_name(one)
    if one.type is bool:
        return [option if value else f"--no-{option.removeprefix('--')}"]
    if one.type is dict:
        return [argument for name, text in value.items() for argument in (option, f"{name}={text}")]
    return [f"{option}={value}s" if one.type is timedelta else f"{option}={value}"]


@each_setting
def test_the_command_line_has_an_option_with_the_same_help_and_limits(
    noun: Noun, one: SettingDefinition, run: Run
) -> None:
    create_options, alter_options = map(command_options, noun.commands)
    shown = create_options[one.name]
    assert option_name(one) in shown.opts
    assert one.help in shown.help
    if one.type is not dict:
        assert f"Default: {one.default_text}." in shown.help
    if not one.choices:
        assert one.limits.capitalize() in shown.help
    assert (one.name in alter_options) == (not one.fixed)
    name = f"cli-{next(_numbers)}"
    made = run(*noun.commands[0].split(), name, *noun.more, *as_option(one, other_value(one)), "--json")
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)[one.json_name] == other_value(one)
    if one.type in (bool, dict):
        return
    for value in bad_values(one):
        # A negative duration cannot be written.
        if one.type is timedelta and value < 0:
            continue
        refused = run(*noun.commands[0].split(), f"{name}-bad", *noun.more, *as_option(one, value), "--json")
        if one.choices:
            assert refused.exit_code == 2
            assert all(choice in refused.output for choice in one.choices)
        else:
            assert refused.exit_code == 3, refused.output
            assert json.loads(refused.stderr)["message"] == one.rule


def schema_of(name: str, one: SettingDefinition) -> Any:
    return DOCUMENT["components"]["schemas"][name]["properties"][one.json_name]


@each_setting
def test_the_openapi_document_describes_it_with_the_same_limits(noun: Noun, one: SettingDefinition) -> None:
    create_schema, update_schema, shown_schema = noun.schemas
    for name in noun.schemas:
        if one.fixed and name == update_schema:
            assert one.json_name not in DOCUMENT["components"]["schemas"][name]["properties"]
            continue
        found = schema_of(name, one)
        assert "x-headwater-setting" in found
        assert found["title"] == one.label
        assert found["description"].startswith(one.help)
        nullable = one.nullable if name == shown_schema else one.removable
        limited = found["anyOf"][0] if nullable else found
        assert ({"type": "null"} in found.get("anyOf", ())) == nullable
        assert limited.get("minimum") == one.minimum
        assert limited.get("exclusiveMinimum") == one.above
        assert limited.get("maximum") == (MAX_JSON_SECONDS if one.type is timedelta else one.maximum)
        assert tuple(limited.get("enum", ())) == one.choices
        required = DOCUMENT["components"]["schemas"][name].get("required", ())
        assert (one.json_name in required) == (name == shown_schema)
    assert schema_of(create_schema, one).get("default") == one.default


@pytest.fixture(scope="module")
def http(dsn: str) -> Iterator[httpx.Client]:
    with http_server(dsn) as address, httpx.Client(base_url=address, timeout=PATIENCE_SECONDS) as client:
        yield client


@each_setting
def test_http_sets_and_changes_it_and_refuses_bad_values(
    noun: Noun, one: SettingDefinition, http: httpx.Client
) -> None:
    name = f"http-{next(_numbers)}"
    made = http.post(noun.path, json={"name": name, **noun.body, one.json_name: other_value(one)})
    assert made.status_code == 201, made.text
    assert made.json()[one.json_name] == other_value(one)
    plain = f"{name}-plain"
    assert http.post(noun.path, json={"name": plain, **noun.body}).status_code == 201
    requests: list[tuple[str, str, dict[str, Any]]] = [("POST", noun.path, {"name": f"{name}-bad", **noun.body})]
    if not one.fixed:
        requests.append(("PATCH", f"{noun.path}/{plain}", {}))
        changed = http.patch(f"{noun.path}/{plain}", json={one.json_name: other_value(one)})
        assert changed.json()[one.json_name] == other_value(one)
        if one.removable:
            assert http.patch(f"{noun.path}/{plain}", json={one.json_name: None}).json()[one.json_name] is None
    for method, path, body in requests:
        for value in [*bad_values(one), *([] if one.removable else [None])]:
            refused = http.request(method, path, json={**body, one.json_name: value})
            assert refused.status_code == 422, refused.text
            assert one.rule in refused.json()["detail"]
            assert refused.json()["problems"][0]["at"][-1] == one.json_name


# --- gRPC and the reference ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "noun"), [(pb.CreateTopicRequest, TOPIC), (pb.CreateQueueRequest, QUEUE), (pb.Topic, TOPIC)]
)
def test_settings_in_protocol_buffers_have_the_types_of_the_definition(message: Any, noun: Noun) -> None:
    types = {bool: "bool", int: "int32", float: "double", str: "string", timedelta: "double"}
    fields = message.DESCRIPTOR.fields_by_name
    listed = [one for one in definitions(noun.settings) if one.json_name in fields]
    assert len(listed) >= 3
    for one in listed:
        assert fields[one.json_name].type == getattr(fields[one.json_name], f"TYPE_{types[one.type].upper()}"), one.name


@each_setting
def test_the_reference_has_it_with_the_same_default_and_limits(noun: Noun, one: SettingDefinition) -> None:
    part = REFERENCE.partition(f"## Settings of a {noun.name}\n")[2].partition("\n## ")[0]
    (row,) = [line for line in part.splitlines() if line.startswith(f"| `{one.name}` ")]
    _, _, default, limits, meaning, _ = (cell.strip() for cell in row.split(" | ".strip()))
    assert (default, limits) == (one.default_text, one.limits)
    assert meaning.startswith(one.help)
