"""Write the pages of docs/reference from the code: command line, Python, SQL, errors, settings, metrics.

`--check` writes nothing and ends with 1 if a page is not what the code says.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

import headwater
from headwater import errors, model, settings
from headwater.cli import app, exit_codes
from headwater.client.eventstore.postgres import EventStore
from headwater.client.eventstore.subscribe import Subscribing
from headwater.database import schema
from headwater.eventstore import query
from headwater.observability import metrics
from headwater.queue import worker

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
FUNCTIONS = ROOT / "src" / "headwater" / "database" / "schema" / "functions"
MIGRATIONS = ROOT / "src" / "headwater" / "database" / "schema" / "migrations"
PROTOS = ROOT / "proto"
CALLS = ROOT / "src" / "headwater" / "calls"
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
        "Every command prints tables for people, and with `--json` one JSON document (`read` and `tail`: one "
        "event a line). Errors go to standard error; with `--json` as an object with `error`, `message`, `hint`, "
        "`detail` and `exit_code`. A command finds its database by `--dsn`, then by `HEADWATER_DSN`, then by the "
        "embedded server that `headwater up` runs.",
        "In JSON, times are ISO 8601 in UTC and durations are seconds. A duration is typed as `30s`, `5m`, `1h30m`, "
        "`7d` or `2w`; a time as `2026-03-01T12:00:00Z` (without a zone: local time).",
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
        "`AsyncHeadwater`). Every method that takes `connection=` runs inside your own transaction on it.",
        "## Opening the log",
        described("headwater.connect", headwater.connect),
        "## The log: `Headwater`",
        paragraph(headwater.Headwater.__doc__),
    ]
    # The last ancestor but object is what the others stand on.
    *_, shell, _ = headwater.Headwater.__mro__
    for kind in (shell, *headwater.Headwater.__bases__):
        parts += [f"## {section_title(kind)}", *members_of(kind)]
    parts += [
        "## An event store: `EventStore`",
        paragraph(EventStore.__doc__),
        *members_of(EventStore),
        *members_of(Subscribing),
        "### open",
        paragraph(headwater.open.__doc__),
        "## Workers: `App`",
        paragraph(worker.App.__doc__),
        *members_of(worker.App),
        "A handler returns None when it is done, or [Retry](#retry), [Dead](#dead) or [Snooze](#snooze). It gets a "
        "[ClaimedEvent](#claimedevent), a batch handler a list of them, a subscriber an [Event](#event).",
        "## Values",
    ]
    for name, kind in (vars(model) | vars(query)).items():
        if not name.startswith("_") and inspect.isclass(kind) and kind.__module__ in (model.__name__, query.__name__):
            parts.append(f"### {name}\n\n{paragraph(kind.__doc__)}\n\n{fields_of(kind)}")
    return "\n\n".join(part.strip() for part in parts)


def section_title(kind: type) -> str:
    """What a part of the log is for, in the words of its docstring."""
    return paragraph(kind.__doc__).partition("\n")[0].rstrip(".")


def members_of(kind: type) -> list[str]:
    return [
        described(name, member)
        for name, member in vars(kind).items()
        if not name.startswith("_") and inspect.isfunction(member)
    ]


def described(name: str, function: Any) -> str:
    signature = inspect.signature(inspect.unwrap(function))
    shown = []
    starred = False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
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
    return f"### {title}\n\n```python\n{one_line}\n```\n\n{paragraph(inspect.unwrap(function).__doc__)}"


def fields_of(kind: type) -> str:
    return "".join(f"- `{name}: {annotation}`\n" for name, annotation in inspect.get_annotations(kind).items())


# --- SQL -----------------------------------------------------------------------------------------------------

DEFINITION = re.compile(
    r"((?:^-- [^\n]*\n)*)^create or replace (function|view) (headwater\.\w+)(.*?)^(?:language|as|select)\b",
    re.MULTILINE | re.DOTALL,
)


TYPE = re.compile(r"((?:^-- [^\n]*\n)*)^create type (headwater\.\w+) as \((.*?)\);", re.MULTILINE | re.DOTALL)


def sql_page() -> str:
    parts = [
        "# SQL",
        "The log is its SQL: these functions are the contract, from psql and from any language. Arguments with a "
        "default may be left out, or named: `headwater.publish('orders', '{}', key => 'k')`. Errors have SQLSTATEs "
        "of ours, see [errors](errors.md). Functions not listed here are internal.",
    ]
    # What the library itself calls is the contract; and the form of publishing that is there for SQL alone.
    calls = "".join(path.read_text() for path in sorted(CALLS.glob("*.py")))
    contract = {"publish", *re.findall(r"headwater\.(\w+)", calls)}
    shown_heads = ""
    for name in schema.FUNCTION_FILES:
        source = (FUNCTIONS / name).read_text()
        found = [match.groups() for match in DEFINITION.finditer(source)]
        found = [groups for groups in found if groups[2].removeprefix("headwater.") in contract]
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
            # What conditions see is nobody's result, and yet what people have to know.
            if name == "headwater.condition_event" or re.search(rf"\b{re.escape(name)}\b", shown_heads):
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
        rows.append((f"`{kind.__name__}`", paragraph(kind.__doc__), codes or "-", str(exit_codes.code_for(kind))))
    return "\n\n".join(
        (
            "# Errors",
            "All are `headwater.HeadwaterError`. An error has a `message`, often a `hint` (what to do next) and a "
            "`detail` (what a program needs to go on). SQL raises the codes below with the same detail as JSON. "
            "What is not in this table is a bug and passes through untouched.",
            table(("error", "means", "SQLSTATE", "exit code"), rows).strip(),
            "A limit that a table keeps (SQLSTATE 23514) has its own sentence as its name, and that is the message: "
            "`a type is 1 to 200 characters`. Exit codes are explained in [the command line](cli.md#exit-codes).",
        )
    )


def settings_page() -> str:
    return "\n\n".join(
        (
            "# Settings",
            "## Environment",
            "Read once at the start of the command line; an option goes before them. The library reads no "
            "environment: it is given a DSN.",
            table(("variable", "means"), [(f"`{name}`", text) for name, text in settings.VARIABLES.items()]).strip(),
            "## Of the whole log",
            "Kept in the database, in the one row of `headwater.setting`. Show them with `headwater settings show`, "
            "change them with `headwater settings set`; a change holds at once for everybody.",
            table(
                ("setting", "default", "means"),
                [
                    ("`segment_interval`", "1 day", "how long the log writes to one segment at most"),
                    ("`segments_ahead`", "3", "how many segments are kept ready for the log to grow into"),
                    ("`auto_create_topics`", "false", "whether publishing to a missing topic makes it"),
                    ("`kafka_offsets_kept`", "7 days", "how long offsets of a Kafka group without members are kept"),
                ],
            ).strip(),
            "## Of a topic",
            "Given at `headwater topic create`, changed with `headwater topic alter`.",
            table(
                ("setting", "default", "means"),
                [
                    ("`kind`", "open", "`open` or `sequenced`; cannot change"),
                    ("`partitions`", "1", "lanes by hash of the key; only ever more"),
                    ("`retention`", "none", "how long events are kept at least; none: for ever"),
                    ("`max_payload_bytes`", "1 MiB", "the largest payload, up to 64 MiB"),
                    ("`max_header_bytes`", "64 KiB", "the largest headers, up to 1 MiB"),
                ],
            ).strip(),
            "## Of a group",
            "Given at `headwater group create` or by `@app.worker`, changed with `headwater group alter`.",
            table(
                ("setting", "default", "means"),
                [
                    (
                        "`lease_seconds`",
                        "30",
                        "how long a worker has for a batch before others get it; workers extend it",
                    ),
                    ("`max_attempts`", "5", "tries until an event is dead"),
                    ("`backoff_seconds`", "1", "the wait after the first failed try"),
                    ("`backoff_factor`", "2", "by how much each further wait is longer"),
                    ("`backoff_max_seconds`", "3600", "the longest wait"),
                    ("`backoff_jitter`", "0.2", "how much waits differ at random: 0.2 is 20 % either way"),
                    ("`ordered_keys`", "false", "one event of a key at a time, in the order of the log; cannot change"),
                    ("`max_in_flight`", "none", "how many events may be leased at once"),
                    ("`must_not_lose`", "true", "whether retention waits for the group"),
                ],
            ).strip(),
        )
    )


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
            "A server gives them at `/metrics`, `headwater metrics` prints them, `headwater.metrics()` has those of "
            "the database as rows. [How to monitor](../how-to/monitor.md) says which to watch.",
            "## Of the log, asked of the database",
            "The same whichever process is asked; at most once a second. Figures by name are given for the first 200 "
            "topics, groups, cursors and pipelines each, by name; `headwater_topics`, `headwater_groups` and "
            "`headwater_cursors` tell how many there are.",
            table(columns, rows("database")).strip(),
            "## Of one process, or of all of one `headwater serve --processes`, counted since its start",
            "Of each, at most 1000 combinations of labels; what comes after them is counted as `(others)`.",
            table(columns, rows("process")).strip(),
            "## Log fields",
            "A message never varies; what does is a field. With `HEADWATER_LOG_FORMAT=json`, or `headwater "
            "--log-format json`, each line is one JSON object with `time`, `level`, `logger`, `message`, these fields "
            "where they apply, and `exception` with a traceback if there is one.",
            table(("field", "means"), [(f"`{name}`", text) for name, text in metrics.LOG_FIELDS.items()]).strip(),
        )
    )


def kafka_page() -> str:
    from kio.index import api_key_map

    from headwater.servers.kafka.configs import TOPIC_CONFIGS
    from headwater.servers.kafka.dispatch import FEATURES, OFFERED

    apis = [
        (str(api), api_key_map[api].replace("_", " "), f"{oldest} to {newest}" if newest > oldest else str(oldest))
        for api, (oldest, newest) in sorted(OFFERED.items())
    ]
    configs = [
        (f"`{name}`", f"`{config.default}`" if config.default else "", config.documentation, config.only_told)
        for name, config in TOPIC_CONFIGS.items()
    ]
    return "\n\n".join(
        (
            "# Kafka: what is offered, and what is different",
            "## APIs and versions",
            "A request for anything else ends the connection, but for ApiVersions, which then tells this table. "
            "Produce 0 to 2 are told, since old librdkafka would not compress without them, and refused when used.",
            table(("number", "API", "versions"), apis).strip(),
            "Features that are told as finalized: "
            + ", ".join(f"`{name}` {level}" for name, level in FEATURES.items())
            + ".",
            "## Settings of a topic",
            table(("setting", "default", "means"), [row[:3] for row in configs if not row[3]]).strip(),
            "### Without effect",
            "Taken, checked for their form, kept and told again, for tools that set them: nothing here goes by them.",
            table(("setting", "default", "why"), [row[:3] for row in configs if row[3]]).strip(),
            "## Differences from Kafka",
            "\n".join(f"- {difference}" for difference in KAFKA_DIFFERENCES),
        )
    )


KAFKA_DIFFERENCES = (
    "Not there: share groups, quotas (there are none to describe), delegation tokens, moving partitions, changing the "
    "settings of a broker while it runs.",
    "Compaction, every 15 seconds, takes all that is superseded by then, and waits for readers that must not lose an "
    "event, and for archives. The last record of a partition stays, also if it deletes its key.",
    "`retention.ms` counts from when the segment of the log that has the record was closed; `retention.bytes` is "
    "applied to the record, once a minute and until it holds: a partition is at most that large afterwards. It counts "
    "keys, values and headers. Both wait for readers that must not lose an event, and for archives, and hold only "
    "where `cleanup.policy` contains `delete`. `headwater topic clean`, and `headwater.clean_up` in SQL, apply all of "
    "it at once, to the record.",
    "DeleteRecords is refused with POLICY_VIOLATION for what somebody who must not lose an event, or an archive, has "
    "yet to read, and for event stores and topics that are only compacted. In an open topic it deletes up to a "
    "position.",
    "DescribeLogDirs tells the sizes of the partitions that a broker leads, in one directory, `postgres`.",
    "A consumer group with members of one protocol, classic or that of KIP-848, refuses members of the other. In the "
    "latter a pattern of topics is looked up by Postgres: what RE2 has and its regular expressions have not is refused "
    "or means what it means there.",
    "An open topic can be consumed and not produced to. Its offsets are positions, with gaps.",
    "The records of a transaction enter the log when it commits. Their acknowledgements carry no offset, and "
    "`read_uncommitted` does not see them before either.",
    "A key has up to 65535 bytes. `max.message.bytes` is also the limit of one value after unpacking; a batch becomes "
    "up to 64 MiB. A batch is of up to 100000 records; a larger one is refused with MESSAGE_TOO_LARGE.",
    "Records are stored one by one, not as the batches that came. What fetched records are packed with, the topic's "
    "`compression.type` says; with `producer` they go as they came while a broker remembers them, and else unpacked.",
    "Fetch sessions are not kept: every fetch is a whole one.",
    "Any broker serves any partition. Metadata names one leader for each, to spread the work; "
    "the leader epoch is the epoch of the log.",
    "There are no replicas: Postgres replicates. `acks=1` and `acks=all` both mean committed in Postgres.",
    "Looking for an offset by time reads through the partition.",
    "Offsets of a group without members are kept for seven days after it last had any or committed; `headwater "
    "settings set --kafka-offsets-kept` changes that.",
    "When another broker takes over a consumer group, its members join anew.",
    "The `uniform` assignor shares each topic evenly, to one partition, among those who subscribe to it, and the whole "
    "where all subscribe to the same; members with more topics have more partitions.",
    "A transactional producer that was silent for seven days is forgotten.",
    "Permissions only allow; `DENY` and hosts other than `*` are refused. `DESCRIBE_CONFIGS`, `ALTER_CONFIGS` and "
    "`IDEMPOTENT_WRITE` are `DESCRIBE`, `ALTER` and `WRITE`, and told as these; an idempotent producer needs no right "
    "of its own. `CLUSTER_ACTION`, which is for brokers among each other, is refused: brokers meet in Postgres. An "
    "account that Kafka's tools give a "
    "password is made if missing, and may do nothing before somebody allows it; it stays when its last "
    "password is taken away.",
)


# --- HTTP ----------------------------------------------------------------------------------------------------


def http_page() -> str:
    from headwater.servers.http.app import described, document
    from headwater.servers.http.errors import STATUS

    found = document(described())
    statuses: dict[int, list[str]] = {}
    for kind, status in STATUS.items():
        statuses.setdefault(status, []).append(f"`{kind.__name__}`")
    parts = [
        "# HTTP",
        f"{found['info']['description']} [How to use it](../how-to/http.md). The same as OpenAPI: `/openapi.json`.",
        "## Errors",
        "`type` is `urn:headwater:error:` and the name; those of the log are in [errors](errors.md).",
        table(("status", "errors"), [(str(status), ", ".join(names)) for status, names in sorted(statuses.items())]),
    ]
    by_tag: dict[str, list[str]] = {}
    for path, methods in found["paths"].items():
        for method, route in methods.items():
            by_tag.setdefault(route["tags"][0], []).append(http_route(path, method, route))
    for tag, routes in by_tag.items():
        parts += [f"## {tag.capitalize()}", *routes]
    parts.append("## Shapes")
    for name, shape in sorted(found["components"]["schemas"].items()):
        if name not in ("HTTPValidationError", "ValidationError"):
            parts.append(f"### {name}\n\n{paragraph(shape.get('description'))}\n\n{http_fields(shape)}")
    return "\n\n".join(part.strip() for part in parts)


def http_route(path: str, method: str, route: Any) -> str:
    lines = [
        f"### {method.upper()} {path}",
        paragraph(route.get("description")),
        f"Right: {route['x-headwater-right']}.",
    ]
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        lines.append(f"Body: {http_type(body)}.")
    if rows := [
        (f"`{one['name']}`", one["in"], http_type(one["schema"]), one.get("description", ""))
        for one in route.get("parameters", ())
    ]:
        lines.append(table(("parameter", "in", "type", "means"), rows))
    answers = []
    for status, one in sorted(route["responses"].items()):
        if status < "400":
            content = next(iter(one.get("content", {}).items()), ("", {}))
            kind = content[0] if content[0] == "text/event-stream" else http_type(content[1].get("schema", {}))
            answers.append(f"{status}: {kind}")
    problems = [status for status in sorted(route["responses"]) if status >= "400"]
    lines.append(f"Answers {'; '.join(answers)}." + (f" Problems: {', '.join(problems)}." if problems else ""))
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
        f"{word} {shape[key]}"
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
        f"- `{name}`{'' if name in required else ' (may be left out)'}: {http_type(one)}"
        f"{'. ' + one['description'] if one.get('description') else ''}\n"
        for name, one in shape.get("properties", {}).items()
    )


def grpc_page() -> str:
    from headwater.servers.grpc import errors as grpc_errors

    parts = [
        "# gRPC: services, methods, status codes",
        "Messages are in the files of the protocol; their comments say what each field means. "
        "[How to use them](../how-to/grpc.md).",
    ]
    for path in sorted(PROTOS.rglob("*.proto")):
        text = path.read_text()
        about = text.partition("\n")[0].removeprefix("// ")
        package = re.search(r"^package (.*);", text, re.MULTILINE)
        assert package is not None
        file = path.relative_to(ROOT).as_posix()
        parts += [f"## `{package[1]}`", f"{about} [{file}](../../{file})"]
        for comment, name, body in PROTO_SERVICE.findall(text):
            rows = [
                (f"`{method}`", f"`{asked}`", f"`{answered}`", promised(promise))
                for promise, method, asked, answered in PROTO_METHOD.findall(body)
            ]
            parts += [f"### {name}", promised(comment), table(("method", "takes", "answers", "means"), rows)]
    codes: dict[str, list[str]] = {}
    for error, code in grpc_errors.BY_ERROR.items():
        codes.setdefault(code.name, []).append(f"`{error.__name__}`")
    rows = [(f"`{code}`", ", ".join(kinds)) for code, kinds in sorted(codes.items())]
    rows.append(("`INTERNAL`", "what is not in this table, as a bug of ours"))
    rows.append(("`DEADLINE_EXCEEDED`", "the deadline of the call came first; what it did may be done"))
    parts += [
        "## Status codes",
        "The [error](errors.md) itself comes beside the status, in the trailing metadata: `headwater-error-bin` is "
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


def promised(comment: str) -> str:
    return " ".join(line.strip().removeprefix("// ") for line in comment.strip().splitlines())


GRPC_LIMITS = (
    "A message has up to 64 MiB, and an event as much as its topic allows: 1 MiB if nothing else is said.",
    "An append has up to 1,000 events, a query up to 100 items, a batch that is read up to 10,000 events and 16 MiB.",
    "A connection has up to 1,000 calls under way, a process 10,000. Pings come at most every ten seconds.",
    "A stream of appends has up to 256 of them under way, or 16 MiB.",
    "Of what a stream is slow to take, the server has a batch in hand: for a follower up to 4 MiB, for a subscriber of "
    "an event store up to 16 MiB.",
    "A call waits for a lost database for 30 seconds, or until its deadline; a subscriber for 60.",
)
ORISUN_DIFFERENCES = (
    "Both numbers of a position are the same, so events that were saved together do not share the first. Positions are "
    "of the whole log and have gaps.",
    "Ids are unique within a boundary: what is saved again under the same ids is not saved twice, and the answer is "
    "that of the first time, whatever its condition says by now. An id that another event has is INVALID_ARGUMENT. Any "
    "text of up to 255 characters is an id; without one, an event gets one.",
    "An event has up to 1 MiB of data and 64 KiB of metadata, a type up to 200 characters, one call up to 1,000 events "
    "and 100 criteria.",
    "Data comes back as it was written, to the letter. An event that another door appended and that is no JSON comes "
    "as `payload_base64`.",
    "A page that would be larger than a message is RESOURCE_EXHAUSTED.",
    "A subscriber that names no position gets what comes from then on. One without a name is one of any number.",
    "An index has events whose values have the form that it says; others are saved all the same. Events are always "
    "found by their type, so an index leaves `eventType` out, of its fields and its conditions, and has more events.",
    "A boundary is active at once. Its description, and the namespace of its placement, are not kept.",
    "A user's id and name are the username. Rights are those of the account, for each topic.",
    "Reflection is open to everybody, as health is.",
)


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
