"""Does the command line do what its help says, and end with the code that its table says?"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import importlib
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from typer.testing import Result

import headwater
from headwater import cli, errors
from headwater.cli import app, exit_codes, options, output
from headwater.embedded import Postgres
from headwater.errors import HeadwaterError
from patience import PATIENCE_SECONDS


@pytest.fixture
def program(environment: dict[str, str]) -> Iterator[Any]:
    """Start the program itself. What a failed test leaves running is ended, and with it a server that it runs."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", "from headwater.cli import main; main()", *arguments],
            env=environment,
            stdin=options.get("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
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
    Postgres(Path(environment["HEADWATER_HOME"], "postgres")).stop()


def next_line(process: subprocess.Popen[bytes]) -> bytes:
    """The next line that the program prints; fails if none comes in time."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], PATIENCE_SECONDS)
    assert ready, "the program printed nothing"
    return process.stdout.readline()


def ok(result: Result) -> Any:
    """The JSON document that a command printed."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def lines(result: Result) -> list[Any]:
    """The JSON lines that a command printed."""
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


# --- every command -------------------------------------------------------------------------------------------


def _commands(queue: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in queue.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


def _root() -> Any:
    import typer.main

    return typer.main.get_command(app)


@pytest.mark.parametrize("path", [path for path, _ in _commands(_root())], ids=" ".join)
def test_every_command_has_help_with_an_example_and_json(run: Any, path: tuple[str, ...]) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert f"headwater {' '.join(path)}" in result.stdout
    assert "--json" in result.stdout


def test_every_module_with_commands_is_found_by_their_names() -> None:
    for module in set(cli.COMMANDS.values()):
        found = importlib.import_module(f"headwater.cli.commands.{module}").app
        names = {name for name, of in cli.COMMANDS.items() if of == module}
        if names <= cli.VERBS:
            assert {one.name or one.callback.__name__ for one in found.registered_commands} == names
    with_commands = {
        path.stem
        for path in Path(cli.__file__).parent.glob("commands/[!_]*.py")
        if "\napp = typer.Typer(" in path.read_text()
    }
    assert with_commands == set(cli.COMMANDS.values())


def test_an_option_has_the_same_kind_of_value_in_every_command() -> None:
    kinds: dict[str, set[str | None]] = {}
    for _, command in _commands(_root()):
        for parameter in command.params:
            if parameter.param_type_name == "option":
                for name in parameter.opts:
                    kinds.setdefault(name, set()).add(parameter.metavar)
    one_kind = {"--limit": None, "--delay": "DURATION", "--deliver-at": "TIME", "--since": "TIME", "--until": "TIME"}
    assert {name: kinds[name] for name in one_kind} == {name: {kind} for name, kind in one_kind.items()}
    assert kinds["--after"] == {"POSITION", "N"}, "N is the number of a migration"
    assert not kinds.keys() & {"--position", "--from-position", "--max", "--count", "--batch-size"}


def test_the_help_lists_each_command_once_below_its_panel(run: Any) -> None:
    panel, shown = "", []
    for line in run("--help").stdout.splitlines():
        if title := re.match(r"╭─ (.*?) ─+╮", line):
            panel = title.group(1)
        elif (row := re.match(r"│ ([a-z]+)  ", line)) and panel != "Options":
            shown.append((panel, row.group(1)))
    assert shown == [(panel, name) for panel, commands in cli.PANELS.items() for name in commands]


@pytest.mark.parametrize(
    ("wrong", "meant"), [(("queu", "list"), "queue"), (("topic", "lsit"), "list"), (("read", "--limt", "1"), "--limit")]
)
def test_a_misspelled_command_or_option_is_answered_with_the_one_that_was_meant(
    run: Any, wrong: tuple[str, ...], meant: str
) -> None:
    result = run(*wrong)
    assert result.exit_code == exit_codes.USAGE
    assert re.search(rf"(Did you mean|Possible options)\W+{meant}\b", result.stderr)


def test_a_command_imports_no_other_command(environment: dict[str, str]) -> None:
    script = (
        "import sys, typer\n"
        "from headwater import cli\n"
        "typer.main.get_command(cli.app).main(['doctor', '--help'], standalone_mode=False)\n"
        "modules = [name for name in cli.COMMANDS.values() if f'headwater.cli.commands.{name}' in sys.modules]\n"
        "print(*modules, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert ended.stderr.split() == [b"doctor"]


def test_every_kind_of_error_has_an_exit_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeadwaterError)]
    unknown = [kind for kind in kinds if kind is not HeadwaterError and exit_codes.code_for(kind) == 1]
    assert unknown == []
    assert set(exit_codes.BY_ERROR.values()) <= exit_codes.MEANINGS.keys()


# --- exit codes and errors -----------------------------------------------------------------------------------


def test_wrong_usage_ends_with_2(run: Any) -> None:
    assert run("topic", "list", "--nonsense").exit_code == 2
    assert run("topic", "create", "t", "--retention", "soon").exit_code == 2


def test_wrong_usage_is_json_for_who_asked_for_json(run: Any) -> None:
    result = run("topic", "list", "--nonsense", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stderr)["error"] == "Usage"


def test_a_wrong_setting_ends_with_2(run: Any, environment: dict[str, str]) -> None:
    environment["HEADWATER_NONSENSE"] = "1"
    result = run("topic", "list")
    assert result.exit_code == 2
    assert "HEADWATER_NONSENSE" in result.stderr


def test_a_refused_request_ends_with_3(run: Any, topic: str) -> None:
    result = run("publish", topic, "{}", "--type", "x" * 201)
    assert result.exit_code == 3
    assert "a type is 1 to 200 characters" in result.stderr


def test_what_is_not_there_ends_with_4(run: Any) -> None:
    for command in (
        ("topic", "describe", "nope"),
        ("read", "nope"),
        ("tail", "nope"),
        ("publish", "nope", "{}"),
        ("cursor", "delete", "nope", "--yes"),
        ("scheduled", "cancel", "999999", "--yes"),
        ("scheduled", "list", "--topic", "nope"),
    ):
        assert run(*command).exit_code == 4, command


def test_a_misspelled_topic_or_queue_or_webhook_is_answered_with_the_one_that_was_meant(
    run: Any, topic: str, log: headwater.Headwater
) -> None:
    log.create_queue("mailer-of-suggestions", topic)
    ok(run("webhook", "create", "hook-of-suggestions", "https://example.org/x", "--topic", topic, "--json"))
    for command, meant in (
        (("publish", f"{topic}s", "{}"), topic),
        (("topic", "describe", f"{topic}s"), topic),
        (("queue", "describe", "mailer-of-sugestions"), "mailer-of-suggestions"),
        (("dead", "list", "mailer-of-sugestions"), "mailer-of-suggestions"),
        (("webhook", "show", "hook-of-sugestions"), "hook-of-suggestions"),
    ):
        result = run(*command)
        assert result.exit_code == exit_codes.NOT_FOUND
        assert re.search(rf"Did you mean [^?]*\b{re.escape(meant)}\b", result.stderr), result.stderr
    document = json.loads(run("queue", "describe", "mailer-of-sugestions", "--json").stderr)
    assert document["hint"].startswith("Did you mean mailer-of-suggestions")
    assert "Did you mean" not in run("topic", "describe", "zzzzzzzzzzzz").stderr


def test_a_role_that_may_not_list_names_gets_the_error_itself(
    run: Any, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> bytes:
        return b"select 1/0"

    monkeypatch.setattr("headwater.cli.suggestions.read_query", refuse)
    result = run("topic", "describe", f"{topic}s")
    assert result.exit_code == exit_codes.NOT_FOUND
    assert f'topic "{topic}s" does not exist' in result.stderr


def test_what_exists_already_ends_with_5(run: Any, topic: str) -> None:
    assert run("topic", "create", topic).exit_code == 5


def test_what_retention_took_ends_with_6(run: Any, topic: str, log: headwater.Headwater) -> None:
    position = log.publish(topic, 1)
    with log.connection() as connection:
        connection.execute("update headwater_internal.topic set expired_to = %s where name = %s", (position, topic))
    result = run("read", topic, "--after", "0", "--json")
    assert result.exit_code == 6
    assert json.loads(result.stderr)["detail"]["earliest_position"] == (position or 0) + 1
    assert run("read", topic, "--after", "0", "--skip-expired").exit_code == 0


def test_a_missing_right_ends_with_7(run: Any, dsn: str, connection: psycopg.Connection, topic: str) -> None:
    name = f"test_cli_{os.getpid()}"
    role = sql.Identifier(name)
    connection.execute(sql.SQL("create role {} login in role headwater_consumer").format(role))
    try:
        consumer = psycopg.conninfo.make_conninfo(dsn, user=name)
        assert run("read", topic, "--dsn", consumer).exit_code == 0
        assert run("publish", topic, "{}", "--dsn", consumer).exit_code == 7
    finally:
        connection.execute(sql.SQL("drop role {}").format(role))


def test_a_database_without_the_schema_ends_with_8_and_names_the_command(run: Any, admin_dsn: str) -> None:
    result = run("topic", "list", "--dsn", admin_dsn)
    assert result.exit_code == 8
    assert "headwater migrate" in result.stderr


def test_no_database_ends_with_9_and_says_why(run: Any, environment: dict[str, str]) -> None:
    result = run("topic", "list", "--dsn", "postgresql://127.0.0.1:1/none")
    assert result.exit_code == 9
    assert "refused" in result.stderr
    del environment["HEADWATER_DSN"]
    result = run("topic", "list")
    assert result.exit_code == 9
    assert "no database: set HEADWATER_DSN or run `headwater up`" in result.stderr


def test_an_error_is_a_json_object_for_who_asked_for_json(run: Any) -> None:
    result = run("topic", "describe", "nope", "--json")
    assert result.stdout == ""
    error = json.loads(result.stderr)
    assert (error["error"], error["exit_code"], error["detail"]) == ("TopicNotFound", 4, {"topic": "nope"})
    assert error["message"]
    assert error["hint"]


def test_the_program_prints_no_traceback_for_an_error_of_ours(program: Any) -> None:
    process = program("topic", "describe", "nope")
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, stdout) == (4, b"")
    assert stderr.startswith(b'error: topic "nope" does not exist')
    assert b"Traceback" not in stderr


# --- topics, cursors, scheduled events, settings ---------------------------------------------------------------


def test_a_topic_is_created_shown_altered_and_deleted(run: Any) -> None:
    created = ok(run("topic", "create", "life", "--retention", "7d", "--partitions", "2", "--json"))
    assert (created["kind"], created["partitions"], created["retention_seconds"]) == ("open", 2, 604800.0)
    assert ok(run("topic", "create", "life", "--if-missing", "--json"))["retention_seconds"] == 604800.0
    assert ok(run("topic", "alter", "life", "--max-payload-bytes", "10", "--json"))["max_payload_bytes"] == 10
    assert ok(run("topic", "alter", "life", "--keep-forever", "--json"))["retention_seconds"] is None
    assert ok(run("topic", "describe", "life", "--json"))["max_payload_bytes"] == 10
    assert "life" in [topic["name"] for topic in ok(run("topic", "list", "--json"))]
    assert "forever" in run("topic", "list").stdout
    assert ok(run("topic", "delete", "life", "--yes", "--json")) == {"deleted": "life"}
    assert run("topic", "describe", "life").exit_code == 4


def test_nothing_is_destroyed_where_nobody_can_be_asked(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.open_cursor(f"cursor-{topic}")
    scheduled = log.schedule(topic, 1, delay=timedelta(days=1))
    for command in (
        ("topic", "delete", topic),
        ("topic", "alter", topic, "--retention", "1s"),
        ("cursor", "delete", f"cursor-{topic}"),
        ("scheduled", "cancel", str(scheduled)),
    ):
        result = run(*command)
        assert result.exit_code == 2, command
        assert "--yes" in result.stderr
    assert log.topic(topic).retention is None
    assert [waiting.id for waiting in log.scheduled(topic)] == [scheduled]
    assert f"cursor-{topic}" in [cursor.name for cursor in log.cursors()]


def test_a_cursor_is_set_to_a_position_a_time_and_either_end(run: Any, topic: str, log: headwater.Headwater) -> None:
    position = log.publish(topic, 1)
    name = f"cursor-{topic}"
    assert ok(run("cursor", "set", name, "--after", "1", "--topic", topic, "--json"))["position"] == 1
    assert ok(run("cursor", "set", name, "--since", "1h", "--topic", topic, "--json"))["position"] < (position or 0)
    assert ok(run("cursor", "set", name, "--to-end", "--json"))["position"] >= (position or 0)
    assert ok(run("cursor", "set", name, "--to-start", "--holds-retention", "--json"))["position"] == 0
    (listed,) = [c for c in ok(run("cursor", "list", "--json")) if c["name"] == name]
    assert (listed["topics"], listed["holds_retention"]) == ([topic], True)
    assert listed["oldest_unread_age_seconds"] > 0
    assert run("cursor", "set", name).exit_code == 2
    assert ok(run("cursor", "delete", name, "--yes", "--json")) == {"deleted": name}


def test_a_scheduled_event_is_listed_moved_and_cancelled(run: Any, topic: str) -> None:
    made = ok(run("publish", topic, "1", "--delay", "10d", "--key", "k", "--json"))
    (listed,) = ok(run("scheduled", "list", "--topic", topic, "--json"))
    assert (listed["id"], listed["key"]) == (made["schedule_id"], "k")
    run("scheduled", "move", str(listed["id"]), "--deliver-at", "2999-01-01T00:00:00Z")
    (moved,) = ok(run("scheduled", "list", "--topic", topic, "--json"))
    assert moved["due_at"] == "2999-01-01T00:00:00+00:00"
    assert ok(run("scheduled", "cancel", str(listed["id"]), "--yes", "--json")) == {"cancelled": listed["id"]}
    assert ok(run("scheduled", "list", "--topic", topic, "--json")) == []


def test_settings_are_shown_and_changed(run: Any) -> None:
    before = ok(run("settings", "show", "--json"))
    changed = ok(run("settings", "set", "--segment-interval", "6h", "--auto-create-topics", "--json"))
    assert changed == {**before, "segment_interval_seconds": 21600.0, "auto_create_topics": True}
    assert ok(run("publish", "made-on-demand", "1", "--json"))["position"] > 0
    run("settings", "set", "--no-auto-create-topics")
    assert ok(run("settings", "show", "--json"))["auto_create_topics"] is False


# --- publish -------------------------------------------------------------------------------------------------


def test_one_event_is_published_with_all_that_was_said_of_it(run: Any, topic: str, log: headwater.Headwater) -> None:
    result = run(
        *("publish", topic, '{"a": 1.10}', "--key", "k", "--type", "T", "--routing-key", "a.b", "--json"),
        *("--header", "x=1", "--header", "y=a=b", "--event-id", "e1"),
    )
    (event,) = log.read(topic)
    assert ok(result) == {"topic": topic, "position": event.position, "published": 1}
    assert event.payload == b'{"a": 1.10}'
    assert (event.key, event.type, event.routing_key, event.event_id) == (b"k", "T", "a.b", "e1")
    assert event.headers == {"x": "1", "y": "a=b"}
    assert event.content_type == "application/json"
    assert ok(run("publish", topic, "2", "--event-id", "e1", "--json"))["position"] == event.position


def test_a_payload_that_is_not_json_needs_raw(run: Any, topic: str, tmp_path: Path, log: headwater.Headwater) -> None:
    for payload in ("hello", "NaN", "{"):
        assert run("publish", topic, payload).exit_code == 3
    assert log.read(topic) == []
    run("publish", topic, "hello", "--raw")
    (tmp_path / "body").write_bytes(b"\x00\xff")
    run("publish", topic, "--file", str(tmp_path / "body"), "--raw", "--content-type", "image/x")
    assert [(event.payload, event.content_type) for event in log.read(topic)] == [
        (b"hello", None),
        (b"\x00\xff", "image/x"),
    ]


def test_lines_of_standard_input_are_published_in_order(run: Any, topic: str, log: headwater.Headwater) -> None:
    # Longer than what is read at once, so that a line lies across the seam.
    text = "".join(f'{{"n":{number}{" " * 600}}}\n' for number in range(2500))
    result = run("publish", topic, "--key", "k", "--json", input=f"{text}\n\n[1]")
    assert ok(result) == {"topic": topic, "published": 2501}
    assert result.stderr == ""
    events = log.read(topic, batch_size=3000)
    assert [event.data for event in events] == [*({"n": number} for number in range(2500)), [1]]
    assert {event.key for event in events} == {b"k"}


@pytest.mark.parametrize("bad", ["{", '"' + "x" * 2000 + '"', '"\\u0000"'], ids=["json", "large", "nul"])
@pytest.mark.parametrize("commit_every", ["3", "1000"])
def test_a_bad_line_is_named_and_all_before_it_is_published_and_nothing_after(
    run: Any, topic: str, log: headwater.Headwater, bad: str, commit_every: str
) -> None:
    log.alter_topic(topic, max_payload_bytes=1000)
    text = "\n".join(["1", "2", "", "3", "4", bad, "5", bad])
    result = run("publish", topic, "--commit-every", commit_every, "--json", input=text)
    assert result.exit_code == 3
    error = json.loads(result.stderr)
    assert error["message"].startswith("line 6: ")
    assert "published the 4 events before it, none from line 6 on" in error["message"]
    assert (error["detail"]["line"], error["detail"]["published"]) == (6, 4)
    assert [event.data for event in log.read(topic)] == [1, 2, 3, 4]


@pytest.mark.parametrize("bad", ["{", '"' + "x" * 2000 + '"'], ids=["json", "large"])
def test_atomic_lines_are_published_all_or_none(run: Any, topic: str, log: headwater.Headwater, bad: str) -> None:
    log.alter_topic(topic, max_payload_bytes=1000)
    result = run("publish", topic, "--atomic", input=f"1\n2\n{bad}\n3\n")
    assert result.exit_code == 3
    assert "no event was published" in result.stderr
    assert log.read(topic) == []
    assert ok(run("publish", topic, "--atomic", "--json", input="1\n2\n"))["published"] == 2


def test_what_was_read_can_be_published_again_as_it_was(run: Any, topic: str, log: headwater.Headwater) -> None:
    every_byte = bytes(range(256))
    log.publish(topic, {"a": [1, None]}, key="ä", type="T", routing_key="r.k", headers={"h": 1}, event_id="id-1")
    log.publish(topic, every_byte, key=every_byte, content_type="image/x")
    log.publish(topic, b"text", key=None)
    log.publish(topic, None, key="gone")
    copy = log.create_topic(f"{topic}-copy").name
    assert ok(run("publish", copy, "--envelope", "--json", input=run("read", topic, "--json").stdout))["published"] == 4
    same = ("key", "type", "routing_key", "headers", "content_type", "payload", "event_id")
    assert [[getattr(event, name) for name in same] for event in log.read(copy)] == [
        [getattr(event, name) for name in same] for event in log.read(topic)
    ]


def test_an_envelope_with_an_unknown_field_is_refused(run: Any, topic: str) -> None:
    result = run("publish", topic, "--envelope", input='{"data": 1, "kay": "k"}\n')
    assert result.exit_code == 3
    assert "line 1: unknown field in an event: kay" in result.stderr


def test_lines_that_trickle_in_are_published_without_waiting_for_more(
    program: Any, topic: str, log: headwater.Headwater, until: Any
) -> None:
    process = program("publish", topic, stdin=subprocess.PIPE)
    for number in (1, 2):
        process.stdin.write(b"%d\n" % number)
        until(lambda number=number: [event.data for event in log.read(topic)] == [*range(1, number + 1)])
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, stderr) == (0, b"")
    assert stdout == f"published 2 events to {topic}\n".encode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_publish_says_what_is_published_and_skip_continues_after_it(
    program: Any, run: Any, topic: str, log: headwater.Headwater, until: Any, number: int
) -> None:
    process = program("publish", topic, stdin=subprocess.PIPE)
    process.stdin.write(b"1\n\n3\n")
    until(lambda: len(log.read(topic)) == 2)
    process.send_signal(number)
    # The last line is not complete, so it is not published.
    _, stderr = process.communicate(b"4", timeout=PATIENCE_SECONDS)
    assert process.returncode == exit_codes.INTERRUPTED
    assert stderr.decode() == (
        "error: interrupted: 2 events were published, up to line 3\n  Continue with the same input and --skip 3.\n"
    )
    assert run("publish", topic, "--skip", "3", input="1\n\n3\n4\n5\n").exit_code == 0
    assert [event.data for event in log.read(topic)] == [1, 3, 4, 5]


def test_a_bulk_publish_that_is_interrupted_anywhere_reports_exactly_what_is_published(
    program: Any, run: Any, topic: str, log: headwater.Headwater, until: Any, tmp_path: Path
) -> None:
    count = 200_000
    file = tmp_path / "lines"
    file.write_text("".join(f"{number}\n" for number in range(1, count + 1)))
    skip = 0
    for _ in range(3):
        before = log.state().stable
        with file.open("rb") as stdin:
            process = program("publish", topic, "--commit-every", "7", "--skip", str(skip), "--json", stdin=stdin)
        until(lambda before=before: log.state().stable > before)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == exit_codes.INTERRUPTED, stderr
        detail = json.loads(stderr)["detail"]
        (state,) = [found for found in log.topics() if found.name == topic]
        assert detail["last_line"] == skip + detail["published"]
        last = log.read(topic, after=(state.last_position or 0) - 1)
        assert [event.data for event in last] == [detail["last_line"]]
        skip = detail["last_line"]


def test_a_commit_is_finished_before_the_command_ends_unless_it_is_interrupted_twice(
    program: Any, topic: str, dsn: str, log: headwater.Headwater, until: Any
) -> None:
    for signals, printed, expected in (
        ((signal.SIGINT,), "interrupted: 2 events were published, up to line 2", 2),
        ((signal.SIGINT, signal.SIGTERM), "1 event was published, up to line 1; unknown whether lines 2 to 2", 1),
    ):
        before = len(log.read(topic))
        process = program("publish", topic, stdin=subprocess.PIPE)
        process.stdin.write(b"1\n")
        until(lambda before=before: len(log.read(topic)) == before + 1)
        with psycopg.connect(dsn) as holder, psycopg.connect(dsn, autocommit=True) as watcher:
            holder.execute("lock table headwater_internal.topic in access exclusive mode")
            process.stdin.write(b"2\n")
            waiting = (
                "select from pg_stat_activity where wait_event_type = 'Lock' and application_name = 'headwater cli'"
            )
            until(lambda watcher=watcher, waiting=waiting: watcher.execute(waiting).fetchone() is not None)
            for number in signals:
                process.send_signal(number)
            if len(signals) == 2:
                process.wait(PATIENCE_SECONDS)
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == exit_codes.INTERRUPTED
        assert printed in stderr.decode()
        assert len(log.read(topic)) == before + expected


def test_an_interrupted_atomic_publish_publishes_nothing(
    program: Any, topic: str, log: headwater.Headwater, until: Any
) -> None:
    process = program("publish", topic, "--atomic", stdin=subprocess.PIPE)
    process.stdin.write(b"1\n2\n")
    # Once it has read the lines, the pipe is empty.
    until(lambda: fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4)) == bytes(4))
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == exit_codes.INTERRUPTED
    assert stderr.startswith(b"error: interrupted: 0 events were published\n")
    assert log.read(topic) == []


