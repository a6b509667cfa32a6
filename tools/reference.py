"""Write the pages of docs/reference from the code: command line, Python, SQL, errors, settings, metrics, limits.

`--check` writes nothing and ends with 1 if a page is not what the code says.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

import typer.main

import headwater
from headwater import errors, settings
from headwater.calls import metrics as metric_calls
from headwater.calls import overview, pipeline_runs
from headwater.calls import store as store_calls
from headwater.cli import app, exit_codes
from headwater.cli.commands import serve
from headwater.client.eventstore.postgres import EventStore
from headwater.client.eventstore.subscribe import StoreSubscriptions
from headwater.client.log.typed import TypedLog
from headwater.database import schema
from headwater.eventstore import field_index, group_commit, query, sqlite
from headwater.log import model as log_model
from headwater.log.payload_hooks import TypedTopic
from headwater.log.settings import TopicSettings
from headwater.observability import metrics
from headwater.queue import model as queue_model
from headwater.queue import worker
from headwater.queue.settings import QueueSettings
from headwater.schema_registry import registry, schemas
from headwater.servers.grpc import convert as grpc_convert
from headwater.servers.grpc import server as grpc_server
from headwater.servers.http import events as http_events
from headwater.servers.http import requests as http_requests
from headwater.servers.http import sse, uvicorn_protocol
from headwater.servers.kafka import coordinator as kafka_coordinator
from headwater.servers.kafka import fetch as kafka_fetch
from headwater.servers.kafka import produce as kafka_produce
from headwater.servers.kafka import transactions as kafka_transactions
from headwater.setting_definitions import SettingDefinition, definitions, format_number
from headwater.sql_subscriptions import model as subscription_model
from headwater.sql_subscriptions import reader as subscription_reader
from headwater.webhooks import model as webhook_model
from headwater.webhooks import requests as webhook_requests
from headwater.webhooks import sender as webhook_sender
from headwater.webhooks.settings import WEBHOOK_QUEUE, WebhookSettings

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
FUNCTIONS = ROOT / "src" / "headwater" / "database" / "schema" / "functions"
MIGRATIONS = ROOT / "src" / "headwater" / "database" / "schema" / "migrations"
PROTOS = ROOT / "proto"
# The modules whose classes are the "Values" of the Python page.
VALUE_MODULES = (log_model, queue_model, subscription_model, webhook_model, pipeline_runs, metric_calls, query)
NOTE = "<!-- Written by tools/reference.py; change the code, then run that. -->\n"


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, tuple("---" for _ in columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def paragraph(text: str | None) -> str:
    return inspect.cleandoc(text or "")


# --- command line --------------------------------------------------------------------------------------------


def cli_page() -> str:
    parts = [
        "# The command line",
        "Every command prints text for people, and with `--json` one JSON document (`read` and `tail`: one event per "
        "line). Errors are written to standard error; with `--json` as an object with `error`, `message`, `hint`, "
        "`detail` and `exit_code`. A command connects to the database given by `--dsn`, otherwise by `HEADWATER_DSN`, "
        "otherwise to the embedded server of `headwater up`.",
        "In JSON, times are in ISO 8601 format in UTC and durations are in seconds. Write a duration as `30s`, `5m`, "
        "`1h30m`, `7d` or `2w`, and a time as `2026-03-01T12:00:00Z` (without a time zone: local time).",
        "## Exit codes",
        table(("code", "means"), [(str(code), meaning) for code, meaning in exit_codes.MEANINGS.items()]),
    ]
    for path, command in commands(typer.main.get_command(app)):
        parts += [f"## headwater {path}", paragraph(command.help).replace("\n\n", "\n\n"), usage(path, command)]
        if options := [row for parameter in command.params for row in option_row(parameter)]:
            parts.append(table(("option", "means"), options))
        example_lines = (command.epilog or "").replace("\\[", "[").split("\n\n")[1:]
        parts.append("```console\n" + "".join(f"$ {line}\n" for line in example_lines) + "```")
    return "\n\n".join(part.strip() for part in parts)


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


def usage(path: str, command: Any) -> str:
    arguments = [argument_name(p) for p in command.params if p.param_type_name == "argument"]
    return f"`{' '.join(['headwater', path, *arguments, '[OPTIONS]'])}`"


def argument_name(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def option_row(parameter: Any) -> Iterator[tuple[str, str]]:
    if parameter.name == "help":
        return
    text = parameter.help or ""
    if parameter.param_type_name == "argument":
        yield f"`{argument_name(parameter)}`", text
        return
    names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
    default = parameter.default
    if default not in (None, False, "") and not callable(default) and not parameter.is_flag:
        text = f"{text} Default: {getattr(default, 'value', default)}."
    yield names, text


# --- Python --------------------------------------------------------------------------------------------------


def python_page() -> str:
    parts = [
        "# Python",
        "`headwater` is the blocking library; `headwater.aio` has the same names for asyncio (`aio.connect`, "
        "`AsyncHeadwater`). A method with `connection=` runs inside your own transaction on that connection.",
        "## Connecting",
        described("headwater.connect", headwater.connect),
        "## The log: `Headwater`",
        paragraph(headwater.Headwater.__doc__),
    ]
    # The last ancestor before object is the base class of the others.
    *_, base, _ = headwater.Headwater.__mro__
    for kind in (base, *headwater.Headwater.__bases__):
        parts += [f"## {section_title(kind)}", *members_of(kind)]
    parts += [
        "## Typed topics: `TypedTopic`",
        described("TypedTopic", TypedTopic),
        *members_of(TypedTopic),
        "`Headwater.typed` returns a `TypedLog`:",
        *members_of(TypedLog),
        "## An event store: `EventStore`",
        paragraph(EventStore.__doc__),
        *members_of(EventStore),
        *members_of(StoreSubscriptions),
        "### open",
        paragraph(headwater.open.__doc__),
        "## Workers: `App`",
        paragraph(worker.App.__doc__),
        *members_of(worker.App),
        "A handler returns None when the event is done, or [Retry](#retry), [Dead](#dead) or [Snooze](#snooze). A "
        "worker is called with a [ClaimedEvent](#claimedevent), a subscriber with an [Event](#event), a batch "
        "handler with a list of them. The package is typed: type checkers report a handler with other parameters.",
        "## Values",
    ]
    for module in VALUE_MODULES:
        for name, kind in vars(module).items():
            if not name.startswith("_") and inspect.isclass(kind) and kind.__module__ == module.__name__:
                parts.append(f"### {name}\n\n{paragraph(kind.__doc__)}\n\n{fields_of(kind)}")
    return "\n\n".join(part.strip() for part in parts)


def section_title(kind: type) -> str:
    """The title of a section: the first line of the class's docstring."""
    return paragraph(kind.__doc__).partition("\n")[0].rstrip(".")


