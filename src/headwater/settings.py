"""Settings from environment variables, read once at the start. All invalid values are reported together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import InvalidSettings


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a process. Options on the command line override them."""

    dsn: str | None
    home: Path
    pool_size: int
    log_level: str
    log_format: str = "text"
    cloud_events_source: str = ""


VARIABLES: Mapping[str, str] = {
    "HEADWATER_DSN": "Postgres to connect to, as a URL or conninfo string. Default: the server of `headwater up`.",
    "HEADWATER_HOME": "Directory of the embedded Postgres. Default: ~/.local/share/headwater.",
    "HEADWATER_POOL_SIZE": "Maximum number of database connections of one process. Default: 10.",
    "HEADWATER_LOG_LEVEL": "Lowest level of log lines: debug, info, warning or error. Default: warning.",
    "HEADWATER_LOG_FORMAT": "Format of log lines: text, or json for one JSON object per line. Default: text.",
    "HEADWATER_CLOUDEVENTS_SOURCE": "URI that begins the source of events read as CloudEvents, such as "
    "https://shop.example. Default: none; the source is /topics/NAME.",
}

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


def load(environment: Mapping[str, str]) -> Settings:
    """Load the settings from an environment; raises InvalidSettings with all problems."""
    problems = [
        f"unknown setting {name}: expected one of {', '.join(VARIABLES)}"
        for name in environment
        if name.startswith("HEADWATER_") and name not in VARIABLES
    ]
    dsn = environment.get("HEADWATER_DSN") or None
    if dsn is not None and "=" not in dsn and "://" not in dsn:
        problems.append(
            "invalid HEADWATER_DSN: expected a URL (postgresql://...) or a conninfo string (host=... dbname=...)"
        )
    home = Path(environment.get("HEADWATER_HOME") or "~/.local/share/headwater").expanduser()
    pool_size = environment.get("HEADWATER_POOL_SIZE") or "10"
    if not pool_size.isdecimal() or not 1 <= int(pool_size) <= 1000:
        problems.append(f"invalid HEADWATER_POOL_SIZE {pool_size!r}: expected a number from 1 to 1000")
    log_level = (environment.get("HEADWATER_LOG_LEVEL") or "warning").lower()
    if log_level not in LOG_LEVELS:
        problems.append(f"invalid HEADWATER_LOG_LEVEL {log_level!r}: expected one of {', '.join(LOG_LEVELS)}")
    log_format = (environment.get("HEADWATER_LOG_FORMAT") or "text").lower()
    if log_format not in LOG_FORMATS:
        problems.append(f"invalid HEADWATER_LOG_FORMAT {log_format!r}: expected one of {', '.join(LOG_FORMATS)}")
    source = (environment.get("HEADWATER_CLOUDEVENTS_SOURCE") or "").rstrip("/")
    if not source.isascii() or not source.isprintable() or " " in source:
        problems.append(f"invalid HEADWATER_CLOUDEVENTS_SOURCE {source!r}: expected a URI such as https://shop.example")
    if problems:
        raise InvalidSettings("; ".join(problems))
    return Settings(
        dsn=dsn,
        home=home,
        pool_size=int(pool_size),
        log_level=log_level,
        log_format=log_format,
        cloud_events_source=source,
    )
