"""Do log lines say what varies, in a form that a program can read, on one line?"""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path

import pytest

from headwater.cli.log_lines import JsonFormatter, TextFormatter
from headwater.observability import metrics
from headwater.observability.metrics import ERROR, LOG_FIELDS, POSITION, QUEUE, logger


@pytest.fixture
def record(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    logger.warning("handler failed", extra={QUEUE: "mailer", POSITION: 7, ERROR: 'KeyError: "a"\nand more'})
    return caplog.records[0]


def test_a_line_for_programs_is_one_object_with_the_fields(record: logging.LogRecord) -> None:
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "warning",
        "logger": "headwater",
        "message": "handler failed",
        "queue": "mailer",
        "position": 7,
        "error": 'KeyError: "a"\nand more',
    }


def test_a_line_for_people_has_the_fields_too(record: logging.LogRecord) -> None:
    text = TextFormatter().format(record)
    assert text == 'WARNING headwater: handler failed queue=mailer position=7 error="KeyError: \\"a\\"\\nand more"'


def test_a_traceback_is_a_field(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("unexpected")
    line = json.loads(JsonFormatter().format(caplog.records[0]))
    assert line["exception"].endswith("ValueError: broken")


def test_what_json_cannot_hold_is_written_as_text(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("odd", extra={QUEUE: object})
    assert json.loads(JsonFormatter().format(caplog.records[0]))["queue"] == "<class 'object'>"


def test_every_field_has_a_meaning() -> None:
    assert all(name.isidentifier() and meaning for name, meaning in LOG_FIELDS.items())


def test_every_field_that_a_log_line_has_is_on_the_page() -> None:
    named = {name: value for name, value in vars(metrics).items() if isinstance(value, str)}
    unknown = []
    for path in Path(metrics.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or "logger" not in ast.unparse(node.func):
                continue
            for given in (keyword.value for keyword in node.keywords if keyword.arg == "extra"):
                assert isinstance(given, ast.Dict)
                written = [ast.unparse(key).rpartition(".")[2] for key in given.keys if key is not None]
                fields = {named[name] if name in named else name.strip("'") for name in written}
                unknown += [f"{path.name}:{given.lineno}: {field}" for field in sorted(fields - set(LOG_FIELDS))]
    assert unknown == []