def members_of(kind: type) -> list[str]:
    return [
        described(name, member)
        for name, member in vars(kind).items()
        if not name.startswith("_") and inspect.isfunction(member)
    ]


def described(name: str, function: Any) -> str:
    signature = inspect.signature(inspect.unwrap(function))
    shown: list[str] = []
    starred = False
    more = ""
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            shown += [] if starred else ["*"]
            shown += keyword_settings(function, parameter.annotation)
            more = "\n\nDefaults, limits and meaning of its settings: [settings](settings.md)."
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            shown.append("*")
            starred = True
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        star = ""
        if parameter.kind is parameter.VAR_POSITIONAL:
            star, starred = "*", True
        shown.append(f"{star}{parameter.name}: {parameter.annotation}{default}")
    returns = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    one_line = f"{name}({', '.join(shown)}){returns}"
    if len(one_line) > 100:
        one_line = f"{name}(\n" + "".join(f"    {part},\n" for part in shown) + f"){returns}"
    one_line = one_line.replace("Connection[Any]", "Connection")
    if inspect.iscoroutinefunction(function):
        one_line = f"async {one_line}"
    title = name.rpartition(".")[2]
    return f"### {title}\n\n```python\n{one_line}\n```\n\n{paragraph(inspect.unwrap(function).__doc__)}{more}"


def keyword_settings(function: Any, annotation: str) -> list[str]:
    """The keyword arguments that `**settings: Unpack[...]` stands for."""
    kind = vars(inspect.getmodule(inspect.unwrap(function)))[annotation.removeprefix("Unpack[").removesuffix("]")]
    # In Python 3.11 the annotations of a TypedDict are references, and those of its bases come first.
    return [f"{name}: {annotation_text(one)} = None" for name, one in inspect.get_annotations(kind).items()]


def annotation_text(annotation: Any) -> str:
    return str(getattr(annotation, "__forward_arg__", annotation))


def fields_of(kind: type) -> str:
    """The fields of a value: its own, then its settings."""
    rows = [(name, annotation_text(one)) for name, one in inspect.get_annotations(kind).items()]
    for base in kind.__mro__[1:]:
        if is_dataclass(base):
            rows += [(one.name, setting_type(base, one.name)) for one in definitions(base)]
    return "".join(f"- `{name}: {annotation}`\n" for name, annotation in rows)


