"""Formatters for log lines: text, or one JSON object per line. Both include the fields of a record."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

# The attributes of every record. All others are fields given by the call, see `observability.metrics.LOG_FIELDS`.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class TextFormatter(logging.Formatter):
    """`WARNING headwater: lease lost queue=mailer position=7`."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _fields(record).items())
        return f"{record.levelname} {record.name}: {record.message}{fields}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, the fields, and the traceback of an exception."""

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


class LogConfig(NamedTuple):
    """The logging configuration of a process: lowest level and format (`text` or `json`)."""

    level: str
    format: str

    def apply(self) -> None:
        """Configure logging to standard error."""
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter() if self.format == "json" else TextFormatter())
        logging.basicConfig(level=self.level.upper(), handlers=[handler])
        # The pool logs every failed attempt; the final error reports the same reason once.
        logging.getLogger("psycopg.pool").setLevel(logging.ERROR)


def _quoted(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text, ensure_ascii=False)
