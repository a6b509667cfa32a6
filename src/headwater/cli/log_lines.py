"""How log lines are written: text for people, a JSON object a line for programs. Both show the fields."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

# What every record has. The rest is what whoever logged gave it, see `telemetry.LOG_FIELDS`.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class TextLines(logging.Formatter):
    """`WARNING headwater: lease lost group=mailer position=7`."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _fields(record).items())
        return f"{record.levelname} {record.name}: {record.message}{fields}"


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, the fields, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class LogLines(NamedTuple):
    """Which lines a process writes, and in which form: `text` or `json`."""

    level: str
    form: str

    def write(self) -> None:
        """Log to standard error from now on, from this level up."""
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines() if self.form == "json" else TextLines())
        logging.basicConfig(level=self.level.upper(), handlers=[handler])
        # The pool would repeat, for each try, what the error at the end says once.
        logging.getLogger("psycopg.pool").setLevel(logging.ERROR)


def _quoted(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text, ensure_ascii=False)