def setting_type(noun: type, name: str) -> str:
    """The type of a setting as it is written."""
    text = str(get_type_hints(noun)[name])
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", re.sub(r"<class '(.*)'>", r"\1", text))


# --- SQL -----------------------------------------------------------------------------------------------------

DEFINITION = re.compile(
    r"((?:^-- [^\n]*\n)*)^create or replace (function|view) (headwater\.\w+)(.*?)^(?:language|as|select)\b",
    re.MULTILINE | re.DOTALL,
)


TYPE = re.compile(
    r"((?:^-- [^\n]*\n)*)^create type (headwater(?:_internal)?\.\w+) as \((.*?)\);", re.MULTILINE | re.DOTALL
)


def sql_page() -> str:
    parts = [
        "# SQL",
        "The functions and views of the schema `headwater` are the contract, from psql and from any language. "
        "Arguments with a default may be left out, or named: `headwater.publish('orders', '{}', key => 'k')`. "
        "Errors have SQLSTATEs of their own, see [errors](errors.md). The schema `headwater_internal` holds the "
        "tables and all other functions: they change without notice, so do not call them.",
    ]
    shown_heads = ""
    for name in schema.FUNCTION_FILES:
        source = (FUNCTIONS / name).read_text()
        found = [match.groups() for match in DEFINITION.finditer(source)]
        if not found:
            continue
        about = " ".join(line.removeprefix("-- ") for line in source.partition("\n\n")[0].splitlines())
        parts.append(f"## {about.partition('. ')[0].rstrip('.')}")
        for comment, kind, full_name, rest in found:
            promise = " ".join(line.removeprefix("-- ") for line in comment.strip().splitlines())
            head = f"{full_name}{rest}".strip()
            shown_heads += f"{head}\n"
            shown = f"```sql\n{head}\n```\n\n" if kind == "function" else ""
            parts.append(f"### {full_name}{' (view)' if kind == 'view' else ''}\n\n{promise}\n\n{shown}")
    parts.append("## Types")
    for path in sorted(MIGRATIONS.glob("*.sql")):
        for comment, name, body in TYPE.findall(path.read_text()):
            # What filters see is the result of no function, but users write filters over it.
            if name == "headwater.filter_event" or re.search(rf"\b{re.escape(name)}\b", shown_heads):
                promise = " ".join(line.removeprefix("-- ") for line in comment.strip().splitlines())
                parts.append(f"### {name}\n\n{promise}\n\n```sql\n{name} ({body})\n```")
    return "\n\n".join(part.strip() for part in parts)


# --- errors and settings -------------------------------------------------------------------------------------


def errors_page() -> str:
    kinds = [
        kind
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.HeadwaterError) and kind is not errors.HeadwaterError
    ]
    rows = []
    for kind in kinds:
        states = [state for state, mapped in errors.BY_SQLSTATE.items() if mapped is kind]
        if kind is errors.LogUnavailable:
            states.append("08xxx")
        codes = ", ".join(f"`{state}`" for state in sorted(states, key=lambda s: (not s.startswith("HW"), s)))
        meaning = " ".join(paragraph(kind.__doc__).split())
        rows.append((f"`{kind.__name__}`", meaning, codes or "-", str(exit_codes.code_for(kind))))
    return "\n\n".join(
        (
            "# Errors",
            "All errors are subclasses of `headwater.HeadwaterError`. An error has a `message`, often a `hint` "
            "(what to do next), and a `detail` for programs. SQL functions raise these codes with the same detail as "
            "JSON. Any other error is a bug and is not translated.",
            table(("error", "means", "SQLSTATE", "exit code"), rows).strip(),
            "For a violated check constraint (SQLSTATE 23514), the message is the name of the constraint, such as "
            "`a type is 1 to 200 characters`. Exit codes are listed in [the command line](cli.md#exit-codes).",
        )
    )


