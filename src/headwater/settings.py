"""Every setting that comes from outside, read once at the start; all problems are reported together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import InvalidSettings


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says. An option on the command line wins over it."""

    dsn: str | None
    home: Path
    pool_size: int
    log_level: str
    log_format: str = "text"


VARIABLES: Mapping[str, str] = {
    "HEADWATER_DSN": "the Postgres to use, as a URL or conninfo; unset: the embedded one that `headwater up` runs",
    "HEADWATER_HOME": "where the embedded Postgres lives; default ~/.local/share/headwater",
    "HEADWATER_POOL_SIZE": "how many connections one process may hold; default 10",
    "HEADWATER_LOG_LEVEL": "debug, info, warning or error; default warning",
    "HEADWATER_LOG_FORMAT": "text, or json for a JSON object a line; default text",
}

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


def load(environment: Mapping[str, str]) -> Settings:
    """The settings in this environment, or InvalidSettings with everything that is wrong with it."""
    problems = [
        f"{name} is not a setting; known are {', '.join(VARIABLES)}"
        for name in environment
        if name.startswith("HEADWATER_") and name not in VARIABLES
    ]
    dsn = environment.get("HEADWATER_DSN") or None
    if dsn is not None and "=" not in dsn and "://" not in dsn:
        problems.append("HEADWATER_DSN is neither a URL (postgresql://...) nor a conninfo (host=... dbname=...)")
    home = Path(environment.get("HEADWATER_HOME") or "~/.local/share/headwater").expanduser()
    pool_size = environment.get("HEADWATER_POOL_SIZE") or "10"
    if not pool_size.isdecimal() or not 1 <= int(pool_size) <= 1000:
        problems.append(f"HEADWATER_POOL_SIZE is {pool_size!r}, not a number from 1 to 1000")
    log_level = (environment.get("HEADWATER_LOG_LEVEL") or "warning").lower()
    if log_level not in LOG_LEVELS:
        problems.append(f"HEADWATER_LOG_LEVEL is {log_level!r}, not one of {', '.join(LOG_LEVELS)}")
    log_format = (environment.get("HEADWATER_LOG_FORMAT") or "text").lower()
    if log_format not in LOG_FORMATS:
        problems.append(f"HEADWATER_LOG_FORMAT is {log_format!r}, not one of {', '.join(LOG_FORMATS)}")
    if problems:
        raise InvalidSettings("; ".join(problems))
    return Settings(dsn=dsn, home=home, pool_size=int(pool_size), log_level=log_level, log_format=log_format)
