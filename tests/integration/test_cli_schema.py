"""Does `headwater schema` do what it says, and say what to do when it cannot?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headwater
from headwater.cli import app

pytest.importorskip("jsonschema_rs")


pytestmark = pytest.mark.usefixtures("clean_environment")


def run(dsn: str, *arguments: str, given: str | None = None) -> Any:
    return CliRunner().invoke(app, [*arguments, "--dsn", dsn], input=given)


def done(dsn: str, *arguments: str, given: str | None = None) -> Any:
    result = run(dsn, *arguments, "--json", given=given)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(dsn: str, *arguments: str, given: str | None = None) -> tuple[int, Any]:
    result = run(dsn, *arguments, "--json", given=given)
    return result.exit_code, json.loads(result.stderr)


STRICT = '{"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}'


def test_a_schema_is_registered_checked_shown_and_deleted(dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "order.json"
    file.write_text('{"type": "object"}')
    registered = done(dsn, "schema", "register", "orders", str(file))
    assert registered == {"subject": "orders", "version": 1, "id": registered["id"]}
    assert done(dsn, "schema", "register", "orders", str(file)) == registered

    code, told = refused(dsn, "schema", "check", "orders", "-", "--type", "json", given=STRICT)
    assert code == 5
    assert any("/id: is required now" in one for one in told["detail"]["problems"])
    assert refused(dsn, "schema", "register", "orders", "-", "--type", "JSON", given=STRICT)[0] == 5
    assert done(dsn, "schema", "config", "orders", "--compatibility", "forward")["compatibility"] == "FORWARD"
    assert done(dsn, "schema", "check", "orders", "-", "--type", "JSON", given=STRICT)["compatible"]
    assert done(dsn, "schema", "register", "orders", "-", "--type", "JSON", given=STRICT)["version"] == 2
    shown = done(dsn, "schema", "show", "orders")
    assert (shown["version"], shown["type"], shown["schema"]) == (2, "JSON", STRICT)
    assert done(dsn, "schema", "show", "orders", "--version", "1")["schema"] == '{"type": "object"}'
    assert done(dsn, "schema", "list") == [
        {"name": "orders", "type": "JSON", "versions": 2, "latest": 2, "compatibility": "FORWARD", "topics": []}
    ]
    assert done(dsn, "schema", "config", "orders", "--reset") == {
        "subject": "orders",
        "compatibility": "BACKWARD",
        "own": False,
    }

    assert refused(dsn, "schema", "delete", "orders", "--version", "1", "--for-good", "--yes")[0] == 5
    assert done(dsn, "schema", "delete", "orders", "--version", "1")["deleted"] == [1]
    assert refused(dsn, "schema", "show", "orders", "--version", "1")[0] == 4
    assert done(dsn, "schema", "delete", "orders", "--version", "1", "--for-good", "--yes")["deleted"] == [1]
    assert done(dsn, "schema", "delete", "orders")["deleted"] == [2]
    assert refused(dsn, "schema", "delete", "orders")[0] == 4


def test_what_makes_no_sense_is_said(dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "schema.txt"
    file.write_text('"string"')
    assert refused(dsn, "schema", "register", "s", str(file))[0] == 2
    assert refused(dsn, "schema", "register", "s", str(file), "--type", "XML")[0] == 2
    assert refused(dsn, "schema", "register", "s", str(tmp_path / "missing.avsc"))[0] == 3
    assert refused(dsn, "schema", "register", "s", str(file), "--type", "AVRO", "--reference", "x")[0] == 2
    code, told = refused(dsn, "schema", "register", "s", str(file), "--type", "AVRO", "--reference", "x=y:1")
    assert (code, told["hint"]) == (3, "Register that version first.")
    assert refused(dsn, "schema", "register", "s", "-", "--type", "AVRO", given="{")[0] == 3
    assert refused(dsn, "schema", "register", "", str(file), "--type", "AVRO")[0] == 3
    assert refused(dsn, "schema", "show", "nobody")[0] == 4
    assert refused(dsn, "schema", "config", "--compatibility", "SOMETIMES")[0] == 2


def test_a_topic_is_bound_to_a_subject_which_then_stays(dsn: str, log: headwater.Headwater) -> None:
    log.create_topic("kept", kind="sequenced")
    done(dsn, "schema", "register", "kept-value", "-", "--type", "AVRO", given='"string"')
    assert refused(dsn, "topic", "alter", "kept", "--value-schema", "nobody")[0] == 4
    done(dsn, "topic", "alter", "kept", "--value-schema", "kept-value", "--key-schema", "kept-value")
    assert done(dsn, "schema", "list")[0]["topics"] == ["kept (key)", "kept (value)"]
    done(dsn, "schema", "delete", "kept-value")
    assert refused(dsn, "schema", "delete", "kept-value", "--for-good", "--yes")[0] == 5
    assert refused(dsn, "topic", "alter", "kept", "--no-value-schema", "--value-schema", "kept-value")[0] == 2
    done(dsn, "topic", "alter", "kept", "--no-value-schema", "--no-key-schema")
    assert done(dsn, "schema", "delete", "kept-value", "--for-good", "--yes")["deleted"] == [1]