def settings_page() -> str:
    return "\n\n".join(
        (
            "# Settings",
            "## Environment",
            "The command line reads these variables at its start; options override them. The library does not read "
            "environment variables.",
            table(("variable", "means"), [(f"`{name}`", text) for name, text in settings.VARIABLES.items()]).strip(),
            "## Settings of the log",
            "Stored in the database, in the single row of `headwater_internal.setting`. Show them with `headwater "
            "settings show` and change them with `headwater settings set`; a change takes effect immediately.",
            table(
                ("setting", "default", "means"),
                [
                    ("`segment_interval`", "1 day", "maximum time that events are written to one segment"),
                    ("`segments_ahead`", "3", "number of segments to create ahead"),
                    ("`auto_create_topics`", "false", "whether publishing creates a missing topic"),
                    (
                        "`kafka_offsets_kept`",
                        "7 days",
                        "how long to keep the offsets of a Kafka consumer group without members",
                    ),
                    (
                        "`max_publisher_seconds`",
                        "none",
                        "a publishing transaction that stays open longer is terminated; none: never",
                    ),
                ],
            ).strip(),
            "## Settings of a topic",
            "Set with `headwater topic create` and changed with `headwater topic alter`.",
            settings_table(definitions(TopicSettings)),
            "## Settings of a queue",
            "Set with `headwater queue create` or `@app.worker`, and changed with `headwater queue alter`.",
            settings_table(definitions(QueueSettings)),
            "## Settings of a webhook",
            "Set with `headwater webhook create` and changed with `headwater webhook update`. Retries are settings of "
            "its queue; a queue that `headwater webhook create` creates has these: "
            + ", ".join(
                f"`{one.name}` {format_number(getattr(WEBHOOK_QUEUE, one.name))}"
                for one in definitions(QueueSettings)
                if getattr(WEBHOOK_QUEUE, one.name) != one.default
            )
            + ".",
            settings_table(definitions(WebhookSettings)),
        )
    )


def settings_table(found: tuple[SettingDefinition, ...]) -> str:
    rows = []
    for one in found:
        meaning = f"{one.help} Cannot be changed." if one.fixed else one.help
        if one.none:
            meaning += "" if one.type is timedelta else f" 0: {one.none}."
        rows.append((f"`{one.name}`", one.default_text, one.limits, meaning))
    return table(("setting", "default", "limits", "means"), rows).strip()


def metrics_page() -> str:
    def rows(source: str) -> list[tuple[str, ...]]:
        return [
            (f"`{metric.name}`", metric.kind, ", ".join(f"`{label}`" for label in metric.labels), metric.meaning)
            for metric in metrics.METRICS
            if metric.source == source
        ]

    columns = ("metric", "kind", "labels", "means")
    return "\n\n".join(
        (
            "# Metrics and log fields",
            "A server provides metrics at `/metrics`, `headwater metrics` prints them, and the SQL function "
            "`headwater.metrics()` returns those of the database. [How to monitor](../how-to/monitor.md) explains "
            "which to watch.",
            "## Metrics of the log",
            "Read from the database at most once a second; every process returns the same values. Metrics with a name "
            "label cover the first 200 topics, queues, cursors and pipelines each, by name; `headwater_topics`, "
            "`headwater_queues` and `headwater_cursors` are the total numbers.",
            table(columns, rows("database")).strip(),
            "## Metrics of a process",
            "Counted since the start of the process, or of all processes of `headwater serve --processes`. A metric "
            "has at most 1000 combinations of labels; further ones are counted as `(others)`.",
            table(columns, rows("process")).strip(),
            "## Log fields",
            "The text of a log line is constant; values are fields. With `HEADWATER_LOG_FORMAT=json`, or `headwater "
            "--log-format json`, each line is one JSON object with `time`, `level`, `logger`, `message`, the "
            "fields that apply, and `exception` with the traceback of an error.",
            table(("field", "means"), [(f"`{name}`", text) for name, text in metrics.LOG_FIELDS.items()]).strip(),
        )
    )


def kafka_page() -> str:
    from headwater.servers.kafka.api_keys import SUPPORTED_VERSIONS
    from headwater.servers.kafka.configs import TOPIC_CONFIGS
    from headwater.servers.kafka.dispatch import FEATURES

    apis = [
        (str(int(api)), api.name.lower().replace("_", " "), f"{oldest} to {newest}" if newest > oldest else str(oldest))
        for api, (oldest, newest) in sorted(SUPPORTED_VERSIONS.items())
    ]
    configs = [
        (f"`{name}`", f"`{config.default}`" if config.default else "", config.documentation, config.no_effect)
        for name, config in TOPIC_CONFIGS.items()
    ]
    return "\n\n".join(
        (
            "# Kafka: supported APIs, settings and differences",
            "## APIs and versions",
            "The server closes the connection on any other API or version, except for ApiVersions, which always "
            "returns this table. Produce 0 to 2 are listed but rejected: old librdkafka disables compression if they "
            "are missing.",
            table(("number", "API", "versions"), apis).strip(),
            "Finalized features: " + ", ".join(f"`{name}` {level}" for name, level in FEATURES.items()) + ".",
            "## Topic settings",
            table(("setting", "default", "means"), [row[:3] for row in configs if not row[3]]).strip(),
            "### Settings without effect",
            "Validated, stored and returned for tools that set them, but not used.",
            table(("setting", "default", "why"), [row[:3] for row in configs if row[3]]).strip(),
            "## Differences from Kafka",
            "\n".join(f"- {difference}" for difference in KAFKA_DIFFERENCES),
        )
    )