# --- read and tail -------------------------------------------------------------------------------------------


def test_read_shows_json_text_and_base64_as_what_they_are(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.publish(topic, b'{"a":\n1.10}', content_type="application/json")
    log.publish(topic, b"text")
    log.publish(topic, b"\xff")
    log.publish(topic, None)
    result = run("read", topic, "--json")
    shown = [{name: event[name] for name in ("data", "text", "base64") if name in event} for event in lines(result)]
    assert shown == [
        {"data": {"a": 1.1}},
        {"text": "text"},
        {"base64": base64.b64encode(b"\xff").decode()},
        {"data": None},
    ]
    assert '"data":{"a": 1.10}' in result.stdout
    assert "base64:/w==" in run("read", topic).stdout


def test_what_is_shown_cannot_steer_the_terminal(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.publish(topic, b"\x1b[31mred\x07[bold]", key="\x1b]0;x")
    shown = run("read", topic).stdout + run("tail", topic).stdout
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[bold]" in shown


def test_read_pages_through_more_than_one_batch(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.publish_many(topic, (headwater.NewEvent(number) for number in range(2100)))
    forwards = [event["data"] for event in lines(run("read", topic, "--limit", "2050", "--json"))]
    backwards = [event["data"] for event in lines(run("read", topic, "--limit", "2050", "--backwards", "--json"))]
    assert forwards == list(range(2050))
    assert backwards == list(range(2099, 49, -1))


def test_read_starts_after_a_position_or_at_a_time(run: Any, topic: str, log: headwater.Headwater) -> None:
    first = log.publish(topic, 1)
    log.publish(topic, 2)
    assert [e["data"] for e in lines(run("read", topic, "--after", str(first), "--json"))] == [2]
    assert [e["data"] for e in lines(run("read", topic, "--since", "1h", "--json"))] == [1, 2]
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert lines(run("read", topic, "--since", tomorrow, "--json")) == []


def test_tail_prints_the_last_events_in_order(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.publish_many(topic, (headwater.NewEvent(number) for number in range(20)))
    assert [e["data"] for e in lines(run("tail", topic, "-n", "3", "--json"))] == [17, 18, 19]


def test_tail_with_a_cursor_goes_on_where_it_stopped(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.publish_many(topic, (headwater.NewEvent(number) for number in range(5)))

    def tailed(*options: str) -> list[int]:
        return [e["data"] for e in lines(run("tail", topic, "--cursor", f"c-{topic}", "--json", *options))]

    assert tailed("--limit", "2") == [0, 1]
    assert tailed("-f", "--limit", "1") == [2]
    assert tailed() == [3, 4]
    assert tailed() == []


def test_tail_follows_until_ctrl_c_and_ends_with_130(program: Any, topic: str, log: headwater.Headwater) -> None:
    log.publish(topic, "before")
    process = program("tail", "-f", topic, "--json")
    assert json.loads(next_line(process))["data"] == "before"
    log.publish(topic, "after")
    assert json.loads(next_line(process))["data"] == "after"
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, stdout, stderr) == (130, b"", b"")


def test_a_closed_pipe_ends_a_command_quietly(program: Any, topic: str, log: headwater.Headwater) -> None:
    log.publish_many(topic, (headwater.NewEvent("x" * 1000) for _ in range(2000)))
    process = program("read", topic, "--limit", "2000", "--json")
    next_line(process)
    process.stdout.close()
    assert process.wait(PATIENCE_SECONDS) == exit_codes.OUTPUT_CLOSED
    assert process.stderr.read() == b""


# --- operating -----------------------------------------------------------------------------------------------


def test_migrate_installs_once_and_prints_the_same_for_psql(run: Any, admin_dsn: str) -> None:
    names = [f"headwater_cli_{os.getpid()}_{how}" for how in ("run", "printed")]
    with psycopg.connect(admin_dsn, autocommit=True) as admin:
        for name in names:
            admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    try:
        migrated, printed = (psycopg.conninfo.make_conninfo(admin_dsn, dbname=name) for name in names)
        assert ok(run("migrate", "--dsn", migrated, "--json"))["applied"][0] == {"number": 1, "name": "log"}
        assert ok(run("migrate", "--dsn", migrated, "--json"))["applied"] == []
        with psycopg.connect(printed, autocommit=True) as connection:
            connection.execute(run("migrate", "--print").stdout.encode())
        for database in (migrated, printed):
            assert ok(run("topic", "list", "--dsn", database, "--json")) == []
    finally:
        with psycopg.connect(admin_dsn, autocommit=True) as admin:
            for name in names:
                admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def _findings(result: Result) -> dict[str, str]:
    """The worst outcome of each check."""
    rank = ("ok", "warn", "fail")
    worst: dict[str, str] = {}
    for finding in json.loads(result.stdout)["findings"]:
        worst[finding["check"]] = max(worst.get(finding["check"], "ok"), finding["outcome"], key=rank.index)
    return worst


def test_doctor_finds_nothing_wrong_with_a_sound_log(run: Any) -> None:
    result = run("doctor", "--json")
    assert result.exit_code == 0
    assert set(_findings(result).values()) == {"ok"}
    assert all(line.startswith("ok ") for line in run("doctor").stdout.splitlines())


def test_doctor_fails_where_the_schema_or_the_database_is_missing(run: Any, admin_dsn: str) -> None:
    result = run("doctor", "--json", "--dsn", admin_dsn)
    assert (result.exit_code, _findings(result)["schema"]) == (1, "fail")
    result = run("doctor", "--json", "--dsn", "postgresql://127.0.0.1:1/none")
    assert (result.exit_code, _findings(result)) == (1, {"reachable": "fail"})


def test_doctor_warns_of_what_holds_the_log_up(
    run: Any, topic: str, log: headwater.Headwater, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater.cli.commands import doctor

    monkeypatch.setattr(doctor, "MAX_PUBLISHER_AGE", timedelta(0))
    monkeypatch.setattr(doctor, "OVERDUE", timedelta(0))
    log.publish(topic, 1)
    log.alter_topic(topic, retention=timedelta(microseconds=1))
    log.set_cursor("laggard", position=0, topics=topic, holds_retention=True)
    scheduled = log.schedule(topic, 1, deliver_at=datetime.now(UTC) - timedelta(hours=1))
    try:
        with log.transaction() as connection:
            log.publish(topic, 2, connection=connection)
            result = run("doctor", "--json")
        assert result.exit_code == 0
        warned = {check for check, outcome in _findings(result).items() if outcome == "warn"}
        assert warned == {"publishers", "cursors", "scheduled"}
        assert str(connection.info.backend_pid) in result.stdout
    finally:
        log.delete_cursor("laggard")
        log.cancel_scheduled(scheduled or 0)
        log.alter_topic(topic, keep_forever=True)


def test_maintain_releases_what_is_due(run: Any, topic: str, log: headwater.Headwater) -> None:
    log.schedule(topic, 1, deliver_at=datetime.now(UTC) - timedelta(seconds=1))
    assert ok(run("maintain", "--json"))["released"] == 1
    assert [event.data for event in log.read(topic)] == [1]


def test_maintain_goes_on_until_it_is_told_to_stop(program: Any) -> None:
    process = program("maintain", "--every", "100ms", "--json")
    rounds = [json.loads(next_line(process)) for _ in range(2)]
    assert all("released" in one for one in rounds)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_SECONDS) == 0


def test_up_serves_until_ctrl_c_and_keeps_its_data(program: Any, run: Any, environment: dict[str, str]) -> None:
    del environment["HEADWATER_DSN"]
    for round_ in range(2):
        process = program("up", "--json")
        started = json.loads(next_line(process))
        assert ok(run("topic", "create", "kept", "--if-missing", "--json"))["name"] == "kept"
        names = [one["name"] for one in ok(run("topic", "list", "--json"))]
        assert names == ["headwater.audit", "kept"], round_
        process.send_signal((signal.SIGINT, signal.SIGTERM)[round_])
        _, stderr = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, stderr) == (0, b"")
        assert run("topic", "list").exit_code == 9
        assert not Path(f"/proc/{started['pid']}").exists()


def test_up_detached_runs_until_down(run: Any, environment: dict[str, str]) -> None:
    del environment["HEADWATER_DSN"]
    started = ok(run("up", "--detach", "--port", "0", "--json"))
    assert "password=" in started["dsn"]
    assert run("topic", "list", "--dsn", started["dsn"]).exit_code == 0
    assert ok(run("down", "--json")) == {"stopped": True}
    assert ok(run("down", "--json")) == {"stopped": False}


def test_the_demo_shows_what_it_says_and_leaves_nothing(run: Any, log: headwater.Headwater) -> None:
    before = {topic.name for topic in log.topics()}
    steps = {step["step"]: step for step in ok(run("demo", "--json"))["steps"]}
    assert steps["publish_in_a_transaction"]["events"] == 3
    assert steps["publish_the_same_again"]["first"] == steps["publish_the_same_again"]["again"]
    assert len(steps["follow_with_a_cursor"]["second"]) == 1
    assert steps["keep_totals_exactly_once"]["crashed"]
    assert steps["keep_totals_exactly_once"]["totals"] == {"ada": 1500, "bob": 550}
    assert steps["deliver_later"]["arrived"] == [1, 2]
    assert steps["wait_for_order"]["seen_while_open"] == 0
    assert steps["wait_for_order"]["seen_after"] == ["slow", "fast"]
    assert {topic.name for topic in log.topics()} == before
    with log.connection() as connection:
        assert connection.execute("select to_regnamespace('headwater_demo')").fetchone() == (None,)


def test_the_demo_brings_its_own_postgres(run: Any, environment: dict[str, str]) -> None:
    del environment["HEADWATER_DSN"]
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert "headwater demo --pipeline" in result.stdout


def test_the_commands_that_the_demo_shows_next_work_as_they_are_shown(environment: dict[str, str]) -> None:
    # As after `./dev demo`: the program is in a virtual environment that is not on PATH.
    program = Path(sys.executable).parent / "headwater"
    bare = {**environment, "PATH": "/usr/bin:/bin"}

    def run_shown(command: str) -> str:
        ended = subprocess.run(
            command,
            shell=True,
            cwd=program.parents[1],
            env=bare,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )
        assert ended.returncode == 0, (command, ended.stderr)
        return ended.stdout

    shown = run_shown("bin/headwater demo").rpartition("Next:\n")[2]
    commands = re.findall(r"^   (\S.*)$", shown, re.MULTILINE)
    assert commands[:4] == [f"bin/headwater {rest}" for rest in ("up --detach", "docs tutorial", "docs", "--help")]
    try:
        assert all(run_shown(command) for command in commands[:4])
    finally:
        run_shown("bin/headwater down")


def test_bench_measures_and_leaves_no_topic(run: Any, log: headwater.Headwater) -> None:
    before = {topic.name for topic in log.topics()}
    assert run("bench", "--events", "1000").exit_code == 2
    measures = ok(run("bench", "--events", "1000", "--yes", "--json"))["measures"]
    assert [measure["events"] for measure in measures] == [1000, 1000, 1000, 3000]
    assert {topic.name for topic in log.topics()} == before


# --- values --------------------------------------------------------------------------------------------------


def test_durations_are_read_as_they_are_shown() -> None:
    for text, seconds in (("30s", 30), ("5m", 300), ("1h30m", 5400), ("7d", 604800), ("2d12h", 216000)):
        assert options.parse_duration(text) == timedelta(seconds=seconds)
        assert output.format_duration(timedelta(seconds=seconds)) == text


def test_a_time_ago_is_counted_back_from_now() -> None:
    ago = datetime.now(UTC) - options.parse_past_time("5m")
    assert timedelta(minutes=5) <= ago + timedelta(seconds=1) < timedelta(minutes=6)
    assert options.parse_past_time("2026-03-01T12:00:00Z") == datetime(2026, 3, 1, 12, tzinfo=UTC)


# --- on a terminal -------------------------------------------------------------------------------------------


def on_a_terminal(environment: dict[str, str], command: str, *, typed: bytes = b"") -> tuple[int, str]:
    """Run a shell command on a terminal of 80 columns; returns its exit code and all that was shown."""
    ours, theirs = pty.openpty()
    os.write(ours, typed)
    program = shlex.join([sys.executable, "-c", "from headwater.cli import main; main()"])
    process = subprocess.Popen(
        ["/bin/sh", "-c", f'headwater() {{ {program} "$@"; }}; {command}'],
        env={**environment, "COLUMNS": "80", "TERM": "xterm"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    # The terminal hangs up, which is an error of reading, when the last who holds it ends.
    with contextlib.suppress(OSError):
        while select.select([ours], [], [], PATIENCE_SECONDS)[0] and (data := os.read(ours, 65536)):
            shown += data
    os.close(ours)
    return process.wait(PATIENCE_SECONDS), shown.decode()


def test_a_terminal_sees_progress_and_the_outcome(
    environment: dict[str, str], topic: str, log: headwater.Headwater, tmp_path: Path
) -> None:
    (tmp_path / "lines").write_text("1\n" * 5000)
    code, shown = on_a_terminal(environment, f"headwater publish {topic} < {tmp_path}/lines")
    assert code == 0
    assert "5,000 lines" in shown
    assert f"published 5000 events to {topic}" in shown


def test_a_terminal_sees_every_column_and_lines_of_its_width(
    environment: dict[str, str], topic: str, log: headwater.Headwater
) -> None:
    log.publish(topic, "x" * 500, key="a-key", type="AType")
    code, shown = on_a_terminal(environment, f"headwater read {topic}")
    lines_shown = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert code == 0
    assert lines_shown[0].split() == ["position", "published", "topic", "key", "type", "payload"]
    assert {"a-key", "AType", topic} <= set(lines_shown[1].split())
    assert max(map(len, lines_shown)) == 80


@pytest.mark.parametrize(("answer", "code", "topics_left"), [(b"n\n", 2, 1), (b"y\n", 0, 0)], ids=["no", "yes"])
def test_a_terminal_is_asked_before_something_is_lost(
    environment: dict[str, str], topic: str, log: headwater.Headwater, answer: bytes, code: int, topics_left: int
) -> None:
    result, shown = on_a_terminal(environment, f"headwater topic delete {topic}", typed=answer)
    assert result == code
    assert f"delete topic {topic} and all of its events?" in shown
    assert len([found for found in log.topics() if found.name == topic]) == topics_left


def test_status_shows_the_database_and_the_embedded_server_without_a_password(
    run: Any, environment: dict[str, str], dsn: str
) -> None:
    secret = psycopg.conninfo.make_conninfo(dsn, password="a secret")
    shown = run("status", "--dsn", secret)
    assert shown.exit_code == 0, shown.output
    assert "secret" not in shown.output
    assert "answers; schema of version" in shown.stdout
    assert ok(run("status", "--json"))["database"]["chosen_by"] == "HEADWATER_DSN"
    del environment["HEADWATER_DSN"]
    found = ok(run("status", "--json"))
    assert (found["database"]["answers"], found["embedded_postgres"]["running"]) == (False, False)
    started = ok(run("up", "--detach", "--port", "0", "--json"))
    found = ok(run("status", "--json"))
    assert found["embedded_postgres"] | {"running": True} == found["embedded_postgres"]
    assert found["embedded_postgres"]["pid"] == started["pid"]
    assert found["database"]["answers"]
    assert "password" not in found["database"]["dsn"]
    ok(run("down", "--json"))


def test_status_of_an_empty_database_and_of_none(run: Any, admin_dsn: str) -> None:
    assert "no schema; run headwater migrate" in run("status", "--dsn", admin_dsn).stdout
    shown = run("status", "--dsn", "host=127.0.0.1 port=1 password=hidden")
    assert "cannot connect" in shown.stdout
    assert "hidden" not in shown.stdout