KAFKA_DIFFERENCES = (
    "Not supported: share groups, quotas, delegation tokens, reassignment of partitions, dynamic broker settings.",
    "Compaction runs every 15 seconds and removes all records that are superseded by then. It waits for consumers that "
    "hold retention and for archives. The last record of a partition stays even if it is a tombstone.",
    "`retention.ms` counts from the time at which the log segment of a record was closed. `retention.bytes` is applied "
    "record by record, once a minute, until the partition is within the limit; it counts keys, values and headers. "
    "Both wait for consumers that hold retention and for archives, and apply only if `cleanup.policy` contains "
    "`delete`. `headwater topic clean` (in SQL `headwater.clean_up`) applies both at once, record by record.",
    "DeleteRecords fails with POLICY_VIOLATION for records that an archive or a consumer that holds retention has not "
    "read yet, and for event stores and topics that are only compacted. In an open topic it deletes up to a position.",
    "DescribeLogDirs returns the sizes of the partitions that a broker leads, in a single directory `postgres`.",
    "A consumer group with members of one protocol (classic or KIP-848) rejects members of the other. With KIP-848, "
    "topic patterns are Postgres regular expressions: RE2 syntax that Postgres lacks is rejected or differs in "
    "meaning.",
    "An open topic can be consumed but not produced to. Its offsets are positions, with gaps.",
    "Records of a transaction enter the log when it commits. Their acknowledgements carry no offset, and "
    "`read_uncommitted` consumers do not see them earlier.",
    "A key has at most 65535 bytes. `max.message.bytes` also limits each value after decompression; a batch may "
    "decompress to at most 64 MiB. A batch of more than 100000 records is rejected with MESSAGE_TOO_LARGE.",
    "Records are stored individually, not as batches. Fetched records are compressed according to the topic's "
    "`compression.type`; with `producer`, batches in the broker's cache are sent as they were produced, and others "
    "uncompressed.",
    "Fetch sessions are not supported: every fetch is a full one.",
    "Any broker serves any partition. Metadata names a leader for each to spread the load; the leader epoch is the "
    "epoch of the log.",
    "There are no Kafka replicas: Postgres replicates. `acks=1` and `acks=all` both mean committed in Postgres.",
    "Looking up an offset by timestamp scans the partition.",
    "Offsets of a consumer group without members are kept for seven days after its last member or commit; "
    "`headwater settings set --kafka-offsets-kept` changes that.",
    "When another broker takes over a consumer group, its members rejoin.",
    "The `uniform` assignor balances each topic among its subscribers to within one partition, and the total if all "
    "members subscribe to the same topics; members with more topics have more partitions.",
    "Transactional producers expire after seven days without activity.",
    "ACLs can only allow; `DENY` and hosts other than `*` are rejected. `DESCRIBE_CONFIGS`, `ALTER_CONFIGS` and "
    "`IDEMPOTENT_WRITE` are stored as `DESCRIBE`, `ALTER` and `WRITE`; an idempotent producer needs no extra "
    "permission. `CLUSTER_ACTION`, which brokers use among themselves, is rejected. Setting a SCRAM credential for an "
    "unknown user creates an account without permissions; the account remains when its last credential is deleted.",
)


# --- HTTP ----------------------------------------------------------------------------------------------------


def http_page() -> str:
    from headwater.servers.http.app import create_api, openapi_document
    from headwater.servers.http.errors import STATUS

    found = openapi_document(create_api())
    statuses: dict[int, list[str]] = {}
    for kind, status in STATUS.items():
        statuses.setdefault(status, []).append(f"`{kind.__name__}`")
    parts = [
        "# HTTP",
        f"{found['info']['description']} [How to use it](../how-to/http.md). As OpenAPI: `/openapi.json`.",
        "## Errors",
        "`type` is `urn:headwater:error:` followed by the error name. [Errors](errors.md) describes those of the log.",
        table(("status", "errors"), [(str(status), ", ".join(names)) for status, names in sorted(statuses.items())]),
    ]
    by_tag: dict[str, list[str]] = {}
    for path, methods in found["paths"].items():
        for method, route in methods.items():
            by_tag.setdefault(route["tags"][0], []).append(http_route(path, method, route))
    for tag, routes in by_tag.items():
        parts += [f"## {tag.capitalize()}", *routes]
    parts.append("## Schemas")
    for name, shape in sorted(found["components"]["schemas"].items()):
        if name not in ("HTTPValidationError", "ValidationError"):
            parts.append(f"### {name}\n\n{paragraph(shape.get('description'))}\n\n{http_fields(shape)}")
    return "\n\n".join(part.strip() for part in parts)


def http_route(path: str, method: str, route: Any) -> str:
    lines = [
        f"### {method.upper()} {path}",
        paragraph(route.get("description")),
        f"Permission: {route['x-headwater-permission']}.",
    ]
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        lines.append(f"Body: {http_type(body)}.")
    if rows := [
        (f"`{one['name']}`", one["in"], http_type(one["schema"]), one.get("description", ""))
        for one in route.get("parameters", ())
    ]:
        lines.append(table(("parameter", "in", "type", "meaning"), rows))
    answers = []
    for status, one in sorted(route["responses"].items()):
        if status < "400":
            content = next(iter(one.get("content", {}).items()), ("", {}))
            kind = content[0] if content[0] == "text/event-stream" else http_type(content[1].get("schema", {}))
            answers.append(f"{status}: {kind}")
    problems = [status for status in sorted(route["responses"]) if status >= "400"]
    lines.append(f"Responses: {'; '.join(answers)}." + (f" Problems: {', '.join(problems)}." if problems else ""))
    return "\n\n".join(line.strip() for line in lines if line)


def http_type(shape: Any) -> str:
    if "$ref" in shape:
        name = shape["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for word in ("anyOf", "oneOf"):
        if word in shape:
            return " or ".join(dict.fromkeys(http_type(one) for one in shape[word]))
    if "enum" in shape or "const" in shape:
        return ", ".join(f"`{one}`" for one in shape.get("enum", [shape.get("const")]))
    if shape.get("type") == "array":
        return f"list of {http_type(shape.get('items', {}))}"
    bounds = [
        f"{word} {format_number(shape[key])}"
        for key, word in (
            ("minimum", "from"),
            ("exclusiveMinimum", "above"),
            ("maximum", "to"),
            ("minLength", "from"),
            ("maxLength", "to"),
        )
        if key in shape
    ]
    kind = {"string": shape.get("format", "text"), "object": "object"}.get(shape.get("type"), shape.get("type", "any"))
    return f"{kind} ({' '.join(bounds)})" if bounds else str(kind)


def http_fields(shape: Any) -> str:
    required = set(shape.get("required", ()))
    return "".join(
        f"- `{name}`{'' if name in required else ' (optional)'}: {http_type(one)}"
        f"{'. ' + one['description'] if one.get('description') else ''}"
        f"{setting_default(one)}\n"
        for name, one in shape.get("properties", {}).items()
    )


def setting_default(shape: Any) -> str:
    return f" Default: {json.dumps(shape['default'])}." if "x-headwater-setting" in shape and "default" in shape else ""


def grpc_page() -> str:
    from headwater.servers.grpc import errors as grpc_errors

    parts = [
        "# gRPC: services, methods and status codes",
        "The messages and their fields are documented in the proto files. "
        "See also [how to use gRPC](../how-to/grpc.md).",
    ]
    for path in sorted(PROTOS.rglob("*.proto")):
        text = path.read_text()
        about = text.partition("\n")[0].removeprefix("// ")
        package = re.search(r"^package (.*);", text, re.MULTILINE)
        assert package is not None
        file = path.relative_to(ROOT).as_posix()
        parts += [f"## `{package[1]}`", f"{about} [{file}](../../{file})"]
        for about_service, name, body in PROTO_SERVICE.findall(text):
            rows = [
                (f"`{method}`", f"`{request}`", f"`{response}`", joined_comment(comment))
                for comment, method, request, response in PROTO_METHOD.findall(body)
            ]
            parts += [
                f"### {name}",
                joined_comment(about_service),
                table(("method", "request", "response", "description"), rows),
            ]
    codes: dict[str, list[str]] = {}
    for error, code in grpc_errors.BY_ERROR.items():
        codes.setdefault(code.name, []).append(f"`{error.__name__}`")
    rows = [(f"`{code}`", ", ".join(kinds)) for code, kinds in sorted(codes.items())]
    rows.append(("`INTERNAL`", "all other errors: a bug in the server"))
    rows.append(("`DEADLINE_EXCEEDED`", "the deadline of the call passed; the operation may have been completed"))
    parts += [
        "## Status codes",
        "The trailing metadata contains the [error](errors.md) in `headwater-error-bin`, as "
        "JSON with `error`, `message`, `hint` and `detail`.",
        table(("status", "errors"), rows),
        "## Limits",
        "\n".join(f"- {limit}" for limit in GRPC_LIMITS),
        "## Differences from Orisun",
        "\n".join(f"- {difference}" for difference in ORISUN_DIFFERENCES),
    ]
    return "\n\n".join(part.strip() for part in parts)


PROTO_SERVICE = re.compile(r"((?:^// [^\n]*\n)*)^service (\w+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
PROTO_METHOD = re.compile(r"((?:^ *// [^\n]*\n)*)^ *rpc (\w+)\(([^)]*)\) returns \(([^)]*)\)", re.MULTILINE)


def joined_comment(comment: str) -> str:
    return " ".join(line.strip().removeprefix("// ") for line in comment.strip().splitlines())


GRPC_LIMITS = (
    "A message has at most 64 MiB. The size of an event is limited by its topic: 1 MiB by default.",
    "An append has at most 1,000 events, a query 100 items, and a batch of a read 10,000 events and 16 MiB.",
    "A connection has at most 1,000 concurrent calls, a process 10,000. Clients may ping at most every ten seconds.",
    "A stream of appends has at most 256 pending appends, or 16 MiB.",
    "For a slow client, the server buffers one batch of a stream: up to 4 MiB for Follow, up to 16 MiB for a "
    "subscription to an event store.",
    "A call waits up to 30 seconds for an unavailable database, or until its deadline; a subscription waits 60 "
    "seconds.",
)
ORISUN_DIFFERENCES = (
    "Both numbers of a position are equal, so events that were saved together do not share the commit position. "
    "Positions are global to the log and have gaps.",
    "Event ids are unique within a boundary and make saves idempotent: a repeated save returns the result of the "
    "first, even if its condition no longer holds. Using the id of another event is INVALID_ARGUMENT. An id is any "
    "text of up to 255 characters; it is generated if missing.",
    "An event has at most 1 MiB of data and 64 KiB of metadata, a type at most 200 characters, and a call at most "
    "1,000 events and 100 criteria.",
    "Data is returned exactly as it was written. An event that was appended through another protocol and is not JSON "
    "is returned as `payload_base64`.",
    "A page that would exceed the maximum message size is RESOURCE_EXHAUSTED.",
    "A subscriber without a position gets only new events. A subscriber without a name is not exclusive.",
    "An index covers the events whose values have the type of its fields; other events are saved without being "
    "indexed. The type of events is always indexed, so `eventType` is removed from the fields and conditions of an "
    "index, which then covers more events.",
    "A boundary is active at once. Its description and the namespace of its placement are not stored.",
    "The id and the name of a user are the username. Permissions are those of the account, per topic.",
    "Reflection and health checks need no authentication.",
)


# --- limits --------------------------------------------------------------------------------------------------

# Migrations whose constraints are limits of what users store; a constraint's name is the sentence that they read.
LIMITED = ("0001_log.sql", "0003_queue.sql", "0004_subscription.sql", "0005_pipeline.sql", "0006_archive.sql")


def limits_page() -> str:
    rows = [
        (
            "Event store",
            [
                ("events in one append", number(store_calls.MAX_EVENTS)),
                ("tags of an event, or of a query item", number(query.MAX_TAGS)),
                ("length of a tag", f"{number(query.MAX_TAG_CHARACTERS)} characters"),
                ("items of a query", number(query.MAX_ITEMS)),
                ("nesting of JSON", f"{number(query.MAX_JSON_DEPTH)} levels"),
                ("fields of a field index", number(field_index.MAX_FIELDS)),
                ("conditions of a field index", number(field_index.MAX_CONDITIONS)),
                ("appends in one commit group", number(group_commit.MAX_GROUP_APPENDS)),
                ("events in one commit group", number(group_commit.MAX_GROUP_EVENTS)),
                ("appends of one process that wait", number(group_commit.MAX_WAITING)),
                ("payload on SQLite", size(sqlite.MAX_PAYLOAD_BYTES)),
                ("snapshot of a decider on SQLite", size(sqlite.MAX_SNAPSHOT_BYTES)),
            ],
        ),
        (
            "HTTP",
            [
                ("events in one request", number(http_requests.MAX_EVENTS)),
                ("header of a request", size(uvicorn_protocol.MAX_HEAD_BYTES)),
                ("time for the header of a request", f"{uvicorn_protocol.MAX_HEAD_SECONDS:g} s"),
                ("length of an SSE stream, after which a client reconnects", f"{sse.MAX_STREAM_SECONDS / 3600:g} h"),
                ("events that one search scans", number(http_events.MAX_EXAMINED)),
            ],
        ),
        (
            "gRPC",
            [
                ("message", size(grpc_server.MAX_MESSAGE_BYTES)),
                ("calls at a time", number(grpc_server.MAX_CALLS)),
                ("events of one read", number(grpc_convert.MAX_READ)),
                ("bytes of one read", size(grpc_convert.MAX_READ_BYTES)),
            ],
        ),
        (
            "Kafka, for each broker",
            [
                ("connections", number(serve.MAX_KAFKA_CONNECTIONS)),
                ("records in one batch", number(kafka_produce.MAX_BATCH_RECORDS)),
                ("one batch, uncompressed", size(kafka_produce.MAX_UNPACKED_BYTES)),
                ("length of a key", f"{number(kafka_produce.MAX_KEY_BYTES)} bytes"),
                ("records waiting to be written", size(kafka_produce.MAX_PENDING_BYTES)),
                ("answer to one fetch", size(kafka_fetch.MAX_RESPONSE_BYTES)),
                ("unsent answers of all clients", size(kafka_fetch.MAX_UNSENT_BYTES)),
                ("members of a consumer group", number(kafka_coordinator.MAX_MEMBERS)),
                ("timeout of a transaction", f"{kafka_transactions.MAX_TIMEOUT_MS / 60_000:g} min"),
            ],
        ),
        (
            "SQL subscriptions and webhooks",
            [
                ("concurrency of a subscriber", number(subscription_reader.MAX_CONCURRENCY)),
                ("timeout of a subscriber", f"{subscription_reader.MAX_TIMEOUT_SECONDS / 86_400:g} day"),
                ("response of a webhook's receiver that is read", size(webhook_sender.MAX_RESPONSE_BYTES)),
                ("`Retry-After` of a webhook's receiver", f"{webhook_requests.MAX_RETRY_AFTER.days:g} day"),
            ],
        ),
        (
            "Schema registry",
            [
                ("text of a schema", size(schemas.MAX_TEXT_BYTES)),
                ("nesting of a schema", f"{number(schemas.MAX_DEPTH)} levels"),
                ("references of a schema", number(registry.MAX_REFERENCES)),
            ],
        ),
    ]
    sections = [
        part
        for title, limits in rows
        for part in (f"## {title}", table(("limit", "maximum"), [(name, value) for name, value in limits]).strip())
    ]
    return "\n\n".join(
        (
            "# Limits",
            "Limits of the code, and the rules that the database enforces. For memory, disk and connections, see "
            "[sizing](../how-to/sizing.md).",
            "## The log",
            table(
                ("limit", "maximum"),
                [
                    ("positions, in the life of a log", number(overview.MAX_POSITION)),
                    ("positions in one segment", number(segment_size())),
                ],
            ).strip(),
            *sections,
            "## Enforced by the database",
            "For every program and protocol. Each line is the text of the error.",
            "\n".join(f"- {rule}" for rule in enforced()),
        )
    )


def segment_size() -> int:
    found = re.search(r"segment_size\(\).*?\nreturn (\d+);", (FUNCTIONS / "segment.sql").read_text(), re.DOTALL)
    assert found is not None
    return int(found[1])


def number(value: int) -> str:
    return f"{value:,}"


def size(value: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value % factor == 0:
            return f"{number(value // factor)} {unit}"
    return f"{number(value)} bytes"


def enforced() -> list[str]:
    """The names of constraints that contain a number."""
    found = [
        name
        for migration in LIMITED
        for name in re.findall(r'constraint "([^"]+)"', (MIGRATIONS / migration).read_text())
        if re.search(r"\d", name)
    ]
    return list(dict.fromkeys(found))


PAGES = {
    "http.md": http_page,
    "grpc.md": grpc_page,
    "kafka.md": kafka_page,
    "cli.md": cli_page,
    "python.md": python_page,
    "sql.md": sql_page,
    "errors.md": errors_page,
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "limits.md": limits_page,
}


def main() -> int:
    stale = []
    for name, page in PAGES.items():
        wanted = f"{NOTE}{page()}\n"
        file = FOLDER / name
        if not file.exists() or file.read_text() != wanted:
            stale.append(name)
            if "--check" not in sys.argv:
                file.write_text(wanted)
    if stale and "--check" in sys.argv:
        print(f"not what the code says: {', '.join(stale)}; run: python tools/reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
